"""Claims of studies: linear inequalities between scores of arms, read from text.

    recall@512/48(kvm_sqrt) - recall@512/48(kvm_fixed) > 0.3
    loss@8x(kvm) <= 1.01 * loss@1x(kvm)

A term is `SCORE(ARM)`, in between stand numbers, `+ - * /` and parentheses, and one of `> >= < <=`
in the middle. A score begins with a letter and goes on with letters, digits, `.`, `_`, `-`, `:`,
`/` and at most one `@`; an arm has letters, digits, `_`, `-` and `.`. So a hyphen or a slash that
follows a letter directly belongs to a name, and one that follows a number or a parenthesis is
arithmetic: `bpb(a)-bpb(b)` and `1-bpb(a)` are differences, `x-y(a)` is the score `x-y`.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import NoReturn

Term = tuple[str, str]  # score, arm

_MEETS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
COMPARISONS = tuple(_MEETS)
LARGEST = 1e50  # of numbers and scores, so that sums of squares are finite
_SWAPPED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}

_SCORE = re.compile(r"[A-Za-z][A-Za-z0-9._:/@-]*")
_ARM = re.compile(r"[A-Za-z0-9._-]+")
_NUMBER = re.compile(r"(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_COMPARISON = re.compile(r"[<>]=?(?!=)")
_SPACE = re.compile(r"\s*")

_MOST_CHARACTERS = 1000
_MOST_PARENTHESES = 50


@dataclasses.dataclass(frozen=True)
class Claim:
    """The sum of coefficient times score over `terms`, compared with `threshold`.

    direction: one of `COMPARISONS`. The terms of `1 < x(a)` are those of `x(a) > 1`, otherwise the
    left side less the right one.
    """

    text: str
    terms: dict[Term, float]
    direction: str
    threshold: float

    @property
    def arms(self) -> list[str]:
        """The arms that it names, in order of first appearance."""
        return list(dict.fromkeys(arm for _, arm in self.terms))

    def value(self, scores: Mapping[Term, float]) -> float:
        """The sum for one seed, from the score of every term."""
        products = [coefficient * scores[term] for term, coefficient in self.terms.items()]
        return settled(math.fsum(products), max(map(abs, products)))

    def is_met(self, value: float) -> bool:
        """Whether a value of the sum satisfies the claim."""
        return _MEETS[self.direction](value, self.threshold)

    @property
    def is_difference(self) -> bool:
        """Whether equal scores give 0: the coefficients of its terms cancel."""
        return math.isclose(math.fsum(self.terms.values()), 0, abs_tol=1e-12)

    @property
    def is_lower_bound(self) -> bool:
        """Whether it says that the sum is large: > or >=."""
        return self.direction in (">", ">=")


def settled(value: float, scale: float) -> float:
    """`value` to 12 digits of `scale`: 0.7 - 0.4 is 0.3, and equal arms differ by exactly 0."""
    if not scale or not math.isfinite(value):
        return value
    return round(value, 12 - math.ceil(math.log10(scale))) + 0.0  # no -0.0


def parse_claim(text: str) -> Claim:
    """Read a claim; ValueError with the place and what is expected there."""
    return _Parser(text).claim()


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A linear expression with exact coefficients, so that what cancels is gone."""

    terms: dict[Term, Fraction]
    constant: Fraction

    def plus(self, other: "_Linear", factor: int = 1) -> "_Linear":
        terms = dict(self.terms)
        for term, coefficient in other.terms.items():
            terms[term] = terms.get(term, Fraction()) + factor * coefficient
        return _Linear(terms, self.constant + factor * other.constant)

    def times(self, factor: Fraction) -> "_Linear":
        scaled = {term: factor * coefficient for term, coefficient in self.terms.items()}
        return _Linear(scaled, factor * self.constant)


class _Parser:
    """Recursive descent: a side is a sum of products of factors."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.depth = 0

    def claim(self) -> Claim:
        if len(self.text) > _MOST_CHARACTERS:
            self.fail(f"expected at most {_MOST_CHARACTERS} characters, got {len(self.text)}")
        left = self.sum()
        start = self.skip()
        direction = self.take(_COMPARISON)
        if direction is None:
            self.fail(f"expected one of + - * / {' '.join(COMPARISONS)}")
        right = self.sum()
        if self.skip() < len(self.text):
            self.fail("expected one of + - * / or the end")
        if not left.terms:
            left, right, direction = right, left, _SWAPPED[direction]
        whole = left.plus(right, -1)
        terms = {term: coefficient for term, coefficient in whole.terms.items() if coefficient}
        if not terms:
            self.fail("expected a score, SCORE(ARM), that does not cancel", start)
        if max(map(abs, [*terms.values(), whole.constant])) > LARGEST:
            self.fail(f"expected numbers of at most {LARGEST:g}", start)
        numbers = {term: float(coefficient) for term, coefficient in terms.items()}
        return Claim(self.text, numbers, direction, float(-whole.constant))

    def sum(self) -> _Linear:
        total = self.product()
        while (sign := self.symbol("+-")) is not None:
            total = total.plus(self.product(), 1 if sign == "+" else -1)
        return total

    def product(self) -> _Linear:
        total = self.factor()
        while (operator := self.symbol("*/")) is not None:
            place = self.place - 1
            other = self.factor()
            if operator == "/":
                if other.terms:
                    self.fail("a claim is linear: expected a number to divide by", place)
                if not other.constant:
                    self.fail("expected a number other than 0 to divide by", place)
                total = total.times(1 / other.constant)
            elif not other.terms:
                total = total.times(other.constant)
            elif not total.terms:
                total = other.times(total.constant)
            else:
                self.fail("a claim is linear: expected a number on one side of *", place)
        return total

    def factor(self) -> _Linear:
        factor = Fraction(1)
        while (sign := self.symbol("+-")) is not None:
            factor = -factor if sign == "-" else factor
        return self.operand().times(factor)

    def operand(self) -> _Linear:
        start = self.skip()
        if self.symbol("(") is not None:
            self.depth += 1
            if self.depth > _MOST_PARENTHESES:
                self.fail(f"expected at most {_MOST_PARENTHESES} parentheses in each other", start)
            inner = self.sum()
            self.closing()
            self.depth -= 1
            return inner
        if (number := self.take(_NUMBER)) is not None:
            return _Linear({}, Fraction(number))
        if (score := self.take(_SCORE)) is not None:
            return _Linear({(score, self.arm(score, start)): Fraction(1)}, Fraction())
        self.fail("expected a number, SCORE(ARM) or (")

    def arm(self, score: str, start: int) -> str:
        if score.count("@") > 1:
            self.fail(f"expected at most one @ in the score {score!r}", start)
        if self.symbol("(") is None:
            self.fail(f"expected an arm after the score {score!r}: {score}(ARM)")
        arm = self.take(_ARM)
        if arm is None:
            self.fail("expected an arm: letters, digits, _ - or .")
        self.closing()
        return arm

    def closing(self) -> None:
        if self.symbol(")") is None:
            self.fail("expected )")

    def skip(self) -> int:
        """Go past spaces; returns the place."""
        found = _SPACE.match(self.text, self.place)
        assert found is not None
        self.place = found.end()
        return self.place

    def take(self, pattern: re.Pattern[str]) -> str | None:
        """Read what fits the pattern here, after spaces; None where nothing does."""
        found = pattern.match(self.text, self.skip())
        if found is None:
            return None
        self.place = found.end()
        return found[0]

    def symbol(self, choices: str) -> str | None:
        """Read one of the characters, after spaces; None where another stands there."""
        place = self.skip()
        if place == len(self.text) or self.text[place] not in choices:
            return None
        self.place += 1
        return self.text[place]

    def fail(self, reason: str, place: int | None = None) -> NoReturn:
        place = self.skip() if place is None else place
        shown = self.text if len(self.text) <= 100 else f"{self.text[:100]}..."
        here = f"character {place + 1}" if place < len(self.text) else "the end"
        raise ValueError(f"claim {shown!r}, at {here}: {reason}")

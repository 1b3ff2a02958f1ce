"""Claims read from text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meanbank.studies.claims import parse_claim, settled


@pytest.mark.parametrize(
    ("text", "terms", "direction", "threshold"),
    [
        ("bpb(bank) - bpb(standard) < 0", {"bpb(bank)": 1, "bpb(standard)": -1}, "<", 0),
        (
            "loss@8x(kvm) <= 1.01 * loss@1x(kvm)",
            {"loss@8x(kvm)": 1, "loss@1x(kvm)": -1.01},
            "<=",
            0,
        ),
        ("0.5 * (a(x) + b(y)) >= c(z)", {"a(x)": 0.5, "b(y)": 0.5, "c(z)": -1}, ">=", 0),
        ("recall@512/48(kvm.2) > .3", {"recall@512/48(kvm.2)": 1}, ">", 0.3),
        ("ruler:niah_single_1@4096(a-b)>1e-3", {"ruler:niah_single_1@4096(a-b)": 1}, ">", 0.001),
        ("core:hellaswag(2) + 1 > 2 - core:hellaswag(2)", {"core:hellaswag(2)": 2}, ">", 1),
        # The side with scores comes first.
        ("0.3 < a(x)", {"a(x)": 1}, ">", 0.3),
        ("1 - 2 >= a(x)", {"a(x)": 1}, "<=", -1),
        # A hyphen or slash behind a letter is the name's, behind a number or parenthesis a sign.
        ("a(x)-b(y)<0", {"a(x)": 1, "b(y)": -1}, "<", 0),
        ("x-y(a)<0", {"x-y(a)": 1}, "<", 0),
        ("1-a(x)<0", {"a(x)": -1}, "<", -1),
        ("a(x)/2-b-c(y)/4<0", {"a(x)": 0.5, "b-c(y)": -0.25}, "<", 0),
        ("a(x) - -b(y) > -(1 - +2)", {"a(x)": 1, "b(y)": 1}, ">", 1),
        ("8 / 2 / 2 * a(x) / 4 > 0", {"a(x)": 0.5}, ">", 0),
        ("a ( x ) >\n1", {"a(x)": 1}, ">", 1),
        # What cancels is gone, exactly.
        ("0.1*a(x) + 0.2*a(x) - 0.3*a(x) + b(y) > 0.1 + 0.2", {"b(y)": 1}, ">", 0.3),
    ],
)
def test_worked_out(text, terms, direction, threshold):
    claim = parse_claim(text)
    assert {f"{score}({arm})": each for (score, arm), each in claim.terms.items()} == terms
    assert (claim.direction, claim.threshold, claim.text) == (direction, threshold, text)


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("x -y(a)<0", "character 3", "expected an arm after the score 'x'"),
        ("", "the end", "expected a number, SCORE(ARM) or ("),
        ("a(x)", "the end", "expected one of + - * / >= <= > <"),
        ("a(x) >", "the end", "expected a number, SCORE(ARM) or ("),
        ("a(x) == 1", "character 6", "expected one of + - * / >= <= > <"),
        ("a(x) => 1", "character 6", "expected one of"),
        ("a(x) > 1 > 2", "character 10", "expected one of + - * / or the end"),
        ("a(x) > 5 3", "character 10", "expected one of + - * / or the end"),
        ("a > 1", "character 3", "expected an arm after the score 'a': a(ARM)"),
        ("a() > 1", "character 3", "expected an arm: letters, digits, _ - or ."),
        ("a(x y) > 1", "character 5", "expected )"),
        ("(a(x) > 1", "character 7", "expected )"),
        ("a@1@2(x) > 1", "character 1", "at most one @ in the score 'a@1@2'"),
        ("é(x) > 1", "character 1", "expected a number, SCORE(ARM) or ("),
        ("a(x) * b(y) > 1", "character 6", "a claim is linear"),
        ("a(x) / b(y) > 1", "character 6", "a claim is linear"),
        ("1 / a(x) > 1", "character 3", "a claim is linear"),
        ("a(x) / (1 - 1) > 1", "character 6", "other than 0"),
        ("a(x) - a(x) > 1", "character 13", "does not cancel"),
        ("2 > 1", "character 3", "expected a score"),
        ("a(x) > 1e999", "character 6", "numbers of at most 1e+50"),
        ("1e30 * 1e30 * a(x) > 1", "character 20", "numbers of at most 1e+50"),
        ("a(x) > 1e99999999999", "character 13", "or the end"),
        ("(" * 51 + "a(x)" + ")" * 51 + "> 1", "character 51", "at most 50 parentheses"),
        ("a(x) > " + "1" * 1000, "character 1", "at most 1000 characters, got 1007"),
        ("__import__('os')(x) > 1", "character 1", "expected a number"),
    ],
)
def test_errors_tell_the_place_and_what_is_expected(text, place, reason):
    with pytest.raises(ValueError, match=re.escape(f"at {place}: ")) as error:
        parse_claim(text)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_parentheses_up_to_the_bound():
    assert parse_claim("(" * 50 + "a(x)" + ")" * 50 + "> 1").terms == {("a", "x"): 1}
    many = " + ".join(["((a(x)))"] * 60)  # beside each other they are no depth
    assert parse_claim(f"{many} > 1").terms == {("a", "x"): 60}


def test_arms_in_order():
    assert parse_claim("a(y) + b(x) > c(y)").arms == ["y", "x"]


@pytest.mark.parametrize(
    ("direction", "met"),
    [(">", (False, False, True)), (">=", (False, True, True)), ("<", (True, False, False)),
     ("<=", (True, True, False))],
)  # fmt: skip
def test_is_met(direction, met):
    claim = parse_claim(f"a(x) {direction} 0.3")
    assert tuple(claim.is_met(value) for value in (0.2, 0.3, 0.4)) == met
    assert claim.is_lower_bound == direction.startswith(">")


def test_rounding_meets_no_claim():
    claim = parse_claim("a(x) - a(y) >= 0.3")
    value = claim.value({("a", "x"): 0.7, ("a", "y"): 0.4})
    assert 0.7 - 0.4 < 0.3 == value
    assert claim.is_met(value)
    claim = parse_claim("a(x) + a(y) - a(z) > 0")
    assert 0.1 + 0.2 - 0.3 > 0
    assert claim.value({("a", "x"): 0.1, ("a", "y"): 0.2, ("a", "z"): 0.3}) == 0
    assert parse_claim("a(x) > 0").value({("a", "x"): 0.0}) == 0


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_settled_moves_by_rounding_only(value, scale):
    assert abs(settled(value, scale) - value) <= 1e-11 * scale + 1e-15 * abs(value)


SCORES = ("bpb", "recall@512/48", "loss@8x", "ruler:a-b_1@4")
ARMS = ("full", "kvm-2.5")
TERMS = {
    f"{score}({arm})": f"s[{score!r}, {arm!r}]" for score in SCORES for arm in ARMS
}  # as a claim writes it, as Python does
NUMBERS = st.sampled_from(["0.5", "2", ".25", "3.", "1e-1", "7", "1.01"])


@st.composite
def products(draw, depth):
    """(claim, Python) of numbers times one linear factor, which also may be a number."""
    kind = draw(st.sampled_from(["term", "term", "number", "sum"] if depth else ["term"]))
    if kind == "sum":
        claim, python = draw(sums(depth - 1))
        factor = f"({claim})", f"({python})"
    elif kind == "number":
        number = draw(NUMBERS)
        factor = number, number
    else:
        factor = draw(st.sampled_from(list(TERMS.items())))
    before = "".join(f"{number}{draw(OPERATORS)}" for number in draw(st.lists(NUMBERS, max_size=2)))
    before = f"{before}1*" if before.rstrip().endswith("/") else before
    after = "".join(f"{draw(OPERATORS)}{number}" for number in draw(st.lists(NUMBERS, max_size=2)))
    sign = draw(st.sampled_from(["", "-", "+", "- "]))
    return tuple(f"{sign}{before}{each}{after}" for each in factor)


@st.composite
def sums(draw, depth=2):
    parts = draw(st.lists(products(depth), min_size=1, max_size=3))
    claim, python = parts[0]
    for more, also in parts[1:]:
        sign = draw(st.sampled_from(["+", "-", " + ", " - "]))
        claim, python = f"{claim}{sign}{more}", f"{python}{sign}{also}"
    return claim, python


OPERATORS = st.sampled_from(["*", "/", " * ", " / "])


@given(sums(), sums(), st.sampled_from([">", "<", ">=", "<="]), st.randoms(use_true_random=False))
def test_linear_expressions_are_worth_what_python_makes_of_them(left, right, direction, random):
    scores = {(score, arm): random.uniform(0.5, 2) for score in SCORES for arm in ARMS}
    try:
        claim = parse_claim(f"{left[0]} {direction} {right[0]}")
    except ValueError as error:
        assert "that does not cancel" in str(error)
        return
    found = [eval(side[1], {"s": scores}) for side in (left, right)]
    gap, margin = found[0] - found[1], claim.value(scores) - claim.threshold
    size = 1 + sum(map(abs, claim.terms.values())) + abs(claim.threshold)
    assert abs(abs(gap) - abs(margin)) <= 1e-9 * size
    if abs(gap) > 1e-9 * size:
        assert claim.is_met(claim.value(scores)) == (gap > 0 if ">" in direction else gap < 0)

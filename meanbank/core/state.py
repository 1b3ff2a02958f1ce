"""State: what a layer carries from one call to the next, as a tree of tensors."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor


class State:
    """Base of frozen dataclasses that hold tensors (batch first), other states, and plain data.

    The operations below are all a cache needs, so they are written here once and no memory has to
    repeat them. They return new states; nothing is changed in place.

    Forgetting tokens needs to know which numbers belong to which tokens. A state that only holds
    other states forgets what they do; one with tensors of its own forgets nothing, unless it says
    how: `undoable`, `crop`, and `limited` where it keeps a record for that.
    """

    @property
    def undoable(self) -> int:
        """How many of the last tokens, at most, `crop` can make every row forget."""
        parts = list(_parts(self))
        if any(isinstance(part, Tensor) for part in parts):
            return 0
        return min((part.undoable for part in parts), default=0)

    def crop(self, tokens: int) -> Self:
        """The state that never saw the last `tokens` tokens of each row; fewer can be undone then.

        Some row must have seen more. Raises ValueError for more than `undoable`.
        """
        self.check_crop(tokens)
        return _rebuild(self, lambda tensor: tensor, lambda state: state.crop(tokens))

    def limited(self, tokens: int) -> Self:
        """The same without what is only kept to undo more than `tokens` tokens."""
        return _rebuild(self, lambda tensor: tensor, lambda state: state.limited(tokens))

    def check_crop(self, tokens: int) -> None:
        """Raise ValueError unless the last `tokens` tokens can be forgotten."""
        if not 0 <= tokens <= self.undoable:
            raise ValueError(
                f"{tokens} tokens cannot be forgotten here, only 0 to {self.undoable}: "
                f"{type(self).__name__} has no record of more"
            )

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to every tensor of the tree."""
        return _map(self, function)

    def select(self, rows: Tensor) -> Self:
        """Keep the batch rows `rows` (R,), in that order."""
        return _rebuild(
            self,
            lambda tensor: tensor.index_select(0, rows.to(tensor.device)),
            lambda state: state.select(rows),
        )

    def repeat(self, times: int) -> Self:
        """Repeat every batch row `times` times, copies next to each other."""
        return _rebuild(
            self,
            lambda tensor: tensor.repeat_interleave(times, dim=0),
            lambda state: state.repeat(times),
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the tree, in field order."""
        found: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.map(collect)
        return iter(found)

    def nbytes(self) -> int:
        """Bytes held, without spare storage behind views (states never keep such views)."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


def _map(node: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return _rebuild(node, function, lambda state: _map(state, function))


def _parts(node: Any) -> Iterator[Any]:
    """The tensors and states that a state holds itself."""

    def found(item: Any) -> Iterator[Any]:
        if isinstance(item, (Tensor, State)):
            yield item
        elif isinstance(item, tuple):
            for part in item:
                yield from found(part)

    for field in dataclasses.fields(node):
        yield from found(getattr(node, field.name))


def _rebuild(
    node: Any, on_tensor: Callable[[Tensor], Any], on_state: Callable[[State], Any]
) -> Any:
    """The same state with its tensors and the states below it replaced."""

    def changed(item: Any) -> Any:
        if isinstance(item, Tensor):
            return on_tensor(item)
        if isinstance(item, State):
            return on_state(item)
        return tuple(map(changed, item)) if isinstance(item, tuple) else item

    fields = dataclasses.fields(node)
    return dataclasses.replace(node, **{f.name: changed(getattr(node, f.name)) for f in fields})


def join(states: Sequence[Any]) -> Any:
    """States of equal shape as one, batch rows one after the other."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(list(states))
    if isinstance(first, State):
        instance: Any = first
        parts = {
            field.name: join([getattr(state, field.name) for state in states])
            for field in dataclasses.fields(instance)
        }
        return dataclasses.replace(instance, **parts)
    if isinstance(first, tuple):
        return tuple(join(items) for items in zip(*states, strict=True))
    assert all(state == first for state in states), "states of different places"
    return first


@dataclasses.dataclass(frozen=True)
class RowStates(State):
    """States of batch rows that are at different places.

    batch: rows in all; rows[i]: those that states[i] holds, ascending, which have seen seen[i]
    tokens. A row that has seen nothing is in none.
    """

    batch: int
    rows: tuple[tuple[int, ...], ...]
    seen: tuple[int, ...]
    states: tuple[State, ...]

    def select(self, rows: Tensor) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted, chosen, places, kept = rows.tolist(), [], [], []
        for held, seen, state in zip(self.rows, self.seen, self.states, strict=True):
            where = {row: local for local, row in enumerate(held)}
            new = tuple(at for at, row in enumerate(wanted) if row in where)
            if new:
                local = torch.tensor([where[wanted[at]] for at in new])
                chosen.append(new)
                places.append(seen)
                kept.append(state.select(local))
        if len(chosen) == 1 and len(chosen[0]) == len(wanted):
            return kept[0]  # all rows are at one place
        return RowStates(len(wanted), tuple(chosen), tuple(places), tuple(kept))

    def repeat(self, times: int) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.select(torch.arange(self.batch).repeat_interleave(times))

    def crop(self, tokens: int) -> "RowStates":
        self.check_crop(tokens)
        left = [
            (rows, seen - tokens, state.crop(tokens))
            for rows, seen, state in zip(self.rows, self.seen, self.states, strict=True)
            if seen > tokens  # else the rows have seen nothing then
        ]
        rows, seen, states = zip(*left, strict=True)
        return RowStates(self.batch, rows, seen, states)


def rows_of(state: Any, rows: tuple[int, ...]) -> Any:
    """The state of some rows that are at one place, without a copy where it is held as such."""
    if isinstance(state, RowStates):
        for held, part in zip(state.rows, state.states, strict=True):
            if rows == held:
                return part
            if rows[0] in held:
                where = {row: local for local, row in enumerate(held)}
                return part.select(torch.tensor([where[row] for row in rows]))
        return None
    return state.select(torch.tensor(rows))


def gathered(batch: int, parts: dict[int, list[tuple[tuple[int, ...], Any]]]) -> Any:
    """One state from those of disjoint rows, by place: whole where all rows are at one.

    Of rows at one place, all can undo what each of them can.
    """
    rows, states = [], []
    for pieces in parts.values():
        held = [row for piece, _ in pieces for row in piece]
        state = pieces[0][1]
        if len(pieces) > 1:
            undoable = min(state.undoable for _, state in pieces)
            state = join([state.limited(undoable) for _, state in pieces])
        order = sorted(range(len(held)), key=held.__getitem__)
        if order != list(range(len(held))):
            state = state.select(torch.tensor(order))
        rows.append(tuple(sorted(held)))
        states.append(state)
    if len(rows) == 1 and len(rows[0]) == batch:
        return states[0]
    return RowStates(batch, tuple(rows), tuple(parts), tuple(states))

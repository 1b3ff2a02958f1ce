"""State: what a layer carries from one call to the next, as a tree of tensors."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor


class State:
    """Base of frozen dataclasses that hold tensors (batch first), other states, and plain data.

    The operations below are all a cache needs, so they are written here once and no memory has to
    repeat them. They return new states; nothing is changed in place.

    composite: its parts are states that tell rows apart each by itself.
    """

    composite: ClassVar[bool] = False

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


def beside(states: Sequence[Any], places: Sequence[int]) -> Any:
    """States of one batch row each, after places[row] tokens, as one of all rows."""
    first: Any = states[0]
    if isinstance(first, State) and first.composite:
        parts = {
            field.name: beside([getattr(state, field.name) for state in states], places)
            for field in dataclasses.fields(first)  # pyright: ignore[reportArgumentType]
        }
        return dataclasses.replace(first, **parts)  # pyright: ignore[reportArgumentType]
    nothing = [isinstance(state, RowStates) for state in states]  # a row that has seen nothing
    if not any(nothing) and len({_shape(state) for state in states}) == 1:
        return join(states)
    groups: dict[int, list[tuple[tuple[int, ...], Any]]] = {}
    for row, (state, place) in enumerate(zip(states, places, strict=True)):
        if not nothing[row]:
            groups.setdefault(place, []).append(((row,), state))
    return gathered(len(states), groups)


def _shape(node: Any) -> Any:
    """Shapes and plain data of a tree: equal for states that `join` can put together."""
    if isinstance(node, Tensor):
        return node.shape
    if isinstance(node, State):
        instance: Any = node
        fields = dataclasses.fields(instance)
        return (type(node), *(_shape(getattr(node, field.name)) for field in fields))
    return tuple(map(_shape, node)) if isinstance(node, tuple) else node


@dataclasses.dataclass(frozen=True)
class RowStates(State):
    """States of batch rows that are at different places.

    batch: rows in all; rows[i]: those that states[i] holds, ascending. A row that has seen nothing
    is in none.
    """

    batch: int
    rows: tuple[tuple[int, ...], ...]
    states: tuple[State, ...]

    def select(self, rows: Tensor) -> Any:
        """As `State.select`; rows that are all at one place are one state of that place."""
        wanted, chosen, kept = rows.tolist(), [], []
        for held, state in zip(self.rows, self.states, strict=True):
            where = {row: local for local, row in enumerate(held)}
            new = tuple(at for at, row in enumerate(wanted) if row in where)
            if new:
                local = torch.tensor([where[wanted[at]] for at in new])
                chosen.append(new)
                kept.append(state.select(local))
        if len(chosen) == 1 and len(chosen[0]) == len(wanted):
            return kept[0]
        return RowStates(len(wanted), tuple(chosen), tuple(kept))

    def repeat(self, times: int) -> Any:
        return self.select(torch.arange(self.batch).repeat_interleave(times))


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
    """One state from those of disjoint rows, by place: whole where all rows are at one."""
    rows, states = [], []
    for pieces in parts.values():
        held = [row for piece, _ in pieces for row in piece]
        state = pieces[0][1] if len(pieces) == 1 else join([state for _, state in pieces])
        order = sorted(range(len(held)), key=held.__getitem__)
        if order != list(range(len(held))):
            state = state.select(torch.tensor(order))
        rows.append(tuple(sorted(held)))
        states.append(state)
    if len(rows) == 1 and len(rows[0]) == batch:
        return states[0]
    return RowStates(batch, tuple(rows), tuple(states))

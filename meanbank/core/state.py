"""State: what a layer carries from one call to the next, as a tree of tensors."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from meanbank.core.derived import NAME, derived_tensors
from meanbank.core.record import Record
from meanbank.core.room import spare_nbytes, without_room


class State:
    """Base of frozen dataclasses that hold tensors (batch first), other states, and plain data.

    The operations below are all a cache needs, so they are written here once and no memory has to
    repeat them. They return new states; nothing is changed in place.

    Forgetting tokens needs to know which numbers belong to which tokens. A state that only holds
    other states forgets what they do; one with tensors of its own forgets nothing, unless it says
    how: `undoable`, `crop`, and `limited` where it keeps a record.
    """

    @property
    def undoable(self) -> int:
        """How many of the last tokens, at most, `crop` can make every row forget."""
        parts = list(_parts(self))
        if any(isinstance(part, Tensor) for part in parts):
            return 0
        return min((part.undoable for part in parts), default=0)

    @property
    def has_provenance(self) -> bool:
        """Whether every memory of compressed rows in it knows where its tokens went."""
        return all(part.has_provenance for part in _parts(self) if isinstance(part, State))

    def crop(self, tokens: int) -> Self:
        """The state that never saw the last `tokens` tokens of each row; fewer can be undone then.

        Some row must have seen more. Raises ValueError for more than `undoable`.
        """
        self.check_crop(tokens)
        return _rebuild(self, lambda tensor: tensor, lambda state: state.crop(tokens))

    def limited(self, record: Record) -> Self:
        """The same without what is only kept for more than this record."""
        return _rebuild(self, lambda tensor: tensor, lambda state: state.limited(record))

    def check_crop(self, tokens: int) -> None:
        """Raise ValueError unless the last `tokens` tokens can be forgotten."""
        if not 0 <= tokens <= self.undoable:
            raise ValueError(
                f"{tokens} tokens cannot be forgotten here, only 0 to {self.undoable}: "
                f"{type(self).__name__} has no record of more"
            )

    registered: ClassVar[dict[str, type["State"]]] = {}  # the classes that a file may name
    part: ClassVar[str] = "other"  # what the tensors that it holds itself are, in one word or two

    def __init_subclass__(cls) -> None:
        State.registered[cls.__name__] = cls

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

    @classmethod
    def joined(cls, states: Sequence[Any], seen: Sequence[tuple[int, ...]]) -> Any:
        """States of several batches as one, rows one after the other.

        seen: tokens of each row, batch by batch. Raises ValueError where they do not fit together.
        """
        first: Any = states[0]
        parts = {}
        for field in dataclasses.fields(first):
            parts[field.name] = joined([getattr(state, field.name) for state in states], seen)
        return dataclasses.replace(first, **parts)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the tree, in field order."""
        for part in _parts(self):
            if isinstance(part, Tensor):
                yield part
            else:
                yield from part.tensors()

    def nbytes_by_part(self) -> dict[str, int]:
        """The same as `nbytes`, told apart by what they are for."""
        found: dict[str, int] = {}
        for item in _parts(self):
            if isinstance(item, Tensor):
                found[self.part] = found.get(self.part, 0) + item.numel() * item.element_size()
            else:
                for part, size in item.nbytes_by_part().items():
                    found[part] = found.get(part, 0) + size
        return found

    def nbytes(self) -> int:
        """Bytes of what the state holds; `prepared_nbytes` come on top."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def prepared_nbytes(self) -> int:
        """Bytes that decoding keeps besides, to go on quickly: room for the next tokens, and what
        is derived from the state. No copy, selection, part or file of it has them."""
        tensors = list(self.tensors())
        spare = {tensor.untyped_storage().data_ptr(): spare_nbytes(tensor) for tensor in tensors}
        storages = (tensor.untyped_storage() for tensor in self.derived_tensors())
        besides = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum((besides | spare).values())

    def derived_tensors(self) -> Iterator[Tensor]:
        """The tensors that accompany the states of the tree; some may be the state's own."""
        yield from derived_tensors(self)
        for part in _parts(self):
            if isinstance(part, State):
                yield from part.derived_tensors()

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have: the fields, without room for more tokens."""
        fields = {name: item for name, item in vars(self).items() if name != NAME}
        return {n: _replaced(item, without_room, lambda s: s) for n, item in fields.items()}


def _map(node: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return _rebuild(node, function, lambda state: _map(state, function))


def _parts(node: Any) -> Iterator[Any]:
    """The tensors and states that a state, or a tuple within one, holds itself."""
    if isinstance(node, State):
        instance: Any = node
        node = tuple(getattr(node, field.name) for field in dataclasses.fields(instance))
    for item in node:
        if isinstance(item, (Tensor, State)):
            yield item
        elif isinstance(item, tuple):
            yield from _parts(item)


def _rebuild(
    node: Any, on_tensor: Callable[[Tensor], Any], on_state: Callable[[State], Any]
) -> Any:
    """The same state with its tensors and the states below it replaced."""
    fields = dataclasses.fields(node)
    parts = {f.name: _replaced(getattr(node, f.name), on_tensor, on_state) for f in fields}
    return dataclasses.replace(node, **parts)


def _replaced(
    item: Any, on_tensor: Callable[[Tensor], Any], on_state: Callable[[State], Any]
) -> Any:
    # not a function within the other: one that calls itself is a cycle, and what its cell reaches
    # (states) would stay until Python collects garbage
    if isinstance(item, Tensor):
        return on_tensor(item)
    if isinstance(item, State):
        return on_state(item)
    if isinstance(item, tuple):
        return tuple(_replaced(part, on_tensor, on_state) for part in item)
    return item


def _class_of(states: Sequence[Any]) -> type[State]:
    """The class that all of some states have; ValueError where they differ."""
    if len({type(state) for state in states}) > 1:
        names = ", ".join(sorted({type(state).__name__ for state in states}))
        raise ValueError(f"states of different kinds ({names}) cannot be joined")
    return type(states[0])


def joined(parts: Sequence[Any], seen: Sequence[tuple[int, ...]]) -> Any:
    """See `State.joined`; parts may also be what states hold."""
    kind = _class_of(parts)
    if issubclass(kind, State):
        return kind.joined(parts, seen)
    if kind is tuple and any(isinstance(item, State) for item in parts[0]):
        return tuple(joined(items, seen) for items in zip(*parts, strict=True))
    return join(parts)


def join(states: Sequence[Any]) -> Any:
    """States of equal shape as one, batch rows one after the other; ValueError for others."""
    first = states[0]
    _class_of(states)
    if isinstance(first, Tensor):
        forms = {(state.shape[1:], state.is_floating_point(), state.device) for state in states}
        if len(forms) > 1:
            raise ValueError("states of different shapes or devices cannot be joined")
        return torch.cat(list(states))  # the widest dtype; calls in others convert what they read
    if isinstance(first, State):
        instance: Any = first
        parts = {
            field.name: join([getattr(state, field.name) for state in states])
            for field in dataclasses.fields(instance)
        }
        return dataclasses.replace(instance, **parts)
    if isinstance(first, tuple):
        return tuple(join(items) for items in zip(*states, strict=True))
    if any(state != first for state in states):
        raise ValueError(f"states of different places ({first} and others) cannot be joined")
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
                local = as_index(where[wanted[at]] for at in new)
                chosen.append(new)
                places.append(seen)
                kept.append(state.select(local))
        if len(chosen) == 1 and len(chosen[0]) == len(wanted):
            return kept[0]  # all rows are at one place
        return RowStates(len(wanted), tuple(chosen), tuple(places), tuple(kept))

    def repeat(self, times: int) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.select(as_index(row for row in range(self.batch) for _ in range(times)))

    def crop(self, tokens: int) -> "RowStates":
        self.check_crop(tokens)
        left = [
            (rows, seen - tokens, state.crop(tokens))
            for rows, seen, state in zip(self.rows, self.seen, self.states, strict=True)
            if seen > tokens  # else the rows have seen nothing then
        ]
        rows, seen, states = zip(*left, strict=True)
        return RowStates(self.batch, rows, seen, states)


def as_index(numbers: Iterable[int]) -> Tensor:
    """Numbers as an index, (N,) int64 in main memory, where a state reads which rows to take."""
    return torch.tensor([*numbers], dtype=torch.long, device="cpu")


def rows_of(state: Any, rows: tuple[int, ...]) -> Any:
    """The state of some rows that are at one place, without a copy where it is held as such."""
    if isinstance(state, RowStates):
        for held, part in zip(state.rows, state.states, strict=True):
            if rows == held:
                return part
            if rows[0] in held:
                where = {row: local for local, row in enumerate(held)}
                return part.select(as_index(where[row] for row in rows))
        return None
    return state.select(as_index(rows))


def gathered(batch: int, parts: dict[int, list[tuple[tuple[int, ...], Any]]]) -> Any:
    """One state from those of disjoint rows, by place: whole where all rows are at one.

    Of rows at one place, all keep what each of them has recorded.
    """
    rows, states = [], []
    for pieces in parts.values():
        held = [row for piece, _ in pieces for row in piece]
        state = pieces[0][1]
        if len(pieces) > 1:
            record = Record(
                undo=min(state.undoable for _, state in pieces),
                provenance=all(state.has_provenance for _, state in pieces),
            )
            state = join([state.limited(record) for _, state in pieces])
        order = sorted(range(len(held)), key=held.__getitem__)
        if order != list(range(len(held))):
            state = state.select(as_index(order))
        rows.append(tuple(sorted(held)))
        states.append(state)
    if len(rows) == 1 and len(rows[0]) == batch:
        return states[0]
    return RowStates(batch, tuple(rows), tuple(parts), tuple(states))


def joined_by_place(states: Sequence[Any], seen: Sequence[tuple[int, ...]]) -> Any:
    """States of rows that may be at different places as one; see `State.joined`."""
    places: dict[int, list[tuple[tuple[int, ...], Any]]] = {}
    offset = 0
    for state, counts in zip(states, seen, strict=True):
        for count in sorted(set(counts) - {0}):
            rows = tuple(row for row, at in enumerate(counts) if at == count)
            whole = len(rows) == len(counts) and not isinstance(state, RowStates)
            held = state if whole else rows_of(state, rows)
            places.setdefault(count, []).append((tuple(row + offset for row in rows), held))
        offset += len(counts)
    return gathered(offset, places)


def by_place(state: Any, seen: tuple[int, ...]) -> Iterator[tuple[int, int, Any]]:
    """Yield (rows, tokens that they have seen, their state) for each place that rows are at.

    Raises ValueError unless `state` holds exactly the rows that have seen something.
    """
    if not isinstance(state, RowStates):
        if len(set(seen)) > 1 or not seen[0]:
            raise ValueError("one state for rows that are at different places, or at none")
        yield len(seen), seen[0], state
        return
    parts = list(zip(state.rows, state.states, strict=True))
    wanted: dict[int, list[int]] = {}
    for row, count in enumerate(seen):
        if count:
            wanted.setdefault(count, []).append(row)
    held = sorted(list(rows) for rows, _ in parts)
    right = held == sorted(wanted.values()) and held != [[*range(len(seen))]]
    right = right and state.seen == tuple(seen[rows[0]] for rows in state.rows)
    if state.batch != len(seen) or not right:
        raise ValueError("its rows are not those of the batch, place by place")
    for rows, part in parts:
        yield len(rows), seen[rows[0]], part


def check_kind(state: Any, kind: type) -> None:
    """Raise ValueError unless `state` is a `kind`."""
    if type(state) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {type(state).__name__}")


def check_like(state: Any, like: Any, name: str = "it") -> None:
    """Raise ValueError unless a tree is as another one, whose tensors may be without data.

    Classes, plain data, shapes and dtypes have to agree; floating-point numbers may be in another
    precision.
    """
    if isinstance(like, State):
        check_kind(state, type(like))
        instance: Any = like
        for field in dataclasses.fields(instance):
            check_like(getattr(state, field.name), getattr(like, field.name), field.name)
    elif isinstance(like, Tensor):
        if not isinstance(state, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(state).__name__}")
        if state.shape != like.shape:
            shape = tuple(like.shape)
            raise ValueError(f"{name} must have shape {shape}, got {tuple(state.shape)}")
        floating = state.is_floating_point() and like.is_floating_point()
        if not floating and state.dtype != like.dtype:
            raise ValueError(f"{name} must not be of {state.dtype}")
    elif type(state) is not type(like) or state != like:
        found = type(state).__name__ if isinstance(state, (State, Tensor)) else state
        raise ValueError(f"{name} must be {like}, got {found}")


def check_at_least(name: str, tensor: Tensor, least: float) -> None:
    """Raise ValueError unless every number is; a tensor without data passes."""
    if not tensor.is_meta and tensor.numel() and tensor.amin() < least:
        raise ValueError(f"{name} must be at least {least}")

"""Where the tables of a loaded model are: resident, mapped from its files, or in int8.

`resident` tables are parameters. `mmap` leaves them in the model's safetensors files, be they
floating-point or int8, and reads the rows of a call's tokens. `int8` quantises them while they are
loaded and keeps them in memory; saved, they are int8 rows of a file. The last two are for
inference.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from meanbank.core.config import choose
from meanbank.core.errors import BankStorageError
from meanbank.core.mapped_file import FLOATING, Mapped, MappedFile
from meanbank.core.table import PARTS, FloatTable, Int8Table, StoredTable, quantized
from meanbank.model.roles import Role, role_of

BANK_STORAGES = ("resident", "mmap", "int8")
Files = dict[str, tuple[MappedFile, str]]
_chosen: ContextVar[str] = ContextVar("bank_storage", default="resident")


class Slot(NamedTuple):
    """A place for a table: an attribute of a module, for now a parameter without numbers."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter


@contextlib.contextmanager
def chosen_storage(choice: str) -> Iterator[None]:
    """Models loaded within it have their tables there; ValueError for what is no choice."""
    token = _chosen.set(choose("bank_storage", choice, BANK_STORAGES))
    try:
        yield
    finally:
        _chosen.reset(token)


@contextlib.contextmanager
def tables_left_out(model: Any, paths: Sequence[str] | None) -> Iterator[None]:
    """Loads a model from these files but for its tables, which it then has where they were chosen
    to be.

    Raises BankStorageError where the files have no tables that can be there.
    """
    choice, slots = _chosen.get(), list(_slots(model))
    if not slots:
        yield
        return
    if choice == "resident":
        _check_floating(slots, paths)
        yield
        return
    files = _files(choice, paths)
    heads = model.config.num_key_value_heads
    tables = [_stored(choice, slot, files, heads) for slot in slots]
    names = {_own(slot.name) + part for slot in slots for part in ("", *PARTS)}
    model._keys_to_ignore_on_load_unexpected |= {rf"(^|\.){re.escape(name)}$" for name in names}
    for slot in slots:
        setattr(slot.module, slot.attribute, None)
    yield
    for slot, table in zip(slots, tables, strict=True):
        delattr(slot.module, slot.attribute)  # a parameter's name takes no module
        setattr(slot.module, slot.attribute, table)
    model.base_model.stored_tables = tuple(tables)


@torch.compiler.disable(reason="it asks the system for pages")
def prefetch(tables: Sequence[StoredTable], token_ids: Tensor) -> None:
    """Let the system begin to read the rows of a call's tokens, which are known before any layer
    runs."""
    if any(table.mapped for table in tables):
        distinct = token_ids.unique().cpu()
        for table in tables:
            table.prefetch(distinct)


@contextlib.contextmanager
def read_whole(tables: Sequence[StoredTable]) -> Iterator[None]:
    """Within it tables are read as a whole, for which the system had better read ahead."""
    mapped = [part for table in tables for part in table.mapped]
    for part in mapped:
        part.expect_all()
    try:
        yield
    finally:
        for part in mapped:
            part.expect_rows()


def check_not_mapped(model: Any, folder: Path) -> None:
    """BankStorageError where a file of the folder is mapped: to write there would cut it off."""
    tables = model.base_model.stored_tables
    mapped = {part.path for table in tables for part in table.mapped}
    for there in folder.glob("*.safetensors"):
        if any(path.exists() and path.samefile(there) for path in mapped):
            raise BankStorageError(
                f"{there} is mapped by this model and cannot be overwritten: save to another folder"
            )


def _own(name: str) -> str:
    """The name within the backbone, whatever is loaded or was saved."""
    return name.removeprefix("model.")


def _slots(model: nn.Module) -> Iterator[Slot]:
    for name, parameter in model.named_parameters():
        if name.endswith("table") and role_of(f"model.{_own(name)}", parameter) is Role.TABLE:
            path, _, attribute = name.rpartition(".")
            yield Slot(name, model.get_submodule(path), attribute, parameter)


def _files(choice: str, paths: Sequence[str] | None) -> Files:
    """Name within the backbone -> the file that has it, and its name there."""
    if not paths or not all(str(path).endswith(".safetensors") for path in paths):
        raise BankStorageError(
            f"bank_storage={choice!r} reads tables from safetensors files, and there are none: "
            "give bank_storage='resident'"
        )
    return {_own(name): (file, name) for file in map(MappedFile, paths) for name in file.names}


def _check_floating(slots: Sequence[Slot], paths: Sequence[str] | None) -> None:
    rows = {_own(slot.name) + PARTS[0] for slot in slots}
    for path in paths or ():
        if str(path).endswith(".safetensors"):
            with safe_open(path, "pt") as file:
                if any(_own(name) in rows for name in file.keys()):  # noqa: SIM118
                    raise BankStorageError(
                        f"the tables in {path} are int8, which cannot be trained: give "
                        "bank_storage='int8' or 'mmap'"
                    )


def _stored(choice: str, slot: Slot, files: Files, heads: int) -> StoredTable:
    """The table of one place."""
    name, dtype, (vocabulary, width) = _own(slot.name), slot.parameter.dtype, slot.parameter.shape

    def mapped(name: str, columns: int, dtypes: Collection[str] = FLOATING) -> Mapped:
        if name not in files:
            raise BankStorageError(f"the files of the model have no {name}")
        file, there = files[name]
        return file.tensor(there, (vocabulary, columns), dtypes)

    if name + PARTS[0] in files:
        parts = [mapped(name + PARTS[0], width, ["I8"]), mapped(name + PARTS[1], heads, ["F32"])]
        if choice == "int8":
            return Int8Table([part.tensor.clone() for part in parts], dtype)
        return Int8Table(parts, dtype)
    table = mapped(name, width)
    if choice == "int8":
        return Int8Table(quantized(table.tensor, heads), dtype)
    return FloatTable([table], dtype)

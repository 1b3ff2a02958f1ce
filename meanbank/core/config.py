"""Typed configurations from plain data (YAML, JSON, command line) and back.

A configuration is a frozen dataclass. Where several classes fit one field, their common base is a
`Tagged` class and the plain form carries the choice as `type: NAME`.
"""

import abc
import contextlib
import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, Union

import yaml

from meanbank.core.errors import one_line

# what PyYAML raises: of tags such as `!!bool maybe`, and of a date that is none, whatever comes up
NO_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)


def choose(kind: str, name: Any, choices: typing.Iterable[str]) -> str:
    """Return `name` if it is one of `choices`, or raise a ValueError with the nearest one first."""
    choices = list(choices)
    if name in choices:
        return name
    ranked = difflib.get_close_matches(str(name), choices, n=max(1, len(choices)), cutoff=0.0)
    if not choices:
        raise ValueError(f"unknown {kind} {name!r}; there are none here")
    raise ValueError(f"unknown {kind} {name!r}; choose one of {', '.join(ranked)}")


def check_least(settings: Any, least: int, *names: str, of: str = "") -> None:
    """Raise ValueError unless each of these fields is None or at least `least`.

    Of a tuple, each number has to be, and there has to be one. of: what stands before the names in
    the message, such as "data.".
    """
    for name in names:
        value = getattr(settings, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if value is not None and (not numbers or min(numbers) < least):
            wanted = f"be at least {least}" if least else "not be negative"
            raise ValueError(f"{of}{name} must {wanted}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tagged(abc.ABC):
    """Base of configuration families whose members are told apart by a `type` tag.

    A direct subclass opens a family (`class MemoryConfig(Tagged, kind="memory")`); its subclasses
    join it (`class Full(MemoryConfig, tag="full")`).
    """

    kind: ClassVar[str]
    tag: ClassVar[str]
    family: ClassVar[dict[str, type[Self]]]

    def __init_subclass__(cls, *, kind: str | None = None, tag: str | None = None) -> None:
        super().__init_subclass__()
        if kind is not None:
            cls.kind, cls.family = kind, {}
        if tag is not None:
            assert tag not in cls.family, f"{cls.kind} {tag!r} is registered twice"
            cls.tag = tag
            cls.family[tag] = cls


def to_plain(value: Any) -> Any:
    """The inverse of `build`: dataclasses become dicts (with their `type`), tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": value.tag, **fields} if isinstance(value, Tagged) else fields
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def build(target: Any, value: Any, path: str = "") -> Any:
    """Build `target` (a dataclass, a `Tagged` family, or a field's annotation) from plain data.

    Raises ValueError with the dotted path of the offending key, the value and what is allowed.
    """
    if dataclasses.is_dataclass(target):
        return _build_dataclass(target, value, path)
    origin, arguments = typing.get_origin(target), typing.get_args(target)
    if origin in (Union, types.UnionType):
        return _build_union(arguments, value, path)
    if origin is Literal:
        return choose(path or "value", value, arguments)
    if origin is tuple:
        return _build_tuple(arguments, value, path)
    if origin is dict and arguments[1] is not Any:
        return _build_mapping(arguments[1], value, path)
    if target is Any or origin in (dict, list):
        return value
    return _build_scalar(target, value, path)


def _build_dataclass(target: Any, value: Any, path: str) -> Any:
    if isinstance(value, target):
        return value
    where = f"{path}: " if path else ""
    if isinstance(value, str) and issubclass(target, Tagged):
        value = {"type": value}  # `memory: full` for `memory: {type: full}`
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}expected a mapping of settings, got {value!r}")
    settings = dict(value)
    if issubclass(target, Tagged):
        if "type" not in settings:
            choices = ", ".join(target.family)
            raise ValueError(f"{where}a {target.kind} needs a `type`; choose one of {choices}")
        target = target.family[choose(target.kind, settings.pop("type"), target.family)]
    hints = _hints(target)
    names = [field.name for field in dataclasses.fields(target)]
    for name in settings:
        choose(f"setting in {path or 'the configuration'}:", name, names)
    prefix = f"{path}." if path else ""
    built = {name: build(hints[name], item, prefix + name) for name, item in settings.items()}
    required = [
        f.name
        for f in dataclasses.fields(target)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in built:
            raise ValueError(f"{where}setting {name!r} is required")
    try:
        return target(**built)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


@functools.cache
def _hints(target: type) -> dict[str, Any]:
    return typing.get_type_hints(target)


def _build_union(arguments: tuple, value: Any, path: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    members = [member for member in arguments if member is not type(None)]
    error: ValueError | None = None
    for member in members:
        try:
            return build(member, value, path)
        except ValueError as caught:
            error = error or caught
    raise error or ValueError(f"{path}: {value!r} is not allowed")


def _build_tuple(arguments: tuple, value: Any, path: str) -> tuple:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError(f"{path} must be a list, got {value!r}")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise ValueError(f"{path} must have {len(arguments)} entries, got {value!r}")
    return tuple(
        build(member, item, f"{path}.{index}")
        for index, (member, item) in enumerate(zip(arguments, value, strict=True))
    )


def _build_mapping(member: Any, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} must be a mapping of names, got {value!r}")
    return {str(name): build(member, item, f"{path}.{name}") for name, item in value.items()}


def _build_scalar(target: type, value: Any, path: str) -> Any:
    if target is float and isinstance(value, str):
        with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-3 as text
            value = float(value)
    if target is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} must be finite, got {value!r}")
    if isinstance(value, target) and (target is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{path} must be of type {target.__name__}, got {value!r}")


def yaml_value(text: str, override: str | None = None) -> Any:
    """What a YAML text says; ValueError, in one line, where it says nothing.

    override: the whole that it stands in, for the message.
    """
    try:
        return yaml.safe_load(text)
    except NO_YAML as error:
        told = repr(text) if override is None else f"the value of {override!r}"
        raise ValueError(f"{told} is not YAML: {one_line(error)}") from None


def apply_override(settings: dict, override: str) -> None:
    """Change plain settings in place as `a.b.0.c=value` says; the value is YAML.

    Raises ValueError, in one line, for what cannot be read or has no place.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"an override must look like training.steps=100, got {override!r}")
    value = yaml_value(text, override)
    node: Any = settings
    *parents, last = key.split(".")
    for depth, name in enumerate(parents):
        child = _child(node, name, override)
        if isinstance(child, str):  # `recipe: kvm` is short for `recipe: {type: kvm}`
            child = {"type": child}
        elif child is None:
            child = {}
        if not isinstance(child, (dict, list)):
            path = ".".join(parents[: depth + 1])
            raise ValueError(f"cannot set {key}: {path} is {child!r}, not a group of settings")
        _assign(node, name, child, override)
        node = child
    _assign(node, last, value, override)


def _child(node: dict | list, name: str, override: str) -> Any:
    return node[_index(node, name, override)] if isinstance(node, list) else node.get(name)


def _assign(node: dict | list, name: str, value: Any, override: str) -> None:
    if isinstance(node, list):
        node[_index(node, name, override)] = value
    else:
        node[name] = value


def _index(node: list, name: str, override: str) -> int:
    if not name.isdigit() or int(name) >= len(node):
        raise ValueError(
            f"{override!r}: {name!r} is not an entry of a list of {len(node)} (0 is the first)"
        )
    return int(name)

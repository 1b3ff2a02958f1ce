"""A state as named tensors and short words, and back: what a file of states holds."""

import dataclasses
import json
import re
from typing import Any

from torch import Tensor

from meanbank.core.state import State

MAX_DEPTH = 16
_NUMBER = r"-?(?:0|[1-9]\d{0,15})"
_NUMBERS = rf"\[(?:{_NUMBER}(?:,{_NUMBER})*)?\]"
_PLAIN = re.compile(rf"null|{_NUMBER}|{_NUMBERS}|\[{_NUMBERS}(?:,{_NUMBERS})*\]")
_PARTS = re.compile(r"\((\d{1,6})\)")


def flatten(node: Any, path: str, tensors: dict[str, Tensor], words: dict[str, str]) -> None:
    """Add what `node` holds to `tensors` and `words`, named by `path` and the fields below it.

    A state's word is the name of its class; that of a tuple of states their number in parentheses;
    other fields are None, an integer, or tuples of integers, as JSON. ValueError for anything else.
    """
    if isinstance(node, Tensor):
        tensors[path] = node
    elif isinstance(node, State):
        words[path] = type(node).__name__
        instance: Any = node
        for field in dataclasses.fields(instance):
            flatten(getattr(node, field.name), f"{path}.{field.name}", tensors, words)
    elif isinstance(node, tuple) and any(isinstance(item, (State, Tensor)) for item in node):
        words[path] = f"({len(node)})"
        for number, item in enumerate(node):
            flatten(item, f"{path}.{number}", tensors, words)
    else:
        words[path] = json.dumps(node, separators=(",", ":"))
        if _plain(words[path]) != node or isinstance(node, bool):
            raise ValueError(f"{path} holds {node!r}, which has no form in a file")


def restored(
    path: str, tensors: dict[str, Tensor], words: dict[str, str], depth: int = MAX_DEPTH
) -> Any:
    """The node that `flatten` named `path`; what it is made of is taken out of both mappings.

    Classes are those that `State.registered` lists, nothing is imported. Raises ValueError where
    something is missing, of an unknown class, or not in the form that `flatten` gives it.
    """
    if path in tensors:
        return tensors.pop(path)
    word = words.pop(path, None)
    if word is None or not depth:
        raise ValueError(f"{path} is missing" if word is None else f"{path} is nested too deeply")
    if word in State.registered:
        kind: Any = State.registered[word]
        fields = {
            field.name: restored(f"{path}.{field.name}", tensors, words, depth - 1)
            for field in dataclasses.fields(kind)
        }
        return kind(**fields)
    parts = _PARTS.fullmatch(word)
    if parts is not None:
        numbers = range(int(parts[1]))
        return tuple(restored(f"{path}.{i}", tensors, words, depth - 1) for i in numbers)
    return _plain(word)


def _plain(word: str) -> Any:
    """None, an integer, or a tuple of integers or of tuples of them."""
    if _PLAIN.fullmatch(word) is None:
        raise ValueError(f"{word[:40]!r} is no value of a state")
    return _tuples(json.loads(word))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

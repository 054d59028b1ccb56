"""Expressions that move every tensor of a container, or of an object, of the user's code."""

from __future__ import annotations

import ast
import functools
from collections import UserDict
from contextlib import suppress
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from ckptmove.training.code.source import nodes_of_class, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: The mappings whose items are searched. Those of another class may be computed, or raise, as OmegaConf's do.
MAPPINGS: Final = (dict, UserDict)
#: Most entries of a container that is searched: a larger one is a dataset, and no batch.
_MOST: Final = 1_000
#: Most entries that are written out one by one.
_WRITTEN: Final = 6
#: Variables of comprehensions, the outermost first: of a list, of a dict.
_NAMES: Final = (("one",), ("each",), ("part",), ("k", "v"), ("key", "value"), ("name", "entry"))


class Move(NamedTuple):
    """A method call that moves a tensor."""

    call: str  # the call: `to(device)`, `cpu()`
    torch: str  # the file's name for `torch`; empty if it has none


@functools.cache
def _returns(kind: type) -> bool:
    """Whether the method ``to`` of a class returns a value, as far as its source is known."""
    every = (one for _, one in nodes_of_class(kind) if isinstance(one, ast.FunctionDef) and one.name == "to")
    own = next(every, None)
    return own is None or any(isinstance(one, ast.Return) and one.value is not None for one in ast.walk(own))


def attributes_of(value: object) -> Mapping[str, Any]:
    """The attributes that an object holds. Its own ``__getattr__`` is not called: it may raise anything."""
    try:
        held: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return {}
    return held


def has_to(value: object) -> bool:
    """Whether an object that is neither a tensor nor a module has a method ``to`` that returns the moved object."""
    kind: Any = type(value)
    is_other = isinstance(value, (torch.Tensor, nn.Module, type))
    return not is_other and callable(getattr(kind, "to", None)) and _returns(kind)


def _is_record(value: object) -> bool:
    """Whether the attributes of an object are fields that can be assigned: of a dataclass, or of a namespace."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    is_settable = parameters is not None and not parameters.frozen
    return isinstance(value, SimpleNamespace) or (is_settable and not isinstance(value, nn.Module))


def ways(name: str, value: object, mappings: tuple[type, ...] = MAPPINGS) -> Iterator[tuple[str, object]]:
    """A value and the values in it that can be moved with it, each with its expression; the outermost first."""
    waiting, seen = [(name, value)], set[int]()
    for way, one in waiting:  # grows in the loop
        yield way, one
        if id(one) not in seen:
            seen.add(id(one))
            waiting += _entries(way, one, mappings)


def _entries(way: str, value: Any, mappings: tuple[type, ...] = MAPPINGS) -> list[tuple[str, object]]:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f"{way}.{key}", one) for key, one in zip(value._fields, value, strict=False)]
    kinds: Any = (*mappings, tuple, list)
    if isinstance(value, kinds):
        is_small = len(value) <= _MOST
        return [(f"{way}[{key!r}]", one) for key, one in islice(_items(value), _MOST * is_small)]
    if has_to(value) or _is_record(value):
        return [(f"{way}.{key}", one) for key, one in attributes_of(value).items()]
    return []


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    yield from enumerate(value) if isinstance(value, (tuple, list)) else value.items()


class _Unwritten(Exception):
    """A container without an expression for its copy."""


def moved(name: str, value: object, move: Move) -> str:
    """Expression for a value with its tensors moved; empty if it contains none, or no expression is known."""
    with suppress(_Unwritten):
        return _moved(name, value, move, read(ast.parse(move.call, mode="eval")))
    return ""


def assignment(name: str, value: object, move: Move) -> str:
    """Statement after which a variable has its tensors moved; empty if no statement is known."""
    if not _is_record(value) or has_to(value):
        whole = moved(name, value, move)
        return f"{name} = {whole}" * bool(whole)
    fields = {way: moved(way, one, move) for way, one in _entries(name, value)}
    changes = {way: one for way, one in fields.items() if one}
    return f"{', '.join(changes)} = {', '.join(changes.values())}" * bool(changes)


def _moved(name: str, value: Any, move: Move, taken: set[str]) -> str:
    if isinstance(value, torch.Tensor) or has_to(value):
        return f"{name}.{move.call}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = {way: _moved(way, one, move, taken) for way, one in _entries(name, value)}
        changes = [f"{way.rpartition('.')[2]}={one}" for way, one in fields.items() if one]
        return f"{name}._replace({', '.join(changes)})" * bool(changes)
    return _copied(name, value, move, taken) if isinstance(value, (*MAPPINGS, tuple, list)) else ""


def _copied(name: str, value: Any, move: Move, taken: set[str]) -> str:
    """Expression for a copy of a container: a comprehension, if its entries are moved alike."""
    names = next((one for one in _NAMES if len(one) == 1 + isinstance(value, MAPPINGS) and not taken & {*one}), None)
    if names is None:
        raise _Unwritten
    each = names[-1]
    texts = [(one, _moved(each, one, move, taken | {*names})) for _, one in _items(value)]
    kinds = {text for _, text in texts} - {""}
    if not kinds:
        return ""
    is_each = all(text for _, text in texts)
    if len(kinds) > 1 or not (is_each or all(isinstance(one, torch.Tensor) == bool(text) for one, text in texts)):
        return _written(name, value, move, taken)
    condition = f"{move.torch}.is_tensor({each})" if move.torch else f'hasattr({each}, "to")'
    text = kinds.pop() + f" if {condition} else {each}" * (not is_each)
    if isinstance(value, MAPPINGS):
        return f"{{{names[0]}: {text} for {names[0]}, {each} in {name}.items()}}"
    return f"[{text} for {each} in {name}]" if isinstance(value, list) else f"tuple({text} for {each} in {name})"


def _written(name: str, value: Any, move: Move, taken: set[str]) -> str:
    """Expression for a copy of a container, with its entries one by one."""
    items = list(_items(value))
    if len(items) > _WRITTEN or not all(_is_literal(key) for key, _ in items):
        raise _Unwritten
    texts = {key: _moved(f"{name}[{key!r}]", one, move, taken) for key, one in items}
    if isinstance(value, MAPPINGS):
        return f"{{**{name}, {', '.join(f'{key!r}: {text}' for key, text in texts.items() if text)}}}"
    every = ", ".join(text or f"{name}[{key}]" for key, text in texts.items())
    return f"[{every}]" if isinstance(value, list) else f"({every})"


def _is_literal(key: object) -> bool:
    """Whether the ``repr`` of a key is an expression for it: that of an ``Enum`` is not."""
    with suppress(ValueError, SyntaxError):
        return bool(ast.literal_eval(repr(key)) == key)
    return False

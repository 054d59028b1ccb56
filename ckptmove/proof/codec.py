"""Values of annotated types as plain ones, which JSON can hold, and back: what processes of ``verify`` send each other.

No pickle: a process may run the user's code, which could write to the same pipe.
"""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
_PLAIN: Final = frozenset({str, int, float, bool})


def to_plain(value: Any) -> Any:
    """A value as dicts, lists, text and numbers.

    Of a named tuple, fields with their default are left out; of a data class, private fields.
    """
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "_fields"):
        defaults = value._field_defaults
        pairs = zip(value._fields, value, strict=True)
        return {name: to_plain(one) for name, one in pairs if name not in defaults or one != defaults[name]}
    if is_dataclass(value):
        own: Any = type(value)
        return {name: to_plain(getattr(value, name)) for name in _public_hints(own)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_plain(one) for key, one in value.items()}
    return [to_plain(one) for one in (value.items() if isinstance(value, dict) else value)]


def from_plain(kind: type[_T], value: Any) -> _T:
    """The value of a type from the result of :func:`to_plain`.

    Raises:
        ValueError, TypeError, LookupError or AttributeError: it is not of the type.
    """
    read: Callable[[Any], _T] = _reader(cast("Any", kind))
    return read(value)


def dumps(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(to_plain(value))


def loads(kind: type[_T], text: str) -> _T:
    """The value of a type from the result of :func:`dumps`. Raises ValueError if it is anything else."""
    try:
        return from_plain(kind, json.loads(text))
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a {kind.__name__}") from error


@cache
def _public_hints(kind: Any) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(kind).items() if not name.startswith("_")}


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """The function that reads plain values of a type."""
    if kind in {object, Any}:
        return lambda value: value
    if kind in _PLAIN:
        return lambda value: _checked(value, kind)
    if get_origin(kind) is not None:
        return _generic_reader(get_origin(kind), get_args(kind))
    if issubclass(kind, Enum):
        return cast("Callable[[Any], Any]", kind)
    readers = {name: _reader(hint) for name, hint in _public_hints(kind).items()}
    return lambda value: kind(**{name: readers[name](one) for name, one in value.items()})


def _generic_reader(origin: Any, inner: tuple[Any, ...]) -> Callable[[Any], Any]:
    if origin is Literal:
        return lambda value: inner[inner.index(value)]
    readers = [_reader(one) for one in inner if one not in {NoneType, Ellipsis}]
    if origin in {Union, UnionType}:  # of None and one type
        return lambda value: None if value is None else readers[0](value)
    if origin is dict:
        return lambda value: {
            readers[0](key): readers[1](one) for key, one in (value.items() if isinstance(value, dict) else value)
        }
    if origin is tuple and Ellipsis not in inner:
        return lambda value: tuple(read(one) for read, one in zip(readers, _checked(value, list), strict=True))
    return lambda value: origin(map(readers[0], _checked(value, list)))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"not of the type {kind.__name__}")

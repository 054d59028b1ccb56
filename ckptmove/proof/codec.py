"""Values of annotated types as plain ones, which JSON can hold, and back: what processes of ``verify`` send each other.

No pickle: a process may run the user's code, which could write to the same pipe.
"""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

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
    if hasattr(value, "_fields") or is_dataclass(value):
        defaults = getattr(value, "_field_defaults", {})
        own: Any = type(value)
        pairs = ((name, getattr(value, name)) for name in _public_hints(own))
        return {name: to_plain(one) for name, one in pairs if name not in defaults or one != defaults[name]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_plain(one) for key, one in value.items()}
    return [to_plain(one) for one in (value.items() if isinstance(value, dict) else value)]


def from_plain(kind: type[_T], value: Any) -> _T:
    """The value of a type from the result of :func:`to_plain`.

    Raises:
        ValueError, TypeError, LookupError or AttributeError: it is not of the type.
    """
    name: Any = kind
    if get_origin(name) is not None:
        found: Any = _of_generic(get_origin(name), get_args(name), value)
    elif name in {object, Any}:
        found = value
    elif name in _PLAIN:
        found = _checked(value, name)
    elif issubclass(name, Enum):
        found = name(value)
    else:
        hints = _public_hints(name)
        found = name(**{key: from_plain(hints[key], one) for key, one in value.items()})
    return cast("_T", found)


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


def _of_generic(origin: Any, inner: tuple[Any, ...], value: Any) -> Any:
    if origin in {Union, UnionType}:  # of one type and None
        return None if value is None else from_plain(inner[0], value)
    if origin is Literal:
        return inner[inner.index(value)]
    if origin is dict:
        pairs = value.items() if isinstance(value, dict) else value
        return {from_plain(inner[0], key): from_plain(inner[1], one) for key, one in pairs}
    if origin is tuple and Ellipsis not in inner:
        return tuple(from_plain(kind, one) for kind, one in zip(inner, _checked(value, list), strict=True))
    return origin(from_plain(inner[0], one) for one in _checked(value, list))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"not of the type {kind.__name__}")

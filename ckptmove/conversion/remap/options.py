"""Parse the options of a remapping."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, get_args

from ckptmove.checkpoint.state_dicts import WRAPPERS
from ckptmove.errors import UsageError
from ckptmove.model import Role
from ckptmove.moves import MoveRequest, Remap, checked_globs
from ckptmove.text import Argument, Phrase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Short names of dtypes, as users type them.
_SHORT: Final = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64",
    "double": "float64",
}  # fmt: skip
#: Dtypes that floating tensors can be cast to.
DTYPES: Final = ("bfloat16", "float16", "float32", "float64")
ROLES: Final = get_args(Role)
#: Options whose values are globs of paths, or roles.
_PARTS: Final = frozenset({"only", "drop"})


def remap_options(**typed: Any) -> Remap:
    """The options of a remapping, checked, from values as they are typed; None for an option that is not.

    The keys are fields of :class:`ckptmove.moves.Remap`. An empty prefix means those of known wrappers.
    """
    remap = Remap(**{name: _parsed(name, value) for name, value in typed.items() if value is not None})
    if len({dtype for role, dtype in remap.dtype if not role}) > 1:
        raise UsageError(
            Phrase(
                Argument("dtype"), " gives the model two dtypes: name a role for the other one, for example ema=float32"
            )
        )
    return remap


def with_options(move: MoveRequest, options: Iterable[Argument]) -> MoveRequest:
    """A request with more options; those that can be given several times are added."""
    moves: dict[str, Any] = {}
    remaps: dict[str, Any] = {}
    old: dict[str, Any] = move.remap._asdict()
    for name, value in options:
        if name in MoveRequest._fields:
            moves[name] = value
        elif name == "strip_prefix":
            remaps[name] = () if value is True else None if value is False else (*(remaps.get(name) or ()), value)
        else:
            typed = [value] if isinstance(old[name], tuple) else value
            new = remap_options(**{name: typed})._asdict()[name]
            remaps[name] = (*remaps.get(name, old[name]), *new) if isinstance(new, tuple) else new
    return move._replace(remap=move.remap._replace(**remaps), **moves)


def _parsed(name: str, value: Any) -> Any:
    if isinstance(value, bool | str):
        return value
    if name in _PARTS:
        value = checked_globs(f"--{name}", value)
    if name == "only" and not value:
        raise UsageError(Phrase(Argument("only"), " takes a glob of names or a role, not an empty list"))
    words = filter(None, value) if name == "strip_prefix" else value
    return tuple(map(_PARSERS.get(name, str), words))


def _with_dot(prefix: str) -> str:
    """The prefix of a wrapper with its dot, which is easily forgotten."""
    return f"{prefix}." if f"{prefix}." in WRAPPERS else prefix


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise UsageError(
            Phrase(Argument("rename"), f" takes OLD=NEW, for example 'backbone.*=encoder.*', not {text!r}")
        )
    if old.count("*") != new.count("*"):
        raise UsageError(Phrase(Argument("rename"), f" needs as many * in the new name as in the old one: {text!r}"))
    return old, new


def _role_and_dtype(text: str) -> tuple[str, str]:
    role, equals, name = text.rpartition("=")
    dtype = _SHORT.get(name.removeprefix("torch."), name.removeprefix("torch."))
    if equals and role not in ROLES:
        raise UsageError(
            Phrase(Argument("dtype"), f" takes a role before '=', one of {', '.join(ROLES)}, not {role!r}")
        )
    if dtype not in DTYPES:
        near = get_close_matches(dtype, (*DTYPES, *_SHORT), 1)
        suggestion = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(Phrase(Argument("dtype"), f" casts to {', '.join(DTYPES)}, not {name!r}{suggestion}"))
    return role, dtype


#: Parsers of words that are not values themselves.
_PARSERS: Final[dict[str, Callable[[str], object]]] = {
    "strip_prefix": _with_dot, "rename": _pair, "dtype": _role_and_dtype,
}  # fmt: skip

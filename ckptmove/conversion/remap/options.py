"""Parse the options of a remapping."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, get_args

from ckptmove.checkpoint.state_dicts import WRAPPERS
from ckptmove.errors import UsageError
from ckptmove.model import Role
from ckptmove.moves import Remap

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Short names of dtypes, as users type them.
_SHORT: Final = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64",
    "double": "float64",
}  # fmt: skip
#: Dtypes that floating tensors can be cast to.
DTYPES: Final = ("bfloat16", "float16", "float32", "float64")
ROLES: Final = get_args(Role)


def remap_options(
    *,
    strip_prefix: Sequence[str] | None = None,
    add_prefix: str = "",
    rename: Sequence[str] = (),
    only: Sequence[str] = (),
    drop: Sequence[str] = (),
    as_root: str = "",
    compact: bool = False,
    plain: bool = False,
    dtype: Sequence[str] = (),
) -> Remap:
    """The options of a remapping, checked.

    Args:
        strip_prefix: prefixes; an empty one means those of known wrappers.
        add_prefix: as of :class:`ckptmove.moves.Remap`, like all that follow.
        rename: ``OLD=NEW``.
        only: globs or roles.
        drop: globs or roles.
        as_root: path of the new root.
        compact: whether storages are cut to their tensors.
        plain: whether objects become plain values.
        dtype: ``DTYPE`` or ``ROLE=DTYPE``.

    Raises:
        UsageError: if one of them is invalid.
    """
    return Remap(
        strip_prefix=None if strip_prefix is None else tuple(map(_with_dot, filter(None, strip_prefix))),
        add_prefix=add_prefix,
        rename=tuple(map(_pair, rename)),
        only=tuple(only),
        drop=tuple(drop),
        as_root=as_root,
        compact=compact,
        plain=plain,
        dtype=tuple(map(_role_and_dtype, dtype)),
    )


def _with_dot(prefix: str) -> str:
    """The prefix of a wrapper with its dot, which is easily forgotten."""
    return f"{prefix}." if f"{prefix}." in WRAPPERS else prefix


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise UsageError(f"--rename takes OLD=NEW, for example 'backbone.*=encoder.*', not {text!r}")
    if old.count("*") != new.count("*"):
        raise UsageError(f"--rename needs as many * in the new name as in the old one: {text!r}")
    return old, new


def _role_and_dtype(text: str) -> tuple[str, str]:
    role, equals, name = text.rpartition("=")
    dtype = _SHORT.get(name.removeprefix("torch."), name.removeprefix("torch."))
    if equals and role not in ROLES:
        raise UsageError(f"--dtype takes a role before '=', one of {', '.join(ROLES)}, not {role!r}")
    if dtype not in DTYPES:
        near = get_close_matches(dtype, (*DTYPES, *_SHORT), 1)
        suggestion = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"--dtype casts to {', '.join(DTYPES)}, not {name!r}{suggestion}")
    return role, dtype

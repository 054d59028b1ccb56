"""Rules about the keys of state_dicts: K601."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.state_dicts import (
    MODULE,
    RootKeys,
    inner_wrappers,
    model_tensors,
    strip_wrappers,
    without_inner_wrappers,
    without_wrappers,
)
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import remap_command
from ckptmove.model import Severity
from ckptmove.text import Argument, amount

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory, Role

#: Roles of state_dicts. An average (AveragedModel) starts with ``module.`` by its class.
_STATE_DICTS: Final[frozenset[Role]] = frozenset({"model", "ema"})
#: Where the prefix of DataParallel comes from.
_EITHER: Final = "DataParallel saves so, and so do models with a part of that name (tensordict)"


def wrapper_prefix(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """K601: keys of a state_dict contain the prefixes of wrappers; one finding for each state_dict.

    It is a note if every key only starts with ``module.``, which may be a part of the model.
    """
    roots = RootKeys(inventory)
    found_in: dict[tuple[str, str], dict[str, str]] = {}
    for tensor in model_tensors(inventory, _STATE_DICTS):
        container, key = roots.split(tensor.name)
        found_in.setdefault((container, tensor.role), {})[tensor.name] = key
    plain = {place: keys for place, keys in found_in.items() if _starts_with_module(keys) and not _inner(keys)}
    for (container, role), keys in found_in.items():
        place, inner = f" of {container}" if container else "", _inner(keys)
        if inner:
            # The bare option would remove `module.` from the other state_dicts too.
            options = [Argument("strip_prefix", prefix if plain else True) for prefix in inner[: None if plain else 1]]
            where = [name for name, key in keys.items() if inner_wrappers(key)]
            yield found("K601", _message(keys, inner, place), where, _fix(inventory, context, keys, inner, options))
        elif role == "model" and (container, role) in plain:
            able = remap_command(inventory, context, [*keys], Argument("strip_prefix", True))
            remedy = "convert --strip-prefix removes it" if able else "remove it there"
            message = f"every key{place} starts with '{MODULE}' ({amount(len(keys), 'tensor')}): {_EITHER}"
            finding = found("K601", f"{message}; if load_state_dict refuses the keys, {remedy}", [*keys], "")
            yield finding._replace(severity=Severity.INFO)


def _inner(keys: Mapping[str, str]) -> list[str]:
    """The prefixes in the keys that only wrappers write."""
    return [*dict.fromkeys(prefix for key in keys.values() for prefix in inner_wrappers(key))]


def _starts_with_module(keys: Mapping[str, str]) -> bool:
    return all(without_inner_wrappers(key).startswith(MODULE) for key in keys.values())


def _begin(keys: Mapping[str, str]) -> str:
    """What every key starts with, if that has all prefixes of wrappers; else empty."""
    begin, *others = {strip_wrappers(key)[0] for key in keys.values()}
    is_all = not others and all(key[len(begin) :] == without_wrappers(key) for key in keys.values())
    return begin if is_all and begin != MODULE else ""


def _message(keys: Mapping[str, str], inner: list[str], place: str) -> str:
    begin = _begin(keys)
    if begin:
        return f"every key{place} starts with '{begin}' ({amount(len(keys), 'tensor')})"
    held = sum(bool(inner_wrappers(key)) for key in keys.values())
    front = f"every key{place} starts with '{MODULE}', and " if _starts_with_module(keys) else ""
    of = "" if front else place
    verb = "contains" if held == 1 else "contain"
    return f"{front}{held:,} of {amount(len(keys), 'key')}{of} {verb} {_quoted(inner)}"


def _quoted(prefixes: list[str]) -> str:
    return ", ".join(f"'{prefix}'" for prefix in prefixes)


def _fix(
    inventory: Inventory, context: Context, keys: Mapping[str, str], inner: list[str], options: list[Argument]
) -> str:
    """The command that removes the prefixes; a sentence if it would make two keys one, or cannot be used."""
    is_clear = len({without_inner_wrappers(key) for key in keys.values()}) == len(keys)
    # A pickled module has no keys: it becomes a state_dict first.
    has_modules = any(use.name.startswith("torch.nn.modules.") for use in inventory.globals)
    plain = [Argument("plain", True)] if has_modules or inventory.layout == "module" else []
    command = remap_command(inventory, context, [*keys], *plain, *options) if is_clear else ""
    prefix = _quoted([_begin(keys)] if _begin(keys) else inner)
    return command or f"remove {prefix} from the keys in the script that reads it: convert cannot change its keys"


#: The rules, in the order of the codes.
RULES: Final = (wrapper_prefix,)

"""Rules about the keys of state_dicts: K601."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ckptmove.checkpoint.state_dicts import RootKeys, model_tensors, strip_wrappers
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import remap_command
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory


def wrapper_prefix(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """K601: every key of a state_dict starts with the prefix of a wrapper; one finding for each state_dict."""
    roots = RootKeys(inventory)
    names: dict[tuple[str, str], list[str]] = {}
    containers: Counter[str] = Counter()
    for tensor in model_tensors(inventory):
        container, key = roots.split(tensor.name)
        containers[container] += 1
        prefix, _ = strip_wrappers(key)
        if prefix:
            names.setdefault((container, prefix), []).append(tensor.name)
    for (container, prefix), where in names.items():
        if len(where) == containers[container]:
            place = f" of {container}" if container else ""
            message = f"every key{place} starts with '{prefix}' ({amount(len(where), 'tensor')})"
            fix = remap_command(inventory, where, *_plain(inventory), "--strip-prefix") or _by_hand(prefix)
            yield found("K601", message, where, fix)


def _plain(inventory: Inventory) -> tuple[str, ...]:
    """The option that turns pickled modules into state_dicts, if there are any: modules have no keys."""
    has_modules = any(use.name.startswith("torch.nn.modules.") for use in inventory.globals)
    return ("--plain",) if has_modules or inventory.layout == "module" else ()


def _by_hand(prefix: str) -> str:
    return f"remove '{prefix}' from the keys in the script that reads it: convert cannot change its keys"

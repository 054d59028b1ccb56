"""The command that gives the keys of a stored model the prefix of the user's model."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.roles import is_kept_aside
from ckptmove.checkpoint.state_dicts import RootKeys, strip_wrappers
from ckptmove.findings.context import remap_command
from ckptmove.verification.step.stored_state import is_inside

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from ckptmove.model import Inventory

#: The lists of missing and unexpected keys in torch's error, and a key there.
_KEYS: Final = re.compile(r"(?:Missing|Unexpected) key\(s\) in state_dict: (.*)")
_KEY: Final = re.compile(r'"(.*?)"')


def of_message(message: str, inventory: Inventory) -> str:
    """Command for a strict ``load_state_dict`` of the checkpoint that fails only because of a prefix.

    Args:
        message: that of the exception. It lists the keys that do not fit, without shapes.
        inventory: inventory of the checkpoint.

    Returns:
        The command; empty if none helps.
    """
    found = [_KEY.findall(part) for part in _KEYS.findall(message)]
    if len(found) != len(("missing", "unexpected")):
        return ""
    wanted, given = (dict.fromkeys(keys) for keys in found)
    stored = {container: dict.fromkeys(keys) for container, keys in _state_dicts(inventory).items()}
    return next((_command(inventory, stored, one, wanted) for one, keys in stored.items() if keys == given), "")


def of_model(module: nn.Module, part: str | None, inventory: Inventory) -> str:
    """Command for a model that has the keys and shapes of a stored state_dict, but for a prefix.

    Args:
        module: the model.
        part: path of the state_dict that it takes, or of a container of it; None for any.
        inventory: inventory of the checkpoint.

    Returns:
        The command; empty if none helps.
    """
    wanted = {strip_wrappers(key)[1]: tuple(value.shape) for key, value in module.state_dict().items()}
    stored = _state_dicts(inventory)
    places = [container for container in stored if is_inside(container, part) and not is_kept_aside(container)]
    return next(filter(None, (_command(inventory, stored, one, wanted) for one in places)), "")


def _state_dicts(inventory: Inventory) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes by key of each stored state_dict, by its path."""
    roots = RootKeys(inventory)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in inventory.tensors:
        if tensor.role != "optimizer":
            container, key = roots.split(tensor.name)
            found.setdefault(container, {})[key] = tensor.shape
    return found


def _command(
    inventory: Inventory, stored: Mapping[str, Mapping[str, object]], place: str, wanted: Mapping[str, object]
) -> str:
    """Command that gives the keys of one stored state_dict another prefix; empty if they differ in more than that.

    Args:
        inventory: inventory of the checkpoint.
        stored: shapes by key of each state_dict.
        place: path of the one.
        wanted: shapes by key of the model; None for shapes that are unknown on both sides.
    """
    given = stored[place]
    new, old = _prefix(wanted), _prefix(given)
    while new and new[-1:] == old[-1:]:  # `0.` of `body.0.weight` and `0.weight` is no part of the difference
        new, old = new[:-1], old[:-1]
    added, left = ("".join(f"{part}." for part in parts) for parts in (new, old))
    renamed = {added + key[len(left) :]: shape for key, shape in given.items()}
    others = (keys for keys in stored.values() if keys.keys() != given.keys())
    # The command changes every state_dict with the prefix: another model's may be right as it is.
    if added == left or renamed != wanted or any(key.startswith(left) for keys in others for key in keys):
        return ""
    if not left:
        options = ["--add-prefix", added]
    elif not added:
        options = ["--strip-prefix", left]
    else:
        options = ["--rename", f"{left}*={added}*"]
    return remap_command(inventory, [f"{place}.{next(iter(given))}".removeprefix(".")], *options)


def _prefix(keys: Iterable[str]) -> list[str]:
    """The first parts that all keys have in common."""
    columns = zip(*(key.split(".")[:-1] for key in keys), strict=False)
    return [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, columns)]

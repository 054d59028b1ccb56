"""The command that gives the keys of a stored model the prefix of the user's model."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.state_dicts import RootKeys
from ckptmove.text import command_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.model import Inventory

#: The lists of missing and unexpected keys in torch's error, and a key there.
_KEYS: Final = re.compile(r"(?:Missing|Unexpected) key\(s\) in state_dict: (.*)")
_KEY: Final = re.compile(r'"(.*?)"')


def of_message(message: str, checkpoint: str) -> str:
    """Command for a strict ``load_state_dict`` that fails only because of a prefix; empty for any other error."""
    found = [_KEY.findall(part) for part in _KEYS.findall(message)]
    if len(found) != len(("missing", "unexpected")):
        return ""
    wanted, given = found
    return _command(checkpoint, wanted, given)


def of_keys(wanted: Iterable[str], inventory: Inventory) -> str:
    """Command for a model with the keys of a stored state_dict but for a prefix; empty if there is no such state_dict.

    Args:
        wanted: keys of the model.
        inventory: inventory of the checkpoint.
    """
    roots = RootKeys(inventory)
    given: dict[str, list[str]] = {}
    for tensor in inventory.tensors:
        if tensor.role != "optimizer":
            container, key = roots.split(tensor.name)
            given.setdefault(container, []).append(key)
    keys = {*wanted}
    return next(filter(None, (_command(inventory.path, keys, own) for own in given.values())), "")


def _command(checkpoint: str, wanted: Iterable[str], given: Iterable[str]) -> str:
    """Command that turns the given keys into those that are wanted; empty if they differ in more than a prefix."""
    theirs, ours = {*wanted}, {*given}
    new, old = _prefix(theirs), _prefix(ours)
    while new and new[-1:] == old[-1:]:  # `0.` of `body.0.weight` and `0.weight` is no part of the difference
        new, old = new[:-1], old[:-1]
    added, left = ("".join(f"{part}." for part in parts) for parts in (new, old))
    if {key[len(added) :] for key in theirs} != {key[len(left) :] for key in ours} or added == left:
        return ""
    if not left:
        options = ["--add-prefix", added]
    elif not added:
        options = ["--strip-prefix", left]
    else:
        options = ["--rename", f"{left}*={added}*"]
    return command_line(["ckptmove", "convert", checkpoint, *options])


def _prefix(keys: Iterable[str]) -> list[str]:
    """The first parts that all keys have in common."""
    columns = zip(*(key.split(".")[:-1] for key in keys), strict=False)
    return [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, columns)]

"""The command that gives the keys of a stored model the prefix of the user's model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from traceback import walk_tb
from typing import TYPE_CHECKING, Final

from torch import Tensor, nn

from ckptmove.checkpoint.roles import is_kept_aside
from ckptmove.checkpoint.state_dicts import RootKeys, strip_wrappers
from ckptmove.findings.context import Context, remap_command
from ckptmove.proof.step.stored_state import is_inside
from ckptmove.text import Argument
from ckptmove.training.fixes.edits import NO_FIX, Fix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.findings.trials import Source
    from ckptmove.model import Inventory


#: Roles of tensors that are in no state_dict of a module, so that no option changes their keys.
_NO_STATE_DICTS: Final = frozenset({"optimizer", "rng", "scaler", "scheduler"})


def of_error(error: BaseException, source: Source) -> Fix:
    """Command for a strict ``load_state_dict`` of the checkpoint that fails only because of a prefix.

    The keys are those of the live model and of the dict that it was given: messages are shortened.

    Args:
        error: the exception that it has raised.

    Returns:
        The command; `NO_FIX` if none helps.
    """
    loads = [frame.f_locals for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "load_state_dict"]
    module, given = (loads[-1].get(name) for name in ("self", "state_dict")) if loads else (None, None)
    if not isinstance(module, nn.Module) or not isinstance(given, Mapping):
        return NO_FIX
    wanted = {key: tuple(value.shape) for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    stored = _state_dicts(source.checkpoint.inventory)
    places = [container for container, keys in stored.items() if keys.keys() == given.keys()]
    return _first_command(source, stored, places, wanted)


def of_model(module: nn.Module, part: str | None, source: Source) -> Fix:
    """Command for a model that has the keys and shapes of a stored state_dict, but for a prefix.

    Args:
        part: path of the state_dict that it takes, or of a container of it; None for any.

    Returns:
        The command; `NO_FIX` if none helps.
    """
    wanted = {strip_wrappers(key)[1]: tuple(value.shape) for key, value in module.state_dict().items()}
    stored = _state_dicts(source.checkpoint.inventory)
    places = [container for container in stored if is_inside(container, part) and not is_kept_aside(container)]
    return _first_command(source, stored, places, wanted)


def _state_dicts(inventory: Inventory) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes by key of each stored state_dict, by its path."""
    roots = RootKeys(inventory)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in inventory.tensors:
        if tensor.role not in _NO_STATE_DICTS:
            container, key = roots.split(tensor.name)
            found.setdefault(container, {})[key] = tensor.shape
    return found


def _first_command(
    source: Source,
    stored: Mapping[str, Mapping[str, object]],
    places: Iterable[str],
    wanted: Mapping[str, object],
) -> Fix:
    commands = (_command(source, stored, place, wanted) for place in places)
    return next((command for command in commands if command.text), NO_FIX)


def _command(
    source: Source, stored: Mapping[str, Mapping[str, object]], place: str, wanted: Mapping[str, object]
) -> Fix:
    """Command that gives the keys of one stored state_dict another prefix; `NO_FIX` if they differ in more than that.

    Args:
        stored: shapes by key of each state_dict.
        wanted: shapes by key of the model.
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
        return NO_FIX
    option = Argument("rename", f"{left}*={added}*")
    if not left:
        option = Argument("add_prefix", added)
    elif not added:
        option = Argument("strip_prefix", left)
    where = [f"{place}.{next(iter(given))}".removeprefix(".")]
    command = remap_command(source.checkpoint.inventory, Context(source=source), where, option)
    return Fix(command, prefix="" if added else left) if command else NO_FIX


def _prefix(keys: Iterable[str]) -> list[str]:
    """The first parts that all keys have in common."""
    columns = zip(*(key.split(".")[:-1] for key in keys), strict=False)
    return [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, columns)]

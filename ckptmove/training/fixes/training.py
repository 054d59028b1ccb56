"""Fixes for errors of torch that are not about a device: of a gradient scaler, a scheduler, another optimizer class."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

import torch

from ckptmove.training.code.source import callee, earlier, nodes_of
from ckptmove.training.fixes.edits import NO_FIX, Fix, replaced, text_of

if TYPE_CHECKING:
    from types import TracebackType

    from ckptmove.model import Inventory
    from ckptmove.training.code.source import Running
    from ckptmove.training.code.watch import Watch

#: torch's error for a loss that was not scaled (torch/amp/grad_scaler.py ``_check_scale_growth_tracker``).
_NOT_SCALED: Final = re.compile(r"Attempted \w+ but _scale is None")
_IN_HALF: Final = "Attempting to unscale FP16 gradients"
_NO_INITIAL_LR: Final = "param 'initial_lr' is not specified"
#: Remedies in words, by a part of torch's message.
_WORDS: Final = {
    "unscale_() has already been called": "call scaler.unscale_(optimizer) once for each scaler.update(), which "
    "follows scaler.step(optimizer)",
    "unscale_() is being called after step()": "call scaler.unscale_(optimizer) before scaler.step(optimizer)",
    "step() has already been called since the last update()": "call scaler.update() after scaler.step(optimizer)",
    "No inf checks were recorded for this optimizer": "no parameter of this optimizer has a gradient: build it from "
    "the parameters of the model that is trained, and call scaler.scale(loss).backward() before scaler.step(optimizer)",
    "No inf checks were recorded prior to update": "call scaler.step(optimizer) before scaler.update()",
}
#: How a line names half precision.
_HALF: Final = re.compile(r"\bhalf\b|\bfloat16\b")


def of_training(message: str, running: Running | None, watch: Watch) -> Fix:
    """Fix for an error of a gradient scaler; `NO_FIX` for another one.

    Args:
        running: innermost frame of the user's code; None for none.
    """
    if _NOT_SCALED.search(message):
        return _scaled(running)
    if _IN_HALF in message:
        halved = next((line for line in watch.moved if _HALF.search(line.source)), None)
        where = f": remove the cast at {halved.quoted}" if halved is not None else ""
        return Fix(f"keep the trained parameters in float32, which torch.autocast casts in the forward pass{where}")
    return next((Fix(words) for part, words in _WORDS.items() if part in message), NO_FIX)


def _scaled(running: Running | None) -> Fix:
    """The last ``loss.backward()`` before a call of a scaler, of the scaled loss."""
    call = None if running is None else running.spot.node
    if running is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return Fix("call scaler.scale(loss).backward() in place of loss.backward()")
    path, statement, scaler = running.spot.line.path, running.spot.statement, ast.unparse(call.func.value)
    before = [] if statement is None else [part for one in earlier(statement) for part in ast.walk(one)]
    calls = [one for one in (*nodes_of(running.spot), *before) if isinstance(one, ast.Call) and not one.args]
    # Not `torch.autograd.backward(loss)`, which has an argument.
    losses = [one.func.value for one in calls if callee(one) == "backward" and isinstance(one.func, ast.Attribute)]
    if losses:
        return replaced(path, (losses[0], f"{scaler}.scale({text_of(path, losses[0])})"))
    return Fix(f"call {scaler}.scale(loss).backward() in place of loss.backward()")


def of_scheduler(message: str, inventory: Inventory) -> str:
    """Remedy for a scheduler that finds no ``initial_lr``; empty for another error."""
    if _NO_INITIAL_LR not in message:
        return ""
    groups = [dict(group.options) for one in inventory.optimizers for group in one.groups]
    if "scheduler" in inventory.contents:
        return (
            "build the scheduler without last_epoch, before optimizer.load_state_dict, and restore it with "
            "scheduler.load_state_dict"
        )
    if groups and all("initial_lr" in options for options in groups):
        return "call optimizer.load_state_dict before the scheduler is built: the stored groups have initial_lr"
    return (
        "no group in the file has initial_lr: give each group of the optimizer its first learning rate as initial_lr, "
        "before the scheduler is built"
    )


def of_other_class(error: BaseException, inventory: Inventory) -> tuple[str, str] | None:
    """Class of the stored optimizer, and of the one that a missing key ended; None if they may be the same."""
    if not isinstance(error, KeyError):
        return None
    optimizer = _optimizer_in(error.__traceback__)
    # Without a name for a class of another library.
    written = [(one.algorithm,) if one.algorithm is not None else one.candidates for one in inventory.optimizers]
    if optimizer is None or not written:
        return None
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if any(not names or names & kinds for names in map(set, written)):
        return None
    return " or ".join(dict.fromkeys(name for names in written for name in names)), type(optimizer).__name__


def _optimizer_in(trace: TracebackType | None) -> torch.optim.Optimizer | None:
    """The optimizer whose method raised an exception; None for none."""
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        found = owner if isinstance(owner, torch.optim.Optimizer) else found
        trace = trace.tb_next
    return found

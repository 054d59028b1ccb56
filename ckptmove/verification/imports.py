"""The class that a user has named to step an optimizer with, imported because they did.

Never imports what a checkpoint names, and never outside of the child process.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import torch

from ckptmove.errors import UsageError


def optimizer_class(name: str) -> type[torch.optim.Optimizer] | None:
    """The class of ``torch.optim`` by its name, or any other as ``pkg.mod:CLASS``.

    A module may lie in the folder at hand, after everything that is installed.

    Args:
        name: as :func:`ckptmove.verification.step.optimizers.check_override` takes it.

    Returns:
        The class; None where this torch has none of that name.

    Raises:
        UsageError: there is no such module or class, or it is no optimizer.
        Exception: whatever the module raises while it is imported.
    """
    module_name, colon, class_name = name.rpartition(":")
    if not colon:
        known: type[torch.optim.Optimizer] | None = getattr(torch.optim, name, None)
        return known
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found: object = import_module(module_name)
    except ModuleNotFoundError as error:
        where = "install it beside torch, or run ckptmove in the folder that it lies in"
        raise UsageError(f"--optimizer {name}: there is no module {error.name}; {where}") from error
    for part in class_name.split("."):
        found = getattr(found, part, None)
    if found is None:
        others = [key for key, value in vars(sys.modules[module_name]).items() if _is_optimizer(value)]
        hint = f"its optimizers are {', '.join(sorted(others))}" if others else "it has no optimizer"
        raise UsageError(f"--optimizer {name}: {module_name} has no {class_name}; {hint}")
    if not isinstance(found, type) or not _is_optimizer(found):
        raise UsageError(f"--optimizer {name}: that is no torch.optim.Optimizer; name a class that is derived from it")
    return found


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer

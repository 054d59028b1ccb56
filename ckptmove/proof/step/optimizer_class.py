"""Import the optimizer class of ``--optimizer``.

It runs only in the child process, and never imports a name that comes from a checkpoint.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import torch

from ckptmove.errors import UsageError
from ckptmove.text import Argument


def optimizer_class(name: str) -> type[torch.optim.Optimizer] | None:
    """Import an optimizer class: a name of ``torch.optim``, or ``pkg.mod:CLASS``.

    The current folder is searched for the module after all installed packages.

    Args:
        name: a name that :func:`ckptmove.proof.step.optimizers.check_override` accepts.

    Returns:
        The class; None if this torch has no class of that name.
    """
    module_name, colon, class_name = name.rpartition(":")
    if not colon:
        known: type[torch.optim.Optimizer] | None = getattr(torch.optim, name, None)
        return known
    own = Argument("optimizer", name)
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found: object = import_module(module_name)
    except ModuleNotFoundError as error:
        where = "install it next to torch, or run ckptmove in the folder that contains it"
        raise UsageError(f"{own}: no module {error.name}; {where}") from error
    for part in class_name.split("."):
        found = getattr(found, part, None)
    if found is None:
        others = [key for key, value in vars(sys.modules[module_name]).items() if _is_optimizer(value)]
        hint = f"its optimizers are {', '.join(sorted(others))}" if others else "it has no optimizer"
        raise UsageError(f"{own}: {module_name} has no {class_name}; {hint}")
    if not isinstance(found, type) or not _is_optimizer(found):
        raise UsageError(f"{own}: not a subclass of torch.optim.Optimizer")
    return found


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer

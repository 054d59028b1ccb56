"""Healthy checkpoints of situations that look like a fault: what users saved, and what resumes.

Each function returns the tree to save. `catalogue.py` verifies it for the CPU and for each device that is simulated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

if TYPE_CHECKING:
    from collections.abc import Callable

    from trained import Tree


def _trained(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    """The optimizer of a model after three steps."""
    torch.manual_seed(0)
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **options)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float32).to(parameter.dtype) * 0.01
        optimizer.step()
    return optimizer


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer, **others: Any) -> Tree:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, **others}


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


class _Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(()))


class _Policy(nn.Module):
    """A model with a part named ``module``, as each policy of tensordict has."""

    def __init__(self) -> None:
        super().__init__()
        self.module = _layers()


def _without_state() -> Tree:
    model = _layers()
    return _saved(model, _trained(model, kind=torch.optim.SGD, lr=0.1))


def _zero_dimensional() -> Tree:
    model = _Temperature()
    return _saved(model, _trained(model))


def _logit_scale() -> Tree:
    model = nn.ModuleDict({"head": _layers(), "scale": _Temperature()})
    return _saved(model, _trained(model))


def _named_module() -> Tree:
    model = _Policy()
    return _saved(model, _trained(model))


def _spectral() -> Tree:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 3))
    return _saved(model, _trained(model))


def _orthogonal() -> Tree:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(5, 5)), nn.Linear(5, 3))
    return _saved(model, _trained(model))


def _batch_norm() -> Tree:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    return _saved(model, _trained(model))


def _averaged() -> Tree:
    """Stochastic weight averaging, with its scheduler."""
    model = _layers()
    optimizer = _trained(model, kind=torch.optim.SGD, lr=0.1, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    return _saved(model, optimizer, swa_model=average.state_dict(), swa_scheduler=scheduler.state_dict())


def _weight_averaging() -> Tree:
    """Lightning's callback: the average under the usual key, the trained weights under another."""
    model = _layers()
    optimizer = _trained(model)
    average = {key: value + 0.01 for key, value in model.state_dict().items()}
    return {
        "pytorch-lightning_version": "2.6.0", "epoch": 3, "global_step": 3, "loops": {}, "callbacks": {},
        "state_dict": average, "current_model_state": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [],
    }  # fmt: skip


def _scaled() -> Tree:
    model = _layers()
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    return _saved(model, _trained(model), scaler=scaler.state_dict(), rng=torch.get_rng_state())


def _bfloat16() -> Tree:
    model = _layers().bfloat16()
    return _saved(model, _trained(model))


#: The tree of each situation.
SITUATIONS: dict[str, Callable[[], Tree]] = {
    "a parameter without dimensions alone": _zero_dimensional,
    "a parameter without dimensions beside others": _logit_scale,
    "a part of the model named module, or the wrapper of DataParallel": _named_module,
    "spectral_norm": _spectral,
    "orthogonal": _orthogonal,
    "buffers of a batch norm": _batch_norm,
    "weight averaging with its scheduler": _averaged,
    "the average of Lightning under the usual key": _weight_averaging,
    "a scaler and the state of a generator": _scaled,
    "bfloat16 parameters with moments of their dtype": _bfloat16,
    "SGD without momentum, which has no state": _without_state,
}

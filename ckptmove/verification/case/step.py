"""One step of the user's training: a batch to the device, the loss of it, backward, and the optimizer's step.

Never moves more than one batch, and nothing but that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch.utils.data import DataLoader, Dataset

from ckptmove.torch_facts.devices import supports_capturable
from ckptmove.verification.case.parts import optimizers_of
from ckptmove.verification.case.tensor_names import parts
from ckptmove.verification.simulated.targets import BACKEND, name_of

if TYPE_CHECKING:
    from ckptmove.case import Case


class UnusableCase(Exception):
    """What a case holds makes no step; the message says what of it, and what it should be."""


class WholeDataset(UnusableCase):
    """The batch is a dataset."""


def one_batch(batch: Any) -> Any:
    """The batch itself, or the first that a loader gives.

    Raises:
        WholeDataset: it is one.
    """
    if isinstance(batch, Dataset) and not isinstance(batch, (list, tuple)):
        raise WholeDataset(f"batch is a whole dataset ({type(batch).__name__}), which would be moved at once")
    return next(iter(batch)) if isinstance(batch, (DataLoader, Iterator)) else batch


def moved(value: Any, device: torch.device) -> Any:
    """A batch on a device: tensors in tuples, lists and dicts, and whatever moves itself, as a tokenizer's output."""
    if callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(one, device) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [moved(one, device) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class Taken(NamedTuple):
    """What a step came to.

    Attributes:
        losses: by the way to each in what ``step`` returns; empty for one that is returned by itself.
        stepped: keys of the optimizers that made a step.
    """

    losses: dict[str, torch.Tensor | float]
    stepped: frozenset[str]


def take_step(case: Case, batch: Any, device: torch.device) -> Taken:
    """Make a step as a loop does.

    Raises:
        UnusableCase: what the case holds makes no step.
    """
    if not isinstance(case.optimizer, torch.optim.Optimizer):
        return _whole_step(case, batch)
    optimizer = case.optimizer
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(case, batch, device)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it so
        losses.append(loss.detach())
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)  # type: ignore[no-untyped-call]  # torch leaves it so
    else:
        closure()
        _refuse_capturable(optimizer)
        optimizer.step()
    return Taken({"": losses[0]}, frozenset({""}))


def _whole_step(case: Case, batch: Any) -> Taken:
    """Let the user's step make all of a training step, and see which optimizers it steps."""
    stepped: set[str] = set()
    for part in optimizers_of(case):
        part.optimizer.register_step_pre_hook(lambda optimizer, _args, _kwargs: _refuse_capturable(optimizer))
        part.optimizer.register_step_post_hook(lambda *_, key=part.key: stepped.add(key))
    result = None if case.step is None else case.step(batch)
    if not stepped:
        raise UnusableCase("step makes no optimizer's step: with a dict of optimizers it is the whole body of the loop")
    return Taken({way: one for way, one in parts(result) if _is_loss(one)}, frozenset(stepped))


def _is_loss(value: object) -> TypeGuard[torch.Tensor | float]:
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
    return is_tensor or isinstance(value, float)


def loss_of(case: Case, batch: Any, device: torch.device) -> torch.Tensor:
    """The loss of a batch, by the user's own step or by the meaning that a batch has without one.

    Raises:
        UnusableCase: there is no loss to be had from what the case holds.
    """
    result = case.step(batch) if case.step is not None else _plain_loss(case, moved(batch, device))
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, torch.Tensor):
        result = getattr(result, "loss", None)
    who = "step" if case.step is not None else "criterion" if case.criterion is not None else "the model"
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        raise UnusableCase(f"{who} returns no loss: a tensor of one value")
    if not result.requires_grad:
        raise UnusableCase(f"{who} returns a loss without a gradient: it is to return it before backward, not detached")
    return result


def _refuse_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Raise torch's error where `capturable` is set for a device without: under its own name a simulated one has it.

    From torch/optim/adam.py ``_single_tensor_adam``, and the others that know it.
    """
    names = {kind.__module__ for kind in type(optimizer).__mro__} - {torch.optim.Optimizer.__module__}
    groups = [group for group in optimizer.param_groups if group.get("capturable")]
    devices = {one.device for group in groups for one in group["params"] if one.grad is not None}
    refused = [one for one in devices if one.type == BACKEND and not supports_capturable(name_of(one))]
    if refused and any(name.startswith("torch.optim.") for name in names):
        raise AssertionError(
            f"If capturable=True, params and state_steps must be on supported devices, and not on {name_of(refused[0])}"
        )


def _plain_loss(case: Case, batch: Any) -> Any:
    model: Any = case.model
    if case.criterion is None:
        return _called(model, batch)
    if isinstance(batch, Mapping) and "labels" in batch:
        rest = {key: value for key, value in batch.items() if key != "labels"}
        return case.criterion(model(**rest), batch["labels"])
    if not isinstance(batch, (tuple, list)) or len(batch) != len(("inputs", "targets")):
        raise UnusableCase("batch is not a pair of inputs and targets: give Case a step(batch) that returns the loss")
    return case.criterion(_called(model, batch[0]), batch[1])


def _called(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)

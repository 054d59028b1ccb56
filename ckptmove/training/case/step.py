"""One training step of a case: batch to the device, loss, backward, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
from torch.utils.data import DataLoader, Dataset

from ckptmove.training.case.options import options_at_step
from ckptmove.training.case.parts import optimizers_of
from ckptmove.training.code.tensor_names import parts

if TYPE_CHECKING:
    from ckptmove.case import Case
    from ckptmove.proof.place import StepDevice
    from ckptmove.training.case.options import AtStep
    from ckptmove.training.case.parts import OptimizerPart


#: Hint for a ``step`` that calls ``optimizer.step()`` or ``backward()`` itself.
_WHOLE: Final = (
    ": with one optimizer, backward() and optimizer.step() are called after it; "
    "if step is the whole body of the loop, give a dict of optimizers"
)


class UnusableCase(Exception):
    """A case without a usable step; the message names the field and the expected value."""


class WholeDataset(UnusableCase):
    """The batch is a dataset."""


def one_batch(batch: Any) -> Any:
    """The batch itself, or the first batch of a loader."""
    if isinstance(batch, Dataset) and not isinstance(batch, (list, tuple)):
        raise WholeDataset(f"batch is a whole dataset ({type(batch).__name__}), and all of it would be moved at once")
    return next(iter(batch)) if isinstance(batch, (DataLoader, Iterator)) else batch


def moved(value: Any, device: torch.device) -> Any:
    """A batch on a device: tensors in tuples, lists and dicts, and objects with ``to``, as a tokenizer's output."""
    if callable(getattr(type(value), "to", None)):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(one, device) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [moved(one, device) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class OwnSteps:
    """Record of the steps of one optimizer, without other changes of its parameters in the loop, as by a clamp.

    Attributes:
        count: number of steps.
        moved: identities of the parameters that a step changed.
        reached: identities of the parameters that a step changed or that had a gradient in one.
        options: options of the groups at the first step; empty before it.
        part: the optimizer.
    """

    def __init__(self, part: OptimizerPart, place: StepDevice) -> None:
        self.count = 0
        self.moved: set[int] = set()
        self.reached: set[int] = set()
        self.options: list[AtStep] = []
        self.part = part
        self._place = place
        self._before: list[dict[int, torch.Tensor]] = []  # a step of a subclass may call that of its parent

    def begin(self) -> None:
        """Copy the parameters before a step."""
        self.options = self.options or options_at_step(self.part.optimizer, self._place)
        self._note_gradients()
        self._before.append({id(one): self._place.to_cpu(one).clone() for one in self.part.parameters})

    def end(self) -> None:
        """Compare the parameters with the copies."""
        before = self._before.pop()
        values = {id(one): self._place.to_cpu(one) for one in self.part.parameters}
        self.moved |= {key for key, value in values.items() if key in before and not torch.equal(before[key], value)}
        self.reached |= self.moved
        self._note_gradients()  # a closure makes them in the step
        self.count += 1

    @property
    def missed(self) -> list[torch.Tensor]:
        """Parameters that no step reached, except those that were frozen in the saved run: they have no state."""
        left = (one for one in self.part.parameters if id(one) not in self.reached)
        return [one for one in left if one.requires_grad or self.part.optimizer.state.get(one)]

    @property
    def is_still(self) -> bool:
        """Whether no step moved a parameter, although a learning rate is not 0 (or the class has its own)."""
        rates = [group.get("lr") for group in self.part.optimizer.param_groups]
        return not self.moved and any(1.0 if rate is None else float(rate) for rate in rates)

    def _note_gradients(self) -> None:
        self.reached |= {id(one) for one in self.part.parameters if one.grad is not None}


def train_step(
    case: Case, batch: Any, place: StepDevice, own: Mapping[str, OwnSteps]
) -> dict[str, torch.Tensor | float]:
    """Make one training step, with a record of the steps of each optimizer by its key.

    Returns the losses by their path in the value that ``step`` returns; the path of a single loss is empty.
    """
    if not isinstance(case.optimizer, torch.optim.Optimizer):
        return _whole_step(case, batch, own)
    optimizer = case.optimizer
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with ExitStack() as stack:
            with suppress(AttributeError):  # a wrapper around an optimizer may not call Optimizer.__init__
                stack.callback(optimizer.register_step_pre_hook(_refuse_own_step).remove)
            loss = loss_of(case, batch, place.device)
        loss.backward()
        losses.append(loss.detach())
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        own[""].begin()
        optimizer.step(closure)
    else:
        closure()
        own[""].begin()
        optimizer.step()
    own[""].end()
    return {"": losses[0]}


def _refuse_own_step(*_: object) -> None:
    """Hook that raises UnusableCase: the user's ``step`` called ``optimizer.step()``, and a second one would follow."""
    raise UnusableCase(f"step calls optimizer.step() itself{_WHOLE}")


def _whole_step(case: Case, batch: Any, own: Mapping[str, OwnSteps]) -> dict[str, torch.Tensor | float]:
    """Run a user's step that is a whole training step, and record the steps of its optimizers."""
    for part in optimizers_of(case):
        part.optimizer.register_step_pre_hook(lambda *_, steps=own[part.key]: steps.begin())
        part.optimizer.register_step_post_hook(lambda *_, steps=own[part.key]: steps.end())
    result = None if case.step is None else case.step(batch)
    if not any(steps.count for steps in own.values()):
        raise UnusableCase(
            "step never calls optimizer.step(): with a dict of optimizers, it is the whole body of the loop"
        )
    return {way: one for way, one in parts(result, mappings=(Mapping,)) if _is_loss(one)}


def _is_loss(value: object) -> TypeGuard[torch.Tensor | float]:
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
    return is_tensor or isinstance(value, float)


def loss_of(case: Case, batch: Any, device: torch.device) -> torch.Tensor:
    """The loss of a batch, from the user's ``step`` if the case has one."""
    result = case.step(batch) if case.step is not None else _plain_loss(case, moved(batch, device))
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, torch.Tensor):
        result = getattr(result, "loss", None)
    who = "step" if case.step is not None else "criterion" if case.criterion is not None else "the model"
    hint = _WHOLE * (case.step is not None)
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        raise UnusableCase(f"{who} returns no loss (a tensor with one value){hint}")
    if not result.requires_grad:
        raise UnusableCase(f"{who} returns a loss without a gradient, detached or after backward(){hint}")
    return result


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

"""Sizes of the parameters, gradients, moments and activations of a case on one rank."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optimizers
from torch.utils import _pytree as pytree

from ckptmove.errors import CaseUnusable, UsageError
from ckptmove.proof.step.objective import needs_closure
from ckptmove.text import Argument
from ckptmove.training.case.check import Attempt
from ckptmove.training.case.parts import models_of, optimizers_of
from ckptmove.training.case.step import UnusableCase, loss_of, one_batch
from ckptmove.training.fit.fake_memory import LiveMemory
from ckptmove.training.mesh.stored import local

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.case import Case


class Sizes(NamedTuple):
    """Bytes on one rank.

    Attributes:
        parameters: its shards of the parameters.
        gradients: those of the gradients.
        optimizer: those of the optimizer state, without step counts.
        buffers: the buffers.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(self)


class Training:
    """The training of a case on one rank."""

    def __init__(self, case: Case, device: torch.device) -> None:
        """Take a case whose tensors have no values."""
        self._case, self._device = case, device
        modules = [*(part.module for part in models_of(case)), case.criterion]
        own = [one for one in modules if isinstance(one, nn.Module)]
        self._stepped = [one for part in optimizers_of(case) for one in part.parameters]
        found = (*(one for module in own for one in module.parameters()), *self._stepped)
        # FSDP replaces the attributes of its modules while parameters are gathered: these are the shards.
        self._parameters = {id(one): one for one in found}
        models = models_of(case)
        self._names = {id(one): name for part in models for name, one in part.module.named_parameters()}
        self._buffers = {id(one): one for module in own for one in module.buffers()}
        self._gradients: dict[int, int] = {}

    @property
    def elements(self) -> int:
        """Number of elements of the parameters of the models, whole."""
        models = (one for part in models_of(self._case) for one in part.module.parameters())
        return sum(one.numel() for one in {id(one): one for one in models}.values())

    @property
    def buffer_elements(self) -> int:
        """Number of elements of the buffers."""
        return sum(one.numel() for one in self._buffers.values())

    @property
    def largest_parameter(self) -> int:
        """Bytes of the largest parameter, whole."""
        return max(map(_whole_bytes, self._parameters.values()), default=0)

    @property
    def largest_name(self) -> str:
        """Name of the largest parameter in the models."""
        return max(self._names.items(), key=lambda pair: _whole_bytes(self._parameters[pair[0]]), default=(0, ""))[1]

    @property
    def why_no_batch(self) -> str:
        """Why the batch cannot run, if the case lacks one; else empty."""
        return "the case has no batch" if self._case.batch is None and self._case.step is None else ""

    @property
    def is_sharded(self) -> bool:
        """Whether a parameter is a DTensor."""
        return any(isinstance(one, DTensor) for one in self._parameters.values())

    def run_batch(self) -> int:
        """Run the forward and the backward of the batch, or the step of a case with several optimizers.

        Returns:
            Bytes at the peak in addition to parameters, gradients and buffers: activations, gathered parameters, and
            other temporary tensors. An estimate.

        Raises:
            CaseUnusable: if a field of the case is not usable.
            BaseException: any exception of the user's code, also of an operation that needs values.
        """
        memory = LiveMemory()
        memory.add([*self._parameters.values(), *self._buffers.values()])
        try:
            with unset_fake_temporarily():  # a loader shuffles by values
                batch = one_batch(self._case.batch)
            with self._noted(memory), memory.counting():
                self._run(batch)
        except UnusableCase as error:
            raise CaseUnusable(str(error)) from None
        for part in optimizers_of(self._case):
            self._note(part.optimizer)
        sizes = self.sizes()
        return max(0, memory.peak - sizes.parameters - sizes.gradients - sizes.buffers)

    def _run(self, batch: Any) -> None:
        case = self._case
        if isinstance(case.optimizer, torch.optim.Optimizer):
            loss_of(case, batch, self._device).backward()
        else:
            step: Any = case.step  # a case with several optimizers has one
            step(batch)

    def make_gradients(self) -> None:
        """Make the gradients that a backward would make if it reached all parameters."""
        for one in self._stepped:
            if one.requires_grad and one.grad is None:
                one.grad = torch.empty_like(one)

    def step(self) -> None:
        """Step each optimizer, so that it makes its state.

        Raises:
            UsageError: if an optimizer needs a closure.
            BaseException: any exception of an optimizer that has not made its state, also because it needs values.
        """
        for part in optimizers_of(self._case):
            optimizer = part.optimizer
            if needs_closure(optimizer):
                name = type(optimizer).__name__
                raise UsageError(f"{Argument('fit')} cannot step {name}: it evaluates its own gradients")
            self._note(optimizer)
            for group in optimizer.param_groups:
                group |= {name: False for name in ("foreach", "fused") if group.get(name)}  # slow for many DTensors
            attempt = Attempt()
            with attempt:
                optimizer.step()
            # The optimizers of torch make all state before they compute.
            if attempt.error is not None and not all(
                optimizer.state.get(one) for one in part.parameters if one.grad is not None
            ):
                raise attempt.error

    @contextmanager
    def _noted(self, memory: LiveMemory) -> Iterator[None]:
        """Note the gradients of each optimizer that steps in the context, and leave out its state."""

        def begin(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self._note(optimizer)
            memory.is_counting = False

        def end(*_: object) -> None:
            memory.is_counting = True

        module: Any = optimizers
        hooks = [module.register_optimizer_step_pre_hook(begin), module.register_optimizer_step_post_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the bytes of an optimizer's gradients."""
        for group in optimizer.param_groups:
            self._gradients |= {id(one): nbytes([one.grad]) for one in group["params"] if one.grad is not None}

    def sizes(self) -> Sizes:
        """The sizes at this point."""
        states = [state for part in optimizers_of(self._case) for state in part.optimizer.state.values()]
        found = {id(one): one for one in pytree.tree_leaves(states) if isinstance(one, torch.Tensor) and one.dim()}
        return Sizes(
            parameters=nbytes(self._parameters.values()),
            gradients=sum(self._gradients.values()),
            optimizer=nbytes(found.values()),
            buffers=nbytes(self._buffers.values()),
        )


def _whole_bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors on this rank."""
    return sum(one.numel() * one.element_size() for one in map(local, tensors))

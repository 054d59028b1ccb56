"""An error in a backward on a simulated device is raised at its end, with the operation."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ckptmove.simulation.backward import is_running
from ckptmove.simulation.errors import CrossDeviceError


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.ones(2)


def by_a_hook(parameter, here):
    parameter.register_hook(lambda grad: grad * here)
    return (parameter * parameter).sum()


def by_a_hook_that_accumulates(parameter, here):
    parameter.register_post_accumulate_grad_hook(lambda one: one.grad.add_(here))
    return (parameter * parameter).sum()


def by_a_hook_of_a_module(parameter, here):
    module = torch.nn.Linear(2, 2).to(parameter.device)
    module.register_full_backward_hook(lambda one, given, made: (given[0] * here,))
    return module(parameter[None]).sum()


def by_a_function(parameter, here):
    return Masked.apply(parameter).sum()


def by_what_was_saved(parameter, here):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.cpu(), lambda saved: saved):
        return (parameter * parameter).exp().sum()


def by_a_backward_inside_of_it(parameter, here):
    runs = []

    def layer(values):
        runs.append(values)
        return values * (here if len(runs) > 1 else 2)

    return checkpoint(layer, parameter, use_reentrant=True).sum()


@pytest.mark.parametrize(
    "loss_of",
    [
        by_a_hook,
        by_a_hook_that_accumulates,
        by_a_hook_of_a_module,
        by_a_function,
        by_what_was_saved,
        by_a_backward_inside_of_it,
    ],
)
def test_operands_of_two_devices_are_refused_in_backward_as_in_forward(cuda, loss_of):
    with cuda:
        parameter = torch.nn.Parameter(torch.ones(2, device=cuda.device))
        loss = loss_of(parameter, torch.ones(2))
        with pytest.raises(CrossDeviceError, match="cuda:0 and cpu!") as caught:
            loss.backward()
        assert all(stray.device.type == "cpu" for stray in caught.value.strays)
        assert not is_running()
        torch.nn.Parameter(torch.ones(2, device=cuda.device)).sum().backward()  # nothing is left of it


def test_what_an_operation_itself_raises_in_backward_is_raised_too(cuda):
    with cuda:
        parameter = torch.nn.Parameter(torch.ones(2, device=cuda.device))
        loss = (parameter * parameter).sum()
        parameter.data = torch.ones(3, device=cuda.device)
        with pytest.raises(RuntimeError, match="size of tensor"):
            loss.backward()


def test_the_node_of_a_refusal_and_the_lines_that_made_it(cuda):
    with cuda, torch.autograd.set_detect_anomaly(mode=True, check_nan=False):
        parameter = torch.nn.Parameter(torch.ones(2, device=cuda.device))
        loss = by_what_was_saved(parameter, None)
        with pytest.raises(CrossDeviceError) as caught:
            torch.autograd.grad(loss, [parameter])
    assert caught.value.node == "ExpBackward0"
    assert caught.value.made_by[-1][0] == __file__
    assert "exp()" in linecache.getline(*caught.value.made_by[-1])


def test_torch_is_as_it_was_after_the_device(cuda):
    engine = torch.autograd._engine_run_backward
    with cuda:
        assert torch.autograd._engine_run_backward is not engine
    assert torch.autograd._engine_run_backward is engine


def test_a_first_gradient_that_is_elsewhere_is_refused(cuda):
    with cuda:
        parameter = torch.nn.Parameter(torch.ones(3, device=cuda.device))
        first = torch.ones(3)
        for begin in (
            lambda: (parameter * 2).backward(first),
            lambda: torch.autograd.grad([parameter.sum(), parameter * 2], [parameter], [None, first]),
        ):
            with pytest.raises(
                CrossDeviceError, match=r"invalid gradient at index . - expected device cuda:0 but got cpu"
            ):
                begin()
        assert parameter.grad is None
        with pytest.raises(CrossDeviceError) as caught:
            (parameter * 2).backward(first)
        assert caught.value.strays == (first,)
        (parameter * 2).sum().backward(torch.tensor(3.0))
        edge = torch.autograd.graph.get_gradient_edge(parameter * 2)
        torch.autograd.backward(edge, first.to(cuda.device))
        assert parameter.grad.tolist() == [8.0] * 3

"""Tensors that are moved in place: `data`, and `nn.Module.to` of parameters with other references."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ckptmove.simulation import targets  # it imports torch


def test_what_is_written_to_data_is_no_new_version(cuda):
    with cuda:
        model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)).to(cuda.device)
        out, _ = model(torch.ones(1, 2, device=cuda.device))
        for parameter in model.parameters():
            parameter.data.clamp_(-1, 1)
        out.sum().backward()
        assert all(one.grad is not None for one in model.parameters())
        model[0].weight.data.zero_()
        assert model[0].weight.tolist() == [[0.0, 0.0]] * 2
        model[0].weight.data.t_().resize_(4)
        assert model[0].weight.shape == (2, 2)
        out = model[0](torch.ones(1, 2, device=cuda.device).requires_grad_())
        with torch.no_grad():
            model[0].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_data_is_replaced_by_what_has_another_shape_dtype_or_device(cuda):
    other = targets.device_for("cuda:1")
    with cuda:
        parameter = nn.Parameter(cuda.to_device(torch.ones(2)))
        for value in map(cuda.to_device, (torch.ones(4), torch.ones(4).half())):
            parameter.data = value
            assert (parameter.shape, parameter.dtype) == (value.shape, value.dtype)
            value.zero_()
            assert parameter.tolist() == [0.0] * 4
        parameter.data = type(parameter)(torch.ones(2), other)
        assert parameter.device == targets.shown(other)
        parameter.data = torch.ones(3)
        assert (type(parameter), parameter.device.type, parameter.requires_grad) == (nn.Parameter, "cpu", True)
        made = cuda.to_device(torch.ones(2)).requires_grad_() * 2
        with pytest.raises(RuntimeError, match=r"operation's result .* cpu"):
            made.data = torch.ones(2)


def test_a_gradient_goes_with_its_parameter(cuda):
    with cuda:
        parameter = nn.Parameter(cuda.to_device(torch.ones(2)))
        (parameter * parameter).sum().backward()
        held = parameter.grad
        parameter.data = parameter.data.cpu()
        assert parameter.grad is held
        assert (held.device.type, held.tolist()) == ("cpu", [2.0, 2.0])


def test_a_parameter_that_is_held_elsewhere_is_moved_with_its_model(cuda):
    model = nn.Linear(2, 2)
    model.weight.mark = "mine"
    seen, before = weakref.ref(model.weight), weakref.ref(model.bias)
    kept = model(torch.ones(1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cuda:
        for device in (cuda.device, "cpu", cuda.device):
            model.to(device)
            assert (seen(), before()) == (model.weight, model.bias)
            assert isinstance(model.weight, nn.Parameter)
        assert model.weight.mark == "mine"
        weights = model.weight.tolist()
        model(torch.ones(1, 2, device=cuda.device)).sum().backward()
        optimizer.step()
        assert model.weight.tolist() != weights
    assert kept.shape == (1, 2)
    del kept


def test_what_torch_does_without_a_device_it_does_again_after_one(cuda):
    names = (torch.utils.swap_tensors, torch._has_compatible_shallow_copy_type)
    with cuda:
        assert torch._has_compatible_shallow_copy_type(torch.ones(1), torch.ones(2))
        assert not torch._has_compatible_shallow_copy_type(torch.ones(1, device="meta"), torch.ones(2))
    assert (torch.utils.swap_tensors, torch._has_compatible_shallow_copy_type) == names

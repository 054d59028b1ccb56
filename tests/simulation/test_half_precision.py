"""Operations without a CPU kernel for float16 or bfloat16; the oracle is float32, rounded."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import operators  # of the benchmarks
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from ckptmove.simulation import half_precision  # it imports torch
from ckptmove.simulation.errors import unsupported_operation  # it imports torch

#: Operators for which only the CPU has no kernel.
LACKING = {
    "_upsample_bilinear2d_aa", "nn.functional.avg_pool3d", "nn.functional.multi_margin_loss",
    "nn.functional.multilabel_margin_loss", "nn.functional.rrelu",
}  # fmt: skip


def as_dtype(values, before, after):
    """Arguments with another dtype in place of one."""
    return pytree.tree_map_only(torch.Tensor, lambda one: one.to(after) if one.dtype == before else one, values)


def outcome(call, values):
    """The results of a call, or its error."""
    torch.manual_seed(0)
    try:
        return call(values[0], *values[1], **values[2])
    except Exception as error:
        return error


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_only_the_cpu_lacks_is_rounded_from_float32(cuda, dtype):
    rounded, refused = [], []
    lacking = "not implemented for 'Half'" if dtype == torch.float16 else "not implemented for 'BFloat16'"
    for number, operator in enumerate(operators.operators()):
        if number % 5 and operator.name not in LACKING:
            continue
        if dtype in operator.dtypes or torch.float32 not in operator.dtypes or "attention" in operator.name:
            continue
        sample = next(iter(operator.sample_inputs("cpu", torch.float32)))
        values = as_dtype((sample.input, sample.args, sample.kwargs), torch.float32, dtype)
        if lacking not in str(outcome(operator.op, values)):
            continue
        wide = outcome(operator.op, as_dtype(values, dtype, torch.float32))
        with cuda:
            on_device = pytree.tree_map_only(torch.Tensor, lambda one: one.to(cuda.device), values)
            found = outcome(operator.op, on_device)
        if isinstance(found, Exception):
            refused.append(operator.name)
            assert dtype not in operator.dtypesIfCUDA, operator.name
            assert unsupported_operation(found) is None, found
        else:
            rounded.append(operator.name)
            assert dtype in operator.dtypesIfCUDA, operator.name
            torch.testing.assert_close(cuda.to_cpu(found), wide.to(dtype), rtol=0, atol=0)
    assert set(rounded) == LACKING & {*rounded, *refused}
    assert len(rounded) > 3
    assert len(refused) > 10


def test_gradients_are_rounded_too(cuda):
    x = torch.randn(1, 2, 4, 4, 4, requires_grad=True)
    F.avg_pool3d(x, 2).pow(2).sum().backward()
    with cuda:
        half = x.detach().half().to(cuda.device).requires_grad_()
        F.avg_pool3d(half, 2).float().pow(2).sum().backward()
    assert half.grad.dtype == torch.float16
    torch.testing.assert_close(cuda.to_cpu(half.grad).float(), x.grad, rtol=2e-3, atol=1e-3)


def test_operands_that_are_written_get_the_rounded_values(cuda):
    with cuda:
        x, noise = (torch.full((5,), value, device=cuda.device).half() for value in (-1.0, 0.0))
        made = torch.ops.aten.rrelu_with_noise(x, noise, 0.25, 0.5, True)
        assert torch.equal(made, -noise)
        assert bool((noise > 0.25).all())
        result = torch.ops.aten.rrelu_with_noise_(x, noise, 0.25, 0.25, True)
        out = torch.zeros(1, 1, 1, 1, 1, device=cuda.device).half()
        torch.ops.aten.avg_pool3d.out(torch.ones(1, 1, 2, 2, 2, device=cuda.device).half(), 2, out=out)
    assert result is x
    assert x.tolist() == [-0.25] * 5
    assert out.item() == 1


def test_an_error_that_no_dtype_causes_is_raised(cuda):
    with cuda, pytest.raises(NotImplementedError, match="'Float'"):
        torch.ones(2, device=cuda.device).bitwise_not()
    with pytest.raises(NotImplementedError, match="'Float'"):
        half_precision.compute(torch.ops.aten.bitwise_not.default, (torch.ones(2),), {}, "cuda")


def test_a_factory_has_no_values_to_round(cuda):
    with cuda, pytest.raises(NotImplementedError, match="'Half'"):
        torch.tril_indices(2, 2, dtype=torch.float16, device=cuda.device)


def test_a_transform_in_half_precision_is_a_limit_of_the_simulation(cuda):
    with cuda, pytest.raises(RuntimeError) as raised:
        torch.fft.rfft(torch.ones(4, device=cuda.device).half())
    assert unsupported_operation(raised.value) == ""

"""A sample of torch's operator database on a simulated device; `benchmarks/operators.py` runs all of it."""

from __future__ import annotations

import io

import pytest

torch = pytest.importorskip("torch")

import operators  # of the benchmarks
from torch import nn

from ckptmove.simulation.errors import NotSimulated  # it imports torch

FINE = {operators.PASSED, operators.ROUNDED}
#: Lazy conjugation and negation, kernels that another backend lacks, and functions that torch wrote in Python.
HARD = {
    "acos", "as_strided", "fft.hfft", "linalg.lstsq", "linalg.pinv", "mul", "native_channel_shuffle",
    "nn.functional.mish", "nn.functional.silu", "pinverse", "svd_lowrank", "tensor_split", "view_as_real",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.filterwarnings("ignore")
def test_operators_equal_those_of_the_cpu(cuda):
    faults = {}
    for number, operator in enumerate(operators.operators()):
        is_hard = operator.name in HARD
        if number % 12 and not is_hard:
            continue
        for dtype in (torch.float32, torch.complex64) if is_hard else (torch.float32,):
            if dtype in operator.dtypes:
                for outcome in operators.outcomes(operator, cuda, dtype, 1):
                    if outcome.verdict not in FINE:
                        faults[operator.name, operator.variant_test_name, dtype] = outcome
    assert not faults


def test_lazy_conjugation_and_negation_are_those_of_the_cpu(cuda):
    plain = torch.randn(3, dtype=torch.complex64)
    with cuda:
        x = plain.to(cuda.device)
        assert (x.conj().is_conj(), x.conj().imag.is_neg()) == (True, True)
        assert torch.equal(cuda.to_cpu(x.conj() * x), plain.conj() * plain)
        assert torch.equal(cuda.to_cpu(x.conj().imag + 1), 1 - plain.imag)
        file = io.BytesIO()
        torch.save(x.conj(), file)
        file.seek(0)
        assert torch.equal(torch.load(file).cpu(), plain.conj())
        x.conj().mul_(2j)
    assert torch.equal(cuda.to_cpu(x), plain * -2j)


def test_an_operation_of_several_steps_on_the_cpu_is_that_without_a_device(cuda):
    """In a dispatch mode, torch treats lazily conjugated tensors as plain ones."""
    plain = torch.randn(3, 3, dtype=torch.complex64)
    with cuda:
        found = torch.linalg.pinv(plain)
    assert torch.equal(found, torch.linalg.pinv(plain))


def test_views_in_inference_mode_are_normal_tensors(cuda):
    model = nn.Linear(3, 3)
    with cuda:
        model.to(cuda.device)
        x = torch.ones(2, 3, device=cuda.device)
        with torch.inference_mode():
            assert not x.t().is_inference()
            assert torch.equal(model(x.unsqueeze(0))[0], model(x))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_gradient_through_a_csr_tensor_is_refused(cuda):
    """torch aborts the process if it records one."""
    with cuda:
        x = torch.eye(3, device=cuda.device)
        sparse = x.to_sparse_csr()
        assert torch.equal(cuda.to_cpu(sparse @ x), torch.eye(3))
        assert not sparse.requires_grad_(requires_grad=False).requires_grad
        for call in (sparse.requires_grad_, lambda: nn.Parameter(sparse), x.clone().requires_grad_().to_sparse_csr):
            with pytest.raises(NotSimulated, match="compressed sparse"):
                call()
        with torch.no_grad():
            assert x.requires_grad_().to_sparse_csr().layout is torch.sparse_csr

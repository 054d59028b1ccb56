from __future__ import annotations

import ast
import importlib.util
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

from ckptmove.simulation import mps  # it imports torch
from ckptmove.simulation.device import SimulatedDevice  # it imports torch
from ckptmove.simulation.errors import MissingOnMps, RefusedOnMps  # as the others

SETTING = "PYTORCH_ENABLE_MPS_FALLBACK"


@pytest.fixture
def device(monkeypatch):
    """A simulated mps, without the fallback."""
    monkeypatch.delenv(SETTING, raising=False)
    one = SimulatedDevice("mps")
    with one:
        yield one.device


def expected_failures():
    """Operations that torch's own tests expect to fail on mps for all dtypes, or for some of them."""
    origin = importlib.util.find_spec("torch").origin
    source = Path(origin).parent / "testing/_internal/common_mps.py"
    if not source.is_file():
        pytest.skip("this torch lacks its lists for the tests of mps")
    lists = {
        node.target.id: node.value
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    }
    names = ("UNIMPLEMENTED_XFAILLIST", "ON_MPS_XFAILLIST")
    return {key.value for name in names for key in lists[name].keys}


def square(device, size=3):
    return (torch.eye(size) + torch.arange(float(size))).to(device)


MISSING = {
    "frexp": torch.frexp,
    "geqrf": torch.geqrf,
    "hash_tensor": torch.hash_tensor,
    "heaviside": lambda x: torch.heaviside(x, x),
    "linalg.cond": torch.linalg.cond,
    "linalg.eig": torch.linalg.eig,
    "linalg.eigh": torch.linalg.eigh,
    "linalg.eigvals": torch.linalg.eigvals,
    "linalg.eigvalsh": torch.linalg.eigvalsh,
    "linalg.ldl_factor": torch.linalg.ldl_factor,
    "linalg.lstsq": lambda x: torch.linalg.lstsq(x, x),
    "linalg.matrix_norm": lambda x: torch.linalg.matrix_norm(x, 2),
    "linalg.matrix_rank": torch.linalg.matrix_rank,
    "linalg.matrix_rankhermitian": lambda x: torch.linalg.matrix_rank(x, hermitian=True),
    "linalg.svdvals": torch.linalg.svdvals,
    "logspace": lambda x: torch.logspace(0, 1, 3, device=x.device),
    "logspacetensor_overload": lambda x: torch.logspace(x[0, 0], x[1, 1], 3, device=x.device),
    "matrix_exp": torch.matrix_exp,
    "mode": torch.mode,
    "nn.functional.adaptive_avg_pool1d": lambda x: functional.adaptive_avg_pool1d(x, 2),
    "nn.functional.adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x[None], 2),
    "nn.functional.adaptive_avg_pool3d": lambda x: functional.adaptive_avg_pool3d(x[None, None], (1, 2, 2)),
    "nn.functional.adaptive_max_pool3d": lambda x: functional.adaptive_max_pool3d(x[None, None], (1, 2, 2)),
    "nn.functional.conv2d": lambda x: functional.conv2d(x[None].long(), x[None, None].long()),
    "nn.functional.ctc_loss": lambda x: functional.ctc_loss(
        x[:, None], x[:1, :2].long(), torch.tensor([3]), torch.tensor([2])
    ),
    "nn.functional.fractional_max_pool2d": lambda x: functional.fractional_max_pool2d(x[None], 2, output_size=1),
    "nn.functional.multi_margin_loss": lambda x: functional.multi_margin_loss(x, x[0].long()),
    "nn.functional.multilabel_margin_loss": lambda x: functional.multilabel_margin_loss(x, x.long()),
    "nn.functional.pdist": functional.pdist,
    "nn.functional.rrelu": lambda x: functional.rrelu(x, training=True),
    "normnuc": lambda x: torch.norm(x, "nuc"),
    "ormqr": lambda x: torch.ormqr(x, x[0], x),
    "put": lambda x: torch.put(x, x[0].long(), x[0]),
    "special.airy_ai": torch.special.airy_ai,
    "special.log_ndtr": torch.special.log_ndtr,
    "special.ndtri": torch.special.ndtri,
    "take": lambda x: torch.take(x, x[0].long()),
}


@pytest.mark.parametrize(("name", "call"), MISSING.items(), ids=MISSING)
def test_operations_that_fail_in_the_tests_of_torch_are_refused(device, name, call):
    if name not in expected_failures():
        pytest.skip("this torch has it on mps")
    with pytest.raises(RefusedOnMps) as caught:
        call(square(device))
    assert caught.value.operation.startswith("aten::")


WORKING = {
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "average pool": lambda x: functional.adaptive_avg_pool2d(x[None, :2, :2], 1),
    "average pool to a larger size": lambda x: functional.adaptive_avg_pool2d(x[None], 6),
    "batch norm": lambda x: nn.BatchNorm1d(3).to(x.device)(x),
    "cdist": lambda x: torch.cdist(x, x),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.T),
    "transposed convolution": lambda x: functional.conv_transpose2d(x[None], x[None, None]),
    "convolution": lambda x: functional.conv2d(x[None], x[None, None]),
    "cross entropy": lambda x: functional.cross_entropy(x, torch.tensor([0, 1, 2], device=x.device)),
    "cumsum": lambda x: x.long().cumsum(0).float() * x,
    "embedding": lambda x: functional.embedding(torch.tensor([0, 2], device=x.device), x),
    "fft": lambda x: torch.fft.fft(x).abs(),
    "group norm": lambda x: functional.group_norm(x, 3),
    "gru": lambda x: nn.GRU(3, 2).to(x.device)(x)[0],
    "index_reduce": lambda x: x.index_reduce(0, torch.tensor([0], device=x.device), x[:1], "amax"),
    "inverse": torch.linalg.inv,
    "layer norm": lambda x: functional.layer_norm(x, (3,)),
    "lstm": lambda x: nn.LSTM(3, 2).to(x.device)(x)[0],
    "max pool": lambda x: functional.adaptive_max_pool2d(x[None], 2),
    "pinverse": torch.pinverse,
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "sort": lambda x: x.sort()[0],
    "topk": lambda x: x.topk(2)[0],
    "transformer": lambda x: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0).to(x.device)(x),
}


@pytest.mark.filterwarnings("ignore:The operator", "ignore:index_reduce")
@pytest.mark.parametrize("call", WORKING.values(), ids=WORKING)
def test_operations_that_mps_has_compute_as_on_the_cpu(device, call):
    results = []
    for home in ("cpu", device):
        torch.manual_seed(0)
        weight = square(home).requires_grad_()
        result = call(weight)
        result.sum().backward()
        results.append((result.detach().cpu(), weight.grad.cpu()))
    for mine, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(mine, expected)


def test_the_message_is_that_of_torch(device):
    with pytest.raises(MissingOnMps) as caught:
        torch.linalg.eigh(square(device))
    assert caught.value.operation == "aten::_linalg_eigh.eigenvalues"  # that of the overload with `out`
    assert str(caught.value).startswith(
        "The operator 'aten::_linalg_eigh.eigenvalues' is not currently implemented for the MPS device."
    )
    assert f"commit hash {torch.version.git_version}. As a temporary fix" in str(caught.value)


def test_a_backward_without_a_kernel_is_refused_in_backward(device):
    weight = square(device).requires_grad_()
    made = functional.interpolate(weight[None, None], size=(6, 6), mode="bicubic", antialias=True)
    with pytest.raises(MissingOnMps) as caught:
        made.sum().backward()
    assert caught.value.operation == "aten::_upsample_bicubic2d_aa_backward.grad_input"
    assert caught.value.node == "UpsampleBicubic2DAaBackward0"


@pytest.mark.parametrize(
    ("value", "runs", "said"),
    [("1", True, ""), (" 2x", True, ""), ("0", False, "=1`"), ("", False, "stoi"), ("true", False, "stoi")],
)
def test_the_fallback_computes_on_the_cpu_with_a_warning(device, monkeypatch, value, runs, said):
    monkeypatch.setenv(SETTING, value)
    monkeypatch.setattr(mps, "FELL_BACK", {})
    one = square(device)
    if not runs:
        with pytest.raises(MissingOnMps, match=said):
            torch.heaviside(one, one)
        return
    with pytest.warns(UserWarning, match="'aten::heaviside.out' is not currently supported on the MPS backend"):
        made = torch.heaviside(one, one)
    assert made.device == device
    assert torch.equal(made.cpu(), torch.heaviside(one.cpu(), one.cpu()))
    assert list(mps.FELL_BACK) == ["aten::heaviside.out"]


def test_operations_that_always_fall_back_need_no_setting(device):
    table = torch.nn.Embedding(3, 3, max_norm=0.5).to(device)
    with pytest.warns(UserWarning, match="'aten::embedding_renorm_'"):
        found = table(torch.tensor([1], device=device))
    assert found.norm() <= 0.501


REFUSED = {
    "Convolution is supported only for Floating types": lambda x: functional.conv1d(x.long(), x[None].long()),
    "ConvTranspose 3D with BF16 or FP16 types is not supported on MPS": lambda x: functional.conv_transpose3d(
        x[None, None, None].half(), x[None, None, None].half()
    ),
    "index_reduce for MPS does not support torch.long dtype": lambda x: x.long().index_reduce(
        0, x[0].long() * 0, x.long(), "amax"
    ),
    "index_reduce for MPS does not support torch.cfloat dtype": lambda x: x.cfloat().index_reduce(
        0, x[0].long() * 0, x.cfloat(), "prod"
    ),
    "_upsample_bilineard2d_aa_out_mps only supports floating-point dtypes": lambda x: functional.interpolate(
        x.byte()[None, None], size=2, mode="bilinear", antialias=True
    ),
    "linalg_inv: not supported for complex types yet!": lambda x: torch.linalg.inv(x.cfloat()),
    "linalg.lu_factor(): MPS only supports floats.": lambda x: torch.linalg.solve(x.cfloat(), x.cfloat()),
    "linalg_qr: MPS currently supports float32 only": lambda x: torch.linalg.qr(x.cfloat()),
    "linalg.solve.triangular(); Only float is supported!": lambda x: torch.cholesky_solve(x.cfloat(), x.cfloat()),
    "MPS device does not support addr for non-float input": lambda x: x.int().addr(x[0].int(), x[0].int()),
    "MPS device does not support linear for non-float inputs": lambda x: nn.Linear(3, 3).to(x.device)(x.long()),
    "MPS device does not support linear for non-float weights": lambda x: functional.linear(x, x.long()),
    "MPS device does not support linear for non-float bias": lambda x: functional.linear(x, x, bias=x[0].long()),
    "value cannot be converted to type double without overflow": lambda x: torch.addmm(
        x.cfloat(), x.cfloat(), x.cfloat(), alpha=2j
    ),
    "scatter_reduce(amin/amax) on int64 currently requires contiguous self": lambda x: (
        x.long().t().scatter_reduce(0, x.long() * 0, x.long(), "amax")
    ),
    "Failed to create function state object for: scatter_prod_dense_long_long": lambda x: x.long().scatter_(
        0, x.long() * 0, x.long(), reduce="multiply"
    ),
    "Failed to create function state object for: scatter_prod_dense_float2_int": lambda x: x.cfloat().scatter_reduce(
        0, x.int() * 0, x.cfloat(), "prod"
    ),
    "Failed to create function state object for: renorm_float2": lambda x: torch.renorm(x.cfloat(), 2, 0, 1.0),
    "Failed to create function state object for: silu_dense_float2_float2": lambda x: functional.silu(x.cfloat()),
    "Failed to create function state object for: upsample_bicubic2d_uchar": lambda x: functional.interpolate(
        x.byte()[None, None], size=2, mode="bicubic"
    ),
    "LSTM with projections is not currently supported with MPS.": lambda x: nn.LSTM(3, 4, proj_size=2).to(x.device)(x),
    "Adaptive pool MPS: input sizes must be divisible by output sizes.": lambda x: functional.adaptive_avg_pool2d(
        x[None], 2
    ),
    "Adaptive pool MPS: output sizes must be divisible by input sizes.": lambda x: functional.adaptive_avg_pool2d(
        x[None], 4
    ),
    "Adaptive pool MPS: Input height and width must both be": lambda x: functional.adaptive_max_pool2d(x[None], (2, 4)),
}


@pytest.mark.parametrize(("message", "call"), REFUSED.items(), ids=REFUSED)
def test_arguments_that_a_kernel_of_mps_refuses(device, message, call):
    with pytest.raises(RefusedOnMps) as caught:
        call(square(device))
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, NotImplementedError) == message.startswith("Adaptive")


def test_arguments_that_these_kernels_accept(device):
    x = square(device)
    assert x.long().scatter_reduce(0, x.long() * 0, x.long(), "amax").dtype == torch.int64
    assert x.scatter_reduce(0, x.long() * 0, x, "prod").dtype == torch.float32
    assert torch.addmm(x.cfloat(), x.cfloat(), x.cfloat(), beta=2, alpha=1 + 0j).is_complex()
    assert torch.linalg.qr(x)[0].device == x.addr(x[0], x[0], alpha=2.0).device == device
    assert functional.interpolate(x[None, None], size=2, mode="bicubic").device == device
    assert functional.linear(bias=None, weight=x, input=x).device == device
    assert (x.long() @ x.long()).dtype == torch.int64


def test_float64_is_refused_only_where_it_is_asked_for(device):
    counts = torch.bincount(torch.tensor([0, 1, 1], device=device), torch.tensor([1, 1, 1], device=device))
    assert counts.tolist() == [1, 2]
    assert counts.dtype == torch.float32
    with pytest.raises(TypeError, match="float64"):
        torch.ones(3, device=device).sum(dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(TypeError, match="float64"):
            torch.ones(3, device=device)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_hermitian_matrix_needs_its_eigenvalues(device):
    for call in (torch.linalg.pinv, torch.linalg.matrix_rank):
        with pytest.raises(MissingOnMps) as caught:
            call(square(device), hermitian=True)
        assert caught.value.operation == "aten::_linalg_eigh.eigenvalues"


def test_an_empty_input_is_refused_as_on_the_cpu(device):
    with pytest.raises(RuntimeError, match="non-zero size"):
        functional.adaptive_avg_pool2d(torch.ones(1, 0, 0, device=device), 2)


def test_a_packed_sequence_needs_no_projection(device):
    packed = nn.utils.rnn.pack_padded_sequence(square(device)[:, None], torch.tensor([3]))
    assert nn.LSTM(3, 2).to(device)(packed)[0].data.device == device


def test_sparse_tensors_have_kernels_of_their_own(device):
    rows = torch.tensor([[0, 1], [2, 0]])
    one = torch.sparse_coo_tensor(rows, torch.ones(2), (3, 3), check_invariants=True).to(device)
    made = torch.sparse_coo_tensor(rows.to(device), torch.ones(2, device=device), (3, 3), check_invariants=True)
    assert torch.equal(made.to_dense().cpu(), one.to_dense().cpu())
    assert torch.equal((one + one).coalesce().cpu().values(), torch.full((2,), 2.0))
    with pytest.raises(MissingOnMps, match="Could not run 'aten::hspmm' with arguments from the 'SparseMPS' backend"):
        torch.hspmm(one, square(device))


def test_other_devices_are_not_refused():
    with SimulatedDevice("cuda:0") as cuda, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.linalg.eigvalsh(square(cuda.device)).device == cuda.device


def test_operators_of_other_libraries_are_not_refused(device):
    @torch.library.custom_op("ckptmove_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert torch.equal(twice(square(device)).cpu(), square("cpu") * 2)


def test_a_torch_without_torchgen_refuses_nothing(device, monkeypatch):
    monkeypatch.setattr(mps, "_YAML", "gen/nothing.yaml")
    for cached in (mps._table, mps._missing):
        cached.cache_clear()
    try:
        assert torch.linalg.eigvalsh(square(device)).device == device
    finally:
        for cached in (mps._table, mps._missing):
            cached.cache_clear()

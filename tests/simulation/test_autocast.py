"""Casts under `torch.autocast` on a simulated device, compared with torch's own autocast of fake tensors."""

from __future__ import annotations

import itertools
import logging
import threading

import pytest

torch = pytest.importorskip("torch")

import operators  # of the benchmarks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ckptmove.simulation import autocast  # it imports torch
from ckptmove.simulation.autocast import KINDS, CastPolicy, policies  # it imports torch
from ckptmove.simulation.device import SimulatedDevice  # it imports torch
from ckptmove.simulation.errors import MissingOnMps  # it imports torch

HALF, SINGLE = torch.float16, torch.float32
#: Calls that torch's operator database lacks, each with the shapes of its operands.
MORE = {
    "chain_matmul": (torch.chain_matmul, (2, 3), (3, 4), (4, 2)),
    "conv_tbc": (torch.conv_tbc, (5, 2, 3), (2, 3, 4), (4,)),
    "frobenius_norm": (lambda x: torch.ops.aten.frobenius_norm.dim(x, [0]), (2, 3)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (1, 2, 3, 3)),
    "norm.Scalar": (torch.ops.aten.norm.Scalar, (2, 3)),
    "norm.ScalarOpt_dim": (lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]), (2, 3)),
    "nuclear_norm": (torch.ops.aten.nuclear_norm.default, (3, 3)),
    "sum": (lambda x: torch.ops.aten.sum(x, dtype=torch.bfloat16), (2, 3)),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), (1, 2, 3, 3)),
}
#: Errors of fake tensors that have nothing to do with autocast: values, and CUDA itself.
_OF_FAKES = frozenset({"DataDependentOutputException", "DynamicOutputShapeException", "AssertionError"})
#: Operators that fake tensors need a backend for, or do not check.
_NOT_FAKE = frozenset({"batch_norm", "binary_cross_entropy", "scaled_dot_product_attention"})


@pytest.fixture
def linear(cuda):
    with cuda:
        torch.manual_seed(0)
        return nn.Linear(3, 3).to(cuda.device), torch.randn(4, 3).to(cuda.device)


def dtypes_of(call):
    """The dtypes of the results, or the class of the error."""
    try:
        results = call()
    except Exception as error:
        return type(error).__name__
    return [leaf.dtype for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]


@pytest.fixture(scope="module")
def calls():
    """Calls of operations that autocast changes: name, function, and arguments, with tensors on the CPU."""
    names = {operation.removeprefix("aten::").partition(".")[0] for kind in KINDS for operation in policies(kind)}
    made = []
    for operator in operators.operators():
        own = operator.name.removeprefix("nn.functional.").replace(".", "_")
        # With a dtype, mps gets float64.
        is_left_out = own in _NOT_FAKE or operator.variant_test_name == "with_dtype"
        if (own in names or operator.aten_name in names) and SINGLE in operator.dtypes and not is_left_out:
            sample = next(iter(operator.sample_inputs("cpu", SINGLE)))
            made.append((operator.name, operator.op, (sample.input, sample.args, sample.kwargs)))
    for name, (call, *shapes) in MORE.items():
        first, *rest = (torch.randn(shape) for shape in shapes)
        made.append((name, call, (first, rest, {})))
    return made


def moved(values, move, is_first_half):
    """The arguments of a call on a device, the first operand in float16 if asked."""
    seen = []

    def on_device(tensor):
        seen.append(tensor)
        return move(tensor, HALF if is_first_half and len(seen) == 1 and tensor.dtype == SINGLE else tensor.dtype)

    return pytree.tree_map_only(torch.Tensor, on_device, values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_results_have_the_dtypes_of_torchs_own_autocast(calls, kind):
    device = SimulatedDevice(kind)
    differing = {}
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

    def fake(tensor, dtype):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=kind)

    fakes = FakeTensorMode()  # one for all: it caches results
    for (name, call, values), is_first_half in itertools.product(calls, (False, True)):
        with fakes:
            value, args, kwargs = moved(values, fake, is_first_half)
            torch.set_autocast_enabled(kind, True)  # `torch.autocast` asks for a driver
            try:
                wanted = dtypes_of(lambda: call(value, *args, **kwargs))  # noqa: B023  # called at once
            finally:
                torch.set_autocast_enabled(kind, False)
        with device, torch.autocast(kind):
            value, args, kwargs = moved(values, lambda one, dtype: one.to(kind, dtype), is_first_half)
            found = dtypes_of(lambda: call(value, *args, **kwargs))  # noqa: B023  # called at once
        if wanted != found and str(wanted) not in _OF_FAKES and found != MissingOnMps.__name__:
            differing[name, is_first_half] = wanted, found
    assert not differing
    assert len(calls) > 80


def test_xpu_shares_the_policies_of_cuda():
    assert policies("xpu").items() <= policies("cuda").items()


def test_cells_of_recurrent_networks_and_samplers_are_cast(cuda, mps):
    for device, dtypes in ((cuda, [HALF, HALF, HALF]), (mps, [HALF, SINGLE, HALF])):
        with device, torch.autocast(device.device.type):
            x, images = torch.ones(2, 3, device=device.device), torch.ones(1, 2, 3, 3, device=device.device)
            cells = [cell(3, 4).to(device.device) for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)]
            assert [pytree.tree_leaves(cell(x))[0].dtype for cell in cells] == dtypes
            grid = F.affine_grid(torch.ones(1, 2, 3, device=device.device), (1, 2, 3, 3), align_corners=False)
            assert F.grid_sample(images, grid.half(), align_corners=False).dtype == SINGLE
            query = torch.ones(1, 1, 2, 4, device=device.device)
            assert F.scaled_dot_product_attention(query, query, query).dtype == HALF


def test_policies_are_known_for_every_listed_operation():
    """A policy that torch adds to its list without a name here would be float32."""
    known = {"norm", "binary_cross_entropy"} | autocast_policies_names()
    listed = {operation.removeprefix("aten::").partition(".")[0] for kind in KINDS for operation in policies(kind)}
    assert known <= listed
    assert {policies("cuda")[f"aten::{name}"] for name in ("mm", "linear", "conv2d")} == {CastPolicy.LOWER_PRECISION}
    assert policies("npu") == {}


def autocast_policies_names():
    from ckptmove.simulation import autocast as table  # private parts of it

    return set(table._LOWER_PRECISION | table._SET_OPT_DTYPE | table._PROMOTE)


def test_gradients_have_the_dtype_of_their_parameters(cuda, linear):
    model, x = linear
    with cuda:
        with torch.autocast("cuda"):
            made = model(model(x))
            assert made.dtype == HALF
        made.float().sum().backward()
    assert {(one.dtype, one.grad.dtype) for one in model.parameters()} == {(SINGLE, SINGLE)}
    host = nn.Linear(3, 3)
    host.load_state_dict({name: cuda.to_cpu(one) for name, one in model.state_dict().items()})
    with torch.autocast("cpu", HALF):
        host(host(cuda.to_cpu(x))).float().sum().backward()
    assert torch.equal(cuda.to_cpu(model.weight.grad), host.weight.grad)


def test_autocast_ends_with_its_region_and_where_it_is_off(cuda, linear):
    model, x = linear
    with cuda:
        with torch.autocast("cuda", torch.bfloat16):
            assert (model(x).dtype, torch.get_autocast_dtype("cuda")) == (torch.bfloat16, torch.bfloat16)
            with torch.autocast("cuda", enabled=False):
                assert model(x).dtype == SINGLE
            with torch.autocast("cpu", torch.bfloat16):
                assert model(x).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == SINGLE
        assert model(x).dtype == SINGLE
        with torch.autocast("cuda"):
            assert nn.Linear(3, 3)(torch.ones(1, 3)).dtype == SINGLE  # on the CPU
    assert not torch.is_autocast_enabled("cuda")


def test_each_device_type_has_its_own_autocast(cuda, mps, linear):
    _, x = linear
    with mps, cuda, torch.autocast("cuda"):
        other = torch.ones(3, 3, device=mps.device)
        assert (other @ other).dtype == SINGLE
        assert (x @ x.T).dtype == HALF
        assert F.binary_cross_entropy(other, other).dtype == SINGLE
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x.sigmoid(), x.sigmoid())


def test_a_parameter_is_cast_once_in_a_region(cuda, linear):
    model, x = linear
    casts = autocast._CASTS
    with cuda:
        with torch.autocast("cuda"):
            first = model(x)
            known = dict(casts)
            with torch.autocast("cuda", enabled=False):
                model(x)
            second = model(x)
            assert casts == known
            assert len(known) == 2
            casts[id(model.weight)] = (lambda: None), torch.ones(1)  # of a tensor that is gone
            assert torch.equal(model(x), first)
        assert not casts
        with torch.autocast("cuda", cache_enabled=False):
            assert torch.equal(model(x), second)
            assert not casts


def test_only_the_widest_of_known_dtypes_is_chosen(cuda):
    with cuda, torch.autocast("cuda"):
        half, wide = (torch.ones(3, dtype=dtype, device="cuda") for dtype in (HALF, torch.float64))
        assert torch.atan2(half, half.float()).dtype == SINGLE
        assert torch.dot(wide, wide).dtype == torch.float64
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.atan2(half.bfloat16(), half)


def test_a_dtype_that_the_user_asks_for_stays(cuda):
    with cuda, torch.autocast("cuda"):
        half = torch.ones(3, 3, device="cuda").half()
        assert torch.softmax(half, 0, torch.bfloat16).dtype == torch.bfloat16
        assert torch.ops.aten.softmax.int(half, 0, None).dtype == SINGLE
        assert half.sum(dtype=HALF).dtype == HALF
        assert half.double().sum().dtype == torch.float64


def test_recurrent_networks_run_in_float16_on_cuda_only(cuda, mps):
    for device, dtype in ((cuda, HALF), (mps, SINGLE)):
        with device:
            model = nn.GRU(3, 4).to(device.device)
            with torch.autocast(device.device.type, torch.bfloat16):
                made, _ = model(torch.ones(2, 1, 3, device=device.device))
            made.float().sum().backward()
        assert made.dtype == dtype
        assert model.weight_ih_l0.grad.dtype == SINGLE


def test_dtypes_that_only_autocast_mixes_are_refused(cuda, linear):
    model, x = linear
    with cuda, torch.autocast("cuda"):
        made = model(x)
        with pytest.raises(RuntimeError, match="dtype"):
            torch.zeros(4, 3, device="cuda").scatter_(1, torch.zeros(4, 3, dtype=torch.int64, device="cuda"), made)
        with pytest.raises(RuntimeError, match="dtypes match"):
            torch.zeros(4, 3, device="cuda")[x > 0] = made[x > 0]
        with torch.autocast("cuda", enabled=False), pytest.raises(RuntimeError, match="dtype"):
            model(made)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_repeats_the_casts(cuda, linear, use_reentrant):
    model, x = linear
    gradients = []
    with cuda:
        for forward in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
            model.zero_grad()
            with torch.autocast("cuda"):
                made = forward(x.requires_grad_())
            made.float().pow(2).sum().backward()
            gradients.append(cuda.to_cpu(model.weight.grad.clone()))
    assert torch.equal(*gradients)


def test_a_thread_has_its_own_autocast(cuda, linear):
    model, x = linear
    found = []

    def work():
        found.append(model(x).dtype)
        with torch.autocast("cuda"):
            found.append(model(x).dtype)

    with cuda, torch.autocast("cuda"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        found.append(model(x).dtype)
    assert found == [SINGLE, HALF, HALF]


def test_transforms_of_functions_cast(cuda, linear):
    model, x = linear
    with cuda, torch.autocast("cuda"):
        weights = {name: one.detach() for name, one in model.named_parameters()}
        slopes = grad(lambda weights: functional_call(model, weights, (x,)).float().sum())(weights)
        assert slopes["weight"].dtype == SINGLE
        assert vmap(lambda row: model.weight @ row)(x).dtype == HALF


def test_a_users_function_casts_its_inputs(cuda, linear):
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=HALF)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            seen.append((x.dtype, (x @ x.T).dtype, torch.is_autocast_enabled("cuda")))
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            seen.append((ctx.saved_tensors[0].dtype, torch.is_autocast_enabled("cuda")))
            return 2 * ctx.saved_tensors[0] * grad

    _, x = linear
    x.requires_grad_()
    with cuda:
        with torch.autocast("cuda"):
            made = Square.apply(x)
        made.sum().backward()
    assert seen == [(HALF, HALF, False), (HALF, False)]
    assert x.grad.dtype == SINGLE


def test_a_scaler_skips_a_step_that_overflows(cuda, linear):
    model, x = linear
    before = model.weight.tolist()
    with cuda:
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)
        for factor in (70000.0, 1e-3):
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = (model(x) * factor).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert (model.weight.tolist() == before) is (factor > 1)
        assert scaler.get_scale() == 2.0**15


def test_inference_mode_casts_and_views(cuda, linear):
    model, x = linear
    with cuda, torch.inference_mode(), torch.autocast("cuda"):
        assert model(x).dtype == HALF
        assert not x[0].is_inference()
        assert (x + 1)[0].is_inference()


@pytest.mark.parametrize("is_missing", [False, True])
def test_the_legacy_switch_is_that_of_cuda(cuda, linear, is_missing):
    _, x = linear
    with cuda:
        torch.set_autocast_enabled(not is_missing)
        try:
            assert (x @ x.T).dtype == (SINGLE if is_missing else HALF)
        finally:
            torch.set_autocast_enabled(False)
        assert (x @ x.T).dtype == SINGLE

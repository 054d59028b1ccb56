"""Python code sees the device of the target: in attributes, arguments and prints, and in decisions of torch."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ckptmove.simulation import identity  # it imports torch
from ckptmove.simulation.device import PlainSimulatedTensor, SimulatedDevice  # it imports torch
from ckptmove.simulation.errors import NotSimulated, unsupported_operation  # of errors of torch

CUDA = torch.device("cuda:0")
NAMED = ("cuda", "cuda:0", CUDA, torch.device("cuda"), 0)


@pytest.mark.parametrize("target", ["cuda:0", "mps", "xpu:0"])
def test_a_tensor_shows_the_device_of_the_target(target):
    device = SimulatedDevice(target)
    kind = target.partition(":")[0]
    shown = torch.device(kind, 0)
    with device:
        made = torch.ones(2, device=device.device)
        assert device.device == made.device == shown
        assert (made.device.type, str(made.device), made.get_device()) == (kind, f"{kind}:0", 0)
        assert (made.is_cuda, made.is_mps, made.is_xpu) == (kind == "cuda", kind == "mps", kind == "xpu")
        assert repr(made) == f"tensor([1., 1.], device='{kind}:0')"
        assert made.type() == f"torch.{kind}.FloatTensor"
        assert nn.Linear(2, 2).to(made.device).weight.device == shown
        assert torch.accelerator.current_accelerator() == torch.device(kind)
    assert made.device == shown


@pytest.mark.parametrize("named", NAMED, ids=repr)
def test_a_device_argument_may_name_the_target(cuda, named):
    with cuda:
        made = (
            torch.zeros(2, device=named), torch.tensor([1.0], device=named), torch.ones(1).to(named),
            torch.ones(1).to(device=named, dtype=torch.float16), torch.ones(1).cuda(named),
            torch.ones(1).new_ones(2, device=named), nn.Linear(2, 2, device=named).weight,
            nn.Linear(2, 2).to(named).bias, torch.rand(2, generator=torch.Generator(named), device=named),
            torch.as_tensor([1.0], device=named), torch.ops.aten.empty.memory_format([2], device=CUDA),
            torch.nested.nested_tensor([[1.0]], device=CUDA, layout=torch.jagged).values(),
        )  # fmt: skip
        assert {one.device for one in made} == {CUDA}
        assert all(isinstance(one, PlainSimulatedTensor) for one in made)
        assert torch.Generator(named).device == CUDA
        assert torch.ones(1).to(made[0]).device == CUDA
        assert torch.cuda.get_device_name(named) == "simulated"
        with torch.cuda.device(named):
            assert torch.cuda.current_device() == 0


def test_a_default_device_may_be_the_target(cuda):
    with cuda:
        with torch.device("cuda"):
            made = [torch.ones(1), torch.tensor([1.0]), nn.Linear(1, 1).weight, torch.arange(2)]
            assert torch.get_default_device() == CUDA
        assert {one.device for one in made} == {CUDA}
        torch.set_default_device("cuda")
        try:
            assert (torch.get_default_device(), torch.zeros(1).device) == (CUDA, CUDA)
            assert torch.zeros(1, device="cpu").device.type == "cpu"
        finally:
            torch.set_default_device(None)
        assert torch.get_default_device() == torch.ones(1).device == torch.device("cpu")


def test_functions_that_torch_writes_in_python_pass_the_device_on(cuda):
    """No function mode is active inside of them."""
    with cuda:
        logits = torch.ones(2, 3, device="cuda")
        made = (
            nn.functional.gumbel_softmax(logits), torch.functional.meshgrid(logits[0], indexing="ij")[0],
            nn.functional.embedding_bag(torch.tensor([[0, 1]], device="cuda"), logits),
            torch.stft(torch.ones(64, device="cuda"), 8, window=torch.ones(8, device="cuda"), return_complex=True),
            nn.MultiheadAttention(4, 2, device="cuda")(*[torch.ones(2, 1, 4, device="cuda")] * 3)[0],
            nn.functional.interpolate(torch.ones(1, 1, 2, device="cuda"), 4), logits.unflatten(1, (3, 1)),
        )  # fmt: skip
        assert {one.device for one in made} == {CUDA}


def test_errors_name_the_target(cuda):
    with cuda:
        with pytest.raises(RuntimeError, match=r"cuda:0 and cpu!"):
            torch.ones(2, device="cuda") + torch.ones(2)
        with pytest.raises(AssertionError, match=r"cuda:0 != cpu"):
            torch.testing.assert_close(torch.ones(2, device="cuda"), torch.ones(2))
        with pytest.raises(ValueError, match=r"from device 'cuda:0' to 'cpu'"):
            torch.asarray(torch.ones(2, device="cuda"), device="cpu", copy=False)
        with pytest.raises(RuntimeError, match=r"mkldnn layout: cuda$"):
            torch.ones(2, device="cuda").to_mkldnn()


def test_hooks_and_functions_of_the_user_see_it_in_backward(cuda):
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            seen.append(value.device)
            return value * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(grad.device)
            return grad * torch.full((), 2.0, device=grad.device).to(grad.device)

    def hook(grad):
        seen.append(grad.device)
        return grad + torch.zeros(2).to("cuda")

    with cuda:
        value = torch.ones(2, device="cuda", requires_grad=True)
        value.register_hook(hook)
        for backward in (lambda loss: loss.backward(), lambda loss: torch.autograd.grad(loss, value)):
            backward(Double.apply(value).sum())
    assert seen == [CUDA] * 6
    assert value.grad.tolist() == [2.0, 2.0]


def test_transforms_see_it(cuda):
    seen = []

    def loss(weight, row):
        seen.append((row.device, row.is_cuda, row.is_mps, row.type()))
        return (weight * row * torch.ones(2, device=row.device)).sum()

    with cuda:
        weight, rows = torch.ones(2, device="cuda"), torch.ones(3, 2, device="cuda")
        made = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, rows)
        assert (made.device, made.tolist()) == (CUDA, [[1.0, 1.0]] * 3)
        assert torch.func.jacrev(lambda one: loss(one, rows[0]))(weight).device == CUDA
        called = torch.func.functional_call(nn.Linear(2, 1), dict(nn.Linear(2, 1).cuda().named_parameters()), rows)
        assert called.device == CUDA
    assert set(seen) == {(CUDA, True, False, "torch.cuda.FloatTensor")}


class Squared(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value):
        return value**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (value,) = ctx.saved_tensors
        return grad * value * torch.full((), 2.0, device=value.device)


def test_functions_of_the_user_are_transformed(cuda):
    with cuda:
        rows = torch.arange(4.0, device="cuda").view(2, 2)
        made = torch.func.vmap(torch.func.grad(lambda row: Squared.apply(row).sum()))(rows)
        assert (made.device, made.tolist()) == (CUDA, [[0.0, 2.0], [4.0, 6.0]])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_are_computed_again_on_it(cuda, reentrant):
    with cuda:
        layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).cuda()
        value = torch.ones(1, 2, device="cuda", requires_grad=True)
        checkpoint(layer, value, use_reentrant=reentrant).sum().backward()
        assert value.grad.device == layer[0].weight.grad.device == CUDA


def test_threads_see_it(cuda):
    seen = []

    class Own(threading.Thread):
        def run(self):
            layer = nn.Linear(2, 2, device="cuda")
            layer(torch.ones(1, 2).to("cuda")).sum().backward()
            seen.extend((layer.weight.grad.device, torch.zeros(1, device=layer.weight.device).device))

    with cuda:
        thread = Own()
        thread.start()
        thread.join()
    assert seen == [CUDA] * 2


def test_hooks_of_saved_tensors_see_it(cuda):
    """A function that torch wrote in Python saves its tensors with the mode on."""
    seen = []

    def pack(tensor):
        seen.append((tensor.device, torch.ones(1, device=tensor.device).to(tensor.device).device))
        return tensor

    with cuda, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        nn.functional.dropout(torch.ones(2, device="cuda", requires_grad=True))
    assert seen == [(CUDA, CUDA)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fork")  # of Python 3.12, in a process with threads
def test_batches_of_a_loader_are_moved_to_it(cuda, workers):
    data = TensorDataset(torch.arange(4.0))
    with cuda:
        loader = DataLoader(data, batch_size=2, num_workers=workers, pin_memory=True)
        batches = [batch.to("cuda", non_blocking=True) for (batch,) in loader]
        assert [(one.device, one.tolist()) for one in batches] == [(CUDA, [0.0, 1.0]), (CUDA, [2.0, 3.0])]


class Marked(torch.Tensor):
    """A user's class without operations of its own."""


class Doubled(torch.Tensor):
    """A user's class that changes operations."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.div:
            return NotImplemented
        if func is torch.Tensor.add:
            assert result.device.type == "cuda"
            return result * 2 - torch.tensor(1.0, device=result.device) * torch.ones(2).to(result.device)
        return result


def test_operations_of_a_class_of_the_user_see_it(cuda):
    with cuda:
        made = torch.ones(2, device="cuda").as_subclass(Doubled).add(1)
        with pytest.raises(TypeError):
            made.div(3)
        assert (made.tolist(), made.device, isinstance(made, Doubled)) == ([3.0, 3.0], CUDA, True)  # 2 * 2 - 1


class Scaled(torch.Tensor):
    """A wrapper subclass, whose operations make tensors."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Scaled(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [one.inner if isinstance(one, cls) else one for one in args]
        assert inner[0].device == torch.zeros(1, device=inner[0].device).device
        return cls(func(*inner, **(kwargs or {})))


def test_wrappers_of_the_user_run_on_it(cuda):
    with cuda:
        for made in (Scaled(torch.ones(2, device="cuda")), Scaled(torch.ones(2)).to("cuda")):
            for one in (made, made + 1):
                assert (one.device, one.inner.device, type(one)) == (CUDA, CUDA, Scaled)


def test_classes_of_the_user_stay(cuda):
    with cuda:
        for made in (torch.ones(2).as_subclass(Marked).to("cuda"), torch.ones(2, device="cuda").as_subclass(Marked)):
            assert isinstance(made, Marked)
            assert isinstance(made + 1, Marked)
            assert (made * 2).device == CUDA
            weight = torch.ones(2, device="cuda", requires_grad=True)
            (made * weight).sum().backward()
            assert weight.grad.tolist() == [1.0, 1.0]


class Untouched(torch.Tensor):
    """A user's class that its operations do not keep."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_a_class_may_leave_its_operations_plain(cuda):
    with cuda:
        made = torch.ones(2, device="cuda").as_subclass(Untouched)
        assert (isinstance(made, Untouched), type(made + 1), made.device) == (True, PlainSimulatedTensor, CUDA)


def test_a_copy_is_on_it(cuda):
    with cuda:
        layer = nn.Linear(2, 2).cuda()
        layer(torch.ones(1, 2, device="cuda")).sum().backward()
        layer.weight.mark = "mine"
        twin = copy.deepcopy(layer).to("cuda")
        assert twin.weight.device == twin.weight.grad.device == CUDA
        assert isinstance(twin.weight, nn.Parameter)
        assert twin.weight.mark == "mine"
        assert torch.equal(twin.weight.grad, layer.weight.grad)
        tied = [layer.weight, layer.weight]
        assert len({id(one) for one in copy.deepcopy(tied)}) == 1
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(layer.weight * 2)


@pytest.mark.parametrize(("target", "location"), [("cuda:0", "cuda:0"), ("mps", "mps")])
def test_what_is_saved_in_memory_is_loaded_on_it(target, location):
    device = SimulatedDevice(target)
    file = io.BytesIO()
    with device:
        layer = nn.Linear(2, 2).to(device.device)
        rows = torch.arange(6.0, device=device.device)
        torch.save({**layer.state_dict(), "own": layer.weight, "rows": rows, "part": rows[2:]}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert {one.device for one in loaded.values()} == {device.device}
        assert isinstance(loaded["own"], nn.Parameter)
        assert torch.equal(loaded["own"], layer.weight)
        loaded["rows"][5] = 9.0
        assert loaded["part"].tolist() == [2.0, 3.0, 4.0, 9.0]
        assert repr(pickle.loads(pickle.dumps(rows))) == repr(rows)
        assert copy.copy(rows).device == device.device
    file.seek(0)
    seen = set()
    torch.load(file, map_location=lambda storage, tag: seen.add(tag) or storage)
    assert seen == {location}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_is_on_it(cuda):
    with cuda:
        made = torch.ones(2, device="cuda")
        assert (made.untyped_storage().device, made.storage().device) == (CUDA, CUDA)
        assert made.untyped_storage().is_cuda
        assert made.untyped_storage().nbytes() == 8
        assert made.untyped_storage().cpu().device == torch.ones(1).untyped_storage().device == torch.device("cpu")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_jagged_layout_is_computed_on_it(cuda):
    rows = [torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)]
    layer = nn.Linear(3, 2)

    def run(device):
        model = copy.deepcopy(layer).to(device)
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, device=device)
        out = model(jagged.to(device))
        torch.cat([*out.unbind()]).sum().backward()
        return jagged, model.weight.grad

    expected = run("cpu")[-1]
    with cuda:
        jagged, grad = run("cuda")
        assert (jagged.device, jagged.layout, grad.device) == (CUDA, torch.jagged, CUDA)
    assert torch.equal(cuda.to_cpu(grad), expected)


def optimized(device, foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3, device=device)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        optimizer.step()
    return model, optimizer


def test_torch_chooses_foreach_as_on_the_target(cuda, mps, monkeypatch):
    calls = []
    adam = importlib.import_module("torch.optim.adam")
    multi = adam._multi_tensor_adam
    monkeypatch.setattr(adam, "_multi_tensor_adam", lambda *args, **more: calls.append(1) or multi(*args, **more))
    expected, _ = optimized("cpu", None)
    assert not calls
    with cuda, identity.foreach_by_default(PlainSimulatedTensor):
        model, optimizer = optimized("cuda", None)
        assert len(calls) == 3
        states = [state["exp_avg"].device for state in optimizer.state.values()]
        assert states == [CUDA] * 4
    assert all(
        torch.equal(cuda.to_cpu(one), other)
        for one, other in zip(model.parameters(), expected.parameters(), strict=True)
    )
    with mps, identity.foreach_by_default(PlainSimulatedTensor):
        optimized("mps", None)
    assert len(calls) == 3


def test_capturable_is_refused_where_torch_refuses_it(mps, cuda):
    for device, is_fine in ((cuda, True), (mps, False)):
        with device:
            model = nn.Linear(2, 2).to(device.device)
            optimizer = torch.optim.Adam(model.parameters(), capturable=True)
            model(torch.ones(1, 2, device=device.device)).sum().backward()
            if is_fine:
                optimizer.step()
                assert optimizer.state[model.weight]["step"].device == CUDA
            else:
                with pytest.raises(AssertionError, match="capturable"):
                    optimizer.step()


def test_two_targets_at_once_are_told_apart(cuda, mps):
    with cuda, mps:
        assert torch.ones(1, device="mps").device == torch.device("mps:0")
        assert torch.ones(1, device="cuda").device == CUDA
        with pytest.raises(RuntimeError, match=r"mps:0 and cuda:0!|cuda:0 and mps:0!"):
            torch.ones(2, device="mps") + torch.ones(2, device="cuda")


def test_legacy_types_make_tensors_on_it(cuda, mps):
    with cuda:
        made = torch.cuda.FloatTensor([1.0, 2.0])
        assert (made.device, made.dtype, made.tolist()) == (CUDA, torch.float32, [1.0, 2.0])
        assert torch.cuda.LongTensor(2, 3).shape == torch.cuda.LongTensor(torch.Size((2, 3))).shape == (2, 3)
        assert torch.cuda.HalfTensor().shape == (0,)
        assert isinstance(made, torch.cuda.FloatTensor)
        assert not isinstance(made, torch.cuda.DoubleTensor)
        assert not isinstance(made.cpu(), torch.cuda.FloatTensor)
        for asked in (torch.cuda.DoubleTensor, "torch.cuda.DoubleTensor"):
            assert (torch.ones(1).type(asked).device, made.type(asked).dtype) == (CUDA, torch.float64)
        assert made.type(torch.float16).dtype == torch.float16
        assert made.type("torch.FloatTensor").device.type == "cpu"
    with mps, pytest.raises(AssertionError, match="not compiled with CUDA"):
        torch.ones(1).type("torch.cuda.DoubleTensor")


def test_markers_of_a_profiler_do_nothing(cuda):
    with cuda, torch.cuda.nvtx.range("forward"):
        torch.cuda.nvtx.mark("here")
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.range_pop()


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_a_default_type_sets_dtype_and_device(cuda):
    with cuda:
        try:
            torch.set_default_tensor_type("torch.cuda.DoubleTensor")
            made = torch.ones(1)
            assert (made.device, made.dtype) == (CUDA, torch.float64)
            torch.set_default_tensor_type(torch.cuda.FloatTensor)
            assert (torch.ones(1).device, torch.ones(1).dtype) == (CUDA, torch.float32)
        finally:
            torch.set_default_tensor_type(torch.FloatTensor)
        assert torch.ones(1).device.type == "cpu"
    assert torch.ones(1).device.type == "cpu"


def test_a_memory_pool_is_not_simulated(cuda):
    with cuda, pytest.raises(NotSimulated) as raised:
        torch.cuda.MemPool()
    assert unsupported_operation(raised.value) == "torch.cuda.MemPool"


LIMITS = {
    "no kernel": (NotImplementedError("Could not run 'my::op' with arguments from the 'CPU' backend. More"), "my::op"),
    "no dtype": (RuntimeError("\"histogram_cpu\" not implemented for 'Half'"), "histogram_cpu"),
    "an extension": (RuntimeError("x must be a CUDA tensor"), ""),
    "a build without CUDA": (AttributeError("module 'torch._C' has no attribute '_scatter'"), "_scatter"),
    "not of torch": (ValueError("x must be a CUDA tensor"), None),
    "another": (RuntimeError("\"sigmoid\" not implemented for 'Long'"), None),
}


@pytest.mark.parametrize(("error", "operation"), LIMITS.values(), ids=LIMITS)
def test_limits_of_the_simulation_are_recognized(error, operation):
    assert unsupported_operation(error) == operation


def test_an_error_of_the_users_code_is_no_limit():
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("x must be a CUDA tensor")
    assert unsupported_operation(raised.value) is None


def test_what_was_replaced_is_put_back(cuda):
    owners = torch.Tensor, torch.UntypedStorage, threading.Thread, torch.utils._device.DeviceContext, torch.cuda
    before = [dict(vars(one)) for one in owners]
    with cuda:
        assert [dict(vars(one)) for one in owners] != before
    assert [dict(vars(one)) for one in owners] == before

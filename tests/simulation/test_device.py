from __future__ import annotations

import copy
import functools
import inspect
import subprocess
import sys
from operator import attrgetter

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ckptmove.simulation import device as simulated  # it imports torch
from ckptmove.simulation.device import SimulatedDevice, unavailable_reason  # it imports torch
from ckptmove.simulation.errors import CrossDeviceError  # it imports torch

OPTIMIZERS = sorted(
    name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and name != torch.optim.Optimizer.__name__
)
CAPTURABLE = [name for name in OPTIMIZERS if "capturable" in inspect.signature(getattr(torch.optim, name)).parameters]
FUSED = [name for name in OPTIMIZERS if "fused" in inspect.signature(getattr(torch.optim, name)).parameters]
FOREACH = [name for name in OPTIMIZERS if "foreach" in inspect.signature(getattr(torch.optim, name)).parameters]


def drawn(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def gradients(name, step):
    dense = drawn(10 + step, (4, 3), (5, 2))
    if name != "SparseAdam":
        return dense
    rows = torch.tensor([[0, 2, 0]])
    return [torch.sparse_coo_tensor(rows, grad[:3], grad.shape, check_invariants=True) for grad in dense]


def stepped(name, options, weights, state, steps, put):
    """Parameters and optimizer after `steps`, from a CPU `state` that goes through load_state_dict."""
    params = [nn.Parameter(weight) for weight in weights]
    optimizer = getattr(torch.optim, name)(params, **options)
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    for step in steps:
        grads = [put(grad) for grad in gradients(name, step)]

        def closure(grads=grads):
            optimizer.zero_grad()
            loss = sum((param * grad).sum() + (param**4).sum() for param, grad in zip(params, grads, strict=True))
            loss.backward()
            return loss

        if name == "LBFGS":
            optimizer.step(closure)
        else:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
    return params, optimizer


def tensors_of(optimizer):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(optimizer.state_dict()) if isinstance(leaf, torch.Tensor)]


def resume_both(device, name, cpu_options, sim_options):
    """The same three steps after a resume, on the CPU and on the device: (values, state) of each, as CPU tensors."""
    start, first = stepped(name, cpu_options, drawn(1, (4, 3), (5, 2)), None, range(2), lambda grad: grad)
    weights = [param.detach().clone() for param in start]
    state = copy.deepcopy(first.state_dict())
    with device:
        params, optimizer = stepped(
            name, sim_options, [device.to_device(weight) for weight in weights], flagged(state, sim_options),
            range(2, 5), device.to_device,
        )  # fmt: skip
    assert {device.device_of(param) for param in params} == {"cuda:0"}
    expected, reference = stepped(name, cpu_options, weights, state, range(2, 5), lambda grad: grad)
    got = [device.to_cpu(tensor) for tensor in (*params, *tensors_of(optimizer))]
    return [*(param.detach() for param in expected), *tensors_of(reference)], got


def flagged(state, options):
    state = copy.deepcopy(state)
    for group in state["param_groups"]:
        group.update(options)
    return state


def assert_same_bits(expected, got):
    assert len(expected) == len(got)
    for one, other in zip(expected, got, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.unmeasured
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch.optim.SparseAdam's own constructor call
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_after_a_resume_are_those_of_the_cpu(cuda, name):
    assert_same_bits(*resume_both(cuda, name, {}, {}))


@pytest.mark.unmeasured
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", FOREACH)
def test_foreach_changes_nothing(cuda, name, foreach):
    options = {"foreach": foreach}
    assert_same_bits(*resume_both(cuda, name, options, options))


@pytest.mark.parametrize("name", FUSED)
def test_fused_runs_the_fused_kernel(cuda, name):
    assert_same_bits(*resume_both(cuda, name, {"fused": True}, {"fused": True}))


@pytest.mark.unmeasured
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable_is_accepted_and_agrees_with_the_plain_step(cuda, name, foreach):
    expected, got = resume_both(cuda, name, {"foreach": foreach}, {"foreach": foreach, "capturable": True})
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6, check_dtype=False)


def test_the_state_is_on_the_device(cuda):
    with cuda:
        _, optimizer = stepped("Adam", {}, [cuda.to_device(w) for w in drawn(1, (4, 3), (5, 2))], None, range(1),
                               cuda.to_device)  # fmt: skip
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert {key: cuda.device_of(value) for key, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "cuda:0",
        "exp_avg_sq": "cuda:0",
    }


def test_moments_left_on_the_cpu_are_refused(cuda):
    with cuda:
        params, optimizer = stepped("Adam", {}, [cuda.to_device(w) for w in drawn(1, (4, 3), (5, 2))], None, range(1),
                                    cuda.to_device)  # fmt: skip
        moments = optimizer.state[params[0]]
        moments["exp_avg"] = cuda.to_cpu(moments["exp_avg"])
        with pytest.raises(CrossDeviceError, match=r"at least two devices, cuda:0 and cpu!") as raised:
            optimizer.step()
    assert raised.value.operation == "aten::lerp_"
    assert raised.value.devices == ("cuda:0", "cpu")
    assert raised.value.strays[0] is moments["exp_avg"]


def test_a_fused_step_on_the_cpu_is_refused(cuda):
    with cuda:
        options = {"fused": True}
        params, optimizer = stepped("Adam", options, [cuda.to_device(w) for w in drawn(1, (4, 3), (5, 2))], None,
                                    range(1), cuda.to_device)  # fmt: skip
        for state in optimizer.state.values():
            state["step"] = cuda.to_cpu(state["step"])
        with pytest.raises(CrossDeviceError):
            optimizer.step()
    assert cuda.device_of(params[0]) == "cuda:0"


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells = kind(3, 4, batch_first=True)

    def forward(self, images):
        return self.cells(images.flatten(2).transpose(1, 2)[:, :5])[0]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, images):
        return self.encoder(self.words(images.flatten(1)[:, :6].abs().mul(2).long()))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3),
        nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 5), nn.LayerNorm(5),
    )  # fmt: skip


MODELS = {
    "convolutions": convolutions,
    "embedding and attention": Words,
    "LSTM": functools.partial(Recurrent, nn.LSTM),
    "GRU": functools.partial(Recurrent, nn.GRU),
    "RNN": functools.partial(Recurrent, nn.RNN),
}


def trained(model, images, frozen=None):
    if frozen is not None:
        frozen(model).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3)
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(out := model(images), torch.zeros_like(out))
        loss.backward()
        optimizer.step()
    return [loss.detach(), *model.state_dict().values()]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_forward_backward_and_step_of_a_model_are_those_of_the_cpu(cuda, make):
    torch.manual_seed(0)
    here = make()
    there = copy.deepcopy(here)
    (images,) = drawn(2, (4, 3, 10, 10))
    with cuda:
        got = trained(there.to(cuda.device), images.to(cuda.device))
        assert {cuda.device_of(tensor) for tensor in there.state_dict().values()} == {"cuda:0"}
    assert_same_bits(trained(here, images), [cuda.to_cpu(tensor) for tensor in got])


def test_a_frozen_weight_in_a_whole_op_gets_no_gradient(cuda):
    torch.manual_seed(0)
    here = Recurrent(nn.LSTM)
    there = copy.deepcopy(here)
    (images,) = drawn(2, (4, 3, 10, 10))
    frozen = attrgetter("cells.weight_hh_l0")
    with cuda:
        got = trained(there.to(cuda.device), images.to(cuda.device), frozen)
    assert frozen(there).grad is None
    assert_same_bits(trained(here, images, frozen), [cuda.to_cpu(tensor) for tensor in got])


def test_a_whole_op_leaves_unused_inputs_without_a_gradient(cuda):
    with cuda:
        query, key = (cuda.to_device(t).requires_grad_() for t in drawn(4, (1, 1, 1, 4), (1, 1, 1, 4)))
        value = torch.zeros(1, 1, 1, 4, device=cuda.device)
        lengths = torch.tensor([1])
        loss = nn.functional.ctc_loss(
            query[0].log_softmax(-1), torch.tensor([[1]], device=cuda.device), lengths, lengths
        )
        loss.backward()
        assert torch.isfinite(query.grad.cpu()).all()
        assert nn.functional.scaled_dot_product_attention(query, key, value).requires_grad


def test_packed_sequences_keep_their_lengths_on_the_cpu(cuda):
    (batch,) = drawn(5, (2, 5, 3))
    cells = nn.GRU(3, 4, batch_first=True)
    there = copy.deepcopy(cells)

    def run(model, data):
        packed = nn.utils.rnn.pack_padded_sequence(data, torch.tensor([5, 3]), batch_first=True)
        assert packed.batch_sizes.device.type == "cpu"
        out, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        out.sum().backward()
        return [out.detach(), *(param.grad for param in model.parameters())]

    with cuda:
        got = [cuda.to_cpu(tensor) for tensor in run(there.to(cuda.device), cuda.to_device(batch))]
    assert_same_bits(run(cells, batch), got)


def test_inference_mode_decomposes_and_stays_on_the_device(cuda):
    model = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 2))
    (batch,) = drawn(5, (2, 3))
    with torch.inference_mode():
        expected = model(batch)[0]
        with cuda:
            ours = cuda.to_device(batch)
            got = model.to(cuda.device)(ours)[0]
            assert cuda.device_of(batch.to(cuda.device)) == "cuda:0"
            assert cuda.device_of(nn.functional.one_hot(torch.tensor([1], device=cuda.device))) == "cuda:0"
    assert torch.equal(expected, cuda.to_cpu(got))


def test_functional_call_puts_parameters_into_an_unchanged_module(cuda):
    model = nn.Linear(3, 2)
    (batch,) = drawn(6, (4, 3))
    with cuda:
        params = {name: nn.Parameter(cuda.to_device(value)) for name, value in model.state_dict().items()}
        out = torch.func.functional_call(model, params, (cuda.to_device(batch),))
        out.sum().backward()
    assert isinstance(params["weight"], nn.Parameter)
    assert cuda.device_of(params["weight"].grad) == "cuda:0"
    assert torch.equal(cuda.to_cpu(out), model(batch).detach())


def test_parameters_left_on_the_cpu_are_refused_by_name(cuda):
    model = nn.Linear(3, 2)
    with cuda, pytest.raises(CrossDeviceError) as raised:
        model(torch.ones(1, 3, device=cuda.device))
    assert raised.value.operation == "aten::addmm"
    assert raised.value.strays[0] is model.bias
    assert raised.value.strays[1]._base is model.weight


def test_activation_checkpointing_draws_the_same_dropout_twice(cuda):
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    (batch,) = drawn(7, (4, 8))

    def gradient(weighted, data):
        torch.manual_seed(1)
        checkpoint(weighted, data, use_reentrant=False).sum().backward()
        return weighted[0].weight.grad

    there = copy.deepcopy(model)
    with cuda:
        got = gradient(there.to(cuda.device), cuda.to_device(batch))
    assert torch.equal(gradient(model, batch), cuda.to_cpu(got))


@pytest.mark.slow
@pytest.mark.usefixtures("cuda")  # skips a torch that cannot simulate it
def test_backward_works_after_one_without_the_device():
    code = (
        "import torch; w = torch.ones(2, requires_grad=True); w.sum().backward()\n"
        "from ckptmove.simulation.device import SimulatedDevice\n"
        "with SimulatedDevice('xpu:5') as sim:\n"
        "    p = torch.nn.Parameter(torch.ones(2, device=sim.device)); (p * p).sum().backward()\n"
        "print(sim.device_of(p.grad), p.grad.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("xpu:5 [2.0, 2.0]", 0), done.stderr


def mixtures(device):
    """Mixed operands that torch refuses on a real accelerator."""
    long, pair, square = torch.ones(3), torch.ones(2, 3), torch.ones(2, 2)
    return {
        "add": lambda: device(pair) + long,
        "add, the other way": lambda: long + device(pair),
        "device scalar with a CPU vector": lambda: device(long).sum() + long,
        "CPU scalar written to": lambda: torch.zeros(()).add_(device(long).sum()),
        "matmul": lambda: square @ device(pair),
        "cat": lambda: torch.cat([device(pair), pair]),
        "equal": lambda: torch.equal(device(pair), pair),
        "CPU tensor indexed from the device": lambda: long[device(torch.tensor([1]))],
        "values put from the CPU": lambda: device(pair).index_put_((torch.tensor([1]),), long),
        "out": lambda: torch.add(device(pair), 1, out=torch.empty(2, 3)),
        "foreach": lambda: torch._foreach_add([device(pair), device(long)], [pair, device(long)]),
        "attention": lambda: nn.functional.scaled_dot_product_attention(
            device(torch.ones(1, 1, 2, 2)), torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
        ),
        "criterion weight": lambda: nn.functional.cross_entropy(
            device(pair), device(torch.tensor([0, 1])), weight=long
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", mixtures(None))
def test_operands_of_two_devices_are_refused(cuda, case):
    text = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    with cuda, pytest.raises(CrossDeviceError) as raised:
        mixtures(cuda.to_device)[case]()
    assert str(raised.value) == text
    assert isinstance(raised.value, RuntimeError)


def test_what_may_mix_mixes(cuda):
    with cuda:
        pair = cuda.to_device(torch.arange(6.0).reshape(2, 3))
        assert (pair + torch.tensor(1.5)).tolist() == [[1.5, 2.5, 3.5], [4.5, 5.5, 6.5]]
        assert cuda.device_of(torch.tensor(2.0) * pair) == "cuda:0"
        assert pair[torch.tensor([1])].tolist() == [[3.0, 4.0, 5.0]]
        assert pair[torch.tensor([False, True])].tolist() == [[3.0, 4.0, 5.0]]
        pair[torch.tensor([0])] = torch.tensor(9.0)
        assert pair[0].tolist() == [9.0, 9.0, 9.0]
        assert cuda.device_of(torch.tensor(1.0) + torch.tensor(2.0)) == "cpu"


def test_foreach_lists_may_span_devices_index_by_index(cuda):
    with cuda:
        there, here = cuda.to_device(torch.ones(2)), torch.ones(3)
        sums = torch._foreach_add([there, here], [there, here])
        torch._foreach_copy_([there], [torch.tensor([5.0, 6.0])])
    assert [cuda.device_of(tensor) for tensor in sums] == ["cuda:0", "cpu"]
    assert there.tolist() == [5.0, 6.0]


def test_copies_cross(cuda):
    with cuda:
        here = torch.arange(3.0)
        there = here.to(cuda.device)
        there.add_(1)
        assert here.tolist() == [0.0, 1.0, 2.0]
        back = there.cpu()
        there.copy_(here)
        here.copy_(there * 2)
        assert type(back) is torch.Tensor
    assert (back.tolist(), there.tolist(), here.tolist()) == ([1.0, 2.0, 3.0], [0.0, 1.0, 2.0], [0.0, 2.0, 4.0])


def test_factories_and_constructors(cuda):
    device = cuda.device
    with cuda:
        made = [
            torch.zeros(2, device=device),
            torch.tensor([0.0, 0.0], device=device),
            torch.as_tensor([0.0, 0.0], device=device),
            torch.full((2,), 0.0, device=device),
            torch.zeros_like(torch.ones(2, device=device)),
            torch.ones(2, device=device).new_zeros(2),
            torch.ones(2, device=device).new_tensor([0.0, 0.0]),
            torch.empty_like(torch.ones(2), device=device).zero_(),
            torch.ones(1, device=device).new(2).zero_(),
        ]
        assert torch.empty_like(made[0], device="cpu").device.type == "cpu"
    assert {cuda.device_of(tensor) for tensor in made} == {"cuda:0"}
    assert [tensor.tolist() for tensor in made] == [[0.0, 0.0]] * len(made)


def test_the_device_that_is_entered_is_the_current_one(mps, cuda):
    for device in (mps, cuda, mps):
        with device:
            assert (
                device.device_of(torch.ones(1, device=device.device).new(2)) == f"{device.target.partition(':')[0]}:0"
            )
    with mps, cuda:
        assert cuda.device_of(torch.ones(1, device=cuda.device).new(2)) == "cuda:0"


def test_views_alias_and_in_place_shows_in_the_base(cuda):
    with cuda:
        base = cuda.to_device(torch.zeros(2, 3))
        base[0].add_(1)
        base.view(-1)[4:].fill_(7)
        base.t()[0, 1] = 5
        parameter = nn.Parameter(base.clone())
        product = parameter * 1
        product[0].mul_(3)
        product.sum().backward()
        assert torch.equal(base, torch.tensor([[1.0, 1.0, 1.0], [5.0, 7.0, 7.0]], device=cuda.device))
    assert parameter.grad.tolist() == [[3.0, 3.0, 3.0], [1.0, 1.0, 1.0]]


def test_shapes_follow_operations_that_change_them_in_place(cuda):
    with cuda:
        tensor = cuda.to_device(torch.arange(6.0).reshape(2, 3))
        tensor.t_()
        assert (tensor.shape, tensor.stride()) == ((3, 2), (1, 3))
        tensor.unsqueeze_(0)
        out = torch.empty(0, device=cuda.device)
        torch.add(tensor, tensor, out=out)
        assert out.shape == tensor.shape == (1, 3, 2)
        out.resize_(2)
        assert out.shape == cuda.to_cpu(out).shape == (2,)


def test_module_goes_there_and_back_and_keeps_its_parameters(cuda):
    model = nn.Linear(2, 2)
    stored = copy.deepcopy(model.state_dict())
    held = list(model.parameters())
    with cuda:
        model.to(cuda.device)
        assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
        model.load_state_dict(stored)
        other = nn.Linear(2, 2).to(cuda.device)
        other.load_state_dict({name: cuda.to_device(value) for name, value in stored.items()}, assign=True)
        assert cuda.device_of(copy.deepcopy(other).weight) == "cuda:0"
        model.to("cpu")
        assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert type(model.weight) is nn.Parameter
    assert torch.equal(model.weight, stored["weight"])
    assert torch.equal(cuda.to_cpu(other.weight), stored["weight"])


def test_values_come_out_as_on_the_target(cuda):
    there = cuda.to_device(torch.tensor([1.5, 2.0]))
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        there.numpy()
    assert there.numpy(force=True).tolist() == there.tolist() == [1.5, 2.0]
    assert there[0].item() == 1.5
    assert f"{there[0]:.2f}" == "1.50"
    assert repr(there) == "tensor([1.5000, 2.0000], device='cuda:0')"


def test_it_is_taken_apart_and_put_together_as_torch_subclasses_are(cuda):
    there = cuda.to_device(torch.ones(2))
    parts, device = there.__tensor_flatten__()
    again = type(there).__tensor_unflatten__(
        {part: getattr(there, part) for part in parts}, device, there.size(), there.stride()
    )
    assert (again.tolist(), cuda.device_of(again)) == ([1.0, 1.0], "cuda:0")


def test_what_is_shared_with_the_cpu(cuda):
    here = torch.zeros(2, 3).t()
    there = cuda.to_device(here)
    there.add_(1)
    cuda.to_cpu(there).mul_(5)
    assert here.sum() == 0
    assert there.stride() == here.stride()
    assert there.tolist() == [[5.0, 5.0]] * 3
    assert cuda.to_cpu(here).data_ptr() == here.data_ptr()


def test_each_target_has_its_own_name_and_its_own_device(cuda, mps):
    third = SimulatedDevice("cuda:3")
    names = [device.device_of(device.to_device(torch.ones(1))) for device in (cuda, mps, third)]
    assert names == ["cuda:0", "mps:0", "cuda:3"]
    assert (mps.target, third.target) == ("mps", "cuda:3")
    assert SimulatedDevice("cuda:3").device == third.device
    assert cuda.device_of(torch.ones(1)) == "cpu"
    with third, pytest.raises(CrossDeviceError, match="cuda:0 and cuda:3!"):
        cuda.to_device(torch.ones(2)) + third.to_device(torch.ones(2))


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.float64, "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"),
        (torch.complex128, "Trying to convert ComplexDouble to the MPS backend"),
    ],
)
def test_mps_has_no_doubles(cuda, mps, dtype, text):
    with mps:
        for attempt in (
            lambda: mps.to_device(torch.ones(1, dtype=dtype)),
            lambda: torch.ones(1, dtype=dtype).to(mps.device),
            lambda: torch.ones(1, dtype=dtype, device=mps.device),
            lambda: torch.tensor([1.0], dtype=dtype, device=mps.device),
            lambda: torch.ones(1, device=mps.device).to(dtype),
        ):
            with pytest.raises(TypeError, match=text):
                attempt()
        half = mps.to_device(torch.ones(2)) * torch.tensor(0.5, dtype=torch.float64)
    assert half.dtype == torch.float32
    assert cuda.to_device(torch.ones(1, dtype=dtype)).dtype == dtype


def test_random_state_is_the_cpus(cuda):
    with cuda:
        torch.manual_seed(5)
        there = torch.rand(3, device=cuda.device)
    torch.manual_seed(5)
    assert torch.equal(cuda.to_cpu(there), torch.rand(3))
    module = torch.sim
    assert module.is_available()
    assert module.is_initialized()
    assert module.current_device() == 0
    assert module.device_count() >= 1
    assert torch.bfloat16 in module.get_amp_supported_dtype()


def test_why_a_process_cannot_simulate(cuda, monkeypatch):
    assert unavailable_reason() is None
    monkeypatch.setattr(simulated, "_register_backend", functools.cache(lambda: None))
    assert unavailable_reason().endswith("'sim'")
    with pytest.raises(RuntimeError, match="PrivateUse1"):
        SimulatedDevice("cuda:0")
    monkeypatch.setattr(simulated, "_get_privateuse1_backend_name", lambda: "privateuseone")
    assert unavailable_reason() is None
    monkeypatch.setattr(simulated, "_SETUP", "_not_in_this_torch")
    assert unavailable_reason().startswith(f"torch {torch.__version__} ")

"""CUDA graphs on a simulated device: replays equal eager steps bit for bit, and captures refuse what a GPU refuses."""

from __future__ import annotations

import contextlib
import gc

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional as F  # noqa: N812

from ckptmove.verification.simulated.errors import NotSimulated  # it imports torch


class Recurrent(nn.Module):
    """Functions that run whole on the CPU: an LSTM with dropout, and attention."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        hidden = self.lstm(x.view(-1, 2, 3, 1).expand(-1, 2, 3, 2).reshape(-1, 2, 6))[0]
        return self.attention(hidden, hidden, hidden, need_weights=False)[0].mean(1)


MODELS = {
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(), nn.Flatten(),
        nn.Linear(12, 8),
    ),
    "recurrent": Recurrent,
}  # fmt: skip
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1, capturable=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.1, capturable=True, foreach=False),
}


class Training:
    """A model, its optimizer and static inputs on the device."""

    def __init__(self, model, optimizer):
        torch.manual_seed(0)
        self.model = MODELS[model]().cuda()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.x, self.y = torch.randn(4, 6, device="cuda"), torch.randn(4, 8, device="cuda")

    def step(self):
        loss = F.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss

    def warm_up(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.optimizer.zero_grad()
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad()

    def state(self):
        """Copies of the values of model and optimizer."""
        entries = [one.values() for one in self.optimizer.state.values()]
        tensors = [one for values in (self.model.state_dict().values(), *entries) for one in values]
        return [one.detach().cpu().clone() for one in tensors if isinstance(one, torch.Tensor)]

    def gradients(self):
        return [one.grad.cpu().clone() for one in self.model.parameters()]


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 8, generator=generator)) for _ in range(3)]


def equal(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.unmeasured
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_replays_of_a_training_step_equal_eager_steps(cuda, model, optimizer):
    with cuda:
        eager, graphed = Training(model, optimizer), Training(model, optimizer)
        for one in (eager, graphed):
            torch.manual_seed(2)
            one.warm_up()
        before, numbers = graphed.state(), torch.cuda.get_rng_state()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = graphed.step()
        assert equal(graphed.state(), before)
        assert torch.equal(torch.cuda.get_rng_state(), numbers)
        assert loss.isnan().item()
        losses = []
        for one in (eager, graphed):
            torch.manual_seed(3)
            for x, y in batches():
                one.x.copy_(x)
                one.y.copy_(y)
                if one is eager:
                    one.optimizer.zero_grad()
                    losses.append(one.step().item())
                else:
                    graph.replay()
                    losses.append(loss.item())
        assert losses[:3] == losses[3:]
        assert equal(eager.state(), graphed.state())
        assert equal(eager.gradients(), graphed.gradients())


def test_tensors_of_a_file_are_captured(cuda, tmp_path):
    """The storage of a loaded tensor shows the device."""
    with cuda:
        torch.save(torch.ones(3, device="cuda"), tmp_path / "x.pth")
        x = torch.load(tmp_path / "x.pth")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
        assert x.tolist() == [1] * 3
        graph.replay()
        assert x.tolist() == [2] * 3


def test_forward_and_backward_are_captured_apart(cuda):
    """The tensors that autograd saved are free after the backward, and their memory stays that of the graphs."""
    with cuda:
        layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).cuda()
        x, slope = torch.randn(2, 3, device="cuda"), torch.empty(2, 2, device="cuda")
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward):
            made = layers(x)
        with torch.cuda.graph(backward, pool=forward.pool()):
            grads = torch.autograd.grad(made, tuple(layers.parameters()), slope)
        gc.collect()
        for seed in range(2):
            torch.manual_seed(seed)
            x.normal_()
            slope.normal_()
            forward.replay()
            backward.replay()
            wanted = layers(x)
            assert torch.equal(made, wanted)
            assert equal(grads, torch.autograd.grad(wanted, tuple(layers.parameters()), slope))


def test_a_double_backward_is_captured(cuda):
    with cuda:
        x = torch.randn(2, 3, 4, device="cuda", requires_grad=True)

        def penalty():
            made = F.scaled_dot_product_attention(x, x, x)
            (slope,) = torch.autograd.grad(made.pow(2).sum(), x, create_graph=True)
            return torch.autograd.grad(slope.pow(2).sum(), x)[0]

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = penalty()
        with torch.no_grad():
            x.normal_()
        graph.replay()
        assert torch.equal(made, penalty())


def test_a_replay_writes_views_and_operands_in_place(cuda):
    with cuda:
        x, table = torch.zeros(4, device="cuda"), torch.zeros(3, 2, dtype=torch.complex64, device="cuda")
        pinned, there = torch.zeros(4).pin_memory(), torch.zeros(4).pin_memory()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            x.copy_(pinned, non_blocking=True)
            x[1:3].add_(torch.tensor(2.0))
            table.t()[1].conj().imag.add_(1)
            doubled = x * 2
            doubled[0] = 7
            there.copy_(doubled, non_blocking=True)
            back = doubled.to("cpu", non_blocking=True)
        assert x.tolist() == [0] * 4
        for value in (1.0, 3.0):
            pinned.fill_(value)
            graph.replay()
            assert x.tolist() == [value, value + 2, value + 2, value]
            assert doubled.tolist() == there.tolist() == back.tolist() == [7, 2 * value + 4, 2 * value + 4, 2 * value]
        assert table.tolist() == [[0, -2j]] * 3


def test_memory_that_the_script_frees_has_lost_its_values(cuda):
    with cuda:
        x = torch.ones(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = x + 1
        graph.replay()
        assert made.tolist() == [2.0] * 3
        del x
        graph.replay()
        assert made.isnan().all().item()
        del made
        graph.replay()


def test_each_replay_draws_new_numbers(cuda):
    with cuda:
        own = torch.Generator("cuda").manual_seed(3)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(own)
        with torch.cuda.graph(graph):
            made = torch.rand(3, device="cuda"), torch.rand(3, device="cuda", generator=own)
            drawn = torch.rand(3)
        torch.manual_seed(4)
        graph.replay()
        first = [one.clone() for one in made]
        graph.replay()
        assert not any(torch.equal(one, other) for one, other in zip(first, made, strict=True))
        torch.manual_seed(4)
        assert torch.equal(first[0], torch.rand(3, device="cuda"))
        assert torch.equal(first[1], torch.rand(3, generator=torch.Generator("cuda").manual_seed(3), device="cuda"))
        assert len(drawn) == 3
        with pytest.raises(RuntimeError, match="not in capture mode"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.rand(3, device="cuda", generator=torch.Generator("cuda"))


NOT_PERMITTED, UNPINNED = "operation not permitted when stream is capturing", "unless the CPU tensor is pinned"
WAITING = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "print": str,
    "format": lambda x: f"{x[0]}",
    "numpy": lambda x: x.numpy(force=True),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "write by a mask": lambda x: x.index_put_((x > 0,), torch.ones(4, device="cuda")),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
    "inverse": lambda x: torch.linalg.inv(torch.eye(2, device="cuda")),
    "blocking copy from pinned memory": lambda x: x.copy_(PINNED[0]),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "stream query": lambda x: torch.cuda.current_stream().query(),
    "event": lambda x: torch.cuda.Event().synchronize(),
    "event query": lambda x: torch.cuda.Event().query(),
}
COPYING = {
    "cpu": lambda x: x.cpu(),
    "to the device": lambda x: torch.ones(2).cuda(),
    "asynchronously": lambda x: torch.ones(2).to("cuda", non_blocking=True),
    "tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "into an input": lambda x: x.copy_(torch.ones(4)),
    "indices": lambda x: x[torch.tensor([0, 1])],
}
PINNED = []


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        *((call, torch.AcceleratorError, NOT_PERMITTED) for call in WAITING.values()),
        *((call, RuntimeError, UNPINNED) for call in COPYING.values()),
    ],
    ids=[*WAITING, *COPYING],
)
def test_a_call_that_a_graph_cannot_hold_is_refused(cuda, call, kind, said):
    with cuda:
        PINNED[:] = [torch.ones(4).pin_memory()]
        x = torch.ones(4, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            call(x)
        with pytest.raises(kind, match=said), torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(x)
        caught = torch.cuda.CUDAGraph()
        is_invalid = kind is torch.AcceleratorError
        ends = pytest.raises(kind, match="previous error") if is_invalid else contextlib.nullcontext()
        with ends, torch.cuda.graph(caught):
            x.add_(1)
            with pytest.raises(kind, match=said):
                call(x)
        assert x.tolist() == [1] * 4
        if is_invalid:
            with pytest.raises(RuntimeError, match="without a preceding successful capture"):
                caught.replay()
        else:
            caught.replay()
            assert x.tolist() == [2] * 4


def test_operations_with_known_shapes_are_captured(cuda):
    with cuda:
        x, index = torch.ones(4, device="cuda", requires_grad=True), torch.arange(3, device="cuda")

        def call():
            made = x * 2
            made[made > 1] = 3.0
            made = made[index] + F.one_hot(index, 3).sum(0)
            made = torch.repeat_interleave(made, index, output_size=3)
            made.sum().backward()
            nn.utils.clip_grad_norm_([x], 1.0)
            return torch.where(made > 0, made, 0)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = call()
        graph.replay()
        assert made.tolist() == [4.0] * 3
        wanted, x.grad = x.grad.tolist(), None
        call()
        assert x.grad.tolist() == wanted


def test_the_optimizer_must_be_capturable(cuda):
    with cuda:
        weight = torch.ones(2, device="cuda", requires_grad=True)
        weight.grad = torch.ones(2, device="cuda")
        optimizer = torch.optim.Adam([weight])
        with pytest.raises(RuntimeError, match="capturable is False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


def test_a_graph_is_captured_step_by_step(cuda):
    with cuda:
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(2, device="cuda")
        with pytest.raises(RuntimeError, match="non-default stream"):
            graph.capture_begin()
        with pytest.raises(RuntimeError, match="before capture_begin"):
            graph.capture_end()
        for call in (graph.replay, graph.pool):
            with pytest.raises(RuntimeError, match="without a preceding successful capture"):
                call()
        stream = torch.cuda.Stream()
        with stream:
            graph.capture_begin(torch.cuda.graph_pool_handle())
            assert torch.cuda.is_current_stream_capturing()
            with pytest.raises(RuntimeError, match="operation not permitted"):
                torch.cuda.CUDAGraph().capture_begin()
            with pytest.raises(RuntimeError, match="previous error"):
                graph.capture_end()
            graph.capture_begin()
            assert stream.is_capturing()
            with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="same stream"):
                graph.capture_end()
            x += 1
            graph.capture_end()
            with pytest.raises(RuntimeError, match="already owns a captured graph"):
                graph.capture_begin()
        graph.instantiate()
        graph.replay()
        assert x.tolist() == [1, 1]
        with pytest.raises(NotSimulated):
            graph.raw_cuda_graph()
        graph.reset()
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()
        with pytest.warns(UserWarning, match="CUDA Graph is empty"), torch.cuda.graph(graph):
            pass
        assert graph.pool() != torch.cuda.graph_pool_handle()


def test_a_graph_of_sparse_tensors_is_a_limit_of_the_simulation(cuda):
    with cuda:
        x, sparse = torch.ones(2, 2, device="cuda"), torch.eye(2, device="cuda").to_sparse()
        with pytest.raises(NotSimulated), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.sparse.mm(sparse, x)


def test_graphed_callables_are_captured_once(cuda):
    with cuda:
        x = torch.ones(2, 3, device="cuda")
        layers = nn.BatchNorm1d(3).cuda(), nn.Linear(3, 2).cuda()
        assert torch.cuda.make_graphed_callables(layers, ((x,), (x,))) is layers
        assert layers[0].num_batches_tracked.item() == 0
        assert torch.cuda.make_graphed_callables(layers[1], (x,)) is layers[1]
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            torch.cuda.make_graphed_callables(lambda x: x * x.sum().item(), (x,))

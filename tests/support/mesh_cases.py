"""Sharded cases for tests under torchrun: layouts, and resumes with a fault that a check has to find."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptmove


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=6, hidden=10, words=20, layers=1, tied=False):
        super().__init__()
        self.emb = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("seen", torch.arange(7.0))
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


#: Layouts of FSDP1: sharding strategy, and whether the optimizer has the original parameters.
FLAT = {
    "fsdp1": (None, True),
    "fsdp1_whole": (ShardingStrategy.NO_SHARD, True),
    "flattened": (None, False),
    "flattened_whole": (ShardingStrategy.NO_SHARD, False),
}


def sharded(model, layout):
    size = dist.get_world_size()
    if layout == "plain":
        return model
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout in FLAT:
        strategy, has_own = FLAT[layout]
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=has_own,
        )
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"emb": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
        for index in range(len(model.layers)):
            plan |= {f"layers.{index}.up": ColwiseParallel(), f"layers.{index}.down": RowwiseParallel()}
        parallelize_module(model, both["tp"], plan)
        mesh = both["dp"]
    if layout != "tp":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def build(layout, make=adamw, *, flat=False, seed=9, state=None, dtype=torch.float32, frozen=False, **sizes):
    torch.manual_seed(seed)
    model = sharded(Net(**sizes).to(dtype), layout)
    if layout not in FLAT:
        model.get_parameter("module.emb.weight" if layout == "ddp" else "emb.weight").requires_grad_(not frozen)
    optimizer = make(model.parameters())
    ids = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(3))

    def step(batch):
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    made = (state or state_of)(model, optimizer, **({"flat": flat} if state is None else {}))
    return ckptmove.Case(model, optimizer, None, ids, step, state=made)


def state_of(model, optimizer, *, flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    own, optim = get_state_dict(model, optimizer, options=options)
    return {"model": own, "optim": optim}


class Stage(nn.Module):
    """The modules of one stage of a pipeline."""

    def __init__(self, net, index):
        super().__init__()
        last = len(net.layers) - 1
        self.layers = nn.ModuleDict({str(index): net.layers[index]})
        if index == 0:
            self.emb = net.emb
        if index == last:
            self.head = net.head

    def forward(self, x):
        x = self.emb(x) if hasattr(self, "emb") else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if hasattr(self, "head") else x


def loss_of_stage(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def stepping(schedule, size):
    """The ``step`` of a case with a pipeline."""
    rank = dist.get_rank()

    def step(batch):
        losses = []
        if rank == 0:
            schedule.step(batch)
        elif rank < size - 1:
            schedule.step()
        else:
            schedule.step(target=batch, losses=losses)
        return torch.stack(losses).mean().detach() if losses else None

    return step


def pipeline(*, flat):
    torch.manual_seed(9)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Stage(Net(layers=size), rank)
    optimizer = adamw(model.parameters())
    schedule = ScheduleGPipe(PipelineStage(model, rank, size, torch.device("cpu")), 2, loss_fn=loss_of_stage)
    ids = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(3))
    return ckptmove.Case(
        model, optimizer, None, ids, stepping(schedule, size), state=state_of(model, optimizer, flat=flat)
    )


def interleaved(*, shared=False):
    """Two stages on each rank, in a state without the names of the stages, as that of torchtitan."""
    torch.manual_seed(9)
    rank, size = dist.get_rank(), dist.get_world_size()
    net = Net(layers=2 * size)
    models = {str(index): Stage(net, index) for index in (rank, rank + size)}
    optimizers = {name: adamw(model.parameters()) for name, model in models.items()}
    stages = [PipelineStage(model, int(name), 2 * size, torch.device("cpu")) for name, model in models.items()]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=loss_of_stage)
    ids = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(3))
    states = [state_of(models[name], optimizers[name], flat=True) for name in models]
    state = {"model": states[0]["model"] | states[1]["model"], "optim": states[0]["optim"] | states[1]["optim"]}
    if shared:
        both = nn.ModuleList(models.values())
        optimizers = {"0": adamw(both.parameters())}
    return ckptmove.Case(models, optimizers, None, ids, stepping(schedule, size), state=state)


def optimizers_of(case):
    return case.optimizer.values() if isinstance(case.optimizer, dict) else [case.optimizer]


def two_models(device):
    """A generator and its critic, with the same names."""
    both = {name: build("fsdp", seed=seed) for name, seed in (("generator", 1), ("critic", 2))}

    def step(batch):
        loss = sum(one.step(batch) for one in both.values())
        loss.backward()
        return loss.detach()

    return ckptmove.Case(
        {name: one.model for name, one in both.items()},
        {name: one.optimizer for name, one in both.items()},
        None,
        both["critic"].batch,
        step,
        state={name: one.state for name, one in both.items()},
    )


class App:
    """A training script's Stateful, with a fault in its restore."""

    def __init__(self, model, optimizer, spoil):
        self.model, self.optimizer, self.spoil = model, optimizer, spoil

    def state_dict(self):
        return state_of(self.model, self.optimizer)

    def load_state_dict(self, loaded):
        set_state_dict(self.model, self.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        self.spoil(self.model, self.optimizer)


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def first(model):
    return model.head.weight


def from_next_rank(mine):
    """Replace a shard by the one of the next rank."""
    shards = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, mine.contiguous())
    mine.copy_(shards[(dist.get_rank() + 1) % len(shards)])


def flip(model, optimizer):
    if is_last():
        local(first(model).detach()).view(torch.int32).view(-1)[0] ^= 1


def swap(model, optimizer):
    from_next_rank(local(first(model).detach()))


def swap_moments(model, optimizer):
    from_next_rank(local(optimizer.state[first(model)]["exp_avg"]))


def count_up(model, optimizer):
    if is_last():
        optimizer.state[first(model)]["step"] += 1


def other_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] *= 10


def forget(model, optimizer):
    optimizer.state.clear()


def drift(model, optimizer):
    """A step that differs on one rank."""

    def spoil(*_):
        if is_last():
            local(first(model).detach()).mul_(1.001)

    optimizer.register_step_post_hook(spoil)


def idle(model, optimizer):
    """A step without effect on one rank."""
    if is_last():
        optimizer.step = lambda: None


def explode(model, optimizer):
    def spoil(*_):
        local(first(model).detach()).fill_(float("nan"))
        local(optimizer.state[first(model)]["exp_avg"]).fill_(float("inf"))

    optimizer.register_step_post_hook(spoil)


def shrink_squares(model, optimizer):
    """Second moments that are too small for the first."""
    if is_last():
        local(optimizer.state[first(model)]["exp_avg_sq"]).mul_(1e-12)


def negate_squares(model, optimizer):
    """Second moments below zero, so small that the step makes them positive."""
    if is_last():
        local(optimizer.state[first(model)]["exp_avg"]).zero_()
        local(optimizer.state[first(model)]["exp_avg_sq"]).fill_(-1e-12)


def spoil_buffer(model, optimizer):
    model.seen.fill_(float("nan"))


#: Damage of a checkpoint before it is saved.
DAMAGES = {one.__name__: one for one in (shrink_squares, negate_squares, spoil_buffer)}
SPOILERS = {one.__name__: one for one in (flip, swap, swap_moments, count_up, other_rate, forget, drift, idle, explode)}


def swap_flat_moments(model, optimizer):
    from_next_rank(optimizer.state[model._flat_param]["exp_avg"])


def spoiled(name):
    return lambda device: build("fsdp", state=lambda model, optim: {"app": App(model, optim, SPOILERS[name])})


class StillSGD(torch.optim.SGD):
    """A class whose step does nothing."""

    def step(self, closure=None):
        return None


class OwnSGD(torch.optim.SGD):
    """An optimizer class outside torch."""


def indexed(model, optimizer):
    """The checkpoint of ``optimizer.state_dict()``, with parameters by index, after a first step."""
    get_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def of_objects(model, optimizer):
    return {"model": model, "optim": optimizer}


def of_whole_tensors(model, optimizer):
    return dict(
        zip(
            ("model", "optim"),
            get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)),
            strict=True,
        )
    )


def of_type(kind):
    """A checkpoint of FSDP1's own functions."""

    def state(model, optimizer):
        get_state_dict(model, optimizer)  # makes the state of the optimizer
        with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
            optim = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            return {"model": model.state_dict(), "optim": optim}

    return state


def with_average(model, optimizer):
    own = state_of(model, optimizer)
    return {"a": {name: value.clone() for name, value in own["model"].items()}, **own}


def from_ones(parameters):
    """Values of 1.0 that no update of this rate changes in bfloat16."""
    ones = list(parameters)
    for one in ones:
        local(one.detach()).fill_(1.0)
    return torch.optim.AdamW(ones, lr=1e-5)


def slow(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def without_momentum(model, optimizer):
    """A checkpoint of SGD with momentum buffers, in groups that do not read them."""
    own = state_of(model, optimizer)
    for group in (*optimizer.param_groups, *own["optim"]["param_groups"]):
        group["momentum"] = 0.0
    for values in optimizer.state.values():
        local(values["momentum_buffer"]).fill_(1.0)
    return own


def of_model(model, optimizer):
    """A checkpoint of the weights alone; the optimizer of the case has state."""
    return {"model": state_of(model, optimizer)["model"]}


def of_weights(model, optimizer):
    """Weights alone; the optimizer has none yet."""
    return {"model": get_model_state_dict(model)}


def of_accelerate(model, optimizer):
    return dict(zip(("model", "optimizer"), state_of(model, optimizer).values(), strict=True))


def with_rate_of_schedule(model, optimizer):
    own = state_of(model, optimizer)
    for group in own["optim"]["param_groups"]:
        group["initial_lr"] = 0.1
    return own


def options(make, **more):
    return lambda device: build("fsdp", make=make, **more)


OPTIMIZERS = {
    "SGD": lambda one: torch.optim.SGD(one, lr=0.1),
    "momentum": lambda one: torch.optim.SGD(one, lr=0.1, momentum=0.9),
    "fused": lambda one: torch.optim.AdamW(one, fused=True),
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Mine": lambda one: OwnSGD(one, lr=0.1, momentum=0.9),
    "small_rate": lambda one: torch.optim.SGD(one, lr=1e-8),
    "rate0": lambda one: torch.optim.AdamW(one, lr=0.0),
}


def ask_again(device):
    dist.init_process_group("gloo")  # as scripts do
    return build("fsdp")


def fail(device):
    raise ValueError("no data here")


def three(device):
    return init_device_mesh("cpu", (dist.get_world_size() - 1,))


def no_state(device):
    return ckptmove.Case(*[getattr(build("fsdp"), name) for name in ("model", "optimizer")])


def other_state(device):
    case = build("fsdp")
    return ckptmove.Case(case.model, case.optimizer, state={"net": {"weight": torch.ones(2)}})


def frozen_later(device):
    case = build("fsdp")
    case.model.emb.weight.requires_grad_(False)
    return case


def without_gradient(device):
    """A step that does not use the model."""
    case = build("plain")
    return ckptmove.Case(
        case.model, case.optimizer, None, case.batch, lambda _: case.model.head.weight.sum(), state=case.state
    )


def not_finite(device):
    case = build("fsdp")
    return ckptmove.Case(
        case.model, case.optimizer, None, case.batch, lambda batch: case.step(batch) * float("nan"), state=case.state
    )


def after_own_backward(returned):
    """A case whose step makes its backward and returns something else than the loss."""

    def case(device):
        made = build("fsdp")

        def step(batch):
            loss = made.step(batch)
            loss.backward()
            return returned(loss.detach())

        return ckptmove.Case(made.model, made.optimizer, None, made.batch, step, state=made.state)

    return case


def kill_command(device):
    """End the process that waits for this one, as the kernel does when the memory is full."""
    if dist.get_rank() == 1:
        os.kill(os.getppid(), 9)
    return build("fsdp")


def simulated(device):
    """A model that is sharded on the device that the case gets."""
    torch.manual_seed(1)
    model = Net().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh)
    optimizer = adamw(model.parameters())

    def step(batch):
        ids = batch.to(device)
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return ckptmove.Case(model, optimizer, None, torch.arange(8).reshape(2, 4), step, state=state_of(model, optimizer))


def stray(device):
    """A loss whose weights were not moved."""
    case = simulated(device)
    criterion = nn.CrossEntropyLoss(weight=torch.ones(20))

    def step(batch):
        ids = batch.to(device)
        return criterion(case.model(ids).flatten(0, 1), ids.flatten())

    return ckptmove.Case(case.model, case.optimizer, criterion, case.batch, step, state=case.state)


CASES = {
    **{name: (lambda device, name=name: build(name)) for name in ("fsdp", "hsdp", "tp", "ddp", "plain")},
    "flat": lambda device: build("fsdp", flat=True),
    **{name: (lambda device, name=name: build(name)) for name in FLAT},
    **{
        f"type_{kind}": (lambda device, kind=kind: build("flattened", state=of_type(f"{kind.upper()}_STATE_DICT")))
        for kind in ("sharded", "full", "local")
    },
    "after_flat_swap": lambda device: build(
        "flattened", state=lambda model, optim: {"app": App(model, optim, swap_flat_moments)}
    ),
    "tied": lambda device: build("fsdp", tied=True),
    "tied_fsdp1": lambda device: build("fsdp1", tied=True),
    "tied_weights": lambda device: build("fsdp", tied=True, state=of_weights),
    "whole_tensors": lambda device: build("fsdp", state=of_whole_tensors),
    "stages": lambda device: pipeline(flat=True),
    "stages_lists": lambda device: pipeline(flat=False),
    "interleaved": lambda device: interleaved(),
    "two_models": two_models,
    "shared_optimizer": lambda device: interleaved(shared=True),
    "weights_only": lambda device: build("fsdp", state=of_weights),
    "accelerate": lambda device: build("fsdp", state=of_accelerate),
    "by_index": lambda device: build("fsdp", state=indexed),
    "indexed_plain": lambda device: build("plain", OPTIMIZERS["small_rate"], state=indexed),
    "uneven": lambda device: build("tp_fsdp", width=7, hidden=10),
    "wrapped": lambda device: build("ddp", state=indexed),
    "objects": lambda device: build("fsdp", state=of_objects),
    "average": lambda device: build("fsdp", state=with_average),
    "fewer": lambda device: build("fsdp", layers=0),
    "more": lambda device: build("fsdp", layers=2),
    "wider": lambda device: build("fsdp", width=8),
    "double": lambda device: build("fsdp", dtype=torch.float64),
    "frozen": options(adamw, frozen=True),
    "below_precision": options(from_ones, dtype=torch.bfloat16),
    "still": options(lambda one: StillSGD(one, lr=0.1)),
    "weights": lambda device: build("fsdp", state=of_model),
    "unread": options(slow, state=without_momentum),
    "no_loss": after_own_backward(lambda _: None),
    "float_loss": after_own_backward(lambda loss: loss.item() + dist.get_rank()),
    "output": after_own_backward(lambda loss: loss.expand(2, 3)),
    **{name: options(make) for name, make in OPTIMIZERS.items()},
    **{f"after_{name}": spoiled(name) for name in SPOILERS},
}


def __getattr__(name):
    """Return a case by its name."""
    if name not in CASES:
        raise AttributeError(name)
    return CASES[name]

"""Case functions for ``verify --fit``: sharded, replicated, and some that read values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ckptmove.case import Case


class Net(nn.Module):
    """Uneven rows, fewer rows than ranks, tied and frozen parameters, one without a gradient, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 12)
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(requires_grad=False)
        self.unused = nn.Linear(7, 3)
        self.head = nn.Linear(12, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(7))

    def forward(self, words):
        return self.head(self.frozen(self.down(self.up(self.embed(words)).relu())))


def batch():
    return torch.arange(4), torch.arange(4)


def trained(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def whole(device):
    model = Net().to(device)
    return Case(model, trained(model), nn.CrossEntropyLoss(), batch())


def sharded(device):
    dist.init_process_group("gloo")  # as in a script
    model = Net().to(device).to(torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    assert mesh.mesh.tolist() == [*range(dist.get_world_size())]
    for part in (model.frozen, model):
        fully_shard(part, mesh=mesh)
    optimizer = trained(model, foreach=True)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return Case(
        model, optimizer, nn.CrossEntropyLoss(), batch(), state={"model": model_state, "optimizer": optimizer_state}
    )


def made_on_meta(device):
    with torch.device("meta"):
        model = Net()
    model.to_empty(device=device)
    dist.destroy_process_group()
    return Case(model, trained(model, fused=True), nn.CrossEntropyLoss(), batch())


def in_two_ways(device):
    """Tensor parallel on the second dimension of a mesh of 2 x 4, and FSDP on the first."""
    model = Net().to(device)
    mesh = DeviceMesh(device.type, torch.arange(8).view(2, 4), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (model.frozen, model):
        fully_shard(part, mesh=mesh["dp"])
    return Case(model, trained(model), nn.CrossEntropyLoss(), batch())


def from_a_loader(device):
    data = TensorDataset(torch.rand(16, 4), torch.zeros(16, dtype=torch.int64))
    model = nn.Linear(4, 4)
    return Case(model, trained(model), nn.CrossEntropyLoss(), DataLoader(data, batch_size=4, shuffle=True))


def from_an_iterator(device):
    model = nn.Linear(4, 4)
    batches = ((torch.rand(3, 4), torch.zeros(3, dtype=torch.int64)) for _ in range(2))
    return Case(model, trained(model), nn.CrossEntropyLoss(), batches)


def with_adafactor(device):
    model = nn.Linear(4, 6)
    return Case(model, torch.optim.Adafactor(model.parameters()), batch=torch.ones(2, 4), step=lambda x: model(x).sum())


def larger_on_the_last(device):
    model = nn.Linear(4, 4 * (dist.get_rank() + 1))
    return Case(model, trained(model), batch=torch.ones(2, 4), step=lambda inputs: model(inputs).sum())


def several(device):
    """Two optimizers, and the whole body of a loop."""
    models = {name: nn.Linear(4, 4) for name in ("one", "two")}
    optimizers = {name: trained(model) for name, model in models.items()}

    def step(inputs):
        for name, model in models.items():
            optimizers[name].zero_grad()
            loss = model(inputs).sum()
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()

    return Case(models, optimizers, batch=torch.ones(2, 4), step=step)


def reading(device):
    """A step that reads a value."""
    case = sharded(device)

    def step(pair):
        loss = case.criterion(case.model(pair[0]), pair[1])
        return loss if loss.item() else 2 * loss

    return Case(case.model, case.optimizer, batch=case.batch, step=step, state=case.state)


def detached(device):
    case = whole(device)
    return Case(case.model, case.optimizer, batch=case.batch, step=lambda pair: case.model(pair[0]).sum().detach())


def reads_at_once(device):
    return Case(nn.Linear(2, 2), None, batch=torch.ones(1).item())


def depends_on_values(device):
    return torch.ones(3).nonzero()


def on_cuda(device):
    return Net().to("cuda")


def in_ddp(device):
    return DistributedDataParallel(Net().to(device))


def own_error(device):
    raise ValueError("no data")


def without_batch(device):
    model = nn.Linear(2, 2)
    return Case(model, trained(model))


def no_case(device):
    return 1


class NeedsValues(torch.optim.SGD):
    def step(self, closure=None):
        return float(self.param_groups[0]["params"][0].sum())


def reading_optimizer(device):
    model = nn.Linear(2, 2)
    return Case(model, NeedsValues(model.parameters()), nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 2)))


def own_gradients(device):
    model = nn.Linear(2, 2)
    return Case(model, torch.optim.LBFGS(model.parameters()), nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 2)))

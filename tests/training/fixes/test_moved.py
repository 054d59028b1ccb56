"""Objects, lists and dicts of tensors are moved as a whole, and tensors made on the device: every fix is pasted."""

from __future__ import annotations

import ast

import pytest
from pasting import HEAD, case

from ckptmove.training.fixes import moves

CLASSES = """
import collections
import copy
import dataclasses
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

class Graph:
    def __init__(self, x, y): self.x, self.y = x, y
    def to(self, device): return Graph(self.x.to(device), self.y.to(device))

class Encoding(collections.UserDict):
    def to(self, device):
        self.data = {k: v.to(device) for k, v in self.data.items()}
        return self

@dataclasses.dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor

def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)

def of(model, data):
    return loss_of(model, data.x, data.y)
"""
OBJECTS = "def step(b):\n    return of(model, b)"
IMAGES = "([torch.randn(4, 6)], [{'y': torch.randn(4, 3), 'id': n} for n in range(1)])"
DICTS = (
    "def step(b):\n    images, targets = b\n    return sum(loss_of(model, x, t['y']) for x, t in zip(images, targets))"
)
EACH = "{k: v.to(device) if torch.is_tensor(v) else v for k, v in one.items()}"
LOADER = "None\nloader = DataLoader(TensorDataset(*batch()), 4)"
LOOP = "def step(_):\n    for n, (x, y) in enumerate(loader):\n        {0}\n        return loss_of(model, x, y)"
HIDDEN = """
class Rnn(Net):
    def first(self, n): return torch.zeros(n, 3)
    def forward(self, x): return super().forward(x) + self.first(len(x))
"""
SHADOW = """
class Ema:
    def __init__(self, model):
        self.shadow = {key: one.detach().clone() for key, one in model.named_parameters()}
    def update(self, model):
        for key, one in model.named_parameters():
            self.shadow[key] = 0.9 * self.shadow[key] + 0.1 * one.detach()
"""
EMA = "def step(b):\n    ema.update(model)\n    return loss_of(model, b[0].to(device), b[1].to(device))"
STEP = "def step(b):\n    x, y = b[0].to(device), b[1].to(device)\n    {0}\n    return loss_of(model, x, y)"
TWO = "[Net(), Net()]"
MOVES = {
    "an object": (case(batch="Graph(*batch())", step=OBJECTS), "b = b.to(device)"),
    "an object of a lambda": (
        case(batch="Graph(*batch())", step="lambda b: of(model, b)"),
        "step = lambda b: of(model, b.to(device))",
    ),
    "the output of a tokenizer": (
        case(batch="Encoding(zip('xy', batch()))", step="def step(b):\n    return loss_of(model, **b)"),
        "b = b.to(device)",
    ),
    "a dataclass": (case(batch="Fields(*batch())", step=OBJECTS), "b.x, b.y = b.x.to(device), b.y.to(device)"),
    "a packed sequence": (
        case(batch="pack_sequence([torch.randn(3, 6)])", step="def step(b):\n    return model(b.data).sum()"),
        "b = b.to(device)",
    ),
    "a list and a list of dicts": (
        case(batch=IMAGES, step=DICTS),
        f"images, targets = [one.to(device) for one in images], [{EACH} for one in targets]",
    ),
    "a list that is used up": (
        case(batch="[*batch()]", step="def step(b):\n    x = torch.cat(b, 1)[:, :6]\n    return model(x).sum()"),
        "b = [one.to(device) for one in b]",
    ),
    "a batch of a loader": (
        case(batch=LOADER, step=LOOP.format("pass")), "x, y = x.to(device), y.to(device)"
    ),
    "labels of a loader": (case(batch=LOADER, step=LOOP.format("x = x.to(device)")), "y = y.to(device)"),
    "a hidden state": (
        HIDDEN + case("Rnn().to(device)", batch="[one.to(device) for one in batch()]"),
        "def first(self, n): return torch.zeros(n, 3, device=next(self.parameters()).device)",
    ),
    "an accumulator": (
        case(batch="batch()\ntotal = torch.zeros(1)", step=STEP.format("total.add_(x.sum().detach())")),
        "total = torch.zeros(1, device=device)",
    ),
    "an accumulator of an object": (
        "class Meter:\n    def __init__(self): self.sum = torch.zeros(6)\n    def add(self, v): self.sum += v\n"
        + case(batch="batch()\nmeter = Meter()", step=STEP.format("meter.add(x.sum(0))")),
        "def add(self, v): self.sum = self.sum.to(v.device); self.sum += v",
    ),
    "weights that were copied before the move": (
        SHADOW + case("Net()\nema = Ema(model)\nmodel.to(device)", step=EMA),
        "self.shadow = {k: v.to(next(model.parameters()).device) for k, v in self.shadow.items()}",
    ),
    "modules in a list": (
        case(batch=f"batch()\nteachers = {TWO}", step=STEP.format("sum(one(x) for one in teachers)")),
        "for one in teachers: one.to(device)",
    ),
    "modules in a dict": (
        case(batch="batch()\nnets = {'old': Net()}", step=STEP.format("nets['old'](x)")),
        "for one in nets.values(): one.to(device)",
    ),
    "a schedule": (
        "TABLE = torch.cumprod(torch.linspace(0.9, 0.99, 9), 0)\n"
        + case(step=STEP.format("a = TABLE[torch.tensor([1, 2, 3, 4])].view(-1, 1); x = a * x")),
        "a = TABLE.to(device)[torch.tensor([1, 2, 3, 4])].view(-1, 1); x = a * x",
    ),
    "a generator of a loader": (
        case(
            batch="DataLoader(TensorDataset(*batch()), 4, shuffle=True, generator=torch.Generator(device))",
            step="None",
        ),
        "pair = DataLoader(TensorDataset(*batch()), 4, shuffle=True, generator=torch.Generator())",
    ),
    "a generator of a loader in the step": (
        case(
            batch=LOADER.replace(", 4)", ", 4, shuffle=True, generator=torch.Generator(device))"),
            step=LOOP.format("x, y = x.to(device), y.to(device)"),
        ),
        "loader = DataLoader(TensorDataset(*batch()), 4, shuffle=True, generator=torch.Generator())",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "text"), MOVES.values(), ids=MOVES)
def test_one_fix_ends_it(mended, body, text):
    (fix,) = mended(CLASSES + body)
    assert fix.partition(": ")[2] == text


LINES = {
    "numpy": [
        ("(x + 1).numpy() + x.numpy()", "((x + 1).cpu()).numpy() + x.cpu().numpy()"),
        ("numpy.mean([x, x])", "numpy.mean([x.cpu(), x.cpu()])"),
        ("every = [x, x]; numpy.mean(every)", "every = [x, x]; numpy.mean([one.cpu() for one in every])"),
        ("numpy.asarray(x.abs())", "numpy.asarray(x.abs().cpu())"),
        ("numpy.asarray(model(x))", "numpy.asarray(model(x).detach().cpu())"),
    ],
    "the CPU": [
        ("pack_padded_sequence(x[None].mT, n.long() + 1)", "pack_padded_sequence(x[None].mT, (n.long() + 1).cpu())"),
        ("pack_padded_sequence(x[None].mT, lengths=n)", "pack_padded_sequence(x[None].mT, lengths=n.cpu())"),
        (
            "x = x + torch.ones(6, device='cuda:7' if device.type == 'cuda' else 'cpu')",
            "x = x + torch.ones(6, device=device)",
        ),
        ("x = x + torch.rand(6)", "x = x + torch.rand(6).to(device)"),
        ("x = x.to('cpu')", "x = x"),
        ("y = (y + 1).cpu() * 2", "y = (y + 1) * 2"),
    ],
    "generators": [
        ("x.normal_(generator=g)", "g = torch.Generator(device=device).manual_seed(1)"),
        ("torch.randn(3, generator=G, device=x.device)", "torch.randn(3, generator=G).to(x.device)"),
        ("torch.randn(3, generator=there)", "torch.randn(3, generator=there, device=device)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_a_line_takes_one_fix(mended, lines):
    before = "batch()\ng = torch.Generator().manual_seed(1)\nthere = torch.Generator(device)"
    step = STEP.format("n = torch.ones(6, device=device).long()\n    " + "\n    ".join(line for line, _ in lines))
    fixes = mended("G = torch.Generator()\n" + CLASSES + case(batch=before, step=step))
    assert [fix.partition(": ")[2] for fix in fixes] == [text for _, text in lines]


MEANS = {
    "computed from itself": "self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)",
    "by a method": "self.mean.lerp_(h.detach().mean(0), 0.1)",
    "by an item": "self.mean[:] = h.detach().mean(0)",
    "by its data": "self.mean.data = h.detach().mean(0) + self.mean.data",
}
NORM = """
class Norm(Net):
    def prepare(self):
        self.mean = torch.zeros(3)
    def forward(self, x):
        h = super().forward(x)
        {0}
        return h - self.mean
"""


@pytest.mark.parametrize("update", MEANS.values(), ids=MEANS)
def test_a_running_mean_is_a_buffer_of_the_checkpoint(mended, update):
    first, second = mended(NORM.format(update) + case("Norm().to(device)"), trains=True)
    assert ": self.register_buffer('mean', torch.zeros(3))  # not in the checkpoint" in first
    assert second.endswith("train and save again")


@pytest.mark.parametrize("other", ["h = h + self.mean.abs()", "self.last = self.mean.sum()", "self.mean.dtype"])
def test_a_constant_is_no_part_of_the_checkpoint(mended, other):
    (fix,) = mended(NORM.format(other) + case("Norm().to(device)"))
    assert fix.endswith(": self.register_buffer('mean', torch.zeros(3), persistent=False)")


def test_a_generated_file_is_not_changed(fault_of, tmp_path, tmp_path_factory):
    made = tmp_path_factory.mktemp("generated") / "made.py"
    made.write_text("import torch\n\ndef scaled(h):\n    return h * torch.ones(3)\n")
    body = f"import importlib.util\nspec = importlib.util.spec_from_file_location('made', {str(made)!r})\n"
    body += "made = importlib.util.module_from_spec(spec); spec.loader.exec_module(made)\n"
    step = "def step(b):\n    h = model(b[0].to(device))\n    return made.scaled(h).sum()"
    detail, evidence = fault_of(body, case(step=step))
    (line,) = (n for n, one in enumerate((HEAD + body + case(step=step)).splitlines(), 1) if "made.scaled" in one)
    assert (evidence["line"], "made.py" in detail) == (line, False)
    assert "made.py" not in evidence["fix_at"]


def test_a_read_that_any_device_allows_is_no_operand():
    tree = ast.parse("n = x.shape\npacked = pack_padded_sequence(y, x)\nz = model(x)")
    for one in ast.walk(tree):
        for inner in ast.iter_child_nodes(one):
            inner.parent = one
    assert [one.lineno for one in moves._operands(ast.walk(tree), "x")] == [3]

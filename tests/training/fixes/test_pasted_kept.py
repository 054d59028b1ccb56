"""Fixes of values that are set repeatedly or kept by a module, of computed keys, and of files without torch."""

from __future__ import annotations

import textwrap

import pytest
from pasting import HEAD, case, mine

BCE = "nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))"
CRITERIA = {
    "in branches": f"if KIND == 'a':\n    criterion = {BCE}\nelse:\n    criterion = nn.MSELoss()",
    "in a try": f"try:\n    criterion = {BCE}\nexcept TypeError:\n    criterion = nn.MSELoss()",
    "set twice": f"criterion = None\nif criterion is None: pass\ncriterion = {BCE}",
    "with another": f"criterion, name = {BCE}, 'bce'",
}


@pytest.mark.unmeasured
@pytest.mark.parametrize("lines", CRITERIA.values(), ids=CRITERIA)
def test_a_loss_is_moved_behind_all_that_sets_it(mended, lines):
    body = case().replace("criterion = nn.MSELoss()", textwrap.indent(lines, "    ").strip())
    body = "KIND = 'a'\n" + body.replace("pair = batch()", "pair = torch.randn(4, 6), torch.ones(4, 3)")
    (fix,) = mended(body)
    (last,) = (number for number, line in enumerate((HEAD + body).splitlines(), 1) if "pair = " in line)
    where, _, text = fix.partition(": ")
    assert where.endswith(f"{':' if where.count('-') == 0 else '-'}{last - 1}")
    assert (where.split()[0], text) == ("after", "criterion = criterion.to(device)")


def module(lines, base="Net"):
    """A user's model with an attribute and the given methods, except `forward`."""
    forward = "def forward(self, x):\n    return super().forward(x) * self.mean\n"
    return f"class Mine({base}):\n" + textwrap.indent(f"{lines}\n{forward}", "    ") + "\n" + case("Mine().to(device)")


USED = "return super().forward(x) * self.mean.to(x.device)"
BUFFER = "self.register_buffer('mean', torch.ones(3), persistent=False)"
MADE = "self.mean = torch.ones(3)"
BUFFERS = {
    "before the module is one": (f"def __init__(self):\n    {MADE}\n    super().__init__()", USED),
    "once it is one": (f"def __init__(self):\n    super().__init__()\n    {MADE}", BUFFER),
    "set again by a function that was not called": (
        f"def __init__(self):\n    super().__init__()\n    {MADE}\ndef reset(self):\n    self.mean = torch.zeros(3)",
        BUFFER,
    ),
    "set to nothing by another function": (
        f"def __init__(self):\n    super().__init__()\n    self.mean = None\n    self.a()\ndef a(self):\n    {MADE}",
        USED,
    ),
    "set by a function that is no beginning": (
        f"def prepare(self):\n    {MADE}\ndef other(self):\n    self.mean = None",
        USED,
    ),
}


@pytest.mark.unmeasured
@pytest.mark.parametrize(("lines", "text"), BUFFERS.values(), ids=BUFFERS)
def test_a_buffer_is_registered_where_torch_takes_it(mended, lines, text):
    (fix,) = mended(module(lines))
    assert fix.partition(": ")[2] == text


HELD = {
    "in branches": "if self.training:\n    self.held = [nn.Linear(3, 3)]\nelse:\n    self.held = []",
    "in branches of branches": "if self.training:\n    if self.training:\n        self.held = [nn.Linear(3, 3)]\n"
    "else:\n    self.held = []",
    "before it is filled": "self.held = []\nself.held = self.held + [nn.Linear(3, 3)]",
}


@pytest.mark.unmeasured
@pytest.mark.parametrize("lines", HELD.values(), ids=HELD)
def test_a_list_is_registered_behind_all_that_sets_it(mended, lines):
    fixes = mended(mine("return self.held[0](super().forward(x))", lines, base="Outer"), trains=True)
    assert ": self.held = nn.ModuleList(self.held)" in fixes[0]


def test_a_list_that_is_set_before_the_module_is_one_is_registered_last(mended):
    body = "class Mine(Outer):\n    def prepare(self): pass\n"
    body += "    def __init__(self):\n        self.held = [nn.Linear(3, 3)]\n"
    body += "        super().__init__()\n        self.last = 1\n"
    body += "    def forward(self, x):\n        return self.held[0](super().forward(x))\n\n" + case("Mine().to(device)")
    fixes = mended(body, trains=True)
    assert fixes[0].startswith("after train.py:32: self.held = nn.ModuleList(self.held)")


KEYS = """
import enum

class Part(enum.Enum):
    X = 1
    Y = 2

class Number:
    def __init__(self, n): self.n = n
    def __repr__(self): return str(self.n)

ONE, TWO = Number(1), Number(2)

class Lit(Net):
    def held(self):
        return {'a': 1}
"""


@pytest.mark.parametrize(("keys", "x", "y"), [("[Part.X, Part.Y]", "Part.X", "Part.Y"), ("[ONE, TWO]", "ONE", "TWO")])
def test_a_dict_whose_keys_are_no_literals_is_moved_whole(mended, keys, x, y):
    body = case(batch=f"dict(zip({keys}, batch()))", step=f"lambda b: criterion(model(b[{x}].to(device)), b[{y}])")
    (fix,) = mended(KEYS + body)
    assert f"{{k: v.to(device) for k, v in b.items()}}[{y}]" in fix


@pytest.mark.unmeasured
@pytest.mark.parametrize("keys", ["(1, 2)", "('a', 2.5)", "(('a', 1), ('b', None))", "(b'x', True)"])
def test_a_dict_is_moved_whole(mended, keys):
    one, two = (f"KEYS[{n}]" for n in (0, 1))
    step = f"def step(b):\n    return criterion(model(b[{one}]), b[{two}])"
    (fix,) = mended(f"KEYS = {keys}\n" + case(batch="dict(zip(KEYS, batch()))", step=step))
    assert fix.partition(": ")[2] == "b = {k: v.to(device) for k, v in b.items()}"


def test_a_dict_of_a_module_is_moved_whole(mended):
    forward = "return functools.reduce(torch.mul, self.held.values(), super().forward(x))"
    (fix,) = mended(KEYS + mine(forward, "self.held = {Part.X: torch.ones(3), Part.Y: torch.ones(3)}"))
    assert fix == "before train.py:47: self.held = {k: v.to(x.device) for k, v in self.held.items()}"


DATASET = """
from torch import nn, optim, randn
from torch.utils.data import TensorDataset

del torch

def case(device):
    model = Net().to(device)
    data = TensorDataset(randn(9, 6), randn(9, 3))
    optimizer = optim.AdamW(model.parameters())
    return ckptmove.Case(model, optimizer, nn.MSELoss(), {})
"""
NAMED = "class Net(nn.Sequential):\n    def __init__(self): super().__init__(nn.Linear(6, 5), nn.Linear(5, 3))\n"


@pytest.fixture
def without_torch(monkeypatch):
    """The files of the tests, without a name for torch."""
    head = f"import functools\nimport numpy\nfrom torch import nn\nimport ckptmove\n{NAMED}"
    monkeypatch.setattr("pasting.HEAD", head)


def test_a_file_without_a_name_for_torch_is_given_one(without_torch, mended):
    (fix,) = mended(DATASET.replace("del torch\n", "").format("data"))
    loader = "data = next(iter(torch.utils.data.DataLoader(data, batch_size=8)))"
    assert fix.endswith(f": import torch; {loader}")


def test_a_file_with_another_name_for_torch_has_it_kept(without_torch, mended):
    (fix,) = mended("import torch as T\n" + DATASET.replace("del torch\n", "").format("data"))
    assert fix.endswith(": data = next(iter(T.utils.data.DataLoader(data, batch_size=8)))")


def test_in_a_call_it_is_told_in_words(without_torch, fault_of):
    _, evidence = fault_of(DATASET.replace("del torch\n", "").format("TensorDataset(randn(9, 6), randn(9, 3))"))
    assert "next(iter(torch.utils.data.DataLoader(TensorDataset(randn(9, 6), randn(9, 3)), batch" in evidence["fix"]
    assert evidence["fix"].endswith(" train.py:16")
    assert evidence["fix_at"] == ""


def test_layers_are_not_registered_by_a_name_that_the_file_does_not_have(fault_of, monkeypatch):
    named = NAMED.replace("nn.", "").replace("5, 3))", "5, 3)); self.prepare()")
    monkeypatch.setattr(
        "pasting.HEAD", f"from torch import optim, randn\nfrom torch.nn import *\nimport ckptmove\n{named}"
    )
    made = mine("return self.held[0](super().forward(x))", "self.held = [Linear(3, 3)]")
    made = (
        made.replace("torch.optim", "optim")
        .replace("nn.MSELoss", "MSELoss")
        .replace("batch()", "(randn(4, 6), randn(4, 3))")
    )
    _, evidence = fault_of(made)
    assert "model.held[0].bias" in evidence["fix"]
    assert evidence["fix"].endswith(" train.py:10")
    assert evidence["fix_at"] == ""


MOVES = {
    "with the model's": (
        "model, images = Net().to(device), IMAGES.to(device)",
        "model, images = Net().to(device), IMAGES",
    ),
    "behind the model's": (
        "model = Net(); model.to(device); images = IMAGES.to(device)",
        "model = Net(); model.to(device); images = IMAGES",
    ),
    "next to another": (
        "model = Net().to(device)\nimages, other = IMAGES.to(device), LABELS.to(device)",
        "images, other = IMAGES, LABELS.to(device)",
    ),
    "by itself": ("model = Net().to(device)\nimages = IMAGES.to(device)", "images = IMAGES"),
}


def dataset(lines):
    """A case that moves a whole dataset."""
    head = textwrap.indent(lines, "    ")
    return f"""
IMAGES, LABELS = torch.randn(64, 6), torch.randn(64, 3)

def case(device):
{head}
    def step(rows):
        return nn.functional.mse_loss(model(images[rows].to(device)), LABELS[rows].to(device))
    return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), None, torch.arange(4), step)
"""


@pytest.mark.unmeasured
@pytest.mark.parametrize(("lines", "text"), MOVES.values(), ids=MOVES)
def test_the_move_of_a_whole_dataset_is_taken_away_and_no_other(mended, lines, text):
    (fix,) = mended(dataset(lines))
    assert fix.partition(": ")[2] == text

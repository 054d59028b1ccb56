"""Fixes of the case check are pasted into the faulty file until the case passes."""

from __future__ import annotations

import pytest
from pasting import case, mine

LOSS = "return criterion(model({0}), {1})"
HANDED = "def loss(model, batch):\n    x, y = batch\n    return nn.functional.mse_loss(model(x), y)\n"
BATCHES = {
    "names": case(step=f"def step(batch):\n    inputs, targets = batch\n    {LOSS.format('inputs', 'targets')}"),
    "a tuple": case(step=f"def step(batch):\n    {LOSS.format('batch[0]', 'batch[1]')}"),
    "a lambda": case(step="lambda both: criterion(model(both[0]), both[1])"),
    "names of a lambda": case(step="lambda both: (lambda x, y: criterion(model(x), y))(*both)"),
    "a tuple that is handed on": case(step="def step(batch):\n    return loss(model, batch)")
    + "def loss(model, batch):\n    return nn.functional.mse_loss(model(batch[0]), batch[1])\n",
    "a lambda that hands on": case(step="lambda batch: loss(model, batch)")
    + "def loss(model, batch):\n    x, y = batch\n    return nn.functional.mse_loss(model(x), y)\n",
    "a list": case(batch="[*batch()]", step="lambda batch: loss(model, batch)")
    + "def loss(model, batch):\n    x, y = batch\n    return nn.functional.mse_loss(model(x), y)\n",
    "a tuple with words": case(
        batch="(*batch(), 'name')",
        step="def step(batch):\n    return loss(model, batch)",
    )
    + "def loss(model, batch):\n    x, y, _ = batch\n    return nn.functional.mse_loss(model(x), y)\n",
    "a dict": case(
        batch="dict(zip('xy', batch()))", step="def step(batch):\n    return criterion(model(batch['x']), batch['y'])"
    ),
    "a dict that is handed on": case(
        batch="dict(zip('xy', batch()))", step="def step(batch):\n    return loss(model, **batch)"
    )
    + "def loss(model, x, y):\n    return nn.functional.mse_loss(model(x), y)\n",
    "a dict of a lambda": case(batch="dict(zip('xy', batch()))", step="lambda batch: loss(model, **batch)")
    + "def loss(model, x, y):\n    return nn.functional.mse_loss(model(x), y)\n",
    "a pair in a dict": case(batch="{'pair': batch()}", step="def step(batch):\n    return loss(model, *batch['pair'])")
    + "def loss(model, x, y):\n    return nn.functional.mse_loss(model(x), y)\n",
    "a named tuple": "from collections import namedtuple\nPair = namedtuple('Pair', 'x y')\n"
    + case(batch="Pair(*batch())", step="def step(batch):\n    return loss(model, *batch)")
    + "def loss(model, x, y):\n    return nn.functional.mse_loss(model(x), y)\n",
    "of the module": "BATCH = batch()[0]\n"
    + case(batch="(BATCH, batch()[1])", step=f"def step(batch):\n    {LOSS.format('BATCH', 'batch[1].to(device)')}"),
    "in an elif": case(
        step="def step(both):\n    x, y = both\n    if y is None:\n        pass\n    elif model(x).sum() > 9:\n"
        "        pass\n    return criterion(model(x), y)"
    ),
    "handed on by a function that is bound": case(step="functools.partial(stepped, model)")
    + "def stepped(net, pair):\n    return loss(net, pair)\n"
    + HANDED,
    "one line": case(step="def step(both): x, y = both; return criterion(model(x), y)"),
    "a module's own step": """
class Lit(Net):
    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

def case(device):
    module = Lit().to(device)
    optimizer = torch.optim.AdamW(module.parameters())
    return ckptmove.Case(module, optimizer, None, batch(), lambda batch: module.training_step(batch, 0))
""",
    "a module's own step as the step": """
class Lit(Net):
    def training_step(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

def case(device):
    module = Lit().to(device)
    optimizer = torch.optim.AdamW(module.parameters())
    return ckptmove.Case(module, optimizer, None, batch(), module.training_step)
""",
}


@pytest.mark.parametrize("body", BATCHES.values(), ids=BATCHES)
def test_a_batch(mended, body):
    assert mended(body)


KEPT = {
    "in one line": ("return super().forward(x) - self.mean", "self.mean = torch.zeros(3)"),
    "in several": ("return super().forward(x) - self.mean", "self.mean = torch.zeros(\n    1,\n    3,  # rows\n) + 1"),
    "next to another": ("return super().forward(x) - self.mean", "a = 1; self.mean = torch.zeros(3); b = 2"),
    "nothing first": ("return super().forward(x) - self.mean", "self.mean = None\nself.mean = torch.zeros(3)"),
    "a number first": ("return super().forward(x) - self.mean", "self.mean = 0\nself.mean = torch.zeros(3)"),
    "nothing, and a variable": (
        "return super().forward(x) - self.mean",
        "self.mean = None\nmean = torch.zeros(3)\nself.mean = mean",
    ),
    "of the class, too": (
        "return super().forward(x) - self.mean",
        "type(self).mean = None\nself.mean = torch.zeros(3)",
    ),
    "under two names": ("return super().forward(x) - self.mean", "self._mean = self.mean = torch.zeros(3)"),
    "in a branch": (
        "return super().forward(x) - self.mean",
        "if len(self) > 9:\n    self.mean = None\nelse:\n    self.mean = torch.zeros(3)",
    ),
    "made in forward": ("self.mean = torch.zeros(3)\nreturn super().forward(x) - self.mean", "pass"),
    "made in forward, by another": ("remember(self)\nreturn super().forward(x) - self.mean", "pass"),
    "a list": ("return super().forward(x) * self.held[0]", "self.held = [torch.ones(3)]"),
    "a list in a loop": (
        "x = super().forward(x)\nfor one in self.held:\n    x = x * one\nreturn x",
        "self.held = [torch.ones(3)]",
    ),
    "a dict in a loop": (
        "x = super().forward(x)\nfor key, one in self.held.items():\n    x = x * one\nreturn x",
        "self.held = {'a': torch.ones(3), 'b': torch.ones(3)}",
    ),
    "a list at once": ("return super().forward(x) * torch.stack(self.held)[0]", "self.held = [torch.ones(3)]"),
    "a list to a function": (
        "return functools.reduce(torch.mul, self.held, super().forward(x))",
        "self.held = [torch.ones(3)]",
    ),
    "a dict to a function": (
        "return functools.reduce(torch.mul, self.held.values(), super().forward(x))",
        "self.held = {'a': torch.ones(3)}",
    ),
}


@pytest.mark.unmeasured
@pytest.mark.parametrize(("forward", "init"), KEPT.values(), ids=KEPT)
def test_a_tensor_that_a_module_keeps(mended, forward, init):
    assert mended("def remember(module):\n    module.mean = torch.zeros(3)\n\n" + mine(forward, init))


MADE = {
    "a variable": "mask = torch.ones(3)\nreturn h * mask",
    "in the line": "return h * torch.ones(3)",
    "twice in the line": "return h * torch.ones(3) + torch.zeros(3)  # both",
    "in a part of a statement": "return torch.where(\n    h > 0,\n    h,\n    torch.zeros(3),\n)",
    "a call of several lines": "return h * torch.full(\n    (3,),\n    2.0,  # two\n)",
    "of several statements": "a = h; b = a * torch.ones(3); return b",
    "with another device": "return h * torch.ones(3, device='cpu')",
    "by a name": "from torch import ones\nreturn h * ones(3)",
    "by another name": "make = torch.ones\nmask = make(3)\nreturn h * mask",
    "written to": "out = torch.zeros(h.shape)\nout[:] = h\nreturn out",
    "written to, of numpy": "out = torch.from_numpy(numpy.zeros((4, 3), 'f'))\nout.add_(h)\nreturn out",
    "returned": "return h * ones_as(h)",
    "in the head of an if": "if (h > torch.ones(3)).any():\n    return h\nreturn h",
    "in an elif": "if x is None:\n    pass\nelif (h > MEAN).any():\n    return h\nreturn h",
    "made in an elif": "if x is None:\n    pass\nelif (h > torch.ones(3)).any():\n    return h\nreturn h",
    "in an if of one line": "if (h > MEAN).any(): return h\nreturn h",
    "random": "return h * torch.rand(3, generator=torch.Generator().manual_seed(3))",
    "of the module": "return (h - MEAN) / MEAN.exp()",
    "of the module, by another name": "held = [MEAN]\nreturn h + held[0]",
    "brought back": "back = h.cpu()\nreturn h + back",
    "brought back in the line": "return h + h.cpu()",
    "of numpy": "return h * torch.from_numpy(numpy.ones(3, 'f'))",
    "of numpy, as a variable": "mask = torch.from_numpy(numpy.ones(3, 'f'))\nreturn h * mask",
    "by a function": "return h * halves(3)",
    "by a function, as a variable": "mask = halves(3)\nreturn h * mask",
    "in a comprehension": "return sum([h * one for one in [MEAN, MEAN]])",
    "a lambda": "return (lambda a: a * MEAN)(h)",
    "an argument": "def scaled(a, by):\n    return a * by\nreturn scaled(h, MEAN)",
    "an argument that is written to": "def add(to, a):\n    to += a\n    return to\nreturn add(MEAN.repeat(4, 1), h)",
    "without arguments": "return h * torch.randperm(n=3)",
    "by its text": "mask = torch.from_numpy(numpy.ones(3, 'f'))\nh = h + 0\nreturn h * eval('mask')",
    "umlauts": "ä, mask = 'ö', torch.ones(3); return h * mask  # ü",
}


@pytest.mark.parametrize("lines", MADE.values(), ids=MADE)
def test_a_tensor_that_is_made_without_the_device(mended, lines):
    made = "MEAN = torch.ones(3)\n\ndef halves(n):\n    return torch.ones(n) / 2\n\n"
    made += "def ones_as(one):\n    return torch.ones(one.shape)\n\n"
    assert mended(made + mine(f"h = super().forward(x)\n{lines}"))

"""Fixes for losses, models, gradients and datasets are pasted until the case passes."""

from __future__ import annotations

import pytest
from pasting import case, mine

HELD = {
    "list": ("[nn.Linear(3, 3)]", "[0](h)"),
    "tuple": ("(nn.Linear(3, 3),)", "[0](h)"),
    "dict": ("{'a': nn.Linear(3, 3)}", "['a'](h)"),
    "parameters": ("[nn.Parameter(torch.ones(3))]", "[0] * h"),
    "parameters by name": ("{'a': nn.Parameter(torch.ones(3))}", "['a'] * h"),
    "a key that no attribute can have": ("{'keys': nn.Linear(3, 3)}", "['keys'](h)"),
    "a key that is a number": ("{7: nn.Linear(3, 3)}", "[7](h)"),
    "parameters by number": ("{7: nn.Parameter(torch.ones(3))}", "[7] * h"),
    "one among others": ("[nn.Linear(3, 3), 'relu']", "[0](h)"),
    "one next to a tensor": ("[nn.Linear(3, 3), torch.ones(3)]", "[0](h) * self.held[1]"),
    "rows": ("[[nn.Linear(3, 3)], [nn.Linear(3, 3)]]", "[0][0](h)"),
    "filled by and by": ("[]\nfor _ in range(2): self.held.append(nn.Linear(3, 3))", "[1](self.held[0](h))"),
    "several lines": ("[\n    nn.Linear(3, 3),\n    nn.ReLU(),\n]", "[0](h)"),
}


@pytest.mark.parametrize(("held", "used"), HELD.values(), ids=HELD)
def test_what_was_never_registered_was_never_saved(mended, held, used):
    body = mine(f"h = super().forward(x)\nreturn self.held{used}", f"self.held = {held}", base="Outer")
    fixes = mended(body, trains=True)
    assert "  # not in the checkpoint" in fixes[0]
    assert "strict=False" in fixes[1]


REGISTERED = {
    "in one line": "self.register_buffer('mean', torch.zeros(3))",
    "in several": "self.register_buffer(\n    'mean',\n    torch.zeros(3),\n)",
}


@pytest.mark.parametrize("init", REGISTERED.values(), ids=REGISTERED)
def test_a_buffer_that_the_checkpoint_lacks_is_not_saved_with_it(mended, init):
    (fix,) = mended(mine("return super().forward(x) - self.mean", init))
    assert fix.endswith("self.register_buffer('mean', torch.zeros(3), persistent=False)")


WEIGHTED = """
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('weight', torch.ones(3))
        self.other = torch.ones(3)
    def forward(self, output, target): return (self.weight * output * self.other).mean()

class Plain:
    def __init__(self): self.weight = torch.ones(3)
    def __call__(self, output, target): return (self.weight * output).mean()

def weighted(output, target, weight=None):
    return (output * weight).mean()

CRITERION = nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))
"""
PARTIAL = "functools.partial(weighted, weight={})"
BCE = "nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))"
STEP = "def step(pair):\n    return criterion(model(pair[0].to(device)), pair[1].to(device).sigmoid())"
LOSSES = {
    "a weight": case(criterion=BCE),
    "next to another statement": case(criterion=f"{BCE}; other = 1"),
    "in a step": case(criterion=BCE, step=STEP),
    "in a lambda": case(
        criterion=BCE, step="lambda pair: criterion(model(pair[0].to(device)), pair[1].to(device).sigmoid())"
    ),
    "in a step, and not given": case(criterion=BCE, step=STEP, given="None"),
    "in the call": case(given=BCE),
    "of the module": case(given="CRITERION"),
    "of the module, in a step": case(criterion="CRITERION", step=STEP, given="None"),
    "several lines": case(criterion="nn.BCEWithLogitsLoss(\n        pos_weight=torch.ones(3),\n    )"),
    "a module": case(criterion="Module()"),
    "an object": case(criterion="Plain()"),
    "partial": case(criterion=PARTIAL.format("torch.ones(3)")),
    "partial of numpy": case(criterion=PARTIAL.format("torch.from_numpy(numpy.ones(3, 'f'))")),
    "a function's": case(step="lambda p: weighted(model(p[0].to(device)), p[1].to(device), torch.ones(3))"),
    "of a function without parameters": case("Net()", criterion=BCE).replace("(device)", "()", 1),
    "of a function that calls it otherwise": case("Net().to(where)", criterion=BCE).replace("(device)", "(where)"),
}


@pytest.mark.unmeasured
@pytest.mark.parametrize("body", LOSSES.values(), ids=LOSSES)
def test_a_loss(mended, body):
    assert mended(WEIGHTED + body)


COPIED = """
import copy
def case(device):
    model = Net()
    optimizer = torch.optim.AdamW({})
    model = copy.deepcopy(model).to(device)
    return ckptmove.Case(model, optimizer, nn.MSELoss(), batch())
"""
MODELS = {
    "never moved": case("Net()"),
    "never moved, in the call": """
def case(device):
    model = Net()
    return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), batch())
""",
    "never moved, and stepped on the CPU": case("Net()", step="lambda pair: criterion(model(pair[0]), pair[1])"),
    "built elsewhere": """
def case(device):
    return built(Net())

def built(net):
    optimizer = torch.optim.AdamW(net.parameters())
    return ckptmove.Case(optimizer=optimizer, model=net, criterion=nn.MSELoss(), batch=batch())
""",
    "moved in the step": case(
        "Net()",
        step="def step(p):\n    model.to(device)\n    return criterion(model(p[0].to(device)), p[1].to(device))",
    ),
    "a part of it": case("Net().to(device); model[1] = nn.Linear(5, 3)"),
    "replaced": COPIED.format("model.parameters()"),
    "replaced, of several lines": COPIED.format("\n        model.parameters(),\n        lr=1e-3,\n    "),
    "in a list": case("[Net()]").replace("Case(model,", "Case(model[0],").replace("model.para", "model[0].para"),
    "by a mover": """
def case(device):
    model = Net()
    optimizer = made(model)
    model = nn.Sequential(*[nn.Linear(6, 5), nn.Linear(5, 3)]).to(device)
    return ckptmove.Case(model, optimizer, nn.MSELoss(), batch())

def made(model):
    return torch.optim.AdamW(model.parameters())
""",
}


@pytest.mark.parametrize("body", MODELS.values(), ids=MODELS)
def test_a_model(mended, body):
    assert mended(body)


TWICE = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, by):
        return values * 2

    @staticmethod
    def backward(ctx, grad):
"""
RETURNS = {
    "one": "return grad.cpu(), None",
    "a tuple": "made = grad.cpu(), None\nreturn made",
    "a call": "return tuple([grad.cpu(), None])",
    "two returns": "if grad.sum() > 1e9:\n    return grad.cpu() * 2, None\nreturn grad.cpu(), None",
    "two returns, the other way": "if grad.sum() < 1e9:\n    return grad.cpu() * 2, None\nreturn grad.cpu(), None",
}


@pytest.mark.parametrize("lines", RETURNS.values(), ids=RETURNS)
def test_a_gradient(mended, lines):
    body = "".join(f"        {line}\n" for line in lines.splitlines())
    assert mended(TWICE + body + mine("return Twice.apply(super().forward(x), 2)"))


def test_a_hook(mended):
    assert mended("""
def case(device):
    model = Net().to(device)
    mask = torch.ones(5)
    model[0].bias.register_hook(lambda grad: grad * mask)
    return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), batch())
""")


DATASETS = {
    "a variable": case(batch="torch.utils.data.TensorDataset(*batch())"),
    "in the call": case().replace(", pair,", ", torch.utils.data.TensorDataset(*batch()),"),
}


@pytest.mark.parametrize("body", DATASETS.values(), ids=DATASETS)
def test_a_dataset(mended, body):
    assert mended(body)


def test_rows_of_a_dataset_that_is_moved_at_once(mended):
    fixes = mended("""
IMAGES, LABELS = torch.randn(64, 6), torch.randn(64, 3)

def case(device):
    model = Net().to(device)
    images = IMAGES.to(device)
    def step(rows):
        return nn.functional.mse_loss(model(images[rows]), LABELS[rows].to(device))
    return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), None, torch.arange(4), step)
""")
    assert [fix.partition(": ")[2] for fix in fixes] == [
        "images = IMAGES",
        "return nn.functional.mse_loss(model(images[rows].to(device)), LABELS[rows].to(device))",
    ]


@pytest.mark.parametrize("move", [".cuda()", ".to('cuda')", ".to(torch.device('cuda:0'))"])
def test_a_device_by_name(mended, move):
    assert mended(case(f"Net(){move}"), to="cpu")


@pytest.mark.unmeasured
@pytest.mark.parametrize("saved", ["", "module."])
@pytest.mark.parametrize("model", ["Net().to(device)", "nn.DataParallel(Net().to(device))"])
def test_a_prefix_needs_none(mended, make, saved, model):
    tree = make.tree()
    tree["model"] = {saved + key: value for key, value in tree["model"].items()}
    assert mended(case(model), make.save(tree)) == []

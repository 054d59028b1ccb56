"""The name of the target in a fix of a method: an attribute of its object, so the line works on other targets too."""

from __future__ import annotations

import pytest
from pasting import case, mine

TRAINER = """
class Trainer:
    def __init__(self, model, place):
        self.name = "cpu"
        {kept}
    def loss(self, pair):
        x, y = pair
        return nn.functional.mse_loss({model}(x), y.to(x.device))
"""
KEPT = {
    "a device": ("self.model, self.place = model, place", "self.model", "x = x.to(self.place)"),
    "its name": ("self.model, self.place = model, 'cuda:0'", "self.model", "x = x.to(self.place)"),
    "a module": ("self.model = model", "self.model", "x = x.to(next(self.model.parameters()).device)"),
    "nothing": (
        "self.run = lambda x: model(x)",
        "self.run",
        "self.run = lambda x: model(x.to(next(model.parameters()).device))",
    ),
}


@pytest.mark.unmeasured
@pytest.mark.parametrize(("kept", "model", "text"), KEPT.values(), ids=KEPT)
def test_a_method_says_it_by_its_object(mended, kept, model, text):
    body = TRAINER.format(kept=kept, model=model) + case(step="Trainer(model, device).loss", given="None")
    (fix, *_) = mended(body)
    assert fix.partition(": ")[2] == text


MAKERS = {
    "of another value": ('device="cpu"', "make(6)", "make(6).to(device)"),
    "of the value": ("device", "make(6, device)", "torch.ones(n, device=device)"),
    "of its name": ('device="cuda"', "make(6)", "torch.ones(n, device=device)"),
}


@pytest.mark.parametrize(("parameter", "call", "fixed"), MAKERS.values(), ids=MAKERS)
def test_a_parameter_is_the_target_only_by_its_value(mended, parameter, call, fixed):
    maker = f"def make(n, {parameter}):\n    return torch.ones(n)\n\n"
    step = f"def step(pair):\n    x, y = [one.to(device) for one in pair]\n    return criterion(model(x * {call}), y)"
    (fix,) = mended(maker + case(step=step))
    assert fixed in fix


def test_a_default_is_not_taken_for_the_target_where_a_module_is_built(mended):
    trainer = TRAINER.format(kept="self.model, self.old = model, Net()", model="self.model(x) + self.old").replace(
        "place):", "*, device='cpu'):"
    )
    (fix,) = mended(trainer + case(step="lambda pair: Trainer(model).loss([one.to(device) for one in pair])"))
    assert fix.partition(": ")[2] == "self.old.to(x.device)"


def test_a_parameter_of_the_case_that_is_rebound_is_not_the_target(mended):
    (fix,) = mended("""
    def case(device):
        model = Net().to(device)
        home, device = device, "cpu"
        criterion = nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), criterion, [one.to(home) for one in batch()])
    """)
    assert fix.partition(": ")[2].endswith(".to(home)")


def test_a_helper_that_builds_the_case_names_its_own_device(mended):
    (fix,) = mended("""
    def build(place):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        return ckptmove.Case(model, optimizer, nn.MSELoss(), [one.to(place) for one in batch()])

    def case(device):
        return build(device)
    """)
    assert fix.partition(": ")[2] == "model = model.to(place)"


IMPORTED = {
    "in a class body": ("", "table = torch.ones(3)", "h * self.table", "h * self.table.to(x.device)"),
    "in a class body, by the class": ("", "table = torch.ones(3)", "h * Mine.table", "h * Mine.table.to(x.device)"),
    "by a function": (
        "def make(): return torch.ones(3)\n",
        "table = make()",
        "h * self.table",
        "h * self.table.to(x.device)",
    ),
    "in the module": ("TABLE = torch.ones(3)\n", "pass", "h * TABLE", "h * TABLE.to(x.device)"),
    "kept in the step": (
        "TABLE = torch.ones(3)\n",
        "pass",
        "h * vars(self).setdefault('t', TABLE)",
        "'t', TABLE.to(x.device)",
    ),
}


@pytest.mark.parametrize(("head", "body", "used", "fixed"), IMPORTED.values(), ids=IMPORTED)
def test_no_device_is_written_into_a_line_that_the_import_runs(fault_of, head, body, used, fixed):
    forward = mine(f"h = super().forward(x)\nreturn {used}").replace("(Net):\n", f"(Net):\n    {body}\n", 1)
    step = "def step(pair):\n    return criterion(model(pair[0].to(device)), pair[1].to(device))"
    model = forward.partition("def case")[0]
    _, evidence = fault_of(head + model + case("Mine().to(device)", step=step))
    assert fixed in evidence["fix"]
    assert "cuda:0" not in evidence["fix"]
    assert evidence["fix_at"]


def test_a_tensor_of_the_import_is_moved_in_the_loss_of_the_case(mended):
    (fix,) = mended("""
    WEIGHT = torch.ones(3)

    def case(device):
        model = Net().to(device)
        criterion = functools.partial(nn.functional.binary_cross_entropy_with_logits, pos_weight=WEIGHT)
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), criterion, [b.to(device) for b in batch()])
    """)
    way = "criterion.keywords['pos_weight']"
    assert fix.partition(": ")[2] == f"{way} = {way}.to(device)"


def test_cuda_is_replaced_by_a_parameter_with_the_target(mended):
    body = "def moved(one, device):\n    return one.cuda()\n\n"
    step = "lambda pair: criterion(model(moved(pair[0], device)), pair[1].to(device))"
    (fix,) = mended(body + case(step=step), to="mps")
    assert fix.partition(": ")[2] == "return one.to(device)"

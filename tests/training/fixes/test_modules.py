"""Fixes of modules that are neither the model nor the loss, and that stayed on the CPU."""

from __future__ import annotations

import pytest
from pasting import case

LOSS = "nn.functional.mse_loss(model(rows), {}(rows))"
STEP = "def step(pair):\n    rows = pair[0].to(device)\n    return " + LOSS


def stepping(old, made=""):
    """A case whose step compares the model with another one, by the expression for that."""
    return case(batch=f"batch()\n{made}" if made else "batch()", step=STEP.format(old))


TRAINER = """
class Trainer:
    def __init__(self, device):
        {made}
    def loss(self, model, rows):
        return nn.functional.mse_loss(model(rows), self.old(rows))
    {more}
"""
BY_TRAINER = "def step(pair):\n    return trainer.loss(model, pair[0].to(device))"
TRAINED = case(batch="batch()\ntrainer = Trainer(device)", step=BY_TRAINER)
FIXES = {
    "closure": (stepping("old", "old = Net()"), "old.0.weight", "old = old.to(device)"),
    "one of several": (stepping("old", "old, _ = Net(), 1"), "old.0.weight", "old = old.to(device)"),
    "global": (f"OLD = Net()\n{stepping('OLD')}", "OLD.0.weight", "OLD.to(device)"),
    "of the step": (
        stepping("old").replace("rows = pair", "old = Net(); rows = pair"),
        "old.0.weight",
        "old = Net(); old = old.to(device); rows = pair[0].to(device)",
    ),
    "attribute": (
        TRAINER.format(made="self.old: nn.Module = Net()", more="") + TRAINED,
        "trainer.old.0.weight",
        "self.old = self.old.to(device)",
    ),
    "attribute of another name": (
        TRAINER.format(made="me = self; me.old = Net()", more="") + TRAINED,
        "trainer.old.0.weight",
        "me = self; me.old = Net(); me.old = me.old.to(device)",
    ),
    "attribute that is made where no device is": (
        (TRAINER.format(made="self.old = Net()", more="") + TRAINED).replace("self, device", "self").replace(
            "Trainer(device)", "Trainer()"
        ),
        "trainer.old.0.weight",
        "trainer.old.to(device)",
    ),
    "attribute that is set twice": (
        TRAINER.format(made="self.old = Net()", more="def reset(self): self.old = Net()") + TRAINED,
        "trainer.old.0.weight",
        "trainer.old.to(device)",
    ),
    "attribute of an argument of a function": (
        TRAINER.format(made="self.old = Net()", more="")
        + stepping("trainer.old", "trainer = Trainer(device)"),
        "trainer.old.0.weight",
        "self.old = self.old.to(device)",
    ),
    "buffer": (
        stepping("old", "old = nn.Sequential(Net().to(device), nn.BatchNorm1d(3, affine=False))"),
        "old.1.running_mean",
        "old = old.to(device)",
    ),
    "argument": (
        "def loss_of(one, model, rows):\n    return " + LOSS.format("one") + "\n"
        + case(batch="batch()", step="def step(pair):\n    return loss_of(Net(), model, pair[0].to(device))"),
        "one.0.weight",
        "one.to(rows.device)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "name", "text"), FIXES.values(), ids=FIXES)
def test_a_module_is_moved_where_it_is_made_or_used(mended, fault_of, body, name, text):
    detail, _ = fault_of(body)
    assert name in detail.partition(" are on cpu")[0].split(" and ")
    (fix,) = mended(body)
    assert fix.partition(": ")[2] == text


def test_the_outermost_frame_says_what_a_module_is_for(fault_of):
    _, evidence = fault_of("class Old(Outer):\n    def prepare(self): pass\n" + stepping("old", "old = Old()"))
    assert set(evidence["tensors"]) == {"old.body.0.bias", "old.body.0.weight"}
    assert evidence["fix"] == "old = old.to(device)"


def test_a_tensor_of_no_module_in_sight_is_told_of_as_before(fault_of):
    old = "class Old(Outer):\n    def prepare(self): pass\n    def forward(self, x): return super().forward(x)\n"
    _, evidence = fault_of(old + stepping("Old()"))
    assert evidence["tensor"].startswith("a tensor that")

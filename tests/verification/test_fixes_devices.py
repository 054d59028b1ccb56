"""What a fix calls the target in a method: by what its object keeps, so that the line serves on another target, too."""

from __future__ import annotations

import pytest
from pasting import case

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
    "a device": ("self.model, self.place = model, place", "self.model", "self.place"),
    "its name": ("self.model, self.place = model, 'cuda:0'", "self.model", "self.place"),
    "a module": ("self.model = model", "self.model", "next(self.model.parameters()).device"),
    "nothing": ("self.run = lambda x: model(x)", "self.run", "'cuda:0'"),
}


@pytest.mark.parametrize(("kept", "model", "device"), KEPT.values(), ids=KEPT)
def test_a_method_says_it_by_its_object(mended, kept, model, device):
    body = TRAINER.format(kept=kept, model=model) + case(step="Trainer(model, device).loss", given="None")
    (fix,) = mended(body)
    assert fix.partition(": ")[2] == f"x = x.to({device})"

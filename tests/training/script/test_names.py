"""How `verify --script` names the tensors of a script with several modules."""

from __future__ import annotations

import textwrap

import pytest

pytest.importorskip("torch")

SCRIPT = """
import sys
import torch
from torch import nn

stored = torch.load(sys.argv[1], map_location="cuda")
model, scale = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), nn.Linear(3, 3)
{moved}.to("cuda")
optimizer = torch.optim.AdamW([*model.parameters(), *scale.parameters()])
model.load_state_dict(stored["model"])
nn.functional.mse_loss(scale(model(torch.randn(4, 6, device="cuda"))), torch.zeros(4, 3, device="cuda")).backward()
optimizer.step()
"""


@pytest.mark.unmeasured
@pytest.mark.parametrize(("moved", "left"), [("model", "scale.weight"), ("scale", "model.0.weight")])
def test_a_parameter_has_the_name_of_its_module_also_if_an_optimizer_has_two(
    answers, make, tmp_path, monkeypatch, moved, left
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT.format(moved=moved)))
    path = make()
    check = answers(path, "cuda:0", script="train.py", script_args=[path])["script"]
    assert check["status"] == "failed"
    assert left in check["evidence"]["tensors"]

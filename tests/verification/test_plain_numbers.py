from __future__ import annotations

import pytest
import torch

INF, NAN = float("inf"), float("nan")


def parts():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu").state_dict()
    return {
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).state_dict(),
        "nested": [{"step": torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict()}],
        "scaler": scaler | {"scale": 65536.0},
        "epoch": NAN,
    }


def change(tree, *path, value):
    *parents, last = path
    for key in parents:
        tree = tree[key]
    tree[last] = value


def numbers(make, answers, tree):
    return answers(make.save({**make.tree("AdamW"), **tree}), "cpu")["numbers"]


def test_healthy_parts_are_let_pass_with_a_best_loss_of_infinity(make, answers):
    tree = parts()
    assert tree["plateau"]["best"] == INF
    tree["again"] = tree["nested"]
    assert numbers(make, answers, tree)["status"] == "passed"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("scaler", "scale"), NAN, "scaler.scale is nan"),
        (("scaler", "scale"), 0.0, "scaler.scale is 0.0"),
        (("scaler", "scale"), INF, "scaler.scale is inf"),
        (("plateau", "best"), NAN, "plateau.best is nan"),
        (("nested", 0, "step", "base_lrs"), [0.1, INF], "nested.0.step.base_lrs is inf"),
        (("nested", 0, "step", "_last_lr"), [NAN], "nested.0.step._last_lr is nan"),
    ],
)
def test_numbers_that_nothing_can_go_on_from(make, answers, path, value, said):
    tree = parts()
    change(tree, *path, value=value)
    found = numbers(make, answers, tree)
    assert found["status"] == "failed"
    assert said in found["detail"]

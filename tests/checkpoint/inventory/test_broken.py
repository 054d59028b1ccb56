"""Numbers of schedulers and scalers that training cannot go on from, in ``inspect`` and in ``verify``."""

from __future__ import annotations

import pytest
import torch

import ckptmove

INF, NAN = float("inf"), float("nan")


def parts():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu").state_dict()
    return {
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).state_dict(),
        "nested": [{"step": torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict()}],
        "scaler": scaler | {"scale": 65536.0},
        "pickled": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "normaliser": {"scale": 0.0},
        "epoch": NAN,
    }


def change(tree, *path, value):
    *parents, last = path
    for key in parents:
        tree = tree[key]
    tree[last] = value


def codes(path):
    return {one.code: list(one.where) for one in ckptmove.inspect(str(path)).findings if one.code in {"N501", "N503"}}


def test_healthy_parts_have_no_finding_with_a_best_loss_of_infinity(tmp_path):
    tree = parts()
    assert tree["plateau"]["best"] == INF
    tree["again"] = tree["nested"]
    change(tree, "plateau", "cooldown", value=10**5000)
    torch.save(tree, tmp_path / "a.pt")
    assert codes(tmp_path / "a.pt") == {}


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        (("scaler", "scale"), NAN, "N503"),
        (("scaler", "scale"), 0.0, "N503"),
        (("scaler", "scale"), 0, "N503"),
        pytest.param(("scaler", "scale"), -(10**5000), "N503", id="huge"),
        (("scaler", "scale"), INF, "N503"),
        (("plateau", "best"), NAN, "N501"),
        (("nested", 0, "step", "base_lrs"), [0.1, INF, INF], "N501"),
        (("nested", 0, "step", "_last_lr"), [NAN], "N501"),
    ],
)
def test_numbers_that_nothing_can_go_on_from(tmp_path, path, value, code):
    tree = parts()
    change(tree, *path, value=value)
    torch.save(tree, tmp_path / "a.pt")
    where = ".".join(map(str, path))
    assert codes(tmp_path / "a.pt") == {code: [where]}
    assert codes(tmp_path) == {code: [f"a.pt.{where}"]}


def test_a_pickled_scheduler_is_judged_too(tmp_path):
    tree = parts()
    tree["pickled"].base_lrs = [NAN]
    torch.save(tree, tmp_path / "a.pt")
    assert codes(tmp_path / "a.pt") == {"N501": ["pickled.base_lrs"]}


@pytest.mark.parametrize(("path", "code"), [(("scaler", "scale"), "N503"), (("plateau", "best"), "N501")])
def test_the_check_of_numbers_fails_unless_the_code_is_ignored(tmp_path, path, code):
    tree = {key: value for key, value in parts().items() if key != "pickled"}
    change(tree, *path, value=NAN)
    torch.save(tree, tmp_path / "a.pt")
    found = ckptmove.verify(str(tmp_path / "a.pt"))
    assert {one.name for one in found.checks if one.status == "failed"} == {"numbers"}
    assert code in {one.code for one in found.findings}
    assert ckptmove.verify(str(tmp_path / "a.pt"), ignore=[code]).passed

"""``diff`` and ``verify --against`` find the same differences, except devices."""

from __future__ import annotations

import shutil

import pytest
import torch

import ckptmove

WEIGHT = torch.arange(12.0).reshape(3, 4)


def transposed():
    return {"w": WEIGHT.t(), "b": torch.ones(2)}


def parameter():
    return {"w": torch.nn.Parameter(WEIGHT), "b": torch.ones(2)}


def contiguous():
    return {"w": WEIGHT.t().contiguous(), "b": torch.ones(2)}


def other_values():
    return {"w": WEIGHT.t() + 1, "b": torch.ones(2)}


def other_option():
    return {"w": WEIGHT.t(), "b": torch.ones(2), "epoch": 3}


@pytest.fixture
def save(distributed):
    """Save a tree as a file, or as a distributed checkpoint."""

    def write(form, tree, folder):
        folder.mkdir()
        if form == "dcp":
            return str(distributed.save(folder / "run", tree))
        torch.save(tree, folder / "run")
        return str(folder / "run")

    return write


@pytest.mark.parametrize(
    ("mine", "theirs", "is_same"),
    [
        (("file", transposed), ("dcp", transposed), True),
        (("dcp", transposed), ("file", transposed), True),
        (("dcp", contiguous), ("dcp", transposed), True),
        (("file", parameter), ("dcp", parameter), True),
        (("file", transposed), ("file", transposed), True),
        (("file", transposed), ("dcp", other_values), False),
        (("file", other_option), ("dcp", transposed), False),
        (("dcp", transposed), ("file", other_option), False),
    ],
)
def test_both_commands_agree_on_tensors(tmp_path, save, answers, mine, theirs, is_same):
    path, against = (save(form, tree(), tmp_path / side) for side, (form, tree) in (("a", mine), ("b", theirs)))
    assert ckptmove.diff(path, against).same == is_same
    restore = answers(path, against=against)["restore"]
    assert (restore["status"] == "passed") == is_same, restore
    assert (restore["evidence"]["changed"] == 0) == is_same


@pytest.mark.parametrize(
    ("target", "is_same"), [("one.pth", True), ("two.pth", False), (None, False)], ids=["same", "other", "gone"]
)
def test_both_commands_agree_on_links(tmp_path, answers, target, is_same):
    for name in ("one.pth", "two.pth"):
        (tmp_path / "a").mkdir(exist_ok=True)
        torch.save({"w": torch.ones(1)}, tmp_path / "a" / name)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / "last").symlink_to("one.pth")
    if target:
        (tmp_path / "b" / "last").symlink_to(target)
    path, against = str(tmp_path / "a"), str(tmp_path / "b")
    assert ckptmove.diff(path, against).same == is_same
    assert (answers(path, against=against)["restore"]["status"] == "passed") == is_same


def test_devices_count_in_one_command_alone(tmp_path, save, answers):
    path = save("file", transposed(), tmp_path / "a")
    moved = str(ckptmove.convert(path, to="cuda:0").output)
    assert {change.what for change in ckptmove.diff(path, moved).changed} == {"device"}
    assert answers(path, against=moved)["restore"]["status"] == "passed"


def test_a_cast_is_a_difference_of_diff_alone(tmp_path, save, answers):
    wide = {"w": WEIGHT.double().t() / 3, "c": torch.randn(3, dtype=torch.complex128)}
    path = save("file", wide, tmp_path / "a")
    moved = str(ckptmove.convert(path, to="mps", cast=True).output)
    assert "dtype" in {change.what for change in ckptmove.diff(moved, path).changed}
    assert answers(moved, against=path)["restore"]["status"] == "passed"
    rounded = {"w": wide["w"].float() + 1e-7, "c": wide["c"].to(torch.complex64)}
    restore = answers(save("file", rounded, tmp_path / "c"), against=path)["restore"]
    assert restore["evidence"]["changed"] == 1
    assert "w: other bits" in restore["detail"]


@pytest.mark.parametrize("lay", [lambda t: t.expand(4, 6), lambda t: torch.as_strided(t, (4, 3), (1, 1))])
def test_a_cast_of_elements_that_share_bytes_is_compared(tmp_path, save, answers, lay):
    path = save("file", {"w": lay(torch.arange(6.0, dtype=torch.float64) / 7)}, tmp_path / "a")
    moved = str(ckptmove.convert(path, to="mps", cast=True).output)
    assert answers(moved, against=path)["restore"]["status"] == "passed"
    other = save("file", {"w": lay(torch.arange(6.0, dtype=torch.float64) / 8)}, tmp_path / "b")
    assert answers(moved, against=other)["restore"]["evidence"]["changed"] == 1


def test_of_a_sparse_tensor_in_the_sample_the_values_are_compared(tmp_path, save, answers):
    def tree(value):
        return {"w": torch.sparse_coo_tensor([[0, 1]], [1.0, value], (3,), check_invariants=True), "b": torch.ones(2)}

    path, against = save("file", tree(2.0), tmp_path / "a"), save("file", tree(3.0), tmp_path / "b")
    assert answers(path, against=path, sample=2)["restore"]["evidence"]["changed"] == 0
    restore = answers(path, against=against, sample=2)["restore"]
    assert (restore["status"], restore["evidence"]["changed"]) == ("failed", 1)

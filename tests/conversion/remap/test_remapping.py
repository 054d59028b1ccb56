"""The number of walks over a tree."""

from __future__ import annotations

import pytest
import torch

import ckptmove
from ckptmove.conversion.remap import remapping, rename

STATE = {"module.l.w": torch.arange(6.0), "module.l.b": torch.arange(9.0)[2:4]}


@pytest.fixture
def walks(monkeypatch):
    """The walks over a new tree."""
    made, walk = [], remapping.tree_inventory

    def counted(*args):
        made.append(args)
        return walk(*args)

    monkeypatch.setattr(remapping, "tree_inventory", counted)
    return made


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "bfloat16"}, 1),
        ({"compact": True}, 1),
        ({"strip_prefix": True}, 1),
        ({"plain": True}, 1),
        ({"to": "cuda:0", "plain": True}, 1),
        ({"strip_prefix": True, "dtype": "bfloat16"}, 2),
        ({"to": "cuda:0", "compact": True}, 2),
    ],
)
def test_a_tree_is_walked_again_only_after_a_change(tmp_path, walks, options, expected) -> None:
    torch.save(STATE, tmp_path / "a.pth")
    ckptmove.convert(tmp_path / "a.pth", output=tmp_path / "b.pth", **options)
    assert len(walks) == expected


def test_entries_are_listed_only_for_a_rename(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rename, "entries", lambda *_: pytest.fail("listed"))
    torch.save(STATE, tmp_path / "a.pth")
    ckptmove.convert(tmp_path / "a.pth", output=tmp_path / "b.pth", plain=True)

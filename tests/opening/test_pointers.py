"""Text files that name the checkpoint to resume from."""

from __future__ import annotations

import pytest
import torch

import ckptmove


@pytest.mark.parametrize(
    ("name", "text", "dangles"),
    [
        ("latest", "global_step5\n", False),
        ("latest", "global_step10", True),
        ("latest", "tagged", False),  # of another program: nothing beside it is called so
        ("latest", "epoch 7", False),
        ("latest", "", False),
        ("latest", "x" * 2000, False),
        (".latest", "global_step10", False),
        ("latest_checkpointed_iteration.txt", "5", False),
        ("latest_checkpointed_iteration.txt", "10", True),
        ("latest_checkpointed_iteration.txt", "release", True),
    ],
)
def test_a_pointer_to_nothing_is_a_warning(tmp_path, name, text, dangles):
    for step in (3, 5):
        home = tmp_path / "run" / f"global_step{step}"
        home.mkdir(parents=True)
        torch.save({"w": torch.ones(2)}, home / "a.pt")
    (tmp_path / "run" / name).write_text(text)
    found = [one for one in ckptmove.inspect(str(tmp_path)).findings if one.code == "F811"]
    assert [(one.severity, list(one.where)) for one in found] == [("warning", [f"run/{name}"])] * dangles
    assert all("global_step5" in one.message for one in found)


def test_a_pointer_of_another_form_than_its_neighbours(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "latest").write_text("global_step10")
    (found,) = [one for one in ckptmove.inspect(str(tmp_path)).findings if one.code == "F811"]
    assert "newest" not in found.message

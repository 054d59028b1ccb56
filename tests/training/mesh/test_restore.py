"""What to add to `state` if the checkpoint has more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ckptmove.training.mesh.restore import key_fix


@pytest.mark.parametrize(
    ("stored", "lacking"),
    [
        ({"model.weight"}, []),
        ({"model.weight", "epoch", "rng.cuda", "rng.cpu"}, ["epoch", "rng"]),
        ({"model.weight", "model.bias"}, []),  # another model, and not an entry that was forgotten
        ({"net.weight", "epoch"}, []),
        (
            {"model.weight", *(f"entry{number}.value" for number in range(7))},
            [*(f"entry{number}" for number in range(5))],
        ),
        ({"model.weight", "scheduler.last_epoch", "scheduler._step_count"}, ["scheduler"]),
    ],
)
def test_whole_entries_are_named(stored, lacking):
    fix = key_fix(frozenset({"model.weight"}), SimpleNamespace(names=stored))
    added = ", ".join(f'"{entry}": ...' for entry in lacking)
    more = ", ..." * (len(lacking) == 5)
    assert fix.endswith(f"{{**state, {added}{more}}}") if lacking else not fix

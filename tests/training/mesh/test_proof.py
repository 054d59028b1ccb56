"""The proofs of many cases on four ranks, and of more on two, in a process group each (``mesh_driver``)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forked_ranks
import mesh_driver
import pytest
from answers import checks_of, run_of

from ckptmove.api.hints import hint_for
from ckptmove.errors import CaseUnusable
from ckptmove.proof.processes.messages import read_message
from ckptmove.simulation.device import unavailable_reason

ORDER = ["keys", "restore", "options", "step", "parity", "fresh", "case"]
ALL, LAST, ALL_BUT_LAST = slice(None), slice(-1, None), slice(-1)
#: The check that has to find each fault, and the ranks that it names; None if the fault is of no single rank.
FOUND_BY = {
    "flip": ("restore", LAST),
    "swap": ("restore", ALL),
    "swap_moments": ("restore", ALL),
    "count_up": ("restore", LAST),
    "other_rate": ("options", ALL),
    "forget": ("restore", ALL),
    "drift": ("parity", None),
    "idle": ("step", LAST),
    "still": ("step", ALL),
    "explode": ("step", ALL),
    "average": ("keys", None),
    "objects": ("keys", None),
    "fewer": ("keys", None),
    "more": ("keys", None),
    "wider": ("restore", ALL),
    "double": ("restore", ALL),
    "frozen_later": ("restore", ALL),
    "truncated": ("restore", ALL),
    "weights": ("restore", ALL),
    "shrink_squares": ("step", LAST),
    "negate_squares": ("step", LAST),
    "spoil_buffer": ("step", ALL),
    "unread": ("fresh", None),
    "without_gradient": ("case", ALL),
    "stages_lists": ("options", ALL_BUT_LAST),
    "file": ("keys", None),
    "no_dict": ("keys", None),
    "after_flat_swap": ("restore", ALL),
    "one_file to wider": ("restore", ALL),
    "other_kinds": ("restore", ALL),
    "not_finite": ("case", ALL),
}
#: Checks that are skipped although nothing failed.
SKIPPED = {"SGD to SGD": ["fresh"], "Mine to Mine": ["parity", "fresh"], "rate0 to rate0": ["fresh"]}
SKIPPED |= {"below_precision to below_precision": ["fresh"], "small_rate to small_rate": ["fresh"]}
SKIPPED |= {f"{name} to weights_only": ["fresh"] for name in ("safetensors", "consolidated")}
SKIPPED |= {"indexed_plain to indexed_plain": ["fresh"], "tied_shards to tied_weights": ["fresh"]}
#: Scenarios whose files do not tell the number of ranks.
OF_FILES = [
    "tied_shards to tied_weights",
    "one_file to fsdp",
    "numbered to fsdp",
    "safetensors to weights_only",
    "consolidated to weights_only",
]
UNUSABLE = ["output", "three", "no_state", "shared_optimizer", "other_state", "type_local"]
REFUSED = ["consolidated to average", "twice", "namespace"]
SIMULATED = ["simulated", "stray", "too_old", "required", "required_too_old"]
RESHARDED = ["fsdp to hsdp", "fsdp to tp", "fsdp to ddp", "fsdp to plain"]


def answers_of(folder, ranks, *scenarios):
    command = [sys.executable, Path(mesh_driver.__file__), folder, str(ranks), *scenarios]
    code, errors = forked_ranks.ended(command, timeout=300, cwd=folder)
    assert code == 0, errors[-5000:]
    lines = json.loads((folder / "answers.json").read_text())
    return {name: [[read_message(line) for line in of_rank] for of_rank in ranks] for name, ranks in lines.items()}


def check_simulated(answers, first):
    if unavailable_reason() is None:
        status = {check: one["status"] for check, one in checks_of(first["simulated"]).items()}
        assert status == dict.fromkeys([*ORDER, "rank"], "passed")
        assert "2 ranks of cuda (simulated)" in checks_of(first["simulated"])["step"]["detail"]
        for messages in answers["stray"]:
            rank = checks_of(messages)["rank"]
            assert rank["evidence"]["check"] == "case"
            assert "criterion.weight" in rank["detail"]
        required = checks_of(first["required"])
        assert [one for one in ORDER if required[one]["status"] == "failed"] == ["step"]
        assert required["restore"]["status"] == "passed"
    assert {checks_of(first["too_old"])[check]["status"] for check in ORDER} == {"skipped"}
    status = {check: one["status"] for check, one in checks_of(first["required_too_old"]).items()}
    assert status == {**dict.fromkeys(ORDER, "skipped"), "step": "failed", "rank": "passed"}


def check_layouts_and_faults(answers):
    """Check that each healthy scenario passes, and that each fault is found by its check."""
    first = {scenario: ranks[0] for scenario, ranks in answers.items()}
    healthy = [
        name
        for name in answers
        if (" to " in name and name not in {*FOUND_BY, *REFUSED}) or name in {"ask_again", "schedule"}
    ]
    for name in healthy:
        status = {check: one["status"] for check, one in checks_of(first[name]).items()}
        skipped = SKIPPED.get(name, [])
        expected = {check: "skipped" if check in skipped else "passed" for check in ORDER}
        assert status == {**expected, "rank": "passed"}, name
        assert [one.check.name for one in first[name] if one.check is not None] == [*ORDER, "rank"]
        assert run_of(first[name]).resharded == (name in RESHARDED), name
        assert run_of(first[name]).saved_by == (None if name in OF_FILES else len(answers[name])), name
    for name in FOUND_BY.keys() & answers.keys():
        check, of_ranks = FOUND_BY[name]
        found = checks_of(first[name])
        ranks = of_ranks and [*range(len(answers[name]))][of_ranks]
        assert [one for one in ORDER if found[one]["status"] == "failed"] == [check], name
        assert all(found[one]["status"] == "skipped" for one in ORDER[ORDER.index(check) + 1 :]), name
        assert found[check]["evidence"].get("ranks") == ranks, name
        named = {one.rank for one in run_of(first[name]).faults}
        assert named == {*(ranks or [])}, name
    # Only the first rank answers the checks; the others tell how they ended.
    assert all([*checks_of(one)] == ["rank"] for ranks in answers.values() for one in ranks[1:] if checks_of(one))
    return first


def test_a_resume_and_a_fault_of_one_rank(tmp_path):
    scenarios = ["fsdp to fsdp", "flattened to flattened", "flip"]
    answers = answers_of(tmp_path, 2, *scenarios)
    assert [*answers] == scenarios
    check_layouts_and_faults(answers)


@pytest.mark.slow
def test_layouts_of_four_ranks(tmp_path):
    answers = answers_of(tmp_path, 4)
    assert {*answers} == {*mesh_driver.ON_FOUR_RANKS}
    first = check_layouts_and_faults(answers)
    meshes = {name: run_of(first[f"{name} to {name}"])[1:3] for name in ("fsdp", "hsdp", "uneven", "ddp")}
    assert meshes == {
        "fsdp": ((4,), ()),
        "hsdp": ((2, 2), ("replicate", "shard")),
        "uneven": ((2, 2), ("dp", "tp")),
        "ddp": ((), ()),
    }
    assert checks_of(first["truncated"])["restore"]["detail"].endswith("EOFError (the file ends too early)")


@pytest.mark.slow
def test_every_layout_passes_and_every_fault_is_found_on_two_ranks(tmp_path):
    answers = answers_of(tmp_path, 2)
    assert {*answers} == {*mesh_driver.ON_TWO_RANKS, *SIMULATED, "accelerator", "late"}
    assert FOUND_BY.keys() <= {*mesh_driver.ON_TWO_RANKS, *mesh_driver.ON_FOUR_RANKS}
    first = check_layouts_and_faults(answers)
    bare = [
        checks_of(first[f"{name} to weights_only"])["fresh"]["evidence"] for name in ("safetensors", "consolidated")
    ]
    assert all(one["anew"] > one["with_state"] == 0 for one in bare), "weights alone prove no resume"
    losses = {
        name: checks_of(first[f"fsdp to {name}"])["case"]["evidence"]["loss"] for name in ("no_loss", "float_loss")
    }
    assert losses["no_loss"] == []
    assert len({*losses["float_loss"]}) == 2
    assert "loss" not in checks_of(first["fsdp to no_loss"])["case"]["detail"]

    for name in UNUSABLE:
        assert all(one[-1].unusable for one in answers[name]), name
    hints = {name: hint_for(CaseUnusable(first[name][-1].unusable)) for name in ("no_state", "output")}
    assert "state=" in hints["no_state"]
    assert hints["output"] == ""
    for name in REFUSED:
        assert all(one[-1].refusal for one in answers[name]), name
    for messages in answers["fail"]:
        rank = checks_of(messages)["rank"]
        assert rank["status"] == "failed"
        assert rank["evidence"]["check"] == "case"
        assert rank["evidence"]["file"].endswith("mesh_cases.py")
        assert not rank["evidence"]["lost"]
    for messages in answers["late"]:
        late = next(one.late for one in messages if one.late is not None)
        assert late.check == "case"
        assert "mesh_driver.py" in late.where
        assert not late.waits
    check_simulated(answers, first)
    assert checks_of(first["accelerator"])["step"]["status"] == "passed"

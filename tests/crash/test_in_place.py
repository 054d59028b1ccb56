"""An interrupted change in place is complete or can be undone. Reading reports it, and changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptmove.api import functions as api
from ckptmove.errors import ChangeFailed, RollbackFailed, UnreadableInput
from ckptmove.io.changes import InterruptedConversion, RestoresMore

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
ZIP, LEGACY = "adamw-cuda3.pth", "legacy-adamw-cuda1.pth"


def to(device):
    return lambda path: api.convert(path, to=device, in_place=True)


#: The steps before, and the step that is interrupted.
CHANGES = {
    "first": (ZIP, (), to("cpu")),
    "again-and-longer": (ZIP, (to("cpu"),), to("cuda:10")),
    "again-and-shorter": (ZIP, (to("cuda:10"),), to("cpu")),
    "back-to-where-it-was": (ZIP, (to("cpu"),), to("cuda:3")),
    "undo": (ZIP, (to("cpu"),), api.undo),
    "legacy": (LEGACY, (), to("cuda:0")),
}


@pytest.fixture(params=CHANGES)
def change(request, crashes):
    """Something to break off, in a folder that has one file."""
    sample, before, last = CHANGES[request.param]
    path = crashes.folder / "run.pth"
    shutil.copy(SAMPLES / sample, path)
    for one in before:
        one(str(path))
    return lambda: last(str(path))


def undo(crashes):
    """Read the file, which changes nothing, and undo a conversion that was interrupted; return whether one was."""
    path, before = str(crashes.folder / "run.pth"), crashes.held()
    try:
        api.inspect(path)
    except InterruptedConversion:
        assert crashes.held() == before
        (note,) = api.undo(path).notes
        assert "interrupted" in note
        api.inspect(path)
        return True
    return False


def test_whatever_a_crash_leaves_becomes_whole(crashes, change):
    recorder = crashes.record(change)
    old, new = recorder.initial, crashes.held()
    assert old.keys() == new.keys() == {"run.pth"}
    assert old != new
    states = crashes.states(recorder)
    assert len(states) > 7
    for state in states:
        crashes.put(state)
        assert undo(crashes) == (len(state) > 1)
        assert crashes.held() in (old, new)


@pytest.mark.unmeasured
def test_a_crash_while_it_is_rolled_back_changes_nothing_about_that(crashes, change):
    recorder = crashes.record(change)
    old, new = recorder.initial, crashes.held()
    for state in crashes.killed(recorder):
        crashes.put(state)
        rollback = crashes.record(lambda: undo(crashes))
        for again in crashes.states(rollback, fast=60):
            crashes.put(again)
            undo(crashes)
            assert crashes.held() in (old, new)


@pytest.mark.unmeasured
def test_short_writes_make_no_difference(crashes, change):
    recorder = crashes.record(change, most_bytes=1500)
    old, new = recorder.initial, crashes.held()
    for state in crashes.states(recorder, fast=60):
        crashes.put(state)
        undo(crashes)
        assert crashes.held() in (old, new)


@pytest.mark.unmeasured
@pytest.mark.parametrize("lasting", [False, True])
def test_a_failing_call_is_told_and_the_file_is_whole(crashes, change, failure, lasting):
    initial = crashes.held()
    change()
    whole = (initial, crashes.held())
    crashes.put(initial)
    tries = 0
    for error in crashes.each_failure(change, failure, lasting=lasting):
        assert isinstance(error, ChangeFailed | RollbackFailed)
        if not lasting:
            assert isinstance(error, ChangeFailed)
        undo(crashes)
        assert crashes.held() in whole
        tries += 1
    assert tries > 5


@pytest.mark.parametrize("late", [False, True])
def test_an_interruption_leaves_the_file_whole(crashes, change, late):
    initial = crashes.held()
    change()
    whole = (initial, crashes.held())
    crashes.put(initial)
    for error in crashes.each_failure(change, KeyboardInterrupt, late=late):
        assert isinstance(error, KeyboardInterrupt)
        undo(crashes)
        assert crashes.held() in whole


@pytest.mark.parametrize("forgotten", ["journal", "folder", "file"])
def test_without_one_of_the_syncs_a_file_could_be_lost(crashes, forgotten):
    path = crashes.folder / "run.pth"
    shutil.copy(SAMPLES / ZIP, path)
    to("cuda:10")(str(path))
    recorder = crashes.record(lambda: to("cpu")(str(path)))
    old, new = recorder.initial, crashes.held()
    kinds = {"journal": ("sync", 1), "folder": ("sync-folder", -1), "file": ("sync", 0)}
    recorder.calls = [call for call in recorder.calls if (call.kind, call.node) != kinds[forgotten]]
    lost = 0
    for state in crashes.states(recorder):
        crashes.put(state)
        try:
            undo(crashes)
        except (UnreadableInput, RestoresMore):
            lost += 1
        else:
            lost += crashes.held() not in (old, new)
    assert lost

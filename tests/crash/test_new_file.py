"""A new file is complete or absent after a crash of the machine that loses calls without a sync."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from ckptmove.api import functions as api

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
ZIP, LEGACY, ARCHIVE = "adamw-cuda3.pth", "legacy-adamw-cuda1.pth", "members"


@pytest.fixture(params=[(ZIP, False), (ZIP, True), (LEGACY, False), (ARCHIVE, False)], ids=str)
def change(request, crashes, monkeypatch):
    """A conversion into a new file, or onto an old one."""
    monkeypatch.delattr(os, "copy_file_range", raising=False)  # every byte comes by a write
    sample, force = request.param
    suffix = ".zip" if sample == ARCHIVE else ".pth"
    path, output = crashes.folder / f"run{suffix}", crashes.folder / f"out{suffix}"
    if sample == ARCHIVE:
        with zipfile.ZipFile(path, "w") as whole:
            whole.write(SAMPLES / ZIP, ZIP)
            whole.write(SAMPLES / "adam-mps.pt", "adam-mps.pt")
    else:
        shutil.copy(SAMPLES / sample, path)
    if force:
        output.write_bytes(b"old")
    return lambda: api.convert(str(path), to="cuda:0", output=str(output), force=force)


def named(contents):
    """Content of the files with names of the user."""
    return {name: data for name, data in contents.items() if not name.startswith(".ckptmove-")}


def test_whatever_a_crash_leaves_is_whole(crashes, change):
    recorder = crashes.record(change)
    old, new = recorder.initial, crashes.held()
    assert old != new == named(new)
    found = [named(state) for state in crashes.states(recorder)]
    assert all(state in (old, new) for state in found)
    assert old in found
    assert new in found


def test_without_the_sync_of_the_file_it_could_be_lost(crashes, change):
    recorder = crashes.record(change)
    old, new = recorder.initial, crashes.held()
    recorder.calls = [call for call in recorder.calls if call.kind != "sync"]
    assert any(named(state) not in (old, new) for state in crashes.states(recorder))

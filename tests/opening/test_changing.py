"""A checkpoint that changes during ``verify``: the change is reported, not a fault of the file."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.checkpoint.inventory import build
from ckptmove.errors import AccessFailed, SourceChanged
from ckptmove.io.source import DiskPlace
from ckptmove.limits import Limits
from ckptmove.opening import reading
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof import opened
from ckptmove.proof.tensors.stored import StoredTensors
from ckptmove.training import worker

FORMS = ["file", "directory", "zip", "deflated", "tar"]
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


class Changing:
    """A checkpoint, and another one of the same size that replaces it."""

    def __init__(self, packer, form):
        self.packer, self.form = packer, form
        self.path, self.changed = self.made("one", 1.0), self.made("other", 2.0)
        assert form == "deflated" or self.changed.stat().st_size == self.file.stat().st_size

    def made(self, name, value):
        model, optimizer = self.packer.build.trained()
        state = {"model": {**model.state_dict(), "w": torch.full((50_000,), value)}}
        state["optimizer"] = optimizer.state_dict()
        data = self.packer.saved(state)
        if self.form in {"file", "directory"}:
            path = self.packer.unpack({"w.pth": data, "train.log": b"1\n"}, name)
            return path if (self.form, name) == ("directory", "one") else path / "w.pth"
        return self.packer.pack({"w.pth": data}, self.form, name)

    @property
    def file(self):
        """Content of the folder."""
        return self.path / "w.pth" if self.form == "directory" else self.path

    def replace(self):
        self.changed.replace(self.file)

    def write(self):
        found = self.file.stat()
        self.file.write_bytes(self.changed.read_bytes())
        os.utime(self.file, ns=(found.st_atime_ns, found.st_mtime_ns + 10**9))


@pytest.fixture(params=FORMS)
def changing(packer, request):
    return Changing(packer, request.param)


WAYS = pytest.mark.parametrize("way", [Changing.replace, Changing.write], ids=["replaced", "written"])


def once(action):
    """The action, at the first call alone."""
    waiting = [action]
    return lambda: waiting.pop()() if waiting else None


def before(monkeypatch, owner, name, action):
    """Have something happen when a function is called for the first time."""
    original, act = getattr(owner, name), once(action)

    def call(*args, **options):
        act()
        return original(*args, **options)

    monkeypatch.setattr(owner, name, call)


@WAYS
def test_between_reading_and_comparing(changing, answers, monkeypatch, way):
    before(monkeypatch, opened, "pair_all", lambda: way(changing))
    with pytest.raises(SourceChanged) as caught:
        answers(changing.path)
    assert caught.value.path == str(changing.file)


@WAYS
def test_before_torch_loads_it(changing, answers, monkeypatch, way):
    before(monkeypatch, torch, "load", lambda: way(changing))
    with pytest.raises(SourceChanged) as caught:
        answers(changing.path)
    assert caught.value.path == str(changing.file)


@pytest.mark.parametrize(
    ("form", "way"),
    [("file", Changing.replace), ("directory", Changing.write), ("deflated", Changing.replace)],
    ids=["file", "directory", "archive"],
)
def test_while_the_child_is_at_work(packer, form, way):
    changing = Changing(packer, form)
    act = once(lambda: way(changing))
    with pytest.raises(SourceChanged) as caught:
        ckptmove.verify(changing.path, progress=lambda done, total: act())
    assert caught.value.path == str(changing.file)


@WAYS
@pytest.mark.parametrize("changes", ["checkpoint", "original"])
def test_while_it_is_compared_with_the_original(packer, answers, monkeypatch, changes, way):
    changing = Changing(packer, "file")
    copy = shutil.copy(changing.path, str(packer.root / "copy.pth"))
    path, against = (changing.path, copy) if changes == "checkpoint" else (copy, str(changing.path))
    before(monkeypatch, worker, "Comparison", lambda: way(changing))
    with pytest.raises(SourceChanged) as caught:
        answers(path, against=against)
    assert caught.value.path == str(changing.path)


def test_an_original_while_the_child_is_at_work(packer):
    changing = Changing(packer, "file")
    act, copy = once(changing.replace), shutil.copy(changing.path, str(packer.root / "copy.pth"))
    with pytest.raises(SourceChanged) as caught:
        ckptmove.verify(copy, against=changing.path, progress=lambda done, total: act())
    assert caught.value.path == str(changing.path)


@pytest.mark.parametrize(("name", "is_passed_over"), [("train.log", True), ("other.bin", False)])
def test_a_text_that_changes_while_it_is_read_is_passed_over(packer, monkeypatch, name, is_passed_over):
    changing = Changing(packer, "directory")
    (changing.path / name).write_bytes(b"1\n")
    read = reading.read_file

    def read_file(source, *args):
        if source.path.endswith(name):
            raise SourceChanged(source.path)
        return read(source, *args)

    monkeypatch.setattr(reading, "read_file", read_file)
    with nullcontext() if is_passed_over else pytest.raises(SourceChanged):
        assert ckptmove.inspect(changing.path).inventory.tensors


def test_what_is_no_checkpoint_may_change(packer):
    changing = Changing(packer, "directory")

    def log(done, total):
        with (changing.path / "train.log").open("a") as file:
            file.write("2\n")

    assert ckptmove.verify(changing.path, progress=log).passed


def test_a_file_that_changes_while_it_is_read(packer, monkeypatch):
    changing = Changing(packer, "file")
    before(monkeypatch, build, "build_inventory", changing.write)
    with pytest.raises(SourceChanged), open_checkpoint(str(changing.path), Limits()):
        pass


@EVERY_FORM
def test_a_file_that_is_open_stays_what_it_was_when_another_one_takes_its_place(packer, form):
    changing = Changing(packer, form)
    with open_checkpoint(str(changing.path), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        record = next(one for one in checkpoint.inventory.tensors if one.name.endswith("model.w"))
        assert stored.tensor(record)[0] == 1.0
        checkpoint.require_unchanged()
        changing.replace()
        assert stored.tensor(record)[0] == 1.0
        with pytest.raises(SourceChanged):
            checkpoint.require_unchanged()


@pytest.mark.parametrize("form", ["file", "directory", "zip", "tar"])
def test_a_file_that_is_written_to_is_not_read_on(packer, form):
    changing = Changing(packer, form)
    with open_checkpoint(str(changing.path), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        record = checkpoint.inventory.tensors[0]
        stored.tensor(record)
        changing.write()
        with pytest.raises(SourceChanged):
            stored.tensor(record)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_a_file_that_is_cut_off_once_it_was_looked_at(packer, monkeypatch, mapped):
    changing = Changing(packer, "file")
    monkeypatch.setattr(DiskPlace, "require_unchanged", lambda *of: None)
    with (
        open_checkpoint(str(changing.path), Limits()) as checkpoint,
        StoredTensors(checkpoint.parts, mapped=mapped) as stored,
    ):
        checkpoint.file.span("0")  # the places of all storages are read once
        os.truncate(changing.path, 64)
        for record in checkpoint.inventory.tensors:
            with pytest.raises(SourceChanged):
                stored.tensor(record)
        Path(changing.path).unlink()
        with StoredTensors(checkpoint.parts) as again, pytest.raises(AccessFailed):
            again.tensor(checkpoint.inventory.tensors[0])

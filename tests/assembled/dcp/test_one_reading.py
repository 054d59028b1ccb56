"""Objects of a distributed checkpoint are read once, and give the same findings in every command."""

from __future__ import annotations

import pytest
import torch

import ckptmove
from ckptmove.assembled import dcp_folder as distributed_folders
from ckptmove.formats.dcp import checkpoint as containers
from ckptmove.io.source import FileSource


@pytest.fixture
def reads(monkeypatch):
    """The names of the objects that are read, each as often as it is."""
    names = []
    read = distributed_folders.read_object
    monkeypatch.setattr(distributed_folders, "read_object", lambda *of: names.append(of[1].name) or read(*of))
    return names


def stored(distributed, folder):
    """How many objects there are."""
    return sum(type(one).__name__ == "BytesStorageMetadata" for one in metadata_entries(distributed, folder))


def metadata_entries(distributed, folder):
    return distributed.metadata_of(folder).state_dict_metadata.values()


def test_an_object_is_read_once_by_each_process_of_a_verification(distributed, trained, answers, reads):
    found = answers(trained)
    assert found["restore"]["status"] == "passed"
    assert len(reads) == len(set(reads)) == stored(distributed, trained) > 0


def test_an_object_is_read_once_for_a_comparison(distributed, trained, reads):
    assert ckptmove.diff(str(trained), str(trained)).same
    assert len(reads) == 2 * stored(distributed, trained)


def test_convert_reads_none(trained, tmp_path, reads):
    ckptmove.convert(trained, to="cpu", output=tmp_path / "out")
    assert reads == []


@pytest.mark.parametrize("command", ["inspect", "convert", "diff"])
def test_metadata_is_walked_once(trained, tmp_path, monkeypatch, command):
    walked = []
    walk = containers.interpret_objects
    monkeypatch.setattr(containers, "interpret_objects", lambda data, *more: walked.append(data) or walk(data, *more))
    options = {"to": "cpu", "output": tmp_path / "out"} if command == "convert" else {}
    getattr(ckptmove, command)(str(trained), *[str(trained)] * (command == "diff"), **options)
    assert len(walked) == (2 if command == "diff" else 1)


def test_convert_reads_every_byte_once(distributed, tmp_path, monkeypatch):
    """The CRCs of the pieces are compared while they are copied, and the progress is that of the copy."""
    folder = distributed.save(tmp_path / "run", {"a": torch.arange(1e6), "b": torch.ones(1_000_000), "n": 7})
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    taken, told = [], []

    def blocks(self, span, *more):
        taken.append(span.nbytes)
        return whole(self, span, *more)

    def read(self, start, end):
        taken.append(end - start)
        return part(self, start, end)

    whole, part = FileSource.blocks, FileSource.read
    monkeypatch.setattr(FileSource, "blocks", blocks)
    monkeypatch.setattr(FileSource, "read", read)
    ckptmove.convert(folder, to="cpu", output=tmp_path / "out", progress=lambda *of: told.append(of))
    assert nbytes <= sum(taken) < 1.2 * nbytes
    assert told[-1] == (nbytes, nbytes)
    assert {total for _, total in told} == {nbytes}


def test_a_conversion_is_heard_of_before_each_piece_that_it_opens(distributed, tmp_path, monkeypatch):
    """A callback can stop the read: Ctrl-C does, and a failure of another file."""
    folder = distributed.save(tmp_path / "run", {name: torch.ones(2) for name in "abcdef"})
    events = []
    check = distributed_folders.checks_in
    monkeypatch.setattr(distributed_folders, "checks_in", lambda *of: events.append("piece") or check(*of))
    ckptmove.convert(folder, to="cpu", output=tmp_path / "out", progress=lambda *_: events.append("told"))
    last = len(events) - events[::-1].index("piece")
    assert events.count("piece") == 6
    assert events[:last].count("told") >= 6


def without_schedule(tree):
    del tree["scheduler"], tree["rng"]


def of_another_rate(tree):
    tree["scheduler"]["_last_lr"] = [0.5]


def of_a_device(tree):
    tree["args"] = {"device": torch.device("cuda:3")}


def without_a_moment(tree):
    del tree["optimizer"]["state"]["0.weight"]["exp_avg_sq"]


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without_schedule, "R302"),
        (of_another_rate, "R304"),
        (of_a_device, "D103"),
        (without_a_moment, "O207"),
    ],
)
def test_inspect_finds_what_verify_finds(distributed, tmp_path, change, code):
    tree = distributed.trained_tree()
    group = tree["optimizer"]["param_groups"][0]
    defaults = torch.optim.AdamW([torch.ones(1)]).state_dict()["param_groups"][0]
    tree["optimizer"]["param_groups"][0] = {**defaults, **group}
    change(tree)
    folder = distributed.save(tmp_path / "run", tree)
    seen = ckptmove.inspect(folder, target="cpu").findings
    assert code in {finding.code for finding in seen}
    assert seen == ckptmove.verify(folder, to="cpu").findings

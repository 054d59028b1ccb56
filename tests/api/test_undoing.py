"""An undo goes back over a conversion, and over nothing else: no journal and no record brings in other bytes."""

from __future__ import annotations

import io
import shutil
import zipfile
import zlib
from pathlib import Path

import pytest

import ckptmove
from ckptmove.api import undoing
from ckptmove.errors import JournalInTheWay, NothingToUndo
from ckptmove.io import patch as changes_in_place
from ckptmove.io.changes import InterruptedConversion, RestoresMore
from ckptmove.io.journal import ChangedRange, Journal
from ckptmove.io.locations import journal_path
from ckptmove.io.part import ChangedSource, MemorySource
from ckptmove.limits import Limits
from ckptmove.model import Span

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
ZIP, LEGACY = "adamw-cuda3.pth", "legacy-adamw-cuda1.pth"


def text(word):
    return b"X" + len(word).to_bytes(4, "little") + word.encode()


STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cuda:0") + b"K\x04tQ"
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x00K\x04\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
)
FLOAT = b"G?\xe0\x00\x00\x00\x00\x00\x00"


def archive(key="w", value=b"K\x01", tensor=TENSOR, data=bytes(16), extra=()):
    """A file of torch.save with a tensor and another value."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as whole:
        whole.writestr("a/data.pkl", b"\x80\x02}(" + text(key) + tensor + text("x") + value + b"u.")
        whole.writestr("a/byteorder", b"little")
        whole.writestr("a/data/0", data)
        whole.writestr("a/version", b"3\n")
        for name, content in extra:
            whole.writestr(name, content)
    return body.getvalue()


def forge(path, now, then, *, torn=None):
    """Lay a journal beside a file, which restores other bytes."""
    path.write_bytes(now if torn is None else torn)
    change = Journal(path.name, len(then), len(now), (ChangedRange(0, then, now),), (Span(0, 0),) * 2, zlib.crc32(b""))
    Path(journal_path(str(path))).write_bytes(change.encode())


#: What a forged journal would bring in.
OTHER = {
    "name": archive(key="v"),
    "value": archive(value=b"K\x02"),
    "type": archive(value=b"\x88"),
    "sign": archive(value=FLOAT.replace(b"?", b"\xbf")),
    "tensor-bytes": archive(data=b"\1" * 16),
    "a-call": archive(value=b"cbuiltins\nexec\n" + text("1") + b"\x85R"),
    "a-global": archive(value=b"cfractions\nFraction\n"),
    "more": archive(value=b"]K\x01a"),
    "another-record": archive(extra=[("a/code.py", b"1")]),
    "another-storage": archive(tensor=TENSOR.replace(text("0"), text("9"))),
    "another-offset": archive(tensor=TENSOR.replace(b"K\x00K\x04\x85", b"K\x01K\x03\x85")),
    "no-checkpoint": b"nothing" * 100,
}


@pytest.mark.parametrize("then", OTHER.values(), ids=OTHER)
def test_a_forged_journal_brings_nothing_in(tmp_path, then):
    path = tmp_path / "run.pth"
    forge(path, archive(), then)
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    for options in ({}, {"dry_run": True}):
        with pytest.raises(RestoresMore) as caught:
            ckptmove.undo(path, **options)
        assert caught.value.journal == journal_path(str(path))
    assert before == {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    ckptmove.undo(path, force=True)
    assert path.read_bytes() == then


@pytest.mark.parametrize("sample", [ZIP, LEGACY])
def test_nor_in_the_place_of_a_torn_file(tmp_path, sample):
    """What a crash has left must show what was there."""
    path, now = tmp_path / "run.pth", (SAMPLES / sample).read_bytes()
    then = now.replace(b"exp_avg", b"EXP_AVG")
    assert then != now
    torn = now[:100] + bytes(len(now) - 100)
    forge(path, now, then, torn=torn)
    with pytest.raises(InterruptedConversion):
        ckptmove.inspect(path)
    with pytest.raises(RestoresMore):
        ckptmove.undo(path)
    assert path.read_bytes() == torn


@pytest.mark.parametrize("intended", [b"x" * 50, bytes(50)])
def test_a_torn_file_whose_journal_holds_no_checkpoint(tmp_path, intended):
    now = (SAMPLES / LEGACY).read_bytes()
    path = tmp_path / "run.pth"
    forge(path, intended, now, torn=b"")
    Path(path).write_bytes(intended)
    with pytest.raises(RestoresMore):
        ckptmove.undo(path)


def interrupted(path, monkeypatch, to):
    """Convert a file in place, as a process does that is killed right before it removes the journal."""
    with monkeypatch.context() as patches:
        patches.setattr(changes_in_place, "_remove", lambda _path: None)
        ckptmove.convert(path, to=to, in_place=True)


@pytest.mark.parametrize(("sample", "to"), [(ZIP, "cpu"), (LEGACY, "cuda:0")])
def test_a_journal_goes_with_its_file(tmp_path, monkeypatch, sample, to):
    (tmp_path / "here").mkdir()
    path = Path(shutil.copy(SAMPLES / sample, tmp_path / "here" / "run.pth"))
    before = path.read_bytes()
    interrupted(path, monkeypatch, to)
    moved = Path(shutil.copytree(tmp_path / "here", tmp_path / "there")) / "run.pth"
    with pytest.raises(InterruptedConversion):
        ckptmove.load(moved)
    result = ckptmove.undo(moved)
    assert (moved.read_bytes(), result.size) == (before, len(before))
    assert [one.name for one in moved.parent.iterdir()] == ["run.pth"]
    ckptmove.undo(path, dry_run=True)
    assert path.read_bytes() != before


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.99])
def test_a_torn_archive_has_its_old_state(tmp_path, monkeypatch, keep):
    path = Path(shutil.copy(SAMPLES / ZIP, tmp_path / "run.pth"))
    before = path.read_bytes()
    interrupted(path, monkeypatch, "cpu")
    data = path.read_bytes()
    path.write_bytes(data[: len(before) + int(keep * (len(data) - len(before)))])
    ckptmove.undo(path)
    assert path.read_bytes() == before


def test_a_file_that_is_copied_alone_can_be_undone(tmp_path):
    path = Path(shutil.copy(SAMPLES / ZIP, tmp_path / "run.pth"))
    before = path.read_bytes()
    ckptmove.convert(path, to="cpu", in_place=True)
    copy = Path(shutil.copy(path, tmp_path / "other.pth"))
    ckptmove.undo(copy)
    assert copy.read_bytes() == before


@pytest.mark.parametrize("sample", ["full-resume-cuda0.pt", "adam-mps.pt", "float64-cpu.pt"])
@pytest.mark.parametrize("to", ["cpu", "cuda:5"])
def test_every_change_of_a_device_is_one(tmp_path, sample, to):
    """Flags, ``torch.device`` objects with and without an index, and device strings."""
    path = Path(shutil.copy(SAMPLES / sample, tmp_path / "run.pth"))
    before = path.read_bytes()
    ckptmove.convert(path, to=to, in_place=True, rewrite_strings=True)
    if path.read_bytes() != before:
        ckptmove.undo(path)
    assert path.read_bytes() == before


def pickle_of(data):
    """The pickle of an archive, moved to the CPU."""
    return zipfile.ZipFile(io.BytesIO(data)).read("a/data.pkl").replace(text("cuda:0"), text("cpu"))


@pytest.mark.parametrize("then", [OTHER["value"], OTHER["name"], OTHER["a-call"]], ids=["value", "name", "a-call"])
def test_a_forged_record_brings_nothing_in(tmp_path, then):
    """The file has a tail that no conversion has written: its pickle is another one."""
    path = tmp_path / "run.pth"
    path.write_bytes(then)
    ckptmove.convert(path, to="cpu", in_place=True)
    data = bytearray(path.read_bytes())
    tail = bytes(data[len(then) :])
    pickled = pickle_of(bytes(data))
    harmless = pickle_of(archive())
    longer = len(pickled) - len(harmless)
    if longer:
        harmless = pickle_of(archive(value=text("p" * (longer - 3))))
    tail = tail.replace(pickled, harmless)
    tail = tail.replace(zlib.crc32(pickled).to_bytes(4, "little"), zlib.crc32(harmless).to_bytes(4, "little"))
    path.write_bytes(then + tail)
    ckptmove.inspect(path)
    with pytest.raises(RestoresMore) as caught:
        ckptmove.undo(path)
    assert not caught.value.journal
    assert path.read_bytes() == then + tail


def test_a_hard_link_is_named(tmp_path):
    path = Path(shutil.copy(SAMPLES / ZIP, tmp_path / "run.pth"))
    (tmp_path / "hard.pth").hardlink_to(path)
    assert any("1 other hard link" in note for note in ckptmove.convert(path, to="cpu", in_place=True).notes)
    assert any("1 other hard link" in note for note in ckptmove.undo(path).notes)


def test_a_journal_of_another_file_is_no_obstacle(tmp_path):
    path = Path(shutil.copy(SAMPLES / ZIP, tmp_path / "run.pth"))
    ckptmove.convert(path, to="cpu", in_place=True)
    other = Journal("other.pth", 0, 0, (), (Span(0, 0),) * 2, 0)
    Path(journal_path(str(path))).write_bytes(other.encode())
    ckptmove.inspect(path)
    with pytest.raises(JournalInTheWay):
        ckptmove.undo(path)


@pytest.mark.parametrize("data", [b"torn", b"saved anew"])
def test_a_journal_without_a_change_is_removed(tmp_path, monkeypatch, data):
    path = Path(shutil.copy(SAMPLES / ZIP, tmp_path / "run.pth"))
    interrupted(path, monkeypatch, "cpu")
    if data == b"torn":
        Path(journal_path(str(path))).write_bytes(data)
    else:
        shutil.copy(SAMPLES / "adam-mps.pt", path)
    before = path.read_bytes()
    result = ckptmove.undo(path)
    assert (path.read_bytes(), result.removed) == (before, 0)
    assert [one.name for one in tmp_path.iterdir()] == ["run.pth"]


def test_a_changed_source_reads_as_the_changed_file():
    whole = MemorySource("a", bytes(range(100)))
    changed = ChangedSource(whole, ((10, b"new"), (98, b"longer")), 104)
    expected = bytearray(range(100)).ljust(104, b"\0")
    expected[10:13], expected[98:104] = b"new", b"longer"
    assert changed.read(0, 104) == bytes(expected)
    assert changed.read(11, 12) == b"e"
    assert changed.read(101, 103) == b"ge"
    assert b"".join(changed.blocks(Span(5, 104), 7)) == bytes(expected[5:])
    assert ChangedSource(whole, (), 50).read(40, 50) == whole.read(40, 50)
    changed.close()


@pytest.mark.parametrize("then", OTHER.values(), ids=OTHER)
def test_whatever_differs_is_a_reason(then):
    """Also if no byte outside of the tail changes."""
    now = archive()
    assert undoing._judge(MemorySource("a", now), MemorySource("a", then), Limits())
    assert not undoing._judge(MemorySource("a", now), MemorySource("a", now), Limits())


def test_another_format_is_a_reason():
    now = (SAMPLES / LEGACY).read_bytes()
    assert undoing._judge(MemorySource("a", now), MemorySource("a", archive()), Limits()).startswith("the format")


def test_a_stream_that_a_crash_has_emptied_is_restored_from_its_journal(tmp_path, monkeypatch):
    path = Path(shutil.copy(SAMPLES / LEGACY, tmp_path / "run.pth"))
    before = path.read_bytes()
    interrupted(path, monkeypatch, "cuda:0")
    changed = path.read_bytes()
    first = next(at for at, pair in enumerate(zip(before, changed, strict=True)) if pair[0] != pair[1])
    path.write_bytes(changed[: first - 20] + bytes(64) + changed[first + 44 :])
    ckptmove.undo(path)
    assert path.read_bytes() == before


def zipped(path):
    with zipfile.ZipFile(path, "w") as whole:
        whole.write(SAMPLES / ZIP, "a.pth")


@pytest.mark.parametrize("make", [Path.mkdir, zipped])
def test_what_has_nothing_to_undo(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(NothingToUndo):
        ckptmove.undo(tmp_path / "run")
    with pytest.raises(NothingToUndo):
        ckptmove.undo(shutil.copy(SAMPLES / ZIP, tmp_path / "run.pth"))


def judged(now, then):
    return undoing._judge(MemorySource("a", now), MemorySource("a", then), Limits())


def test_a_device_object_may_get_or_lose_its_index():
    whole = archive(value=b"ctorch\ndevice\n" + text("cuda") + b"K\x00\x86R")
    for word in ("cpu", "cuda"):
        assert not judged(archive(value=b"ctorch\ndevice\n" + text(word) + b"\x85R"), whole)
    assert judged(archive(value=b"ctorch\nSize\n" + text("cuda") + b"\x85R"), whole)


def test_a_bool_that_does_not_follow_a_device_is_a_value():
    assert judged(archive(value=b"\x88"), archive(value=b"\x89"))


def test_what_a_pickle_drops_is_compared_by_its_operations():
    dropped = archive(value=b"K\x01K\x070")
    assert not judged(dropped, dropped)
    assert judged(dropped, archive(value=b"K\x01K\x080"))


@pytest.mark.parametrize("pair", [(b")", b"]"), (b"]", b"]K\x01a"), (b"](K\x01K\x02e", b"](K\x01K\x03e")])
def test_containers_are_compared(pair):
    assert judged(archive(value=pair[0]), archive(value=pair[1]))


def test_a_call_that_no_value_shows_is_a_reason():
    stored, dropped = archive(value=b"capp\nNet\n"), archive(value=b"capp\nNet\n)R0capp\nNet\n")
    assert "no value shows" in judged(stored, dropped)
    assert not judged(dropped, dropped)


def test_a_storage_that_is_missing_stays_missing():
    assert not judged(OTHER["another-storage"], OTHER["another-storage"])


def test_a_stream_of_another_length_is_no_conversion_in_place(tmp_path):
    path, then = tmp_path / "run.pth", (SAMPLES / LEGACY).read_bytes()
    ckptmove.convert(SAMPLES / LEGACY, to="cpu", output=tmp_path / "new.pth")
    now = (tmp_path / "new.pth").read_bytes()
    for torn in (None, bytes(len(now))):
        forge(path, now, then, torn=torn)
        with pytest.raises(RestoresMore):
            ckptmove.undo(path)


def test_a_finished_conversion_is_tried_and_forced(tmp_path):
    path = Path(shutil.copy(SAMPLES / ZIP, tmp_path / "run.pth"))
    before = path.read_bytes()
    ckptmove.convert(path, to="cpu", in_place=True)
    ckptmove.undo(path, dry_run=True)
    assert path.read_bytes() != before
    ckptmove.undo(path, force=True)
    assert path.read_bytes() == before


def test_a_journal_that_restores_what_is_there(tmp_path):
    path = tmp_path / "run.pth"
    forge(path, archive(), archive())
    ckptmove.undo(path)
    assert [one.name for one in tmp_path.iterdir()] == ["run.pth"]


@pytest.mark.parametrize("is_half_written", [False, True])
def test_an_archive_whose_tail_is_torn_is_compared_with_what_is_before_it(tmp_path, monkeypatch, is_half_written):
    path = Path(shutil.copy(SAMPLES / ZIP, tmp_path / "run.pth"))
    size = path.stat().st_size
    ckptmove.convert(path, to="cuda:10", in_place=True)
    before = path.read_bytes()
    interrupted(path, monkeypatch, "cpu")
    data = path.read_bytes()
    path.write_bytes(data[:-40] + before[-88:] if is_half_written else data[:size] + bytes(len(data) - size))
    ckptmove.undo(path)
    assert path.read_bytes() == before

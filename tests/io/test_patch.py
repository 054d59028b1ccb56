"""In-place changes of a file: the journal, the lock, and changes that are not undone."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import zlib
from pathlib import Path

import pytest

from ckptmove.errors import (
    BeingConverted,
    ChangeFailed,
    JournalInTheWay,
    RollbackFailed,
    SourceChanged,
)
from ckptmove.io import patch as room
from ckptmove.io.changes import InterruptedConversion, Patch
from ckptmove.io.journal import UNKNOWN_JOURNAL, ChangedRange, Journal, decode
from ckptmove.io.locations import is_journal, journal_name, journal_path
from ckptmove.io.patch import apply_patch, read_journal
from ckptmove.io.patch import roll_back as roll_back_found
from ckptmove.io.recovery import require_settled, with_journals
from ckptmove.io.source import stamp_of
from ckptmove.model import Span

OLD = bytes(range(200))
TAIL = Patch(((190, b"new tail"),), 198)


@pytest.fixture
def file(tmp_path):
    """A file of a change that was killed after it was made, with its journal."""
    path = tmp_path / "run.pth"
    path.write_bytes(OLD)
    return path


def change(path, patch=TAIL):
    apply_patch(str(path), patch, stamp_of(path.stat()))


def roll_back(path):
    """Read the journal and roll it back; return the message, or an empty one without a journal."""
    found = read_journal(path)
    if found is None:
        return ""
    roll_back_found(path, found)
    return found.message


def kill_before_the_end(path, monkeypatch, patch=TAIL):
    """Leave the journal there, as if the process had ended right before it was removed."""
    with monkeypatch.context() as patches:
        patches.setattr(room, "_remove", lambda _path: None)
        change(path, patch)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        (Patch(((200, b"more"),), 204), OLD + b"more"),
        (TAIL, OLD[:190] + b"new tail"),
        (Patch((), 100), OLD[:100]),
        (Patch(((10, b"over"),), 200), OLD[:10] + b"over" + OLD[14:]),
        (Patch(((10, b"over"), (50, b"more")), 200), OLD[:10] + b"over" + OLD[14:50] + b"more" + OLD[54:]),
        (Patch((), 200), OLD),
    ],
)
def test_it_changes_what_it_says_and_can_be_taken_back(file, monkeypatch, patch, expected):
    inode, mode = file.stat().st_ino, file.stat().st_mode
    kill_before_the_end(file, monkeypatch, patch)
    assert file.read_bytes() == expected
    assert len(names(file.parent)) == 2
    assert roll_back(str(file)).startswith("rolls back")
    assert file.read_bytes() == OLD
    assert (file.stat().st_ino, file.stat().st_mode) == (inode, mode)
    change(file, patch)
    assert file.read_bytes() == expected
    assert names(file.parent) == ["run.pth"]


def test_links_stay_links(file, monkeypatch):
    (file.parent / "hard.pth").hardlink_to(file)
    (file.parent / "inside").mkdir()
    link = file.parent / "inside" / "link.pth"
    link.symlink_to("../run.pth")
    kill_before_the_end(link, monkeypatch)
    assert link.is_symlink()
    assert names(file.parent / "inside") == ["link.pth"]
    assert (file.parent / "hard.pth").read_bytes() == file.read_bytes() != OLD
    roll_back(str(file))
    assert (file.parent / "hard.pth").read_bytes() == link.read_bytes() == OLD


def test_nobody_reads_more_in_the_journal_than_in_the_file(file, monkeypatch):
    for mode in (0o640, 0o755):
        file.chmod(mode)
        kill_before_the_end(file, monkeypatch)
        assert stat.S_IMODE(Path(journal_path(str(file))).stat().st_mode) == mode & 0o666
        roll_back(str(file))


def test_a_rollback_is_settled_when_the_file_is_restored_and_the_journal_still_there(file, monkeypatch):
    kill_before_the_end(file, monkeypatch)
    settled = []
    roll_back_found(
        str(file), read_journal(str(file)), lambda: settled.append((file.read_bytes(), len(names(file.parent))))
    )
    assert settled == [(OLD, 2)]
    assert names(file.parent) == ["run.pth"]


def test_a_file_that_changed_meanwhile_is_left_alone(file):
    before = stamp_of(file.stat())
    file.write_bytes(b"other")
    with pytest.raises(SourceChanged):
        apply_patch(str(file), TAIL, before)
    assert file.read_bytes() == b"other"
    assert names(file.parent) == ["run.pth"]


def test_two_do_not_change_it_at_once(file, monkeypatch):
    with file.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BeingConverted):
            change(file)
        with pytest.raises(BeingConverted):
            roll_back(str(file))
    assert file.read_bytes() == OLD
    assert names(file.parent) == ["run.pth"]


def test_a_system_without_locks_is_told(file, monkeypatch):
    def refuse(_fd, _operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ChangeFailed) as caught:
        change(file)
    assert caught.value.reason == os.strerror(errno.ENOSYS)
    assert file.read_bytes() == OLD


def test_a_torn_journal_tells_that_nothing_has_changed(file):
    for data in (b"", b"x" * 10, b"x" * 300):
        Path(journal_path(str(file))).write_bytes(data)
        assert "before" in roll_back(str(file))
        assert file.read_bytes() == OLD
        assert names(file.parent) == ["run.pth"]


@pytest.mark.parametrize("data", [b"saved anew", OLD[:120] + b"!" + OLD[121:], bytes(300)])
def test_a_file_that_was_saved_anew_is_not_rolled_back(file, monkeypatch, data):
    kill_before_the_end(file, monkeypatch)
    file.write_bytes(data)
    assert "rewritten" in roll_back(str(file))
    assert file.read_bytes() == data
    assert names(file.parent) == ["run.pth"]


def test_what_lies_behind_a_change_tells_other_files_apart_too(file, monkeypatch):
    kill_before_the_end(file, monkeypatch, Patch(((10, b"over"),), 200))
    data = file.read_bytes()[:199] + b"!"
    file.write_bytes(data)
    assert "rewritten" in roll_back(str(file))
    assert file.read_bytes() == data


def test_what_lies_before_a_change_amid_a_file_tells_other_files_apart_too(file, monkeypatch):
    kill_before_the_end(file, monkeypatch, Patch(((10, b"over"),), 200))
    data = b"!" + file.read_bytes()[1:]
    file.write_bytes(data)
    assert "rewritten" in roll_back(str(file))
    assert file.read_bytes() == data


@pytest.mark.parametrize("data", [b"ovwr", b"ov\0r"])
def test_a_byte_that_is_neither_old_nor_new_was_saved_since(file, monkeypatch, data):
    kill_before_the_end(file, monkeypatch, Patch(((10, b"over"), (50, b"m")), 200))
    saved = OLD[:10] + data + OLD[10 + len(data) :]
    file.write_bytes(saved)
    assert "rewritten" in roll_back(str(file))
    assert file.read_bytes() == saved


def test_the_journal_of_another_name_is_left_alone(file, monkeypatch):
    kill_before_the_end(file, monkeypatch)
    other = file.rename(file.parent / "other.pth")
    require_settled(str(other))
    Path(journal_path(str(file))).rename(journal_path(str(other)))
    require_settled(str(other))
    assert other.read_bytes() != OLD
    assert journal_name("other.pth") in names(file.parent)


def test_a_journal_that_is_in_the_way_is_named(file):
    Path(journal_path(str(file))).write_bytes(journal(name="other.pth").encode())
    require_settled(str(file))
    with pytest.raises(JournalInTheWay, match=journal_name("run.pth")) as caught:
        change(file)
    assert caught.value.journal == journal_path(str(file))
    assert file.read_bytes() == OLD
    assert names(file.parent) == [journal_name("run.pth"), "run.pth"]


def test_a_journal_of_another_user_is_not_trusted(file, monkeypatch):
    kill_before_the_end(file, monkeypatch)
    changed = file.read_bytes()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    real = os.fstat

    def foreign(fd):
        found = list(real(fd))
        found[4] = 54321 if stat.S_ISREG(found[0]) and found[6] != len(changed) else 12345
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.raises(RollbackFailed, match="another user"):
        roll_back(str(file))
    assert file.read_bytes() == changed


def journal(**changes):
    fields = {
        "name": "run.pth", "old_size": 200, "new_size": 198, "anchors": (Span(0, 190), Span(0, 0)), "anchor_crc": 7,
        "runs": (ChangedRange(190, OLD[190:198], b"new tail"), ChangedRange(198, OLD[198:], b"")),
    }  # fmt: skip
    return Journal(**{**fields, **changes})


def test_a_journal_is_read_as_it_was_written():
    unchanged = journal(name="r\udcffn \n.pth", new_size=200, runs=())
    for one in (
        journal(),
        unchanged,
        journal(runs=(ChangedRange(1, b"a", b"b"), ChangedRange(190, OLD[190:], b"new tail"))),
    ):
        assert decode(one.encode()) == one


#: Journals that refer to bytes after the end of the file, or make it longer without the bytes.
IMPOSSIBLE = [
    {"runs": (ChangedRange(191, bytes(10), b""),)},
    {"runs": (ChangedRange(190, OLD[190:], b"new tail!"),)},
    {"runs": (ChangedRange(198, OLD[198:199], b""),)},
    {"runs": ()},
    {"runs": (ChangedRange(199, OLD[199:], b""),)},
    {"runs": (ChangedRange(2**63, b"", b""),)},
    {"runs": (ChangedRange(2**64 - 10, b"xxxx", b""),), "old_size": 2**64 - 1, "new_size": 0},
    {"runs": (ChangedRange(2**40 - 4, b"xxxx", b""),), "old_size": 2**40, "new_size": 0},
    {"runs": (), "old_size": 2**64 - 1, "new_size": 2**64 - 1},
    {"anchors": (Span(3, 2), Span(0, 0))},
    {"anchors": (Span(0, 199), Span(0, 0))},
    {"anchors": (Span(0, 0), Span(2**64 - 10, 2**64 - 5))},
    {"anchors": (Span(0, 1 << 17), Span(0, 0)), "old_size": 1 << 20, "new_size": 1 << 20, "runs": ()},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE)
def test_a_journal_that_cannot_be_is_refused(file, changes):
    Path(journal_path(str(file))).write_bytes(journal(**changes).encode())
    with pytest.raises(RollbackFailed) as caught:
        roll_back(str(file))
    assert caught.value.reason == UNKNOWN_JOURNAL
    assert file.read_bytes() == OLD


def test_a_journal_of_a_larger_file_makes_none(file):
    size = 2**62
    anchors = Span(size - 10, size), Span(0, 0)
    wrong = journal(
        old_size=size, new_size=size, runs=(ChangedRange(size - 4, b"xxxx", b"yyyy"),), anchors=anchors, anchor_crc=0
    )
    Path(journal_path(str(file))).write_bytes(wrong.encode())
    assert "rewritten" in roll_back(str(file))
    assert file.read_bytes() == OLD


def test_a_journal_of_a_later_version_is_refused(file, monkeypatch):
    monkeypatch.setattr("ckptmove.io.journal._MAGIC", b"ckptmove undo 3\n")
    data = journal().encode()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version"):
        decode(data)


def test_a_journal_whose_lengths_do_not_add_up_is_refused():
    data = bytearray(journal().encode()[:-4])
    for at, value in ((struct.calcsize("<16s6QLHL") + 8, 9), (struct.calcsize("<16s6QLH"), 1 << 30)):
        wrong = bytes(data[:at]) + value.to_bytes(4, "little") + data[at + 4 :]
        with pytest.raises(ValueError, match="version"):
            decode(wrong + zlib.crc32(wrong).to_bytes(4, "little"))


def test_what_cannot_be_rolled_back_names_its_journal(file, monkeypatch):
    kill_before_the_end(file, monkeypatch)
    changed = file.read_bytes()
    real = os.open

    def refuse(path, flags, *rest, **options):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *rest, **options)

    with monkeypatch.context() as patches:
        patches.setattr(os, "open", refuse)
        with pytest.raises(RollbackFailed, match="Permission denied") as caught:
            roll_back(str(file))
    assert caught.value.journal == journal_path(str(file))
    assert file.read_bytes() == changed
    assert roll_back(str(file))
    assert file.read_bytes() == OLD


def test_a_change_that_cannot_be_taken_back_either_leaves_its_journal(file, monkeypatch):
    real = os.write

    def fail(fd, data):
        if bytes(data[:8]) == b"ckptmove":  # the journal
            return real(fd, data)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patches:
        patches.setattr(os, "write", fail)
        with pytest.raises(RollbackFailed):
            change(file)
    assert roll_back(str(file)).startswith("rolls back")
    assert file.read_bytes() == OLD
    assert names(file.parent) == ["run.pth"]


def test_a_change_that_fails_is_taken_back(file, monkeypatch):
    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(ChangeFailed):
        apply_patch(str(file), TAIL, stamp_of(file.stat()), settle=fail)
    assert file.read_bytes() == OLD
    assert names(file.parent) == [file.name]


def test_a_file_that_shrinks_while_it_is_read_has_no_more_bytes(file):
    with file.open("rb") as opened:
        assert room._read_span(opened.fileno(), Span(195, 250)) == OLD[195:]


def test_there_is_nothing_to_roll_back(file):
    assert roll_back(str(file)) == ""
    assert roll_back(str(file.parent / "gone")) == ""
    for path in (str(file), str(file.parent / "gone"), "a\0b", "\ud800"):
        require_settled(path)


def test_the_name_of_a_journal_has_one_length_and_hides():
    assert {len(journal_name(name)) for name in ("a", "x" * 255, "r\udcff")} == {len(".ckptmove-00000000.journal")}
    assert is_journal(journal_name("a"))
    assert not is_journal("a.journal")


def test_a_file_with_a_journal_is_not_read(file, monkeypatch):
    kill_before_the_end(file, monkeypatch)
    before = file.read_bytes()
    with pytest.raises(InterruptedConversion) as caught:
        require_settled(str(file))
    assert caught.value.hint == ""
    Path(journal_path(str(file))).write_bytes(journal(anchors=(Span(3, 2), Span(0, 0))).encode())
    with pytest.raises(InterruptedConversion):  # also with a journal that no rollback can read
        require_settled(str(file))
    assert file.read_bytes() == before
    assert len(names(file.parent)) == 2


def test_a_file_that_changes_after_its_journal_was_read_is_left_alone(file, monkeypatch):
    kill_before_the_end(file, monkeypatch)
    found = read_journal(str(file))
    file.write_bytes(b"other")
    with pytest.raises(SourceChanged):
        roll_back_found(str(file), found)
    assert file.read_bytes() == b"other"
    assert len(names(file.parent)) == 2


def test_the_files_of_a_directory_are_found_by_their_journals():
    paths = ["a.pth", "inside/b.pth", "inside/c.pth"]
    assert not [*with_journals(paths)]
    listed = [*paths, journal_name("a.pth"), f"inside/{journal_name('b.pth')}", journal_name("c.pth")]
    assert [*with_journals(listed)] == paths[:2]


def test_a_journal_that_cannot_be_written_is_removed(file, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ChangeFailed):
        change(file)
    assert names(file.parent) == ["run.pth"]
    assert file.read_bytes() == OLD

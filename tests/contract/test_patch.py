"""The contract of an in-place change: the same result as a new file, and no other byte changes."""

from __future__ import annotations

import io
import zipfile

import pytest

from ckptmove.errors import InPlaceImpossible, NothingToUndo
from ckptmove.formats.opening import container_of
from ckptmove.io.contracts import CopySegment
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from ckptmove.model import Span


def changed(data, patch):
    for start, new in patch.writes:
        data = data[:start] + new + data[start + len(new) :]
    return data[: patch.size]


def opened(data):
    return container_of(MemorySource("specimen.pt", data), Limits())


@pytest.mark.parametrize("nbytes", [14, 64, 70_000])
def test_everything_but_the_pickle_is_the_same_and_where_it_was(roomy, pickle_of, nbytes):
    old = roomy.path.read_bytes()
    pickle = pickle_of(nbytes) + roomy.specimen.more_pickles
    patch = roomy.container.patch(pickle)
    data = changed(old, patch)
    assert len(data) == patch.size
    assert data.startswith(old)
    after = roomy.look(data)
    assert after.pickle == pickle
    assert after.storages == roomy.seen.storages
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == zipfile.ZipFile(io.BytesIO(old)).namelist()
        assert archive.testzip() is None or not roomy.specimen.checksums
    reopened = opened(data)
    assert reopened.object_pickle() == pickle
    facts = {fact.kind: fact.nbytes for fact in reopened.locate(roomy.storages())}
    assert facts == {"kept-for-undo": len(data) - len(old)}
    assert reopened.check() == ()
    for storage in roomy.storages():
        assert reopened.storage_span(storage.key) == roomy.container.storage_span(storage.key)


def test_the_tail_is_aligned(roomy, pickle_of):
    pickle = pickle_of(999) + roomy.specimen.more_pickles
    patch = roomy.container.patch(pickle)
    ((start, tail),) = patch.writes
    at = start + tail.find(pickle_of(999))
    first = roomy.path.read_bytes().find(roomy.container.object_pickle()[:40])
    assert (at - first) % roomy.specimen.alignment == 0


def test_the_second_change_replaces_the_first(roomy, pickle_of):
    old = roomy.path.read_bytes()
    more = roomy.specimen.more_pickles
    first = changed(old, roomy.container.patch(pickle_of(5000) + more))
    second = opened(first).patch(pickle_of(700) + more)
    assert second == roomy.container.patch(pickle_of(700) + more)
    assert roomy.look(changed(first, second)).pickle == pickle_of(700) + more


def test_undo_gives_back_the_first_original(roomy, pickle_of):
    old = data = roomy.path.read_bytes()
    for nbytes in (500, 50_000, 14):
        data = changed(data, opened(data).patch(pickle_of(nbytes) + roomy.specimen.more_pickles))
    assert changed(data, opened(data).undo()) == old


def test_the_old_pickle_is_the_old_file(roomy, pickle_of):
    old = roomy.path.read_bytes()
    first = changed(old, roomy.container.patch(pickle_of(500) + roomy.specimen.more_pickles))
    patch = opened(first).patch(roomy.container.object_pickle())
    assert not patch.can_undo
    assert changed(first, patch) == old


def test_a_new_file_has_nothing_of_what_is_kept(roomy, pickle_of):
    old = roomy.path.read_bytes()
    more = roomy.specimen.more_pickles
    data = changed(old, roomy.container.patch(pickle_of(500) + more))
    for pickle in (pickle_of(900) + more, roomy.container.object_pickle()):
        segments = opened(data).lay_out(pickle, {})
        assert segments == roomy.container.lay_out(pickle, {})
    (whole,) = opened(data).lay_out(pickle_of(500) + more, {})
    assert isinstance(whole, CopySegment)
    assert whole.span == Span(0, len(data))


def test_what_was_never_changed_cannot_be_undone(opened):
    with pytest.raises(NothingToUndo):
        opened.container.undo()


def test_of_another_length_it_is_refused(stream, pickle_of):
    stream.container.locate(stream.storages())
    for nbytes in (len(pickle_of(14)), len(stream.seen.pickle) + 1):
        with pytest.raises(InPlaceImpossible, match=" length"):
            stream.container.patch(pickle_of(nbytes) + stream.specimen.more_pickles)


def test_of_the_same_length_it_takes_the_place(stream, pickle_of):
    stream.container.locate(stream.storages())
    old = stream.path.read_bytes()
    own = len(stream.seen.pickle) - len(stream.specimen.more_pickles)
    pickle = pickle_of(own) + stream.specimen.more_pickles
    patch = stream.container.patch(pickle)
    assert [len(data) for _, data in patch.writes] == [own]
    data = changed(old, patch)
    assert len(data) == len(old)
    assert stream.look(data).pickle == pickle
    assert stream.look(data).storages == stream.seen.storages


def tail_of(roomy, pickle_of):
    old = roomy.path.read_bytes()
    return old, changed(old, roomy.container.patch(pickle_of(500) + roomy.specimen.more_pickles))


def test_an_archive_that_was_written_over_since_is_not_brought_back(roomy, pickle_of):
    """As ``zip -u`` and the like do: the directory that the undo relies on is another one."""
    old, data = tail_of(roomy, pickle_of)
    at = len(old) - 30
    for flipped in (at, len(old) - 2):
        spoiled = data[:flipped] + bytes([data[flipped] ^ 1]) + data[flipped + 1 :]
        with pytest.raises(NothingToUndo, match="overwritten"):
            opened(spoiled).undo()
        again = opened(spoiled).patch(pickle_of(14) + roomy.specimen.more_pickles)
        assert [start for start, _ in again.writes] == [len(spoiled)]
        assert changed(changed(spoiled, again), opened(changed(spoiled, again)).undo()) == spoiled


def test_a_damaged_undo_record_is_none(roomy, pickle_of):
    _, data = tail_of(roomy, pickle_of)
    at = data.index(b"ckptmove\0undo")
    for offset in (0, 20, 36, 39):
        spoiled = data[: at + offset] + bytes([data[at + offset] ^ 1]) + data[at + offset + 1 :]
        container = opened(spoiled)
        with pytest.raises(NothingToUndo, match="never"):
            container.undo()
        assert {fact.kind for fact in container.locate(roomy.storages())} == {"stray-bytes"}


def test_a_storage_in_the_tail_is_none_of_ours(roomy, pickle_of, monkeypatch):
    """Else a new file would have other tensors than those that were inspected."""
    old, data = tail_of(roomy, pickle_of)
    container = opened(data)
    records = container._directory.records
    place = next(place for place in container._storages.values() if records.nbytes[place])
    records.header_offsets[place] = len(old)
    with pytest.raises(NothingToUndo, match="overwritten"):
        container.undo()


def test_records_that_the_archive_did_not_have_are_none_of_ours(roomy, pickle_of):
    _, data = tail_of(roomy, pickle_of)
    container = opened(data)
    records = container._directory.records
    records.raw_starts[-1] -= 1  # another entry
    with pytest.raises(NothingToUndo, match="overwritten"):
        container.undo()
    records.flags.pop()  # one entry less
    with pytest.raises(NothingToUndo, match="overwritten"):
        container.undo()

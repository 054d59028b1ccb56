"""What every container promises, on each specimen of it; zipfile and the file's own bytes are the judges."""

from __future__ import annotations

import dataclasses
import io
import zipfile

import pytest

from ckptmove.contracts import BytesSegment, CastSegment, CopySegment
from ckptmove.model import ArchiveFact


def bytes_of(path, segments):
    """The output that segments without casts stand for."""
    data = path.read_bytes()
    pieces = [
        segment.data if isinstance(segment, BytesSegment) else data[segment.span.start : segment.span.end]
        for segment in segments
    ]
    return b"".join(pieces)


def test_the_pickle_is_the_record(opened):
    assert opened.container.object_pickle() == opened.records["data.pkl"]


def test_byte_order_and_checksums_are_as_written(opened):
    assert opened.container.byteorder == opened.specimen.byteorder
    assert opened.container.has_checksums() is opened.specimen.checksums


def test_a_span_holds_the_bytes_of_its_storage(opened):
    data = opened.path.read_bytes()
    for storage in opened.storages():
        span = opened.container.storage_span(storage.key)
        if opened.specimen.deflated:
            assert span is None
        else:
            assert data[span.start : span.end] == opened.records[f"data/{storage.key}"]


def test_an_unknown_storage_has_no_span(opened):
    assert opened.container.storage_span("nowhere") is None


def test_a_sound_file_has_no_facts_but_its_compression(opened):
    kinds = {fact.kind for fact in opened.container.locate(opened.storages())}
    assert kinds == ({"compressed-storage"} if opened.specimen.deflated else set())


def test_facts_about_storages_that_do_not_fit(opened):
    first, second, *rest = opened.storages()
    long = dataclasses.replace(first, nbytes=first.nbytes + 5)
    lost = dataclasses.replace(second, key="lost", nbytes=8)
    facts = [fact for fact in opened.container.locate((long, lost, *rest)) if fact.kind != "compressed-storage"]
    assert {(fact.kind, fact.record.rpartition("/")[2], fact.nbytes) for fact in facts} == {
        ("short-storage", first.key, 5),
        ("missing-storage", "lost", 8),
        ("orphan-record", second.key, second.nbytes),
    }


def test_a_sound_file_passes_its_check(opened):
    assert opened.container.check() == ()


def test_a_flipped_bit_is_named(opened):
    storage = max(opened.storages(), key=lambda storage: storage.nbytes)
    data = bytearray(opened.path.read_bytes())
    raw = opened.records[f"data/{storage.key}"]
    at = data.find(raw) if not opened.specimen.deflated else data.find(b"data/" + storage.key.encode()) + 60
    data[at + 10] ^= 1
    with opened.path.open("r+b") as file:
        file.write(data)
    facts = opened.container.check()
    if opened.specimen.checksums:
        assert [(fact.kind, fact.record.rpartition("/")[2]) for fact in facts] == [("crc-mismatch", storage.key)]
        assert isinstance(facts[0], ArchiveFact)
    else:
        assert facts == ()


def test_with_the_same_pickle_the_file_is_the_same(opened):
    (segment,) = opened.container.lay_out(opened.container.object_pickle(), {})
    assert isinstance(segment, CopySegment)
    assert (segment.span.start, segment.span.end) == (0, opened.path.stat().st_size)


@pytest.mark.parametrize("nbytes", [14, 63, 64, 65, 300, 500, 5000, 70_000])
def test_with_another_pickle_everything_else_is_the_same(opened, pickle_of, nbytes):
    pickle = pickle_of(nbytes)
    segments = opened.container.lay_out(pickle, {})
    data = bytes_of(opened.path, segments)
    with zipfile.ZipFile(io.BytesIO(data)) as after, zipfile.ZipFile(opened.path) as before:
        assert after.namelist() == before.namelist()
        if not opened.specimen.checksums:
            assert not any(info.CRC for info in after.infolist())
            return
        assert after.testzip() is None
        for name in before.namelist():
            wanted = pickle if name.endswith("/data.pkl") else before.read(name)
            assert after.read(name) == wanted
            assert after.getinfo(name).compress_type == before.getinfo(name).compress_type or name.endswith("/data.pkl")


@pytest.mark.parametrize("nbytes", [14, 64, 65, 300, 5000])
def test_storages_keep_their_alignment(opened, pickle_of, nbytes):
    data = bytes_of(opened.path, opened.container.lay_out(pickle_of(nbytes), {}))
    old = opened.path.read_bytes()
    for storage in opened.storages():
        raw = opened.records[f"data/{storage.key}"]
        if len(raw) > 100 and not opened.specimen.deflated:
            assert (data.find(raw) - old.find(raw)) % opened.specimen.alignment == 0


def test_the_tail_moves_as_one_block(opened, pickle_of):
    segments = opened.container.lay_out(pickle_of(1000), {})
    copies = [segment for segment in segments if isinstance(segment, CopySegment)]
    storages = sum(len(raw) for name, raw in opened.records.items() if name.startswith("data/"))
    if not opened.specimen.deflated:
        assert copies[-1].span.nbytes > storages
    assert len(segments) <= 8


def test_checks_cover_every_stored_record_that_is_copied(opened, pickle_of):
    data = opened.path.read_bytes()
    segments = opened.container.lay_out(pickle_of(1000), {})
    checks = [check for segment in segments if isinstance(segment, CopySegment) for check in segment.checks]
    found = {check.record.partition("/")[2]: data[check.span.start : check.span.end] for check in checks}
    wanted = {name: raw for name, raw in opened.records.items() if raw and name != "data.pkl"}
    if not opened.specimen.checksums:
        wanted = {}
    if opened.specimen.deflated:
        assert found == {}
    else:
        assert found == wanted


def test_a_cast_storage_is_half_as_long(opened, pickle_of):
    key = next(storage.key for storage in opened.storages() if storage.nbytes == 40 * 7 * 8)
    if opened.specimen.deflated:
        return
    segments = opened.container.lay_out(pickle_of(200), {key: ("float64", "float32")})
    (cast,) = [segment for segment in segments if isinstance(segment, CastSegment)]
    assert cast.span == opened.container.storage_span(key)
    assert (cast.source, cast.target, cast.byteorder) == ("float64", "float32", opened.specimen.byteorder)
    assert (cast.check is not None) is opened.specimen.checksums

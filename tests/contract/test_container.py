"""The contract of every container, on each specimen; the oracles are independent readers and the bytes of the file."""

from __future__ import annotations

import zlib

import pytest

from ckptmove.formats.contract import ReadOnlyFormat
from ckptmove.formats.facts import facts_of
from ckptmove.io.contracts import CastSegment, CopySegment, InflateSegment
from ckptmove.io.segments import blocks_of, length


def test_it_knows_its_name(opened):
    assert opened.container.name == opened.specimen.name


def test_the_pickle_is_the_one_that_others_read(opened):
    if opened.seen.pickle is not None:
        assert opened.container.object_pickle() == opened.seen.pickle


def test_what_is_read_back_is_told_in_the_order_of_the_bytes(opened):
    reads = opened.container.read().reads[::2]
    assert list(reads) == sorted(set(reads))


def test_byte_order_and_checksums_are_as_written(opened):
    assert opened.container.byteorder == opened.specimen.byteorder
    assert opened.container.has_checksums() is opened.specimen.checksums


def test_a_span_holds_the_bytes_of_its_storage(opened):
    opened.container.locate(opened.storages())
    data = opened.path.read_bytes()
    for storage in opened.storages():
        span = opened.container.storage_span(storage.key)
        if opened.specimen.deflated:
            assert span is None
        else:
            assert data[span.start : span.end] == opened.seen.storages[storage.key]


def test_an_unknown_storage_has_no_bytes(opened):
    opened.container.locate(opened.storages())
    assert opened.container.storage_span("nowhere") is None
    assert opened.container.storage_segment("nowhere") is None
    assert opened.container.storage_crc("nowhere") is None


def test_a_storage_is_copied_with_the_check_of_its_crc(opened):
    opened.container.locate(opened.storages())
    for storage in opened.storages():
        segment = opened.container.storage_segment(storage.key)
        raw, crc = opened.seen.storages[storage.key], opened.container.storage_crc(storage.key)
        assert b"".join(blocks_of(opened.container.source, [segment])) == raw
        assert crc in {None, zlib.crc32(raw)}
        if opened.specimen.deflated:
            assert segment.crc == (crc or 0)
        else:
            assert [check.crc for check in segment.checks] == ([] if crc is None else [crc])
            assert all(check.span == segment.span for check in segment.checks)


def test_the_crcs_of_an_archive_are_known(opened_zip):
    opened_zip.container.locate(opened_zip.storages())
    crcs = {key: opened_zip.container.storage_crc(key) for key in opened_zip.seen.storages}
    known = opened_zip.specimen.checksums
    assert crcs == {key: zlib.crc32(raw) or None if known else None for key, raw in opened_zip.seen.storages.items()}


def test_a_sound_file_has_the_facts_of_its_kind_alone(opened):
    assert {fact.kind for fact in opened.container.locate(opened.storages())} == opened.specimen.facts


def test_a_storage_that_the_file_does_not_have_is_missing(opened):
    lost = opened.storages()[0]._replace(key="lost")
    facts = opened.container.locate((lost, *opened.storages()))
    missing = [(fact.record, fact.nbytes) for fact in facts if fact.kind not in opened.specimen.facts]
    assert missing == [("lost", lost.nbytes)]


def test_a_sound_file_passes_its_check(opened):
    assert opened.container.check() == ()


def test_with_the_same_pickle_the_file_is_the_same(opened):
    opened.container.locate(opened.storages())
    segments = opened.container.lay_out(opened.container.object_pickle(), {})
    if opened.specimen.deflated:
        assert opened.look(opened.output(segments)) == opened.seen
        return
    (segment,) = segments
    assert isinstance(segment, CopySegment)
    assert (segment.span.start, segment.span.end) == (0, opened.path.stat().st_size)


def test_a_format_that_is_only_read_refuses_every_change(read_only):
    own, (storage, *_) = read_only.container.object_pickle(), read_only.storages()
    assert not facts_of(read_only.container.name).is_written
    for change in (
        lambda: read_only.container.lay_out(own + b".", {}),
        lambda: read_only.container.lay_out(own, {storage.key: ("float64", "float32")}),
        lambda: read_only.container.patch(own + b"."),
    ):
        with pytest.raises(ReadOnlyFormat) as caught:
            change()
        assert (caught.value.container, caught.value.path) == (read_only.specimen.name, str(read_only.path))
    assert read_only.container.patch(own).writes == ()


@pytest.mark.unmeasured
@pytest.mark.parametrize("nbytes", [14, 64, 70_000])
def test_with_another_pickle_everything_else_is_the_same_and_aligned(pickled, pickle_of, nbytes):
    pickled.container.locate(pickled.storages())
    pickle = pickle_of(nbytes) + pickled.specimen.more_pickles
    data = pickled.output(pickled.container.lay_out(pickle, {}))
    after = pickled.look(data)
    assert after.pickle == pickle
    assert after.storages == pickled.seen.storages
    old = pickled.path.read_bytes()
    for raw in after.storages.values():
        if len(raw) > 100:
            begin = 0 if pickled.specimen.deflated else old.find(raw)
            assert (data.find(raw) - begin) % pickled.specimen.alignment == 0


def test_the_tail_moves_as_one_block(pickled, pickle_of):
    pickled.container.locate(pickled.storages())
    segments = pickled.container.lay_out(pickle_of(1000) + pickled.specimen.more_pickles, {})
    copies = [segment for segment in segments if isinstance(segment, CopySegment)]
    if not pickled.specimen.deflated:
        assert max(copy.span.nbytes for copy in copies) > sum(map(len, pickled.seen.storages.values()))
        assert len(segments) <= 8


def test_a_cast_storage_is_half_as_long(pickled, pickle_of):
    pickled.container.locate(pickled.storages())
    key = next(storage.key for storage in pickled.storages() if storage.nbytes == 40 * 7 * 8)
    segments = pickled.container.lay_out(pickle_of(200) + pickled.specimen.more_pickles, {key: ("float64", "float32")})
    (cast,) = [segment for segment in segments if isinstance(segment, CastSegment)]
    assert length(cast.segment) == 40 * 7 * 8
    assert isinstance(cast.segment, InflateSegment) is pickled.specimen.deflated
    if pickled.specimen.deflated:
        assert zlib.crc32(pickled.seen.storages[key]) == cast.segment.crc
        return
    assert cast.segment.span == pickled.container.storage_span(key)
    assert (cast.source, cast.target, cast.byteorder) == (
        "float64",
        "float32",
        pickled.specimen.byteorder,
    )
    assert bool(cast.segment.checks) is pickled.specimen.checksums


def test_code_comes_with_scripts_alone(opened):
    assert opened.container.name == "torchscript" or not [*opened.container.code()]

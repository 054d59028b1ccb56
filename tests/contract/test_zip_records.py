"""The contract of zip archives, beyond that of every container: short or additional records, and CRCs."""

from __future__ import annotations

import io
import zipfile

import pytest

from ckptmove.io.contracts import CopySegment
from ckptmove.model import ArchiveFact


def test_facts_about_storages_that_do_not_fit(opened_zip):
    first, second, *rest = opened_zip.storages()
    long = first._replace(nbytes=first.nbytes + 5)
    facts = [fact for fact in opened_zip.container.locate((long, *rest)) if fact.kind != "compressed-storage"]
    assert {(fact.kind, fact.record.rpartition("/")[2], fact.nbytes) for fact in facts} == {
        ("short-storage", first.key, 5),
        ("orphan-record", second.key, second.nbytes),
    }


def test_a_flipped_bit_is_named(opened_zip):
    key, raw = max(opened_zip.seen.storages.items(), key=lambda item: len(item[1]))
    data = bytearray(opened_zip.path.read_bytes())
    at = data.find(raw) if not opened_zip.specimen.deflated else data.find(b"data/" + key.encode()) + 60
    data[at + 10] ^= 1
    with opened_zip.path.open("r+b") as file:
        file.write(data)
    facts = opened_zip.container.check()
    if opened_zip.specimen.checksums:
        assert [(fact.kind, fact.record.rpartition("/")[2]) for fact in facts] == [("crc-mismatch", key)]
        assert isinstance(facts[0], ArchiveFact)
    else:
        assert facts == ()


@pytest.mark.parametrize("nbytes", [14, 64, 70_000])
def test_another_pickle_changes_no_other_record(opened_zip, pickle_of, nbytes):
    opened_zip.container.locate(opened_zip.storages())
    data = opened_zip.output(opened_zip.container.lay_out(pickle_of(nbytes), {}))
    with zipfile.ZipFile(io.BytesIO(data)) as after, zipfile.ZipFile(opened_zip.path) as before:
        assert after.namelist() == before.namelist()
        if not opened_zip.specimen.checksums:
            assert not any(info.CRC for info in after.infolist())
        else:
            assert after.testzip() is None
        for name in before.namelist():
            is_stored = "/data/" in name or name.endswith("/data.pkl")
            kept = zipfile.ZIP_STORED if is_stored else before.getinfo(name).compress_type
            assert after.getinfo(name).compress_type == kept
    wanted = opened_zip.records() | {"data.pkl": pickle_of(nbytes)}
    assert opened_zip.records(data) == wanted


def test_checks_cover_every_stored_record_that_is_copied(opened_zip, pickle_of):
    opened_zip.container.locate(opened_zip.storages())
    data = opened_zip.path.read_bytes()
    segments = opened_zip.container.lay_out(pickle_of(1000), {})
    checks = [check for segment in segments if isinstance(segment, CopySegment) for check in segment.checks]
    found = {check.record.partition("/")[2]: data[check.span.start : check.span.end] for check in checks}
    wanted = {name: raw for name, raw in opened_zip.records().items() if raw and name != "data.pkl"}
    if not opened_zip.specimen.checksums:
        wanted = {}
    if opened_zip.specimen.deflated:
        assert found == {}
    else:
        assert found == wanted

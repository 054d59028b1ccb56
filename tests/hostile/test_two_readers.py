"""Files in which two readers see different content: F805 as an error, the names of both readings, and no copy."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile

import pytest
import torch

import ckptmove
from ckptmove.conversion.results import TwoReadings
from ckptmove.formats.bare_pickle import BarePickle
from ckptmove.formats.safetensors_file import SafetensorsFile
from ckptmove.formats.two_readers import other_readings
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from tests.hostile.conftest import saved

EVIL = b"cbuiltins\nexec\n(V1\ntR."


def table(nbytes=16):
    return {"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}


def safetensors(data=bytes(16), length=None):
    """A file of one tensor, whose header has this length."""
    header = json.dumps(table(len(data))).encode()
    header = header.ljust(length or len(header))
    return struct.pack("<Q", len(header)) + header + data


def safetensors_pickle():
    """PROTO 4 and BINFLOAT are the length of the header; the rest of the pickle is the name of a tensor.

    Strings of JSON contain no control characters, so that no string of the pickle is shorter than 32 bytes.
    """
    start = b"\x80\x04G\0\0\0\0\0"
    names = (b"multiprocessing.popen_spawn_posix", b"os.path.os.path.os.path.os.system", b"true".ljust(32))
    module, name, argument = (b"U" + bytes([len(text)]) + text for text in names)
    header = (
        b'{"a0' + module + name + b"q\xc2\x93(" + argument + b'tR.":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    )
    return start + header.ljust(int.from_bytes(start, "little")) + bytes(4)


class Counted(MemorySource):
    """Bytes at a URL; counts those that are read."""

    is_remote = True
    read_bytes = 0

    def read(self, start, end):
        self.read_bytes += end - start
        return super().read(start, end)

    def blocks(self, span, block_bytes, buffers=1):
        for block in super().blocks(span, block_bytes, buffers):
            self.read_bytes += len(block)
            yield block


def whole(archives, data):
    """An archive whose offsets count from the start of the file, after other bytes."""
    return archives.build(data, *archives.records(data_pkl=archives.Record(b"a/data.pkl", EVIL)))


def tar(name, data, *, magic=True):
    """A tar of one member, without the magic of POSIX if requested."""
    info = tarfile.TarInfo("x")
    info.size = len(data)
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[: len(name)] = name
    if not magic:
        header[257:265] = bytes(8)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data.ljust(512, b"\0") + bytes(1024)


def tar01():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        members = {
            "storages": pickle.dumps(0, 2) + pickle.dumps([], 2),
            "tensors": pickle.dumps(0, 2),
            "pickle": pickle.dumps({"n": 1}, 2),
        }
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


LEGACY = {"_use_new_zipfile_serialization": False}
POLYGLOTS = {
    "safetensors and pickle": lambda a: safetensors_pickle(),
    "safetensors and zip": lambda a: safetensors(a.build(*a.records(data_pkl=a.Record(b"a/data.pkl", EVIL)))),
    "legacy, then zip": lambda a: whole(a, saved({"w": torch.ones(2)}, **LEGACY)),
    "pickle, then zip": lambda a: whole(a, pickle.dumps({"n": 1})),
    "tar, then zip": lambda a: whole(a, tar01()),
    "tar, then pickle": lambda a: tar01() + EVIL,
    "zip, then zip": lambda a: whole(a, a.build(*a.records())),
    "zip, then pickle": lambda a: a.build(*a.records(), behind=EVIL),
    "zip, then tar": lambda a: a.build(*a.records(), behind=tar(b"x", EVIL)),
    "records that no directory lists": lambda a: a.build(
        *a.records(), a.Record(b"b/data.pkl", EVIL).header() + EVIL + bytes(900)
    ),
    "tar without magic, and pickle": lambda a: tar(b"\x80\x02K\1.", EVIL, magic=False),
}  # fmt: skip


@pytest.mark.parametrize("name", POLYGLOTS)
def test_both_readings_are_named(archives, file_of, tmp_path, name) -> None:
    path = file_of(POLYGLOTS[name](archives))
    result = ckptmove.inspect(path)
    (finding,) = [one for one in result.findings if one.code == "F805"]
    assert finding.severity == "error"
    assert result.inventory.container in finding.message
    assert "S702" in {one.code for one in result.findings}
    with pytest.raises(TwoReadings):
        ckptmove.convert(path, to="cpu", output=str(tmp_path / "copy.pt"))


def test_a_record_among_stray_bytes_is_a_second_reading(archives, file_of) -> None:
    behind = b"junk" + archives.Record(b"b/data.pkl", EVIL).header() + EVIL
    (finding,) = ckptmove.inspect(file_of(archives.build(*archives.records(), behind=behind))).findings
    assert (finding.code, finding.severity) == ("F805", "error")


def test_verify_fails_the_file(archives, file_of) -> None:
    path = file_of(POLYGLOTS["zip, then tar"](archives))
    (check,) = [one for one in ckptmove.verify(path, ignore=("S702",)).checks if one.name == "file"]
    assert check.status == "failed"
    assert "F805" in check.detail


def test_stray_bytes_that_no_reader_reads_are_a_warning(archives, file_of) -> None:
    path = file_of(archives.build(*archives.records(), behind=b"junk" * 5))
    (finding,) = [one for one in ckptmove.inspect(path).findings if one.code == "F805"]
    assert finding.severity == "warning"


@pytest.mark.parametrize("behind", [b"", tar01()], ids=["nothing", "a tar"])
def test_both_ends_of_a_run_of_zeros_are_searched(tmp_path, behind) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps({"n": 1}, 2))
    with path.open("ab") as stream:
        stream.truncate(1 << 27)
        stream.seek(0, 2)
        stream.write(behind)
    findings = {one.code: one for one in ckptmove.inspect(str(path)).findings}
    assert findings["F805"].severity == ("error" if behind else "warning")


def test_at_a_url_only_the_ends_of_zeros_are_read() -> None:
    first = pickle.dumps({"n": 1}, 2)
    source = Counted("a.pkl", first + bytes(1 << 20))
    (reading,) = other_readings(BarePickle.open(source, None, Limits()))
    assert reading.kind == "stray-bytes"
    assert source.read_bytes < 1 << 19


def test_the_zeros_of_a_short_run_are_searched_whole() -> None:
    data = pickle.dumps({"n": 1}, 2) + bytes(100_000)
    source = Counted("a.pkl", data)
    assert not [*other_readings(BarePickle.open(source, None, Limits()))]
    source = Counted("a.pkl", data + tar01())
    (reading,) = other_readings(BarePickle.open(source, None, Limits()))
    assert reading.kind == "second-reading"


def test_the_next_objects_of_a_program_are_no_second_reading(file_of) -> None:
    for first in (saved({"n": 1}, **LEGACY), pickle.dumps({"n": 1})):
        result = ckptmove.inspect(file_of(first + pickle.dumps({"n": 2})))
        assert "F805" not in {one.code for one in result.findings}


def test_an_archive_that_is_a_tensor_of_a_pickle_is_no_second_reading(archives, file_of) -> None:
    inner = torch.frombuffer(bytearray(archives.build(*archives.records())), dtype=torch.uint8)
    result = ckptmove.inspect(file_of(saved({"file": inner}, **LEGACY)))
    assert "F805" not in {one.code for one in result.findings}


def test_no_length_of_a_header_alone_is_a_pickle() -> None:
    limits = Limits()
    for length in range(64, 10_064):
        container = SafetensorsFile(MemorySource("x", safetensors(length=length)), limits)
        assert not [*other_readings(container)], length

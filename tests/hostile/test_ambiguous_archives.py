"""Archives that two readers can read as different checkpoints: an error or F805, and never another one than torch's."""

from __future__ import annotations

import io
import pickle

import pytest
import torch

import ckptmove
from ckptmove.conversion.results import TwoReadings
from ckptmove.errors import CkptMoveError, DamagedArchive, NotACheckpoint
from ckptmove.formats.zip_archive.headers import LocalHeaders
from ckptmove.formats.zip_archive.index import read_directory
from ckptmove.io.source import open_source
from ckptmove.limits import Limits


def first(archives, **changes):
    """The record of the pickle, changed."""
    return archives.records(data_pkl=archives.Record(b"a/data.pkl", archives.pickle, **changes))


REFUSED = {
    "a second data.pkl": lambda a: [*a.records(), a.Record(b"a/data.pkl", a.other)],
    "a second data.pkl in capitals": lambda a: [*a.records(), a.Record(b"a/DATA.PKL", a.other)],
    "capitals first": lambda a: [a.Record(b"a/DATA.PKL", a.other), *a.records()],
    "a folder in capitals": lambda a: [*a.records(), a.Record(b"A/data.pkl", a.other)],
    "data.pkl in two folders": lambda a: [*a.records(), a.Record(b"b/data.pkl", a.other)],
    "a second storage 0": lambda a: [*a.records(), a.Record(b"a/data/0", bytes(16))],
    "one name in two encodings": lambda a: [
        *a.records(),
        a.Record("a/data/é".encode(), b"1", {"flags": 0x800}, {"flags": 0x800}),
        a.Record("a/data/é".encode(), b"2"),
    ],
    "a name that goes on behind NUL": lambda a: [*a.records(), a.Record(b"a/data.pkl\0x", a.other)],
    "a word in capitals": lambda a: [*a.records(), a.Record(b"a/.Storage_Alignment", b"1")],
    "another folder first": lambda a: [a.Record(b"b/x", b""), *a.records()],
    "another folder last": lambda a: [*a.records(), a.Record(b"b/x", b"hello")],
    "a record without a folder": lambda a: [*a.records(), a.Record(b"x", b"hello")],
    "a backslash for a folder": lambda a: [*a.records(), a.Record(b"a\\data.pkl", a.other)],
    "another name before the data": lambda a: first(a, local_name=b"a/DATA.pkl"),
    "another method before the data": lambda a: first(a, local={"method": 8}),
    "encrypted before the data": lambda a: first(a, local={"flags": 1}),
    "another length before the data": lambda a: first(a, local={"size": 3}),
    "another stored length before the data": lambda a: first(a, local={"stored": 3}),
    "another CRC before the data": lambda a: first(a, local={"crc": 0xDEADBEEF}),
    "two entries for one record": lambda a: [*a.records(), a.Record(b"a/data/1", b"", central={"offset": 0})],
    "a directory in the comment": lambda a: (a.records(), {"comment": a.end(0, 0, 0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(archives, file_of, tmp_path, name) -> None:
    made = REFUSED[name](archives)
    pieces, more = made if isinstance(made, tuple) else (made, {})
    path = file_of(archives.build(*pieces, **more))
    with pytest.raises((DamagedArchive, NotACheckpoint)):
        ckptmove.inspect(path)
    with pytest.raises((DamagedArchive, NotACheckpoint)):
        ckptmove.convert(path, to="cuda:0", output=str(tmp_path / "out.pt"))
    assert [one.name for one in tmp_path.iterdir()] == ["hostile.pt"]


def test_a_header_that_contradicts_the_directory_about_a_storage_is_seen(archives, file_of, tmp_path) -> None:
    wrong = archives.Record(b"a/data/0", bytes(16), local={"size": 4, "stored": 4})
    path = file_of(archives.build(*archives.records(data_0=wrong)))
    with pytest.raises(DamagedArchive, match=" contradicts "):
        ckptmove.inspect(path)
    with pytest.raises(DamagedArchive, match=" contradicts "):
        ckptmove.inspect(path, check=True)
    with pytest.raises(DamagedArchive, match=" contradicts "):
        ckptmove.convert(path, to="cuda:0", output=str(tmp_path / "out.pt"))


@pytest.mark.parametrize(("local", "central"), [({"crc": 0}, {}), ({}, {"crc": 0})])
def test_a_crc_that_one_side_leaves_out_is_no_contradiction(archives, file_of, local, central) -> None:
    path = file_of(archives.build(*first(archives, local=local, central=central)))
    assert ckptmove.inspect(path, check=True).inventory.facts == ()


@pytest.mark.parametrize(("numel", "most"), [(4, 40_000), (4096, 60_000)])
def test_local_headers_are_read_at_a_cost_that_follows_their_number(tmp_path, numel, most) -> None:
    path = tmp_path / "many.pt"
    torch.save([torch.zeros(numel) for _ in range(100)], path)
    source = open_source(str(path))
    headers, read, nbytes = LocalHeaders(source, read_directory(source, Limits())), source.read, []
    source.read = lambda start, end: nbytes.append(end - start) or read(start, end)
    headers.check_all()
    source.close()
    assert sum(nbytes) < most
    assert len(nbytes) < 110


def hidden(archives):
    return archives.Record(b"a/data.pkl", archives.other).header() + archives.other


STRAY = {
    "behind STOP": lambda a: (
        a.records(data_pkl=a.Record(b"a/data.pkl", a.pickle + b"more")), {}, 4, "bytes after the end of data.pkl",
    ),
    "a second pickle behind the first": lambda a: (
        a.records(data_pkl=a.Record(b"a/data.pkl", a.pickle + a.other)), {}, len(a.other),
        "bytes after the end of data.pkl",
    ),
    "between two records": lambda a: (
        [*a.records()[:2], b"G" * 5000, *a.records()[2:]], {}, 5000, "bytes after a/byteorder",
    ),
    "before the directory": lambda a: ([*a.records(), b"G" * 5000], {}, 5000, "bytes after a/version"),
    "behind the directory": lambda a: (a.records(), {"behind": b"more"}, 4, "bytes after the directory"),
    "a comment": lambda a: (a.records(), {"comment": b"a comment"}, 9, "bytes after the directory"),
}  # fmt: skip


@pytest.mark.parametrize(
    "pieces", [lambda a: [*a.records()[:2], hidden(a), *a.records()[2:]], lambda a: [hidden(a), *a.records()]]
)
def test_a_record_that_the_directory_does_not_name_is_a_second_reading(archives, file_of, tmp_path, pieces) -> None:
    path = file_of(archives.build(*pieces(archives)))
    [finding] = [one for one in ckptmove.inspect(path).findings if one.code == "F805"]
    assert finding.severity == "error"
    assert torch.load(path, weights_only=True)["n"] == 1
    with pytest.raises(TwoReadings):
        ckptmove.convert(path, to="cuda:0", output=str(tmp_path / "out.pt"))


@pytest.mark.parametrize("name", STRAY)
def test_what_torch_passes_over_is_a_finding_and_is_read_as_torch_reads_it(archives, file_of, tmp_path, name) -> None:
    pieces, more, nbytes, where = STRAY[name](archives)
    path, output = file_of(archives.build(*pieces, **more)), tmp_path / "out.pt"
    found = ckptmove.inspect(path, check=True)
    [finding] = [one for one in found.findings if one.code == "F805"]
    assert finding.where == (where,)
    assert finding.message.startswith(f"{nbytes:,} bytes in 1 place ")
    read = torch.load(path, weights_only=True)
    assert (read["weight"].tolist(), read["n"]) == ([0.0, 1.0, 2.0, 3.0], 1)
    assert [one.name for one in found.inventory.tensors] == ["weight"]
    ckptmove.convert(path, to="cuda:0", output=str(output))
    moved = torch.load(output, weights_only=True, map_location="cpu")
    assert (moved["weight"].tolist(), moved["n"]) == ([0.0, 1.0, 2.0, 3.0], 1)


@pytest.mark.parametrize(
    "pieces",
    [
        lambda a: a.records(),
        lambda a: a.records()[::-1],  # data.pkl last
        lambda a: a.records(data_0=a.Record(b"a/data/0", bytes(16), {"size": 0, "stored": 0, "crc": 0, "flags": 8})),
        lambda a: a.records(data_0=a.Record(b"a/data/0", bytes(16), {"size": 2**32 - 1, "stored": 2**32 - 1})),
        lambda a: a.records(byteorder=a.Record(b"a/byteorder", b"little", extra=b"FB" + b"\xf0\1" + bytes(0x1F0))),
        lambda a: [*a.records()[:2], bytes(24), *a.records()[2:]],  # a data descriptor
    ],
)
def test_what_is_plain_is_no_finding(archives, file_of, pieces) -> None:
    found = ckptmove.inspect(file_of(archives.build(*pieces(archives))), check=True)
    assert [one.code for one in found.findings] == []


def test_names_that_are_one_in_another_alphabet_are_two(archives, file_of) -> None:
    kelvin = [archives.Record(name.encode(), b"", {"flags": 0x800}, {"flags": 0x800}) for name in ("a/k", "a/\u212a")]
    path = file_of(archives.build(*archives.records(), *kelvin))
    assert torch.load(path, weights_only=True)["n"] == 1
    assert [one.name for one in ckptmove.inspect(path).inventory.tensors] == ["weight"]


def test_bytes_before_the_archive_of_a_tensor_inside_of_a_pickle(archives, file_of) -> None:
    class Stream:
        def __init__(self, data):
            self.data = data

        def __reduce__(self):
            return torch.storage._load_from_bytes, (self.data,)

    sound = archives.build(*archives.records())
    assert ckptmove.inspect(file_of(pickle.dumps(Stream(sound), 4))).inventory.tensors
    shifted = sound[:-22] + b"G" * 64 + sound[-22:]
    with pytest.raises(DamagedArchive):
        ckptmove.inspect(file_of(pickle.dumps(Stream(b"PK\3\4" + sound), 4)))
    with pytest.raises(CkptMoveError):
        ckptmove.inspect(file_of(pickle.dumps(Stream(shifted), 4)))


def test_a_stream_is_read_as_torch_reads_it_whatever_follows(file_of) -> None:
    stream = io.BytesIO()
    torch.save({"weight": torch.arange(4.0)}, stream, _use_new_zipfile_serialization=False)
    found = ckptmove.inspect(file_of(stream.getvalue() + stream.getvalue()))
    [finding] = [one for one in found.findings if one.code == "F804"]
    [fact] = found.inventory.facts
    assert (fact.kind, fact.nbytes) == ("orphan-record", len(stream.getvalue()))
    assert finding.where == (fact.record,)

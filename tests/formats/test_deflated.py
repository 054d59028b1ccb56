"""Compressed archives: read directly, and converted into archives that torch can map."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
from pathlib import Path

import pytest
from open_containers import open_container

import ckptmove
from ckptmove.errors import CrcMismatch, LimitExceeded
from ckptmove.limits import Limits

torch = pytest.importorskip("torch")

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"
#: Larger than any block that is read or written at a time, of values that deflate a little.
LARGE = torch.arange(700_001, dtype=torch.float64)


def zipped_again(data, stored=(), **changes):
    """Every record deflated, but for those whose names end in one of some words; a record may get other bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(stream, "w") as target:
        for record in source.infolist():
            method = zipfile.ZIP_STORED if record.filename.endswith(stored) else zipfile.ZIP_DEFLATED
            own = record.filename.partition("/")[2].replace("/", "_")
            target.writestr(record.filename, changes.get(own, source.read(record)), method)
    return stream.getvalue()


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.fixture
def deflated(tmp_path):
    def write(value, stored=()):
        path = tmp_path / "deflated.pt"
        path.write_bytes(zipped_again(saved(value), stored))
        return path

    return write


def load(path, **options):
    return torch.load(path, map_location="cpu", weights_only=True, **options)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def method_of(path, ending):
    with zipfile.ZipFile(path) as archive:
        return next(record.compress_type for record in archive.infolist() if record.filename.endswith(ending))


@pytest.mark.parametrize("stored", [(), ("/data/0", "/data/2")], ids=["all", "some"])
@pytest.mark.parametrize("target", ["cpu", "cuda:0"])
def test_the_converted_file_is_mapped_by_torch(deflated, tmp_path, stored, target):
    value = {"large": LARGE, "none": torch.empty(0), "few": torch.arange(7), "noise": torch.rand(90_000), "n": 3}
    path, output = deflated(value, stored), tmp_path / "moved.pt"
    result = ckptmove.convert(str(path), to=target, output=str(output))
    assert result.bytes_copied == output.stat().st_size
    assert ckptmove.inspect(str(output), check=True).inventory.facts == ()
    assert same(load(output, mmap=True), value)
    assert same(load(output), value)
    with zipfile.ZipFile(output) as archive:
        assert archive.testzip() is None
        spans = {record.filename: record for record in archive.infolist() if "/data/" in record.filename}
    raw = output.read_bytes()
    for record in spans.values():
        name_n, extra_n = struct.unpack_from("<2H", raw, record.header_offset + 26)
        assert record.compress_type == zipfile.ZIP_STORED
        was_stored = record.filename.endswith(stored) if stored else False
        assert was_stored or (record.header_offset + 30 + name_n + extra_n) % 64 == 0


def test_there_and_back_no_value_has_changed(deflated, tmp_path):
    value = {"w": LARGE, "b": torch.ones(5, dtype=torch.bfloat16)}
    path, away, back = deflated(value), tmp_path / "away.pt", tmp_path / "back.pt"
    ckptmove.convert(str(path), to="xpu:1", output=str(away))
    ckptmove.convert(str(away), to="cpu", output=str(back))
    assert same(load(back, mmap=True), value)


def test_a_conversion_says_what_it_stores(deflated, tmp_path):
    path = deflated({"a": torch.ones(3), "b": torch.ones(4)})
    before = ckptmove.inspect(str(path))
    [finding] = [one for one in before.findings if one.code == "F803"]
    assert finding.fix == f"ckptmove convert {path} --compact"
    [note] = ckptmove.convert(str(path), to="cpu", dry_run=True).notes
    assert note == "2 deflated storages are stored uncompressed in the new file, so that it can be memory-mapped (F803)"
    [note] = ckptmove.convert(str(deflated([torch.ones(3)])), to="cpu", output=str(tmp_path / "one.pt")).notes
    assert note.split()[:3] == ["1", "deflated", "storage"]
    assert ckptmove.inspect(str(tmp_path / "one.pt")).findings == ()


def test_a_cast_is_what_torch_would_cast(tmp_path):
    path, output = tmp_path / "deflated.pt", tmp_path / "mps.pt"
    path.write_bytes(zipped_again((SAMPLES / "float64-cpu.pt").read_bytes()))
    ckptmove.convert(str(path), to="mps", output=str(output), cast=True)
    ckptmove.convert(str(SAMPLES / "float64-cpu.pt"), to="mps", output=str(tmp_path / "stored.pt"), cast=True)
    assert same(load(output, mmap=True), load(tmp_path / "stored.pt"))
    assert ckptmove.inspect(str(output), check=True).inventory.facts == ()


def test_a_cast_over_several_blocks(deflated, tmp_path):
    ckptmove.convert(str(deflated({"w": LARGE})), to="mps", output=str(tmp_path / "mps.pt"), cast=True)
    assert same(load(tmp_path / "mps.pt", mmap=True), {"w": LARGE.float()})


def test_what_torch_saved_without_crcs_and_somebody_zipped(tmp_path):
    path, output = tmp_path / "deflated.pt", tmp_path / "moved.pt"
    data = bytearray(zipped_again(saved({"w": LARGE})))
    for at in range(len(data)):
        if data[at : at + 4] == b"PK\x01\x02":
            data[at + 16 : at + 20] = bytes(4)
    path.write_bytes(data)
    ckptmove.convert(str(path), to="mps", output=str(output), cast=True)
    assert not ckptmove.inspect(str(output)).inventory.facts
    assert same(load(output, mmap=True), {"w": LARGE.float()})


def test_a_record_of_no_storage_stays_as_it_is(tmp_path):
    path, output = tmp_path / "deflated.pt", tmp_path / "moved.pt"
    path.write_bytes(zipped_again(saved({"w": torch.ones(300)})))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/data/9", bytes(1000))
    ckptmove.convert(str(path), to="cuda:0", output=str(output))
    assert method_of(output, "/data/9") == zipfile.ZIP_DEFLATED
    assert method_of(output, "/data/0") == zipfile.ZIP_STORED
    assert [fact.kind for fact in ckptmove.inspect(str(output)).inventory.facts] == ["orphan-record"]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_script_is_stored_too(tmp_path):
    module = torch.jit.script(torch.nn.Linear(40, 30))
    torch.jit.save(module, tmp_path / "script.pt")
    path, output = tmp_path / "deflated.pt", tmp_path / "moved.pt"
    path.write_bytes(zipped_again((tmp_path / "script.pt").read_bytes()))
    [finding] = ckptmove.inspect(str(path)).findings
    assert (finding.code, finding.severity.value, finding.fix) == ("F803", "info", f"ckptmove convert {path} --to cpu")
    assert "torch.jit.load" in finding.message
    ckptmove.convert(str(path), to="cpu", output=str(output))
    assert method_of(output, "/data/0") == zipfile.ZIP_STORED
    assert same(dict(torch.jit.load(output).state_dict()), dict(module.state_dict()))


def test_a_directory_is_stored_too(deflated, tmp_path):
    value = {"a": torch.ones(300), "b": LARGE}
    folder, output = tmp_path / "run", tmp_path / "moved"
    folder.mkdir()
    deflated(value).rename(folder / "pytorch_model.bin")
    result = ckptmove.convert(str(folder), to="cuda:0", output=str(output))
    assert result.notes[0].startswith("2 deflated")
    assert result.plan.inflates == tuple(edit.storage for edit in result.plan.edits)
    assert same(load(output / "pytorch_model.bin", mmap=True), value)


class Stream:
    """Pickles as the call that loads a stream of torch."""

    def __init__(self, data):
        self.data = data

    def __reduce__(self):
        return torch.storage._load_from_bytes, (self.data,)


def test_an_archive_inside_of_a_pickle_cannot_be_mapped_and_is_stored_where_it_changes(tmp_path):
    path, output = tmp_path / "deflated.pkl", tmp_path / "moved.pkl"
    value = {"w": LARGE, "i": torch.arange(300)}
    path.write_bytes(pickle.dumps({"s": Stream(zipped_again(saved(value)))}, 4))
    assert ckptmove.inspect(str(path)).inventory.facts == ()
    ckptmove.convert(str(path), to="mps", output=str(output), cast=True)
    assert ckptmove.inspect(str(output), check=True).inventory.facts == ()
    found = {one.name: (one.dtype, one.device) for one in ckptmove.inspect(str(output)).inventory.tensors}
    assert found == {"s.w": ("float32", "mps"), "s.i": ("int64", "mps")}
    ckptmove.convert(str(output), to="cpu", output=str(tmp_path / "back.pkl"))
    assert same(pickle.loads((tmp_path / "back.pkl").read_bytes())["s"], {**value, "w": LARGE.float()})


# --- wrong sizes -----------------------------------------------------------------------------------------------------


def refused(path, error, **options):
    output = path.parent / "out.pt"
    with pytest.raises(error) as caught:
        ckptmove.convert(str(path), to="mps", output=str(output), **options)
    assert [one.name for one in path.parent.iterdir()] == [path.name], "nothing is left behind"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_bit_stops_the_conversion(deflated, place, cast):
    noise = random.Random(0).randbytes(3_000_000)
    path = deflated({"w": torch.frombuffer(bytearray(noise), dtype=torch.float64 if cast else torch.int64)})
    data = bytearray(path.read_bytes())
    begin = data.index(b"data/0") + 6
    end = data.index(b"PK\x03\x04", begin)
    data[{"first": begin + 40, "middle": (begin + end) // 2, "last": end - 9}[place]] ^= 4
    path.write_bytes(data)
    refused(path, CrcMismatch, cast=cast)


@pytest.mark.parametrize("said", [2_399, 2_401, 500])
def test_a_storage_of_another_length_than_it_says(deflated, said):
    path = deflated({"w": torch.arange(300)})
    data = path.read_bytes()
    assert data.count(struct.pack("<L", 2400)) == 2, "in its header and in the directory"
    path.write_bytes(data.replace(struct.pack("<L", 2400), struct.pack("<L", said)))
    refused(path, CrcMismatch)


def test_a_storage_that_says_more_than_its_tensors_need_is_refused(tmp_path):
    path = tmp_path / "bomb.pt"
    path.write_bytes(zipped_again(saved({"w": torch.ones(3)}), data_0=bytes(100 << 20)))
    refused(path, LimitExceeded)
    container = open_container(str(path), Limits())
    with pytest.raises(LimitExceeded):
        container.storage_segment("0")
    container.source.close()


def test_a_storage_that_is_as_large_as_its_tensors_may_deflate_to_nothing(deflated, tmp_path):
    value = {"w": torch.zeros(80 << 20, dtype=torch.uint8)}
    ckptmove.convert(str(deflated(value)), to="cuda:0", output=str(tmp_path / "moved.pt"))
    assert same(load(tmp_path / "moved.pt", mmap=True), value)

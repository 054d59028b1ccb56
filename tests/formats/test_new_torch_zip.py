"""New files of torch.save: loaded by every mode of torch.load, free of findings, and converted again."""

from __future__ import annotations

import zipfile
import zlib

import pytest
import torch
from open_containers import open_container

import ckptmove
from ckptmove.formats.new_torch_zip import NewStorage, new_torch_file
from ckptmove.io.contracts import BytesSegment, FromSource, StreamSegment
from ckptmove.io.part import MemorySource
from ckptmove.io.rewrite import write_segments
from ckptmove.io.sink import FileSink
from ckptmove.limits import Limits

STATE = {"w": torch.arange(300.0).reshape(20, 15), "none": torch.ones(0), "b": torch.arange(7), "view": None}
STATE["view"] = STATE["w"][3:5]
LOADS = [{"mmap": mmap, "weights_only": safe} for mmap in (False, True) for safe in (False, True)]


@pytest.fixture
def new(tmp_path):
    """Write a new file from the records of another one; return its path."""

    def write(keys="012", crc=zlib.crc32, segments_of=lambda data: (BytesSegment(data),), byteorder="little"):
        torch.save(STATE, tmp_path / "old.pt")
        with zipfile.ZipFile(tmp_path / "old.pt") as old:
            held = {key: old.read(f"old/data/{key}") for key in keys}
            pickle = old.read("old/data.pkl")
        storages = [NewStorage(key, segments_of(data), crc(data)) for key, data in held.items()]
        with FileSink(str(tmp_path / "new.pt"), force=True) as sink:
            segments = new_torch_file("new", pickle, storages, byteorder)
            write_segments(MemorySource("none", b""), segments, sink)
            sink.commit()
        return tmp_path / "new.pt"

    return write


def require_state(path, **options):
    loaded = torch.load(path, **options)
    assert loaded.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert torch.equal(loaded[name].cpu(), tensor)
        assert loaded[name].stride() == tensor.stride()
    assert loaded["view"].untyped_storage().data_ptr() == loaded["w"].untyped_storage().data_ptr()


@pytest.mark.parametrize("options", LOADS, ids=str)
@pytest.mark.parametrize("crc", [zlib.crc32, lambda _: None], ids=["known", "summed"])
def test_torch_loads_it(new, crc, options):
    require_state(new(crc=crc, segments_of=lambda data: (StreamSegment(len(data), lambda: iter((data,))),)), **options)


def test_storages_in_any_order(new):
    """For ``meta``, torch would compute their places from the order in the pickle if the file had a format version."""
    path = new(keys="210")
    require_state(path, mmap=True)
    if not hasattr(torch.UntypedStorage, "_checkpoint_offset"):
        pytest.skip("this torch computes no places")
    loaded, data = torch.load(path, map_location="meta"), path.read_bytes()
    for name in "wb":
        start = loaded[name].untyped_storage()._checkpoint_offset
        assert data[start:].startswith(STATE[name].numpy().tobytes())


def test_its_records_are_those_of_torch(new):
    with zipfile.ZipFile(new()) as ours, zipfile.ZipFile(new().with_name("old.pt")) as theirs:
        names = [name.removeprefix("new/") for name in ours.namelist()]
        others = [name.removeprefix("old/") for name in theirs.namelist()]
        assert names == [name for name in others if name not in {".format_version", ".data/serialization_id"}]
        assert all(ours.read(f"new/{name}") == theirs.read(f"old/{name}") for name in names)


@pytest.mark.parametrize("crc", [zlib.crc32, lambda _: None], ids=["known", "summed"])
def test_a_check_finds_nothing(new, crc):
    report = ckptmove.inspect(new(crc=crc), check=True)
    assert report.inventory.container == "torch-zip"
    assert report.findings == ()


def test_the_byte_order_is_recorded(new):
    container = open_container(str(new(byteorder="big")), Limits())
    container.source.close()
    assert container.byteorder == "big"


@pytest.mark.parametrize("in_place", [False, True])
def test_it_is_converted_again(new, in_place):
    path = new()
    target = path if in_place else path.with_name("moved.pt")
    ckptmove.convert(path, to="cuda:0", in_place=in_place, output=None if in_place else target)
    assert {one.device for one in ckptmove.inspect(target, check=True).inventory.tensors} == {"cuda:0"}
    for options in LOADS:
        require_state(target, map_location="cpu", **options)
    if in_place:
        ckptmove.undo(path)
        require_state(path)


def test_storages_of_several_files_keep_their_crc(tmp_path):
    """Each is checked against the CRC of its own archive, which the new one repeats."""
    containers = []
    for name in "wb":
        torch.save({name: STATE[name]}, tmp_path / f"{name}.pt")
        containers.append(open_container(str(tmp_path / f"{name}.pt"), Limits()))
    torch.save({name: STATE[name] for name in "wb"}, tmp_path / "both.pt")
    with zipfile.ZipFile(tmp_path / "both.pt") as both:
        pickle, sums = both.read("both/data.pkl"), {name: both.getinfo(f"both/data/{name}").CRC for name in "01"}
    storages = []
    for place, one in enumerate(containers):
        segment = FromSource(one.source, one.storage_segment("0"))
        storages.append(NewStorage(str(place), (segment,), one.storage_crc("0")))
    with FileSink(str(tmp_path / "new.pt"), force=False) as sink:
        segments = new_torch_file("new", pickle, storages)
        write_segments(MemorySource("none", b""), segments, sink)
        sink.commit()
    for one in containers:
        one.source.close()
    loaded = torch.load(tmp_path / "new.pt")
    assert all(torch.equal(loaded[name], STATE[name]) for name in "wb")
    with zipfile.ZipFile(tmp_path / "new.pt") as archive:
        assert {name: archive.getinfo(f"new/data/{name}").CRC for name in "01"} == sums

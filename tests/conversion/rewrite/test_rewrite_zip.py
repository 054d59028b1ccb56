"""Rewrites of torch's archives; the oracles are torch and zipfile."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import zipfile
import zlib

import pytest
import saving
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmove.errors import CkptMoveError, CrcMismatch, DamagedArchive, LimitExceeded, SourceChanged, WriteFailed
from ckptmove.io.rewrite import KERNEL_BLOCK, write_segments
from ckptmove.io.segments import without_checks
from ckptmove.io.sink import FileSink
from ckptmove.limits import Limits

CPU = b"X\x03\x00\x00\x00cpu"
CUDA = b"X\x06\x00\x00\x00cuda:3"


def save(path, state=None):
    torch.save(state if state is not None else {"w": torch.randn(50, 30), "n": {"b": torch.arange(7)}}, path)
    return path


def retag(before, after):
    return lambda pickle: pickle.replace(before, after)


def pad(length):
    """A pickle of another length that means the same: NONE and POP would be foreign, so memo puts before the end."""
    return lambda pickle: pickle[:-1] + b"q\xff" * (length // 2) + b"."


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("crcs", [True, False])
def test_torch_loads_what_was_retagged(tmp_path, mmap, alignment, crcs, rewrite):
    with saving.crcs(crcs), saving.aligned(alignment):
        source = save(tmp_path / "a.pt")
    output = rewrite(source, tmp_path / "b.pt", retag(CPU, CUDA))
    before = torch.load(source, weights_only=True)
    after = torch.load(output, weights_only=True, map_location="cpu", mmap=mmap)
    assert torch.equal(before["w"], after["w"])
    assert torch.equal(before["n"]["b"], after["n"]["b"])
    assert after["w"].data_ptr() % (alignment if mmap else 1) == 0
    assert rewrite(output, tmp_path / "c.pt", retag(CUDA, CPU)).read_bytes() == source.read_bytes()


def test_it_is_what_torch_itself_would_write(tmp_path, rewrite):
    source = save(tmp_path / "model.pt", {"w": torch.ones(9), "name": "x" * 70})
    (tmp_path / "other").mkdir()
    wanted = save(tmp_path / "other" / "model.pt", {"w": torch.ones(9), "name": "x" * 7})
    text = struct.pack("<L", 70) + b"x" * 70, struct.pack("<L", 7) + b"x" * 7
    data = bytearray(rewrite(source, tmp_path / "b.pt", retag(*text)).read_bytes())
    # torch computes the id from the content; a rewrite keeps the old id.
    with zipfile.ZipFile(tmp_path / "b.pt") as ours, zipfile.ZipFile(wanted) as theirs:
        name = "model/.data/serialization_id"
        mine, its = ours.read(name), theirs.read(name)
        crcs = zlib.crc32(mine), zlib.crc32(its)
    data = bytes(data).replace(mine, its).replace(struct.pack("<L", crcs[0]), struct.pack("<L", crcs[1]))
    assert data == wanted.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=4), numels=st.lists(st.integers(0, 90), max_size=5))
def test_any_change_of_length_keeps_every_storage(tmp_path, lengths, numels, rewrite):
    source = save(tmp_path / "a.pt", [torch.arange(numel) for numel in numels])
    current = source
    for step, length in enumerate(lengths):
        current = rewrite(current, tmp_path / f"{step}.pt", pad(length))
        with zipfile.ZipFile(source) as before, zipfile.ZipFile(current) as after:
            assert after.testzip() is None
            assert after.namelist() == before.namelist()
            data = current.read_bytes()
            for info in after.infolist():
                name_bytes, extra_bytes = struct.unpack_from("<2H", data, info.header_offset + 26)
                assert (info.header_offset + 30 + name_bytes + extra_bytes) % 64 == 0
                if not info.filename.endswith("data.pkl"):
                    assert after.read(info) == before.read(info.filename)
    with zipfile.ZipFile(source) as before:
        original = before.read("a/data.pkl")
    assert rewrite(current, tmp_path / "back.pt", lambda _: original).read_bytes() == source.read_bytes()


@pytest.mark.parametrize("crcs", [True, False])
def test_casts_give_what_torch_gives(tmp_path, crcs, rewrite, opened):
    state = {"a": torch.randn(7, dtype=torch.float64), "b": torch.ones(5), "c": torch.randn(3, dtype=torch.complex128)}
    with saving.crcs(crcs):
        source = save(tmp_path / "a.pt", state)

    casts = {"0": ("float64", "float32"), "2": ("complex128", "complex64")}
    output = rewrite(
        source,
        tmp_path / "b.pt",
        lambda pickle: pickle.replace(b"ComplexDoubleStorage", b"ComplexFloatStorage").replace(
            b"\nDoubleStorage", b"\nFloatStorage"
        ),
        casts,
    )
    for mmap in (False, True):
        after = torch.load(output, weights_only=True, mmap=mmap)
        assert torch.equal(after["a"], state["a"].float())
        assert torch.equal(after["b"], state["b"])
        assert torch.equal(after["c"], state["c"].to(torch.complex64))
    if crcs:
        assert zipfile.ZipFile(output).testzip() is None
    with opened(output) as container:
        assert container.check() == ()
        assert container.has_checksums() is crcs


@pytest.mark.parametrize(("numel", "block"), [(1 << 18, 4096), ((1 << 18) - 64, 64)])
def test_large_storages_move_by_whole_blocks_of_the_disk(tmp_path, numel, block, rewrite):
    """Where the offsets differ by whole blocks, a file system can share them between both files."""
    source = save(tmp_path / "a.pt", {"w": torch.zeros(numel)})
    output = rewrite(source, tmp_path / "b.pt", pad(100))
    starts = [data_start(path, "data/0") for path in (source, output)]
    assert starts[1] > starts[0]
    assert starts[0] % 64 == starts[1] % 64 == 0
    assert (starts[1] - starts[0]) % block == 0
    assert starts[1] - starts[0] <= max(block, 128)


def data_start(path, name):
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        (record,) = (record for record in archive.infolist() if record.filename.endswith(name))
        file.seek(record.header_offset + 26)
        return record.header_offset + 30 + sum(struct.unpack("<2H", file.read(4)))


def test_the_kernel_is_given_whole_blocks(tmp_path, opened, monkeypatch):
    source, output = save(tmp_path / "a.pt", {"w": torch.randn(5 << 20)}), tmp_path / "b.pt"
    asked, copy = [], os.copy_file_range

    def noted(source, destination, count, start):
        asked.append((start, os.lseek(destination, 0, os.SEEK_CUR), count))
        return copy(source, destination, count, start)

    monkeypatch.setattr(os, "copy_file_range", noted)
    with opened(source) as container, FileSink(str(output), force=False) as sink:
        segments = container.lay_out(pad(100)(container.object_pickle()), {})
        write_segments(container.source, without_checks(segments), sink)
        sink.commit()
    assert [start for start, _, count in asked if count == KERNEL_BLOCK] == [KERNEL_BLOCK]
    assert all((start - written) % 4096 == 0 for start, written, count in asked if count > 4096)
    assert torch.equal(*(torch.load(path)["w"] for path in (source, output)))


def test_a_cast_of_a_damaged_storage_stops(tmp_path, rewrite):
    source = save(tmp_path / "a.pt", {"a": torch.ones(90, dtype=torch.float64)})
    flip(source, "a/data/0")
    with pytest.raises(CrcMismatch) as caught:
        rewrite(source, tmp_path / "b.pt", casts={"0": ("float64", "float32")})
    assert caught.value.record == "a/data/0"


def flip(path, record, at=5):
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(record)
    data[info.header_offset + 30 + sum(struct.unpack_from("<2H", data, info.header_offset + 26)) + at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("key", ["9", "x"])
def test_a_cast_of_what_is_not_there(tmp_path, key, rewrite):
    with pytest.raises(DamagedArchive, match="no bytes to cast"):
        rewrite(save(tmp_path / "a.pt"), tmp_path / "b.pt", casts={key: ("float64", "float32")})


def test_a_flipped_bit_stops_the_copy_and_leaves_nothing(tmp_path, rewrite):
    source = save(tmp_path / "a.pt", {"w": torch.ones(1 << 20), "v": torch.ones(9)})
    flip(source, "a/data/0", at=3 << 20)
    with pytest.raises(CrcMismatch) as caught:
        rewrite(source, tmp_path / "b.pt", retag(CPU, CUDA))
    assert (caught.value.record, caught.value.path) == ("a/data/0", str(source))
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def copied_unchecked(opened, source, output, casts=None):
    with opened(source) as container, FileSink(str(output), force=False) as sink:
        segments = without_checks(container.lay_out(pad(90)(container.object_pickle()), casts or {}))
        write_segments(container.source, segments, sink)
        sink.commit()


@pytest.mark.parametrize("kernel", ["copies", "stops after a while", "cannot"])
def test_unchecked_bytes_are_the_same_whoever_copies_them(tmp_path, opened, rewrite, monkeypatch, kernel):
    source = save(tmp_path / "a.pt", {"w": torch.randn(3 << 20), "v": torch.ones(9)})
    real, calls = os.copy_file_range, []

    def copy(source_fd, sink_fd, nbytes, start):
        calls.append(nbytes)
        if kernel == "cannot" or (kernel == "stops after a while" and len(calls) > 1):
            raise OSError(22, "Invalid argument")
        return real(source_fd, sink_fd, nbytes, start)

    monkeypatch.setattr(os, "copy_file_range", copy)
    copied_unchecked(opened, source, tmp_path / "b.pt")
    assert calls
    assert (tmp_path / "b.pt").read_bytes() == rewrite(source, tmp_path / "c.pt", pad(90)).read_bytes()


def test_unchecked_a_flipped_bit_passes_also_through_a_cast(tmp_path, opened):
    source = save(tmp_path / "a.pt", {"w": torch.ones(900), "d": torch.ones(90, dtype=torch.float64)})
    flip(source, "a/data/0")
    flip(source, "a/data/1", at=1)
    copied_unchecked(opened, source, tmp_path / "b.pt", {"1": ("float64", "float32")})
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() == "a/data/0"


def test_a_source_that_shrinks_while_the_kernel_copies(tmp_path, opened, monkeypatch):
    source = save(tmp_path / "a.pt", {"w": torch.ones(5 << 20)})
    real = os.copy_file_range

    def copy(*args):
        os.truncate(source, 1 << 20)
        return real(*args)

    monkeypatch.setattr(os, "copy_file_range", copy)
    with pytest.raises(SourceChanged):
        copied_unchecked(opened, source, tmp_path / "b.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_disk_without_room_is_not_written_to(tmp_path, monkeypatch, rewrite):
    source = save(tmp_path / "a.pt")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: (36_864, 32_768, 4096))
    monkeypatch.setattr(os, "write", None)
    with pytest.raises(WriteFailed, match="and 4,096 are free"):
        rewrite(source, tmp_path / "b.pt", retag(CPU, CUDA))
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_flipped_bit_in_the_pickle(tmp_path, opened):
    source = save(tmp_path / "a.pt")
    flip(source, "a/data.pkl")
    with opened(source) as container, pytest.raises(CrcMismatch):
        container.object_pickle()


def test_a_source_that_shrinks_meanwhile(tmp_path, opened):
    source = save(tmp_path / "a.pt", {"w": torch.ones(1 << 20)})
    with opened(source) as container:
        segments = container.lay_out(container.object_pickle() + b" ", {})
        os.truncate(source, 1 << 20)
        with pytest.raises(SourceChanged), FileSink(str(tmp_path / "b.pt"), force=False) as sink:
            write_segments(container.source, segments, sink)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_full_disk_in_the_middle(tmp_path, monkeypatch, rewrite):
    source = save(tmp_path / "a.pt", {"w": torch.ones(1 << 20)})
    real, left = os.write, [2 << 20]

    def write(fd, data):
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        count = real(fd, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(WriteFailed, match="No space left"):
        rewrite(source, tmp_path / "b.pt", retag(CPU, CUDA))
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_progress_counts_every_byte_once(tmp_path, rewrite):
    source = save(tmp_path / "a.pt", {"w": torch.ones(1 << 20), "d": torch.ones(1 << 17, dtype=torch.float64)})
    seen = []
    output = rewrite(
        source,
        tmp_path / "b.pt",
        retag(CPU, CUDA),
        {"1": ("float64", "float32")},
        lambda done, total: seen.append((done, total)),
    )
    size = output.stat().st_size
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)
    assert {total for _, total in seen} == {size}
    assert len(seen) > 5


def test_the_limit_on_pickles(tmp_path, opened):
    with opened(save(tmp_path / "a.pt"), Limits(pickle_bytes=100)) as container, pytest.raises(LimitExceeded):
        container.object_pickle()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_broken_only_our_errors_escape(tmp_path, data, rewrite, opened):
    source = tmp_path / "a.pt"
    if not source.exists():
        save(source, [torch.arange(4), torch.ones(2, dtype=torch.float64)])
    good = source.read_bytes()
    broken = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.one_of(st.integers(0, len(good) - 1), st.integers(good.index(b"PK\x01\x02"), len(good) - 1)))
        broken[at] = data.draw(st.sampled_from([0, 1, 8, 0x7F, 0xFF]))
    (tmp_path / "x.pt").write_bytes(broken)
    with contextlib.suppress(CkptMoveError), opened(tmp_path / "x.pt") as container:
        container.locate(())
        with contextlib.suppress(CkptMoveError):
            container.check()
        rewrite(tmp_path / "x.pt", tmp_path / "y.pt", lambda pickle: pickle + b" ")

"""The container of a file, recognised by its bytes, for files of each writer."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import pickle
import tarfile
import warnings
import zipfile
from collections import OrderedDict

import pytest
import torch
from open_containers import open_container

from ckptmove.errors import (
    ArchiveOfFiles,
    CkptMoveError,
    DamagedArchive,
    LimitExceeded,
    NotACheckpoint,
    UnsupportedContainer,
)
from ckptmove.formats.facts import facts_of
from ckptmove.formats.opening import container_class, recognise
from ckptmove.formats.signatures import SIGNATURES
from ckptmove.io.source import open_source
from ckptmove.limits import Limits


def saved(**options):
    stream = io.BytesIO()
    torch.save({"w": torch.ones(3)}, stream, **options)
    return stream.getvalue()


def zipped(*names):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as writer:
        for name in names:
            writer.writestr(name, b"x")
    return stream.getvalue()


def tarred(*names, mtime=0, **headers):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as writer:
        for name in names:
            info = tarfile.TarInfo(name)
            info.mtime = mtime
            writer.addfile(info)
    return stream.getvalue()


def scripted():
    stream = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), stream)
    return stream.getvalue()


def flat():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on the age of TorchScript
        module = torch.jit.script(torch.nn.Linear(2, 2))
        return module._save_to_buffer_for_lite_interpreter(_use_flatbuffer=True)


@pytest.fixture
def name_of(tmp_path):
    def name(data):
        path = tmp_path / "anything.txt"
        path.write_bytes(data)
        source = open_source(str(path))
        try:
            return recognise(source)
        finally:
            source.close()

    return name


SAFETENSORS = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (saved(), "torch-zip"),
        (saved(_use_new_zipfile_serialization=False), "torch-legacy"),
        (saved(_use_new_zipfile_serialization=False, pickle_protocol=0), "torch-legacy"),
        (saved(_use_new_zipfile_serialization=False, pickle_protocol=4), "torch-legacy"),
        (tarred("sys_info", "pickle", "tensors", "storages"), "torch-tar"),
        (tarred("./storages", "pickle"), "torch-tar"),
        (tarred("sys_info", "pickle", mtime=0.5), "torch-tar"),
        (zipped("m/version", "m/model.json"), "torchscript"),
        (zipped("m/data.pkl", "m/code/__torch__.py"), "torchscript"),
        (zipped("m/data.pkl", "m/constants.pkl"), "torchscript"),
        (zipped("m/code/__torch__.py", "m/constants.pkl"), "torchscript"),
        (zipped("m/archive_format", "m/models/model.json"), "torch-export"),
        (zipped("m/data/weights/weight_0", "m/archive_format"), "torch-export"),
        (zipped("m/data/aotinductor/model/x.so", "m/version"), "torch-export"),
        (zipped("data/aotinductor/model/x.so"), "torch-export"),
        (zipped("serialized_exported_program.json", "serialized_state_dict.pt", "version"), "torch-export"),
        (len(SAFETENSORS).to_bytes(8, "little") + SAFETENSORS + b"\0", "safetensors"),
        (saved() + saved(), "dcp"),
        *((pickle.dumps({"a": 1}, protocol), "pickle") for protocol in range(6)),
        (pickle.dumps(OrderedDict(a=[1.5]), 0), "pickle"),
        (pickle.dumps([str(number) for number in range(3000)], 0), "pickle"),
    ],
)
def test_a_checkpoint_is_recognised(name_of, data, expected):
    assert name_of(data) == expected


@pytest.mark.parametrize(
    ("place", "mark"), [(257, b"ustar"), (4, b"\0\0\0\0{"), (4, b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")]
)
def test_a_zip_archive_has_the_format_of_its_directory(name_of, place, mark):
    data = bytearray(saved() + saved())
    data[place : place + len(mark)] = mark
    assert name_of(bytes(data)) == "dcp"


@pytest.mark.parametrize("name", ["torchscript", "torch-export", "torch-zip", *SIGNATURES])
def test_each_format_has_its_facts_and_its_class(name):
    assert facts_of(name).suffixes or name == "dcp"
    assert name == "dcp" or container_class(name).name == name  # a directory has no container


def test_sources_in_a_zip_are_no_torchscript(name_of):
    with pytest.raises(ArchiveOfFiles):
        name_of(zipped("app/code/train.py", "app/README"))


def test_a_real_torchscript_archive(name_of, tmp_path):
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        data = scripted()
    assert name_of(data) == "torchscript"
    (tmp_path / "m.pt").write_bytes(data)
    container = open_container(str(tmp_path / "m.pt"), Limits())
    assert (container.name, container.byteorder, container.torch_version) == ("torchscript", "little", None)
    container.source.close()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "an empty file"),
        (b"hello, world\n", "a text file"),
        (b"I am (no) pickle.", "a text file"),
        (b"(a parenthesis.)", "a text file"),
        (b"(lp0\nno pickle at all.", "a text file"),
        (b"(" + b"K\x01" * 50 + b"!.", "bytes of no known format"),
        (b"(\x80\x02.", "bytes of no known format"),
        ("ü".encode() * 4000, "a text file"),
        (b"a" + "ü".encode() * 4000, "a text file"),
        (b"abc\x00\x01", "bytes of no known format"),
        (b"\xff\xfe\x01", "bytes of no known format"),
        (b"\x80", "bytes of no known format"),
        (bytes(5000), "nothing but zero bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a git-lfs pointer"),
        (b"\n<!DOCTYPE html><html></html>", "an HTML page"),
        (b"<html lang='en'>", "an HTML page"),
        (gzip.compress(b"x", mtime=0), "a gzip file"),
        (gzip.compress(tarred("weights.th"), mtime=0), "a tar archive in a gzip file"),
        (gzip.compress(b"", mtime=0) + gzip.compress(tarred("weights.th"), mtime=0), "a tar archive in a gzip file"),
        (gzip.compress(b"", mtime=0) * 64 + gzip.compress(tarred("weights.th"), mtime=0), "a gzip file"),
        (gzip.compress(b"x", mtime=0) + bytes(20), "a gzip file"),
        (b"\x1f\x8b" + bytes(20), "a gzip file"),
        (flat(), "a mobile module in FlatBuffer form"),
        (bz2.compress(b"x"), "a bzip2 file"),
        (b"7z\xbc\xaf\x27\x1c\x00", "a 7z archive"),
        (b"\x89HDF\r\n\x1a\n\x00", "an HDF5 file"),
        (tarred("notes.txt"), "a tar archive"),
        (tarred("notes.txt", "sys_info", mtime=0.5), "a tar archive"),
        (tarred(comment="by hand"), "a tar archive"),
        (zipped(), "an empty zip archive"),
        (zipped("data", "version"), "a zip archive without data.pkl"),
        (zipped("a/b/data.pkl"), "a zip archive without data.pkl"),
        (zipped("data", "policy.pth"), "a zip archive without data.pkl; it holds policy.pth"),
        (zipped("policy.pth", "o.pth", "v.pth"), "a zip archive without data.pkl; it holds policy.pth and 2 more"),
        (b"\x00\x00\x00\x00\x10\x00\x00\x00{}", "bytes of no known format"),
    ],
)
def test_what_is_none_is_named(name_of, data, found):
    with pytest.raises(NotACheckpoint) as caught:
        name_of(data)
    assert caught.value.found == found


def test_an_archive_cut_short(name_of):
    with pytest.raises(DamagedArchive, match="truncated"):
        name_of(saved()[:-40])


@pytest.mark.parametrize("cut", [10, 100, 1000])
def test_an_archive_of_files_of_torch_cut_short(name_of, cut):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as writer:
        for name in ("policy.pth", "policy.optimizer.pth", "more.pth"):
            writer.writestr(name, saved())
    with pytest.raises(DamagedArchive, match="truncated"):
        name_of(stream.getvalue()[:-cut])


def test_a_tar_that_begins_with_no_header(name_of):
    with pytest.raises(DamagedArchive, match="at byte 0"):
        name_of(bytes(257) + b"ustar")


def test_two_pickles_in_one_archive(name_of):
    with pytest.raises(DamagedArchive, match="2 times"):
        name_of(zipped("a/data.pkl", "b/data.pkl"))


def test_bytes_before_an_archive(name_of):
    with pytest.raises(DamagedArchive, match="5 unexpected bytes"):
        name_of(b"PK\x03\x04!" + zipped("a/version", "a/data.pkl"))


def test_truncated_anywhere_only_our_errors_escape(name_of):
    data = saved()
    for length in range(0, len(data), 64):
        with pytest.raises(CkptMoveError):
            name_of(data[:length])


def test_a_torch_archive_is_opened(tmp_path):
    (tmp_path / "w.bin").write_bytes(saved())
    container = open_container(str(tmp_path / "w.bin"), Limits())
    assert (container.name, container.byteorder, container.torch_version) == ("torch-zip", "little", None)
    container.source.close()


@pytest.mark.parametrize("protocol", range(6))
def test_a_legacy_file_is_opened(tmp_path, protocol):
    (tmp_path / "w.zip").write_bytes(saved(_use_new_zipfile_serialization=False, pickle_protocol=protocol))
    container = open_container(str(tmp_path / "w.zip"), Limits())
    assert (container.name, container.byteorder, container.torch_version) == ("torch-legacy", "little", None)
    container.source.close()


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (pickle.dumps({}), "pickle"),
        (len(SAFETENSORS).to_bytes(8, "little") + SAFETENSORS + b"\0", "safetensors"),
    ],
)
def test_what_torch_save_did_not_write_is_opened(tmp_path, data, name):
    (tmp_path / "w.bin").write_bytes(data)
    container = open_container(str(tmp_path / "w.bin"), Limits())
    assert (container.name, container.byteorder, container.torch_version) == (name, "little", None)
    container.source.close()


@pytest.mark.parametrize(
    ("data", "described"),
    [
        (saved() + saved(), "a file of a distributed checkpoint"),
    ],
)
def test_what_is_recognised_but_not_read(tmp_path, data, described):
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(UnsupportedContainer) as caught:
        open_container(str(tmp_path / "x.pt"), Limits())
    assert caught.value.described == described


def test_the_limits_hold(tmp_path):
    (tmp_path / "x.pt").write_bytes(saved())
    with pytest.raises(LimitExceeded):
        open_container(str(tmp_path / "x.pt"), Limits(records=1))

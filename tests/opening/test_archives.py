"""Archives of checkpoints, read by Python and torch before and after a conversion."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
import torch

import ckptmove
from ckptmove.conversion.archive import UnsafeMember
from ckptmove.errors import (
    CrcMismatch,
    DamagedArchive,
    EmptyDirectory,
    LimitExceeded,
    MissingShard,
    MustBeUnpacked,
    NotACheckpoint,
    OutputExists,
    OutputIsFolder,
    OutputIsSource,
)
from ckptmove.formats.facts import facts_of
from ckptmove.io.source import FileSource
from ckptmove.limits import Limits
from ckptmove.opening import zip_members

FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}
KINDS = ["sb3", "wide", "streamed", "deflated", *FORMATS]


class Unseekable(io.BytesIO):
    """A pipe: zipfile writes sizes and CRCs after the data."""

    def seekable(self):
        return False

    def seek(self, *_where):
        raise io.UnsupportedOperation

    def tell(self):
        raise io.UnsupportedOperation


class Archives:
    """Makes archives below one folder."""

    def __init__(self, root, build):
        self.root = root
        self.build = build

    def files(self, device="cuda:0", **options):
        """The members that stable-baselines3 writes, in its order."""
        model, optimizer = self.build.trained()
        folder = self.root / "unpacked"
        self.build.save(folder / "v", {})
        self.build.save(folder / "p", model.state_dict(), device, **options)
        self.build.save(folder / "o", optimizer.state_dict(), device, **options)
        return {
            "data": json.dumps({"policy_class": "MlpPolicy", "num_timesteps": 100}).encode(),
            "pytorch_variables.pth": (folder / "v").read_bytes(),
            "policy.pth": (folder / "p").read_bytes(),
            "policy.optimizer.pth": (folder / "o").read_bytes(),
            "_stable_baselines3_version": b"2.3.2",
        }

    def zip(self, files, name="model.zip", *, compression=zipfile.ZIP_STORED, wide=False, file=None):
        path = self.root / name
        with zipfile.ZipFile(file or path, "w", compression) as archive:
            for member, data in files.items():
                info = zipfile.ZipInfo(member, (2021, 4, 11, 19, 9, 12))
                info.external_attr = 0o640 << 16
                info.compress_type = compression
                with archive.open(info, "w", force_zip64=wide) as member_file:
                    member_file.write(data)
        return path

    def tar(self, files, name="model.nemo", form=tarfile.GNU_FORMAT):
        path = self.root / name
        with tarfile.open(path, "w", format=form) as archive:
            for member, data in files.items():
                info = tarfile.TarInfo(member)
                info.size, info.mtime, info.mode = len(data), 1_700_000_000, 0o640
                archive.addfile(info, io.BytesIO(data))
        return path

    def make(self, kind, device="cuda:0", **options):
        files = self.files(device, **options)
        if kind in FORMATS:
            nemo = {"./model_config.yaml": b"name: x\n", "./model_weights.ckpt": files["policy.pth"]}
            return self.tar(nemo | {"./optimizer.pt": files["policy.optimizer.pth"]}, form=FORMATS[kind])
        if kind == "streamed":
            return self.streamed(files)
        compression = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
        return self.zip(files, compression=compression, wide=kind == "wide")

    def streamed(self, files, **options):
        pipe = Unseekable()
        path = self.zip(files, file=pipe, **options)
        path.write_bytes(pipe.getvalue())
        return path


@pytest.fixture
def archives(tmp_path, build):
    return Archives(tmp_path, build)


def unpacked(path):
    """Names, bytes and attributes of the members, as Python reads them."""
    if path.read_bytes().startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            return {
                info.filename: (archive.read(info), info.date_time, info.external_attr, info.extra)
                for info in archive.infolist()
            }
    with tarfile.open(path) as archive:
        return {
            info.name: (archive.extractfile(info).read() if info.isfile() else None, info.mtime, info.mode, info.type)
            for info in archive.getmembers()
        }


def loaded(data):
    """The object, and the tags of its storages as torch meets them."""
    tags = []

    def record(storage, tag):
        tags.append(tag)
        return storage

    return torch.load(io.BytesIO(data), map_location=record, weights_only=True), tags


def tensors_of(tree, path=""):
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_of(value, f"{path}.{key}")


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_stable_baselines3(archives):
    path = archives.make("wide")
    inventory = ckptmove.inspect(path, check=True).inventory
    assert (inventory.container, inventory.layout) == ("archive", "stable-baselines3")
    assert inventory.size_bytes == path.stat().st_size
    assert {one.path: (one.roles, one.container, one.tensors) for one in inventory.files} == {
        "policy.optimizer.pth": (("optimizer",), "torch-zip", 12),
        "policy.pth": (("model",), "torch-zip", 4),
        "pytorch_variables.pth": (("other",), "torch-zip", 0),
    }
    assert inventory.files[1].size_bytes == len(unpacked(path)["policy.pth"][0])
    assert "policy.pth.0.weight" in {tensor.name for tensor in inventory.tensors}
    assert [one.where for one in inventory.optimizers] == ["policy.optimizer.pth"]
    assert inventory.facts == ()


@pytest.mark.parametrize("kind", FORMATS)
def test_nemo(archives, kind):
    inventory = ckptmove.inspect(archives.make(kind), check=True).inventory
    assert (inventory.container, inventory.layout) == ("archive", "nemo")
    assert [one.path for one in inventory.files] == ["model_weights.ckpt", "optimizer.pt"]
    assert [one.roles for one in inventory.files] == [("model",), ("optimizer",)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_says_what_the_directory_in_it_says(archives, kind, tmp_path):
    path = archives.make(kind)
    folder = tmp_path / "directory"
    for name, (data, *_) in unpacked(path).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    packed, plain = ckptmove.inspect(path, outline=True), ckptmove.inspect(folder, outline=True)
    assert packed.inventory.tensors == plain.inventory.tensors
    assert packed.inventory.storages == plain.inventory.storages
    assert packed.inventory.layout == plain.inventory.layout
    assert [one.code for one in packed.findings] == [one.code for one in plain.findings]
    assert packed.outline[1:] == plain.outline[1:]
    assert packed.outline[0].description == f"archive ({len(unpacked(path))})"
    assert packed.inventory.size_bytes == path.stat().st_size


def test_names_may_begin_at_the_top_of_the_archive(archives):
    files = {f"././{name}": data for name, data in archives.files().items()}
    inventory = ckptmove.inspect(archives.zip(files)).inventory
    assert [one.path for one in inventory.files] == ["policy.optimizer.pth", "policy.pth", "pytorch_variables.pth"]


def test_a_run_that_was_zipped_with_its_folder(archives, build):
    folder = build.hf_trainer(shards=2)
    files = {f"{path.relative_to(folder.parent)}": path.read_bytes() for path in folder.rglob("*")}
    path = archives.zip({"checkpoint-2/": b""} | files, compression=zipfile.ZIP_DEFLATED)
    inventory = ckptmove.inspect(path).inventory
    assert inventory.layout == "hf-trainer"
    assert "counter" in inventory.contents
    assert {one.roles for one in inventory.files if "pytorch_model" in one.path} == {("model",)}
    del files["checkpoint-2/pytorch_model-00001-of-00002.bin"]
    with pytest.raises(MissingShard, match="pytorch_model-00001-of-00002") as caught:
        ckptmove.inspect(archives.tar(files))
    assert caught.value.path.endswith("model.nemo/checkpoint-2/pytorch_model.bin.index.json")


def test_what_macos_puts_into_an_archive_is_nobodys_checkpoint(archives):
    files = archives.files()
    hidden = {"__MACOSX/._policy.pth": b"\0\x05\x16\x07", "._policy.pth": b"\0\x05", ".cache/x.pth": b"", "../y": b""}
    inventory = ckptmove.inspect(archives.zip(files | hidden)).inventory
    assert len(inventory.files) == 3


@pytest.mark.parametrize("kind", ["sb3", "gnu"])
def test_the_bytes_of_tensors_are_not_read(archives, build, kind, monkeypatch):
    build.save(archives.root / "big", {"0.weight": torch.zeros(1 << 22)}, "cuda:0")
    files = {"policy.pth": (archives.root / "big").read_bytes()}
    path = archives.zip(files) if kind == "sb3" else archives.tar(files)
    done = []
    read, blocks = FileSource.read, FileSource.blocks

    def counted(self, start, end):
        done.append(end - start)
        return read(self, start, end)

    def counted_blocks(self, span, block_bytes, buffers=1):
        done.append(span.nbytes)
        return blocks(self, span, block_bytes)

    monkeypatch.setattr(FileSource, "read", counted)
    monkeypatch.setattr(FileSource, "blocks", counted_blocks)
    assert ckptmove.inspect(path).inventory.tensors[0].nbytes == 1 << 24
    assert sum(done) < 1 << 19


# --- convert ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "cuda:1", "mps"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_sees_the_planned_tags_and_the_same_values_in_every_member(archives, kind, target, tmp_path):
    path, output = archives.make(kind), tmp_path / "out"
    result = ckptmove.convert(path, to=target, output=output)
    assert (result.output, result.bytes_copied) == (str(output), output.stat().st_size)
    edits = {edit.storage: edit.target for edit in result.plan.edits}
    inventory = ckptmove.inspect(path).inventory
    planned = {one.path: Counter() for one in inventory.files}
    for storage in inventory.storages:
        planned[storage.key.split("/")[0]][edits.get(storage.key, storage.device)] += 1
    before, after = unpacked(path), unpacked(output)
    assert list(after) == list(before)
    for name, (data, *told) in before.items():
        new, *new_told = after[name]
        assert new_told == told, name
        if name.removeprefix("./") not in planned:
            assert new == data
            continue
        tree, tags = loaded(new)
        assert Counter(tags) == planned[name.removeprefix("./")], name
        moved = dict(tensors_of(tree))
        assert moved.keys() == dict(tensors_of(loaded(data)[0])).keys()
        assert all(torch.equal(moved[key], old) for key, old in tensors_of(loaded(data)[0]))
    assert ckptmove.inspect(output, expect=target, check=True).plan.edits == ()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "deflated"])
def test_there_and_back_is_the_same_archive(archives, kind, tmp_path):
    path = archives.make(kind)
    ckptmove.convert(path, to="xpu:1", output=tmp_path / "away")
    assert (tmp_path / "away").read_bytes() != path.read_bytes()
    ckptmove.convert(tmp_path / "away", to="cuda:0", output=tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_that_is_as_asked_is_copied_as_it_is(archives, kind):
    path = archives.make(kind)
    result = ckptmove.convert(path, to="cuda:0")
    assert result.plan.is_empty
    assert result.output == f"{path.with_suffix('')}.cuda0{path.suffix}"
    assert Path(result.output).read_bytes() == path.read_bytes()
    assert result.notes == ()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_lengths_that_stand_behind_the_bytes(archives, compression, tmp_path):
    path = archives.streamed(archives.files(), compression=compression, wide=True)
    ckptmove.convert(path, to="cpu", output=tmp_path / "out.zip")
    assert loaded(unpacked(tmp_path / "out.zip")["policy.pth"][0])[1] == ["cpu"] * 4


def test_links_and_folders_in_a_tar_pass_as_they_are(archives, tmp_path):
    path = archives.make("pax")
    with tarfile.open(path, "a") as archive:
        for kind, name in ((tarfile.DIRTYPE, "logs"), (tarfile.SYMTYPE, "best.ckpt"), (tarfile.LNKTYPE, "last.ckpt")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "" if kind == tarfile.DIRTYPE else "model_weights.ckpt"
            archive.addfile(info)
    ckptmove.convert(path, to="cpu", output=tmp_path / "out.nemo")
    before, after = unpacked(path), unpacked(tmp_path / "out.nemo")
    assert list(after) == list(before)
    assert [after[name] for name in ("logs", "best.ckpt")] == [before[name] for name in ("logs", "best.ckpt")]
    assert loaded(after["last.ckpt"][0] or after["./model_weights.ckpt"][0])[1] == ["cpu"] * 4


def test_what_was_compressed_is_stored_where_it_changes(archives, tmp_path):
    result = ckptmove.convert(archives.make("deflated"), to="cpu", output=tmp_path / "out.zip")
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        stored = {info.filename for info in archive.infolist() if info.compress_type == zipfile.ZIP_STORED}
    assert stored == {"policy.pth", "policy.optimizer.pth"}
    (note,) = result.notes
    assert note.endswith(": policy.optimizer.pth, policy.pth")


def test_only_what_is_named_moves(archives, tmp_path):
    path = archives.make("wide")
    kept = ckptmove.convert(path, to="cpu", keep=["policy.pth.*"], output=tmp_path / "kept.zip")
    assert {kept_one.name for kept_one in kept.plan.kept} >= {"policy.pth.0.weight"}
    before, after = unpacked(path), unpacked(tmp_path / "kept.zip")
    assert after["policy.pth"] == before["policy.pth"]
    assert after["policy.optimizer.pth"] != before["policy.optimizer.pth"]
    mapped = ckptmove.convert(path, map_location={"cuda:*": "cuda:3"}, dry_run=True)
    assert {edit.target for edit in mapped.plan.edits} == {"cuda:3"}
    assert mapped.output is None
    assert sorted(one.name for one in tmp_path.iterdir()) == ["kept.zip", "model.zip", "unpacked"]


@pytest.mark.parametrize("kind", ["stored", "deflated", "tar"])
def test_a_cast(archives, build, kind, tmp_path):
    build.save(tmp_path / "w", {"0.weight": torch.tensor([1 / 3, 1e300], dtype=torch.float64)}, "cuda:0")
    files = {"a.txt": b"hello", "w.pt": (tmp_path / "w").read_bytes()}
    compression = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
    path = archives.tar(files) if kind == "tar" else archives.zip(files, compression=compression)
    result = ckptmove.convert(path, to="mps", cast=True, output=tmp_path / "out")
    tree, tags = loaded(unpacked(tmp_path / "out")["w.pt"][0])
    assert torch.equal(tree["0.weight"], torch.tensor([1 / 3, torch.inf]))
    assert tags == ["mps"]
    assert any("1 value was too large" in note for note in result.notes)


def test_an_archive_without_any_device(archives, tmp_path):
    path = archives.zip({"model.safetensors": safetensors.torch.save({"0.weight": torch.ones(3)})})
    told = ckptmove.convert(path, to="cpu")
    assert told.output is None
    assert told.notes[0].startswith(f"{facts_of('safetensors').why_no_devices}; ")
    assert "-o OUT" in told.notes[0]
    ckptmove.convert(path, to="cpu", output=tmp_path / "copy.zip")
    assert (tmp_path / "copy.zip").read_bytes() == path.read_bytes()


def test_an_output_is_not_lost(archives, tmp_path):
    path = archives.make("sb3")
    with pytest.raises(OutputIsSource):
        ckptmove.convert(path, to="cpu", output=path, force=True)
    with pytest.raises(OutputIsFolder):
        ckptmove.convert(path, to="cpu", output=tmp_path)
    (tmp_path / "there.zip").write_text("mine")
    with pytest.raises(OutputExists):
        ckptmove.convert(path, to="cpu", output=tmp_path / "there.zip")
    assert (tmp_path / "there.zip").read_text() == "mine"
    ckptmove.convert(path, to="cpu", output=tmp_path / "there.zip", force=True)
    assert ckptmove.inspect(tmp_path / "there.zip", expect="cpu").plan.edits == ()


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path, needle, after=0):
    data = bytearray(path.read_bytes())
    at = data.index(needle) + after
    data[at] ^= 0xFF
    path.write_bytes(data)


def facts(path):
    return [(fact.kind, fact.record) for fact in ckptmove.inspect(path, check=True).inventory.facts]


def names(folder):
    return sorted(one.name for one in folder.iterdir())


def test_a_flipped_bit_in_a_file_beside_the_checkpoints(archives, tmp_path):
    path = archives.make("sb3")
    flip(path, b"MlpPolicy")
    assert ckptmove.inspect(path).inventory.facts == ()
    assert facts(path) == [("crc-mismatch", "data")]
    before = names(tmp_path)
    with pytest.raises(CrcMismatch, match="'data'"):
        ckptmove.convert(path, to="cpu")
    assert names(tmp_path) == before


@pytest.mark.parametrize("kind", ["sb3", "gnu"])
def test_a_flipped_bit_in_a_tensor(archives, kind, tmp_path):
    path = archives.make(kind)
    weight = archives.build.trained()[0].state_dict()["0.weight"]
    flip(path, weight.numpy().tobytes())
    (fact,) = ckptmove.inspect(path, check=True).inventory.facts
    assert fact.storage_key.split("/")[0] in {"policy.pth", "model_weights.ckpt"}
    before = names(tmp_path)
    with pytest.raises(CrcMismatch, match=r"'(policy\.pth|model_weights\.ckpt)/p/data/0'"):
        ckptmove.convert(path, to="cpu")
    assert names(tmp_path) == before


def test_a_stream_without_crcs_is_held_against_that_of_the_zip(archives, tmp_path):
    path = archives.make("sb3", _use_new_zipfile_serialization=False)
    result = ckptmove.convert(path, to="cpu", output=tmp_path / "sound.zip")
    assert result.notes == ()
    weight = archives.build.trained()[0].state_dict()["0.weight"]
    flip(path, weight.numpy().tobytes())
    assert facts(path) == [("crc-mismatch", "policy.pth")]
    with pytest.raises(CrcMismatch, match=r"'policy\.pth'"):
        ckptmove.convert(path, to="cpu")


def test_a_stream_without_crcs_in_a_tar_is_copied_unchecked(archives, tmp_path):
    path = archives.make("ustar", _use_new_zipfile_serialization=False)
    assert facts(path) == []
    result = ckptmove.convert(path, to="cpu", output=tmp_path / "out.nemo")
    (note,) = result.notes
    assert "CRC" in note
    assert note.endswith(": model_weights.ckpt, optimizer.pt")


def test_a_compressed_member_that_is_damaged(archives):
    path = archives.make("deflated")
    with zipfile.ZipFile(path) as archive:
        at = {info.filename: info.header_offset + 30 + len(info.filename) for info in archive.infolist()}
        last = archive.getinfo("policy.pth").compress_size - 20
    data = bytearray(path.read_bytes())
    data[at["data"] + 20] ^= 0xFF
    path.write_bytes(data)
    assert facts(path) == [("crc-mismatch", "data")]
    with pytest.raises(CrcMismatch, match="'data'"):
        ckptmove.convert(path, to="cpu")
    data[at["policy.pth"] + last] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CrcMismatch, match=r"'policy\.pth'"):
        ckptmove.inspect(path)


def test_a_compressed_member_that_is_damaged_from_its_first_byte_on(archives):
    path = archives.make("deflated")
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("policy.pth")
    data = bytearray(path.read_bytes())
    data[info.header_offset + 30 + len(info.filename)] |= 0b110  # a kind of block that deflate does not have
    path.write_bytes(data)
    with pytest.raises(NotACheckpoint, match=r"policy\.pth: .*inflated"):
        ckptmove.inspect(path)


# --- refused and skipped members --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_no_name_leads_anywhere(archives, form, tmp_path):
    files = archives.files()
    bad = {f"../{tmp_path.name}-out/policy.pth": files["policy.pth"], "/etc/policy.pth": files["policy.pth"]}
    path = getattr(archives, form)(bad)
    with pytest.raises(UnsafeMember):
        ckptmove.convert(path, to="cpu", output=tmp_path / "out")
    assert {one.path for one in ckptmove.inspect(path).inventory.files} == set(bad)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path.parent / f"{tmp_path.name}-out").exists()


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_two_members_of_one_name(archives, form):
    files = archives.files()
    path = getattr(archives, form)(files | {"./policy.pth": files["policy.pth"]})
    with pytest.raises(MustBeUnpacked, match=r"two .*'policy\.pth'") as caught:
        ckptmove.inspect(path)
    assert (caught.value.path, caught.value.form) == (str(path), form)


def test_members_that_share_bytes(archives):
    files = archives.files()
    path = archives.zip({"a.pth": files["policy.pth"], "b.pth": archives.zip(files, "inner").read_bytes()})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        second = archive.getinfo("b.pth")
    inner = bytes(data).index(b"PK\x03\x04", second.header_offset + 4)
    local = bytearray(data[second.header_offset : second.header_offset + 35])
    # The second central entry points into the bytes of the first member, at a copy of its header.
    first = 30 + len("a.pth") + 100
    data[first : first + 35] = local
    at = bytes(data).rindex(b"b.pth") - 46 + 42
    data[at : at + 4] = struct.pack("<L", first)
    path.write_bytes(data)
    assert inner > first
    with pytest.raises(DamagedArchive, match=r"'b\.pth' overlaps"):
        ckptmove.inspect(path)


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_a_million_members(archives, form):
    path = getattr(archives, form)({str(number): b"" for number in range(20)})
    with pytest.raises(LimitExceeded, match="members"):
        ckptmove.inspect(path, limits=Limits(entries=19))
    with pytest.raises(EmptyDirectory) as caught:
        ckptmove.inspect(path, limits=Limits(entries=20))
    assert caught.value.files == 20


@pytest.mark.parametrize(
    ("form", "found"), [("zip", "a zip archive without data.pkl"), ("tar", "a tar archive")], ids=["zip", "tar"]
)
def test_an_archive_without_a_checkpoint(archives, form, found):
    inner = archives.make("sb3")
    path = getattr(archives, form)({"README.md": b"hello", "run/model.zip": inner.read_bytes()}, "outer")
    with pytest.raises(EmptyDirectory) as caught:
        ckptmove.inspect(path)
    assert caught.value.__context__ is None
    assert caught.value.found.startswith(f"{found}, ")
    assert "'run/model.zip'" in caught.value.found
    assert (caught.value.form, caught.value.inner, caught.value.files) == (form, "run/model.zip", 2)
    with pytest.raises(EmptyDirectory):
        ckptmove.convert(path, to="cpu")


def test_an_archive_in_an_archive_or_a_directory_is_one_of_the_other_files(archives, tmp_path):
    files = archives.files()
    inner = archives.make("deflated").read_bytes()
    path = archives.zip({"policy.pth": files["policy.pth"], "inner.zip": inner}, "outer.zip")
    result = ckptmove.inspect(path, outline=True)
    assert [one.path for one in result.inventory.files] == ["policy.pth"]
    described = {line.name: line.description for line in result.outline if line.depth == 1}
    assert described["inner.zip"].startswith("a zip archive without data.pkl; it holds ")
    ckptmove.convert(path, to="cpu", output=tmp_path / "out.zip")
    assert unpacked(tmp_path / "out.zip")["inner.zip"][0] == inner
    (tmp_path / "d").mkdir()
    for name in ("model.zip", "outer.zip"):
        (tmp_path / name).rename(tmp_path / "d" / name)
    (tmp_path / "d" / "policy.pth").write_bytes(files["policy.pth"])
    assert [one.path for one in ckptmove.inspect(tmp_path / "d").inventory.files] == ["policy.pth"]


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_a_file_that_must_have_been_a_checkpoint(archives, form):
    path = getattr(archives, form)(archives.files() | {"best.pth": b""})
    with pytest.raises(NotACheckpoint, match="an empty file") as caught:
        ckptmove.inspect(path)
    assert caught.value.path == f"{path}/best.pth"


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_a_damaged_member_is_named(archives, form):
    files = archives.files()
    path = getattr(archives, form)(files | {"policy.pth": files["policy.pth"][:-40]})
    with pytest.raises(DamagedArchive, match="truncated") as caught:
        ckptmove.inspect(path)
    assert caught.value.path == f"{path}/policy.pth"


def test_an_encrypted_member(archives):
    path = archives.make("sb3")
    data = bytearray(path.read_bytes())
    at = bytes(data).rindex(b"policy.pth") - 46
    data[at + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(MustBeUnpacked, match=r"member 'policy\.pth' is encrypted") as caught:
        ckptmove.inspect(path)
    assert caught.value.locked


@pytest.mark.parametrize(("method", "name"), [(zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "lzma")])
def test_a_member_that_only_unpacking_reads(archives, method, name):
    path = archives.make("sb3")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("log.txt", "hello" * 100, method)
    with pytest.raises(MustBeUnpacked, match=rf"'log\.txt' .* {name}") as caught:
        ckptmove.inspect(path)
    assert not caught.value.locked


def test_a_record_of_another_method_in_a_checkpoint_is_damage(tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("w/notes", "hello" * 100, zipfile.ZIP_BZIP2)
    with pytest.raises(DamagedArchive, match=r"'w/notes' .* bzip2"):
        ckptmove.inspect(path)


def test_bytes_before_a_zip(archives):
    path = archives.make("sb3")
    path.write_bytes(b"PK\x03\x04!" + path.read_bytes())
    with pytest.raises(DamagedArchive, match="5 bytes"):
        ckptmove.inspect(path)


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_a_distributed_checkpoint(archives, form):
    path = getattr(archives, form)(archives.files() | {"run/__0_0.distcp": b"x", "run/.metadata": b"x"})
    with pytest.raises(MustBeUnpacked, match="a distributed checkpoint"):
        ckptmove.inspect(path)


def test_a_member_with_holes(archives):
    path = archives.make("pax")
    with tarfile.open(path, "a", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("sparse.ckpt")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
        archive.addfile(info)
    with pytest.raises(MustBeUnpacked, match=r"'sparse\.ckpt' is sparse"):
        ckptmove.inspect(path)


def test_as_much_is_inflated_as_fits_in_memory(archives, monkeypatch, tmp_path):
    files = archives.files()
    held = sum(len(data) for name, data in files.items() if name.endswith(".pth"))
    large = {"log.txt": b"hello, world\n" * 10_000}
    path = archives.zip(files | large, compression=zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(zip_members, "MOST_INFLATED_BYTES", held)
    assert len(ckptmove.inspect(path).inventory.files) == 3
    ckptmove.convert(path, to="cpu", output=tmp_path / "out.zip")
    monkeypatch.setattr(zip_members, "MOST_INFLATED_BYTES", held - 1)
    with pytest.raises(MustBeUnpacked, match=r"\.pth' .*inflate"):
        ckptmove.inspect(path)


def test_what_is_compressed_twice_is_counted_as_what_it_becomes(archives, build, monkeypatch, tmp_path):
    build.save(tmp_path / "plain.pth", {"w": torch.zeros(50_000)}, "cuda:0")
    twice = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "plain.pth") as plain, zipfile.ZipFile(twice, "w") as packed:
        for info in plain.infolist():
            is_storage = info.filename.endswith("/data/0")
            method = zipfile.ZIP_DEFLATED if is_storage else zipfile.ZIP_STORED
            packed.writestr(info.filename, plain.read(info), method)
    path = archives.zip({"w.pth": twice.getvalue()}, compression=zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(zip_members, "MOST_INFLATED_BYTES", 200_000)
    assert ckptmove.inspect(path).inventory.tensors[0].shape == (50_000,)
    with pytest.raises(MustBeUnpacked, match=r"'w\.pth' .*\(20\d,"):
        ckptmove.convert(path, to="cpu", output=tmp_path / "out.zip")
    assert not (tmp_path / "out.zip").exists()


def test_a_member_that_inflates_to_more_than_it_says(archives):
    path = archives.make("deflated")
    data = bytearray(path.read_bytes())
    at = bytes(data).rindex(b"pytorch_variables.pth") - 46
    data[at + 24 : at + 28] = struct.pack("<L", 100)
    at = bytes(data).index(b"pytorch_variables.pth") - 30
    data[at + 22 : at + 26] = struct.pack("<L", 100)
    path.write_bytes(data)
    with pytest.raises(CrcMismatch, match=r"pytorch_variables\.pth"):
        ckptmove.inspect(path)


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_anywhere_only_our_errors_escape(archives, kind, tmp_path):
    data = archives.make(kind).read_bytes()
    end = len(data) if kind not in FORMATS else data.rindex(b"PK\x05\x06")
    for length in range(0, end, 499):
        (tmp_path / "cut").write_bytes(data[:length])
        with warnings.catch_warnings(), pytest.raises(ckptmove.errors.CkptMoveError):
            ckptmove.inspect(tmp_path / "cut")


def test_the_members_of_a_tar_may_stand_in_any_order(archives, tmp_path):
    files = archives.files("cuda:0")
    path = archives.tar({"z.ckpt": files["policy.pth"], "a.ckpt": files["policy.optimizer.pth"], "m.txt": b"between"})
    ckptmove.convert(path, to="cuda:10", output=tmp_path / "out.nemo")
    assert list(unpacked(tmp_path / "out.nemo")) == ["z.ckpt", "a.ckpt", "m.txt"]
    ckptmove.convert(tmp_path / "out.nemo", to="cuda:0", output=tmp_path / "back.nemo")
    assert unpacked(tmp_path / "back.nemo") == unpacked(path)


def test_without_checks_the_new_archive_is_the_same(archives, tmp_path):
    path = archives.make("sb3")
    for name, check in (("a.zip", True), ("b.zip", False)):
        ckptmove.convert(path, to="cuda:10", output=tmp_path / name, check=check)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()

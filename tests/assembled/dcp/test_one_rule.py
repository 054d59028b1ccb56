"""Each command reports the damage of a piece in the same way, for tensors and for other objects.

As for a file with a damaged storage, ``inspect`` and ``verify`` exit 1, and ``convert`` writes nothing and exits 3.
"""

from __future__ import annotations

import io
import shutil
import zipfile
from dataclasses import replace

import pytest
import torch

import ckptmove
from ckptmove.errors import CrcMismatch, DamagedArchive, DamagedPickle

KINDS = {"crc": ("F801", CrcMismatch), "form": ("F802", DamagedArchive)}
#: For each of the two pieces: the bytes to change, and their replacement.
DAMAGE = {
    "the value": (lambda piece, value: piece.index(value), "crc"),
    "the pickle": (lambda piece, value: piece.index(b"\x80\x02") + 2, "crc"),
    "the header": (lambda piece, value: 0, "form"),
    "the directory": (lambda piece, value: len(piece) - 20, "form"),
    "the name of a record": (lambda piece, value: piece.rindex(b"version"), "form"),
}
WORD = "a word that is saved"


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.fixture
def folder(distributed, tmp_path):
    tree = {"w": (torch.full((2,), 7.5), [(0, (0,), (2,))])}
    return distributed.save_ranks(tmp_path / "run", tree, {"o": (0, saved(WORD))})


def spoil(distributed, folder, name, damage):
    """Change a bit in a piece; return the expected message."""
    place = next(one for key, one in distributed.metadata_of(folder).storage_data.items() if key.fqn == name)
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    piece = bytes(data[place.offset : place.offset + place.length])
    find, kind = DAMAGE[damage]
    value = torch.full((2,), 7.5).numpy().tobytes() if name == "w" else WORD.encode()
    data[place.offset + find(piece, value)] ^= 1
    path.write_bytes(data)
    return KINDS[kind]


def failed(result):
    return [check.name for check in result.checks if check.status == "failed"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["w", "o"])
def test_a_damaged_piece_is_an_answer_and_no_error_of_the_input(distributed, folder, tmp_path, name, damage):
    code, error = spoil(distributed, folder, name, damage)
    (finding,) = ckptmove.inspect(folder, check=True).findings
    assert (finding.code, finding.where) == (code, (f"__0_0.distcp/{name}",))
    # Without --check no tensor is read, and only the pickles of other objects.
    codes = [finding.code for finding in ckptmove.inspect(folder).findings]
    assert codes == [code] * (name == "o" and damage != "the name of a record")
    result = ckptmove.verify(folder, to="cpu")
    assert failed(result)[:1] == ["file"]
    assert code in {finding.code for finding in result.findings}
    with pytest.raises(error):
        ckptmove.convert(folder, to="cpu", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    ckptmove.convert(folder, to="cpu", output=tmp_path / "out", check=False)
    assert (tmp_path / "out" / "__0_0.distcp").read_bytes() == (folder / "__0_0.distcp").read_bytes()


def test_it_is_the_rule_of_a_storage_in_a_file(tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"w": torch.full((2,), 7.5)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((2,), 7.5).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert [finding.code for finding in ckptmove.inspect(path, check=True).findings] == ["F801"]
    assert failed(ckptmove.verify(path, to="cpu")) == ["file"]
    with pytest.raises(CrcMismatch):
        ckptmove.convert(path, to="cuda:0")


def test_what_says_what_there_is_cannot_be_damaged(distributed, folder, tmp_path):
    """Damage in .metadata is an error, as in ``data.pkl`` of a file."""
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data.replace(b"storage_data", b"storage_dada"))
    for command in (
        lambda: ckptmove.inspect(folder),
        lambda: ckptmove.inspect(folder, check=True),
        lambda: ckptmove.verify(folder, to="cpu"),
        lambda: ckptmove.convert(folder, to="cpu", output=tmp_path / "out"),
    ):
        with pytest.raises((DamagedArchive, DamagedPickle)):
            command()


def test_what_is_cut_off_is_not_copied(folder, tmp_path):
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])
    for options in ({}, {"check": False}, {"dry_run": True}):
        with pytest.raises(DamagedArchive, match=r"__0_0\.distcp/o"):
            ckptmove.convert(folder, to="cpu", output=tmp_path / "out", **options)
    assert ckptmove.convert(folder, to="cpu").output is None  # nothing was to be copied


def test_a_file_that_is_not_named_is_copied(folder, tmp_path):
    (folder / "__7_0.distcp").write_bytes(b"what more ranks have left")
    ckptmove.convert(folder, to="cpu", output=tmp_path / "out")
    assert (tmp_path / "out" / "__7_0.distcp").exists()


def test_both_sides_of_a_comparison_name_what_they_cannot_compare(distributed, folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    for name in ("w", "o"):
        spoil(distributed, other, name, "the header")
    result = ckptmove.diff(str(folder), str(other))
    assert {one.name: str(other) in one.reason for one in result.uncompared} == {"w": True, "o": True}
    assert result.changed == ()


def deflated(piece):
    """A torch.save with its records deflated, as other programs write it again."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(piece)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["w", "o"])
def test_what_is_deflated_is_compared_too(distributed, tmp_path, name):
    """Its CRC is that of the inflated bytes, so it cannot be checked while the bytes are copied."""
    noise = torch.randint(256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    piece = deflated(saved(noise if name == "w" else [noise]))
    whole = {"w": (noise, [(0, (0,), (4000,))])}
    folder = distributed.save_ranks(tmp_path / "run", whole, {"o": (0, saved(WORD))})
    data = (folder / "__0_0.distcp").read_bytes()

    def point(metadata):
        index = next(key for key in metadata.storage_data if key.fqn == name)
        place = metadata.storage_data[index]
        metadata.storage_data[index] = replace(place, offset=len(data), length=len(piece))

    distributed.change(folder, point)
    (folder / "__0_0.distcp").write_bytes(data + piece)
    ckptmove.convert(folder, to="cpu", output=tmp_path / "out")
    assert (tmp_path / "out" / "__0_0.distcp").read_bytes() == data + piece
    with zipfile.ZipFile(io.BytesIO(piece)) as archive:
        record = next(one for one in archive.infolist() if "/data/0" in one.filename)
    spoilt = bytearray(data + piece)
    spoilt[len(data) + piece.index(b"PK\x01\x02") - 40 - record.compress_size // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(spoilt)
    with pytest.raises((CrcMismatch, DamagedArchive)):
        ckptmove.convert(folder, to="cpu", output=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_piece_of_fewer_bytes_than_its_tensor_is_damaged(distributed, folder, tmp_path):
    """Its CRC is right: only .metadata and its own pickle show that bytes are missing."""
    short = saved(torch.full((1,), 7.5)).replace(b"K\x01\x85", b"K\x02\x85").replace(b"cpuq\x04K\x01", b"cpuq\x04K\x02")
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(short)) as old, zipfile.ZipFile(buffer, "w") as new:
        for record in old.infolist():
            data = old.open(record)
            data._expected_crc = None  # its pickle was changed
            new.writestr(record.filename, data.read())
    data = (folder / "__0_0.distcp").read_bytes()

    def point(metadata):
        index = next(key for key in metadata.storage_data if key.fqn == "w")
        place = metadata.storage_data[index]
        metadata.storage_data[index] = replace(place, offset=len(data), length=len(buffer.getvalue()))

    distributed.change(folder, point)
    (folder / "__0_0.distcp").write_bytes(data + buffer.getvalue())
    with pytest.raises(RuntimeError):
        torch.load(io.BytesIO(buffer.getvalue()))
    (finding,) = ckptmove.inspect(folder, check=True).findings
    assert (finding.code, finding.where) == ("F802", ("__0_0.distcp/w",))
    with pytest.raises(DamagedArchive):
        ckptmove.convert(folder, to="cpu", output=tmp_path / "out")

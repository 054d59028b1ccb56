"""Files that ckptmove refuses and torch may load all the same: the error names what a load would run."""

from __future__ import annotations

import io
import zipfile
from contextlib import suppress

import pytest
import torch

import ckptmove
from ckptmove.errors import CkptMoveError, MustBeUnpacked
from tests.hostile.conftest import saved

EVIL = b"\x80\x04}X\x01\0\0\0xcbuiltins\nprint\nX\x04\0\0\0here\x85Rs."
DANGEROUS = EVIL.replace(b"print", b"exec")


def changed(archives, pickle, **changes):
    record = archives.Record(b"a/data.pkl", pickle, **changes)
    return archives.build(*archives.records(data_pkl=record))


#: How a file is made with a pickle, and whether the installed torch was seen to run that pickle.
DAMAGED = {
    "a CRC in the directory": (lambda a, p: changed(a, p, central={"crc": 7}), True),
    "encrypted before the data": (lambda a, p: changed(a, p, local={"flags": 1}), True),
    "a method before the data": (lambda a, p: changed(a, p, local={"method": 99}), True),
    "data.pkl twice": (
        lambda a, p: a.build(*a.records(data_pkl=a.Record(b"a/data.pkl", p)), a.Record(b"a/data.pkl", a.pickle)),
        True,
    ),
    "encrypted in the directory": (lambda a, p: changed(a, p, central={"flags": 1}), False),
    "a method in the directory": (lambda a, p: changed(a, p, central={"method": 99}), False),
    "another folder": (
        lambda a, p: a.build(*a.records(data_pkl=a.Record(b"a/data.pkl", p)), a.Record(b"b/x", b"")),
        False,
    ),
    "a name before the data": (lambda a, p: changed(a, p, local_name=b"a/data.pkx"), True),
    "a name in the directory": (
        lambda a, p: a.build(
            *a.records(data_pkl=a.Record(b"a/data.pkx", p, local_name=b"a/data.pkl")), a.Record(b"a/x.pt", b"PK\5\6")
        ),
        False,
    ),
    "an unknown opcode at the end": (lambda a, p: changed(a, p[:-1] + b"\xff"), True),
    "bytes before the archive": (lambda a, p: b"#!/bin/sh\n" + changed(a, p), False),
    "two archives": (lambda a, p: a.build(*a.records()) + changed(a, p), False),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_the_error_names_what_a_load_would_run(archives, file_of, name) -> None:
    with pytest.raises(CkptMoveError) as caught:
        ckptmove.inspect(file_of(DAMAGED[name][0](archives, DANGEROUS)))
    assert caught.value.runs == ("builtins.exec",)
    assert "builtins.exec" in caught.value.message
    assert "do not load it" in caught.value.hint


@pytest.mark.parametrize("name", DAMAGED)
def test_what_torch_does_with_it(archives, file_of, capsys, name) -> None:
    make, runs = DAMAGED[name]
    path = file_of(make(archives, EVIL))
    with suppress(Exception):  # whatever torch raises: the pickle has run before, or not
        torch.load(path, weights_only=False)
    assert (capsys.readouterr().out == "here\n") is runs


def test_the_names_of_a_damaged_file_without_danger(archives, file_of) -> None:
    with pytest.raises(CkptMoveError) as caught:
        ckptmove.inspect(file_of(changed(archives, archives.pickle, central={"crc": 7})))
    assert caught.value.runs == ()
    assert "torch" not in caught.value.hint


def test_a_member_that_is_only_said_to_be_encrypted(tmp_path) -> None:
    path = tmp_path / "models.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/config.pkl", DANGEROUS)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(MustBeUnpacked) as caught:
        ckptmove.inspect(path)
    assert caught.value.runs == ("builtins.exec",)


def test_a_file_of_a_folder_is_not_skipped(archives, tmp_path) -> None:
    (tmp_path / "model.pt").write_bytes(saved({"w": torch.ones(2)}))
    (tmp_path / "notes").write_bytes(b"#!/bin/sh\n" + changed(archives, DANGEROUS))
    [finding] = [one for one in ckptmove.inspect(str(tmp_path)).findings if one.code == "S702"]
    assert finding.where == ("notes",)
    assert "builtins.exec" in finding.message


def test_deflated_pickles_of_a_damaged_archive(file_of) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", DANGEROUS)
        archive.writestr("a/version", b"3\n")
    cut = stream.getvalue().partition(b"PK\1\2")[0]
    with pytest.raises(CkptMoveError) as caught:
        ckptmove.inspect(file_of(cut))
    assert caught.value.runs == ("builtins.exec",)


def test_build_on_a_module(file_of) -> None:
    """It replaces attributes of the module, which later names lead to."""
    module = b"\x80\x04X\x05\0\0\0torchX\x06\0\0\0_utils\x93\x94"
    result = ckptmove.inspect(file_of(module + b"0h\0}X\x01\0\0\0aX\x08\0\0\0builtinssb0h\0h\0\x93."))
    assert {use.name for use in result.inventory.globals if use.verdict == "dangerous"} == {
        "torch._utils",
        "torch._utils.__setstate__",
        "<computed>.<computed>",
    }

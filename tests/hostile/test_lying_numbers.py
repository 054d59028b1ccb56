"""Wrong numbers and keys: a finding or a one-line error, never a wrong result."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

import ckptmove
from ckptmove.errors import CkptMoveError, DamagedPickle
from fuzz.payloads import text
from fuzz.seeds import STORAGE, archive_of

DENSE = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE
BYTES = {"0": bytes(16)}


def one(tensor: bytes) -> bytes:
    return b"\x80\x02}" + text("w") + tensor + b"s."


@pytest.mark.parametrize("key", ["../0", "/etc/passwd", "..", "0/../../x", "0\0", "é", "\u202e0", "C:\\x", "-1", "00"])
def test_a_key_is_a_name_and_no_path(key, file_of, tmp_path) -> None:
    named = DENSE.replace(text("0"), text(key))
    path = file_of(archive_of(one(named), BYTES))
    found = ckptmove.inspect(path)
    assert [finding.code for finding in found.findings if finding.severity.value == "error"] == ["F802"]
    ckptmove.convert(path, to="cpu", output=str(tmp_path / "out.pt"))
    assert {entry.name for entry in tmp_path.iterdir()} == {"hostile.pt", "out.pt"}


@pytest.mark.parametrize(
    "tag", ["cüda:0", "cuda:٣", "cuda:0\0", "CUDA:0", "cuda:-1", "cuda:99999999999999999999", "", "cuda:0:0"]
)
def test_a_tag_that_torch_does_not_know_stays_what_it_is(tag, file_of, tmp_path) -> None:
    path = file_of(archive_of(one(DENSE.replace(text("cuda:0"), text(tag))), BYTES))
    assert [tensor.device for tensor in ckptmove.inspect(path).inventory.tensors] == [tag]
    done = ckptmove.convert(path, to="cuda:1", output=str(tmp_path / "out.pt"))
    assert [(edit.source, edit.target) for edit in done.plan.edits] == [(tag, "cuda:1")]
    assert [tensor.device for tensor in ckptmove.inspect(str(tmp_path / "out.pt")).inventory.tensors] == ["cuda:1"]


@pytest.mark.parametrize(
    "second",
    [
        STORAGE.replace(text("cuda:0"), text("cuda:1")),
        STORAGE.replace(b"FloatStorage", b"DoubleStorage"),
        STORAGE.replace(b"K\x04tQ", b"K\x08tQ"),
        STORAGE.replace(b"K\x04tQ", b"K\x02tQ"),
    ],
)
def test_one_storage_of_two_minds_is_what_torch_takes_it_for(second, file_of) -> None:
    other = b"ctorch._utils\n_rebuild_tensor_v2\n" + second
    path = file_of(archive_of(b"\x80\x02(" + DENSE + other + b"t.", BYTES))
    tags = []
    loaded = torch.load(path, map_location=lambda storage, tag: (tags.append(tag), storage)[1], weights_only=False)
    found = ckptmove.inspect(path).inventory
    assert [storage.device for storage in found.storages] == tags
    assert [(f"torch.{tensor.dtype}", tensor.shape) for tensor in found.tensors] == [
        (str(tensor.dtype), tensor.shape) for tensor in loaded
    ]


QUANTIZERS = {
    "none": b"N",
    "a number": b"K\1",
    "empty": b")",
    "of no scheme": b"(NG?\xf0\0\0\0\0\0\0K\0t",
    "of another scheme": b"(ctorch\nsparse_coo\nG?\xf0\0\0\0\0\0\0K\0t",
    "scales of text": b"(ctorch\nper_channel_affine\n" + text("x") + text("y") + b"K\0t",
    "scales of themselves": b"(ctorch\nper_channel_affine\n]q\x50h\x50ah\x50K\0t",
    "a scale of text": b"(ctorch\nper_tensor_affine\n" + text("x") + b"K\0t",
    "too many": b"(" + b"ctorch\nper_tensor_affine\n" * 1000 + b"t",
}


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_a_quantizer_of_the_wrong_type(quantizer, file_of, tmp_path) -> None:
    tensor = DENSE.replace(b"_rebuild_tensor_v2", b"_rebuild_qtensor").replace(b"FloatStorage", b"QInt8Storage")
    path = file_of(archive_of(one(tensor.replace(b"\x89cc", quantizer + b"\x89cc")), BYTES))
    with suppress(DamagedPickle):
        (found,) = ckptmove.inspect(path).inventory.tensors
        assert (found.kind, found.dtype, found.shape) == ("quantized", "qint8", (4,))
        ckptmove.convert(path, to="cpu", output=str(tmp_path / "out.pt"))


@pytest.mark.parametrize("kind", [b"EvilStorage", b"_StorageBase", b"FloatStorage2", b"Tensor", b"nn"])
def test_a_storage_class_that_is_none(kind, file_of) -> None:
    with pytest.raises(CkptMoveError) as caught:
        ckptmove.inspect(file_of(archive_of(one(DENSE.replace(b"FloatStorage", kind)), BYTES)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("numel", [5, 2**31, 2**60])
def test_a_storage_longer_than_its_record(numel, file_of) -> None:
    longer = DENSE.replace(b"K\x04tQ", b"\x8a\x08" + numel.to_bytes(8, "little") + b"tQ")
    [finding] = [
        one for one in ckptmove.inspect(file_of(archive_of(one(longer), BYTES))).findings if one.code == "F802"
    ]
    assert f"{4 * numel - 16:,} bytes" in finding.message

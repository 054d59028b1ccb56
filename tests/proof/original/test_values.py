"""Values that torch reads, and how two tensors are compared."""

from __future__ import annotations

import struct
import warnings

import pytest
import remaps
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove.comparison.counterparts import Counterparts
from ckptmove.conversion.conversion import Conversion
from ckptmove.io.part import MemorySource
from ckptmove.lazy.stored import StoredBytes
from ckptmove.model import Span, TensorRecord
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.errors import ConversionDiffers
from ckptmove.proof.original.against import OriginalTensors
from ckptmove.proof.original.content import common_end, may_be_cast
from ckptmove.proof.original.values import difference, digest
from ckptmove.proof.restored.pieces import as_stored

WHOLE = torch.arange(6.0).reshape(2, 3)
MODELS = {"model": {"w": WHOLE.clone()}, "ema": {"w": WHOLE + 1}}
RNG = torch.ones(8, dtype=torch.uint8)


def quantized(scale):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to remove them
        return torch.quantize_per_tensor(torch.ones(3), scale, 0, torch.qint8)


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        (WHOLE, WHOLE.clone(), ""),
        (WHOLE, WHOLE.t().contiguous().t(), ""),
        (WHOLE.half(), WHOLE, ""),
        (torch.ones(2, 3), torch.ones(1).expand(2, 3), ""),
        (torch.zeros(2).expand(3, 2), torch.zeros(2).expand(3, 2), ""),
        (torch.complex(WHOLE, WHOLE).conj(), torch.complex(WHOLE, -WHOLE), ""),
        (WHOLE, WHOLE + 1, ": other bits"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), ": other bits"),
        (WHOLE, WHOLE.reshape(3, 2), ": shape [2, 3] in place of [3, 2]"),
        (quantized(0.1), quantized(0.1), ""),
        (quantized(0.1), quantized(0.5), ": another scale"),
        (
            torch.arange(5.0).as_strided((3, 3), (1, 1)),
            torch.arange(7.0).as_strided((3, 3), (2, 1)),
            ": its elements overlap in a different way on each side",
        ),
    ],
)
def test_tensors_are_compared_bit_for_bit(mine, theirs, found):
    assert difference(mine, theirs) == found


def test_a_quantized_tensor_from_its_bytes_has_no_scale():
    values = quantized(0.1)
    stored = torch.empty(0, dtype=torch.qint8).set_(values.untyped_storage(), 0, (3,), (1,))
    assert difference(stored, values) == ""
    assert difference(stored, quantized(0.5)) == ": other bits"


def test_a_digest_is_that_of_form_and_elements():
    assert digest(WHOLE) == digest(WHOLE.t().contiguous().t())
    assert len({digest(WHOLE), digest(WHOLE.reshape(3, 2)), digest(WHOLE + 1)}) == 3
    assert digest(quantized(0.1)) != digest(quantized(0.5))
    assert digest(torch.ones(1).expand(4)) is None


def test_casts_that_a_conversion_may_make():
    assert may_be_cast(("float32", "int64"), ("bfloat16", "int64"))
    assert may_be_cast(("complex128",), ("complex64",))
    assert not may_be_cast(("float32",), ("bool",))
    assert not may_be_cast(("float32",), ())
    assert (common_end("a.b.c", "x.b.c"), common_end("a", "b")) == (2, 0)


@pytest.mark.parametrize(("byteorder", "code"), [("little", "<"), ("big", ">")])
def test_a_chunk_is_built_from_its_bytes(byteorder, code):
    data = struct.pack(f"{code}4f", *range(4))
    record = TensorRecord("w", "model", "cpu", "float32", (2,), (2,), "0", 1, 8)
    assert as_stored(StoredBytes(MemorySource("", data), Span(0, 16), byteorder), record).tolist() == [1, 3]


def test_a_deflated_storage_of_a_file_that_torch_refuses_is_inflated(tmp_path):
    source = tmp_path / "run.pth"
    source.write_bytes(remaps.deflated(remaps.run()))
    assert ckptmove.convert(source, compact=True, output=tmp_path / "new.pth", verify=True).verified


def test_a_tensor_that_was_not_paired_is_asked_for_in_vain(tmp_path):
    torch.save({"w": WHOLE}, tmp_path / "a.pth")
    with open_checkpoint(str(tmp_path / "a.pth")) as checkpoint, pytest.raises(LookupError):
        OriginalTensors(Counterparts(), checkpoint.inventory, None).tensor(checkpoint.inventory.tensors[0])


@pytest.mark.parametrize(
    ("mine", "theirs", "status", "unseen"),
    [
        (MODELS, {"net": MODELS["ema"], "ema_model": MODELS["model"]}, "passed", True),
        ({"w": WHOLE}, {"w": WHOLE.bool()}, "failed", False),
        ({"a": WHOLE}, {"a": WHOLE, "tied": WHOLE}, "failed", False),
        ({}, {"w": WHOLE}, "failed", False),
        ({"model": {"w": WHOLE}, "rng_state": RNG}, {"model": {"w": WHOLE, "b": WHOLE[0] + 1}}, "failed", False),
    ],
    ids=["roles", "dtype", "tied", "nothing", "other role"],
)  # fmt: skip
def test_what_is_not_shown_is_not_proven(tmp_path, mine, theirs, status, unseen):
    for name, tree in (("mine", mine), ("theirs", theirs)):
        torch.save(tree, tmp_path / f"{name}.pth")
    result = ckptmove.verify(tmp_path / "mine.pth", against=tmp_path / "theirs.pth")
    restore = next(check for check in result.checks if check.name == "restore")
    assert (restore.status, bool(dict(restore.evidence)["unseen"])) == (status, unseen), restore.detail
    assert not result.proven


@pytest.mark.filterwarnings("ignore")  # torch calls nested tensors a prototype
def test_values_of_nested_tensors_are_not_shown(tmp_path):
    for name, values in (("mine", WHOLE), ("theirs", WHOLE + 1)):
        torch.save({"w": torch.nested.nested_tensor([values]), "v": WHOLE}, tmp_path / f"{name}.pth")
    result = ckptmove.verify(tmp_path / "mine.pth", against=tmp_path / "theirs.pth")
    restore = next(check for check in result.checks if check.name == "restore")
    assert (restore.status, result.proven) == ("passed", False)
    assert "values of another layout: w" in restore.detail


def test_a_counter_of_averages_keeps_its_name(tmp_path):
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)))
    torch.save({"model": averaged.state_dict()}, tmp_path / "swa.pth")
    ckptmove.convert(tmp_path / "swa.pth", strip_prefix=True, output=tmp_path / "new.pth", verify=True)
    assert ckptmove.verify(tmp_path / "new.pth", against=tmp_path / "swa.pth").proven


def test_the_metadata_of_safetensors_is_no_loss(tmp_path):
    (tmp_path / "run").mkdir()
    save_file({"w": WHOLE}, tmp_path / "run" / "model.safetensors", {"format": "pt", "step": "1"})
    ckptmove.convert(tmp_path / "run", output=tmp_path / "a.pth", verify=True)
    assert ckptmove.verify(tmp_path / "a.pth", against=tmp_path / "run").proven


def test_an_output_of_another_kind_or_shape_differs(tmp_path, monkeypatch):
    torch.save({"w": WHOLE, "m": torch.empty(3, device="meta")}, tmp_path / "a.pth")
    prove = Conversion.prove
    for number, value in enumerate((WHOLE.to_sparse(), WHOLE.reshape(3, 2).clone(), torch.empty(2, 3, device="meta"))):

        def replaced(conversion, written, value=value):
            torch.save({"w": value, "m": torch.empty(3, device="meta")}, written)
            prove(conversion, written)

        monkeypatch.setattr(Conversion, "prove", replaced)
        with pytest.raises(ConversionDiffers, match=" w"):
            ckptmove.convert(tmp_path / "a.pth", to="cuda:0", output=tmp_path / f"{number}.pth", verify=True)


def test_a_tensor_without_values_is_no_tied_one(tmp_path):
    save_file({"w": WHOLE}, tmp_path / "a.safetensors")
    torch.save({"w": WHOLE, "m": torch.empty(2, device="meta")}, tmp_path / "a.pth")
    result = ckptmove.verify(tmp_path / "a.safetensors", against=tmp_path / "a.pth")
    assert any("m is missing" in check.detail for check in result.checks)

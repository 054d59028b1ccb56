"""Every fact and every value of a legacy stream, compared with ``torch.load``."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from ckptmove.api.functions import convert
from ckptmove.formats.facts import facts_of
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.equality import bits
from ckptmove.proof.request import VerifyRequest
from ckptmove.proof.restored.loaded import load, named_tensors
from ckptmove.proof.tensors.stored import StoredTensors
from ckptmove.training.run import verify_checkpoint

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
#: dtypes that torch 2.13 writes into a stream over an untyped storage, and cannot load.
UNTYPED = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def views():
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base, "row": base[2], "column": base[:, 3], "transposed": base.t(), "part": base[1:3, 2:5],
        "scalar": torch.tensor(3.0), "empty": torch.empty(0, 5), "expanded": torch.ones(1).expand(4, 3),
        "param": nn.Parameter(base), "frozen": nn.Parameter(base[0], requires_grad=False),
        "sparse": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(),
        "nested": {"list": [torch.arange(3), (torch.ones(2).half(),)]},
    }  # fmt: skip


def trained():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"epoch": 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


OBJECTS = {
    "dtypes": lambda: {str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES},
    "views": views,
    "trained": trained,
    "tensor": lambda: torch.arange(6).reshape(2, 3),
    "nothing": dict,
}


@pytest.fixture(params=OBJECTS)
def saved(request, tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "saved.pth"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on the state of its sparse layouts
        torch.save(OBJECTS[request.param](), path, _use_new_zipfile_serialization=False)
    return path


def test_facts_and_values_are_those_of_torch(saved):
    root = torch.load(saved, weights_only=True)
    expected = list(named_tensors(root))
    with open_checkpoint(str(saved), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        records = [part for tensor in checkpoint.inventory.tensors for part in tensor.dense()]
        assert [record.name for record in records] == [name for name, _ in expected]
        for record, (name, own) in zip(records, expected, strict=True):
            facts = (str(own.dtype).removeprefix("torch."), tuple(own.shape), own.stride(), own.storage_offset())
            assert (record.dtype, record.shape, record.stride, record.storage_offset) == facts, name
            assert record.device == str(own.device)
            assert torch.equal(bits(stored.tensor(record)), bits(own)), name
        assert checkpoint.inventory.facts == ()


def test_the_inventory_is_that_of_the_zip(saved, tmp_path):
    torch.save(torch.load(saved, weights_only=True), tmp_path / "zip.pth")
    with open_checkpoint(str(saved)) as one, open_checkpoint(str(tmp_path / "zip.pth")) as other:
        for attribute in ("layout", "root_keys", "mentions", "globals", "contents", "foreign_opcodes"):
            assert getattr(one.inventory, attribute) == getattr(other.inventory, attribute)
        for first, second in zip(one.inventory.tensors, other.inventory.tensors, strict=True):
            for attribute in ("name", "role", "device", "dtype", "shape", "nbytes", "kind", "requires_grad"):
                assert getattr(first, attribute) == getattr(second, attribute)
        assert len(one.inventory.optimizers) == len(other.inventory.optimizers)


def test_verify_loads_it_without_a_mapping(saved):
    with open_checkpoint(str(saved)) as checkpoint:
        loaded = load(facts_of(checkpoint.inventory.container), checkpoint.path)
    assert (loaded.refusal, loaded.error, loaded.is_mapped) == ("", "", False)


def test_a_step_is_made_from_a_stream(tmp_path):
    torch.save(trained(), tmp_path / "saved.pth", _use_new_zipfile_serialization=False)
    result = verify_checkpoint(VerifyRequest(path=str(tmp_path / "saved.pth"), to="cpu"), ())
    assert result.passed
    assert {check.status for check in result.checks} == {"passed"}
    assert "without CRCs" in result.checks[0].detail


@pytest.mark.parametrize("dtype", UNTYPED, ids=str)
def test_an_untyped_storage_is_read_and_moved(tmp_path, dtype):
    path, moved, back = (tmp_path / name for name in ("saved.pth", "moved.pth", "back.pth"))
    try:
        torch.save({"w": torch.arange(7).to(dtype)}, path, _use_new_zipfile_serialization=False)
    except KeyError:
        pytest.skip("this torch writes no such storage into a stream")
    with open_checkpoint(str(path), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        (record,) = checkpoint.inventory.tensors
        assert record.dtype == str(dtype).removeprefix("torch.")
        assert torch.equal(bits(stored.tensor(record)), bits(torch.arange(7).to(dtype)))
    convert(str(path), to="cuda:0", output=str(moved))
    convert(str(moved), to="cpu", output=str(back))
    assert back.read_bytes() == path.read_bytes() != moved.read_bytes()

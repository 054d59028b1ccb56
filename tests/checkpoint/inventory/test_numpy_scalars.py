from __future__ import annotations

import numpy as np
import pytest
import torch

from ckptmove.checkpoint.inventory.numpy_scalars import scalar_value
from ckptmove.model import OPAQUE
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.tree import Call, Global, Tuple

SCALARS = [
    np.float64(0.1), np.float32(-2.5), np.float16(0.5), np.int64(-3), np.int32(7), np.int16(-9), np.int8(-1),
    np.uint8(250), np.uint16(9), np.uint32(2**31), np.uint64(2**63), np.bool_(True), np.float64("inf"),
]  # fmt: skip


def options_of(path):
    with open_checkpoint(str(path)) as checkpoint:
        return dict(checkpoint.inventory.optimizers[0].groups[0].options)


def saved(folder, value, protocol=2):
    path = folder / "optimizer.pt"
    torch.save({"state": {}, "param_groups": [{"lr": value, "params": []}]}, path, pickle_protocol=protocol)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", SCALARS, ids=lambda value: f"{value.dtype}-{value}")
def test_a_scalar_reads_as_numpy_has_it(value, protocol, tmp_path):
    found = options_of(saved(tmp_path, value, protocol))["lr"]
    assert found == value.item()
    assert type(found) is type(value.item())


def test_the_other_byte_order():
    dtype = Call(Global("numpy", "dtype"), Tuple(("f8", False, True), (0, 0, 0)), 0)
    dtype.state = Tuple((3, ">", None), (0, 0, 0))
    raw = np.array(0.25, dtype=">f8").tobytes()
    assert scalar_value(Call(Global("numpy.core.multiarray", "scalar"), Tuple((dtype, raw), (0, 0)), 0)) == 0.25


@pytest.mark.parametrize(
    "value", [torch.tensor(0.1), np.complex64(1j), np.str_("x"), np.datetime64("2020-01-01"), [[]]]
)
def test_what_is_no_number_is_opaque(value, tmp_path):
    assert options_of(saved(tmp_path, value))["lr"] is OPAQUE


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (Call(Global("numpy", "dtype"), None, 0), b"12345678"),
        (Call(Global("numpy", "dtype"), Tuple((8,), (0,)), 0), b"12345678"),
        (Call(Global("numpy", "dtype"), Tuple(("f8",), (0,)), 0), b"short"),
        (Call(Global("numpy", "dtype"), Tuple(("f8",), (0,)), 0), "text"),
        (Call(Global("numpy", "dtype"), Tuple(("f8",), (0,)), 0), Call(Global("_codecs", "encode"), Tuple((), ()), 0)),
        (
            Call(Global("numpy", "dtype"), Tuple(("f8",), (0,)), 0),
            Call(Global("_codecs", "encode"), Tuple(("\u20ac234567", "latin1"), (0, 0)), 0),
        ),
    ],
)
def test_what_numpy_would_not_write_is_none(arguments):
    scalar = Global("numpy._core.multiarray", "scalar")
    assert scalar_value(Call(scalar, Tuple(arguments, (0,) * len(arguments)), 0)) is None

"""The tables of dtypes, compared with torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.storage import _dtype_to_storage_type_map, _new_dtypes
from weights_only_lists import numbers

import ckptmove
from ckptmove.errors import UncastableDtype
from ckptmove.simulation.rules import refuse_dtype
from ckptmove.torch_facts.dtypes import (
    CAST_DOWN,
    CASTABLE_FLOATS,
    COMPLEX_PARTS,
    DTYPE_STORAGE,
    ITEM_BYTES,
    MPS_DTYPES,
    PACKED,
    SCRIPT_STORAGE_DTYPE,
    STORAGE_DTYPE,
)
from ckptmove.torch_facts.weights_only import WEIGHTS_ONLY_SINCE

#: Integers of one to seven bits have no tensors that could be saved.
NARROW = {f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)}


def test_every_dtype_is_known_by_its_size():
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    sizes = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in dtypes}
    known = {name: size for name, size in ITEM_BYTES.items() if hasattr(torch, name)}
    assert {name: size for name, size in sizes.items() if name not in NARROW} == known


def test_every_storage_class_stands_for_its_dtype():
    expected = {name: str(dtype).removeprefix("torch.") for dtype, name in _dtype_to_storage_type_map().items()}
    assert {**expected, "UntypedStorage": "uint8"} == STORAGE_DTYPE
    assert {storage: dtype for dtype, storage in DTYPE_STORAGE.items()} == expected


def test_the_other_dtypes_are_those_that_torch_saves_untyped():
    untyped = {str(dtype).removeprefix("torch.") for dtype in _new_dtypes()}
    here = {name for name in ITEM_BYTES if numbers(WEIGHTS_ONLY_SINCE[f"torch.{name}"]) <= numbers(torch.__version__)}
    assert here == untyped | set(DTYPE_STORAGE)


def test_casts_to_shorter_dtypes_exist():
    for wide, narrow in CAST_DOWN.items():
        assert any({wide, narrow} <= set(family) for family in (CASTABLE_FLOATS, COMPLEX_PARTS))
        assert ITEM_BYTES[narrow] < ITEM_BYTES[wide]


@pytest.mark.filterwarnings("ignore:.*(quantize|Quant|quantized|TypedStorage).*")
@pytest.mark.parametrize(("name", "elements"), PACKED.items())
def test_packed_dtypes_have_that_many_elements_in_a_byte(name, elements):
    tensor = torch._empty_affine_quantized([4 * elements], scale=1.0, zero_point=0, dtype=getattr(torch, name))
    assert tensor.untyped_storage().nbytes() == 4


def metal_types():
    """The dtypes that torch makes Metal kernels for (``C10_METAL_ALL_TYPES_FUNCTOR``), by the header that it ships."""
    header = Path(torch.__file__).parent / "include" / "c10" / "metal" / "common.h"
    text = header.read_text() if header.exists() else ""
    listed = re.findall(r"^  _\((\w+), \d+, \w+\)", text, re.MULTILINE)
    if not listed or "UInt64" not in listed:
        pytest.skip("this torch ships no list, or one without unsigned dtypes")
    names = {**SCRIPT_STORAGE_DTYPE, **STORAGE_DTYPE}
    return {names[f"{name}Storage"] for name in listed}


def test_mps_has_the_dtypes_that_torch_has_kernels_for():
    assert metal_types() - {"float8_e4m3fn"} == MPS_DTYPES  # which torch accepts from 2.15 on
    assert set(ITEM_BYTES) > MPS_DTYPES


@pytest.mark.parametrize("name", sorted(name for name in ITEM_BYTES if name.startswith("float8_")))
def test_bfloat16_holds_each_value_of_a_float8(name):
    """The text of the catalogue about T401."""
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    wide = values.to(torch.float64)
    assert torch.equal(values.to(torch.bfloat16).to(torch.float64).nan_to_num(7), wide.nan_to_num(7))


@pytest.fixture
def every_dtype(tmp_path):
    """A file with a tensor of each dtype that this torch can save, named by it."""
    dtypes = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name) and name not in PACKED}
    tensors = {}
    for name, dtype in dtypes.items():
        if name.startswith("q"):
            tensors[name] = torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=dtype)
        else:
            tensors[name] = torch.zeros(16, dtype=torch.uint8).view(dtype)
    path = tmp_path / "every.pth"
    torch.save(tensors, path)
    return path, set(tensors)


@pytest.mark.filterwarnings("ignore:.*(quantize|Quant|quantized|TypedStorage).*")
def test_what_mps_lacks_is_found_and_refused_and_the_rest_is_moved(every_dtype, tmp_path):
    path, names = every_dtype
    lacking = names - MPS_DTYPES
    [finding] = [one for one in ckptmove.inspect(path, target="mps").findings if one.code == "T401"]
    assert set(finding.where) == lacking
    with pytest.raises(UncastableDtype) as caught:
        ckptmove.convert(path, to="mps", output=tmp_path / "moved.pth", cast=True)
    assert {name for name, _ in caught.value.tensors} == lacking - set(CAST_DOWN)
    # Some of them can be cast, so that nobody is sent to --cast before the others are out of the way.
    with pytest.raises(UncastableDtype):
        ckptmove.convert(path, to="mps", output=tmp_path / "moved.pth")
    result = ckptmove.convert(
        path, to="mps", output=tmp_path / "moved.pth", cast=True, keep=sorted(lacking - {"float64"})
    )
    assert {name for edit in result.plan.edits for name in edit.names} == (names & MPS_DTYPES) | {"float64"}
    plan = ckptmove.inspect(path, expect="mps").plan
    assert {name for edit in plan.edits for name in edit.names} == names  # everything that is not on mps yet
    assert not [one for one in ckptmove.inspect(path, target="cuda:0").findings if one.code == "T401"]


def test_a_simulated_mps_refuses_what_the_table_lacks():
    for name in ITEM_BYTES:
        if not hasattr(torch, name):
            continue
        refused = False
        try:
            refuse_dtype("mps", getattr(torch, name))
        except TypeError:
            refused = True
        assert refused is (name not in MPS_DTYPES), name
        refuse_dtype("cuda:0", getattr(torch, name))
    with pytest.raises(TypeError, match="Trying to convert Float8_e4m3fn to the MPS backend"):
        refuse_dtype("mps", torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="Cannot convert a MPS Tensor to float64"):
        refuse_dtype("mps:0", torch.float64)
    with pytest.raises(TypeError, match="ComplexDouble"):
        refuse_dtype("mps", torch.complex128)

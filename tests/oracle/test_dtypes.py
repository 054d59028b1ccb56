"""The tables of dtypes, held against torch."""

from __future__ import annotations

import pytest
import torch
from torch.storage import _dtype_to_storage_type_map, _new_dtypes
from weights_only_lists import numbers

from ckptmove.dtypes import CAST_DOWN, DTYPE_STORAGE, ITEM_BYTES, PACKED, STORAGE_DTYPE
from ckptmove.pickles.names import WEIGHTS_ONLY_SINCE

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


def test_a_cast_halves_the_size():
    for wide, narrow in CAST_DOWN.items():
        assert ITEM_BYTES[wide] == 2 * ITEM_BYTES[narrow]


@pytest.mark.filterwarnings("ignore:.*(quantize|Quant|quantized|TypedStorage).*")
@pytest.mark.parametrize(("name", "elements"), PACKED.items())
def test_packed_dtypes_have_that_many_elements_in_a_byte(name, elements):
    tensor = torch._empty_affine_quantized([4 * elements], scale=1.0, zero_point=0, dtype=getattr(torch, name))
    assert tensor.untyped_storage().nbytes() == 4

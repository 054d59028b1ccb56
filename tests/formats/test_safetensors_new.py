"""New safetensors files, compared byte for byte with those of the library."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from ckptmove.errors import LimitExceeded
from ckptmove.formats import safetensors_new
from ckptmove.formats.safetensors_file import DTYPES
from ckptmove.formats.safetensors_new import NewTensor, new_safetensors, obstacle
from ckptmove.io.contracts import BytesSegment
from ckptmove.io.part import MemorySource
from ckptmove.io.segments import blocks_of

KNOWN = [name for name in DTYPES.values() if hasattr(torch, name)]
SHAPES = [(), (0,), (3,), (2, 0, 3), (2, 4)]


def tensor_of(dtype, shape, seed=0):
    size = torch.empty(shape, dtype=getattr(torch, dtype)).nbytes
    raw = torch.randint(0, 2, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(getattr(torch, dtype)).reshape(shape)


def new_tensor(name, tensor):
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return NewTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), (BytesSegment(data),))


def written(tensors, metadata):
    segments = new_safetensors([new_tensor(name, tensor) for name, tensor in tensors.items()], metadata)
    return b"".join(map(bytes, blocks_of(MemorySource("", b""), segments)))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_dtype_as_the_library_writes_it(shape) -> None:
    tensors = {
        f"{index % 3}{dtype}": tensor_of(dtype, shape, index)
        for index, dtype in enumerate(KNOWN)
        if not obstacle("", dtype, shape)
    }
    assert len(tensors) >= len(KNOWN) - 1
    assert written(tensors, {"format": "pt"}) == save(tensors, {"format": "pt"})
    assert written(tensors, {}) == save(tensors)


@pytest.mark.unmeasured
@given(
    st.dictionaries(
        st.text(max_size=5), st.tuples(st.sampled_from(["int8", "float32", "int64"]), st.sampled_from(SHAPES))
    ),
    st.text(max_size=5),
)
def test_names_and_metadata_as_the_library_writes_them(found, text) -> None:
    tensors = {
        name: tensor_of(dtype, shape) for name, (dtype, shape) in found.items() if not obstacle(name, dtype, shape)
    }
    tensors["w"] = torch.ones(1)  # the library writes no valid file of metadata alone
    metadata = {"format": text.encode(errors="ignore").decode()}
    data = written(tensors, metadata)
    assert data == save(tensors, metadata)
    assert load(data).keys() == tensors.keys()


@pytest.mark.parametrize("dtype", ["complex128", "complex32", "quint8", "bits8"])
def test_dtypes_that_the_format_lacks(dtype) -> None:
    assert dtype in obstacle("a", dtype, (1,))


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_names_that_the_format_lacks(name) -> None:
    assert obstacle(name, "float32", ())
    assert not obstacle("a", "float32", ())
    assert obstacle("a", "float4_e2m1fn_x2", ())


def test_the_library_reads_no_larger_header(monkeypatch) -> None:
    monkeypatch.setattr(safetensors_new, "_MOST_HEADER_BYTES", 64)
    written({"a": torch.ones(1)}, {})
    with pytest.raises(LimitExceeded):
        written({"a" * 20: torch.ones(1)}, {})

"""Find quantized weights whose scales are tensors beside them, by names and dtypes.

The names are those of transformers (float8 with block scales), compressed-tensors, GPTQ, AWQ, bitsandbytes, ComfyUI and
gpt-oss (MXFP4). A tensor subclass of torchao holds its scale inside, and is not counted here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.model import TensorRecord

#: Dtypes of stored numbers that need a scale; wider integers pack several into an element, under names of their own.
_QUANTIZED: Final = ("float8_", "float4_", "int8", "uint8")
_PACKED: Final = ("int16", "int32")
_PACKED_NAMES: Final = ("qweight", "_packed")
#: Scales and codes of a weight in 4 bits; with double quantization, ``absmax`` is quantized itself.
_OF_BITSANDBYTES: Final = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class ScaledWeight(NamedTuple):
    """A quantized weight and the tensor of its scales."""

    weight: TensorRecord
    scale: TensorRecord


def scaled_weights(tensors: Iterable[TensorRecord]) -> tuple[ScaledWeight, ...]:
    """Return the quantized weights of models with each tensor of scales beside them, in the order of the file."""
    by_name = {tensor.name: tensor for tensor in tensors if tensor.role != "optimizer"}
    quantized = [
        tensor
        for tensor in by_name.values()
        if tensor.dtype.startswith(_QUANTIZED) or (tensor.dtype in _PACKED and tensor.name.endswith(_PACKED_NAMES))
    ]
    pairs = ((weight, by_name.get(name)) for weight in quantized for name in _names_of_scale(weight.name))
    return tuple(ScaledWeight(weight, scale) for weight, scale in pairs if scale is not None)


def _names_of_scale(weight: str) -> Iterator[str]:
    stem, _, leaf = weight.rpartition(".")
    root = f"{stem}." if stem else ""
    if leaf == "qweight":
        yield f"{root}scales"
    elif leaf.endswith("_packed"):
        yield f"{weight.removesuffix('_packed')}_scale"
    elif leaf.endswith("_blocks"):
        yield f"{weight.removesuffix('_blocks')}_scales"
    else:
        yield from (f"{weight}_scale_inv", f"{weight}_scale")
        yield from (f"{weight}.{name}" for name in _OF_BITSANDBYTES)
        if leaf == "weight":
            yield from (f"{root}SCB", f"{root}scale_weight")

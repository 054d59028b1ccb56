"""Classes that a package adds to the list of weights-only mode when it is imported.

A file that stores them loads with ``weights_only=True`` after that import. Only packages whose source does so are
listed, and only the classes that it names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.torch_facts.weights_only import DTENSOR_MODULE, DTENSOR_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable

_FLOAT8: Final = "torchao.quantization.quantize_.workflows.float8"
_INTX: Final = "torchao.quantization.quantize_.workflows.intx"

#: The names that each module registers.
REGISTERED: Final[dict[str, frozenset[str]]] = {
    DTENSOR_MODULE: DTENSOR_NAMES,
    # torch/nested/__init__.py registers jagged tensors, torch/_dynamo/decorators.py their sizes.
    "torch._dynamo": frozenset({
        "torch._dynamo.decorators._DimRange", "torch.nested._internal.nested_tensor.NestedTensor",
        "torch.nested._internal.nested_tensor._rebuild_njt",
    }),
    # torchao 0.18 imports these modules from torchao/__init__.py; each ends with add_safe_globals.
    "torchao": frozenset({
        *(f"torchao.float8.float8_training_tensor.{name}" for name in (
            "Float8TrainingTensor", "GemmInputRole", "LinearMMConfig", "ScaledMMConfig",
        )),
        "torchao.float8.config.ScalingGranularity", "torchao.float8.inference.Float8MMConfig",
        "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor",
        *(f"torchao.optim.subclass_{bits}.OptimState{bits}" for bits in ("4bit", "8bit")),
        "torchao.optim.subclass_fp8.OptimStateFp8",
        "torchao.prototype.quantization.gguf.gguf_quantized_tensor.GGUFQuantizedTensor",
        *(f"torchao.quantization.{name}Tensor" for name in (
            "Float8", "Int4", "Int4PlainInt32", "Int4Preshuffled", "Int4TilePackedTo4d", "Int8", "IntxOpaque",
            "IntxUnpackedToInt8",
        )),
        *(f"torchao.quantization.granularity.{name}" for name in ("PerBlock", "PerRow", "PerTensor")),
        *(f"torchao.quantization.quant_primitives.{name}" for name in ("MappingType", "ZeroPointDomain")),
        "torchao.quantization.quantize_.common.kernel_preference.KernelPreference",
        f"{_FLOAT8}.float8_packing_format.Float8PackingFormat",
        f"{_FLOAT8}.float8_tensor.QuantizeTensorToFloat8Kwargs",
        *(
            f"{_FLOAT8}.float8_sparse_2x4_{low}_tensor.Float8Sparse2x4_{high}Tensor"
            for low, high in (("1d_data_1d_metadata", "1DData1DMetadata"), ("2d_data_2d_metadata", "2DData2DMetadata"))
        ),
        "torchao.quantization.quantize_.workflows.int8.int8_tensor.QuantizeTensorToInt8Kwargs",
        f"{_INTX}.intx_packing_format.IntxPackingFormat",
        f"{_INTX}.intx_unpacked_to_int8_tensor.IntxUnpackedToInt8TensorActivationQuantization",
        "torchao.quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor",
    }),
}  # fmt: skip


def modules_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the modules whose import makes weights-only mode accept some names; none if a name is of no module."""
    owners = [next((module for module, own in REGISTERED.items() if name in own), "") for name in names]
    return tuple(sorted({*owners})) if all(owners) else ()

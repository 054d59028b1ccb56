"""Tables of torch's dtypes, their sizes and their storage classes. Unknown names have no guessed size.

From torch/storage.py ``_dtype_to_storage_type_map`` and ``_new_dtypes``; a test compares the tables with torch.
"""

from __future__ import annotations

from typing import Final

ITEM_BYTES: Final[dict[str, int]] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "bcomplex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "quint8": 1, "qint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1,
    "bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
}  # fmt: skip

#: Elements in a byte, for dtypes whose elements are smaller than the item size of one byte that torch reports.
PACKED: Final[dict[str, int]] = {"quint4x2": 2, "quint2x4": 4}

STORAGE_DTYPE: Final[dict[str, str]] = {
    "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16",
    "IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32", "DoubleStorage": "float64", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QUInt8Storage": "quint8", "QInt8Storage": "qint8",
    "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}  # fmt: skip

DTYPE_STORAGE: Final[dict[str, str]] = {
    dtype: storage for storage, dtype in STORAGE_DTYPE.items() if storage != "UntypedStorage"
}

#: Storage classes that only TorchScript writes. It names them after c10's ScalarType; torch/storage.py lacks them.
SCRIPT_STORAGE_DTYPE: Final[dict[str, str]] = {
    "ComplexHalfStorage": "complex32", "UInt16Storage": "uint16", "UInt32Storage": "uint32", "UInt64Storage": "uint64",
    **{
        f"{dtype.capitalize()}Storage": dtype
        for dtype in ITEM_BYTES
        if dtype.startswith(("float8_", "float4_", "bits"))
    },
}  # fmt: skip

#: Dtypes that mps supports: those for which ``getMPSDataType`` in aten/src/ATen/native/mps/OperationUtils.mm returns a
#: type in torch 2.4 to 2.14; uint16, uint32 and uint64 since 2.9. ``empty_mps`` (aten/src/ATen/mps/EmptyTensor.cpp)
#: refuses float64, and complex128 since 2.12. It allocates tensors of other dtypes and ``torch.load`` fills them, but
#: the first operation raises, including a cast to another dtype. Quantized tensors cannot be created, because
#: ``_empty_affine_quantized`` has no mps kernel. float8_e4m3fn has its first operations in torch 2.15
#: (pytorch/pytorch#194074).
MPS_DTYPES: Final = frozenset({
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "complex32", "complex64",
})  # fmt: skip

#: Real floating dtypes that can be cast to each other.
CASTABLE_FLOATS: Final = frozenset({
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
})  # fmt: skip

#: Complex dtypes that can be cast to each other, with the dtype of their real and imaginary parts.
COMPLEX_PARTS: Final[dict[str, str]] = {"complex128": "float64", "complex64": "float32"}

#: Unsupported dtypes, and the dtypes that ``--cast`` converts them to. Other unsupported dtypes have no cast.
CAST_DOWN: Final[dict[str, str]] = {"float64": "float32", "complex128": "complex64"}

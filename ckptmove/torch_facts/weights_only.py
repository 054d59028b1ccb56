"""The names that torch's weights-only mode allows a pickle to import. Nothing is imported.

From torch/_weights_only_unpickler.py ``_get_allowed_globals``, torch 2.4 to 2.15; a test compares the lists.
"""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from ckptmove.model import OLDEST_TORCH
from ckptmove.torch_facts.dtypes import ITEM_BYTES, STORAGE_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterable

_NARROW_INTS: Final = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8))
_TENSOR_TYPES: Final = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_SPARSE_TYPES: Final = tuple(kind for kind in _TENSOR_TYPES if kind != "Bool")
_QSCHEMES: Final = (
    "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)  # fmt: skip
_REBUILDS: Final = (
    "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_device_tensor_from_numpy", "_rebuild_meta_tensor_no_storage",
    "_rebuild_nested_tensor", "_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_qtensor",
    "_rebuild_sparse_tensor", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3",
    "_rebuild_wrapper_subclass",
)  # fmt: skip
_STORAGES: Final = tuple(name for name in STORAGE_DTYPE if name != "UntypedStorage")
#: Storage classes without a counterpart in ``torch.cuda``.
_CPU_ONLY: Final = frozenset({"QUInt8Storage", "QInt8Storage", "QInt32Storage", "QUInt4x2Storage", "QUInt2x4Storage"})

_GLOBALS: Final = frozenset({
    "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set",
    "collections.Counter", "collections.OrderedDict",
    "torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter",
    "torch._tensor._rebuild_from_type_v2", "torch.serialization._get_layout",
    "torch.storage.TypedStorage", "torch.storage.UntypedStorage",
    *(f"torch.{name}" for name in (*ITEM_BYTES, *_NARROW_INTS, *_QSCHEMES, *_STORAGES)),
    *(f"torch.cuda.{name}" for name in _STORAGES if name not in _CPU_ONLY),
    *(f"torch.{kind}Tensor" for kind in _TENSOR_TYPES),
    *(f"torch.cuda.{kind}Tensor" for kind in _TENSOR_TYPES),
    *(f"torch.sparse.{kind}Tensor" for kind in _SPARSE_TYPES),
    *(f"torch.cuda.sparse.{kind}Tensor" for kind in _SPARSE_TYPES),
    *(f"torch._utils.{name}" for name in _REBUILDS),
})  # fmt: skip

#: Names added to the list after the oldest supported torch, by version.
_ADDED: Final[dict[str, tuple[str, ...]]] = {
    "2.5": ("_codecs.encode", "builtins.bytearray", "torch._utils._rebuild_device_tensor_from_numpy"),
    "2.6": (
        "builtins.complex", "builtins.set", "torch._utils._rebuild_device_tensor_from_cpu_tensor", "torch.uint16",
        "torch.uint32", "torch.uint64",
    ),
    "2.7": ("torch.float8_e8m0fnu", *(f"torch.{name}" for name in _NARROW_INTS)),
    "2.8": ("torch.float4_e2m1fn_x2",),
    "2.14": ("torch.bcomplex32",),
}  # fmt: skip

#: Full name of the class ShardedTensor.
SHARDED_TENSOR: Final = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
#: The module that adds the classes of DTensor to the list when it is imported.
DTENSOR_MODULE: Final = "torch.distributed.tensor"
#: The names that it adds (torch/distributed/tensor/__init__.py, torch/distributed/device_mesh.py).
DTENSOR_NAMES: Final = frozenset({
    "torch.distributed.tensor.DTensor", "torch.distributed.device_mesh.DeviceMesh",
    *(f"torch.distributed.tensor._dtensor_spec.{name}" for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    *(f"torch.distributed.tensor.placement_types.{n}" for n in ("Partial", "Replicate", "Shard", "_StridedShard")),
    *(f"torch.distributed._mesh_layout.{name}" for name in ("_FlatLayout", "_MeshLayout")),
})  # fmt: skip

#: Names removed from the list, with the first torch that refuses them.
WEIGHTS_ONLY_UNTIL: Final[dict[str, str]] = {"torch._utils._rebuild_nested_tensor": "2.15"}
#: Every name that weights-only mode allows, with the first torch that allows it.
WEIGHTS_ONLY_SINCE: Final[dict[str, str]] = {
    **dict.fromkeys(_GLOBALS - {*WEIGHTS_ONLY_UNTIL}, OLDEST_TORCH),
    **{name: version for version, names in _ADDED.items() for name in names},
}


@lru_cache(maxsize=4096)
def modern_name(name: str) -> str:
    """Return a full name as Python 3 and torch look it up: ``__builtin__`` of Python 2 becomes ``builtins``.

    From ``_compat_pickle``, as in ``pickle`` and torch/_weights_only_unpickler.py (``_read_global_instruction``).
    """
    module, _, attribute = name.rpartition(".")
    if (module, attribute) in NAME_MAPPING:
        return ".".join(NAME_MAPPING[module, attribute])
    return f"{IMPORT_MAPPING[module]}.{attribute}" if module in IMPORT_MAPPING else name


def newest(versions: Iterable[str | None]) -> str:
    """Return the newest of some versions of torch (``2.10``), at least the oldest supported one; None is ignored."""
    return max((OLDEST_TORCH, *filter(None, versions)), key=lambda version: [int(part) for part in version.split(".")])

"""Autocast of a simulated device: the casts that torch makes on the target under `torch.autocast`.

torch's own kernels for a device's autocast key cast tensors of that device only. Kernels in Python make the same casts
for simulated tensors. Like torch's, they run before autograd, which records the casts.

The installed torch has the list of the operations, as kernels of the device's autocast key. It does not have their
policies, which are templates in C++: those are from ``AT_FORALL_*`` in aten/src/ATen/autocast_mode.h, and for mps from
aten/src/ATen/autocast_mode.cpp. A test compares the table with torch's kernels.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._library.utils import lookup_op
from torch.utils import _pytree as pytree

from ckptmove.simulation.replaced import replaced
from ckptmove.simulation.rules import schema_of
from ckptmove.simulation.targets import BACKEND, home_of, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._ops import OpOverload

    Operation = OpOverload[..., Any]

_KEY: Final[Any] = DispatchKey.__members__["AutocastPrivateUse1"]  # torch's annotations leave it out
_AFTER: Final = torch._C._dispatch_keyset_full_after(_KEY)
#: The operations with a dtype argument that replace those without, from ``AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE``.
_WITH_DTYPE: Final[dict[str, Operation]] = {
    "aten::norm.Scalar": torch.ops.aten.norm.ScalarOpt_dtype,
    "aten::norm.ScalarOpt_dim": torch.ops.aten.norm.ScalarOpt_dim_dtype,
}
#: torch's message, from ``binary_cross_entropy_banned`` in aten/src/ATen/autocast_mode.cpp.
_BANNED: Final = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)
#: Casts of parameters, by address: torch casts each parameter once in a region of autocast.
_CASTS: Final[dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]]] = {}


def register_kernels(library: Any) -> Any:
    """Register kernels for the operations that autocast changes, and that it changes no others.

    Args:
        library: the torch.library.Library of ``aten``.

    Returns:
        The library of the second rule, which ends when the library is collected.
    """
    for operation in sorted(operations()):
        kernel = functools.partial(_run, lookup_op(operation), operation)
        library.impl(operation.removeprefix("aten::"), kernel, "AutocastPrivateUse1", with_keyset=True)
    others: Any = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return others


@contextlib.contextmanager
def autocast_on_device() -> Iterator[None]:
    """Let `torch.autocast` of a target's type cast simulated tensors while the context is open."""
    module: Any = torch
    enable, clear = module.set_autocast_enabled, module.clear_autocast_cache

    def enabled(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        enable(BACKEND, any(map(torch.is_autocast_enabled, KINDS)))

    def cleared() -> None:
        _CASTS.clear()
        clear()

    with replaced(torch, set_autocast_enabled=enabled, clear_autocast_cache=cleared):
        yield


def _run(func: Operation, name: str, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """Run an operation with the casts of its operands' device."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    kind = next((kind for kind in map(_kind, tensors) if kind in KINDS), "")
    policy = policies(kind).get(name)
    if policy is None or not torch.is_autocast_enabled(kind):
        return func.redispatch(keys & _AFTER, *args, **kwargs)
    if policy is CastPolicy.BANNED:
        raise RuntimeError(_BANNED)
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):  # as in torch.library
        if policy is CastPolicy.FP32_SET_OPT_DTYPE:
            return func(*args, **kwargs) if not _is_eligible(args[0], kind) else _with_dtype(func, args, kwargs)
        if policy is CastPolicy.FP32_APPEND_DTYPE:
            more = [argument.default_value for argument in schema_of(func).arguments[len(args) :]]
            dtype = torch.float32 if _is_eligible(args[0], kind) else args[0].dtype
            return _WITH_DTYPE[name](*args, *more, dtype=dtype)
        to = _operand_dtype(policy, kind, tensors)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda one: _cast(one, to, kind), (args, kwargs))
        return func(*args, **kwargs)


def _kind(tensor: torch.Tensor) -> str:
    return kind_of(home_of(tensor))


def _is_eligible(tensor: torch.Tensor, kind: str) -> bool:
    """Whether autocast of a device type casts a tensor, by ``is_eligible`` in aten/src/ATen/autocast_mode.h."""
    is_narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return is_narrow and _kind(tensor) == kind


def _with_dtype(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation with the results' dtype set to float32, unless the caller has set it."""
    place = [argument.name for argument in schema_of(func).arguments].index("dtype")
    if place < len(args):
        dtype = torch.float32 if args[place] is None else args[place]
        return func(*args[:place], dtype, *args[place + 1 :], **kwargs)
    return func(*args, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})


def _operand_dtype(policy: CastPolicy, kind: str, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype for the operands of an operation.

    Raises:
        RuntimeError: if there is no widest dtype, with torch's message.
    """
    lower = torch.get_autocast_dtype(kind)
    if policy is CastPolicy.LOWER_PRECISION:
        return lower
    if policy is not CastPolicy.PROMOTE:
        return torch.float16 if policy is CastPolicy.FLOAT16 else torch.float32
    dtypes = {tensor.dtype for tensor in tensors if _is_eligible(tensor, kind)}
    if torch.float32 in dtypes:
        return torch.float32
    if dtypes - {lower}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return lower


def _cast(tensor: torch.Tensor, to: torch.dtype, kind: str) -> torch.Tensor:
    """A tensor in another dtype, by ``cached_cast`` in aten/src/ATen/autocast_mode.cpp."""
    if tensor.dtype == to or not _is_eligible(tensor, kind):
        return tensor
    is_parameter = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    if not (is_parameter and to == torch.get_autocast_dtype(kind) and torch.is_autocast_cache_enabled()):
        return tensor.to(to)
    source, cast = _CASTS.get(id(tensor), (None, tensor))
    if source is None or source() is not tensor:
        cast = tensor.to(to)
        _CASTS[id(tensor)] = weakref.ref(tensor), cast
    return cast


class CastPolicy(enum.Enum):
    """The casts of an operation's operands; the first names are those of ``CastPolicy`` in torch."""

    LOWER_PRECISION = enum.auto()
    FP32 = enum.auto()
    FP32_SET_OPT_DTYPE = enum.auto()
    FP32_APPEND_DTYPE = enum.auto()
    PROMOTE = enum.auto()
    BANNED = enum.auto()
    FLOAT16 = enum.auto()  # of `_cudnn_rnn_cast_reflatten`, for every dtype of autocast


#: Device types that have autocast in torch.
KINDS: Final = frozenset({"cuda", "mps", "mtia", "xpu"})
_LOWER_PRECISION: Final = frozenset({
    "_convolution", "_mps_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d",
    "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
    "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot",
    "linear", "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell",
    "scaled_dot_product_attention",
})  # fmt: skip
_SET_OPT_DTYPE: Final = frozenset({
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "prod", "softmax", "sum",
})  # fmt: skip
_PROMOTE: Final = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot",
    "vdot",
})  # fmt: skip
#: Recurrent networks of cuDNN, from aten/src/ATen/cudnn/AutocastRNN.cpp. A torch without cuDNN has no kernels for them.
_ON_CUDNN: Final = dict.fromkeys(
    (f"aten::{name}.{overload}" for name in ("gru", "lstm", "rnn_relu", "rnn_tanh") for overload in ("data", "input")),
    CastPolicy.FLOAT16,
)
#: Policies that mps does not share.
_ON_MPS: Final = dict.fromkeys(_SET_OPT_DTYPE | {"conv_transpose3d"}, CastPolicy.FP32)
_POLICIES: Final[dict[str, CastPolicy]] = {
    **dict.fromkeys(_LOWER_PRECISION, CastPolicy.LOWER_PRECISION),
    **dict.fromkeys(_SET_OPT_DTYPE, CastPolicy.FP32_SET_OPT_DTYPE),
    **dict.fromkeys(_PROMOTE, CastPolicy.PROMOTE),
    "norm": CastPolicy.FP32_APPEND_DTYPE,
    "binary_cross_entropy": CastPolicy.BANNED,
}


@functools.cache
def policies(kind: str) -> dict[str, CastPolicy]:
    """The policy of each operation (`aten::sum.dim_IntList`) that autocast changes on a device type."""
    if kind not in KINDS:
        return {}
    listed = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{kind.upper()}")
    names = {operation: operation.removeprefix("aten::").partition(".")[0] for operation in listed}
    known = _POLICIES | _ON_MPS if kind == "mps" else _POLICIES
    found = {operation: known.get(name, CastPolicy.FP32) for operation, name in names.items()}
    return found | _ON_CUDNN if kind == "cuda" else found


def operations() -> set[str]:
    """The operations that autocast changes on any device type."""
    return {operation for kind in KINDS for operation in policies(kind)}

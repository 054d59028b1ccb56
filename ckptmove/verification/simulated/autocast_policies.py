"""Table of autocast policies: the dtypes in which torch runs the operations of each device under `torch.autocast`.

The installed torch has the list of the operations, as kernels of the device's autocast key. It does not have their
policies, which are templates in C++: those are from ``AT_FORALL_*`` in aten/src/ATen/autocast_mode.h, and for mps from
aten/src/ATen/autocast_mode.cpp. A test compares the table with torch's kernels.
"""

from __future__ import annotations

import enum
import functools
from typing import Final

import torch


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
    """The policy of each operation (`aten::sum.dim_IntList`) that autocast changes on a device type.

    Args:
        kind: device type of the target (``cuda``).
    """
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

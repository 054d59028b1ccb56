"""Refuse dtypes and shapes that single kernels of the MPS backend do not accept, with torch's messages.

From aten/src/ATen/native/mps/operations: Convolution.mm, AdaptivePooling.mm, Indexing.mm, Linear.mm, LinearAlgebra.mm,
RnnOps.mm, ScatterGather.mm, UpSample.mm. The messages are those in the macOS wheels of torch 2.10 to 2.14, and a kernel
is missing if the Metal libraries in them lack its name.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.verification.simulated.errors import MissingOnMps, RefusedOnMps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_HALVES: Final = (torch.float16, torch.bfloat16)
_VOLUME: Final = 5  # dimensions of a batch of volumes
_LU: Final = "linalg.lu_factor(): MPS doesn't support complex types."
_TRIANGULAR: Final = "linalg.solve.triangular(); Only float is supported!"
#: From ``getLibraryPipelineState`` in aten/src/ATen/native/mps/OperationUtils.mm; the name of a kernel follows.
_NO_KERNEL: Final = "Failed to create function state object for: "
#: Message for complex operands, by operation.
_COMPLEX: Final = {
    "_linalg_det": _LU,
    "_linalg_slogdet": _LU,
    "_linalg_solve_ex": "linalg.lu_factor(): MPS only supports floats.",
    "cholesky_inverse": "cholesky_inverse: MPS only supports float type!",
    "cholesky_solve": _TRIANGULAR,
    "index_reduce": "index_reduce for MPS does not support torch.cfloat dtype",
    "linalg_inv_ex": "linalg_inv: not supported for complex types yet!",
    "linalg_lu": _LU,
    "linalg_lu_factor_ex": _LU,
    "linalg_lu_solve": _TRIANGULAR,
    "linalg_solve_triangular": _TRIANGULAR,
    "renorm": f"{_NO_KERNEL}renorm_float2",
    "silu": f"{_NO_KERNEL}silu_dense_float2_float2",
    "triangular_solve": _TRIANGULAR,
}
#: Names of ATen's functions that resize with antialiasing, in their messages.
_RESIZED: Final = {
    "_upsample_bicubic2d_aa": "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa": "_upsample_bilineard2d_aa",
}


def refuse_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:  # noqa: A002  # torch's name
    """Raise torch's error if the MPS kernel of `torch.nn.functional.linear` does not accept its operands.

    On other devices the function is a composite of products, which accept integers on mps.

    Raises:
        RefusedOnMps: if an operand is not floating or complex.
    """
    for name, one in (("inputs", input), ("weights", weight), ("bias", bias)):
        if one is not None and not (one.is_floating_point() or one.is_complex()):
            raise RefusedOnMps("aten::linear", f"MPS device does not support linear for non-float {name}")


def refuse_arguments(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise torch's error if the MPS kernel of an operation does not accept its arguments.

    Args:
        operation: name of the operation, without namespace and overload.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        RefusedOnMps: if the kernel refuses a dtype.
        MissingOnMps: if the kernel refuses a shape.
    """
    message = _COMPLEX.get(operation)
    if message is not None and args[0].is_complex():
        raise RefusedOnMps(f"aten::{operation}", message)
    check = _CHECKS.get(operation)
    if check is not None:
        check(args)
    if operation in _SCALED:
        _refuse_scalars(operation, args, kwargs)
    if operation in _SCATTERED:
        _refuse_reduction(args, str(kwargs.get("reduce", [*args, ""][4])))


def _convolution(args: Sequence[Any]) -> None:
    inputs, transposed = args[0], args[6]
    if not inputs.is_floating_point():
        raise RefusedOnMps("aten::convolution", "Convolution is supported only for Floating types")
    if transposed and inputs.dim() == _VOLUME and inputs.dtype in _HALVES:
        raise RefusedOnMps("aten::convolution", "ConvTranspose 3D with BF16 or FP16 types is not supported on MPS")


def _resize(args: Sequence[Any], name: str) -> None:
    if not args[0].is_floating_point():
        raise RefusedOnMps(f"aten::{name}", f"{_RESIZED[name]}_out_mps only supports floating-point dtypes")


def _bicubic(args: Sequence[Any]) -> None:
    if args[0].dtype == torch.uint8:
        raise RefusedOnMps("aten::upsample_bicubic2d", f"{_NO_KERNEL}upsample_bicubic2d_uchar")


def _qr(args: Sequence[Any]) -> None:
    if args[0].dtype != torch.float32:
        raise RefusedOnMps("aten::linalg_qr", "linalg_qr: MPS currently supports float32 only")


def _addr(args: Sequence[Any]) -> None:
    if not (args[1].is_floating_point() or args[1].is_complex()):
        raise RefusedOnMps("aten::addr", "MPS device does not support addr for non-float input")


def _refuse_scalars(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The kernels take both factors as real numbers."""
    factors = [*args[3:], *(kwargs.get(name, 1) for name in ("beta", "alpha"))]
    if any(complex(one).imag for one in factors):
        raise RefusedOnMps(f"aten::{operation}", "value cannot be converted to type double without overflow")


def _refuse_reduction(args: Sequence[Any], reduce: str) -> None:
    """Metal has no atomic operation for these products, and one for integers of 64 bits that needs dense memory."""
    target, index = args[0], args[2]
    operation, mode = "aten::scatter_reduce", "prod" if reduce == "multiply" else reduce
    if target.dtype == torch.int64 and mode in {"amax", "amin"} and not target.is_contiguous():
        raise RefusedOnMps(operation, "scatter_reduce(amin/amax) on int64 currently requires contiguous self")
    kind = {torch.int64: "long", torch.complex64: "float2"}.get(target.dtype)
    if kind is not None and mode == "prod":
        of_index = "int" if index.dtype == torch.int32 else "long"
        raise RefusedOnMps(operation, f"{_NO_KERNEL}scatter_prod_dense_{kind}_{of_index}")


def _index_reduce(args: Sequence[Any]) -> None:
    if args[0].dtype == torch.int64:
        raise RefusedOnMps("aten::index_reduce", "index_reduce for MPS does not support torch.long dtype")


def _lstm(args: Sequence[Any]) -> None:
    states = args[1]  # of the overload for packed sequences, they are the third argument, and mps has no kernel for it
    if isinstance(states, (list, tuple)) and states[0].shape[-1] != states[1].shape[-1]:
        raise RefusedOnMps("aten::lstm", "LSTM with projections is not currently supported with MPS.")


def _adaptive_max_pool(args: Sequence[Any]) -> None:
    sizes = list(zip(args[0].shape[-2:], args[1], strict=True))
    if not (all(one >= other for one, other in sizes) or all(one <= other for one, other in sizes)):
        raise MissingOnMps(
            "aten::adaptive_max_pool2d",
            "Adaptive pool MPS: Input height and width must both be greater than, or equal to, or lesser than output "
            "height and width",
        )


def _adaptive_average_pool(args: Sequence[Any]) -> None:
    _adaptive_max_pool(args)
    inputs, outputs = tuple(args[0].shape[-2:]), tuple(args[1])
    large, small = (inputs, outputs) if inputs[0] >= outputs[0] else (outputs, inputs)
    if any(one % max(other, 1) for one, other in zip(large, small, strict=True)):
        names = ("input", "output") if large is inputs else ("output", "input")
        raise MissingOnMps(
            "aten::_adaptive_avg_pool2d",
            f"Adaptive pool MPS: {names[0]} sizes must be divisible by {names[1]} sizes. Non-divisible input sizes are "
            "not implemented on MPS device yet. For now, you can manually transfer tensor to cpu in this case. Please "
            "refer to [this issue](https://github.com/pytorch/pytorch/issues/96056)",
        )


#: Operations with the factors `beta` and `alpha`.
_SCALED: Final = frozenset({"addmm", "addmm_", "addr", "addr_"})
#: Operations whose fifth argument, or `reduce`, is a reduction.
_SCATTERED: Final = frozenset({"scatter", "scatter_", "scatter_reduce", "scatter_reduce_"})
_CHECKS: Final[dict[str, Callable[[Sequence[Any]], None]]] = {
    "_adaptive_avg_pool2d": _adaptive_average_pool,
    "adaptive_max_pool2d": _adaptive_max_pool,
    "addr": _addr,
    "addr_": _addr,
    "convolution": _convolution,
    "index_reduce": _index_reduce,
    "index_reduce_": _index_reduce,
    "linalg_qr": _qr,
    "lstm": _lstm,
    "upsample_bicubic2d": _bicubic,
    **{name: functools.partial(_resize, name=name) for name in _RESIZED},
}

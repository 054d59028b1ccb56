"""Refuse operations and arguments that the MPS backend of the installed torch lacks, with torch's own messages.

``native_functions.yaml``, which torch installs with torchgen, lists the kernels of the MPS backend, and the dispatcher
of this process knows the composite kernels. Operators that the macOS wheels of torch 2.10 to 2.14 register, and the
yaml does not list, are in `_FALLBACKS`.

Dtypes and shapes that single kernels do not accept are from aten/src/ATen/native/mps/operations: Convolution.mm,
AdaptivePooling.mm, Indexing.mm, Linear.mm, LinearAlgebra.mm, RnnOps.mm, ScatterGather.mm, UpSample.mm. The messages are
those in the macOS wheels of torch 2.10 to 2.14, and a kernel is missing if the Metal libraries in them lack its name.
"""

from __future__ import annotations

import functools
import linecache
import os
import re
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils import _pytree as pytree

from ckptmove.simulation.errors import MissingOnMps, RefusedOnMps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch._ops import OpOverload

#: Path of the yaml, after that of torch's folder.
_YAML: Final = "gen/packaged/ATen/native/native_functions.yaml"
#: Dispatch key of a tensor on mps by its layout; that of all other layouts is `_CSR`.
_KEYS: Final = {torch.strided: "MPS", torch.sparse_coo: "SparseMPS"}
_CSR: Final = "SparseCsrMPS"
#: Operators that always run on the CPU, with a warning, from aten/src/ATen/mps/MPSFallback.mm. In torch 2.14 the second
#: has no kernel of its own any more.
_FALLBACKS: Final = frozenset({"embedding_renorm_", "linalg_svd"})
#: Operators that composite kernels of ATen call: every composite kernel in torch's operator database that ends in an
#: operator without a kernel.
_CALLED: Final = {
    "ctc_loss.Tensor": "_ctc_loss",
    "frexp.Tensor": "frexp.Tensor_out",
    "linalg_lstsq": "linalg_lstsq.out",
    "linalg_matrix_rank.atol_rtol_float": "_linalg_svd.U",
    "linalg_matrix_rank.atol_rtol_tensor": "_linalg_svd.U",
    "linalg_pinv.atol_rtol_float": "linalg_svd",
    "linalg_pinv.atol_rtol_tensor": "linalg_svd",
    "logspace": "logspace.out",
    "logspace.Scalar_Tensor": "logspace.out",
    "logspace.Tensor_Scalar": "logspace.out",
    "logspace.Tensor_Tensor": "logspace.out",
    "put": "put_",
}
#: Operator that a function of a hermitian matrix (`linalg_pinv`) calls in place of that in `_CALLED`.
_EIGENVALUES: Final = "_linalg_eigh.eigenvalues"
_ENVIRONMENT: Final = "PYTORCH_ENABLE_MPS_FALLBACK"
#: The start of a text that ``std::stoi`` accepts.
_NUMBER: Final = re.compile(r"\s*([+-]?[0-9]+)")
#: Operators that ran on the CPU in this process.
FELL_BACK: Final[dict[str, None]] = {}
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


def refuse_on_mps(
    func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[Any]
) -> None:
    """Raise torch's error if the MPS backend lacks an operation; warn as torch does if it falls back to the CPU.

    Args:
        operands: all arguments, with the items of lists; their layouts determine the kernel.

    Raises:
        MissingOnMps: if it has no kernel, and ``PYTORCH_ENABLE_MPS_FALLBACK`` is not set.
        RefusedOnMps: if its kernel does not accept the arguments.
    """
    if func.namespace != "aten":
        return
    layouts = [one.layout for one in operands if isinstance(one, torch.Tensor)]
    if any(isinstance(one, torch.device) for one in operands):  # a factory (`BackendSelect` of torch)
        layouts += [one for one in operands if isinstance(one, torch.layout)]
    key = next((_KEYS.get(one, _CSR) for one in layouts if one != torch.strided), "MPS")
    name = str(func).removeprefix("aten.").removesuffix(".default")
    missing = _missing(_EIGENVALUES if kwargs.get("hermitian") else name, key)
    if missing is None:
        refuse_arguments(func.overloadpacket.__name__, args, kwargs)
        return
    operation = f"aten::{missing}"
    if key != "MPS":
        raise MissingOnMps(
            operation,
            f"Could not run '{operation}' with arguments from the '{key}' backend. This could be because the operator "
            "doesn't exist for this backend, or was omitted during the selective/custom build process (if using custom "
            "build).",
        )
    if missing not in _FALLBACKS and not _falls_back(operation):
        raise MissingOnMps(
            operation,
            f"The operator '{operation}' is not currently implemented for the MPS device. If you want this op to be "
            "considered for addition please comment on https://github.com/pytorch/pytorch/issues/141287 and mention "
            f"use-case, that resulted in missing op as well as commit hash {torch.version.git_version}. As a "
            f"temporary fix, you can set the environment variable `{_ENVIRONMENT}=1` to use the CPU as a fallback for "
            "this op. WARNING: this will be slower than running natively on MPS.",
        )
    FELL_BACK[operation] = None
    warnings.warn(
        f"The operator '{operation}' is not currently supported on the MPS backend and will fall back to run on the "
        "CPU. This may have performance implications.",
        stacklevel=2,
    )


def without_float64(results: Any, operands: Sequence[Any]) -> Any:
    """Results of an operation in float32 where the CPU chooses float64, which MPS lacks (`bincount` with weights).

    Args:
        results: results on the CPU.
        operands: all arguments of the operation; float64 among them asks for float64.
    """
    dtypes = {getattr(one, "dtype", one) for one in operands if isinstance(one, (torch.Tensor, torch.dtype))}
    if torch.float64 in {*dtypes, torch.get_default_dtype()}:
        return results
    is_wide = any(getattr(one, "dtype", None) == torch.float64 for one in pytree.tree_leaves(results))
    return pytree.tree_map(_narrow, results) if is_wide else results


def _narrow(one: Any) -> Any:
    return one.float() if isinstance(one, torch.Tensor) and one.dtype == torch.float64 else one


def _falls_back(operation: str) -> bool:
    """Whether torch runs all missing operations on the CPU; it reads a number (aten/src/ATen/mps/MPSFallback.mm).

    Raises:
        MissingOnMps: if the variable is no number.
    """
    value = os.environ.get(_ENVIRONMENT, "0")
    number = _NUMBER.match(value)
    if number is None:
        raise MissingOnMps(
            operation,
            f"The operator '{operation}' is not currently implemented for the MPS device, and torch does not start on "
            f"a Mac with {_ENVIRONMENT}={value!r}, because that is not a number (std::invalid_argument: stoi).",
        )
    return int(number[1]) != 0


@functools.cache
def _missing(name: str, key: str) -> str | None:
    """The operator without a kernel that an operator calls, or that operator itself; None if all have kernels."""
    kernels, delegates = _table()
    if not kernels or name in kernels[key]:
        return None
    ends_in = delegates.get(name) or _CALLED.get(name)
    if ends_in is not None:
        return _missing(ends_in, key)
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    return name if name in _FALLBACKS or not has_kernel(f"aten::{name}", key) else None


@functools.cache
def _table() -> tuple[dict[str, set[str]], dict[str, str]]:
    """Operators with a kernel by dispatch key, and the `out` operators of structured ones; empty without the yaml."""
    kernels: dict[str, set[str]] = {key: set() for key in (*_KEYS.values(), _CSR)}
    delegates: dict[str, str] = {}
    name = ""
    for line in linecache.getlines(f"{torch.__path__[0]}{_YAML}"):
        head, _, rest = line.partition(": ")
        if head == "- func":
            name = rest.partition("(")[0]
        elif head == "  structured_delegate":
            delegates[name] = rest.strip()
        elif line.startswith("    ") and "MPS" in head:
            for key in head.split(","):
                kernels.get(key.strip(), set()).add(name)
    for own in kernels.values():
        own |= {one for one, out in delegates.items() if out in own}
    return (kernels, delegates) if name else ({}, {})


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
        factors = [*args[3:], *(kwargs.get(name, 1) for name in ("beta", "alpha"))]
        if any(complex(one).imag for one in factors):  # the kernels take both as real numbers
            raise RefusedOnMps(f"aten::{operation}", "value cannot be converted to type double without overflow")
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

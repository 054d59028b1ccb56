"""Refuse operations that the MPS backend of the installed torch lacks, with torch's own messages.

``native_functions.yaml``, which torch installs with torchgen, lists the kernels of the MPS backend, and the dispatcher
of this process knows the composite kernels. Operators that the macOS wheels of torch 2.10 to 2.14 register, and the
yaml does not list, are in `_FALLBACKS`.
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

from ckptmove.verification.simulated.errors import MissingOnMps
from ckptmove.verification.simulated.mps_arguments import refuse_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def refuse_on_mps(
    func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[Any]
) -> None:
    """Raise torch's error if the MPS backend lacks an operation; warn as torch does if it falls back to the CPU.

    Args:
        func: the operation.
        args: its positional arguments.
        kwargs: its keyword arguments.
        operands: all its arguments, with the items of lists; their layouts determine the kernel.

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

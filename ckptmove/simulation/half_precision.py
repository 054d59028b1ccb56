"""Run operations on CPU tensors, in float32 and rounded if only a GPU has a kernel for float16 or bfloat16."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils import _pytree as pytree

from ckptmove.simulation.rules import schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._ops import OpOverload

    Operation = OpOverload[..., Any]

_NARROW: Final = frozenset({torch.float16, torch.bfloat16})
_NO_KERNEL: Final = re.compile(r"\" not implemented for '(Half|BFloat16)'")
#: Operations without a kernel for these dtypes on a GPU either. A test compares them with torch's operator database.
_NOWHERE: Final = re.compile(
    r"aten::(_?linalg_|special_|bitwise_|__\w+shift__|cholesky|geqrf|orgqr|ormqr|lu_|triangular_solve|gcd|lcm|polar"
    r"|bincount|_?histogram|_cdist_|_pdist_|_?ctc_loss)"
)
_KEYS: Final = (
    DispatchKeySet(DispatchKey.Conjugate)
    | DispatchKeySet(DispatchKey.Negative)
    | DispatchKeySet(DispatchKey.ZeroTensor)
)


def compute(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: str) -> Any:
    """Run an operation on CPU tensors, in float32 if only the CPU lacks a kernel for their dtype."""
    try:
        with lazy_kernels():
            return func(*args, **kwargs)
    except NotImplementedError as error:
        if _NO_KERNEL.search(str(error)) is None or not any(map(_is_narrow, pytree.tree_leaves((args, dict(kwargs))))):
            raise
        if _NOWHERE.match(schema_of(func).name):
            error.args = (str(error).replace("cpu", kind),)
            raise
    with lazy_kernels():
        return _in_float32(func, args, kwargs)


def _in_float32(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    wide = [leaf.float() if _is_narrow(leaf) else leaf for leaf in leaves]
    narrow: dict[int, torch.Tensor] = {id(one): leaf for one, leaf in zip(wide, leaves, strict=True) if one is not leaf}
    dtype = next(leaf.dtype for leaf in narrow.values())
    wide_args, wide_kwargs = pytree.tree_unflatten(wide, spec)
    results = func(*wide_args, **wide_kwargs)
    arguments = schema_of(func).arguments
    named = dict(zip((argument.name for argument in arguments), wide_args, strict=False)) | wide_kwargs
    written = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    for operand in [named[name] for name in written if id(named.get(name)) in narrow]:
        narrow[id(operand)].copy_(operand)

    def rounded(result: torch.Tensor) -> torch.Tensor:
        return narrow.get(id(result), result.to(dtype) if result.dtype == torch.float32 else result)

    return pytree.tree_map_only(torch.Tensor, rounded, results)


def _is_narrow(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in _NARROW


def lazy_kernels() -> Any:
    """A context that turns the kernels on, which are off in `__torch_dispatch__`.

    Without them, an operation of several steps (`linalg_pinv`) takes its own lazily conjugated tensors for plain ones.
    """
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()  # the same
    return torch._C._ForceDispatchKeyGuard(include, exclude - _KEYS)  # the same

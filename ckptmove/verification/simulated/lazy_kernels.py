"""Resolve lazy conjugation, negation and zeros of CPU tensors in operations called from `__torch_dispatch__`."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._C import DispatchKey, DispatchKeySet

_KEYS: Final = (
    DispatchKeySet(DispatchKey.Conjugate)
    | DispatchKeySet(DispatchKey.Negative)
    | DispatchKeySet(DispatchKey.ZeroTensor)
)


def lazy_kernels() -> Any:
    """A context that turns the kernels on, which are off in `__torch_dispatch__`.

    Without them, an operation of several steps (`linalg_pinv`) takes its own lazily conjugated tensors for plain ones.
    """
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()  # the same
    return torch._C._ForceDispatchKeyGuard(include, exclude - _KEYS)  # the same

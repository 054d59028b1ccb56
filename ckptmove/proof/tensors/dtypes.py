"""The dtypes of torch, by name."""

from __future__ import annotations

import torch


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name without ``torch.``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype

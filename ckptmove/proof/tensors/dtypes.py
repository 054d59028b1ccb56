"""The dtypes of torch, by name."""

from __future__ import annotations

import torch


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name without ``torch.``.

    Raises:
        AttributeError: if this torch has no dtype of this name.
    """
    dtype: torch.dtype = getattr(torch, name)
    return dtype

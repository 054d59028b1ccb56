"""torch's list of globals that ``weights_only=True`` allows, and its content after a test."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def restored_allow_list(*, empty: bool = False) -> Iterator[None]:
    """Restore the list at the end, and start from an empty one on request.

    Modules of torch (``torch.distributed.tensor``) add their globals once, when they are imported. Those stay in the
    list for later tests.
    """
    before = list(torch.serialization.get_safe_globals())
    if empty:
        torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        after = torch.serialization.get_safe_globals()
        own = [one for one in after if str(getattr(one, "__module__", None)).partition(".")[0] == "torch"]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([*before, *own])

"""What torch asks of `torch.<device>` for a simulated device.

Never keeps a state of its own: draws come from the CPU's generator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class DeviceModule:
    """Stands for the module, as long as the process lives."""

    def __init__(self, count: Callable[[], int], current: Callable[[], int]) -> None:
        """Take down what to ask.

        Args:
            count: how many devices are simulated.
            current: the index of the one that is meant where none is named.
        """
        self._count = count
        self._current = current

    def is_initialized(self) -> bool:
        """Yes: there is nothing to do for it."""
        return True

    def is_available(self) -> bool:
        """Yes, as far as a script can tell."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing to seed: `torch.manual_seed` has seeded the CPU's generator."""

    def device_count(self) -> int:
        """How many devices there are."""
        return self._count()

    def current_device(self) -> int:
        """The one that is meant where none is named."""
        return self._current()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may cast to."""
        return [torch.float16, torch.bfloat16]

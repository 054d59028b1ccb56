"""The command that verifies a file on the machine that it is for, which may have more than one device.

Never opens a file: what is in it has been read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.devices import is_accelerator, split
from ckptmove.wording import command_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.model import Inventory


def verify_command(path: str, options: Sequence[str] = (), *, devices: int = 1) -> str:
    """The command line; ``verify`` counts on one device where it is not told of more.

    Args:
        path: of the checkpoint.
        options: words that follow it.
        devices: how many devices the machine has to have.
    """
    count = ["--devices", str(devices)] if devices > 1 else []
    return command_line(["ckptmove", "verify", path, *options, *count])


def devices_needed(inventory: Inventory) -> int:
    """How many devices of one type a machine has that has every device on which tensors lie."""
    tags = {tensor.device for tensor in inventory.tensors}
    return max((1 + (split(tag)[1] or 0) for tag in tags if is_accelerator(tag)), default=1)

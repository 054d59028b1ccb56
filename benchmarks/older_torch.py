"""What torch came to know later than 2.4, by the way that every torch knows: asked of torch, not of its version."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    import io

#: Says that one process saves, or loads, all of a distributed checkpoint; older torch takes that for granted by itself.
IN_ONE_PROCESS: Final[dict[str, Any]] = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}


def safetensors_table(file: io.BufferedReader) -> tuple[dict[str, Any], int]:
    """The table of a safetensors file, and where its tensors begin: by torch's own reader, where it has one."""
    try:
        from torch.distributed.checkpoint._hf_utils import _get_safetensors_file_metadata
    except ImportError:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length
    table, start = _get_safetensors_file_metadata(file)
    return table, start

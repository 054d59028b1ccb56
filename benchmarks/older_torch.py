"""Use features of newer torch if it has them, and their equivalent in torch 2.4 otherwise."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    import io

#: Arguments to save or load a distributed checkpoint in one process; older torch needs none.
IN_ONE_PROCESS: Final[dict[str, Any]] = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}


def safetensors_table(file: io.BufferedReader) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the offset of its tensors, by torch's own reader if it has one."""
    try:
        from torch.distributed.checkpoint._hf_utils import _get_safetensors_file_metadata
    except ImportError:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length
    table, start = _get_safetensors_file_metadata(file)
    return table, start

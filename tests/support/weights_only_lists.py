"""Record the globals and opcodes that each torch accepts in weights-only mode.

    python tests/support/weights_only_lists.py tests/torch_facts/weights_only_lists.json

adds the installed torch. The file has the list of the oldest torch, and the additions and removals of each later one.
"""

from __future__ import annotations

import io
import json
import pickletools
import sys
from pathlib import Path
from typing import TypeAlias

import torch
from torch import _weights_only_unpickler

Changes: TypeAlias = "dict[str, dict[str, list[str]]]"


def numbers(version: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` as ``(2, 13, 0)``."""
    return tuple(int(part) for part in version.partition("+")[0].split("."))


def opcodes_here() -> set[str]:
    """Names of the opcodes that the installed torch accepts."""
    return {opcode.name for opcode in pickletools.opcodes if _is_known(ord(opcode.code))}


def taken_here() -> list[str]:
    """All that the installed torch accepts: full names of globals, and names of opcodes."""
    return sorted({*_weights_only_unpickler._get_allowed_globals(), *opcodes_here()})


def read(path: Path) -> dict[str, set[str]]:
    """All that each recorded version accepts."""
    changes: Changes = json.loads(path.read_text()) if path.exists() else {}
    taken: set[str] = set()
    lists = {}
    for version, change in changes.items():
        taken = (taken | set(change["added"])) - set(change["removed"])
        lists[version] = taken
    return lists


def write(path: Path, lists: dict[str, set[str]]) -> None:
    changes: Changes = {}
    before: set[str] = set()
    for version in sorted(lists, key=numbers):
        now = lists[version]
        changes[version] = {"added": sorted(now - before), "removed": sorted(before - now)}
        before = now
    rows = ",\n".join(f"{json.dumps(version)}: {json.dumps(change)}" for version, change in changes.items())
    path.write_text(f"{{\n{rows}\n}}\n")


def _is_known(code: int) -> bool:
    """Whether the unpickler knows an opcode."""
    try:
        _weights_only_unpickler.load(io.BytesIO(bytes([code])), encoding="utf-8")
    except Exception as error:  # the argument and the operands are missing
        return str(error) != f"Unsupported operand {code}"
    return True


if __name__ == "__main__":
    recorded = Path(sys.argv[1])
    write(recorded, read(recorded) | {torch.__version__.partition("+")[0]: set(taken_here())})

"""Read and convert every file below a folder, and compare the result with torch.

    python benchmarks/corpus.py FOLDER
    python benchmarks/corpus.py FOLDER --commands

The table has a row for each subfolder. Its columns count files:

* *refused*: ckptmove raises an error of its own.
* *same bytes*: the file is unchanged after a conversion to other devices and back.
* *same tensors*: only its pickle is written differently then.
* *agreed*: torch.load(weights_only=True) or torch.jit.load finds the same name, dtype, shape, stride, offset and device
  for every tensor.
* *not comparable*: torch refuses the file, or has no reader for its format.

Differences from torch and tracebacks are listed below the table, and make the exit code 1.

With ``--commands``, it runs every command that ``inspect`` and ``convert`` print for each file, and lists those that
fail: see ``printed.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from agreement import NotComparableError, differences, round_trip
from printed import failing

from ckptmove.api.functions import inspect
from ckptmove.errors import CkptMoveError

COLUMNS = ("files", "read", "refused", "converted", "same bytes", "same tensors", "agreed", "not comparable")


@dataclass(slots=True)
class Row:
    """Counts for the files of one kind: by column, and by kind of error for refused files."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def cells(self) -> list[str]:
        """The counts in the order of the columns, then the errors."""
        errors = ", ".join(f"{kind} {count}" for kind, count in self.refusals.most_common())
        return [*(str(self.counts[column]) for column in COLUMNS), errors]


def look_at(path: Path, row: Row, scratch: Path) -> list[str]:
    """Read, convert and compare one file; return what is wrong."""
    row.counts["files"] += 1
    wrong = []
    try:
        inventory = inspect(str(path)).inventory
        row.counts["read"] += 1
        try:
            wrong += differences(path, inventory)
            row.counts["agreed"] += not wrong
        except NotComparableError:
            row.counts["not comparable"] += 1
        back = round_trip(path, scratch)
        row.counts["converted"] += 1
        row.counts[back] += 1
        wrong += ["other tensors after a conversion to other devices and back"] if back == "other tensors" else []
    except CkptMoveError as error:
        row.counts["refused"] += 1
        row.refusals[error.kind] += 1
    except Exception as error:
        wrong.append(f"traceback: {type(error).__name__}: {error}")
    return wrong


def print_table(rows: dict[str, Row]) -> None:
    """Print a line for each kind, and a line for all."""
    total = Row()
    for row in rows.values():
        total.counts.update(row.counts)
        total.refusals.update(row.refusals)
    lines = [["kind", *COLUMNS, "refused by"]]
    lines += [[kind, *row.cells()] for kind, row in [*sorted(rows.items()), ("all", total)]]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for kind, *figures, errors in lines:
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:-1], strict=True)]
        print("  ".join([kind.ljust(widths[0]), *cells, errors]).rstrip())


def main() -> int:
    """Print the table of a folder; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Read and convert every file below a folder, and compare it with torch."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commands", action="store_true", help="Run the commands that are printed for each file.")
    options = parser.parse_args()
    folder, rows = options.folder, dict[str, Row]()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if options.commands:
        lines = [f"{path.relative_to(folder)}: {line}" for path in files for line in failing(path)]
        print("\n".join([f"files: {len(files)}; commands that fail: {len(lines)}", *lines]))
        return 1 if lines else 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for path in files:
            parts = path.relative_to(folder).parts
            row = rows.setdefault(parts[0] if len(parts) > 1 else ".", Row())
            wrong += [f"{path.relative_to(folder)}: {line}" for line in look_at(path, row, Path(scratch))]
    print_table(rows)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""A table of what ckptmove makes of every file below a folder, and whether torch agrees.

    python benchmarks/corpus.py FOLDER

A row for each of its subfolders, which say what kind of files they hold. A file is *refused* by an error of ckptmove's
own; *same bytes* says how many were so after every tensor that moves had been moved to another device and back, *same
tensors* how many held the same although their pickle is written otherwise then;
*agreed* how many are, tensor by tensor, what torch.load(weights_only=True) or torch.jit.load says: name, dtype, shape,
stride, offset, device. torch cannot be asked about the rest: it refuses them, or has no reader for them. Whatever
disagrees, and every traceback, is listed below the table, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from agreement import NotComparableError, differences, round_trip

from ckptmove.api.functions import inspect
from ckptmove.errors import CkptMoveError

COLUMNS = ("files", "read", "refused", "converted", "same bytes", "same tensors", "agreed", "not comparable")


@dataclass(slots=True)
class Row:
    """What was counted of the files of one kind: by column, and the kinds of the errors that refused some."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def cells(self) -> list[str]:
        """The figures, in the order of the columns; the errors last."""
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
        wrong += ["other tensors after the way there and back"] if back == "other tensors" else []
    except CkptMoveError as error:
        row.counts["refused"] += 1
        row.refusals[error.kind] += 1
    except Exception as error:
        wrong.append(f"traceback: {type(error).__name__}: {error}")
    return wrong


def print_table(rows: dict[str, Row]) -> None:
    """Print a line for each kind and one for all."""
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
    parser = argparse.ArgumentParser(description="What ckptmove makes of every file below a folder.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rows: dict[str, Row] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            parts = path.relative_to(folder).parts
            row = rows.setdefault(parts[0] if len(parts) > 1 else ".", Row())
            wrong += [f"{path.relative_to(folder)}: {line}" for line in look_at(path, row, Path(scratch))]
    print_table(rows)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Convert every checkpoint with an optimizer below a folder, and print the verdict of `verify`.

    python benchmarks/verdicts.py FOLDER [--to DEVICE]

Each line has a file, its optimizers, the verdict, and the codes of warnings and errors. Files without a checkpoint or
an optimizer are counted at the end. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import ckptmove
from ckptmove.cli.render.verification import outcome
from ckptmove.errors import CkptMoveError
from ckptmove.model import Severity


def main() -> int:
    """Print the verdicts of a folder; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Convert every checkpoint below a folder, and print the verdict of verify."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", default="cuda:0", help="device to convert for (default: cuda:0)")
    asked = parser.parse_args()
    without, failed = 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        for path in sorted(path for path in asked.folder.rglob("*") if path.is_file()):
            try:
                optimizers = ckptmove.inspect(str(path)).inventory.optimizers
                if not optimizers:
                    without += 1
                    continue
                converted = f"{scratch}/{path.name}"
                ckptmove.convert(str(path), to=asked.to, output=converted, force=True)
                result = ckptmove.verify(converted, to=asked.to)
            except CkptMoveError:
                without += 1
                continue
            failed += not result.passed
            codes = sorted({one.code for one in result.findings if one.severity is not Severity.INFO})
            names = ", ".join(str(one.algorithm) for one in optimizers)
            found = f" ({', '.join(codes)})" if codes else ""
            print(f"{path.relative_to(asked.folder)}: {names}: {outcome(result)}{found}", flush=True)
    print(f"{without} more: not a checkpoint of torch.save, or without an optimizer")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

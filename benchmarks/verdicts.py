"""What `verify` says of every checkpoint with an optimizer below a folder, once it is converted for a device.

    python benchmarks/verdicts.py FOLDER [--to DEVICE]

A line for each file: its optimizers, the verdict, and the codes of what was found in it that is more than a note. Those
that are no checkpoints, or have no optimizer, are counted at the end. The exit code is 1 where a check failed.
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
    parser = argparse.ArgumentParser(description="What verify says of every checkpoint below a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", default="cuda:0", help="the device that each is converted for (default: cuda:0)")
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
    print(f"{without} more: no checkpoint of torch.save, or none with an optimizer")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

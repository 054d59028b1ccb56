"""Measure the first load of a process: ``ckptmove.load(mmap=True)`` next to ``torch.load(mmap=True)``.

The time begins after ``import torch`` and includes the import of ckptmove. Processes run in pairs, and the table has
medians of their processor time: of the load, and of the whole process.

    python benchmarks/first_load.py              # 11 pairs of each row
    python benchmarks/first_load.py --pairs 31
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MAKE = """
import sys, torch
path, tensors, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = {f"layers.{i}.weight": torch.zeros(size // 4 // tensors) for i in range(tensors)}
torch.save({"model": model, "epoch": 3}, path)
"""
LOAD = """
import json, sys, time, torch
began = time.process_time()
{load}(sys.argv[1], mmap=True, map_location={map_location!r})
done = time.process_time()
print(json.dumps([done - began, done]))
"""
LOADS = {"ckptmove": "import ckptmove; ckptmove.load", "torch": "torch.load"}
#: Number of tensors and bytes of each file.
FILES = ((64, 10**9), (600, 10**9), (2_320, 10**9))


def run(name: str, path: Path, map_location: str | None) -> list[float]:
    """Seconds of processor time of the load and of the whole process."""
    code = LOAD.format(load=LOADS[name], map_location=map_location)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code, str(path)]
    found: list[float] = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    return found


def main() -> None:
    """Make the files, run the pairs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=11, help="counted pairs of each row (default 11)")
    pairs = parser.parse_args().pairs
    print("| tensors | map_location | ckptmove ms | torch ms | ckptmove, whole s | torch, whole s |")
    print("|---:|---|---:|---:|---:|---:|")
    for tensors, size in FILES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.pt"
            subprocess.run([sys.executable, "-c", MAKE, str(path), str(tensors), str(size)], check=True)
            for map_location in (None, "cpu"):
                rounds = [[run(name, path, map_location) for name in LOADS] for _ in range(pairs + 1)][1:]
                ours, theirs = (
                    [statistics.median(times) for times in zip(*one, strict=True)] for one in zip(*rounds, strict=True)
                )
                row = f"{1000 * ours[0]:.0f} | {1000 * theirs[0]:.0f} | {ours[1]:.2f} | {theirs[1]:.2f}"
                print(f"| {tensors:,} | {map_location} | {row} |", flush=True)


if __name__ == "__main__":
    main()

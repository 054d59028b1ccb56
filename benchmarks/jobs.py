"""Measure ``--jobs 1`` and ``--jobs 2`` next to the scripts that load everything. Linux only.

    python benchmarks/jobs.py                      # 3 GB
    python benchmarks/jobs.py --size 9e9 --rounds 1 --folder /dev/shm

The checkpoint is a model with Adam, as one file of ``torch.save`` and as a folder of ``dcp.save`` with 8 files. The
commands of a comparison run in turn. Memory is the anonymous memory of all processes of a command, at its peak. Pages
that forks share count once, and pages of mapped files do not count. It is measured in a run of its own: to watch it
takes a tenth of a core, which two jobs do not leave free.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from side_by_side import MAKE, MIB, STEP, Contender

#: Largest number of jobs.
JOBS = 2
TENSORS = 300
MAKE_FOLDER = """
import sys, torch, warnings
from torch.distributed.checkpoint import FileSystemWriter, save
warnings.simplefilter("ignore")
whole = torch.load(sys.argv[1], mmap=True, map_location="cpu")
names = list(whole["model"])
optimizer = whole["optimizer"]
optimizer["state"] = {names[index]: state for index, state in optimizer["state"].items()}
optimizer["param_groups"][0]["params"] = names
save(whole, storage_writer=FileSystemWriter(sys.argv[2], thread_count=8), no_dist=True)
"""
DCP_TO_TORCH = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""


class Memory:
    """Peak of the anonymous memory of all processes below this one, in a ``with`` statement."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Memory:
        """Start to watch."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, sum(map(anonymous_bytes, descendants(os.getpid()))))


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have started."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in tasks.read_text().split()]
        except OSError:  # it has ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process, with its part of the pages that it shares with forks; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))


def comparisons(file: Path, folder: Path, output: Path) -> dict[str, list[Contender]]:
    """The contenders of each comparison, by its label."""
    python = sys.executable
    gather = ["convert", str(folder), "-o", str(output)]
    commands = {
        "verify, a file": ["verify", str(file), "--to", "cuda:3"],
        "verify, a folder": ["verify", str(folder), "--to", "cpu"],
        "inspect --check, a file": ["inspect", "--check", str(file)],
        "inspect --check, a folder": ["inspect", "--check", str(folder)],
        "convert a folder to a file": gather,
    }
    table = {
        label: [
            Contender(f"--jobs {jobs}", [python, "-m", "ckptmove", *words, "--jobs", str(jobs)], output)
            for jobs in range(1, JOBS + 1)
        ]
        for label, words in commands.items()
    }
    table["verify, a file"].append(Contender("load all and step once", [python, "-c", STEP, str(file)]))
    loaded = Contender("dcp_to_torch_save", [python, "-c", DCP_TO_TORCH, str(folder), str(output)], output)
    table["convert a folder to a file"].append(loaded)
    return table


def main() -> None:
    """Make the checkpoint, run the contenders in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=3e9, help="bytes of the checkpoint (default 3e9)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default 3)")
    parser.add_argument("--folder", type=Path, help="folder for the files (default: a temporary folder)")
    options = parser.parse_args()
    made = Path(tempfile.mkdtemp(prefix="ckptmove-jobs-", dir=options.folder))
    file, folder, output = made / "one.pt", made / "run", made / "output.pt"
    try:
        subprocess.run([sys.executable, "-c", MAKE, str(file), str(TENSORS), str(int(options.size))], check=True)
        subprocess.run([sys.executable, "-c", MAKE_FOLDER, str(file), str(folder)], check=True)
        print("| what | command | median s | min - max s | of the first | peak MiB |\n|---|---|---:|---:|---:|---:|")
        for label, contenders in comparisons(file, folder, output).items():
            peaks = {}
            for one in contenders:
                with Memory() as memory:
                    one.run()
                peaks[one.name] = memory.peak_bytes
                one.seconds.clear()
            for _ in range(options.rounds):
                for one in contenders:
                    one.run()
            first = statistics.median(contenders[0].seconds)
            for one in contenders:
                median, spread = statistics.median(one.seconds), f"{min(one.seconds):.2f} - {max(one.seconds):.2f}"
                peak = peaks[one.name] / MIB
                print(f"| {label} | {one.name} | {median:.2f} | {spread} | {median / first:.2f} | {peak:.0f} |")
    finally:
        shutil.rmtree(made)


if __name__ == "__main__":
    main()

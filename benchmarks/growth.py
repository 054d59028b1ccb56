"""Measure how time and memory grow with the number of tensors, records, bytes and views of one storage.

    python benchmarks/growth.py                     # the table
    python benchmarks/growth.py --largest 100000    # at most this many tensors, records or views

Each kind of file is made in several sizes. Each command runs once on each file, as a whole process. A row has the
ratios of size, time and memory to the row above: growth is linear if the ratio of time is at most that of size. The
first row is the start-up, which the other rows include. Times are processor times, so that other work on the machine
does not change them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from side_by_side import LOAD, LOAD_MMAP, MIB, Contender

#: A model with its Adam states. Every tensor has its own record.
MAKE_TENSORS = """
import sys, torch
path, count = sys.argv[1], int(sys.argv[2])
third = count // 3
model = {f"layers.{i}.weight": torch.full((2,), 1.0) for i in range(count - 2 * third)}
state = {i: {"exp_avg": torch.full((2,), 1.0), "exp_avg_sq": torch.full((2,), 1.0)} for i in range(third)}
group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": list(range(third))}
torch.save({"model": model, "optimizer": {"state": state, "param_groups": [group]}}, path)
"""
#: One storage whose bytes are not written: the file has a hole in their place.
MAKE_HOLE = """
import sys, torch
with torch.serialization.skip_data():
    torch.save({"model": {"weight": torch.empty(int(sys.argv[2]) // 4)}}, sys.argv[1])
"""
MAKE_VIEWS = """
import sys, torch
count = int(sys.argv[2])
torch.save({"model": {f"layers.{i}.weight": view for i, view in enumerate(torch.zeros(count, 8))}}, sys.argv[1])
"""
#: The ``.metadata`` of a 70B model with AdamW, and files that are holes.
MAKE_RANKS = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from sharded_llama import make
folder = Path(sys.argv[1])
folder.mkdir()
make(folder, int(sys.argv[2]))
"""
#: Torch's reader executes the pickle, and checks nothing.
READ_METADATA = """
import sys
from torch.distributed.checkpoint import FileSystemReader
FileSystemReader(sys.argv[1]).read_metadata()
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """Files that differ in one size.

    Attributes:
        figure: what the size counts.
        recipe: script that makes a file; its arguments are the path and the size.
        sizes: the sizes, ascending.
        commands: names of the measured commands.
    """

    figure: str
    recipe: str
    sizes: tuple[int, ...]
    commands: tuple[str, ...]


KINDS = (
    Kind("tensors", MAKE_TENSORS, (10_000, 100_000, 1_000_000), ("inspect", "convert", "torch.load")),
    Kind("ranks of `dcp.save`, 70B with AdamW", MAKE_RANKS, (64, 512), ("inspect", "read_metadata")),
    Kind("records (zip64)", MAKE_TENSORS, (35_000, 70_000), ("inspect --check", "convert", "convert --in-place")),
    Kind("bytes (sparse)", MAKE_HOLE, (500_000_000, 5_000_000_000), ("inspect", "convert --in-place", "mmap=True")),
    Kind("views of a storage", MAKE_VIEWS, (1_000, 10_000, 100_000), ("inspect", "convert", "torch.load")),
)


def contenders(source: Path, output: Path) -> dict[str, Contender]:
    """The commands for a file, by name."""
    ours = [sys.executable, "-m", "ckptmove"]
    convert = [*ours, "convert", str(source), "--to", "cuda:0"]
    return {
        "inspect": Contender("ckptmove inspect", [*ours, "inspect", str(source)]),
        "inspect --check": Contender("ckptmove inspect --check", [*ours, "inspect", str(source), "--check"]),
        "convert": Contender("ckptmove convert", [*convert, "-o", str(output)], output),
        "convert --in-place": Contender("ckptmove convert --in-place", [*convert, "--in-place"]),
        "torch.load": Contender("torch.load(weights_only=True)", [sys.executable, "-c", LOAD, str(source)]),
        "read_metadata": Contender(
            "FileSystemReader.read_metadata()", [sys.executable, "-c", READ_METADATA, str(source)]
        ),
        "mmap=True": Contender("torch.load(mmap=True)", [sys.executable, "-c", LOAD_MMAP, str(source)]),
    }


def measure(kind: Kind, largest: int, folder: Path) -> None:
    """Print the rows of one kind of file, grouped by command."""
    rows: dict[str, list[tuple[int, Contender]]] = {name: [] for name in kind.commands}
    for size in kind.sizes:
        if size > largest and kind.recipe != MAKE_HOLE:
            continue
        source, output = folder / "source.pt", folder / "output.pt"
        subprocess.run([sys.executable, "-c", kind.recipe, str(source), str(size)], check=True)
        for name in kind.commands:
            contender = contenders(source, output)[name]
            contender.run()
            output.unlink(missing_ok=True)
            rows[name].append((size, contender))
        shutil.rmtree(source) if source.is_dir() else source.unlink()
    for found in rows.values():
        before: tuple[int, float, int] | None = None
        for size, contender in found:
            now = size, contender.cpu_seconds[0], contender.peak_bytes[0]
            ratios = " | ".join(f"{new / old:.1f}" for new, old in zip(now, before, strict=True)) if before else "| |"
            print(
                f"| {kind.figure} | {contender.name} | {size:,} | {now[1]:.2f} | {now[2] / MIB:.0f} | {ratios} |",
                flush=True,
            )
            before = now


def main() -> None:
    """Make the files, run the commands, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=1_000_000, help="maximum number of tensors, records or views")
    parser.add_argument("--folder", type=Path, help="folder for the files (default: a temporary folder)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckptmove-growth-", dir=options.folder))
    try:
        print("| what grows | command | how many | CPU seconds | peak MiB | size ratio | time ratio | memory ratio |")
        print("|---|---|---:|---:|---:|---:|---:|---:|")
        start = Contender("ckptmove --help", [sys.executable, "-m", "ckptmove", "--help"])
        start.run()
        print(f"| nothing | {start.name} | 0 | {start.cpu_seconds[0]:.2f} | {start.peak_bytes[0] / MIB:.0f} | | | |")
        for kind in KINDS:
            measure(kind, options.largest, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

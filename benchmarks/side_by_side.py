"""Measure time and memory of ckptmove next to the scripts that people use today.

Every run is a whole process, measured by the operating system (``wait4``). The commands of a comparison run in turn, so
that a slow phase of the machine slows all of them. The table has medians and their ratios.

    python benchmarks/side_by_side.py                 # the table
    python benchmarks/side_by_side.py --runs 9 --keep # more runs, keep the files
    python benchmarks/side_by_side.py --large         # 3 GB as well

A warm-up compiles the bytecode first, as pip does when it installs a package.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1024 * 1024
#: Number of tensors from which `verify` is not compared: it would take longer than all other comparisons.
MANY = 10_000

MAKE = """
import sys, torch
path, tensors, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
# A step counter of 4 bytes stays on the CPU, where torch creates it.
tag = lambda storage: "cuda:" + str(3) if storage.nbytes() > 4 else None
torch.serialization.register_package(1, tag, lambda storage, location: None)
each = size // 4 // tensors
third = max(tensors // 3, 1)
model = {f"layers.{i}.weight": torch.randn(each) for i in range(third)}
state = {i: {"step": torch.tensor(9.0), "exp_avg": torch.randn(each), "exp_avg_sq": torch.rand(each) + 1}
         for i in range(third)}
group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False,
         "params": list(range(third))}
torch.save({"model": model, "optimizer": {"state": state, "param_groups": [group]}, "epoch": 3}, path)
"""
LOAD_MMAP = """
import sys, torch
checkpoint = torch.load(sys.argv[1], mmap=True, map_location="cpu", weights_only=True)
for name, tensor in checkpoint["model"].items():
    print(name, tensor.device, tuple(tensor.shape))
"""
LOAD_MAPPED = """
import sys, torch
torch.load(sys.argv[1], mmap=True, map_location="cpu", weights_only=True)
"""
OUR_LOAD = """
import sys, torch, ckptmove
ckptmove.load(sys.argv[1], map_location="cpu")
"""
OUR_LOAD_MAPPED = """
import sys, torch, ckptmove
ckptmove.load(sys.argv[1], map_location="cpu", mmap=True)
"""
LOAD = """
import sys, torch
torch.load(sys.argv[1], map_location="cpu", weights_only=True)
"""
LOAD_SAVE = """
import sys, torch
torch.save(torch.load(sys.argv[1], map_location="cpu", weights_only=True), sys.argv[2])
"""
LOAD_MMAP_SAVE = """
import sys, torch
torch.save(torch.load(sys.argv[1], mmap=True, map_location="cpu", weights_only=True), sys.argv[2])
"""
STEP = """
import sys, torch
checkpoint = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
parameters = [torch.nn.Parameter(value) for value in checkpoint["model"].values()]
optimizer = torch.optim.Adam(parameters)
optimizer.load_state_dict(checkpoint["optimizer"])
for parameter in parameters:
    parameter.grad = torch.randn_like(parameter)
optimizer.step()
assert all(parameter.isfinite().all() for parameter in parameters)
"""
COPY = 'cp "$1" "$2" && sync "$2"'


@dataclass
class Contender:
    """A command of a comparison, and its measurements.

    Attributes:
        name: name in the table.
        command: the command line.
        output: the file that it writes, removed before each run.
        edits: for a command that works in place: the file that is copied to ``output`` before each run.
        seconds: elapsed time of each run.
        cpu_seconds: processor time of each run.
        peak_bytes: largest resident set of each run.
    """

    name: str
    command: list[str]
    output: Path | None = None
    edits: Path | None = None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Run the command once, and measure it."""
        if self.output is not None:
            self.output.unlink(missing_ok=True)
            if self.edits is not None:
                shutil.copyfile(self.edits, self.output)
        os.sync()  # pending writes of the run before would be counted here
        began = time.perf_counter()
        process = subprocess.Popen(
            self.command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        )
        error = process.stderr.read() if process.stderr else b""
        _, status, usage = os.wait4(process.pid, 0)
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(usage.ru_utime + usage.ru_stime)
        self.peak_bytes.append(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"{self.name} failed with {process.returncode}: {error.decode()}")


def comparisons(folder: Path, sizes: dict[str, tuple[int, int]]) -> dict[str, list[Contender]]:
    """The contenders of each comparison, by its label; ratios are to the first one."""
    python = sys.executable
    ours = [python, "-m", "ckptmove"]
    table: dict[str, list[Contender]] = {}
    for label, (tensors, nbytes) in sizes.items():
        source = folder / f"{label.replace(' ', '-').replace(',', '')}.pt"
        subprocess.run([python, "-c", MAKE, str(source), str(tensors), str(nbytes)], check=True)
        table[f"inspect, {label}"] = [
            Contender("ckptmove inspect", [*ours, "inspect", str(source)]),
            Contender("torch.load(mmap=True) script", [python, "-c", LOAD_MMAP, str(source)]),
            Contender("torch.load(weights_only=True) script", [python, "-c", LOAD, str(source)]),
        ]
        table[f"load, {label}"] = [
            Contender("ckptmove.load script", [python, "-c", OUR_LOAD, str(source)]),
            Contender("torch.load script", [python, "-c", LOAD, str(source)]),
        ]
        table[f"load(mmap=True), {label}"] = [
            Contender("ckptmove.load(mmap=True) script", [python, "-c", OUR_LOAD_MAPPED, str(source)]),
            Contender("torch.load(mmap=True) script", [python, "-c", LOAD_MAPPED, str(source)]),
        ]
        output = folder / "output.pt"  # one file for all, to save disk space
        convert = [*ours, "convert", str(source), "--to", "cuda:0", "-o", str(output)]
        table[f"convert, {label}"] = [
            Contender("ckptmove convert", convert, output),
            Contender("ckptmove convert --no-check", [*convert, "--no-check"], output),
            Contender(
                "ckptmove convert --in-place",
                [*ours, "convert", str(output), "--to", "cuda:0", "--in-place"],
                output,
                edits=source,
            ),
            Contender("cp + fsync", ["sh", "-c", COPY, "sh", str(source), str(output)], output),
            Contender("torch.load + torch.save script", [python, "-c", LOAD_SAVE, str(source), str(output)], output),
            Contender("the same with mmap=True", [python, "-c", LOAD_MMAP_SAVE, str(source), str(output)], output),
        ]
        if tensors < MANY:
            table[f"verify, {label}"] = [
                Contender("ckptmove verify, simulated", [*ours, "verify", str(source), "--to", "cuda:3"]),
                Contender("load all and step once, on the CPU", [python, "-c", STEP, str(source)]),
            ]
    table["start-up"] = [
        Contender("ckptmove --help", [*ours, "--help"]),
        Contender("python -c 'import torch'", [python, "-c", "import torch"]),
    ]
    return table


def main() -> None:
    """Make the files, run the contenders in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each command (default 5)")
    parser.add_argument("--folder", type=Path, help="folder for the files (default: a temporary folder)")
    parser.add_argument("--large", action="store_true", help="compare files of 3 GB as well")
    parser.add_argument("--keep", action="store_true", help="keep the files")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckptmove-bench-", dir=options.folder))
    sizes = {
        "3 MB": (30, 3_000_000),
        "300 MB": (300, 300_000_000),
        "1,000 tensors": (1_000, 4_000_000),
        "100,000 tensors": (100_000, 1_600_000),
    }
    if options.large:
        sizes["3 GB"] = (300, 3_000_000_000)
    try:
        table = comparisons(folder, sizes)
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {options.runs} runs\n"
        )
        print("| what | command | median s | min - max s | ratio | peak MiB |")
        print("|---|---|---:|---:|---:|---:|")
        for label, contenders in table.items():
            for _ in range(options.runs + 1):  # the first is a warm-up
                for contender in contenders:
                    contender.run()
            show(label, contenders)
    finally:
        if not options.keep:
            shutil.rmtree(folder)


def show(label: str, contenders: list[Contender]) -> None:
    """Print the rows of one comparison; a ratio of 2 is twice as slow as ckptmove."""
    base = statistics.median(contenders[0].seconds[1:])
    for contender in contenders:
        seconds = contender.seconds[1:]
        median = statistics.median(seconds)
        peak = max(contender.peak_bytes) / MIB
        spread = f"{min(seconds):.2f} - {max(seconds):.2f}"
        print(f"| {label} | {contender.name} | {median:.2f} | {spread} | {median / base:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    main()

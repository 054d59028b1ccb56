"""Measure `inspect`, `convert`, `diff` and `verify` on files that need much time or memory.

    python benchmarks/hostile.py [FAMILY...] [--size 1000000] [--commands inspect json convert dry-run diff verify]

The table has a row for each family, with the worst file of each figure. Seconds are processor time, which other work on
the machine does not change. ``EACH=1`` prints every run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fuzz import whole_bombs
from fuzz.bombs import by_family
from fuzz.folders import folders

if TYPE_CHECKING:
    from collections.abc import Callable

#: Maximum number of seconds for a run.
PATIENCE = 300
COMMANDS = {
    "inspect": ["inspect", "{path}", "--tensors", "--tree", "--globals", "--check", "--expect", "cpu", "-v"],
    "json": ["inspect", "{path}", "--json"],
    "convert": ["convert", "{path}", "--to", "mps", "--cast", "--rewrite-strings", "--force", "-o", "{out}"],
    "dry-run": ["convert", "{path}", "--to", "mps", "--dry-run"],
    "diff": ["diff", "{path}", "{path}"],
    "verify": ["verify", "{path}", "--to", "cuda:0"],
}
#: The default: without `verify`, which imports torch in each run, and `dry-run`, which `convert` includes.
USUAL = [name for name in COMMANDS if name not in {"verify", "dry-run"}]
#: Run in a small process: the peak memory of a process includes that of its parent before the fork.
MEASURE = """
import os, signal, sys, time
began = time.perf_counter()
pid = os.fork()
if not pid:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    os.execv(sys.argv[2], sys.argv[2:])
signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
signal.alarm(int(sys.argv[1]))
_, status, usage = os.wait4(pid, 0)
seconds = usage.ru_utime + usage.ru_stime, time.perf_counter() - began
print(os.waitstatus_to_exitcode(status), *seconds, usage.ru_maxrss / 1024)
"""


@dataclass(frozen=True)
class Run:
    """One command on one file.

    Attributes:
        name: name of the file.
        command: a key of ``COMMANDS``.
        code: exit code; negative for a signal.
        seconds: processor time of all processes.
        clock: elapsed seconds.
        mib: peak of resident memory of the largest process.
    """

    name: str
    command: str
    code: int
    seconds: float
    clock: float
    mib: float

    @property
    def named(self) -> str:
        """The file and the command."""
        return f"({self.name}, {self.command})"


_SECONDS, _CLOCK, _MEMORY = map(attrgetter, ("seconds", "clock", "mib"))


def measured(name: str, command: str, words: list[str]) -> Run:
    """Run a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", MEASURE, str(PATIENCE), sys.executable, "-m", "ckptmove", *words],
        stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, text=True,
    )  # fmt: skip
    code, seconds, clock, mib = done.stdout.split()
    return Run(name, command, int(code), float(seconds), float(clock), float(mib))


def family(name: str, recipes: dict[str, Callable[[Path], None]], commands: dict[str, list[str]]) -> list[Run]:
    """Run every command on every file of a family, and print its row."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe, make in recipes.items():
            path, out = Path(folder) / "hostile", Path(folder) / "out"
            make(path)
            for command, words in commands.items():
                run = measured(recipe, command, [word.format(path=path, out=out) for word in words])
                runs.append(run)
                subprocess.run(["rm", "-rf", str(out)], check=True)
                if os.environ.get("EACH"):
                    figures = f"{run.code:4} {run.seconds:7.2f} s {run.clock:7.2f} s {run.mib:8.0f} MiB"
                    print(f"    {recipe:45} {command:8} {figures}", flush=True)
            subprocess.run(["rm", "-rf", str(path)], check=True)
    slowest, longest, largest = (max(runs, key=key) for key in (_SECONDS, _CLOCK, _MEMORY))
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(Counter(run.code for run in runs).items()))
    print(
        f"| {name} | {len(recipes)} | {codes} | {slowest.seconds:.1f} s {slowest.named}"
        f" | {longest.clock:.1f} s {longest.named} | {largest.mib:.0f} MiB {largest.named} |",
        flush=True,
    )
    return runs


def written(make: Callable[[], bytes]) -> Callable[[Path], None]:
    """Turn a recipe that returns bytes into one that writes a file."""

    def write(path: Path) -> None:
        path.write_bytes(make())

    return write


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=USUAL)
    asked = parser.parse_args()
    commands = {name: COMMANDS[name] for name in asked.commands}
    print(
        "| family | inputs | exit codes | worst time | worst elapsed time | worst memory |\n|---|---:|---|---|---|---|"
    )
    runs: list[Run] = []
    every = {
        name: {recipe: written(make) for recipe, make in recipes.items()}
        for name, recipes in (by_family(asked.size) | whole_bombs.by_family(asked.size)).items()
    }
    every["directories"] = folders(asked.size)
    every["distributed checkpoints"] = whole_bombs.folders(asked.size)
    for name, recipes in every.items():
        if not asked.families or name in asked.families:
            runs += family(name, recipes, commands)
    sys.exit(any(run.code not in {0, 1, 3, 4} for run in runs))


if __name__ == "__main__":
    main()

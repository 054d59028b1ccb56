"""Count the device bugs in training scripts that `verify --script` names, and that its fixes remove.

``python benchmarks/device_bugs.py`` runs each script of `scripts/`, and each of its mutants (`mutations.py`), on a
simulated ``cuda:0``. The suggested fix is pasted and the script run again, up to `RUNS` times. Every script, and every
script that ends clean, also has to train and resume on the CPU without `ckptmove`.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parent
# Tensors are small, and there is a process for each processor.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(ROOT.parent / "tests" / "support"))

import torch._dynamo  # noqa: F401  # optimizers import it; here, before children are forked
from mutations import CHANGES_KEYS, KINDS, Mutant, mutants
from warm_worker import Servers

import ckptmove
from ckptmove.proof.processes import child
from ckptmove.proof.source_edits import Edit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SCRIPTS: Final = ROOT / "scripts"
#: Maximum number of runs for a bug to be fixed; the first run finds it.
RUNS: Final = 3
#: Number of runs after which a script is given up.
_MOST_RUNS: Final = 5
_SECONDS: Final = 120
_HEALTHY: Final = "healthy"
#: Mutants that are no bugs on a GPU, with the reason.
HARMLESS: Final[dict[tuple[str, str], str]] = {
    ("amp_recipe", "state"): "an item of a CPU tensor is set from a tensor without dimensions: a copy",
    ("clip", "created"): "an index may be on the CPU",
    ("dqn", "index"): "a mask that indexes may be on the CPU",
    ("imagenet", "input"): "`nn.DataParallel` moves the input",
    ("imagenet", "late_move"): "`nn.DataParallel` moved the model",
    ("imagenet", "model"): "`nn.DataParallel` moves the model, with one GPU",
    ("memory_bank", "created"): "an index may be on the CPU",
    ("mlm", "index"): "a tensor without dimensions may be on the CPU",
    ("nerf", "index"): "an index may be on the CPU",
    ("neural_ode", "index"): "an index may be on the CPU",
    ("neural_ode", "state"): "the steps of time are tensors without dimensions",
    ("quantile", "index"): "an index may be on the CPU",
    ("simclr", "index"): "a mask that indexes may be on the CPU",
    ("timm_style", "index"): "an index may be on the CPU",
    ("vae", "state"): "an item of the tensor has no dimensions",
}


@dataclass(frozen=True)
class Row:
    """The result of one script.

    Attributes:
        script: its name.
        kind: the bug in it; ``healthy`` for none.
        status: of the check *script* at the first run; ``not on the cpu`` if plain Python cannot run it.
        named: whether the report names the tensor or a line of the bug.
        runs: runs until the check passed; 0 if it never did.
        report: detail of the check at the first run.
        fixes: each pasted fix, with its place.
        end: report of the last run.
    """

    script: str
    kind: str
    status: str
    named: bool
    runs: int
    report: str
    fixes: str
    end: str

    @property
    def is_fixed(self) -> bool:
        """Whether the script was clean within `RUNS` runs."""
        return 0 < self.runs <= RUNS


def main() -> None:
    """Run the scripts, write each result to a table, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a script, a kind, or SCRIPT-KIND")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("device_bugs.tsv"), help="results, one line for each run")
    parser.add_argument("--resume", action="store_true", help="keep the results that are there, and run the others")
    parser.add_argument("--keep", type=Path, help="folder for each version of each script (default: a temporary one)")
    options = parser.parse_args()
    done = _read(options.results) if options.resume and options.results.exists() else []
    known = {(row.script, row.kind) for row in done}
    tasks = [one for one in _tasks(options.only) if one not in known]
    with tempfile.TemporaryDirectory() as scratch, options.results.open("a" if done else "w", newline="") as file:
        table = csv.DictWriter(file, [one.name for one in fields(Row)], delimiter="\t")
        if not done:
            table.writeheader()
        folder = str((options.keep or Path(scratch)).resolve())
        processes = multiprocessing.get_context("spawn")
        # Workers of multiprocessing.Pool cannot start processes.
        with ProcessPoolExecutor(options.jobs, processes, _warm_up, (folder,)) as pool:
            for future in as_completed([pool.submit(run, task) for task in tasks]):
                row = future.result()
                done.append(row)
                table.writerow(asdict(row))
                file.flush()
                print(f"{row.script} {row.kind}: {row.status}, {row.runs} runs", file=sys.stderr)
    print(summary(done))


def _tasks(only: Iterable[str]) -> list[tuple[str, str]]:
    found = []
    for path in sorted(SCRIPTS.glob("*.py")):
        kinds = [_HEALTHY, *(one.kind for one in mutants(path.read_text()))]
        found += [(path.stem, kind) for kind in kinds]
    wanted = set(only)
    return [(name, kind) for name, kind in found if not wanted or wanted & {name, kind, f"{name}-{kind}"}]


def _read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [Row(**{**row, "named": row["named"] == "True", "runs": int(row["runs"])}) for row in rows]  # type: ignore[arg-type]


# One script, in a process of the pool

_FOLDER = Path()


def _warm_up(folder: str) -> None:
    """Fork the children of `verify` in this process from a server."""
    global _FOLDER  # noqa: PLW0603  # set once, in each process of the pool
    _FOLDER = Path(folder)
    vars(child)["subprocess"] = SimpleNamespace(
        Popen=Servers().start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


def run(task: tuple[str, str]) -> Row:
    """Run one script, with its fixes, until it passes or no fix is known."""
    name, kind = task
    source = (SCRIPTS / f"{name}.py").read_text()
    mutant = next((one for one in mutants(source) if one.kind == kind), Mutant(kind, source, frozenset(), frozenset()))
    folder = _FOLDER / f"{name}-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    text, seen = mutant.source, list[dict[str, Any]]()
    fixes: list[str] = []
    status, end, runs = "", "", 0
    for run in range(1, _MOST_RUNS + 1):
        path, checkpoint = folder / f"{name}_{run}.py", folder / "checkpoint.pth"
        path.write_text(text)
        error = ""
        if run == 1 or kind in CHANGES_KEYS:
            error = _plain(path, "--save", str(checkpoint))
        error = error or _plain(path, "--resume", str(checkpoint))
        if error:
            status, end = status or "not on the cpu", f"on the CPU: {error}"
            break
        check = _check(path, checkpoint)
        status, end = status or check["status"], check["status"]
        seen.append(check)
        if check["status"] == "passed":
            runs = run
            break
        edit = edit_of(check)
        if edit is None or Path(edit.path).resolve() != path.resolve():
            end = f"no line to paste: {check['detail']}"
            break
        fixes.append(f"{check['evidence']['fix_at']}: {check['evidence']['fix']}".replace(f"{folder}/", ""))
        text = edit.applied(text.encode()).decode()
    named = bool(seen) and seen[0]["status"] == "failed" and is_named(seen[0], mutant)
    report = seen[0]["detail"].replace(f"{folder}/", "") if seen else ""
    return Row(name, kind, status, named, runs, report, " || ".join(fixes), end.replace(f"{folder}/", ""))


def _check(path: Path, checkpoint: Path) -> dict[str, Any]:
    """The check *script* of `verify`."""
    arguments = ["--resume", str(checkpoint)]
    result = ckptmove.verify(checkpoint, to="cuda:0", script=path, script_args=arguments, timeout=_SECONDS)
    check = next(one for one in result.checks if one.name == "script")
    return {"status": check.status, "detail": check.detail, "evidence": dict(check.evidence)}


def _plain(path: Path, *arguments: str) -> str:
    """Run a script on the CPU, in a process of its own; return its last line if it fails.

    The process is forked from a server that has imported torch and nothing else: autograd refuses to run in a process
    that was forked after its threads were started.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch._dynamo"])
    log = path.with_suffix(".log")
    process = processes.Process(target=_run, args=(path, log, arguments))
    process.start()
    process.join()
    lines = log.read_text().splitlines()
    return (lines[-1] if lines else "no output") if process.exitcode else ""


def _run(path: Path, log: Path, arguments: Sequence[str]) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    warnings.simplefilter("ignore")
    sys.argv = [str(path), "--device", "cpu", *arguments]
    runpy.run_path(str(path), run_name="__main__")


def edit_of(check: Mapping[str, Any]) -> Edit | None:
    """The edit that a check suggests; None if its fix is a sentence."""
    edit = check["evidence"].get("edit")
    return None if edit is None else Edit(**edit)


def is_named(check: Mapping[str, Any], mutant: Mutant) -> bool:
    """Whether a report names the tensor, or a line, of a bug.

    A report without a tensor names what the line that it quotes mentions.
    """
    evidence: Mapping[str, Any] = check["evidence"]
    made_at, edit = str(evidence.get("made_at", "")), edit_of(check)
    lines = {int(evidence.get("line") or 0)}
    lines |= {int(made_at.rpartition(":")[2])} if made_at else set()
    lines |= set() if edit is None else set(range(edit.first, edit.last + 1))
    words = evidence.get("tensors") or [evidence.get("source", "")]
    return bool(lines & mutant.lines or set(re.findall(r"\w+", " ".join(words))) & mutant.aliases())


# The table


def summary(rows: Iterable[Row]) -> str:
    """The results by kind, and a line for each script with an unexpected result."""
    rows = sorted(rows, key=lambda row: (row.script, row.kind))
    healthy = [row for row in rows if row.kind == _HEALTHY]
    harmless = [row for row in rows if (row.script, row.kind) in HARMLESS]
    bugs = [row for row in rows if row not in healthy and row not in harmless and row.status != "not on the cpu"]
    lines = ["| kind | inserted | failed | named | clean within 3 runs |", "|---|---:|---:|---:|---:|"]
    for kind, title in (*KINDS.items(), ("", "**all**")):
        own = [row for row in bugs if kind in {"", row.kind}]
        failed = sum(row.status == "failed" for row in own)
        named, fixed = sum(row.named for row in own), sum(row.named and row.is_fixed for row in own)
        lines.append(f"| {title} | {len(own)} | {failed} | {named} | {fixed} |")
    passed = sum(row.status == "passed" for row in healthy)
    unharmed = sum(row.status == "passed" for row in harmless)
    lines += ["", f"{passed} of {len(healthy)} healthy scripts pass."]
    lines += [f"{unharmed} of {len(harmless)} edits that are no bugs on a GPU pass.", ""]
    lines += [
        f"{row.script} {row.kind}: {row.status}: {row.report}"
        for row in (*healthy, *harmless)
        if row.status != "passed"
    ]
    lines += [f"{row.script} {row.kind}: not a mutant: {row.end}" for row in rows if row.status == "not on the cpu"]
    for row in bugs:
        wrong = [
            *(["not found"] * (row.status == "passed")),
            *(["skipped"] * (row.status == "skipped")),
            *(["not named"] * (row.status == "failed" and not row.named)),
            *([f"clean after {row.runs} runs"] * (row.runs > RUNS)),
            *(["not fixed"] * (row.runs == 0)),
        ]
        if wrong:
            lines.append(f"{row.script} {row.kind}: {', '.join(wrong)}: {row.report}\n    {row.fixes}\n    {row.end}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

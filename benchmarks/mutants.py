"""Break the code of ckptmove/ in 60 places, and see which of these mutants the quick tests catch, and which all tests.

    python benchmarks/mutants.py

A mutant has one change, in the body of a function. It is judged in a copy of the tree, on Linux, by the tests of its
room: first by those of the quick set that name its module, then by the room's quick set, and by all tests of the room
if it survives. The tests have to pass without a mutant, so run `make test` first.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    _Change = tuple[int, int, str]

HERE: Final = Path(__file__).resolve().parent
TREE: Final = HERE.parent
#: Seconds after which a test hangs, which catches the mutant.
TIMEOUT: Final = 300
#: Rooms whose tests stand in `tests/contract/` too.
_IN_CONTRACT: Final = {"formats", "conversion", "pickles"}
_OTHER: Final = {"and": "or", "<": "<=", ">": ">=", "==": "!=", "in": "not in", "is": "is not"}
_OTHER_OPERATOR: Final = _OTHER | {new: old for old, new in _OTHER.items()}
_OPERATOR: Final = re.compile(r"#.*|is\s+not\b|not\s+in\b|and\b|or\b|in\b|is\b|[<>=!]=|[<>]")
_NO_TESTS: Final = 5  # a code of pytest


class Mutant(NamedTuple):
    """A change of the bytes of a module between two offsets, which keeps the lines."""

    path: str
    line: int  # the first line of the changed node
    start: int
    end: int
    new: str
    what: str  # for people

    @property
    def row(self) -> str:
        """The first cells of the table."""
        return f"| {_room(self.path)} | {self.path}:{self.line} | `{self.what}` |"

    def applied(self, source: bytes) -> bytes:
        """The broken module."""
        return source[: self.start] + self.new.encode() + source[self.end :]


class _Finder(ast.NodeVisitor):
    """Find the mutants of a module."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._path, self._source = path, source
        self._starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        self._in_body, self._may_be_none = False, False
        self.visit(ast.parse(source))

    def visit(self, node: Any) -> None:
        for start, end, replacement in self._changes(node) if self._in_body else ():
            old = self._source[start:end].decode()
            new = replacement.format(old)
            what = " -> ".join(textwrap.shorten(it, 48, placeholder="…") for it in (old, new))
            new += "\n" * (old.count("\n") - new.count("\n"))
            self.found.append(Mutant(self._path, node.lineno, start, end, new, what))
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        if node.name == "__repr__":
            return
        outer = self._in_body, self._may_be_none
        self._in_body = not isinstance(node, ast.ClassDef)
        if not isinstance(node, ast.ClassDef):
            answer = ast.unparse(node.returns) if node.returns else "None"
            self._may_be_none = bool(re.search(r"\b(None|Any|object)\b", answer))
        for statement in node.body:
            self.visit(statement)
        self._in_body, self._may_be_none = outer

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # noqa: N815 - named by ast

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        """`zip(strict=True)` is left: it raises only where the code has a bug already."""
        if node.arg != "strict":
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Nothing in a message is changed."""

    def _changes(self, node: Any) -> Iterator[_Change]:
        """How a node can be changed; `{}` is the text that was there."""
        match node:
            case ast.Compare() | ast.BoolOp():
                values = node.values if isinstance(node, ast.BoolOp) else [node.left, *node.comparators]
                yield from itertools.starmap(self._other_operator, itertools.pairwise(values))
            case ast.UnaryOp(op=ast.Not()):
                start, _ = self._span(node)
                yield start, start + len("not"), ""
            case ast.Constant(value=bool() | int() | float() as value):
                yield *self._span(node), str(not value if isinstance(value, bool) else value + 1)
            case ast.Return(value=ast.expr()) if not self._may_be_none:
                yield *self._span(node.value), "None"
            case ast.Expr(value=ast.Call()):
                yield *self._span(node), "pass"
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                # What negates the others changes their operator.
                if not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):
                    yield *self._span(test), "not ({})"

    def _other_operator(self, before: ast.expr, after: ast.expr) -> _Change:
        """Change an operator, which parentheses and comments may surround."""
        (_, start), (end, _) = self._span(before), self._span(after)
        between = self._source[start:end].decode()
        match = next(it for it in _OPERATOR.finditer(between) if not it.group().startswith("#"))
        first, last = (start + len(between[:offset].encode()) for offset in match.span())
        return first, last, _OTHER_OPERATOR[" ".join(match.group().split())]

    def _span(self, node: Any) -> tuple[int, int]:
        start, end = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]
        return start + node.col_offset, end + node.end_col_offset


def mutants(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a module."""
    return _Finder(path, source).found


def choose(sources: dict[str, bytes], count: int, seed: int) -> list[Mutant]:
    """Choose mutants of each room by its share of the code, in a line each.

    A hash of the line decides: lines that stay, or move with their file, keep their mutants while others change.
    """
    sizes: Counter[str] = Counter()
    ranked: dict[str, dict[str, list[Mutant]]] = {}
    for path, source in sources.items():
        lines = source.decode().split("\n")
        sizes[_room(path)] += len({node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr)})
        for mutant in mutants(path, source):
            key = repr((seed, Path(path).name, lines[mutant.line - 1].strip()))
            rank = hashlib.sha256(key.encode()).hexdigest()
            ranked.setdefault(_room(path), {}).setdefault(rank, []).append(mutant)
    shares = dict.fromkeys(sorted(ranked), 1)
    for _ in range(count - len(shares)):
        shares[max(shares, key=lambda room: sizes[room] / (shares[room] + 0.5))] += 1
    chosen = [entry for room, share in shares.items() for entry in sorted(ranked[room].items())[:share]]
    return [found[int(rank, 16) % len(found)] for rank, found in chosen]


def _room(path: str) -> str:
    """The package in ckptmove/ that contains a module; `root` for the modules beside the packages."""
    return parts[1] if len(parts := Path(path).parts) > 2 else "root"


def reaching(path: str) -> tuple[list[str], list[str]]:
    """The tests of a module's room: the files that name the module, and all."""
    room, name = _room(path), re.compile(rf"(\b|_){re.escape(Path(path).stem)}(\b|_)")
    folders = [f"tests/{room}", *["tests/contract"][: room in _IN_CONTRACT]]
    files = [file for folder in folders for file in sorted(TREE.glob(f"{folder}/**/test_*.py"))]
    if room == "root":
        files = sorted(TREE.glob("tests/test_*.py"))
    near = [file for file in files if name.search(file.stem) or name.search(_imports(file))]
    return [it.relative_to(TREE).as_posix() for it in near], [it.relative_to(TREE).as_posix() for it in files]


def _imports(file: Path) -> str:
    return "\n".join(line for line in file.read_text().split("\n") if re.match(r"\s*(from|import)\b", line))


class Copy:
    """A copy of the tree, with a folder for temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree = folder, folder / "tree"
        command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in subprocess.check_output(command, cwd=TREE, text=True).split("\0"):
            if (TREE / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(TREE / name, self.tree / name)

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """What the quick tests of the room do with a mutant, and what all do."""
        target, (near, room) = self.tree / mutant.path, reaching(mutant.path)
        source = target.read_bytes()
        try:
            target.write_bytes(mutant.applied(source))
            os.utime(target, (mutant.start, mutant.start))  # cached bytecode is valid for a size and a second
            quick = self._run(near, "--quick") or self._run(room, "--quick")
            return quick or "survives", quick or self._run(room) or "survives"
        finally:
            target.write_bytes(source)

    def _run(self, tests: Sequence[str], *options: str) -> str:
        """Run tests here up to the first failure, and say how they catch the mutant."""
        if not tests:
            return ""
        (temporary := self.folder / "tmp").mkdir(exist_ok=True)
        path = os.pathsep.join([str(self.tree), str(HERE)])
        alone = ("-n", "0", "-x", "-p", "no:cacheprovider", "-p", "mutants")
        command = [sys.executable, "-m", "pytest", *alone, *options, *tests]
        environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(temporary)}
        quiet = subprocess.DEVNULL
        try:
            code = subprocess.run(
                command, cwd=self.tree, env=environment, check=False, stdin=quiet, stdout=quiet, stderr=quiet
            ).returncode
        finally:
            end_processes(self.folder)
            shutil.rmtree(temporary, ignore_errors=True)
        return "" if code in {0, _NO_TESTS} else "timeout" if code == -signal.SIGALRM else "caught"


def end_processes(folder: Path) -> None:
    """Kill what `Copy` started below a folder: children of `verify` lead sessions of their own."""
    found = True
    while found:
        found = False
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if os.fsencode(f"{folder}/") in environment.read_bytes():
                    os.kill(int(environment.parent.name), signal.SIGKILL)
                    found = True


def run(chosen: Sequence[Mutant], jobs: int) -> None:
    """Judge mutants, and print the table."""
    caught: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as root, ThreadPoolExecutor(jobs) as pool:
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            free.put(Copy(Path(root, str(number))))

        def judge(mutant: Mutant) -> tuple[str, str, float]:
            copy, start = free.get(), time.monotonic()
            try:
                return *copy.judge(mutant), time.monotonic() - start
            finally:
                free.put(copy)

        print("| room | line | mutation | quick | all | s |\n|---|---|---|---|---|---:|", flush=True)
        for mutant, answer in zip(chosen, pool.map(judge, chosen), strict=True):
            print(mutant.row, "{} | {} | {:.0f} |".format(*answer), flush=True)
            caught += Counter(quick=answer[0] != "survives", all=answer[1] != "survives")
    share = caught["quick"] / max(caught["all"], 1)
    print(f"\n{len(chosen)} mutants. All tests catch {caught['all']}, the quick ones {caught['quick']}: {share:.0%}")


def _restart_alarm() -> None:
    """Let the system end this process of pytest when an import or a test takes too long."""
    signal.alarm(TIMEOUT)


pytest_load_initial_conftests = pytest_runtest_logstart = _restart_alarm


def main() -> None:
    """List or judge."""
    files = {path.relative_to(TREE).as_posix(): path.read_bytes() for path in sorted(TREE.glob("ckptmove/**/*.py"))}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--list", action="store_true", help="print the mutants, and run nothing")
    option("--room", action="append", choices=sorted(set(map(_room, files))), help="only the mutants of this room")
    option("--count", type=int, default=60, help="how many mutants of all rooms")
    option("--seed", type=int, default=0, help="which ones")
    option("--jobs", type=int, default=2, help="processes at once")
    options = parser.parse_args()
    chosen = [
        it for it in choose(files, options.count, options.seed) if _room(it.path) in (options.room or _room(it.path))
    ]
    if options.list:
        print("\n".join(mutant.row for mutant in chosen))
    else:
        run(chosen, options.jobs)


if __name__ == "__main__":
    main()

"""Break the code of ckptmove/ in 60 places, and see which of these mutants the quick tests catch, and which all tests.

A mutant has one change, in the body of a function. Only the tests that execute its statement run, in a copy of the
tree, on Linux. A record of coverage says which tests these are. Make it for all rooms or for some, and again after each
change of the code or its tests:

    python benchmarks/mutants.py --contexts FILE --room io --record
    python benchmarks/mutants.py --contexts FILE --room io --count 10

Tests marked with `unmeasured` run without coverage, so they are left out. So are functions with a cache, which run for
the first of their tests only.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import os
import queue
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from coverage import CoveragePlugin
from coverage.numbits import nums_to_numbits, register_sqlite_functions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    import pytest

    _Change = tuple[int, int, str]

HERE: Final = Path(__file__).resolve().parent
TREE: Final = HERE.parent
#: Tests of a mutant that run first, in a process that collects their files alone: most mutants are caught by them.
FIRST: Final = 30
_OTHER: Final = {"and": "or", "<": "<=", ">": ">=", "==": "!=", "in": "not in", "is": "is not"}
_OTHER_OPERATOR: Final = _OTHER | {new: old for old, new in _OTHER.items()}
_OPERATOR: Final = re.compile(r"#.*|is\s+not\b|not\s+in\b|and\b|or\b|in\b|is\b|[<>=!]=|[<>]")
_NOTHING_RAN: Final = {4, 5}  # codes of pytest for a usage error, and for no tests
_SELECTION: Final = "MUTANTS_SELECTION"  # a name that ckptmove does not read as an option
_COVERAGE: Final = """\
[run]
source = ckptmove
core = ctrace
parallel = true
patch = subprocess, _exit
plugins = mutants
relative_files = true
data_file = {}
"""


class Mutant(NamedTuple):
    """A change of the bytes of a module between two offsets, which keeps the lines."""

    path: str
    statement: int  # its first line
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
        self._statement, self._in_body, self._may_be_none = 0, False, False
        self.visit(ast.parse(source))

    def visit(self, node: Any) -> None:
        outer = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node.lineno
        for start, end, replacement in self._changes(node) if self._in_body else ():
            old = self._source[start:end].decode()
            new = replacement.format(old)
            what = " -> ".join(textwrap.shorten(it, 48, placeholder="…") for it in (old, new))
            new += "\n" * (old.count("\n") - new.count("\n"))
            self.found.append(Mutant(self._path, self._statement, node.lineno, start, end, new, what))
        super().visit(node)
        self._statement = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        if node.name == "__repr__" or re.search(r"\b(lru_)?cache\b", decorators):
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


def _files(pattern: str) -> dict[str, bytes]:
    return {path.relative_to(TREE).as_posix(): path.read_bytes() for path in sorted(TREE.glob(pattern))}


def _tests_of(rooms: Sequence[str]) -> list[str]:
    """The folders and files of tests that mirror rooms; all if no room is named."""
    beside = _files("tests/test_*.py")
    return [it for room in rooms for it in (beside if room == "root" else [f"tests/{room}/"])] or ["tests/"]


class Copy:
    """A copy of the tree, with a folder for temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree, self.selection = folder, folder / "tree", folder / "selection.json"
        command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in subprocess.check_output(command, cwd=TREE, text=True).split("\0"):
            if (TREE / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(TREE / name, self.tree / name)

    def pytest(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run pytest here, and end the processes that it leaves."""
        (temporary := self.folder / "tmp").mkdir(exist_ok=True)
        path = os.pathsep.join([str(self.tree), str(HERE)])
        environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(temporary), _SELECTION: str(self.selection)}
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        try:
            return subprocess.run(command, cwd=self.tree, env=environment, check=False, text=True, **options)
        finally:
            end_processes(self.folder)
            shutil.rmtree(temporary, ignore_errors=True)

    def judge(self, mutant: Mutant, tests: Sequence[str], timeout: int, *options: str) -> str:
        """Whether one of the tests catches a mutant."""
        target = self.tree / mutant.path
        for part in filter(None, (tests[:FIRST], tests[FIRST:])):
            target.write_bytes(mutant.applied((TREE / mutant.path).read_bytes()))
            os.utime(target, (mutant.start, mutant.start))  # cached bytecode is valid for a size and a second
            self.selection.write_text(json.dumps([timeout, part]))
            arguments = [*options, *dict.fromkeys(test.partition("::")[0] for test in part)]
            code = self._run(*arguments)
            shutil.copy2(TREE / mutant.path, target)
            # A mutant can keep `conftest.py` from being imported, or the tests from having their names.
            if code in _NOTHING_RAN and self._run("--collect-only", *arguments):
                raise SystemExit(f"pytest ends with {code} and runs none of these tests: {' '.join(part)}")
            if code:
                return "timeout" if code == -signal.SIGALRM else "caught"
        return "survives"

    def _run(self, *arguments: str) -> int:
        """The code that pytest ends with, of the selected tests."""
        return self.pytest(
            *("-n", "0", "-x", "-p", "no:cacheprovider", "-p", "mutants", "--hypothesis-seed=0", *arguments),
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
        ).returncode


def end_processes(folder: str | Path) -> None:
    """Kill what `Copy.pytest` started below a folder: children of `verify` lead sessions of their own."""
    found = True
    while found:
        found = False
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if os.fsencode(f"{folder}/") in environment.read_bytes():
                    os.kill(int(environment.parent.name), signal.SIGKILL)
                    found = True


@contextmanager
def _copies(count: int) -> Iterator[list[Copy]]:
    """Copies that another process removes when this one ends in any way."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    root = tempfile.mkdtemp(prefix="mutants-")
    code = "import mutants, shutil, sys; sys.stdin.read(); mutants.end_processes({0!r}); shutil.rmtree({0!r}, True)"
    command = [sys.executable, "-c", code.format(root)]
    with subprocess.Popen(command, cwd=HERE, stdin=subprocess.PIPE, start_new_session=True):
        yield [Copy(Path(root, str(number))) for number in range(count)]


def record(file: Path, rooms: Sequence[str], jobs: int) -> None:
    """Run the tests of rooms with coverage, and keep which of them execute each line."""
    with _copies(1) as [copy]:
        settings, data, cache = copy.folder / "coveragerc", copy.folder / "data", copy.folder / "cache"
        settings.write_text(_COVERAGE.format(data))
        code = copy.pytest(
            *("-n", str(jobs), "--dist", "worksteal", "-m", "not unmeasured", "-o", f"cache_dir={cache}"),
            *("--cov", "--cov-context=test", f"--cov-config={settings}", "--cov-report=", *_tests_of(rooms)),
        ).returncode
        if code not in {0, 1}:
            raise SystemExit("there is no record of these tests")
        failed = cache / "v" / "cache" / "lastfailed"
        connection = sqlite3.connect(data)
        for test in json.loads(failed.read_text()) if code else ():
            print(f"fails without a mutant, so it is left out: {test}")
            connection.execute("DELETE FROM context WHERE substr(context, 1, length(?1) + 1) = ?1 || '|'", [test])
        connection.execute("INSERT INTO meta VALUES ('tree', ?)", [_digest()])
        connection.commit()
        connection.close()
        shutil.move(data, file)


def _digest() -> str:
    return hashlib.sha256(repr([_files("ckptmove/**/*.py"), _files("tests/**/*.py")]).encode()).hexdigest()


class Record:
    """Which tests of rooms execute each line."""

    def __init__(self, file: Path, rooms: Sequence[str]) -> None:
        self._data = sqlite3.connect(file)
        register_sqlite_functions(self._data)
        if (_digest(),) not in self._data.execute("SELECT value FROM meta WHERE key = 'tree'"):
            raise SystemExit("the code or its tests have changed since the record: make it again with --record")
        self._sizes: Counter[str] = Counter()
        rows = self._data.execute("SELECT context, numbits FROM line_bits JOIN context ON context_id = context.id")
        prefixes = tuple(_tests_of(rooms))
        for context, lines in rows:
            if context.startswith(prefixes):
                self._sizes[context.rpartition("|")[0]] += int.from_bytes(lines, "big").bit_count()

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that execute a mutant, those with the fewest lines first.

        A fixture that executes it counts for all tests of its file, which may share it. A line that only processes of
        no test execute has all tests of its room; one that nothing executes has none.
        """
        rows = self._data.execute(
            "SELECT context FROM line_bits JOIN context ON context_id = context.id JOIN file ON file_id = file.id"
            " WHERE path = ? AND numbits_any_intersection(numbits, ?)",
            [mutant.path, nums_to_numbits([mutant.statement, mutant.line])],
        )
        contexts = [context.rpartition("|") for (context,) in rows]
        shared = [test.partition("::")[0] + "::" for test, _, phase in contexts if phase == "setup"]
        prefixes = tuple(_tests_of([_room(mutant.path)]) if contexts == [("", "", "")] else shared)
        found = {test for test in self._sizes if test.startswith(prefixes)} | {test for test, *_ in contexts}
        return sorted(found & self._sizes.keys(), key=lambda test: (self._sizes[test], test))


def quick_tests(copy: Copy, rooms: Sequence[str]) -> set[str]:
    """The tests that `pytest --quick` chooses."""
    answer = copy.pytest("-n", "0", "--quick", "--collect-only", *_tests_of(rooms), capture_output=True)
    if answer.returncode:
        raise SystemExit(f"`pytest --quick --collect-only` fails: {(answer.stderr or answer.stdout).strip()}")
    return {line for line in answer.stdout.split("\n") if line.startswith("tests/") and "::" in line}


def run(chosen: Sequence[Mutant], options: argparse.Namespace) -> None:
    """Judge mutants, and print the table."""
    tests = list(map(Record(options.contexts, options.room).tests, chosen))
    caught: Counter[str] = Counter()
    with _copies(options.jobs) as copies, ThreadPoolExecutor(options.jobs) as pool:
        quick = quick_tests(copies[0], options.room)
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)

        def judge(mutant: Mutant, reached: Sequence[str]) -> tuple[str, str, float]:
            copy, start = free.get(), time.monotonic()
            try:
                chosen_tests = [test for test in reached if test in quick]
                by_quick = by_all = copy.judge(mutant, chosen_tests, options.timeout, "--quick")
                if by_quick == "survives":
                    # The quick ones again, after the others: hypothesis tries more examples.
                    by_all = copy.judge(mutant, sorted(reached, key=quick.__contains__), options.timeout)
            finally:
                free.put(copy)
            return by_quick, by_all, time.monotonic() - start

        print("| room | line | mutation | tests | quick | all | s |\n|---|---|---|---:|---|---|---:|", flush=True)
        for mutant, reached, answer in zip(chosen, tests, pool.map(judge, chosen, tests), strict=True):
            print(mutant.row, "{} | {} | {} | {:.0f} |".format(len(reached), *answer), flush=True)
            caught.update(quick=answer[0] != "survives", all=answer[1] != "survives")
    share = caught["quick"] / max(caught["all"], 1)
    print(f"\n{len(chosen)} mutants. No test executes {tests.count([])} of them.")
    print(f"All tests catch {caught['all']}, the quick ones {caught['quick']}: {share:.0%}")


def _restart_alarm() -> None:
    """Let the system end this process of pytest when an import or a test takes too long."""
    signal.alarm(json.loads(Path(os.environ[_SELECTION]).read_text())[0])


pytest_load_initial_conftests = pytest_runtest_logstart = _restart_alarm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pytest run the tests of a mutant in their order."""
    order = {test: number for number, test in enumerate(json.loads(Path(os.environ[_SELECTION]).read_text())[1])}
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


class _Children(CoveragePlugin):
    """The context of a child process of a test, whose name is in the environment that it inherits from pytest."""

    def dynamic_context(self, frame: FrameType) -> str | None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        return f"{test}|child" if test and str(frame.f_globals.get("__name__")).startswith("ckptmove") else None


def coverage_init(plugins: Any, _options: object) -> None:
    """Let coverage.py name the tests of child processes; pytest-cov does it in the processes of pytest."""
    if "pytest" not in sys.modules:
        plugins.add_dynamic_context(_Children())


def main() -> None:
    """Record, list or judge."""
    files = _files("ckptmove/**/*.py")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--contexts", type=Path, metavar="FILE", help="the record of coverage")
    option("--record", action="store_true", help="make the record: more than half an hour for all rooms")
    option("--list", action="store_true", help="print the mutants, and run nothing")
    option("--room", action="append", choices=sorted(set(map(_room, files))), help="a room, with its own tests only")
    option("--count", type=int, default=60, help="how many mutants")
    option("--seed", type=int, default=0, help="which ones")
    option("--jobs", type=int, default=2, help="processes at once")
    option("--timeout", type=int, default=120, help="seconds after which a test hangs: it catches the mutant")
    options = parser.parse_args()
    options.room = options.room or []
    if not (options.list or (options.contexts and (options.record or options.contexts.exists()))):
        parser.error("without a record, --contexts FILE needs --record")
    if options.record:
        record(options.contexts, options.room, options.jobs)
        return
    sources = {path: source for path, source in files.items() if not options.room or _room(path) in options.room}
    chosen = choose(sources, options.count, options.seed)
    if options.list:
        print("\n".join(mutant.row for mutant in chosen))
    else:
        run(chosen, options)


if __name__ == "__main__":
    main()

"""The user's own function, imported by the name that was typed, and told from everybody else's code; what it says.

Never imports a name that stands in a checkpoint: what the user typed is the only one.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import linecache
import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptmove.errors import CaseUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType, TracebackType

    from ckptmove.verification.case.name import CaseName

_LIBRARIES: Final = tuple(
    {os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
#: Folders of installed libraries wherever they are: of the user, of the system beside a venv, of a Debian.
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_OURS: Final = str(Path(__file__).resolve().parents[2]) + os.sep
#: Statements that have names of their own.
SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: Expressions that are run as a function is, by what Python calls their code.
_EXPRESSIONS: Final = {
    "<lambda>": ast.Lambda,
    "<listcomp>": ast.ListComp,
    "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp,
    "<genexpr>": ast.GeneratorExp,
}
#: A name that no file of the user's has, as ``train`` and ``random`` may.
_MODULE: Final = "_ckptmove_case"


class Line(NamedTuple):
    """A line of the user's code.

    Attributes:
        file: as seen from the working directory.
        number: from 1.
        source: what stands there, without indentation.
        path: the file as Python calls it, wherever the working directory is by now.
    """

    file: str
    number: int
    source: str
    path: str

    def __str__(self) -> str:
        """Where it is, as an editor takes it."""
        return f"{self.file}:{self.number}"


class Entrance:
    """The function that was typed."""

    def __init__(self, name: CaseName) -> None:
        self._name = name
        self._file = os.path.realpath(name.home) if name.is_file else ""
        self._known: dict[str, bool] = {}

    def load(self) -> Callable[..., Any]:
        """Import the function as ``python FILE.py`` and ``python -m pkg.mod`` would find what it needs.

        Raises:
            CaseUnusable: there is no such module, or nothing in it that could be called.
            BaseException: whatever its module raises while it is imported.
        """
        module = self._load_file() if self._name.is_file else self._load_module()
        self._file = os.path.realpath(getattr(module, "__file__", None) or "")
        function = getattr(module, self._name.function, None)
        if not callable(function):
            raise CaseUnusable(f"{self._name.home} has no function '{self._name.function}'")
        found: Callable[..., Any] = function
        return found

    def _load_file(self) -> Any:
        path = Path(self._name.home)
        sys.path.insert(0, str(path.parent.absolute()))
        spec = importlib.util.spec_from_file_location(_MODULE, path.absolute())
        if spec is None or spec.loader is None:
            raise CaseUnusable("its name does not end in .py", path=str(path))
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module  # dataclasses look up there what their annotations mean
        spec.loader.exec_module(module)
        return module

    def _load_module(self) -> Any:
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(self._name.home)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self._name.home}.".startswith(f"{error.name}."):
                raise  # something that the module itself wants
            raise CaseUnusable(f"there is no module '{self._name.home}' here") from error

    def is_own(self, file: str) -> bool:
        """Whether a file is the user's: neither torch's nor another library's, nor this package's."""
        if file not in self._known:
            real = os.path.realpath(file)
            is_installed = real.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(Path(real).parts)
            is_foreign = file.startswith("<") or is_installed or real.startswith(_OURS)
            self._known[file] = real == self._file or not is_foreign
        return self._known[file]

    def frames(self, trace: TracebackType | None) -> list[tuple[FrameType, int]]:
        """The user's frames of a traceback with their lines, the innermost last."""
        return [(frame, number) for frame, number in _walk(trace) if self.is_own(frame.f_code.co_filename)]

    def caller(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame of the user's, from a frame outwards; None where there is none."""
        while frame is not None and not self.is_own(frame.f_code.co_filename):
            frame = frame.f_back
        return frame


def line_of(file: str, number: int) -> Line:
    """A line by the name that Python gives its file."""
    here = os.getcwd() + os.sep  # noqa: PTH109  # a prefix of text
    return Line(file.removeprefix(here), number, linecache.getline(file, number).strip(), file)


def tree_of(file: str) -> ast.Module:
    """What a file says; nothing where it is gone, or another one by now."""
    return _kept("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=16)
def _kept(text: str) -> ast.Module:
    return parsed(text)


def parsed(text: str) -> ast.Module:
    """What a text says; nothing where it is no Python."""
    with suppress(SyntaxError, ValueError):
        return ast.parse(text)
    return ast.Module([], [])


def statements_at(line: Line) -> list[ast.stmt]:
    """The statements that a line has a part in, from left to right; of those with a body, where it is in their head."""
    return statements_in(tree_of(line.path), line.number)


def statements_in(tree: ast.Module, number: int) -> list[ast.stmt]:
    """The same of a file that has been read."""
    every = [one for one in ast.walk(tree) if isinstance(one, ast.stmt)]
    found = [one for one in every if any(first <= number <= last for first, last in _heads(one))]
    return sorted(found, key=lambda one: (one.lineno, one.col_offset))


def own_nodes(line: Line, code: str = "") -> Iterator[ast.AST]:
    """What is written in the statements of a line, but not in those under them.

    Args:
        line: the line.
        code: what Python calls the code that was run there: of ``<lambda>``, only what is in such.
    """
    waiting: list[ast.AST] = [*statements_at(line)]
    if code in _EXPRESSIONS:
        waiting = [one for one in own_nodes(line) if isinstance(one, _EXPRESSIONS[code])]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting += [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.stmt) and _is_at(one, line)]


def _is_at(node: ast.AST, line: Line) -> bool:
    """Whether a node is in a line, if it is a case of a ``match``: the others are of other lines."""
    first, last = _head_of_case(node) if isinstance(node, ast.match_case) else (line.number, line.number)
    return first <= line.number <= last


def _heads(statement: ast.stmt) -> list[tuple[int, int]]:
    """First and last line of all of a statement but what is under it: a ``match`` has a head for each case, too."""
    if isinstance(statement, ast.Match):
        first, *_ = heads = [_head_of_case(one) for one in statement.cases]
        return [(statement.lineno, first[0] - 1), *heads]
    body: list[ast.stmt] = getattr(statement, "body", [])
    if not body:
        return [(statement.lineno, statement.end_lineno or statement.lineno)]
    return [(statement.lineno, max(body[0].lineno - 1, statement.lineno))]


def _head_of_case(case: ast.match_case) -> tuple[int, int]:
    return case.pattern.lineno, max(case.body[0].lineno - 1, case.pattern.lineno)


def function_of(line: Line) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function that a line is in."""
    return next(iter(functions_of(line)), None)


def functions_of(line: Line) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that a line is in, the innermost first."""
    every = [one for one in ast.walk(tree_of(line.path)) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    found = [one for one in every if _first_line(one) <= line.number <= (one.end_lineno or one.lineno)]
    return sorted(found, key=lambda one: -one.lineno)


def _first_line(one: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min(part.lineno for part in (one, *one.decorator_list))


def assigned(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """Target and value of an assignment to one target; None for anything else."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0], node.value
    return (node.target, node.value) if isinstance(node, ast.AnnAssign) and node.value is not None else None


def callee(node: ast.expr) -> str:
    """What is called, without the module that it is in; empty for anything but a call."""
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


def full_name(line: Line, node: ast.expr) -> str:
    """What an expression names of a module, by what the file of a line imports: ``torch.load``; empty for the rest."""
    if isinstance(node, ast.Attribute):
        owner = full_name(line, node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return imported(line).get(node.id, "") if isinstance(node, ast.Name) else ""


def imported(line: Line) -> dict[str, str]:
    """What the file of a line imports, by the names that it has there."""
    names: dict[str, str] = {}
    for node in ast.walk(tree_of(line.path)):
        if isinstance(node, ast.Import):
            names |= {one.asname: one.name for one in node.names if one.asname}
            names |= {(top := one.name.partition(".")[0]): top for one in node.names if not one.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def called(line: Line, module: str) -> str:
    """What the file of a line calls a module."""
    return next((name for name, one in imported(line).items() if one == module), module)


def assignments(nodes: Iterable[ast.AST], attribute: str) -> Iterator[ast.stmt]:
    """Of some nodes those that set an attribute."""
    for node in nodes:
        found = assigned(node)
        if isinstance(node, ast.stmt) and found and isinstance(found[0], ast.Attribute) and found[0].attr == attribute:
            yield node


def written_in(kind: type) -> Iterator[tuple[Line, ast.AST]]:
    """What is written in a class, and in those that it inherits from, with a line of the file that it is in."""
    for one in kind.__mro__:
        file = getattr(sys.modules.get(one.__module__), "__file__", None) or ""
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef) and node.name == one.__name__:
                yield from ((line_of(file, node.lineno), part) for part in ast.walk(node))


def _walk(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next

"""The user's own function, imported by the name that was typed, and told from everybody else's code; what it says.

Never imports a name that stands in a checkpoint: what the user typed is the only one.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import linecache
import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptmove.case import CaseUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType, TracebackType

    from ckptmove.verification.case_name import CaseName

_LIBRARIES: Final = tuple(
    {os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OURS: Final = str(Path(__file__).resolve().parents[1]) + os.sep
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
            is_foreign = file.startswith("<") or real.startswith((*_LIBRARIES, _OURS))
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
    with suppress(SyntaxError, ValueError):
        return ast.parse("".join(linecache.getlines(file)))
    return ast.Module([], [])


def statements(line: Line) -> list[ast.stmt]:
    """The statements without a body that a line has a part in, from left to right."""
    every = [one for one in ast.walk(tree_of(line.path)) if isinstance(one, ast.stmt)]
    simple = [one for one in every if not {"body", "cases"} & {*one._fields}]
    found = [one for one in simple if one.lineno <= line.number <= (one.end_lineno or one.lineno)]
    return sorted(found, key=lambda one: (one.lineno, one.col_offset))


def assigned(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """Target and value of an assignment to one target; None for anything else."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0], node.value
    return (node.target, node.value) if isinstance(node, ast.AnnAssign) and node.value is not None else None


def callee(node: ast.expr) -> str:
    """What is called, without the module that it is in; empty for anything but a call."""
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


def criterion_of(home: Line) -> str:
    """What the file of a line calls the loss that it gives to its cases."""
    names = set()
    for node in ast.walk(tree_of(home.path)):
        if isinstance(node, ast.Call) and callee(node) == "Case":
            given = [*node.args[2:3], *(one.value for one in node.keywords if one.arg == "criterion")]
            names |= {one.id for one in given if isinstance(one, ast.Name)}
    return names.pop() if len(names) == 1 else "criterion"


def assignments(nodes: Iterable[ast.AST], attribute: str) -> Iterator[tuple[str, str]]:
    """Of some nodes those that set an attribute: of what, and to what."""
    for node in nodes:
        found = assigned(node)
        if found is not None and isinstance(found[0], ast.Attribute) and found[0].attr == attribute:
            yield ast.unparse(found[0].value), ast.unparse(found[1])


def nodes_of(kind: type) -> Iterator[ast.AST]:
    """What is written in a class, and in those that it inherits from."""
    for one in kind.__mro__:
        file = getattr(sys.modules.get(one.__module__), "__file__", None) or ""
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef) and node.name == one.__name__:
                yield from ast.walk(node)


class _Moving(ast.NodeTransformer):
    """Puts ``.to(device)`` behind an expression."""

    def __init__(self, expression: str, device: str) -> None:
        self._expression = expression
        self._moved = ast.parse(f"{expression}.to({device})", mode="eval").body

    def visit(self, node: ast.AST) -> ast.AST:
        is_read = isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        return self._moved if is_read and ast.unparse(node) == self._expression else super().generic_visit(node)


def with_move(line: Line, expression: str, device: str) -> str:
    """The user's statement with the tensor moved where it is used, or what to put before it."""
    for statement in (*statements(line), *_heads(line)):
        before = ast.unparse(statement)
        after = ast.unparse(_Moving(expression, device).visit(statement))
        if after != before:
            return after.partition("\n")[0]
    return f"{expression} = {expression}.to({device})"  # it is there by another name


def _heads(line: Line) -> list[ast.stmt]:
    """The statement whose head a line is in, without what is under it; none for an ``elif``, which is a part of one."""
    every = [one for one in ast.walk(tree_of(line.path)) if isinstance(one, (ast.If, ast.While, ast.For, ast.With))]
    found = [one for one in every if one.lineno <= line.number < one.body[0].lineno]
    for one in found:
        one.body = [ast.Pass()]
    return [one for one in found if not line.source.startswith("elif")]


def with_device(line: Line, operation: str, device: str) -> str:
    """The user's statement with the device in the calls that make the tensor; of several lines, the call alone."""
    short = operation.rpartition(".")[2]
    for statement in (*statements(line), *_heads(line)):
        calls = [one for one in ast.walk(statement) if isinstance(one, ast.Call) and callee(one) == short]
        calls = [one for one in calls if one.lineno <= line.number <= (one.end_lineno or one.lineno)]
        if calls and operation.startswith("torch.Tensor."):  # a method, which takes the tensor off the target
            return with_move(line, ast.unparse(calls[0]), device)
        for call in calls:
            others = [one for one in call.keywords if one.arg != "device"]
            call.keywords = [*others, ast.keyword("device", ast.parse(device, mode="eval").body)]
        if calls:
            return ast.unparse(statement if statement.lineno == statement.end_lineno else calls[0])
    return f"{short}(..., device={device})"


def _walk(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next

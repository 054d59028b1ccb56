"""Lines and syntax trees of the user's files: ``executing`` finds the node of a frame and links nodes to parents."""

from __future__ import annotations

import ast
import linecache
import os
import sys
from itertools import takewhile
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from executing import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType

FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
#: `inspect.CO_OPTIMIZED`: of the code of a function, whose variables are not in a dict.
_OPTIMIZED: Final = 0x01
#: Statements with a scope of their own.
SCOPES: Final = (*FUNCTIONS, ast.ClassDef)
#: Expressions with a frame of their own, by the name of its code.
_EXPRESSIONS: Final[dict[str, type[ast.expr]]] = {
    "<lambda>": ast.Lambda,
    "<listcomp>": ast.ListComp,
    "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp,
    "<genexpr>": ast.GeneratorExp,
}


class Line(NamedTuple):
    """A line of the user's code."""

    file: str  # path relative to the working directory
    number: int  # line number, from 1; 0 for no line, but the file
    source: str  # text of the line, stripped
    path: str  # the file's name in Python (`co_filename`); does not depend on the working directory

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.number else self.file

    @property
    def quoted(self) -> str:
        """The line with its text, for a sentence: ``train.py:7: loss.backward()``."""
        return f"{self}: {self.source}" if self.source else str(self)

    @property
    def evidence(self) -> dict[str, object]:
        """Evidence for the JSON report; without a number for a whole file."""
        return {"file": self.file, "line": self.number or None, "source": self.source}


class Spot(NamedTuple):
    """A point in the user's code that a frame has reached. It keeps no reference to the frame."""

    line: Line
    code: CodeType  # the frame's code object
    node: ast.AST | None  # node of the current instruction; None if `executing` finds none, as for code made by `exec`
    statement: ast.stmt | None  # the statement that contains it; None if the line has several and the node is unknown


class Running(NamedTuple):
    """A frame of the user's code, and the point that it has reached."""

    frame: FrameType
    spot: Spot


def line_of(path: str, number: int) -> Line:
    """Line of a file, by the file's name in Python."""
    here = os.getcwd() + os.sep  # noqa: PTH109  # a prefix of text
    return Line(path.removeprefix(here), number, linecache.getline(path, number).strip(), path)


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Local variables of a frame that runs on. Until Python 3.13, `f_locals` would keep deleted ones alive."""
    snapshot = frame.f_locals
    found = dict(snapshot)
    if frame.f_code.co_flags & _OPTIMIZED and type(snapshot) is dict:  # no namespace of a module or a class
        snapshot.clear()
    return found


def spot_of(found: FrameType | TracebackType) -> Spot:
    """The point that a frame, or the frame of a traceback entry, has reached."""
    frame = found.tb_frame if isinstance(found, TracebackType) else found
    number = found.tb_lineno if isinstance(found, TracebackType) else found.f_lineno
    line, running = line_of(frame.f_code.co_filename, number), Source.executing(found)
    statements = running.statements or ()
    statement = next(iter(statements)) if len(statements) == 1 else None
    return Spot(line, frame.f_code, running.node, statement)


def tree_of(path: str) -> ast.Module:
    """Syntax tree of a file; an empty one if the file is missing or not valid Python."""
    return Source.for_filename(path).tree or ast.Module([], [])


def parents(node: ast.AST | None) -> Iterator[ast.AST]:
    """The nodes that contain a node, the innermost first."""
    while (node := getattr(node, "parent", None)) is not None:
        yield node


def head_of(node: ast.AST) -> Iterator[ast.AST]:
    """A node and the nodes in it, without nested statements: of a compound statement its head."""
    waiting = [node]
    while waiting:
        one = waiting.pop(0)
        yield one
        waiting += [part for part in ast.iter_child_nodes(one) if not isinstance(part, ast.stmt)]


def nodes_of(spot: Spot) -> list[ast.AST]:
    """The nodes that run with a spot: its statement; in a lambda, a comprehension or a ``case``, only that."""
    inner = takewhile(lambda one: not isinstance(one, ast.stmt), (spot.node, *parents(spot.node)))
    kinds = (ast.match_case, _EXPRESSIONS.get(spot.code.co_name, ast.match_case))
    root = next((one for one in inner if isinstance(one, kinds)), spot.statement)
    return [] if root is None else list(head_of(root))


def function_of(node: ast.AST | None) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Innermost function that contains a node."""
    return next((one for one in parents(node) if isinstance(one, FUNCTIONS)), None)


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names of a function's parameters."""
    return {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}


def block_of(statement: ast.stmt) -> list[ast.stmt]:
    """The statements of the block that a statement is in."""
    bodies = (body for parent in parents(statement) for _, body in ast.iter_fields(parent) if isinstance(body, list))
    return next(body for body in bodies if statement in body)


def before_in_block(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements before one in its block, the last first; none for a node that is no statement."""
    body = block_of(node) if isinstance(node, ast.stmt) else []
    return reversed([*takewhile(lambda one: one is not node, body)])


def earlier(statement: ast.stmt) -> Iterator[ast.stmt]:
    """The statements before another one in its function, in the blocks that contain it, the last first."""
    near: ast.AST = statement
    for parent in parents(statement):
        if not isinstance(parent, ast.Module):
            yield from before_in_block(near)
        if isinstance(parent, SCOPES):
            return
        near = parent


def assignment_before(statement: ast.stmt, name: str) -> ast.stmt | None:
    """The last statement before another one that assigns a variable, or contains a statement that does."""
    return next((one for one in earlier(statement) if name in stored(one)), None)


def stored(node: ast.AST) -> set[str]:
    """The names that a statement assigns, defines or deletes, nested statements included."""
    return stored_by(ast.walk(node))


def stored_by(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that nodes assign, define or delete."""
    found: set[str] = set()
    for one in nodes:
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
            found.add(one.id)
        elif isinstance(one, (*SCOPES, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping)):
            found.add(getattr(one, "name", None) or getattr(one, "rest", None) or "")
    return found


def read(node: ast.AST) -> set[str]:
    """The names that a node reads, without nested statements."""
    return {one.id for one in head_of(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def since_set(statement: ast.stmt, name: str) -> tuple[list[ast.stmt], ast.AST | None]:
    """The statements after the one that sets a variable and before another one, the last first; and that one."""
    between: list[ast.stmt] = []
    inside = takewhile(lambda one: not isinstance(one, SCOPES), parents(statement))
    for near in (statement, *inside):
        if near is not statement and sets(head_of(near), name):
            return between, near
        for one in before_in_block(near):
            if sets(ast.walk(one), name):
                return between, one
            between.append(one)
    return between, None


def sets(nodes: Iterable[ast.AST], name: str) -> bool:
    """Whether a node assigns a variable, or an attribute of ``self``."""
    every = list(nodes)
    owned = (one for one in every if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load))
    return name in stored_by(every) or any(ast.unparse(one) == name for one in owned)


def assigned(node: ast.AST | None) -> tuple[ast.expr, ast.expr] | tuple[None, None]:
    """Target and value of an assignment to one target."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0], node.value
    return (node.target, node.value) if isinstance(node, ast.AnnAssign) and node.value is not None else (None, None)


def attribute_assignments(nodes: Iterable[ast.AST], attribute: str) -> Iterator[ast.stmt]:
    """The nodes that assign an attribute."""
    for node in nodes:
        target, _ = assigned(node)
        if isinstance(node, ast.stmt) and isinstance(target, ast.Attribute) and target.attr == attribute:
            yield node


def functions_at(path: str, number: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that begin in a line of a file, decorators included."""
    every = [one for one in ast.walk(tree_of(path)) if isinstance(one, FUNCTIONS)]
    return [one for one in every if number in {one.lineno, *(part.lineno for part in one.decorator_list)}]


def callee(node: ast.AST | None) -> str:
    """Name of the function that a call calls, without its module; empty for other nodes."""
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


def full_name(path: str, node: ast.expr) -> str:
    """Name of a function with its module, by the imports of the file: ``torch.load``; empty if it is not imported."""
    if isinstance(node, ast.Attribute):
        owner = full_name(path, node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return imported(path).get(node.id, "") if isinstance(node, ast.Name) else ""


def imported(path: str) -> dict[str, str]:
    """Names that a file imports, with the object that each refers to."""
    names: dict[str, str] = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {one.asname: one.name for one in node.names if one.asname}
            names |= {(top := one.name.partition(".")[0]): top for one in node.names if not one.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def name_of_module(path: str, module: str) -> str:
    """A file's name for a module; empty if the file does not import it."""
    return next((name for name, one in imported(path).items() if one == module), "")


def nodes_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The nodes of a class and of the classes that it inherits from, torch's excepted, each with its file's path."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] == "torch":
            continue
        for path in _files_of(one):
            found = [part for part in ast.walk(tree_of(path)) if isinstance(part, ast.ClassDef)]
            own = [part for part in found if part.name == one.__name__]
            yield from ((path, part) for node in own for part in ast.walk(node))
            if own:
                break


def _files_of(kind: type) -> list[str]:
    """The files that may define a class: those of its methods, as a script is no module any more, and its module's."""
    codes = (getattr(getattr(one, "__wrapped__", one), "__code__", None) for one in kind.__dict__.values())
    module = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return list(dict.fromkeys([*(code.co_filename for code in codes if code is not None), module]))

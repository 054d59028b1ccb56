"""Parse the arguments of ``--case`` and ``--script``.

The files are parsed and neither imported nor run: the child process does that.
"""

from __future__ import annotations

import ast
import os
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.errors import CaseUnusable, UsageError, reason_of
from ckptmove.proof.processes.strays import MARK
from ckptmove.text import Argument, Phrase

if TYPE_CHECKING:
    from collections.abc import Callable


class CaseName(NamedTuple):
    """Name of a case function."""

    home: str  # path of a Python file, or dotted name of a module
    function: str  # name of the function in it
    is_file: bool  # whether `home` is a path


def parse_case(text: str) -> CaseName:
    """Parse and check a name."""
    home, colon, function = text.rpartition(":")
    is_file = home.endswith(".py") or "/" in home or os.sep in home
    is_dotted = all(part.isidentifier() for part in home.split("."))
    if not colon or not function.isidentifier() or not (is_file or is_dotted):
        raise CaseUnusable(f"'{text}' is not FILE.py:FUNC or pkg.mod:FUNC")
    if is_file:
        _look_for(Path(home), function)
    return CaseName(home, function, is_file)


def name_of(function: Callable[..., object]) -> str:
    """Name by which the child process imports a function.

    Returns:
        ``pkg.mod:FUNC`` for a module of a package, which may use relative imports; else ``FILE.py:FUNC``.
    """
    if MARK in os.environ:
        raise CaseUnusable("importing the file of the case verifies again: put that under if __name__ == '__main__':")
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not function:
        raise CaseUnusable(
            "the function must be defined at the top level of a module: another process imports it by name"
        )
    if module.__spec__ is not None and module.__spec__.parent:
        return f"{module.__spec__.name}:{name}"
    file = getattr(module, "__file__", None)
    if file is None:
        raise CaseUnusable(
            f"'{name}' is in no file, so no other process can import it; write it to case.py, and pass 'case.py:{name}'"
        )
    return f"{file}:{name}"


def _look_for(path: Path, function: str) -> None:
    """Raise CaseUnusable if a file has no such function and no statement that may bind its name."""
    tree = _parsed(path, CaseUnusable)
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if function in defined or any(_may_bind(node, function) for node in ast.walk(tree)):
        return
    near = get_close_matches(function, defined, n=1) or defined[-1:]  # functions that the last one calls are above it
    raise CaseUnusable(f"it has no function '{function}'", path=str(path), known=(*dict.fromkeys([*near, *defined]),))


def _may_bind(node: ast.AST, name: str) -> bool:
    """Whether a statement may bind a name: a definition, an assignment, or an import."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any(name in {alias.asname or alias.name, alias.name} or alias.name == "*" for alias in node.names)
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name == name
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)


class ScriptUnusable(UsageError):
    """``--script`` does not name a Python file."""

    kind = "script-unusable"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(Phrase(Argument("script"), f": {message}"), path=path)


def require_script(path: str) -> None:
    """Check that a file is Python."""
    _parsed(Path(path), ScriptUnusable)


def _parsed(path: Path, unusable: type[CaseUnusable | ScriptUnusable]) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise unusable(f"its file cannot be read: {reason_of(error)}", path=str(path)) from error
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise unusable(f"it is not valid Python{line}: {getattr(error, 'msg', error)}", path=str(path)) from error

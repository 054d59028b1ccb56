"""Names of case functions, ``FILE.py:FUNC`` or ``pkg.mod:FUNC``: checked against the file, or made for a function.

The file is parsed, never imported or run here: the child process does that.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.errors import CaseUnusable, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable


class CaseName(NamedTuple):
    """A function by name.

    Attributes:
        home: path of a Python file, or dotted name of a module.
        function: its name there.
        is_file: whether ``home`` is a path.
    """

    home: str
    function: str
    is_file: bool


def parse_case(text: str) -> CaseName:
    """Read a name.

    Raises:
        CaseUnusable: it is none, or the file that it names is not there, is no Python, or has no such function.
    """
    home, colon, function = text.rpartition(":")
    is_file = home.endswith(".py") or "/" in home or os.sep in home
    if not colon or not function.isidentifier() or not (is_file or _is_dotted(home)):
        raise CaseUnusable(f"'{text}' names no function")
    if is_file:
        _look_for(Path(home), function)
    return CaseName(home, function, is_file)


def name_of(function: Callable[..., object]) -> str:
    """The name by which the child process imports a function of this one.

    Returns:
        ``pkg.mod:FUNC`` for a module of a package, which may use relative imports; else ``FILE.py:FUNC``.

    Raises:
        CaseUnusable: another process cannot import it: a lambda, a method, a nested function, or one of a notebook.
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not function:
        raise CaseUnusable("the function must stand at the top level of a module: another process imports it by name")
    if module.__spec__ is not None and module.__spec__.parent:
        return f"{module.__spec__.name}:{name}"
    file = getattr(module, "__file__", None)
    if file is None:
        raise CaseUnusable(
            f"'{name}' is in no file, so no other process can import it; write it to case.py, and pass 'case.py:{name}'"
        )
    return f"{file}:{name}"


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _look_for(path: Path, function: str) -> None:
    """Refuse a file without that function; one that binds names in ways that cannot be read off is left to Python."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise CaseUnusable(f"its file cannot be read: {reason_of(error)}", path=str(path)) from error
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise CaseUnusable(f"it is no Python{line}: {getattr(error, 'msg', error)}", path=str(path)) from error
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if function in defined or any(_may_bind(node, function) for node in ast.walk(tree)):
        return
    raise CaseUnusable(f"it has no function '{function}'", path=str(path), known=tuple(defined))


def _may_bind(node: ast.AST, name: str) -> bool:
    """Whether a statement gives something that name: an assignment, an import, or an import of everything."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any(name in {alias.asname or alias.name, alias.name} or alias.name == "*" for alias in node.names)
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name == name
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)

"""The name of a case as it is typed, ``FILE.py:FUNC`` or ``pkg.mod:FUNC``, held against the file that it names.

Never imports or runs what it names: the file is only parsed.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import NamedTuple

from ckptmove.case import CaseUnusable
from ckptmove.errors import reason_of


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

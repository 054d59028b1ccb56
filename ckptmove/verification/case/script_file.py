"""Check the file named by ``--script``. It is parsed and not run: the child process does that."""

from __future__ import annotations

import ast
from pathlib import Path

from ckptmove.errors import UsageError, reason_of
from ckptmove.text import Argument, Phrase


class ScriptUnusable(UsageError):
    """``--script`` does not name a Python file."""

    kind = "script-unusable"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(Phrase(Argument("script"), f": {message}"), path=path)


def require_script(path: str) -> None:
    """Check that a file is Python.

    Raises:
        ScriptUnusable: if it is missing or is not valid Python.
    """
    try:
        ast.parse(Path(path).read_bytes(), path)
    except OSError as error:
        raise ScriptUnusable(f"the file cannot be read: {reason_of(error)}", path=path) from error
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ScriptUnusable(f"it is not valid Python{line}: {getattr(error, 'msg', error)}", path=path) from error

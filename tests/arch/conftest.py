"""The source of ckptmove, parsed once for all rules of a file of tests."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

import ckptmove

PACKAGE = Path(ckptmove.__file__).parent


class Module(NamedTuple):
    """A module of the package: its path in the package, and every node of its tree."""

    path: str
    source: str
    nodes: list[ast.AST]


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """Every module, for one file of tests only: the trees take 100 MB."""
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return [Module(path, source, list(ast.walk(ast.parse(source)))) for path, source in sources.items()]

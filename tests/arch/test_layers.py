"""Imports point down only, and each third-party library has one home.

The rows below are the map of the project, lowest first. A module may import modules of its own row or of a lower one,
at the top of the file, inside a function or for the type checker alone. Within a row there are no circles.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import ckptmove

PACKAGE = Path(ckptmove.__file__).parent

ROWS: list[list[str]] = [
    ["case", "errors", "limits", "model", "moves", "text"],
    ["torch_facts.*"],
    ["simulation.*"],
    ["io.*"],
    ["pickles.*"],
    ["lazy.*"],
    ["formats.*"],
    ["checkpoint.*"],
    ["assembled.*"],
    ["opening.*"],
    ["conversion.*"],
    ["comparison.*"],
    ["findings.*"],
    ["proof.*"],
    ["training.*"],
    ["api.*", "__init__"],
    ["cli.*", "testing", "pytest_plugin", "__main__"],
]

#: Where a third-party library may be imported.
HOMES = {
    # In `case` for the type checker alone: the fields of a Case are of its classes.
    "torch": ("simulation", "proof", "training", "case"),
    "safetensors": ("proof", "training"),
    "asttokens": ("training",),
    "executing": ("training",),
    "typer": ("cli",),
    "pytest": ("pytest_plugin",),
    "rich": ("cli",),
    # In `opening` for a pyproject.toml beside a checkpoint: the parser of `cli` decides which code it names.
    "tomli": ("cli", "opening"),
    "filelock": ("io",),
    "fsspec": ("io",),
    "aiohttp": ("io",),
    "numpy": ("io", "lazy"),
    # For the type checker alone, until Python 3.11 is the oldest: torch requires it.
    "typing_extensions": ("simulation", "proof", "training", "api"),
}

#: Rooms that handle paths: files of the user (``api.hints``, ``cli``, ``training``), of this package or of the system
#: (the others).
PATH_ROOMS = (
    "io", "api.hints", "cli", "testing", "training.case", "training.code", "training.fixes", "training.script",
    "proof.source_edits", "proof.processes.forking", "proof.processes.memory", "proof.processes.strays",
    "proof.restored.pages", "proof.step.optimizer_class",
)  # fmt: skip
PATH_MODULES = {"pathlib", "glob", "stat", "shutil", "tempfile"}
#: Names in ``os`` that take no path.
OS_WITHOUT_PATHS = {
    "PathLike", "_exit", "altsep", "close", "devnull", "dup", "dup2", "environ", "fdopen", "fspath", "fstat",
    "getpgrp", "getpid", "killpg", "linesep", "name", "O_RDONLY", "open", "pathsep", "read", "sep", "strerror",
    "write",
}  # fmt: skip


def name_of(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1]) if parts[-1] == "__init__" and len(parts) > 1 else ".".join(parts)


def row_of(module: str) -> int | None:
    """The row of a module; None if it has no place on the map."""
    places = {module, f"{module.partition('.')[0]}.*"}
    return next((index for index, row in enumerate(ROWS) if not places.isdisjoint(row)), None)


class Imports(NamedTuple):
    """What a module imports, wherever in the file, with the lines: all of it, and the modules of ckptmove."""

    all: list[tuple[str, int]]
    inner: set[tuple[str, int]]


def imports_of(nodes: list[ast.AST]) -> list[tuple[str, int]]:
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                is_module = (PACKAGE.parent / Path(*module.split("."), f"{alias.name}.py")).exists()
                found.append((f"{module}.{alias.name}" if is_module else module, node.lineno))
    return found


@pytest.fixture(scope="module")
def imports(modules) -> dict[str, Imports]:
    """What each module imports, by its dotted name."""
    found = {}
    for path, _, nodes in modules:
        inner = set()
        imported = imports_of(nodes)
        for module, line in imported:
            if module == "ckptmove":
                inner.add(("__init__", line))
            elif module.startswith("ckptmove."):
                inner.add((module.removeprefix("ckptmove."), line))
        found[name_of(path)] = Imports(imported, inner)
    return found


def is_room(module: str) -> bool:
    """A package whose ``__init__`` is a docstring: importing from it names a module inside."""
    return (PACKAGE / Path(*module.split("."))).is_dir()


def test_imports_are_absolute_and_name_modules_that_are_there(imports) -> None:
    faults = []
    for importer, (imported, inner) in imports.items():
        faults += [f"{importer}:{line}: imports are absolute" for module, line in imported if module.startswith(".")]
        faults += [f"{importer}:{line}: {name} is no module" for name, line in inner if name not in imports]
    assert not faults


def test_imports_point_down(imports) -> None:
    faults = [f"{module} is on no row: give it a place on the map" for module in imports if row_of(module) is None]
    for importer, (_, inner) in imports.items():
        if is_room(importer) and inner:
            faults.append(f"{importer}: a room's __init__ is a sign on the door")
        for imported, line in inner:
            if is_room(imported) or (imported, importer) == ("__init__", "cli.options"):  # the version
                continue
            lower, own = row_of(imported), row_of(importer)
            if lower is not None and own is not None and lower > own:
                faults.append(f"{importer}:{line} imports {imported}")
    assert not faults


def test_no_circles_inside_a_row(imports) -> None:
    edges = {importer: {name for name, _ in inner} for importer, (_, inner) in imports.items()}
    done: set[str] = set()
    faults = []

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            faults.append(" -> ".join((*trail, module)))
        elif module not in done and module != "__init__":  # it hands out the use-cases when asked
            for imported in edges.get(module, set()):
                visit(imported, (*trail, module))
            done.add(module)

    for module in edges:
        visit(module, ())
    assert not faults


def test_third_parties_stay_in_their_homes(imports) -> None:
    faults = []
    for importer, (imported, _) in imports.items():
        for module, line in imported:
            top = module.partition(".")[0]
            if top in {"ckptmove", "__future__"} or top in sys.stdlib_module_names:
                continue
            if importer.partition(".")[0] not in HOMES.get(top, ()):
                faults.append(f"{importer}:{line} imports {top}")
    assert not faults


def test_paths_of_checkpoints_are_handled_in_io(modules, imports) -> None:
    """A checkpoint is a location and a source of bytes to every other room, so that it need not be on a disk."""
    faults = []
    for path, _, nodes in modules:
        module = name_of(path)
        if any(module == room or module.startswith(f"{room}.") for room in PATH_ROOMS):
            continue
        for imported, line in imports[module].all:
            if imported.partition(".")[0] in PATH_MODULES:
                faults.append(f"{module}:{line} imports {imported}")
        for node in nodes:
            is_of_os = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
            if is_of_os and node.attr not in OS_WITHOUT_PATHS:
                faults.append(f"{module}:{node.lineno} uses os.{node.attr}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
                faults.append(f"{module}:{node.lineno} opens a file")
    assert not faults


def test_every_row_is_of_a_module_that_is_there(imports) -> None:
    for entry in (entry for row in ROWS for entry in row):
        assert entry in imports or any(name.startswith(entry.removesuffix("*")) for name in imports), entry

"""House style that no linter checks: length of files and functions, places of print and exit, broad excepts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST_FILE = 600
LONGEST_FUNCTION = 60


#: Where every exception is caught and not raised again at once, with the reason.
CATCHING_ALL = {
    "cli/guard.py": "bugs, for their exit code",
    "io/at_once.py": "raised again by the thread that waits for the result",
    "simulation/backward.py": "raised again by the caller of the autograd engine",
    "training/script/check.py": "an exception of the user's script is an answer",
    "proof/processes/child.py": "a fork ends with its exit code, and never returns into its parent's code",
    "training/mesh/worker.py": "an exception of the user's code on a rank is an answer",
}


def test_files_and_functions_are_short(modules) -> None:
    faults = []
    for path, source, nodes in modules:
        if len(source.splitlines()) > LONGEST_FILE:
            faults.append(path)
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else node.lineno
                if (node.end_lineno or 0) - first >= LONGEST_FUNCTION:
                    faults.append(f"{path}: {node.name}")
    assert not faults


def test_printing_and_exiting_are_left_to_the_rim(modules) -> None:
    faults = []
    for path, _, nodes in modules:
        if path.startswith(("cli/", "report/")) or path == "__main__.py":
            continue
        for node in nodes:
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            is_exit = isinstance(node, ast.Attribute) and node.attr == "exit" and ast.unparse(node) == "sys.exit"
            if is_print or is_exit:
                faults.append(f"{path}:{node.lineno}")
    assert not faults


def test_a_class_name_names_one_class(modules) -> None:
    homes: dict[str, list[str]] = {}
    for path, _, nodes in modules:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path)
    faults = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not faults


def catches_all(nodes: list[ast.AST]) -> list[int]:
    """Lines that catch every exception and do not end in ``raise``, or that name such a class in a tuple."""
    found = []
    for node in nodes:
        if isinstance(node, ast.ExceptHandler):
            last = node.body[-1]
            if not (isinstance(last, ast.Raise) and last.exc is None) and (node.type is None or is_broad(node.type)):
                found.append(node.lineno)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Tuple):
            found += [node.lineno] * is_broad(node.value)
    return found


def is_broad(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return any(map(is_broad, node.elts))
    return ast.unparse(node).removeprefix("builtins.") in {"Exception", "BaseException"}


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("try: f()\nexcept (Exception, OSError): pass", True),
        ("try: f()\nexcept BaseException as error: keep(error)", True),
        ("try: f()\nexcept: pass", True),
        ("ERRORS: Final = (OSError, Exception)", True),
        ("try: f()\nexcept BaseException:\n    close()\n    raise", False),
        ("try: f()\nexcept (OSError, ValueError): pass", False),
    ],
)
def test_a_broad_except_is_recognized(source, is_found) -> None:
    assert bool(catches_all(list(ast.walk(ast.parse(source))))) == is_found


def test_broad_excepts_have_a_reason(modules) -> None:
    found = [(path, line) for path, _, nodes in modules for line in catches_all(nodes)]
    assert sorted(path for path, _ in found) == sorted(CATCHING_ALL), found


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["inspect", "sample_ckpts/adamw-cuda3.pth"], ["rules"]],
    ids=lambda arguments: arguments[0],
)
def test_torch_is_not_imported(arguments: list[str], tmp_path: Path) -> None:
    assert not heavy_imports(arguments)


def test_convert_does_not_import_torch(tmp_path: Path) -> None:
    output = tmp_path / "out.pth"
    imported = heavy_imports(["convert", "sample_ckpts/adamw-cuda3.pth", "--to", "cpu", "-o", str(output)])
    assert imported <= {"concurrent.futures"}  # for CRCs and writes at once
    assert output.stat().st_size > 0


#: Modules that no command imports before it needs them.
HEAVY = {
    "torch",
    "numpy",
    "safetensors",
    "pydantic",
    "fsspec",
    "urllib.request",
    "concurrent.futures",
    "ckptmove.api.hints",
}


def heavy_imports(arguments: list[str]) -> set[str]:
    """The heavy modules that a run of the command line imports."""
    code = (
        "import sys\n"
        "from ckptmove.cli.app import main\n"
        f"sys.argv = ['ckptmove', *{arguments!r}]\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "ckptmove.cli.app" in loaded
    return loaded & HEAVY

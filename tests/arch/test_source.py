"""House style that no linter checks: length of files and functions, places of print and exit, one broad except."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST_FILE = 600
LONGEST_FUNCTION = 60


def test_files_and_functions_are_short(modules) -> None:
    for path, source, nodes in modules:
        assert len(source.splitlines()) <= LONGEST_FILE, path
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else node.lineno
                assert (node.end_lineno or 0) - first < LONGEST_FUNCTION, f"{path}: {node.name}"


def test_printing_and_exiting_are_left_to_the_rim(modules) -> None:
    for path, _, nodes in modules:
        if path.startswith(("cli/", "report/")) or path == "__main__.py":
            continue
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("sys", "exit"), f"{path}:{node.lineno}"


def test_there_is_one_broad_except(modules) -> None:
    broad = [
        f"{path}:{node.lineno}"
        for path, _, nodes in modules
        for node in nodes
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception"))
    ]
    assert len(broad) == 1, broad
    assert broad[0].startswith("cli/")


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

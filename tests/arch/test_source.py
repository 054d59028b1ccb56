"""The house style that no linter knows: small files, and modules that say what they own and what they never do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ckptmove

PACKAGE = Path(ckptmove.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 600
LONGEST_FUNCTION = 60


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_files_and_functions_are_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            first = body[0].lineno if body else node.lineno
            assert (node.end_lineno or 0) - first < LONGEST_FUNCTION, f"{relative(path)}: {node.name}"


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "__init__.py"], ids=relative)
def test_a_module_says_what_it_never_does(path: Path) -> None:
    paragraphs = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")
    assert len(paragraphs) > 1, f"{relative(path)} says only what it owns"
    assert paragraphs[1].startswith(("Never", "It never", "Knows no")), f"{relative(path)}: {paragraphs[1]}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_printing_and_exiting_are_left_to_the_rim(path: Path) -> None:
    if relative(path).startswith(("cli/", "report/")) or relative(path) == "__main__.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{relative(path)}:{node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("sys", "exit"), f"{relative(path)}:{node.lineno}"


def test_a_plain_value_is_a_named_tuple() -> None:
    """A frozen dataclass takes five times as long to make: only the API's, with heirs, or with what each makes anew."""
    classes = [
        node for path in MODULES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    heirs = {name for node in classes for base in node.bases for name in (node.name, ast.unparse(base))}
    frozen = [node for node in classes if "frozen=True" in "".join(map(ast.unparse, node.decorator_list))]
    plain = [node.name for node in frozen if node.name not in heirs and "field(" not in ast.unparse(node)]
    assert not [name for name in plain if name not in ckptmove.__all__ and not name.endswith("Result")]


def test_there_is_one_broad_except() -> None:
    broad = [
        f"{relative(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
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
    assert not heavy_imports(["convert", "sample_ckpts/adamw-cuda3.pth", "--to", "cpu", "-o", str(output)])
    assert output.stat().st_size > 0


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
    return loaded & {"torch", "numpy", "safetensors", "pydantic"}

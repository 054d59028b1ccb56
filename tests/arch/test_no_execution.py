"""Nothing that ckptmove reads can make it run: held over its own source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ckptmove

PACKAGE = Path(ckptmove.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

#: Calls that turn data into behaviour, by the last part of their name.
EXECUTING = {"eval", "exec", "compile", "__import__", "import_module", "Unpickler", "find_class", "system", "popen"}
#: Whole calls, with their owner.
EXECUTING_DOTTED = {"pickle.load", "pickle.loads", "torch.jit.load", "marshal.loads", "shelve.open", "runpy.run_path"}
#: ``re.compile`` and ``struct``'s tables compile no Python.
HARMLESS = {"re.compile"}
MODULES_THAT_EXECUTE = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "imp"}
#: What the user has typed, and no file: the optimizer of ``verify --optimizer pkg.mod:CLASS``, in its child process.
MAY_IMPORT = {("verification/imports.py", "import_module")}
#: The only places that may start a process: the child of ``verify``.
MAY_SPAWN = {"verification/run.py", "verification/child.py"}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_can_execute_what_it_reads(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in HARMLESS or (relative(path), name) in MAY_IMPORT:
                continue
            assert name not in EXECUTING_DOTTED, f"{relative(path)}:{node.lineno} calls {name}"
            assert name.rpartition(".")[2] not in EXECUTING, f"{relative(path)}:{node.lineno} calls {name}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.partition(".")[0] not in MODULES_THAT_EXECUTE, f"{relative(path)}: {alias.name}"
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.module.partition(".")[0] not in MODULES_THAT_EXECUTE, f"{relative(path)}: {node.module}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_torch_load_is_called_in_weights_only_mode_and_only_by_verify(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and dotted(node.func) in {"torch.load", "torch.serialization.load"}:
            assert relative(path).startswith("verification/"), f"{relative(path)}:{node.lineno} calls torch.load"
            modes = [keyword.value for keyword in node.keywords if keyword.arg == "weights_only"]
            assert len(modes) == 1, f"{relative(path)}:{node.lineno} does not say weights_only"
            assert isinstance(modes[0], ast.Constant), (
                f"{relative(path)}:{node.lineno} decides weights_only at run time"
            )
            assert modes[0].value is True, f"{relative(path)}:{node.lineno} unpickles"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_processes_are_started_by_verify_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        if any(name.partition(".")[0] in {"subprocess", "multiprocessing"} for name in names):
            assert relative(path) in MAY_SPAWN, f"{relative(path)} starts processes"

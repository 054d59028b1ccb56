"""The verdict on a name, by what a pickle does with it."""

from __future__ import annotations

import importlib
import random
import sys
import types

import pytest

from ckptmove.torch_facts.harmless import is_harmless
from ckptmove.torch_facts.verdicts import classify, dangerous, is_dangerous, uses_of_names

#: Modules whose import does something, or asks for a display.
NOT_IMPORTED = {"antigravity", "this", "idlelib", "turtledemo", "turtle", "tkinter", "__main__"}


@pytest.mark.parametrize(
    ("name", "modern", "verdict"),
    [
        ("__builtin__.set", "builtins.set", "safe"),
        ("__builtin__.eval", "builtins.eval", "dangerous"),
        ("__builtin__.eval.x", "__builtin__.eval.x", "dangerous"),
        ("copy_reg._reconstructor", "copyreg._reconstructor", "safe"),
        ("__builtin__.long", "builtins.int", "safe"),
        ("posix.system", "posix.system", "dangerous"),
        ("nt.system", "nt.system", "dangerous"),
        ("os.path.join", "os.path.join", "dangerous"),
        ("osprey.Model", "osprey.Model", "unknown"),
        ("subprocess.Popen", "subprocess.Popen", "dangerous"),
        ("code.interact", "code.interact", "dangerous"),
        ("code.InteractiveInterpreter.runcode", "code.InteractiveInterpreter.runcode", "dangerous"),
        ("code.models.Net", "code.models.Net", "unknown"),
        ("test.models.Net", "test.models.Net", "unknown"),
        ("commands.getoutput", "subprocess.getoutput", "dangerous"),
        ("argparse.Namespace", "argparse.Namespace", "safe"),
        ("numpy._core.multiarray.scalar", "numpy._core.multiarray.scalar", "safe"),
        ("my_package.Net", "my_package.Net", "unknown"),
        ("sklearn.preprocessing._data.StandardScaler", "sklearn.preprocessing._data.StandardScaler", "unknown"),
        ("torchmetrics.utilities.data.dim_zero_sum", "torchmetrics.utilities.data.dim_zero_sum", "unknown"),
        ("torch.nn.modules.linear.Linear", "torch.nn.modules.linear.Linear", "safe"),
        ("torch.nn.Linear", "torch.nn.Linear", "safe"),
        ("torch.nn.Linear.register_forward_hook", "torch.nn.Linear.register_forward_hook", "dangerous"),
        ("torch.nn.modules.module.torch.os.system", "torch.nn.modules.module.torch.os.system", "dangerous"),
        ("torch.nn.utils.rnn.NamedTuple", "torch.nn.utils.rnn.NamedTuple", "dangerous"),
        ("collections.OrderedDict.__init__", "collections.OrderedDict.__init__", "dangerous"),
        ("my_package.Net.__globals__", "my_package.Net.__globals__", "dangerous"),
        ("random._os.system", "random._os.system", "dangerous"),
        ("my_package._os.system", "my_package._os.system", "dangerous"),
        ("pandas.io.pytables.HDFStore", "pandas.io.pytables.HDFStore", "dangerous"),
        ("pandas.core.frame.DataFrame", "pandas.core.frame.DataFrame", "unknown"),
        ("torch.jit.CompilationUnit", "torch.jit.CompilationUnit", "dangerous"),
        ("torch.fx.graph_module.GraphModule", "torch.fx.graph_module.GraphModule", "dangerous"),
        ("torch.utils.benchmark.Timer", "torch.utils.benchmark.Timer", "dangerous"),
        ("torch.utils.tensorboard.SummaryWriter", "torch.utils.tensorboard.SummaryWriter", "dangerous"),
        ("torch._C._VariableFunctionsClass.from_file", "torch._C._VariableFunctionsClass.from_file", "dangerous"),
        ("torch._C._VariableFunctionsClass.relu", "torch._C._VariableFunctionsClass.relu", "safe"),
        ("numpy.memmap", "numpy.memmap", "dangerous"),
        ("builtins.getattr", "builtins.getattr", "unknown"),
        ("torch.nn." + "A" * 200, "torch.nn." + "A" * 200, "dangerous"),
        ("torch.nn.ReLU" + ".AA" * 20, "torch.nn.ReLU" + ".AA" * 20, "dangerous"),
        ("copyreg.extension.7", "copyreg.extension.7", "dangerous"),
        ("my_package.<computed>", "my_package.<computed>", "dangerous"),
        ("__main__.Net", "__main__.Net", "unknown"),
        ("", "", "unknown"),
    ],
)
def test_verdicts_on_names_that_are_stored(name, modern, verdict):
    use = classify(name)
    assert (use.name, use.verdict) == (modern, verdict)


@pytest.mark.parametrize(
    ("name", "made", "called"),
    [
        ("my_package.Net", "unknown", "unknown"),
        ("my_package._Net", "unknown", "unknown"),
        ("__main__.make", "unknown", "dangerous"),
        ("scipy.sparse._csr.csr_matrix", "unknown", "dangerous"),
        ("my_package.make", "unknown", "dangerous"),
        ("my_package.Net.load", "unknown", "dangerous"),
        ("my_package.__pyx_unpickle_Net", "unknown", "unknown"),
        ("my_package._rebuild_from_type", "unknown", "unknown"),
        ("pandas.core.indexes.base._new_Index", "unknown", "unknown"),
        ("my_package.Popen", "dangerous", "dangerous"),
        ("builtins.getattr", "unknown", "dangerous"),
        ("torch.nn.functional.relu", "safe", "safe"),
    ],
)
def test_verdicts_on_names_that_are_made_or_called(name, made, called):
    assert (classify(name, "made").verdict, classify(name, "called").verdict) == (made, called)


def test_a_name_is_dangerous_if_one_of_its_uses_is():
    runs = dangerous([("__builtin__.eval", "stored"), ("my_package.make", "called"), ("my_package.Net", "called")])
    assert [*runs] == ["builtins.eval", "my_package.make"]
    uses = uses_of_names(["my_package.make", "my_package.Net"], runs)
    assert [(use.name, use.verdict) for use in uses] == [
        ("my_package.make", "dangerous"), ("my_package.Net", "unknown"), ("builtins.eval", "dangerous"),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_random_callables_of_the_standard_library_are_dangerous():
    draw = random.Random(34)
    modules = sorted(name for name in sys.stdlib_module_names - NOT_IMPORTED if not name.startswith("__"))
    found: dict[str, object] = {}
    while len(found) < 200:
        name = draw.choice(modules)
        try:
            module = importlib.import_module(name)
        except ImportError:  # of another system
            continue
        names = sorted(leaf for leaf, value in vars(module).items() if callable(value))
        if names:
            leaf = draw.choice(names)
            found[f"{name}.{leaf}"] = getattr(module, leaf)
    safe = {name: value for name, value in found.items() if not is_dangerous(name, "called")}
    assert all(map(is_harmless, safe))
    assert len(safe) < len(found) // 4


@pytest.mark.parametrize("name", ["cProfile", "code", "glob", "profile", "timeit", "trace"])
def test_what_a_module_imports_is_no_folder_of_a_user(name):
    for leaf, value in vars(importlib.import_module(name)).items():
        if isinstance(value, types.ModuleType):
            assert is_dangerous(f"{name}.{leaf}.x")

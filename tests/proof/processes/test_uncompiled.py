"""Without `torch._dynamo` every optimizer steps in the same way, and user code can still import it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import ckptmove
from ckptmove.errors import UsageError
from ckptmove.proof.processes.uncompiled import Uncompiled, leave_out_dynamo, uncompiled_calls

NAMES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in {"Optimizer", "SparseAdam"}
)
STEPS = """
import torch

def steps(name):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3, 5))]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.125)
    for _ in range(3):
        def closure():
            optimizer.zero_grad()
            loss = (parameters[0] @ parameters[1]).square().sum()
            loss.backward()
            return loss
        optimizer.step(closure)
        optimizer.load_state_dict(optimizer.state_dict())
    return [parameter.detach().flatten().tolist() for parameter in parameters]
"""
CHILD = f"""
import json, sys
import ckptmove
from ckptmove.errors import UsageError
from ckptmove.proof.processes.uncompiled import leave_out_dynamo
leave_out_dynamo()
{STEPS}
found = {{name: steps(name) for name in {NAMES!r}}}
print(json.dumps([found, len([name for name in sys.modules if name.startswith("torch._dynamo")])]))
print(torch._dynamo.config.suppress_errors)
import torch._dynamo.utils
print(torch._dynamo.utils.__name__, torch.compile(lambda: 3, backend="eager")())
"""


@pytest.mark.slow
@pytest.mark.unmeasured
def test_every_optimizer_steps_the_same_and_the_real_module_comes_when_it_is_asked_for():
    told = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout.splitlines()
    without, modules = json.loads(told[0])
    scope = {}
    exec(STEPS, scope)  # the same words
    assert len(NAMES) >= 12
    assert without == {name: scope["steps"](name) for name in NAMES}
    assert modules == 1, "the replacement"
    assert told[1:] == ["False", "torch._dynamo.utils 3"]


def test_what_a_step_does_not_ask_for_is_taken_from_the_real_module(monkeypatch):
    import torch._dynamo

    real = torch._dynamo
    monkeypatch.setattr(torch, "_dynamo", real)
    monkeypatch.setitem(sys.modules, "torch._dynamo", real)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    leave_out_dynamo()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert sys.modules["torch._dynamo"] is real, "it was there before"

    absent = Uncompiled("torch._dynamo")
    assert absent.disable(len, recursive=False) is len
    assert absent.graph_break("a reason") is None
    assert absent.config is real.config
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    leave_out_dynamo()
    assert type(sys.modules["torch._dynamo"]) is type(torch._dynamo) is Uncompiled

    def imported(name, *_):
        torch._dynamo = sys.modules[name] = real
        return torch

    monkeypatch.setattr("builtins.__import__", imported)
    assert torch._dynamo.config is real.config
    assert sys.modules["torch._dynamo"] is torch._dynamo is real


@pytest.mark.parametrize("name", ["__path__", "nothing_of_this_name"])
def test_what_nobody_has_is_an_attribute_error(name):
    absent = Uncompiled("torch._dynamo")
    assert hasattr(absent, name) is hasattr(__import__("torch._dynamo")._dynamo, name)


def test_a_look_for_the_file_of_each_module_imports_nothing():
    absent = Uncompiled("torch._dynamo")
    assert not hasattr(absent, "__file__")


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_users_optimizer_has_the_real_module_and_one_thread_and_a_users_model_all(make, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.syspath_prepend(tmp_path)
    noted = tmp_path / "threads"
    (tmp_path / "mine.py").write_text(
        "import pathlib, torch\n\nclass Mine(torch.optim.SGD):\n    @torch.compiler.disable(recursive=False)\n"
        "    def step(self, closure=None):\n"
        f"        pathlib.Path({str(noted)!r}).write_text(str(torch.get_num_threads()))\n"
        "        return super().step(closure)\n\n"
        "def case(device):\n    step = Mine([torch.zeros(1, requires_grad=True)])\n    step.step()\n"
    )
    path = make("SGD", device="cpu", lr=0.1, momentum=0.9)
    assert ckptmove.verify(path, to="cpu", optimizer="mine:Mine").proven
    assert noted.read_text() == "1"
    with pytest.raises(UsageError, match="case"):  # the value is None
        ckptmove.verify(path, to="cpu", case=f"{tmp_path / 'mine.py'}:case")
    assert noted.read_text() == "2"


class Traced(torch.nn.Linear):
    """A module that tells whether a compiler reads it."""

    def forward(self, x):
        assert not torch.compiler.is_compiling()
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by the compiler
@pytest.mark.parametrize("has_stances", [True, False])
def test_compiled_modules_are_called_as_they_are_and_keep_the_prefix_of_their_keys(monkeypatch, has_stances):
    if not has_stances:  # torch 2.4 and 2.5
        monkeypatch.delattr(torch.compiler, "set_stance", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    model = torch.nn.Sequential(Traced(2, 2))
    with uncompiled_calls():
        if has_stances and hasattr(torch.compiler, "set_stance"):
            torch.compiler.set_stance("default")  # by a script
        compiled = torch.compile(model, fullgraph=has_stances)
        assert [*compiled.state_dict()] == ["_orig_mod.0.weight", "_orig_mod.0.bias"]
        compiled(torch.ones(1, 2)).sum().backward()
        assert model[0].weight.grad is not None
        assert torch.compile(model, disable=True) is model
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        assert torch.compile(model) is model

"""The names that weights-only mode takes, held against torch's own list."""

from __future__ import annotations

import io
import zipfile
from pickle import PROTO

import pytest
import torch
from torch._weights_only_unpickler import _get_allowed_globals

from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.names import WEIGHTS_ONLY_GLOBALS, judge, modern_name

IMPORT_MAPPING = torch._utils.IMPORT_MAPPING
NAME_MAPPING = torch._utils.NAME_MAPPING


def test_the_allow_list_is_torchs():
    assert frozenset(_get_allowed_globals()) == WEIGHTS_ONLY_GLOBALS


@pytest.mark.parametrize("name", sorted(WEIGHTS_ONLY_GLOBALS))
def test_what_torch_allows_is_safe(name):
    use = judge(name)
    assert (use.weights_only, use.verdict) == (True, "safe")


@pytest.mark.parametrize(("module", "name"), sorted(NAME_MAPPING))
def test_names_of_python_2_are_looked_up_as_torch_does(module, name):
    assert modern_name(f"{module}.{name}") == ".".join(NAME_MAPPING[module, name])


@pytest.mark.parametrize("module", sorted(IMPORT_MAPPING))
def test_modules_of_python_2_are_looked_up_as_torch_does(module):
    assert modern_name(f"{module}.something") == f"{IMPORT_MAPPING[module]}.something"


@pytest.mark.parametrize(
    ("name", "modern", "verdict"),
    [
        ("__builtin__.set", "builtins.set", "safe"),
        ("__builtin__.eval", "builtins.eval", "dangerous"),
        ("__builtin__.getattr", "builtins.getattr", "unknown"),
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
        ("commands.getoutput", "subprocess.getoutput", "dangerous"),
        ("argparse.Namespace", "argparse.Namespace", "safe"),
        ("numpy._core.multiarray.scalar", "numpy._core.multiarray.scalar", "safe"),
        ("my_package.Net", "my_package.Net", "unknown"),
        ("torch.nn.modules.linear.Linear", "torch.nn.modules.linear.Linear", "unknown"),
        ("copyreg.extension.7", "copyreg.extension.7", "unknown"),
        ("", "", "unknown"),
    ],
)
def test_verdicts(name, modern, verdict):
    use = judge(name)
    assert (use.name, use.verdict) == (modern, verdict)


@pytest.mark.parametrize("name", ["__builtin__.set", "builtins.set", "my_package.Net", "collections.OrderedDict"])
def test_the_answer_is_that_of_torch_load(name):
    module, _, attribute = name.rpartition(".")
    pickle = PROTO + b"\x02" + f"c{module}\n{attribute}\n.".encode()
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("a/data.pkl", pickle)
        archive.writestr("a/version", "3")
    saved.seek(0)
    (found,) = interpret(pickle, Limits()).globals
    try:
        torch.load(saved, weights_only=True)
        accepted = True
    except torch.serialization.pickle.UnpicklingError:
        accepted = False
    assert judge(found).weights_only is accepted

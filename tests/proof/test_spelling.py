"""Messages of ``verify`` name options on the command line, and arguments for a caller of the function."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.errors import UsageError
from ckptmove.proof.request import VerifyRequest
from ckptmove.training.run import verify_checkpoint

#: Words of command lines, and prefixes that are removed.
COMMANDS = {"--to", " --to ", " --keep ", "--case", "--nproc-per-node", "--case: ", "--resume PATH"}


def constants(path: Path) -> list[str]:
    """Texts of a module, without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, owners) and ast.get_docstring(node)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in found if id(node) not in docs]


@pytest.mark.unmeasured
def test_every_option_in_a_message_is_an_argument() -> None:
    """Only a run under torchrun, which has no function, names options as they are typed."""
    package = Path(ckptmove.__file__).parent
    rooms = [package / name for name in ("simulation", "proof", "training")]
    modules = [path for room in rooms for path in room.rglob("*.py") if "mesh" not in path.parts]
    named = [text for path in modules for text in constants(path) if re.search(r"--[a-z]", text)]
    assert [text for text in named if text not in COMMANDS and "ckptmove " not in text] == []
    assert len(named) > len(COMMANDS)


class Unknown(torch.optim.Optimizer):
    """Its state is that of no class of torch."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1, "odd": 1})


@pytest.fixture
def unknown(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = Unknown(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"odd": torch.ones_like(parameter)}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    return tmp_path / "run.pth"


def test_a_check_of_the_child_names_what_its_caller_can_type(unknown) -> None:
    """An optimizer of an unknown class is not stepped, and the reason says how to name it."""
    called, typed = ckptmove.verify(unknown), verify_checkpoint(VerifyRequest(str(unknown)))
    for result, spelling in ((called, "optimizer='pkg.mod:CLASS'"), (typed, "--optimizer pkg.mod:CLASS")):
        (check,) = (one for one in result.checks if one.name == "step")
        assert check.status == "skipped"
        assert spelling in check.detail


def test_a_refusal_of_the_child_names_what_its_caller_can_type(unknown) -> None:
    with pytest.raises(UsageError, match=r"^optimizer='nowhere.at.all:Adam': "):
        ckptmove.verify(unknown, optimizer="nowhere.at.all:Adam")
    with pytest.raises(UsageError, match=r"^--optimizer nowhere.at.all:Adam: "):
        verify_checkpoint(VerifyRequest(str(unknown), optimizer="nowhere.at.all:Adam"))
    with pytest.raises(UsageError, match=r"^fit takes"):
        ckptmove.inspect(unknown, fit="2")

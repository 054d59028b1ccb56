"""State in wrapper subclasses of tensors: stepped if it can be restored, else not proven."""

from __future__ import annotations

import importlib
import sys
import tarfile

import pytest
import torch
from allow_list import restored_allow_list

from ckptmove.proof.restored.loaded import LoadedFiles, named_tensors

pytest.importorskip("torchao")

import torchao.optim

STEPS = ("step", "parity", "fresh")

SOURCE = """
import torch
from torch.utils._pytree import tree_map


class Opaque(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return Opaque(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} is not written yet")


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = Opaque(torch.zeros_like(parameter))
                state["mean"].inner.lerp_(parameter.grad, 0.1)
                parameter.sub_(state["mean"].inner, alpha=group["lr"])


class OfMatrices(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("mean", torch.ones_like(parameter))
                if parameter.dim() == 2:
                    state["mean"].lerp_(parameter.grad, 0.1)
                    parameter.sub_(state["mean"], alpha=group["lr"])


torch.serialization.add_safe_globals([Opaque])
"""


@pytest.fixture(autouse=True)
def _eager():
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A user's module in the working directory, removed from this process afterwards."""
    (tmp_path / "their_wrappers.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield importlib.import_module("their_wrappers")
    sys.modules.pop("their_wrappers")


def trained(kind, *, empty=False, **options):
    """A large parameter, which torchao keeps in 8 or 4 bits, and a small one, which it does not."""
    torch.manual_seed(0)
    model = torch.nn.ParameterDict({"big": torch.randn(64, 64), "small": torch.randn(6)})
    if empty:
        model["none"] = torch.empty(0, 4)
    optimizer = kind(model.parameters(), **{"lr": 1e-3, **options})
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 0.01
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def save(tree, folder, name="c.pt"):
    torch.save(tree, folder / name)
    return str(folder / name)


def statuses(found):
    return [found[name]["status"] for name in STEPS]


@pytest.mark.parametrize("target", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_state_is_restored_and_stepped(answers, tmp_path, name, target):
    path = save(trained(getattr(torchao.optim, name)), tmp_path)
    found = answers(path, target, optimizer=f"torchao.optim:{name}")
    assert [found["restore"]["status"], *statuses(found)] == ["passed"] * 4, found
    assert found["restore"]["evidence"]["differing"] == 0
    evidence = found["step"]["evidence"]
    assert (evidence["parameters"], evidence["not_stepped"], evidence["counted"]) == (2, 0, 2)
    assert (evidence["proven"], evidence["unproven"]) == (True, "")
    assert found["fresh"]["evidence"] == {"with_state": 2, "changed": 2}


@pytest.mark.parametrize("optimizer", [None, "AdamW"])
def test_a_parameter_that_torch_cannot_step_is_not_proven(answers, tmp_path, optimizer):
    found = answers(save(trained(torchao.optim.AdamW8bit), tmp_path), "cpu", optimizer=optimizer)
    assert statuses(found) == ["passed"] * 3
    evidence = found["step"]["evidence"]
    assert (evidence["parameters"], evidence["not_stepped"], evidence["proven"]) == (1, 1, False)
    assert "(model.big)" in evidence["unproven"]
    assert "torchao.optim.subclass_8bit.OptimState8bit" in evidence["unproven"]


def test_a_wrapper_that_cannot_be_copied_is_a_limit_and_no_fault(answers, tmp_path, theirs):
    found = answers(save(trained(theirs.Momentum), tmp_path), "cpu", optimizer="their_wrappers:Momentum")
    assert found["restore"]["status"] == "passed"
    assert statuses(found) == ["skipped"] * 3
    assert (found["step"]["evidence"]["proven"], found["step"]["evidence"]["not_stepped"]) == (False, 2)
    assert "NotImplementedError: " in found["step"]["detail"]


def test_a_wrapper_that_torch_does_not_return_is_a_limit_and_no_fault(answers, tmp_path, theirs):
    tree = trained(theirs.Momentum)
    with restored_allow_list(empty=True):
        found = answers(save(tree, tmp_path), "cpu", optimizer="their_wrappers:Momentum")
    assert found["restore"]["evidence"]["weights_only"] is False
    assert statuses(found) == ["skipped"] * 3
    assert found["step"]["detail"].count("torch.load(weights_only=True)") == 1
    assert found["step"]["evidence"]["not_stepped"] == 2


def test_a_wrapper_in_an_archive_is_a_limit_with_one_reason(answers, tmp_path):
    tree = trained(torchao.optim.AdamW8bit)
    model = {name: torch.randn(64, 64) for name in ("a", "b")}
    optimizer = torchao.optim.AdamW8bit(model.values())
    for parameter in model.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tree = {"model": model, "optimizer": optimizer.state_dict()}
    inside, archive = save(tree, tmp_path, "inside.pt"), str(tmp_path / "c.tar")
    with tarfile.open(archive, "w") as packed:
        packed.add(inside, "inside.pt")
    found = answers(archive, "cpu", optimizer="torchao.optim:AdamW8bit")
    assert statuses(found) == ["skipped"] * 3
    assert found["step"]["evidence"]["not_stepped"] == 2
    assert found["step"]["detail"].count("archives") == 1


def test_a_parameter_that_the_step_passes_over_is_not_proven(answers, tmp_path, theirs):
    found = answers(
        save(trained(theirs.OfMatrices, empty=True), tmp_path), "cpu", optimizer="their_wrappers:OfMatrices"
    )
    evidence = found["step"]["evidence"]
    assert (evidence["not_stepped"], evidence["proven"]) == (1, False)
    assert "(model.small)" in evidence["unproven"]


def test_parity_compares_with_the_wrappers_of_the_original(answers, tmp_path):
    tree = trained(torchao.optim.AdamW8bit)
    original = save(tree, tmp_path, "original.pt")
    found = answers(original, "cpu", optimizer="torchao.optim:AdamW8bit", against=original)
    assert (statuses(found), found["step"]["evidence"]["proven"]) == (["passed"] * 3, True)
    tree["optimizer"]["state"][0]["exp_avg"].codes.random_(1, 255)
    found = answers(save(tree, tmp_path), "cpu", optimizer="torchao.optim:AdamW8bit", against=original)
    assert found["parity"]["status"] == "failed"
    assert found["parity"]["detail"].count("model.big") > 0
    assert "model.small" not in found["parity"]["detail"]


def test_parity_with_wrappers_that_torch_does_not_return_is_not_proven(answers, tmp_path):
    inside, archive = save(trained(torchao.optim.AdamW8bit), tmp_path, "c.pt"), str(tmp_path / "c.tar")
    with tarfile.open(archive, "w") as packed:
        packed.add(inside, "c.pt")
    found = answers(inside, "cpu", optimizer="torchao.optim:AdamW8bit", against=archive)
    assert "failed" not in statuses(found), found
    assert found["step"]["evidence"]["proven"] is False


def test_an_update_below_precision_shows_in_what_is_inside(answers, tmp_path):
    path = save(trained(torchao.optim.AdamW8bit, lr=1e-12, weight_decay=0.0), tmp_path)
    found = answers(path, "cpu", optimizer="torchao.optim:AdamW8bit")
    assert statuses(found) == ["passed"] * 3
    assert (found["step"]["evidence"]["moved"], found["step"]["evidence"]["not_stepped"]) == (0, 0)


def test_options_that_make_a_foreign_step_read_no_state_are_no_fault_and_no_proof(answers, tmp_path):
    path = save(trained(torchao.optim.AdamW8bit, betas=(0.0, 0.0)), tmp_path)
    found = answers(path, "cpu", optimizer="torchao.optim:AdamW8bit")
    assert statuses(found) == ["passed", "passed", "skipped"]
    assert found["step"]["evidence"]["proven"] is False


def test_a_parameter_of_which_nothing_is_known_is_not_stepped_and_said(answers, tmp_path):
    tree = trained(torch.optim.SGD, momentum=0.9)
    del tree["model"]["small"]
    tree["optimizer"]["state"][1]["momentum_buffer"] = None
    found = answers(save(tree, tmp_path), "cpu")
    evidence = found["step"]["evidence"]
    assert (evidence["parameters"], evidence["not_stepped"], evidence["proven"]) == (1, 1, False)


class Slotted:
    __slots__ = "empty", "inner"

    def __init__(self, inner):
        self.inner = inner


class Unpicklable:
    def __getstate__(self):
        raise TypeError("cannot be pickled")


class OneSlot:
    __slots__ = "inner"  # noqa: PLC0205  # one name is allowed, and not a sequence of letters

    def __init__(self, inner):
        self.inner = inner


def test_tensors_on_other_tensors_and_in_objects_are_named():
    holder = torch.ones(2)
    holder.more = {"scale": torch.ones(1), "kind": int}
    both = Slotted(OneSlot(torch.ones(3)))
    tree = {"w": holder, "first": both, "again": both, "kind": int, "lambda": Unpicklable()}
    assert [name for name, _ in named_tensors(tree)] == ["w", "w.more.scale", "first.inner.inner"]


def test_a_tensor_attribute_of_a_parameter_is_no_difference(answers, tmp_path):
    tree = trained(torch.optim.AdamW)
    tree["model"]["big"] = torch.nn.Parameter(tree["model"]["big"])
    tree["model"]["big"].scale = torch.ones(4)
    found = answers(save(tree, tmp_path), "cpu")
    assert (found["restore"]["status"], found["restore"]["evidence"]["differing"]) == ("passed", 0)


def test_a_wrapper_of_no_file_is_not_there():
    from ckptmove.model import TensorRecord

    record = TensorRecord("w", "optimizer", "cpu", "float32", (1,), (1,), None, 0, 0, "wrapper-subclass")
    with pytest.raises(LookupError, match="weights_only=True"):
        LoadedFiles((), None).wrapper(record)


def test_sparse_state_is_not_stepped_and_said(answers, tmp_path):
    tree = trained(torch.optim.AdamW)
    state = tree["optimizer"]["state"][0]
    state["exp_avg"] = state["exp_avg"].to_sparse()
    found = answers(save(tree, tmp_path), "cpu")
    assert (found["step"]["evidence"]["not_stepped"], found["step"]["evidence"]["proven"]) == (1, False)
    assert "sparse_coo" in found["step"]["evidence"]["unproven"]


CASE = """
import torch
import ckptmove
IMPORTS

def case(device):
    model = torch.nn.ParameterDict({"big": torch.zeros(64, 64), "small": torch.zeros(6)}).to(device)
    step = lambda batch: sum(one.square().sum() for one in model.values())
    return ckptmove.Case(model, KIND(model.parameters(), lr=1e-3), None, (), step)
"""


def case_of(folder, imports, kind):
    (folder / "train.py").write_text(CASE.replace("IMPORTS", imports).replace("KIND", kind))
    return "train.py:case"


@pytest.mark.parametrize("target", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_case_restores_low_bit_state(answers, tmp_path, monkeypatch, name, target):
    monkeypatch.chdir(tmp_path)
    path = save(trained(getattr(torchao.optim, name)), tmp_path)
    check = answers(path, target, case=case_of(tmp_path, "import torchao.optim", f"torchao.optim.{name}"))["case"]
    assert (check["status"], check["evidence"]["proven"], check["evidence"]["entries"]) == ("passed", True, 2), check


def test_a_case_restores_what_torch_returns_once_the_script_is_imported(answers, tmp_path, theirs):
    path = save(trained(theirs.Momentum), tmp_path)
    with restored_allow_list(empty=True):
        imports = "import their_wrappers\ntorch.serialization.add_safe_globals([their_wrappers.Opaque])"
        found = answers(path, "cpu", case=case_of(tmp_path, imports, "their_wrappers.Momentum"))
    assert found["restore"]["evidence"]["weights_only"] is False
    assert (found["case"]["status"], found["case"]["evidence"]["proven"]) == ("passed", True), found["case"]


def test_a_case_whose_wrappers_torch_does_not_return_is_not_proven(answers, tmp_path, theirs):
    path = save(trained(theirs.Momentum), tmp_path)
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        found = answers(path, "cpu", case=case_of(tmp_path, "import their_wrappers", "their_wrappers.Momentum"))
    finally:
        torch.serialization.add_safe_globals(allowed)
    assert (found["case"]["status"], found["case"]["evidence"]["proven"]) == ("skipped", False), found["case"]
    assert "optimizer.state.0.mean" in found["case"]["detail"]

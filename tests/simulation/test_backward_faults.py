"""Faults in the backward of a user's case, reported with their lines."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch

HEAD = """
import torch
from torch import nn
from torch.autograd.function import once_differentiable
import ckptmove

def case(device):
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(device)
    step = lambda pair: loss(model, *(one.to(device) for one in pair))
    return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), batch(), step)

def batch():
    return torch.randn(4, 6), torch.randn(4, 3)

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values * 2
"""
USED = """
def loss(model, inputs, targets):
    return nn.functional.mse_loss(Twice.apply(model(inputs)), targets)
"""


@pytest.fixture
def evidence_of(answers, make, tmp_path, monkeypatch):
    """The evidence of the case check of a script, which fails."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def evidence_of(body, inside=""):
        source = HEAD + textwrap.indent(textwrap.dedent(inside), "    ") + textwrap.dedent(body)
        (tmp_path / "train.py").write_text(source)
        check = answers(make(), "cuda:0", case="train.py:case")["case"]
        assert check["status"] == "failed", check["detail"]
        return check["evidence"]

    return evidence_of


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("backward", "source", "fix"),
    [
        ("return grad.cpu()", "return grad.cpu()", "return grad.cpu().to(grad.device)"),
        ("return (grad.cpu(),)", "return (grad.cpu(),)", "return (grad.cpu().to(grad.device),)"),
        (
            "if grad is None:\n    return None\nreturn grad.cpu()",
            "return grad.cpu()",
            "return grad.cpu().to(grad.device)",
        ),
    ],
    ids=["one", "a tuple", "two returns"],
)
@pytest.mark.parametrize("decorator", ["", "@once_differentiable"])
def test_a_gradient_that_is_elsewhere(evidence_of, backward, source, fix, decorator):
    lines = ["@staticmethod", *decorator.split(), "def backward(ctx, grad):", textwrap.indent(backward, "    ")]
    found = evidence_of(USED, "\n".join(lines))
    assert {key: found[key] for key in ("tensor", "on", "operation", "source", "fix", "file")} == {
        "tensor": "gradient 0 of Twice.backward",
        "on": "cpu",
        "operation": "torch.autograd.Function Twice",
        "source": source,
        "fix": fix,
        "file": "train.py",
    }
    assert "TwiceBackward" in found["error"]


def test_one_of_a_backward_that_takes_them_all_as_they_come(evidence_of):
    inside = "@staticmethod\ndef backward(ctx, *grads):\n    return grads[0].cpu()"
    assert evidence_of(USED, inside)["fix"] == "return grads[0].cpu().to(grads[0].device)"


def test_one_of_a_backward_without_lines(evidence_of):
    called = """
class Called:
    def __call__(self, ctx, *grads):
        return grads[0].cpu()

Twice.backward = Called()
"""
    found = evidence_of(called + USED)
    assert found["source"] == "def case(device):"
    assert (found["fix_at"], "backward" in found["fix"]) == ("", True)


def test_one_of_a_backward_whose_file_is_another_one_by_now(evidence_of):
    code = "compile('def backward(ctx, grad): return grad.cpu()', 'gone.py', 'exec')"
    found = evidence_of(f"made = {{}}\nexec({code}, made)\nTwice.backward = made['backward']\n" + USED)
    assert (found["file"], found["line"], found["source"]) == ("gone.py", 1, "")


def test_a_hook_that_raises_is_named_by_its_line(evidence_of):
    found = evidence_of(
        """
        def loss(model, inputs, targets):
            model[0].weight.register_hook(watched)
            return nn.functional.mse_loss(model(inputs), targets)

        def watched(grad):
            raise ValueError("bad gradient")
        """
    )
    assert found["error"] == "ValueError: bad gradient"
    assert found["source"] == 'raise ValueError("bad gradient")'


def test_a_module_whose_hook_raises(evidence_of):
    found = evidence_of(
        """
        def loss(model, inputs, targets):
            model[0].register_full_backward_hook(lambda module, given, made: given[0].shape[7])
            return nn.functional.mse_loss(model(inputs.requires_grad_()), targets)
        """
    )
    assert found["error"].startswith("IndexError")
    assert found["source"].startswith("model[0].register_full_backward_hook(lambda")


@pytest.mark.parametrize(
    "registered",
    [
        "made.grad_fn.register_hook(watched)",
        "made.grad_fn.register_prehook(watched)",
        "stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda one: one, watched))",
        "stack.callback(nn.modules.module.register_module_full_backward_hook(watched).remove)",
        "stack.callback(nn.modules.module.register_module_full_backward_pre_hook(watched).remove)",
        "stack.callback(nn.modules.module.register_module_forward_hook(watched).remove)",
    ],
    ids=["node", "before a node", "saved", "every module", "before every module", "forward"],
)
def test_a_hook_of_whatever_kind_is_named_by_its_line(evidence_of, registered):
    found = evidence_of(
        f"""
        from contextlib import ExitStack

        def loss(model, inputs, targets):
            made = inputs.requires_grad_() * 2
            with ExitStack() as stack:
                {registered}
                return nn.functional.mse_loss(model(made), targets)

        def watched(*given):
            raise ValueError("bad value")
        """
    )
    assert found["error"] == "ValueError: bad value"
    assert (found["file"], found["source"]) == ("train.py", 'raise ValueError("bad value")')


def test_a_function_that_is_right_is_none_of_it(answers, make, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    inside = "    @staticmethod\n    def backward(ctx, grad):\n        return grad * 2\n"
    (tmp_path / "train.py").write_text(HEAD + inside + USED)
    check = answers(make(), "cuda:0", case="train.py:case")["case"]
    assert check["status"] == "passed", check["detail"]
    assert torch.autograd.function.BackwardCFunction.apply.__name__ == "apply"

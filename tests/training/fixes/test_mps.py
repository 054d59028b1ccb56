"""Fixes for what mps lacks, pasted until the case passes."""

from __future__ import annotations

import sys

import pytest
from pasting import HEAD, case

FALLBACK = 'import os; os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] = "1"'
STEP = "def step(pair):\n    out = model(pair[0].to(device))\n    "


def stepped(body, batch="batch()"):
    """A case whose loss is of the user's own lines."""
    return case(step=f"{STEP}{body}", batch=batch, given="None")


@pytest.fixture
def check_of(answers, make, tmp_path, monkeypatch):
    """The check of a script on mps."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK", raising=False)

    def check_of(body, head=HEAD):
        (tmp_path / "train.py").write_text(head + body)
        return answers(make(), "mps", case="train.py:case")["case"]

    return check_of


@pytest.mark.filterwarnings("ignore:The operator")
def test_a_missing_operation_falls_back_to_the_cpu(mended):
    (fix,) = mended(stepped("return torch.nn.functional.pdist(out).sum()"), to="mps")
    assert fix == f"before train.py:2: {FALLBACK}"


def test_a_missing_operation_is_named_with_the_line(check_of):
    evidence = check_of(stepped("return torch.nn.functional.pdist(out).sum()"))["evidence"]
    assert evidence["operation"] == "torch.nn.functional.pdist"
    assert evidence["aten"] == "aten::_pdist_forward"
    assert evidence["source"] == "return torch.nn.functional.pdist(out).sum()"
    assert evidence["error"].startswith("NotImplementedError: The operator 'aten::_pdist_forward' is not")


def test_a_missing_backward_is_named_with_the_line_of_its_forward(check_of):
    resized = "torch.nn.functional.interpolate(out[None, None], size=(9, 9), mode='bicubic', antialias=True)"
    check = check_of(stepped(f"return {resized}.sum()"))
    assert check["status"] == "failed"
    assert check["evidence"]["aten"] == "aten::_upsample_bicubic2d_aa_backward.grad_input"
    assert check["evidence"]["operation"].endswith(" in torch.Tensor.backward (UpsampleBicubic2DAaBackward0)")
    assert check["evidence"]["source"] == f"return {resized}.sum()"


@pytest.mark.filterwarnings("ignore:The operator")
def test_a_script_that_sets_the_fallback_passes_and_the_operations_are_noted(check_of):
    body = stepped("return out.sum() + torch.nn.functional.pdist(out).sum()")
    check = check_of(body, f"from __future__ import annotations\n{FALLBACK}\n{HEAD}")
    assert check["status"] == "passed", check["detail"]
    assert check["evidence"]["on_cpu"] == ["aten::_pdist_forward", "aten::_pdist_backward"]
    assert "aten::_pdist_backward" in check["detail"]


def test_the_setting_is_pasted_after_future_imports(check_of):
    check = check_of(
        stepped("return torch.nn.functional.pdist(out).sum()"), f"from __future__ import annotations\n{HEAD}"
    )
    assert check["evidence"]["fix_at"] == "before train.py:3"


def test_without_an_import_the_fix_is_in_words(check_of):
    imports = [f"{name} = __import__({name!r})" for name in ("functools", "numpy", "torch", "ckptmove")]
    head = "\n".join([*imports, "nn = torch.nn", HEAD.partition("import ckptmove\n")[2]])
    check = check_of(stepped("return torch.nn.functional.pdist(out).sum()"), head)
    assert "fix_at" not in check["evidence"] or not check["evidence"]["fix_at"]
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1" in check["evidence"]["fix"]


def test_a_kernel_that_refuses_a_shape_runs_on_the_cpu(check_of):
    check = check_of(stepped("return torch.nn.functional.adaptive_avg_pool2d(out[None], 2).sum()"))
    assert check["status"] == "failed"
    assert check["evidence"]["operation"] == "torch.nn.functional.adaptive_avg_pool2d"
    assert check["evidence"]["error"].startswith("NotImplementedError: Adaptive pool MPS: ")
    assert ".cpu()" in check["evidence"]["fix"]


CASTS = {
    "made on the device": (
        "return (out + torch.zeros(3, dtype=torch.float64, device=device)).sum()",
        "return (out + torch.zeros(3, dtype=torch.float32, device=device)).sum()",
    ),
    "made from numpy on the device": (
        "return (out + torch.tensor(numpy.zeros(3), device=device)).sum()",
        "return (out + torch.tensor(numpy.zeros(3), device=device, dtype=torch.float32)).sum()",
    ),
    "made from numpy with a dtype of numpy": (
        "return (out + torch.tensor(numpy.zeros(3, dtype=numpy.float64), device=device)).sum()",
        "return (out + torch.tensor(numpy.zeros(3, dtype=numpy.float64), device=device, dtype=torch.float32)).sum()",
    ),
    "moved from numpy": (
        "return (out + torch.from_numpy(numpy.zeros(3)).to(device)).sum()",
        "return (out + torch.from_numpy(numpy.zeros(3)).to(device, dtype=torch.float32)).sum()",
    ),
    "moved in a comprehension": (
        "both = out, torch.tensor(numpy.ones(1)), torch.tensor(1)\n    return sum(v.to(device).sum() for v in both)",
        "return sum(v.to(device, dtype=torch.float32 if v.dtype == torch.float64 else v.dtype).sum() for v in both)",
    ),
    "cast by a method": ("return out.double().sum()", "return out.float().sum()"),
    "cast by to": ("return out.to(torch.double).sum()", "return out.to(torch.float32).sum()"),
    "complex": (
        "return (out * torch.ones(3, dtype=torch.complex128, device=device)).abs().sum()",
        "return (out * torch.ones(3, dtype=torch.complex64, device=device)).abs().sum()",
    ),
}


@pytest.mark.parametrize(("line", "cast"), CASTS.values(), ids=CASTS)
def test_a_dtype_that_mps_lacks_is_replaced(mended, line, cast):
    (fix,) = mended(stepped(line), to="mps")
    assert fix.endswith(f": {cast}")


def test_a_batch_is_cast_where_it_is_made(mended):
    fixes = mended(case(batch="(torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 3))"), to="mps")
    assert fixes == ["in place of train.py:31: pair = (torch.randn(4, 6, dtype=torch.float32), torch.randn(4, 3))"]


WORDS = {
    "a batch that is not made by torch": case(batch="(torch.from_numpy(numpy.zeros((4, 6))), torch.randn(4, 3))"),
    "a dtype in a variable": stepped("wide = getattr(torch, 'float64')\n    return out.to(wide).sum()"),
    "a dtype in a function's argument": stepped("return out.type(getattr(torch, 'float64')).sum()"),
}


@pytest.mark.parametrize("body", WORDS.values(), ids=WORDS)
def test_the_cast_is_in_words_where_no_line_names_it(check_of, body):
    evidence = check_of(body)["evidence"]
    assert not evidence.get("fix_at")
    assert "torch.float32" in evidence["fix"]


def test_a_dtype_without_a_smaller_one_has_no_fix(check_of):
    check = check_of(stepped("return out.to(torch.float8_e4m3fn).float().sum()"))
    assert check["status"] == "failed"
    assert "MPS" in check["detail"]

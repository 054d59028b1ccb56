"""The command `verify --case`: child process, exit codes, configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from ckptmove.cli.render.verification import outcome
from ckptmove.proof.evidence import CheckResult, Verdict
from ckptmove.testing import assert_resumes
from ckptmove.training.run import _is_proven

SCRIPT = """
import torch
from torch import nn
import ckptmove

print("what the user's code prints is not an answer")

def case(device):
    model = nn.Linear(3, 2).to(device)
    inputs, targets = torch.randn(4, 3), torch.randn(4, 2)
    return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), (inputs, targets))

def broken(device):
    made = case(device)
    return ckptmove.Case(made.model, made.optimizer, None, made.batch, lambda batch: made.model(batch[0]).sum())

def one_of_two(device):
    nets = {"netG": nn.Linear(3, 2).to(device), "netD": nn.Linear(3, 2).to(device)}
    optimizers = {name: torch.optim.AdamW(net.parameters()) for name, net in zip(("optG", "optD"), nets.values())}
    def step(batch):
        nets["netG"](batch.to(device)).sum().backward()
        optimizers["optG"].step()
    return ckptmove.Case(nets, optimizers, batch=torch.randn(4, 3), step=step)

def dying(device):
    import os
    os.abort()

def endless(device):
    while True:
        pass

def nothing(device):
    return None
"""


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    torch.save(trained(torch.nn.Linear(3, 2)), tmp_path / "run.pth")
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.unmeasured
def test_a_case_is_the_last_check_of_the_verdict(folder, ckptmove, monkeypatch):
    monkeypatch.setenv("CKPTMOVE_PROJECT_CODE", "1")
    (folder / "pyproject.toml").write_text('[tool.ckptmove]\ncase = "train.py:case"\nto = "cpu"\n')
    code, out, _ = ckptmove("verify", "run.pth", "--json")
    result = json.loads(out)["results"][0]
    assert (code, result["passed"], result["proven"]) == (0, True, True)
    assert result["checks"][-1]["name"] == "case"
    assert result["checks"][-1]["evidence"]["case"] == "train.py:case"


def test_a_case_that_proves_nothing_is_not_outvoted_by_the_step(folder, ckptmove):
    tree = {}
    for model, optimizer in (("netG", "optG"), ("netD", "optD")):
        whole = trained(torch.nn.Linear(3, 2))
        tree |= {model: whole["model"], optimizer: whole["optimizer"]}
    torch.save(tree, folder / "gan.pth")
    code, out, _ = ckptmove("verify", "gan.pth", "--case", "train.py:one_of_two", "--json", "--strict")
    (result,) = json.loads(out)["results"]
    proofs = {check["name"]: check["evidence"].get("proven") for check in result["checks"]}
    assert (proofs["step"], proofs["case"]) == (True, False)
    assert (code, result["passed"], result["proven"]) == (1, True, False)


def test_a_case_does_not_stand_in_for_a_step_with_doubts(folder, ckptmove):
    whole = trained(torch.nn.Linear(3, 2))
    del whole["optimizer"]["state"][1]
    torch.save(whole, folder / "frozen.pth")
    _, out, _ = ckptmove("verify", "frozen.pth", "--case", "train.py:case", "--json")
    (result,) = json.loads(out)["results"]
    (step,) = (check for check in result["checks"] if check["name"] == "step")
    assert (step["status"], step["evidence"]["not_stepped"], result["proven"]) == ("passed", 1, False)


def test_a_case_stands_in_for_a_step_that_was_skipped():
    skipped = CheckResult("step", "skipped", "nothing to resume")
    for proven in (True, False):
        checks = (skipped, CheckResult("case", "passed", "", (("proven", proven),)))
        assert _is_proven(checks) is proven


@pytest.mark.parametrize(
    ("step", "case", "said"),
    [
        (("passed", "", (("proven", True),)), ("passed", "", (("proven", False), ("unproven", "half"))), "half"),
        (("passed", "", (("proven", True),)), ("passed", "", (("proven", False),)), "the case does not prove it"),
        (("skipped", "no class", ()), ("skipped", "no device", ()), "no device"),
        (("passed", "", (("unproven", "frozen"),)), ("passed", "", (("proven", True),)), "frozen"),
        (("skipped", "no class; more", ()), None, "no class"),
    ],
)
def test_the_verdict_names_the_check_that_does_not_prove_it(step, case, said):
    checks = (CheckResult("step", *step), *([CheckResult("case", *case)] if case else []))
    result = Verdict(path="run.pth", target="cpu", mode="cpu", passed=True, proven=False, checks=checks, findings=())
    assert outcome(result).endswith(f"but not proven to resume: {said}")


def test_a_broken_case_says_where_and_what_mends_it(folder, ckptmove, simulates):
    code, out, err = ckptmove("verify", "run.pth", "--to", "cpu", "--case", "train.py:broken")
    assert code == 0, "on the CPU there is nothing to forget"
    code, out, err = ckptmove("verify", "run.pth", "--to", "cuda:0", "--case", "train.py:broken")
    assert code == 1
    for fact in ("batch[0]", "cuda:0", "torch.nn.functional.linear", "train.py:"):
        assert fact in out
    assert re.search(r"train.py:\d+: return ckptmove.Case\(.* made.model\(batch\[0\].to\(device\)\)", out)
    assert "Traceback" not in out + err


def test_a_case_that_ends_the_process_is_a_failed_check(folder, ckptmove):
    code, out, _ = ckptmove("verify", "run.pth", "--to", "cpu", "--case", "train.py:dying")
    assert code == 1
    assert re.search(r"case .* SIGABRT", out)


@pytest.mark.unmeasured
def test_a_case_without_end_is_a_failed_check_after_as_much_time_as_it_was_given(folder, ckptmove):
    code, out, _ = ckptmove("verify", "run.pth", "--case", "train.py:endless", "--timeout", "2", "--json")
    (result,) = json.loads(out)["results"]
    assert code == 1
    (late,) = (check for check in result["checks"] if check["status"] == "failed")
    assert "--timeout" in late["detail"]  # whichever check it had reached
    assert late["evidence"] == {"timeout": 2.0}


@pytest.mark.parametrize("seconds", ["0", "-3", "nan"])
def test_no_time_at_all_is_a_mistake_of_usage(folder, ckptmove, seconds):
    code, out, err = ckptmove("verify", "run.pth", "--timeout", seconds)
    assert (code, out) == (2, "")
    assert err.startswith("error: --timeout")
    assert f" {float(seconds):g}\n" in err


@pytest.mark.parametrize(
    ("typed", "said", "hint"),
    [
        ("train.py:cases", "it has no function 'cases'", "--case train.py:case"),
        ("train.py:other", "it has no function 'other'", "--case train.py:nothing"),
        ("train.py", "'train.py' is not FILE.py:FUNC or pkg.mod:FUNC", "--case FILE.py:FUNC"),
        ("train.py:nothing", "train.py:nothing returns a NoneType, not a ckptmove.Case", "--case FILE.py:FUNC"),
    ],
)
def test_a_case_that_is_none_is_one_line_and_a_hint(folder, ckptmove, typed, said, hint):
    code, out, err = ckptmove("verify", "run.pth", "--to", "cpu", "--case", typed)
    assert (code, out) == (2, "")
    assert said in err
    assert hint in err
    assert "Traceback" not in err


def test_a_test_may_name_a_case(folder, simulates):
    assert assert_resumes("run.pth", to="cpu", case="train.py:case").checks[-1].name == "case"
    with pytest.raises(AssertionError, match=r"case: batch\[0\]"):
        assert_resumes(Path("run.pth"), to="cuda:0", case="train.py:broken")


def test_a_case_is_named_where_it_would_prove_what_a_file_does_not_tell(folder, ckptmove):
    hint = "hint: --case FILE.py:FUNC or --script FILE.py proves it with your own model and optimizer\n"
    whole = torch.load(folder / "run.pth")
    torch.save({"model": {}, "optimizer": whole["optimizer"]}, folder / "alone.pth")
    code, out, err = ckptmove("verify", "alone.pth", "--to", "cpu")
    assert (code, err) == (0, hint)
    assert "not proven" in out
    torch.save({"model": whole["model"]}, folder / "weights.pth")
    for words in (["run.pth"], ["weights.pth"], ["alone.pth", "--quiet"], ["alone.pth", "--json"]):
        assert ckptmove("verify", *words, "--to", "cpu")[2] == ""
    code, out, err = ckptmove("verify", "alone.pth", "--to", "cpu", "--case", "train.py:dying")
    assert (code, err) == (1, "")

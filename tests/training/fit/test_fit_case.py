"""``verify --fit`` with a case: figures, verdicts, and what cannot run without values."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import fit_cases
import pytest
import torch

import ckptmove
from ckptmove.errors import CaseUnusable, UsageError
from ckptmove.proof.request import VerifyRequest
from ckptmove.training.fit.sizes import verify_fit
from ckptmove.training.fit.worker import measure_case

FILE = Path(fit_cases.__file__)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("fit") / "run.pth"
    case = fit_cases.whole(torch.device("cpu"))
    case.criterion(case.model(case.batch[0]), case.batch[1]).backward()
    case.optimizer.step()
    torch.save({"model": case.model.state_dict(), "optimizer": case.optimizer.state_dict()}, path)
    return str(path)


def measured(name, ranks=8):
    """What the child process answers."""
    answers = []
    measure_case(VerifyRequest("run.pth", fit=f"{ranks}x1GB", case=f"{FILE}:{name}"), answers.append)
    found = {key: value for answer in answers for key, value in answer.items()}
    return found.get("fact") or found.get("refusal") or found["unusable"]


@functools.cache
def facts(name, ranks=8):
    return measured(name, ranks)


@pytest.mark.unmeasured
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_figures_of_fsdp_are_those_of_the_metadata(saved, ranks) -> None:
    alone = verify_fit(VerifyRequest(saved, fit=f"{ranks}x1GB"), f"{ranks}x1GB").fit
    found = facts("sharded", ranks)
    table = -(-7 // ranks) * 4  # the buffer: a state_dict does not mark it
    assert found["sizes"]["parameters"] == alone.parameters - table
    assert found["sizes"]["buffers"] == 7 * 4
    assert found["is_sharded"]
    assert (found["smallest"] < found["sizes"]["total"]) is (ranks > 1)


def test_a_step_that_reads_a_value() -> None:
    found, whole = facts("reading"), facts("sharded")
    assert found["activations"] is None
    assert "fit_cases.py" in found["why_none"]
    assert "loss.item()" in found["why_none"]
    assert "reads a value of a tensor (.item())" in found["why_none"]
    assert found["largest_name"] == "up.weight"
    # Without a backward, each parameter that requires a gradient has one.
    assert found["sizes"]["parameters"] == whole["sizes"]["parameters"]
    assert found["sizes"]["optimizer"] == whole["sizes"]["optimizer"]
    assert found["sizes"]["gradients"] == whole["sizes"]["optimizer"] // 2
    assert not whole["why_none"]


def test_a_model_made_on_meta() -> None:
    assert facts("made_on_meta")["sizes"] == facts("whole")["sizes"]
    assert facts("whole")["smallest"] == facts("whole")["sizes"]["total"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reads_at_once", ["reads_at_once", "torch.ones(1).item()", "value"]),
        ("depends_on_values", ["shape", "nonzero()"]),
        ("on_cuda", ['to("cuda")', "cpu"]),
        ("in_ddp", ["DistributedDataParallel"]),
        ("no_case", ["ckptmove.Case"]),
        ("detached", ["gradient"]),
        ("reading_optimizer", ["value"]),
        ("own_gradients", ["LBFGS"]),
    ],
)
def test_what_cannot_run_without_values(name, words) -> None:
    found = measured(name)
    assert isinstance(found, str)
    assert "\n" not in found
    assert all(word in found for word in words)


@pytest.mark.parametrize(("name", "is_own"), [("own_error", True), ("reads_at_once", False), ("in_ddp", False)])
def test_an_exception_of_the_own_code(name, is_own) -> None:
    assert ("no values" not in measured(name)) is is_own


def test_no_batch() -> None:
    found = facts("without_batch")
    assert found["activations"] is None
    assert found["why_none"] == "the case has no batch"


@pytest.fixture
def answered(monkeypatch, saved):
    """Verify with the answers of this process in place of those of a child."""

    def verify(name, fit):
        answers = SimpleNamespace(collect=lambda *_: collected(name, fit))
        monkeypatch.setattr("ckptmove.training.fit.case.child", lambda *_: nullcontext(answers))
        return ckptmove.verify(saved, fit=fit, case=f"{FILE}:{name}")

    return verify


def collected(name, fit):
    from ckptmove.proof.checks import passed
    from ckptmove.proof.processes.child import Answers

    return Answers(checks={"fit": passed("fit", "measured")}, facts=facts(name, int(fit.partition("x")[0])))


def test_the_estimate_has_to_fit(answered) -> None:
    fit = answered("sharded", "8x1GB").fit
    needed = (fit.total + fit.activations) / 1000
    assert fit.free == 10**9 - fit.total
    result = answered("sharded", f"8x{needed}KB")
    assert result.passed
    assert result.mode is None
    assert not answered("sharded", f"8x{needed - 0.001:.3f}KB").passed


def test_without_an_estimate_a_gathered_parameter_has_to_fit(answered) -> None:
    fit = answered("reading", "8x1GB").fit
    needed = (fit.total + fit.largest_parameter) / 1000
    assert fit.activations is None
    assert answered("reading", f"8x{needed}KB").passed
    assert "up.weight, the largest gathered parameter" in answered("reading", f"8x{needed}KB").checks[0].detail
    assert not answered("reading", f"8x{needed - 0.001:.3f}KB").passed


def test_a_last_rank_that_needs_more(answered) -> None:
    result = answered("larger_on_the_last", "8x1GB")
    assert result.fit.total == 8 * result.fit.smallest
    assert dict(result.checks[0].evidence)["rank"] == 7
    assert dict(answered("sharded", "8x1GB").checks[0].evidence)["rank"] == 0


def test_notes(answered) -> None:
    assert "does not shard" in answered("whole", "8x1GB").checks[0].detail
    assert "does not shard" not in answered("whole", "1x1GB").checks[0].detail


@pytest.mark.parametrize("fit", ["1x1GB", "1x1KB"])
def test_another_model_than_that_of_the_checkpoint(answered, fit) -> None:
    assert answered("whole", "1x1GB").passed
    result = answered("several", fit)
    assert not result.passed
    assert result.fit is not None
    assert "40 elements" in result.checks[0].failures[0]
    assert str(result).endswith("failed on 1 rank")


@pytest.mark.slow
@pytest.mark.unmeasured
def test_in_a_child_process(saved) -> None:
    result = ckptmove.verify(saved, fit="3x1GB", case=fit_cases.sharded)
    assert result.passed
    assert not result.proven
    assert [check.name for check in result.checks] == ["fit"]
    assert result.fit.activations > 0
    assert result.to_dict()["results"][0]["fit"]["activations"] == result.fit.activations
    assert "fits on 3 ranks" in str(result)


def test_a_timeout_and_an_unusable_case(saved) -> None:
    result = ckptmove.verify(saved, fit="3x1GB", case=fit_cases.sharded, timeout=0.001)
    assert not result.passed
    assert result.fit is None
    assert "failed" in str(result)
    with pytest.raises(CaseUnusable):
        ckptmove.verify(saved, fit="3x1GB", case=fit_cases.no_case)
    for fit, options in (("3x1GB", {"sample": 1}), ("65537x1GB", {})):
        with pytest.raises(UsageError):
            ckptmove.verify(saved, fit=fit, case=fit_cases.sharded, **options)

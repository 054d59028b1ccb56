"""The assertion for the tests of users."""

from __future__ import annotations

import pytest
import torch

from ckptmove.errors import MissingFile
from ckptmove.testing import assert_resumes


@pytest.fixture
def saved(tmp_path):
    """A model and its optimizer after a step, saved on the CPU."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    def save(change=lambda state: None):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        change(state)
        torch.save(state, tmp_path / "run.pt")
        return tmp_path / "run.pt"

    return save


def test_a_checkpoint_that_resumes_passes_with_its_verdict(saved):
    result = assert_resumes(saved(), to="cpu", against=saved())
    assert result.proven
    assert result.target == "cpu"


def test_one_that_does_not_fails_with_its_faults(saved):
    def spoil(state):
        state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(7)

    with pytest.raises(AssertionError) as caught:
        assert_resumes(saved(spoil), to="cpu")
    first, *faults = str(caught.value).splitlines()
    assert first.startswith(str(saved(spoil)))
    assert any(line.startswith("  structure: ") for line in faults)


def test_nothing_proven_is_a_failure_unless_it_is_told_otherwise(saved):
    def strip(state):
        del state["optimizer"]

    with pytest.raises(AssertionError, match="not proven to resume"):
        assert_resumes(saved(strip))
    assert not assert_resumes(saved(strip), require_proof=False).proven


def test_what_cannot_be_read_is_an_error_and_no_failure(tmp_path):
    with pytest.raises(MissingFile) as raised:
        assert_resumes(tmp_path / "none.pt")
    assert len(raised.traceback) == 2, "the test's own line, and that function"

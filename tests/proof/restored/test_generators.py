from __future__ import annotations

import pytest
import torch

CUDA = torch.zeros(16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (torch.get_rng_state(), ""),
        (torch.zeros(5056, dtype=torch.uint8), "rng_state: Invalid mt19937 state"),
        (torch.zeros(100, dtype=torch.uint8), "rng_state has 100 bytes, a size that no generator's state has"),
        (CUDA, ""),
        (torch.zeros(816, dtype=torch.uint8), ""),
        ([CUDA, torch.zeros(70, dtype=torch.uint8)], "rng_state.1 has 70 bytes"),
    ],
    ids=["cpu", "zeros", "short", "cuda", "old-cuda", "list"],
)
def test_a_random_state_is_tried_in_a_generator(make, answers, state, said):
    path = make.save({**make.tree("AdamW"), "rng_state": state}, device="cpu")
    before = torch.get_rng_state()
    found = answers(path, "cpu")["restore"]
    assert found["status"] == ("failed" if said else "passed"), found
    assert said in found["detail"]
    assert torch.equal(before, torch.get_rng_state())


def test_a_restore_that_has_failed_keeps_its_words(make, answers, monkeypatch):
    path = make.save({**make.tree("AdamW"), "rng_state": torch.zeros(100, dtype=torch.uint8)}, device="cpu")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: {})
    assert " is missing" in answers(path, "cpu")["restore"]["detail"]

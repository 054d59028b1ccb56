"""Folders of the Trainer with an adapter of PEFT, whose optimizer trains more than the adapter holds."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import ckptmove

LORA = {
    **{f"base_model.model.layers.{index}.q_proj.lora_A.weight": (4, 16) for index in range(2)},
    **{f"base_model.model.layers.{index}.q_proj.lora_B.weight": (16, 4) for index in range(2)},
}
HEAD = {"base_model.model.lm_head.weight": (32, 16)}


def checkpoint(folder, stored, trained, *, sign="trainer_state.json", name="adapter_model.safetensors"):
    """Save an adapter, and an optimizer of parameters of these shapes."""
    folder.mkdir()
    save_file({key: torch.randn(shape) for key, shape in stored.items()}, folder / name)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in trained]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()
    torch.save(state, folder / "optimizer.pt")
    (folder / sign).write_text('{"global_step": 3}')
    return state


def found(folder):
    return [(one.code, one.severity.value) for one in ckptmove.inspect(str(folder)).findings if one.code[:2] == "O2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "more", "expected"),
    [
        (LORA | HEAD, {}, []),
        (LORA, {}, [("O206", "warning")]),
        ({**LORA, "base_model.model.other.weight": (32, 16)}, {"twice": (32, 16)}, [("O206", "warning")]),
        ({"prompt_embeddings": (20, 16)}, {}, []),  # PEFT stores the output of the encoder that it trains
        ({**LORA, "base_model.model.layers.0.q_proj.lora_E": (4, 1)}, {}, []),
    ],
)
def test_parameters_without_a_tensor_in_the_adapter(tmp_path, stored, more, expected):
    checkpoint(tmp_path / "run", stored, [*LORA.values(), *HEAD.values(), *more.values()])
    assert found(tmp_path / "run") == expected
    verdict = ckptmove.verify(str(tmp_path / "run"))
    assert all(check.status != "failed" for check in verdict.checks)


@pytest.mark.parametrize("changed", [{"name": "pytorch_lora.safetensors"}, {"sign": "random_states_0.pkl.json"}])
def test_adapters_of_other_libraries_are_not_judged(tmp_path, changed):
    checkpoint(tmp_path / "run", LORA, [*LORA.values(), *HEAD.values()], **changed)
    assert found(tmp_path / "run") == []


def test_state_that_no_group_lists_is_an_error_here_too(tmp_path):
    state = checkpoint(tmp_path / "run", LORA | HEAD, [*LORA.values(), *HEAD.values()])
    state["state"][9] = state["state"][0]
    torch.save(state, tmp_path / "run" / "optimizer.pt")
    assert found(tmp_path / "run") == [("O206", "error")]

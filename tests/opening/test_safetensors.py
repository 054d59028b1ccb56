"""Safetensors together with files of torch.save: the format has no devices and no order of keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.formats.facts import facts_of


@pytest.fixture
def mixed(build):
    """A checkpoint of the HF Trainer as it is written today."""
    folder = build.hf_trainer()
    (folder / "pytorch_model.bin").unlink()
    save_file(build.trained()[0].state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_healthy_run_has_no_findings(mixed):
    found = ckptmove.inspect(mixed)
    assert found.inventory.layout == "hf-trainer"
    assert found.inventory.producer is None
    assert found.findings == ()
    assert {one.path: one.devices for one in found.inventory.files}["model.safetensors"] == ("unknown",)


def test_shapes_pair_where_each_is_there_once(mixed):
    (pairing,) = pair_all(ckptmove.inspect(mixed).inventory)
    assert (pairing.how, pairing.is_certain, pairing.reason) == ("shapes", True, "")
    names = [record.name.removeprefix("model.safetensors.") for _, record in pairing.matches]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_names_still_pair(build, mixed, tmp_path):
    model, _ = build.trained()
    try:
        named = torch.optim.AdamW(model.named_parameters())
    except TypeError:
        pytest.skip("this torch gives an optimizer no names")
    build.save(mixed / "optimizer.pt", named.state_dict(), "cuda:0")
    (pairing,) = pair_all(ckptmove.inspect(mixed).inventory)
    assert pairing.how == "names"
    assert pairing.matches[0][1].name == "model.safetensors.0.weight"
    result = ckptmove.convert(mixed, output=tmp_path / "whole.pth")
    assert not any("order" in note for note in result.notes)


def test_moments_in_safetensors_leave_the_order_of_the_model(build):
    folder = build.hf_trainer()
    save_file({"0.exp_avg": torch.ones(1)}, folder / "states.safetensors")
    (pairing,) = pair_all(ckptmove.inspect(folder).inventory)
    assert pairing.how == "order"


def test_what_names_a_device_is_moved_and_the_rest_is_copied(mixed):
    output = Path(ckptmove.convert(mixed, to="cpu").output)
    assert (output / "model.safetensors").read_bytes() == (mixed / "model.safetensors").read_bytes()
    tags = []
    torch.load(output / "optimizer.pt", map_location=lambda storage, tag: tags.append(tag) or storage)
    assert set(tags) == {"cpu"}


def test_a_directory_without_any_device_is_only_copied_where_that_is_asked_for(build, tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(build.trained()[0].state_dict(), folder / "model.safetensors")
    result = ckptmove.convert(folder, to="cuda:0")
    assert result.output is None
    assert result.notes[0].startswith(f"{facts_of('safetensors').why_no_devices}; ")
    assert "-o OUT" in result.notes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    output = Path(ckptmove.convert(folder, to="cuda:0", output=tmp_path / "copy").output)
    assert load_file(output / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


def test_shards_with_an_index(build, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in (1, 2):
        save_file({f"{number}.weight": torch.ones(2)}, folder / f"model-0000{number}-of-00002.safetensors")
    index = '{"weight_map": {"1.weight": "model-00001-of-00002.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    assert ckptmove.inspect(folder).inventory.layout == "sharded"

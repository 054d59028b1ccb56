"""One file from a distributed checkpoint: the order of its model, objects saved whole, and files next to it."""

from __future__ import annotations

import argparse
import shutil

import pytest
import torch

import ckptmove
from ckptmove.conversion.remap.errors import SavedWhole


@pytest.fixture
def unordered(distributed, tmp_path):
    """Two ranks have saved a share of the model each, and ``.metadata`` lists the last parameter first."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()])
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    folder = distributed.save(tmp_path / "run", {"model": model.state_dict(), "optim": optimizer.state_dict()})
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")

    def edit(metadata):
        entries = metadata.state_dict_metadata
        metadata.state_dict_metadata = dict(sorted(entries.items(), reverse=True))
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.2.weight":
                info.relative_path = "__1_0.distcp"

    return distributed.change(folder, edit)


def test_the_model_is_in_the_order_of_the_optimizer(unordered, tmp_path):
    result = ckptmove.convert(unordered, output=tmp_path / "run.pth")
    assert any("order" in note for note in result.notes)
    names = [name for name in torch.load(tmp_path / "run.pth", weights_only=True)["model"] if name[0] != "1"]
    assert names == ["0.weight", "0.bias", "2.weight"]
    assert ckptmove.verify(tmp_path / "run.pth", against=unordered).ok


def test_an_object_with_tensors_is_left_out_by_name(distributed, tmp_path):
    holder = argparse.Namespace(state=torch.ones(1))
    folder = distributed.save(tmp_path / "run", {"0.weight": torch.ones(2), "rng_state/shard_0_1": holder})
    with pytest.raises(SavedWhole) as caught:
        ckptmove.convert(folder, output=tmp_path / "run.pth")
    assert caught.value.name == "rng_state/shard_0_1"
    assert caught.value.name in str(caught.value.hint)
    ckptmove.convert(folder, output=tmp_path / "run.pth", drop=[caught.value.name])
    assert list(torch.load(tmp_path / "run.pth", weights_only=True)) == ["0.weight"]


def test_files_next_to_it_have_their_name(distributed, tmp_path):
    folder = distributed.save(tmp_path / "run", {"0.weight": torch.ones(2)})
    torch.save({"0.weight": torch.zeros(1), "iteration": 7}, folder / "common.pt")
    ckptmove.convert(folder, output=tmp_path / "run.pth")
    found = torch.load(tmp_path / "run.pth", weights_only=True)
    assert list(found) == ["0.weight", "common"]
    assert found["common"]["iteration"] == 7
    assert ckptmove.verify(tmp_path / "run.pth", against=folder).ok


def test_a_file_with_the_name_of_a_key_stays_apart(distributed, tmp_path):
    folder = distributed.save(tmp_path / "run", {"common": {"weight": torch.ones(2)}})
    torch.save({"iteration": 7}, folder / "common.pt")
    ckptmove.convert(folder, output=tmp_path / "run.pth")
    found = torch.load(tmp_path / "run.pth", weights_only=True)
    assert (list(found), list(found[""])) == (["", "common"], ["common"])


def test_state_of_megatron_is_no_parameter(distributed, tmp_path):
    tree = {"0.weight": torch.ones(2), "optimizer.state.exp_avg.0.weight": torch.ones(2)}
    torch.save(tree, tmp_path / "run.pth")
    assert [one.role for one in ckptmove.inspect(tmp_path / "run.pth").inventory.tensors] == ["model", "optimizer"]

"""One file from a distributed checkpoint: the order of its model, objects saved whole, and files next to it."""

from __future__ import annotations

import collections
import io
import pickle
import shutil
import zipfile

import pytest
import torch
from typer.testing import CliRunner

import ckptmove
from ckptmove.cli.app import app
from ckptmove.conversion.remap.errors import SavedWhole
from ckptmove.errors import CrcMismatch, OutputSuffix
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.restored import pieces as restore_pieces
from ckptmove.proof.restored.loaded import Loaded, LoadedFiles
from ckptmove.proof.restored.numbers import NumbersTally
from ckptmove.proof.restored.survey import RestoreTally, survey
from ckptmove.proof.step.counters import CounterFaults
from ckptmove.proof.tensors.stored import StoredTensors


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


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_objects(distributed, folder, **objects):
    """A tensor, and objects by their bytes."""
    placed = {name: (0, data) for name, data in objects.items()}
    return distributed.save_ranks(folder, {"0.weight": (torch.ones(2), [(0, (0,), (2,))])}, placed)


def test_an_object_with_tensors_is_written(distributed, tmp_path, answers):
    shared = torch.arange(6.0)
    tree = {"0.weight": torch.ones(2), "rng_state/shard_0_1": ({"a": shared, "b": shared[2:4], "n": (1, "x")},)}
    folder = distributed.save(tmp_path / "run", {**tree, "more": (torch.ones(3), 1, torch.eye(2).to_sparse())})
    found = ckptmove.inspect(folder)
    assert {"rng_state/shard_0_1.0.a", "more.0"} < {one.name for one in found.inventory.tensors}
    assert "rng" in found.inventory.contents
    result = answers(folder)["restore"]
    assert (result["status"], result["evidence"]["compared"]) == ("passed", 6)
    ckptmove.convert(folder, output=tmp_path / "run.pth")
    written = torch.load(tmp_path / "run.pth", weights_only=True)
    (state,) = written["rng_state/shard_0_1"]
    assert (state["a"].tolist(), state["b"].tolist(), state["n"]) == ([*range(6)], [2, 3], (1, "x"))
    assert state["a"].untyped_storage().data_ptr() == state["b"].untyped_storage().data_ptr()
    assert written["more"][0].tolist() == [1, 1, 1]
    assert ckptmove.diff(folder, tmp_path / "run.pth").same
    assert ckptmove.load(folder)["more"][0].tolist() == [1, 1, 1]


def test_a_damaged_tensor_in_an_object_stops_the_conversion(distributed, tmp_path):
    data = bytearray(saved((torch.full((4,), 7.0),)))
    data[data.index(torch.full((4,), 7.0).numpy().tobytes())] ^= 1
    folder = with_objects(distributed, tmp_path / "run", state=bytes(data))
    with pytest.raises(CrcMismatch):
        ckptmove.convert(folder, output=tmp_path / "run.pth")
    assert not (tmp_path / "run.pth").exists()
    assert "F801" in {finding.code for finding in ckptmove.inspect(folder, check=True).findings}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, "missing"),
        ({"0": [torch.ones(2, dtype=torch.int32)]}, "dtype"),
        ({"0": [torch.zeros(2)]}, "other bits"),
        ({"0": [torch.ones(2)]}, ""),
    ],
)
def test_a_tensor_in_an_object_is_compared(distributed, tmp_path, monkeypatch, other, words):
    folder = with_objects(distributed, tmp_path / "run", state=saved((torch.ones(2),)))
    load = restore_pieces.load

    def load_other(*args, **options):
        found = load(*args, **options)
        return found if "" in found.tensors else Loaded(other)

    monkeypatch.setattr(restore_pieces, "load", load_other)
    with open_checkpoint(str(folder), objects=True) as found, StoredTensors(found.parts) as stored:
        numbers = NumbersTally.of(found.inventory, (), CounterFaults())
        check = survey(found.inventory, stored, LoadedFiles(found.parts, stored), numbers)
        (part,) = found.parts
        assert [*restore_pieces.load_objects(part, {"of another process"}, RestoreTally().pieces)] == []
    assert check.status == ("failed" if words else "passed")
    assert words in check.detail
    assert dict(check.evidence)["compared"] == 2


def test_two_paths_in_an_object_that_read_alike_are_told_apart(distributed, tmp_path, answers):
    data = saved(({"a.b": torch.ones(2), "a": {"b": torch.ones(3)}},))
    folder = with_objects(distributed, tmp_path / "run", state=data)
    assert answers(folder)["restore"]["status"] == "passed"


def deflated(data):
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue()


def with_id(fields):
    """An object whose tensor has a persistent id that torch does not write."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return fields if obj is fields else None

    buffer, pickled = io.BytesIO(), io.BytesIO()
    Pickler(pickled).dump([fields])
    with zipfile.ZipFile(io.BytesIO(saved([1]))) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled.getvalue() if name.endswith("data.pkl") else old.read(name))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [b"own bytes", deflated(saved((torch.zeros(999),))), with_id(("storage", 1)), with_id("x"), with_id((1,) * 5)],
    ids=["own bytes", "deflated", "short id", "text id", "other id"],
)
def test_an_object_that_only_its_class_reads_is_left_out_by_name(distributed, tmp_path, data):
    folder = with_objects(distributed, tmp_path / "run", **{"extra/shard_0_1": data})
    with pytest.raises(SavedWhole) as caught:
        ckptmove.convert(folder, output=tmp_path / "run.pth")
    assert caught.value.name == "extra/shard_0_1"
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


def test_a_part_of_it_may_have_another_class_of_dict(distributed, tmp_path):
    tree = {"model": collections.OrderedDict(weight=torch.arange(3.0)), "step": 3}
    folder = distributed.save(tmp_path / "run", tree)
    torch.save(tree["model"], tmp_path / "model.pth")
    assert ckptmove.verify(tmp_path / "model.pth", against=folder).ok
    tree["model"]["weight"][1] = 7
    torch.save(tree["model"], tmp_path / "model.pth")
    assert not ckptmove.verify(tmp_path / "model.pth", against=folder).ok


def test_a_new_file_in_the_directory_is_verified_alone(distributed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    distributed.save(tmp_path / "run", {"weight": torch.ones(2)})
    said = CliRunner().invoke(app, ["convert", "run", "-o", "run/new.pth"])
    assert said.stderr.endswith("next: ckptmove verify run/new.pth\n")
    said = CliRunner().invoke(app, ["convert", "run", "-o", "new.pth", "--only", "model"])
    assert said.stderr.endswith("next: ckptmove verify new.pth\n")


def test_the_suffix_of_another_format(distributed, tmp_path):
    folder = distributed.save(tmp_path / "run", {"weight": torch.ones(2)})
    with pytest.raises(OutputSuffix) as caught:
        ckptmove.convert(folder, to="cpu", output="new.onnx")
    assert caught.value.instead == "new"

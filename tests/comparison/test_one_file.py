"""A directory and the file that ``convert`` writes for it are the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch

import ckptmove
from ckptmove.comparison.one_file import as_one_file
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint

MODEL = {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.ones(2), "1.weight": torch.zeros(1, 2)}


def index(folder, name, files):
    weights = {key: file for file, tensors in files.items() for key in tensors}
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def shards(folder, suffix, save, base):
    names = list(MODEL)
    files = {f"{base}-0000{at}-of-00002{suffix}": names[at - 1 :: 2] for at in (1, 2)}
    for file, own in files.items():
        save({key: MODEL[key] for key in own}, folder / file)
    index(folder, f"{base}{suffix}.index.json", files)


def torch_shards(folder):
    shards(folder, ".bin", torch.save, "pytorch_model")


def trainer(folder):
    shards(folder, ".safetensors", safetensors.torch.save_file, "model")
    parameters = [torch.nn.Parameter(one) for one in MODEL.values()]
    optimizer = torch.optim.AdamW(parameters)
    sum(one.sum() for one in parameters).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"epoch": 1.0, "global_step": 5}')


@pytest.fixture(params=[torch_shards, trainer], ids=lambda make: make.__name__)
def folder(request, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    request.param(path)
    return path


def test_nothing_differs(folder, tmp_path):
    new = tmp_path / "run.pth"
    ckptmove.convert(folder, output=new)
    for sides in ((folder, new), (new, folder)):
        found = ckptmove.diff(*sides)
        assert found.same, found
        assert any("not compared, because the other side is a single file" in note for note in found.notes)


def test_devices_that_a_file_stores_are_compared(folder, tmp_path):
    new = tmp_path / "run.pth"
    ckptmove.convert(folder, output=new, to="cuda:0")
    found = ckptmove.diff(folder, new)
    has_devices = not any(name.suffix == ".safetensors" for name in folder.iterdir())
    names = {one.name.partition(".")[0] for one in found.changed if one.what == "device"}
    assert names == ({"0", "1"} if has_devices else {"optimizer"})
    assert {one.what for one in found.changed} == {"device"}


def test_a_changed_object_is_found(folder, tmp_path):
    new = tmp_path / "run.pth"
    ckptmove.convert(folder, output=new)
    value = torch.load(new)
    value["extra"] = 3
    torch.save(value, new)
    assert [one.name for one in ckptmove.diff(folder, new).changed] == ["extra"]


def test_a_directory_that_no_file_can_hold_is_compared_file_by_file(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for at in (1, 2):
        torch.save({"w": torch.ones(1)}, folder / f"pytorch_model-0000{at}-of-00002.bin")
    torch.save({"w": torch.ones(1)}, tmp_path / "one.pth")
    assert not ckptmove.diff(folder, tmp_path / "one.pth").same


@pytest.mark.slow
def test_verify_compares_with_a_directory_in_a_fork(folder, tmp_path):
    """In a process without torch, ``verify`` forks after the comparison with the trees of the original has begun."""
    new = tmp_path / "run.pth"
    ckptmove.convert(folder, output=new)
    words = [sys.executable, "-m", "ckptmove", "verify", str(new), "--against", str(folder), "--json"]
    document = json.loads(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
    (restore,) = (one for one in document["results"][0]["checks"] if one["name"] == "restore")
    assert restore["status"] == "passed", restore


def test_the_files_of_a_directory_are_a_part_like_any_other(folder, tmp_path):
    ckptmove.convert(folder, output=tmp_path / "one.pth")
    with open_checkpoint(str(folder), keep_trees=True) as side, open_checkpoint(str(tmp_path / "one.pth")) as file:
        (part,) = as_one_file(side, file, Limits()).parts
        key = part.inventory.storages[0].key
        assert part.span(key) == part.storage(key).span
        assert (part.check(), part.extras()) == ((), {})


def test_parts_of_files_are_compared_by_their_tensors(tmp_path):
    (tmp_path / "run").mkdir()
    for name in "ab":
        torch.save({name: torch.ones(2), "epoch": 1}, tmp_path / "run" / f"{name}.pt")
    torch.save({"a": torch.ones(2), "b": torch.ones(2), "epoch": 1}, tmp_path / "one.pth")
    assert any(
        "only tensors were compared" in note for note in ckptmove.diff(tmp_path / "run", tmp_path / "one.pth").notes
    )


def test_the_order_of_keys_in_safetensors_is_no_difference(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3), "c": torch.ones(3, dtype=torch.bfloat16)}
    paths = [str(tmp_path / name) for name in ("mixed.safetensors", "cast.safetensors")]
    safetensors.torch.save_file(tensors, paths[0])
    ckptmove.convert(paths[0], output=paths[1], dtype="bf16")
    assert [[one.name for one in ckptmove.inspect(path).inventory.tensors] for path in paths] == [[*"bac"], [*"abc"]]
    assert ckptmove.verify(paths[1], against=paths[0]).passed
    assert [one.what for one in ckptmove.diff(*paths).changed] == ["dtype"]
    torch.save({**dict(reversed(tensors.items())), "epoch": 3, "options": {"lr": 0.1}}, tmp_path / "other.pth")
    found = ckptmove.diff(tmp_path / "other.pth", paths[0]).changed
    assert {one.name for one in found if one.what == "object"} == {"epoch", "options.lr"}

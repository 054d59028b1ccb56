"""What holds for every kind of checkpoint in several files: what torch reads, every command says, copies and finds."""

from __future__ import annotations

import json
import shutil
import zipfile
from copy import copy
from math import prod
from typing import NamedTuple

import hf_shards
import pytest
import torch
import zero_runs
from distributed_checkpoints import Distributed
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove.assembled.zero import gather_partitions
from ckptmove.errors import CrcMismatch, DamagedArchive, MissingShard
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.restored import pieces
from ckptmove.proof.tensors.stored import StoredTensors

STEPS = ("restore", "numbers", "step", "parity", "fresh")


class Kind(NamedTuple):
    """A kind of checkpoint."""

    files: str  # pattern of the files with chunks
    tensor: str  # name in the new file of a tensor in several files
    lost: tuple[int, ...]  # files without which it is incomplete
    has_crcs: bool = True
    is_read_whole: bool = True  # whether its tensors are whole when it is opened
    has_step: bool = True  # whether it has an optimizer
    is_loaded: bool = True  # whether weights-only mode loads its files


KINDS = {
    "dcp": Kind("*.distcp", "model.0.weight", (1,)),
    "hsdp": Kind("rank*.pt", "model.head.weight", (0, 2)),
    "strided": Kind("rank*.pt", "model.head.weight", (2,)),
    "fsdp1_sharded": Kind("rank*.pt", "model.head.weight", (1,), is_loaded=False),
    "hf": Kind("shard-*", "emb.weight", (1,), has_crcs=False, has_step=False),
    "zero": Kind("zero_pp_*", "module.a", (0,), is_read_whole=False),
}
WHOLE = [name for name, kind in KINDS.items() if kind.is_read_whole]
LOADED = [name for name in WHOLE if KINDS[name].is_loaded]


def model_and_state():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(3, 6)).square().sum().backward()
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    state = dict(zip(names, optimizer.state_dict()["state"].values(), strict=True))
    group = {**optimizer.state_dict()["param_groups"][0], "params": names}
    return {"model": dict(model.state_dict()), "optim": {"state": state, "param_groups": [group]}, "epoch": 2}


@pytest.fixture(params=KINDS)
def name(request):
    return request.param


@pytest.fixture
def kind(name):
    return KINDS[name]


@pytest.fixture
def folder(name, tmp_path, request):
    path = tmp_path / "run"
    if name == "dcp":
        return Distributed.halve(Distributed.save(path, model_and_state()))
    if name == "hf":
        return hf_shards.write(path)
    if name == "zero":
        return zero_runs.made(path)
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has fully_shard elsewhere")
    return shutil.copytree(request.getfixturevalue("saved") / name, path)


@pytest.fixture
def whole(name, request):
    """The values of the whole checkpoint by name, as the program that saved it had them."""
    if name == "dcp":
        return named(model_and_state())
    if name == "hf":
        return {key: tensor for key, (tensor, *_) in hf_shards.MODEL.items()}
    if name == "zero":
        return {f"module.{key}": value for key, value in zero_runs.whole(0).items()}
    return named(torch.load(request.getfixturevalue("saved") / f"{name}.full.pth", weights_only=True))


@pytest.fixture
def files(folder, kind):
    return sorted(folder.glob(kind.files))


def named(tree, path=""):
    """The tensors and the other values of a tree, by their names."""
    if not isinstance(tree, dict | list | tuple):
        return {path: tree}
    found = {}
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        found |= named(value, f"{path}.{key}" if path else str(key))
    return found


def tensors_in(values):
    return {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}


def is_same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def differing(found, expected):
    """Names of the expected values that are not there, or are others."""
    return [key for key, value in expected.items() if key not in found or not is_same(value, found[key])]


def form(tensor):
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def spoil(files, tensor):
    """Change a byte of the first elements of a tensor, in the first file that has them."""
    start = tensor.detach().contiguous().flatten()[:4].view(torch.uint8).numpy().tobytes()
    path = next(path for path in files if start in path.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(start) + 1] ^= 1
    path.write_bytes(data)


# --- what torch reads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE, indirect=True)
def test_its_tensors_are_those_that_were_saved(folder, whole, files):
    with open_checkpoint(str(folder), keep_trees=True) as found, StoredTensors(found.parts) as stored:
        (part,) = found.parts
        assert {one.name: (one.dtype, one.shape) for one in found.inventory.tensors} == {
            name: form(tensor) for name, tensor in tensors_in(whole).items()
        }
        assert {row.path for row in found.inventory.files} >= {path.name for path in files}
        assert not differing({one.name: stored.tensor(one) for one in found.inventory.tensors}, tensors_in(whole))
        assert part.tree() is not None
        part.budget().spend(1)
    assert not differing(named(ckptmove.load(folder)), whole)


def test_a_new_file_has_whole_tensors(folder, whole, tmp_path):
    outputs = []
    for jobs in (1, 5):
        (tmp_path / str(jobs)).mkdir()
        ckptmove.convert(folder, output=tmp_path / str(jobs) / "run.pth", jobs=jobs)
        outputs.append((tmp_path / str(jobs) / "run.pth").read_bytes())
    assert outputs[0] == outputs[1]
    assert not differing(named(torch.load(tmp_path / "1" / "run.pth", weights_only=True)), whole)


def test_its_chunks_cover_each_tensor_once(folder, kind, files):
    with open_checkpoint(str(folder), keep_trees=True) as opened:
        found = opened if kind.is_read_whole else gather_partitions(opened, Limits())
        (part,) = found.parts
        several = 0
        for record in part.inventory.tensors:
            key = part.own_key(record)
            assert part.files_of(record) <= {path.name for path in files} | {"mp_rank_00_model_states.pt"}
            stored = part.storage(key)
            assert stored.span == part.span(key)
            assert stored.source.read(0, stored.span.nbytes) == stored.source.read(0, stored.span.nbytes)
            chunks = {*part.chunks(key)}
            several += len(part.files_of(record)) > 1
            assert {placed.chunk for placed in part.pieces(key)} <= chunks or not chunks
            assert all(part.source(placed.file).size for placed in part.pieces(key))
            assert sum(chunk.volume for chunk in chunks) == (prod(record.shape) if chunks else 0)
            part.require_sound(key)
        assert several


# --- every command ----------------------------------------------------------------------------------------------------


def test_it_is_proven_to_resume(folder, kind, answers):
    found = answers(folder)
    restore = found["restore"]
    assert restore["status"] == ("passed" if kind.is_loaded else "skipped"), found
    assert restore["evidence"]["weights_only"] is kind.is_loaded
    assert restore["evidence"]["compared"] == restore["evidence"]["tensors"] * kind.is_loaded
    if kind.has_step:
        assert [found[name]["status"] for name in STEPS[1:]] == ["passed"] * 4, found
        assert found["step"]["evidence"]["proven"] is True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dcp", "hsdp", "hf", "zero"], indirect=True)
def test_a_verdict_through_the_child(folder, kind):
    told = []
    result = ckptmove.verify(folder, progress=lambda done, total: told.append((done, total)))
    assert result.ok, result.checks
    assert bool(told) is kind.has_crcs
    assert all(done <= total for done, total in told)


def test_a_new_file_is_the_same_checkpoint(folder, tmp_path, answers):
    output = tmp_path / "run.pth"
    ckptmove.convert(folder, output=output)
    assert ckptmove.diff(folder, output).same
    assert ckptmove.diff(output, folder).same
    assert answers(output, against=str(folder))["restore"]["status"] == "passed"


def test_a_copy_is_the_same_checkpoint(folder, kind, files, tmp_path):
    result = ckptmove.convert(folder, to="cpu", output=tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").glob(kind.files)) == [path.name for path in files]
    assert ckptmove.diff(folder, tmp_path / "copy").same, result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hsdp", "strided", "fsdp1_sharded", "zero"], indirect=True)
def test_an_archive_of_it_is_the_same_checkpoint(folder, whole, tmp_path):
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, f"run/{path.name}")
    ckptmove.convert(tmp_path / "run.zip", output=tmp_path / "run.pth")
    assert not differing(named(torch.load(tmp_path / "run.pth", weights_only=True)), whole)


def test_a_folder_at_a_url_is_the_same_checkpoint(folder, name):
    fs = pytest.importorskip("fsspec").filesystem("memory")
    for path in folder.iterdir():
        fs.pipe(f"/{name}/{path.name}", path.read_bytes())
    here, there = ckptmove.inspect(folder).inventory, ckptmove.inspect(f"memory://{name}").inventory
    fs.rm(f"/{name}", recursive=True)
    assert [(one.name, one.shape) for one in there.tensors] == [(one.name, one.shape) for one in here.tensors]


# --- faults -----------------------------------------------------------------------------------------------------------


def test_one_changed_byte_is_found(folder, kind, files, whole, tmp_path):
    shutil.copytree(folder, tmp_path / "original")
    spoil(files, whole[kind.tensor])
    (change,) = ckptmove.diff(folder, tmp_path / "original").changed
    assert change.what == "value"
    if kind.has_crcs:
        assert "F801" in {one.code for one in ckptmove.inspect(folder, check=True).findings}
        with pytest.raises(CrcMismatch):
            ckptmove.convert(folder, output=tmp_path / "run.pth")
        assert not (tmp_path / "run.pth").exists()
    ckptmove.convert(folder, output=tmp_path / "run.pth", check=False)
    found = named(torch.load(tmp_path / "run.pth", weights_only=True))
    assert differing(found, whole) == [kind.tensor]


@pytest.mark.parametrize("name", LOADED, indirect=True)
def test_what_is_loaded_is_held_against_what_is_stored(folder, answers, monkeypatch):
    monkeypatch.setattr(pieces, "same_bits", lambda mine, theirs: False)
    found = answers(folder)["restore"]
    assert (found["status"], found["evidence"]["differing"] > 1) == ("failed", True)


def test_a_lost_file_is_named(folder, kind, files, tmp_path):
    for place in kind.lost:
        files[place].unlink()
    with pytest.raises(MissingShard) as caught:
        ckptmove.convert(folder, output=tmp_path / "run.pth")
    assert files[kind.lost[0]].name in str(caught.value)


def test_a_file_that_is_cut_off_is_damage(folder, files, tmp_path):
    files[-1].write_bytes(files[-1].read_bytes()[:-30])
    with pytest.raises(DamagedArchive):
        ckptmove.convert(folder, output=tmp_path / "run.pth")


def drop_chunk(folder):
    def edit(metadata):
        entry = metadata.state_dict_metadata["model.0.weight"]
        gone = entry.chunks.pop()
        places = metadata.storage_data
        metadata.storage_data = {
            at: one for at, one in places.items() if at.offset != gone.offsets or at.fqn[:7] != "model.0"
        }

    Distributed.change(folder, edit)


def lay_over(folder):
    def edit(metadata):
        _, chunk = metadata.state_dict_metadata["model.0.weight"].chunks
        chunk.offsets = torch.Size((1, 0))

    Distributed.change(folder, edit)


def claim_another_place(folder):
    for rank in (1, 3):
        tree = torch.load(folder / f"rank0{rank}.pt", weights_only=True)
        tensor = tree["model"]["block.up.weight"]
        spec = tensor._spec = copy(tensor._spec)
        spec.mesh = copy(spec.mesh)
        spec.mesh._coordinate_on_dim = (0, 0)
        torch.save(tree, folder / f"rank0{rank}.pt")


def begin_at(row):
    def change(folder):
        path = folder / hf_shards.ShardName(2, 1, 2).text
        notes = {"DCP_SHARDING_INFO": json.dumps({"emb.weight": {"saved_offsets": [row, 0]}})}
        save_file(load_file(path), path, metadata=notes)

    return change


def shapes_of_more(folder):
    path = folder / "mp_rank_00_model_states.pt"
    tree = torch.load(path, weights_only=True)
    tree["param_shapes"][0]["a"] = torch.Size((300, 5))
    torch.save(tree, path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dcp", drop_chunk),
        ("dcp", lay_over),
        ("hsdp", claim_another_place),
        ("hf", begin_at(3)),
        ("hf", begin_at(100)),
        ("zero", shapes_of_more),
    ],
    ids=["dcp hole", "dcp overlap", "ranks hole", "hf overlap", "hf hole", "zero hole"],
    indirect=["name"],
)
def test_chunks_that_do_not_cover_a_tensor_are_damage(folder, change, tmp_path):
    change(folder)
    with pytest.raises(DamagedArchive):
        ckptmove.convert(folder, output=tmp_path / "run.pth")
    assert not (tmp_path / "run.pth").exists()

"""Checkpoints of several files: directories, archives, shards and distributed checkpoints."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile

import pytest
import remaps
import torch
from distributed_checkpoints import Distributed
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptmove
from ckptmove.conversion import conversion
from ckptmove.conversion.remap.errors import MixedByteOrders, NotInFormat, NotRemappable
from ckptmove.errors import CrcMismatch, MissingShard, MustBeUnpacked, NotGathered, OutputExists, OutputSuffix

MODEL = {
    "module.a.weight": torch.arange(12.0).reshape(3, 4),
    "module.a.bias": torch.arange(3.0),
    "module.b.weight": torch.arange(5.0),
    "module.b.count": torch.arange(4),
}
NBYTES = sum(tensor.nbytes for tensor in MODEL.values())
NAMES = ("model-00001-of-00002", "model-00002-of-00002")


def stripped(model):
    return {key.removeprefix("module."): tensor for key, tensor in model.items()}


def half(model):
    return {key: tensor.bfloat16() if tensor.is_floating_point() else tensor for key, tensor in model.items()}


def without_bias(model):
    return {key: tensor for key, tensor in model.items() if not key.endswith("bias")}


#: Options, and their effect on the state_dict of a model.
CHANGES = {
    "strip": ({"strip_prefix": True}, stripped),
    "rename": (
        {"rename": {"module.*": "net.*"}},
        lambda model: {f"net.{key}": one for key, one in stripped(model).items()},
    ),
    "drop": ({"drop": "*.bias"}, without_bias),
    "dtype": ({"dtype": "bf16"}, half),
    "all": (
        {"strip_prefix": True, "drop": "*.bias", "dtype": "bf16", "compact": True, "plain": True},
        lambda model: half(without_bias(stripped(model))),
    ),
}


def same(found, wanted):
    """Two state_dicts hold the same tensors, in any order."""
    assert {key: (one.dtype, one.shape, remaps.bits(one)) for key, one in found.items()} == {
        key: (one.dtype, one.shape, remaps.bits(one)) for key, one in wanted.items()
    }


def shards(folder, suffix):
    """Shards of the model, their index, and another file."""
    folder.mkdir()
    items = list(MODEL.items())
    weight_map = {}
    for name, part in zip(NAMES, (dict(items[:2]), dict(items[2:])), strict=True):
        if suffix == ".safetensors":
            save_file(part, folder / f"{name}{suffix}", {"format": "pt", "source": "test"})
        else:
            torch.save(part, folder / f"{name}{suffix}")
        weight_map |= dict.fromkeys(part, f"{name}{suffix}")
    index = {"metadata": {"total_size": NBYTES, "more": 1}, "weight_map": weight_map}
    (folder / f"model{suffix}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def load_shards(folder, suffix):
    """The state_dict, through the index."""
    index = json.loads((folder / f"model{suffix}.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        one = load_file(folder / name) if suffix == ".safetensors" else remaps.load(folder / name, weights_only=True)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(one)
        found |= one
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found, index


def training(folder):
    """A directory with a model and other files."""
    tree = remaps.run(objects=False)
    folder.mkdir()
    torch.save(tree["model"], folder / "pytorch_model.bin")
    torch.save(tree["optimizer"], folder / "optimizer.pt")
    (folder / "vocab.txt").write_text("a")
    return folder


def contents(path):
    return {one: one.read_bytes() for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file()}


def is_sound(path):
    return not {one.code for one in ckptmove.inspect(path, check=True).findings} & remaps.FORBIDDEN


# --- shards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("name", CHANGES)
def test_shards_stay_shards_with_their_index(suffix, name, tmp_path, compared):
    options, change = CHANGES[name]
    source, output = shards(tmp_path / "in", suffix), tmp_path / "out"
    before = contents(source)
    ckptmove.convert(source, output=output, **options)
    found, index = load_shards(output, suffix)
    same(found, change(MODEL))
    assert index["metadata"]["more"] == 1
    assert sorted(one.name for one in output.iterdir()) == sorted(one.name for one in source.iterdir())
    assert contents(source) == before
    assert is_sound(output)
    assert compared(output, source, **options) == 0
    assert compared(output, source) > 0


def test_a_shard_without_tensors_is_left_out(tmp_path, compared):
    source, output = shards(tmp_path / "in", ".safetensors"), tmp_path / "out"
    ckptmove.convert(source, output=output, drop="*.b.*")
    found, _ = load_shards(output, ".safetensors")
    assert list(found) == ["module.a.bias", "module.a.weight"]
    assert not (output / f"{NAMES[1]}.safetensors").exists()
    assert compared(output, source, drop="*.b.*") == 0


def test_unchanged_shards_keep_their_bytes(tmp_path):
    source, output = shards(tmp_path / "in", ".safetensors"), tmp_path / "out"
    ckptmove.convert(source, output=output, drop="*.a.bias")
    name = f"{NAMES[1]}.safetensors"
    assert (output / name).read_bytes() == (source / name).read_bytes()


def test_metadata_of_safetensors_is_kept(tmp_path):
    path, output = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(MODEL, path, {"format": "pt", "source": "test"})
    ckptmove.convert(path, output=output, strip_prefix=True)
    with output.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["__metadata__"] == {"format": "pt", "source": "test"}
    same(load_file(output), stripped(MODEL))


# --- other directories, and archives ------------------------------------------------------------------------------


def test_files_of_a_directory_change_together(tmp_path, compared):
    source, output = training(tmp_path / "in"), tmp_path / "out"
    options = {"strip_prefix": True, "dtype": {"optimizer": "double"}}
    result = ckptmove.convert(source, to="cuda:0", output=output, **options)
    assert {edit.target for edit in result.plan.edits if edit.reason != "dtype"} <= {"cuda:0", "cpu"}
    assert list(remaps.load(output / "pytorch_model.bin")) == list(stripped(remaps.run()["model"]))
    assert remaps.load(output / "optimizer.pt")["state"][0]["exp_avg"].dtype == torch.float64
    assert (output / "vocab.txt").read_text() == "a"
    assert is_sound(output)
    assert compared(output, source, **options) == 0


def test_a_file_of_a_directory_is_left_out(tmp_path, compared):
    source, output = training(tmp_path / "in"), tmp_path / "out"
    result = ckptmove.convert(source, output=output, drop="optimizer")
    assert [(one.name, one.reason) for one in result.plan.dropped] == [("optimizer.pt", "drop")]
    assert sorted(one.name for one in output.iterdir()) == ["pytorch_model.bin", "vocab.txt"]
    assert (output / "pytorch_model.bin").read_bytes() == (source / "pytorch_model.bin").read_bytes()
    assert compared(output, source, drop="optimizer") == 0


def members_of(path):
    if path.suffix == ".tar":
        with tarfile.open(path) as tar:
            return {name: tar.extractfile(name).read() for name in tar.getnames()}
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        return {name: file.read(name) for name in file.namelist()}


def packed(path, make=remaps.zipped):
    """An archive of a model, of shards with an index, and of a text."""
    index = json.dumps({"metadata": {"total_size": NBYTES}, "weight_map": dict.fromkeys(MODEL, "a.safetensors")})
    save_file(MODEL, path.parent / "shard")
    shard = (path.parent / "shard").read_bytes()
    (path.parent / "shard").unlink()
    return remaps.archive(
        path,
        {
            "policy.pth": make(MODEL),
            "s/a.safetensors": shard,
            "s/a.safetensors.index.json": index.encode(),
            "data": b'{"a": 1}',
        },
    )


ARCHIVES = pytest.mark.parametrize("name", ["plain.zip", "deflated.zip", "plain.tar"])


@ARCHIVES
@pytest.mark.parametrize("make", [remaps.zipped, remaps.legacy, remaps.without_crcs])
def test_archives_keep_their_members(name, make, tmp_path, compared):
    source, output = packed(tmp_path / name, make), tmp_path / f"out{name[-4:]}"
    before = source.read_bytes()
    ckptmove.convert(source, output=output, strip_prefix=True, dtype="bf16")
    found = members_of(output)
    assert list(found) == list(members_of(source))
    same(remaps.load(io.BytesIO(found["policy.pth"]), weights_only=True), half(stripped(MODEL)))
    assert json.loads(found["s/a.safetensors.index.json"])["weight_map"].keys() == stripped(MODEL).keys()
    assert found["data"] == b'{"a": 1}'
    assert source.read_bytes() == before
    assert is_sound(output)
    assert compared(output, source, strip_prefix=True, dtype="bf16") == 0
    assert compared(output, source, strip_prefix=True) > 0


@ARCHIVES
def test_an_archive_becomes_one_file(name, tmp_path, compared):
    source, output = packed(tmp_path / name), tmp_path / "out.pth"
    ckptmove.convert(source, output=output, strip_prefix=True)
    found = remaps.load(output, weights_only=True, mmap=True)
    assert list(found) == ["policy", "s/a"]
    same(found["policy"], stripped(MODEL))
    assert compared(output, source, strip_prefix=True) == 0


@ARCHIVES
def test_a_member_is_written_as_safetensors(name, tmp_path, compared):
    source, output = packed(tmp_path / name), tmp_path / "out.safetensors"
    ckptmove.convert(source, output=output, as_root="policy.pth")
    same(load_file(output), MODEL)
    assert compared(output, source, as_root="policy.pth") == 0


@pytest.mark.unmeasured
@ARCHIVES
@pytest.mark.parametrize("drop", ["policy.pth", "s/a.safetensors"])
@pytest.mark.parametrize("options", [{}, {"strip_prefix": True}], ids=["drop", "strip"])
def test_a_member_is_left_out(name, drop, options, tmp_path, compared):
    source, output = packed(tmp_path / name), tmp_path / f"out{name[-4:]}"
    old, before = members_of(source), source.read_bytes()
    ckptmove.convert(source, output=output, drop=drop, **options)
    found = members_of(output)
    gone = {drop, f"{drop}.index.json"}
    assert list(found) == [one for one in old if one not in gone]
    kept = {"data"} if options else old.keys() - gone
    assert {one: found[one] for one in kept} == {one: old[one] for one in kept}
    assert source.read_bytes() == before
    assert is_sound(output)
    assert compared(output, source, drop=drop, **options) == 0
    assert compared(output, source, **options) > 0


@pytest.mark.parametrize("name", ["streamed.zip", "folders.zip", "folders.tar"])
def test_a_member_is_left_out_with_its_descriptor_and_its_folder(name, tmp_path, compared):
    """A zip that is written to a stream has a data descriptor after each member."""
    source, output = tmp_path / name, tmp_path / f"out{name[-4:]}"
    members = {"m/a.pth": remaps.zipped(MODEL), "o/b.pth": remaps.zipped(MODEL), "data": b"1"}
    if name == "streamed.zip":
        stream = Unseekable()
        archive_stream(stream, members)
        source.write_bytes(stream.getvalue())
    elif name == "folders.zip":
        remaps.archive(source, {"m/": b"", **members, "o/": b""})
    else:
        folder = tmp_path / "o"
        folder.mkdir()
        remaps.archive(source, members)
        with tarfile.open(source, "a") as tar:
            tar.add(folder, "o")
    ckptmove.convert(source, output=output, drop="o/*")
    names = [one.rstrip("/") for one in names_of(output)]
    assert names == [one.rstrip("/") for one in names_of(source) if not one.startswith("o")]
    assert is_sound(output)
    assert compared(output, source, drop="o/*") == 0


class Unseekable(io.BytesIO):
    def seekable(self):
        return False

    def seek(self, *_):
        raise io.UnsupportedOperation


def archive_stream(stream, members):
    with zipfile.ZipFile(stream, "w") as new:
        for name, data in members.items():
            new.writestr(name, data)


def names_of(path):
    if path.suffix == ".tar":
        with tarfile.open(path) as tar:
            return tar.getnames()
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        return file.namelist()


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
@pytest.mark.parametrize("folder", ["o", "o" * 120])
def test_a_member_with_a_link_is_not_left_out(form, kind, folder, tmp_path):
    source, output = tmp_path / "in.tar", tmp_path / "out.tar"
    data = remaps.zipped(MODEL)
    with tarfile.open(source, "w", format=form) as tar:
        for name in ("m/a.pth", f"{folder}/b.pth"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("m/link")
        link.type, link.linkname = kind, f"{folder}/b.pth" if kind == tarfile.LNKTYPE else f"../{folder}/b.pth"
        tar.addfile(link)
    with pytest.raises(MustBeUnpacked):
        ckptmove.convert(source, output=output, drop=f"{folder}/*")
    assert not output.exists()
    ckptmove.convert(source, output=output, drop="m/*")
    assert names_of(output) == [f"{folder}/b.pth", "m/link"]


def test_a_damaged_member_may_be_left_out(tmp_path):
    source = tmp_path / "deflated.zip"
    remaps.archive(source, {"a.pth": remaps.zipped(MODEL), "notes": b"1" * 1000})
    with zipfile.ZipFile(source, "a") as file:
        file.writestr("b.pth", remaps.zipped({"x": WEIGHT + 100}))
    damaged(source, WEIGHT + 100)
    with pytest.raises(CrcMismatch):
        ckptmove.convert(source, output=tmp_path / "out.zip", drop="a.pth")
    ckptmove.convert(source, output=tmp_path / "out.zip", drop="b.pth")
    assert names_of(tmp_path / "out.zip") == ["a.pth", "notes"]


# --- other formats ------------------------------------------------------------------------------------------------


def sharded(tmp_path):
    return shards(tmp_path / "in", ".safetensors")


def sharded_torch(tmp_path):
    return shards(tmp_path / "in", ".bin")


def one_table(tmp_path):
    save_file(MODEL, tmp_path / "in.safetensors", {"format": "pt"})
    return tmp_path / "in.safetensors"


def one_torch(tmp_path):
    torch.save(MODEL, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def one_legacy(tmp_path):
    (tmp_path / "in.pth").write_bytes(remaps.legacy(MODEL))
    return tmp_path / "in.pth"


def distributed(tmp_path):
    return Distributed.save(tmp_path / "in", MODEL)


def mesh(tmp_path):
    """Pieces of a 2-D mesh, of uneven sizes."""
    boxes = [(0, (0, 0), (2, 3)), (1, (0, 3), (2, 1)), (2, (2, 0), (1, 3)), (3, (2, 3), (1, 1))]
    pieces = {"module.a.weight": boxes, "module.b.weight": [(0, (0,), (3,)), (2, (3,), (2,))]}
    whole = {key: pieces.get(key, [(0, (0,), tuple(one.shape))]) for key, one in MODEL.items()}
    return Distributed.save_ranks(tmp_path / "in", {key: (one, whole[key]) for key, one in MODEL.items()})


SOURCES = [sharded, sharded_torch, one_table, one_torch, one_legacy, distributed, mesh]


#: Nothing would change in these.
SAME = {(one_torch, "torch"), (one_legacy, "torch"), (one_table, "safetensors")}
CASES = [
    (make, name, form)
    for make in SOURCES
    for name in ("none", "all")
    for form in ("torch", "safetensors", "shards")
    if name != "none" or (make, form) not in SAME
]


@pytest.mark.parametrize(("make", "name", "form"), CASES)
def test_every_format_becomes_every_other_one(make, name, form, tmp_path, compared):
    options, change = CHANGES.get(name, ({}, lambda model: model))
    source = make(tmp_path)
    before = contents(source)
    output = tmp_path / {"torch": "out.pth", "safetensors": "out.safetensors", "shards": "out"}[form]
    others = {"shard_size": 50} if form == "shards" else {}
    dry = ckptmove.convert(source, output=output, dry_run=True, **others, **options)
    assert not output.exists()
    result = ckptmove.convert(source, output=output, **others, **options)
    assert result.plan == dry.plan
    if form == "torch":
        found = remaps.load(output, weights_only=True, mmap=result.container == "torch-zip")
    else:
        found = load_file(output) if form == "safetensors" else load_shards(output, ".safetensors")[0]
    same(found, change(MODEL))
    assert contents(source) == before
    assert is_sound(output)
    assert compared(output, source, **options) == 0
    if options:
        assert compared(output, source) > 0


def test_a_distributed_checkpoint_is_what_torch_makes_of_it(tmp_path, compared):
    source = Distributed.save(tmp_path / "in", Distributed.trained_tree())
    dcp_to_torch_save(source, tmp_path / "torch.pth")
    ckptmove.convert(source, output=tmp_path / "out.pth")
    wanted, found = remaps.load(tmp_path / "torch.pth"), remaps.load(tmp_path / "out.pth", weights_only=True)
    assert {path: remaps.bits(one) for path, one in remaps.tensors(found)} == {
        path: remaps.bits(one) for path, one in remaps.tensors(wanted)
    }
    assert found["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]
    assert found["scheduler"] == wanted["scheduler"]
    assert compared(tmp_path / "out.pth", source) == 0


@pytest.mark.parametrize("groups", [[{"params": [1, 0]}], [{"params": [0]}, {"params": [1], "lr": 0.5}]])
def test_the_state_of_a_distributed_checkpoint_is_found_by_number(tmp_path, compared, groups):
    model = torch.nn.Linear(3, 2)
    by_number = [*model.parameters()]
    own = [{**one, "params": [by_number[place] for place in one["params"]]} for one in groups]
    optimizer = torch.optim.AdamW(own)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    source = Distributed.save(tmp_path / "in", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    ckptmove.convert(source, output=tmp_path / "out.pth")
    found = remaps.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    fresh = torch.optim.AdamW(own)
    fresh.load_state_dict(found)
    same(fresh.state_dict()["state"][0], optimizer.state_dict()["state"][0])
    assert [*found["state"]] == [0, 1]
    assert compared(tmp_path / "out.pth", source) == 0


@pytest.mark.parametrize("listed", [{}, {"params": 3}, 7])
def test_a_group_without_a_list_of_parameters_is_kept(tmp_path, listed):
    tree = {"optimizer": {"state": {"0": {"step": torch.ones(1)}}, "param_groups": [listed]}}
    source = Distributed.save(tmp_path / "in", tree)
    ckptmove.convert(source, output=tmp_path / "out.pth")
    assert [*remaps.load(tmp_path / "out.pth")["optimizer"]["state"]] == ["0"]


def test_parts_of_a_distributed_checkpoint(tmp_path, compared):
    source = Distributed.save(tmp_path / "in", Distributed.trained_tree())
    options = {"as_root": "model", "dtype": "bf16"}
    ckptmove.convert(source, output=tmp_path / "out.safetensors", **options)
    model = {key: one.bfloat16() for key, one in Distributed.trained_tree()["model"].items()}
    same(load_file(tmp_path / "out.safetensors"), model)
    assert compared(tmp_path / "out.safetensors", source, **options) == 0


def test_a_distributed_checkpoint_is_not_written_with_changes(tmp_path):
    with pytest.raises(NotRemappable) as caught:
        ckptmove.convert(distributed(tmp_path), output=tmp_path / "out", strip_prefix=True)
    assert caught.value.container == "dcp"
    assert not (tmp_path / "out").exists()


def test_files_become_entries_of_one_file(tmp_path, compared):
    source, output = training(tmp_path / "in"), tmp_path / "out.pth"
    ckptmove.convert(source, output=output)
    found = remaps.load(output, weights_only=True)
    assert sorted(found) == ["optimizer", "pytorch_model"]
    remaps.assert_equal(found["pytorch_model"], remaps.run()["model"])
    assert compared(output, source) == 0


def test_tied_weights_are_written_once(tmp_path, compared):
    tied = {"a.weight": MODEL["module.a.weight"], "b.weight": MODEL["module.a.weight"]}
    torch.save(tied, tmp_path / "in.pth")
    result = ckptmove.convert(tmp_path / "in.pth", output=tmp_path / "out.safetensors")
    assert [(one.name, one.reason) for one in result.plan.dropped] == [("b.weight", "tied")]
    assert list(load_file(tmp_path / "out.safetensors")) == ["a.weight"]
    assert compared(tmp_path / "out.safetensors", tmp_path / "in.pth") == 0


def test_a_model_in_one_file_becomes_shards(tmp_path):
    output = tmp_path / "out"
    ckptmove.convert(one_torch(tmp_path), output=output, shard_size=50)
    same(load_shards(output, ".safetensors")[0], MODEL)
    with pytest.raises(OutputExists):
        ckptmove.convert(tmp_path / "in.pth", output=output, shard_size=50)
    ckptmove.convert(tmp_path / "in.pth", output=output, shard_size=50, force=True)
    same(load_shards(output, ".safetensors")[0], MODEL)


def test_what_safetensors_cannot_hold_is_named(tmp_path):
    source = training(tmp_path / "in")
    with pytest.raises(NotInFormat) as caught:
        ckptmove.convert(source, output=tmp_path / "out.safetensors")
    assert {name for name, _ in caught.value.entries} == {"optimizer.pt", "pytorch_model.bin"}
    with pytest.raises(NotInFormat):
        ckptmove.convert(source, output=tmp_path / "out", shard_size=100, dry_run=True)
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("suffix", [".gguf", ".zip", ".npz", ".safetensor"])
def test_other_suffixes_are_refused(suffix, tmp_path):
    with pytest.raises(OutputSuffix):
        ckptmove.convert(one_table(tmp_path), output=tmp_path / f"out{suffix}")


def test_two_files_with_one_key_are_no_state_dict(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for name in NAMES:
        torch.save({"a": torch.ones(1)}, source / f"py{name}.bin")
    with pytest.raises(NotGathered):
        ckptmove.convert(source, output=tmp_path / "out.pth")


def test_a_shard_that_is_no_dict_is_not_gathered(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    torch.save({"a": torch.ones(1)}, source / f"py{NAMES[0]}.bin")
    torch.save([torch.ones(1)], source / f"py{NAMES[1]}.bin")
    with pytest.raises(NotGathered):
        ckptmove.convert(source, output=tmp_path / "out.pth")


def test_several_checkpoints_are_not_gathered(tmp_path):
    for name in ("checkpoint-1", "checkpoint-2"):
        (tmp_path / "run").mkdir(exist_ok=True)
        training(tmp_path / "run" / name)
    with pytest.raises(NotGathered) as caught:
        ckptmove.convert(tmp_path / "run", output=tmp_path / "out.pth")
    assert caught.value.folder.endswith("checkpoint-2")


# --- damage -------------------------------------------------------------------------------------------------------


def damaged(path, tensor):
    """Change one bit of the only copy of a tensor."""
    data = bytearray(path.read_bytes())
    needle = remaps.bits(tensor)
    assert data.count(needle) == 1
    data[data.index(needle) + 1] ^= 1
    path.write_bytes(bytes(data))
    return path


WEIGHT = MODEL["module.a.weight"]


def damaged_zip(tmp_path):
    return damaged(one_torch(tmp_path), WEIGHT)


def damaged_archive(tmp_path):
    return damaged(remaps.archive(tmp_path / "in.zip", {"a.pth": remaps.zipped(MODEL), "b": b""}), WEIGHT)


def damaged_legacy_member(tmp_path):
    return damaged(remaps.archive(tmp_path / "in.zip", {"a.pth": remaps.legacy(MODEL), "b": b""}), WEIGHT)


def damaged_tar(tmp_path):
    return damaged(remaps.archive(tmp_path / "in.tar", {"a.pth": remaps.zipped(MODEL), "b": b""}), WEIGHT)


def damaged_shard(tmp_path):
    source = shards(tmp_path / "in", ".bin")
    damaged(source / f"{NAMES[0]}.bin", WEIGHT)
    return source


def damaged_piece(tmp_path):
    source = distributed(tmp_path)
    damaged(next(source.glob("*.distcp")), WEIGHT)
    return source


DAMAGED = [damaged_zip, damaged_archive, damaged_legacy_member, damaged_tar, damaged_shard, damaged_piece]


@pytest.mark.parametrize("make", DAMAGED)
@pytest.mark.parametrize(
    "options",
    [{"strip_prefix": True}, {"dtype": "bf16"}, {"drop": "*.bias"}, {"compact": True}],
    ids=["strip", "dtype", "drop", "compact"],
)
@pytest.mark.parametrize("form", ["", "torch"])
def test_damaged_bytes_are_never_written(make, options, form, tmp_path):
    source = make(tmp_path)
    # A distributed checkpoint is not written with changes.
    output = tmp_path / ("out.pth" if form or make is damaged_piece else f"out{source.suffix}")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CrcMismatch):
        ckptmove.convert(source, output=output, **options)
    assert sorted(tmp_path.iterdir()) == before
    ckptmove.convert(source, output=output, check=False, **options)
    assert output.exists()


@pytest.mark.parametrize("make", [damaged_zip, damaged_shard, damaged_piece])
@pytest.mark.parametrize("form", ["safetensors", "shards"])
def test_damaged_bytes_are_never_written_as_safetensors(make, form, tmp_path):
    source = make(tmp_path)
    before = sorted(tmp_path.iterdir())
    others = {"shard_size": 50} if form == "shards" else {}
    with pytest.raises(CrcMismatch):
        ckptmove.convert(source, output=tmp_path / ("out" if form == "shards" else "out.safetensors"), **others)
    assert sorted(tmp_path.iterdir()) == before


def test_a_dropped_part_may_be_damaged(tmp_path):
    source = damaged_piece(tmp_path)
    ckptmove.convert(source, output=tmp_path / "out.pth", drop="module.a.weight")
    assert "module.a.weight" not in remaps.load(tmp_path / "out.pth")


def test_files_without_crcs_are_noted(tmp_path):
    source = shards(tmp_path / "in", ".safetensors")
    result = ckptmove.convert(source, output=tmp_path / "out", strip_prefix=True)
    assert any(f"{NAMES[0]}.safetensors" in note for note in result.notes)
    result = ckptmove.convert(source, output=tmp_path / "out.pth", check=False)
    assert not any(NAMES[0] in note for note in result.notes)


def test_a_missing_shard_is_no_smaller_model(tmp_path):
    source = sharded(tmp_path)
    (source / f"{NAMES[1]}.safetensors").unlink()
    with pytest.raises(MissingShard):
        ckptmove.convert(source, output=tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_tensors_of_safetensors_are_put_in_the_order_of_their_optimizer(tmp_path):
    """``safetensors`` sorts its tensors; in one file, parameters come in the order of ``param_groups``."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    source = tmp_path / "in"
    source.mkdir()
    save_file(model.state_dict(), source / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), source / "optimizer.bin")
    result = ckptmove.convert(source, output=tmp_path / "out.pth")
    assert conversion._GUESSED_ORDER in result.notes
    weights = ckptmove.convert(source, output=tmp_path / "weights.pth", only="model")
    assert conversion._GUESSED_ORDER not in weights.notes
    found = remaps.load(tmp_path / "out.pth", weights_only=True)
    same(found["model"], model.state_dict())
    assert [key for key in found["model"] if key in dict(model.named_parameters())] == list(
        dict(model.named_parameters())
    )


@pytest.mark.unmeasured
@pytest.mark.parametrize("width", [4, 3])
def test_an_order_that_a_conversion_chose_is_no_evidence(tmp_path, width):
    """Two weights of one shape could belong to each other's state; the file alone does not show that."""
    model = torch.nn.Sequential(torch.nn.Linear(width, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    source, output = tmp_path / "in", tmp_path / "out.pth"
    source.mkdir()
    save_file(model.state_dict(), source / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), source / "optimizer.bin")
    ckptmove.convert(source, output=output)
    alone, compared = ckptmove.verify(output), ckptmove.verify(output, against=source)
    assert alone.passed
    assert compared.passed
    found = [{one.name: dict(one.evidence) for one in result.checks} for result in (alone, compared)]
    assert [one["structure"]["paired_by"] for one in found] == ["order", "ambiguous"]


def test_an_object_loses_a_part_when_it_becomes_a_dict(tmp_path, compared):
    torch.save(remaps.run(), tmp_path / "in.pth")
    options = {"plain": True, "drop": "args.name"}
    ckptmove.convert(tmp_path / "in.pth", output=tmp_path / "out.pth", **options)
    assert remaps.load(tmp_path / "out.pth", weights_only=True)["args"] == {"lr": 0.1}
    assert compared(tmp_path / "out.pth", tmp_path / "in.pth", **options) == 0


def test_one_file_has_one_byte_order(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.pth").write_bytes(remaps.zipped(MODEL))
    (source / "b.pth").write_bytes(remaps.big_endian(MODEL))
    with pytest.raises(MixedByteOrders):
        ckptmove.convert(source, output=tmp_path / "out.pth")
    ckptmove.convert(source, output=tmp_path / "out.safetensors", as_root="b.pth")
    same(load_file(tmp_path / "out.safetensors"), MODEL)


def test_zero_keeps_its_files(tmp_path):
    source = tmp_path / "run" / "global_step2"
    source.mkdir(parents=True)
    for rank in range(2):
        torch.save({"module": MODEL, "ds_version": "0.14.0"}, source / f"mp_rank_{rank:02}_model_states.pt")
        state = {"optimizer_state_dict": {"state": {}, "param_groups": []}, "ds_version": "0.14.0"}
        torch.save(state, source / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    with pytest.raises(NotGathered):
        ckptmove.convert(tmp_path / "run", output=tmp_path / "out.pth")

"""Directories of torch.distributed.checkpoint: facts from the metadata, without devices."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

import ckptmove
from ckptmove.errors import (
    DamagedArchive,
    DistributedFile,
    MissingFile,
    MissingShard,
    NotACheckpoint,
    UnsupportedContainer,
)

HALVES = {"w": (torch.arange(12.0).reshape(4, 3), [(0, (0, 0), (2, 3)), (1, (2, 0), (2, 3))])}

writes_safetensors = pytest.mark.skipif(
    not hasattr(filesystem, "SerializationFormat"), reason="this torch writes no safetensors into its pieces"
)


def read(folder):
    return ckptmove.inspect(folder).inventory


def facts(folder, **options):
    return [(one.kind, one.record, one.nbytes) for one in ckptmove.inspect(folder, **options).inventory.facts]


# --- facts of the metadata --------------------------------------------------------------------------------------------


def test_it_says_what_torch_reads(trained):
    inventory = read(trained)
    said = dcp.FileSystemReader(trained).read_metadata().state_dict_metadata
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in inventory.tensors} == {
        name: (str(one.properties.dtype).removeprefix("torch."), tuple(one.size))
        for name, one in said.items()
        if isinstance(one, TensorStorageMetadata)
    }
    assert (inventory.container, inventory.layout, inventory.path) == ("dcp", "dcp", str(trained))
    assert inventory.size_bytes == sum(path.stat().st_size for path in trained.iterdir())
    assert inventory.facts == ()


def test_its_tensors_have_the_roles_of_their_keys(trained):
    inventory = ckptmove.inspect(trained, check=True).inventory
    roles = {tensor.name: tensor.role for tensor in inventory.tensors}
    assert roles["model.0.weight"] == "model"
    assert roles["optimizer.state.0.weight.exp_avg"] == roles["optimizer.state.0.weight.step"] == "optimizer"
    assert (roles["rng"], roles["scalar"]) == ("rng", "other")
    assert inventory.contents == {"scheduler", "rng", "counter"}


def test_no_device_is_stored_and_nothing_is_wrong_with_that(trained):
    found = ckptmove.inspect(trained)
    assert {tensor.device for tensor in found.inventory.tensors} == {"unknown"}
    assert found.findings == ()


def test_megatron_has_optimizers_in_one_table_with_the_model(distributed, tmp_path):
    names = ["decoder.layers.weight", "optimizer.state.exp_avg.decoder.layers.weight", "optimizer.weight"]
    tree = {name: (torch.ones(2), [(0, (0,), (2,))]) for name in names}
    inventory = read(distributed.save_ranks(tmp_path / "m", tree))
    assert [tensor.role for tensor in inventory.tensors] == ["model", "optimizer", "optimizer"]
    assert [tensor.name for tensor in inventory.tensors] == names


def test_keys_that_do_not_make_up_the_name_are_left_alone(distributed, trained):
    def edit(metadata):
        metadata.planner_data["model.0.weight"] = ("optimizer", "0.weight")
        metadata.planner_data["model.0.bias"] = ("model", 0.5, "bias")
        metadata.planner_data["model.1.weight"] = ("", "") * 40
        metadata.planner_data["model.1.bias"] = "model.1.bias"
        metadata.planner_data["rng"] = None

    before = {tensor.name: tensor.shape for tensor in read(trained).tensors}
    assert {tensor.name: tensor.shape for tensor in read(distributed.change(trained, edit)).tensors} == before


def test_nothing_stands_below_a_tensor(distributed, tmp_path):
    folder = distributed.save(tmp_path / "run", {"a": {"b": torch.ones(1)}, "x": torch.ones(1)})

    def edit(metadata):
        metadata.state_dict_metadata["a"] = metadata.state_dict_metadata["x"]

    names = [tensor.name for tensor in read(distributed.change(folder, edit)).tensors]
    assert sorted(names) == ["a", "a.b", "x"]


def test_requires_grad_is_as_saved(distributed, tmp_path):
    folder = distributed.save(tmp_path / "run", {"a": torch.ones(1, requires_grad=True), "b": torch.ones(1)})
    assert [tensor.requires_grad for tensor in read(folder).tensors] == [True, False]


def test_the_outline_is_the_tree_that_was_saved(trained):
    lines = [(line.depth, line.name) for line in ckptmove.inspect(trained, outline=True).outline]
    assert lines[:4] == [(0, ""), (1, ".metadata"), (2, "model"), (3, "0.weight")]
    described = {line.name: line.description for line in ckptmove.inspect(trained, outline=True).outline}
    assert described["step_size"] == "3"
    assert described["lr"] == "0.001"


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_row_for_each_file_counts_the_tensors_with_a_piece_in_it(distributed, tmp_path):
    tree = HALVES | {"b": (torch.ones(3), [(1, (0,), (3,))])}
    folder = distributed.save_ranks(tmp_path / "run", tree, {"notes": (2, pickle.dumps({}))})
    (folder / "__9_0.distcp").write_bytes(b"of a run with more ranks")
    rows = [(one.path, one.roles, one.tensors, one.devices, one.size_bytes) for one in read(folder).files]
    assert rows == [
        (f"__{rank}_0.distcp", roles, count, devices, (folder / f"__{rank}_0.distcp").stat().st_size)
        for rank, roles, count, devices in [
            (0, ("other",), 1, ("unknown",)),
            (1, ("other",), 2, ("unknown",)),
            (2, ("other",), 0, ()),
            (9, ("other",), 0, ()),
        ]
    ]


def test_a_hand_made_checkpoint_is_one_to_torch(distributed, halves):
    target = {"w": torch.zeros(4, 3)}
    distributed.load(target, halves)
    assert torch.equal(target["w"], HALVES["w"][0])


def test_files_may_be_many_for_each_rank(distributed, tmp_path):
    tree = {"model": {"a.weight": torch.ones(3, 4), "b.weight": torch.ones(5)}, "step": 3}
    for name, options in {"each": {"single_file_per_rank": False}, "threads": {"thread_count": 4}}.items():
        folder = distributed.save(tmp_path / name, tree, **options)
        found = ckptmove.inspect(folder, check=True)
        assert {one.path for one in found.inventory.files} == {path.name for path in folder.glob("*.distcp")}
        assert [tensor.shape for tensor in found.inventory.tensors] == [(3, 4), (5,)]
        assert found.findings == ()


def test_each_rank_may_have_metadata_of_its_own(halves):
    for rank in (0, 1):
        (halves / f"__{rank}.metadata").write_bytes((halves / ".metadata").read_bytes())
    assert [tensor.name for tensor in read(halves).tensors] == ["w"]
    (halves / ".metadata").unlink()
    inventory = read(halves)
    assert [tensor.name for tensor in inventory.tensors] == ["__0.metadata.w", "__1.metadata.w"]
    assert (inventory.container, inventory.layout) == ("directory", "dcp")


def test_a_file_may_be_a_link(halves):
    (halves / "__1_0.distcp").rename(halves / "blob")
    (halves / "__1_0.distcp").symlink_to("blob")
    (halves / "readme").symlink_to("nowhere")
    assert facts(halves, check=True) == []
    (halves / "blob").unlink()
    with pytest.raises(MissingFile):
        read(halves)


def test_what_a_save_that_broke_off_has_left_is_passed_over(halves):
    (halves / ".metadata.tmp").write_bytes((halves / ".metadata").read_bytes()[:50])
    assert read(halves).container == "dcp"


# --- refused by name --------------------------------------------------------------------------------------------------


def test_a_file_of_it_alone_is_not_read(distributed, trained, tmp_path):
    single = distributed.save_ranks(tmp_path / "single", {"w": (torch.ones(2), [(0, (0,), (2,))])})
    for path in (trained / "__0_0.distcp", trained / ".metadata", single / "__0_0.distcp"):
        with pytest.raises(DistributedFile):
            ckptmove.inspect(path)
        with pytest.raises(DistributedFile):
            ckptmove.convert(path, to="cuda:0")


def test_a_file_of_it_that_begins_or_ends_as_no_archive_is_not_read_alone_either(trained):
    shard = trained / "__0_0.distcp"
    whole = shard.read_bytes()
    for data in (b"raw bytes" + whole, whole[:-100], whole[:500]):
        (trained / "0.distcp").write_bytes(data)
        with pytest.raises((DistributedFile, NotACheckpoint)) as caught:
            ckptmove.inspect(trained / "0.distcp")
        assert isinstance(caught.value, DistributedFile) == data.startswith(b"PK")
    (trained / "0.pth").write_bytes(whole[:500])
    with pytest.raises(DamagedArchive, match="truncated"):
        ckptmove.inspect(trained / "0.pth")


def test_metadata_of_every_protocol_is_known(distributed, trained):
    metadata = distributed.metadata_of(trained)
    for protocol in range(2, 6):
        (trained / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        assert len(read(trained).tensors) == 23
        with pytest.raises(DistributedFile):
            ckptmove.inspect(trained / ".metadata")


def test_files_without_their_metadata_are_of_a_save_that_did_not_end(halves):
    (halves / ".metadata").unlink()
    with pytest.raises(MissingShard, match=r"2 \*\.distcp,.*\.metadata") as caught:
        read(halves)
    assert caught.value.path == str(halves / ".metadata")


def test_metadata_without_any_file(trained):
    (trained / "__0_0.distcp").unlink()
    with pytest.raises(MissingShard, match="is missing"):
        read(trained)


@writes_safetensors
def test_files_of_safetensors_are_refused_by_name(distributed, tmp_path):
    folder = distributed.save(
        tmp_path / "run", {"w": torch.ones(3)}, serialization_format=filesystem.SerializationFormat.SAFETENSORS
    )
    with pytest.raises(UnsupportedContainer) as caught:
        read(folder)
    assert (caught.value.container, caught.value.path) == ("safetensors", str(folder / "__0_0.distcp"))


@writes_safetensors
def test_safetensors_are_refused_by_name_where_their_places_overlap(distributed, tmp_path):
    tree = {"weight": torch.ones(4, 3), "bias": torch.ones(4), "step": 3}
    folder = distributed.save(tmp_path / "run", tree, serialization_format=filesystem.SerializationFormat.SAFETENSORS)

    def edit(metadata):
        first, second, *_ = (place for index, place in metadata.storage_data.items() if index.offset is not None)
        second.offset, second.length = first.offset, first.length

    with pytest.raises(UnsupportedContainer) as caught:
        read(distributed.change(folder, edit))
    assert caught.value.container == "safetensors"


def test_transformed_pieces_are_refused_by_name(distributed, halves):
    def edit(metadata):
        metadata.storage_data[MetadataIndex("w", (0, 0))].transform_descriptors = ["stream.zstd/1"]

    with pytest.raises(UnsupportedContainer, match="transform_descriptors"):
        read(distributed.change(halves, edit))


def test_a_dtype_that_torch_does_not_have(halves):
    path = halves / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"\x07float32", b"\x07float33"))
    with pytest.raises(UnsupportedContainer, match="dtype 'float33'"):
        read(halves)


def test_objects_are_not_tensors(distributed, tmp_path):
    folder = distributed.save_ranks(tmp_path / "run", {}, {"a": (0, b"x")})
    assert isinstance(distributed.metadata_of(folder).state_dict_metadata["a"], BytesStorageMetadata)
    assert read(folder).tensors == ()

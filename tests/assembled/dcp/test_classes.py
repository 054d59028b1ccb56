"""Classes in a ``.metadata``: only those of torch, by their full names, and created as torch pickles them."""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import random
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as PropertiesOfOld
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan

import ckptmove
from ckptmove.errors import CkptMoveError, DamagedArchive, DamagedPickle
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.file_checks import check_file


def names_of(folder):
    return [tensor.name for tensor in ckptmove.inspect(folder, check=True).inventory.tensors]


def replace_bytes(folder, old, new):
    path = folder / ".metadata"
    data = path.read_bytes()
    assert len(old) == len(new)
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


FLIPS = {
    "torch has no 'torch.distributed.checkpoint.metadata.ChunkStorageMeuadata'": (
        b"ChunkStorageMet",
        b"ChunkStorageMeu",
    ),
    "torch has no '.*ietadata.Metadata'": (b"torch.distributed.checkpoint.meta", b"torch.distributed.checkpoint.ieta"),
    "torch has no '.*filesystem._StkrageInfo'": (b"_StorageInfo", b"_StkrageInfo"),
    "torch has no 'torch.Sizf'": (b"\x04Size", b"\x04Sizf"),
    "torch has no 'pathlkb.PosixPath'": (b"pathlib", b"pathlkb"),
    "the properties of tensor": (b"torch.strided", b"torch.stridee"),
    "a call of a value that is not a class": (b")\x81\x94}", b"}\x81\x94}"),
}


@pytest.mark.parametrize("reason", FLIPS)
def test_what_pickle_cannot_load_is_damaged(distributed, trained, reason):
    replace_bytes(trained, *FLIPS[reason])
    with pytest.raises((AttributeError, ImportError, KeyError, TypeError, pickle.UnpicklingError)):
        distributed.metadata_of(trained)
    with pytest.raises((DamagedArchive, DamagedPickle), match=reason) as caught:
        ckptmove.inspect(trained)
    assert caught.value.path == str(trained / ".metadata")


def test_the_place_of_a_name_that_torch_does_not_have_is_said(halves):
    replace_bytes(halves, b"ChunkStorageMet", b"ChunkStorageMeu")
    data = (halves / ".metadata").read_bytes()
    with pytest.raises(DamagedPickle, match=r" at byte \d+") as caught:
        ckptmove.inspect(halves)
    assert data.index(b"ChunkStorageMeu") < caught.value.offset < data.index(b"ChunkStorageMeu") + 30


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"\x88Q", "persistent id"),
        (b"\x82\x07", "persistent id"),
        (b"}]K\x01s", "a key that Python cannot hash"),
        (b"]}K\x01\x86\x94a}}K\x01s\x94a0}]\x94K\x01s", "a key that Python cannot hash"),
    ],
)
def test_planner_data_that_pickle_cannot_load_is_damaged_too(distributed, halves, value, reason):
    path = halves / ".metadata"
    data = pickle.dumps(distributed.metadata_of(halves), 2)  # without frames
    head, found, rest = data.partition(b"planner_data")
    memo = rest[:2]
    assert found
    assert memo[:1] == b"q"
    path.write_bytes(head + found + memo + value + rest[3:])
    with pytest.raises((pickle.UnpicklingError, ValueError, TypeError)):
        pickle.loads(path.read_bytes())
    with pytest.raises(DamagedPickle, match=reason):
        ckptmove.inspect(halves)


@pytest.mark.parametrize("separator", [".", "/"])
def test_a_letter_of_a_name_has_changed(distributed, tmp_path, separator):
    folder = distributed.save(tmp_path / "run", {"model": {"weight": torch.ones(3)}, "step": {"loss": torch.ones(1)}})

    def edit(metadata):
        for table in (metadata.state_dict_metadata, metadata.planner_data):
            for name in list(table):
                table[name.replace(".", separator)] = table.pop(name)
        metadata.storage_data = {
            MetadataIndex(index.fqn.replace(".", separator), index.offset): place
            for index, place in metadata.storage_data.items()
        }

    # A planner that joins keys otherwise does so with all of them.
    assert len(names_of(distributed.change(folder, edit))) == 2
    path = folder / ".metadata"
    name = f"model{separator}weight".encode()
    path.write_bytes(path.read_bytes().replace(name, name.replace(b"i", b"k")))
    if separator == ".":
        with pytest.raises(DamagedArchive, match=r"'model\.wekght' .*'model\.weight'"):
            ckptmove.inspect(folder)
    else:
        assert len(names_of(folder)) == 2


def test_state_dicts_of_old_are_read(distributed, halves):
    def edit(metadata):
        one = metadata.state_dict_metadata["w"]
        one.properties = PropertiesOfOld(dtype=torch.float32)

    assert names_of(distributed.change(halves, edit)) == ["w"]


class _ByName(pickle.Pickler):
    """As Python 3.11.0 has members of an Enum pickled."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, _MEM_FORMAT_ENCODING) else NotImplemented


def test_an_enumeration_may_be_pickled_by_name(distributed, halves):
    buffer = io.BytesIO()
    _ByName(buffer).dump(distributed.metadata_of(halves))
    (halves / ".metadata").write_bytes(buffer.getvalue())
    assert b"getattr" in buffer.getvalue()
    assert names_of(halves) == ["w"]


@pytest.mark.parametrize("memory_format", [None, 3, (1, 2), "TORCH_CONTIGUOUS_FORMAT"])
def test_properties_that_torch_would_not_write(distributed, halves, memory_format):
    class Wrong(pickle.Pickler):
        def reducer_override(self, value):
            if not isinstance(value, TensorProperties):
                return NotImplemented
            return copyreg.__newobj__, (TensorProperties,), (torch.float32, torch.strided, False, memory_format, False)

    buffer = io.BytesIO()
    Wrong(buffer).dump(distributed.metadata_of(halves))
    (halves / ".metadata").write_bytes(buffer.getvalue())
    with pytest.raises((RuntimeError, ValueError)):
        distributed.metadata_of(halves)
    with pytest.raises(DamagedArchive, match="tensor 'w'"):
        ckptmove.inspect(halves)


def with_more(distributed, folder, *more):
    """The metadata with additional properties of a tensor after the first four."""
    layout, memory_format = torch.strided, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT

    class Newer(pickle.Pickler):
        def reducer_override(self, value):
            if not isinstance(value, TensorProperties):
                return NotImplemented
            state = (torch.float32, layout, False, memory_format, *more)
            return copyreg.__newobj__, (TensorProperties,), state

    buffer = io.BytesIO()
    Newer(buffer).dump(distributed.metadata_of(folder))
    (folder / ".metadata").write_bytes(buffer.getvalue())


@pytest.mark.parametrize("strides", [None, (), (3, 1)])
def test_properties_may_have_strides(distributed, halves, strides):
    """As torch has them from 2.15 on: those of the whole tensor."""
    with_more(distributed, halves, False, strides)
    assert names_of(halves) == ["w"]


@pytest.mark.parametrize("strides", ["31", 3, [3, 1], (3, "1")])
def test_strides_are_none_or_numbers(distributed, halves, strides):
    with_more(distributed, halves, False, strides)
    with pytest.raises(DamagedArchive, match="tensor 'w'"):
        ckptmove.inspect(halves)


def test_a_tensor_of_another_module_than_torch_is_damaged(halves):
    replace_bytes(halves, b"\x05torch\x94\x8c\x07float32", b"\x05uorch\x94\x8c\x07float32")
    with pytest.raises(DamagedArchive, match="tensor 'w'"):
        ckptmove.inspect(halves)


@pytest.mark.parametrize("more", [(), (False, None, None)])
def test_properties_of_another_number_are_damaged(distributed, halves, more):
    with_more(distributed, halves, *more)
    with pytest.raises(DamagedArchive, match="tensor 'w'"):
        ckptmove.inspect(halves)


def test_what_other_writers_put_there_is_read(distributed, halves, monkeypatch):
    # As Megatron-Core has it: a Metadata of its own with one more field, and the plans of all ranks.
    module = types.ModuleType("megatron_core_strategies")

    @dataclass
    class MCoreMetadata(Metadata):
        mcore_data: object = None

    class Planned(dict):
        @classmethod
        def made(cls, count):
            return cls(count=count)

        def __reduce__(self):
            return Planned.made, (3,)

    for one in (MCoreMetadata, Planned):
        one.__module__, one.__qualname__ = module.__name__, one.__name__
        setattr(module, one.__name__, one)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    metadata = MCoreMetadata(**vars(distributed.metadata_of(halves)))
    metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (4, 3)}}
    metadata.all_local_plans = [SavePlan([])]
    metadata.planner_data = {"w": ("w",), "seen": frozenset({1}), "mine": Planned()}
    (halves / ".metadata").write_bytes(pickle.dumps(metadata))
    assert distributed.metadata_of(halves).planner_data["mine"] == {"count": 3}
    assert names_of(halves) == ["w"]


def test_an_object_in_the_place_of_another_is_damaged(distributed, halves):
    def edit(metadata):
        metadata.storage_data[MetadataIndex("w", (0, 0))] = MetadataIndex("w", (0, 0))

    distributed.change(halves, edit)
    with pytest.raises(DamagedArchive, match="'a place'"):
        ckptmove.inspect(halves)


def test_no_flipped_bit_with_which_torch_cannot_load_passes(distributed, tmp_path):
    tree = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "step": {"loss": torch.ones(1), "count": 3}}
    folder = distributed.save(tmp_path / "run", tree)
    path = folder / ".metadata"
    whole = path.read_bytes()
    generator = random.Random(0)
    passed = []
    for place in generator.sample(range(len(whole)), 150):
        data = bytearray(whole)
        data[place] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        with contextlib.suppress(CkptMoveError):
            found = ckptmove.inspect(folder, check=True).findings
            if not [finding for finding in found if finding.severity.name == "ERROR"]:
                passed.append(bytes(data))
    assert 0 < len(passed) < 30
    for data in passed:
        path.write_bytes(data)
        distributed.load({"model": {"weight": torch.zeros(2, 3)}, "step": {"loss": torch.zeros(1), "count": 0}}, folder)


def test_no_checksum_guards_it_and_the_verdict_says_so(halves):
    with open_checkpoint(halves, Limits()) as checkpoint:
        check = check_file(checkpoint.parts)
    assert dict(check.evidence)["checksums"] is True
    assert ".metadata" in check.detail

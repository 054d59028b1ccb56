"""Hostile metadata: a one-line error, in little time, and nothing in it is executed."""

from __future__ import annotations

import os
import pickle
import random
import re

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

import ckptmove
from ckptmove.errors import CkptMoveError, DamagedArchive, LimitExceeded, MissingShard
from ckptmove.limits import Limits

FIRST = MetadataIndex("w", (0, 0))


def tensor(metadata):
    return metadata.state_dict_metadata["w"]


def place(metadata):
    return metadata.storage_data[FIRST]


class Spring:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


EDITS = {
    "it has no state_dict_metadata": lambda m: setattr(m, "state_dict_metadata", [1]),
    "it has no storage_data": lambda m: setattr(m, "storage_data", None),
    "a name in its state_dict_metadata is not a string": lambda m: m.state_dict_metadata.update({3: tensor(m)}),
    "'x' is neither a tensor nor an object": lambda m: m.state_dict_metadata.update(x=torch.Size([1])),
    "'y' is neither a tensor nor an object": lambda m: m.state_dict_metadata.update(y=m.state_dict_metadata),
    "the properties of tensor 'w' are not": lambda m: setattr(tensor(m), "properties", (torch.float32,)),
    "the sizes of tensor 'w' are not": lambda m: setattr(tensor(m), "size", torch.Size([2**62, 2**62])),
    "the sizes of tensor 'w' are not .*": lambda m: setattr(tensor(m), "size", (4, -3)),
    "the sizes of tensor 'w' .* as torch writes them": lambda m: setattr(tensor(m), "chunks", None),
    "'a chunk' in it is not as torch writes it": lambda m: setattr(tensor(m), "chunks", [tensor(m).chunks]),
    "tensor 'w' has 65 axes": lambda m: setattr(tensor(m), "size", torch.Size([1] * 65)),
    "'w' in it is not as torch writes it": lambda m: tensor(m).__dict__.update({str(i): i for i in range(99)}),
    "'an index' in it is not": lambda m: m.storage_data.update({"w": place(m)}),
    "'a place' in it is not": lambda m: m.storage_data.update({FIRST: "w"}),
    "a place in it is not": lambda m: setattr(place(m), "offset", True),
    "the place of 'w' is invalid: 1 bytes from -1": lambda m: place(m).__dict__.update(offset=-1, length=1),
    "invalid: a number of 20001 bits bytes from 0": lambda m: setattr(place(m), "length", 2**20000),
    "the offset of a chunk of 'w' is invalid": lambda m: m.storage_data.update({MetadataIndex("w", (-1, 0)): place(m)}),
    "is missing: '../../etc/passwd'": lambda m: setattr(place(m), "relative_path", "../../etc/passwd"),
    "is missing: '/etc/passwd'": lambda m: setattr(place(m), "relative_path", "/etc/passwd"),
}


@pytest.mark.parametrize("reason", EDITS)
def test_what_torch_would_not_write_is_damage(distributed, halves, reason):
    distributed.change(halves, EDITS[reason])
    with pytest.raises((DamagedArchive, MissingShard), match=reason) as caught:
        ckptmove.inspect(halves)
    assert caught.value.path == str(halves / ".metadata")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"\x80\x04}.", b"x", pickle.dumps(torch.Size([1]))])
def test_metadata_that_is_none(halves, data):
    (halves / ".metadata").write_bytes(data)
    with pytest.raises(CkptMoveError) as caught:
        ckptmove.inspect(halves)
    assert caught.value.path == str(halves / ".metadata")


def test_sizes_and_offsets_without_arguments(halves):
    path = halves / ".metadata"
    whole = path.read_bytes()
    for found in re.finditer(rb"\x86\x94\x85\x94R", whole):  # torch.Size((a, b)) as torch.Size() with rubbish below
        path.write_bytes(whole[: found.start()] + b"00)\x94" + whole[found.start() + 4 :])
        with pytest.raises(CkptMoveError):
            ckptmove.inspect(halves)


def test_tensors_that_share_their_chunks_do_not_multiply(distributed, halves):
    def edit(metadata):
        one = tensor(metadata)
        one.size, one.chunks = torch.Size([0]), [one.chunks[0]] * 1000
        one.chunks[0].offsets = one.chunks[0].sizes = torch.Size([0])
        metadata.state_dict_metadata = {str(index): one for index in range(1000)}

    distributed.change(halves, edit)
    with pytest.raises(LimitExceeded, match="chunks"):
        ckptmove.inspect(halves)


def test_pieces_that_share_a_long_name_do_not_multiply(distributed, halves):
    def edit(metadata):
        name, info = "n" * 100_000, place(metadata)
        metadata.storage_data = {MetadataIndex(name, (index,)): info for index in range(100)}

    distributed.change(halves, edit)
    with pytest.raises(LimitExceeded, match="names"):
        ckptmove.inspect(halves)


def test_its_size_is_bounded(halves):
    with pytest.raises(LimitExceeded):
        ckptmove.inspect(halves, limits=Limits(pickle_bytes=100))


def test_nothing_in_it_is_run_and_what_is_dangerous_is_told(distributed, halves, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    distributed.change(halves, lambda metadata: setattr(metadata, "planner_data", Spring()))
    found = ckptmove.inspect(halves)
    assert [finding.code for finding in found.findings] == ["S702"]
    assert "torch.distributed.checkpoint.metadata.Metadata" in {use.name for use in found.inventory.globals}
    (tmp_path / "d").mkdir()
    halves.rename(tmp_path / "d" / "halves")
    found = ckptmove.inspect(tmp_path / "d")
    assert {use.verdict for use in found.inventory.globals} == {"dangerous"}
    assert not (tmp_path / "sprung").exists()


@pytest.mark.unmeasured
def test_no_byte_lets_another_error_escape(trained):
    path = trained / ".metadata"
    whole = path.read_bytes()
    generator = random.Random(0)
    messages = []
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(data)
        try:
            ckptmove.inspect(trained, check=True, outline=True)
        except CkptMoveError as error:
            messages.append(error.message)
    assert len(messages) > 100

"""Bare pickles; the oracle for reading and writing is ``pickle.load``."""

from __future__ import annotations

import argparse
import contextlib
import io
import pickle
import pickletools
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import ckptmove
from ckptmove.api.functions import convert, inspect
from ckptmove.errors import CkptMoveError, DamagedArchive, DamagedPickle, LimitExceeded, UneditablePickle
from ckptmove.formats.pickle_outline import read_outlines
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from ckptmove.model import ArchiveFact
from ckptmove.opening.checkpoint import open_checkpoint

PROTOCOLS = pytest.mark.parametrize("protocol", range(6))
#: Protocols with an opcode for bytes.
BINARY = pytest.mark.parametrize("protocol", [3, 4, 5])
LOAD = torch.load


def tree():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3, 4, generator=generator)
    return {
        "epoch": 3,
        "model": {"fc.weight": weight, "fc.bias": torch.nn.Parameter(torch.ones(4)), "empty": torch.empty(0).byte()},
        "tied": weight,
        "view": weight.t()[1:],
        "large": torch.randn(70_000, generator=generator),
        "sparse": torch.eye(3).to_sparse(),
        "mask": torch.tensor([True, False]),
        "array": np.arange(90_000.0),
        "small": np.arange(3),
        "text": "x" * 100_000,
        "args": {"device": "cpu", "lr": np.float64(0.1)},
    }


def dumped(value, protocol=4):
    return pickle.dumps(value, protocol)


def loaded(data):
    """The result of ``pickle.load``, and the tags that torch reads."""
    tags = []

    def record(storage, tag):
        tags.append(tag)
        return storage

    with mock.patch.object(torch, "load", partial(LOAD, map_location=record)):
        return pickle.loads(data), Counter(tags)


def tensors(value, path=""):
    if isinstance(value, torch.Tensor):
        yield path[:-1], value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{path}{key}.")


def bits(tensor):
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return bytes(dense.contiguous().reshape(-1).view(torch.uint8).tolist()) if dense.numel() else b""


@pytest.fixture
def write(tmp_path):
    def written(data, name="run.pkl"):
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return written


@PROTOCOLS
def test_its_tensors_are_those_of_torch(write, protocol):
    data = dumped(tree(), protocol)
    expected, tags = loaded(data)
    inventory = inspect(write(data)).inventory
    assert (inventory.container, inventory.layout) == ("pickle", "plain")
    encoded = {fact.storage_key for fact in inventory.facts if fact.kind == "encoded-storage"}
    assert (len(inventory.facts), encoded) == (
        (len(encoded), {storage.key for storage in inventory.storages}) if protocol < 3 else (0, set())
    )
    own = {tensor.name: tensor for tensor in inventory.tensors}
    assert list(own) == [name for name, _ in tensors(expected)]
    for name, tensor in tensors(expected):
        assert (f"torch.{own[name].dtype}", own[name].shape) == (str(tensor.dtype), tuple(tensor.shape))
        assert own[name].requires_grad == tensor.requires_grad
        if not tensor.is_sparse:
            assert (own[name].stride, own[name].storage_offset) == (tensor.stride(), tensor.storage_offset())
    assert Counter(storage.device for storage in inventory.storages) == tags
    assert [(mention.where, mention.value) for mention in inventory.mentions] == [("args.device", "cpu")]


@pytest.mark.unmeasured
@BINARY
def test_a_storage_lies_where_it_is_said_to(write, protocol):
    data = dumped(tree(), protocol)
    expected = dict(tensors(loaded(data)[0]))
    with open_checkpoint(write(data)) as checkpoint:
        for tensor in checkpoint.inventory.tensors:
            if not tensor.parts:
                span = checkpoint.file.span(tensor.storage)
                storage = bytes(expected[tensor.name].untyped_storage())
                assert data[span.start : span.end] == storage
        assert checkpoint.check() == ()
        assert not checkpoint.file.has_checksums


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_what_is_written_as_text_lies_nowhere(write, protocol):
    with open_checkpoint(write(dumped({"w": torch.ones(2)}, protocol))) as checkpoint:
        (tensor,) = checkpoint.inventory.tensors
        assert checkpoint.file.span(tensor.storage) is None
        assert checkpoint.inventory.facts == (ArchiveFact("encoded-storage", tensor.storage, 8),)


@BINARY
@pytest.mark.parametrize("target", ["cuda:0", "mps", "privateuseone:1"])
def test_the_output_is_what_was_planned(write, tmp_path, protocol, target):
    """The longest one makes a stream of less than 256 bytes a longer one, which needs another opcode."""
    data = dumped(tree(), protocol)
    output = tmp_path / "out.pkl"
    result = convert(write(data), to=target, output=str(output))
    before, tags = loaded(data)
    after, moved = loaded(output.read_bytes())
    assert set(moved) == {target}
    assert moved.total() == tags.total() == len(result.plan.edits)
    for (name, old), (other, new) in zip(tensors(before), tensors(after), strict=True):
        assert (name, old.dtype, old.shape, bits(old)) == (other, new.dtype, new.shape, bits(new))
    assert after["tied"].data_ptr() == after["model"]["fc.weight"].data_ptr()
    assert np.array_equal(after["array"], before["array"])
    assert (after["text"], after["args"], after["epoch"]) == (before["text"], before["args"], 3)
    pickletools.dis(output.read_bytes(), io.StringIO())
    assert inspect(str(output)).inventory.facts == ()


@BINARY
def test_there_and_back_is_the_same_file(write, tmp_path, protocol):
    source = write(dumped(tree(), protocol) + b"what follows")
    away, back = tmp_path / "away.pkl", tmp_path / "back.pkl"
    convert(source, to="xpu:3", output=str(away))
    convert(str(away), to="cpu", output=str(back))
    assert back.read_bytes() == Path(source).read_bytes()
    (fact,) = inspect(source).inventory.facts
    assert (fact.kind, fact.nbytes) == ("orphan-record", 12)


@BINARY
def test_python_reads_its_frames(write, tmp_path, protocol):
    """The unpickler in Python, unlike the one in C, refuses a frame that does not end where an operation ends."""
    output = tmp_path / "out.pkl"
    convert(write(dumped(tree(), protocol)), to="cuda:7", output=str(output))
    value = pickle._Unpickler(io.BytesIO(output.read_bytes()))
    with mock.patch.object(torch, "load", partial(LOAD, map_location="cpu")):
        assert value.load()["epoch"] == 3


def test_a_tensor_that_is_kept_stays(write, tmp_path):
    output = tmp_path / "out.pkl"
    convert(write(dumped({"w": torch.ones(2), "v": torch.zeros(2)})), to="cuda:0", keep=["w"], output=str(output))
    with open_checkpoint(str(output)) as checkpoint:
        assert [tensor.device for tensor in checkpoint.inventory.tensors] == ["cpu", "cuda:0"]
    assert loaded(output.read_bytes())[1] == {"cpu": 1, "cuda:0": 1}


def test_a_tied_tensor_moves_with_one_edit(write):
    result = convert(write(dumped(tree())), to="cuda:0", dry_run=True)
    names = next(edit.names for edit in result.plan.edits if "tied" in edit.names)
    assert names == ("model.fc.weight", "tied")


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_tensors_that_are_written_as_text_are_not_moved(write, tmp_path, protocol):
    path, output = write(dumped({"args": {"epoch": 1}, "w": torch.ones(2)}, protocol)), tmp_path / "out.pkl"
    with pytest.raises(UneditablePickle, match="text"):
        convert(path, to="cuda:0", output=str(output))
    assert not output.exists()
    convert(path, to="cpu", output=str(output))
    assert output.read_bytes() == Path(path).read_bytes()


def test_the_rest_of_a_pickle_of_text_may_change(write, tmp_path):
    path = write(dumped({"device": torch.device("cuda:1"), "s": "cuda:1", "w": torch.ones(2)}, 2))
    output = tmp_path / "out.pkl"
    with pytest.raises(UneditablePickle):
        convert(path, to="cuda:0", output=str(output))
    mentions = [(one.where, one.value) for one in inspect(path).inventory.mentions]
    assert mentions == [("device", "cuda:1"), ("s", "cuda:1")]


def test_an_untyped_storage_which_torch_writes_and_cannot_load(write):
    data = dumped({"w": torch.arange(8).to(torch.float8_e4m3fn)})
    with pytest.raises(AttributeError, match="UntypedStorage"):
        loaded(data)
    (tensor,) = inspect(write(data)).inventory.tensors
    assert (tensor.dtype, tensor.shape, tensor.device) == ("float8_e4m3fn", (8,), "cpu")


@BINARY
def test_a_cast(write, tmp_path, protocol):
    values = {"w": torch.linspace(0, 1, 1000, dtype=torch.float64), "b": torch.ones(2)}
    output = tmp_path / "out.pkl"
    convert(write(dumped(values, protocol)), to="mps", cast=True, output=str(output))
    after, tags = loaded(output.read_bytes())
    assert tags == {"mps": 2}
    assert torch.equal(after["w"], values["w"].float())
    assert torch.equal(after["b"], values["b"])


class Stream:
    """Pickles as the call that loads a stream of torch."""

    def __init__(self, data):
        self.data = data

    def __reduce__(self):
        return torch.storage._load_from_bytes, (self.data,)


def zipped(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_zip_archive_inside(write, tmp_path):
    inner = {"w": torch.arange(6.0, dtype=torch.float64), "b": torch.ones(300)}
    data = dumped({"first": Stream(zipped(inner)), "second": Stream(zipped(inner))})
    path, output = write(data), tmp_path / "out.pkl"
    with open_checkpoint(path) as checkpoint:
        names = [tensor.name for tensor in checkpoint.inventory.tensors]
        assert names == ["first.w", "first.b", "second.w", "second.b"]
        assert checkpoint.file.has_checksums
        span = checkpoint.file.span(checkpoint.inventory.tensors[2].storage)
        assert torch.equal(torch.frombuffer(bytearray(data[span.start : span.end]), dtype=torch.float64), inner["w"])
    convert(path, to="mps", cast=True, output=str(output))
    after, tags = loaded(output.read_bytes())
    assert tags == {"mps": 4}
    assert torch.equal(after["second"]["w"], inner["w"].float())
    assert torch.equal(after["first"]["b"], inner["b"])
    assert inspect(str(output), check=True).inventory.facts == ()


def test_a_zip_archive_inside_of_text(write):
    (tensor,) = inspect(write(dumped(Stream(zipped([torch.ones(3)])), 2))).inventory.tensors
    assert (tensor.name, tensor.shape) == ("0", (3,))


def test_a_flipped_bit_in_an_archive_inside(write):
    data = bytearray(dumped([Stream(zipped({"b": torch.ones(300)}))]))
    data[data.find(b"\x00\x00\x80\x3f" * 50) + 10] ^= 1
    facts = inspect(write(bytes(data)), check=True).inventory.facts
    assert [(fact.kind, fact.record) for fact in facts] == [("crc-mismatch", "0:0")]


def test_a_storage_and_an_object_that_are_all_there_is(write, tmp_path):
    for value in (torch.ones(3), Stream(zipped([torch.ones(3)]))):
        output = tmp_path / "out.pkl"
        convert(write(dumped(value)), to="cuda:0", output=str(output), force=True)
        assert loaded(output.read_bytes())[1] == {"cuda:0": 1}


def test_a_stream_that_a_set_a_state_and_a_key_hold(write):
    key = torch.ones(3)
    data = dumped({"set": {key}, key: 1, "state": torch.nn.Linear(2, 2)})
    assert len(inspect(write(data)).inventory.tensors) == 4


def test_long_strings_are_not_read():
    data = dumped({"array": np.zeros(10**6), "text": "x" * 10**6, "w": torch.zeros(10**6)})
    outline = next(read_outlines(MemorySource("x", data), Limits()))
    assert len(outline.data) < 1000
    assert len(outline.strings) == 3
    assert outline.end == len(data)
    assert outline.file_offset(len(outline.data)) == len(data)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_long_strings_are_in_a_file_of_another_format(write, tmp_path, protocol):
    shared = b"b" * 200
    value = {
        "w": torch.ones(2), "bytes": shared, "again": [shared], "text": "ä" * 50_000, "array": np.arange(300.0),
        "t" * 70_000: 1, ("k" * 70_000, 2): 3, "settings": argparse.Namespace(note="n" * 70_000),
    }  # fmt: skip
    if protocol == 2:  # it writes the streams of tensors as text
        del value["w"]
    path, output = write(dumped(value, protocol)), tmp_path / "out.pth"
    convert(path, output=str(output), plain=True)
    expected = {**value, "array": value["array"].tolist(), "settings": vars(value["settings"])}
    for found in (torch.load(output, weights_only=True), ckptmove.load(path, plain=True)):
        assert found.keys() == expected.keys()
        assert all(found[key] == expected[key] for key in expected if key != "w")
        assert found["bytes"] is found["again"][0]
    assert ckptmove.load(write(dumped(value["text"], protocol), "text.pkl")) == value["text"]
    few = Limits(string_bytes=100_000)
    with pytest.raises(LimitExceeded, match="long strings"):
        convert(path, output=str(output), plain=True, force=True, limits=few)


def test_a_string_that_equals_the_name_of_a_long_key_stays(write, tmp_path):
    long, name = "k" * 70_000, "<string 0 of 70000 bytes>"
    value = {long: 1, "w": torch.ones(2), "name": name, "keys": {name: 2, (name, 1): 3}, "again": [long, {long: 4}]}
    path, output = write(dumped(value)), tmp_path / "out.pth"
    assert f"{name}" in inspect(path).inventory.root_keys
    convert(path, output=str(output), plain=True)
    for found in (torch.load(output, weights_only=True), ckptmove.load(path, plain=True), ckptmove.load(path)):
        assert {**found, "w": 0} == {**value, "w": 0}
        assert found["again"][0] is next(iter(found)) is next(iter(found["again"][1]))


def test_python_2_wrote_its_streams_as_str(write, tmp_path):
    stream = torch.ones(3).untyped_storage().__reduce__()[1][0]
    data = b"\x80\x02ctorch.storage\n_load_from_bytes\nT" + len(stream).to_bytes(4, "little") + stream + b"\x85R."
    path, output = write(data), tmp_path / "out.pkl"
    assert [storage.device for storage in inspect(path).inventory.storages] == ["cpu"]
    convert(path, to="cuda:0", output=str(output))
    assert output.read_bytes().startswith(data[:35])
    short = torch.empty(0).byte().untyped_storage()
    assert len(short.__reduce__()[1][0]) < 300


# --- nothing to move -------------------------------------------------------------------------------------------------


def test_without_tensors_there_is_nothing_to_convert(write, tmp_path):
    path = write(dumped({"lr": 0.1, "device": "cuda:0", "table": np.arange(5000)}))
    result = convert(path, to="cpu")
    assert (result.output, result.plan.is_empty) == (None, True)
    assert "no tensor" in result.notes[-1]
    assert list(tmp_path.iterdir()) == [tmp_path / "run.pkl"]
    convert(path, to="cpu", output=str(tmp_path / "copy.pkl"))
    assert (tmp_path / "copy.pkl").read_bytes() == Path(path).read_bytes()


def test_its_globals_and_those_of_its_streams_are_judged(write):
    class Evil:
        def __reduce__(self):
            return eval, ("1",)

    stream = io.BytesIO()
    torch.save({"x": Evil(), "w": torch.ones(2)}, stream, _use_new_zipfile_serialization=False)
    found = {one.name: one.verdict for one in inspect(write(dumped([Stream(stream.getvalue())]))).inventory.globals}
    assert found["builtins.eval"] == "dangerous"
    assert found["torch.storage._load_from_bytes"] == "unknown"


# --- hostile files ---------------------------------------------------------------------------------------------------

LOADER = b"ctorch.storage\n_load_from_bytes\n"


def binbytes(data):
    return b"B" + len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize(
    "argument",
    [b"c_codecs\nencode\nNR", b"c_codecs\nencode\nN\x85R", b"c_codecs\nencode\n(X\x01\0\0\0aX\x05\0\0\0utf-8tR"],
)
def test_a_stream_in_another_encoding_is_not_read_and_stays_dangerous(write, argument):
    found = inspect(write(b"\x80\x03" + LOADER + argument + b"\x85R."))
    assert {one.name for one in found.inventory.globals if one.verdict == "dangerous"} == {
        "torch.storage._load_from_bytes"
    }


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"\x80\x03" + LOADER + binbytes(bytes(200)) + b"\x85R.", CkptMoveError, "magic number"),
        (b"\x80\x03" + LOADER + binbytes(b"PK\x03\x04" + bytes(200)) + b"\x85R.", DamagedArchive, "damaged archive"),
        (
            b"\x80\x03" + LOADER + b"c_codecs\nencode\n(X\x02\x00\x00\x00\xc4\x80X\x06\x00\x00\x00latin1tR\x85R.",
            DamagedArchive,
            "not a byte",
        ),
        (b"\x80\x03" + LOADER + b"c_codecs\nencode\n(NX\x06\x00\x00\x00latin1tR\x85R.", CkptMoveError, "magic number"),
        (b"\x80\x03" + b"B\xff\xff\xff\x7f" + b"x" * 300, DamagedPickle, "past the end at byte 2"),
        (b"\x80\x03" + binbytes(bytes(300)), DamagedPickle, "before STOP at byte 307"),
        (b"\x80\x03" + binbytes(bytes(300)) + b"\xff", DamagedPickle, "no such opcode 0xff at byte 307"),
        (b"\x80\x03" + binbytes(bytes(300)) + b"0s.", DamagedPickle, "at byte 308"),
        (b"\x80\x03" + binbytes(b"x" * 50), DamagedPickle, "before STOP"),
        (b"\x80\x03cabc", DamagedPickle, "before STOP"),
        (b"\x80\x03X\x01", DamagedPickle, "before STOP"),
        (b"\x80\x03J\x01", DamagedPickle, "before STOP"),
        (b"\x80\x04\x95" + (100).to_bytes(8, "little") + binbytes(bytes(300)) + b".", DamagedPickle, "ends inside"),
        (b"\x80\x04\x95" + (2**64 - 1).to_bytes(8, "little") + binbytes(bytes(300)) + b".", DamagedPickle, "frame"),
    ],
)
def test_what_no_pickler_writes(write, data, error, match):
    with pytest.raises(error, match=match):
        inspect(write(data))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x03" + LOADER + b")R.",
        b"\x80\x03" + LOADER + b"NR.",
        b"\x80\x03" + LOADER + binbytes(b"short") + b"\x85R.",
        b"\x80\x03" + LOADER + b"X" + (70_000).to_bytes(4, "little") + b"x" * 70_000 + b"\x85R.",
    ],
)
def test_a_call_that_loads_nothing_is_an_object_like_any(write, data):
    assert inspect(write(data)).inventory.tensors == ()


def test_bytes_behind_the_pickle_of_a_stream(write):
    data = zipped([torch.ones(3)])
    stream = io.BytesIO()
    torch.save(torch.ones(3), stream, _use_new_zipfile_serialization=False)
    assert inspect(write(dumped([Stream(stream.getvalue() + b"more")]))).inventory.facts[0].kind == "orphan-record"
    spoiled = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(spoiled, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) + (b"more" if name.endswith("data.pkl") else b""))
    with pytest.raises(DamagedArchive, match="unexpected bytes after"):
        inspect(write(dumped([Stream(spoiled.getvalue())])))


def test_a_storage_that_no_stream_holds_is_missing(write):
    persistent = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x03\x00\x00\x009:xX\x03\x00\x00\x00cpuK\x02tQ"
    data = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + b"K\x00K\x02\x85K\x01\x85\x89NtR."
    with open_checkpoint(write(data)) as checkpoint:
        (fact,) = checkpoint.inventory.facts
        assert (fact.kind, fact.record) == ("missing-storage", "9:x")
        assert checkpoint.file.span("9:x") is None


def test_persistent_ids_inside_that_are_no_storages_stay_as_they_are(write):
    stream = io.BytesIO()
    for number in (0x1950A86A20F9469CFC6C, 1001, {}):
        pickle.dump(number, stream, 2)
    stream.write(b"\x80\x02K\x01Q0N.")
    pickle.dump([], stream, 2)
    data = stream.getvalue() + bytes(200)
    assert inspect(write(dumped([Stream(data)]))).inventory.tensors == ()


@pytest.mark.parametrize(
    ("value", "limits", "resource"),
    [
        ([b"x" * 300, b"y" * 300], Limits(records=1), "long strings"),
        (["x" * 2000], Limits(string_bytes=1000), "a string"),
        (list(range(2000)), Limits(pickle_bytes=1000), "a pickle"),
    ],
)
def test_the_limits_hold(write, value, limits, resource):
    with pytest.raises(LimitExceeded, match=resource):
        inspect(write(dumped(value)), limits=limits)


def test_a_line_longer_than_what_is_read_at_once(write):
    path = write(pickle.dumps({"text": "x" * 200_000, "number": 1 << 600_000, "w": torch.ones(2)}, 2))
    assert len(inspect(path).inventory.tensors) == 1
    assert len(inspect(write(pickle.dumps(["x" * 200_000, torch.ones(2)], 0))).inventory.tensors) == 1
    with pytest.raises(DamagedPickle, match="before STOP"):
        inspect(write(b"\x80\x02V" + b"x" * 200_000))


def test_cut_off_anywhere(write):
    data = dumped({"w": torch.ones(2), "a": np.zeros(40)})
    for length in range(0, len(data), 3):
        with pytest.raises(CkptMoveError):
            inspect(write(data[:length]))


@pytest.mark.unmeasured
def test_every_kind_of_flipped_byte(write, tmp_path):
    data = dumped({"w": torch.ones(2), "a": np.zeros(40), "b": Stream(zipped([torch.ones(1)]))})
    for place in range(2, len(data), 7):
        spoiled = bytearray(data)
        spoiled[place] ^= 1 << place % 8
        path = write(bytes(spoiled))
        with contextlib.suppress(CkptMoveError):
            convert(path, to="cuda:0", output=str(tmp_path / "out.pkl"), force=True)

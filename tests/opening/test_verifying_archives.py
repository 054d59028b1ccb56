"""``verify`` of archives: each member is loaded by ``torch.load`` without unpacking it."""

from __future__ import annotations

import io
import pickle
import zipfile
from argparse import Namespace

import pytest
import safetensors.torch
import torch
from simulation import on_a_simulated_device

import ckptmove
from ckptmove.errors import CrcMismatch
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.file_checks import check_file
from ckptmove.proof.restored.byte_source_file import as_file
from ckptmove.proof.restored.loaded import LoadedFiles
from ckptmove.proof.tensors import stored as state
from ckptmove.proof.tensors.stored import StoredTensors

STEPS = ("restore", "numbers", "step", "parity", "fresh")
KINDS = ["zip", "deflated", "tar"]


def statuses(found, names=STEPS):
    return [found[name]["status"] for name in names]


def opened(path):
    return open_checkpoint(str(path), Limits(), keep_trees=True)


# --- a real verdict ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["cpu", "cuda:0"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_check_is_made_of_the_members(packer, answers, kind, to):
    found = answers(packer.pack(packer.members(to), kind), to)
    assert statuses(found) == ["passed"] * 5, found
    assert found["step"]["evidence"]["proven"] is True
    assert found["restore"]["evidence"]["compared"] == 16


@on_a_simulated_device
def test_a_verdict_through_the_child(packer):
    members, told = packer.members("cuda:0"), []
    path, folder = packer.pack(members), str(packer.unpack(members))
    result = ckptmove.verify(path, against=folder, progress=lambda done, total: told.append((done, total)))
    assert (result.passed, result.target, result.mode, result.proven) == (True, "cuda:0", "simulated", True)
    details = {check.name: check.detail for check in result.checks}
    assert details["file"].startswith("2 ")
    assert details["restore"].endswith(f"all equal {folder}, ignoring devices")
    assert details["placement"].startswith("16 tensors ")
    assert told


def test_members_are_loaded_from_their_bytes_and_none_is_mapped(packer, answers, monkeypatch):
    load, seen = torch.load, []

    def watch(file, **options):
        seen.append((isinstance(file, str), options["mmap"], options["weights_only"]))
        return load(file, **options)

    monkeypatch.setattr(torch, "load", watch)
    parity = answers(packer.pack(packer.members()))["parity"]
    assert seen == [(False, False, True)] * 2
    assert parity["detail"].endswith("after a second reading (the result of torch.load was released)")


def test_one_member_is_held_at_a_time(packer):
    with opened(packer.pack(packer.members())) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        loaded = LoadedFiles(checkpoint.parts, stored)
        first = loaded.at("policy.pth")
        assert first.tensors
        assert loaded.at("policy.pth") is first
        second = loaded.at("policy.optimizer.pth")
        assert (bool(first.tensors), bool(second.tensors)) == (False, True)
        loaded.release()
        assert not second.tensors
        loaded.release()


def test_none_is_held_once_all_were_compared(packer, answers, monkeypatch):
    made, held = LoadedFiles.__init__, []

    def watch(self, *given, **options):
        made(self, *given, **options)
        held.append(self)

    monkeypatch.setattr(LoadedFiles, "__init__", watch)
    assert answers(packer.pack(packer.members()))["restore"]["status"] == "passed"
    (loaded,) = held
    assert [loaded.at(name).tensors for name in ("policy.pth", "policy.optimizer.pth")] == [{}, {}]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_what_torch_loads(packer, kind):
    large = {"w": torch.arange(100_000.0), "b": torch.arange(7, dtype=torch.int16)}
    with (
        opened(packer.pack({"a.pth": packer.saved(large), "b.pth": packer.saved({})}, kind)) as checkpoint,
        StoredTensors(checkpoint.parts) as stored,
    ):
        for record in checkpoint.inventory.tensors:
            assert torch.equal(stored.tensor(record), large[record.name.removeprefix("a.pth.")])


def test_a_few_tensors_are_kept(packer, monkeypatch):
    gathered, original = [], StoredTensors.read_into
    monkeypatch.setattr(state, "_KEPT_BYTES", 4 * 160_000)
    monkeypatch.setattr(StoredTensors, "read_into", lambda *of: gathered.append(of[2]) or original(*of))
    tree = {name: torch.full((40_000,), float(index)) for index, name in enumerate("abcdef")}
    with (
        opened(packer.pack({"a.pth": packer.saved(tree)}, "deflated")) as checkpoint,
        StoredTensors(checkpoint.parts, keeps=True) as stored,
    ):
        records = checkpoint.inventory.tensors
        for record in (*records, *records[2:], records[0]):
            assert torch.equal(stored.tensor(record), tree[record.name.removeprefix("a.pth.")])
        assert gathered == [*"012345", "0"]
        monkeypatch.setattr(state, "_KEPT_BYTES", 10)
        assert [torch.equal(stored.tensor(records[1]), tree["b"]) for _ in range(2)] == [True, True]
        assert gathered == [*"012345", "0", "1", "1"]


def test_members_of_other_kinds(packer, answers):
    model, optimizer = packer.build.trained()
    members = {
        "model.safetensors": safetensors.torch.save(model.state_dict()),
        "optimizer.pt": packer.saved(optimizer.state_dict(), _use_new_zipfile_serialization=False),
        "labels.pkl": pickle.dumps({"cat": 0}),
    }
    found = answers(packer.pack(members))
    assert statuses(found) == ["passed"] * 5, found
    assert all(library in found["restore"]["detail"] for library in ("torch.load", "safetensors"))


def test_a_member_that_is_refused_is_named(packer, answers):
    members = packer.members() | {"args.pth": packer.saved({"w": torch.ones(2), "args": Namespace(a=1)})}
    found = answers(packer.pack(members))
    assert found["restore"]["evidence"]["weights_only"] is False
    assert ": args.pth (" in found["restore"]["detail"]
    model, optimizer = packer.build.trained()
    members["policy.pth"] = packer.saved({**model.state_dict(), "odd": Namespace(a=1)})
    found = answers(packer.pack(members))
    assert statuses(found, ("restore", "step", "parity")) == ["passed"] * 3
    assert "policy.pth" in found["parity"]["detail"]
    assert optimizer.state_dict()


# --- faults -----------------------------------------------------------------------------------------------------------


def flip(path, tensor):
    content = bytearray(path.read_bytes())
    content[content.index(tensor.numpy().tobytes())] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_changed_byte_fails_the_file(packer, kind):
    path = packer.pack(packer.members(), kind)
    flip(path, packer.build.trained()[0].state_dict()["0.weight"])
    result = ckptmove.verify(path)
    assert next(check.name for check in result.checks if check.status == "failed") == "file"
    assert any(finding.code == "F801" and "policy.pth" in finding.where[0] for finding in result.findings)


def test_a_changed_byte_of_what_is_compressed_is_an_error_of_the_input(packer):
    path = packer.pack(packer.members(), "deflated")
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("policy.pth").header_offset
        content[at + 14] ^= 1  # of the CRC, here and in the directory
        content[content.rindex(b"policy.pth") - 46 + 16] ^= 1
    path.write_bytes(content)
    with pytest.raises(CrcMismatch):
        ckptmove.verify(path)


def test_crcs_are_those_of_the_archive_where_a_member_has_none(packer):
    members = packer.members(_use_new_zipfile_serialization=False)
    with opened(packer.pack(members)) as checkpoint:
        assert dict(check_file(checkpoint.parts).evidence)["checksums"] is True
        assert checkpoint.check() == ()
    with opened(packer.pack(members, "tar")) as checkpoint:
        check = check_file(checkpoint.parts)
    assert dict(check.evidence)["checksums"] is False
    assert check.detail.endswith(": policy.optimizer.pth, policy.pth")


# --- against an original ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_is_the_directory_that_it_was_made_of(packer, answers, kind):
    members = packer.members()
    archive, folder = packer.pack(members, kind), packer.unpack(members)
    for path, against in ((archive, folder), (folder, archive)):
        found = answers(path, against=str(against))
        assert statuses(found) == ["passed"] * 5, found
        assert found["restore"]["detail"].endswith(f"all equal {against}, ignoring devices")
        assert found["parity"]["detail"].endswith(f"from {against}")


def test_the_folder_that_all_of_an_archive_lies_in_is_not_its_own(packer, answers):
    members = packer.members()
    archive = packer.pack({f"run/{name}": data for name, data in members.items()})
    assert answers(archive, against=str(packer.unpack(members)))["restore"]["status"] == "passed"


def test_a_converted_archive_is_what_the_original_was(packer, answers):
    path = packer.pack(packer.members("cuda:1"))
    output = ckptmove.convert(path, to="cuda:0").output
    found = answers(output, "cuda:0", against=str(path))
    assert statuses(found) == ["passed"] * 5, found


def other_value(packer, members):
    model, _ = packer.build.trained()
    state = model.state_dict()
    state["0.bias"] += 1
    return members | {"policy.pth": packer.saved(state)}


def other_option(packer, members):
    _, optimizer = packer.build.trained()
    optimizer.param_groups[0]["lr"] = 5.0
    return members | {"policy.optimizer.pth": packer.saved(optimizer.state_dict())}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_value, "policy.pth.0.bias: other bits"),
        (other_option, "policy.optimizer.pth.param_groups.0.lr is 5.0 in place of 0.001"),
        (lambda _, members: members | {"data": b"{}"}, "data is sha256"),
        (lambda _, members: members | {"more": b"{}"}, "more is not in the original"),
        (lambda _, members: {name: data for name, data in members.items() if name != "data"}, "data is missing"),
        (lambda packer, members: members | {"x.pth": packer.saved({"n": 1})}, "x.pth is not in the original"),
    ],
    ids=["value", "option", "bytes", "more", "less", "checkpoint"],
)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_what_is_not_as_in_the_original_is_named(packer, answers, kind, change, said):
    members = packer.members()
    original = packer.pack(members, kind, "original")
    restore = answers(packer.pack(change(packer, members), kind), against=str(original))["restore"]
    assert restore["status"] == "failed"
    assert said in restore["detail"]


def test_one_member_against_the_file_that_it_was(packer, answers):
    members = packer.members()
    file = packer.root / "w.pth"
    file.write_bytes(members["policy.pth"])
    archive = packer.pack({"model_config.yaml": b"name: x\n", "weights.ckpt": members["policy.pth"]}, "tar")
    restore = answers(archive, against=str(file))["restore"]
    assert restore["status"] == "passed", restore
    assert "model_config.yaml" in restore["detail"]  # not compared, because the other side is a single file


# --- in other files ---------------------------------------------------------------------------------------------------


def test_a_model_in_shards_is_what_one_file_of_it_is(build, answers):
    one, several = build.hf_trainer("one", "cpu"), build.hf_trainer("several", "cpu", shards=2)
    for path, against in ((one, several), (several, one)):
        found = answers(path, against=str(against))
        assert statuses(found) == ["passed"] * 5, found["restore"]
        assert all(f".bin of {side}" in found["restore"]["detail"] for side in (one, several))


def test_an_index_of_other_shards_is_none_of_the_checkpoint(build, answers):
    two, four = build.hf_trainer("two", "cpu", shards=2), build.hf_trainer("four", "cpu", shards=4)
    assert answers(two, against=str(four))["restore"]["status"] == "passed"


def test_a_file_that_was_renamed_is_compared_with_all_that_it_holds(build, answers):
    folder, copy = build.root / "a", build.root / "b"
    build.save(folder / "old.pt", {"w": torch.ones(3), "epoch": 3})
    build.save(copy / "new.pt", {"w": torch.ones(3), "epoch": 3})
    assert answers(copy, against=str(folder))["restore"]["status"] == "passed"
    build.save(copy / "new.pt", {"w": torch.ones(3), "epoch": 4})
    restore = answers(copy, against=str(folder))["restore"]
    assert (restore["status"], restore["evidence"]["changed"]) == ("failed", 1)
    assert "new.pt.epoch is 4 " in restore["detail"]


def test_a_tensor_that_could_be_in_several_files_is_not_taken_for_one(build, answers):
    folder, file = build.root / "a", build.root / "b.pt"
    for name in ("one.pt", "two.pt"):
        build.save(folder / name, {"w": torch.ones(3)})
    build.save(file, {"w": torch.ones(3), "v": torch.ones(2)})
    build.save(folder / "three.pt", {"v": torch.ones(2)})
    restore = answers(file, against=str(folder))["restore"]
    assert (restore["status"], restore["evidence"]["unseen"] > 0) == ("passed", True)
    assert " w: " in restore["detail"]
    assert f"in {file} " in restore["detail"]


# --- a source as a file -----------------------------------------------------------------------------------------------


def test_a_source_is_read_like_a_file(packer):
    data = bytes(range(256)) * 300
    with opened(packer.pack({"a.pth": packer.saved({"w": torch.ones(1)})})) as checkpoint:
        (part,) = checkpoint.parts
        whole = as_file(part.source).read()
    assert zipfile.is_zipfile(io.BytesIO(whole))
    file, twin = as_file(MemorySource("x", data)), io.BytesIO(data)
    for one in (file, twin):
        one.seek(-10, io.SEEK_END)
    assert file.read() == twin.read()
    for where, whence in ((5, io.SEEK_SET), (100_000, io.SEEK_SET), (70_000, io.SEEK_SET), (3, io.SEEK_CUR)):
        assert file.seek(where, whence) == twin.seek(where, whence)
        assert file.read(7) == twin.read(7)
        assert file.tell() == twin.tell()

"""The restore check gives the same results for members of an archive as for files."""

from __future__ import annotations

import io
import sys
import zipfile
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.restored import loaded
from ckptmove.proof.restored.loaded import LoadedFiles
from ckptmove.proof.restored.numbers import NumbersTally
from ckptmove.proof.restored.survey import survey
from ckptmove.proof.step.counters import CounterFaults
from ckptmove.proof.tensors.stored import StoredTensors

KINDS = ["zip", "deflated", "tar"]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def tree():
    base = torch.arange(24.0).view(4, 6)
    return {
        "plain": torch.randn(5, 3),
        "transposed": base.t(),
        "view": base[1:, 2:],
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor([float("nan"), -0.0]),
        "complex": torch.ones(3, dtype=torch.complex64),
        "large": torch.randn(400, 200),
        "meta": torch.empty(3, device="meta"),
        "a.b": torch.ones(2),
        "a": {"b": torch.zeros(3)},
    }


@pytest.fixture
def archive(packer):
    """An archive of one checkpoint."""
    return lambda kind, value=None, **options: packer.pack({"w.pth": packer.saved(value or tree(), **options)}, kind)


def restored(path, change=lambda inventory: inventory):
    with open_checkpoint(str(path), Limits(), keep_trees=True) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        inventory = change(checkpoint.inventory)
        numbers = NumbersTally.of(inventory, (), CounterFaults())
        return survey(inventory, stored, LoadedFiles(checkpoint.parts, stored), numbers)


@pytest.fixture
def other_bytes(monkeypatch):
    """Have torch read a member with other bytes than those that are stored."""

    def change(old, new):
        assert len(old) == len(new)

        def as_file(source, original=loaded.as_file):
            data = source.read(0, source.size)
            assert data.count(old) == 1
            return original(MemorySource(source.path, data.replace(old, new)))

        monkeypatch.setattr(loaded, "as_file", as_file)

    return change


def differing(check):
    """The one tensor that torch returns with other values."""
    assert (check.status, dict(check.evidence)["differing"]) == ("failed", 1), check.detail
    return check.detail.split(": ")[1]


# --- found as of a file -----------------------------------------------------------------------------------------------


@EVERY_KIND
def test_every_kind_of_tensor_is_what_torch_load_returns(archive, kind):
    check = restored(archive(kind))
    assert check.status == "passed", check.detail
    assert (dict(check.evidence)["compared"], dict(check.evidence)["differing"]) == (10, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "w.pth.nobody"}, "w.pth.nobody is missing"),
        ({"dtype": "int32"}, "w.pth.plain: dtype torch.float32 in place of torch.int32"),
        ({"shape": (3, 3)}, "w.pth.plain: shape (5, 3) in place of (3, 3)"),
        ({"stride": (1, 3)}, "w.pth.plain: stride (3, 1) in place of (1, 3)"),
    ],
    ids=["missing", "dtype", "shape", "stride"],
)
@EVERY_KIND
def test_what_is_not_as_torch_has_it_fails(archive, kind, changes, said):
    def change(inventory):
        first, *rest = inventory.tensors
        return replace(inventory, tensors=(first._replace(**changes), *rest))

    check = restored(archive(kind), change)
    assert (check.status, check.detail.partition(": ")[2]) == ("failed", said)


@EVERY_KIND
def test_a_view_at_another_place_of_its_storage_fails(archive, kind):
    def change(inventory):
        first, *rest = inventory.tensors
        return replace(inventory, tensors=(first._replace(storage_offset=1), *rest))

    check = restored(archive(kind, {"view": torch.arange(8.0)[:4]}), change)
    assert differing(check) == "w.pth.view"


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@EVERY_KIND
def test_a_storage_of_another_size_fails(packer, kind):
    file = io.BytesIO()
    torch.save({"s": torch.ones(4).untyped_storage()}, file)
    path = packer.pack({"w.pth": file.getvalue()}, kind)

    def change(inventory):
        return replace(inventory, tensors=(inventory.tensors[0]._replace(shape=(8,)),))

    assert restored(path).status == "passed"
    check = restored(path, change)
    assert differing(check) == "w.pth.s"


@EVERY_KIND
def test_one_other_bit_fails(archive, kind, other_bytes):
    value = tree()
    old = value["large"].numpy().tobytes()
    other_bytes(old, old[:-1] + bytes([old[-1] ^ 1]))
    check = restored(archive(kind, value))
    assert differing(check) == "w.pth.large"


@EVERY_KIND
def test_two_paths_that_read_alike_are_told_apart(archive, kind, other_bytes):
    first, second = torch.full((3,), 5.0), torch.full((3,), 6.0)
    value = {"a.b": first, "a": {"b": second}}
    assert restored(archive(kind, value)).status == "passed"
    other_bytes(second.numpy().tobytes(), first.numpy().tobytes())
    check = restored(archive(kind, value))
    assert differing(check) == "w.pth.a.b"


@EVERY_KIND
def test_bytes_beside_a_view_are_of_its_storage(archive, kind, other_bytes):
    whole = torch.arange(50_000.0)
    other_bytes(whole[-2:].numpy().tobytes(), whole[:2].numpy().tobytes())
    assert restored(archive(kind, {"view": whole[:9]})).status == "passed"
    check = restored(archive(kind, {"view": whole[:9], "end": whole[-3:]}))
    assert differing(check) == "w.pth.end"


# --- by digests -------------------------------------------------------------------------------------------------------


def first_load(path, spoil=lambda part: None):
    """The first member as torch loads it, and its records."""
    with open_checkpoint(str(path), Limits(), keep_trees=True) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        spoil(checkpoint.parts[0])
        part = checkpoint.parts[0]
        return LoadedFiles([part], stored).at(part.name), part.inventory.tensors


@pytest.mark.skipif(sys.platform != "linux", reason="other systems need not take the memory back")
@EVERY_KIND
def test_the_memory_of_what_was_digested_is_given_back(archive, kind):
    found, _ = first_load(archive(kind, {"w": torch.ones(100_000), "tied": torch.ones(7)}))
    assert found.tensors["w"][0].count_nonzero() < 3 * 1024  # the pages at its ends are not its own
    assert found.digests.has_taken(found.tensors["w"][0])


@EVERY_KIND
def test_a_storage_that_is_not_as_it_is_stored_keeps_its_values(archive, kind, other_bytes):
    same, other = torch.full((60_000,), 2.0), torch.full((60_000,), 3.0)
    path = archive(kind, {"same": same, "other": other})
    other_bytes(other.numpy().tobytes(), torch.full((60_000,), 4.0).numpy().tobytes())
    found, _ = first_load(path)
    assert [found.digests.has_taken(found.tensors[name][0]) for name in ("same", "other")] == [True, False]
    assert torch.equal(found.tensors["other"][0], torch.full((60_000,), 4.0))


def test_a_storage_in_the_place_of_another_one_is_told(archive, other_bytes):
    first, second = torch.full((60_000,), 2.0), torch.full((60_000,), 3.0)
    path = archive("zip", {"first": first, "second": second})
    other_bytes(second.numpy().tobytes(), first.numpy().tobytes())
    assert differing(restored(path)) == "w.pth.second"


def test_each_storage_is_hashed_once_however_many_views_it_has(archive, monkeypatch):
    calls = []
    original = StoredTensors.read
    monkeypatch.setattr(StoredTensors, "read", lambda *of: calls.append(of[2:]) or original(*of))
    whole = torch.arange(90_000.0)
    tree = {"rows": list(whole.view(300, 300)), "empty": torch.empty(0)}
    check = restored(archive("zip", tree))
    assert (check.status, dict(check.evidence)["compared"]) == ("passed", 301)
    assert [key for key, span in calls if span.nbytes > 1200] == ["0"]


@pytest.mark.parametrize("left", [None, 8], ids=["deflated", "cut"])
def test_what_is_not_stored_plainly_and_whole_has_no_digest(packer, left):
    file = io.BytesIO()
    saved = io.BytesIO(packer.saved({"a": torch.ones(5), "b": torch.ones(6)}))
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(file, "w") as new:
        for item in old.infolist():
            is_first = item.filename.endswith("/data/0")
            how = zipfile.ZIP_DEFLATED if is_first and left is None else zipfile.ZIP_STORED
            new.writestr(item.filename, old.read(item)[: left if is_first else None], how)
    path = packer.pack({"w.pth": file.getvalue()})
    with open_checkpoint(str(path), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        assert list(stored.digests(checkpoint.parts[0])) == ["w.pth/1"]
    assert restored(path).status == "failed"


def big_endian(part):
    part.byteorder = "big" if sys.byteorder == "little" else "little"


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8),
    ],
    ids=["coo", "csr", "per-channel"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*[Qq]uantiz", "ignore:TypedStorage is deprecated")
def test_what_torch_looks_at_while_it_loads_is_held(packer, made):
    file = io.BytesIO()
    torch.save({"w": made()}, file)
    path = packer.pack({"w.pth": file.getvalue()})
    assert first_load(path)[0].digests is None
    assert restored(path).status == "passed"


def test_what_is_no_archive_of_torch_or_is_to_be_swapped_is_held(packer, archive):
    old = packer.saved(tree(), _use_new_zipfile_serialization=False)
    table = safetensors.torch.save({"w": torch.ones(3)})
    for members in ({"w.pth": old}, {"w.safetensors": table}):
        path = packer.pack(members)
        assert first_load(path)[0].digests is None
        assert restored(path).status == "passed"
    assert first_load(archive("zip"), big_endian)[0].digests is None
    assert first_load(archive("zip"))[0].digests is not None


def test_what_fails_without_values_is_loaded_once_more(archive, monkeypatch):
    load, seen = torch.load, []

    def fail(file, **options):
        is_first = not seen
        seen.append((file.tell(), options["map_location"] == "cpu"))
        if is_first:
            file.read(5)
            raise RuntimeError("no values")
        return load(file, **options)

    monkeypatch.setattr(torch, "load", fail)
    assert restored(archive("zip")).status == "passed"
    assert seen == [(0, False), (0, True)]


def test_what_cannot_be_loaded_at_all_is_said_as_of_a_file(archive, monkeypatch):
    def fail(file, **options):
        raise RuntimeError("broken")

    monkeypatch.setattr(torch, "load", fail)
    check = restored(archive("zip"))
    assert check.status == "failed"
    assert ": w.pth: RuntimeError: " in check.detail

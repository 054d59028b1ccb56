"""Comparisons of distributed checkpoints, whose tensors can be split in different ways; the oracle is torch's load."""

from __future__ import annotations

import io
import pickle
import re
import tracemalloc
import zipfile
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

import ckptmove
from ckptmove.comparison.differences import Change, Gap, Uncompared
from ckptmove.errors import LimitExceeded, MissingShard
from ckptmove.limits import Limits

WHOLE = torch.arange(24.0).reshape(4, 6)
CHUNKINGS = {
    "whole": [(0, (0, 0), (4, 6))],
    "rows": [(0, (0, 0), (1, 6)), (1, (1, 0), (3, 6))],
    "columns": [(0, (0, 0), (4, 2)), (1, (0, 2), (4, 1)), (2, (0, 3), (4, 3))],
    "grid": [(1, (0, 3), (2, 3)), (0, (0, 0), (2, 3)), (3, (2, 4), (2, 2)), (2, (2, 0), (2, 4))],
    "some empty": [(0, (0, 0), (0, 6)), (1, (0, 0), (4, 6)), (2, (4, 0), (0, 6))],
}


def diff(one, other, **options):
    return ckptmove.diff(str(one), str(other), **options)


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


# --- tensors in pieces -----------------------------------------------------------------------------------------------


@pytest.mark.unmeasured
@pytest.mark.parametrize(("ours", "theirs"), list(product(CHUNKINGS, repeat=2)))
def test_two_chunkings_of_one_tensor(distributed, tmp_path, ours, theirs):
    one = distributed.save_ranks(tmp_path / "one", {"w": (WHOLE, CHUNKINGS[ours])})
    other = distributed.save_ranks(tmp_path / "other", {"w": (WHOLE, CHUNKINGS[theirs])})
    assert diff(one, other).same
    assert diff(one, other).notes == ()
    changed = WHOLE.clone()
    changed[2, 3] += 0.5
    distributed.save_ranks(other, {"w": (changed, CHUNKINGS[theirs])})
    assert diff(one, other).changed == (Change("w", "value", "[4, 6]", "[4, 6]", Gap(0.5, 0.5 / 15.5)),)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.0),
        torch.ones(0, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.arange(9.0).reshape(3, 3)[:, 1],
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}",
)
def test_what_torch_saves_is_what_torch_saves_into_one_file(distributed, tmp_path, value):
    folder = distributed.save(tmp_path / "run", {"w": value})
    torch.save({"w": value}, tmp_path / "w.pt")
    result = diff(folder, tmp_path / "w.pt")
    assert [change for change in result.changed if not change.source.startswith("stride")] == []
    assert result.uncompared == ()


def test_elements_of_a_piece_that_do_not_lie_in_order(distributed, tmp_path):
    whole = torch.arange(12.0).reshape(4, 3)
    piece = saved(whole.t().contiguous().t())
    folder = distributed.save_ranks(tmp_path / "run", {"w": (whole, [(0, (0, 0), (4, 3))])})
    (folder / "__0_0.distcp").write_bytes(piece)

    def edit(metadata):
        place = metadata.storage_data[MetadataIndex("w", (0, 0))]
        metadata.storage_data[MetadataIndex("w", (0, 0))] = replace(place, length=len(piece))

    distributed.change(folder, edit)
    other = distributed.save_ranks(tmp_path / "other", {"w": (whole, CHUNKING_OF_ROWS)})
    assert diff(folder, other).same


CHUNKING_OF_ROWS = [(0, (0, 0), (1, 3)), (1, (1, 0), (3, 3))]


def test_ranks_that_all_wrote_a_scalar(distributed, tmp_path):
    tree = {"loss": (torch.tensor(1.0), [(0, (), ()), (1, (), ())])}
    one = distributed.save_ranks(tmp_path / "one", tree)
    other = distributed.save_ranks(tmp_path / "other", {"loss": (torch.tensor(2.0), [(0, (), ())])})
    assert diff(one, one).same
    assert [change.gap for change in diff(one, other).changed] == [Gap(1.0, 0.5)]


def test_memory_does_not_hang_on_the_size_of_tensors(distributed, tmp_path):
    whole = torch.zeros(1000, 4000)
    chunks = {
        "rows": [(rank, (rank * 250, 0), (250, 4000)) for rank in range(4)],
        "columns": [(rank, (0, rank * 1000), (1000, 1000)) for rank in range(4)],
    }
    one, other = (distributed.save_ranks(tmp_path / name, {"w": (whole, own)}) for name, own in chunks.items())
    diff(one, other)
    tracemalloc.start()
    try:
        assert diff(one, other).same
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000  # a quarter of the tensor


# --- objects other than tensors --------------------------------------------------------------------------------------


def test_objects_are_told_by_what_is_in_them(distributed, trained, tmp_path):
    tree = distributed.trained_tree()
    tree["step"] = 4
    tree["optimizer"]["param_groups"][0]["lr"] = 0.2
    tree["more"] = "x"
    other = distributed.save(tmp_path / "other", tree)
    changes = {(change.name, change.source, change.target) for change in diff(trained, other).changed}
    assert changes == {
        ("step", "3", "4"),
        ("more", "absent", "'x'"),
        ("optimizer.param_groups.0.lr", "0.001", "0.2"),
    }


def test_objects_that_wrote_their_own_bytes_or_hold_tensors(distributed, tmp_path):
    def save(name, notes, nested, kind):
        objects = {"notes": (0, notes), "nested": (0, saved(nested)), "kind": (0, kind)}
        return distributed.save_ranks(tmp_path / name, {"w": (WHOLE, CHUNKINGS["rows"])}, objects)

    one = save("one", b"own bytes", {"t": torch.ones(2)}, saved(1))
    other = save("other", b"own bytes!", {"t": torch.zeros(2)}, saved({"t": torch.ones(1)}))
    found = [(change.name, change.source[:7], change.target[:7]) for change in diff(one, other).changed]
    assert sorted(found) == [
        ("kind", "1", "a dict"),
        ("nested.t", "[2]", "[2]"),
        ("notes", "sha256 ", "sha256 "),
    ]
    assert diff(one, one).same
    without = distributed.save_ranks(tmp_path / "without", {"w": (WHOLE, CHUNKINGS["rows"])}, {"kind": (0, saved(1))})
    result = diff(one, without)
    assert [(change.name, change.what, change.target) for change in result.changed] == [("notes", "object", "absent")]
    assert result.removed == ("nested.t",)


def test_long_strings_in_a_piece_are_compared_by_its_bytes(distributed, tmp_path):
    def save(name, text):
        return distributed.save_ranks(tmp_path / name, {}, {"long": (0, pickle.dumps({"a": text * 500}))})

    one, other = save("one", b"x"), save("other", b"y")
    assert diff(one, one).same
    assert [change.name for change in diff(one, other).changed] == ["long"]


def test_against_a_file_all_that_both_hold_is_compared(distributed, trained, tmp_path):
    torch.save(distributed.trained_tree(), tmp_path / "run.pt")
    result = diff(trained, tmp_path / "run.pt")
    assert (result.changed, result.added, result.removed, result.uncompared) == ((), (), (), ())
    (nowhere,) = result.notes
    assert f" {result.tensors} tensors" in nowhere
    (trained / "notes.txt").write_text("by hand")
    assert diff(tmp_path / "run.pt", trained).notes[0].startswith(f"notes.txt of {trained}: not compared")


def test_a_folder_in_a_trainers_directory(distributed, build):
    folders = []
    for name, step in (("one", 1.0), ("other", 2.0)):
        folder = build.accelerate(name)
        (folder / "pytorch_model.bin").unlink()
        weights = {"model": {"w": torch.full((4,), step)}, "step": step}
        distributed.save(folder / "pytorch_model_fsdp_0", weights)
        folders.append(folder)
    value, step = diff(*folders).changed
    assert (value.name, value.gap) == ("pytorch_model_fsdp_0.model.w", Gap(1.0, 0.5))
    assert (step.name, step.source, step.target) == ("pytorch_model_fsdp_0.step", "1.0", "2.0")
    (folders[1] / "pytorch_model_fsdp_0" / "notes.txt").write_text("by hand")
    assert diff(*folders).changed[-1].name == "pytorch_model_fsdp_0/notes.txt"


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_file_of_pieces_that_is_missing(halves, distributed, tmp_path):
    other = distributed.save_ranks(tmp_path / "other", {"w": (WHOLE, CHUNKINGS["rows"])})
    (halves / "__1_0.distcp").unlink()
    with pytest.raises(MissingShard):
        diff(other, halves)


def test_chunks_and_objects_that_are_not_all_there(distributed, tmp_path):
    def save(name):
        return distributed.save_ranks(
            tmp_path / name,
            {"v": (WHOLE, CHUNKINGS["rows"]), "w": (WHOLE, CHUNKINGS["rows"])},
            {"kept": (0, saved(1)), "cut": (5, saved(2)), "lost": (0, saved(3))},
        )

    one, other = save("one"), save("other")
    (other / "__5_0.distcp").write_bytes(saved(2)[:-1])

    def edit(metadata):
        del metadata.storage_data[MetadataIndex("w", (1, 0))]
        del metadata.storage_data[MetadataIndex("lost")]

    distributed.change(other, edit)
    result = diff(one, other)
    assert result.changed == ()
    assert [one.name for one in result.uncompared] == ["w", "cut", "lost"]
    assert all(one.reason.endswith(f" {other}") for one in result.uncompared)
    assert not result.same


def test_chunks_that_leave_a_hole(distributed, tmp_path):
    one = distributed.save_ranks(tmp_path / "one", {"w": (torch.ones(4, 3), [(0, (0, 0), (4, 3))])})
    holes = [(0, (0, 0), (1, 3)), (1, (2, 0), (2, 3))]
    other = distributed.save_ranks(tmp_path / "other", {"w": (torch.ones(4, 3), holes)})
    assert diff(one, other).uncompared == (Uncompared("w", f"missing or cut off in {other}"),)


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (saved({"no": "tensor"}), "contains no tensor, not float32"),
        (saved(torch.ones(3, 6, dtype=torch.float64)), "contains float64"),
        (saved(torch.ones(6, 3)), "contains float32 \\[6, 3\\]"),
        (b"\0" * 600, "is nothing but zero bytes"),
        (saved(torch.ones(3, 6, device="meta")), "is compressed, incomplete, or has overlapping elements"),
        (saved(torch.ones(1, 1).expand(3, 6)), "is compressed, incomplete, or has overlapping elements"),
        (None, "has too few bytes for its tensor"),
    ],
)
def test_a_piece_that_is_not_the_chunk(distributed, tmp_path, piece, said):
    if piece is None:
        stream = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(saved(torch.ones(3, 6)))) as source, zipfile.ZipFile(stream, "w") as target:
            for name in source.namelist():
                target.writestr(name, source.read(name)[:60] if name.endswith("/data/0") else source.read(name))
        piece = stream.getvalue()
    one = distributed.save_ranks(tmp_path / "one", {"w": (WHOLE, CHUNKINGS["rows"])})
    other = distributed.save_ranks(tmp_path / "other", {"w": (WHOLE, CHUNKINGS["rows"])})
    (other / "__1_0.distcp").write_bytes(piece)

    def edit(metadata):
        place = metadata.storage_data[MetadataIndex("w", (1, 0))]
        metadata.storage_data[MetadataIndex("w", (1, 0))] = replace(place, length=len(piece))

    distributed.change(other, edit)
    (uncompared,) = diff(one, other).uncompared
    assert uncompared.name == "w"
    assert re.match(rf"{other}/__1_0.distcp: .*'w' at byte 0 {said}", uncompared.reason)


def test_an_object_that_asks_for_too_much(distributed, tmp_path):
    deep = [1, 2]
    for _ in range(20):
        deep = [1, deep]
    folder = distributed.save_ranks(tmp_path / "run", {}, {"deep": (0, saved(deep))})
    with pytest.raises(LimitExceeded):
        diff(folder, folder, limits=Limits(depth=16))


def test_a_link_to_a_file_of_pieces(halves, distributed, tmp_path):
    (halves / "real").mkdir()
    (halves / "__1_0.distcp").rename(halves / "real" / "piece.distcp.bin")
    (halves / "__1_0.distcp").symlink_to("real/piece.distcp.bin")
    other = distributed.save_ranks(tmp_path / "other", {"w": (torch.arange(12.0).reshape(4, 3), [(0, (0, 0), (4, 3))])})
    assert {change.what for change in diff(halves, other).changed} <= {"object"}
    assert diff(halves, halves).uncompared == ()


def test_an_object_that_asks_for_too_much_is_told_of_its_own_side(distributed, tmp_path):
    many, few = (
        distributed.save_ranks(
            tmp_path / name, {"w": (WHOLE, CHUNKINGS["rows"])}, {"o": (0, saved(list(range(count))))}
        )
        for name, count in (("many", 9000), ("few", 3))
    )
    for pair in ((many, few), (few, many)):
        with pytest.raises(LimitExceeded) as caught:
            diff(*pair, limits=Limits(operations=5000))
        assert caught.value.path == str(many / "__0_0.distcp")


def test_a_name_that_reads_as_that_of_a_tensor_in_another_file(distributed, tmp_path):
    """``x.w`` in the folder ``m``, and ``w`` in the file ``m.x``."""
    for name, step in (("one", 1.0), ("other", 2.0)):
        distributed.save(tmp_path / name / "m", {"x.w": torch.zeros(3)})
        torch.save({"w": torch.full((3,), step)}, tmp_path / name / "m.x")
    assert diff(tmp_path / "one", tmp_path / "one").same
    (change,) = diff(tmp_path / "one", tmp_path / "other").changed
    assert (change.name, change.what, change.gap) == ("m.x.w", "value", Gap(1.0, 0.5))

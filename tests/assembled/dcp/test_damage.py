"""Faults of a distributed checkpoint, found from its metadata alone or by reading every piece."""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

import ckptmove
from ckptmove.errors import DamagedArchive, MissingShard

HALVES = {"w": (torch.arange(12.0).reshape(4, 3), [(0, (0, 0), (2, 3)), (1, (2, 0), (2, 3))])}


def read(folder):
    return ckptmove.inspect(folder).inventory


def facts(folder, **options):
    """All but files that are named no more once a test has changed the metadata."""
    found = ckptmove.inspect(folder, **options).inventory.facts
    return [(one.kind, one.record, one.nbytes) for one in found if one.kind != "unnamed-file"]


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named(halves):
    (halves / "__1_0.distcp").unlink()
    with pytest.raises(MissingShard) as caught:
        read(halves)
    assert caught.value.name == "__1_0.distcp"
    (halves / "__0_0.distcp").unlink()
    with pytest.raises(MissingShard, match=r"'__0_0\.distcp', and 1 more") as caught:
        read(halves)
    assert caught.value.path == str(halves / ".metadata")


def test_a_file_that_is_cut_off_has_lost_its_last_pieces(distributed, tmp_path):
    folder = distributed.save_ranks(tmp_path / "run", HALVES | {"b": (torch.ones(3), [(1, (0,), (3,))])})
    shard = folder / "__1_0.distcp"
    info = {index.fqn: one for index, one in distributed.metadata_of(folder).storage_data.items()}["b"]
    shard.write_bytes(shard.read_bytes()[: info.offset - 10])
    found = ckptmove.inspect(folder, check=True)
    assert [(one.kind, one.record, one.nbytes) for one in found.inventory.facts] == [
        ("past-end", "__1_0.distcp/w", 10),
        ("past-end", "__1_0.distcp/b", info.length),
    ]
    (finding,) = found.findings
    assert (finding.code, finding.where) == ("F802", ("__1_0.distcp/w", "__1_0.distcp/b"))


def test_a_file_of_a_folder_is_named_with_it(tmp_path, halves):
    (tmp_path / "d").mkdir()
    halves = halves.rename(tmp_path / "d" / "halves")
    (halves / "__1_0.distcp").write_bytes(b"")
    (finding,) = ckptmove.inspect(tmp_path / "d").findings
    assert finding.where == ("halves/__1_0.distcp/w",)


def test_a_piece_that_is_too_short_for_its_chunk(distributed, halves):
    def edit(metadata):
        metadata.storage_data[MetadataIndex("w", (0, 0))].length = 20

    assert facts(distributed.change(halves, edit)) == [("short-storage", "__0_0.distcp/w", 4)]


def test_a_chunk_or_an_object_that_was_never_written(distributed, tmp_path):
    folder = distributed.save_ranks(tmp_path / "run", HALVES, {"notes": (0, b"x")})

    def edit(metadata):
        del metadata.storage_data[MetadataIndex("w", (2, 0))]
        metadata.storage_data[MetadataIndex("stranger")] = metadata.storage_data.pop(MetadataIndex("notes"))

    assert facts(distributed.change(folder, edit)) == [("missing-storage", "w", 24), ("missing-storage", "notes", 0)]
    for dry_run in (True, False):
        with pytest.raises(DamagedArchive, match="'w'"):
            ckptmove.convert(folder, to="cpu", output=tmp_path / "out", dry_run=dry_run)


def test_chunks_that_leave_a_hole(distributed, tmp_path):
    tree = {"w": (torch.ones(4, 3), [(0, (0, 0), (1, 3)), (1, (2, 0), (2, 3))])}
    assert facts(distributed.save_ranks(tmp_path / "run", tree)) == [("short-storage", "w", 12)]


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_two_pieces_never_share_bytes(distributed, tmp_path, shift):
    whole = torch.arange(6.0)
    tree = {name: (whole, [(0, (0,), (6,))]) for name in ("u", "v", "w")}
    folder = distributed.save_ranks(tmp_path / "run", tree)
    assert facts(folder, check=True) == []

    def edit(metadata):
        place = metadata.storage_data[MetadataIndex("v", (0,))]
        metadata.storage_data[MetadataIndex("w", (0,))] = replace(place, offset=place.offset + shift)

    with pytest.raises(DamagedArchive, match=r"'\w' .*'\w' .*'__0_0\.distcp'") as caught:
        read(distributed.change(folder, edit))
    assert caught.value.path == str(folder / ".metadata")


def test_an_empty_chunk_needs_no_piece(distributed, tmp_path):
    tree = {"w": (torch.ones(2), [(0, (0,), (0,)), (1, (0,), (2,)), (2, (2,), (0,))])}
    folder = distributed.save_ranks(tmp_path / "run", tree)

    def edit(metadata):
        del metadata.storage_data[MetadataIndex("w", (2,))]

    assert facts(distributed.change(folder, edit), check=True) == []


def test_each_rank_may_have_written_a_scalar(distributed, tmp_path):
    tree = {"loss": (torch.tensor(1.0), [(0, (), ()), (1, (), ())])}
    assert facts(distributed.save_ranks(tmp_path / "run", tree)) == []


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([(0, (0, 0), (3, 3)), (1, (2, 0), (2, 3))], "chunks overlap in tensor 'w'"),
        ([(0, (0, 0), (5, 3))], "a chunk reaches past the end of tensor 'w'"),
        ([(0, (0,), (4,))], "a chunk has another number of axes than tensor 'w'"),
    ],
)
def test_chunks_that_cannot_be_parts_of_the_tensor(distributed, tmp_path, chunks, reason):
    with pytest.raises(DamagedArchive, match=reason):
        read(distributed.save_ranks(tmp_path / "run", {"w": (torch.ones(4, 3), chunks)}))


def test_a_file_that_nothing_refers_to_is_told(tmp_path, halves):
    (halves / "__7_0.distcp").write_bytes(b"what more ranks have left")
    (halves / "__8_0.distcp").write_bytes(b"")
    (finding,) = ckptmove.inspect(halves).findings
    assert (finding.code, finding.where, finding.fix) == ("F804", ("__7_0.distcp",), "")
    assert "25 bytes" in finding.message
    (tmp_path / "d").mkdir()
    halves.rename(tmp_path / "d" / "halves")
    (finding,) = ckptmove.inspect(tmp_path / "d").findings
    assert finding.where == ("halves/__7_0.distcp",)


# --- --check ----------------------------------------------------------------------------------------------------------


def test_a_bit_that_has_flipped_is_found_and_named(halves):
    shard = halves / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[data.index(torch.tensor(6.0).numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    assert facts(halves) == []
    (fact,) = facts(halves, check=True)
    assert fact[:2] == ("crc-mismatch", "__1_0.distcp/w")
    assert [finding.code for finding in ckptmove.inspect(halves, check=True).findings] == ["F801"]


def test_an_object_may_be_of_any_bytes_and_a_tensor_may_not(distributed, tmp_path):
    folder = distributed.save_ranks(
        tmp_path / "run", HALVES, {"raw": (0, b"hello, world"), "saved": (1, pickle.dumps({"a": 1}))}
    )
    assert facts(folder, check=True) == []

    def edit(metadata):
        metadata.storage_data[MetadataIndex("w", (0, 0))] = metadata.storage_data.pop(MetadataIndex("raw"))

    distributed.change(folder, edit)
    assert ("damaged-piece", "__0_0.distcp/w", 12) in facts(folder, check=True)
    (uncompared,) = ckptmove.diff(str(folder), str(folder)).uncompared[:1]
    assert re.search(r"^\S+__0_0\.distcp: .*'w' at byte \d+ is a text file", uncompared.reason)


@pytest.mark.parametrize("held", [torch.ones(2, 2), {}, torch.ones(2, 3).half()], ids=["shape", "nothing", "dtype"])
def test_a_piece_is_held_against_the_metadata(distributed, halves, held):
    buffer = io.BytesIO()
    torch.save(held, buffer)
    (halves / "__0_0.distcp").write_bytes(buffer.getvalue())

    def edit(metadata):
        metadata.storage_data[MetadataIndex("w", (0, 0))].length = len(buffer.getvalue())

    distributed.change(halves, edit)
    assert facts(halves) == []
    assert facts(halves, check=True) == [("damaged-piece", "__0_0.distcp/w", len(buffer.getvalue()))]
    (finding,) = ckptmove.inspect(halves, check=True).findings
    assert f"(1x, {len(buffer.getvalue()):,} bytes)" in finding.message
    assert "whole directory" in finding.fix
    assert "ckptmove inspect --check " in finding.fix
    assert (finding.code, finding.where) == ("F802", ("__0_0.distcp/w",))


def test_a_piece_of_no_chunk_is_only_checked(distributed, tmp_path):
    folder = distributed.save_ranks(tmp_path / "run", HALVES | {"v": (torch.ones(3), [(0, (0,), (3,))])})

    def edit(metadata):
        del metadata.state_dict_metadata["v"]

    assert facts(distributed.change(folder, edit), check=True) == []


def test_progress_is_told_of_all_bytes(trained):
    told = []
    ckptmove.inspect(trained, check=True, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == (trained / "__0_0.distcp").stat().st_size
    assert {total for _, total in told} == {read(trained).size_bytes}

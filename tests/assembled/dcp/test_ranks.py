"""Files of ranks that saved without collectives, and of an interrupted save."""

from __future__ import annotations

import io
import os
import shutil

import pytest
import torch
from distributed_checkpoints import HALVES, Distributed

import ckptmove
from ckptmove.errors import DamagedArchive
from ckptmove.model import Severity


def codes(folder):
    return {finding.code: finding.severity for finding in ckptmove.inspect(folder).findings}


def test_shares_of_all_ranks_are_one_checkpoint(halves, tmp_path):
    Distributed.share_out(halves)
    found = ckptmove.inspect(halves, check=True)
    assert [(tensor.name, tensor.shape) for tensor in found.inventory.tensors] == [("w", (4, 3))]
    assert (found.inventory.container, found.findings) == ("dcp", ())
    assert [file.path for file in found.inventory.files] == ["__0_0.distcp", "__1_0.distcp"]
    output = ckptmove.convert(halves, output=tmp_path / "w.pth").output
    assert torch.equal(torch.load(output)["w"], HALVES["w"][0])


def test_a_lost_share_is_reported(halves):
    Distributed.share_out(halves)
    (halves / "__1.metadata").unlink()
    assert codes(halves) == {"F802": Severity.ERROR}


def test_what_several_ranks_saved_is_taken_from_the_first(tmp_path):
    whole = torch.arange(4.0)
    folder = Distributed.save_ranks(tmp_path / "run", {"w": (whole, [(0, (0,), (2,)), (1, (2,), (2,))])})
    Distributed.share_out(folder)
    for rank in (0, 1):
        note = io.BytesIO()
        torch.save(f"of rank {rank}", note)
        step = {"step": (torch.tensor(rank + 3.0), [(rank, (), ())])}
        other = Distributed.save_ranks(tmp_path / f"{rank}", step, {"note": (rank, note.getvalue())})
        shutil.copy(other / f"__{rank}_0.distcp", folder / f"__{rank}_1.distcp")
        own = Distributed.metadata_of(other)
        (folder / f"__{rank}.metadata").rename(folder / ".metadata")

        def add(metadata, own=own, rank=rank):
            metadata.state_dict_metadata |= own.state_dict_metadata
            for index, info in own.storage_data.items():
                info.relative_path = f"__{rank}_1.distcp"
                metadata.storage_data[index] = info

        Distributed.change(folder, add)
        (folder / ".metadata").rename(folder / f"__{rank}.metadata")
    output = ckptmove.convert(folder, output=tmp_path / "out.pth").output
    loaded = torch.load(output)
    assert torch.equal(loaded["w"], whole)
    assert (loaded["step"], loaded["note"]) == (3, "of rank 0")


@pytest.mark.parametrize(
    "other",
    [
        {"w": (torch.zeros(4, 3, dtype=torch.float64), [(1, (2, 0), (2, 3))])},
        {"w": (torch.zeros(4, 3), [(1, (1, 0), (2, 3))])},
    ],
    ids=["another dtype", "an overlap"],
)
def test_shares_that_do_not_fit_together_are_refused(halves, tmp_path, other):
    Distributed.share_out(halves)
    Distributed.save_ranks(tmp_path / "other", other)
    shutil.copy(tmp_path / "other" / ".metadata", halves / "__1.metadata")
    shutil.copy(tmp_path / "other" / "__1_0.distcp", halves / "__1_0.distcp")
    with pytest.raises(DamagedArchive):
        ckptmove.inspect(halves)


SECOND = 1_000_000_000


def written(path, seconds):
    os.utime(path, ns=(0, seconds * SECOND))


@pytest.fixture
def run(tmp_path):
    """A run of two ranks: each has a parameter, its moment and its step count, and a save takes a second."""

    def make(step_of_last):
        tensors, steps = {}, {"a": 3.0, "b": step_of_last}
        for rank, name in enumerate("ab"):
            box = [(rank, (0,), (2,))]
            tensors[f"model.{name}"] = (torch.ones(2), box)
            tensors[f"optim.state.{name}.exp_avg"] = (torch.ones(2), box)
            tensors[f"optim.state.{name}.exp_avg_sq"] = (torch.ones(2), box)
            tensors[f"optim.state.{name}.step"] = (torch.tensor(steps[name]), [(rank, (), ())])
        tensors["optim.state.c.exp_avg"] = (torch.ones(2), [(0, (0,), (2,))])  # frozen before its first step
        groups = io.BytesIO()
        torch.save([{"lr": 0.1, "params": ["a", "b"]}], groups)
        inside = io.BytesIO()
        torch.save({"step": torch.tensor(3.0)}, inside)
        objects = {"optim.param_groups": (0, groups.getvalue()), "optim.state.d": (0, inside.getvalue())}
        folder = Distributed.save_ranks(tmp_path / "run", tensors, objects)

        def nest(metadata):
            metadata.planner_data = {name: tuple(name.split(".")) for name in (*tensors, *objects)}

        Distributed.change(folder, nest)
        for seconds, name in enumerate(("__0_0.distcp", "__1_0.distcp", ".metadata")):
            written(folder / name, seconds)
        return folder

    return make


def test_a_complete_save_is_not_reported(run):
    assert "F806" not in codes(run(3.0))


def test_a_file_of_a_later_save_is_reported(run):
    folder = run(3.0)
    written(folder / "__1_0.distcp", 60)
    assert codes(folder)["F806"] is Severity.WARNING


def test_other_step_counts_in_the_newer_files_are_an_error(run):
    folder = run(53.0)
    assert codes(folder).keys().isdisjoint({"F806", "F807"})
    written(folder / "__1_0.distcp", 60)
    found = ckptmove.inspect(folder, check=True).findings
    (finding,) = [one for one in found if one.code in {"F806", "F807"}]
    assert (finding.code, finding.where) == ("F807", ("__1_0.distcp",))
    assert not ckptmove.verify(folder, to="cpu").passed


def test_a_copy_that_sets_new_times_is_not_reported(run):
    folder = run(3.0)
    for seconds, name in enumerate((".metadata", "__1_0.distcp", "__0_0.distcp")):
        written(folder / name, 100 + seconds)
    assert "F806" not in codes(folder)


def test_all_files_after_the_first_newer_one_are_newer(run):
    folder = run(3.0)
    written(folder / "__1_0.distcp", 60)
    written(folder / "__0_0.distcp", 61)
    (finding,) = [one for one in ckptmove.inspect(folder).findings if one.code == "F806"]
    assert (finding.severity, len(finding.where)) == (Severity.WARNING, 2)


def test_a_link_to_the_metadata_has_no_time(run):
    folder = run(3.0)
    (folder / ".hidden").mkdir()
    (folder / ".metadata").rename(folder / ".hidden" / "table")
    (folder / ".metadata").symlink_to(".hidden/table")
    written(folder / "__1_0.distcp", 60)
    assert "F806" not in codes(folder)

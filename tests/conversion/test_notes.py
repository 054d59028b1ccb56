"""Notes of a conversion about things that it did not change."""

from __future__ import annotations

import argparse
import math
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import ckptmove
from ckptmove.conversion.notes import source_warnings
from ckptmove.errors import UnknownDevice
from ckptmove.model import ArchiveFact

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"


def notes(file: str, **options: object) -> tuple[str, ...]:
    return ckptmove.convert(str(SAMPLES / file), dry_run=True, **options).notes


def unmatched(file: str, **options: object) -> list[str]:
    return list(map(str, ckptmove.convert(str(SAMPLES / file), dry_run=True, **options).unmatched))


def test_options_that_meet_something_are_not_mentioned() -> None:
    for file, options in (
        ("adamw-cuda3.pth", {"map_location": {"cuda:*": "cpu"}, "keep": ["model.*"]}),
        ("capturable-adam-cuda0.pt", {"to": "cpu", "keep": ["optimizer.param_groups.0.capturable"]}),
    ):
        assert notes(file, **options) == ()
        assert unmatched(file, **options) == []
    # No device is stored there: the note says this, and does not mention the map.
    assert unmatched("weights.safetensors", map_location={"cuda:7": "cpu"}) == []


def test_options_that_meet_nothing_are() -> None:
    [kept] = unmatched("adamw-cuda3.pth", to="cpu", keep=["model"])
    assert kept == "--keep model matches no whole name; the file has model.*, optimizer.*"
    [mapped] = unmatched("adamw-cuda3.pth", map_location={"cuda:7": "cpu"})
    assert mapped == "--map cuda:7=... matches no device; the file has cpu, cuda:3"


@pytest.mark.parametrize(
    ("glob", "near"),
    [
        ("model.0.wieght", "model.0.weight, model.0.bias"),
        ("modle.0.weight", "model.*, optimizer.*"),
        ("model.1.weight", "model.0.*, model.2.*"),
        ("*.wieght", "model.*, optimizer.*"),
        ("optimizer.param_groups.0.fuse", None),
    ],
)
def test_names_near_a_glob_that_matches_none_are(glob: str, near: str | None) -> None:
    [kept] = unmatched("adamw-cuda3.pth", to="cpu", keep=[glob])
    assert kept.startswith(f"--keep {glob} matches no whole name; the file has ")
    assert near is None or kept.endswith(f" has {near}")


def test_many_names_are_cut_short_and_none_are_none(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({f"w{number}": torch.ones(1) for number in range(9)}, tmp_path / "many.pt")
    [kept] = ckptmove.convert(tmp_path / "many.pt", to="cuda", keep=["x"], dry_run=True).unmatched
    assert str(kept).endswith(" has w0, w1, w2, w3, w4, w5 and 3 more")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    [kept] = ckptmove.convert(tmp_path / "none.pt", to="cuda", keep=["x"], dry_run=True).unmatched
    assert str(kept).endswith("; the file has no tensors")


def test_devices_that_stay_named_in_configs_are() -> None:
    [left] = notes("nanogpt-compiled-fused.pt", to="cpu")
    assert left == "configs still name another device: config.device = cuda (rewrite_strings=True moves strings)"
    assert notes("nanogpt-compiled-fused.pt", to="cpu", rewrite_strings=True) == ()


@pytest.mark.parametrize(
    ("named", "to", "is_told"),
    [
        ("cuda:0", "cuda:3", True),
        ("cuda:3", "cuda:3", False),
        ("cuda", "cuda:3", False),
        ("cuda:0", "cpu", True),
        ("cpu", "cuda:3", True),
        ("cpu", "cpu", False),
    ],
)
@pytest.mark.parametrize("kind", ["dict", "namespace"])
def test_a_device_named_where_the_model_does_not_go_is_told(tmp_path, named, to, is_told, kind) -> None:
    torch = pytest.importorskip("torch")
    config = {"device": named} if kind == "dict" else argparse.Namespace(device=named)
    torch.save({"model": {"w": torch.ones(2)}, "args": config}, tmp_path / "a.pt")
    told = ckptmove.convert(tmp_path / "a.pt", to=to, output=str(tmp_path / "b.pt")).notes
    hint = "(rewrite_strings=True moves strings)"
    refused = (
        "torch.load(weights_only=True) still refuses it (S701): plain=True replaces its objects by plain values",
    )
    assert tuple(note.replace(str(tmp_path / "a.pt"), "PATH") for note in told) == (
        ((f"configs still name another device: args.device = {named} {hint}",) if is_told else ())
        + (refused if kind == "namespace" else ())
    )
    warned = {finding.code for finding in ckptmove.inspect(tmp_path / "b.pt").findings}
    assert "D104" not in warned or is_told
    assert ckptmove.convert(tmp_path / "a.pt", to=to, keep=["args.device"], dry_run=True).notes == told[is_told:]


@pytest.mark.parametrize(("ids", "is_told"), [([3], True), ([0, 3], False), ([1], False), (3, False)])
def test_device_ids_that_name_where_the_model_was_are_told(tmp_path, ids, is_told) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"model": {"a.weight": torch.ones(2)}, "gpus": ids}, tmp_path / "a.pt")
    ckptmove.convert(tmp_path / "a.pt", to="cuda:3", output=str(tmp_path / "b.pt"))
    told = ckptmove.convert(tmp_path / "b.pt", to="cuda:0", output=str(tmp_path / "c.pt")).notes
    assert told == (("configs still name another device: gpus = [3]",) if is_told else ())


def test_the_target_is_not_left_behind_where_the_model_stores_no_device(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path / "run"
    folder.mkdir()
    safetensors.save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    torch.save({"device": "cuda:0", "state": torch.ones(2)}, folder / "training_args.bin")
    assert ckptmove.convert(folder, to="cuda:0", dry_run=True).notes == ()
    [told] = ckptmove.convert(folder, to="cuda:1", dry_run=True).notes
    assert told.startswith("configs still name another device: training_args.bin.device = cuda:0 (")


def test_device_objects_that_stay_are_not_moved_by_rewriting_strings(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"model": {"w": torch.ones(2)}, "where": torch.device("cuda:5")}, tmp_path / "a.pt")
    told = ckptmove.convert(tmp_path / "a.pt", map_location={"cpu": "cuda:1"}, dry_run=True).notes
    assert told == ("configs still name another device: where = cuda:5",)


class _Attack:
    def __reduce__(self):
        return os.system, ("true",)


def test_what_a_copy_cannot_mend_is_told(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2), "x": _Attack()}, tmp_path / "evil.pt")
    [told] = ckptmove.convert(tmp_path / "evil.pt", to="mps").warnings
    assert f"{os.system.__module__}.system" in told
    assert "(S702)" in told
    assert told.endswith("do not load it")
    assert "S702" in {finding.code for finding in ckptmove.inspect(tmp_path / "evil.mps.pt").findings}

    torch.save({"a": torch.ones(1000), "b": torch.ones(5), "c": torch.ones(7)}, tmp_path / "whole.pt")
    for left_out, told in ((["1"], "1 storage is incomplete (F802): 20"), (["1", "2"], "2 storages are incomplete")):
        with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "cut.pt", "w") as cut:
            for record in whole.infolist():
                if record.filename.rpartition("/data/")[2] not in left_out:
                    cut.writestr(record.filename, whole.read(record))
        result = ckptmove.convert(tmp_path / "cut.pt", to="mps", force=True)
        [warning] = result.warnings
        assert not result.notes
        assert warning.startswith(told)
        assert warning.endswith(" bytes are missing in the new file too")


def test_problems_of_the_source_are_warnings() -> None:
    facts = (
        ArchiveFact("short-storage", "0", 8, "0"),
        ArchiveFact("short-storage", "1", 4, "1"),
        ArchiveFact("missing-end", "end", 1),
        ArchiveFact("missing-rank", "rank1.pt", 0),
        ArchiveFact("inner-archive", "more.zip", 9),
    )
    source = replace(ckptmove.inspect(SAMPLES / "adamw-cuda3.pth").inventory, facts=facts)
    copied = list(source_warnings(source, source, is_one_file=False))
    assert [re.findall(r"F\d+", warning) for warning in copied] == [["F802"], ["F802"], ["F808"], ["F804"]]
    assert "12 bytes" in copied[0]
    assert "rank1.pt" in copied[2]
    new = replace(source, facts=(), storages=())
    made = list(source_warnings(source, new, is_one_file=True))  # without the two storages
    assert [re.findall(r"F\d+", warning) for warning in made] == [["F802"], ["F808"], ["F804"]]
    assert "left out" in made[-1]


def test_values_that_a_cast_makes_infinite_are_told(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for values, told in (([1e300], "1 value was"), ([1e300, -1e39, 1.0, math.inf], "2 values were"), ([1.0], None)):
        torch.save({"w": torch.tensor(values, dtype=torch.float64)}, tmp_path / "wide.pt")
        made = ckptmove.convert(tmp_path / "wide.pt", to="mps", cast=True, force=True)
        assert made.notes == ((f"{told} too large for the smaller dtype: inf in the new file",) if told else ())


def test_an_empty_device_is_no_device() -> None:
    for use in (ckptmove.inspect, ckptmove.verify):
        with pytest.raises(UnknownDevice):
            use(str(SAMPLES / "adamw-cuda3.pth"), **{"target" if use is ckptmove.inspect else "to": ""})
    with pytest.raises(UnknownDevice):
        notes("adamw-cuda3.pth", to="")


def test_what_stays_because_of_a_shared_storage_is_named(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(2)
    torch.save({"model": {"w": weight, "b": torch.ones(1)}, "ema": {"w": weight}}, tmp_path / "run.pth")
    notes = ckptmove.convert(tmp_path / "run.pth", to="cuda", keep=["ema.*"], dry_run=True).notes
    assert notes == ("also kept, because they share storage with a match of keep: model.w",)

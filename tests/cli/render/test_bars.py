"""The bars of ``inspect --verbose``: the number of tensors by role and device."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmove.api.inspection import InspectRequest, inspect_checkpoint
from ckptmove.cli.render.inspection import inspection_lines
from ckptmove.cli.render.renderer import Detail, InspectAnswer
from ckptmove.cli.render.text import Page

SAMPLES = Path(__file__).parents[3] / "sample_ckpts"


def lines(name, page, *, verbose=True, **options):
    request = InspectRequest(path=str(SAMPLES / name), **options)
    found = inspect_checkpoint(request)
    answer = InspectAnswer(request, found, found.inventory.tensors, 0, Detail(verbose=verbose))
    return [*inspection_lines(page, answer)]


def bars(written):
    return [line.split() for line in written if "█" in line or "#" in line]


def test_tensors_are_counted_now_and_after_the_conversion() -> None:
    written = lines("map-location-dragged-all.pth", Page())
    assert bars(written) == [
        ["model", "4", "█" * 5], ["optimizer", "12", "█" * 16], ["rng", "2", "█" * 3],
        ["model", "4", "█" * 5], ["optimizer", "8", "█" * 11, "4", "█" * 5], ["rng", "2", "█" * 3],
    ]  # fmt: skip
    path = SAMPLES / "map-location-dragged-all.pth"
    assert f"after ckptmove convert {path} --to cuda:0:" in written
    assert not bars(lines("map-location-dragged-all.pth", Page(), verbose=False))


@pytest.mark.parametrize(("columns", "longest"), [(200, 16), (60, 16), (40, 10), (22, 1), (20, 0), (1, 0)])
def test_bars_fit_the_terminal(columns, longest) -> None:
    written = lines("map-location-dragged-all.pth", Page(columns=columns))
    assert max((word.count("█") for line in written for word in line.split()), default=0) == longest
    assert columns < 40 or all(len(line) <= columns for line in written if "█" in line)
    assert [line for line in written if line.startswith("optimizer  12")]


def test_an_encoding_without_blocks_has_signs() -> None:
    assert bars(lines("map-location-dragged-all.pth", Page(unicode=False)))[1] == ["optimizer", "12", "#" * 16]


def test_nothing_moves() -> None:
    written = lines("full-resume-cuda0.pt", Page())
    assert bars(written)
    assert not [line for line in written if line.startswith("after ")]


def test_one_role_on_one_device_needs_no_bars() -> None:
    assert not bars(lines("weights.safetensors", Page()))

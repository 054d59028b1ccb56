"""A conversion says what it did not do."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptmove
from ckptmove.errors import UnknownDevice

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"


def notes(file: str, **options: object) -> tuple[str, ...]:
    return ckptmove.convert(str(SAMPLES / file), dry_run=True, **options).notes


def test_options_that_meet_something_are_not_mentioned() -> None:
    assert notes("adamw-cuda3.pth", map_location={"cuda:*": "cpu"}, keep=["model.*"]) == ()
    assert notes("capturable-adam-cuda0.pt", to="cpu", keep=["optimizer.param_groups.0.capturable"]) == ()


def test_options_that_meet_nothing_are() -> None:
    [kept] = notes("adamw-cuda3.pth", to="cpu", keep=["model"])
    assert kept.startswith("--keep model names nothing in the file")
    [mapped] = notes("adamw-cuda3.pth", map_location={"cuda:7": "cpu"})
    assert mapped == "--map cuda:7=... names no device of the file, which has cpu, cuda:3"


def test_devices_that_stay_named_in_configs_are() -> None:
    [left] = notes("nanogpt-compiled-fused.pt", to="cpu")
    assert left == "still named in the file's configs: config.device = cuda (--rewrite-strings moves strings)"
    assert notes("nanogpt-compiled-fused.pt", to="cpu", rewrite_strings=True) == ()


def test_an_empty_device_is_no_device() -> None:
    for use in (ckptmove.inspect, ckptmove.verify):
        with pytest.raises(UnknownDevice):
            use(str(SAMPLES / "adamw-cuda3.pth"), **{"target" if use is ckptmove.inspect else "to": ""})
    with pytest.raises(UnknownDevice):
        notes("adamw-cuda3.pth", to="")

"""The summary line of a report."""

from __future__ import annotations

import pytest

from ckptmove.api.inspection import Inspection, InspectRequest
from ckptmove.checkpoint.summary import CheckpointSummary
from ckptmove.cli.render.inspection import inspection_lines
from ckptmove.cli.render.renderer import InspectAnswer
from ckptmove.cli.render.text import Page
from ckptmove.model import Inventory


def shown(page=None, **facts):
    inventory = Inventory(path="x.pt", container="torch-zip", layout="plain", size_bytes=0)
    found = Inspection(inventory, (), summary=CheckpointSummary(**facts))
    answer = InspectAnswer(InspectRequest("x.pt"), found, (), 0)
    lines = list(inspection_lines(page or Page(), answer))
    return lines[2 : lines.index("")]


def test_every_fact_is_shown_in_order() -> None:
    facts = {
        "parameters": 124_439_808, "dtypes": (("float32", 124_439_808),), "epoch": 3, "step": 12_000,
        "learning_rates": (6e-4,), "optimizers": ("AdamW",),
    }  # fmt: skip
    assert shown(**facts) == ["124.4 M parameters · float32 · epoch 3 · step 12,000 · lr 6e-4 · AdamW"]
    (line,) = shown(Page(unicode=False), **facts)
    assert line.isascii()
    assert line.split(" - ") == shown(**facts)[0].split(" · ")
    narrow = shown(Page(columns=40), **facts)
    assert narrow[1].startswith("step 12,000")
    assert max(map(len, narrow)) <= 40
    assert " ".join(narrow) == shown(**facts)[0]


def test_an_unknown_fact_is_left_out() -> None:
    assert shown() == []
    assert shown(epoch=0) == ["epoch 0"]
    assert shown(step=1) == ["step 1"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1 parameter"), (999, "999 parameters"), (1000, "1.0 K parameters"), (999_960, "1.0 M parameters"),
        (7_241_732_096, "7.2 B parameters"), (10**12, "1.0 T parameters"), (2 * 10**15, "2000.0 T parameters"),
    ],
)  # fmt: skip
def test_parameters_are_counted_as_on_model_cards(count, text) -> None:
    assert shown(parameters=count, dtypes=(("float32", count),)) == [f"{text} · float32"]


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ((0.1,), "lr 0.1"), ((1.0,), "lr 1"), ((0.0,), "lr 0"), ((0.01,), "lr 0.01"), ((0.009,), "lr 9e-3"),
        ((5.99771e-05,), "lr 5.998e-5"), ((1e-10,), "lr 1e-10"), ((1e-3, 1e-5, 1e-4), "lr 1e-5 to 1e-3"),
        ((0.00010001, 0.00010002), "lr 1e-4"),
    ],
)  # fmt: skip
def test_rates_have_four_digits(rates, text) -> None:
    assert shown(learning_rates=rates) == [text]


def test_parts_of_an_epoch_are_rounded() -> None:
    assert shown(epoch=2.9987) == ["epoch 3"]
    assert shown(epoch=0.5) == ["epoch 0.5"]
    assert shown(epoch=1_234_567) == ["epoch 1,234,567"]
    assert shown(epoch=0.333333) == ["epoch 0.33"]


def test_long_lists_are_cut() -> None:
    assert shown(optimizers=("SGD", "Adam", "Muon", "LBFGS")) == ["SGD, Adam, Muon and 1 more"]

"""The two catalogues of `benchmarks/catalogue.py`: every fault is found, and no healthy file raises an alarm."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import catalogue
from faults import FAULTS  # it imports torch

from ckptmove.findings.catalogue import CATALOGUE
from ckptmove.proof.checks import CASE, CHECKS

pytestmark = pytest.mark.unmeasured

SEEN = [fault for fault in FAULTS if not fault.unseen]
UNSEEN = [pytest.param(fault, marks=pytest.mark.xfail(reason=fault.unseen)) for fault in FAULTS if fault.unseen]
#: Every optimizer, layout, dtype and device. `benchmarks/catalogue.py` tries all combinations.
KINDS = len(catalogue.DTYPES) * len(catalogue.TARGETS)
SAMPLE = catalogue.HEALTHY[:: 3 * KINDS + 1]
HEALTHY = [
    *SAMPLE,
    *catalogue.ON_ONE_OF_SEVERAL[::5],
    *catalogue.HEALTHY_CASES,
    *catalogue.HEALTHY_SITUATIONS,
]


def test_the_catalogue_has_every_finding_and_every_check():
    # Stray bytes, files of two saves or of ranks, unsafe members, files beside a checkpoint, and weights that a library
    # has quantized have their own tests: no training in one process makes them.
    elsewhere = {"F805", "F806", "F807", "F808", "F809", "F810", "F811", "F815", "O211", "S704", "S705", "T402"}
    assert {fault.caught_by for fault in SEEN} == (CATALOGUE.keys() - elsewhere) | {*CHECKS, CASE}


def test_the_sample_has_every_optimizer_layout_dtype_and_device():
    for field in ("optimizer", "layout", "dtype", "target", "tensors"):
        assert {getattr(one, field) for one in SAMPLE} == {getattr(one, field) for one in catalogue.HEALTHY}, field


@pytest.mark.parametrize("fault", [*SEEN, *UNSEEN], ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, tmp_path):
    assert catalogue.is_found(fault, tmp_path)


@pytest.mark.parametrize("healthy", HEALTHY, ids=str)
def test_a_healthy_checkpoint_raises_no_alarm(healthy, tmp_path):
    assert catalogue.alarms(healthy, tmp_path) == []


def test_the_table_counts_what_was_missed(tmp_path, monkeypatch, capsys):
    good, bad = SEEN[0], catalogue.HEALTHY[0]
    monkeypatch.setattr(catalogue, "FAULTS", [good])
    monkeypatch.setattr(catalogue, "HEALTHY", [bad])
    monkeypatch.setattr(catalogue, "ON_ONE_OF_SEVERAL", [])
    monkeypatch.setattr(catalogue, "HEALTHY_CASES", [])
    monkeypatch.setattr(catalogue, "HEALTHY_SITUATIONS", [])
    assert catalogue.main() == 0
    assert "| injected faults | 1 | 1 of 1 | |" in capsys.readouterr().out
    monkeypatch.setattr(catalogue, "is_found", lambda fault, folder: False)
    monkeypatch.setattr(catalogue, "alarms", lambda healthy, folder: ["numbers: a false alarm"])
    assert catalogue.main() == 1
    told = capsys.readouterr().out
    assert "| injected faults | 1 | 0 of 1 | |" in told
    assert f"not found: {good.name} ({good.caught_by})" in told
    assert f"{bad}: numbers: a false alarm" in told

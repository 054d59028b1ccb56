"""The code in S701 and S703, run with the installed torch."""

from __future__ import annotations

import argparse
import collections
import pathlib
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from allow_list import restored_allow_list
from weights_only_lists import numbers

import ckptmove
from ckptmove.findings.safety import allowing_line

VALUES = {
    "a set": {1, 2},
    "a complex number": 1j,
    "a Namespace": argparse.Namespace(lr=1),
    "a Namespace and a set": [argparse.Namespace(lr=1), {1}],
    "an optimizer": torch.optim.SGD([torch.ones(1)]),
    "a class of a scheduler": torch.optim.lr_scheduler.StepLR,
    "a class of swa_utils": torch.optim.swa_utils.SWALR,
    "a path": pathlib.Path("runs"),
    "a NumPy scalar": np.float64(1.5),
    "a module": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),
    "an empty defaultdict": collections.defaultdict(list),
    "a defaultdict": collections.defaultdict(list, a=[1]),
    "an empty deque": collections.deque(),
    "a deque": collections.deque([1]),
}


#: A line to be pasted closes no file.
LEAVES_IT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def run(line):
    """Run a line as it is pasted, with nothing imported."""
    with restored_allow_list():
        exec(line, {})


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_the_line_loads_the_file(value, tmp_path):
    path = str(tmp_path / "c.pt")
    torch.save({"weight": torch.ones(2), "value": value}, path)
    inspection = ckptmove.inspect(path)
    (finding,) = [one for one in inspection.findings if one.code in {"S701", "S703"}]
    line = finding.fix if finding.code == "S703" else allowing_line(inspection.inventory) or finding.fix
    oldest = line.partition("# torch ")[2].partition(" or later")[0]
    if oldest and numbers(oldest) > numbers(torch.__version__):
        pytest.skip(f"the line is for torch {oldest}")
    run(line)


@LEAVES_IT_OPEN
def test_the_line_loads_a_member_of_an_archive(tmp_path):
    torch.save({"weight": torch.ones(2), "value": argparse.Namespace(lr=1)}, tmp_path / "c.pt")
    for name in ("c.zip", "c.tar"):
        with (
            zipfile.ZipFile(tmp_path / name, "w") if name == "c.zip" else tarfile.open(tmp_path / name, "w") as archive
        ):
            (archive.write if name == "c.zip" else archive.add)(tmp_path / "c.pt", "c.pt")
        (finding,) = [one for one in ckptmove.inspect(tmp_path / name).findings if one.code == "S701"]
        run(finding.fix)


@LEAVES_IT_OPEN
def test_the_line_loads_a_bare_pickle(tmp_path):
    (tmp_path / "c.pkl").write_bytes(pickle.dumps({"weight": torch.ones(2), "value": argparse.Namespace(lr=1)}))
    (finding,) = [one for one in ckptmove.inspect(tmp_path / "c.pkl").findings if one.code == "S701"]
    run(finding.fix)


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="this torch knows them for good alone")
@pytest.mark.parametrize("value", [collections.deque([1]), collections.deque()], ids=["filled", "empty"])
def test_no_line_would_have_it_put_items_into_a_deque(value, tmp_path):
    torch.save(value, tmp_path / "c.pt")
    with torch.serialization.safe_globals([collections.deque]):
        if value:
            with pytest.raises(Exception, match="Can only append to lists"):
                torch.load(tmp_path / "c.pt", weights_only=True)
        else:
            assert torch.load(tmp_path / "c.pt", weights_only=True) == value

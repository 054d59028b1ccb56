"""CRCs of many records are compared in batches: findings do not depend on the size of a batch."""

from __future__ import annotations

import warnings

import pytest

import ckptmove
from ckptmove.assembled import dcp_folder as distributed
from ckptmove.formats import torch_zip

torch = pytest.importorskip("torch")


def test_pieces_and_records_are_checked_in_batches(tmp_path, monkeypatch) -> None:

    dcp = pytest.importorskip("torch.distributed.checkpoint")

    tree = {"a": torch.arange(9.0), "b": torch.ones(3), "c": torch.zeros(5)}
    torch.save(tree, tmp_path / "run.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for path in (tmp_path / "run.pth", next((tmp_path / "dcp").glob("*.distcp"))):
        data = path.read_bytes()
        at = data.index(torch.ones(3).numpy().tobytes())
        path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])

    def found():
        return [
            [(one.code, one.where) for one in ckptmove.inspect(tmp_path / name, check=True).findings]
            for name in ("run.pth", "dcp")
        ]

    whole = found()
    for module in (torch_zip, distributed):
        monkeypatch.setattr(module, "_BATCH_BYTES", 1)
    assert found() == whole
    assert all(any(code == "F801" for code, _ in one) for one in whole)

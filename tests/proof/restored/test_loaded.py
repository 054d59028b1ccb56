"""Files as a script loads them."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from ckptmove.proof.restored.loaded import load_tensor


def test_a_file_is_opened_once_for_all_of_its_tensors(tmp_path):
    path, opened = str(tmp_path / "a.safetensors"), {}
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, path)
    first = load_tensor(path, "a", opened)
    (file,) = opened.values()
    assert [one.tolist() for one in first.tensors["a"]] == [[1.0, 1.0]]
    assert [one.tolist() for one in load_tensor(path, "b", opened).tensors["b"]] == [[0.0] * 3]
    assert opened == {path: file}


def test_a_tensor_or_a_file_that_is_missing_is_an_error(tmp_path):
    path = str(tmp_path / "a.safetensors")
    save_file({"a": torch.ones(2)}, path)
    assert "c" in load_tensor(path, "c", {}).error
    opened = {}
    assert load_tensor(str(tmp_path / "none.safetensors"), "a", opened).error
    assert not opened

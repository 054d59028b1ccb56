"""A run that is interrupted, moved to another device and back, and resumed equals an uninterrupted one bit for bit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from trained import OPTIMIZERS, Training, as_plain, device_by_path, tensors_of  # it imports torch

from ckptmove import convert

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # torch.optim.SparseAdam's own constructor
    pytest.mark.unmeasured,
]


def numbers_of(value, path=""):
    """Everything in a tree except tensors, with its path."""
    if isinstance(value, (dict, list, tuple)):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_of(member, f"{path}.{key}")
    elif not isinstance(value, torch.Tensor):
        yield path, value


def assert_same_bits(one, other):
    tensors, others = dict(tensors_of(one)), dict(tensors_of(other))
    assert tensors.keys() == others.keys()
    for path, tensor in tensors.items():
        assert tensor.dtype == others[path].dtype, path
        assert tensor.numpy().tobytes() == others[path].numpy().tobytes(), path
    assert dict(numbers_of(one)) == dict(numbers_of(other))


def there_and_back(path, folder):
    away = convert(path, to="cuda:0", output=folder / "away.pth").output
    return convert(away, to="cpu", output=folder / "back.pth").output


@pytest.mark.parametrize("trained_on", ["cpu", "cuda:1", "mps"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resume_after_conversions_is_bit_for_bit_the_run_that_was_never_cut_off(name, trained_on, tmp_path):
    expected = Training(name).train(6).tree()
    path = as_plain(Training(name).train(3).tree(), tmp_path, device_by_path(trained_on, name))
    saved = torch.load(there_and_back(path, tmp_path), weights_only=True)
    assert_same_bits(Training(name).resume(saved).train(3).tree(), expected)


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler", "rng"])
def test_a_part_that_is_not_restored_shows(part, tmp_path):
    expected = Training("AdamW").train(6).tree()
    saved = Training("AdamW").train(3).tree()
    saved[part] = Training("AdamW").tree()[part]
    with pytest.raises(AssertionError):
        assert_same_bits(Training("AdamW").resume(saved).train(3).tree(), expected)

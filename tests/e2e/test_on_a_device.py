"""Training that is resumed on another device after a conversion, on the CPU and on a GPU if there is one.

Converted values are equal bit for bit. Devices round differently, so steps are compared with a tolerance.
"""

from __future__ import annotations

import json
import sys
from subprocess import run

import pytest

torch = pytest.importorskip("torch")

from trained import Training, as_plain, device_by_path, tensors_of  # it imports torch

from ckptmove import convert

pytestmark = pytest.mark.unmeasured

#: Optimizers without a threshold that a rounding error could push a number over, as the signs of Rprop are.
NAMES = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam")
#: Of values of about 1, after three steps in float32 whose sums are made in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request):
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


def assert_alike(one, other):
    tensors, others = dict(tensors_of(one)), dict(tensors_of(other))
    assert tensors.keys() == others.keys()
    for path, tensor in tensors.items():
        torch.testing.assert_close(
            tensor.cpu(), others[path].cpu(), **TOLERANCE, msg=lambda why, at=path: f"{at}: {why}"
        )


def moved(training, target, folder):
    """A run that is restored from a converted file, without map_location."""
    torch.save(training.tree(), folder / "run.pth")
    return torch.load(convert(folder / "run.pth", to=target, output=folder / "moved.pth").output, weights_only=True)


def assert_moved(tree, training, target):
    place = device_by_path(target, training.name)
    saved = dict(tensors_of(training.tree()))
    for path, tensor in tensors_of(tree):
        assert tensor.device == torch.device(place(path)), path
        assert tensor.cpu().equal(saved[path].cpu()), path


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_the_cpu_goes_on_at_the_device(name, device, tmp_path):
    begun = Training(name).train(3)
    tree = moved(begun, device, tmp_path)
    assert_moved(tree, begun, device)
    assert_alike(Training(name, device=device).resume(tree).train(3).tree(), Training(name).train(6).tree())


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_the_device_goes_on_at_the_cpu(name, device, tmp_path):
    begun = Training(name, device=device).train(3)
    tree = moved(begun, "cpu", tmp_path)
    assert_moved(tree, begun, "cpu")
    assert_alike(Training(name).resume(tree).train(3).tree(), Training(name, device=device).train(6).tree())


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_verify_steps_it_there(name, device, tmp_path):
    path = as_plain(Training(name).train(3).tree(), tmp_path, device_by_path(device, name))
    command = [sys.executable, "-m", "ckptmove", "verify", path, "--to", device, "--require-device", "--json"]
    [result] = json.loads(run(command, capture_output=True, check=False, timeout=600).stdout)["results"]
    assert (result["passed"], result["proven"]) == (True, True)
    assert result["mode"] == ("cpu" if device == "cpu" else "real")

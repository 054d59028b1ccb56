"""A 0-d CPU tensor with tensors of the target: operations that accept it, and operations that refuse it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from ckptmove.simulation.errors import CrossDeviceError
from ckptmove.simulation.rules import takes_scalar

#: Torch's own list of operations, which it makes the wrappers of its kernels from.
LIST = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
#: Calls operations on meta tensors with a 0-d CPU tensor as each argument in turn, with torch's C++ kernels for meta.
#: Those in Python do not check devices. Prints each result.
ASKING = """
import json, sys, types
sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")
import torch

def answer(func, at, dtype):
    given = [argument for argument in func._schema.arguments if not argument.has_default_value()]
    args = [torch.ones(3, dtype=dtype, device="meta") if str(one.type) == "Tensor" else 1 for one in given]
    args[at] = torch.ones((), dtype=dtype)
    options = {one.name: None for one in given if one.name == "rounding_mode"}
    try:
        func(*args[: len(args) - len(options)], **options)
    except RuntimeError as error:
        return str(error)
    return "taken"

said = {}
for name in json.load(sys.stdin):
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    for at, one in enumerate(func._schema.arguments):
        if str(one.type) == "Tensor" and one.alias_info is None:
            said[f"{name} {one.name}"] = [answer(func, at, dtype) for dtype in (torch.float32, torch.int64)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def listed():
    """Entries of torch's list, by the name and overload of each operation."""
    if not LIST.exists():
        pytest.skip("this torch came without its list of operations")
    found = {}
    for line in LIST.read_text().splitlines():
        if line.startswith("- func: "):
            func = line.removeprefix("- func: ")
            found[func.partition("(")[0]] = said = {"func": func, "kernels": set()}
        elif at := re.match(r"  (\w+): *([^#]*)", line):
            said[at[1]] = at[2].strip()
        elif at := re.match(r"    (\w[\w, ]*): ", line):
            said["kernels"].update(at[1].split(", "))
    return found


def tensors_of(said):
    """The tensor arguments, except outputs."""
    return re.findall(r"Tensor\??(?:\[\])? (\w+)", said["func"].partition(") ->")[0])


def iterates(said, listed):
    """Whether it is for `TensorIterator` to look at the devices: nobody else does."""
    kernel = listed.get(said.get("structured_delegate"), said)
    return said.get("device_check") == "NoCheck" and kernel.get("structured_inherits") == "TensorIteratorBase"


@pytest.mark.slow
@pytest.mark.unmeasured
def test_what_iterates_takes_what_torch_takes_there(listed):
    names = [name for name, said in listed.items() if iterates(said, listed) and "[] " not in said["func"]]
    names = [name for name in names if len(tensors_of(listed[name])) > 1 and "(a!) out" not in listed[name]["func"]]
    done = subprocess.run(
        [sys.executable, "-c", ASKING], input=json.dumps(names), capture_output=True, text=True, check=True
    )
    answers = {key: "taken" in said for key, said in json.loads(done.stdout).items()}
    assert answers == {
        key: takes_scalar(f"aten::{name.partition('.')[0]}", argument)
        for key in answers
        for name, _, argument in [key.partition(" ")]
    }
    assert set(answers.values()) == {True, False}
    assert len(answers) > len(names) > 40


def test_no_other_operation_takes_it_where_torch_checks_the_devices(listed):
    """Composite ones have no kernel for CUDA, so that nobody looks before their parts are called."""
    checked = {
        name: {argument for argument in tensors_of(said) if takes_scalar(f"aten::{name.partition('.')[0]}", argument)}
        for name, said in listed.items()
        if said.get("device_check") != "NoCheck" and ("structured_delegate" in said or "CUDA" in said["kernels"])
    }
    assert {name for name, taken in checked.items() if taken} == set()
    assert len(checked) > 500


def refused(device):
    """Samples that torch refuses, each with its operation, which does not treat 0-d operands differently."""
    rows, label, scalar = device(torch.ones(2, 3)), torch.tensor(1), torch.tensor(0.0)
    return {
        "stack": ("stack", lambda: torch.stack([scalar, rows.mean()])),
        "hstack": ("cat", lambda: torch.hstack([scalar, rows.mean()])),
        "cross_entropy": ("nll_loss_forward", lambda: functional.cross_entropy(rows[0], label)),
        "embedding": ("embedding", lambda: functional.embedding(label, rows)),
        "gather": ("gather", lambda: rows[0].gather(0, label)),
        "index_select": ("index_select", lambda: rows.index_select(0, label)),
        "scatter": ("scatter", lambda: rows[0].scatter(0, label, 1.0)),
        "equal": ("equal", lambda: torch.equal(rows.mean(), scalar)),
        "clamp": ("clamp", lambda: rows.clamp(max=scalar)),
        "addcdiv": ("addcdiv", lambda: rows.addcdiv(rows, scalar)),
        "logaddexp": ("logaddexp", lambda: torch.logaddexp(rows, scalar)),
        "mask": ("masked_fill", lambda: rows.masked_fill(torch.tensor(True), 1.0)),
        "target": ("mul_", lambda: scalar.mul_(rows.mean())),
    }


@pytest.mark.parametrize("case", refused(lambda tensor: tensor))
def test_refused(cuda, case):
    operation, call = refused(cuda.to_device)[case]
    with cuda, pytest.raises(CrossDeviceError, match="Expected all tensors to be on the same device") as raised:
        call()
    assert raised.value.operation.removeprefix("aten::") == operation
    assert [stray.device.type for stray in raised.value.strays] == ["cpu"]


class Backwards(torch.autograd.Function):
    """A function that uses a 0-d CPU tensor in its backward only."""

    @staticmethod
    def forward(ctx, rows):
        return rows * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.stack([grad[0], torch.tensor(0.0)])


def test_refused_in_a_backward(cuda):
    with cuda:
        rows = cuda.to_device(torch.ones(2)).requires_grad_()
        loss = Backwards.apply(rows).sum()
        with pytest.raises(CrossDeviceError) as raised:
            loss.backward()
    assert raised.value.operation == "aten::stack"


def taken():
    """Samples that torch accepts, each with a parameter and a 0-d CPU tensor of 2."""
    indices = torch.tensor(1)
    return {
        "times": lambda rows, two: two * rows * two,
        "loss": lambda rows, two: two + rows.square().mean(),
        "where": lambda rows, two: torch.where(rows > 0, rows, two) + torch.where(two > 1, rows, rows),
        "masked_fill": lambda rows, two: rows.masked_fill(rows > 0, two),
        "clamp": lambda rows, _: rows.clamp(0.0, 3.0),
        "lerp": lambda rows, two: rows.lerp(rows * 3, two),
        "addcmul": lambda rows, two: torch.addcmul(rows, rows, two),
        "index": lambda rows, two: rows[indices] + rows[:, torch.tensor([2, 0])].sum() * two,
        "index_put": lambda rows, two: (rows * 1).index_put((indices,), two),
        "set": lambda rows, two: torch.zeros_like(rows).copy_(rows).index_fill_(0, (rows[:1, 0] * 0).long(), two),
        "fill": lambda rows, two: rows * torch.empty_like(rows).fill_(two),
        "pow": lambda rows, two: rows**two + two**rows,
        "compare": lambda rows, two: rows * (rows > two) + rows * (two == rows),
        "logical": lambda rows, two: rows * torch.logical_and(rows, two),
        "nan_to_num": lambda rows, two: (rows / two).nan_to_num(),
        "maximum": lambda rows, two: torch.maximum(rows, two) + torch.minimum(two, rows),
        "floor_divide": lambda rows, two: rows * (rows.detach() // two) + rows % two,
        "pos_weight": lambda rows, two: functional.binary_cross_entropy_with_logits(
            rows, rows * 0, weight=two, pos_weight=two
        ),
        "select_scatter": lambda rows, two: rows[0].select_scatter(two, 0, 1) * two,
        "dist": lambda rows, two: rows.dist(two),
    }


@pytest.mark.parametrize("case", taken())
def test_taken(cuda, case):
    call = taken()[case]
    here = nn.Parameter(torch.arange(6.0).reshape(2, 3) / 2)
    call(here, torch.tensor(2.0)).sum().backward()
    with cuda:
        there = nn.Parameter(cuda.to_device(here))
        result = call(there, torch.tensor(2.0))
        result.sum().backward()
    assert cuda.device_of(result) == "cuda:0"
    assert torch.equal(here.grad, cuda.to_cpu(there.grad))


@pytest.mark.parametrize("way", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_steps_keep_their_step_and_learning_rate_on_the_cpu(cuda, way):
    with cuda:
        weights = [nn.Parameter(cuda.to_device(torch.ones(2))) for _ in range(2)]
        rate = 0.1 if way == {"foreach": True} else torch.tensor(0.1)  # torch refuses a tensor lr with foreach
        optimizer = torch.optim.Adam(weights, lr=rate, **way)
        for _ in range(2):
            sum(weight.square().sum() for weight in weights).backward()
            optimizer.step()
        moved = [torch.tensor(weight.tolist()) for weight in weights]
    assert all((one < 1).all() for one in moved)


def test_of_an_operation_of_another_library_nothing_is_known():
    assert takes_scalar("torchvision::roi_align", "rois")
    assert not takes_scalar("aten::no_such_operation", "self")

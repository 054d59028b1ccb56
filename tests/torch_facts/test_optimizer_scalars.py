"""Devices of the scalars that ``torch.optim`` creates in its state, compared with the policy."""

from __future__ import annotations

import contextlib
import inspect
import sys

import pytest
import torch

from ckptmove.conversion.policy import Policy
from ckptmove.model import FlagValue, Inventory, OptimizerRecord, ParamGroup, StateEntry, TensorRecord
from ckptmove.moves import MoveRequest
from ckptmove.torch_facts.optimizers import TABLE, is_moment, magnitudes

CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
ROWS = {row.name: row for row in TABLE}
#: They cannot step with a ``meta`` parameter: LBFGS asks for the loss, SparseAdam for the values of a sparse gradient.
BY_VALUE = {"LBFGS", "SparseAdam"}
CASES = [
    (name, flag)
    for name, kind in CLASSES.items()
    if name not in BY_VALUE
    for flag in (None, "capturable", "fused")
    if flag is None or flag in inspect.signature(kind).parameters
]


def stepped(kind, options):
    """The state after one step of a parameter on ``meta``, which represents any device other than the CPU."""
    parameter = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
    parameter.grad = torch.empty(2, 2, device="meta")
    optimizer = kind([parameter], lr=0.1, **options)
    # ``meta`` has no values and few kernels, so some steps fail after they created the state.
    with contextlib.suppress(AssertionError, RuntimeError):
        optimizer.step()
    return dict(optimizer.state[parameter])


def scalar_devices(state):
    return {key: value.device.type for key, value in state.items() if torch.is_tensor(value) and value.dim() == 0}


def planned_homes(name, keys, flag):
    """The policy for a file whose tensors all move from one accelerator to another."""
    records = tuple(
        (key, TensorRecord(f"state.0.{key}", "optimizer", "cuda:0", "float32", shape, (1,) * len(shape), key, 0, 4))
        for key, shape in keys.items()
    )
    flags = (FlagValue(flag, True, 1),) if flag else ()
    group = ParamGroup("param_groups.0", ("0",), (), (), flags)
    optimizer = OptimizerRecord("", (group,), (StateEntry("0", records, ()),), name)
    inventory = Inventory(path="x", container="torch-zip", layout="plain", size_bytes=0, optimizers=(optimizer,))
    policy = Policy(inventory, MoveRequest(to="cuda:1"))
    assert not policy.refused
    return {key: policy.decide(record)[1] for key, record in records}


@pytest.fixture
def meta_is_fused(monkeypatch):
    """``_device_dtype_check_for_fused`` runs before the state is created, so it must accept ``meta``."""
    name = "_get_fused_kernels_supported_devices"
    for module in [module for path, module in sys.modules.items() if path.startswith("torch.optim.")]:
        if hasattr(module, name):  # before torch 2.5 each class asked for itself
            monkeypatch.setattr(module, name, lambda: ["meta", "cuda", "cpu"])


def test_the_table_knows_every_class():
    assert set(ROWS) >= set(CLASSES)


@pytest.mark.parametrize(("name", "flag"), CASES)
@pytest.mark.usefixtures("meta_is_fused")
def test_the_policy_puts_scalars_where_torch_creates_them(name, flag):
    state = stepped(CLASSES[name], {flag: True} if flag else {})
    created = scalar_devices(state)
    assert set(created) == ROWS[name].scalars, name

    shapes = {key: tuple(value.shape) for key, value in state.items() if torch.is_tensor(value)}
    homes = planned_homes(name, {**shapes, "moment": (2, 2)}, flag)
    expected = {key: "cpu" if created.get(key) == "cpu" else "cuda:1" for key in homes}
    assert homes == expected


@pytest.mark.parametrize("name", sorted(BY_VALUE))
def test_the_others_keep_their_step_as_a_number(name):
    parameter = torch.nn.Parameter(torch.ones(3, 2))

    def closure():
        parameter.grad = torch.ones(3, 2).to_sparse() if name == "SparseAdam" else torch.ones(3, 2)
        return (parameter**2).sum()

    optimizer = CLASSES[name]([parameter])
    optimizer.step(closure)
    counters = {"step", "n_iter"} & set(optimizer.state[parameter])
    assert counters
    assert all(type(optimizer.state[parameter][key]) is int for key in counters)
    assert not ROWS[name].scalars


def test_a_flag_that_stays_on_a_device_that_refuses_it_would_raise():
    """The reason for clearing ``capturable``: restored flags beat the constructor's."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], capturable=True)
    parameter.grad = torch.ones(2)
    with pytest.raises(AssertionError, match="capturable=True"):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_step_does_not_ask_whether_it_could_be_captured(kind):
    """The reason why O202 ignores this group."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([parameter], capturable=True, fused=True)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert bool((parameter != 1).all())


def test_load_state_dict_leaves_a_spoiled_step_unless_its_group_wants_it_there():
    """``_process_value_according_to_param_policy``: so a file must have ``step`` in the right place."""
    process = torch.optim.Optimizer._process_value_according_to_param_policy
    spoiled = torch.ones((), device="meta")
    parameter = torch.ones(2)
    for flags, expected in (({}, "meta"), ({"fused": True}, "cpu"), ({"capturable": True}, "cpu")):
        if expected == "meta":
            found = process(parameter, spoiled, 0, [{"params": [0], **flags}], "step")
        else:
            found = process(parameter, torch.ones(()), 0, [{"params": [0], **flags}], "step")
        assert found.device.type == expected
    assert (
        process(torch.ones(2, device="meta"), torch.ones(()), 0, [{"params": [0]}], "mu_product").device.type == "meta"
    )


@pytest.mark.parametrize("name", CLASSES)
def test_moments_are_told_by_their_keys(name):
    parameter = torch.nn.Parameter(torch.ones(3, 2))

    def closure():
        parameter.grad = torch.ones(3, 2).to_sparse() if name == "SparseAdam" else torch.ones(3, 2)
        return (parameter**2).sum()

    optimizer = CLASSES[name]([parameter])
    for _ in range(2):
        optimizer.step(closure)
    state = optimizer.state[parameter]
    lists = {key: value[-1] for key, value in state.items() if isinstance(value, list) and value}
    shapes = {key: one.shape for key, one in (state | lists).items() if torch.is_tensor(one)}
    # The key tells it whatever the shape is: moments of a 0-d parameter are 0-d.
    assert {key for key in shapes if is_moment(name, f"{key}.0", ())} == {key for key in shapes if shapes[key]}


def test_a_scalar_of_another_library_is_no_moment():
    assert not is_moment("pkg.mod:Lion", "exp_avg", ())
    assert is_moment("pkg.mod:Lion", "exp_avg", (1,))


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - BY_VALUE))
def test_state_that_cannot_be_negative(name):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(40, 40))
    options = {"momentum": 0.9, "amsgrad": True, "centered": True}
    known = inspect.signature(CLASSES[name]).parameters
    optimizer = CLASSES[name]([parameter], lr=0.01, **{key: options[key] for key in options.keys() & known})
    for _ in range(3):
        parameter.grad = torch.randn(40, 40)
        optimizer.step()
    state = {key: value for key, value in optimizer.state[parameter].items() if getattr(value, "shape", ())}
    assert {key for key, value in state.items() if value.min() >= 0} == magnitudes(name) & state.keys()
    assert magnitudes("Another") >= {"exp_avg_sq", "square_avg"}

"""Relations between the moments of one parameter: they hold for all gradients, and for few faults."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.model import StateEntry, TensorRecord
from ckptmove.proof.step.moments import disagreement
from ckptmove.proof.tensors.pieces import ParameterPiece


class Source:
    def __init__(self, state):
        self.state = state

    def tensor(self, record):
        return self.state[record.name]


def said(state, **options):
    tensors = {key: value for key, value in state.items() if torch.is_tensor(value) and value.dim()}
    records = {
        key: TensorRecord(key, "optimizer", "cpu", "float32", tuple(value.shape), value.stride(), "0", 0, 0)
        for key, value in tensors.items()
    }
    entry = StateEntry("0", tuple(records.items()), ())
    first = next(iter(records.values()), TensorRecord("w", "model", "cpu", "float32", (3,), (1,), "0", 0, 12))
    return disagreement(ParameterPiece("w", 0, first, True, entry, None, 3, 0), Source(tensors), options)


OPTIMIZERS = {
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
}


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0.1, 0.9999)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]),
    magnitudes=st.lists(st.floats(-12, 4), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_no_run_of_gradients_contradicts_itself(name, betas, dtype, magnitudes, seed):
    if name == "Adamax" and dtype.is_complex:
        dtype = torch.float32
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.zeros(50, dtype=dtype))
    optimizer = getattr(torch.optim, name)([parameter], betas=betas, **OPTIMIZERS[name])
    for exponent in magnitudes:
        gradient = torch.randn(50, generator=generator, dtype=torch.float32) * 10.0**exponent
        gradient[::3] = 0
        parameter.grad = gradient.to(dtype)
        optimizer.step()
    assert said(optimizer.state[parameter], betas=betas) == ""


def test_betas_that_a_schedule_has_changed_are_allowed():
    parameter = torch.nn.Parameter(torch.zeros(50))
    optimizer = torch.optim.AdamW([parameter], betas=(0.95, 0.999))
    for step in range(200):
        optimizer.param_groups[0]["betas"] = (0.95 - 0.1 * (step % 20) / 20, 0.999)
        parameter.grad = torch.randn(50, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    assert said(optimizer.state[parameter], betas=(0.95, 0.999)) == ""


MEAN = torch.tensor([0.1, 0.0, -0.2])


@pytest.mark.parametrize(
    ("state", "options", "expected"),
    [
        ({"exp_avg": MEAN, "exp_avg_sq": torch.zeros(3)}, {}, "exp_avg_sq is too small for exp_avg in 2 of 3 values"),
        ({"exp_avg": MEAN, "exp_inf": MEAN.abs() / 99}, {}, "exp_inf is too small for exp_avg in 2 of 3 values"),
        (
            {"exp_avg": MEAN, "exp_avg_sq": MEAN**2, "max_exp_avg_sq": torch.zeros(3)},
            {},
            "max_exp_avg_sq is less than exp_avg_sq in 2 values",
        ),
        ({"exp_avg": MEAN, "exp_avg_sq": torch.zeros(3)}, {"betas": (0.99, 0.5)}, ""),  # nothing bounds it
        ({"exp_avg": MEAN, "exp_inf": torch.zeros(3)}, {"betas": (0.99, 0.5)}, ""),
        (
            {"exp_avg": MEAN, "exp_avg_sq": torch.zeros(3)},
            {"betas": (2, 3)},
            "exp_avg_sq is too small for exp_avg in 2 of 3 values",
        ),
        ({"exp_avg": MEAN, "exp_avg_sq": MEAN**2 / 1e3}, {"betas": (0.0, 0.5)}, None),
        ({"exp_avg": MEAN.half(), "exp_avg_sq": torch.zeros(3).half()}, {}, ""),
        ({"exp_avg": MEAN, "exp_avg_sq": torch.zeros(2)}, {}, ""),
        ({"exp_avg": MEAN * 1e-20, "exp_avg_sq": torch.zeros(3)}, {}, ""),
        ({"exp_avg_sq": torch.zeros(3)}, {}, ""),
        ({"momentum_buffer": MEAN}, {}, ""),
        ({"exp_avg": MEAN, "exp_avg_sq": torch.full((3,), torch.nan)}, {}, ""),  # the check of numbers reports NaN
        (
            {"exp_avg": MEAN, "exp_avg_sq": torch.tensor([0.0, torch.nan, 1.0])},
            {},
            "exp_avg_sq is too small for exp_avg in 1 of 3 values",
        ),
        (
            {"exp_avg": MEAN * 1j, "exp_avg_sq": torch.complex(torch.zeros(3), torch.zeros(3))},
            {},
            "exp_avg_sq is too small for exp_avg in 2 of 3 values",
        ),
        ({"exp_avg": torch.zeros(0, 3), "exp_avg_sq": torch.zeros(0, 3)}, {}, ""),
    ],
)
def test_what_cannot_be(state, options, expected):
    found = said(state, **options)
    assert bool(found) if expected is None else found == expected


def test_moments_that_are_zero_where_others_are_not_fail_the_step(make, answers):
    tree = make.tree("AdamW")
    tree["optimizer"]["state"][1]["exp_avg_sq"].zero_()
    found = answers(make.save(tree), "cuda:0")
    assert found["step"]["status"] == "failed"
    assert "model.0.bias: exp_avg_sq is too small for exp_avg in 5 of 5 values" in found["step"]["detail"]


def test_moments_of_integers_fail_the_step(make, answers):
    tree = make.tree("AdamW")
    tree["optimizer"]["state"][1]["exp_avg"] = torch.ones(5, dtype=torch.int64)
    found = answers(make.save(tree), "cuda:0")
    assert "model.0.bias: exp_avg is int64, " in found["step"]["detail"]


def test_a_cast_to_a_wider_dtype_loses_nothing(make, answers):
    tree = make.tree("AdamW")
    for state in tree["optimizer"]["state"].values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    found = answers(make.save(tree), "cuda:0")
    assert found["step"]["status"] == "passed"
    assert "load_state_dict casts 4 exp_avg from bfloat16 to float32;" in found["step"]["detail"] + ";"

"""Parts of a step, each with the fault that it detects."""

from __future__ import annotations

import pytest
import torch

from ckptmove.model import StateEntry, TensorRecord
from ckptmove.proof import place
from ckptmove.proof.place import TorchDevice
from ckptmove.proof.step.step import _largest_magnitude, copy_to, scaled
from ckptmove.proof.step.trial import IDLE, LOST, TOO_SMALL, ZEROS
from ckptmove.proof.tensors.pieces import WINDOW_ELEMENTS, select

STEPS = ("step", "parity", "fresh")


def statuses(found):
    return [found[name]["status"] for name in STEPS]


class Recorder:
    def to_device(self, tensor):
        return tensor + 1


def test_a_tensor_goes_where_the_file_has_it():
    assert copy_to(torch.zeros(()), "cpu", Recorder()) == 0
    assert copy_to(torch.zeros(()), "cuda:0", Recorder()) == 1


def test_what_is_stepped_is_a_copy():
    stored = torch.ones(3)
    TorchDevice("cpu").to_device(stored).zero_()
    copy_to(stored, "cpu", TorchDevice("cpu")).zero_()
    assert stored.sum() == 3


def test_a_device_of_this_machine_has_an_index_below_their_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [place.is_here(tag) for tag in ("cuda", "cuda:1", "cuda:2")] == [True, True, False]


# --- the magnitude of a gradient -------------------------------------------------------------------------------------


class Source:
    def __init__(self, **values):
        self.values = values

    def tensor(self, record):
        return self.values[record.name]


def record(name, shape=(4,), dtype="float32"):
    stride = tuple(torch.empty(shape).stride())
    return TensorRecord(name, "optimizer", "cpu", dtype, shape, stride, "0", 0, 0)


def draft(dtype=torch.float32, **state):
    name = str(dtype).removeprefix("torch.")
    entry = StateEntry("0", tuple((key, record(key, tuple(value.shape))) for key, value in state.items()), ())
    optimizer = OPTIMIZER.with_state(entry)
    (piece,) = select(optimizer, {"0": record("w", dtype=name)}, "Adam").pieces
    return scaled(piece, Source(w=torch.ones(4, dtype=dtype), **state), "Adam")


class OPTIMIZER:
    where = "optimizer"

    def __init__(self, entry):
        self.state = (entry,)
        self.groups = (type("Group", (), {"params": ("0",)}),)

    with_state = classmethod(lambda cls, entry: cls(entry))


def test_the_gradient_has_the_magnitude_of_the_moments():
    assert draft(exp_avg=torch.full((4,), 0.01)).largest == pytest.approx(0.01)
    assert draft(exp_avg=torch.full((4,), -0.01)).largest == pytest.approx(0.01)
    assert draft(exp_avg_sq=torch.full((4,), 1e-4)).largest == pytest.approx(0.01)
    assert draft(step=torch.tensor(9.0)).largest == 0
    assert draft(exp_avg=torch.full((4,), 0.01)).scale == 2.0**-7
    assert draft(exp_avg=torch.full((4,), 50.0)).scale == 1.0
    assert draft().scale == 1.0


def test_a_gradient_in_half_precision_is_large_enough_to_be_squared():
    small = torch.full((4,), 1e-4)
    assert draft(exp_avg=small).scale == 2.0**-14
    assert draft(torch.float16, exp_avg=small).scale == 2.0**-4
    assert not draft(torch.float16, exp_avg=torch.full((4,), 1e-5)).shows
    assert draft(torch.float16, exp_avg=torch.full((4,), 1e-4)).shows


# --- pieces ----------------------------------------------------------------------------------------------------------


def test_a_large_parameter_is_cut_and_one_with_a_moment_of_another_shape_is_not():
    large = record("w", (4, WINDOW_ELEMENTS))
    same = StateEntry("0", (("step", record("s", ())), ("exp_avg", record("m", large.shape))), ())
    other = same._replace(tensors=(("exp_avg", record("m", (WINDOW_ELEMENTS, 4))),))
    assert [piece.elements for piece in select(OPTIMIZER(same), {"0": large}, "Adam").pieces] == [WINDOW_ELEMENTS] * 4
    assert [piece.window for piece in select(OPTIMIZER(other), {"0": large}, "Adam").pieces] == [None]
    assert [piece.window for piece in select(OPTIMIZER(same), {"0": large}, "Muon").pieces] == [None]


# --- whole steps -----------------------------------------------------------------------------------------------------


def test_a_count_that_leaves_the_cpu_in_the_step_is_a_stray(make, answers, monkeypatch):
    class Dragging(torch.optim.AdamW):
        def step(self):
            super().step()
            for parameter, state in self.state.items():
                state["step"] = state["step"].to(parameter.device)

    path = make("AdamW")
    monkeypatch.setattr(torch.optim, "AdamW", Dragging)
    assert "model.0.weight: step is on cuda:0, but belongs on cpu" in answers(path, "cuda:0")["step"]["detail"]


def test_a_step_that_reads_no_more_than_the_count_fails_fresh(make, answers, monkeypatch):
    class Counting(torch.optim.RMSprop):
        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            for state in self.state.values():
                state["square_avg"].zero_()

    path = make("RMSprop")
    monkeypatch.setattr(torch.optim, "RMSprop", Counting)
    assert statuses(answers(path, "cpu")) == ["passed", "passed", "failed"]


def test_one_optimizer_within_tolerance_makes_the_whole_so(make, answers):
    tree = make.tree("Adam")
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    tree["second"] = make.tree("Adam")["optimizer"]
    found = answers(make.save(tree), "cuda:0")
    assert statuses(found) == ["passed"] * 3
    assert found["parity"]["evidence"]["exact"] is False


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("Adam", {"betas": (0.0, 0.0)}),
        ("Adamax", {"betas": (0.0, 0.01)}),
        ("Adamax", {"betas": (0.0, 0.9)}),
        ("ASGD", {"lr": 0.0}),
        ("SGD", {"lr": torch.tensor(0.0)}),
    ],
)
def test_options_that_make_the_step_read_no_state_are_no_fault(make, answers, optimizer, options):
    found = answers(make(optimizer, **options), "cpu")
    assert found["fresh"]["status"] != "failed", found
    assert found["step"]["evidence"]["proven"] is True


def drop(tree, *keys):
    for key in keys:
        del tree["optimizer"]["state"][key]


@pytest.mark.parametrize(
    ("optimizer", "options", "change", "fresh"),
    [
        ("AdamW", {}, lambda tree: drop(tree, 0, 1, 2, 3), "skipped"),
        ("SGD", {"momentum": 0.9}, lambda tree: drop(tree, 0, 1, 2, 3), "skipped"),
        ("AdamW", {}, lambda tree: drop(tree, 0, 1, 2), "passed"),
        ("AdamW", {"steps": 0}, lambda tree: None, "skipped"),
    ],
)
def test_state_that_is_not_there_proves_nothing(make, answers, optimizer, options, change, fresh):
    tree = make.tree(optimizer, **options)
    change(tree)
    found = answers(make.save(tree), "cpu")
    assert statuses(found) == ["passed", "passed", fresh]
    assert found["step"]["evidence"]["proven"] is False


def test_parameters_without_state_are_said(make, answers):
    tree = make.tree("AdamW")
    drop(tree, 0, 1, 2)
    found = answers(make.save(tree), "cpu")
    evidence = found["step"]["evidence"]
    assert (evidence["parameters"], evidence["not_stepped"], evidence["proven"]) == (1, 3, False)
    assert "(model.0.weight, model.0.bias, model.1.weight)" in evidence["unproven"]
    assert evidence["unproven"] in found["step"]["detail"]


def test_state_of_nothing_but_zeros_was_lost(make, answers):
    tree = make.tree("AdamW")
    for state in tree["optimizer"]["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].zero_()
    found = answers(make.save(tree), "cpu")
    assert found["fresh"]["status"] == "failed"
    assert found["fresh"]["detail"].endswith(f": 4 parameters {LOST}")


def test_state_of_zeros_with_a_learning_rate_of_zero_cannot_be_told_from_lost_state(make, answers):
    tree = make.tree("AdamW", lr=0.0)
    for state in tree["optimizer"]["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].zero_()
    found = answers(make.save(tree), "cpu")
    assert found["fresh"]["detail"].endswith(f": 4 parameters {IDLE}")


def test_zeros_without_a_count_and_tiny_values_show_nothing(make, answers):
    tree = make.tree("SGD", momentum=0.9)
    for state in tree["optimizer"]["state"].values():
        state["momentum_buffer"].zero_()
    found = answers(make.save(tree), "cpu")
    assert found["fresh"]["detail"].endswith(f": 4 parameters {ZEROS}")
    for state in tree["optimizer"]["state"].values():
        state["momentum_buffer"].fill_(1e-30)
    found = answers(make.save(tree), "cpu")
    assert found["fresh"]["detail"].endswith(f": 4 parameters {TOO_SMALL}")


def test_an_ambiguous_pairing_proves_nothing(make, answers):
    tree = make.tree("AdamW", model=torch.nn.Linear(3, 3))
    tree["model"] = {f"{part}.{name}": value.clone() for part in "ab" for name, value in tree["model"].items()}
    found = answers(make.save(tree), "cpu")
    assert found["step"]["status"] == "passed"
    assert found["step"]["evidence"]["proven"] is False
    assert " ambiguous: " in found["step"]["evidence"]["unproven"]


def test_a_count_of_two_values_is_none(make, answers):
    tree = make.tree("RMSprop")
    tree["optimizer"]["state"][0]["step"] = torch.ones(2)
    found = answers(make.save(tree), "cpu")
    assert found["step"]["evidence"]["counted"] == 3
    assert found["numbers"]["evidence"]["wrong_counts"] == 1
    assert "optimizer.state.0.step " in found["numbers"]["detail"]


def test_tensors_without_plain_values_are_not_stepped_and_it_is_said(make, answers):
    tree = make.tree("AdamW")
    tree["model"]["0.weight"] = torch.empty(5, 6, device="meta")
    tree["model"]["0.bias"] = torch.empty(5, device="meta")
    found = answers(make.save(tree), "cpu")
    assert statuses(found) == ["passed"] * 3
    evidence = found["step"]["evidence"]
    assert (evidence["parameters"], evidence["not_stepped"], evidence["proven"]) == (2, 2, False)
    assert "(model.0.weight, model.0.bias)" in evidence["unproven"]


def test_a_learning_rate_of_zero_is_said_and_no_fault(make, answers):
    found = answers(make("SGD", momentum=0.9, lr=0.0), "cpu")
    assert statuses(found) == ["passed"] * 3
    assert found["step"]["evidence"]["moved"] == 0
    assert f"4 parameters {IDLE}" in found["step"]["detail"]


def test_a_step_that_does_nothing_fails(make, answers, monkeypatch):
    class Idle(torch.optim.SGD):
        def step(self):
            return

    path = make("SGD", momentum=0.9)
    monkeypatch.setattr(torch.optim, "SGD", Idle)
    found = answers(path, "cpu")["step"]
    assert (found["status"], found["evidence"]["moved"]) == ("failed", 0)


def test_infinities_in_what_may_be_a_parameter_are_no_mask(make, answers):
    """Two parts with the same shapes: it is unknown which of them is trained."""
    tree = make.tree("AdamW", model=torch.nn.Linear(3, 3))
    tree["model"] = {"a.weight": tree["model"]["weight"], "a.bias": tree["model"]["bias"]}
    tree["model"] |= {"b.weight": torch.tensor([[float("-inf")] + [0.5] * 2] * 3), "b.bias": torch.ones(3)}
    found = answers(make.save(tree), "cpu")
    assert "model.b.weight holds 3 Inf" in found["numbers"]["detail"]


@pytest.mark.parametrize(
    "values",
    [torch.tensor([-3.0, 1.0]), torch.tensor([3.0, -1.0]).half(), torch.tensor([3j, 1]), torch.tensor([-3, 1])],
)
def test_the_largest_magnitude_of_values_of_either_sign(values):
    assert _largest_magnitude(values) == 3
    assert _largest_magnitude(torch.tensor([-3.0, float("-inf")])) == float("inf")
    assert _largest_magnitude(torch.tensor([-3.0, float("nan")])) != _largest_magnitude(
        torch.tensor([-3.0, float("nan")])
    )


def test_moments_that_are_columns_of_larger_tensors(make, answers):
    tree = make.tree("AdamW")
    for entry in tree["optimizer"]["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            columns = torch.zeros(*entry[key].shape, 5)
            columns[..., 2] = entry[key]
            entry[key] = columns[..., 2]
    found = answers(make.save(tree), "cuda:0")
    assert [found[name]["status"] for name in ("restore", "step", "parity", "fresh")] == ["passed"] * 4

from __future__ import annotations

from argparse import Namespace
from fractions import Fraction

import numpy as np
import pytest
import torch

import ckptmove
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.checks import NOTHING_TO_RESUME
from ckptmove.proof.step.stored_state import optimizer_state_dict
from ckptmove.proof.step.trial import IDLE, LOST, NOT_STEPPED, READS_NOTHING, WITHOUT_STATE
from ckptmove.proof.tensors.stored import StoredTensors
from ckptmove.training.case.options import is_equal

OPTIONS = {
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Adagrad": {},
    "Adadelta": {},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
    "Muon": {},
}
STEPS = ("step", "parity", "fresh")


def statuses(found, names=STEPS):
    return [found[name]["status"] for name in names]


@pytest.mark.unmeasured
@pytest.mark.parametrize("target", ["cpu", "cuda:0", "mps"])
@pytest.mark.parametrize("optimizer", OPTIONS)
def test_every_optimizer_resumes(make, answers, optimizer, target):
    if not hasattr(torch.optim, optimizer):
        pytest.skip(f"this torch has no {optimizer}")
    model = torch.nn.Linear(6, 5, bias=False) if optimizer == "Muon" else None
    found = answers(make(optimizer, device=target, model=model, **OPTIONS[optimizer]), target)
    assert statuses(found) == ["passed"] * 3, found
    assert found["mode"] == ("cpu" if target == "cpu" else "simulated")
    assert ("(simulated)" in found["step"]["detail"]) == (target != "cpu")
    assert found["step"]["evidence"]["moved"] == found["step"]["evidence"]["parameters"]
    assert found["parity"]["evidence"]["exact"] is True


#: An option that is an object, which weights-only mode builds; and one that it does not.
OBJECTS = {"extra": {"ranks": [1, (2,)], "at": torch.ones(2)}, "precision": torch.bfloat16}


@pytest.mark.parametrize(("options", "is_proven"), [(OBJECTS, True), ({**OBJECTS, "other": Namespace(a=1)}, False)])
def test_options_that_are_objects_are_built_as_load_builds_them(make, answers, options, is_proven):
    tree = make.tree("AdamW")
    tree["optimizer"]["param_groups"][0] |= options
    step = answers(make.save(tree), "cuda:0")["step"]
    assert (step["status"], step["evidence"]["proven"]) == ("passed", is_proven)
    assert step["evidence"]["unproven"].startswith("" if is_proven else "options that need unpickling (other)")


@pytest.mark.parametrize("optimizer", [*OPTIONS, "LBFGS"])
def test_a_state_dict_is_rebuilt_as_load_builds_it(make, optimizer):
    model = torch.nn.Linear(6, 5, bias=False) if optimizer == "Muon" else None
    options = OPTIONS.get(optimizer, {})
    tree = trained_scalar(optimizer, {}) if optimizer == "LBFGS" else make.tree(optimizer, model=model, **options)
    tree["optimizer"]["param_groups"][0] |= OBJECTS
    path = make.save(tree, device="cpu")
    with open_checkpoint(str(path), Limits(), keep_trees=True) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        [record] = checkpoint.inventory.optimizers
        found = optimizer_state_dict(record, checkpoint, stored, Limits())
    expected = ckptmove.load(path)["optimizer"]
    expected["state"] = {str(key): state for key, state in expected["state"].items()}
    for state in expected["state"].values():
        state.pop("al", None)
    for group in expected["param_groups"]:
        group["params"] = [*map(str, group["params"])]
    assert is_equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "maximize": True},
        {"momentum": 0.9, "foreach": True},
        {"momentum": 0.9, "fused": True},
    ],
    ids=str,
)
def test_sgd_with_its_options(make, answers, options):
    found = answers(make("SGD", **options), "cuda:0")
    assert statuses(found) == ["passed"] * 3, found
    assert found["parity"]["evidence"]["exact"] is True


def test_sgd_without_momentum_has_nothing_to_restore(make, answers):
    found = answers(make("SGD"), "cpu")
    assert statuses(found) == ["passed", "passed", "skipped"]
    assert found["fresh"]["detail"].endswith(f": 4 parameters {READS_NOTHING}")


def test_state_that_is_not_there_yet(make, answers):
    found = answers(make("AdamW", steps=0), "cpu")
    assert statuses(found) == ["passed", "passed", "skipped"]
    assert found["fresh"]["detail"].endswith(f": 4 parameters {WITHOUT_STATE}")


def test_adagrad_at_its_first_step_is_fresh_although_its_sums_are_not_zero(make, answers):
    found = answers(make("Adagrad", steps=0, initial_accumulator_value=0.1), "cpu")
    assert statuses(found) == ["passed", "passed", "skipped"]
    assert found["fresh"]["detail"].endswith(f": 4 parameters {NOT_STEPPED}")


def test_state_of_zeros_is_said_beside_state_that_shows(make, answers):
    tree = make.tree("AdamW")
    for key in ("exp_avg", "exp_avg_sq"):
        tree["optimizer"]["state"][2][key].zero_()
    found = answers(make.save(tree), "cpu")
    assert statuses(found) == ["passed"] * 3
    assert found["fresh"]["evidence"] == {"with_state": 3, "changed": 3}
    assert found["fresh"]["detail"].endswith(f"; 1 parameter {LOST}")


class Scalar(torch.nn.Module):
    """A model with one parameter, which is 0-d: a temperature, the logarithm of an entropy coefficient."""

    def __init__(self):
        super().__init__()
        self.log_alpha = torch.nn.Parameter(torch.tensor(0.5))


@pytest.mark.parametrize("target", ["cpu", "cuda:0"])
@pytest.mark.parametrize("optimizer", {name: None for name in OPTIONS if name != "Muon"} | {"LBFGS": None})
def test_a_parameter_without_dimensions_resumes(make, answers, optimizer, target):
    options = OPTIONS.get(optimizer, {})
    path = (
        make.save(trained_scalar(optimizer, options))
        if optimizer == "LBFGS"
        else make(optimizer, model=Scalar(), **options)
    )
    found = answers(path, target)
    assert statuses(found) == ["passed"] * 3, found["fresh"]["detail"]
    assert found["step"]["evidence"]["proven"], found["step"]["evidence"]["unproven"]
    assert found["fresh"]["evidence"] == {"with_state": 1, "changed": 1}


def trained_scalar(optimizer, options):
    model = Scalar()
    trained = getattr(torch.optim, optimizer)(model.parameters(), **options)

    def closure():
        trained.zero_grad()
        loss = (model.log_alpha - 3) ** 4
        loss.backward()
        return loss

    for _ in range(3):
        trained.step(closure)
    return {"model": model.state_dict(), "optimizer": trained.state_dict()}


def test_lost_state_of_a_parameter_without_dimensions(make, answers):
    tree = make.tree("AdamW", model=Scalar())
    for key in ("exp_avg", "exp_avg_sq"):
        tree["optimizer"]["state"][0][key].zero_()
    found = answers(make.save(tree), "cpu")
    assert found["fresh"]["status"] == "failed"
    assert found["fresh"]["detail"].endswith(f": 1 parameter {LOST}")


def test_no_optimizer_at_all(make, answers):
    tree = make.tree()
    del tree["optimizer"]
    found = answers(make.save(tree), "cuda:0")
    assert statuses(found) == ["skipped"] * 3
    assert found["step"]["detail"] == NOTHING_TO_RESUME


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_dtypes(make, answers, dtype):
    model = torch.nn.Linear(6, 5)
    model.weight.data[:] = 1.0
    found = answers(make("Adam", dtype=dtype, model=model, eps=1e-4), "cuda:0")
    assert statuses(found) == ["passed"] * 3, found


def test_master_weights_are_cast_by_load_state_dict_and_it_is_said(make, answers):
    tree = make.tree("AdamW")
    tree["model"] = {key: value.bfloat16() for key, value in tree["model"].items()}
    found = answers(make.save(tree), "cuda:0")
    assert " 4 exp_avg from float32 to bfloat16: that loses precision" in found["step"]["detail"]


def test_step_counts_of_old_torch_are_plain_ints(make, answers):
    tree = make.tree("AdamW")
    for state in tree["optimizer"]["state"].values():
        state["step"] = 3
    found = answers(make.save(tree), "cuda:0")
    assert statuses(found) == ["passed"] * 3
    assert found["step"]["evidence"]["counted"] == 4
    assert " to 4" in found["step"]["detail"]


def test_state_without_a_step_count(make, answers):
    tree = make.tree("RMSprop")
    for state in tree["optimizer"]["state"].values():
        del state["step"]
    found = answers(make.save(tree), "cpu")
    assert found["step"]["evidence"]["counted"] == 0


def test_a_learning_rate_that_is_a_tensor(make, answers):
    found = answers(make("Adam", lr=torch.tensor(1e-3)), "cuda:0")
    assert statuses(found) == ["passed"] * 3, found


def test_an_option_that_is_an_object(make, answers):
    tree = make.tree("AdamW")
    tree["optimizer"]["param_groups"][0]["lr"] = Fraction(1, 1000)
    found = answers(make.save(tree), "cuda:0")
    assert statuses(found) == ["passed"] * 3
    assert found["step"]["evidence"]["proven"] is False
    assert "(lr)" in found["step"]["evidence"]["unproven"]


def test_a_learning_rate_that_numpy_has_computed(make, answers):
    tree = make.tree("AdamW")
    tree["optimizer"]["param_groups"][0]["lr"] = np.float64(1e-3)
    found = answers(make.save(tree), "cuda:0")
    assert statuses(found) == ["passed"] * 3
    assert found["step"]["evidence"]["proven"] is True


def test_extra_keys_of_a_scheduler_do_not_matter(make, answers):
    tree = make.tree("AdamW")
    tree["optimizer"]["param_groups"][0]["initial_lr"] = 0.1
    assert statuses(answers(make.save(tree), "cuda:0")) == ["passed"] * 3


def test_a_learning_rate_of_zero_moves_nothing(make, answers):
    found = answers(make("AdamW", lr=0.0), "cpu")
    assert statuses(found) == ["passed"] * 3
    assert f"4 parameters {IDLE}" in found["step"]["detail"]


def test_an_update_below_the_precision_is_no_failure_while_the_moments_change(make, answers):
    found = answers(make("AdamW", lr=1e-30, weight_decay=0.0), "cpu")
    assert statuses(found) == ["passed"] * 3
    assert "4 parameters with an update below its precision" in found["step"]["detail"]


def test_nothing_that_changes_is_a_failure(make, answers):
    found = answers(make("SGD", lr=1e-30), "cpu")
    assert found["step"]["status"] == "failed"
    assert found["step"]["detail"] == "neither a parameter nor a moment changed on cpu"


def test_parameters_that_are_not_in_the_file_are_stood_in_for(make, answers):
    tree = make.tree("AdamW")
    del tree["model"]
    found = answers(make.save(tree, name="optimizer.pt"), "cuda:0")
    assert statuses(found) == ["passed"] * 3
    assert found["step"]["evidence"]["standins"] == 4


def test_neither_parameter_nor_moment(make, answers):
    tree = make.tree("SGD")
    del tree["model"]
    found = answers(make.save(tree), "cpu")
    assert statuses(found) == ["skipped"] * 3
    assert (found["step"]["evidence"]["parameters"], found["step"]["evidence"]["not_stepped"]) == (0, 4)


def test_frozen_parameters_are_left_out(make, answers):
    tree = make.tree("AdamW")
    del tree["optimizer"]["state"][1]
    assert answers(make.save(tree), "cpu")["step"]["evidence"]["parameters"] == 3


@pytest.mark.parametrize("contiguous", [True, False])
def test_large_parameters_are_stepped_in_windows(make, answers, contiguous):
    weight = torch.nn.Linear(600, 1100, bias=False)
    if not contiguous:
        weight.weight = torch.nn.Parameter(torch.randn(1100, 600).t())
    found = answers(make("AdamW", model=weight, steps=2), "cuda:0")
    assert statuses(found) == ["passed"] * 3, found
    assert found["step"]["evidence"]["elements"] == 660_000
    assert found["step"]["evidence"]["parameters"] == 1


def test_a_whole_parameter_larger_than_the_noise(make, answers):
    found = answers(make("Adafactor", model=torch.nn.Linear(900, 700, bias=False), steps=1), "cpu")
    assert statuses(found) == ["passed"] * 3, found


def test_an_unknown_optimizer_is_skipped(make, answers):
    tree = make.tree("AdamW")
    tree["optimizer"]["param_groups"] = [{"params": [0, 1, 2, 3], "lr": 0.1, "rho_of_mine": 1}]
    found = answers(make.save(tree), "cpu")
    assert found["step"]["detail"].endswith(" --optimizer pkg.mod:CLASS")


def test_a_class_that_this_torch_lacks(make, answers, monkeypatch):
    path = make("Adamax")
    monkeypatch.delattr(torch.optim, "Adamax")
    assert answers(path, "cpu")["step"]["detail"].endswith(" no Adamax")


def test_two_optimizers_of_which_one_is_known(make, answers):
    tree = make.tree("AdamW")
    tree["other"] = {"state": {}, "param_groups": [{"params": [0], "lr": 0.1, "rho_of_mine": 1}]}
    found = answers(make.save(tree), "cpu")
    assert statuses(found) == ["passed"] * 3
    assert found["step"]["evidence"]["unproven"].startswith("other ")


def test_old_adam_and_adamw_look_alike(make, answers):
    tree = make.tree("AdamW")
    for group in tree["optimizer"]["param_groups"]:
        group.pop("decoupled_weight_decay", None)  # torch 2.6 writes it
    path = make.save(tree)
    assert "--optimizer Adam " in answers(path, "cpu")["step"]["detail"]
    assert "assumed" not in answers(path, "cpu", optimizer="AdamW")["step"]["detail"]
    tree["optimizer"]["param_groups"][0]["weight_decay"] = 0
    detail = answers(make.save(tree), "cpu")["step"]["detail"]
    assert "Adam was assumed; AdamW writes the same keys, and without weight decay the same step" in detail

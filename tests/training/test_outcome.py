"""The verdict on a step of the user's training follows from the facts about it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ckptmove.proof.place import Site, TorchDevice
from ckptmove.training.case.options import AtStep, Setter
from ckptmove.training.case.parts import ModelPart, OptimizerPart
from ckptmove.training.case.taken import StoredPart
from ckptmove.training.code.source import Line
from ckptmove.training.outcome import Facts, RestoredModel, SteppedOptimizer, judge

MODEL = nn.Linear(2, 1)
PARAMETERS = (*MODEL.parameters(),)
BENCH = SimpleNamespace(site=Site("cuda:0", "simulated"), pairings=[(SimpleNamespace(where="optimizer"), None)])


def steps(count=1, moved=PARAMETERS, is_still=False, missed=(), options=()):
    return SimpleNamespace(
        count=count, moved=set(map(id, moved)), is_still=is_still, missed=missed, options=[AtStep(dict(options), {})]
    )


def stepped(kind="Adam", key="", where="optimizer", entries=2, stored=2, fault="", **record):
    optimizer = getattr(torch.optim, kind)(MODEL.parameters(), lr=0.1)
    part = OptimizerPart(f"optimizer[{key!r}]" if key else "optimizer", key, None, optimizer)
    groups = ({"lr": 0.5},) if "options" in record else ()
    return SteppedOptimizer(part, steps(**record), where, entries, stored, groups, fault=fault)


PROVEN = Facts(
    who="script",
    bench=BENCH,
    place=TorchDevice("cpu"),
    models=[RestoredModel(ModelPart("model", "", None, MODEL), "model", 2, 2)],
    optimizers=[stepped()],
    parameters=PARAMETERS,
    names={id(one): f"model.{name}" for name, one in MODEL.named_parameters()},
    restored="by train.py:3",
    parts=(),
    not_taken=(),
)


def model(**changes):
    return [PROVEN.models[0]._replace(**changes)]


def part(path, role):
    return StoredPart(path, role, None, {}, ("",), ())


def test_a_step_without_doubts_is_proven():
    outcome = judge(PROVEN)
    assert outcome.fault is None
    assert outcome.figures == {
        "resumed": True,
        "options": [],
        "not_taken": [],
        "parameters": 2,
        "moved": 2,
        "unproven": "",
        "proven": True,
    }
    assert outcome.summary == (
        "1 step of Adam on cuda:0 (simulated): 2 of 2 parameters moved, all finite; "
        "2 tensors and the state of 2 parameters restored by train.py:3"
    )


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"losses": {"": 0.25}}, ": loss 0.25, 2 of 2"),
        ({"losses": {"['d']": 1.0, "['g']": 2.0}}, ": loss['d'] 1, loss['g'] 2, 2 of 2"),
        ({"losses": {}}, ": no loss returned, 2 of 2"),
        ({"bench": SimpleNamespace(**{**vars(BENCH), "pairings": []})}, "; there is no optimizer state"),
        ({"optimizers": [stepped(), stepped("SGD", "g")]}, "2 steps of Adam and g (SGD) on"),
    ],
)
def test_a_summary_says_what_is_known(change, part):
    assert part in judge(PROVEN._replace(**change)).summary


@pytest.mark.parametrize(
    ("change", "figures"),
    [
        ({"raised": "it raised"}, {}),
        ({"away": MODEL.weight}, {"tensor": "model.weight", "on": "cpu"}),
        ({"models": model(tensors=0)}, {}),
        ({"losses": {"": math.nan}}, {}),
        ({"parameters": [torch.tensor(math.inf)]}, {"tensor": "a parameter"}),
        ({"optimizers": [stepped(), stepped(moved=(), is_still=True)]}, {}),
    ],
)
def test_a_fault_names_its_tensor(change, figures):
    fault = judge(PROVEN._replace(**change)).fault
    assert fault is not None
    assert fault.figures == figures
    assert all(text in fault.text for text in figures.values())


def test_the_first_fault_is_the_cause_of_the_others():
    assert judge(PROVEN._replace(away=MODEL.weight, raised="it raised")).fault.text == "it raised"


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({"models": model(fault="no part fits")}, "no part fits"),
        ({"models": []}, "no model has the parameters of the optimizer"),
        ({"optimizers": [stepped(where=None, entries=0, stored=0, fault="no state fits")]}, "no state fits"),
        ({"models": model(differing=("a", "b"))}, "2 tensors not as stored before the step (a, b)"),
        ({"models": model(cast=("a",))}, "1 tensor of the file cast to the dtype of the model (a)"),
        ({"optimizers": [stepped(missed=[MODEL.bias])]}, "1 parameter not stepped (model.bias)"),
        ({"optimizers": [stepped(entries=1)]}, "the state of 1 of 2 parameters in Adam is not the stored one"),
        ({"optimizers": [stepped(), stepped("SGD", count=0, moved=(), missed=[MODEL.bias])]}, "SGD made no step"),
        ({"optimizers": [stepped(entries=0, stored=0)]}, "no state was restored into Adam"),
        (
            {"optimizers": [stepped(moved=()), stepped("SGD", moved=())]},
            "no parameter moved in the step of Adam and SGD",
        ),
        ({"optimizers": [stepped(where="")]}, "no optimizer with the state of optimizer made a step"),
    ],
)
def test_a_doubt_leaves_the_resume_unproven(change, doubt):
    outcome = judge(PROVEN._replace(**change))
    assert outcome.figures["unproven"] == doubt
    assert (outcome.figures["resumed"], outcome.figures["proven"]) == (False, False)
    assert outcome.summary.endswith(f"; not proven: {doubt}")


@pytest.mark.parametrize("constructor", ["", "StepLR"])
def test_an_option_that_was_lost_is_a_doubt_and_one_that_is_computed_a_note(constructor):
    optimizer = stepped(options={"lr": 0.1})
    optimizer.steps.options[0] = AtStep({"lr": 0.1}, {"lr": Setter(Line("train.py", 3, "", "train.py"), constructor)})
    outcome = judge(PROVEN._replace(optimizers=[optimizer]))
    assert (outcome.figures["resumed"], outcome.figures["proven"]) == (True, not constructor)
    assert ("not proven: lr is 0.1" in outcome.summary, "lr is 0.1" in outcome.summary) == (bool(constructor), True)


def test_an_option_that_is_not_unpickled_is_not_compared():
    outcome = judge(PROVEN._replace(optimizers=[stepped()._replace(left_out=("part",))]))
    assert (outcome.figures["resumed"], outcome.figures["proven"]) == (True, False)
    assert outcome.figures["unproven"].startswith("part is in the file")


@pytest.mark.parametrize(
    ("left", "named"),
    [
        ([], ""),
        (["scaler"], "scaler is in the file; the script does not restore it"),
        (["rng.a"], "rng.a is in the file; the script does not restore it"),
        (["rng.b", "rng.a"], "rng is in the file; the script does not restore it"),
        (["rng.b", "ema", "scaler"], "scaler, ema and rng.b are in the file; the script restores none of them"),
        (["", "scheduler"], "the file and scheduler are in the file; the script restores none of them"),
    ],
)
def test_all_parts_of_a_role_are_named_by_the_role(left, named):
    roles = {
        "scaler": "scaler",
        "ema": "ema",
        "rng.a": "rng",
        "rng.b": "rng",
        "": "scheduler",
        "scheduler": "scheduler",
    }
    parts = tuple(part(path, role) for path, role in [*roles.items(), ("other", "scheduler")])
    facts = PROVEN._replace(parts=parts, not_taken=tuple(part(path, roles[path]) for path in left))
    figures = judge(facts).figures
    assert (figures["unproven"], figures["not_taken"], figures["resumed"]) == (named, left, True)

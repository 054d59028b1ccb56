"""LBFGS, which steps all parameters as one vector, and SparseAdam, which takes sparse gradients alone."""

from __future__ import annotations

import pytest
import torch

from ckptmove.proof.step import trial

STEPS = ("step", "parity", "fresh")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch.optim.SparseAdam's own constructor


def statuses(found):
    return [found[name]["status"] for name in STEPS]


def lbfgs(steps=3, dtype=torch.float32, model=None, **options):
    torch.manual_seed(0)
    model = (model or torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))).to(dtype)
    batch = torch.randn(8, 6, dtype=dtype)
    optimizer = torch.optim.LBFGS(model.parameters(), **{"max_iter": 4, "history_size": 5, **options})

    def closure():
        optimizer.zero_grad()
        loss = (model(batch) - 1).abs().pow(2).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": steps}


def sparse(steps=3, dtype=torch.float32, rows=10):
    torch.manual_seed(0)
    table = torch.nn.Embedding(rows, 4, sparse=True).to(dtype)
    optimizer = torch.optim.SparseAdam(table.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        table(torch.tensor([1, 3, 3, rows - 1])).pow(2).sum().backward()
        optimizer.step()
    return {"model": {"table.weight": table.weight.detach()}, "optimizer": optimizer.state_dict(), "epoch": steps}


@pytest.mark.unmeasured
@pytest.mark.parametrize("target", ["cpu", "cuda:0", "mps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
def test_lbfgs_resumes_from_its_history(make, answers, target, dtype, line_search_fn):
    tree = lbfgs(dtype=dtype, line_search_fn=line_search_fn)
    found = answers(make.save(tree, device=target, stay=()), target)
    assert statuses(found) == ["passed"] * 3, found
    assert found["step"]["evidence"]["proven"] is True
    assert found["step"]["evidence"]["parameters"] == 4
    assert found["parity"]["evidence"]["exact"] is True
    assert found["fresh"]["evidence"]["changed"] == 4


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_lbfgs_on_complex_parameters(make, answers):
    found = answers(make.save(lbfgs(dtype=torch.complex64, model=torch.nn.Linear(6, 5))), "cpu")
    assert statuses(found) == ["passed"] * 3, found


def test_lbfgs_before_its_first_step(make, answers):
    found = answers(make.save(lbfgs(steps=0)), "cuda:0")
    assert statuses(found) == ["passed", "passed", "skipped"]
    assert found["fresh"]["detail"].endswith(f": 4 parameters {trial.WITHOUT_STATE}")


def test_lbfgs_after_one_iteration_has_no_history_and_a_scale_of_one(make, answers):
    tree = lbfgs(steps=1, max_iter=1)
    assert tree["optimizer"]["state"][0]["old_dirs"] == []
    assert tree["optimizer"]["state"][0]["H_diag"] == 1
    assert statuses(answers(make.save(tree), "cuda:0")) == ["passed"] * 3


def test_lbfgs_with_a_learning_rate_of_zero(make, answers):
    tree = lbfgs()
    tree["optimizer"]["param_groups"][0]["lr"] = 0.0
    found = answers(make.save(tree), "cpu")
    assert found["step"]["status"] == "passed"
    assert f"4 parameters {trial.IDLE}" in found["step"]["detail"]


def test_a_history_that_the_optimizer_forgets_fails_fresh(make, answers, monkeypatch):
    class Forgetful(torch.optim.LBFGS):
        def load_state_dict(self, state_dict):
            super().load_state_dict({**state_dict, "state": {}})

    path = make.save(lbfgs())
    monkeypatch.setattr(torch.optim, "LBFGS", Forgetful)
    found = answers(path, "cpu")
    assert found["fresh"]["status"] == "failed"
    assert found["fresh"]["evidence"] == {"with_state": 4, "changed": 0}
    assert " model.0.bias" in found["fresh"]["detail"]
    assert "n_iter went from 12 to 4" in found["step"]["detail"]


@pytest.mark.parametrize(
    ("key", "fault"), [("old_dirs", "TypeError"), ("ro", "AttributeError"), ("prev_flat_grad", "Error")]
)
def test_a_lost_part_of_the_history_fails_the_step(make, answers, key, fault):
    tree = lbfgs()
    del tree["optimizer"]["state"][0][key]
    found = answers(make.save(tree), "cpu")
    assert statuses(found) == ["failed", "skipped", "skipped"]
    assert fault in found["step"]["detail"]


def swap(state):
    state["old_dirs"], state["old_stps"] = state["old_stps"], [2 * one for one in state["old_dirs"]]


def shorten(state):
    state["old_dirs"].pop()


def misshape(state):
    state["old_stps"][1] = torch.zeros(7)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (swap, "ro.0 is"),
        (shorten, "the history has no old_dirs.4"),
        (misshape, "Error"),
        (lambda state: state["ro"].reverse(), "ro.0 is"),
    ],
)
def test_a_history_that_does_not_belong_together_fails_the_step(make, answers, spoil, said):
    tree = lbfgs()
    spoil(tree["optimizer"]["state"][0])
    found = answers(make.save(tree), "cpu")
    assert found["step"]["status"] == "failed"
    assert said in found["step"]["detail"]


def test_a_history_of_two_sizes_that_the_step_does_not_look_at_yet(make, answers):
    tree = lbfgs()
    state = tree["optimizer"]["state"][0]
    state["n_iter"] = 0
    misshape(state)
    found = answers(make.save(tree), "cpu")
    assert "old_dirs.1 is [53], old_stps.1 is [7]" in found["step"]["detail"]


def test_an_inverse_of_zero_belongs_to_no_history(make, answers):
    tree = lbfgs()
    tree["optimizer"]["state"][0]["ro"][0] = torch.tensor(0.0)
    assert "ro.0 is 0, " in answers(make.save(tree), "cpu")["step"]["detail"]


def test_another_history_is_not_the_original(make, answers):
    tree = lbfgs()
    path = make.save(tree)
    tree["optimizer"]["state"][0]["old_stps"][-1] += 1e-3
    found = answers(path, "cuda:0", against=make.save(tree, name="original.pt"))
    assert found["parity"]["status"] == "failed"


def test_a_refusal_of_lbfgs_is_not_searched_for_parameter_by_parameter(make, answers, monkeypatch):
    steps = []

    class Refusing(torch.optim.LBFGS):
        def step(self, closure):
            steps.append(len(self.param_groups[0]["params"]))
            raise RuntimeError("no")

    path = make.save(lbfgs())
    monkeypatch.setattr(torch.optim, "LBFGS", Refusing)
    assert "model.0.weight: RuntimeError: no" in answers(path, "cpu")["step"]["detail"]
    assert steps == [4]


def test_lbfgs_without_its_model_is_not_stepped(make, answers):
    tree = lbfgs()
    del tree["model"]
    found = answers(make.save(tree), "cpu")
    assert statuses(found) == ["skipped"] * 3
    assert found["step"]["detail"].endswith(
        "LBFGS steps all parameters as one vector, and 4 of 4 parameters not found in the file"
    )


def test_lbfgs_of_options_that_are_those_of_another(make, answers):
    found = answers(make("AdamW"), "cpu", optimizer="LBFGS")
    assert found["step"]["status"] == "failed"
    assert "KeyError: 'max_iter'" in found["step"]["detail"]


@pytest.mark.parametrize("target", ["cpu", "cuda:0", "mps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sparse_adam_resumes(make, answers, target, dtype):
    found = answers(make.save(sparse(dtype=dtype), device=target), target)
    assert statuses(found) == ["passed"] * 3, found
    assert found["step"]["evidence"]["proven"] is True
    assert found["step"]["evidence"]["counted"] == 1


@pytest.mark.slow
@pytest.mark.unmeasured
def test_sparse_adam_in_windows(make, answers):
    found = answers(make.save(sparse(steps=2, rows=70_000)), "cuda:0")
    assert statuses(found) == ["passed"] * 3, found
    assert found["step"]["evidence"]["elements"] == 280_000


def test_sparse_moments_that_are_forgotten_fail_fresh(make, answers, monkeypatch):
    class Forgetful(torch.optim.SparseAdam):
        def load_state_dict(self, state_dict):
            super().load_state_dict({**state_dict, "state": {}})

    path = make.save(sparse())
    monkeypatch.setattr(torch.optim, "SparseAdam", Forgetful)
    found = answers(path, "cpu")
    assert statuses(found)[2] == "failed"
    assert found["fresh"]["detail"].endswith(" model.table.weight")


def test_other_sparse_moments_are_not_the_original(make, answers):
    tree = sparse()
    path = make.save(tree)
    tree["optimizer"]["state"][0]["exp_avg_sq"] *= 2
    assert answers(path, "cpu", against=make.save(tree, name="original.pt"))["parity"]["status"] == "failed"


def test_the_gradients_of_lbfgs_are_of_the_magnitude_that_its_state_speaks_of(make, answers, monkeypatch):
    seen = []

    def watch(drafts, source, real=trial.as_one):
        seen.extend(real(drafts, source))
        return seen

    tree = lbfgs()
    tree["optimizer"]["state"][0]["H_diag"] = torch.tensor(-1.0)
    monkeypatch.setattr(trial, "as_one", watch)
    answers(make.save(tree), "cpu")
    assert {draft.curvature for draft in seen} == {1.0}
    assert len({draft.scale for draft in seen}) == 1


class Halves(torch.nn.Module):
    """A model with a frozen part that the optimizer does not have."""

    def __init__(self, frozen):
        super().__init__()
        sizes = [(6, 4), (4, 3), (3, 2)]
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        self.layers[frozen].requires_grad_(False)

    def parameters(self, recurse=True):
        return (one for one in super().parameters(recurse) if one.requires_grad)

    def forward(self, batch):
        return self.layers(batch)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("frozen", [0, 2])
def test_lbfgs_of_one_run_of_the_model_is_stepped_with_it(make, answers, frozen, dtype):
    found = answers(make.save(lbfgs(model=Halves(frozen), dtype=dtype)), "cpu")
    assert statuses(found) == ["passed"] * 3, found
    assert " elements " in found["step"]["evidence"]["unproven"]


def test_lbfgs_of_no_run_of_the_model_is_not_accused(make, answers):
    found = answers(make.save(lbfgs(model=Halves(1))), "cpu")
    assert statuses(found) == ["skipped"] * 3
    assert ", and 4 of 4 parameters " in found["step"]["detail"]

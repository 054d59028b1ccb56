from __future__ import annotations

import pytest
import torch

INF, NAN = float("inf"), float("nan")


def spoil_weight(tree):
    tree["model"]["0.weight"][1, 1] = NAN


def spoil_moment(tree):
    tree["optimizer"]["state"][1]["exp_avg"][0] = INF


def negative_moment(tree):
    tree["optimizer"]["state"][1]["exp_avg_sq"][0] = -1e-9


def negative_step(tree):
    tree["optimizer"]["state"][1]["step"] = torch.tensor(-1.0)


def negative_int_step(tree):
    tree["optimizer"]["state"][1]["step"] = -3


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (spoil_weight, "N501", "model.0.weight holds 1 NaN in 30 values"),
        (spoil_moment, "N501", "optimizer.state.1.exp_avg holds 1 Inf in 5 values"),
        (negative_moment, "N502", "optimizer.state.1.exp_avg_sq holds -1e-09"),
        (negative_step, "N502", "optimizer.state.1.step holds -1"),
        (negative_int_step, "N502", "optimizer.state.1.step holds -3"),
    ],
)
def test_values_that_training_cannot_go_on_from(make, answers, spoil, code, said):
    tree = make.tree("AdamW")
    spoil(tree)
    found = answers(make.save(tree), "cpu")
    assert found["numbers"]["status"] == "failed"
    assert said in found["numbers"]["detail"]
    assert [finding["code"] for finding in found["findings"]] == [code]
    assert said in found["findings"][0]["message"]


def test_what_is_ignored_does_not_fail(make, answers):
    tree = make.tree("AdamW")
    negative_moment(tree)
    spoil_weight(tree)
    path = make.save(tree)
    assert answers(path, "cpu", ignore=("N501",))["numbers"]["detail"].startswith("below")
    assert answers(path, "cpu", ignore=("N502",))["numbers"]["detail"].startswith("not finite:")
    found = answers(path, "cpu", ignore=("N501", "N502"))["numbers"]
    assert found["status"] == "passed"
    assert (found["evidence"]["not_finite"], found["evidence"]["negative"]) == (1, 1)


@pytest.mark.parametrize(
    ("optimizer", "key", "value"), [("AdamW", "step", 0.0), ("AdamW", "step", 2.5), ("NAdam", "mu_product", 5.0)]
)
def test_a_scalar_that_no_training_writes_has_a_code_too(make, answers, optimizer, key, value):
    tree = make.tree(optimizer)
    tree["optimizer"]["state"][2][key] = torch.tensor(value)
    path = make.save(tree)
    (where,) = [one["where"] for one in answers(path, "cpu")["findings"] if one["code"] == "N502"]
    assert where == [f"optimizer.state.2.{key}"]
    found = answers(path, "cpu", ignore=("N502",))["numbers"]
    assert (found["status"], found["evidence"]["wrong_counts"]) == ("passed", 1)


def test_both_at_once_and_nan_beside_inf(make, answers):
    tree = make.tree("AdamW")
    negative_moment(tree)
    tree["model"]["0.weight"][0, 0] = NAN
    tree["model"]["0.weight"][0, 1] = INF
    found = answers(make.save(tree), "cpu")
    assert " 1 NaN and 1 Inf in 30 values; below " in found["numbers"]["detail"]
    assert [finding["code"] for finding in found["findings"]] == ["N501", "N502"]


def test_a_mask_in_a_buffer_may_be_infinite_but_not_nan(make, answers):
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    tree = make.tree("AdamW", model=Masked())
    found = answers(make.save(tree), "cpu")
    assert found["numbers"]["status"] == "passed", found["numbers"]
    assert found["numbers"]["evidence"]["infinite_buffers"] == 1
    tree["model"]["mask"][0, 0] = NAN
    assert answers(make.save(tree), "cpu")["numbers"]["status"] == "failed"


def test_a_mask_without_an_optimizer_and_before_the_first_step(make, answers):
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    tree = make.tree("SGD", model=Masked())
    found = answers(make.save(tree), "cpu")
    assert [found[name]["status"] for name in ("numbers", "step")] == ["passed", "passed"], found
    del tree["optimizer"]
    assert answers(make.save(tree), "cpu")["numbers"]["status"] == "passed"


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_statistics_of_a_normalisation_are_no_mask(make, answers, name):
    tree = make.tree("AdamW", model=torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)))
    tree["model"][f"1.{name}"].fill_(-INF)
    assert f"model.1.{name} holds 5 Inf" in answers(make.save(tree), "cpu")["numbers"]["detail"]


def test_extremes_that_an_observer_has_not_seen_may_be_infinite(make, answers):
    observed = {"obs.min_val": torch.full((3,), INF), "obs.max_val": torch.full((3,), -INF), "best": torch.tensor(INF)}
    tree = make.tree("AdamW")
    tree["model"].update(observed)
    assert answers(make.save(tree), "cpu")["numbers"]["status"] == "passed"
    del tree["optimizer"]
    assert answers(make.save(tree), "cpu")["numbers"]["status"] == "passed"
    tree["model"]["obs.min_val"][0] = -INF
    assert answers(make.save(tree), "cpu")["numbers"]["status"] == "failed"


def test_a_buffer_of_plus_infinity_is_no_mask(make, answers):
    tree = make.tree("AdamW")
    tree["model"]["buffer"] = torch.full((3,), INF)
    assert "model.buffer holds 3 Inf" in answers(make.save(tree), "cpu")["numbers"]["detail"]


def test_a_variance_below_zero(make, answers):
    tree = make.tree("AdamW", model=torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)))
    assert answers(make.save(tree), "cpu")["numbers"]["status"] == "passed"
    tree["model"]["1.running_var"][2] = -0.5
    assert "model.1.running_var holds -0.5" in answers(make.save(tree), "cpu")["numbers"]["detail"]


@pytest.mark.parametrize(
    ("optimizer", "key"), [("Adadelta", "acc_delta"), ("Adafactor", "variance"), ("Adamax", "exp_inf")]
)
def test_every_magnitude_is_looked_at(make, answers, optimizer, key):
    tree = make.tree(optimizer)
    tree["optimizer"]["state"][1][key][0] = -1.0
    assert f"state.1.{key} holds -1" in answers(make.save(tree), "cpu")["numbers"]["detail"]


def test_without_an_optimizer_nothing_is_known_to_be_a_buffer(make, answers):
    tree = {"model": {"layer.weight": torch.tensor([INF])}}
    assert answers(make.save(tree), "cpu")["numbers"]["status"] == "failed"


def test_metrics_may_be_infinite(make, answers):
    found = answers(make.save({**make.tree("AdamW"), "best": torch.tensor(INF)}), "cpu")
    assert found["numbers"]["status"] == "passed"


def test_sums_of_adagrad_are_second_moments_and_others_are_not(make, answers):
    tree = make.tree("Adagrad")
    tree["optimizer"]["state"][0]["sum"][0] = -1.0
    assert "state.0.sum holds -1" in answers(make.save(tree), "cpu")["numbers"]["detail"]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_rare_dtypes_are_looked_at_too(make, answers):
    tree = {
        "model": {
            "a.float8": torch.ones(3).to(torch.float8_e5m2),
            "a.complex": torch.ones(3, dtype=torch.complex64),
            "a.half": torch.full((3,), 60_000.0, dtype=torch.float16),
            "a.float4": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "a.count": torch.tensor(4),
            "a.empty": torch.empty(0),
        }
    }
    found = answers(make.save(tree), "cpu")
    assert found["numbers"]["evidence"]["tensors"] == 4
    assert found["numbers"]["status"] == "passed"
    tree["model"]["a.float8"] = torch.tensor([NAN, 1.0, 1.0]).to(torch.float8_e5m2)
    tree["model"]["a.complex"][1] = complex(0, INF)
    assert answers(make.save(tree), "cpu")["numbers"]["evidence"]["not_finite"] == 2


def test_tied_tensors_are_counted_once(make, answers):
    weight = torch.ones(3, 3)
    found = answers(make.save({"model": {"a.weight": weight, "b.weight": weight}}), "cpu")
    assert found["numbers"]["evidence"]["tensors"] == 1


def test_many_offenders_are_counted_and_a_few_named(make, answers):
    tree = {"model": {f"layer{index}.weight": torch.tensor([NAN]) for index in range(9)}}
    assert "; and 4 more" in answers(make.save(tree), "cpu")["numbers"]["detail"]

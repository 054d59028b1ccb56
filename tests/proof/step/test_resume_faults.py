from __future__ import annotations

import copy
import zipfile
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from ckptmove.proof import equality, place
from ckptmove.proof.step.recipe import Recipe, refused_options
from ckptmove.proof.step.trial import LOST, WITHOUT_STATE

STEPS = ("step", "parity", "fresh")


def statuses(found):
    return [found[name]["status"] for name in STEPS]


def test_capturable_on_the_cpu_is_refused_by_torch_itself(make, answers):
    tree = make.tree("Adam")
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    found = answers(make.save(tree, name="my model.pt"), "cpu")
    assert statuses(found) == ["failed", "skipped", "skipped"]
    assert "AssertionError: If capturable=True" in found["step"]["detail"]
    assert "ckptmove convert '" in found["step"]["detail"]
    assert found["step"]["detail"].endswith("--to cpu")


def test_capturable_on_a_simulated_mps_is_refused(make, answers):
    tree = make.tree("Adam")
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    found = answers(make.save(tree, device="mps"), "mps")
    assert found["step"]["status"] == "failed"
    assert "optimizer.param_groups.0.capturable=True " in found["step"]["detail"]


def test_a_simulated_mps_without_it_is_asked_and_passes(make, answers):
    assert answers(make("Adam", device="mps"), "mps")["step"]["status"] == "passed"


def test_capturable_on_cuda_has_parity_within_tolerance(make, answers):
    tree = make.tree("Adam")
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    found = answers(make.save(tree, stay=()), "cuda:0")
    assert statuses(found) == ["passed"] * 3, found
    assert found["parity"]["evidence"]["exact"] is False
    assert 0 < found["parity"]["evidence"]["furthest"] < 1e-5


def test_float64_on_mps_is_refused_by_name(make, answers):
    found = answers(make("Adam", dtype=torch.float64, device="mps"), "mps")
    assert "model.0.weight: TypeError: Cannot convert a MPS Tensor to float64" in found["step"]["detail"]


def test_a_moment_of_another_shape_fails_the_step_by_name(make, answers):
    tree = make.tree("AdamW")
    tree["optimizer"]["state"][2]["exp_avg"] = torch.zeros(7, 2)
    found = answers(make.save(tree), "cuda:0")
    assert statuses(found) == ["failed", "skipped", "skipped"]
    assert "model.1.weight: RuntimeError" in found["step"]["detail"]


def test_parity_with_an_original_of_other_moments_fails(make, answers):
    tree = make.tree("AdamW")
    path = make.save(tree)
    tree["optimizer"]["state"][0]["exp_avg"] += 1e-3
    original = make.save(tree, name="original.pt")
    for target in ("cpu", "cuda:0"):
        found = answers(path, target, against=original)
        assert statuses(found) == ["passed", "failed", "passed"]
        assert f"from {original}" in found["parity"]["detail"]
        assert "model.0.weight: differs in " in found["parity"]["detail"]


def test_parity_is_with_the_file_itself_if_its_original_lacks_a_moment(make, answers):
    tree = make.tree("AdamW")
    path = make.save(tree)
    del tree["optimizer"]["state"][1]["exp_avg"]
    found = answers(path, "cpu", against=make.save(tree, name="original.pt"))
    assert statuses(found) == ["passed"] * 3
    assert "optimizer.state.1.exp_avg is not in the original" in found["restore"]["detail"]


def test_parity_is_with_a_step_that_has_the_options_of_the_original(make, answers):
    tree = make.tree("AdamW")
    same, path = make.save(tree, name="same.pt"), make.save(tree)
    tree["optimizer"]["param_groups"][0]["lr"] = 5.0
    other = make.save(tree, name="other.pt")
    for target in ("cpu", "cuda:0"):
        assert statuses(answers(path, target, against=same)) == ["passed"] * 3
        found = answers(path, target, against=other)
        assert statuses(found) == ["passed", "failed", "passed"]
        assert "model.0.weight: differs " in found["parity"]["detail"]


def test_an_option_that_differs_by_little_is_no_matter_of_tolerance(make, answers):
    tree = make.tree("AdamW", lr=1e-6)
    path = make.save(tree, device="cpu")
    tree["optimizer"]["param_groups"][0]["lr"] = 2e-6
    found = answers(path, "cpu", against=make.save(tree, name="other.pt", device="cpu"))
    assert found["parity"]["status"] == "failed"


def test_how_a_step_is_made_is_no_option_of_the_original(make, answers):
    tree = make.tree("Adam")
    path = make.save(tree)
    tree["optimizer"]["param_groups"][0] |= {"capturable": True, "fused": True}
    original = make.save(tree, name="original.pt", stay=())
    assert statuses(answers(path, "cuda:0", against=original)) == ["passed"] * 3


def test_an_original_of_other_groups_is_stepped_with_the_options_at_hand(make, answers):
    tree = make.tree("AdamW")
    path = make.save(tree)
    (group,) = tree["optimizer"]["param_groups"]
    tree["optimizer"]["param_groups"] = [{**group, "params": [0, 1]}, {**group, "params": [2, 3]}]
    original = make.save(tree, name="original.pt")
    step = answers(path, "cpu", against=original)["step"]
    assert f"; {original} is " in step["detail"]


@pytest.mark.parametrize("steps", [3, (3, 9, 3, 3)])
def test_the_counts_are_said_as_they_are(make, answers, steps):
    tree = make.tree("AdamW")
    for index, count in enumerate(steps if isinstance(steps, tuple) else ()):
        tree["optimizer"]["state"][index]["step"].fill_(count)
    said = answers(make.save(tree), "cpu")["step"]["detail"]
    counts = said.partition(";")[0]  # the rest of the line is about older torch, which writes the keys of Adam
    assert counts.endswith(" to 4" if steps == 3 else " to 4 in some and 10 in others")


def test_values_that_were_not_finite_before_are_not_called_so(make, answers):
    tree = make.tree("AdamW")
    tree["model"]["0.weight"][1, 1] = torch.nan
    said = answers(make.save(tree), "cpu")["step"]
    assert said["status"] == "passed"
    assert said["evidence"]["moved"] == 4
    assert ", 1 not finite, as before, " in said["detail"]


def test_parity_out_of_tolerance_fails(make, answers, monkeypatch):
    tree = make.tree("Adam")
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    monkeypatch.setattr(equality, "TOLERANCES", {})
    found = answers(make.save(tree, stay=()), "cuda:0")
    assert found["parity"]["status"] == "failed"


def test_parity_of_another_dtype_fails(make, answers, monkeypatch):
    class Wider(torch.optim.AdamW):
        made = 0

        def step(self):
            super().step()
            Wider.made += 1
            for state in self.state.values() if Wider.made == 2 else ():
                state["exp_avg"] = state["exp_avg"].double()

    path = make("AdamW")
    monkeypatch.setattr(torch.optim, "AdamW", Wider)
    found = answers(path, "cpu")
    assert "dtype torch.float32 in place of torch.float64" in found["parity"]["detail"]


def test_parity_without_weights_only_says_how_little_it_shows(make, answers):
    from argparse import Namespace

    tree = {**make.tree("AdamW"), "args": Namespace(lr=1)}
    found = answers(make.save(tree), "cpu")
    assert statuses(found) == ["passed"] * 3
    assert found["parity"]["detail"].endswith("torch.load refuses the file")


def broken(monkeypatch, change):
    class Broken(torch.optim.AdamW):
        def step(self):
            super().step()
            for parameter, state in self.state.items():
                change(parameter, state)

    monkeypatch.setattr(torch.optim, "AdamW", Broken)


def test_a_step_that_gives_nan_fails(make, answers, monkeypatch):
    path = make("AdamW")
    broken(monkeypatch, lambda parameter, state: parameter.data.fill_(torch.nan))
    found = answers(path, "cpu")
    assert "model.0.weight is not finite after the step" in found["step"]["detail"]


def test_a_moment_that_becomes_infinite_fails(make, answers, monkeypatch):
    path = make("AdamW")
    broken(monkeypatch, lambda parameter, state: state["exp_avg"].fill_(torch.inf))
    assert "model.0.weight: exp_avg is not " in answers(path, "cpu")["step"]["detail"]


def test_a_count_that_stands_still_fails(make, answers, monkeypatch):
    path = make("AdamW")
    broken(monkeypatch, lambda parameter, state: state["step"].sub_(1))
    found = answers(path, "cpu")["step"]
    assert "model.0.weight: step " in found["detail"]
    assert "from 3 to 3" in found["detail"]


def test_a_tensor_that_leaves_its_device_fails(make, answers, monkeypatch):
    path = make("AdamW")
    broken(monkeypatch, lambda parameter, state: state.update(exp_avg=state["exp_avg"].cpu()))
    found = answers(path, "cuda:0")
    assert "model.0.weight: exp_avg is on cpu, but belongs on cuda:0" in found["step"]["detail"]


def test_state_that_is_forgotten_fails_fresh(make, answers, monkeypatch):
    class Forgetful(torch.optim.AdamW):
        def load_state_dict(self, state_dict):
            super().load_state_dict({**state_dict, "state": {}})

    path = make("AdamW")
    monkeypatch.setattr(torch.optim, "AdamW", Forgetful)
    found = answers(path, "cpu")
    assert found["fresh"]["status"] == "failed"
    assert found["fresh"]["evidence"] == {"with_state": 4, "changed": 0}
    assert found["fresh"]["detail"].endswith(" model.0.bias, model.0.weight, model.1.bias, model.1.weight")
    assert "from 3 to 1" in found["step"]["detail"]


def _beside(make, change):
    """A healthy optimizer, and a changed one over a model of its own."""
    tree, other = make.tree("Adam"), make.tree("Adam")
    change(other["optimizer"])
    return make.save({"g": tree["model"], "d": other["model"], "opt_g": tree["optimizer"], "opt_d": other["optimizer"]})


def _zero_moments(optimizer):
    for state in optimizer["state"].values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def test_no_optimizer_vouches_for_the_lost_state_of_another(make, answers):
    found = answers(_beside(make, _zero_moments), "cuda:0")
    assert found["fresh"]["status"] == "failed"
    assert found["fresh"]["detail"].endswith(f": opt_d: 4 parameters {LOST}")
    healthy = answers(_beside(make, lambda optimizer: None), "cuda:0")
    assert (healthy["fresh"]["status"], healthy["step"]["evidence"]["proven"]) == ("passed", True)


def test_no_optimizer_proves_the_state_of_another(make, answers):
    found = answers(_beside(make, lambda optimizer: optimizer.update(state={})), "cuda:0")
    assert [found[name]["status"] for name in ("step", "parity", "fresh")] == ["passed"] * 3
    evidence = found["step"]["evidence"]
    assert evidence["proven"] is False
    assert evidence["unproven"] == f"no step shows that the state of opt_d is used: 4 parameters {WITHOUT_STATE}"


def test_two_optimizers_of_the_same_parameters_are_two(make, answers):
    tree = make.tree("Adam")
    tree["second"] = copy.deepcopy(tree["optimizer"])
    _zero_moments(tree["second"])
    found = answers(make.save(tree), "cuda:0")
    assert found["fresh"]["status"] == "failed"
    assert f"second: 4 parameters {LOST}" in found["fresh"]["detail"]


def test_plain_values_in_the_state_are_carried_along(make, answers, monkeypatch):
    path = make("AdamW")
    broken(monkeypatch, lambda parameter, state: state.update(note="text"))
    assert statuses(answers(path, "cpu")) == ["passed"] * 3


def test_a_batch_that_fails_only_as_a_whole_names_its_first(make, answers, monkeypatch):
    class Crowded(torch.optim.AdamW):
        def step(self):
            if len(self.param_groups[0]["params"]) > 1:
                raise RuntimeError("too many")
            super().step()

    path = make("AdamW")
    monkeypatch.setattr(torch.optim, "AdamW", Crowded)
    assert "model.0.weight: RuntimeError: too many" in answers(path, "cpu")["step"]["detail"]


def test_the_second_optimizer_is_not_tried_after_a_refusal(make, answers):
    tree = make.tree("Adam")
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    tree["second"] = tree["optimizer"]
    assert answers(make.save(tree), "cpu")["step"]["evidence"]["optimizer"] == "Adam"


def test_a_real_device_is_asked_for_and_there_is_none(make, answers):
    found = answers(make("AdamW"), "cuda:0", require_device=True)
    assert statuses(found) == ["failed", "passed", "passed"]
    assert found["step"]["detail"].startswith("--require-device: ")
    assert found["step"]["detail"].endswith("simulated")
    assert answers(make("AdamW", device="cpu"), "cpu", require_device=True)["step"]["status"] == "passed"


def weights_only(tree):
    del tree["optimizer"]


def unknown(tree):
    tree["optimizer"]["param_groups"][0]["correct_bias"] = True


@pytest.mark.parametrize("change", [weights_only, unknown])
def test_a_real_device_is_asked_for_and_there_is_nothing_to_step(make, answers, change):
    tree = make.tree("AdamW")
    change(tree)
    path = make.save(tree)
    assert statuses(answers(path, "cuda:0")) == ["skipped"] * 3
    found = answers(path, "cuda:0", require_device=True)
    assert statuses(found) == ["failed", "skipped", "skipped"]
    assert found["step"]["detail"].startswith("--require-device: ")


def lose(*path):
    def change(tree):
        *parents, last = path
        place = tree["optimizer"]
        for key in parents:
            place = place[key]
        del place[last]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lose("state", 0, "exp_avg_sq"), "model.0.weight: KeyError: 'exp_avg_sq'"),
        (lose("state", 3, "step"), "KeyError: 'step'"),
        (lose("param_groups", 0, "betas"), "KeyError: 'betas'"),
        (lose("param_groups", 0, "lr"), "KeyError: 'lr'"),
    ],
)
def test_a_lost_key_fails_the_step(make, answers, change, said):
    tree = make.tree("AdamW")
    change(tree)
    found = answers(make.save(tree), "cuda:0")
    assert statuses(found) == ["failed", "skipped", "skipped"]
    assert said in found["step"]["detail"]


def test_state_in_another_order_is_not_proven_on_zeros(make, answers):
    tree = make.tree("AdamW")
    state = tree["optimizer"]["state"]
    state[0], state[1] = state[1], state[0]
    found = answers(make.save(tree), "cuda:0")
    assert statuses(found) == ["skipped", "passed", "passed"]
    assert found["step"]["evidence"]["standins"] == 4
    assert found["step"]["evidence"]["proven"] is False


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("lr", None, "optimizer.param_groups.0.lr is None"),
        ("lr", -1.0, "optimizer.param_groups.0: Invalid learning rate: -1.0"),
        ("lr", float("inf"), "optimizer.param_groups.0.lr is inf"),
        ("betas", (0.9, float("nan")), "optimizer.param_groups.0.betas is (0.9, nan)"),
        ("lr", 10**400, "optimizer.param_groups.0.lr has an integer that is too large"),
        ("betas", (10**400, 1), "optimizer.param_groups.0.betas has an integer that is too large"),
        ("betas", (1.0, 0.999), "optimizer.param_groups.0: Invalid beta parameter at index 0: 1.0"),
        ("eps", -1e-8, "optimizer.param_groups.0: Invalid epsilon value: -1e-08"),
        ("weight_decay", -0.1, "optimizer.param_groups.0: Invalid weight_decay value: -0.1"),
        ("lr", "fast", "TypeError"),
        ("lr", torch.tensor(-1.0), "optimizer.param_groups.0: Invalid learning rate: -1.0"),
        ("betas", (0.9,), "optimizer.param_groups.0: tuple index out of range"),
    ],
)
@pytest.mark.parametrize("target", ["cpu", "cuda:0"])
def test_options_that_the_constructor_refuses(make, answers, option, value, said, target):
    tree = make.tree("AdamW")
    tree["optimizer"]["param_groups"][0][option] = value
    found = answers(make.save(tree), target)
    assert statuses(found) == ["failed", "skipped", "skipped"]
    assert said in found["step"]["detail"]
    assert "fix:" not in found["step"]["detail"]


def test_options_that_many_groups_share_are_tried_once():
    tried = []

    def counted(params, lr=0.5):
        tried.append(lr)
        return torch.optim.SGD(params, lr=lr)

    rates = [0.1] * 50 + [0.2] * 50 + [-1.0]
    optimizer = SimpleNamespace(groups=[SimpleNamespace(where=f"groups.{index}") for index in range(len(rates))])
    recipe = Recipe("SGD", counted, tuple({"lr": lr} for lr in rates), ({},) * len(rates), torch.zeros(1), (), "")
    assert refused_options(recipe, optimizer, None).startswith("groups.100: ")
    assert tried == [0.5, 0.1, 0.2, -1.0]


@pytest.mark.parametrize(
    ("optimizer", "option", "value"),
    [
        ("Adam", "betas", (0, 0.999)),
        ("Adam", "amsgrad", None),
        ("SGD", "nesterov", None),
        ("RMSprop", "centered", None),
        ("Adam", "lr", 1),
    ],
)
def test_options_that_torch_steps_with_whatever_its_constructor_says(make, answers, optimizer, option, value):
    tree = make.tree(optimizer, **({"momentum": 0.9} if optimizer == "SGD" else {}))
    tree["optimizer"]["param_groups"][0][option] = value
    found = answers(make.save(tree), "cpu")
    assert statuses(found) == ["passed"] * 3, found


def test_second_moments_that_a_cast_makes_zero(make, answers):
    tree = make.tree("AdamW")
    tree["model"] = {name: value.half() for name, value in tree["model"].items()}
    for state in tree["optimizer"]["state"].values():
        state["exp_avg_sq"].fill_(1e-9)
    found = answers(make.save(tree), "cuda:0")
    assert found["step"]["status"] == "failed"
    assert "model.0.weight: load_state_dict casts exp_avg_sq to torch.float16, " in found["step"]["detail"]
    assert " 30 of its values 0" in found["step"]["detail"]


def test_what_is_deflated_is_not_stepped(make, answers, tmp_path):
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(make("Adam")) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for item in source.infolist():
            target.writestr(item.filename, source.read(item))
    found = answers(str(packed), "cuda:0")
    assert statuses(found) == ["skipped"] * 3
    assert f": ckptmove convert {packed} --to cuda:0" in found["step"]["detail"]


def test_float64_on_mps_is_mended_by_a_cast(make, answers):
    found = answers(make("Adam", dtype=torch.float64, device="mps"), "mps")
    assert found["step"]["detail"].endswith("--to mps --cast")


def test_a_target_that_cannot_be_simulated_is_not_proven(make, answers, monkeypatch):
    monkeypatch.setattr(place, "unavailable_reason", lambda: "too-old")
    found = answers(make("AdamW"), "cuda:0")
    assert statuses(found) == ["failed", "skipped", "skipped"]
    assert found["step"]["detail"].startswith("not proven: ")
    assert found["step"]["detail"].endswith(": too-old")


def test_what_cannot_be_simulated_is_not_said_to_have_been(make, answers, monkeypatch):
    monkeypatch.setattr(place, "unavailable_reason", lambda: "torch 2.3 is too old")
    tree = make.tree("AdamW")
    weights_only(tree)
    found = answers(make.save(tree), "cuda:0", require_device=True)
    assert statuses(found) == ["failed", "skipped", "skipped"]
    assert found["step"]["detail"] == (
        "--require-device: there is no cuda:0 here, and it cannot be simulated: torch 2.3 is too old"
    )


def test_a_case_that_cannot_be_stepped_is_not_passed_over(make, answers, monkeypatch):
    monkeypatch.setattr(place, "unavailable_reason", lambda: "torch 2.3 is too old")
    tree = make.tree("AdamW")
    weights_only(tree)
    path = make.save(tree)
    assert statuses(answers(path, "cuda:0")) == ["skipped"] * 3, "there is nothing to resume"
    found = answers(path, "cuda:0", case="train.py:case")
    assert (statuses(found), found["case"]["status"]) == (["failed", "skipped", "skipped"], "skipped")
    assert found["step"]["detail"].startswith("not proven: ")
    assert found["step"]["detail"].endswith(": torch 2.3 is too old")


def test_an_accelerator_of_this_machine_is_used_as_it_is(make, answers, monkeypatch):
    # A CPU that is called an accelerator: the parts that do not depend on which one it is.
    monkeypatch.setattr(place, "is_here", lambda target: True)
    monkeypatch.setattr(place, "TorchDevice", lambda tag, make=place.TorchDevice: make("cpu"))
    found = answers(make("AdamW"), "cuda:0")
    assert found["mode"] == "real"
    assert statuses(found) == ["passed"] * 3
    assert found["parity"]["evidence"] == {"exact": False, "apart": 0, "furthest": 0.0}


@pytest.mark.parametrize("target", ["cuda:9999", "meta", "npu:0"])
def test_what_is_not_here(target):
    assert not place.is_here(target)


def test_what_is_here():
    assert place.is_here("cpu")
    assert place.is_here("mps") == torch.backends.mps.is_available()


def test_the_seed_changes_the_gradient_and_not_the_verdict(make, answers):
    path = make("AdamW")
    assert statuses(answers(path, "cpu", seed=7)) == ["passed"] * 3


def test_a_parameter_of_integers_has_no_gradient(make, answers):
    tree = make.tree("AdamW")
    for state in tree["optimizer"]["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].long()
    del tree["model"]
    found = answers(make.save(tree), "cpu")
    assert "RuntimeError: only Tensors of floating point" in found["step"]["detail"]


def test_a_dtype_that_no_cast_mends_has_no_mending_command(answers, tmp_path):
    save_file({"w": torch.ones(3, dtype=torch.float64)}, tmp_path / "wide.safetensors")
    assert "--cast" not in str(answers(str(tmp_path / "wide.safetensors"), "mps"))

"""``verify`` of a sample: sampled tensors are checked completely, others not at all, and the verdict says so."""

from __future__ import annotations

from functools import cache
from math import nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.api.functions import inspect, verify
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.cli.render.verification import outcome
from ckptmove.errors import UsageError
from ckptmove.proof.sampling import choose_sample
from ckptmove.proof.tensors.pieces import NOT_SAMPLED

LAYERS = 12


def layers(count=LAYERS):
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(count)])


def trained(count):
    model = layers(count)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model.state_dict() | {"optimizer": optimizer.state_dict()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """24 parameters in two groups, and twenty tensors that nobody trains."""
    model = layers()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:20]}, {"params": parameters[20:]}])
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "kept": [torch.ones(2) * n for n in range(20)],
    }
    path = tmp_path_factory.mktemp("sample") / "run.pt"
    torch.save(tree, path)
    return str(path)


@cache
def paired(path):
    inventory = inspect(path).inventory
    return inventory, list(zip(inventory.optimizers, pair_all(inventory), strict=True))


def sampled(path, count, seed=0):
    inventory, pairings = paired(path)
    return inventory, choose_sample(inventory, pairings, count, seed)


@given(count=st.integers(1, 60), seed=st.integers(0, 2**64 - 1))
def test_a_sample_is_so_many_parameters_with_their_state_and_so_many_others(checkpoint, count, seed):
    inventory, sample = sampled(checkpoint, count, seed)
    (keys,) = sample.keys
    assert len(keys) == min(count, 24)
    state = {record.name for entry in inventory.optimizers[0].state if entry.key in keys for _, record in entry.tensors}
    weights = {name for name in sample.names if name.startswith("model.")}
    others = {name for name in sample.names if name.startswith("kept.")}
    assert (len(weights), len(others)) == (min(count, 24), min(count, 20))
    assert sample.names == state | weights | others
    model = [record.name for record in inventory.tensors if record.name.startswith("model.")]
    assert {str(model.index(name)) for name in weights} == keys
    size = sample.size
    assert (size.asked, size.parameters, size.of_parameters) == (count, min(count, 24), 24)
    assert (size.tensors, size.of_tensors) == (len(sample.names), 24 * 4 + 20)
    assert size.is_all is (count >= 24)
    assert sampled(checkpoint, count, seed)[1] == sample


@given(count=st.integers(1, 24), seed=st.integers(0, 1000))
def test_it_is_spread_over_all_groups(checkpoint, count, seed):
    _, sample = sampled(checkpoint, count, seed)
    runs = [range(24 * run // count, 24 * (run + 1) // count) for run in range(count)]
    assert all(place in run for place, run in zip(sorted(map(int, sample.keys[0])), runs, strict=True))


def test_in_time_every_seed_has_looked_at_everything(checkpoint):
    seen = set().union(*(sampled(checkpoint, 6, seed)[1].names for seed in range(60)))
    assert seen == {record.name for record in inspect(checkpoint).inventory.tensors}


def test_a_tensor_that_is_not_a_number_is_found_by_the_seeds_that_look_at_it(tmp_path, checkpoint, answers):
    tree = torch.load(checkpoint)
    tree["model"]["3.weight"][1, 1] = nan
    path = str(tmp_path / "spoiled.pt")
    torch.save(tree, path)
    looking, passing = seeds(path, "model.3.weight")
    for seed, status in ((looking, "failed"), (passing, "passed")):
        checks = answers(path, "cpu", sample=6, seed=seed)
        assert checks["numbers"]["status"] == status
        assert checks["numbers"]["evidence"]["tensors"] == 24
        assert checks["step"]["evidence"]["parameters"] == 6
        assert checks["restore"]["evidence"]["compared"] == 6 * 4 + 6


def test_against_an_original_bits_are_those_of_the_sample_and_form_that_of_all(tmp_path, checkpoint, answers):
    bits, form = str(tmp_path / "bits.pt"), str(tmp_path / "form.pt")
    tree = torch.load(checkpoint)
    tree["model"]["3.weight"] += 1
    torch.save(tree, bits)
    tree = torch.load(checkpoint)
    tree["model"]["3.weight"] = tree["model"]["3.weight"][:1].clone()
    torch.save(tree, form)
    looking, passing = seeds(checkpoint, "model.3.weight")
    for seed, status in ((looking, "failed"), (passing, "passed")):
        assert answers(checkpoint, "cpu", sample=6, seed=seed, against=bits)["restore"]["status"] == status
    assert answers(checkpoint, "cpu", sample=6, seed=passing, against=form)["restore"]["status"] == "failed"
    told = answers(checkpoint, "cpu", sample=6, against=checkpoint)["restore"]["detail"]
    unseen = "except the bits of tensors outside the sample"
    assert f"; all equal {checkpoint} {unseen}, ignoring devices; a sample: " in told
    whole = answers(checkpoint, "cpu", sample=1000, against=checkpoint)["restore"]["detail"]
    assert whole.endswith(f"; all equal {checkpoint}, ignoring devices")


def test_every_check_that_looked_at_a_sample_says_of_how_much(checkpoint, answers):
    checks = answers(checkpoint, "cuda:0", sample=3)
    tensors, parameters = "; a sample: 15 of 116 tensors", "; a sample: 3 of 24 parameters"
    ends = {"restore": tensors, "numbers": tensors, "step": parameters, "parity": parameters, "fresh": parameters}
    for name, end in ends.items():
        assert checks[name]["status"] == "passed"
        assert checks[name]["detail"].endswith(end)
    assert checks["step"]["evidence"]["unproven"] == "21 parameters not stepped: not in the sample"
    whole = answers(checkpoint, "cuda:0", sample=24)
    assert not [name for name in ends if "a sample" in whole[name]["detail"]]


def test_state_that_no_group_lists_is_looked_at_as_the_other_tensors_are(tmp_path, checkpoint, answers):
    tree = torch.load(checkpoint)
    tree["optimizer"]["state"][99] = {**tree["optimizer"]["state"][0], "exp_avg": torch.full((4, 4), nan)}
    path = str(tmp_path / "orphan.pt")
    torch.save(tree, path)
    assert sampled(path, 24)[1].size.is_all
    assert answers(path, "cpu", sample=24)["numbers"]["status"] == "failed"


def test_of_two_optimizers_whose_paths_read_alike_each_has_a_sample_of_its_own(tmp_path, answers):
    large, small = trained(12), trained(2)
    tree = {"a": {"b": large.pop("optimizer")}, "a.b": small.pop("optimizer"), "large": large, "small": small}
    path = str(tmp_path / "alike.pt")
    torch.save(tree, path)
    inventory, sample = sampled(path, 6)
    assert [optimizer.where for optimizer in inventory.optimizers] == ["a.b", "a.b"]
    assert [len(keys) for keys in sample.keys] == [6, 4]
    assert max(map(int, sample.keys[0])) > 4  # it has keys that the smaller one lacks
    assert answers(path, "cpu", sample=6)["step"]["evidence"]["parameters"] == 10


def test_an_optimizer_that_steps_one_vector_is_stepped_whole(make, answers):
    path = make.save(make.tree("LBFGS", steps=0) | {"optimizer": lbfgs_state()}, device="cpu")
    assert answers(path, "cpu", sample=1)["step"]["evidence"]["parameters"] == 4
    assert sampled(path, 1)[1].size.parameters == 4


def seeds(path, name):
    """One with which a sample of six looks at a tensor, and one with which it does not."""
    looks = [name in sampled(path, 6, seed)[1].names for seed in range(20)]
    return looks.index(True), looks.index(False)


def lbfgs_state():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return optimizer.state_dict()


def test_the_verdict_says_that_it_is_one_of_a_sample_and_that_no_crc_was_compared(tmp_path, checkpoint):
    with_crc = verify(checkpoint)
    assert (with_crc.sample, dict(with_crc.checks[0].evidence)["checksums"]) == (None, True)
    result = verify(checkpoint, sample=2)
    assert result.passed
    size = "2 of 24 parameters, 10 of 116 tensors"
    assert str(result) == f"{checkpoint}: passed, but not proven on cpu, by a sample: {size}"
    assert " inspect --check " in result.checks[0].detail
    assert dict(result.checks[0].evidence)["checksums"] is False


@pytest.mark.parametrize(("count", "not_stepped", "proven"), [(20, 4, False), (24, 0, True)])
def test_a_sample_proves_no_resume_unless_it_is_all(checkpoint, count, not_stepped, proven):
    result = verify(checkpoint, sample=count)
    (step,) = (dict(check.evidence) for check in result.checks if check.name == "step")
    assert (step["not_stepped"], step["proven"], result.proven) == (not_stepped, proven, proven)
    assert step["unproven"].endswith("" if proven else NOT_SAMPLED)
    assert ("not proven to resume: 4 parameters not stepped" in outcome(result)) is not proven


def test_a_sample_of_all_parameters_and_not_of_all_tensors_proves_no_resume(tmp_path):
    path = tmp_path / "run.pt"
    torch.save(trained(1) | {"kept": [torch.ones(2) * n for n in range(5)]}, path)
    result = verify(path, sample=2)
    (step,) = (dict(check.evidence) for check in result.checks if check.name == "step")
    assert (step["not_stepped"], step["proven"], result.proven) == (0, True, False)
    assert outcome(result).endswith("not proven to resume: only a sample was checked")


@pytest.mark.parametrize("count", [0, -3])
def test_a_sample_of_nothing_is_refused(checkpoint, count):
    with pytest.raises(UsageError, match=f"sample .* not {count}"):
        verify(checkpoint, sample=count)

"""The check *placement*: what torch's own restore repairs is a line, and what it leaves as it is fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptmove
from ckptmove.conversion.keep import kept_tensors
from ckptmove.findings.context import Context, target_device
from ckptmove.findings.registry import find_all
from ckptmove.moves import MoveRequest
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.file_checks import fail_on_findings
from ckptmove.proof.placement import check_placement

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"


def placement(path, target=None, keep=(), devices=None):
    """The check with the findings of the file; without a target, of the file as it was saved."""
    with open_checkpoint(str(path)) as checkpoint:
        inventory = checkpoint.inventory
        context = Context(target, devices, kept=kept_tensors(inventory, keep))
        request = MoveRequest(to=target_device(inventory, context), keep=keep)
        check = check_placement(inventory, request, devices, as_saved=target is None)
        return fail_on_findings(check, find_all(inventory, context))


def figures(check):
    return check.status, dict(check.evidence)["misplaced"], dict(check.evidence)["elsewhere"]


@pytest.mark.parametrize(
    ("device", "target", "elsewhere"),
    [
        ("cuda:0", "cuda:0", {}),
        ("cpu", "cuda:0", {"cpu": 12}),
        ("cuda:0", "cpu", {"cuda:0": 12}),
        ("mps", "cuda:0", {"mps": 12}),
        ("cuda:3", None, {}),
    ],
)
def test_a_state_dict_resumes_from_every_device(make, device, target, elsewhere):
    check = placement(make.save(make.tree("AdamW"), device=device), target)
    assert figures(check) == ("passed", 0, elsewhere)
    assert dict(check.evidence)["tensors"] == 16
    kinds = {tag.partition(":")[0] for tag in elsewhere} - {"cpu"}
    assert ("map_location" in check.detail) == bool(kinds)
    assert all(f"{count} tensors on {tag}" in check.detail for tag, count in elsewhere.items())


def test_an_index_that_the_machine_lacks_fails(make):
    path = make.save(make.tree("AdamW"), device="cuda:3")
    assert placement(path, "cuda:0").status == "failed"
    assert "(D103)" in placement(path, "cuda:0").detail
    assert placement(path, devices=3).status == "failed"
    assert figures(placement(path, "cuda:0", devices=4)) == ("passed", 0, {"cuda:3": 12})
    with open_checkpoint(path) as checkpoint:
        check = check_placement(checkpoint.inventory, MoveRequest(to="cuda:0"))
    assert check.detail.endswith("map_location on a machine without cuda:3")  # for a case, which judges the rest


def test_moments_apart_from_their_parameters_are_copied(make):
    left = make.save(make.tree("AdamW"), device="cuda:3", stay=("step", "exp_avg", "exp_avg_sq"))
    assert figures(placement(left)) == ("passed", 0, {"cpu": 8})
    two = SAMPLES / "dataparallel-two-gpus.pth"
    assert figures(placement(two)) == ("passed", 0, {"cuda:1": 4})
    assert placement(two, devices=1).status == "failed"


def test_counters(make):
    """`load_state_dict` moves those of captured groups and NAdam's `mu_product`, and leaves others where they are."""
    tree = make.tree("Adam")
    dragged = placement(make.save(tree, stay=()), "cuda:0")
    assert figures(dragged) == ("passed", 0, {"cuda:0": 4})
    assert "4 counters on cuda:0" in dragged.detail
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    captured = placement(make.save(tree), "cuda:0")
    assert captured.detail == "16 tensors placed for cuda:0; load_state_dict itself moves 4 counters"
    assert placement(make("NAdam", device="cuda:0"), "cuda:0").status == "passed"


def test_a_flag_that_the_target_refuses_fails(make):
    tree = make.tree("Adam")
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    check = placement(make.save(tree, device="cpu"), "cpu")
    assert check.status == "failed"
    assert "(O202)" in check.detail


def test_a_random_state_off_the_cpu_or_in_another_dtype_fails(make):
    tree = {**make.tree("AdamW"), "rng_state": torch.get_rng_state()}
    assert placement(make.save(tree, stay=("step", "rng_state")), "cuda:0").status == "passed"
    assert "(R301)" in placement(make.save(tree), "cuda:0").detail
    tree["rng_state"] = tree["rng_state"].float()
    assert "(R301)" in placement(make.save(tree, stay=("step", "rng_state")), "cuda:0").detail


def test_a_dtype_that_the_target_lacks_fails_unless_it_stays_on_the_cpu(make):
    path = make("AdamW", dtype=torch.float64, device="cpu")
    check = placement(path, "mps")
    assert check.status == "failed"
    assert "(T401)" in check.detail
    assert check.detail.endswith("--to mps --cast")
    assert placement(path, "mps", ("*",)).status == "passed"


def test_what_is_kept_is_counted_apart(make):
    path = make(name="c.pt", device="cuda:1")
    check = placement(path, "cuda:0", ("model.*",), devices=2)
    assert figures(check) == ("passed", 0, {"cuda:1": 12})
    assert check.detail.endswith("; 4 tensors on cuda:1, kept there")


def test_tensors_of_no_known_role(tmp_path):
    """A metric may stay on the CPU. Nothing moves one that is elsewhere, and without a model it counts as one."""

    def check(target, keep, **tree):
        source, output = tmp_path / "a.pt", tmp_path / "b.pt"
        torch.save(tree, source)
        ckptmove.convert(str(source), to="cuda:0", keep=keep, output=str(output), force=True)
        return placement(output, target)

    state = {"model": {"a.weight": torch.ones(2)}, "metric": torch.ones(1)}
    beside = check("cuda:0", ["metric"], **state)
    assert beside.detail == "1 tensor placed for cuda:0; 1 tensor of no known role may stay on the CPU"
    astray = check("cpu", ["model.*"], **state)
    assert figures(astray) == ("passed", 0, {"cuda:0": 1})
    assert "1 tensor on cuda:0: no load_state_dict moves it" in astray.detail
    alone = check("cuda:0", ["metric"], metric=torch.ones(1))
    assert figures(alone) == ("passed", 0, {"cpu": 1})
    assert check("cuda:0", [], words=["no tensor"]).status == "skipped"


class TestObjects:
    """Pickled modules and optimizers, which are used as they are."""

    @pytest.fixture
    def saved(self, tmp_path):
        """Save a tree with a model and an Adam that made a step, on the CPU, with some tensors on other devices."""

        def saved(build, **moves):
            model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            path = tmp_path / "object.pth"
            torch.save(build(model, optimizer), path)
            for device, keep in moves.items():
                output = tmp_path / f"{device}.pth"
                ckptmove.convert(path, map_location={"cpu": f"{device}:0"}, keep=keep, output=output, force=True)
                path = output
            return path

        return saved

    @pytest.mark.parametrize(
        ("build", "misplaced"),
        [
            (lambda model, _: model, 4),
            (lambda model, _: {"model": model}, 4),
            # The optimizer lists the parameters under names of its own.
            (lambda model, optimizer: {"model": model, "optimizer": optimizer}, 16),
            (lambda model, optimizer: {"model": model.state_dict(), "optimizer": optimizer}, 12),
            (lambda model, optimizer: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 0),
            # Next to the state_dict of a model, a script builds an argument or a loss anew, and uses another module.
            (lambda model, _: {"model": model.state_dict(), "hyper_parameters": {"encoder": model}}, 0),
            (lambda model, _: {"model": model.state_dict(), "config": {"encoder": model}}, 0),
            (lambda model, _: {"model": model.state_dict(), "loss": model}, 0),
            (lambda model, _: {"netG": {"a.weight": torch.ones(2)}, "discriminator": model}, 4),
            # Ultralytics itself moves its modules.
            (lambda model, _: {"model": model, "train_args": {}, "ema": None, "updates": 1, "epoch": 1}, 0),
        ],
    )
    def test_what_is_not_on_a_named_target_fails(self, saved, build, misplaced):
        path = saved(build)
        check = placement(path, "cuda:0")
        assert figures(check)[:2] == ("failed" if misplaced else "passed", misplaced)
        assert (f"ckptmove convert {path} --to cuda:0" in check.detail) == bool(misplaced)
        assert placement(path).status == "passed"
        assert placement(path, "cuda:0", ("*",)).status == "passed"

    def test_a_module_that_is_on_the_cpu_in_part_is_an_error(self, saved):
        path = saved(lambda model, _: {"model": model}, cuda=["model.1.*"])
        assert "(D101)" in placement(path).detail
        [finding] = [one for one in ckptmove.inspect(path).findings if one.code == "D101"]
        assert finding.severity == "error"
        beside = saved(lambda model, _: {"model": model.state_dict(), "loss": model}, cuda=["loss.1.*"])
        assert placement(beside).status == "passed"
        other = saved(lambda model, _: {"G": {"a.weight": torch.ones(2)}, "discriminator": model}, cuda=["*.1.*"])
        assert "(D101)" in placement(other).detail

    def test_an_optimizer_apart_from_its_parameters_is_an_error(self, saved):
        path = saved(lambda model, optimizer: {"model": model, "optimizer": optimizer}, cuda=["*.exp_avg", "*.step"])
        assert "(D102)" in placement(path).detail
        [finding] = [one for one in ckptmove.inspect(path).findings if one.code == "D102"]
        assert finding.severity == "error"

    def test_objects_are_named_by_the_file_that_has_them(self, saved, tmp_path):
        torch.save({"epoch": 1}, tmp_path / "other.pth")
        saved(lambda model, _: model)
        inventory = ckptmove.inspect(tmp_path).inventory
        assert inventory.objects == ("object.pth",)


def test_a_tensor_option_on_another_accelerator_fails(make):
    """`load_state_dict` copies the groups as they are."""
    tree = make.tree("AdamW")
    tree["optimizer"]["param_groups"][0]["lr"] = torch.tensor(1e-3)
    path = make.save(tree, device="cuda:1")
    check = placement(path, "cuda:0", devices=2)
    assert figures(check) == ("failed", 1, {"cuda:1": 12})
    assert "cuda:1 -> cuda:0: optimizer.param_groups.0.lr" in check.detail
    assert check.detail.endswith("--to cuda:0")
    assert placement(path).status == "passed"
    kept = placement(path, "cuda:0", ("optimizer.state.*.exp_avg",), devices=2)
    assert kept.detail.endswith("--to cuda:0 --keep 'optimizer.state.*.exp_avg'")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sizes_of_a_nested_tensor_off_the_cpu_fail(make):
    tree = {"model": {"a.weight": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}}
    with open_checkpoint(make.save(tree, device="cpu")) as checkpoint:
        storages = tuple(one._replace(device="cuda:0") for one in checkpoint.inventory.storages)
        check = check_placement(replace(checkpoint.inventory, storages=storages), MoveRequest(to="cuda:0"))
    assert check.status == "failed"
    assert "cuda:0 -> cpu: model.a.weight" in check.detail

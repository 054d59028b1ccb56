from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import saving
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove.checkpoint.opening import open_checkpoint
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.errors import UsageError
from ckptmove.findings.catalogue import CATALOGUE, found
from ckptmove.findings.context import Context, target_device
from ckptmove.findings.registry import find_all
from ckptmove.limits import Limits
from ckptmove.model import ArchiveFact, Severity
from ckptmove.moves import MoveRequest
from ckptmove.torch_facts.verdicts import classify
from ckptmove.verification.checks import CHECKS, failed, passed
from ckptmove.verification.file_checks import FAILED_BY, check_file, check_placement, check_structure, fail_on_findings
from ckptmove.verification.step.optimizers import check_override

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"


def placement(path, target, keep=()):
    with open_checkpoint(path) as checkpoint:
        return check_placement(checkpoint.inventory, MoveRequest(to=target, keep=keep))


def structure(path, ignored=()):
    with open_checkpoint(path) as checkpoint:
        inventory = checkpoint.inventory
        pairings = list(zip(inventory.optimizers, pair_all(inventory), strict=True))
        findings = [finding for finding in find_all(inventory, Context()) if finding.code not in ignored]
        return fail_on_findings(check_structure(inventory, pairings), findings)


@pytest.mark.parametrize("kind", ["short-storage", "missing-storage", "past-end", "crc-mismatch"])
def test_a_file_with_broken_records_fails(make, kind):
    with open_checkpoint(make("AdamW"), Limits()) as checkpoint:
        whole = checkpoint.inventory
        check = check_file(checkpoint.parts)
        assert check.status == "passed"
        assert check.detail.endswith("every CRC matches")
        broken = replace(whole, facts=(ArchiveFact(kind, "data/0", 120),))
        failed = fail_on_findings(check, find_all(broken, Context()))
        assert failed.status == "failed"
        assert failed.detail.endswith("): data/0")
        assert failed.evidence == check.evidence


def test_what_is_no_fault_of_the_file_does_not_fail_it(make):
    with open_checkpoint(make("AdamW"), Limits()) as checkpoint:
        check = check_file(checkpoint.parts)
        harmless = replace(checkpoint.inventory, facts=(ArchiveFact("orphan-record", "x", 3),))
        assert fail_on_findings(check, find_all(harmless, Context())) is check


def test_a_pickle_that_attacks_fails_the_file(make):
    with open_checkpoint(make("AdamW"), Limits()) as checkpoint:
        inventory = replace(checkpoint.inventory, globals=(classify("os.system"), classify("torch.Size")))
        check = fail_on_findings(check_file(checkpoint.parts), find_all(inventory, Context()))
    assert check.status == "failed"
    assert "os.system" in check.detail
    assert check.detail.endswith("(S702)")


def test_every_error_of_the_catalogue_fails_a_check():
    errors = {code for code, entry in CATALOGUE.items() if entry.severity is Severity.ERROR}
    assert errors | {"O208", "F805"} == FAILED_BY.keys()  # a second reading (F805) is an error, stray bytes are not
    assert set(FAILED_BY.values()) <= set(CHECKS)


def test_a_check_that_has_failed_keeps_its_own_words():
    fault = found("F801", "data/0", (), "")
    assert fail_on_findings(failed("file", "own"), [fault]).detail == "own"
    assert fail_on_findings(passed("file", ""), [fault]).detail == "data/0 (F801)"
    assert fail_on_findings(passed("numbers", ""), [fault]).status == "passed"


def test_a_file_without_crcs_is_said_and_not_failed(make):
    with saving.crcs(written=False):
        path = make("AdamW")
    with open_checkpoint(path, Limits()) as checkpoint:
        check = check_file(checkpoint.parts)
        assert check.status == "passed"
        assert dict(check.evidence)["checksums"] is False


def test_a_file_that_lies_right(make):
    assert placement(make("AdamW"), "cuda:0").status == "passed"


def test_tensors_on_another_device_are_named_with_the_mending_command(make):
    check = placement(make("AdamW", name="my model.pt"), "cuda:1")
    assert check.status == "failed"
    assert "cuda:0 -> cuda:1: model.0.weight, model.0.bias and 10 more" in check.detail
    assert check.detail.endswith("my model.pt' --to cuda:1")
    assert dict(check.evidence) == {"tensors": 16, "misplaced": 12, "flags": 0}


def test_a_step_that_map_location_dragged_along_is_misplaced(make):
    tree = make.tree("AdamW")
    check = placement(make.save(tree, stay=()), "cuda:0")
    assert dict(check.evidence)["misplaced"] == 4
    assert "cuda:0 -> cpu: optimizer.state.0.step" in check.detail


def test_a_metric_may_lie_anywhere(make):
    tree = make.tree("AdamW")
    tree["best_loss"] = torch.tensor(0.5)
    assert placement(make.save(tree, stay=("step", "best_loss")), "cuda:0").status == "passed"


def test_what_may_stay_where_it_is(make):
    path = make(name="c.pt", device="cuda:1")
    assert placement(path, "cuda:0", ("model.*", "optimizer.*")).status == "passed"
    check = placement(path, "cuda:0", ("model.*",))
    assert check.status == "failed"
    assert check.detail.endswith("c.pt --to cuda:0 --keep 'model.*'")


def test_for_the_cpu_a_script_can_mend_it_itself(make):
    check = placement(make("AdamW"), "cpu")
    assert check.status == "failed"
    assert "--to cpu, " in check.detail
    assert "map_location='cpu'" in check.detail


def test_a_flag_that_the_target_refuses(make):
    tree = make.tree("Adam")
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    check = placement(make.save(tree, device="cpu"), "cpu")
    assert check.status == "failed"
    assert dict(check.evidence)["flags"] == 1
    assert "optimizer.param_groups.0.capturable is True, " in check.detail
    assert "map_location" not in check.detail


def test_a_dtype_that_the_target_lacks(make):
    check = placement(make("AdamW", dtype=torch.float64), "mps")
    assert check.status == "failed"
    assert ": model.0.weight is" in check.detail
    assert check.detail.endswith("--to mps --cast")


def test_a_dtype_that_no_cast_mends(tmp_path):
    path = tmp_path / "wide.safetensors"
    save_file({"w": torch.ones(3, dtype=torch.float64)}, path)
    check = placement(str(path), "mps")
    assert check.status == "failed"
    assert "w is float64" in check.detail
    assert "--cast" not in check.detail


def test_placement_of_tensors_of_no_known_role(tmp_path):
    """A metric may stay on the CPU, but not on another accelerator. Without a model, it counts as one."""

    def check(target, keep, **tree):
        source, output = tmp_path / "a.pt", tmp_path / "b.pt"
        torch.save(tree, source)
        ckptmove.convert(str(source), to="cuda:0", keep=keep, output=str(output), force=True)
        return placement(str(output), target)

    state = {"model": {"a.weight": torch.ones(2)}, "metric": torch.ones(1)}
    checked = check("cuda:0", ["metric"], **state)
    assert checked.detail == "1 tensor placed for cuda:0; 1 tensor of no known role may stay on the CPU"
    astray = check("cpu", ["model.*"], **state)
    assert (astray.status, dict(astray.evidence)["misplaced"]) == ("failed", 1)
    assert "cuda:0 -> cpu: metric" in astray.detail
    assert check("cuda:0", ["metric"], metric=torch.ones(1)).status == "failed"
    assert check("cuda:0", [], words=["no tensor"]).status == "skipped"


def test_a_storage_that_no_tensor_views_is_named_by_its_key(make):
    with open_checkpoint(make("AdamW")) as checkpoint:
        inventory = replace(checkpoint.inventory, tensors=())
        assert (
            "cuda:0 -> cpu: storage 0, storage 1 and 10 more"
            in check_placement(inventory, MoveRequest(to="cpu")).detail
        )


def test_parts_that_fit(make):
    check = structure(make("AdamW"))
    assert check.status == "passed"
    assert check.detail == "4 parameters in 1 group, 4 with state; 4 found in the model by order"


def test_no_optimizer_has_no_structure(make):
    assert structure(make.save({"model": {"a.weight": torch.ones(2)}})).status == "skipped"


def test_no_model_is_said(make):
    tree = make.tree("AdamW")
    del tree["model"]
    check = structure(make.save(tree))
    assert check.status == "skipped"
    assert (dict(check.evidence)["paired"], dict(check.evidence)["model_tensors"]) == (0, 0)


def test_state_of_a_model_of_other_widths(make):
    tree = make.tree("AdamW")
    tree["model"] = {name: torch.ones(*(2 * size for size in value.shape)) for name, value in tree["model"].items()}
    check = structure(make.save(tree))
    assert check.status == "failed"
    assert "no tensor that could be its parameter has that shape" in check.detail
    assert structure(make.save(tree), ["O204"]).status == "skipped"


def test_a_moment_of_another_shape(make):
    tree = make.tree("AdamW")
    tree["optimizer"]["state"][2]["exp_avg"] = torch.zeros(7, 2)
    check = structure(make.save(tree))
    assert check.status == "failed"
    assert "(O204)" in check.detail


def test_state_of_no_group(make):
    tree = make.tree("AdamW")
    tree["optimizer"]["state"][9] = tree["optimizer"]["state"][0]
    assert structure(make.save(tree)).detail.endswith("(O206): optimizer.state.9")
    assert structure(make.save(tree), ["O206"]).status == "passed"


def test_state_by_text_where_the_groups_list_numbers(make):
    tree = make.tree("AdamW")
    tree["optimizer"]["state"] = {str(key): value for key, value in tree["optimizer"]["state"].items()}
    detail = structure(make.save(tree)).detail
    assert "state of 4 parameters by keys of another type than in the groups" in detail
    tree["optimizer"]["param_groups"][0]["params"] = ["0", "1", "2", "3"]
    assert structure(make.save(tree)).status == "passed"


def test_state_in_another_order_than_the_model(make):
    tree = make.tree("AdamW")
    state = tree["optimizer"]["state"]
    state[0], state[1] = state[1], state[0]
    check = structure(make.save(tree))
    assert check.status == "failed"
    assert check.detail.endswith("(O208): optimizer.state.0.exp_avg")
    check = structure(make.save(tree), ["O208"])
    assert check.status == "skipped"
    assert dict(check.evidence)["with_state"] == 4


def test_a_state_that_has_lost_a_key(make):
    tree = make.tree("AdamW")
    del tree["optimizer"]["state"][2]["exp_avg_sq"]
    assert "optimizer.state.2.exp_avg_sq: " in structure(make.save(tree)).detail
    assert structure(make.save(tree)).detail.endswith("(O207)")


def test_groups_that_list_nothing_beside_state(make):
    tree = make.tree("AdamW")
    tree["optimizer"]["param_groups"] = []
    assert "optimizer has state, but its param_groups list no parameter" in structure(make.save(tree)).detail


def test_counters_that_load_state_dict_moves_are_not_misplaced(make):
    tree = make.tree("Adam")
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    check = placement(make.save(tree), "cuda:0")
    assert check.status == "passed"
    assert check.detail == "16 tensors placed for cuda:0; load_state_dict itself moves 4 counters"
    assert placement(make("NAdam", device="cuda:0"), "cuda:0").status == "passed"


def as_saved(path, device_count=None):
    """The placement of a file, where nobody names a target."""
    with open_checkpoint(path) as checkpoint:
        inventory, context = checkpoint.inventory, Context(device_count=device_count)
        request = MoveRequest(to=target_device(inventory, context))
        check = check_placement(inventory, request, device_count, as_saved=True)
        return fail_on_findings(check, find_all(inventory, context))


def test_without_a_target_each_device_of_the_file_is_right(make):
    tree = make.tree("AdamW")
    whole = as_saved(make.save(tree, device="cuda:3"))
    assert (whole.status, dict(whole.evidence)["misplaced"]) == ("passed", 0)
    assert whole.detail.endswith(" cuda:3")
    assert dict(whole.evidence)["tensors"] == 16
    tree["ema"] = {"0.average": torch.ones(5, 6)}
    averaged = make.save(tree, stay=("step", "average"))
    assert as_saved(averaged).status == "passed"
    assert placement(averaged, "cuda:0").status == "failed"


def test_a_model_on_several_devices_is_right_as_it_was_saved(make):
    two = SAMPLES / "dataparallel-two-gpus.pth"
    check = as_saved(str(two))
    assert check.status == "passed"
    assert check.detail.endswith(": 4 for cuda:0, 4 on cuda:1")
    assert as_saved(str(two), 8).status == "passed"
    assert as_saved(str(two), 1).status == "failed"
    assert placement(str(two), "cuda:0").status == "failed"


def test_without_a_target_what_was_saved_on_the_cpu_is_not_called_what_the_target_wants(make):
    tree = make.tree("AdamW")
    tree["model"]["norm.running_mean"] = torch.ones(3)
    check = as_saved(make.save(tree, device="cuda:0", stay=("step", "running_mean")))
    assert check.status == "passed"
    assert check.detail.endswith(": 16 for cuda:0, 1 on cpu")


def test_without_a_target_what_belongs_elsewhere_by_its_nature_is_misplaced(make):
    dragged = as_saved(make.save(make.tree("AdamW"), device="cuda:3", stay=()))
    assert dragged.status == "failed"
    assert dict(dragged.evidence)["misplaced"] == 4
    assert "cuda:3 -> cpu: optimizer.state.0.step" in dragged.detail
    assert dragged.detail.endswith("--to cuda:3")
    left = as_saved(make.save(make.tree("AdamW"), device="cuda:3", stay=("step", "exp_avg", "exp_avg_sq")))
    assert left.status == "failed"
    assert "(D102): optimizer.state.0.exp_avg; fix: " in left.detail
    assert left.detail.endswith("--to cuda:3")


def test_a_random_state_that_is_no_bytes_is_misplaced(make):
    tree = {**make.tree("AdamW"), "rng_state": torch.get_rng_state().float()}
    with open_checkpoint(make.save(tree, stay=("step", "rng_state"))) as checkpoint:
        inventory = checkpoint.inventory
        check = fail_on_findings(
            check_placement(inventory, MoveRequest(to="cuda:0")), find_all(inventory, Context(target="cuda:0"))
        )
    assert check.status == "failed"
    assert check.detail.endswith("(R301): rng_state")


def test_a_parameter_in_two_groups(make):
    tree = make.tree("AdamW")
    group = tree["optimizer"]["param_groups"][0]
    tree["optimizer"]["param_groups"].append({**group, "params": [3]})
    assert "parameter 3 of optimizer is listed more than once" in structure(make.save(tree)).detail


def test_an_optimizer_that_nobody_knows_is_a_usage_error():
    check_override(None)
    check_override("AdamW")
    with pytest.raises(UsageError, match="'Lion' is not a class of"):
        check_override("Lion")


def test_what_shares_memory_with_what_is_kept_is_not_kept_on_purpose(make, tmp_path):
    """A model stays on its device if its averages are views of it, while its moments move."""
    weight = torch.ones(2, 3)
    tree = {"model": {"w": weight, "b": torch.ones(2)}, "ema": {"w": weight}}
    torch.save(tree, tmp_path / "tied.pth")
    moved = tmp_path / "moved.pth"
    ckptmove.convert(str(tmp_path / "tied.pth"), to="cuda:0", keep=("ema.*",), output=str(moved))
    check = placement(str(moved), "cuda:0", ("ema.*",))
    assert check.status == "failed"
    assert dict(check.evidence)["misplaced"] == 1
    assert ": model.w; fix:" in check.detail
    assert placement(str(moved), "cuda:0", ("ema.*", "model.w")).status == "passed"


def test_the_fix_names_no_device_that_the_target_machine_lacks(make):
    path = make.save(make.tree("AdamW"), device="cuda:3", stay=("step", "exp_avg"))
    with open_checkpoint(path) as checkpoint:
        request = MoveRequest(to="cuda:3")
        assert check_placement(checkpoint.inventory, request, 1).detail.endswith("--to cuda:0")
        assert check_placement(checkpoint.inventory, request, 4).detail.endswith("--to cuda:3")
        assert check_placement(checkpoint.inventory, request).detail.endswith("--to cuda:3")

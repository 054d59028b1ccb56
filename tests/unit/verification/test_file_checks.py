from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ckptmove.checkpoint import open_checkpoint
from ckptmove.errors import UsageError
from ckptmove.findings.context import Context
from ckptmove.findings.registry import find_all
from ckptmove.model import ArchiveFact
from ckptmove.pairing import pair_all
from ckptmove.pickles.names import judge
from ckptmove.verification.file_checks import check_file, check_placement, check_structure
from ckptmove.verification.optimizers import check_override
from ckptmove.verification.run import default_target


def placement(path, target):
    with open_checkpoint(path) as checkpoint:
        return check_placement(checkpoint.inventory, target)


def structure(path):
    with open_checkpoint(path) as checkpoint:
        inventory = checkpoint.inventory
        pairings = list(zip(inventory.optimizers, pair_all(inventory), strict=True))
        return check_structure(inventory, pairings, find_all(inventory, Context()))


def test_a_whole_file(make):
    with open_checkpoint(make("AdamW")) as checkpoint:
        whole = checkpoint.inventory
        check = check_file(checkpoint.container, whole)
        assert check.status == "passed"
        assert check.detail.endswith("every CRC matches")
        check = check_file(checkpoint.container, replace(whole, facts=(ArchiveFact("orphan-record", "x", 3),)))
        assert check.status == "passed"
        check = check_file(checkpoint.container, replace(whole, facts=(ArchiveFact("crc-mismatch", "data/0", 120),)))
        assert check.status == "failed"
        assert check.detail == "data/0 (crc-mismatch, 120 bytes)"
        check = check_file(checkpoint.container, replace(whole, globals=(judge("os.system"), judge("torch.Size"))))
        assert check.status == "failed"
        assert check.detail == "the pickle would call os.system (S702)"


def test_a_file_without_crcs_is_said_and_not_failed(make):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = make("AdamW")
    finally:
        torch.serialization.set_crc32_options(before)
    with open_checkpoint(path) as checkpoint:
        check = check_file(checkpoint.container, checkpoint.inventory)
    assert check.status == "passed"
    assert "saved without CRCs" in check.detail


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
    assert "4 tensors misplaced; cuda:0 -> cpu: optimizer.state.0.step" in check.detail


def test_a_metric_may_lie_anywhere(make):
    tree = make.tree("AdamW")
    tree["best_loss"] = torch.tensor(0.5)
    assert placement(make.save(tree, stay=("step", "best_loss")), "cuda:0").status == "passed"


def test_for_the_cpu_a_script_can_mend_it_itself(make):
    check = placement(make("AdamW"), "cpu")
    assert check.status == "failed"
    assert check.detail.endswith("--to cpu, or torch.load(..., map_location='cpu') in the script")


def test_a_flag_that_the_target_refuses(make):
    tree = make.tree("Adam")
    tree["optimizer"]["param_groups"][0]["capturable"] = True
    check = placement(make.save(tree, device="cpu"), "cpu")
    assert check.status == "failed"
    assert "1 option to follow: optimizer.param_groups.0.capturable is True, has to be False" in check.detail
    assert "map_location" not in check.detail


def test_a_dtype_that_the_target_lacks(make):
    check = placement(make("AdamW", dtype=torch.float64), "mps")
    assert check.status == "failed"
    assert check.detail.startswith("mps has no such dtype: model.0.weight is float64")
    assert check.detail.endswith("--to mps --cast")


def test_a_storage_that_no_tensor_views_is_named_by_its_key(make):
    with open_checkpoint(make("AdamW")) as checkpoint:
        inventory = replace(checkpoint.inventory, tensors=())
        assert "cuda:0 -> cpu: storage 0, storage 1 and 10 more" in check_placement(inventory, "cpu").detail


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
    assert check.detail.endswith("none found in the model (the file holds no model tensors)")


def test_state_of_a_model_of_other_widths(make):
    tree = make.tree("AdamW")
    tree["model"] = {name: torch.ones(*(2 * size for size in value.shape)) for name, value in tree["model"].items()}
    check = structure(make.save(tree))
    assert check.status == "failed"
    assert "no tensor that could be its parameter has that shape" in check.detail


def test_a_moment_of_another_shape(make):
    tree = make.tree("AdamW")
    tree["optimizer"]["state"][2]["exp_avg"] = torch.zeros(7, 2)
    check = structure(make.save(tree))
    assert check.status == "failed"
    assert "(O204)" in check.detail


def test_state_of_no_group(make):
    tree = make.tree("AdamW")
    tree["optimizer"]["state"][9] = tree["optimizer"]["state"][0]
    assert "optimizer.state.9 belongs to no group" in structure(make.save(tree)).detail


def test_a_parameter_in_two_groups(make):
    tree = make.tree("AdamW")
    group = tree["optimizer"]["param_groups"][0]
    tree["optimizer"]["param_groups"].append({**group, "params": [3]})
    assert "parameter 3 of optimizer is listed more than once" in structure(make.save(tree)).detail


def test_the_target_is_where_most_of_the_model_lies(make):
    with open_checkpoint(make("AdamW", device="cuda:3")) as checkpoint:
        assert default_target(checkpoint.inventory) == "cuda:3"
    with open_checkpoint(make.save({"x": torch.ones(2)}, device="mps")) as checkpoint:
        assert default_target(checkpoint.inventory) == "mps"
    with open_checkpoint(make.save({"x": 1})) as checkpoint:
        assert default_target(checkpoint.inventory) == "cpu"


def test_an_optimizer_that_nobody_knows_is_a_usage_error():
    check_override(None)
    check_override("AdamW")
    with pytest.raises(UsageError, match="'Lion' is not a class of"):
        check_override("Lion")

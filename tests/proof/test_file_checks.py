from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import saving
import torch

from ckptmove.checkpoint.pairing import pair_all
from ckptmove.errors import UsageError
from ckptmove.findings.catalogue import CATALOGUE, found
from ckptmove.findings.context import Context
from ckptmove.findings.registry import find_all
from ckptmove.limits import Limits
from ckptmove.model import ArchiveFact, Severity
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.checks import CHECKS, failed, passed
from ckptmove.proof.file_checks import FAILED_BY, check_file, check_structure, fail_on_findings
from ckptmove.proof.step.optimizers import check_override
from ckptmove.torch_facts.verdicts import classify

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"


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
    # Of these some findings are errors: pickled objects, a graph, a second reading. O208 makes a proof impossible.
    assert errors | {"D101", "D102", "D104", "F805", "O208"} == FAILED_BY.keys()
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

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import ckptmove.api
from ckptmove.api import document
from ckptmove.api.failures import Failure
from ckptmove.api.figures import RoleOnDevice, shares
from ckptmove.checkpoint.trainers import TRAINERS
from ckptmove.cli.render import verification
from ckptmove.cli.render.text import Page
from ckptmove.formats.signatures import SIGNATURES
from ckptmove.model import TensorRecord
from ckptmove.proof.evidence import CheckResult, Verdict

SCHEMA = json.loads((Path(ckptmove.api.__file__).parent / "schema.json").read_text(encoding="utf-8"))
FAILURE = Failure(kind="missing-file", message="no such file", hint="", path="a\udc80", exit_code=3)


def result(*evidence, mode="simulated", passed=True):
    checks = (
        CheckResult(name="file", status="passed", detail="fine", evidence=evidence),
        CheckResult(
            name="step", status="passed" if passed else "failed", detail="a\x1b[2Jb", evidence=(("simulated", True),)
        ),
        CheckResult(name="parity", status="skipped", detail="nothing to compare"),
    )
    return Verdict(path="a.pth", target="cuda:0", mode=mode, passed=passed, proven=passed, checks=checks, findings=())


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_schema_names_every_format() -> None:
    assert set(SCHEMA["$defs"]["container"]["enum"]) == {
        *SIGNATURES, "torchscript", "torch-export", "torch-zip", "directory", "archive"
    }  # fmt: skip


def test_the_schema_names_every_layout() -> None:
    trainers = {trainer.layout for trainer in TRAINERS}
    assert set(SCHEMA["$defs"]["layout"]["enum"]) == {*trainers, "plain", "module", "other"}


def test_every_key_that_the_schema_names_has_to_be_there() -> None:
    objects = [node for node in _objects(SCHEMA) if "properties" in node]
    assert len(objects) > 15
    for node in objects:
        assert sorted(node["required"]) == sorted(node["properties"])


def test_the_schema_leaves_room_for_later_keys() -> None:
    answer = document.envelope("verify", 0, []) | {"results": [document.result_to_json(result())], "later": 1}
    answer["results"][0]["proven"] = True
    jsonschema.Draft202012Validator(SCHEMA).validate(answer)


def _objects(node):
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _objects(child)


@pytest.mark.parametrize("command", ["inspect", "convert", "verify", "rules", None])
def test_a_failed_command_has_every_key(command) -> None:
    text = document.dumps(document.envelope(command, 3, [FAILURE, FAILURE]))
    assert text.isascii()
    answer = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(answer)
    assert answer["error"] == answer["errors"][1]
    assert answer["error"]["path"] == "a\udc80"


@pytest.mark.parametrize("key", ["ok", "errors", "command"])
def test_the_schema_notices_a_missing_key(key) -> None:
    answer = document.envelope("inspect", 0, [])
    del answer[key]
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(answer)


def test_evidence_of_any_kind_is_json() -> None:
    evidence = {
        "count": 3, "rate": 0.5, "worst": math.inf, "mean": math.nan, "equal": True, "none": None, "text": "x",
        "pair": (1, -math.inf), "list": [1.5], "map": {1: math.nan}, "odd": Path("a"),
    }  # fmt: skip
    answer = document.envelope("verify", 0, []) | {"results": [document.result_to_json(result(*evidence.items()))]}
    jsonschema.Draft202012Validator(SCHEMA).validate(answer)
    assert json.loads(document.dumps(answer))["results"][0]["checks"][0]["evidence"] == evidence | {
        "worst": "inf", "mean": "nan", "pair": [1, "-inf"], "list": [1.5], "map": {"1": "nan"}, "odd": "a",
    }  # fmt: skip


def test_a_tied_tensor_takes_its_bytes_once() -> None:
    def tensor(name: str, storage: str | None, offset: int = 0) -> TensorRecord:
        return TensorRecord(name, "model", "cpu", "float32", (4,), (1,), storage, offset, 16)

    tensors = (tensor("a", "0"), tensor("tied", "0"), tensor("view", "0", 4), tensor("b", None), tensor("c", None))
    assert shares(tensors) == (RoleOnDevice("cpu", "model", 5, 64),)


def test_the_verdict_never_leaves_out_where_it_ran() -> None:
    assert verification.outcome(result()) == "passed, simulated cuda:0"
    assert verification.outcome(result(mode="real", passed=False)) == "failed, real cuda:0"
    assert verification.outcome(result(mode="cpu")) == "passed, cpu"
    unseen = replace(result(mode="cpu"), not_looked_at=("scheduler", "rng"))
    assert verification.outcome(unseen) == "passed, cpu; scheduler, rng: in the file, not looked at"
    script = CheckResult(name="script", status="passed", detail="")
    unseen = replace(unseen, not_looked_at=("position in the data",), checks=(script,))
    assert verification.outcome(unseen) == "passed, cpu; not looked at: the position in the data"
    skipped = replace(result(mode="real"), checks=(CheckResult(name="step", status="skipped", detail="no state"),))
    skipped = replace(skipped, proven=False)
    assert verification.outcome(skipped) == "passed, real cuda:0, but not proven to resume: no state"
    lost = replace(skipped, checks=(CheckResult(name="fresh", status="skipped", detail="without state; more"),))
    assert verification.outcome(lost) == "passed, real cuda:0, but not proven to resume: without state"
    shown = (CheckResult(name="step", status="passed", detail=""),)
    stood_in = replace(result(mode="cpu"), proven=False, checks=shown)
    assert verification.outcome(stood_in) == (
        "passed, cpu, but not proven to resume: a value missing from the file was replaced"
    )
    ranks = replace(
        result(), checks=(CheckResult(name="keys", status="passed", detail=""), lost.checks[0]), proven=False
    )
    said = "passed, simulated cuda:0: every shard equal, but not proven to resume: without state; more"
    assert verification.outcome(ranks) == said
    assert verification.brief_line(result(passed=False)) == "a.pth: failed, simulated cuda:0 (step)"
    unmade = replace(result(passed=False), checks=(CheckResult(name="step", status="failed", detail="not proven"),))
    assert verification.outcome(unmade) == "failed, cuda:0", "nothing was simulated"
    elsewhere = replace(unmade, checks=(CheckResult(name="numbers", status="failed", detail="NaN"),))
    assert verification.outcome(elsewhere) == "failed, simulated cuda:0"


def test_checks_are_lines_that_a_terminal_cannot_obey() -> None:
    lines = list(verification.verification_lines(Page(), result(("figure", "x\ny"), passed=False), verbose=True))
    assert lines == [
        "a.pth on cuda:0",
        "✓ file    fine",
        "          figure = x\\x0ay",
        "✗ step    a\\x1b[2Jb",
        "          simulated = True",
        "– parity  nothing to compare",
        "failed, simulated cuda:0",
    ]
    old = list(verification.verification_lines(Page(unicode=False, columns=30), result(), verbose=False))
    assert [line.split()[:2] for line in old[1:4]] == [["ok", "file"], ["ok", "step"], ["-", "parity"]]
    assert {line.index(line.split()[2]) for line in old[1:4]} == {11}
    one = result(("figure", "x"), passed=False)
    failed = list(verification.verification_lines(Page(unicode=False), one, verbose=False))
    assert [line.split()[:2] for line in failed[1:4]] == [["ok", "file"], ["FAILED", "step"], ["-", "parity"]]
    assert {line.index(line.split()[2]) for line in failed[1:4]} == {15}


def test_a_result_without_checks_is_still_a_report() -> None:
    empty = Verdict(path="a", target="cpu", mode="cpu", passed=True, proven=False, checks=(), findings=())
    assert list(verification.verification_lines(Page(), empty, verbose=False))[:1] == ["a on cpu"]

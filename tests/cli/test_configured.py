"""Configuration in pyproject.toml."""

from __future__ import annotations

import pytest
import torch

from ckptmove.proof.evidence import Verdict


@pytest.fixture
def configure(bench):
    def configure(text: str) -> None:
        (bench / "pyproject.toml").write_text(f"[tool.ckptmove]\n{text}\n")

    return configure


@pytest.mark.parametrize("command", ["inspect", "convert", "verify"])
def test_no_path_at_all_shows_both_ways(ask, say, command) -> None:
    error = ask(command)["error"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert f"'ckptmove {command} PATH'" in error["message"]
    assert '[tool.ckptmove] checkpoints = ["runs/*/last.pth"]' in error["message"]
    assert say(command).err.count("\n") == 1


def test_checkpoints_and_ignore_come_from_the_project(ask, configure) -> None:
    configure('checkpoints = ["*.pth"]\nignore = ["D103", "R"]')
    document = ask("inspect")
    assert [checkpoint["path"] for checkpoint in document["checkpoints"]] == ["dragged.pth", "run.pth"]
    assert {finding["code"] for finding in document["checkpoints"][1]["findings"]} == set()


def test_what_is_typed_comes_first(ask, configure) -> None:
    configure('checkpoints = ["dragged.pth"]\nto = "cpu"')
    assert ask("inspect", "run.pth")["checkpoints"][0]["path"] == "run.pth"
    assert ask("convert", "run.pth", "--to", "mps")["output"] == "run.mps.pth"
    assert ask("convert", "run.pth", "--map", "cuda:3=cuda:1", "--dry-run")["plan"]["edits"][0]["to"] == "cuda:1"


def test_the_target_comes_from_the_project(ask, configure) -> None:
    configure('checkpoints = ["run.pth"]\nto = "cpu"')
    assert ask("convert")["output"] == "run.cpu.pth"


def test_a_wrong_device_in_the_project_is_named(ask, configure) -> None:
    configure('checkpoints = ["run.pth"]\nto = "gpu"')
    for command in ("inspect", "convert", "verify"):
        error = ask(command)["error"]
        assert error["kind"] == "unknown-device"
        assert error["path"].endswith("pyproject.toml")
        assert error["hint"].endswith(": cuda:0")


@pytest.mark.parametrize(
    ("text", "message"),
    [('to = "xla"', "cannot be moved to 'xla'"), ('ignore = ["D101,Z9"]', "no finding is about 'Z9'")],
)
def test_other_wrong_words_in_the_project_are_found_there(ask, configure, text, message) -> None:
    configure(text)
    error = ask("inspect", "run.pth")["error"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert message in error["message"]
    assert error["path"].endswith("pyproject.toml")


@pytest.mark.parametrize("command", ["inspect", "convert", "verify"])
def test_a_project_whose_checkpoints_are_not_there_is_named(ask, configure, command) -> None:
    configure('checkpoints = ["runs/*/last.pth", "best.pth"]\nto = "cpu"')
    error = ask(command)["error"]
    assert (error["kind"], error["exit_code"]) == ("nothing-configured", 3)
    assert error["message"].endswith(": runs/*/last.pth, best.pth")
    assert error["path"].endswith("pyproject.toml")
    assert ask(command, "best.pth")["error"]["path"] == "best.pth"


def test_what_is_there_is_inspected_although_the_rest_is_not(ask, configure) -> None:
    configure('checkpoints = ["runs/*/last.pth", "run.pth"]')
    document = ask("inspect")
    assert [checkpoint["path"] for checkpoint in document["checkpoints"]] == ["run.pth"]
    assert [error["path"] for error in document["errors"]] == ["runs/*/last.pth"]
    assert "in pyproject.toml" in document["error"]["hint"]


def test_verify_alone_is_a_job(ask, configure) -> None:
    pytest.importorskip("torch")
    configure('checkpoints = ["run.pth"]\nto = "cuda:3"')
    document = ask("verify")
    assert [(result["path"], result["target"]) for result in document["results"]] == [("run.pth", "cuda:3")]


def test_a_broken_project_file_is_an_error_of_usage(ask, configure) -> None:
    configure("to = 3")
    error = ask("inspect", "run.pth")["error"]
    assert error["kind"] == "usage"
    assert error["path"].endswith("pyproject.toml")


def test_what_proves_nothing_is_a_failure_where_the_project_says_so(ask, configure, bench) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, bench / "weights.pth")
    for text, arguments, code in (("", (), 0), ("", ("--strict",), 1), ("strict = true", (), 1)):
        configure(text)
        document = ask("verify", "weights.pth", *arguments)
        assert (document["exit_code"], document["ok"]) == (code, code == 0)
        assert [(result["passed"], result["proven"]) for result in document["results"]] == [(True, False)]


@pytest.fixture
def requests(monkeypatch):
    """The requests of ``verify``, which is not made."""
    from ckptmove.cli import verify_command

    seen = []
    result = Verdict(path="run.pth", target="cpu", mode="cpu", passed=True, proven=True, checks=(), findings=())
    monkeypatch.setattr(
        verify_command, "verify_checkpoint", lambda request, **_callbacks: seen.append(request) or result
    )
    return seen


def test_options_of_verify_come_from_the_project_and_the_environment(say, configure, requests, monkeypatch) -> None:
    configure('seed = 3\nsample = 2\nrequire-device = true\ntimeout = 5\nkeep = ["a", "b"]')
    monkeypatch.setenv("CKPTMOVE_SAMPLE", "4")
    assert say("verify", "run.pth", "--seed", "7").code == 0
    (request,) = requests
    assert (request.seed, request.sample, request.require_device, request.timeout) == (7, 4, True, 5.0)
    assert request.keep == ("a", "b")


def test_reports_come_from_the_project(say, configure, requests, bench) -> None:
    configure('report = ["json=a.json"]\njunit = "b.xml"\nquiet = true')
    assert say("verify", "run.pth").out == "run.pth: passed, cpu\n"
    assert (bench / "a.json").exists()
    assert (bench / "b.xml").exists()
    assert say("verify", "run.pth", "--report", "json=c.json").code == 0
    assert (bench / "c.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = -1", "-1"),
        ("report = ['pdf=x']", "pdf"),
        ("format = 'xml'", "'xml'"),
    ],
)
def test_a_wrong_value_of_an_option_is_found_in_its_source(ask, say, configure, monkeypatch, text, message) -> None:
    configure(text)
    error = ask("verify", "run.pth")["error"] if "format" not in text else None
    said = say("verify", "run.pth")
    assert (said.code, "pyproject.toml" in said.err, message in said.err) == (2, True, True)
    assert error is None or (error["kind"], error["exit_code"]) == ("usage", 2)
    assert ask("inspect", "run.pth", "--select", "D101")["ok"]


@pytest.mark.parametrize(
    ("text", "variables", "is_json"),
    [
        ("json = true", {}, True),
        ("format = 'json'", {"SEED": "x"}, True),
        ("format = 'github'", {"JSON": "1"}, True),
        ("json = true", {"FORMAT": "human"}, False),
        ("json = 1", {}, False),
        ("format = 'xml'", {}, False),
    ],
)
def test_an_error_has_the_format_that_is_set(say, configure, monkeypatch, text, variables, is_json) -> None:
    configure(text)
    for name, value in variables.items():
        monkeypatch.setenv(f"CKPTMOVE_{name}", value)
    said = say("verify", "run.pth", "--no-such-option")
    assert (said.code, said.out.startswith("{")) == (2, is_json)
    assert not say("inspect", "run.pth", "--no-such-option").out


def test_help_needs_no_valid_project(say, configure) -> None:
    configure("to = 3")
    assert say("verify", "--help").code == 0


def test_what_is_ignored_in_the_project_is_so_with_a_typed_code_too(say, configure, requests) -> None:
    configure('ignore = ["D101"]')
    say("verify", "run.pth", "--ignore", "D102")
    assert {"D101", "D102"} == set(requests[0].ignore)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("inspect", "run.pth", "--expect", "cpu", "--expect=cuda:0"), "--expect"),
        (("convert", "run.pth", "--to", "cpu", "--to", "cpu"), "--to"),
        (("convert", "run.pth", "--to", "cpu", "-o", "a.pth", "--output", "b.pth"), "--output"),
        (("convert", "run.pth", "--to", "cpu", "-oa.pth", "-o", "b.pth"), "--output"),
        (("verify", "run.pth", "--seed", "1", "--seed", "2"), "--seed"),
        (("diff", "run.pth", "run.pth", "--limit-factor", "1", "--limit-factor", "2"), "--limit-factor"),
        (("rules", "--format", "human", "--format", "github"), "--format"),
    ],
)
def test_an_option_with_one_value_is_typed_once(say, words, option) -> None:
    said = say(*words)
    assert said.code == 2
    assert f"'{option}'" in said.err


def test_repeatable_options_and_flags_may_be_repeated(ask) -> None:
    words = ("--ignore", "D103", "--ignore", "R302", "-v", "-v")
    assert ask("inspect", "run.pth", *words)["checkpoints"][0]["findings"] == []


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("convert", "run.pth", "--only", "-o", "new.pth"), "'--only'"),
        (("convert", "run.pth", "--to", "--force"), "'--to'"),
        (("verify", "run.pth", "--optimizer", "--to=cpu"), "'--optimizer'"),
        (("inspect", "run.pth", "--match", "-q"), "'--match'"),
    ],
)
def test_an_option_is_no_value(say, words, option) -> None:
    said = say(*words)
    assert said.code == 2
    assert option in said.err


def test_a_value_may_look_like_an_option(ask) -> None:
    assert ask("inspect", "run.pth", "--match=--force")["checkpoints"][0]["tensors"] == []
    assert ask("inspect", "run.pth", "--match", "-other")["checkpoints"][0]["tensors"] == []
    assert ask("convert", "run.pth", "--to", "cpu", "--keep", "-other", "-o", "new.pth")["exit_code"] == 0


def test_words_after_two_dashes_are_no_options(say) -> None:
    said = say("inspect", "--expect", "cpu", "--", "--expect", "--expect")
    assert said.code == 3
    assert "./--expect: no such file" in said.err

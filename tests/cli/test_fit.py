from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import fit_cases
import pytest
import torch
from http_server import serving

CASE = f"{Path(fit_cases.__file__)}:several"


@pytest.fixture
def few(bench):
    """A checkpoint with the parameters of the case."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    torch.save(model.state_dict(), bench / "few.pth")


@pytest.mark.parametrize(("fit", "code", "word"), [("2x1GB", 0, "fits"), ("2x0.5KB", 1, "does not fit")])
def test_the_verdict(say, ask, fit, code, word) -> None:
    said = say("verify", "run.pth", "--fit", fit)
    assert said.code == code
    assert said.out.splitlines()[-1].startswith(f"{word}, 2 devices of ")
    level = "error" if code else "notice"
    assert say("verify", "run.pth", "--fit", fit, "--format", "github").out.splitlines()[-1].startswith(f"::{level} ")
    assert say("verify", "run.pth", "--fit", fit, "-q").out.startswith(f"run.pth: {word}, ")
    (result,) = ask("verify", "run.pth", "--fit", fit)["results"]
    assert result["passed"] is (code == 0)
    assert result["fit"] == result["checks"][0]["evidence"]
    assert [check["name"] for check in result["checks"]] == ["fit"]


def test_it_fails_no_strict_run(say) -> None:
    said = say("verify", "run.pth", "dragged.pth", "--fit", "2x1GB", "--strict")
    assert said.code == 0
    assert "not proven" not in said.out
    assert "not proven" not in say("verify", "run.pth", "dragged.pth", "--fit", "2x1GB").out
    assert str(say("verify", "run.pth", "--fit", "2 GB").code) == "2"


@pytest.mark.parametrize(("fit", "code"), [("2x1GB", 0), ("2x0.5KB", 1)])
@pytest.mark.parametrize("words", [(), ("--strict",)])
def test_the_reports_agree_with_the_exit_code(say, bench, fit, code, words) -> None:
    reports = ("--report", "junit=j.xml", "--report", "html=h.html", "--report", "sarif=s.sarif")
    assert say("verify", "run.pth", "--fit", fit, *words, *reports).code == code
    (suite,) = ET.parse(bench / "j.xml").getroot()
    assert (suite.get("failures"), suite.get("skipped")) == (str(code), "0")
    assert f'class="verdict {"failed" if code else "passed"}"' in (bench / "h.html").read_text()
    (run,) = json.loads((bench / "s.sarif").read_text())["runs"]
    assert [result["level"] for result in run["results"]] == ["error"] * code


def test_only_the_metadata_are_read(say, bench, monkeypatch) -> None:
    shutil.copy("run.pth", bench / "served.pth")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no torch
    with serving(bench) as server:
        assert say("verify", f"{server.url}/served.pth", "--fit", "2x1GB", "-q").code == 0


@pytest.mark.usefixtures("few")
def test_the_verdict_with_a_case(say) -> None:
    said = say("verify", "few.pth", "--fit", "2x1GB", "--case", CASE)
    assert said.code == 0
    assert said.out.splitlines()[-1] == "fits, 2 devices of 953.7 MiB, activations estimated"


def test_a_case_with_another_model(say) -> None:
    said = say("verify", "run.pth", "--fit", "2x1GB", "--case", CASE)
    assert said.code == 1
    assert said.out.splitlines()[1].endswith(" elements in its parameters, the checkpoint 83")
    assert said.out.splitlines()[-1].startswith("failed, 2 devices of ")


def test_the_reports(say, bench) -> None:
    reports = ("--report", "markdown=fit.md", "--report", "html=fit.html", "--report", "sarif=fit.sarif")
    assert say("verify", "run.pth", "--fit", "2x1GB", *reports).code == 0
    markdown, page = (bench / "fit.md").read_text(), (bench / "fit.html").read_text()
    assert "✅ | <code>run.pth</code>" in markdown
    assert "<summary>1 check of" in markdown
    assert ">2x1GB<" in page
    assert ">target<" not in page
    assert 'class="verdict passed"' in page
    assert "proven to resume" not in page
    assert json.loads((bench / "fit.sarif").read_text())["runs"][0]["results"] == []


def test_a_case_that_is_not_measured(say) -> None:
    said = say("verify", "run.pth", "--fit", "2x1GB", "--case", CASE, "--timeout", "0.001")
    assert said.code == 1
    assert said.out.splitlines()[-1] == "failed, not measured"


@pytest.mark.parametrize("more", [["--fix", "--case", CASE], ["--case", CASE, "--sample", "1"], ["--case", "x"]])
def test_options_of_other_checks(say, more) -> None:
    said = say("verify", "run.pth", "--fit", "2x1GB", *more)
    assert said.code == 2
    assert said.out == ""

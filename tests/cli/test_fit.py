from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from http_server import serving

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"


@pytest.mark.parametrize(("fit", "code", "word"), [("2x1GB", 0, "fits"), ("2x0.5KB", 1, "does not fit")])
@pytest.mark.parametrize("more", [(), ("--strict",)])
def test_every_report_agrees_with_the_exit_code(say, ask, bench, fit, code, word, more) -> None:
    files = "junit=j.xml", "html=h.html", "sarif=s.sarif", "markdown=m.md"
    said = say("inspect", "run.pth", "--fit", fit, *more, *(one for file in files for one in ("--report", file)))
    assert said.code == code
    (line,) = (one for one in said.out.splitlines() if one.startswith(f"{word} on 2 devices of "))
    (answer,) = ask("inspect", "run.pth", "--fit", fit)["checkpoints"]
    assert answer["fit"]["fits"] is (code == 0)
    brief = say("inspect", "run.pth", "--fit", fit, "-q").out
    assert brief.rstrip().endswith(f"; {word}")
    assert said.out.splitlines()[-1] == line
    assert ("next: " in said.err) is (code == 0)
    level = "error" if code else "notice"
    notes = say("inspect", "run.pth", "--fit", fit, *more, "--format", "github").out.splitlines()
    assert [one for one in notes if one.endswith(line)] == [f"::{level} file=run.pth,title=fit::{line}"]
    assert any(one.startswith("::error") for one in notes) is bool(code)
    (suite,) = ET.parse(bench / "j.xml").getroot()
    assert suite.get("failures") == str(code)
    assert line in "".join(suite.itertext())
    (run,) = json.loads((bench / "s.sarif").read_text())["runs"]
    assert [one["ruleId"] for one in run["results"] if one["level"] == "error"] == ["inspect/fit"] * code
    assert (bench / "m.md").read_text().count("devices of") == 1
    assert ">memory<" in (bench / "h.html").read_text()


def test_it_is_null_unless_asked_for(ask) -> None:
    assert ask("inspect", "run.pth")["checkpoints"][0]["fit"] is None


def test_a_warning_that_only_strict_fails_is_named_beside_it(say, bench) -> None:
    shutil.copy(SAMPLES / "optimizer-left-on-cpu.pth", bench / "left.pth")
    words = "inspect", "left.pth", "--fit", "2x1GB", "--format", "github"
    assert say(*words).code == 0
    said = say(*words, "--strict")
    assert said.code == 1
    assert said.out.splitlines()[-1].startswith("::error file=left.pth,title=inspect::")


def test_only_the_metadata_are_read(say, bench, monkeypatch) -> None:
    shutil.copy("run.pth", bench / "served.pth")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(bench) as server:
        assert say("inspect", f"{server.url}/served.pth", "--fit", "2x1GB", "-q").code == 0


def test_a_value_of_another_form_is_an_error_before_any_file_is_read(say) -> None:
    said = say("inspect", "missing.pth", "missing.pth", "--fit", "2 GB")
    assert (said.code, said.out) == (2, "")
    assert said.err.count("error: ") == said.err.count("hint: ") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("verify run.pth --fit 2x1GB", "run.pth --fit 2x1GB"),
        ("convert --fit=2x1GB run.pth", "run.pth --fit 2x1GB"),
        ("verify run.pth --fit 2x1GB --to cpu", "PATH --fit 2x1GB"),
        ("verify run.pth --fit --to cpu", "PATH --fit NxSIZE"),
        ("verify --fit", "PATH --fit NxSIZE"),
        ("verify run.pth --device-memory 24GB", "run.pth --fit 1x24GB"),
        ("inspect run.pth --device-memory=24GB", "run.pth --fit 1x24GB"),
    ],
)
def test_another_command_names_inspect(say, words, line) -> None:
    said = say(*words.split())
    assert said.code == 2
    assert said.err.endswith(f"ckptmove inspect {line}\n")
    assert "Possible" not in said.err


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("verify run.pth --fixx", "--fix"),
        ("convert run.pth --in-plac", "--in-place"),
        ("convert run.pth --forc", "--f"),
    ],
)
def test_no_option_that_writes_is_suggested(say, words, option) -> None:
    said = say(*words.split())
    assert said.code == 2
    assert option not in said.err.replace(words.split()[-1], "")
    assert "--strict" in say("verify", "run.pth", "--strikt").err

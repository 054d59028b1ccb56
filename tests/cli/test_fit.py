from __future__ import annotations

import shutil

import pytest
from http_server import serving


@pytest.mark.parametrize(("fit", "code", "word"), [("2x1GB", 0, "fits"), ("2x0.5KB", 1, "does not fit")])
def test_the_verdict(say, ask, fit, code, word) -> None:
    said = say("verify", "run.pth", "--fit", fit)
    assert said.code == code
    assert said.out.splitlines()[-1].startswith(f"{word}, 2 devices of ")
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


def test_only_the_metadata_are_read(say, bench, monkeypatch) -> None:
    shutil.copy("run.pth", bench / "served.pth")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no torch
    with serving(bench) as server:
        assert say("verify", f"{server.url}/served.pth", "--fit", "2x1GB", "-q").code == 0

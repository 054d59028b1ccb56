"""A broken link is reported as such by every command that reads."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "dang.pth"),
        ("convert", "dang.pth", "--to", "cpu"),
        ("convert", "dang.pth", "--to", "cpu", "--in-place"),
        ("verify", "dang.pth"),
        ("verify", "run.pth", "--against", "dang.pth"),
        ("diff", "dang.pth", "run.pth"),
        ("diff", "run.pth", "dang.pth"),
    ],
)
def test_a_link_to_nowhere(ask, bench, words) -> None:
    if words[0] == "verify":
        pytest.importorskip("torch")
    (bench / "dang.pth").symlink_to("nowhere.pth")
    error = ask(*words)["error"]
    assert (error["kind"], error["path"], error["exit_code"]) == ("missing-file", "dang.pth", 3)
    assert "nowhere.pth" in error["message"]
    assert error["hint"].endswith(": ln -sfn FILE dang.pth")


def test_what_is_not_there_at_all_is_no_link(ask, bench) -> None:
    (bench / "dang.pth").symlink_to("run.pth")
    error = ask("inspect", "danq.pth")["error"]
    assert (error["kind"], error["hint"].split()[-1]) == ("missing-file", "dang.pth?")
    assert "nowhere.pth" not in error["message"]

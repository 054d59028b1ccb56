"""The suggested next command, and output to a closed stream."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmove.api import functions as api
from ckptmove.opening.checkpoint import open_checkpoint

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"
WITHOUT = "load it without map_location:"


def test_no_command_helps_a_file_whose_bytes_are_lost(tmp_path, say):
    path = Path(shutil.copy(SAMPLES / "adam-mps.pt", tmp_path / "flipped.pt"))
    with open_checkpoint(str(path)) as checkpoint:
        span = checkpoint.file.span("0")
    data = bytearray(path.read_bytes())
    data[span.start] ^= 1
    path.write_bytes(data)
    assert say("inspect", str(path)).next[0] == "verify"
    assert not say("inspect", "--check", str(path)).next


def test_what_is_not_where_it_was_expected_is_converted(say):
    path = str(SAMPLES / "tutorial-sgd-cpu.pth")
    said = say("inspect", path, "--expect", "cuda:0")
    assert said.code == 1
    assert said.next == ["convert", path, "--to", "cuda:0"]


def test_what_the_expected_device_lacks_is_cast_or_has_no_command(say, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"weight": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "run.pth")
    wide = str(SAMPLES / "float64-cpu.pt")
    assert say("inspect", wide, "--expect", "mps").next == ["convert", wide, "--to", "mps", "--cast"]
    assert not say("inspect", str(tmp_path / "run.pth"), "--expect", "mps").next


def test_an_error_without_a_command_needs_no_proof(say, tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(5, 7)
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "run.pth")
    said = say("inspect", str(tmp_path / "run.pth"))
    assert "O204" in said.out
    assert not said.next


def test_an_output_that_is_taken_away_at_once_has_no_next_command(tmp_path, monkeypatch, say):
    path = shutil.copy(SAMPLES / "adamw-cuda3.pth", tmp_path / "run.pth")
    real = api.convert_checkpoint

    def taken_away(request):
        result = real(request)
        Path(result.output).unlink()
        return result

    monkeypatch.setattr(api, "convert_checkpoint", taken_away)
    said = say("convert", str(path), "--map", "cuda:3=cpu")
    assert said.code == 0
    assert "next:" not in said.err


def test_a_name_that_no_tensor_has(say):
    assert "(--tensors lists all)" in say("inspect", str(SAMPLES / "adam-mps.pt"), "--match", "zzz*").out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--to", "cuda"),
            [
                f"{WITHOUT} torch.load('run.cuda0.pth', weights_only=True)",
                "verify run.cuda0.pth --to cuda:0",
            ],
        ),
        (
            ("--map", "cuda:3=mps"),
            [
                f"{WITHOUT} torch.load('run.moved.pth', weights_only=True)",
                "verify run.moved.pth",
            ],
        ),
        (("--to", "cpu"), ["verify run.cpu.pth --to cpu"]),
        (("--map", "cuda:3=cpu"), ["verify run.moved.pth"]),
        (
            ("--to", "mps", "--map", "cuda:3=cpu"),
            [
                f"{WITHOUT} torch.load('run.mps.pth', weights_only=True)",
                "verify run.mps.pth",
            ],
        ),
        (("--to", "cpu", "--map", "cuda:3=cpu"), ["verify run.cpu.pth --to cpu"]),
        (
            ("--to", "cpu", "--keep", "model.*", "--keep", "*.1.*"),
            ["verify run.cpu.pth --to cpu --keep 'model.*' --keep '*.1.*'"],
        ),
        (("--to", "cuda:0", "--quiet"), []),
        (("--to", "cuda:0", "--dry-run"), []),
    ],
)
def test_a_converted_file_says_how_it_is_loaded_and_verified(say, words, expected):
    lines = say("convert", "run.pth", *words).err.splitlines()
    assert [line.removeprefix("next: ckptmove ") for line in lines] == expected


class Settings:
    """A class that torch.load(weights_only=True) refuses."""


@pytest.mark.parametrize(("words", "new"), [((), "own.cuda0.pth"), (("--in-place",), "own.pth")])
def test_a_file_that_weights_only_refuses_is_not_said_to_load_so(say, bench, words, new):
    torch = pytest.importorskip("torch")
    tree = {"model": {"weight": torch.ones(3)}, "settings": Settings()}
    torch.save(tree, bench / "own.pth")
    said = say("convert", "own.pth", "--to", "cuda:0", *words).err.splitlines()
    assert not any("load it" in line for line in said)
    assert "S701" in say("inspect", new).out


@pytest.mark.parametrize("more", [(), ("--quiet",), ("--json",), ("--in-place",), ("--dry-run", "--quiet")])
def test_an_option_that_meets_nothing_is_a_warning_and_not_repeated(say, more):
    said = say(
        "convert", "run.pth", "--map", "cuda:7=cpu", "--to", "cpu", "--keep", "modle.*", "--keep", "model.*", *more
    )
    assert said.code == 0
    kept, mapped, *rest = said.err.splitlines()
    assert re.match(r"warning: --keep modle\.\* .*model\.\*, optimizer\.\*$", kept)
    assert re.match(r"warning: --map cuda:7=\.\.\. .*cpu, cuda:3$", mapped)
    assert "modle" not in said.out or "--json" in more
    new = {(): "run.cpu.pth", ("--in-place",): "run.pth"}.get(more)
    assert len(rest) == bool(new)
    assert said.next == (["verify", new, "--to", "cpu", "--keep", "model.*"] if new else [])


def test_an_option_that_meets_nothing_stands_in_json_and_in_annotations(say):
    words = ("convert", "run.pth", "--to", "cpu", "--keep", "modle.*", "--dry-run")
    told = "--keep modle.* matches no whole name; the file has model.*, optimizer.*"
    assert json.loads(say(*words, "--json").out)["notes"] == [told]
    said = say(*words, "--format", "github")
    assert said.out.splitlines()[0] == f"::warning file=run.pth,title=convert --keep::{told}"
    assert said.err == ""


def test_a_name_that_begins_as_an_option_can_be_typed_as_it_is_shown(say, bench):
    (bench / "run.pth").rename(bench / "-x.pth")
    assert " convert ./-x.pth --to cuda:0\n" in say("inspect", "--", "-x.pth").out
    for words, new in (("--to", "cpu"), "./-x.cpu.pth"), (("--to", "cpu", "--output=-y.pth"), "./-y.pth"):
        said = say("convert", *words, "--", "-x.pth")
        assert said.only_next == ["verify", new, "--to", "cpu"]
        assert (bench / new).is_file()
    assert say("diff", "--", "-x.pth", "-z.pth").err.startswith("error: ./-z.pth: ")
    assert say("verify", "--against=-z.pth", "--", "-y.pth").err.startswith("error: ./-z.pth: ")
    assert say("inspect", "-").err.startswith("error: -: ")


def test_a_newline_in_a_name_does_not_break_a_command(say, bench):
    (bench / "run.pth").rename(bench / "a\nb.pth")
    assert say("convert", "a\nb.pth", "--to", "cpu").err.endswith(" verify $'a\\x0ab.cpu.pth' --to cpu\n")
    said = say("inspect", "a\nb.pth", "--devices", "1")
    assert " convert $'a\\x0ab.pth' --to cuda:0\n" in said.out
    assert said.err.endswith(" convert $'a\\x0ab.pth' --to cuda:0\n")


def test_what_has_to_be_cast_says_how_that_is_typed(say, bench):
    path = shutil.copy(SAMPLES / "float64-cpu.pt", bench / "a b.pt")
    hint = say("convert", path.name, "--to", "mps").err.splitlines()[1]
    assert hint.endswith(": ckptmove convert 'a b.pt' --to mps --cast")
    assert say("convert", "--cast", path.name, "--to", "mps").code == 0


def test_what_torch_load_does_not_read_is_not_loaded_with_it(say, tmp_path):
    said = say("convert", str(SAMPLES / "bare-pickle-cuda2.pkl"), "--to", "cuda:0", "-o", str(tmp_path / "out.pkl"))
    assert said.only_next == ["verify", str(tmp_path / "out.pkl"), "--to", "cuda:0"]


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("words", "code", "closed"),
    [
        ("inspect adam-mps.pt", 0, ">&-"),
        ("inspect adamw-cuda3.pth --devices 1", 1, ">&-"),
        ("inspect none.pth", 3, ">&-"),
        ("inspect none.pth", 3, "2>&-"),
        ("inspect none.pth", 3, "<&- >&- 2>&-"),
        ("inspect --bogus", 2, "<&- 2>&-"),
        ("convert adam-mps.pt --to cpu -o {}/out.pt", 0, "<&- 2>&-"),
        ("convert adam-mps.pt --to cpu -o {}/out.pt", 0, "<&- >&- 2>&-"),
        ("verify tutorial-sgd-cpu.pth", 0, "<&- >&- 2>&-"),
        ("verify none.pth", 3, "2>&-"),
    ],
)
def test_closed_streams_do_not_change_the_exit_code(tmp_path, words, code, closed):
    if words.startswith("verify"):
        pytest.importorskip("torch")
    program = f"exec {sys.executable} -m ckptmove {words.format(tmp_path)} {closed}"
    environment = {**os.environ, "PYTHONPATH": str(SAMPLES.parent)}
    done = subprocess.run(
        ["sh", "-c", program], cwd=SAMPLES, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    for output in tmp_path.glob("out.pt"):
        assert api.inspect(str(output), expect="cpu").plan.is_empty

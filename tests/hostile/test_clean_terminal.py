"""No output format passes on control sequences or CI commands from a file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ckptmove.api import document
from ckptmove.cli.app import app
from ckptmove.cli.render import github, report
from ckptmove.cli.render.text import Page
from ckptmove.cli.render.verification import brief_line, verification_lines
from ckptmove.proof.evidence import Verdict
from ckptmove.proof.processes.messages import Message, read_message
from ckptmove.proof.request import VerifyRequest
from ckptmove.training.worker import run
from fuzz.seeds import STORAGE, archive_of

pytestmark = pytest.mark.unmeasured

#: Each example runs up to a dozen commands.
SOME = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
#: Any text, and more often than not one that wants something.
NASTY = st.sampled_from([
    "\x1b[2J", "\x1b]0;x\x07", "\x9b31m", "\u202e", "\u2066", "\n", "\r", "\t", "\0", "\ud800", "\udfff", "\u2028",
    "\x85", "\U000e0041", "\n::error::x", "::set-output name=a::b", "##[error]", "%0A", "; ", "; fix: ", "\x7f",
    "\u200b", "\ufeff", "cuda:0", "cpu", "step", "'", '"', "\\", "[red]", "{0}", "x" * 3000,
])  # fmt: skip
TEXT = st.lists(NASTY | st.text(st.characters(exclude_categories=[]), max_size=8), min_size=1, max_size=5).map("".join)


def pushed(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def checkpoint(words: list[str]) -> bytes:
    """A file with the given text in every place for text."""
    key, tag, name, device, module, group = words
    dense = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE
    tagged = dense.replace(b"X\x06\0\0\0cuda:0", pushed(tag)).replace(b"X\x01\0\0\x000", pushed("1"))
    named = module.replace("\n", "").encode("utf-8", "replace")
    pickled = b"".join((
        b"\x80\x02}(", pushed(key), dense, pushed("state"), b"}K\0}(", pushed("step"), dense, pushed(name), dense,
        b"us", pushed("param_groups"), b"](}(", pushed(group), b"K\x01", pushed("params"), b"](K\0", pushed(name),
        b"eue", pushed("model"), b"}(", pushed("weight"), tagged, pushed(name), dense, b"u",
        pushed("device"), pushed(device), pushed("args"), b"ctorch\ndevice\n", pushed(device), b"\x85R",
        pushed("odd"), b"c", named, b"\n", named, b"\n)R", pushed("long"), pushed(key * 20), b"u.",
    ))  # fmt: skip
    return archive_of(pickled, {"0": bytes(16), "1": bytes(8)})


def assert_clean(output: str) -> None:
    for line in output.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.lstrip().startswith("##["), line


def said(*words: str) -> None:
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.exit_code in {0, 1, 2, 3, 4, 5}, result.output
    assert_clean(result.stdout)
    assert_clean(result.stderr)
    for line in (result.stdout + result.stderr).splitlines():
        if "github" not in words:
            assert not line.lstrip().startswith("::"), line
        elif line.startswith("::"):
            assert line.split(" ", 1)[0] in {"::error", "::warning", "::notice"}, line
    if "--json" in words:
        assert result.stdout.isascii()
        json.loads(result.stdout)


@pytest.mark.slow
@SOME
@given(st.lists(TEXT, min_size=6, max_size=6))
def test_a_file_says_nothing_to_the_terminal(tmp_path, words) -> None:
    path, output = str(tmp_path / "hostile"), str(tmp_path / "out")
    Path(path).write_bytes(checkpoint(words))
    flags = ["--tensors", "--tree", "--globals", "--expect", "cpu", "-v"]
    for extra in ([], ["--format", "github"], ["--json"], ["-q"]):
        said("inspect", path, *flags, *extra)
        said("convert", path, "--to", "mps", "--cast", "--rewrite-strings", "-v", "--force", "-o", output, *extra)


@SOME
@given(st.lists(TEXT, min_size=6, max_size=6))
def test_its_verification_says_nothing_to_the_terminal(tmp_path, words) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(checkpoint(words))
    told: list[Message] = []
    run(VerifyRequest(path=str(path), to="cpu"), told.append)
    told = [read_message(one.line()) or one for one in told]
    checks = tuple(one.check for one in told if one.check is not None)
    findings = tuple(one.finding for one in told if one.finding is not None)
    result = Verdict(
        path=words[0], target="cpu", mode="cpu", passed=False, proven=False, checks=checks, findings=findings
    )
    human = [*verification_lines(Page(), result, verbose=True), brief_line(result)]
    assert_clean("\n".join([*human, *github.annotations_of(report.verified(result))]))
    assert not [line for line in human if line.lstrip().startswith("::")]
    assert document.dumps(document.result_to_json(result)).isascii()


@pytest.mark.slow
@SOME
@given(TEXT)
def test_what_is_typed_is_not_repeated_to_the_terminal(word) -> None:
    for words in (
        ["inspect", word], ["inspect", word, "--json"], ["convert", word, "--to", "cpu", "--format", "github"],
        ["convert", "x", "--to", word], ["convert", "x", "--map", word], ["verify", word, "-q"], ["rules", word],
        ["rules", word, "--json"], ["inspect", "x", "--select", word], [word],
    ):  # fmt: skip
        said(*words)


@SOME
@given(TEXT)
def test_the_names_of_files_say_nothing_to_the_terminal(word) -> None:
    with tempfile.TemporaryDirectory() as folder:
        name = word.replace("/", "").replace("\0", "")[:60]
        data = checkpoint(["weight", "cpu", "a", "cpu", "b", "c"])
        try:
            (Path(folder) / f"x{name}.bin").write_bytes(data)
            (Path(folder) / f"{name}.txt").write_bytes(b"text")
        except (OSError, UnicodeEncodeError):
            return
        said("inspect", folder, "--tree", "-v")
        said("inspect", folder, "--json")
        said("inspect", f"{folder}/x{name}.bin", "--format", "github")
        said("convert", folder, "--to", "mps", "-o", f"{folder}.out", "--dry-run")


@pytest.mark.parametrize("place", range(6))
def test_a_name_of_a_megabyte(tmp_path, place) -> None:
    words = ["a", "cpu", "b", "cuda:0", "m", "lr"]
    words[place] = "\x1b" * 1_000_000
    (tmp_path / "hostile").write_bytes(checkpoint(words))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "hostile"), "--tensors", "--tree", "--globals"])
    assert result.exit_code in {0, 1, 3, 4}
    assert_clean(result.stdout + result.stderr)
    assert len(result.stdout) < 200_000

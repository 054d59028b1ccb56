"""Each failure is one line, one hint and an exit code; with --json, one document."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path

import pytest

from ckptmove import errors
from ckptmove.api import functions as api
from ckptmove.api import inspection
from ckptmove.api.arguments import NotAccepted, OutputsCollide
from ckptmove.api.failures import failure_of
from ckptmove.cli.ended import retyped
from ckptmove.conversion.archive import UnsafeMember
from ckptmove.conversion.remap import errors as remap_errors
from ckptmove.conversion.results import TwoReadings
from ckptmove.findings.fit import FitUnreadable, NotWhole
from ckptmove.formats.contract import ReadOnlyFormat
from ckptmove.io import changes, journal
from ckptmove.io.remote import errors as remote_errors
from ckptmove.limits import TREE_MEMORY
from ckptmove.proof.downloading import CopyExists, NotDownloaded
from ckptmove.proof.errors import ChildKilled, ConversionDiffers, PackageMissing, TorchBroken
from ckptmove.proof.loading import errors as loading_errors
from ckptmove.proof.source_edits import FixNotWritten
from ckptmove.training.case.name import ScriptUnusable
from ckptmove.training.mesh.errors import RankFailed

BAD = ["%", "::", ",", "[red]", "\x1b[31m", "\n", "\u202e"]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("inspect", "run.pth", "--bogus"), "No such option: --bogus", "ckptmove inspect --help"),
        (("inspect", "run.pth", "--devices", "0"), "Invalid value for '--devices': ", "ckptmove inspect --help"),
        (
            ("convert", "run.pth", "new.pth"),
            "'new.pth' is no existing PATH",
            "did you mean: ckptmove convert run.pth --output=new.pth",
        ),
        (("rules", "D101", "D102"), "(D102)", "ckptmove rules --help"),
        (
            ("convert", "run.pth", "--device", "cuda"),
            "No such option: --device",
            "did you mean: ckptmove convert run.pth --to cuda",
        ),
        (
            ("convert", "run.pth", "--dst=cpu"),
            "No such option: --dst",
            "did you mean: ckptmove convert run.pth --to=cpu",
        ),
        (
            ("convert", "run.pth", "--to", "cpu", "--overwrite"),
            "No such option: --overwrite",
            "did you mean: ckptmove convert run.pth --to cpu --force",
        ),
        (("inspect", ""), "a path is empty", ""),
        (("diff", "run.pth", ""), "a path is empty", ""),
        (("verify", "run.pth", "--target", "mps"), "--target", "did you mean: ckptmove verify run.pth --to mps"),
        (("verify", "run.pth", "--strip-prefix"), "No such option: --strip-prefix", "convert has it"),
        (("inspect", "run.pth", "--target", "mps"), "No such option: --target", "ckptmove inspect --help"),
        (("frobnicate",), "No such command 'frobnicate'", "ckptmove --help"),
        (
            ("ck", "run.pth"),
            "No such command 'ck'",
            "the commands are inspect, convert, verify, diff, rules: ckptmove ",
        ),
        (
            ("load", "run.pth"),
            "No such command 'load'",
            "import ckptmove; checkpoint = ckptmove.load('run.pth')",
        ),
        (("inspect", "run.pth", "--limit-factor", "x"), "'x' is not a whole number.", "ckptmove inspect --help"),
        (("check", "run.pth"), "No such command 'check'", "did you mean: ckptmove inspect run.pth"),
        (("Verfy", "run.pth"), "No such command 'Verfy'", "did you mean: ckptmove verify run.pth"),
        (("run.pth", "dragged.pth"), "No such command 'run.pth'", "did you mean: ckptmove inspect run.pth dragged.pth"),
        (("run", "--to=cpu"), "No such command 'run'", "the commands are"),
        (("other/run", "--to=cpu"), "No such command 'other/run'", "did you mean: ckptmove convert other/run --to=cpu"),
        (("*", "--to", "cpu"), "No such command '*'", "did you mean: ckptmove convert '*' --to cpu"),
        (("help", "convert"), "No such command 'help'", "did you mean: ckptmove convert --"),
        (("--to=cpu", "run.pth"), "No such option: --to", "ckptmove convert --to=cpu run.pth"),
        (("-q", "verify", "run.pth"), "No such option: -q", "the command: ckptmove verify -q run.pth"),
        (("--bogus", "verify"), "No such option: --bogus", "ckptmove --help"),
        (("-q",), "No such option: -q", "ckptmove --help"),
        (("--to=cpu", "inspect", "run.pth"), "No such option: --to", "ckptmove --help"),
        (("-q", "run.pth", "--to", "cpu"), "No such option: -q", "ckptmove convert -q run.pth --to cpu"),
        (("run.pth", "--undo"), "No such command 'run.pth'", "did you mean: ckptmove convert run.pth --undo"),
        (("run.pth", "--optimizer", "Adam"), "No such command 'run.pth'", "ckptmove verify run.pth --optimizer Adam"),
        (("run.pth", "--bogus"), "No such command 'run.pth'", "the commands are"),
        (("inspect", "run.pth", "--to", "cpu"), "No such option: --to", "ckptmove inspect run.pth --expect cpu"),
        (("inspect", "run.pth", "--select", "Z9"), "no finding is about 'Z9'", ""),
        (("rules", "--format", "xml"), "'xml' is not one of 'human'", "ckptmove rules --help"),
        (("rules", "--format", "junit"), "--report junit=FILE", "ckptmove rules --help"),
        (("rules", "Z9"), "no finding is about 'Z9'; 'ckptmove rules' lists them", ""),
        (("rules", "Mixed-Devise"), "no finding is about 'Mixed-Devise'; did you mean mixed-devices?", ""),
        (("verify", "run.pth", "--ignore", "crc-missmatch"), "'crc-missmatch'; did you mean crc-mismatch?", ""),
        (("verify", "run.pth", "dragged.pth", "--against", "run.pth"), "--against names the original of one", ""),
        (("verify", "run.pth", "--seed", "-1"), "Invalid value for '--seed': ", "ckptmove verify --help"),
        (("verify", "run.pth", "--seed", "9" * 20), "Invalid value for '--seed': ", "ckptmove verify --help"),
        (
            ("verify", "run.pth", "--optimizer", "adamw"),
            "torch.optim; did you mean AdamW?",
            "",
        ),
        (("convert", "run.pth"), "convert needs a target", ""),
        (("convert", "run.pth", "--map", "cuda:0"), "is not a mapping of devices", ""),
        (("convert", "run.pth", "--to", "gpu"), "'gpu' is not a device", "ckptmove convert run.pth --to cuda:0"),
        (("convert", "run.pth", "--map=gpu=cpu"), "'gpu' is not a device", "ckptmove convert run.pth --map=cuda:0=cpu"),
        (("inspect", "run.pth", "--expect", "%%"), "'%%' is not a device", "devices: cpu, cuda:0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_errors(say, ask, words, message, hint) -> None:
    error = ask(*words)["error"]
    assert error["exit_code"] == 2
    assert message in error["message"]
    assert hint in error["hint"]
    said = say(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == (2 if error["hint"] else 1)


@pytest.mark.parametrize("form", ["github", "human"])
def test_two_formats_are_a_usage_error(ask, form) -> None:
    error = ask("inspect", "run.pth", "--format", form)["error"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert f"--format {form}" in error["message"]


def test_one_format_may_be_named_twice(ask) -> None:
    assert ask("rules", "--format", "json")["ok"]


def test_no_command_shows_the_help(say) -> None:
    said = say()
    assert said.code == 2
    assert said.out.startswith("Usage: ckptmove [OPTIONS] COMMAND")


@pytest.mark.parametrize("words", [("--version",), ("-V",), ("inspect", "--version"), ("verify", "-V")])
def test_version(say, words) -> None:
    said = say(*words)
    assert (said.code, said.out) == (0, "ckptmove 0.1.0\n")


@pytest.mark.parametrize("words", [("--help",), ("inspect", "-h"), ("convert", "--help"), ("verify", "--help")])
def test_help(say, words) -> None:
    said = say(*words)
    assert said.code == 0
    assert "--version" in said.out


@pytest.mark.parametrize("spelling", [("--format", "github"), ("--format=github",)])
def test_usage_errors_are_annotations_where_that_was_asked_for(say, spelling) -> None:
    said = say("inspect", "--bogus", *spelling)
    assert said.code == 2
    assert re.match(r"::error title=usage::.*--bogus", said.out)
    assert said.err == ""


def test_an_unknown_command_has_a_document_without_a_command(ask) -> None:
    assert ask("frobnicate")["command"] is None


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, EOFError])
def test_ctrl_c(say, ask, monkeypatch, trouble) -> None:
    def interrupt(*_args, **_options):
        raise trouble

    monkeypatch.setattr(inspection, "inspect_checkpoint", interrupt)
    said = say("inspect", "run.pth")
    assert (said.code, said.out) == (130, "")
    assert said.err.strip() == "error: interrupted"
    assert ask("inspect", "run.pth")["error"]["kind"] == "interrupted"


def test_a_bug_keeps_its_traceback(say, ask, monkeypatch) -> None:
    def broken(*_args, **_options):
        raise KeyError("weights\x1b[2J")

    monkeypatch.setattr(inspection, "inspect_checkpoint", broken)
    said = say("inspect", "run.pth")
    assert (said.code, said.out) == (70, "")
    assert said.err.startswith("Traceback (most recent call last):\n")
    assert "in broken" in said.err
    assert "\x1b" not in said.err
    assert re.search(r"^hint: .*bug in ckptmove", said.err, re.MULTILINE)
    error = ask("inspect", "run.pth")["error"]
    assert (error["kind"], error["exit_code"]) == ("bug", 70)


@pytest.mark.parametrize("name", ["page.html", "pointer.pth", "empty.pth", "notes.txt"])
def test_files_that_are_no_checkpoints(ask, bench, name) -> None:
    contents = {
        "page.html": (b"<!DOCTYPE html><html>", "login page"),
        "pointer.pth": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        "empty.pth": (b"", "earlier checkpoint"),
        "notes.txt": (b"hello", "torch.save"),
    }
    (bench / name).write_bytes(contents[name][0])
    error = ask("inspect", name)["error"]
    assert (error["kind"], error["exit_code"], error["path"]) == ("not-a-checkpoint", 3, name)
    assert contents[name][1] in error["hint"]


ERRORS = {
    errors.UsageError("w"): (2, ""),
    errors.UnknownDevice("gpu", "cuda:0"): (2, "cuda:0"),
    errors.UnknownDevice("?", None): (2, "cpu"),
    PackageMissing("torch"): (2, "pip install torch"),
    PackageMissing("safetensors"): (2, "pip install safetensors"),
    ChildKilled("it", 9): (70, "memory"),
    ConversionDiffers("a.pth", ["w: other bits"]): (1, "report"),
    TorchBroken("OSError: no"): (2, "python -c 'import torch'"),
    errors.MissingFile("a"): (3, "the path"),
    errors.MissingFile("a*"): (3, "glob"),
    errors.NothingConfigured("a.toml", ("b*",)): (3, "pass the PATH"),
    errors.AccessFailed("a b", "no"): (3, "ls -ld 'a b'"),
    errors.NotACheckpoint("a b", "a gzip file"): (3, "gunzip -c 'a b' > unpacked.pth"),
    errors.NotACheckpoint("a b", "a tar archive in a gzip file"): (3, "tar -xzf 'a b'"),
    errors.NotACheckpoint("a b", "a bzip2 file"): (3, "bunzip2 -c 'a b' > unpacked.pth"),
    errors.NotACheckpoint("a b", "a 7z archive"): (3, "7z x 'a b'"),
    errors.NotACheckpoint("a b", "a text file"): (3, "head 'a b'"),
    errors.NotACheckpoint("a b", "bytes of no known format"): (3, "file 'a b'"),
    errors.NotACheckpoint("a b", "an HDF5 file"): (3, "torch.save"),
    errors.NotACheckpoint("a b", "a mobile module in FlatBuffer form"): (3, "torch.jit.save"),
    errors.UnsupportedContainer("a", "safetensors", "x"): (3, "load_file"),
    errors.UnsupportedContainer("a", "torch-export", "x"): (3, "torch.export.save"),
    errors.UnsupportedContainer("a/.metadata", "dcp", "x"): (3, "save it again"),
    errors.DistributedFile("a b/0.distcp"): (3, "ckptmove inspect 'a b'"),
    errors.UnsupportedContainer("a", "pickle", "x"): (3, "torch.save"),
    errors.EmptyDirectory("a", 3): (3, "torch.save"),
    RankFailed(1, "no", path=None, hint="look there", exit_code=3): (3, "look there"),
    errors.CaseUnusable("no"): (2, "--case FILE.py:FUNC"),
    errors.CaseUnusable("no", path="a b.py", known=("one", "two")): (2, "--case 'a b.py:one'"),
    ScriptUnusable("no", path="a.py"): (2, "--script train.py -- "),
    errors.InPlaceImpossible("a", "it is a directory"): (4, "leave out --in-place"),
    UnsafeMember("a b", "../c"): (4, "ckptmove inspect 'a b'"),
    errors.NothingToUndo("a b"): (4, "--to"),
    changes.RestoresMore("a b", "c"): (4, "ckptmove convert 'a b' --undo --force"),
    changes.RestoresMore("a", "c", "j k"): (4, "rm 'j k'"),
    changes.RestoresMore("a", "d", "j k", is_unsafe=True): (4, "do not load it, and do not trust its source; remove"),
    changes.RestoresMore("a", "e", is_unsafe=True): (4, "do not load it, and do not trust its source"),
    errors.BeingConverted("a"): (4, "wait"),
    errors.ChangeFailed("a", os.strerror(errno.EACCES)): (5, "make it writable"),
    errors.ChangeFailed("a", os.strerror(errno.ENOSPC)): (5, "free some space"),
    errors.ChangeFailed("a b", "no"): (5, "ckptmove inspect 'a b'"),
    errors.JournalInTheWay("a", "j k"): (5, "rm 'j k'"),
    errors.RollbackFailed("a", "j k", journal.UNKNOWN_JOURNAL): (5, "rm 'j k'"),
    errors.RollbackFailed("a b", "j", "no"): (
        5,
        "make both writable, free some space, then run: ckptmove convert 'a b' --undo",
    ),
    changes.InterruptedConversion("a b"): (3, "roll it back: ckptmove convert 'a b' --undo"),
    errors.ArchiveOfFiles("a", "a tar archive", "tar"): (3, "torch.save"),
    errors.MustBeUnpacked("a b", "c", "zip"): (3, "python -m zipfile -e 'a b' 'a b.unpacked'"),
    errors.MissingShard("a b/c", "d"): (3, "into 'a b'"),
    errors.NotACheckpoint("a", "a named pipe"): (3, "from the directory"),
    errors.NotACheckpoint("a", "a symbolic link out of its directory"): (3, "cp -rL"),
    errors.DamagedArchive("a", "b"): (3, "download it again"),
    errors.CrcMismatch("a", "b"): (3, "download it again"),
    errors.DamagedPickle("a", offset=3): (3, "download it again"),
    errors.SourceChanged("a"): (3, "wait"),
    errors.OutputExists("a"): (4, "--force"),
    CopyExists("a/b.pth"): (4, "ckptmove verify a/b.pth"),
    errors.OutputClaimed("a"): (4, "wait for it, or choose another path with --output"),
    errors.OutputIsSource("a"): (4, "--output"),
    errors.OutputHoldsMore("a b", "c"): (4, "rm -r 'a b'"),
    errors.OutputIsFolder("a", "a/b c"): (4, "--output 'a/b c'"),
    errors.OutputSuffix("a.npz", ".npz", "torch-zip", "a b.pth"): (4, "--output 'a b.pth'"),
    errors.OutputIsNoReport("a", path="b"): (4, "choose a file that does not exist yet"),
    errors.OutputIsStdout(): (2, "./-"),
    OutputsCollide("a/x.pth", "b/x.pth", "new/x.pth"): (2, "--output-dir"),
    remap_errors.NotInFormat("safetensors", (("epoch", "an int"), ("a b", "a dict"))): (4, ""),
    remap_errors.SavedWhole("dir", "a.extra", 2): (4, ""),
    remap_errors.NotCastable("a b", "it is a meta tensor"): (4, ""),
    remap_errors.SharedStorage("a", "b", "ema"): (4, ""),
    TwoReadings("a", ("a pickle at its start",)): (4, "one format"),
    remap_errors.ScaledWeightCast("a", "b"): (4, "dequantize"),
    remap_errors.ShardNotCastable("a"): (4, "--output X.pth"),
    errors.LimitExceeded("a", limit=1, actual=2): (4, "--limit-factor 10 "),
    errors.LimitExceeded("a", limit=3, actual=97): (4, "--limit-factor 100 "),
    errors.LimitExceeded("a", limit=1, actual=2000): (4, "--limit-factor cannot raise it"),
    errors.LimitExceeded("a", limit=1, actual=2, is_fixed=True): (4, "--limit-factor cannot raise it"),
    errors.LimitExceeded(TREE_MEMORY, limit=1, actual=2): (4, "as tensors; if you trust the file: --limit-factor 10 "),
    errors.LimitExceeded(TREE_MEMORY, limit=1, actual=2000): (4, "as tensors; --limit-factor cannot raise it"),
    errors.OutOfMemory("a"): (4, "ulimit -v"),
    errors.UnsupportedDtype("mps", (("a", "float64"),)): (4, ""),
    errors.UncastableDtype("mps", (("a b", "float64"),), "no"): (4, "together with its scale"),
    errors.UneditablePickle("a", offset=3): (4, "save it again"),
    remap_errors.NotPlain((("", "lib.Kind", "no"),)): (4, ""),
    remap_errors.NotPlain((("a", "os.system", "no"),), is_dangerous=True): (4, "do not load it"),
    ReadOnlyFormat("a", "torch-tar", "do that"): (4, "do that"),
    errors.WriteFailed("a", os.strerror(errno.ENOSPC)): (5, "free some space"),
    errors.WriteFailed("a", os.strerror(errno.EACCES)): (5, "writable path with --output"),
    errors.WriteFailed("a b/c", os.strerror(errno.ENOENT)): (5, "mkdir -p 'a b'; or choose another path with --output"),
    errors.ReportFailed("a b/c", os.strerror(errno.ENOENT)): (
        5,
        "mkdir -p 'a b'; or choose another path with --report",
    ),
    errors.WriteFailed("a", os.strerror(errno.ENOENT)): (5, "writable path with --output"),
    errors.ReportFailed("a", os.strerror(errno.ENOENT)): (5, "writable file with --report"),
    errors.ReportFailed("a", os.strerror(errno.ENOSPC)): (5, "free some space, or choose another path with --report"),
    errors.ReportFailed("a", os.strerror(errno.EACCES)): (5, "writable file with --report"),
    FixNotWritten("a b/c", os.strerror(errno.ENOSPC)): (5, "ls -ld 'a b'"),
    remap_errors.NoMatch("--drop", "a", ("b c", "d")): (2, "'b c', d"),
    remap_errors.NoMatch("--strip-prefix", "", ("b.",)): (2, "begin with b."),
    remap_errors.NoMatch("--only", "a", ()): (2, "ckptmove inspect --tree PATH"),
    remap_errors.NotRemappable("a", "torchscript", "b"): (4, "save it again"),
    errors.NotGathered("a b", "b", "c"): (4, "'a b/c'"),
    errors.NotGathered("a", "b"): (4, "a directory as --output"),
    remap_errors.MixedByteOrders("a"): (4, "a directory as --output"),
    errors.NotAPath("a", "--to"): (2, ""),
    remap_errors.InsideObject("--drop", "a.b", "a"): (4, ""),
    remap_errors.ListItems("a b"): (4, ""),
    remap_errors.ListItems(""): (4, "--as-root"),
    remap_errors.SharedPart("a", "b c"): (4, ""),
    remap_errors.NeededByOptimizer("a", "b", 2): (4, ""),
    remap_errors.NothingLeft(): (4, "--only GLOB"),
    remap_errors.PartialPrefix("a.", ("a.b",), ("c",)): (4, ""),
    remap_errors.KeysCollide("a", "b", ("c d", "e")): (4, "--rename"),
    errors.NotDurable("a b", os.strerror(errno.EIO)): (5, "ckptmove inspect --check 'a b'"),
    errors.StdoutFailed("full"): (5, ""),
    errors.MissingFile("s3://b/a.pth"): (3, "credentials"),
    errors.NotACheckpoint("https://h/a.pth", "an HTML page"): (3, "/resolve/"),
    errors.NotACheckpoint("https://h/o/r/blob/main/a", "an HTML page"): (3, "/resolve/"),
    errors.NotACheckpoint("https://h/run/step-3", "an HTML page"): (3, "ckptmove inspect https://h/run/step-3/"),
    errors.NotACheckpoint("https://h/a b.txt", "a text file"): (3, "curl -s 'https://h/a b.txt' | head"),
    remote_errors.RemoteMissing("s3://b/a", "s3", "s3fs", is_extra=True): (2, "pip install 'ckptmove[remote]'"),
    remote_errors.RemoteMissing("az://b/a", "az", "adlfs", is_extra=False): (2, "adlfs"),
    remote_errors.UnknownScheme("htps://h", "htps", "https"): (2, "https://?"),
    remote_errors.UnknownScheme("q://h", "q", ""): (2, "s3://bucket"),
    remote_errors.ArtifactAddress("a", "MLflow", ("get", "a b")): (2, "get 'a b'"),
    NotDownloaded("s3://b/a"): (2, "add --download DIR"),
    remote_errors.NotLocal("s3://b/a", "convert writes local files"): (2, "a local path"),
    remote_errors.RemoteFailed("s3://b/a", "403", "s3", is_denied=True): (3, "aws sts"),
    remote_errors.RemoteFailed("ftp://b/a", "403", "ftp", is_denied=True): (3, "credentials"),
    remote_errors.RemoteFailed("s3://b/a", "500", "s3"): (3, "try again"),
    NotAccepted("no bytes", "pass it as io.BytesIO(data)"): (2, "io.BytesIO"),
    NotAccepted("no number"): (2, ""),
    FitUnreadable("2 GB"): (2, "64x80GiB"),
    NotWhole("a", "counts one checkpoint, not 2", "name one, such as a/b"): (2, "name one, such as a/b"),
    loading_errors.NotLoadable("a b", "torchscript"): (4, "ckptmove inspect --tensors 'a b'"),
    loading_errors.NotWeightsOnly("a", ("lib.Kind",), is_dangerous=False, instead="plain=True"): (4, "plain=True"),
    loading_errors.NotWeightsOnly("a", ("os.system",), is_dangerous=True, instead=""): (4, "do not load it"),
    loading_errors.NotRebuilt("no", path="a b"): (3, "ckptmove inspect 'a b'"),
    loading_errors.MissingDevice("a", "cuda:0", is_requested=False): (2, 'map_location="cpu"'),
    remote_errors.NoRanges("https://h/a b", 9): (3, "curl -fLO 'https://h/a b'"),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.kind)
def test_every_error_has_its_exit_code_and_its_hint(error) -> None:
    code, hint = ERRORS[error]
    failure = failure_of(error)
    assert failure.exit_code == code
    assert hint in failure.hint
    assert bool(failure.hint) == bool(hint)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("run.pht", "did you mean run.pth?"),
        ("runs of mine/last.pht", "did you mean 'runs of mine/last.pth'?"),
        ("else.pth", "check the path; it is relative to the working directory"),
        ("nowhere/run.pth", "check the path; it is relative to the working directory"),
    ],
)
def test_a_path_that_is_nearly_there(ask, bench, path, hint) -> None:
    (bench / "runs of mine").mkdir()
    (bench / "runs of mine" / "last.pth").touch()
    assert ask("inspect", path)["error"]["hint"] == hint


def test_an_option_without_its_value_has_the_help_of_its_command(say) -> None:
    assert say("verify", "run.pth", "--to").err.endswith(": ckptmove verify --help\n")


def test_no_error_class_is_forgotten() -> None:
    def family(kind):
        return {kind}.union(*(family(child) for child in kind.__subclasses__()))

    told = {type(error) for error in ERRORS}
    abstract = {errors.CkptMoveError, errors.UnreadableInput, errors.Refused}
    assert family(errors.CkptMoveError) - abstract == told


def test_an_error_of_no_family_is_a_bug() -> None:
    failure = failure_of(errors.CkptMoveError("odd"))
    assert (failure.exit_code, failure.hint) == (70, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["convert", "gpu.pth", "--to", "gpu"], "ckptmove convert gpu.pth --to cuda:0"),
        (["convert", "a b", "--to=gpu"], "ckptmove convert 'a b' --to=cuda:0"),
        (["convert", "--map", "cpu=gpu"], "ckptmove convert --map cpu=cuda:0"),
        (["convert"], "cuda:0"),
    ],
)
def test_a_command_is_typed_again_with_the_right_device(words, expected) -> None:
    assert retyped("ckptmove", words, "gpu", "cuda:0") == expected


def test_names_cannot_speak_to_the_terminal(say, ask, bench) -> None:
    name = "".join(BAD) + ".pth"
    Path("run.pth").rename(name)
    for words in (
        ("inspect", name),
        ("inspect", name, "-q"),
        ("convert", name, "--to", "cpu"),
        ("inspect", name + "?"),
    ):
        said = say(*words)
        for text in (said.out, said.err):
            assert text.replace("\n", "").isprintable()
        assert "[red]\\x1b[31m\\x0a\\u202e" in said.out + said.err
    line = say("inspect", name, "--format", "github", "--select", "D103", "--devices", "1").out
    assert line.startswith("::error file=%25%3A%3A%2C[red]\\x1b[31m\\x0a\\u202e.pth,title=D103 device-index::")
    assert line.count("\n") == 1
    assert ask("inspect", name)["checkpoints"][0]["path"] == name


def test_a_path_that_is_no_utf8(ask, say) -> None:
    name = os.fsdecode(b"run\xff.pth")
    Path("run.pth").rename(name)
    assert ask("inspect", name)["checkpoints"][0]["path"] == name
    assert say("inspect", name, "-q", "--select", "N").out.partition(":")[0] == "run\\udcff.pth"


class _Broken:
    """A stream that fails as the system would; its descriptor is real, so that it can be silenced."""

    encoding = "utf-8"

    def __init__(self, error: OSError, descriptor: int) -> None:
        self.error = error
        self.descriptor = descriptor

    def write(self, text: str) -> int:
        if not os.path.sameopenfile(self.descriptor, NULL):
            raise self.error
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.descriptor


NULL = os.open(os.devnull, os.O_WRONLY)


@pytest.fixture
def broken(tmp_path):
    opened = []

    def broken(error: OSError) -> _Broken:
        opened.append(os.open(tmp_path / f"stream{len(opened)}", os.O_WRONLY | os.O_CREAT))
        return _Broken(error, opened[-1])

    yield broken
    for descriptor in opened:
        os.close(descriptor)


def run(*words) -> int:
    from ckptmove.cli.app import app

    with pytest.raises(SystemExit) as left:
        app(list(words))
    return left.value.code


@pytest.mark.parametrize("extra", [(), ("--json",), ("--quiet",)])
def test_a_reader_who_leaves_does_not_change_the_answer(monkeypatch, broken, capsys, extra) -> None:
    monkeypatch.setattr(sys, "stdout", broken(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert run("inspect", "dragged.pth", "--select", "N", *extra) == 0
    assert run("inspect", "run.pth", "--select", "D103", "--devices", "1", *extra) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "run.pth"),
        ("inspect", "run.pth", "--json"),
        ("inspect", "none.pth", "--format", "github"),
        ("--bogus", "--json"),
        ("--help",),
        ("inspect", "-h"),
        ("--version",),
        ("rules",),
        (),
    ],
)
def test_a_full_disk_behind_stdout(monkeypatch, broken, capsys, words) -> None:
    monkeypatch.setattr(sys, "stdout", broken(OSError(errno.ENOSPC, "No space left on device")))
    assert run(*words) == 5
    err = capsys.readouterr().err
    assert "Traceback" not in err
    *_, last = err.splitlines()
    assert last.startswith("error: ")
    assert last.endswith(os.strerror(errno.ENOSPC))
    assert len(err.splitlines()) == (3 if "--bogus" in words else 1)


def test_what_was_written_is_named_where_the_answer_is_lost(monkeypatch, broken, capsys, bench) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for extra in ((), ("--json",), ("--format", "github"), ("--quiet",)):
        monkeypatch.setattr(sys, "stdout", broken(full))
        assert run("convert", "run.pth", "--to", "cpu", "--output", "out.pth", "--force", *extra) == 5
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: out.pth: ")
        assert line.endswith(os.strerror(errno.ENOSPC))
        assert api.inspect("out.pth").inventory.tensors


def test_nobody_goes_on_for_an_answer_that_cannot_be_given(monkeypatch, broken, capsys) -> None:
    monkeypatch.setattr(sys, "stdout", broken(OSError(errno.ENOSPC, "No space left on device")))
    assert run("inspect", "run.pth", "none.pth", "dragged.pth") == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(os.strerror(errno.ENOSPC))


def test_stderr_may_be_closed(monkeypatch, broken, capsys) -> None:
    monkeypatch.setattr(sys, "stderr", broken(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert run("inspect", "none.pth") == 3

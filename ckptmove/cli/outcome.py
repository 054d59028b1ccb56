"""From errors to what the command line says and leaves with: exit code, one line, and a hint what to do next.

Never prints, and never catches anything.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from functools import singledispatch
from glob import has_magic
from signal import Signals
from typing import TYPE_CHECKING, Final

from ckptmove import case, changes, directories, errors
from ckptmove.cli.signals import Terminated
from ckptmove.report.answers import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

YES: Final = 0
NO: Final = 1
USAGE: Final = 2
REFUSED: Final = 4
BUG: Final = 70
INTERRUPTED: Final = 130
#: What a shell adds to the number of a signal that ends a program.
_SIGNALLED: Final = 128

#: Exit codes of the families; every error belongs to one.
_EXIT_CODES: Final = {
    errors.UsageError: USAGE,
    errors.UnreadableInput: 3,
    errors.Refused: REFUSED,
    errors.WriteFailed: 5,
    errors.StdoutFailed: 5,
}
_NO_SPACE: Final = frozenset({os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)})
_NO_ACCESS: Final = frozenset({os.strerror(errno.EACCES), os.strerror(errno.EPERM), os.strerror(errno.EROFS)})
_AGAIN: Final = "compare its size with the original's, and copy or download it again"
#: What a file that is no checkpoint can be mended with, by what it is; with its path for a shell, and for Python.
_MENDS: Final = {
    "an empty file": "the save or the copy stopped before its first byte: go back to an earlier checkpoint",
    "nothing but zero bytes": "the disk was full or the copy broke off: go back to an earlier checkpoint",
    "a git-lfs pointer": "fetch the file that it stands for: git lfs pull",
    "an HTML page": "the download gave a web page, a login page perhaps: open its address in a browser, then download "
    "again",
    "a gzip file": "unpack it first: gunzip -c {shell} > unpacked.pth",
    "a tar archive in a gzip file": "unpack it first: tar -xzf {shell}",
    "a mobile module in FlatBuffer form": "make an archive of it: torch.jit.load({python}).save('module.pt')",
    "a symbolic link out of its directory": "no link is followed out of it: copy the directory with what its links "
    "name, cp -rL DIRECTORY COPY, and take the copy",
    **dict.fromkeys(
        ("a named pipe", "a socket", "a character device", "a block device"),
        "nothing was read from it: name a regular file, or take it out of the directory",
    ),
    "an empty zip archive": "nothing was saved into it: go back to an earlier checkpoint",
}


def failure_of(error: errors.CkptMoveError) -> Failure:
    """An error of ours, as it is told."""
    code = next((code for family, code in _EXIT_CODES.items() if isinstance(error, family)), BUG)
    return Failure(
        kind=error.kind,
        message=error.message,
        hint=hint_for(error),
        path=error.path,
        exit_code=code,
    )


def interruption(error: BaseException) -> Failure:
    """An interruption from outside, as it is told: Ctrl-C, SIGTERM or SIGHUP, with the code that a shell gives it."""
    message, code = "interrupted", INTERRUPTED
    if isinstance(error, Terminated):
        message, code = f"ended by {Signals(error.number).name}", _SIGNALLED + error.number
    return Failure(kind="interrupted", message=message, hint="", path=None, exit_code=code)


def _unpacking(archive: str, form: directories.ArchiveForm) -> str:
    """The command that makes a directory of an archive: Python's, which is here."""
    return shlex.join(["python", "-m", f"{form}file", "-e", archive, f"{archive}.unpacked"])


def retyped(program: str, words: Sequence[str], wrong: str, right: str) -> str:
    """The command again, with a device or an option corrected; only that, where it was not typed but configured."""
    pattern = re.compile(rf"(?:(?<==)|^){re.escape(wrong)}(?==|$)")
    corrected = [pattern.sub(right, word) for word in words]
    return shlex.join([program, *corrected]) if corrected != [*words] else right


@singledispatch
def hint_for(error: errors.CkptMoveError) -> str:
    """What to do next; empty where there is nothing to say."""
    del error
    return ""


@hint_for.register(errors.UnknownDevice)
def _(error: errors.UnknownDevice) -> str:
    if error.suggestion is None:
        return "torch's devices are named cpu, cuda:0, mps, xpu:0 and the like"
    return f"did you mean {error.suggestion}?"


@hint_for.register(errors.TorchMissing)
def _(error: errors.TorchMissing) -> str:
    del error
    return "install it: pip install 'ckptmove[torch]'; inspect and convert work without"


@hint_for.register(errors.TorchBroken)
def _(error: errors.TorchBroken) -> str:
    del error
    return "see it fail with: python -c 'import torch'; then install a build for this machine, as pytorch.org says"


@hint_for.register(case.CaseUnusable)
def _(error: case.CaseUnusable) -> str:
    if error.known:
        return f"its functions are {', '.join(error.known)}: --case {shlex.quote(f'{error.path}:{error.known[-1]}')}"
    return (
        "name a function that returns ckptmove.Case(model, optimizer, criterion, batch): --case FILE.py:FUNC, or "
        "--case pkg.mod:FUNC"
    )


@hint_for.register(errors.MissingFile)
def _(error: errors.MissingFile) -> str:
    if has_magic(error.path or ""):
        return "the pattern matches nothing, typed or in pyproject.toml, as seen from the working directory"
    return "check the path; relative ones start at the working directory"


@hint_for.register(errors.NothingConfigured)
def _(error: errors.NothingConfigured) -> str:
    del error
    return "correct it there, or type the PATH of a checkpoint"


@hint_for.register(errors.AccessFailed)
def _(error: errors.AccessFailed) -> str:
    return f"look at it with: ls -ld {shlex.quote(error.path or '')}"


@hint_for.register(errors.NotACheckpoint)
def _(error: errors.NotACheckpoint) -> str:
    mend, path = _MENDS.get(error.found, "ckptmove reads what torch.save writes"), error.path or ""
    return mend.format(shell=shlex.quote(path), python=repr(path))


@hint_for.register(directories.EmptyDirectory)
def _(error: directories.EmptyDirectory) -> str:
    del error
    return (
        "looked for what torch.save writes, under any name, as the HF Trainer, Accelerate, DeepSpeed, Megatron and "
        "mmengine keep it in directories"
    )


@hint_for.register(directories.OneFileAtATime)
def _(error: directories.OneFileAtATime) -> str:
    return f"name a file of it: ckptmove {error.command} {shlex.quote(error.path or '')}/FILE"


@hint_for.register(directories.MustBeUnpacked)
def _(error: directories.MustBeUnpacked) -> str:
    return f"unpack it, then take the directory: {_unpacking(error.path or '', error.form)}"


@hint_for.register(directories.UnverifiedArchive)
def _(error: directories.UnverifiedArchive) -> str:
    return f"unpack it, then name the file with the optimizer: {_unpacking(error.path or '', error.form)}"


@hint_for.register(directories.DistributedFile)
def _(error: directories.DistributedFile) -> str:
    folder = shlex.quote(_folder_of(error.path or ""))
    tool = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE"
    return f"name its directory: ckptmove inspect {folder}; verify needs one file of it: {tool}"


def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."  # noqa: PTH120  # a path may become a URL: it stays text


@hint_for.register(errors.UnsupportedContainer)
def _(error: errors.UnsupportedContainer) -> str:
    name = error.path or ""
    if error.container == "dcp":
        folder = _folder_of(name) if name.endswith(".metadata") else name
        tool = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {shlex.quote(folder)} FILE"
        return f"if you trust its origin, make one file of it: {tool}"
    if error.container == "safetensors":
        return "it names no devices: safetensors.torch.load_file(path, device='cuda:0') puts it anywhere"
    if error.container == "torchscript":
        return f"torch.jit.load({name!r}, map_location='cpu') moves it"
    return "ckptmove reads what torch.save writes"


@hint_for.register(errors.DamagedArchive)
def _(error: errors.DamagedArchive) -> str:
    del error
    return f"it was cut off or changed on its way: {_AGAIN}"


@hint_for.register(errors.CrcMismatch)
def _(error: errors.CrcMismatch) -> str:
    del error
    return f"a copy or a disk has changed it, and torch.load would not notice: {_AGAIN}"


@hint_for.register(errors.DamagedPickle)
def _(error: errors.DamagedPickle) -> str:
    del error
    return f"no version of torch reads it either: {_AGAIN}"


@hint_for.register(errors.SourceChanged)
def _(error: errors.SourceChanged) -> str:
    del error
    return "wait until the run that writes it has finished, then try again"


@hint_for.register(errors.OutputExists)
def _(error: errors.OutputExists) -> str:
    del error
    return "replace it with --force, or name another one with --output"


@hint_for.register(errors.OutputIsSource)
def _(error: errors.OutputIsSource) -> str:
    del error
    return "name another place with --output"


@hint_for.register(directories.OutputHoldsMore)
def _(error: directories.OutputHoldsMore) -> str:
    return f"look at it, then remove it: rm -r {shlex.quote(error.path or '')}; or name another one with --output"


@hint_for.register(errors.OutputIsFolder)
def _(error: errors.OutputIsFolder) -> str:
    return f"name a file in it: --output {shlex.quote(error.inside)}"


@hint_for.register(errors.OutputIsStdout)
def _(error: errors.OutputIsStdout) -> str:
    del error
    return "name a file with --output; one that is called - is named ./-"


@hint_for.register(changes.InPlaceImpossible)
def _(error: changes.InPlaceImpossible) -> str:
    del error
    return "write a new file: take --output NEW in place of --in-place"


@hint_for.register(changes.NothingToUndo)
def _(error: changes.NothingToUndo) -> str:
    return f"convert it back to where it was: ckptmove convert {shlex.quote(error.path or '')} --to DEVICE"


@hint_for.register(changes.BeingConverted)
def _(error: changes.BeingConverted) -> str:
    del error
    return "wait until it has finished, then try again"


@hint_for.register(errors.LimitExceeded)
def _(error: errors.LimitExceeded) -> str:
    del error
    return "no checkpoint of a real run comes near that limit: do not trust the file"


@hint_for.register(errors.UnsupportedDtype)
def _(error: errors.UnsupportedDtype) -> str:
    return f"cast what {error.target} cannot hold to the next smaller dtype with --cast"


@hint_for.register(errors.UncastableDtype)
def _(error: errors.UncastableDtype) -> str:
    return f"leave it where it is with --keep {shlex.quote(error.tensors[0][0])}, or save it again from torch, cast"


@hint_for.register(errors.UneditablePickle)
def _(error: errors.UneditablePickle) -> str:
    del error
    return "if you trust its origin, save it again with torch.save, then convert that"


@hint_for.register(changes.ChangeFailed)
def _(error: changes.ChangeFailed) -> str:
    if error.reason in _NO_ACCESS:
        return "make it writable, or write a new file: take --output NEW in place of --in-place"
    if error.reason in _NO_SPACE:
        return "it is what it was: free some space, or write a new file elsewhere with --output"
    return f"see what it is with: ckptmove inspect {shlex.quote(error.path or '')}"


@hint_for.register(changes.RollbackFailed)
def _(error: changes.RollbackFailed) -> str:
    return f"make both writable, with some space, then type: ckptmove inspect {shlex.quote(error.path or '')}"


@hint_for.register(errors.WriteFailed)
def _(error: errors.WriteFailed) -> str:
    if error.reason == os.strerror(errno.ENOENT):
        return "its folder does not exist: make it first, or name another place with --output"
    if error.reason in _NO_SPACE:
        return "nothing is left of it: free some space, or name another place with --output"
    return "nothing is left of it: name a place that can be written with --output"

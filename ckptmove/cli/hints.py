"""What to do next, for each error: the command to type, with its paths.

Never prints, and never knows an exit code.
"""

from __future__ import annotations

import errno
import os
from functools import singledispatch
from glob import has_magic
from typing import TYPE_CHECKING, Final

from ckptmove import errors
from ckptmove.cli.meant import beside, link_target
from ckptmove.io import changes
from ckptmove.limits import TREE_MEMORY
from ckptmove.text import command_line, quoted

if TYPE_CHECKING:
    from ckptmove.model import ArchiveForm

_NO_SPACE: Final = frozenset({os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)})
_NO_ACCESS: Final = frozenset({os.strerror(errno.EACCES), os.strerror(errno.EPERM), os.strerror(errno.EROFS)})
_AGAIN: Final = "compare its size with the original's, and copy or download it again"
_DISTRUST: Final = "do not load it, and do not trust where it comes from"
#: What ``--limit-factor`` may be, by powers of ten.
_FACTORS: Final = (10, 100, 1000)
#: What a conversion writes anew, and never changes.
_MADE_ANEW: Final = frozenset({"directory", "archive"})
#: What a file that is no checkpoint can be mended with, by what it is; with its path and its folder
#: for a shell, and its path for Python.
_MENDS: Final = {
    "bytes that cannot be inflated": _AGAIN,
    "an empty file": "the save or the copy stopped before its first byte: go back to an earlier checkpoint",
    "nothing but zero bytes": "the disk was full or the copy broke off: go back to an earlier checkpoint",
    "a git-lfs pointer": "fetch the file that it stands for: git lfs pull",
    "an HTML page": "the download gave a web page, a login page perhaps: open its address in a browser, then download "
    "again",
    "a gzip file": "unpack it first: gunzip -c {shell} > unpacked.pth",
    "a tar archive in a gzip file": "unpack it first: tar -xzf {shell}",
    "a bzip2 file": "unpack it first: bunzip2 -c {shell} > unpacked.pth",
    "an xz file": "unpack it first: xz -dc {shell} > unpacked.pth",
    "a zstd file": "unpack it first: zstd -dc {shell} > unpacked.pth",
    "a 7z archive": "unpack it first: 7z x {shell}",
    "a rar archive": "unpack it first: unrar x {shell}",
    "a text file": "ckptmove reads what torch.save writes; see what this says with: head {shell}",
    "bytes of no known format": "ckptmove reads what torch.save writes; see what this may be with: file {shell}",
    "a mobile module in FlatBuffer form": "make an archive of it: torch.jit.load({python}).save('module.pt')",
    "a symbolic link out of its directory": "no link is followed out of it: copy the directory with what its links "
    "name, cp -rL DIRECTORY COPY, and take the copy",
    **dict.fromkeys(
        ("a named pipe", "a socket", "a character device", "a block device"),
        "nothing was read from it: name a regular file, or take it out of the directory",
    ),
    "an index of a model in several files": "name its directory: ckptmove inspect {folder}",
    "an empty zip archive": "nothing was saved into it: go back to an earlier checkpoint",
}


def unpacking(archive: str, form: ArchiveForm, *, locked: bool = False) -> str:
    """The command that makes a directory of an archive: Python's, which is here, unless it must ask for a password.

    Without the filter, older versions of Python write what is named ``../x`` outside of that directory.
    """
    if locked:
        return command_line(["unzip", archive, "-d", f"{archive}.unpacked"])
    safely = ["--filter", "data"] if form == "tar" else []
    return command_line(["python", "-m", f"{form}file", *safely, "-e", archive, f"{archive}.unpacked"])


def gathering(folder: str) -> str:
    """The command that makes one file of a distributed checkpoint: torch's."""
    return f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {quoted(folder)} FILE"


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


@hint_for.register(errors.CaseUnusable)
def _(error: errors.CaseUnusable) -> str:
    if error.known:
        return f"its functions are {', '.join(error.known)}: --case {quoted(f'{error.path}:{error.known[-1]}')}"
    return (
        "name a function that returns ckptmove.Case(model, optimizer, criterion, batch): --case FILE.py:FUNC, or "
        "--case pkg.mod:FUNC"
    )


@hint_for.register(errors.MissingFile)
def _(error: errors.MissingFile) -> str:
    if has_magic(error.path or ""):
        return "the pattern matches nothing, typed or in pyproject.toml, as seen from the working directory"
    if link_target(error.path or ""):
        return f"bring that file back, or lead the link elsewhere: ln -sfn FILE {quoted(error.path or '')}"
    near = beside(error.path or "")
    return f"did you mean {quoted(near)}?" if near else "check the path; relative ones start at the working directory"


@hint_for.register(errors.NothingConfigured)
def _(error: errors.NothingConfigured) -> str:
    del error
    return "correct it there, or type the PATH of a checkpoint"


@hint_for.register(errors.AccessFailed)
def _(error: errors.AccessFailed) -> str:
    return f"look at it with: ls -ld {quoted(error.path or '')}"


@hint_for.register(errors.NotACheckpoint)
def _(error: errors.NotACheckpoint) -> str:
    mend, path = _MENDS.get(error.found, "ckptmove reads what torch.save writes"), error.path or ""
    for mark, text in {"{shell}": quoted(path), "{folder}": quoted(_folder_of(path))}.items():
        if mark in mend:
            return mend.replace(mark, text)
    return mend.replace("{python}", repr(path))


@hint_for.register(errors.EmptyDirectory)
def _(error: errors.EmptyDirectory) -> str:
    path = error.path or ""
    if error.form is not None and error.inner:
        name = quoted(f"{path}.unpacked/{error.inner}")
        return f"unpack it, and take that: {unpacking(path, error.form)} && ckptmove inspect {name}"
    if error.is_cut:
        return f"it was cut off on its way: {_AGAIN}"
    return (
        "looked for what torch.save writes, under any name, as the HF Trainer, Accelerate, DeepSpeed, Megatron and "
        "mmengine keep it in directories"
    )


@hint_for.register(errors.MissingShard)
def _(error: errors.MissingShard) -> str:
    beside = quoted(_folder_of(error.path or ""))
    return f"copy or download that file too, into {beside}; if it was never saved, go back to an earlier checkpoint"


@hint_for.register(errors.MustBeUnpacked)
def _(error: errors.MustBeUnpacked) -> str:
    path = error.path or ""
    command = unpacking(path, error.form, locked=error.locked)
    return f"unpack it, and take the directory: {command} && ckptmove inspect {quoted(f'{path}.unpacked')}"


@hint_for.register(errors.DistributedFile)
def _(error: errors.DistributedFile) -> str:
    return f"name its directory: ckptmove inspect {quoted(_folder_of(error.path or ''))}"


def _has_folder(error: errors.CkptMoveError) -> bool:
    """In one that is there a file may not be made all the same, as in /proc."""
    return os.path.isdir(_folder_of(error.path or ""))  # noqa: PTH112  # the path stays text


def _make_folder(error: errors.CkptMoveError) -> str:
    return f"its folder does not exist: mkdir -p {quoted(_folder_of(error.path or ''))}"


def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."  # noqa: PTH120  # a path stays as it was typed: a Path would drop "./" and a slash at its end


@hint_for.register(errors.UnsupportedContainer)
def _(error: errors.UnsupportedContainer) -> str:
    name = error.path or ""
    if error.container == "dcp":
        folder = _folder_of(name) if name.endswith(".metadata") else name
        return f"if you trust its origin, make one file of it: {gathering(folder)}"
    if error.container == "safetensors":
        return "it names no devices: safetensors.torch.load_file(path, device='cuda:0') puts it anywhere"
    if error.container == "torchscript":
        return f"torch.jit.load({name!r}, map_location='cpu') moves it"
    if error.container == "torch-export":
        return "export the model again with torch 2.8 or newer: torch.export.save(torch.export.export(...), 'x.pt2')"
    return "ckptmove reads what torch.save writes"


@hint_for.register(errors.DamagedArchive)
def _(error: errors.DamagedArchive) -> str:
    return _DISTRUST if error.runs else f"it was cut off or changed on its way: {_AGAIN}"


@hint_for.register(errors.CrcMismatch)
def _(error: errors.CrcMismatch) -> str:
    del error
    return f"a copy or a disk has changed it, and torch.load would not notice: {_AGAIN}"


@hint_for.register(errors.DamagedPickle)
def _(error: errors.DamagedPickle) -> str:
    return _DISTRUST if error.runs else f"no version of torch reads it either: {_AGAIN}"


@hint_for.register(errors.SourceChanged)
def _(error: errors.SourceChanged) -> str:
    del error
    return "wait until the run that writes it has finished, then try again"


@hint_for.register(errors.OutputExists)
def _(error: errors.OutputExists) -> str:
    path = error.path or ""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # noqa: PTH110, PTH112, PTH113  # a path stays as it was typed
        return "it is no regular file, which nothing replaces: name another one with --output"
    return "replace it with --force, or name another one with --output"


@hint_for.register(errors.OutputIsSource)
def _(error: errors.OutputIsSource) -> str:
    del error
    return "name another place with --output"


@hint_for.register(errors.OutputHoldsMore)
def _(error: errors.OutputHoldsMore) -> str:
    return f"look at it, then remove it: rm -r {quoted(error.path or '')}; or name another one with --output"


@hint_for.register(errors.OutputSuffix)
def _(error: errors.OutputSuffix) -> str:
    return f"name it by what it is: {command_line(['--output', error.instead])}"


@hint_for.register(errors.OutputIsFolder)
def _(error: errors.OutputIsFolder) -> str:
    return f"name a file in it: --output {quoted(error.inside)}"


@hint_for.register(errors.OutputIsNoReport)
def _(error: errors.OutputIsNoReport) -> str:
    del error
    return "the word after --junit is the file to write: name one of its own, as in --junit report.xml"


@hint_for.register(errors.OutputIsStdout)
def _(error: errors.OutputIsStdout) -> str:
    del error
    return "name a file with --output; one that is called - is named ./-"


@hint_for.register(errors.InPlaceImpossible)
def _(error: errors.InPlaceImpossible) -> str:
    del error
    return "write a new one: take --output NEW in place of --in-place"


@hint_for.register(errors.NothingToUndo)
def _(error: errors.NothingToUndo) -> str:
    if error.container == "safetensors":
        return "it stores no device, so that no conversion has changed it"
    if error.container in _MADE_ANEW:
        shown = f"ckptmove inspect {quoted(error.path or '')}"
        return f"what it was made from is as it was: take that; to see where this one lies: {shown}"
    return f"convert it back to where it was: ckptmove convert {quoted(error.path or '')} --to DEVICE"


@hint_for.register(errors.BeingConverted)
def _(error: errors.BeingConverted) -> str:
    del error
    return "wait until it has finished, then try again"


@hint_for.register(errors.LimitExceeded)
def _(error: errors.LimitExceeded) -> str:
    factor = next((one for one in _FACTORS if one * error.limit >= error.actual), None)
    # Who counts operations stops at the first too many.
    typed = f"if you trust the file: --limit-factor {factor} (times one that was given), or more"
    if error.is_fixed or factor is None:
        typed = "no --limit-factor lifts it so far"
    if error.resource == TREE_MEMORY:
        return f"lists and dicts of millions of plain values reach that limit: save them as tensors; {typed}"
    return f"no checkpoint of a real run comes near that limit; {typed}"


@hint_for.register(errors.OutOfMemory)
def _(error: errors.OutOfMemory) -> str:
    del error
    return "take a machine with more memory, or raise the limit that holds this one: ulimit -v"


@hint_for.register(errors.UnsupportedDtype)
def _(error: errors.UnsupportedDtype) -> str:
    return f"cast what {error.target} cannot hold to the next smaller dtype with --cast"


@hint_for.register(errors.UncastableDtype)
def _(error: errors.UncastableDtype) -> str:
    return f"leave it where it is with --keep {quoted(error.tensors[0][0])}, or save it again from torch, cast"


@hint_for.register(errors.UneditableGraph)
def _(error: errors.UneditableGraph) -> str:
    del error
    return "export the model where it is to run: torch.export.export(model.to('DEVICE'), inputs_on_that_device)"


@hint_for.register(errors.UneditablePickle)
def _(error: errors.UneditablePickle) -> str:
    del error
    return "if you trust its origin, save it again with torch.save, then convert that"


@hint_for.register(errors.ChangeFailed)
def _(error: errors.ChangeFailed) -> str:
    if error.reason in _NO_ACCESS:
        return "make it writable, or copy it to where it can be; then type the same again"
    if error.reason in _NO_SPACE:
        return "it is what it was: free some space, or copy it to where there is some; then type the same again"
    return f"see what it is with: ckptmove inspect {quoted(error.path or '')}"


@hint_for.register(errors.JournalInTheWay)
def _(error: errors.JournalInTheWay) -> str:
    return (
        "if the file was renamed after a crash, give it its old name and type: ckptmove inspect OLD; "
        f"if it is whole: rm {quoted(error.journal)}"
    )


@hint_for.register(errors.RollbackFailed)
def _(error: errors.RollbackFailed) -> str:
    if error.reason == changes.UNKNOWN_JOURNAL:
        journal = quoted(error.journal)
        return f"take the version that wrote it; or, if another one wrote the file anew since: rm {journal}"
    return f"make both writable, with some space, then type: ckptmove inspect {quoted(error.path or '')}"


@hint_for.register(errors.ReportFailed)
def _(error: errors.ReportFailed) -> str:
    if error.reason == os.strerror(errno.ENOENT) and not _has_folder(error):
        return f"{_make_folder(error)}; or name another place with --junit"
    if error.reason in _NO_SPACE:
        return "free some space, or name another place with --junit"
    return "name a file that can be written with --junit"


@hint_for.register(errors.NotDurable)
def _(error: errors.NotDurable) -> str:
    return f"have the disk looked at, and compare: ckptmove inspect --check {quoted(error.path or '')}"


@hint_for.register(errors.WriteFailed)
def _(error: errors.WriteFailed) -> str:
    if error.reason == os.strerror(errno.ENOENT) and not _has_folder(error):
        return f"{_make_folder(error)}; or name another place with --output"
    if error.reason in _NO_SPACE:
        return "nothing is left of it: free some space, or name another place with --output"
    return "nothing is left of it: name a place that can be written with --output"

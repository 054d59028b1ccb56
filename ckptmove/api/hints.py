"""The hint for each error: what to do next, as a command with its paths if possible."""

from __future__ import annotations

import errno
import os
import posixpath
import re
from functools import singledispatch
from glob import has_magic
from typing import TYPE_CHECKING, Final

from ckptmove import errors
from ckptmove.api.arguments import NotAccepted, OutputsCollide
from ckptmove.conversion.archive import UnsafeMember
from ckptmove.conversion.remap import errors as remap_errors
from ckptmove.conversion.results import TwoReadings
from ckptmove.findings.fit import FitUnreadable, NotWhole
from ckptmove.formats.contract import ReadOnlyFormat
from ckptmove.formats.facts import facts_of
from ckptmove.io import changes, journal
from ckptmove.io.locations import read_link, similar_path
from ckptmove.io.remote import errors as remote_errors
from ckptmove.io.remote.address import is_url
from ckptmove.limits import TREE_MEMORY
from ckptmove.proof.downloading import CopyExists, NotDownloaded
from ckptmove.proof.errors import ChildKilled, ConversionDiffers, PackageMissing, TorchBroken
from ckptmove.proof.loading.errors import MissingDevice, NotLoadable, NotRebuilt, NotWeightsOnly
from ckptmove.proof.source_edits import FixNotWritten
from ckptmove.text import Argument, Phrase, ShellOnly, command_line, quoted, spelled_in_python
from ckptmove.training.case.name import ScriptUnusable

if TYPE_CHECKING:
    from ckptmove.model import ArchiveForm

_NO_SPACE: Final = frozenset({os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)})
_NO_ACCESS: Final = frozenset({os.strerror(errno.EACCES), os.strerror(errno.EPERM), os.strerror(errno.EROFS)})
_AGAIN: Final = "compare its size with the original's, and copy or download it again"
_ONE_FILE: Final = Argument("output", "X.pth")
_SAME_FILES: Final = Phrase("keep its files: choose a directory as ", Argument("output"))
_DISTRUST: Final = "do not load it, and do not trust its source"
#: Values of ``--limit-factor`` that hints suggest.
_FACTORS: Final = (10, 100, 1000)
#: Containers that a conversion never changes in place.
_MADE_ANEW: Final = frozenset({"directory", "archive"})
#: Hints for files that are no checkpoint, by kind. ``{shell}`` is the path for a shell, ``{folder}`` its folder.
_MENDS: Final = {
    "bytes that cannot be inflated": _AGAIN,
    "an empty file": "the save or the copy stopped at the start: use an earlier checkpoint",
    "nothing but zero bytes": "the disk was full, or the copy stopped: use an earlier checkpoint",
    "a git-lfs pointer": "fetch the real file: git lfs pull",
    "an HTML page": "the download returned a web page, for example a login page: open its address in a browser, then "
    "download again",
    "a gzip file": "unpack it first: gunzip -c {shell} > unpacked.pth",
    "a tar archive in a gzip file": "unpack it first: tar -xzf {shell}",
    "a bzip2 file": "unpack it first: bunzip2 -c {shell} > unpacked.pth",
    "an xz file": "unpack it first: xz -dc {shell} > unpacked.pth",
    "a zstd file": "unpack it first: zstd -dc {shell} > unpacked.pth",
    "a zlib file": "decompress it first: python -c 'import sys, zlib; "
    "sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))' < {shell} > unpacked.pkl",
    "a 7z archive": "unpack it first: 7z x {shell}",
    "a rar archive": "unpack it first: unrar x {shell}",
    "a text file": "ckptmove reads files of torch.save; look at this one with: head {shell}",
    "bytes of no known format": "ckptmove reads files of torch.save; identify this one with: file {shell}",
    "a mobile module in FlatBuffer form": "save it again as an archive, in the program that made it: torch.jit.save",
    "a symbolic link out of its directory": "links out of the directory are not followed: use a copy without links, "
    "cp -rL DIRECTORY COPY",
    **dict.fromkeys(
        ("a named pipe", "a socket", "a character device", "a block device"),
        "nothing was read from it: give a regular file, or remove it from the directory",
    ),
    "an index of a model in several files": "give its directory: ckptmove inspect {folder}",
    "an empty zip archive": "it holds no data: use an earlier checkpoint",
}
#: Contents of a URL that leads to the page of a file, or to its pointer.
_LINKS: Final = frozenset({"an HTML page", "a git-lfs pointer"})
_WEB: Final = re.compile("https?://")
#: A URL that may be that of a directory: without a slash at its end or a suffix, and no page of the Hub or of GitHub.
_DIRECTORY_PAGE: Final = re.compile(r"https?://(?!huggingface\.co/|github\.com/|.*/blob/)[^?#]*/[^/.?#]+")
#: How to log in, by protocol.
_LOGINS: Final = {
    "hf": "log in with: hf auth login; for a gated model, also accept its terms on its page",
    **dict.fromkeys(("s3", "s3a"), "check the credentials with: aws sts get-caller-identity; or set AWS_PROFILE"),
    **dict.fromkeys(("gs", "gcs"), "log in with: gcloud auth application-default login"),
    **dict.fromkeys(("http", "https"), "check the credentials; a signed URL may have expired"),
}
#: Hints for errors whose facts change nothing.
_TEXTS: Final[dict[type[errors.CkptMoveError], str]] = {
    ChildKilled: Phrase(
        "the system kills a process when memory runs out: see dmesg, use a machine with more memory, or try ",
        Argument("jobs", "1"),
    ),
    TorchBroken: (
        "see the error with: python -c 'import torch'; then install the build for this machine (pytorch.org)"
    ),
    errors.NothingConfigured: "correct it there, or pass the PATH of a checkpoint",
    errors.CrcMismatch: f"a copy or a disk has changed it, and torch.load does not detect that: {_AGAIN}",
    errors.SourceChanged: "wait until the run that writes it has finished, then try again",
    ConversionDiffers: "the source is as it was: convert it again, and report the bug if the same tensor differs",
    errors.InPlaceImpossible: Phrase("leave out ", Argument("in_place", True), " to write a new file"),
    errors.OutputClaimed: Phrase("wait for it, or choose another path with ", Argument("output")),
    errors.OutputIsSource: Phrase("choose another path with ", Argument("output")),
    errors.OutputIsNoReport: "choose a file that does not exist yet",
    errors.OutputIsStdout: Phrase("give a file with ", Argument("output"), "; use ./- for a file named -"),
    errors.BeingConverted: "wait until it has finished, then try again",
    errors.OutOfMemory: "use a machine with more memory, or raise the limit of this process: ulimit -v",
    errors.UneditablePickle: "save it again in the program that made it, and convert the new file",
    remap_errors.MixedByteOrders: _SAME_FILES,
    TwoReadings: f"{_DISTRUST}: ask its author for a file in one format",
    remap_errors.ScaledWeightCast: Phrase(
        "dequantize it with the library that quantized it, or convert without ", Argument("dtype")
    ),
    remap_errors.ShardNotCastable: Phrase(
        "gather the shards of all ranks, from their directory to one file: ", _ONE_FILE
    ),
    errors.UncastableDtype: "cast it in torch, a quantized weight together with its scale, and save it again",
    remap_errors.KeysCollide: Phrase(
        "choose another name for one of them with ", Argument("rename"), ", or leave one out with ", Argument("drop")
    ),
    remap_errors.NothingLeft: Phrase("name the parts to keep: ", Argument("only", "GLOB")),
    remote_errors.NotLocal: "use a local path",
    NotDownloaded: Phrase("add ", Argument("download", "DIR"), ", which downloads it first"),
    FitUnreadable: "at most 1,048,576 devices, and the memory of each in KB to TB or KiB to TiB, such as 64x80GiB",
    MissingDevice: 'load it on a device of this machine: map_location="cpu"',
    ScriptUnusable: Phrase(
        "name a Python file",
        ShellOnly(", and its own arguments after --"),
        ": ",
        Argument("script", "train.py"),
        ShellOnly(" -- --resume run.pth"),
    ),
}


def unpacking(archive: str, form: ArchiveForm, *, locked: bool = False) -> str:
    """The command that unpacks an archive into a directory: Python's, or ``unzip`` if a password is needed.

    Without ``--filter``, older versions of Python write a member named ``../x`` outside of that directory.
    """
    if locked:
        return command_line(["unzip", archive, "-d", f"{archive}.unpacked"])
    safely = ["--filter", "data"] if form == "tar" else []
    return command_line(["python", "-m", f"{form}file", *safely, "-e", archive, f"{archive}.unpacked"])


@singledispatch
def _hint(error: errors.CkptMoveError) -> str:
    del error
    return ""


def hint_for(error: errors.CkptMoveError) -> str:
    """The hint for an error; may be empty."""
    if error.runs:
        return _DISTRUST
    first, *later = error.mends or ("",)
    return Phrase(first, *(part for one in later for part in (", and ", one))) if first else _hint(error)


def hint_in_python(error: errors.CkptMoveError) -> str:
    """The hint for an error that a function raises: only the command line expands globs."""
    if isinstance(error, errors.MissingFile) and not is_url(error.path or "") and has_magic(error.path or ""):
        return "the function takes one path and no glob: call it for each path of glob.glob(pattern)"
    return spelled_in_python(hint_for(error))


for _kind, _text in _TEXTS.items():
    _hint.register(_kind, lambda _error, text=_text: text)


@_hint.register(PackageMissing)
def _(error: PackageMissing) -> str:
    return f"install it: pip install {error.package}; inspect and convert do not need it"


@_hint.register(NotWhole)
def _(error: NotWhole) -> str:
    return _filled(error.remedy, error.path or "", _folder_of(error.path or ""))


@_hint.register(errors.UnknownDevice)
def _(error: errors.UnknownDevice) -> str:
    if error.suggestion is None:
        return "examples of devices: cpu, cuda:0, mps, xpu:0"
    return f"did you mean {error.suggestion}?"


@_hint.register(errors.CaseUnusable)
def _(error: errors.CaseUnusable) -> str:
    if "torchrun needs state" in error.message:
        return (
            'add state={"model": ..., "optimizer": ...} with the dicts of get_state_dict (docs/mesh.md), '
            "or leave out torchrun if the model is not sharded"
        )
    if "torchrun " in error.message or "step returned " in error.message:  # it ends with what to do
        return ""
    if error.known:
        return Phrase(
            f"its functions are {', '.join(error.known)}: ", Argument("case", f"{error.path}:{error.known[0]}")
        )
    return Phrase(
        "point it at a function that returns ckptmove.Case(model, optimizer, criterion, batch): ",
        Argument("case", "FILE.py:FUNC"),
        " or ",
        Argument("case", "pkg.mod:FUNC"),
    )


@_hint.register(errors.MissingFile)
def _(error: errors.MissingFile) -> str:
    if is_url(error.path or ""):
        return "check the URL; a private file can look missing to a client without credentials"
    if has_magic(error.path or ""):
        return "the glob, typed or in pyproject.toml, matches no file; it is relative to the working directory"
    if read_link(error.path or ""):
        return f"restore its target, or change the link: ln -sfn FILE {quoted(error.path or '')}"
    near = similar_path(error.path or "")
    return f"did you mean {quoted(near)}?" if near else "check the path; it is relative to the working directory"


@_hint.register(errors.AccessFailed)
def _(error: errors.AccessFailed) -> str:
    return f"check its permissions: ls -ld {quoted(error.path or '')}"


@_hint.register(remote_errors.RemoteMissing)
def _(error: remote_errors.RemoteMissing) -> str:
    if error.is_extra:
        return "install it: pip install 'ckptmove[remote]'"
    return f"fsspec reads {error.scheme}:// with {error.package}: install that package"


@_hint.register(remote_errors.UnknownScheme)
def _(error: remote_errors.UnknownScheme) -> str:
    if error.suggestion:
        return f"did you mean {error.suggestion}://?"
    return "examples of URLs: hf://org/repo/file.bin, https://host/file.pth, s3://bucket/file.pth, gs://bucket/file.pth"


@_hint.register(remote_errors.ArtifactAddress)
def _(error: remote_errors.ArtifactAddress) -> str:
    return f"download it first: {command_line(error.command)}"


@_hint.register(remote_errors.RemoteFailed)
def _(error: remote_errors.RemoteFailed) -> str:
    if error.is_denied:
        return _LOGINS.get(error.scheme, "check the credentials")
    return "check the URL and the network, then try again"


@_hint.register(remote_errors.NoRanges)
def _(error: remote_errors.NoRanges) -> str:
    return f"download it first: {command_line(['curl', '-fLO', error.path or ''])}"


@_hint.register(errors.NotACheckpoint)
def _(error: errors.NotACheckpoint) -> str:
    path = error.path or ""
    if _WEB.match(path) and error.found == "a text file":
        return f"ckptmove reads files of torch.save; look at this one with: curl -s {quoted(path)} | head"
    if _DIRECTORY_PAGE.fullmatch(path) and error.found == "an HTML page":
        return f"the URL of a directory ends with a slash: {command_line(['ckptmove', 'inspect', f'{path}/'])}"
    if is_url(path) and error.found in _LINKS:
        return "on the Hub and on GitHub, the URL of the file itself has /resolve/ or /raw/ in place of /blob/"
    return _filled(_MENDS.get(error.found, "ckptmove reads files of torch.save"), path, _folder_of(path))


@_hint.register(errors.EmptyDirectory)
def _(error: errors.EmptyDirectory) -> str:
    path = error.path or ""
    if error.form is not None and error.inner:
        name = quoted(f"{path}.unpacked/{error.inner}")
        return f"unpack it, and use that file: {unpacking(path, error.form)} && ckptmove inspect {name}"
    if error.is_cut:
        return f"it was cut off in transit: {_AGAIN}"
    return (
        "ckptmove reads directories of the HF Trainer, Accelerate, DeepSpeed, Megatron and mmengine, and any file of "
        "torch.save"
    )


@_hint.register(errors.MissingShard)
def _(error: errors.MissingShard) -> str:
    folder = quoted(_folder_of(error.path or ""))
    return f"copy or download that file too, into {folder}; if it was never saved, use an earlier checkpoint"


@_hint.register(errors.MustBeUnpacked)
def _(error: errors.MustBeUnpacked) -> str:
    path = error.path or ""
    command = unpacking(path, error.form, locked=error.locked)
    return f"unpack it, and use the directory: {command} && ckptmove inspect {quoted(f'{path}.unpacked')}"


@_hint.register(OutputsCollide)
def _(_: OutputsCollide) -> Phrase:
    return Phrase(
        "convert them one at a time, or leave out ", Argument("output_dir"), ": each is then written next to its source"
    )


@_hint.register(errors.DistributedFile)
def _(error: errors.DistributedFile) -> str:
    return f"give its directory: ckptmove inspect {quoted(_folder_of(error.path or ''))}"


def _has_folder(error: errors.CkptMoveError) -> bool:
    """Whether the folder exists; a file cannot be created in some existing folders, for example /proc."""
    return os.path.isdir(_folder_of(error.path or ""))


def _make_folder(error: errors.CkptMoveError) -> str:
    return f"its folder does not exist: mkdir -p {quoted(_folder_of(error.path or ''))}"


def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."


def _filled(hint: str, path: str, folder: str) -> str:
    """A hint with a path in its placeholder, if it has one."""
    paths = {"{shell}": quoted(path), "{folder}": quoted(folder)}
    mark = next((mark for mark in paths if mark in hint), None)
    return hint if mark is None else hint.replace(mark, paths[mark])


@_hint.register(errors.UnsupportedContainer)
def _(error: errors.UnsupportedContainer) -> str:
    return facts_of(error.container).unsupported_hint


@_hint.register(errors.DamagedArchive)
@_hint.register(errors.DamagedPickle)
def _(error: errors.UnreadableInput) -> str:
    del error
    return f"it was cut off or changed in transit: {_AGAIN}"


@_hint.register(errors.OutputExists)
def _(error: errors.OutputExists) -> str:
    path = error.path or ""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        return Phrase("only regular files are replaced: choose another path with ", Argument("output"))
    force, keep = Argument("force", True), ShellOnly(", keep it with --skip-existing,")
    return Phrase("replace it with ", force, keep, " or choose another path with ", Argument("output"))


@_hint.register(CopyExists)
def _(error: CopyExists) -> str:
    return f"verify the copy: {command_line(['ckptmove', 'verify', error.path or ''])}; or choose another folder"


@_hint.register(errors.OutputHoldsMore)
def _(error: errors.OutputHoldsMore) -> str:
    remove = f"check its content, then remove it: rm -r {quoted(error.path or '')}; or choose another path with "
    return Phrase(remove, Argument("output"))


@_hint.register(errors.OutputSuffix)
def _(error: errors.OutputSuffix) -> str:
    return Phrase("use the suffix of its format: ", Argument("output", error.instead))


@_hint.register(errors.OutputIsFolder)
def _(error: errors.OutputIsFolder) -> str:
    return Phrase("give a file in it: ", Argument("output", error.inside))


@_hint.register(errors.NothingToUndo)
def _(error: errors.NothingToUndo) -> str:
    if error.container is not None and not facts_of(error.container).has_devices:
        return "it stores no device, so no conversion has changed it"
    if error.container in _MADE_ANEW:
        shown = f"ckptmove inspect {quoted(error.path or '')}"
        return f"the original is unchanged: use that; to see the devices of this one: {shown}"
    return Phrase("convert it back with ", Argument("to"))


@_hint.register(UnsafeMember)
def _(error: UnsafeMember) -> str:
    return f"ask for an archive without it; to see all of them: ckptmove inspect {quoted(error.path or '')}"


@_hint.register(changes.InterruptedConversion)
def _(error: changes.InterruptedConversion) -> str:
    return f"roll it back: {_undo(error.path)}"


@_hint.register(changes.RestoresMore)
def _(error: changes.RestoresMore) -> str:
    if error.is_unsafe:
        return f"{_DISTRUST}" + (f"; remove the journal: rm {quoted(error.journal)}" if error.journal else "")
    removed = f"; if the file is whole, and you did not convert it: rm {quoted(error.journal)}" if error.journal else ""
    return f"if you converted it yourself: {_undo(error.path)} --force{removed}"


def _undo(path: str | None) -> str:
    return f"ckptmove convert {quoted(path or '')} --undo"


@_hint.register(errors.LimitExceeded)
def _(error: errors.LimitExceeded) -> str:
    factor = next((one for one in _FACTORS if one * error.limit >= error.actual), None)
    # A count of operations stops at the limit, so the real number is unknown.
    raised = Argument("limit_factor", str(factor))
    typed = Phrase("if you trust the file: ", raised, ShellOnly(" (times the one given)"), ", or more")
    if error.is_fixed or factor is None:
        typed = Phrase(ShellOnly("--limit-factor cannot raise it far enough"))
    if error.resource == TREE_MEMORY:
        return Phrase("lists and dicts of millions of plain values exceed it: save them as tensors; ", typed)
    return Phrase("no real checkpoint needs that much; ", typed)


@_hint.register(remap_errors.NotPlain)
def _(error: remap_errors.NotPlain) -> str:
    return _DISTRUST if error.is_dangerous else ""


@_hint.register(NotWeightsOnly)
def _(error: NotWeightsOnly) -> str:
    return _DISTRUST if error.is_dangerous else error.instead


@_hint.register(NotLoadable)
def _(error: NotLoadable) -> str:
    return f"list its tensors: ckptmove inspect --tensors {quoted(error.path or '')}"


@_hint.register(NotAccepted)
@_hint.register(ReadOnlyFormat)
def _(error: NotAccepted | ReadOnlyFormat) -> str:
    return error.instead


@_hint.register(NotRebuilt)
def _(error: NotRebuilt) -> str:
    return f"check it: ckptmove inspect {quoted(error.path or '')}"


@_hint.register(errors.ChangeFailed)
def _(error: errors.ChangeFailed) -> str:
    if error.reason in _NO_ACCESS:
        return "make it writable, or use a writable copy, then run the command again"
    if error.reason in _NO_SPACE:
        return "it is unchanged: free some space, or copy it to another disk, then run the command again"
    return f"check it: ckptmove inspect {quoted(error.path or '')}"


@_hint.register(errors.JournalInTheWay)
def _(error: errors.JournalInTheWay) -> str:
    return (
        "if the file was renamed after a crash, rename it back, and undo the conversion there; "
        f"if the file is complete: rm {quoted(error.journal)}"
    )


@_hint.register(errors.RollbackFailed)
def _(error: errors.RollbackFailed) -> str:
    if error.reason == journal.UNKNOWN_JOURNAL:
        rewritten = f"rm {quoted(error.journal)}"
        return f"use the ckptmove version that wrote it; or, if the file was rewritten since: {rewritten}"
    return f"make both writable, free some space, then run: {_undo(error.path)}"


@_hint.register(FixNotWritten)
def _(error: FixNotWritten) -> str:
    return f"free some space, or make its folder writable: ls -ld {quoted(_folder_of(error.path or ''))}"


@_hint.register(errors.ReportFailed)
def _(error: errors.ReportFailed) -> str:
    if error.reason == os.strerror(errno.ENOENT) and not _has_folder(error):
        return f"{_make_folder(error)}; or choose another path with --report"
    if error.reason in _NO_SPACE:
        return "free some space, or choose another path with --report"
    return "choose a writable file with --report"


@_hint.register(errors.NotDurable)
def _(error: errors.NotDurable) -> str:
    return f"check the disk, and compare the CRCs: ckptmove inspect --check {quoted(error.path or '')}"


@_hint.register(errors.WriteFailed)
def _(error: errors.WriteFailed) -> str:
    if error.reason == os.strerror(errno.ENOENT) and not _has_folder(error):
        return Phrase(_make_folder(error), "; or choose another path with ", Argument("output"))
    if error.reason in _NO_SPACE:
        return Phrase("free some space, or choose another path with ", Argument("output"))
    return Phrase("choose a writable path with ", Argument("output"))


@_hint.register(remap_errors.NotRemappable)
def _(error: remap_errors.NotRemappable) -> str:
    return "change its module, and save it again" if facts_of(error.container).has_code else ""


@_hint.register(errors.NotGathered)
def _(error: errors.NotGathered) -> str:
    if error.folder:
        one = posixpath.join(error.path or "", error.folder)
        return f"give the path of one of them: {quoted(one)}"
    return _SAME_FILES


@_hint.register(remap_errors.NoMatch)
def _(error: remap_errors.NoMatch) -> str:
    every = f"ckptmove inspect --tree {quoted(error.path or 'PATH')}"
    if error.known:
        begin = "its keys begin with" if error.option == "--strip-prefix" else "some names in the checkpoint:"
        return f"{begin} {', '.join(map(quoted, error.known))}; list all: {every}"
    return f"list the names of its parts and tensors: {every}"


@_hint.register(remap_errors.ListItems)
def _(error: remap_errors.ListItems) -> str:
    return "" if error.where else Phrase("choose the item to keep with ", Argument("as_root"))

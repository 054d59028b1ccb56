"""The use-cases: ``inspect``, ``convert``, ``undo``, ``verify``, ``diff``; scripts, tests and the CLI call them.

They take a path as ``str`` or ``Path``, and a device as ``str`` or ``torch.device``, as torch does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from ckptmove.checkpoint.opening import Survey, survey
from ckptmove.errors import ArchiveOfFiles, UsageError
from ckptmove.io.outputs import unheard
from ckptmove.io.portable import SEPARATORS
from ckptmove.io.source import is_folder
from ckptmove.limits import Limits
from ckptmove.model import OneLine
from ckptmove.pickles.collector import collector_paused
from ckptmove.text import amount
from ckptmove.torch_facts.devices import parse_mapping, parse_target
from ckptmove.verification.measuring import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptmove.case import Case
    from ckptmove.checkpoint.inventory.outline import OutlineLine
    from ckptmove.checkpoint.layouts.reading import Directory
    from ckptmove.comparison.differences import DiffResult
    from ckptmove.conversion.file import ConvertRequest
    from ckptmove.errors import LimitExceeded, UnreadableInput
    from ckptmove.io.changes import UndoResult
    from ckptmove.io.contracts import Progress
    from ckptmove.model import Finding, Inventory
    from ckptmove.moves import ConvertResult, MovePlan, MoveRequest
    from ckptmove.verification.evidence import VerifyResult


class DeviceLike(Protocol):
    """A ``torch.device``: its ``str`` is the device string. A protocol, since torch need not be installed."""

    @property
    def type(self) -> str:
        """``cuda``."""
        ...

    @property
    def index(self) -> int | None:
        """``0`` of ``cuda:0``."""
        ...


FilePath: TypeAlias = "str | os.PathLike[str]"
Device: TypeAlias = "str | DeviceLike"
#: As ``torch.load`` takes it, but no function: a file has no loaded storages to give it. One is refused with a reason.
MapLocation: TypeAlias = "Device | Mapping[str, Device]"


class InspectRequest(NamedTuple):
    """The options of :func:`inspect`, with devices and paths as text; its arguments are described there."""

    path: str
    target: str | None = None
    expect: str | None = None
    device_count: int | None = None
    check: bool = False
    outline: bool = False
    keep_going: bool = False
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(OneLine):
    """What ``inspect`` found.

    Attributes:
        inventory: what the checkpoint holds.
        findings: what is wrong with it.
        outline: its tree, where that was asked for.
        plan: what ``convert`` would change to bring it to the device that was expected, where one was.
        unchecked: paths of the file, or of those in it, that have no CRCs to compare, where that was asked for.
        unreadable: errors of the files of a directory or an archive that cannot be read; the others are in all else.
    """

    inventory: Inventory
    findings: tuple[Finding, ...]
    outline: tuple[OutlineLine, ...] = ()
    plan: MovePlan | None = None
    unchecked: tuple[str, ...] = ()
    unreadable: tuple[UnreadableInput | LimitExceeded, ...] = ()

    def __str__(self) -> str:
        """How much was found, in one line."""
        held, codes = self.inventory, ", ".join(dict.fromkeys(finding.code for finding in self.findings))
        return f"{held.path}: {amount(len(held.tensors), 'tensor')}, {f'findings {codes}' if codes else 'no findings'}"


def inspect(
    path: FilePath,
    *,
    target: Device | None = None,
    expect: Device | None = None,
    device_count: int | None = None,
    check: bool = False,
    outline: bool = False,
    keep_going: bool = False,
    progress: Progress | None = None,
    limits: Limits | None = None,
) -> Inspection:
    """Read a checkpoint as data: no torch, no GPU, none of the model's own classes.

    Args:
        path: a file, or a directory or an archive of files, which is read as one checkpoint.
        target: device that the findings judge the file for; without it, the device that is expected, and without
            that, the device where the model lies.
        expect: device where everything that should move is expected to be; without it, there is no plan.
        device_count: how many devices of one type the target machine has; None where that is not known.
        check: whether to read every record and compare its CRC.
        outline: whether to make the outline too.
        keep_going: whether files of a directory or an archive that cannot be read are left out; their errors are then
            in ``unreadable``, and no finding rests on what these files may hold. Otherwise, or where all of them are
            left out, the first of them is raised.
        progress: told of bytes checked and bytes in all.
        limits: what the file may ask for.

    Raises:
        UnreadableInput: it cannot be read, is damaged, or is no checkpoint.
        LimitExceeded: it asks for more than the limits allow.
        UnknownDevice: torch knows no such target.
    """
    request = InspectRequest(
        path=os.fspath(path),
        target=_text(target),
        expect=_text(expect),
        device_count=device_count,
        check=check,
        outline=outline,
        keep_going=keep_going,
        limits=limits or Limits(),
    )
    return inspect_checkpoint(request, progress)


@collector_paused()
def inspect_checkpoint(request: InspectRequest, progress: Progress | None = None) -> Inspection:
    """Run a request of :func:`inspect`."""
    from ckptmove.findings.context import Context  # noqa: PLC0415  # convert does not wait for it
    from ckptmove.findings.registry import find_all  # noqa: PLC0415  # convert does not wait for it

    path, limits, check, outline, keep_going = (
        request.path, request.limits, request.check, request.outline, request.keep_going,
    )  # fmt: skip
    target = request.target if request.target is not None else request.expect
    context = Context(parse_target(target) if target is not None else None, request.device_count)
    found = _read(path, limits, check=check, outline=outline, keep_going=keep_going, progress=progress)
    plan: MovePlan | None = None
    if request.expect is not None:
        from ckptmove.conversion.plan import plan_for  # noqa: PLC0415  # inspect does not wait for what it was not asked for

        plan = plan_for(found.inventory, request.expect)
    unchecked = _without_checksums(found) if check else ()
    unreadable = () if isinstance(found, Survey) else found.unreadable
    return Inspection(found.inventory, find_all(found.inventory, context), found.outline, plan, unchecked, unreadable)


def convert(
    path: FilePath,
    *,
    to: Device | None = None,
    map_location: MapLocation | None = None,
    keep: Sequence[str] = (),
    output: FilePath | None = None,
    in_place: bool = False,
    force: bool = False,
    dry_run: bool = False,
    cast: bool = False,
    rewrite_strings: bool = False,
    check: bool = True,
    progress: Progress | None = None,
    settle: Callable[[], None] = unheard,
    limits: Limits | None = None,
) -> ConvertResult:
    """Rewrite a checkpoint for another device: the pickle is edited, the tensors' bytes are copied as they are.

    Where no device stands in the file (safetensors, say) only an ``output`` that is asked for is written: a copy.

    Args:
        path: a file, or a directory or an archive of files, which becomes a new one: whole, or not at all.
        to: device that everything goes to, save what has to stay (RNG states, ``step``).
        map_location: as of ``torch.load``: a device for everything, as ``to`` is, or a dict of source globs and their
            devices, which is applied before ``to``; the first glob that matches counts.
        keep: globs of tensor names that stay where they are.
        output: the new file or directory; by default the name of ``path`` with the device in it.
        in_place: whether the file itself is changed, in a time that does not hang on its size; :func:`undo` takes that
            back.
        force: whether an existing output is replaced.
        dry_run: whether to stop after the plan.
        cast: whether dtypes that the target lacks are cast down.
        rewrite_strings: whether device strings in configs follow their tensors.
        check: whether the bytes that are copied are compared with their CRCs; without, the kernel copies them.
        progress: told of bytes done and bytes in all; of a directory, in other threads, one call at a time.
        settle: called before the last step, which cannot be taken back: an exception of a signal comes too late then.
        limits: what the file may ask for.

    Raises:
        UsageError: neither ``to`` nor ``map_location``, two targets, a function as ``map_location``, an unknown device,
            or an output, ``force`` or ``check=False`` besides ``in_place``.
        UnreadableInput: the source cannot be read, is damaged, or is no checkpoint.
        Refused: the output exists, is a folder or is the source, the target lacks a dtype, or the change cannot be
            made in place.
        WriteFailed: the output could not be written; nothing is left of it, and a file to be changed is what it was.
    """
    from ckptmove.conversion.file import ConvertRequest  # noqa: PLC0415  # inspect does not wait for it

    to, mapping = _targets(to, map_location)
    request = ConvertRequest(
        path=os.fspath(path),
        move=move_request(to, mapping, keep, cast=cast, rewrite_strings=rewrite_strings),
        output=os.fspath(output) if output else None,
        in_place=in_place,
        force=force,
        dry_run=dry_run,
        check=check,
        progress=progress,
        settle=settle,
        limits=limits or Limits(),
    )
    return convert_checkpoint(request)


@collector_paused()
def convert_checkpoint(request: ConvertRequest) -> ConvertResult:
    """Run a request of :func:`convert`."""
    if request.in_place and request.output:
        raise UsageError("a file that is converted in place has no other output: --in-place, or --output")
    if request.in_place and (request.force or not request.check):
        raise UsageError(
            "--in-place replaces no other file and reads no tensor: it goes without --force and --no-check"
        )
    from ckptmove.conversion.file import convert_file  # noqa: PLC0415  # inspect does not wait for it

    request = replace(request, beside=default_output(request.path, request.move.to or "moved"))
    if request.in_place:
        from ckptmove.conversion.in_place import convert_in_place  # noqa: PLC0415  # a new file does not wait for it

        return convert_in_place(request)
    if is_folder(request.path):
        from ckptmove.conversion.directory import convert_directory  # noqa: PLC0415  # a file does not wait for it

        return convert_directory(request)
    with suppress(ArchiveOfFiles):
        return convert_file(request)
    from ckptmove.conversion.archive import convert_archive  # noqa: PLC0415  # a file does not wait for it

    return convert_archive(request)


def undo(
    path: FilePath, *, dry_run: bool = False, settle: Callable[[], None] = unheard, limits: Limits | None = None
) -> UndoResult:
    """Make a file what it was before it was first converted in place, byte for byte.

    Args:
        path: the file.
        dry_run: whether to stop before it is changed.
        settle: as of :func:`convert`.
        limits: what the file may ask for.

    Raises:
        UnreadableInput: the file cannot be read, is damaged, or is no checkpoint.
        Refused: it does not say what it was, or another process is converting it.
        WriteFailed: it could not be changed; it is as it is.
    """
    from ckptmove.conversion.in_place import undo_in_place  # noqa: PLC0415  # inspect does not wait for it

    return undo_in_place(os.fspath(path), dry_run=dry_run, limits=limits or Limits(), settle=settle)


def verify(
    path: FilePath,
    *,
    to: Device | None = None,
    against: FilePath | None = None,
    optimizer: str | None = None,
    require_device: bool = False,
    seed: int = 0,
    ignore: Sequence[str] = (),
    keep: Sequence[str] = (),
    devices: int | None = None,
    case: str | Callable[..., Case] | None = None,
    timeout: float | None = None,
    sample: int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    stage: Callable[[str], None] | None = None,
) -> VerifyResult:
    """Prove that a checkpoint resumes, by one step of its optimizer on the target.

    Args:
        path: a file, or a directory or an archive of files, which is one checkpoint.
        to: the target; by default every tensor stays on its device, and the step is made where the model is.
        against: the original that the values must equal, in whichever of these forms.
        optimizer: class to use in place of the one that the keys point to: of ``torch.optim`` by its name, or any other
            as ``pkg.mod:CLASS``, which is imported and run in a process of its own.
        require_device: whether a simulated target is a failure.
        seed: of the gradient.
        ignore: codes of findings that are no failure.
        keep: globs of tensor names that may lie where they are.
        devices: how many devices the target machine has; by default as many as ``to`` and the file name.
        case: your function that returns a :class:`ckptmove.Case`, or its name, ``FILE.py:FUNC`` or ``pkg.mod:FUNC``:
            your model is stepped from the stored state, too. Another process imports the function by its name.
        timeout: seconds that torch may take for its checks; by default as many as they need.
        sample: look at so many parameters of each optimizer, with their state, and at so many other tensors, which
            ``seed`` chooses; by default at all of them.
        limits: what each file may ask for.
        progress: told of bytes checked and bytes in all.
        stage: then told what torch does next.

    Raises:
        TorchMissing: torch is not installed.
        TorchBroken: it cannot be imported.
        UsageError: an unknown device or optimizer, a case that is none, an original with none of the same tensors, or
            no time at all.
        UnreadableInput: it cannot be read, is damaged, or is no checkpoint.
        LimitExceeded: it asks for more than a limit allows.
    """
    from ckptmove.verification.case.name import name_of  # noqa: PLC0415  # the only command that pays for this room
    from ckptmove.verification.request import VerifyRequest  # noqa: PLC0415  # the only command that pays for this room
    from ckptmove.verification.run import verify_checkpoint  # noqa: PLC0415  # the only command that pays for this room

    request = VerifyRequest(
        path=os.fspath(path),
        to=_text(to),
        against=None if against is None else os.fspath(against),
        optimizer=optimizer,
        require_device=require_device,
        seed=seed,
        ignore=tuple(ignore),
        keep=tuple(keep),
        devices=devices,
        case=name_of(case) if callable(case) else case,
        timeout=timeout,
        sample=sample,
        limits=limits or Limits(),
    )
    return verify_checkpoint(request, progress=progress, stage=stage)


@collector_paused()
def diff(
    first: FilePath, second: FilePath, *, progress: Progress | None = None, limits: Limits | None = None
) -> DiffResult:
    """Compare two checkpoints: structure, devices, dtypes and values, bit for bit.

    Nothing is unpickled. Without torch it is not said how far differing values lie apart.

    Args:
        first: a file, a directory or an archive of files.
        second: another one.
        progress: told of bytes of tensors compared and bytes in all.
        limits: what each of them may ask for.

    Raises:
        UnreadableInput, LimitExceeded: as :func:`inspect`, for either of them.
    """
    from ckptmove.comparison.compare import compare  # noqa: PLC0415  # the other commands do not wait for it

    return compare(os.fspath(first), os.fspath(second), limits or Limits(), measure, progress)


def default_output(path: str, to: str) -> str:
    """The output beside the source: ``model.pth`` for ``cuda:0`` is ``model.cuda0.pth``, a directory ``run.cuda0``."""
    target = parse_target(to).replace(":", "") if to != "moved" else to
    if is_folder(path):
        plain = path.rstrip(SEPARATORS)
        has_name = os.path.basename(plain) not in {"", ".", ".."}  # noqa: PTH119  # a path stays as it was typed: a Path would drop "./" and a slash at its end
        return f"{plain if has_name else os.path.realpath(path)}.{target}"
    root, extension = os.path.splitext(path)  # noqa: PTH122  # a path stays as it was typed: a Path would drop "./" and a slash at its end
    if root.endswith(".pth") and extension == ".tar":  # model.pth.tar, by far the commonest double ending
        root, extension = root.removesuffix(".pth"), ".pth.tar"
    return f"{root}.{target}{extension}"


def _read(
    path: str, limits: Limits, *, check: bool, outline: bool, keep_going: bool, progress: Progress | None
) -> Survey | Directory:
    """A file, a directory, or an archive of files, as it was read."""
    if is_folder(path):
        from ckptmove.checkpoint.layouts.reading import read_directory  # noqa: PLC0415  # a file does not wait for it

        return read_directory(path, limits, check=check, outline=outline, keep_going=keep_going, progress=progress)
    with suppress(ArchiveOfFiles):
        return survey(path, limits, check=check, outline=outline, progress=progress)
    from ckptmove.checkpoint.layouts.reading import read_archive  # noqa: PLC0415  # a file does not wait for it

    return read_archive(path, limits, check=check, outline=outline, keep_going=keep_going, progress=progress)


def _without_checksums(found: Survey | Directory) -> tuple[str, ...]:
    if isinstance(found, Survey):
        return () if found.has_checksums else (found.inventory.path,)
    return found.without_checksums


def _targets(to: Device | None, map_location: MapLocation | None) -> tuple[str | None, Mapping[str, str]]:
    """The one target and the mapping that ``to`` and ``map_location`` ask for."""
    if callable(map_location):
        raise UsageError("a function as map_location moves loaded storages; a file takes a device or a dict")
    if isinstance(map_location, Mapping):
        return _text(to), {str(source): str(device) for source, device in map_location.items()}
    if to is not None and map_location is not None and parse_target(str(to)) != parse_target(str(map_location)):
        raise UsageError(f"two targets: to={str(to)!r} and map_location={str(map_location)!r}")
    return _text(map_location if to is None else to), {}


def _text(device: Device | None) -> str | None:
    return None if device is None else str(device)


def move_request(
    to: str | None, map_location: Mapping[str, str], keep: Sequence[str], *, cast: bool, rewrite_strings: bool
) -> MoveRequest:
    """The moves of a conversion, with its devices checked.

    Raises:
        UsageError: if there is no target, or a device is unknown.
    """
    from ckptmove.moves import MoveRequest  # noqa: PLC0415  # inspect does not wait for it

    if to is None and not map_location:
        raise UsageError("convert needs a target: --to DEVICE, or --map SOURCE=DEVICE")
    return MoveRequest(
        to=parse_target(to) if to is not None else None,
        mapping=tuple(parse_mapping(f"{source}={device}") for source, device in map_location.items()),
        keep=tuple(keep),
        cast=cast,
        rewrite_strings=rewrite_strings,
    )

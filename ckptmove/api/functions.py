"""The functions ``inspect``, ``convert``, ``undo``, ``verify`` and ``diff``; ``load`` is in ``loading``.

A path is a ``str`` or a ``Path``, a device a ``str`` or a ``torch.device``, as in torch.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from ckptmove.api.arguments import (
    device_text,
    local_path,
    location,
    move_request,
    named_remap,
    of_type,
    optimizer_name,
    remap_of,
    targets,
    words,
    written_path,
)
from ckptmove.api.hinting import hinted
from ckptmove.api.results import ConvertResult, DiffResult, VerifyResult
from ckptmove.errors import Refused, UsageError
from ckptmove.io.locations import default_output, inside, without_suffix
from ckptmove.io.outputs import do_nothing
from ckptmove.io.remote.address import Address
from ckptmove.io.remote.errors import NotLocal
from ckptmove.limits import Limits
from ckptmove.moves import checked_globs
from ckptmove.pickles.collector import collector_paused
from ckptmove.proof.errors import PackageMissing, TorchBroken
from ckptmove.proof.tensors.measuring import measure_with_torch
from ckptmove.text import Argument, Phrase, spelled_for_python
from ckptmove.torch_facts.devices import parse_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Unpack

    from ckptmove.api.arguments import Device, FilePath, MapLocation
    from ckptmove.api.inspection import Inspection
    from ckptmove.case import Case
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.conversion.results import Converted, UndoResult
    from ckptmove.io.contracts import Progress
    from ckptmove.moves import RemapOptions

#: The option, as a subject of messages.
_IN_PLACE: Final = Argument("in_place")


@hinted()
def inspect(
    path: FilePath | BinaryIO,
    *,
    target: Device | None = None,
    expect: Device | None = None,
    device_count: int | None = None,
    fit: str | None = None,
    check: bool = False,
    outline: bool = False,
    keep_going: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    limits: Limits | None = None,
) -> Inspection:
    """Read a checkpoint as data: no torch, no GPU, none of the model's own classes.

    Args:
        path: a file, or a directory or an archive of files, which is read as one checkpoint; its URL; or a binary file
            object.
        target: target device of the findings (default: ``expect``, or else the device of the model).
        expect: device on which every tensor that should move is expected; the result then has a plan.
        device_count: number of devices of the target machine, or None if unknown.
        fit: number of devices and memory of each, ``"64x80GiB"``. The result then has the parameters, gradients and
            optimizer state of each device in a training with FSDP2, from the sizes in the file.
        check: whether to read every record and compare its CRC.
        outline: whether to build the outline too.
        keep_going: whether to leave out files of a directory or an archive that cannot be read. Their errors are in
            ``unreadable``, and no finding depends on their content. The first error is raised if no file is left, and
            with ``fit``, which needs all files.
        jobs: number of threads that compare CRCs of local files (default: the number of available cores).
        progress: called with the bytes checked so far and the total; from other threads, one at a time.
        limits: resource limits for reading it.

    Raises:
        UnreadableInput: if it cannot be read, is damaged, or is not a checkpoint.
        LimitExceeded: if it needs more than the limits allow.
        UnknownDevice: if torch does not know the target device.
        UsageError: if ``fit`` has another form, or the parameters are not whole.
    """
    from ckptmove.api.inspection import InspectRequest, inspect_checkpoint

    request = InspectRequest(
        path=location(path),
        target=device_text(target),
        expect=device_text(expect),
        device_count=device_count,
        fit=of_type(fit, "fit", "64x80GiB"),
        check=check,
        outline=outline,
        keep_going=keep_going,
        jobs=jobs,
        limits=limits or Limits(),
    )
    return inspect_checkpoint(request, progress)


@named_remap
@hinted()
def convert(
    path: FilePath | BinaryIO,
    *,
    to: Device | None = None,
    map_location: MapLocation | None = None,
    keep: str | Sequence[str] = (),
    output: FilePath | None = None,
    shard_size: int | str | None = None,
    in_place: bool = False,
    force: bool = False,
    dry_run: bool = False,
    cast: bool = False,
    rewrite_strings: bool = False,
    check: bool = True,
    verify: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    settle: Callable[[], None] = do_nothing,
    limits: Limits | None = None,
    **remap: Unpack[RemapOptions],
) -> ConvertResult:
    """Rewrite a checkpoint: for another device, with other keys, parts or dtypes, or in another format.

    A format without devices, for example safetensors, is copied if ``output`` is given; otherwise nothing is written.

    Args:
        path: a file, or a directory or an archive of files, which is written completely or not at all; its URL;
            or, with ``output``, a binary file object.
        to: target device of all tensors, except those that have to stay (RNG states, ``step``).
        map_location: as in ``torch.load``: a target device, as ``to``, or a dict from globs of devices to devices,
            applied before ``to``; the first match counts.
        keep: globs of tensor names that stay on their device.
        output: the new file or directory (default: the name of ``path`` with the device in it; for a URL, in the
            working directory). Its suffix names the format: ``.safetensors``, or ``.pth`` for one file of
            ``torch.save``.
        shard_size: largest size of a file, in bytes or as ``"5GB"``; the output is a directory of safetensors files.
        in_place: whether to change the file itself, in a time independent of its size; :func:`undo` restores it.
        force: whether to replace an existing output.
        dry_run: whether to stop after the plan.
        cast: whether to cast dtypes that the target lacks to smaller ones.
        rewrite_strings: whether device strings in configs follow their tensors.
        check: whether to compare copied bytes with their CRCs; without it, the kernel copies them.
        verify: whether to compare each tensor of the output with its source, by torch, before the output gets its name.
        jobs: number of files of a directory that are written at once (default: 4, or the number of available cores).
        progress: called with the bytes done so far and the total; for a directory from other threads, one at a time.
        settle: called before the last step, which cannot be undone: signals must not raise exceptions after it.
        limits: resource limits for reading it.
        remap: changes of keys, parts and dtypes: ``strip_prefix``, ``add_prefix``, ``rename``, ``only``, ``drop``,
            ``as_root``, ``compact``, ``plain`` and ``dtype``, as of :class:`ckptmove.moves.RemapOptions`.

    Raises:
        UsageError: if no target or two targets are given, ``map_location`` is a function, a device is unknown, or
            ``in_place`` is combined with ``output``, ``force`` or ``check=False``.
        UnreadableInput: if the source cannot be read, is damaged, or is not a checkpoint.
        Refused: if the output exists, is a folder or is the source, the target lacks a dtype, or the change cannot be
            made in place.
        WriteFailed: if the output cannot be written; the partial file is removed, and the source is unchanged.
        ConversionDiffers: if ``verify`` finds a difference; nothing new is kept.
        PackageMissing: if ``verify`` needs torch, which is not installed.
    """
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.conversion.shards import parse_size

    to, mapping = targets(to, map_location)
    request = ConvertRequest(
        path=location(path) if output is not None else local_path(path, "convert without output takes"),
        move=move_request(to, mapping, keep, cast=cast, rewrite_strings=rewrite_strings, remap=remap_of(remap)),
        shard_bytes=parse_size(shard_size) if isinstance(shard_size, str) else shard_size,
        output=None if output is None else written_path(output, "output"),
        in_place=in_place,
        force=force,
        dry_run=dry_run,
        check=check,
        verify=verify,
        jobs=jobs,
        progress=progress,
        settle=settle,
        limits=limits or Limits(),
    )
    with spelled_for_python():
        return ConvertResult.of(convert_checkpoint(request), path=request.path)


@collector_paused()
def convert_checkpoint(request: ConvertRequest) -> Converted:
    """Run a request of :func:`convert`."""
    if request.in_place and request.output:
        raise UsageError(Phrase(_IN_PLACE, " changes the file itself and takes no ", Argument("output")))
    if request.in_place and request.shard_bytes is not None:
        new = Phrase(Argument("shard_size"), " writes a new directory, and ")
        raise UsageError(Phrase(new, _IN_PLACE, " changes the file itself: leave one out"))
    if request.in_place and (request.force or not request.check):
        alone = Phrase(_IN_PLACE, " replaces no other file and reads no tensor: leave out ")
        raise UsageError(Phrase(alone, Argument("force"), " and ", Argument("no_check")))
    output = location(request.output or "")
    if isinstance(output, Address):
        raise NotLocal(output, "convert writes local files")
    from ckptmove.conversion.convert import convert as carry_out

    request = with_default_output(request)
    try:
        with _proving(request) as proving:
            made = carry_out(proving)
    except (Refused, UsageError) as error:
        from ckptmove.api.mends import mend

        mend(error, request)
        raise
    if not made.is_refused:
        return made
    from ckptmove.findings.remedies import note_on

    return replace(made, notes=(*made.notes, *note_on(made, request)))


@contextmanager
def _proving(request: ConvertRequest) -> Iterator[ConvertRequest]:
    """The request with the function that compares the output, if it asks for that."""
    if not request.verify or request.dry_run:
        yield request
        return
    try:
        from ckptmove.proof.original.written import proof_of
    except ModuleNotFoundError as error:
        raise PackageMissing(error.name or "torch", "convert with verify needs") from error
    except (ImportError, OSError) as error:
        raise TorchBroken(str(error).partition("\n")[0]) from error
    with proof_of(request) as prove:
        yield replace(request, prove=prove)


def with_default_output(request: ConvertRequest) -> ConvertRequest:
    """The request with its default output, which is next to the source."""
    if request.default_output:
        return request
    move = request.move
    tag = parse_target(move.to).replace(":", "") if move.to else "moved" if move.mapping else "new"
    path = request.path if request.shard_bytes is None else without_suffix(request.path)
    return replace(request, default_output=default_output(path, tag))


@hinted()
def undo(
    path: FilePath,
    *,
    dry_run: bool = False,
    force: bool = False,
    settle: Callable[[], None] = do_nothing,
    limits: Limits | None = None,
) -> UndoResult:
    """Restore a file from before its first conversion in place, or from before one that was interrupted.

    The bytes are those from before. Only a conversion is undone: what is restored may differ from the file in devices
    and in the flags that follow them.

    Args:
        path: the file.
        dry_run: whether to stop before the change.
        force: whether to restore the file although it differs in more, for example in its keys.
        settle: as in :func:`convert`.
        limits: resource limits for reading it.

    Raises:
        UnreadableInput: if the file cannot be read, is damaged, or is not a checkpoint.
        Refused: if the file has no record of a conversion in place, another process is converting it, or the result
            differs in more than a conversion to another device changes.
        WriteFailed: if the file cannot be changed; it stays unchanged.
    """
    from ckptmove.api.undoing import undo_in_place

    local = local_path(path, "undo takes")
    if isinstance(local, Address):
        raise NotLocal(local, "only local files are converted in place")
    return undo_in_place(local, dry_run=dry_run, force=force, limits=limits or Limits(), settle=settle)


@hinted()
def verify(
    path: FilePath,
    *,
    to: Device | None = None,
    against: FilePath | None = None,
    optimizer: str | type[Any] | None = None,
    require_device: bool = False,
    seed: int = 0,
    ignore: str | Sequence[str] = (),
    keep: str | Sequence[str] = (),
    devices: int | None = None,
    case: str | Callable[..., Case] | None = None,
    script: FilePath | None = None,
    script_args: str | Sequence[str] = (),
    timeout: float | None = None,
    download: FilePath | None = None,
    sample: int | None = None,
    jobs: int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    stage: Callable[[str], None] | None = None,
) -> VerifyResult:
    """Prove that a checkpoint resumes, by one step of its optimizer on the target.

    Args:
        path: a file, or a directory or an archive of files, which is one checkpoint; or its URL, with ``download``.
        to: target device (default: every tensor stays on its device, and the step is made on the model's).
        against: checkpoint whose tensors must be equal, by torch's own readers: a file, a directory or an archive.
            Tensors are paired by name, by the keys of optimizers and by content.
        optimizer: optimizer class to step with (default: detected): the class; the name of one of ``torch.optim``; or
            ``pkg.mod:CLASS``. Another process imports it by its name, and runs it.
        require_device: whether a simulated target is a failure.
        seed: seed of the gradients and of ``sample``.
        ignore: codes of findings that are not failures.
        keep: globs of tensor names that may stay on another device.
        devices: number of devices of the target machine (default: as many as ``to`` needs, or else the file).
        case: your function that returns a :class:`ckptmove.Case`, or its name, ``FILE.py:FUNC`` or ``pkg.mod:FUNC``.
            Your model is then stepped from the stored state too. Another process imports the function by its name.
        script: your training script. Another process runs it up to its first optimizer step after it loaded the
            checkpoint.
        script_args: command-line arguments of the script.
        timeout: longest time of the checks with torch, in seconds (default: unlimited; 300 with ``script``).
        download: folder that a checkpoint at a URL is downloaded to.
        sample: number of parameters of each optimizer, with their state, and of other tensors, to check (default:
            all); ``seed`` selects them.
        jobs: largest number of processes (default: the number of available cores); a small checkpoint is checked by
            one.
        limits: resource limits for reading each file.
        progress: called with the bytes checked so far and the total.
        stage: called with the name of each check with torch, when it starts.

    Raises:
        PackageMissing: if torch is not installed.
        TorchBroken: if torch cannot be imported.
        UsageError: if the device or the optimizer is unknown, the case is not usable, ``against`` has none of the
            tensors, or ``timeout`` is not positive.
        UnreadableInput: if it cannot be read, is damaged, or is not a checkpoint.
        LimitExceeded: if it needs more than a limit allows.
    """
    from ckptmove.proof.downloading import downloaded
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.training.case.name import name_of
    from ckptmove.training.run import verify_checkpoint

    request = VerifyRequest(
        path=local_path(path, "verify takes"),
        to=device_text(to),
        against=None if against is None else local_path(against, "against takes"),
        optimizer=optimizer_name(optimizer),
        require_device=require_device,
        seed=seed,
        ignore=words(ignore),
        keep=checked_globs("--keep", keep),
        devices=devices,
        case=name_of(case) if callable(case) else case,
        script=None if script is None else written_path(script, "script"),
        script_args=words(script_args),
        timeout=timeout,
        download=None if download is None else inside(written_path(download, "download"), location(path)),
        sample=of_type(sample, "sample", 3),
        jobs=of_type(jobs, "jobs", 4),
        limits=limits or Limits(),
        in_python=True,
    )
    request = downloaded(request, progress, do_nothing)
    with spelled_for_python():
        return VerifyResult.of(verify_checkpoint(request, progress=progress, stage=stage))


@hinted()
@collector_paused()
def diff(
    first: FilePath | BinaryIO,
    second: FilePath | BinaryIO,
    *,
    progress: Progress | None = None,
    limits: Limits | None = None,
) -> DiffResult:
    """Compare two checkpoints: structure, devices, dtypes and values, bit for bit.

    Nothing is unpickled. Without torch, the sizes of differences between values are unknown.

    Args:
        first: a file, a directory or an archive of files; its URL; or a binary file object.
        second: the checkpoint to compare with.
        progress: called with the bytes of tensors compared so far and the total.
        limits: resource limits for reading each of them.

    Raises:
        UnreadableInput: if one of them cannot be read, is damaged, or is not a checkpoint.
        LimitExceeded: if one of them needs more than the limits allow.
    """
    from ckptmove.comparison.compare import compare

    found = compare(location(first), location(second), limits or Limits(), measure_with_torch, progress)
    return DiffResult.of(found)

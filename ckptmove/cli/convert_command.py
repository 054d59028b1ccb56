"""``convert``, between its options and its report.

Never plans or writes anything itself: the use-cases do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptmove import api
from ckptmove.cli.next_command import verify_command
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render import conversion
from ckptmove.cli.render.text import sentence
from ckptmove.cli.signals import settle
from ckptmove.cli.streams import Format, say, suggest
from ckptmove.errors import CkptMoveError, OutputIsStdout, StdoutFailed, UsageError
from ckptmove.formats.opening import container_class
from ckptmove.text import command_line
from ckptmove.torch_facts.devices import is_accelerator, parse_mapping, parse_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.cli.streams import Output
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory
    from ckptmove.moves import ConvertResult


class ConvertOptions(NamedTuple):
    """What ``convert`` was asked for; as the arguments of :func:`ckptmove.api.convert`.

    Attributes:
        to: the target, or None.
        maps: mappings as they were typed: ``SRC=DST``.
        keep: globs of tensor names.
        output: the new file, or None.
        in_place: whether the file itself is changed.
        dry_run: whether to stop after the plan.
        force: whether an existing output is replaced.
        cast: whether dtypes that the target lacks are cast down.
        rewrite_strings: whether device strings in configs follow their tensors.
        check: whether the bytes that are copied are compared with their CRCs.
        strict: whether nothing is written where an option met nothing.
        strict_from: the path of the configuration that says so; empty where it was typed.
        limits: what a file may ask for.
    """

    to: str | None
    maps: tuple[str, ...]
    keep: tuple[str, ...]
    output: str | None
    in_place: bool
    dry_run: bool
    force: bool
    cast: bool
    rewrite_strings: bool
    check: bool
    strict: bool
    strict_from: str
    limits: Limits


def run_convert(path: str, options: ConvertOptions, out: Output) -> int:
    """Convert a checkpoint and report on it.

    Raises:
        OutputIsStdout: the output is ``-``, which every shell user takes for standard output.
        CkptMoveError: as :func:`ckptmove.api.convert`.
        StdoutFailed: the report could not be written; the new file is there.
    """
    if options.output == "-":
        raise OutputIsStdout
    result = _convert(path, options._replace(dry_run=options.dry_run or options.strict), out)
    code = NO if options.strict and result.unmatched else YES
    if options.strict and not options.dry_run and code == YES:
        result = _convert(path, options, out)
    try:
        _tell(path, result, out, options, code)
    except StdoutFailed as error:
        raise StdoutFailed(error.reason, output=result.output) from error
    return code


def _convert(path: str, options: ConvertOptions, out: Output) -> ConvertResult:
    with ProgressBar(wanted=out.is_watched) as progress:
        return api.convert(
            path,
            to=options.to,
            map_location=dict(map(parse_mapping, options.maps)),
            keep=options.keep,
            output=options.output,
            in_place=options.in_place,
            force=options.force,
            dry_run=options.dry_run,
            cast=options.cast,
            rewrite_strings=options.rewrite_strings,
            check=options.check,
            progress=progress,
            settle=settle,
            limits=options.limits,
        )


def require_alone(*others: object) -> None:
    """Refuse whatever else was asked for besides ``--undo``.

    Raises:
        UsageError: there is something.
    """
    if any(others):
        raise UsageError("--undo takes the file back to what it was: it goes with no option but --dry-run")


def run_undo(path: str, out: Output, *, dry_run: bool, limits: Limits) -> int:
    """Take back what was done in place, and report on it.

    Raises:
        CkptMoveError: as :func:`ckptmove.api.undo`.
        StdoutFailed: the report could not be written; the file is what it was.
    """
    result = api.undo(path, dry_run=dry_run, settle=settle, limits=limits)
    if out.format is Format.JSON:
        from ckptmove.cli.render.document import undo_document  # noqa: PLC0415  # each format pays for itself alone

        out.document(undo_document(result))
    elif out.format is Format.GITHUB:
        from ckptmove.cli.render.github import undo_line  # noqa: PLC0415  # each format pays for itself alone

        out.lines([undo_line(result)])
    else:
        out.lines([conversion.undo_line(result)])
    return YES


def _tell(path: str, result: ConvertResult, out: Output, options: ConvertOptions, code: int) -> None:
    for one in result.unmatched if out.format is not Format.GITHUB else ():
        # Mistyped, as a rule: --quiet does not hide what was not done.
        say(f"{'error' if code else 'warning'}: {sentence(str(one))}")
    if code and out.format is not Format.GITHUB:
        lifted = f"set strict = false in {options.strict_from}" if options.strict_from else "leave out --strict"
        say(f"hint: nothing was written, as the run is strict: correct the option, or {sentence(lifted)}")
    if out.format is Format.JSON:
        from ckptmove.cli.render.document import convert_document  # noqa: PLC0415  # each format pays for itself alone

        out.document(convert_document(result, code))
    elif out.format is Format.GITHUB:
        from ckptmove.cli.render.github import conversion_lines  # noqa: PLC0415  # each format pays for itself alone

        out.lines(conversion_lines(path, result, strict=bool(code)))
    elif out.quiet:
        out.lines([conversion.brief_line(path, result)])
    else:
        out.lines(conversion.conversion_lines(out.page, path, result, verbose=out.verbose))
        if result.output is not None:
            _suggest(result.output, result, options.limits)


def _suggest(output: str, result: ConvertResult, limits: Limits) -> None:
    """Say how the new file is loaded and verified; what was kept on purpose has to be named to ``verify`` too."""
    request = result.plan.request
    targets = (request.to, *(target for _, target in request.mapping))
    # Others hold no optimizer, or torch.load reads none; where weights_only mode refuses the file, a note says so.
    is_loadable = container_class(result.container).is_torch_save and not result.is_refused
    if is_loadable and any(target is not None and is_accelerator(target) for target in targets):
        # map_location would take the RNG states and the step counters along again, which is what was mended.
        say(f"load it without map_location: {sentence(f'torch.load({output!r}, weights_only=True)')}")
    unmatched = {(one.option, one.glob) for one in result.unmatched}
    kept = [glob for glob in request.keep if ("keep", glob) not in unmatched]
    options = [word for glob in kept for word in ("--keep", glob)]
    if request.to and all(
        target == request.to for source, target in request.mapping if ("map", source) not in unmatched
    ):
        suggest(verify_command(output, ["--to", request.to, *options]))
        return
    # What no mapping names has stayed where it was: only the new file says where that is.
    try:
        inventory = api.inspect(output, limits=limits).inventory
    except CkptMoveError:
        return  # taken away meanwhile: the conversion is done all the same
    if _is_in_place(inventory, kept):
        suggest(verify_command(output, options))
    else:
        suggest(command_line(["ckptmove", "inspect", output]))  # which says what is on several devices now


def _is_in_place(inventory: Inventory, keep: Sequence[str]) -> bool:
    """Whether ``verify`` would find every tensor where it belongs, for the device where the model lies."""
    from ckptmove.conversion.plan import plan_move  # noqa: PLC0415  # only a mapping leaves that open
    from ckptmove.findings.context import Context, target_device  # noqa: PLC0415  # only a mapping leaves that open
    from ckptmove.moves import MoveRequest  # noqa: PLC0415  # only a mapping leaves that open

    try:
        home = parse_target(target_device(inventory, Context()) or "cpu")
    except UsageError:  # a tag in the file that no target can be
        return False
    # Training does not compute with a metric on the CPU: verify passes over it.
    idle = {tensor.name for tensor in inventory.tensors if tensor.role == "other" and not is_accelerator(tensor.device)}
    plan = plan_move(inventory, MoveRequest(to=home, keep=tuple(keep), cast=True))
    return not plan.flags and all(idle.issuperset(edit.names) for edit in plan.edits)

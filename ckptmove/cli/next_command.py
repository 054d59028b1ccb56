"""The command to type after ``inspect`` and ``convert``."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.cli.render.text import sentence
from ckptmove.errors import CkptMoveError, UsageError
from ckptmove.formats.facts import facts_of
from ckptmove.io.remote.address import Address, is_url
from ckptmove.model import Severity
from ckptmove.moves import Remap
from ckptmove.text import Argument, Command, command_line, quoted
from ckptmove.torch_facts.devices import is_accelerator, parse_target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.api.inspection import Inspection, InspectRequest
    from ckptmove.cli.render.renderer import ConvertAnswer, InspectAnswer
    from ckptmove.model import Inventory

#: Findings that no other command helps with: bytes or files are lost or of another save, or loading or unpacking the
#: file is an attack.
_HOPELESS: Final = frozenset({"F801", "F802", "F807", "F808", "F810", "F815", "S702"})


def after_inspection(answer: InspectAnswer) -> str:
    """The command after ``inspect``; empty if none helps."""
    request, inventory = answer.request, answer.result.inventory
    path = inventory.path
    if isinstance(request.path, Address) and request.path.url != path:
        return ""  # the path as shown has no credentials
    findings = [finding for finding in answer.result.findings if finding.severity is not Severity.INFO]
    is_ambiguous = any(fact.kind == "second-reading" for fact in inventory.facts)
    is_large = answer.result.fit is not None and not answer.result.fit.fits
    if answer.result.unreadable or is_ambiguous or is_large or any(one.code in _HOPELESS for one in findings):
        return ""
    if answer.result.expectation is not None and answer.result.expectation.misplaced:
        from ckptmove.findings.context import Context, available_device

        target = available_device(
            parse_target(answer.result.expectation.device), Context(device_count=request.device_count)
        )
        return _conversion(request, inventory, Argument("to", target))
    if isinstance(inventory, DirectoryInventory) and inventory.form is None and inventory.checkpoints:
        last = inventory.checkpoints[-1]
        if "*" in last:  # files of ranks
            last = posixpath.dirname(last) or "**"
        return command_line(["ckptmove", "inspect", posixpath.join(path, last)])
    fixes = (finding.fix for finding in findings if isinstance(finding.fix, Command))
    fix = next((fix for fix in fixes if fix.startswith("ckptmove ")), "")  # others load the file
    judged = request.expect or request.target
    devices = [] if request.device_count is None else ["--devices", str(request.device_count)]
    local = ["--download", "."] if is_url(path) else []
    if fix or any(finding.severity is Severity.ERROR for finding in findings):
        return fix  # verify would fail for the same reason
    return command_line(["ckptmove", "verify", path, *local, *(["--to", judged] if judged else []), *devices])


def _conversion(request: InspectRequest, inventory: Inventory, to: Argument) -> str:
    """The command that converts a checkpoint, with a cast of dtypes that the target lacks; empty if it would fail."""
    from ckptmove.conversion.remap.options import with_options
    from ckptmove.findings.trials import dry_run, is_certain
    from ckptmove.moves import MoveRequest

    for options in ([to], [to, Argument("cast", True)]):
        is_possible = is_certain(inventory, options)
        if not is_possible and not isinstance(request.path, Address):  # a trial would read a URL again
            is_possible = dry_run(request.path, with_options(MoveRequest(None), options), request.limits) is not None
        if is_possible:
            return " ".join(["ckptmove convert", quoted(inventory.path), *(one.in_shell for one in options)])
    return ""


def after_conversion(answer: ConvertAnswer) -> Iterator[str]:
    """How to load the new file, and the command that verifies it; nothing if no file was written.

    ``verify`` needs the ``--keep`` of the conversion too.
    """
    result = answer.result
    if result.output is None:
        return
    request = result.plan.request
    targets = (request.to, *(target for _, target in request.mapping))
    # Other formats hold no optimizer, or torch.load does not read them. A note names what weights_only mode refuses.
    is_loadable = facts_of(result.container).is_torch_save and not result.is_refused
    if is_loadable and any(target is not None and is_accelerator(target) for target in targets):
        # map_location would move the RNG states and step counters again, which the conversion has just fixed.
        yield f"load it without map_location: {sentence(f'torch.load({result.output!r}, weights_only=True)')}"
    command = _after_moving(answer, result.output)
    if command:
        yield f"next: {sentence(command)}"


def _after_moving(answer: ConvertAnswer, output: str) -> str:
    request = answer.result.plan.request
    unmatched = {(one.option, one.glob) for one in answer.result.unmatched}
    kept = [glob for glob in request.keep if ("keep", glob) not in unmatched]
    options = [word for glob in kept for word in ("--keep", glob)]
    verify = ["ckptmove", "verify", output]
    against = []
    # What was left out or renamed has no counterpart, and what --verify has compared needs no other proof.
    is_whole = request.remap._replace(strip_prefix=None, add_prefix="", compact=False, plain=False, dtype=()) == Remap()
    is_changed = request.remap != Remap() or bool(answer.result.plan.format)
    if is_changed and is_whole and not answer.result.in_place and answer.result.verified is None:
        # verify reads local originals only, and one that holds the new file is another checkpoint now
        original = answer.request.path
        is_lost = isinstance(original, Address) or Path(output).resolve().is_relative_to(Path(original).resolve())
        against = [] if is_lost else ["--against", original]
    if request.to and all(
        target == request.to for source, target in request.mapping if ("map", source) not in unmatched
    ):
        return command_line([*verify, "--to", request.to, *options, *against])
    from ckptmove.api.inspection import InspectRequest, inspect_checkpoint

    # Tensors that no mapping matches have stayed on their device: only the new file shows which one.
    try:
        inspection = inspect_checkpoint(InspectRequest(output, limits=answer.request.limits))
    except CkptMoveError:
        return ""  # the file was removed meanwhile: the conversion has succeeded all the same
    if _may_resume(inspection):
        return command_line([*verify, *options, *against])
    return command_line(["ckptmove", "inspect", output])  # it shows what is wrong


def _may_resume(inspection: Inspection) -> bool:
    """Whether ``verify`` takes the device of the model as its target, and no finding fails it."""
    from ckptmove.findings.context import Context, target_device

    try:
        parse_target(target_device(inspection.inventory, Context()) or "cpu")
    except UsageError:  # the tag in the file is not a valid target
        return False
    return all(finding.severity is not Severity.ERROR for finding in inspection.findings)

"""The command ``inspect``: its request, its result, and the way from one to the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.api.figures import Expectation, shares
from ckptmove.api.shown import Shown
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.checkpoint.summary import CheckpointSummary, summarize
from ckptmove.findings.context import Context
from ckptmove.findings.registry import find_all
from ckptmove.findings.trials import Source
from ckptmove.io.cores import cores
from ckptmove.limits import Limits
from ckptmove.model import OneLine, fails_run
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.collector import collector_paused
from ckptmove.text import amount, size
from ckptmove.torch_facts.devices import NO_DEVICE, parse_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api.document import Json
    from ckptmove.checkpoint.inventory.outline import OutlineLine
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.errors import LimitExceeded, UnreadableInput
    from ckptmove.findings.fit import Fit
    from ckptmove.io.contracts import Progress, Traffic
    from ckptmove.io.walk import WalkedFile
    from ckptmove.model import Finding, Inventory, TensorRecord
    from ckptmove.moves import MovePlan


class InspectRequest(NamedTuple):
    """The options of :func:`ckptmove.inspect`, with devices and paths as text; its arguments are described there."""

    path: str
    target: str | None = None
    expect: str | None = None
    device_count: int | None = None
    fit: str | None = None
    check: bool = False
    outline: bool = False
    keep_going: bool = False
    jobs: int | None = None
    limits: Limits = Limits()
    #: the files of a directory that belong to the checkpoint, as a search has found them; None for all.
    members: Sequence[WalkedFile] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(OneLine, Shown):
    """The result of ``inspect``.

    Attributes:
        inventory: content of the checkpoint.
        findings: problems of the checkpoint.
        outline: the tree, with ``outline=True``.
        plan: what ``convert`` would change for the device of ``expect``, or None.
        unchecked: with ``check=True``, paths of files that have no CRCs to compare.
        unreadable: errors of the files of a directory or an archive that cannot be read and were left out.
        expectation: the tensors that are not on the device of ``expect``, or None.
        fit: the memory of a training on the devices of ``fit``, or None.
        traffic: requests for a checkpoint at a URL, and the bytes that they read; None for a local one.
        summary: parameters, dtypes, epoch, step, learning rates and optimizers.
        pairings: parameters of each optimizer, matched with the tensors of the model.
    """

    inventory: Inventory
    findings: tuple[Finding, ...]
    outline: tuple[OutlineLine, ...] = ()
    plan: MovePlan | None = None
    unchecked: tuple[str, ...] = ()
    unreadable: tuple[UnreadableInput | LimitExceeded, ...] = ()
    expectation: Expectation | None = None
    fit: Fit | None = None
    traffic: Traffic | None = None
    summary: CheckpointSummary = field(default_factory=CheckpointSummary)
    pairings: tuple[Pairing, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Number of elements of the model's parameters: :class:`ckptmove.checkpoint.summary.CheckpointSummary`."""
        return self.summary.parameters

    @property
    def ok(self) -> bool:
        """Whether the command would exit with 0: no error was found, and every file was readable."""
        return not (self.fails(strict=False) or self.unreadable)

    @property
    def tensors(self) -> tuple[TensorRecord, ...]:
        """Its tensors, in the order of the file."""
        return self.inventory.tensors

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of its tensors, in the order of the file."""
        return tuple(dict.fromkeys(tensor.device for tensor in self.inventory.tensors))

    def fails(self, *, strict: bool) -> bool:
        """Whether findings fail it, with ``strict`` warnings too, or ``expect`` or ``fit`` is not met."""
        is_misplaced = self.expectation is not None and bool(self.expectation.misplaced)
        is_large = self.fit is not None and not self.fit.fits
        return fails_run(self.findings, strict=strict) or is_misplaced or is_large

    def to_dict(self) -> Json:
        """The document of ``ckptmove inspect --json``."""
        from ckptmove.api.document import checkpoint, envelope
        from ckptmove.api.failures import failure_of

        failures = [failure_of(error) for error in self.unreadable]
        code = max([1 if self.fails(strict=False) else 0, *(failure.exit_code for failure in failures)])
        entry = checkpoint(
            self.inventory,
            self.findings,
            tensors=self.inventory.tensors,
            summary=self.summary,
            pairings=self.pairings,
            expectation=self.expectation,
            fit=self.fit,
            unchecked=self.unchecked,
            traffic=self.traffic,
        )
        return envelope("inspect", code, failures) | {"checkpoints": [entry]}

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        """The findings; without any, the tensors by device and role."""
        if self.findings:
            rows = [(one.code, one.severity.value, one.message, one.fix) for one in self.findings]
            return ("code", "severity", "message", "fix"), rows
        found = shares(self.inventory.tensors)
        rows = [(one.device, one.role, f"{one.tensors:,}", size(one.nbytes)) for one in found]
        return ("device", "role", "tensors", "size"), rows

    def __str__(self) -> str:
        """The path, the number of tensors and the codes of findings, in one line."""
        held, codes = self.inventory, ", ".join(dict.fromkeys(finding.code for finding in self.findings))
        return f"{held.path}: {amount(len(held.tensors), 'tensor')}, {f'findings {codes}' if codes else 'no findings'}"


@collector_paused()
def inspect_checkpoint(request: InspectRequest, progress: Progress | None = None) -> Inspection:
    """Run a request of :func:`inspect`."""
    target = request.target if request.target is not None else request.expect
    context = Context(parse_target(target) if target is not None else None, request.device_count)
    with open_checkpoint(
        request.path,
        request.limits,
        # A plan needs the sites of the storages.
        tree="edit" if request.outline or request.expect is not None else "inventory",
        keep_going=request.keep_going and request.fit is None,  # it would leave out a part of the training
        check=request.check,
        jobs=request.jobs or (cores() if request.check else 1),
        outline=request.outline,
        progress=progress,
        members=request.members,
    ) as checkpoint:
        unchecked = checkpoint.without_checksums if request.check else ()
        summary = summarize(checkpoint)
        inventory = checkpoint.inventory
        pairings = pair_all(inventory)
        source = Source(request.path, checkpoint, request.limits)
        findings = find_all(inventory, context._replace(pairings=pairings, source=source))
    plan: MovePlan | None = None
    expectation: Expectation | None = None
    if request.expect is not None:
        from ckptmove.conversion.plan import plan_for

        plan = plan_for(inventory, request.expect)
        unplaced = sum(tensor.device == NO_DEVICE for tensor in inventory.tensors)
        expectation = Expectation(request.expect, plan.edits, unplaced)
    fit: Fit | None = None
    if request.fit is not None:
        from ckptmove.findings.fit import find_fit, parse_fit

        fit = find_fit(inventory, pairings, parse_fit(request.fit))
    return Inspection(
        inventory=inventory,
        findings=findings,
        outline=checkpoint.outline,
        plan=plan,
        unchecked=unchecked,
        unreadable=checkpoint.unreadable,
        expectation=expectation,
        fit=fit,
        summary=summary,
        pairings=pairings,
        traffic=checkpoint.traffic,
    )

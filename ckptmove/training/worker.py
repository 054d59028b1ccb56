"""Main function of the child process, which makes all checks that need torch.

Its standard output carries only its answers: one JSON document on each line, written as soon as it is known.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckptmove.errors import CaseUnusable, OutOfMemory, UsageError
from ckptmove.proof.checks import failed
from ckptmove.proof.codec import loads
from ckptmove.proof.opened import open_files
from ckptmove.proof.original.against import Comparison, Sides
from ckptmove.proof.place import find_site
from ckptmove.proof.processes.group import Follower, Leader, start_others
from ckptmove.proof.processes.memory import limit_memory, memory_hint, with_hint
from ckptmove.proof.processes.messages import Message
from ckptmove.proof.processes.pipes import Pipes
from ckptmove.proof.processes.shares import ONE_PROCESS, share
from ckptmove.proof.processes.uncompiled import torch_for
from ckptmove.proof.request import VerifyRequest
from ckptmove.proof.restored.generators import refused_states
from ckptmove.proof.restored.loaded import LoadedFiles
from ckptmove.proof.restored.numbers import NumbersTally
from ckptmove.proof.restored.survey import survey
from ckptmove.proof.sampling import Sample
from ckptmove.proof.step.counters import CounterFaults, check_counters
from ckptmove.proof.step.optimizer_class import optimizer_class
from ckptmove.proof.step.resume import Bench, resume
from ckptmove.proof.tensors.stored import StoredTensors
from ckptmove.text import spelled, spelled_for_python
from ckptmove.torch_facts.optimizers import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.opened import Opened
    from ckptmove.proof.original.against import OriginalTensors
    from ckptmove.proof.processes.child import Child
    from ckptmove.proof.processes.shares import ProcessGroup, Share

    Emit = Callable[[Message], None]


def main() -> None:
    """Answer the request in the last command-line argument."""
    work(loads(VerifyRequest, sys.argv[-1]))


def work(request: VerifyRequest, opened: Opened | None = None) -> None:
    """Answer a request on standard output.

    Args:
        opened: the files, if this process is a fork of one that has read them.
    """
    is_limited = limit_memory(request)
    with ExitStack() as stack, spelled_for_python(request.in_python), torch_for(request):
        try:
            opened = opened or stack.enter_context(open_files(request))
            others: list[Child] = []
            if request.rank == 0 and find_site(request.to or "cpu").mode != "real":  # one process uses an accelerator
                request, others = start_others(request, stack.enter_context(ExitStack()))
            _answer(request, opened, others, is_limited=is_limited)
        except (MemoryError, OutOfMemory) as error:
            # The parent reports the last line of standard error.
            raise MemoryError(memory_hint() if is_limited else error) from error


def _answer(request: VerifyRequest, opened: Opened, others: Sequence[Child], *, is_limited: bool) -> None:
    pipes = Pipes()

    def emit(message: Message) -> None:
        pipes.tell(with_hint(message) if is_limited else message)

    with ExitStack() as stack:
        try:
            group: ProcessGroup = Follower(request, emit) if request.rank else ONE_PROCESS
            run(request, emit, stack.enter_context(Leader(others, emit)) if others else group, opened)
        except UsageError as error:
            emit(Message(refusal=spelled(error.message)))


def run(request: VerifyRequest, emit: Emit, group: ProcessGroup = ONE_PROCESS, opened: Opened | None = None) -> None:
    """Make every check that needs torch.

    Args:
        emit: called with the device mode, and with each finding and check in order.
        group: the processes that call this function together. Each checks one share of the checkpoint, and that of rank
            0 emits the results of all.
        opened: the files; None to open them.
    """
    site = find_site(request.to or "cpu")
    if group.rank == 0:
        emit(Message(mode=site.mode))
    if request.optimizer is not None and request.optimizer not in BY_NAME:
        emit(Message(imports=request.optimizer))
        optimizer_class(request.optimizer)
        emit(Message(imports=""))
    with ExitStack() as stack:
        opened = opened or stack.enter_context(open_files(request))
        checkpoint, source, _, pairings, sample = opened
        inventory = checkpoint.inventory
        stored = stack.enter_context(StoredTensors(checkpoint.parts))
        own = share(checkpoint, pairings, group.rank, group.size) if group.size > 1 else None
        loaded = LoadedFiles(checkpoint.parts, stored, sample=sample, share=own)
        counters = check_counters(inventory, stored) if group.rank == 0 else CounterFaults()
        numbers = NumbersTally.of(inventory, pairings, counters)
        restore = survey(inventory, stored, loaded, numbers, sample, own, group)
        refused = refused_states(inventory, stored)
        if refused and restore.status != "failed":
            restore = failed("restore", refused.failures("refused by torch's generators: "), **dict(restore.evidence))
        original: OriginalTensors | None = None
        if source is not None:
            sides = Sides.of(checkpoint, loaded, stored, source, request.limits, stack)
            original, restore = _with_original(restore, sides, sample or own, group)
        checkpoint.require_unchanged()  # a file may have been replaced by another one of its name
        bench = Bench(request, site, checkpoint, stored, loaded, original, pairings, sample, own)
        if group.rank > 0:
            resume(bench, group)
            return
        for check in (restore, numbers.check(request.ignore)):
            emit(Message(check=_of_sample(check, sample)))
        for finding in numbers.findings():
            emit(Message(finding=finding))
        for check in resume(bench, group):
            emit(Message(check=_of_sample(check, sample)))
        if request.runs_training:
            _emit_training(bench, emit)


def _emit_training(bench: Bench, emit: Emit) -> None:
    from ckptmove.training.code.entrance import edited_sources  # for --case and --script only

    def answer(check: CheckResult) -> None:
        emit(Message(check=check))

    request = bench.request
    try:
        with edited_sources(request.edits):
            if request.case is not None:
                from ckptmove.training.case.check import check_case

                answer(check_case(bench, request.case))
            if request.script is not None:
                from ckptmove.training.script.check import check_script

                answer(check_script(bench, request.script, request.script_args, answer))
    except CaseUnusable as error:
        emit(Message(unusable=error.message.removeprefix("--case: ")))


def _of_sample(check: CheckResult, sample: Sample | None) -> CheckResult:
    """Add the size of the sample to a check that passed."""
    if sample is None or sample.size.is_all or check.status != "passed":
        return check
    part = sample.size.of_all_tensors if check.name in {"restore", "numbers"} else sample.size.of_all_parameters
    return check._replace(detail=f"{check.detail}; a sample: {part}")


def _with_original(
    restore: CheckResult, sides: Sides, part: Sample | Share | None, group: ProcessGroup
) -> tuple[OriginalTensors | None, CheckResult]:
    """Compare a checkpoint with its original.

    Returns:
        The tensors of the original, or None if some have no counterpart; and the ``restore`` check with the comparison.
    """
    comparison = Comparison(sides)
    comparison.compare(None if part is None else part.names, is_first=group.rank == 0)
    tally, against = comparison.tally, sides.original.path
    group.join(tally)
    sides.original.require_unchanged()
    tensors = comparison.tensors()
    evidence = (*restore.evidence, ("against", against), ("changed", tally.lost.count), ("unseen", tally.unseen.count))
    evidence += (("not_shown", tally.unseen.failures()),) if tally.unseen else ()
    if restore.status == "failed":
        return tensors, restore._replace(evidence=evidence)
    if tally.lost:
        return tensors, failed("restore", tally.lost.failures(f"differs from {against}: "), **dict(evidence))
    outside = " except the bits of tensors outside the sample"
    unseen = outside if isinstance(part, Sample) and not part.size.is_all else ""
    detail = f"{restore.detail}; {comparison.summary(unseen)}"
    return tensors, restore._replace(detail=detail, evidence=evidence)

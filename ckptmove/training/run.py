"""Verify one checkpoint: make the checks without torch, run the child process, and return the verdict."""

from __future__ import annotations

import importlib.util
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from ckptmove.conversion.keep import kept_tensors
from ckptmove.errors import UsageError
from ckptmove.findings.context import Context, devices_needed, known_count, target_device
from ckptmove.findings.registry import find_all
from ckptmove.findings.trials import Source
from ckptmove.formats.facts import facts_of
from ckptmove.io.cores import cores
from ckptmove.moves import MoveRequest
from ckptmove.proof.checks import CASE, CHILD_CHECKS, SCRIPT, skipped
from ckptmove.proof.codec import dumps
from ckptmove.proof.errors import PackageMissing
from ckptmove.proof.evidence import Verdict
from ckptmove.proof.file_checks import check_file, check_structure
from ckptmove.proof.opened import open_files
from ckptmove.proof.placement import check_placement
from ckptmove.proof.processes.child import ONE_THREAD, child, forked, worker_command
from ckptmove.proof.processes.forking import can_fork
from ckptmove.proof.refused_keys import with_refused_keys
from ckptmove.proof.refuted import judge
from ckptmove.proof.step.optimizers import check_override
from ckptmove.text import Argument, Phrase
from ckptmove.torch_facts.devices import parse_target, split
from ckptmove.training.case.name import parse_case, require_script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptmove.io.contracts import Progress
    from ckptmove.model import ArchiveFact, Finding, Inventory
    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.opened import Opened
    from ckptmove.proof.processes.child import Answers, Child
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.proof.sampling import Sample

#: Packages that the child imports.
_PACKAGES: Final = ("torch", "safetensors", "executing", "asttokens")
#: Default of ``--timeout`` for a script, which may never make a step.
_SCRIPT_SECONDS: Final = 300.0
#: Bytes of a checkpoint for each process. Their checks take far longer than a fork; elsewhere than on Linux, where each
#: process imports torch, as long as the import.
_JOB_BYTES: Final = 2**26 if sys.platform == "linux" else 2**29
#: Contents of a checkpoint that the step of its optimizer does not need.
_NOT_STEPPED: Final = ("scheduler", "scaler", "rng")
#: Part of the timeout after which the child reports the line that the script has reached.
LATE_SHARE: Final = 0.95


def verify_checkpoint(
    request: VerifyRequest,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    stage: Callable[[str], None] | None = None,
) -> Verdict:
    """Prove that a checkpoint resumes, or report why it does not.

    Args:
        command: command line of the child process; by default this package's worker.
        progress: called with the bytes checked so far and the total.
        stage: called with the name of the child's next stage.

    Returns:
        The verdict with all checks in order. The step fails if this machine does not have the target and cannot
        simulate it: nothing was proven.
    """
    refuse_request(request)
    cases = tuple(name for name, code in ((CASE, request.case), (SCRIPT, request.script)) if code is not None)
    timeout = _SCRIPT_SECONDS if request.timeout is None and request.script is not None else request.timeout
    # A file that cannot be read is an error of the input: nothing is started.
    with open_files(request) as opened:
        deadline = None if timeout is None else time.time() + timeout * LATE_SHARE
        asked = settled(request, opened.checkpoint.inventory)
        asked = asked._replace(nbytes=opened.nbytes, deadline=deadline, jobs=_jobs(request, opened.nbytes))
        # Importing torch takes seconds; this process compares the CRCs meanwhile.
        with ExitStack() as running:
            started = _start(running, command, asked, opened)
            facts = None if asked.sample else opened.checkpoint.check(progress, asked.jobs or 1)
            findings, here = checks_without_torch(opened, facts, request)
            answers = started.collect(stage, (*CHILD_CHECKS, *cases), timeout)
    answers.require_usable()
    result = verdict(asked, answers, here, findings, opened.sample)
    rest = tuple(part for part in _NOT_STEPPED if part in opened.checkpoint.inventory.contents)
    return replace(result, not_looked_at=("position in the data",) if request.runs_training else rest)


def _jobs(request: VerifyRequest, nbytes: int) -> int:
    """Number of child processes. The user's own training runs in one, which also makes the other checks."""
    if request.runs_training or request.sample is not None:
        return 1
    return max(1, min(request.jobs or cores(), nbytes // _JOB_BYTES))


def _start(running: ExitStack, command: Sequence[str], asked: VerifyRequest, opened: Opened) -> Child:
    """Start the child process: a fork, which has the open files, or else a new one."""
    is_other = bool(command) or asked.runs_own_code or "torch" in sys.modules
    if not is_other and can_fork():

        def load() -> Callable[[], None]:
            from ckptmove.training.worker import work

            return partial(work, asked, opened)

        with suppress(OSError):  # the system has no room for a copy of this process
            return running.enter_context(forked(load))
    variables = None if asked.runs_own_code else ONE_THREAD
    return running.enter_context(child(command or worker_command(), dumps(asked), variables))


def refuse_request(request: VerifyRequest) -> None:
    """Raise for options that no checkpoint could fulfil."""
    missing = next((package for package in _PACKAGES if importlib.util.find_spec(package) is None), None)
    if missing is not None:
        raise PackageMissing(missing)
    if request.timeout is not None and not request.timeout > 0:
        raise UsageError(
            Phrase(Argument("timeout"), f" takes a number of seconds greater than 0, not {request.timeout:g}")
        )
    for option, number, what in (("sample", request.sample, "parameters"), ("jobs", request.jobs, "processes")):
        if number is not None and number < 1:
            raise UsageError(Phrase(Argument(option), f" takes a number of {what}, at least 1, not {number}"))
    check_override(request.optimizer)
    if request.case is not None:
        parse_case(request.case)
    if request.script is not None:
        require_script(request.script)
    if request.case is not None and request.script is not None:
        raise UsageError(
            Phrase(Argument("case"), " and ", Argument("script"), " both make a step of your training: choose one")
        )


def checks_without_torch(
    opened: Opened, facts: tuple[ArchiveFact, ...] | None, asked: VerifyRequest
) -> tuple[tuple[Finding, ...], tuple[CheckResult, ...]]:
    """Make the checks of this process, while the child imports torch.

    Args:
        facts: facts about its bytes; None if they were not compared with their CRCs.
        asked: the options; without a target, the devices in the file are taken as correct.
    """
    checkpoint, inventory = opened.checkpoint, opened.checkpoint.inventory
    target = None if asked.to is None else parse_target(asked.to)
    context = Context(
        target=target,
        device_count=asked.devices,
        kept=kept_tensors(inventory, asked.keep),
        pairings=tuple(pairing for _, pairing in opened.pairings) if opened.original is None else (),
        source=Source(asked.path, checkpoint, asked.limits),
    )
    findings = tuple(
        one
        for one in find_all(inventory if facts is None else replace(inventory, facts=facts), context)
        if one.code not in asked.ignore
    )
    placed = [part.inventory for part in checkpoint.parts if part.inventory.storages or part.inventory.mentions]
    placed = placed or [checkpoint.parts[0].inventory]
    without_devices = [facts_of(one.container).why_no_devices for one in placed]
    checks = (
        check_file(checkpoint.parts, is_checked=facts is not None),
        skipped("placement", without_devices[0])
        if all(without_devices)
        else check_placement(
            inventory,
            MoveRequest(to=_target(asked, inventory), keep=asked.keep),
            asked.devices,
            as_saved=target is None,
        ),
        check_structure(inventory, opened.pairings),
    )
    return findings, checks


def verdict(
    asked: VerifyRequest,
    answers: Answers,
    here: tuple[CheckResult, ...],
    findings: tuple[Finding, ...],
    sample: Sample | None = None,
) -> Verdict:
    """The verdict of all checks.

    Args:
        here: the checks that this process has made.
        findings: findings of the file.
    """
    target = asked.to or "cpu"
    found = {check.name: check for check in (*here, *answers.checks.values())}
    runs = [found[name] for name in (CASE, SCRIPT) if name in found]
    checks, findings = judge(found, with_refused_keys(findings, runs), runs)
    passed = all(check.status != "failed" for check in checks)
    # There is no state to resume from, and all was compared with the original.
    is_equal = asked.against is not None and any(dict(check.evidence).get("optimizers") == 0 for check in checks)
    has_unseen = any(dict(check.evidence).get("unseen") for check in checks)
    return Verdict(
        path=asked.path,
        target=target,
        mode=answers.mode or ("cpu" if target == "cpu" else "simulated"),
        passed=passed,
        proven=passed
        and (_is_proven(checks) or is_equal)
        and not has_unseen
        and (sample is None or sample.size.is_all),
        checks=checks,
        findings=(*findings, *(one for one in answers.findings if one.code not in asked.ignore)),
        sample=None if sample is None else sample.size,
    )


def _is_proven(checks: Sequence[CheckResult]) -> bool:
    """Whether every step made proves the resume.

    A case replaces a step that was skipped. A script replaces any step: all that it restored was compared.
    """
    proofs = {check.name: dict(check.evidence).get("proven") is True for check in checks}
    if SCRIPT in proofs:
        return proofs[SCRIPT]
    is_skipped = any(check.name == "step" and check.status == "skipped" for check in checks)
    return proofs[CASE] and (proofs["step"] or is_skipped) if CASE in proofs else proofs["step"]


def _target(request: VerifyRequest, inventory: Inventory) -> str:
    return parse_target(request.to if request.to is not None else target_device(inventory, Context()) or "cpu")


def settled(request: VerifyRequest, inventory: Inventory) -> VerifyRequest:
    """The request with target and number of devices filled in: those of the machine that the findings assume (D103)."""
    target = _target(request, inventory)
    named = Context(None if request.to is None else target, request.devices)
    devices = known_count(split(target)[0], named)
    if devices is None:
        devices = devices_needed((target, *(tensor.device for tensor in inventory.tensors)))
    return request._replace(to=target, devices=devices)

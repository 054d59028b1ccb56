"""Run the checks of ``verify`` that need no torch on one file in memory.

The invariant is that of the harness. In addition, a step has at most the parameters and the state that the file lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.api import document
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.cli.render import github, report, verification
from ckptmove.proof.checks import CHECKS, skipped
from ckptmove.proof.codec import dumps, loads
from ckptmove.proof.evidence import Verdict
from ckptmove.proof.file_checks import fail_on_findings
from ckptmove.proof.opened import Opened
from ckptmove.proof.request import VerifyRequest
from ckptmove.proof.step.entries import leaves, nested_state
from ckptmove.proof.step.optimizers import choose_optimizer
from ckptmove.proof.step.tensor_sizes import limit_tensor_sizes
from ckptmove.proof.tensors.pieces import batches, select
from ckptmove.training.run import checks_without_torch
from fuzz.harness import LIMITS, PAGE, opened, require, require_printable

if TYPE_CHECKING:
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.model import ArchiveFact

_REQUESTS: Final = (
    VerifyRequest(path="input", to="cuda:0", devices=1, limits=LIMITS),
    VerifyRequest(path="input", to="mps", keep=("model*",), limits=LIMITS),
    VerifyRequest(path="input", to="cpu", ignore=("O204",), limits=LIMITS),
)


def examine_resume(data: bytes) -> None:
    """Run every check that needs no torch on a file, for three devices, and plan the steps."""
    whole = opened(data)
    limit_tensor_sizes(whole, LIMITS)
    facts = whole.check()
    pairings = list(zip(whole.inventory.optimizers, pair_all(whole.inventory), strict=True))
    for request in _REQUESTS:
        _show(Opened(whole, None, whole.nbytes, pairings, None), facts, loads(VerifyRequest, dumps(request)))
    _plan_steps(whole)


def _show(whole: Opened, facts: tuple[ArchiveFact, ...], request: VerifyRequest) -> None:
    """Render the output of ``verify`` in every format, with the checks of torch skipped."""
    findings, here = checks_without_torch(whole, facts, request)
    made = {check.name: check for check in here}
    checks = tuple(fail_on_findings(made.get(name, skipped(name, "it needs torch")), findings) for name in CHECKS)
    result = Verdict(
        path="input", target=request.to or "cpu", mode="cpu", passed=False, proven=False, checks=checks,
        findings=findings,
    )  # fmt: skip
    require_printable(verification.verification_lines(PAGE, result, verbose=True))
    require_printable(github.annotations_of(report.verified(result)))
    require_printable([document.dumps(document.result_to_json(result))])


def _plan_steps(whole: OpenCheckpoint) -> None:
    """Plan the steps; check that they have at most the parameters and the state that the file lists."""
    inventory = whole.inventory
    for optimizer, pairing in zip(inventory.optimizers, pair_all(inventory), strict=True):
        name = choose_optimizer(optimizer, None).name or "SGD"
        listed = sum(len(group.params) for group in optimizer.groups)
        named = 0
        for batch in batches(iter(select(optimizer, pairing.by_key(), name).pieces), together=False):
            named += sum(piece.offset == 0 for piece in batch)
        require(named <= listed, "a step has more parameters than the groups list")
        for entry in optimizer.state:
            state = nested_state(entry, {key: record.name for key, record in entry.tensors})
            require(
                len(leaves(state)) <= len(entry.tensors) + len(entry.scalars),
                "a step has state that the file does not have",
            )

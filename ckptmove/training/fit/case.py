"""``verify --fit 64x80GiB --case train.py:case``: the memory of a case on one rank, measured without values."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.opening import open_checkpoint
from ckptmove.checkpoint.summary import counted_parameters
from ckptmove.errors import UsageError
from ckptmove.proof.checks import failed, passed
from ckptmove.proof.evidence import Fit
from ckptmove.proof.processes.child import child, worker_command
from ckptmove.text import Argument, size
from ckptmove.training.fit.sizes import (
    FIT,
    has_whole_parameters,
    listed_sizes,
    parse_fit,
    refuse_others,
    verdict_of_fit,
    where,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from ckptmove.proof.evidence import CheckResult, Verdict
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.training.fit.sizes import Devices

#: Most ranks. ``fully_shard`` takes time in proportion to them, for each small parameter.
_MOST_RANKS: Final = 1 << 16


def verify_fit_of_case(
    request: VerifyRequest, devices: str, command: Sequence[str] = (), stage: Callable[[str], None] | None = None
) -> Verdict:
    """Make the check *fit* with the sizes of a case, which runs as the first and as the last rank.

    Args:
        request: the options, with a case.
        devices: the value of ``--fit``.
        command: command line of the child process; by default this package's worker.
        stage: called with the name of the child's next stage.

    Raises:
        TorchBroken: if torch cannot be imported.
        UsageError: if the value has another form, or is combined with an option for the other checks; if the case
            cannot be built, or its optimizer stepped, with tensors that have no values.
        UnreadableInput: if the checkpoint cannot be read, is damaged, or is not a checkpoint.
        LimitExceeded: if it needs more than the limits allow.
    """
    refuse_others(request)
    wanted = parse_fit(devices)
    if wanted.ranks > _MOST_RANKS:
        raise UsageError(
            f"{Argument('fit')} with {Argument('case')} takes at most {_MOST_RANKS:,} devices, not {wanted.ranks:,}"
        )
    stored = _stored_elements(request)
    with child(command or worker_command(), request.to_json()) as started:
        answers = started.collect(stage, (FIT,), request.timeout)
    answers.require_usable()
    check, fit = answers.checks[FIT], None
    if check.status == "passed":
        fit = _figures(answers.facts, wanted)
        check = _check(fit, answers.facts, stored)
    return verdict_of_fit(request, devices, check, fit)


def _stored_elements(request: VerifyRequest) -> int | None:
    """Number of elements of the parameters in the checkpoint; None if their shapes are not in it."""
    with open_checkpoint(request.path, request.limits, exclude=request.exclude) as checkpoint:
        inventory = checkpoint.inventory
        return (
            sum(prod(one.shape) for one in counted_parameters(inventory)) if has_whole_parameters(inventory) else None
        )


def _figures(facts: Mapping[str, Any], devices: Devices) -> Fit:
    sizes = facts["sizes"]
    return Fit(
        ranks=devices.ranks,
        capacity=devices.capacity,
        **sizes,
        smallest=facts["smallest"],
        free=devices.capacity - sizes["total"],
        largest_parameter=facts["largest_parameter"],
        activations=facts["activations"],
    )


def _check(fit: Fit, facts: Mapping[str, Any], stored: int | None) -> CheckResult:
    rank = facts["rank"]
    parts = [f"{size(fit.total)} of {size(fit.capacity)} {where(fit, f'rank {rank}')} ({listed_sizes(fit)})"]
    gathered = fit.largest_parameter if facts["is_sharded"] and fit.ranks > 1 else 0
    if fit.activations is None:
        parts.append(f"activations not estimated: {facts['why_none']}")
        largest = f"{facts['largest_name']}, the largest gathered parameter"
        after = f", after {size(gathered)} for {largest}" if gathered else ""
        left, rest = fit.free - gathered, f" for activations{after}"
    else:
        parts.append(f"about {size(fit.activations)} for activations and gathered parameters of the batch, an estimate")
        left, rest = fit.free - fit.activations, ""
    parts.append(f"{size(left)} left{rest}" if left >= 0 else f"{size(-left)} too much")
    if fit.ranks > 1 and not facts["is_sharded"]:
        parts.append("the case does not shard its model: each rank has all of it")
    # A state_dict does not mark buffers, so they may count among the parameters of the checkpoint.
    is_other = stored is not None and not 0 <= stored - facts["elements"] <= facts["buffer_elements"]
    detail, figures = "; ".join(parts), {**fit._asdict(), "rank": rank, "why_no_activations": facts["why_none"]}
    if is_other:
        other = f"the case has {facts['elements']:,} elements in its parameters, the checkpoint {stored:,}"
        return failed(FIT, [other, detail], **figures, other_model=True)
    return passed(FIT, detail, **figures) if left >= 0 else failed(FIT, detail, **figures)

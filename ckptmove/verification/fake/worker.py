"""Measure a case for ``--fit``, in the child process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses import fake_tensor

from ckptmove.errors import CaseUnusable, UsageError
from ckptmove.verification.case.check import Attempt, called
from ckptmove.verification.case.name import parse_case
from ckptmove.verification.case.user_code import Entrance
from ckptmove.verification.checks import check_to_json, passed
from ckptmove.verification.fake.group import on_fake_rank
from ckptmove.verification.fake.training import Training
from ckptmove.verification.fit import FIT, parse_fit

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.verification.request import VerifyRequest

    Emit = Callable[[dict[str, object]], None]

_SHOWN: Final = 200
#: Errors of operations that need values, and how the report names them.
_NEEDS_VALUES: Final = (
    (fake_tensor.DataDependentOutputException, "a value of a tensor is read"),
    (fake_tensor.DynamicOutputShapeException, "the shape of a result depends on values"),
    (fake_tensor.UnsupportedOperatorException, "torch cannot run an operation without values"),
    (fake_tensor.UnsupportedFakeTensorException, "torch cannot make a tensor without values"),
)
_CPU: Final = "; the device that the function is given is the cpu: use that"
_DDP: Final = "; leave out DistributedDataParallel: each rank has the whole model without it too"


def measure_case(request: VerifyRequest, emit: Emit) -> None:
    """Measure the case of a request on the first rank, and its sizes on the last.

    Args:
        request: the options, with a case and ``fit``.
        emit: called with the figures.
    """
    emit({"mode": "cpu"})
    typed, ranks = request.case or "", parse_fit(request.fit or "").ranks
    try:
        facts = _on_first(request, typed, ranks)
        trained = facts.pop("trained")
        facts["smallest"] = facts["sizes"]["total"] if ranks == 1 else _on_last(request, typed, ranks, trained)
    except CaseUnusable as error:
        emit({"unusable": error.message.removeprefix("--case: ")})
        return
    except UsageError as error:
        emit({"refusal": str(error)})
        return
    emit({"fact": facts})
    emit({"check": check_to_json(passed(FIT, "measured"))})


def _on_first(request: VerifyRequest, typed: str, ranks: int) -> dict[str, Any]:
    entrance = Entrance(parse_case(typed))
    with on_fake_rank(0, ranks):
        training = _build(request, typed, entrance)
        attempt, found = Attempt(), list[int]()
        with attempt:
            found.append(training.run_batch())
        _step(training, training.trained if found else None, entrance)
        sizes = training.sizes()
        return {
            "sizes": {**sizes._asdict(), "total": sizes.total},
            "activations": found[0] if found else None,
            "why_none": "" if attempt.error is None else reason(attempt.error, entrance),
            "largest_parameter": training.largest_parameter,
            "elements": training.elements,
            "buffer_elements": training.buffer_elements,
            "is_sharded": training.is_sharded,
            "trained": training.trained,
        }


def _on_last(request: VerifyRequest, typed: str, ranks: int, trained: frozenset[int]) -> int:
    """Bytes on the last rank."""
    entrance = Entrance(parse_case(typed))
    with on_fake_rank(ranks - 1, ranks):
        training = _build(request, typed, entrance)
        _step(training, trained, entrance)
        return training.sizes().total


def _build(request: VerifyRequest, typed: str, entrance: Entrance) -> Training:
    attempt, made = Attempt(), list[Training]()
    device = torch.device("cpu")
    torch.manual_seed(request.seed)
    with attempt:
        made.append(Training(called(entrance.load(), device, typed), device))
    if attempt.error is not None:
        why = reason(attempt.error, entrance)
        raise UsageError(f"--fit calls {typed} with tensors that have shapes and no values: {why}")
    return made[0]


def _step(training: Training, trained: frozenset[int] | None, entrance: Entrance) -> None:
    attempt = Attempt()
    with attempt:
        training.step(trained)
    if attempt.error is not None:
        raise UsageError(f"--fit steps optimizers without values: {reason(attempt.error, entrance)}")


def reason(error: BaseException, entrance: Entrance) -> str:
    """An exception of code that ran without values, in one line."""
    text = " ".join(str(error).split())[:_SHOWN].rstrip(".")
    named = next((f"{what} ({text})" for kind, what in _NEEDS_VALUES if isinstance(error, kind)), "")
    named = named or f"{type(error).__name__}: {text}"
    frames = entrance.frames(error.__traceback__)
    line = f", at {frames[-1].spot.line}: {frames[-1].spot.line.source}" if frames else ""
    hint = _CPU if "cuda" in text.lower() else _DDP if "data is not allocated yet" in text else ""
    return f"{named}{line}{hint}"

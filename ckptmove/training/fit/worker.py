"""Measure a case for ``--fit``, in the child process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses import fake_tensor

from ckptmove.errors import CaseUnusable, UsageError
from ckptmove.proof.checks import check_to_json, passed
from ckptmove.text import Argument, spelled
from ckptmove.training.case.check import Attempt, called
from ckptmove.training.case.name import parse_case
from ckptmove.training.code.entrance import Entrance
from ckptmove.training.fit.fake_group import on_fake_rank
from ckptmove.training.fit.sizes import FIT, parse_fit
from ckptmove.training.fit.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.proof.request import VerifyRequest

    Emit = Callable[[dict[str, object]], None]

_SHOWN: Final = 200
#: Errors of operations that need values, and how the report names them.
_NEEDS_VALUES: Final = (
    (fake_tensor.DataDependentOutputException, "it reads a value of a tensor"),
    (fake_tensor.DynamicOutputShapeException, "the shape of a result depends on values"),
    (fake_tensor.UnsupportedOperatorException, "torch cannot run an operation without values"),
    (fake_tensor.UnsupportedFakeTensorException, "torch cannot make a tensor without values"),
)
#: Operations, and the Python of users that calls them.
_SPELLED: Final = {"aten._local_scalar_dense.default": ".item()"}
_CPU: Final = "; the device that the function is given is the cpu: use that"
_DDP: Final = "; leave out DistributedDataParallel: each rank has the whole model without it too"


def measure_case(request: VerifyRequest, emit: Emit) -> None:
    """Measure the case of a request on the first and on the last rank; emit the figures of the one that needs more."""
    emit({"mode": "cpu"})
    typed, ranks = request.case or "", parse_fit(request.fit or "").ranks
    try:
        found = [_measure(request, typed, rank, ranks) for rank in sorted({0, ranks - 1})]
    except CaseUnusable as error:
        emit({"unusable": error.message.removeprefix("--case: ")})
        return
    except UsageError as error:
        emit({"refusal": spelled(error.message)})
        return
    fullest = max(found, key=lambda one: (one["sizes"]["total"], one["activations"] or 0))
    emit({"fact": {**fullest, "smallest": min(one["sizes"]["total"] for one in found)}})
    emit({"check": check_to_json(passed(FIT, "measured"))})


def _measure(request: VerifyRequest, typed: str, rank: int, ranks: int) -> dict[str, Any]:
    entrance = Entrance(parse_case(typed))
    with on_fake_rank(rank, ranks):
        training = _build(request, typed, entrance)
        batch, step = Attempt(), Attempt()
        activations = None
        with batch:
            activations = training.run_batch()
        if batch.error is not None:
            training.make_gradients()
        with step:
            training.step()
        if step.error is not None:
            raise UsageError(f"{Argument('fit')} steps optimizers without values: {reason(step.error, entrance)}")
        sizes = training.sizes()
        return {
            "rank": rank,
            "sizes": {**sizes._asdict(), "total": sizes.total},
            "activations": activations,
            "why_none": "" if batch.error is None else training.why_no_batch or reason(batch.error, entrance),
            "largest_parameter": training.largest_parameter,
            "largest_name": training.largest_name,
            "elements": training.elements,
            "buffer_elements": training.buffer_elements,
            "is_sharded": training.is_sharded,
        }


def _build(request: VerifyRequest, typed: str, entrance: Entrance) -> Training:
    attempt, made = Attempt(), list[Training]()
    device = torch.device("cpu")
    torch.manual_seed(request.seed)
    with attempt:
        made.append(Training(called(entrance.load(), device, typed), device))
    if attempt.error is not None:
        # Operations that need values raise RuntimeErrors; any other exception is that of the user's own code.
        needs = f"{Argument('fit')} calls {typed} with tensors that have shapes and no values: "
        start = needs if isinstance(attempt.error, RuntimeError) else f"{typed} raises "
        raise UsageError(f"{start}{reason(attempt.error, entrance)}")
    return made[0]


def reason(error: BaseException, entrance: Entrance) -> str:
    """An exception of code that ran without values, in one line."""
    text = " ".join(str(error).split())[:_SHOWN].rstrip(".")
    named = next(
        (f"{what} ({_SPELLED.get(text, text)})" for kind, what in _NEEDS_VALUES if isinstance(error, kind)), ""
    )
    named = named or f"{type(error).__name__}: {text}"
    frames = entrance.frames(error.__traceback__)
    line = f", at {frames[-1].spot.line}: {frames[-1].spot.line.source}" if frames else ""
    hint = _CPU if "cuda" in text.lower() else _DDP if "data is not allocated yet" in text else ""
    return f"{named}{line}{hint}"

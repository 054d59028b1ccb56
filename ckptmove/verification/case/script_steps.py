"""Hooks around the optimizer steps of a training script, also around those that raise an exception."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.text import Argument, amount
from ckptmove.verification.case.blame import line_evidence
from ckptmove.verification.checks import SCRIPT, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ckptmove.verification.case.script_session import Session
    from ckptmove.verification.case.source import Line
    from ckptmove.verification.case.watch import Refusal
    from ckptmove.verification.evidence import CheckResult

    #: Called with an optimizer; the result of the check ends the script, None lets it go on.
    Observe = Callable[[torch.optim.Optimizer], CheckResult | None]
    #: Called with an exception that ended a step; returns the result of the check.
    Explain = Callable[[BaseException], CheckResult]

#: Optimizer steps that a script may make before it loads the checkpoint.
_STEPS_BEFORE: Final = 20
#: Steps that may raise an exception, which the script catches.
_CAUGHT_STEPS: Final = 10


def how_to_resume() -> str:
    """Fix for a script that does not load the checkpoint."""
    return f"pass the checkpoint by the script's own option: {Argument('script_args', '--resume PATH')}"


class Started(NamedTuple):
    """A step that has begun.

    Attributes:
        optimizer: its optimizer.
        frame: the frame that calls the hooks, which runs as long as the step.
        line: the user's line that called it.
    """

    optimizer: torch.optim.Optimizer
    frame: FrameType
    line: Line


class Steps:
    """Hooks around the steps of all optimizers. The step of a subclass may call that of its parent."""

    def __init__(
        self, session: Session, begin: Observe, finish: Observe, explain: Explain, refusals: Sequence[Refusal]
    ) -> None:
        self._session = session
        self._begin = begin
        self._finish = finish
        self._explain = explain
        self._refusals = refusals
        self._open: list[Started] = []
        self._early = 0
        self._caught = 0

    def before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Hook before a step."""
        self._session.raise_if_stopped()
        self.judge_raised()
        is_outer = not self._is_open(optimizer)
        self._open.append(Started(optimizer, sys._getframe(1), self._session.here()))  # the caller
        if not is_outer:
            return
        self._session.stop_if_passed()
        if self._session.loads:
            self._decide(self._begin(optimizer))
        else:
            self._early += 1
            if self._early > _STEPS_BEFORE:
                fault = f"it made {_STEPS_BEFORE} optimizer steps without loading the checkpoint"
                self._session.stop(never_loaded(self._session, fault))

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Hook after a step."""
        self._session.raise_if_stopped()
        self.judge_raised()
        self._open.pop()
        if self._session.loads and not self._is_open(optimizer):
            self._session.raised.pop(id(optimizer), None)
            self._decide(self._finish(optimizer))

    def judge_raised(self) -> None:
        """Judge the steps that raised an exception, which the script caught: no hook is called after them.

        A script may try again, for example with a smaller batch.

        Raises:
            Stopped: if the exception is a fault of the step by itself, or too many steps raised one.
        """
        running = set[FrameType]()
        for frame in sys._current_frames().values():  # of all threads
            one: FrameType | None = frame
            while one is not None:
                running.add(one)
                one = one.f_back
        raised = [one for one in self._open if one.frame not in running]
        self._open = [one for one in self._open if one.frame in running]
        for step in raised if self._session.loads else ():
            error = next((one.error for one in self._refusals if _is_raised_in(step.frame, one.error)), None)
            self._decide(None if error is None else self._explain(error))
            kind = type(step.optimizer).__name__
            fault = (
                f"the step of {kind} raised an exception, which the script caught, at {step.line}: {step.line.source}"
            )
            self._session.raised[id(step.optimizer)] = fault
            self._caught += 1
            if self._caught >= _CAUGHT_STEPS:
                self._session.stop(failed(SCRIPT, fault, proven=False, **line_evidence(step.line)))

    def _is_open(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(one.optimizer is optimizer for one in self._open)

    def _decide(self, check: CheckResult | None) -> None:
        if check is None:
            return
        if check.status == "passed":
            self._session.go_on(check)
        else:
            self._session.stop(check)


def _is_raised_in(frame: FrameType, error: BaseException) -> bool:
    """Whether an exception was raised in a frame, or in one that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame is not frame:
        trace = trace.tb_next
    return trace is not None


def never_loaded(session: Session, fault: str) -> CheckResult:
    """Result for a script that did not load the checkpoint."""
    others = ", ".join(dict.fromkeys(session.others))
    fault += f"; it loaded {others}" if others else ""
    is_named = any(session.is_inside(one.rpartition("=")[2]) for one in session.arguments)
    fault += "; its arguments name the checkpoint, but it never opens it" if is_named else ""
    fix = "" if is_named else how_to_resume()
    return failed(SCRIPT, fault, fix, loaded=list(dict.fromkeys(session.others)), proven=False)


def skipped_by_scaler(session: Session) -> str:
    """Fault of a script whose gradient scaler skipped each step."""
    steps = amount(session.skipped_steps, "step")
    return f"its gradient scaler skipped all {steps} after the load: the gradients, and so the loss, are not finite"

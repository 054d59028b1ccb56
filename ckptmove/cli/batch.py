"""Several checkpoints in one command: every one is worked on, whatever happens to the others.

Never goes on after an error of usage, which would be the same for each of them, or when nobody takes the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptmove.cli.outcome import REFUSED, YES, failure_of, interruption
from ckptmove.cli.render.text import clean
from ckptmove.cli.signals import Terminated
from ckptmove.cli.streams import Format
from ckptmove.errors import CkptMoveError, OutOfMemory, StdoutFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptmove.cli.render.answers import Failure
    from ckptmove.cli.streams import Output


class Batch(NamedTuple):
    """What came of several checkpoints.

    Attributes:
        code: the gravest exit code.
        failures: errors, in the order in which they were met.
        good: how many have the exit code 0.
        is_cut_short: whether an interruption left some of them out.
    """

    code: int
    failures: tuple[Failure, ...]
    good: int
    is_cut_short: bool


def for_each(paths: Sequence[str], work: Callable[[str], tuple[int, Sequence[CkptMoveError]]], out: Output) -> Batch:
    """Work on each path, and say of which ones that was not possible.

    An interruption ends it and is one of its errors, so that what was found until then is not lost.

    Args:
        paths: of checkpoints.
        work: reports on one of them, and returns its exit code and the errors of files in it that it left out.
        out: told of the errors, as they happen.

    Raises:
        UsageError: as ``work``.
        StdoutFailed: as ``work``.
    """
    is_cut_short = False
    codes: list[int] = []
    failures: list[Failure] = []
    for path in paths:
        failed: list[Failure] = []
        code, is_reported = YES, False
        try:
            code, errors = work(path)
            failed, is_reported = [failure_of(error) for error in errors], True
        except (UsageError, StdoutFailed):
            raise
        except CkptMoveError as error:
            failed = [failure_of(one) for one in (error, *error.others)]
        except MemoryError:  # what the work holds is let go with the exception: only then is there room for words
            pass
        except (KeyboardInterrupt, Terminated) as error:
            failed, is_cut_short = [interruption(error)], True
        if not is_reported:
            failed = failed or [failure_of(OutOfMemory(path))]
        codes.append(max([code, *(failure.exit_code for failure in failed)]))
        failures += failed
        for failure in failed:
            out.failure(failure)
        if not (is_reported or is_cut_short) and out.quiet and out.format is Format.HUMAN and len(paths) > 1:
            # Whoever reads a line for each checkpoint misses none.
            out.lines([f"{clean(path)}: {'refused' if codes[-1] == REFUSED else 'unreadable'}"])
        if is_cut_short:
            break
    return Batch(
        code=max(codes, default=YES), failures=tuple(failures), good=codes.count(YES), is_cut_short=is_cut_short
    )


def conclude(batch: Batch, asked: int, word: str, out: Output, *, unproven: int = 0) -> None:
    """Say, below several reports for people, how many of the checkpoints have the exit code 0.

    Args:
        batch: what came of them.
        asked: how many there were.
        word: what such a checkpoint is: ``passed``.
        out: where to say it.
        unproven: how many of those have it only because nothing spoke against it, which is said of them.

    Raises:
        StdoutFailed: stdout does not take it.
    """
    if asked == 1 or out.format is not Format.HUMAN or batch.is_cut_short:
        return
    doubt = f", {unproven:,} of them not proven" if unproven else ""
    line = f"{batch.good:,} of {asked:,} {word}{doubt}"
    if out.quiet:
        out.lines([line])
    else:
        style = "red" if batch.good < asked else "yellow" if unproven else "green"
        out.report([out.page.paint(line, f"bold {style}")])

"""Run a command on several checkpoints: an error of one does not stop the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from ckptmove.cli.outcome import YES, interruption
from ckptmove.cli.render.renderer import Summary
from ckptmove.cli.signals import Terminated
from ckptmove.errors import CkptMoveError, OutOfMemory, StdoutFailed, UsageError
from ckptmove.io.remote.address import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.renderer import Renderer


class _Request(Protocol):
    @property
    def path(self) -> str: ...


_R = TypeVar("_R", bound=_Request)


def for_each(
    command: str,
    requests: Iterable[_R],
    work: Callable[[_R], tuple[int, Sequence[CkptMoveError]]],
    renderer: Renderer,
    total: int,
) -> Summary:
    """Do the work of each request, and write the errors.

    An interruption ends the loop and becomes the last error: the answers before it are kept.

    Args:
        requests: one for each checkpoint. Waiting for the next may be interrupted too.
        work: writes the answer of one request. Returns its exit code, and the errors of files that it left out.
        renderer: writes the errors when they occur.
        total: number of the requests.
    """
    is_complete = True
    highest, good = YES, 0
    failures: list[Failure] = []
    left = iter(requests)
    path = ""
    while is_complete:
        failed: list[Failure] = []
        errors: Sequence[CkptMoveError] = ()
        code, has_answer = YES, False
        try:
            request = next(left, None)
            if request is None:
                break
            path = request.path
            code, errors = work(request)
            has_answer = True
        except CkptMoveError as error:
            if isinstance(error, StdoutFailed) or (isinstance(error, UsageError) and not error.is_of_checkpoint):
                raise
            errors = (error, *error.others)
        except MemoryError:  # the exception's traceback holds the memory: messages are built after it is released
            pass
        except (KeyboardInterrupt, Terminated) as error:
            failed, is_complete = [interruption(error)], False
        if not failed and (errors or not has_answer):
            failed = _failures(errors or [OutOfMemory(path)])
        code = max([code, *(failure.exit_code for failure in failed)])
        highest, good = max(highest, code), good + (code == YES)
        failures += failed
        for failure in failed:
            renderer.failure(failure._replace(checkpoint=redacted(path) if is_complete else None))
        if not has_answer and is_complete and total > 1:
            renderer.no_answer(path, code)
    return Summary(
        command=command,
        exit_code=highest,
        failures=tuple(failures),
        checkpoints=total,
        good=good,
        is_complete=is_complete,
    )


def _failures(errors: Iterable[CkptMoveError]) -> list[Failure]:
    from ckptmove.api.failures import failure_of

    return [failure_of(error) for error in errors]

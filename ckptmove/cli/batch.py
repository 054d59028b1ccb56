"""Several checkpoints in one command: every one is worked on, whatever happens to the others.

Never goes on after a usage error: that would be the same for each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.cli.outcome import failure_of
from ckptmove.errors import CkptMoveError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptmove.cli.streams import Output
    from ckptmove.report.answers import Failure


def for_each(paths: Iterable[str], work: Callable[[str], int], out: Output) -> tuple[int, tuple[Failure, ...]]:
    """Work on each path, and say of which ones that was not possible.

    Args:
        paths: of checkpoints.
        work: reports on one of them and returns its exit code.
        out: told of the errors, as they happen.

    Returns:
        The gravest exit code, and the errors in their order.

    Raises:
        UsageError: as ``work``.
    """
    gravest = 0
    failures: list[Failure] = []
    for path in paths:
        try:
            code = work(path)
        except UsageError:
            raise
        except CkptMoveError as error:
            failure = failure_of(error)
            failures.append(failure)
            out.failure(failure)
            code = failure.exit_code
        gravest = max(gravest, code)
    return gravest, tuple(failures)

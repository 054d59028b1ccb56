"""Make the checks of one verification in several processes: the first one starts the others, and joins the results."""

from __future__ import annotations

import os
import signal
import sys
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Final, cast

from ckptmove.proof.codec import dumps, from_plain, to_plain
from ckptmove.proof.processes.child import ONE_THREAD, Child, Ending, child, worker_command
from ckptmove.proof.processes.forking import can_fork, fork
from ckptmove.proof.processes.messages import Message
from ckptmove.proof.processes.shares import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from typing_extensions import Self

    from ckptmove.proof.checks import Tally
    from ckptmove.proof.request import VerifyRequest

    Emit = Callable[[Message], None]

#: Seconds that another process has to end after the first one: its exit functions have two.
_EXIT_SECONDS: Final = 3


def start_others(request: VerifyRequest, stack: ExitStack) -> tuple[VerifyRequest, list[Child]]:
    """Start the processes of other ranks. Each begins as a fork where this function returns, or else as a new worker.

    Args:
        request: the request to the first process, with the number of processes.

    Returns:
        The request to this process, and, in the first one, the others. These are none if the system has no room for
        all of them.
    """
    others: list[Child] = []
    can = can_fork()
    try:
        for rank in range(1, request.jobs or 1):
            asked = request._replace(rank=rank)
            if can:
                process = fork(leads=False)
                if process is None:
                    stack.pop_all()  # it is the first process that ends the others
                    return asked, []
                others.append(Child(stack.enter_context(process)))
            else:
                variables = None if request.runs_own_code else ONE_THREAD
                others.append(stack.enter_context(child(worker_command(), dumps(asked), variables)))
    except OSError:
        stack.close()
        return request._replace(jobs=1), []
    return request, others


class Follower(ProcessGroup):
    """The group in another process than the first."""

    def __init__(self, request: VerifyRequest, emit: Emit) -> None:
        self.rank, self.size = request.rank, cast("int", request.jobs)
        self._emit = emit

    def join(self, tally: Tally) -> None:
        """Send the tally of this process to the first one."""
        self._emit(Message(joined=to_plain(tally)))


class Leader(ProcessGroup):
    """The group in the first process; a context manager that waits for the others to end."""

    def __init__(self, others: Sequence[Child], emit: Emit) -> None:
        self.size = 1 + len(others)
        self._others = [_Other(started, emit) for started in others]

    def __enter__(self) -> Self:
        for other in self._others:
            other.start()
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        for other in self._others:
            other.leave(_EXIT_SECONDS if error is None else 0)

    def join(self, tally: Tally) -> None:
        """Wait for the tallies of the others, and add them."""
        results = [other.results.get() for other in self._others]
        if None in results:
            raise ChildProcessError("another process of this verification ended before it sent its results")
        for result in results:
            tally.join(from_plain(type(tally), result))


class _Other(Thread):
    """Reads the output of another process. If that process fails, it ends this one in the same way."""

    def __init__(self, started: Child, emit: Emit) -> None:
        super().__init__(daemon=True)
        #: Tallies of the process, in order; None after the last one.
        self.results: SimpleQueue[object] = SimpleQueue()
        self._child, self._emit = started, emit
        self._is_left = False

    def run(self) -> None:
        """Read its output to the end."""
        told: list[Message] = []

        def take(message: Message) -> None:
            if message.joined is None:
                told.append(message)
            else:
                self.results.put(message.joined)

        ending = self._child.read(take)
        if not self._is_left:
            for message in told:
                self._emit(message)
            if ending.code:
                _end_as(ending)
        self.results.put(None)

    def leave(self, seconds: float) -> None:
        """Wait for its end for some seconds, and then kill it. How it ends no longer matters."""
        self._is_left = True
        self.join(seconds)
        self._child.process.kill()
        self._child.end()
        self.join()


def _end_as(ending: Ending) -> None:
    """End this process as another one has ended, with its exit code or signal and the end of its standard error."""
    sys.stderr.write(ending.errors)
    sys.stderr.flush()
    if ending.code < 0:
        signal.raise_signal(-ending.code)
    os._exit(1 if ending.code < 0 else ending.code)

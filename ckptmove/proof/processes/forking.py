"""Fork this process, with all that it has read and imported, in place of starting another one. Linux only."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

#: Threads of this process (``man 5 proc``).
_THREADS: Final = Path("/proc/self/task")
#: Signals for which a program may have handlers.
_HANDLED: Final = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM") if hasattr(signal, name))
_LONGEST_SLEEP: Final = 0.05


def can_fork() -> bool:
    """Whether a fork can run like this process: on Linux, with one thread, and with all standard streams.

    A lock that another thread holds would stay locked in the fork. Elsewhere, the system's own libraries have threads.
    """
    return (
        sys.platform == "linux"
        and hasattr(os, "fork")
        and len(list(_THREADS.iterdir())) == 1
        # If a stream was closed at the start, another file has its descriptor.
        and None not in (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    )


class Forked:
    """A fork of this process, with the methods and attributes of ``subprocess.Popen`` that its parent needs.

    Its ``stdin`` is None if it reads that of this process.
    """

    def __init__(self, pid: int, stdin: IO[str] | None, stdout: IO[str], stderr: IO[str]) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = pid, stdin, stdout, stderr
        self._code = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self._code = self.wait()
        with suppress(ChildProcessError):  # the program ignores SIGCHLD
            os.waitpid(self.pid, 0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; several threads may do so.

        Args:
            timeout: longest time in seconds; None for no limit.

        Returns:
            Its exit code; negative for a signal.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        # Without WNOWAIT, the system would forget the exit code, and could give the process id to another process.
        flags = os.WEXITED | os.WNOWAIT | (0 if deadline is None else os.WNOHANG)
        sleep = _LONGEST_SLEEP / 64
        while True:
            try:
                found = os.waitid(os.P_PID, self.pid, flags)
            except ChildProcessError:  # another thread has left the context
                return self._code
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            sleep = min(2 * sleep, _LONGEST_SLEEP)
            time.sleep(sleep)

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)


def fork(*, leads: bool) -> Forked | None:
    """Fork this process. The output of the fork goes to pipes, and signals end it as they end a new process.

    Args:
        leads: whether the fork leads a process group, and reads another pipe as its standard input.

    Returns:
        The fork; in the fork itself, None.
    """
    pipes = {number: os.pipe() for number in ((0, 1, 2) if leads else (1, 2))}
    ours = {number: pipe[number == 0] for number, pipe in pipes.items()}
    theirs = {number: pipe[number != 0] for number, pipe in pipes.items()}
    # A handler that raises in the fork, before it is a process of its own, would run the parent's code there.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if not pid:
            _separate(theirs, leads=leads)
    except OSError:
        _close(ours)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        _close(theirs)
    if not pid:
        _close(ours)
        return None
    if leads:
        with suppress(OSError):  # it has ended
            os.setpgid(pid, pid)  # as the fork does: the first call counts
    stdin = os.fdopen(ours[0], "w") if leads else None
    return Forked(pid, stdin, os.fdopen(ours[1], errors="replace"), os.fdopen(ours[2], errors="replace"))


def _separate(streams: Mapping[int, int], *, leads: bool) -> None:
    """Make a fork a process of its own."""
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    if leads:
        with suppress(OSError):  # the parent has done it
            os.setpgid(0, 0)
    for number, descriptor in streams.items():
        os.dup2(descriptor, number)
    # Text that the parent's objects have not written yet is left to the parent.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    gc.freeze()  # the collector would copy the pages of each object that it visits


def _close(descriptors: Mapping[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)

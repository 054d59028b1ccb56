"""Count the system calls that change the disk, to kill a process at one of them, or to make one fail.

A test tries a sample of the calls, or all of them if CRASHES is "all", as in `make crash`.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import traceback
import warnings
from contextlib import contextmanager

CHANGING = (
    "open", "write", "pwrite", "copy_file_range", "posix_fallocate", "ftruncate", "fsync", "link", "rename", "replace",
    "symlink", "unlink", "remove", "mkdir", "rmdir", "chmod",
)  # fmt: skip
#: The accessor that pathlib uses in Python 3.10; later versions use os.
_ACCESSOR = getattr(pathlib, "_NormalAccessor", None)
_IS_COMPLETE = os.environ.get("CRASHES") == "all"


class Counted:
    """Counts the system calls of all threads, one at a time, and acts before a chosen one.

    ``act`` gets the name of the call and its arguments. If ``lasting``, it acts before every later call too.
    """

    def __init__(self, place=-1, act=None, *, lasting=False):
        self.count = 0
        self._place = place
        self._act = act
        self._lasting = lasting
        self._lock = threading.RLock()  # `act` may make calls too

    def before(self, name, arguments):
        with self._lock:
            here, self.count = self.count, self.count + 1
            if here == self._place or (self._lasting and here > self._place >= 0):
                self._act(name, arguments)

    def wrapped_call(self, name):
        real = getattr(os, name)

        def call(*arguments, **options):
            # Opening without O_CREAT changes nothing.
            if name != "open" or arguments[1] & os.O_CREAT:
                self.before(name, arguments)
            return real(*arguments, **options)

        return real, call

    @contextmanager
    def installed(self):
        calls = {name: self.wrapped_call(name) for name in CHANGING if hasattr(os, name)}
        accessors = {name: getattr(_ACCESSOR, name) for name in calls if hasattr(_ACCESSOR, name)}
        try:
            for name, (_, call) in calls.items():
                setattr(os, name, call)
                if name in accessors:
                    setattr(_ACCESSOR, name, staticmethod(call))
            yield self
        finally:
            for name, (real, _) in calls.items():
                setattr(os, name, real)
            for name, real in accessors.items():
                setattr(_ACCESSOR, name, staticmethod(real))


def count(change):
    """The number of calls that a change makes."""
    counted = Counted()
    with counted.installed():
        change()
    return counted.count


def kill_at(place, change):
    """Make a change in another process, and kill it before the call of this number, or halfway through a write."""

    def kill(name, arguments):
        if name in {"write", "pwrite"}:
            half = memoryview(arguments[1])[: len(arguments[1]) // 2]
            os.writev(arguments[0], [half]) if name == "write" else os.pwritev(arguments[0], [half], arguments[2])
        os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads are not copied; the copy needs none
        child = os.fork()
    if not child:
        try:
            with Counted(place, kill).installed():
                change()
        except BaseException:  # the copy must not return to the test
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in {0, -signal.SIGKILL}, code


def spread(total, fast, last=0):
    """Indices to try: ``fast`` of ``total`` and the ``last`` ones; all in the complete test."""
    if _IS_COMPLETE:
        return range(total)
    return sorted({*(total * step // fast for step in range(fast)), *range(max(0, total - last), total)})


def instants(fast, complete):
    """The number of instants at which a process is killed."""
    return complete if _IS_COMPLETE else fast

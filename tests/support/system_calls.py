"""Every call of the system that changes a disk, counted, so that a process can be killed at one of them, or one fails.

Which of them are tried: a spread in every run, and each one where CRASHES is "all", as `make crash` has it.
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
    "open", "write", "copy_file_range", "posix_fallocate", "ftruncate", "fsync", "link", "rename", "replace",
    "symlink", "unlink", "remove", "mkdir", "rmdir", "chmod",
)  # fmt: skip
#: What Python 3.10 calls in pathlib; later ones look it up in os.
_ACCESSOR = getattr(pathlib, "_NormalAccessor", None)
_IS_COMPLETE = os.environ.get("CRASHES") == "all"


class Counted:
    """Stands before the system: counts the calls of all threads, one at a time, and acts before the chosen one.

    ``act`` is told the name of the call and its arguments. Where ``lasting``, it acts before every later one too.
    """

    def __init__(self, place=-1, act=None, *, lasting=False):
        self.count = 0
        self._place = place
        self._act = act
        self._lasting = lasting
        self._lock = threading.RLock()  # what acts may make calls itself

    def before(self, name, arguments):
        with self._lock:
            here, self.count = self.count, self.count + 1
            if here == self._place or (self._lasting and here > self._place >= 0):
                self._act(name, arguments)

    def standing_before(self, name):
        real = getattr(os, name)

        def call(*arguments, **options):
            # What is only opened, or was never there, is not changed.
            if name != "open" or arguments[1] & os.O_CREAT:
                self.before(name, arguments)
            return real(*arguments, **options)

        return real, call

    @contextmanager
    def installed(self):
        calls = {name: self.standing_before(name) for name in CHANGING if hasattr(os, name)}
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
    """How many calls a change makes."""
    counted = Counted()
    with counted.installed():
        change()
    return counted.count


def kill_at(place, change):
    """Make a change in another process, which is killed before its call of that number; a write is half made."""

    def kill(name, arguments):
        if name == "write":
            os.writev(arguments[0], [memoryview(arguments[1])[: len(arguments[1]) // 2]])
        os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads are not copied: nobody waits for one in the copy
        child = os.fork()
    if not child:
        try:
            with Counted(place, kill).installed():
                change()
        except BaseException:  # whatever it is, this is the end of the copy
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in {0, -signal.SIGKILL}, code


def spread(total, fast, last=0):
    """Of so many places ``fast`` and the last few; every one in the complete test."""
    if _IS_COMPLETE:
        return range(total)
    return sorted({*(total * step // fast for step in range(fast)), *range(max(0, total - last), total)})


def instants(fast, complete):
    """How many of the instants at which a process may be killed are tried."""
    return complete if _IS_COMPLETE else fast

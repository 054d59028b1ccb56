"""Keep a script from changing the checkpoint that it resumes from, and observe the programs that it starts."""

from __future__ import annotations

import errno
import functools
import os
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_WRITES: Final = os.O_WRONLY | os.O_RDWR
#: Audit events (https://docs.python.org/3/library/audit_events.html) that change files, with the number of their paths.
_PATHS: Final = {"open": 1, "os.remove": 1, "os.rename": 2, "os.truncate": 1, "shutil.rmtree": 1}
#: Audit events that start a program.
_PROGRAMS: Final = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"})
#: What separates the words of a shell command, and an option from its value.
_BETWEEN_WORDS: Final = re.compile(r"[\s=;|&<>'\"]+")
_protected: set[str] = set()
_observers: list[Callable[[list[str]], None]] = []


@contextmanager
def protected(paths: Iterable[str], on_program: Callable[[list[str]], None]) -> Iterator[None]:
    """Refuse to open files for writing, to remove and to rename them, while the context is open.

    Args:
        on_program: called with the words of a command, before the program starts. It may raise.
    """
    _install()
    _protected.update(map(os.path.realpath, paths))
    _observers.append(on_program)
    try:
        yield
    finally:
        _protected.clear()
        _observers.clear()


@functools.cache
def _install() -> None:
    """Add the hook. Python cannot remove one: outside of the context, it does nothing."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if not _protected or (event == "open" and not args[2] & _WRITES):
        return
    if event in _PROGRAMS:
        for observe in _observers:
            observe(_words(args))
    for path in args[: _PATHS.get(event, 0)]:
        if isinstance(path, (str, bytes, os.PathLike)) and os.path.realpath(os.fsdecode(path)) in _protected:
            raise PermissionError(errno.EPERM, "the checkpoint is protected while it is verified", os.fsdecode(path))


def _words(args: Iterable[Any]) -> list[str]:
    """The strings in the arguments of an event, each with its own words."""
    flat = (part for one in args for part in (one if isinstance(one, (list, tuple)) else [one]))
    texts = [os.fsdecode(one) for one in flat if isinstance(one, (str, bytes, os.PathLike))]
    return [*texts, *(word for text in texts for word in _BETWEEN_WORDS.split(text))]

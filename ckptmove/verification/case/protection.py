"""Keep a script from changing the files of the checkpoint that it resumes from."""

from __future__ import annotations

import errno
import functools
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WRITES: Final = os.O_WRONLY | os.O_RDWR
#: Audit events (https://docs.python.org/3/library/audit_events.html) that change files, with the number of their paths.
_PATHS: Final = {"open": 1, "os.remove": 1, "os.rename": 2, "os.truncate": 1, "shutil.rmtree": 1}
_protected: set[str] = set()


@contextmanager
def protected(paths: Iterable[str]) -> Iterator[None]:
    """Refuse to open files for writing, to remove and to rename them, while the context is open.

    Args:
        paths: the files.

    Raises:
        PermissionError: in the call that would change one of them.
    """
    _install()
    _protected.update(map(os.path.realpath, paths))
    try:
        yield
    finally:
        _protected.clear()


@functools.cache
def _install() -> None:
    """Add the hook. Python cannot remove one: outside of the context, it does nothing."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if not _protected or (event == "open" and not args[2] & _WRITES):
        return
    for path in args[: _PATHS.get(event, 0)]:
        if isinstance(path, (str, bytes, os.PathLike)) and os.path.realpath(os.fsdecode(path)) in _protected:
            raise PermissionError(errno.EPERM, "the checkpoint is protected while it is verified", os.fsdecode(path))

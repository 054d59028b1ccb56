"""The process group of a mesh proof, and the exchange of values between its ranks."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")

#: Seconds after which a collective of the user's code fails: torch's default for NCCL. With gloo, torch's default is 30
#: minutes, too long for a rank that waits alone.
_COLLECTIVE_SECONDS: Final = 600.0
#: Seconds after which an exchange of values fails: a rank may wait for the checks of another one.
_EXCHANGE_SECONDS: Final = 1800.0
#: Messages of gloo and of the stores, if another rank is gone or late. Their exceptions are often plain RuntimeErrors.
_LOST: Final = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe", "gloo")


class Ranks:
    """The ranks of this run. They exchange their own values in a group that the user's code does not use.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        enter: called with the name of each check when it begins.
        group: their group, also for the load of the checkpoint.
    """

    def __init__(self, entered: Callable[[str], None], timeout: float | None = None) -> None:
        """Make a group of all ranks; a collective.

        Args:
            entered: called with the name of each check when it begins.
            timeout: timeout of the run in seconds, which the collectives outlast; None for none.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.enter = entered
        self.group: Any = dist.new_group(backend="gloo", timeout=_at_least(_EXCHANGE_SECONDS, timeout))

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks, by rank; a collective."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


def collective_timeout(timeout: float | None) -> timedelta:
    """Timeout of the collectives in the process group that the user's code finds."""
    return _at_least(_COLLECTIVE_SECONDS, timeout)


def _at_least(seconds: float, timeout: float | None) -> timedelta:
    """A timeout of collectives. ``--timeout`` ends a rank first, so that the report can name it."""
    return timedelta(seconds=max(seconds, 2 * (timeout or 0.0)))


def is_lost(error: BaseException) -> bool:
    """Whether an exception means that another rank ended or did not answer."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)


@contextmanager
def group_is_there() -> Iterator[None]:
    """Let a script call ``init_process_group`` although the group exists."""
    init = dist.init_process_group
    dist.init_process_group = _do_nothing
    try:
        yield
    finally:
        dist.init_process_group = init


def _do_nothing(*_: object, **__: object) -> None:
    """Stand in for ``init_process_group``."""

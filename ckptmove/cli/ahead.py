"""Call a function for several requests at once, and take the results in the order of the requests, or as they come."""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from ckptmove.io.at_once import started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

#: Longest wait: a signal that comes just before a wait is raised only at its end.
_SECONDS: Final = 0.2
_Q = TypeVar("_Q")
_A = TypeVar("_A")


class Ahead(Generic[_Q, _A]):
    """Runs calls in threads, a fixed number ahead of the result that is taken next.

    The threads are daemons: after an interruption the program ends without waiting for servers.
    """

    def __init__(self, call: Callable[[_Q], _A], requests: Iterable[_Q], jobs: int) -> None:
        """Start the first calls.

        Args:
            call: the function; it must be safe to run in several threads.
            requests: its arguments, one for each call.
            jobs: number of calls that run, or whose result waits, at a time.
        """
        self._call = call
        self._left = iter(requests)
        self._running: deque[tuple[_Q, Future[_A]]] = deque()
        for _ in range(jobs):
            self._start()

    def take(self) -> _A:
        """Wait for the next result, and start another call; raises what the call raised."""
        _, future = self._running.popleft()
        try:
            while not wait([future], _SECONDS).done:
                pass
            return future.result()
        finally:
            self._start()

    def as_completed(self) -> Iterator[_Q]:
        """Yield the requests in the order in which their calls end; :meth:`take` then returns the result of that call.

        The result has to be taken before the next request.
        """
        while self._running:
            done = wait([future for _, future in self._running], _SECONDS, FIRST_COMPLETED).done
            first = next((one for one in self._running if one[1] in done), None)
            if first is not None:
                self._running.remove(first)
                self._running.appendleft(first)
                yield first[0]

    def _start(self) -> None:
        self._running.extend((request, started(self._call, request)) for request in islice(self._left, 1))

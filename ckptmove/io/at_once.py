"""Call a function for several items at once, in threads."""

from __future__ import annotations

from collections import deque
from itertools import islice
from threading import Condition, Thread, local
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def at_once(call: Callable[[_Item], _Result], items: Iterable[_Item], jobs: int) -> Iterator[_Result]:
    """Call a function, in several threads, for each item; return the results in the order of the items.

    The next item is taken when a call has returned. The threads are daemons: an interrupted program does not wait for
    them.
    """
    if jobs == 1:
        yield from map(call, items)
        return
    left = iter(items)
    running = deque(started(call, item) for item in islice(left, jobs))
    while running:
        result = running.popleft().result()
        running.extend(started(call, item) for item in islice(left, 1))
        yield result


class CallStopped(Exception):
    """A call stops, because another one failed or the user interrupted the program."""


class Workers(Generic[_Item]):
    """Threads that take items one after the other. An error stops all of them."""

    def __init__(self, items: Iterable[_Item]) -> None:
        self._left = iter(items)
        self._changed = Condition()
        self._running = 0
        self._is_empty = False
        self._is_over = False
        self._error: BaseException | None = None

    def run(self, call: Callable[[_Item], None], jobs: int) -> None:
        """Call a function in several threads, and wait for all calls; also after an interruption.

        The function calls :func:`go_on` now and then.
        """
        try:
            for _ in range(jobs):
                Thread(target=self._work, args=(call,), daemon=True).start()
            self._wait()
        finally:
            # A thread whose start was interrupted takes no item any more.
            self._is_over = True
            self._wait_through_interruptions()
        if self._error is not None:
            raise self._error

    def go_on(self) -> None:
        """Raise CallStopped if another call failed or the user interrupted the program."""
        if self._is_over:
            raise CallStopped

    def _work(self, call: Callable[[_Item], None]) -> None:
        _OF_THREAD.workers = self
        while self._call_next(call):
            pass

    def _call_next(self, call: Callable[[_Item], None]) -> bool:
        """Call the function for the next item; False if no call follows."""
        from concurrent.futures import Future  # a slow import

        with self._changed:
            if self._is_over or self._is_empty:
                return False
            self._running += 1
        done: Future[None] = Future()
        _settle(done, self._call_once, call)
        with self._changed:
            self._running -= 1
            if not isinstance(done.exception(), CallStopped | None):
                self._error = done.exception()
                self._is_over = True
            self._changed.notify_all()
        return True

    def _call_once(self, call: Callable[[_Item], None]) -> None:
        with self._changed:
            item = next(self._left, None)
            self._is_empty = item is None
        if item is not None:
            call(item)

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: (self._is_over or self._is_empty) and not self._running)

    def _wait_through_interruptions(self) -> None:
        """Wait for all calls. Another interruption is raised only then: they use files that are closed next."""
        try:
            self._wait()
        except BaseException:
            self._wait_through_interruptions()
            raise


class _OfThread(local):
    #: The workers that the thread is one of; None for any other thread.
    workers: Workers[Any] | None = None


_OF_THREAD: Final = _OfThread()


def go_on() -> None:
    """Raise CallStopped in a thread of workers that are to stop. Long reads call it between blocks."""
    if _OF_THREAD.workers is not None:
        _OF_THREAD.workers.go_on()


def started(call: Callable[[_Item], _Result], item: _Item) -> Future[_Result]:
    """Start a call in a thread that does not keep an interrupted program from ending."""
    from concurrent.futures import Future  # a slow import, which one thread does not need

    future: Future[_Result] = Future()

    Thread(target=_settle, args=(future, call, item), daemon=True).start()
    return future


def _settle(future: Future[_Result], call: Callable[[_Item], _Result], item: _Item) -> None:
    """Call a function; its result or exception is that of the future."""
    try:
        future.set_result(call(item))
    except BaseException as error:  # noqa: BLE001  # raised again by `result`
        future.set_exception(error)

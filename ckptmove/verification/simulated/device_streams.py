"""Streams and events of a simulated device: all that they order has been done already.

Never measures anything: the time between two events is none.
"""

from __future__ import annotations

import contextlib


class Stream:
    """A queue of work, always empty."""

    def __init__(self, *_args: object, **_more: object) -> None:
        """Take what a real one takes."""

    def query(self) -> bool:
        """Whether all is done: yes."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """An event after all that was queued."""
        return Event() if event is None else event

    def _nothing(self, *_args: object) -> None:
        """Nothing to wait for."""

    synchronize = wait_event = wait_stream = _nothing


class Event:
    """A mark in a stream, always reached."""

    def __init__(self, *_args: object, **_more: object) -> None:
        """Take what a real one takes."""

    def query(self) -> bool:
        """Whether it is reached: yes."""
        return True

    def elapsed_time(self, _end: Event) -> float:
        """The milliseconds to another: none."""
        return 0.0

    def _nothing(self, *_args: object) -> None:
        """Nothing to wait for."""

    record = synchronize = wait = _nothing


def any_stream(*_args: object) -> Stream:
    """The current stream, or the default one."""
    return Stream()


class StreamContext(contextlib.nullcontext[None]):
    """A context in which work goes to a stream."""

    def __init__(self, _stream: object) -> None:
        """Take what a real one takes."""
        super().__init__(None)

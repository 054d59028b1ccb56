"""Streams and events of a simulated device, whose work is always complete."""

from __future__ import annotations

import contextlib


class Stream(contextlib.AbstractContextManager["Stream"]):
    """A queue of work, always empty; as a context, the current one."""

    def __init__(self, *_args: object, **_more: object) -> None:
        """Take what a real one takes."""

    def query(self) -> bool:
        """Always True: all work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """An event after all queued work."""
        return Event() if event is None else event

    def __exit__(self, *_error: object) -> None:
        """Select the stream before."""

    def is_capturing(self) -> bool:
        """Always False: there are no graphs."""
        return False

    def _nothing(self, *_args: object, **_more: object) -> None:
        """Nothing to wait for."""

    synchronize = wait_event = wait_stream = _nothing


class Event:
    """An event in a stream, always complete."""

    def __init__(self, *_args: object, **_more: object) -> None:
        """Take what a real one takes."""

    def query(self) -> bool:
        """Always True: the event is complete."""
        return True

    def elapsed_time(self, _end: Event) -> float:
        """Always 0 milliseconds."""
        return 0.0

    def _nothing(self, *_args: object, **_more: object) -> None:
        """Nothing to wait for."""

    record = synchronize = wait = _nothing


def any_stream(*_args: object, **_more: object) -> Stream:
    """The current stream, or the default one."""
    return Stream()


class StreamContext(contextlib.nullcontext[None]):
    """A context that selects a stream."""

    def __init__(self, *_args: object, **_more: object) -> None:
        """Take what a real one takes."""
        super().__init__(None)

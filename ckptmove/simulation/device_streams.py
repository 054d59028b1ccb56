"""Streams and events of a simulated device, whose work is always complete."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, Any, Final

from ckptmove.simulation import targets

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

_DEFAULT: Final = 0  # id of the default stream of a device
_IDS: Final = itertools.count(1)


class _Thread(threading.local):
    """The current stream of each device in a thread, where it is not the default one."""

    def __init__(self) -> None:
        self.current: dict[torch.device, Stream] = {}


_THREAD: Final = _Thread()


def nothing(*_args: object, **_more: object) -> None:
    """Do nothing: there is no work to wait for, no memory to free, and no generator except the CPU's."""


class Stream:
    """A queue of work, always empty; as a context, the current one."""

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_more: object) -> None:
        """Make a stream.

        Args:
            device: the device; None or a negative number for the current one.
            priority: as for a real one.
            stream_id: id of an existing stream.
        """
        self.simulated_on = _home(device)
        self.device = targets.shown(self.simulated_on)
        self.device_index = targets.number_of(self.simulated_on)
        self.priority = priority
        self.stream_id = self.cuda_stream = next(_IDS) if stream_id is None else stream_id
        self._contexts: list[StreamContext] = []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        return (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __enter__(self) -> Self:
        self._contexts.append(StreamContext(self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *_error: object) -> None:
        self._contexts.pop().__exit__()

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """An event after all queued work."""
        return Event() if event is None else event

    def is_capturing(self) -> bool:
        """False: there are no CUDA graphs."""
        return False

    synchronize = wait_event = wait_stream = nothing


class Event:
    """An event in a stream, always complete."""

    def __init__(self, *_args: object, **_more: object) -> None:
        """Take what a real one takes."""

    def query(self) -> bool:
        """True: the event is complete."""
        return True

    def elapsed_time(self, _end: Event) -> float:
        """Always 0 milliseconds."""
        return 0.0

    record = synchronize = wait = nothing


class StreamContext:
    """A context that selects a stream and its device; None changes nothing."""

    def __init__(self, stream: Stream | None = None) -> None:
        self._stream = stream
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._stream is not None:
            home = self._stream.simulated_on
            before = current_stream(home)
            if home != targets.current():
                self._open.enter_context(targets.chosen(home))
            self._open.callback(set_stream, before)
            set_stream(self._stream)

    def __exit__(self, *_error: object) -> None:
        self._open.close()


def default_stream(device: Any = None) -> Stream:
    """The default stream of a device, or of the current one."""
    return Stream(device, stream_id=_DEFAULT)


def current_stream(device: Any = None) -> Stream:
    """The current stream of a device, or of the current one."""
    return _THREAD.current.get(_home(device)) or default_stream(device)


def set_stream(stream: Stream | None) -> None:
    """Make a stream and its device current; None changes nothing."""
    if stream is None:
        return
    _THREAD.current[stream.simulated_on] = stream
    if stream.simulated_on != targets.current():
        targets.set_current(stream.simulated_on)


def forget_streams() -> None:
    """Make the default stream of each device current again."""
    _THREAD.current.clear()


def _home(device: Any) -> torch.device:
    is_current = device is None or (isinstance(device, int) and device < 0)
    return targets.current() if is_current else targets.meant_by(device) or targets.current()

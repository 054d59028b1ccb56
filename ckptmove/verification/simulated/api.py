"""What torch says of the target beside its tensors, while a simulated device stands for it.

Never leaves anything of it behind: what was replaced is put back.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.jit import _state as torchscript

from ckptmove.verification.simulated import targets
from ckptmove.verification.simulated.device_module import Device, DeviceCalls, DeviceOf
from ckptmove.verification.simulated.device_streams import Event, Stream, StreamContext, any_stream
from ckptmove.verification.simulated.generator import made_on_the_device
from ckptmove.verification.simulated.loading import rebuilt_there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CALLS: Final = tuple(name for name in vars(DeviceCalls) if not name.startswith("_"))
_STREAMS: Final[dict[str, Callable[..., object]]] = {
    "stream": StreamContext,
    "current_stream": any_stream,
    "default_stream": any_stream,
    "set_stream": any_stream,
}
_CLASSES: Final[dict[str, object]] = {
    "Stream": Stream,
    "Event": Event,
    "StreamContext": StreamContext,
    "device": Device,
    "device_of": DeviceOf,
}
#: What `torch.accelerator` asks a backend in C++ for, which one in Python cannot answer.
_OF_ANY_KIND: Final = frozenset({
    "empty_cache", "get_memory_info", "max_memory_allocated", "max_memory_reserved", "memory_allocated",
    "memory_reserved", "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats", "synchronize",
})  # fmt: skip


@contextlib.contextmanager
def as_if_it_were_here(
    device: torch.device, place: Callable[[torch.Tensor, torch.device], torch.Tensor]
) -> Iterator[None]:
    """Have `torch` know a simulated device beyond its tensors, as long as the context is open.

    A module scripted by `torch.jit` runs as Python: its parameters cannot be moved to a backend written in Python.

    Args:
        device: the device.
        place: makes a tensor of the device from one of the CPU, with the same memory.
    """
    with made_on_the_device(), rebuilt_there(place), _answering(device), _as_python():
        yield


@contextlib.contextmanager
def _answering(device: torch.device) -> Iterator[None]:
    """Have the functions of the target's own module answer: those that it has, so that no torch gets new ones."""
    kind = targets.kind_of(device)
    calls = DeviceCalls(lambda: kind)
    answers = {name: _apart(getattr(calls, name)) for name in _CALLS}
    of_any_kind = {name: answers[name] for name in _OF_ANY_KIND}
    own = answers | {name: _apart(call) for name, call in _STREAMS.items()} | _CLASSES
    modules: list[tuple[Any, dict[str, Any]]] = [
        (getattr(torch, kind, None), own),
        (getattr(torch.backends, kind, None), own),
        (torch.accelerator, of_any_kind),
    ]
    known = [(vars(module), some) for module, some in modules if module is not None]
    before = [(names, {name: names[name] for name in some.keys() & names.keys()}) for names, some in known]
    for (names, replaced), (_, some) in zip(before, known, strict=True):
        names.update({name: some[name] for name in replaced})
    try:
        yield
    finally:
        for names, replaced in before:
            names.update(replaced)


def _apart(call: Callable[..., object]) -> Callable[..., object]:
    """A function of its own: torch/_dynamo/trace_rules.py has one rule for each, and is imported by much of torch."""

    def answer(*args: object, **kwargs: object) -> object:
        return call(*args, **kwargs)

    return answer


@contextlib.contextmanager
def _as_python() -> Iterator[None]:
    was_enabled = bool(torchscript._enabled)  # noqa: SLF001  # torch has no public name for it
    torchscript.disable()
    try:
        yield
    finally:
        if was_enabled:
            torchscript.enable()

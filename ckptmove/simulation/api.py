"""Make torch's API report the target as available while a simulated device is active; undone afterwards."""

from __future__ import annotations

import contextlib
import platform
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.parallel import comm

from ckptmove.simulation import targets
from ckptmove.simulation.communication import nccl_of_one_process
from ckptmove.simulation.device_module import DeviceCalls, DeviceContext, DeviceOf
from ckptmove.simulation.device_streams import Event, Stream, StreamContext, forget_streams
from ckptmove.simulation.errors import refused
from ckptmove.simulation.generator import generators_on_device
from ckptmove.simulation.legacy import set_default_tensor_type, tensor_types
from ckptmove.simulation.loading import storages_on_device
from ckptmove.simulation.parallel import COPIES
from ckptmove.simulation.replaced import replaced
from ckptmove.simulation.scripted import as_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptmove.simulation.targets import Place

_CALLS: Final = tuple(name for name in vars(DeviceCalls) if not name.startswith("_"))
_CLASSES: Final[dict[str, object]] = {
    "Stream": Stream,
    "Event": Event,
    "StreamContext": StreamContext,
    "device": DeviceContext,
    "device_of": DeviceOf,
}
#: Versions of the libraries that a torch for CUDA is built with.
_CUDA: Final = "12.8"
_CUDNN: Final = 91002
#: CUDA graphs and their memory, which exist only on a GPU.
_GRAPHS: Final[dict[str, object]] = {
    name: refused(f"torch.cuda.{name}")
    for name in ("CUDAGraph", "graph", "graph_pool_handle", "MemPool", "make_graphed_callables")
}
#: Functions of `torch.mps`, `torch.backends.mps` and `torch.mps.profiler`, on the newest macOS.
_MPS: Final[dict[str, object]] = {
    "compile_shader": refused("torch.mps.compile_shader"),
    "get_core_count": lambda: 1,
    "get_name": lambda: "simulated",
    "is_built": lambda: True,
    "is_macos13_or_newer": lambda *_args, **_more: True,
    "is_macos_or_newer": lambda *_args, **_more: True,
    "load_metallib": refused("torch.mps.load_metallib"),
    "profile": lambda *_args, **_more: contextlib.nullcontext(),
    "start": lambda *_args, **_more: None,
    "stop": lambda: None,
}
#: Functions of `torch.jit` for a module that it has compiled.
_SCRIPTS: Final[dict[str, object]] = {
    name: refused(f"torch.jit.{name}") for name in ("freeze", "optimize_for_inference", "save")
}
#: Functions of `torch.export` that trace with fake tensors, which the simulated operations do not accept.
_EXPORTS: Final[dict[str, object]] = {
    name: refused(f"torch.export.{name}") for name in ("draft_export", "export", "export_for_training")
}
#: Functions of `torch.accelerator` that need a backend in C++.
_OF_ACCELERATOR: Final = frozenset({
    "empty_cache", "get_memory_info", "max_memory_allocated", "max_memory_reserved", "memory_allocated",
    "memory_reserved", "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats", "synchronize",
    "device_count", "is_available", "current_accelerator", "current_stream", "set_stream",
})  # fmt: skip


class _Markers:
    """Replacement of torch's NVTX functions: there is no profiler to mark a range for."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_args: 0


@contextlib.contextmanager
def patched_torch_api(device: torch.device, place: Place) -> Iterator[None]:
    """Patch torch's API for a simulated device while the context is open."""
    with generators_on_device(), storages_on_device(place), _answering(device), as_python():
        yield


@contextlib.contextmanager
def _answering(device: torch.device) -> Iterator[None]:
    """Replace the functions that the target's own module already has; no torch gets new functions."""
    kind = targets.kind_of(device)
    calls = DeviceCalls(lambda: kind)
    answers = {name: _separate(getattr(calls, name)) for name in _CALLS}
    of_accelerator = {name: answers[name] for name in _OF_ACCELERATOR}
    of_accelerator |= {"current_device_index": answers["current_device"]}
    own = tensor_types(kind) | answers | _CLASSES | {"_lazy_init": lambda: None}
    modules: list[tuple[Any, dict[str, Any]]] = [
        (getattr(torch, kind, None), own),
        (getattr(torch.backends, kind, None), own),
        (torch.accelerator, of_accelerator),
        (torch.jit, _SCRIPTS),
        (torch.export, _EXPORTS),
        (torch, {"set_default_tensor_type": set_default_tensor_type}),
        (getattr(torch.accelerator, "memory", None), of_accelerator),
        (getattr(getattr(torch, kind, None), "memory", None), own),
    ]
    if kind == "cuda":
        modules += [
            (torch.cuda, _GRAPHS),
            (torch.cuda.graphs, _GRAPHS),
            (torch.cuda.nvtx, {"_nvtx": _Markers()}),
            (torch.version, {"cuda": _CUDA}),
            (comm, COPIES),
        ]
    if kind == "mps":
        modules += [(module, _MPS) for module in (torch.mps, torch.backends.mps, torch.mps.profiler)]
        modules += [(torch.mps.event, _CLASSES), (platform, {"processor": lambda: "arm"})]  # Lightning asks for it
    with contextlib.ExitStack() as stack:
        for module, some in modules:
            if module is not None:
                known = {name: one for name, one in some.items() if name in vars(module)}
                stack.enter_context(replaced(module, **known))
        if kind == "cuda":  # the module that torch shows has no functions of its own
            stack.enter_context(replaced(torch.backends.cudnn, version=lambda: _CUDNN))
            stack.enter_context(nccl_of_one_process())
        stack.callback(forget_streams)
        yield


def _separate(call: Callable[..., object]) -> Callable[..., object]:
    """A separate function object: torch/_dynamo/trace_rules.py, which much of torch imports, has one rule for each."""

    def answer(*args: object, **kwargs: object) -> object:
        return call(*args, **kwargs)

    return answer

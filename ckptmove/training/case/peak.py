"""Record the peak memory of a user's step, and describe it: bytes, roles of the tensors, and the line."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.simulation.accounting import MemoryRecord, Usage, recorded
from ckptmove.simulation.backward import ENGINE, frames_of
from ckptmove.simulation.targets import tag_of
from ckptmove.text import size
from ckptmove.training.case.parts import models_of, optimizers_of
from ckptmove.training.code.source import Line, line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from ckptmove.case import Case
    from ckptmove.proof.place import Site
    from ckptmove.simulation.accounting import Kind
    from ckptmove.training.code.entrance import Entrance

_OPTIMIZERS: Final = os.path.dirname(torch.optim.__file__)  # noqa: PTH120  # a prefix of names of code objects
_WORKER: Final = str(Path(__file__).parents[1] / "worker.py")
_CALLS: Final = frozenset({"load_state_dict", "step"})
_NAMES: Final[dict[Kind, str]] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "other": "activations and other tensors",
}
_FIXES: Final[dict[Kind, str]] = {
    "parameters": "keep the parameters in a lower precision (bfloat16), or train a smaller model",
    "gradients": "train fewer parameters, or keep them in a lower precision (bfloat16)",
    "optimizer_state": "use an optimizer with less state, or with its state in a lower precision (8-bit)",
    "other": "use a smaller batch, or recompute activations (torch.utils.checkpoint)",
}
_NO_LINES: Final[Sequence[str]] = ()
_UNKNOWN: Final = "use a smaller batch or model, a lower precision, or a device with more memory"


class AllocationPlace(NamedTuple):
    """Where memory was allocated.

    Attributes:
        at: file and line of the innermost frame of the user's code; None for none.
        during: ``backward``, ``optimizer.step``, ``optimizer.load_state_dict``, or empty.
        made_by: in a backward, lines of ``traceback.format_stack`` for the operation of the current node.
    """

    at: tuple[str, int] | None
    during: str = ""
    made_by: Sequence[str] = _NO_LINES


def locator(entrance: Entrance) -> Callable[[FrameType], AllocationPlace]:
    """A function that finds the place of an allocation; it keeps no frame."""

    def locate(frame: FrameType | None) -> AllocationPlace:
        during, made_by = "", _NO_LINES
        while frame is not None and not entrance.is_own(frame.f_code.co_filename):
            if frame.f_code.co_filename == _WORKER:  # its callers do not belong to the step
                return AllocationPlace(None, during, made_by)
            if frame.f_code is ENGINE:
                during, made_by = "backward", _trace_of_node()
            elif frame.f_code.co_name in _CALLS and frame.f_code.co_filename.startswith(_OPTIMIZERS):
                during = f"optimizer.{frame.f_code.co_name}"
            frame = frame.f_back
        return AllocationPlace(None if frame is None else (frame.f_code.co_filename, frame.f_lineno), during, made_by)

    return locate


def _trace_of_node() -> Sequence[str]:
    """Stack of the operation that made the current node of the graph, as anomaly detection keeps it."""
    node: Any = torch._C._current_autograd_node()
    return _NO_LINES if node is None else node.metadata.get("traceback_", _NO_LINES)


def line_at(usage: Usage, entrance: Entrance) -> Line | None:
    """The user's line that allocated; in a backward that torch computes, the line of the forward. None for none."""
    place: AllocationPlace = usage.place
    own = [line_of(*one) for one in frames_of(place.made_by) if entrance.is_own(one[0])]
    if own:
        return own[-1]
    return None if place.at is None else line_of(*place.at)


@contextmanager
def memory_recorded(site: Site, limit: int | None, entrance: Entrance) -> Iterator[MemoryRecord]:
    """Record the memory of a step, and limit it, while the context is open.

    Args:
        site: the target. Memory of the CPU is not recorded.
        limit: bytes of the device; None for no limit.
        entrance: knows which files are the user's.
    """
    kind = site.target.partition(":")[0]
    module: Any = getattr(torch, kind, None)
    if site.mode == "real" and limit is not None:
        _limit_real(module, torch.device(site.target), limit)
    if site.mode == "real" and hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(site.target)
    with recorded(limit, locator(entrance)) as record:
        yield record


def _limit_real(module: Any, device: torch.device, limit: int) -> None:
    """Let torch's allocator of a real device raise its error at a limit."""
    if device.type == "mps":
        module.set_per_process_memory_fraction(min(limit / module.recommended_max_memory(), 2.0))
    else:
        total = module.get_device_properties(device).total_memory
        module.set_per_process_memory_fraction(min(limit / total, 1.0), device)


def label_case(record: MemoryRecord, case: Case) -> None:
    """Set the roles of the tensors of a case."""
    modules = [part.module for part in models_of(case)]
    label(record, modules, [part.optimizer for part in optimizers_of(case)])


def label(
    record: MemoryRecord, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Set the roles of the tensors of modules and optimizers."""
    for module in modules:
        record.label_parameters(module.parameters())
        record.label("parameters", module.buffers())
    for optimizer in optimizers:
        record.label_optimizer(optimizer)


def peak_of(record: MemoryRecord, site: Site, limit: int | None) -> Usage | None:
    """The memory at the peak; None on the CPU, and on a real device whose peak torch does not record (mps)."""
    kind = site.target.partition(":")[0]
    module: Any = getattr(torch, kind, None)
    if site.mode == "real" and hasattr(module, "max_memory_allocated"):
        device = torch.device(site.target)
        return Usage(device, module.max_memory_allocated(device), limit, AllocationPlace(None), ())
    return record.at_peak()


def peak_text(usage: Usage) -> str:
    """The peak in words: ``peak memory 3.1 GiB of 16.0 GiB``."""
    limit = "" if usage.limit is None else f" of {size(usage.limit)}"
    return f"peak memory {size(usage.nbytes)}{limit}"


def peak_evidence(usage: Usage, entrance: Entrance) -> dict[str, object]:
    """Evidence about a peak, for the JSON report."""
    place: AllocationPlace = usage.place
    figures: dict[str, object] = {
        "peak_bytes": usage.nbytes,
        "peak_device": tag_of(usage.device),
        "device_memory": usage.limit,
    }
    if usage.allocations:
        at = line_at(usage, entrance)
        figures |= {"peak_at": str(at or ""), "peak_during": place.during, "peak_memory": usage.kinds}
    return figures


def shortage(usage: Usage) -> tuple[str, str, str]:
    """An allocation that failed, the memory in use, and the fix, each as a sentence."""
    place: AllocationPlace = usage.place
    during = f" in {place.during}" if place.during else ""
    free = size((usage.limit or 0) - usage.nbytes)
    fault = f"{tag_of(usage.device)} is out of memory{during}: {size(usage.requested)} requested, {free} free"
    fault += f" of {size(usage.limit or 0)}"
    kinds = usage.kinds
    if kinds["other"] == usage.nbytes:
        return fault, f"in use: {size(usage.nbytes)}", _UNKNOWN
    parts = ", ".join(f"{_NAMES[kind]} {size(nbytes)}" for kind, nbytes in kinds.items())
    asked: Kind = "optimizer_state" if place.during.startswith("optimizer.") else "other"
    wanted = {kind: nbytes + usage.requested * (kind == asked) for kind, nbytes in kinds.items()}
    return fault, f"in use: {parts}", _FIXES[max(kinds, key=lambda kind: wanted[kind])]

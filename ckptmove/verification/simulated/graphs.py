"""CUDA graphs of a simulated device: operations are recorded while a graph is captured, and run again on replay.

As on a GPU, a captured operation does not change memory, and a replay reads and writes the memory of the capture.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch._C import Generator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ckptmove.verification.simulated import capture
from ckptmove.verification.simulated.device_streams import Stream, StreamContext, current_stream, default_stream
from ckptmove.verification.simulated.errors import NotSimulated, refused
from ckptmove.verification.simulated.generator import address
from ckptmove.verification.simulated.pinning import is_pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

#: From ``CUDAGeneratorState::increase`` in aten/src/ATen/cuda/CUDAGeneratorImpl.cpp.
_NO_CAPTURE_MODE: Final = "Attempt to increase offset for a CUDA generator not in capture mode."
#: Message of ``cudaErrorStreamCaptureInvalidated``.
_INVALIDATED: Final = "CUDA error: operation failed due to a previous error during capture"
#: From ``CUDAGraph::capture_end`` in aten/src/ATen/cuda/CUDAGraph.cpp.
_EMPTY: Final = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong device or stream."
)
_POOLS: Final = itertools.count(1)


class _Memory:
    """Memory that a graph reads or writes, which outlives the tensors of the script."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._nbytes = storage.nbytes()
        self._used = StorageWeakRef(storage)
        self._own: torch.UntypedStorage | None = None

    def storage(self) -> torch.UntypedStorage:
        """Its storage. If the script has freed it, an input has lost its values, as on a GPU: they are NaN."""
        kind: Any = torch.UntypedStorage
        used: torch.UntypedStorage | None = kind._new_with_weak_ptr(self._used.cdata)
        if used is not None:
            return used
        if self._own is None:
            self._own = kind(self._nbytes).fill_(0xFF)
        return self._own

    def values(self) -> torch.Tensor:
        """Its bytes. They take no device from its storage, unlike a copy of that."""
        return torch.empty(0, dtype=torch.uint8).set_(self.storage())


#: Memory of the graphs by address of the StorageImpl, which a weak reference keeps from being reused.
_KNOWN: Final[weakref.WeakValueDictionary[int, _Memory]] = weakref.WeakValueDictionary()


class _Operand(NamedTuple):
    """A tensor in memory of a device."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        made = torch.empty(0, dtype=self.dtype).set_(self.memory.storage(), self.offset, self.size, self.stride)
        made = made.conj() if self.is_conj else made
        return made._neg_view() if self.is_neg else made


def _operand(host: torch.Tensor) -> _Operand:
    """The operand of a tensor.

    Raises:
        NotSimulated: if it has no strides.
    """
    if host.layout is not torch.strided or host.is_quantized:
        raise NotSimulated("a sparse or quantized tensor in a CUDA graph")
    storage: Any = host.untyped_storage()
    offset: Any = host.storage_offset()
    memory = _KNOWN.get(storage._cdata)
    if memory is None:
        memory = _KNOWN[storage._cdata] = _Memory(storage)  # the same
    return _Operand(memory, host.dtype, host.size(), host.stride(), offset, host.is_conj(), host.is_neg())


class _Step(NamedTuple):
    """A call of a graph: its arguments, and an operand for each result in new memory."""

    call: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    made: list[_Operand | None]

    def run(self) -> None:
        """Call again, and write the results to the same memory."""
        leaves = [leaf.tensor() if isinstance(leaf, _Operand) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = pytree.tree_leaves(self.call(*args, **kwargs))
        for operand, result in zip(self.made, results, strict=True):
            if operand is not None:
                operand.tensor().copy_(result)


class CUDAGraph:
    """Replacement of `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:  # noqa: ARG002  # torch's name
        """Take what a real one takes."""
        self._stream: Stream | None = None
        self._pool = (0, 0)
        self._steps: list[_Step] = []
        self._is_captured = False
        self._before: dict[_Memory, torch.Tensor] = {}
        self._made: set[_Memory] = set()
        self._generators = {address(torch.default_generator)}

    def capture_begin(self, pool: tuple[int, int] | None = None, *_mode: object, **_more: object) -> None:
        """Record the operations from here on.

        Args:
            pool: a handle of :meth:`pool` or of `torch.cuda.graph_pool_handle`.

        Raises:
            RuntimeError: if the graph is captured already, if another one is being captured, or if the current stream
                is the default one, with torch's message.
        """
        if self._is_captured:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        if current_stream() == default_stream():
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them "
                "on the default stream.)"
            )
        capture.refuse_synchronization()
        self._stream, self._pool = current_stream(), pool or (next(_POOLS), 0)
        capture.OPEN.append(self)

    def capture_end(self) -> None:
        """Stop recording, and restore the memory from before.

        Raises:
            RuntimeError: if no capture began in the current stream, or if the script caught the error of an operation
                that waits for the device, with torch's message.
        """
        if self not in capture.OPEN:
            raise RuntimeError("capture_end() called before capture_begin().")
        if current_stream() != self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._restore()
        refusals = capture.end()
        error = sys.exc_info()[1]
        self._is_captured = not refusals
        if refusals and error not in refusals:  # an error on its way out of the capture says more
            raise torch.AcceleratorError(_INVALIDATED)
        if not self._steps and error is None:
            warnings.warn(_EMPTY, stacklevel=2)

    def replay(self) -> None:
        """Run the recorded operations again.

        Raises:
            RuntimeError: if nothing was captured, with torch's message.
        """
        if not self._is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        capture.refuse_synchronization()
        with _outside_of_modes():
            for step in self._steps:
                step.run()

    def reset(self) -> None:
        """Forget the recorded operations."""
        self._steps, self._is_captured = [], False

    def pool(self) -> tuple[int, int]:
        """A handle of its memory.

        Raises:
            RuntimeError: if nothing was captured, with torch's message.
        """
        if not self._is_captured:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def register_generator_state(self, generator: Any) -> None:
        """Let the graph use a generator that is not the default one."""
        self._generators.add(address(generator))

    def instantiate(self, *_path: object) -> None:
        """Do nothing: there is no executable graph, and no dump of it."""

    enable_debug_mode = debug_dump = instantiate
    raw_cuda_graph = raw_cuda_graph_exec = get_graph_data = refused("the handle of a CUDA graph")

    def record(self, call: Callable[..., Any], args: Any, kwargs: Any, hosts: Container[int]) -> Any:
        """Make a call, and record it (see :func:`run`)."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        kept = [self._kept(leaf, hosts) for leaf in leaves]
        generators = [leaf for leaf in leaves if isinstance(leaf, Generator)] or [torch.default_generator]
        states = [Generator.get_state(one) for one in generators]
        results = call(*args, **kwargs)
        for one, state in zip(generators, states, strict=True):
            Generator.set_state(one, state)
        known = {leaf.memory for leaf in kept if isinstance(leaf, _Operand)}
        operands = [_operand(one) if isinstance(one, torch.Tensor) else None for one in pytree.tree_leaves(results)]
        made = [None if one is None or one.memory in known else one for one in operands]
        self._made.update(one.memory for one in made if one is not None)
        self._steps.append(_Step(call, kept, spec, made))
        return results

    def _kept(self, leaf: Any, hosts: Container[int]) -> Any:
        """An argument for the replay. Memory of the CPU is read now, unless it is pinned."""
        if isinstance(leaf, Generator) and address(leaf) not in self._generators:
            raise RuntimeError(_NO_CAPTURE_MODE)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in hosts and not is_pinned(leaf):
            return leaf.clone()
        operand = _operand(leaf)
        if operand.memory not in self._before and operand.memory not in self._made:
            self._before[operand.memory] = operand.memory.values().clone()
        return operand

    def _restore(self) -> None:
        """Undo what the operations wrote; their results have no values before the first replay."""
        with _outside_of_modes():
            for memory, values in self._before.items():
                memory.values().copy_(values)
            for one in {made.memory: made for step in self._steps for made in step.made if made is not None}.values():
                has_nan = one.dtype.is_floating_point or one.dtype.is_complex
                one.memory.values().fill_(0xFF if has_nan else 0)
        self._before.clear()
        self._made.clear()


class GraphContext:
    """Replacement of `torch.cuda.graph`: a context that captures a graph in a stream of its own."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: tuple[int, int] | None = None, stream: Stream | None = None, **_more: object
    ) -> None:
        """Take what a real one takes."""
        self._graph = cuda_graph
        self._pool = pool
        self._stream = StreamContext(stream or Stream())

    def __enter__(self) -> None:
        self._stream.__enter__()
        self._graph.capture_begin(self._pool)

    def __exit__(self, *_error: object) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._stream.__exit__()


def graph_pool_handle() -> tuple[int, int]:
    """Replacement of `torch.cuda.graph_pool_handle`."""
    return 0, next(_POOLS)


def make_graphed_callables(callables: Any, sample_args: Any, *_args: object, **_more: object) -> Any:
    """Replacement of `torch.cuda.make_graphed_callables`: the callables themselves, whose results are the same.

    Each forward is captured once, which refuses what a graph cannot hold.
    """
    is_tuple = isinstance(callables, tuple)
    for call, args in zip(callables, sample_args, strict=True) if is_tuple else [(callables, sample_args)]:
        with GraphContext(CUDAGraph()):
            call(*args)
    return callables


def run(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], hosts: Container[int]) -> Any:
    """Call a function of CPU tensors, and record the call if a graph is being captured.

    Args:
        call: the function. Its results depend on its arguments and random numbers only.
        args: its positional arguments.
        kwargs: its keyword arguments.
        hosts: ids of the tensors among them that are memory of a device.
    """
    return capture.OPEN[-1].record(call, args, kwargs, hosts) if capture.OPEN else call(*args, **kwargs)


@contextlib.contextmanager
def _outside_of_modes() -> Iterator[None]:
    """Run operations on the CPU without the simulation's modes, and without autograd."""
    with (
        torch.inference_mode(mode=False),
        torch.no_grad(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
    ):
        yield

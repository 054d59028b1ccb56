"""The simulated device: tensors that report the target's device and compute on the CPU.

Results equal those of the CPU bit for bit; only operations that the target refuses are refused.

It uses private parts of torch (the Python backend under PrivateUse1), and renames that backend for the lifetime of
the process, so it runs in a child process.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._C import (
    DispatchKey,
    TensorBase,
    _disabled_torch_function_impl,
    _get_privateuse1_backend_name,
)
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from ckptmove.verification.case.backward import as_on_a_real_device, is_running, make_guard, note_node
from ckptmove.verification.simulated import targets
from ckptmove.verification.simulated.api import patched_torch_api
from ckptmove.verification.simulated.data import become, parameters_moved_in_place
from ckptmove.verification.simulated.device_module import DeviceModule
from ckptmove.verification.simulated.generator import refuse_generator
from ckptmove.verification.simulated.loading import BEFORE_OTHERS, restore_storage
from ckptmove.verification.simulated.pinning import is_pinned, made_pinned, pin, refuse_pinning
from ckptmove.verification.simulated.rules import WHOLE_OPS, CrossDeviceError, operand_devices, refuse_dtype, schema_of
from ckptmove.verification.simulated.targets import BACKEND, kind_of, tag_of
from ckptmove.verification.simulated.whole import run_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from torch._ops import OpOverload
    from typing_extensions import Self

    Operation = OpOverload[..., Any]

__all__ = ["CrossDeviceError", "SimulatedDevice", "unavailable_reason"]

_SETUP = "_setup_privateuseone_for_python_backend"  # of torch.utils.backend_registration, not in every torch
_DATA: Any = vars(TensorBase)["data"]  # the setter of `Tensor.data`, which copies shape, strides and offset
_CPU = torch.device("cpu")
_COMPOSITE = DispatchKey.CompositeImplicitAutograd


class SimulatedDevice:
    """A simulated accelerator; inside its `with` block, factories and copies accept `device`.

    Attributes:
        target: the target's tag: `cuda:3`, `mps`, `xpu:0`.
        device: the torch.device that represents the target in this process.
    """

    def __init__(self, target: str) -> None:
        """Reserve a device index for `target`; the first device of a process also registers the backend.

        Raises:
            RuntimeError: if this torch cannot simulate; check `unavailable_reason` first.
        """
        reason = unavailable_reason()
        if reason is not None:
            raise RuntimeError(reason)
        _register_backend()
        self.target = target
        self.device = targets.device_for(target)
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Self:
        # The autograd engine counts devices at the first backward of the process and fails on later ones, unless the
        # backward runs in the calling thread.
        self._entered.enter_context(torch.autograd.set_multithreading_enabled(mode=False))
        self._entered.enter_context(as_on_a_real_device(tag_of))
        self._entered.enter_context(parameters_moved_in_place())
        self._entered.enter_context(patched_torch_api(self.device, _place))
        if not targets.is_any_active():  # one mode serves all devices
            self._entered.enter_context(_Simulation())
        targets.enter(self.device)
        self._entered.callback(targets.leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    def active(self) -> SimulatedDevice:
        """The device itself, which is entered as a context; operations of the CPU alone run directly on the CPU."""
        return self

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A detached copy of a CPU tensor on the device, with the same strides if they are dense.

        Raises:
            TypeError: if the target does not have the dtype.
        """
        refuse_dtype(tag_of(self.device), tensor.dtype)
        return SimulatedTensor(tensor.detach().clone(), self.device)

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values as a detached CPU tensor, which shares memory with `tensor`."""
        return tensor.host if isinstance(tensor, SimulatedTensor) else tensor.detach()

    def device_of(self, tensor: torch.Tensor) -> str:
        """A tensor's device tag, as torch prints it on the target's machine: `cuda:0`, `mps:0`, `cpu`."""
        return tag_of(tensor.device)


class SimulatedTensor(torch.Tensor):
    """A tensor of the simulated device; `host` holds its values on the CPU, with the same shape and strides."""

    host: torch.Tensor

    def __new__(cls, host: torch.Tensor, device: torch.device) -> Self:
        strided = host.layout is torch.strided
        outer = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  # no public way to make a tensor without memory
            cls,
            host.size(),
            strides=host.stride() if strided else None,
            storage_offset=host.storage_offset() if strided else None,
            dtype=host.dtype,
            layout=host.layout,
            device=device,
        )
        outer.host = host
        return outer

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own subclasses do

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the base declares the signature of TorchFunctionMode
        cls, func: Operation, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    # With these two methods `nn.Module.to` swaps whole tensors: a CPU tensor cannot take the data of this class.
    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["host"], self.device

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, torch.Tensor], device: torch.device, size: torch.Size, stride: Sequence[int]
    ) -> SimulatedTensor:
        return SimulatedTensor(parts["host"], device)

    @property
    def data(self) -> torch.Tensor:
        return SimulatedTensor(self.host.data, self.device)  # writing to it does not change this tensor's version

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, SimulatedTensor):
            self.host = value.host.data
            _update_metadata(self, value.device)
        else:
            become(self, value)

    is_cuda = property(lambda self: kind_of(self.device) == "cuda")
    is_mps = property(lambda self: kind_of(self.device) == "mps")
    is_xpu = property(lambda self: kind_of(self.device) == "xpu")

    def record_stream(self, s: Any) -> None:
        """Do nothing: its memory is the CPU's."""

    # torch uses its current device for both, which a backend written in Python cannot set.
    def new_tensor(
        self,
        data: Any,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        home = self.device if device is None else device
        return torch.tensor(
            data, dtype=dtype or self.dtype, device=home, requires_grad=requires_grad, pin_memory=pin_memory
        )

    def new(self, *args: Any, **more: Any) -> Any:
        with targets.chosen(self.device):
            return super().new(*args, **more)

    def tolist(self) -> Any:
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.host.numpy(force=True)
        raise TypeError(
            f"can't convert {tag_of(self.device)} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __format__(self, spec: str) -> str:
        return format(self.host, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # unannotated there
        return f"{repr(self.host)[:-1]}, device='{tag_of(self.device)}')"


class _Simulation(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ is not annotated
    """Pass every operation to `_run`; a factory has no simulated operand, so only a mode intercepts it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would otherwise trace each operation with its compiler."""
        return False

    def __torch_dispatch__(
        self, func: Operation, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def unavailable_reason() -> str | None:
    """Why this torch cannot simulate a device in this process, or None if it can."""
    if _register_backend.cache_info().currsize:
        return None
    if not hasattr(backend_registration, _SETUP):
        return f"torch {torch.__version__} cannot host a backend written in Python; torch 2.10 and later can"
    name = _get_privateuse1_backend_name()
    if name != "privateuseone":
        return f"the PrivateUse1 backend of this process is already taken by {name!r}"
    return None


def _run(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Refuse what the target refuses, compute on the inner tensors, and wrap the results."""
    leaves = pytree.tree_leaves((args, kwargs))
    simulated = {id(leaf.host): leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)}
    asked = kwargs.get("device")
    if asked is not None and asked.type == BACKEND:
        asked = targets.meant_by(asked)
    elif not simulated:
        return _run_elsewhere(func, args, kwargs, leaves)
    if func not in WHOLE_OPS and func.has_kernel_for_dispatch_key(_COMPOSITE):
        with _Simulation():  # inference_mode passes composite ops, whose parts may be factories
            return func.decompose(*args, **kwargs)
    inner_args, inner_kwargs = pytree.tree_map(_inner, (args, kwargs))
    try:
        result_devices = operand_devices(func, args, kwargs, tag_of) if asked is None else [asked]
        refuse_generator(schema_of(func).name, leaves, result_devices[0])
        refuse_pinning(schema_of(func).name, args, kwargs)
        results = func(*inner_args, **inner_kwargs)
        if schema_of(func).is_mutable:
            for outer in simulated.values():
                _update_metadata(outer, outer.device)
        return _wrap(results, result_devices, simulated)
    except CrossDeviceError as error:
        if is_running():
            note_node(error)
        raise


def _run_elsewhere(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: list[Any]) -> Any:
    """Run an operation without simulated tensors; its generator or pinned memory may still belong to a device."""
    places = (leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
    refuse_generator(schema_of(func).name, leaves, kwargs.get("device") or next(places, _CPU))
    return made_pinned(func, args, kwargs) if kwargs.get("pin_memory") else func(*args, **kwargs)


def _inner(leaf: Any) -> Any:
    if isinstance(leaf, SimulatedTensor):
        return leaf.host
    return _CPU if isinstance(leaf, torch.device) else leaf


def _wrap(results: Any, result_devices: list[torch.device], simulated: Mapping[int, SimulatedTensor]) -> Any:
    def wrap(leaf: Any, device: torch.device) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in simulated:
            return simulated[id(leaf)]
        return _place(leaf, device) if device.type == BACKEND else leaf

    if len(result_devices) > 1 and isinstance(results, (list, tuple)):
        return type(results)(wrap(leaf, device) for leaf, device in zip(results, result_devices, strict=False))
    return pytree.tree_map(lambda leaf: wrap(leaf, result_devices[0]), results)


def _place(inner: torch.Tensor, device: torch.device) -> SimulatedTensor:
    refuse_dtype(tag_of(device), inner.dtype)
    return SimulatedTensor(inner, device)


def _update_metadata(outer: SimulatedTensor, device: torch.device) -> None:
    """Update the wrapper's metadata after an op that may change the inner tensor's (`t_`, `resize_`)."""
    inner = outer.host
    is_unchanged = (outer.shape, outer.dtype, outer.device) == (inner.shape, inner.dtype, device)
    if not is_unchanged or (inner.layout is torch.strided and outer.stride() != inner.stride()):
        _DATA.__set__(outer, SimulatedTensor(inner, device))


@functools.cache
def _register_backend() -> Any:
    """Rename PrivateUse1, and register the kernels that torch calls without Python dispatch.

    `torch.tensor`, `torch.as_tensor` and sparse constructors allocate, copy and read with Python dispatch switched off.
    Library and guard must live as long as the process: their kernels are removed when they are collected.
    """
    guard = make_guard(torch._C._autograd.DeviceType.PrivateUse1)  # noqa: SLF001  # as in torch's own guard
    module = DeviceModule(targets.kind)
    getattr(backend_registration, _SETUP)(BACKEND, backend_module=module, device_guard=guard)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch has no annotation
    library.impl("empty.memory_format", _kernel(torch.ops.aten.empty.memory_format), "PrivateUse1")
    library.impl("empty_strided", _kernel(torch.ops.aten.empty_strided.default), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", lambda one: one.host.item(), "PrivateUse1")
    torch.serialization.register_package(BEFORE_OTHERS, lambda _: None, restore_storage)
    # CPU kernels for the thread of a data loader, in which no mode is active.
    library.impl("_pin_memory", pin, "CPU")
    library.impl("is_pinned", is_pinned, "CPU")
    for func in WHOLE_OPS:
        library.impl(func.name().removeprefix("aten::"), run_whole(func, _inner, _place), "AutogradPrivateUse1")
    return library, guard


def _kernel(func: Operation) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(func, args, kwargs)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _inner(target).copy_(_inner(source), non_blocking=non_blocking)
    return target

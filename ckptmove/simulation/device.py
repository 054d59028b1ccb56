"""The simulated device: tensors that report the target's device and compute on the CPU.

Results equal those of the CPU bit for bit; only operations that the target refuses are refused.

It uses private parts of torch (the Python backend under PrivateUse1), and renames that backend for the lifetime of
the process, so it runs in a child process.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C import (
    DispatchKey,
    TensorBase,
    _disabled_torch_function_impl,
    _get_privateuse1_backend_name,
)
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from ckptmove.simulation import accounting, identity, targets
from ckptmove.simulation.api import patched_torch_api
from ckptmove.simulation.autocast import autocast_on_device, register_kernels
from ckptmove.simulation.backward import as_on_a_real_device, is_running, make_guard, note_node
from ckptmove.simulation.data import become, parameters_moved_in_place
from ckptmove.simulation.device_module import DeviceModule
from ckptmove.simulation.errors import NotSimulated, RefusedOperation
from ckptmove.simulation.generator import refuse_generator
from ckptmove.simulation.half_precision import compute, lazy_kernels
from ckptmove.simulation.loading import BEFORE_OTHERS, location_of, on_device, restore_storage
from ckptmove.simulation.mps import refuse_on_mps, without_float64
from ckptmove.simulation.pinning import is_pinned, made_pinned, pin, refuse_pinning
from ckptmove.simulation.rules import (
    COMPOSITE_ELSEWHERE,
    WHOLE_OPS,
    operand_devices,
    refuse_dtype,
    schema_of,
)
from ckptmove.simulation.targets import BACKEND, home_of, kind_of, tag_of
from ckptmove.simulation.whole import COMPRESSED, SPARSE_GRADIENT, run_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch._ops import OpOverload
    from typing_extensions import Self

    Operation = OpOverload[..., Any]

__all__ = ["SimulatedDevice", "unavailable_reason"]

_SETUP = "_setup_privateuseone_for_python_backend"  # of torch.utils.backend_registration, not in every torch
_DATA: Any = vars(TensorBase)["data"]  # the setter of `Tensor.data`, which copies shape, strides and offset
_CPU = torch.device("cpu")
_PLAIN: Any = torch.Tensor.__torch_dispatch__
_NO_COMPOSITES = frozenset({*COMPOSITE_ELSEWHERE, *WHOLE_OPS})
_COMPOSITE = DispatchKey.CompositeImplicitAutograd


class SimulatedDevice:
    """A simulated accelerator; inside its `with` block, factories and copies accept `device`.

    Attributes:
        target: the target's tag: `cuda:3`, `mps`, `xpu:0`.
        device: the target's torch.device, as code on the target's machine sees it.
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
        self._home = targets.device_for(target)
        self.device = targets.shown(self._home)
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(as_on_a_real_device(tag_of))
        self._entered.enter_context(parameters_moved_in_place())
        self._entered.enter_context(patched_torch_api(self._home, _place))
        if not targets.is_any_active():  # one mode of each kind serves all devices
            self._entered.enter_context(identity.shown_everywhere(_modes))
            self._entered.enter_context(autocast_on_device())
            self._entered.enter_context(_modes())
        targets.enter(self._home)
        self._entered.callback(targets.leave)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def active(self) -> SimulatedDevice:
        """The device itself, which is entered as a context; operations of the CPU alone run directly on the CPU."""
        return self

    def to_device(self, tensor: torch.Tensor, *, copy: bool = True) -> torch.Tensor:
        """A CPU tensor on the device, detached, with the same strides if they are dense.

        Args:
            tensor: the CPU tensor.
            copy: whether to copy its memory; otherwise the result shares it.

        Raises:
            TypeError: if the target does not have the dtype.
        """
        refuse_dtype(tag_of(self._home), tensor.dtype)
        return SimulatedTensor(tensor.detach().clone() if copy else tensor.detach(), self._home)

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values as a detached CPU tensor, which shares memory with `tensor`."""
        return tensor.host if isinstance(tensor, SimulatedTensor) else tensor.detach()

    def device_of(self, tensor: torch.Tensor) -> str:
        """A tensor's device tag, as torch prints it on the target's machine: `cuda:0`, `mps:0`, `cpu`."""
        return tag_of(home_of(tensor))


class SimulatedTensor(torch.Tensor):
    """A tensor of the simulated device.

    Attributes:
        host: its values on the CPU, with the same shape and strides.
        simulated_index: index of its device in this process. A copy of a torch.device would be that of the target.
    """

    host: torch.Tensor
    simulated_index: int

    def __new__(cls, host: torch.Tensor, device: torch.device) -> Self:
        accounting.count(host, device)
        strided = host.layout is torch.strided
        make: Callable[..., Self] = TensorBase._make_wrapper_subclass  # no public way to make a tensor without memory
        # Like its host, a view in inference mode may be a normal tensor.
        is_normal = torch.is_inference_mode_enabled() and not host.is_inference()
        with torch.inference_mode(mode=False) if is_normal else contextlib.nullcontext():
            outer = make(
                PlainSimulatedTensor if cls is SimulatedTensor else cls,
                host.size(),
                strides=host.stride() if strided else None,
                storage_offset=host.storage_offset() if strided else None,
                dtype=host.dtype,
                layout=host.layout,
                device=device,
            )
        # torch resolves lazy conjugation and negation before it calls `__torch_dispatch__`.
        if host.is_conj():
            torch._C._set_conj(outer, True)
        if host.is_neg():
            torch._C._set_neg(outer, True)
        outer.host = host
        outer.simulated_index = device.index
        return outer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the base declares the signature of TorchFunctionMode
        cls, func: Operation, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run_own(func, types, args, kwargs or {})

    # With these two methods `nn.Module.to` swaps whole tensors: a CPU tensor cannot take the data of this class.
    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["host"], self.simulated_on

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, torch.Tensor], device: torch.device, size: torch.Size, stride: Sequence[int]
    ) -> SimulatedTensor:
        return SimulatedTensor(parts["host"], device)

    @property
    def data(self) -> torch.Tensor:
        return SimulatedTensor(self.host.data, self.simulated_on)  # writing to it does not change this tensor's version

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, SimulatedTensor):
            self.host = value.host.data
            _update_metadata(self, value.simulated_on)
        else:
            become(self, value)

    #: Its device in this process, where `device` is that of the target.
    simulated_on = property(lambda self: targets.at_index(self.simulated_index))
    layout = property(lambda self: self.host.layout)  # torch's getter knows the layouts of real backends only
    # As properties, they answer in every thread, and where function modes are disabled.
    device = property(lambda self: targets.shown(self.simulated_on))
    is_cuda = property(lambda self: kind_of(self.simulated_on) == "cuda")
    is_mps = property(lambda self: kind_of(self.simulated_on) == "mps")
    is_xpu = property(lambda self: kind_of(self.simulated_on) == "xpu")

    def untyped_storage(self) -> Any:
        return on_device(self.host.untyped_storage(), self.simulated_on)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self, nn.Parameter):
            data = SimulatedTensor(self.host, self.simulated_on)
            return torch._utils._rebuild_parameter, (data, self.requires_grad, OrderedDict())  # as a parameter's own
        # torch would set the lazy bits of a restored tensor, and not those of its host.
        plain: Any = self.host.detach().resolve_conj().resolve_neg().requires_grad_(self.requires_grad)
        on_device(plain.untyped_storage(), self.simulated_on)
        return plain.__reduce_ex__(protocol)

    def data_ptr(self) -> int:
        return 0  # torch copies a tensor without memory by `clone`

    def as_subclass(self, cls: type[torch.Tensor]) -> Any:
        made = self.view_as(self)
        made.__class__ = PlainSimulatedTensor if cls in {torch.Tensor, SimulatedTensor} else _both(cls)
        return made

    def placed(self, host: torch.Tensor) -> SimulatedTensor:
        """A CPU tensor on this tensor's device, with the same memory."""
        return _place(host, self.simulated_on)

    def get_device(self) -> int:
        return targets.number_of(self.simulated_on)

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
        home = self.simulated_on if device is None else device
        return torch.tensor(
            data, dtype=dtype or self.dtype, device=home, requires_grad=requires_grad, pin_memory=pin_memory
        )

    def new(self, *args: Any, **more: Any) -> Any:
        with targets.chosen(self.simulated_on):
            return super().new(*args, **more)

    def tolist(self) -> Any:
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.host.numpy(force=True)
        raise TypeError(
            f"can't convert {tag_of(self.simulated_on)} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __format__(self, spec: str) -> str:
        return format(self.host, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # unannotated there
        return f"{repr(self.host)[:-1]}, device='{tag_of(self.simulated_on)}')"


# torch's metaclass disables it in a class with `__torch_dispatch__`. The classes of users need torch's own.
SimulatedTensor.__torch_function__ = torch.Tensor.__dict__["__torch_function__"]  # type: ignore[method-assign]


class PlainSimulatedTensor(SimulatedTensor):
    """A simulated tensor without a class of the user."""

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own subclasses do


class _Simulation(TorchDispatchMode):
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
        if any(kind.__name__ == "DTensor" for kind in types):
            return func(*args, **(kwargs or {}))  # its kernel is not this method: it calls the shards' operations
        return _run_own(func, types, args, kwargs or {})


@functools.cache
def _both(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """A class for simulated tensors of a user's class that has no `__torch_dispatch__`."""
    if issubclass(kind, SimulatedTensor):
        return kind

    class Both(kind, SimulatedTensor):  # type: ignore[misc, valid-type]  # any class of the user
        pass

    Both.__name__ = kind.__name__
    own: Any = kind.__torch_function__
    # torch's metaclass has replaced it. Without a function, it is not a class method.
    Both.__torch_function__ = classmethod(own.__func__) if hasattr(own, "__func__") else own  # type: ignore[method-assign]
    return Both


@contextlib.contextmanager
def _modes() -> Iterator[None]:
    # The autograd engine counts devices at the first backward of the process and fails on later ones, unless the
    # backward runs in the calling thread.
    with torch.autograd.set_multithreading_enabled(mode=False), identity.TargetDevices(), _Simulation():
        yield


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


def _run_own(func: Operation, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation, or let another wrapper subclass among the operands run it on its inner tensors."""
    foreign = [kind for kind in types if not issubclass(kind, SimulatedTensor) and _dispatch_of(kind) is not _PLAIN]
    if not foreign:
        return _run(func, args, kwargs)
    with _modes():
        results = (_dispatch_of(kind)(func, types, args, kwargs) for kind in foreign)
        return next((result for result in results if result is not NotImplemented), NotImplemented)


def _dispatch_of(kind: type) -> Any:
    return getattr(kind, "__torch_dispatch__", _PLAIN)


def _run(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Refuse what the target refuses, compute on the inner tensors, and wrap the results."""
    leaves = pytree.tree_leaves((args, kwargs))
    simulated = {id(leaf.host): leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)}
    asked = kwargs.get("device")
    if asked is not None:
        asked = targets.meant_by(asked) or asked  # functions of torch call factories without a function mode
    if not simulated and (asked is None or asked.type != BACKEND):
        return _run_elsewhere(func, args, kwargs, leaves)
    if func not in _NO_COMPOSITES and func.has_kernel_for_dispatch_key(_COMPOSITE):
        # inference_mode passes composite ops, whose parts may be factories. A function mode would start a C++ one anew.
        with _modes() if _COMPOSITE in func.py_kernels else _Simulation():
            return func.decompose(*args, **kwargs)
    inner_args, inner_kwargs = pytree.tree_map(_inner, (args, kwargs))
    try:
        result_devices = operand_devices(func, args, kwargs, tag_of) if asked is None else [asked]
        refuse_generator(schema_of(func).name, leaves, result_devices[0])
        refuse_pinning(schema_of(func).name, args, kwargs)
        is_on_mps = kind_of(next((one.simulated_on for one in simulated.values()), result_devices[0])) == "mps"
        if is_on_mps:
            refuse_on_mps(func, args, kwargs, leaves)
        results = compute(func, inner_args, inner_kwargs, kind_of(result_devices[0]))
        if is_on_mps:
            results = without_float64(results, leaves)
        if schema_of(func).is_mutable:
            for outer in simulated.values():
                _update_metadata(outer, outer.simulated_on)
        _refuse_csr_gradient(results, leaves)
        return _wrap(results, result_devices, simulated)
    except RefusedOperation as error:
        if is_running():
            note_node(error)
        raise


def _run_elsewhere(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: list[Any]) -> Any:
    """Run an operation without simulated tensors; its generator or pinned memory may still belong to a device."""
    places = (home_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    refuse_generator(schema_of(func).name, leaves, kwargs.get("device") or next(places, _CPU))
    with lazy_kernels():
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


def _refuse_csr_gradient(results: Any, leaves: list[Any]) -> None:
    """Raise an error before torch records a gradient through a compressed tensor, which aborts the process."""
    is_compressed = isinstance(results, torch.Tensor) and results.layout in COMPRESSED
    if is_compressed and torch.is_grad_enabled() and any(getattr(leaf, "requires_grad", False) for leaf in leaves):
        raise NotSimulated(SPARSE_GRADIENT)


def _place(inner: torch.Tensor, device: torch.device) -> SimulatedTensor:
    refuse_dtype(tag_of(device), inner.dtype)
    return SimulatedTensor(inner, device)


def _update_metadata(outer: SimulatedTensor, device: torch.device) -> None:
    """Update the wrapper's metadata after an op that may change the inner tensor's (`t_`, `resize_`)."""
    inner = outer.host
    is_unchanged = (outer.shape, outer.dtype, outer.simulated_on) == (inner.shape, inner.dtype, device)
    if not is_unchanged or (inner.layout is torch.strided and outer.stride() != inner.stride()):
        _DATA.__set__(outer, SimulatedTensor(inner, device))
        outer.simulated_index = device.index


@functools.cache
def _register_backend() -> Any:
    """Rename PrivateUse1, and register the kernels that torch calls without Python dispatch.

    `torch.tensor`, `torch.as_tensor` and sparse constructors allocate, copy and read with Python dispatch switched off.
    Libraries and guard must live as long as the process: their kernels are removed when they are collected.
    """
    guard = make_guard(torch._C._autograd.DeviceType.PrivateUse1)  # as in torch's own guard
    module = DeviceModule(targets.kind)
    getattr(backend_registration, _SETUP)(BACKEND, backend_module=module, device_guard=guard)
    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _kernel(torch.ops.aten.empty.memory_format), "PrivateUse1")
    library.impl("empty_strided", _kernel(torch.ops.aten.empty_strided.default), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", lambda one: one.host.item(), "PrivateUse1")
    torch.serialization.register_package(BEFORE_OTHERS, location_of, restore_storage)
    # CPU kernels for the thread of a data loader, in which no mode is active.
    library.impl("_pin_memory", pin, "CPU")
    library.impl("is_pinned", is_pinned, "CPU")
    # Without a kernel of the backend, torch would run these as composites, which round differently from the kernels.
    for func in COMPOSITE_ELSEWHERE:
        library.impl(func.name().removeprefix("aten::"), _kernel(func), "PrivateUse1")
    for func in WHOLE_OPS:
        library.impl(func.name().removeprefix("aten::"), run_whole(func, _inner, _place), "AutogradPrivateUse1")
    return library, register_kernels(library), guard


def _kernel(func: Operation) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(func, args, kwargs)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _inner(target).copy_(_inner(source), non_blocking=non_blocking)
    return target

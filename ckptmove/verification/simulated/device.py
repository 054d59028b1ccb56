"""The simulated device: tensors that say they are on the target, with real arithmetic on the CPU underneath.

Never changes a figure: results are those of the CPU bit for bit, and only what the target refuses is refused.

Leans on private parts of torch (the Python backend under PrivateUse1), and renames that backend for the life of the
process: run it in a child process.
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
from ckptmove.verification.simulated.api import as_if_it_were_here
from ckptmove.verification.simulated.data import become, replaced_in_place
from ckptmove.verification.simulated.device_module import DeviceModule
from ckptmove.verification.simulated.generator import refuse_generator
from ckptmove.verification.simulated.loading import BEFORE_OTHERS, restore
from ckptmove.verification.simulated.pinning import is_pinned, made_pinned, pin, refuse_pinning
from ckptmove.verification.simulated.rules import WHOLE_OPS, CrossDeviceError, operand_devices, refuse_dtype, schema_of
from ckptmove.verification.simulated.targets import BACKEND, kind_of, name_of
from ckptmove.verification.simulated.whole import in_one_piece

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from torch._ops import OpOverload
    from typing_extensions import Self

    Operation = OpOverload[..., Any]

__all__ = ["CrossDeviceError", "SimulatedDevice", "unavailable_reason"]

_SETUP = "_setup_privateuseone_for_python_backend"  # of torch.utils.backend_registration, not in every torch
_DATA: Any = vars(TensorBase)["data"]  # the setter of `Tensor.data`: takes over shape, strides and offset
_CPU = torch.device("cpu")
_COMPOSITE = DispatchKey.CompositeImplicitAutograd


class SimulatedDevice:
    """A stand-in for one accelerator; inside the `with`, factories and copies understand `device`.

    Attributes:
        target: The tag as it was given: `cuda:3`, `mps`, `xpu:0`.
        device: The torch.device that stands for the target in this process.
    """

    def __init__(self, target: str) -> None:
        """Take a device index for `target`, and register the backend where this is the first of the process.

        Raises:
            RuntimeError: This torch cannot simulate: `unavailable_reason` says why, and is to be asked first.
        """
        reason = unavailable_reason()
        if reason is not None:
            raise RuntimeError(reason)
        _register_backend()
        self.target = target
        self.device = targets.device_for(target)
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Self:
        # The engine counts devices at the first backward of the process and fails on one that came later, unless the
        # backward stays in the calling thread.
        self._entered.enter_context(torch.autograd.set_multithreading_enabled(mode=False))
        self._entered.enter_context(as_on_a_real_device(name_of))
        self._entered.enter_context(replaced_in_place())
        self._entered.enter_context(as_if_it_were_here(self.device, _place))
        if not targets.any_stands():  # it is the same for all of them
            self._entered.enter_context(_Simulation())
        targets.enter(self.device)
        self._entered.callback(targets.leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    def standing(self) -> SimulatedDevice:
        """The device itself, to be entered; beside it, what the CPU does on its own goes straight to the CPU."""
        return self

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a CPU tensor on the device, detached, of the same strides where they are dense; shares nothing.

        Raises:
            TypeError: The target has no such dtype.
        """
        refuse_dtype(name_of(self.device), tensor.dtype)
        return SimulatedTensor(tensor.detach().clone(), self.device)

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values as a plain CPU tensor, detached; shares the memory of `tensor`, simulated or not."""
        return tensor.host if isinstance(tensor, SimulatedTensor) else tensor.detach()

    def device_of(self, tensor: torch.Tensor) -> str:
        """Where a tensor is, as torch would print it on the target's machine: `cuda:0`, `mps:0`, `cpu`."""
        return name_of(tensor.device)


class SimulatedTensor(torch.Tensor):
    """A tensor of the simulated device; `host` holds its values on the CPU, with the same shape and strides."""

    host: torch.Tensor

    def __new__(cls, host: torch.Tensor, device: torch.device) -> Self:
        strided = host.layout is torch.strided
        outer = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  # the one way to make a tensor without memory
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
    def __torch_dispatch__(  # type: ignore[override]  # the base declares the method that TorchFunctionMode wants
        cls, func: Operation, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    # These two make `nn.Module.to` swap whole tensors: a tensor of the CPU cannot take the data of one of these.
    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["host"], self.device

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, torch.Tensor], device: torch.device, size: torch.Size, stride: Sequence[int]
    ) -> SimulatedTensor:
        return SimulatedTensor(parts["host"], device)

    @property
    def data(self) -> torch.Tensor:
        return SimulatedTensor(self.host.data, self.device)  # what is written to it is no new version of this

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, SimulatedTensor):
            self.host = value.host.data
            _describe_again(self, value.device)
        else:
            become(self, value)

    is_cuda = property(lambda self: kind_of(self.device) == "cuda")
    is_mps = property(lambda self: kind_of(self.device) == "mps")
    is_xpu = property(lambda self: kind_of(self.device) == "xpu")

    def record_stream(self, s: Any) -> None:
        """Nothing: its memory is the CPU's."""

    # torch takes the device of both from its current one, which a backend written in Python has no say in.
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
            f"can't convert {name_of(self.device)} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __format__(self, spec: str) -> str:
        return format(self.host, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # unannotated there
        return f"{repr(self.host)[:-1]}, device='{name_of(self.device)}')"


class _Simulation(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ is not annotated
    """Hands every operation to `_run`: a factory has no simulated operand, and is seen only by a mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would lead each operation through its compiler, by which nothing here is compiled."""
        return False

    def __torch_dispatch__(
        self, func: Operation, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def unavailable_reason() -> str | None:
    """Why this torch cannot simulate a device in this process, or None where it can."""
    if _register_backend.cache_info().currsize:
        return None
    if not hasattr(backend_registration, _SETUP):
        return f"torch {torch.__version__} cannot host a backend written in Python, torch 2.10 and later can"
    name = _get_privateuse1_backend_name()
    if name != "privateuseone":
        return f"the PrivateUse1 backend of this process is already taken by {name!r}"
    return None


def _run(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Refuse what the target would refuse, compute on the inner tensors, and wrap what comes out."""
    leaves = pytree.tree_leaves((args, kwargs))
    simulated = {id(leaf.host): leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)}
    asked = kwargs.get("device")
    if asked is not None and asked.type == BACKEND:
        asked = targets.meant_by(asked)
    elif not simulated:
        return _run_elsewhere(func, args, kwargs, leaves)
    if func not in WHOLE_OPS and func.has_kernel_for_dispatch_key(_COMPOSITE):
        with _Simulation():  # inference_mode hands over whole ops, whose parts may be factories
            return func.decompose(*args, **kwargs)
    inner_args, inner_kwargs = pytree.tree_map(_inner, (args, kwargs))
    try:
        landing = operand_devices(func, args, kwargs, name_of) if asked is None else [asked]
        refuse_generator(schema_of(func).name, leaves, landing[0])
        refuse_pinning(schema_of(func).name, args, kwargs)
        results = func(*inner_args, **inner_kwargs)
        if schema_of(func).is_mutable:
            for outer in simulated.values():
                _describe_again(outer, outer.device)
        return _wrap(results, landing, simulated)
    except CrossDeviceError as error:
        if is_running():
            note_node(error)
        raise


def _run_elsewhere(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: list[Any]) -> Any:
    """Run an operation that touches no simulated device, but for a generator of one and for memory pinned for one."""
    places = (leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
    refuse_generator(schema_of(func).name, leaves, kwargs.get("device") or next(places, _CPU))
    return made_pinned(func, args, kwargs) if kwargs.get("pin_memory") else func(*args, **kwargs)


def _inner(leaf: Any) -> Any:
    if isinstance(leaf, SimulatedTensor):
        return leaf.host
    return _CPU if isinstance(leaf, torch.device) else leaf


def _wrap(results: Any, landing: list[torch.device], simulated: Mapping[int, SimulatedTensor]) -> Any:
    def wrap(leaf: Any, device: torch.device) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in simulated:
            return simulated[id(leaf)]
        return _place(leaf, device) if device.type == BACKEND else leaf

    if len(landing) > 1 and isinstance(results, (list, tuple)):
        return type(results)(wrap(leaf, device) for leaf, device in zip(results, landing, strict=False))
    return pytree.tree_map(lambda leaf: wrap(leaf, landing[0]), results)


def _place(inner: torch.Tensor, device: torch.device) -> SimulatedTensor:
    refuse_dtype(name_of(device), inner.dtype)
    return SimulatedTensor(inner, device)


def _describe_again(outer: SimulatedTensor, device: torch.device) -> None:
    """Give the wrapper what its inner tensor is, after an op that may change that (`t_`, `resize_`)."""
    inner = outer.host
    is_as_before = (outer.shape, outer.dtype, outer.device) == (inner.shape, inner.dtype, device)
    if not is_as_before or (inner.layout is torch.strided and outer.stride() != inner.stride()):
        _DATA.__set__(outer, SimulatedTensor(inner, device))


@functools.cache
def _register_backend() -> Any:
    """Rename PrivateUse1, and give it the kernels that torch calls beneath every Python dispatch.

    `torch.tensor`, `torch.as_tensor` and sparse constructors allocate, copy and read with Python dispatch switched off.
    The library must live as long as the process, and so must the guard: its kernels go when it is collected.
    """
    guard = make_guard(torch._C._autograd.DeviceType.PrivateUse1)  # noqa: SLF001  # as torch's own guard says
    module = DeviceModule(targets.kind)
    getattr(backend_registration, _SETUP)(BACKEND, backend_module=module, device_guard=guard)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it so
    library.impl("empty.memory_format", _kernel(torch.ops.aten.empty.memory_format), "PrivateUse1")
    library.impl("empty_strided", _kernel(torch.ops.aten.empty_strided.default), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", lambda one: one.host.item(), "PrivateUse1")
    torch.serialization.register_package(BEFORE_OTHERS, lambda _: None, restore)
    # Of the CPU, for a loader's own thread: no mode stands there.
    library.impl("_pin_memory", pin, "CPU")
    library.impl("is_pinned", is_pinned, "CPU")
    for func in WHOLE_OPS:
        library.impl(func.name().removeprefix("aten::"), in_one_piece(func, _inner, _place), "AutogradPrivateUse1")
    return library, guard


def _kernel(func: Operation) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(func, args, kwargs)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _inner(target).copy_(_inner(source), non_blocking=non_blocking)
    return target

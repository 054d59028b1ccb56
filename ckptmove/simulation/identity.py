"""Show the target's device to Python code in place of the simulated one, and translate it back in arguments."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import _lobpcg, _lowrank, _tensor
from torch._C import StorageBase, TensorBase, _disabled_torch_function_impl
from torch._higher_order_ops.flex_attention import math_attention
from torch._ops import HigherOrderOperator
from torch.nn import functional as F  # noqa: N812  # as in torch's documentation
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._device import DeviceContext

from ckptmove.simulation import legacy, targets
from ckptmove.simulation.data import become
from ckptmove.simulation.errors import NotSimulated
from ckptmove.simulation.mps import refuse_linear
from ckptmove.simulation.pinning import made_pinned
from ckptmove.simulation.replaced import replaced
from ckptmove.simulation.targets import BACKEND, home_of
from ckptmove.simulation.whole import COMPRESSED, SPARSE_GRADIENT, run_compressed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


_FUNCTION: Final = type(torch.manual_seed)
_DEFAULT: Final[Any] = getattr(torch.Tensor.__torch_function__, "__func__", None)
_SET_DATA: Final[Any] = vars(TensorBase)["data"].__set__  # as a function mode is given it
_REQUIRES_GRAD: Final = (torch.Tensor.requires_grad_, vars(TensorBase)["requires_grad"].__set__)
#: Getters that are true for one device type.
_FLAGS: Final[dict[Any, str]] = {vars(TensorBase)[f"is_{kind}"].__get__: kind for kind in ("cuda", "mps", "xpu")}
#: Names in torch of the checks for modes and for tensors with `__torch_function__`.
_CHECKS: Final = frozenset({"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"})
#: Modules that make these checks.
_CHECKING: Final = (
    _lobpcg, _lowrank, _tensor, torch.autograd, torch.functional, torch.nn.functional, torch.overrides
)  # fmt: skip
#: Methods that move a tensor to a device type.
_MOVERS: Final[dict[Any, str]] = {torch.Tensor.cuda: "cuda", torch.Tensor.xpu: "xpu"}
#: Functions that allocate memory below every Python dispatch.
_IN_CPP: Final = frozenset({torch.tensor, torch.Tensor.new_tensor})
#: Message of torch for an operand without a layout in C++: a wrapper of a CSR, CSC, BSR or BSC tensor.
_NO_LAYOUT: Final = "layout_impl is only implemented for TensorImpl subclasses"
#: Types of the functions of torch that are written in C++.
_BUILTIN: Final = (type(torch.mm), type(torch.Tensor.mm))
_NAMED: Final = re.compile(rf"\b{BACKEND}\b(?::(\d+))?")


class _ThreadState(threading.local):
    def __init__(self) -> None:
        #: Functions of torch that run with the mode inside of them, the innermost last.
        self.running: list[Any] = []
        self.is_unseen = False  # whether the next check for modes finds none


_THREAD: Final = _ThreadState()


@functools.cache
def _overrides(kind: type) -> bool:
    method = getattr(kind, "__torch_function__", _disabled_torch_function_impl)
    return getattr(method, "__func__", method) not in {_DEFAULT, _disabled_torch_function_impl}


class TargetDevices(TorchFunctionMode):
    """Function mode in which arguments may name the target's device, and results and errors have it.

    `SimulatedTensor` shows the device without the mode. Tensors of `torch.func` are wrapped in C++, and need it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in filter(_overrides, types):
            if not torch._C._is_torch_function_enabled():  # false in what the method of a class calls
                break
            with self:  # a class of the user needs the mode, which is off here
                result = kind.__torch_function__(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        func, args, kwargs = _translated_call(func, args, kwargs)
        try:
            result = self._call(func, args, kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            if _NO_LAYOUT in str(error) and isinstance(func, _BUILTIN):
                return run_compressed(func, args, kwargs)
            error.args = tuple(as_on_target(one) if isinstance(one, str) else one for one in error.args)
            raise
        if isinstance(result, torch.device):
            return targets.shown(result)
        if func in _FLAGS:
            return targets.kind_of(home_of(args[0])) == _FLAGS[func]
        return as_on_target(result) if isinstance(result, str) else result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function. The mode is off here: it is entered again for a function that torch wrote in Python."""
        if not isinstance(func, _FUNCTION) or _THREAD.running[-1:] == [func]:
            _THREAD.is_unseen = False
            return func(*args, **kwargs)
        _THREAD.running.append(func)
        _THREAD.is_unseen = True
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            _THREAD.running.pop()
            _THREAD.is_unseen = False


def _once_unseen(check: Callable[..., bool]) -> Callable[..., bool]:
    """A check for modes that finds none when a function of torch makes it for its own call."""

    def checked(*tensors: Any) -> bool:
        is_unseen, _THREAD.is_unseen = _THREAD.is_unseen, False
        return not is_unseen and check(*tensors)

    return checked


def as_on_target(text: str) -> str:
    """A message or a type of torch, with the target's name for the simulated device."""
    if BACKEND not in text:
        return text
    return _NAMED.sub(lambda found: targets.tag_of(torch.device(found[0])) if found[1] else targets.kind(), text)


def _translated_call(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """A call with the simulated device in place of the target's.

    Raises:
        RuntimeError: if the target has no device of that index. Its name alone raises nothing.
        NotSimulated: if the function is not simulated.
    """
    if func is torch.device:
        return func, args, kwargs
    other = _replacement(func, args, kwargs)
    if other is not None:
        return other
    # C++ code would take a number for the index of a device of the backend, of any type.
    numbered = args[1:2] if func is torch.Tensor.to else ()
    args = (*args[:1], *map(targets.of_number, numbered), *args[1 + len(numbered) :])
    args = tuple(_translated(one) for one in args)
    kwargs = {name: _translated(targets.of_number(one) if name == "device" else one) for name, one in kwargs.items()}
    if func in _IN_CPP and kwargs.get("pin_memory"):
        return made_pinned, (func, args, kwargs), {}
    return func, args, kwargs


def _replacement(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]] | None:
    """Another call for the same result, of a function that a simulated device needs in another form; else None."""
    if isinstance(func, HigherOrderOperator) and str(func) == "flex_attention":
        return math_attention, args, kwargs  # its eager form
    if func in _REQUIRES_GRAD and args[0].layout in COMPRESSED and kwargs.get("requires_grad", [*args, True][1]):
        raise NotSimulated(SPARSE_GRADIENT)
    if func is F.linear and targets.kind_of(home_of([*args, kwargs.get("input")][0])) == "mps":
        refuse_linear(*args, **kwargs)
    if func == _SET_DATA and home_of(args[0]).type != home_of(args[1]).type:
        return become, args, {}
    if func is torch.Tensor.type and len(args) > 1:
        found = legacy.meant_by(args[1])
        return None if found is None else (torch.Tensor.to, (args[0], *found), {})
    if func in _MOVERS:
        asked = args[1] if len(args) > 1 else kwargs.get("device")
        home = targets.meant_by(targets.translated(_MOVERS[func] if asked is None else asked))
        return None if home is None else (torch.Tensor.to, (args[0], home), {})
    return None


def _translated(value: Any) -> Any:
    return targets.translated(value) if isinstance(value, (str, torch.device)) else value


@contextlib.contextmanager
def shown_everywhere(modes: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Translate devices where torch passes them without a function mode, while the context is open."""
    bindings: Any = torch._C
    group = bindings._group_tensors_by_device_and_dtype  # used by optimizers and `clip_grad_norm_`
    make: Any = TensorBase._make_wrapper_subclass  # used by every wrapper subclass
    on_default: Any = DeviceContext.__torch_function__
    start = threading.Thread.start
    push: Any = bindings._autograd._push_saved_tensors_default_hooks  # used by `saved_tensors_hooks`
    device_of_storage: Any = vars(StorageBase)["device"].__get__  # the getter of both kinds

    def grouped(*args: Any, **kwargs: Any) -> Any:
        return {(targets.shown(device), dtype): found for (device, dtype), found in group(*args, **kwargs).items()}

    def made(*args: Any, **kwargs: Any) -> Any:
        return make(*map(_translated, args), **{name: _translated(one) for name, one in kwargs.items()})

    def in_context(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return on_default(SimpleNamespace(device=targets.translated(mode.device)), func, types, args, kwargs)

    def started(thread: threading.Thread) -> None:
        run = thread.run

        def run_simulated() -> None:
            with modes():
                run()

        thread.run = run_simulated  # type: ignore[method-assign]  # the class of a thread may have its own `run`
        start(thread)

    def pushed(*hooks: Callable[..., Any]) -> None:
        push(*map(_in_mode, hooks))

    def of_storage(storage: Any) -> torch.device:
        home = getattr(storage, "simulated_on", None)
        return device_of_storage(storage) if home is None else targets.shown(home)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(bindings, _group_tensors_by_device_and_dtype=grouped))
        stack.enter_context(replaced(torch.Tensor, _make_wrapper_subclass=staticmethod(made)))
        stack.enter_context(replaced(bindings._autograd, _push_saved_tensors_default_hooks=pushed))  # as at `push`
        stack.enter_context(replaced(DeviceContext, __torch_function__=in_context))
        stack.enter_context(replaced(threading.Thread, start=started))
        stack.enter_context(replaced(torch.UntypedStorage, device=property(of_storage)))
        # There are no weights to arrange for cuDNN.
        stack.enter_context(replaced(torch.backends.cudnn, is_acceptable=lambda _tensor: False))
        for module in _CHECKING:
            for name in _CHECKS & vars(module).keys():
                stack.enter_context(replaced(module, **{name: _once_unseen(vars(module)[name])}))
        yield


def _in_mode(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that runs with the mode: the function that saves a tensor has left it."""

    def run(*args: Any) -> Any:
        with TargetDevices():
            return hook(*args)

    return run


@contextlib.contextmanager
def foreach_by_default(kind: type[torch.Tensor]) -> Iterator[None]:
    """Let torch choose foreach for tensors of a class as for its own, while the context is open."""
    with contextlib.ExitStack() as stack:
        for module in (optimizers, _foreach_utils):
            types = [*module._foreach_supported_types, kind]
            stack.enter_context(replaced(module, _foreach_supported_types=types))
        yield

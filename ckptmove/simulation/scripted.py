"""Let `torch.jit` return Python: parameters of a scripted module cannot be moved to a backend written in Python."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd import forward_ad
from torch.jit import _state as torchscript

from ckptmove.simulation.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_jit: Any = torch.jit
#: Attributes of the modules and functions that they return.
_ATTRIBUTES: Final = frozenset({*dir(_jit.RecursiveScriptModule), *dir(_jit.ScriptFunction)})
#: What they have returned, by identity.
_returned: Final[dict[int, tuple[weakref.ref[Any], str]]] = {}


@contextlib.contextmanager
def as_python() -> Iterator[None]:
    """Disable TorchScript, except for the formulas that torch loads for the first forward-mode AD."""
    was_enabled = bool(torchscript._enabled)
    module: Any = forward_ad
    load = module._maybe_load_decompositions

    def loaded() -> None:
        torchscript.enable()
        try:
            load()
        finally:
            torchscript.disable()

    torchscript.disable()
    compilers = {
        "script": _noted("torch.jit.script", _jit.script),
        "trace": _noted("torch.jit.trace", _jit.trace),
        "trace_module": _noted("torch.jit.trace_module", _jit.trace_module),
    }
    try:
        with replaced(module, _maybe_load_decompositions=loaded), replaced(torch.jit, **compilers):
            yield
    finally:
        if was_enabled:
            torchscript.enable()


def _noted(name: str, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A function that remembers the objects that another one returns."""

    @functools.wraps(compiler)
    def call(*args: Any, **kwargs: Any) -> Any:
        made = compiler(*args, **kwargs)
        with contextlib.suppress(TypeError):  # a builtin has no weak references
            _returned[id(made)] = (weakref.ref(made), name)
        return made

    return call


def missing_attribute(error: AttributeError) -> str:
    """The attribute of a scripted or traced object that its Python does not have; empty for any other error."""
    known = _returned.get(id(error.obj))
    if known is None or known[0]() is not error.obj:
        return ""
    return f"{known[1]}(…).{error.name}" if error.name in _ATTRIBUTES else ""

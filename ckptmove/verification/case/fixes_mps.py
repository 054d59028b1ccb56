"""Fixes for operations and dtypes that mps lacks."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

import torch

from ckptmove.verification.case.edits import NO_FIX, Fix, before, replaced, text_of
from ckptmove.verification.case.fixes import target_name
from ckptmove.verification.case.source import callee, full_name, name_of_module, nodes_of, parents, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.verification.case.fixes import Scene
    from ckptmove.verification.case.source import Line, Running, Spot

_NO_KERNEL: Final = "is not currently implemented for the MPS device"
#: The dtype that replaces one that mps lacks, by torch's message.
_DTYPES: Final = {
    "doesn't support float64": "float32",
    "Trying to convert ComplexDouble to the MPS": "complex64",
}
#: Names of the dtypes that mps lacks, those of their replacements, and the methods that cast to them.
_SMALLER: Final = {"float64": "float32", "double": "float32", "complex128": "complex64", "cdouble": "complex64"}
_WIDER: Final = {"float32": "float64", "complex64": "complex128"}
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_METHODS: Final = {"double": "float", "cdouble": "cfloat"}
_SETTING: Final = 'os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] = "1"'

_ON_CPU: Final = Fix("run the operation on the CPU: pass its tensors with .cpu(), and move its result with .to(device)")


def on_mps(text: str, frames: Sequence[Running], scene: Scene) -> Fix:
    """Fix for an error of the MPS backend; `NO_FIX` for any other error, and for another target.

    Args:
        text: torch's message.
        frames: frames of the user's code, the innermost last.
        scene: all the rest.
    """
    if "mps" not in target_name(scene):
        return NO_FIX
    if _NO_KERNEL in text:
        return with_fallback(scene.home)
    dtype = next((smaller for words, smaller in _DTYPES.items() if words in text), "")
    if dtype:
        return _cast(dtype, frames, scene)
    return _ON_CPU if "MPS" in text else NO_FIX


def with_fallback(home: Line) -> Fix:
    """The setting that runs missing operations on the CPU, before the first import: torch reads it once."""
    for one in tree_of(home.path).body:
        if isinstance(one, ast.Import) or (isinstance(one, ast.ImportFrom) and one.module != "__future__"):
            return before(home.path, one, f"import os; {_SETTING}")
    return Fix("set PYTORCH_ENABLE_MPS_FALLBACK=1 in the environment of the script")


def _cast(dtype: str, frames: Sequence[Running], scene: Scene) -> Fix:
    """The user's line with another dtype; that of the operation that made a tensor if no line asks for the dtype."""
    lines = [(running.spot, running.frame.f_locals) for running in reversed(frames)]
    wide = [one for one in scene.names.values() if str(one.tensor.dtype).removeprefix("torch.") in _SMALLER]
    origins = (scene.watch.origin(one.tensor) for one in wide)
    lines += [(origin.spot, {}) for origin in origins if origin is not None]
    for spot, values in lines:
        changes = list(_changes(spot, dtype, values))
        if changes:
            return replaced(spot.line.path, *changes)
    named = wide[0].name if wide else "the tensor"
    return Fix(f"cast {named} to torch.{dtype} where it is made")


def _changes(spot: Spot, dtype: str, values: Mapping[str, object]) -> Iterator[tuple[ast.expr, str]]:
    """The nodes that name a dtype that mps lacks; else the call that moves a tensor or makes it on the device."""
    path, nodes = spot.line.path, nodes_of(spot)
    calls = {one.func: one for one in nodes if isinstance(one, ast.Call)}
    found = False
    for one in nodes:
        if not isinstance(one, ast.Attribute) or one.attr not in _SMALLER:
            continue
        owner = text_of(path, one.value)
        if one in calls and one.attr in _METHODS:
            found = True
            yield one, f"{owner}.{_METHODS[one.attr]}"
        elif full_name(path, one.value) == "torch":
            found = True
            yield one, f"{owner}.{_SMALLER[one.attr]}"
    call = spot.node
    if found or not isinstance(call, ast.Call):
        return
    given, own = {one.arg for one in call.keywords}, name_of_module(path, "torch")
    moved = [one for one in call.args if not isinstance(values.get(ast.unparse(one)), torch.dtype)]
    is_move = callee(call) == "to" and len(moved) == 1
    if not own or not (is_move or "device" in given) or not given.isdisjoint({"dtype", None}):
        return
    smaller = f"{own}.{dtype}"
    if (
        is_move
        and isinstance(call.func, ast.Attribute)
        and any(isinstance(one, _COMPREHENSIONS) for one in parents(call))
    ):
        moved_one = text_of(path, call.func.value)  # others may have another dtype
        smaller += f" if {moved_one}.dtype == {own}.{_WIDER[dtype]} else {moved_one}.dtype"
    yield call, f"{text_of(path, call)[:-1].rstrip(' ,')}, dtype={smaller})"

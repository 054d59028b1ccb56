"""Fixes for lines by torch's message: a ``backward`` on another device, a device by its name, what mps lacks."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

import torch

from ckptmove.text import Argument
from ckptmove.training.code.calls import device_parameter, required_device
from ckptmove.training.code.source import (
    SCOPES,
    Line,
    assigned,
    assignment_before,
    callee,
    full_name,
    functions_at,
    line_of,
    name_of_module,
    nodes_of,
    parents,
    tree_of,
)
from ckptmove.training.code.watch import is_target
from ckptmove.training.fixes.edits import (
    NO_FIX,
    Fix,
    before,
    called,
    is_loaded,
    on_device,
    replaced,
    text_of,
    with_to,
)
from ckptmove.training.fixes.moves import device_before
from ckptmove.training.fixes.scene import device_in, is_fixed, target_name
from ckptmove.training.fixes.to_numpy import for_numpy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.simulation.errors import WrongGradient
    from ckptmove.training.code.source import Running, Spot
    from ckptmove.training.fixes.scene import Scene

#: torch's errors for a CUDA device that is not there: of a build without CUDA, without a driver, with fewer devices.
_NO_CUDA: Final = re.compile("not compiled with CUDA|Found no NVIDIA driver|invalid device ordinal")
_NUMPY: Final = re.compile("can't convert .* device type tensor to numpy")
_NO_LOCATION: Final = "Attempting to deserialize object on"
_LENGTHS: Final = re.compile("'lengths' argument should be a 1D CPU int64 tensor")
_RNG_STATE: Final = "RNG state must be a torch.ByteTensor"
#: Functions with an argument that has to be on the CPU: its keyword, and its index.
_ON_CPU: Final = {
    "pack_padded_sequence": ("lengths", 1),
    "set_rng_state": ("new_state", 0),
    "set_rng_state_all": ("new_states", 0),
    "set_state": ("new_state", 0),
}
_GENERATOR: Final = re.compile("Expected an? '(.+)' (?:device type for generator|generator device) but found")
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

_RUN_ON_CPU: Final = Fix(
    "run the operation on the CPU: pass its tensors with .cpu(), and move its result with .to(device)"
)


def returned(line: Line, error: WrongGradient) -> tuple[Line, Fix]:
    """The line where a ``backward`` of the user's returns a gradient, and that line with the gradient moved.

    Args:
        line: first line of the ``backward``. Its frame is gone: torch checks the gradient after it returned.
    """
    if not error.argument:
        return line, Fix("return it on the device of the gradient passed to backward")
    device = f"{error.argument}.device"
    functions = functions_at(line.path, line.number)
    returns = [one for each in functions for one in ast.walk(each) if isinstance(one, ast.Return)]
    for one in (one for one in returns if one.value is not None):
        node = _gradient(one, error.index)
        there, written = f"one.to({device})", ast.unparse(node)
        is_several = isinstance(node, (ast.Tuple, ast.ListComp)) or callee(node) == "tuple"
        text = f"tuple(one if one is None else {there} for one in {written})" if is_several else ""
        if there not in written and not written.endswith((f".to({device})", "None")):
            fix = replaced(line.path, (node, text or with_to(line.path, node, device)))
            return line_of(line.path, node.lineno), fix
    return line, Fix(f"return it at {line} where the input is: .to({device})")


def _gradient(one: ast.Return, index: int) -> ast.expr:
    """The gradient at an index of a returned tuple: torch counts the ``None`` of an input that is no tensor, too."""
    value = one.value or ast.Constant(None)
    built = assignment_before(one, value.id) if isinstance(value, ast.Name) else None
    if isinstance(built, ast.Assign) and isinstance(built.value, ast.Tuple):
        value = built.value
    is_each = isinstance(value, ast.Tuple) and not any(isinstance(part, ast.Starred) for part in value.elts)
    return value.elts[index] if isinstance(value, ast.Tuple) and is_each and index < len(value.elts) else value


def of_message(message: str, operands: Sequence[torch.Tensor], running: Running | None, scene: Scene) -> Fix:
    """Fix for an error of torch about one line, by its message; `NO_FIX` if none is known."""
    generator = _GENERATOR.search(message)
    if running is None:
        made = _generator(scene.home.path, "") if generator is not None and generator[1] == "cpu" else None
        return NO_FIX if made is None else _on_cpu(scene.home.path, made)
    if _NO_CUDA.search(message):
        fix = _without_cuda(running, scene)
        is_ordinal = "invalid device ordinal" in message and not (fix.where or scene.home.number)
        number = f"if the target has it, pass its number of devices with {Argument('devices')}"
        return Fix(f"{number}; or use {target_name(scene)}") if is_ordinal else fix
    if _NO_LOCATION in message:
        return _with_location(running, scene)
    if _NUMPY.search(message):
        return for_numpy(running, operands)
    state = "the state of the generator" if _RNG_STATE in message else ""
    if what := "the lengths" if _LENGTHS.search(message) else state:
        return _with_argument_on_cpu(running, what)
    return NO_FIX if generator is None else _with_generator(running, generator[1], scene)


def _without_cuda(running: Running, scene: Scene) -> Fix:
    """A line that names CUDA, with the case's device instead."""
    spot = running.spot
    path = spot.line.path
    device = device_in(running, scene) if spot.statement is None else device_before(spot.statement, running, scene)
    for node in nodes_of(spot):
        if isinstance(node, ast.Call) and callee(node) == "cuda" and isinstance(node.func, ast.Attribute):
            return replaced(path, (node, f"{text_of(path, node.func.value)}.to({device})"))
        if isinstance(node, ast.Constant) and str(node.value).partition(":")[0] == "cuda":
            around = (one for one in parents(node) if isinstance(one, ast.IfExp) or callee(one) == "device")
            return replaced(path, (next(around, node), device))
    return Fix("use the device passed to the function")


def _with_location(running: Running, scene: Scene) -> Fix:
    """A load of a device that is not there, with the target as ``map_location``, or the CPU if none is known there.

    ``load_state_dict`` copies from the CPU to the device of the model.
    """
    spot, device = running.spot, device_in(running, scene)
    path, call = spot.line.path, spot.node
    if not isinstance(call, ast.Call) or not is_loaded(path, call):
        return NO_FIX
    known = '"cpu"' if is_fixed(device, scene) else device
    named = [one.value for one in call.keywords if one.arg == "map_location"]
    given = (named or call.args[1:2])[:1]
    if given:
        return replaced(path, (given[0], known))
    if any(one.arg is None for one in call.keywords):
        return Fix(f"pass map_location={known} to {callee(call)} at {spot.line}")
    return replaced(path, (call, f"{text_of(path, call)[:-1].rstrip(' ,')}, map_location={known})"))


def _with_argument_on_cpu(running: Running, what: str) -> Fix:
    """A line that calls a function of `_ON_CPU`, with its argument on the CPU."""
    spot = running.spot
    path = spot.line.path
    calls = [one for one in nodes_of(spot) if isinstance(one, ast.Call) and callee(one) in _ON_CPU]
    changes = []
    for call in calls:
        name, index = _ON_CPU[callee(call)]
        given = [*(one.value for one in call.keywords if one.arg == name), *call.args[index : index + 1]]
        is_list = callee(call) == "set_rng_state_all"
        changes += [
            (one, f"[one.cpu() for one in {text_of(path, one)}]" if is_list else called(path, one, "cpu()"))
            for one in given
        ]
    return replaced(path, *changes) if changes else Fix(f"move {what} to the CPU at {spot.line}: .cpu()")


def _with_generator(running: Running, wanted: str, scene: Scene) -> Fix:
    """A generator on the device of the numbers that it makes."""
    spot = running.spot
    path, node = spot.line.path, spot.node
    given = {one.arg: one.value for one in getattr(node, "keywords", ())}
    generator = given.get("generator")
    if wanted == "cpu" and isinstance(node, ast.Call) and generator is not None:
        return replaced(path, on_device(path, node, device_in(running, scene)))
    name = "" if generator is None else ast.unparse(generator)
    made = _generator(path, name)
    device = "" if made is None else _device_at(made, running, scene)
    if made is not None and wanted == "cpu":
        return _on_cpu(path, made)
    if made is not None and device:
        return replaced(path, (made, f"{text_of(path, made.func)}(device={device})"))
    if isinstance(node, ast.Call) and "device" in given:
        rest = [one for one in (*node.args, *node.keywords) if getattr(one, "arg", "") != "device"]
        text = f"{text_of(path, node.func)}({', '.join(text_of(path, one) for one in rest)})"
        return replaced(path, (node, f"{text}.to({text_of(path, given['device'])})"))
    return Fix(f"make the generator on {wanted}, for {spot.line}: torch.Generator(device={wanted!r})")


def _on_cpu(path: str, made: ast.Call) -> Fix:
    return replaced(path, (made, f"{text_of(path, made.func)}()"))


def _generator(path: str, name: str) -> ast.Call | None:
    """The only call in a file that makes a generator, for a variable if its name is known; None for several."""
    calls = [one for one in ast.walk(tree_of(path)) if isinstance(one, ast.Call) and callee(one) == "Generator"]
    named = [one for one in calls if any(ast.unparse(assigned(part)[0] or one) == name for part in parents(one))]
    found = named if name else calls
    return found[0] if len(found) == 1 else None


def _device_at(node: ast.expr, running: Running, scene: Scene) -> str:
    """Variable for the target at a node: of its function, which may have ended, or of the file; empty for none."""
    path, home = running.spot.line.path, scene.place.device
    known = device_parameter(node, path, scene.home) or required_device(node)
    scopes = {one for one in parents(node) if isinstance(one, SCOPES)}
    shared = [one for one in (running.frame.f_locals, running.frame.f_globals) if one.get("device") is not None]
    is_there = any(
        isinstance(one, ast.Name)
        and one.id == "device"
        and not isinstance(one.ctx, ast.Load)
        and one.lineno < node.lineno
        and scopes >= {part for part in parents(one) if isinstance(part, SCOPES)}
        for one in ast.walk(tree_of(path))
    )
    return known or ("device" if is_there and shared and is_target(shared[0]["device"], home) else "")


def on_mps(text: str, frames: Sequence[Running], scene: Scene) -> Fix:
    """Fix for an error of the MPS backend; `NO_FIX` for any other error, and for another target."""
    if "mps" not in target_name(scene):
        return NO_FIX
    if _NO_KERNEL in text:
        return with_fallback(scene.home)
    dtype = next((smaller for words, smaller in _DTYPES.items() if words in text), "")
    if dtype:
        return _cast(dtype, frames, scene)
    return _RUN_ON_CPU if "MPS" in text else NO_FIX


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

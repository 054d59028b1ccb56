"""Record the user's calls of torch: where tensors come from, moves to the target, and refused operands.

Calls go through unchanged.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from ckptmove.training.code.calls import devices_of, late_names, user_frames
from ckptmove.training.code.containers import attributes_of
from ckptmove.training.code.source import Line, Spot, assigned, callee, line_of, locals_of, spot_of, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

    from ckptmove.training.code.calls import UserFrame
    from ckptmove.training.code.entrance import Entrance

_OPTIMIZER: Final = torch.optim.Optimizer.__init__.__code__.co_filename
_MODULE: Final = torch.nn.Module.to.__code__.co_filename
_LOADER: Final = DataLoader.__iter__.__code__.co_filename
#: `Origin.operation` of a tensor that a loader made.
LOADED: Final = "torch.utils.data.DataLoader"
#: `Optimizer.add_param_group` reads it for each parameter.
_IS_LEAF: Final[Any] = vars(torch._C.TensorBase)["is_leaf"].__get__  # as a function mode is given it
_MOVES: Final = frozenset({torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.xpu})


class Origin(NamedTuple):
    """The operation that made a tensor that is not on the target."""

    operation: str  # the function's full name: `torch.arange`
    spot: Spot  # the point in the user's code that called it
    parent: torch.Tensor | None  # the operand that is not on the target either; None for none
    device: str  # expression for the target there, from a tensor or a device; empty for none
    module: str  # expression for the target there, from a module; empty for none
    at_import: bool  # whether it was made while the user's script was imported


class Refusal(NamedTuple):
    """A call that torch refused."""

    error: BaseException  # the exception
    operation: str  # full name of the function
    strays: tuple[torch.Tensor, ...]  # operands that are not on the target; zero-dimensional ones excluded
    operands: tuple[torch.Tensor, ...]  # all operands that are tensors


@dataclass(slots=True)
class Transfer:
    """A tensor that the user's code moved to the target."""

    tensor: torch.Tensor  # the tensor before the move
    spot: Spot  # the point in the user's code
    arrived: weakref.ref[torch.Tensor]  # the tensor on the target
    rows: int = 0  # the most rows that were taken of it at once; 0 if it was used whole


class Watch(TorchFunctionMode):
    """Function mode around the user's code.

    Attributes:
        refusals: refused calls in order; a script may go on after one.
        transfers: moves to the target in the user's own lines.
        built: frames of the user's code that built each optimizer, by the optimizer's identity.
        moved: the user's lines that moved a module, in order.
    """

    def __init__(self, device: torch.device, entrance: Entrance) -> None:
        super().__init__()
        self.refusals: list[Refusal] = []
        self.transfers: list[Transfer] = []
        self.built: dict[int, list[UserFrame]] = {}
        self.moved: list[Line] = []
        self._device = device
        self._entrance = entrance
        self._origins: dict[int, tuple[weakref.ref[torch.Tensor], Origin]] = {}
        self._places: dict[tuple[CodeType, int, int], tuple[Spot, str, str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.before_call()
        frame = sys._getframe(1)  # the caller, without a traceback
        self._note_site(func, frame)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            if "out of memory" in str(error):  # its frames hold tensors, and the caller may try a smaller batch
                raise
            operands = _tensors((args, kwargs))
            strays = (one for one in operands if one.device != self._device and one.dim())
            self.refusals.append(Refusal(error, _name(func), tuple(strays), tuple(operands)))
            raise
        if isinstance(result, (torch.Tensor, tuple, list)):
            self._note(func, args, kwargs, result, frame)
        return result

    def before_call(self) -> None:
        """Called before each call of torch; an exception ends it."""

    def origin(self, tensor: torch.Tensor) -> Origin | None:
        """Origin of a tensor; None for one that was made before the mode."""
        known = self._origins.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def lineage(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """A tensor off the target, then the tensors off the target that it was made from, as far as known."""
        seen: set[int] = set()
        following: torch.Tensor | None = tensor
        while following is not None and id(following) not in seen:
            seen.add(id(following))
            yield following
            origin = self.origin(following)
            following = following._base if origin is None else origin.parent
            if following is not None and following.device == self._device:  # a parameter that was moved since
                return

    def _note_site(self, func: Any, frame: FrameType) -> None:
        """Record the user's frames when an optimizer is built, or the line when a module is moved."""
        file = frame.f_code.co_filename
        caller = self._entrance.caller(frame) if file in {_OPTIMIZER, _MODULE} else None
        if caller is None:
            return
        if func == _IS_LEAF and file == _OPTIMIZER:
            optimizer = id(locals_of(frame)["self"])
            if optimizer not in self.built:
                self.built[optimizer] = user_frames(self._entrance, caller)
            return
        line = line_of(caller.f_code.co_filename, caller.f_lineno)
        if func in _MOVES and file == _MODULE and self.moved[-1:] != [line]:
            self.moved.append(line)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, frame: FrameType) -> None:
        given = _tensors((args, kwargs))
        identities = {id(leaf) for leaf in given}
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(made, torch.Tensor) or id(made) in identities:
                continue
            if made.device == self._device:
                self._note_transfer(func, given, made, frame)
                continue
            loading = self._loading(frame)
            caller = loading or self._entrance.caller(frame)
            if caller is not None:
                # A batch begins with its loader: the dataset may stay on the CPU.
                parent = None if loading else next((leaf for leaf in given if leaf.device != self._device), None)
                operation = LOADED if loading else _name(func)
                spot, device, module = self._place(caller)
                origin = Origin(operation, spot, parent, device, module, at_import=not self._entrance.is_loaded)
                self._origins[id(made)] = (weakref.ref(made), origin)

    def _place(self, frame: FrameType) -> tuple[Spot, str, str]:
        """The point that a frame has reached, and expressions for the target there.

        A dataset comes by thousands of times. Its expressions stay the same until its module has another global.
        """
        key = frame.f_code, frame.f_lasti, len(frame.f_globals)
        if key not in self._places:
            spot = spot_of(frame)
            self._places[key] = (spot, *target_in(frame, spot, self._device))
        return self._places[key]

    def _loading(self, frame: FrameType | None) -> FrameType | None:
        """The user's frame that waits for a DataLoader's batch; None if no loader is running."""
        loader = None
        while frame is not None:
            loader = frame if frame.f_code.co_filename == _LOADER else loader
            frame = frame.f_back
        return self._entrance.caller(loader)

    def _note_transfer(self, func: Any, given: list[torch.Tensor], made: torch.Tensor, frame: FrameType) -> None:
        """Record a ``.to(device)`` in the user's own line, and rows taken of the result."""
        is_move = func in _MOVES
        if is_move and given[0].device != self._device and self._entrance.is_own(frame.f_code.co_filename):
            # A script may move thousands of batches before its step. Those that are gone yield no more rows.
            self.transfers = [one for one in self.transfers if one.rows or one.arrived() is not None]
            self.transfers.append(Transfer(given[0], spot_of(frame), weakref.ref(made)))
        for transfer in self.transfers:
            whole = transfer.arrived()
            if whole is not None and any(whole is one for one in given) and are_rows(made, whole):
                transfer.rows = max(transfer.rows, len(made))


def target_in(frame: FrameType, spot: Spot, device: torch.device) -> tuple[str, str]:
    """Expressions for the target that a frame's statement can read.

    Returns:
        A variable that the file passes as a device, the device of a tensor there, or another variable; then an
        attribute of ``self``, a global, or the device of a module's parameters. Empty for none.
    """
    own, other = targets_in(frame, spot, device)
    return next(own, ""), next(other, "")


def targets_in(frame: FrameType, spot: Spot, device: torch.device) -> tuple[Iterator[str], Iterator[str]]:
    """All expressions for the target that a frame's statement can read, in the two kinds of `target_in`."""
    late = late_names(spot)
    found = locals_of(frame)
    names = {name: one for name, one in found.items() if name not in late}
    kept = {f"self.{key}": one for key, one in attributes_of(found.get("self")).items()}
    shared = {name: one for name, one in list(frame.f_globals.items()) if name not in late}
    passed, constant = _names_in(tree_of(spot.line.path))
    visible = shared | names
    plain = (name for name in passed if name in visible and is_target(visible[name], device))
    tensors = (
        f"{name}.device"
        for name, one in names.items()
        if isinstance(one, torch.Tensor) and one.device == device and name not in constant
    )
    own, held, outer = (_devices_in(one, device) for one in (names, kept, shared))
    modules = (f"next({name}.parameters()).device" for name, one in (names | kept).items() if _is_on(one, device))
    return itertools.chain(plain, tensors, own), itertools.chain(held, outer, modules)


@functools.lru_cache
def _names_in(tree: ast.Module) -> tuple[list[str], set[str]]:
    """The variables of a file that it passes as a device, and those that may be a constant, not a tensor.

    The variables that it passes to ``to`` come first: another one may name the type alone.
    """
    moved_to: dict[str, None] = {}
    passed: dict[str, None] = {}
    constant: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [one.value for one in node.keywords if one.arg in {"device", "map_location"}]
            moved_to |= {one.id: None for one in node.args[:1] if callee(node) == "to" and isinstance(one, ast.Name)}
            passed |= {one.id: None for one in given if isinstance(one, ast.Name)}
        target, value = assigned(node)
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [*zip(target.elts, value.elts, strict=False)]
        constant.update(one.id for one, given in pairs if isinstance(one, ast.Name) and isinstance(given, ast.Constant))
    return [*(moved_to | passed)], constant


def is_passed(path: str, expression: str) -> bool:
    """Whether a file passes a variable as a device: ``model.to(device)``."""
    return expression in _names_in(tree_of(path))[0]


def _devices_in(named: dict[str, object], device: torch.device) -> Iterator[str]:
    return (way for name, one in named.items() for way, held in devices_of(name, one) if is_target(held, device))


def is_target(value: object, device: torch.device) -> bool:
    """Whether a value is a device or its name: ``cuda`` is ``cuda:0``."""
    named = str(value) if isinstance(value, (str, torch.device)) else ""
    return named.removesuffix(":0") == str(device).removesuffix(":0")


def _is_on(module: object, device: torch.device) -> bool:
    """Whether a value is a module with a parameter on a device."""
    with suppress(AttributeError):  # it is being built
        return isinstance(module, torch.nn.Module) and any(one.device == device for one in module.parameters())
    return False


def are_rows(one: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor has the shape of some rows of another one, which may be a dataset.

    A table with one number for each row is no dataset, for example the noise of each timestep.
    """
    is_table = whole.dim() == 1 and whole.is_floating_point()
    is_part = bool(one.dim() and whole.dim()) and one.shape[1:] == whole.shape[1:]
    return is_part and not is_table and len(one) < len(whole)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _name(func: Any) -> str:
    """Full name of a function: ``torch.nn.functional.linear``, ``torch.Tensor.add``."""
    name = str(resolve_name(func) or getattr(func, "__name__", func))
    return f"torch.{name}" if name.startswith("_foreach_") else name

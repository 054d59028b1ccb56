"""Convert pickled modules, optimizers, schedulers and ``GradScaler`` to their state_dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.objects import module_attributes
from ckptmove.checkpoint.inventory.shapes import as_dict, members, optimizer_state, role_of_keys, string_keys, unique
from ckptmove.conversion.remap.values import NoPlainValue
from ckptmove.errors import LimitExceeded
from ckptmove.pickles.build import new_dict, new_list, ordered_dict
from ckptmove.pickles.tree import Call, Dict, Sequence, items_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptmove.checkpoint.inventory.shapes import Member
    from ckptmove.limits import Limits
    from ckptmove.pickles.tree import Value

_PARAMETERS: Final = frozenset({"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"})
_COMPILED: Final = "torch._dynamo.eval_frame.OptimizedModule"
_SCHEDULERS: Final = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.SWALR")
#: Attributes of schedulers that their ``state_dict()`` leaves out.
_NOT_SAVED: Final = frozenset({"optimizer", "_scale_fn_ref", "anneal_func"})
#: Attributes of a pickled ``GradScaler`` by the keys of its ``state_dict()``, torch/amp/grad_scaler.py.
_SCALER: Final = {
    "scale": "_init_scale",
    "growth_factor": "_growth_factor",
    "backoff_factor": "_backoff_factor",
    "growth_interval": "_growth_interval",
    "_growth_tracker": "_init_growth_tracker",
}


class ModuleState:
    """The state_dict of one pickled module, in the order of ``Module.state_dict()``.

    ``spend`` is called with the number of attributes of each module, to limit the work: a module that is registered
    several times has several names.
    """

    def __init__(self, limits: Limits, spend: Callable[[int], None]) -> None:
        self._limits = limits
        self._spend = spend
        self._pairs: list[tuple[Value, Value]] = []
        self._frames: list[tuple[Iterator[Member], str, int]] = []
        self._open: set[int] = set()

    def read(self, module: Call) -> Call:
        """Return the ``OrderedDict``."""
        self._enter(module, "")
        while self._frames:
            children, prefix, identity = self._frames[-1]
            for name, child, _ in children:
                if child is not None:
                    self._enter(child, f"{prefix}{name}.")
                    break
            else:
                self._frames.pop()
                self._open.discard(identity)
        return ordered_dict(new_dict(self._pairs))

    def _enter(self, module: Value, prefix: str) -> None:
        if id(module) in self._open:
            raise NoPlainValue(f"its submodule '{prefix[:-1]}' contains itself")
        if len(self._frames) >= self._limits.depth:
            raise LimitExceeded("the depth of a pickle", limit=self._limits.depth, actual=len(self._frames) + 1)
        if type(module) is not Call or not is_module(module):
            raise NoPlainValue(f"its submodule '{prefix[:-1]}' is not written as a module")
        if module.name.startswith("bitsandbytes.") or (
            module.name.startswith("torch.") and ".quantized." in module.name
        ):
            raise NoPlainValue(f"{module.name} writes its own state_dict")
        self._open.add(id(module))
        self._frames.append((self._members(module, prefix), prefix, id(module)))

    def _members(self, module: Call, prefix: str) -> Iterator[Member]:
        """Add the tensors of a module, and return its submodules."""
        pairs = module_attributes(module)
        if pairs is None:
            return iter((("_orig_mod", module.arguments[0], -1),))
        self._spend(len(pairs.flat) + len(prefix))
        transient = _strings(pairs.get("_non_persistent_buffers_set"))
        for registry, skipped in (("_parameters", frozenset[str]()), ("_buffers", transient)):
            for name, value, _ in members(as_dict(pairs.get(registry)) or new_dict()):
                self._spend(1)
                if value is not None and name not in skipped:
                    self._pairs.append((prefix + name, _data(value)))
        return iter(members(as_dict(pairs.get("_modules")) or new_dict()))


def is_module(call: Call) -> bool:
    """Whether a call is a pickled ``nn.Module``, or a compiled one: a call with the module as its first argument."""
    is_compiled = call.name == _COMPILED and len(call.arguments) > 0
    return is_compiled or module_attributes(call) is not None


def _strings(value: Value) -> frozenset[str]:
    """Return the strings of a set."""
    if type(value) is Call and value.arguments:
        value = value.arguments[0]
    return frozenset(item for item in value.items if type(item) is str) if isinstance(value, Sequence) else frozenset()


def _data(value: Value) -> Value:
    """Return the tensor of a parameter: ``Module.state_dict()`` detaches it."""
    while type(value) is Call and value.name in _PARAMETERS and value.arguments:
        value = value.arguments[0]
    return value


def object_state(name: str, attributes: Dict, is_tensor: Callable[[Value], bool]) -> Dict | None:
    """Return the state_dict of an optimizer, a scheduler or a ``GradScaler``; None for other objects."""
    groups, state = _groups(attributes.get("param_groups")), optimizer_state(attributes)
    if state is not None and any(is_tensor(one) for _, params in groups for one in params.items):
        return _optimizer_state(groups, state, is_tensor)
    keys = string_keys(attributes)
    if keys.issuperset(_SCALER.values()):
        return new_dict([(key, attributes.get(source)) for key, source in _SCALER.items()])
    if name.startswith("torch.") and name.endswith(".GradScaler"):
        return new_dict()  # a scaler that is not enabled
    if name.startswith(_SCHEDULERS) or role_of_keys(keys) == "scheduler":
        return _scheduler_state(attributes)
    return None


def _groups(value: Value) -> list[tuple[Dict, Sequence]]:
    """Return the groups of an optimizer with their parameters; nothing if one has no parameters."""
    groups = items_of(value)
    found = [(pairs, pairs.get("params")) for pairs in map(as_dict, groups) if pairs is not None]
    complete = [(pairs, params) for pairs, params in found if isinstance(params, Sequence)]
    return complete if len(complete) == len(groups) else []


def _optimizer_state(groups: list[tuple[Dict, Sequence]], state: Dict, is_tensor: Callable[[Value], bool]) -> Dict:
    """Number the parameters over all groups, as ``torch.optim.Optimizer.state_dict`` does."""
    numbers: dict[int, int] = {}
    packed: list[Value] = []
    for pairs, params in groups:
        for one in params.items:
            numbers.setdefault(id(one), len(numbers))
        options: list[tuple[Value, Value]] = [(key, value) for key, value, _ in unique(pairs) if key != "params"]
        indices: list[Value] = [numbers[id(one)] if is_tensor(one) else one for one in params.items]
        packed.append(new_dict([*options, ("params", new_list(indices))]))
    entries: list[tuple[Value, Value]] = []
    for key, value, _ in unique(state):
        if is_tensor(key) and id(key) not in numbers:
            raise NoPlainValue("the optimizer has state of a parameter that is in no group")
        entries.append((numbers[id(key)] if is_tensor(key) else key, value))
    return new_dict([("state", new_dict(entries)), ("param_groups", new_list(packed))])


def _scheduler_state(attributes: Dict) -> Dict:
    kept: list[tuple[Value, Value]] = []
    for key, value, _ in unique(attributes):
        if key == "lr_lambdas" and isinstance(value, Sequence):
            # `LambdaLR.state_dict` saves objects by their attributes, and functions as None.
            items: list[Value] = [
                item if type(item) is Call and as_dict(item.state) is not None else None for item in value.items
            ]
            kept.append((key, new_list(items)))
        elif key not in _NOT_SAVED:
            kept.append((key, value))
    return new_dict(kept)

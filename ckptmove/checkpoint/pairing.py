"""Match optimizer state with the tensors of the model, by names, order and shapes.

``torch.optim.Optimizer.load_state_dict`` matches by position: the n-th parameter of the saved groups with the n-th of
the new groups. The file has no list of parameters, only a state_dict, which also has buffers, lists tied weights twice,
and is in the order of the module, not of the groups. So the shapes of the moments decide: each group must be a
subsequence of the model's tensors. The leftmost and the rightmost subsequence are compared. If they are equal, a single
group has no other match; for several groups it is strong evidence. If they differ, the leftmost one is returned as
ambiguous. The file does not show whether the script listed parameters of one shape in another order than the model.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from functools import cached_property
from itertools import accumulate, chain, permutations
from math import prod
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from ckptmove.checkpoint.directories import DirectoryInventory, sharding_of
from ckptmove.checkpoint.inventory.partitions import is_partitioned, partitions
from ckptmove.checkpoint.state_dicts import EMA, FreePlaces, Scope, is_never_trained, model_scopes, without_wrappers
from ckptmove.torch_facts.optimizers import TABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.checkpoint.state_dicts import Index, Shape
    from ckptmove.model import Inventory, OptimizerRecord, StateEntry, TensorRecord

#: Shape of a parameter by its state, and its probable dtype; None if the state does not show them.
Known: TypeAlias = "tuple[Shape, str] | None"

_NUMBER: Final = re.compile(r"([0-9]+)")
#: Names of parameters that torch's modules register first, in this order, as they are sorted.
_LEAVES: Final = {"weight": " weight", "bias": " weights bias"}
How: TypeAlias = Literal["names", "order", "sorted", "shapes", "position", "ambiguous", "permuted", "flat", "none"]

#: State keys of tensors that are 0-d for a parameter of any shape.
BOOKKEEPING: Final = frozenset().union(*(row.scalars for row in TABLE))
#: State keys of classes whose moments have the shape of their parameter.
_STATE_KEYS: Final = {row.name: row.known_state for row in TABLE if row.shapes == "parameter"}
_ALL_STATE_KEYS: Final = frozenset().union(*_STATE_KEYS.values())
#: Parts with copies, which no optimizer updates: target networks, and modules in Lightning's hyperparameters.
_COPIES: Final = re.compile(r"target|hyper_parameters")
#: Words to remove before the names of an optimizer and a part are compared: ``opt_G`` and ``netG`` are both ``g``.
_FILLER: Final = re.compile(r"optimizers?|optim|opt|states?|dict|net|model|[^a-z0-9]")


class Pairing(NamedTuple):
    """The parameters of one optimizer, matched with tensors of the model."""

    #: key and tensor (or None) of each parameter: first the keys in the groups, in order, then keys that only the
    #: state has.
    matches: tuple[tuple[str, TensorRecord | None], ...]
    #: how the match was found. ``names``: the optimizer names its parameters. ``order``: the only match in the order
    #: of the model that agrees with all known shapes. ``sorted``: the same in the order of the tensors' names, which
    #: some scripts use for each group. ``shapes``: the order is lost, but no other tensor of the model has the shape.
    #: ``position``: as many parameters as model tensors, but a few shapes differ. ``ambiguous``: one of several
    #: matches. ``permuted``: a single group whose moments have the shapes of the model's tensors in an unusual order.
    #: ``flat``: each parameter is a flat partition of ZeRO, or a flat bucket of Megatron. ``none``: no match.
    how: How
    reason: str = ""  # why the match is incomplete or not certain, else empty

    @property
    def is_certain(self) -> bool:
        """Whether a finding may depend on it."""
        return self.how in {"names", "order", "sorted", "shapes", "position", "flat"}

    def by_key(self) -> dict[str, TensorRecord | None]:
        """Return the tensors by the keys of their parameters."""
        return dict(self.matches)


def pair_all(inventory: Inventory, source: Inventory | None = None) -> tuple[Pairing, ...]:
    """Match each optimizer's parameters with the model's tensors, in time proportional to their number.

    In a directory, an optimizer belongs to the model in its own folder, if that has one. If ``source``, the checkpoint
    that it was converted from, has lost the order of the model's tensors, the order in a single new file was chosen by
    the conversion, and proves nothing.
    """
    if isinstance(inventory, DirectoryInventory):
        found = _pair_in_directory(inventory)
    else:
        lost = source.order_lost if isinstance(source, DirectoryInventory) else ""
        scopes, why = _Scopes(inventory), sharding_of(inventory)
        found = tuple(
            _result(optimizer, [], "none", why) if why else scopes.pair(optimizer, lost)
            for optimizer in inventory.optimizers
        )
    is_megatron = inventory.layout == "megatron"
    if not (is_megatron or any(map(is_partitioned, inventory.optimizers))):
        return found
    named = {one.name: one for one in inventory.tensors if one.role == "optimizer"}
    if is_megatron:
        pairs = zip(inventory.optimizers, found, strict=True)
        return tuple(_with_copies(optimizer, pairing, named) for optimizer, pairing in pairs)
    return tuple(
        _result(optimizer, own, "flat") if is_partitioned(optimizer) and (own := partitions(optimizer, named)) else one
        for optimizer, one in zip(inventory.optimizers, found, strict=True)
    )


def _with_copies(optimizer: OptimizerRecord, pairing: Pairing, named: Mapping[str, TensorRecord]) -> Pairing:
    """Replace parameters by the copies that an optimizer of Megatron steps."""
    from ckptmove.checkpoint.inventory.megatron import copies, is_in_buckets

    found = copies(optimizer, named)
    if is_in_buckets(optimizer):
        return _result(optimizer, [*found.values()], "flat")
    return pairing._replace(matches=tuple((key, found.get(key, record)) for key, record in pairing.matches))


def parameter_names(optimizers: Sequence[OptimizerRecord], pairings: Sequence[Pairing]) -> dict[str, str]:
    """Return the parameter's name of each optimizer tensor by the tensor's name, from :func:`pair_all`.

    Only certain matches are included. The name is that of the tensor in the model. If the file lacks that tensor, it
    is the name that the optimizer gives to the parameter.
    """
    found: dict[str, str] = {}
    for optimizer, pairing in zip(optimizers, pairings, strict=True):
        if optimizer.algorithm == "LBFGS":
            continue  # its first entry holds the state of all parameters
        known = (
            {key: tensor.name for key, tensor in pairing.matches if tensor is not None} if pairing.is_certain else {}
        )
        names = {**_own_names(optimizer), **known}
        for entry in optimizer.state:
            name = names.get(entry.key)
            if name is not None:
                found.update((tensor.name, name) for _, tensor in entry.tensors)
    return found


def _own_names(optimizer: OptimizerRecord) -> dict[str, str]:
    """Return the names that an optimizer gives to its parameters, by their keys; none for numbers."""
    names: dict[str, str] = {}
    for group in optimizer.groups:
        named = group.param_names if len(group.param_names) == len(group.params) else group.params
        names.update((key, name) for key, name in zip(group.params, named, strict=True) if not name.isdigit())
    return names


def _pair_in_directory(inventory: DirectoryInventory) -> tuple[Pairing, ...]:
    unknown = "a file could not be read" if inventory.is_incomplete else inventory.sharding
    if unknown:
        return tuple(_result(optimizer, [], "none", unknown) for optimizer in inventory.optimizers)
    scopes: dict[str, tuple[_Scopes, str]] = {}
    pairings = []
    for optimizer in inventory.optimizers:
        folder = inventory.folder_of(optimizer.where)
        if folder not in scopes:
            near = inventory.in_folder(folder)
            source = near if any("model" in file.roles for file in near.files) else inventory
            scopes[folder] = _Scopes(source), source.order_lost
        pairings.append(scopes[folder][0].pair(optimizer, scopes[folder][1]))
    return tuple(pairings)


class _Scopes:
    """The scopes of a checkpoint, with and without the parameters of a loss, created when first needed."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory

    @cached_property
    def _of_model(self) -> tuple[Scope, ...]:
        """Those of the model; or of its average, if only that was saved (Ultralytics)."""
        return model_scopes(self._inventory) or model_scopes(self._inventory, EMA)

    @cached_property
    def _with_loss(self) -> tuple[Scope, ...]:
        has_loss = any(tensor.role == "criterion" for tensor in self._inventory.tensors)
        return model_scopes(self._inventory, frozenset({"model", "criterion"})) if has_loss else ()

    def pair(self, optimizer: OptimizerRecord, lost: str = "") -> Pairing:
        """Match an optimizer with the model, or with the model and its loss if the model alone does not fit."""
        pairing = _pair(optimizer, self._of_model, lost)
        if (pairing.is_certain and not pairing.reason) or not self._with_loss:
            return pairing
        wider = _pair(optimizer, self._with_loss, lost)
        return wider if wider.is_certain and not wider.reason else pairing


def moments(entry: StateEntry, algorithm: str | None) -> tuple[tuple[str, TensorRecord], ...]:
    """Return the state tensors that ``torch.optim`` creates in the shape of the parameter, with their keys.

    Empty for LBFGS and Adafactor, and for state with keys that torch does not write: other optimizers (GaLore, 8-bit
    Adam) may use torch's keys for tensors of other shapes. ``algorithm`` may be None for any class but these two.
    """
    known = _STATE_KEYS.get(algorithm, frozenset()) if algorithm else _ALL_STATE_KEYS
    entry = entry.without_inner()
    if not known.issuperset([key for key, _ in (*entry.tensors, *entry.scalars)]):
        return ()
    return tuple([pair for pair in entry.tensors if pair[0] not in BOOKKEEPING])


def parameter_shape(entry: StateEntry, algorithm: str | None) -> Shape | None:
    """Return the shape of a parameter by its state, or None if the state does not show it.

    Adafactor's ``row_var`` has the parameter's shape with a last size of 1, and ``col_var`` has the last size
    (``torch/optim/_adafactor.py``, ``_init_group`` of Adafactor).
    """
    if algorithm == "Adafactor":
        tensors = dict(entry.tensors)
        row, column, variance = (tensors.get(key) for key in ("row_var", "col_var", "variance"))
        if row is not None and column is not None:
            return (*row.shape[:-1], *column.shape[-1:])
        return None if variance is None else variance.shape
    own = moments(entry, algorithm)
    return own[0][1].shape if own else None


class _Fit(NamedTuple):
    """Tensors of a scope for the listed parameters, in the order of the groups; None for a name without a tensor."""

    scope: Scope
    tensors: list[TensorRecord | None]
    is_unique: bool

    @property
    def is_whole(self) -> bool:
        return len(self.tensors) == len(self.scope.parameters)


def _pair(optimizer: OptimizerRecord, scopes: tuple[Scope, ...], lost: str = "") -> Pairing:
    groups = [group.params for group in optimizer.groups]
    keys = [key for group in groups for key in group]
    if not keys or not scopes:
        lacking = "file holds no model tensors" if keys else "groups list no parameters"
        return _result(optimizer, [], "none", f"the {lacking}")
    named = _by_names(optimizer, keys, scopes)
    if named is not None or lost:
        return named or _without_order(optimizer, keys, scopes, lost)
    if optimizer.algorithm == "LBFGS" and not any(len(scope.parameters) == len(keys) for scope in scopes):
        return _as_one_vector(optimizer, len(keys), scopes)
    state = {entry.key: parameter_shape(entry, optimizer.algorithm) for entry in optimizer.state}
    without_state = [key for key in keys if key not in state]
    frozen = [tensor.shape for tensor in scopes[-1].parameters if is_never_trained(tensor.name)]
    state |= zip(without_state, frozen, strict=True) if len(without_state) == len(frozen) else ()
    shapes = [[state.get(key) for key in group] for group in groups]
    fits = [fit for scope in scopes if (fit := _fit(shapes, scope)) is not None]
    if fits:
        return _by_shapes(optimizer, [_by_kinds(shapes, fit) for fit in fits])
    if len(groups) > 1:
        fits = [fit for scope in scopes if (fit := _fit(shapes, scope.sorted_by_name)) is not None and fit.is_unique]
        if fits:
            return _by_shapes(optimizer, fits)._replace(how="sorted")
    return _not_in_order(optimizer, [shape for group in shapes for shape in group], scopes)


def _as_one_vector(optimizer: OptimizerRecord, count: int, scopes: tuple[Scope, ...]) -> Pairing:
    """Match LBFGS, whose state is one vector for all parameters, with consecutive tensors of as many elements."""
    sizes = {one.shape for entry in optimizer.state for key, one in entry.tensors if key in {"d", "prev_flat_grad"}}
    for scope in scopes:
        ends = [0, *accumulate(prod(one.shape) * (1 + one.dtype.startswith("complex")) for one in scope.parameters)]
        for start in range(len(ends) - count):
            if sizes <= {(ends[start + count] - ends[start],)}:
                run = scope.parameters[start : start + count]
                return _result(optimizer, run, "ambiguous", "its state shows how many elements there are, not which")
    return _result(optimizer, [], "none", "no run of the model's tensors has as many elements as its state")


def _without_order(optimizer: OptimizerRecord, keys: list[str], scopes: tuple[Scope, ...], lost: str) -> Pairing:
    """Match by the shapes of the state only; ambiguous if several tensors have one shape."""
    known: dict[str, Known] = {}
    for entry in optimizer.state:
        shape, own = parameter_shape(entry, optimizer.algorithm), moments(entry, optimizer.algorithm)
        known[entry.key] = (shape, own[0][1].dtype if own else "") if shape is not None else None
    states = [known.get(key) for key in keys]
    if optimizer.state and not any(states):
        return _result(optimizer, [], "none", f"{lost}, and the state does not tell the parameters' shapes")
    matches = [(scope, match_unordered(states, scope.parameters)) for scope in scopes]
    fits = [_Fit(scope, *match) for scope, match in matches if match is not None]
    if not fits:
        return _result(optimizer, [], "none", f"{lost}, and the shapes of the state do not fit them")
    fit, rivals = _decide(optimizer, [fit for fit in fits if fit.is_whole] or fits)
    if not rivals and not fit.is_unique:
        rivals = f"{lost}, and several have one shape"
    return _result(optimizer, fit.tensors, "ambiguous" if rivals else "shapes", rivals)


def _not_in_order(optimizer: OptimizerRecord, flat: list[Shape | None], scopes: tuple[Scope, ...]) -> Pairing:
    """Match an optimizer whose state fits no scope in order: by position, in a common other order, or not at all."""
    for scope in scopes:
        differing = _differing_shapes(flat, scope)
        if differing:
            reason = (
                f"the state of {differing} of {len(flat)} parameters has another shape than the tensor at its place"
            )
            return _result(optimizer, scope.parameters, "position", reason)
    if len(optimizer.groups) == 1 and (arranged := _in_another_order(flat, scopes)):
        return _result(optimizer, arranged[0], "ambiguous", arranged[1])
    if len(optimizer.groups) == 1 and any(_is_permuted(flat, scope) for scope in scopes):
        reason = "the state has the shapes of the model's tensors, but in another order"
        return _result(optimizer, [], "permuted", reason)
    return _result(optimizer, [], "none", "the shapes of the state do not fit the model's tensors in their order")


def _result(optimizer: OptimizerRecord, tensors: Sequence[TensorRecord | None], how: How, reason: str = "") -> Pairing:
    listed = [key for group in optimizer.groups for key in group.params]
    known = set(listed)
    rest = [entry.key for entry in optimizer.state if entry.key not in known]
    found = [*tensors, *[None] * (len(listed) + len(rest) - len(tensors))]
    return Pairing(matches=tuple(zip((*listed, *rest), found, strict=True)), how=how, reason=reason)


def _by_names(optimizer: OptimizerRecord, keys: list[str], scopes: tuple[Scope, ...]) -> Pairing | None:
    """Match by ``param_names`` (torch 2.6 and up), or by keys that are names; None if less than half have a tensor."""
    names: list[str] = []
    for group in optimizer.groups:
        names += group.param_names if len(group.param_names) == len(group.params) else group.params
    if all(name.isdigit() for name in names):
        return None
    wanted = [without_wrappers(name) for name in names]
    fits = [_Fit(scope, [scope.named.get(name) for name in wanted], True) for scope in scopes]
    fewest = min(fit.tensors.count(None) for fit in fits)
    if fewest * 2 > len(keys):
        return None
    fit, rivals = _decide(optimizer, [fit for fit in fits if fit.tensors.count(None) == fewest])
    if rivals:
        return _result(optimizer, fit.tensors, "ambiguous", rivals)
    reason = f"{fewest} of {len(keys)} names are not in the model" if fewest else ""
    return _result(optimizer, fit.tensors, "names", reason)


def _by_shapes(optimizer: OptimizerRecord, fits: list[_Fit]) -> Pairing:
    """Choose the best of the scopes that fit: first those with no other parameters, then those with a unique match."""
    best = [fit for fit in fits if fit.is_whole] or [fit for fit in fits if fit.is_unique] or fits
    fit, rivals = _decide(optimizer, best)
    if not rivals and not fit.is_unique:
        rivals = "several tensors of the model have these shapes in this order"
    return _result(optimizer, fit.tensors, "ambiguous" if rivals else "order", rivals)


def _decide(optimizer: OptimizerRecord, fits: list[_Fit]) -> tuple[_Fit, str]:
    """Choose a scope, by the name of the optimizer if several fit (``opt_G``: ``netG``), and report other matches."""
    fits = [fit for fit in fits if not _COPIES.search(fit.scope.where)] or fits
    distinct = {tuple(map(_view, fit.tensors)): fit for fit in reversed(fits)}
    if len(distinct) == 1:
        return fits[0], ""
    purpose = _purpose(optimizer.where)
    purposes = [(_purpose(fit.scope.where), fit) for fit in distinct.values()]
    named = [fit for own, fit in purposes if purpose and own and (purpose.startswith(own) or own.startswith(purpose))]
    if len(named) == 1:
        return named[0], ""
    return fits[0], "it fits several parts: " + ", ".join(fit.scope.where for fit in fits if fit.scope.where)


def _view(tensor: TensorRecord | None) -> object:
    """Return an identity of a tensor under any of its names: tied weights are one parameter, not two candidates."""
    if tensor is None or tensor.storage is None:
        return tensor and tensor.name
    return tensor.storage, tensor.storage_offset, tensor.shape, tensor.stride


def _purpose(where: str) -> str:
    return _FILLER.sub("", where.lower())


def _differing_shapes(shapes: list[Shape | None], scope: Scope) -> int:
    """Return how many known shapes differ from the tensor at the same position; 0 if that match is implausible.

    A match by position is plausible if the counts agree, most shapes agree, and the known shapes are not those of the
    scope in another order: in that case the groups only have another order than the model, which is not a fault.
    """
    if len(shapes) != len(scope.parameters) or _is_permuted(shapes, scope):
        return 0
    pairs = [(shape, tensor.shape) for shape, tensor in zip(shapes, scope.parameters, strict=True)]
    differing = sum(shape is not None and shape != own for shape, own in pairs)
    return 0 if differing * 2 > len(shapes) else differing


def _in_another_order(shapes: list[Shape | None], scopes: tuple[Scope, ...]) -> tuple[list[TensorRecord], str] | None:
    """Match in an order that scripts choose, with the reason: last to first, or the parts of the model permuted."""
    for scope in scopes:
        backward = list(reversed(scope.parameters))
        if _agree(shapes, backward) and len(shapes) == len(backward):
            return backward, (
                "it fits the model's tensors only from last to first: correct if the script lists them in this order"
            )
    rest = list(scopes[:-1])
    arranged: list[TensorRecord] = []
    while len(arranged) < len(shapes):
        part = next((one for one in rest if _agree(shapes[len(arranged) :], one.parameters)), None)
        if part is None:
            return None
        rest.remove(part)
        arranged += part.parameters
    return (
        arranged,
        "it fits the parts of the model only in another order: correct if the script lists them in this order",
    )


def _agree(shapes: list[Shape | None], tensors: Sequence[TensorRecord]) -> bool:
    """Whether each tensor has a shape, and each known shape is the tensor's."""
    both = zip(shapes, tensors, strict=False)
    return len(tensors) <= len(shapes) and all(shape is None or shape == tensor.shape for shape, tensor in both)


def _is_permuted(shapes: list[Shape | None], scope: Scope) -> bool:
    """Whether every known shape has its own tensor in a scope that is large enough."""
    known = Counter(shape for shape in shapes if shape is not None)
    enough = len(shapes) <= len(scope.parameters)
    return bool(known) and enough and known <= Counter(tensor.shape for tensor in scope.parameters)


def _fit(groups: list[list[Shape | None]], scope: Scope) -> _Fit | None:
    """Match the groups with a scope: all in one subsequence, or each in its own (weight decay and no decay)."""
    flat = [shape for group in groups for shape in group]
    if len(flat) > len(scope.parameters):
        return None
    if len(flat) == len(scope.parameters) and _agree(flat, scope.parameters):
        return _Fit(scope, list(scope.parameters), True)
    for runs in ([flat], groups):
        left = _embed(runs, scope.forward)
        if left is not None:
            last = len(scope.parameters) - 1
            right = _embed([run[::-1] for run in reversed(runs)], scope.backward)
            is_unique = right is not None and left == [last - place for place in reversed(right)]
            return _Fit(scope, [scope.parameters[place] for place in left], is_unique)
    return None


def _by_kinds(groups: list[list[Shape | None]], fit: _Fit) -> _Fit:
    """Match three groups: all biases, all other vectors (weights of normalizations), and all other parameters.

    Ultralytics groups so (ultralytics/engine/trainer.py, ``build_optimizer``). If two of these groups have the same
    shapes, nothing shows which is which.
    """
    kinds: dict[str, list[TensorRecord]] = {}
    for tensor in fit.scope.parameters if len(groups) > 1 else ():
        kind = "bias" if tensor.name.endswith("bias") else "vector" if len(tensor.shape) == 1 else "rest"
        kinds.setdefault(kind, []).append(tensor)
    orders: list[list[TensorRecord | None]] = [
        [*chain.from_iterable(order)]
        for order in (permutations(kinds.values()) if len(kinds) == len(groups) else ())
        if all(len(own) == len(group) and _agree(group, own) for group, own in zip(groups, order, strict=True))
    ]
    return _Fit(fit.scope, orders[0], len(orders) == 1) if orders else fit


def _embed(runs: list[list[Shape | None]], index: Index) -> list[int] | None:
    """Return the leftmost places of each run in turn, each used once; None if a run does not fit."""
    free = FreePlaces(index.places)
    places: list[int] = []
    for run in runs:
        at = -1
        for shape in run:
            found = free.take(shape, at)
            if found is None:
                return None
            at = found
            places.append(at)
    return places


def match_unordered(
    states: Sequence[Known], tensors: Sequence[TensorRecord]
) -> tuple[list[TensorRecord | None], bool] | None:
    """Assign one tensor to each state, by shape, then by dtype, then by name in natural order.

    Args:
        states: shape and dtype of each parameter, in the order of the groups. If all are None, the tensors are assigned
            in order.
        tensors: tensors that can be parameters, in any order.

    Returns:
        The tensors, and whether no other match is as good; None if a shape has fewer tensors than states.
    """
    wanted = Counter(known[0] for known in states if known is not None)
    there = Counter(tensor.shape for tensor in tensors)
    if len(states) > len(tensors) or not wanted <= there:
        return None
    ordered = sorted(tensors, key=_natural_order)
    if not wanted:
        return list(ordered[: len(states)]), len(tensors) == 1
    found: list[TensorRecord | None] = [None] * len(states)
    for with_dtype in (True, False):
        taken = {id(tensor) for tensor in found}
        pools: dict[object, deque[TensorRecord]] = {}
        for tensor in ordered:
            if id(tensor) not in taken:
                key = (tensor.shape, tensor.dtype) if with_dtype else tensor.shape
                pools.setdefault(key, deque()).append(tensor)
        for place, known in enumerate(states):
            if known is not None and found[place] is None:
                pool = pools.get(known if with_dtype else known[0])
                found[place] = pool.popleft() if pool else None
    return found, all(there[shape] == 1 for shape in wanted)


def _natural_order(tensor: TensorRecord) -> tuple[tuple[int, str], ...]:
    """Return a sort key that compares the numbers in a name as numbers: layer 2 before layer 10.

    A weight comes before the bias of its module, as in torch's own modules.
    """
    module, dot, leaf = tensor.name.rpartition(".")
    name = f"{module}{dot}{_LEAVES.get(leaf, leaf)}"
    return tuple((len(part.lstrip("0")) if part.isdigit() else 0, part) for part in _NUMBER.split(name))

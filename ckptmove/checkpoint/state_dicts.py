"""Find the state_dicts of a model, and the parts of it that an optimizer can cover."""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.checkpoint.roles import is_kept_aside

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from ckptmove.model import Inventory, Role, TensorRecord

Shape: TypeAlias = "tuple[int, ...]"

#: Prefix of DataParallel, DDP and AveragedModel. Models have parts of this name too (the policies of tensordict), so it
#: is a wrapper's only in front.
MODULE: Final = "module."
#: Prefixes that only wrappers write, at any place in a key: torch.compile, activation checkpointing, FSDP, Lightning.
INNER_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_forward_module.")
#: Buffer of ``torch.optim.swa_utils.AveragedModel``, whose other keys begin with ``module.``.
AVERAGED: Final = "n_averaged"
WRAPPERS: Final = (MODULE, *INNER_WRAPPERS)
_INNER: Final = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(map(re.escape, INNER_WRAPPERS))})")
#: Buffers of torch's own modules; the floating ones look like parameters.
_BUFFERS: Final = frozenset({"running_mean", "running_var", "num_batches_tracked"})
#: Those of torch/nn/utils/parametrizations.py: ``_SpectralNorm`` and ``_Orthogonal``.
_OF_PARAMETRIZATION: Final = frozenset({"_u", "_v", "base"})
_PARAMETRIZATION: Final = re.compile(r"(?:^|\.)parametrizations\.[^.]+\.[0-9]+\.[^.]+\Z")
#: Ends of the buffers of torch/nn/utils/spectral_norm.py, beside a parameter with the end ``_orig``. Those of
#: torch/nn/utils/weight_norm.py have the same end, but are parameters.
_OF_SPECTRAL_NORM: Final = ("_u", "_v")
#: Weight that Ultralytics freezes, and lists in the optimizer (ultralytics/nn/modules/block.py, ``DFL``).
_FROZEN: Final = ".dfl.conv.weight"
_PARAMETER_DTYPES: Final = ("float", "bfloat", "complex")
#: Keys of a state_dict inside the root's entry for the model.
_INNER_CONTAINERS: Final = frozenset({"state_dict", "model_state_dict", "model_state"})
#: Key of the model next to other state, as DeepSpeed writes it; also the prefix of a wrapper.
_MODULE: Final = ".module"
#: Default roles of a model's tensors.
_MODEL: Final[frozenset[Role]] = frozenset({"model"})
EMA: Final[frozenset[Role]] = frozenset({"ema"})
#: A model with more first parts than this is not a set of networks with an optimizer each.
_MOST_PARTS: Final = 16


class Scope:
    """Tensors of a model, or of a part of it, that one optimizer can cover.

    Attributes:
        where: common path of the tensors.
        parameters: tensors that can be parameters, each view once, in the order of the file.
    """

    def __init__(self, where: str, members: Sequence[tuple[str, TensorRecord]]) -> None:
        self.where = where
        self._members = members
        self.parameters = _parameters(tensor for _, tensor in members)

    @cached_property
    def named(self) -> dict[str, TensorRecord]:
        """The tensors by their keys in the state_dict, without wrapper prefixes."""
        return {without_wrappers(key): tensor for key, tensor in self._members}

    @cached_property
    def sorted_by_name(self) -> Scope:
        """The same tensors in the order of their keys."""
        return Scope(self.where, sorted(self._members, key=lambda member: member[0]))

    @cached_property
    def forward(self) -> Index:
        """The positions of the parameters by shape."""
        return Index(tensor.shape for tensor in self.parameters)

    @cached_property
    def backward(self) -> Index:
        """The same, counted from the end."""
        return Index(tensor.shape for tensor in reversed(self.parameters))


class Index:
    """Positions of shapes in a sequence, in ascending order; None means any shape."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        listed = tuple(shapes)
        by_shape: dict[Shape | None, list[int]] = {}
        for place, shape in enumerate(listed):
            by_shape.setdefault(shape, []).append(place)
        self.places: dict[Shape | None, Sequence[int]] = {**by_shape, None: range(len(listed))}


class FreePlaces:
    """Places that are still free; a run of taken places is skipped in one step."""

    def __init__(self, places: dict[Shape | None, Sequence[int]]) -> None:
        self._places = places
        self._taken: set[int] = set()
        self._skip: dict[tuple[Shape | None, int], int] = {}

    def take(self, shape: Shape | None, after: int) -> int | None:
        """Take the first free place of a shape after another place; return None if all are taken."""
        places = self._places.get(shape, ())
        start = end = bisect_right(places, after)
        while end < len(places) and places[end] in self._taken:
            end = self._skip.get((shape, end), end + 1)
        while start < end:  # path compression: the next search from here goes straight to the end
            following = self._skip.get((shape, start), start + 1)
            self._skip[shape, start] = end
            start = following
        if end == len(places):
            return None
        self._taken.add(places[end])
        return places[end]


class RootKeys:
    """The keys of a checkpoint's root, which may contain dots."""

    def __init__(self, inventory: Inventory) -> None:
        self._keys = frozenset(inventory.root_keys)
        self._sections = frozenset(path for path, _ in inventory.sections if path.endswith(_MODULE))
        self._has_dots = any("." in key for key in self._keys)

    @cached_property
    def _hashes(self) -> frozenset[int]:
        return frozenset([value for key in self._keys for end, value in _hashes(key) if end == len(key)])

    def first(self, path: str) -> int:
        """Return the end of the shortest root key that a path begins with, before a dot; -1 without a match."""
        if not self._has_dots:
            end = path.find(".")
            return end if path[: max(end, 0)] in self._keys else -1
        for end, value in _hashes(path):
            if end < len(path) and value in self._hashes and path[:end] in self._keys:
                return end
        return -1

    def split(self, name: str) -> tuple[str, str]:
        """Split a tensor's name into the path of its state_dict and its key there.

        The path is empty if the root itself is the state_dict.
        """
        end = -1 if name in self._keys or not self._keys else self.first(name)
        if end == -1:
            return "", name
        following, _, rest = name[end + 1 :].partition(".")
        inner = end + 1 + len(following)
        if rest and (following in _INNER_CONTAINERS or name[:inner] in self._sections):
            end = inner
        return name[:end], name[end + 1 :]


def _hashes(path: str) -> Iterator[tuple[int, int]]:
    """Iterate over the end of each part of a path, with a hash of all parts up to there, in linear time."""
    value = begin = 0
    while begin <= len(path):
        dot = path.find(".", begin)
        end = len(path) if dot == -1 else dot
        value = hash((value, path[begin:end]))
        yield end, value
        begin = end + 1


def model_scopes(inventory: Inventory, roles: Container[Role] = _MODEL) -> tuple[Scope, ...]:
    """Return the scopes of a checkpoint: each state_dict, or each first part of the only one, and last the whole model.

    Scopes without a parameter are omitted.
    """
    parts = _by_state_dict(inventory, model_tensors(inventory, roles))
    whole = Scope("", [member for inside in parts.values() for member in inside])
    if len(parts) == 1:
        parts = _first_parts(*parts.popitem())
    several = parts.items() if 1 < len(parts) <= _MOST_PARTS else ()
    scopes = [Scope(where, inside) for where, inside in several]
    return tuple(scope for scope in (*scopes, whole) if scope.parameters)


def parameters_by_state_dict(inventory: Inventory) -> dict[str, tuple[TensorRecord, ...]]:
    """Return the parameters of each state_dict of the model, by its path; those of the EMA copy if there is no model.

    Quantized weights are included. Copies that are no longer trained (``best_model``) are left out.
    """
    tensors = model_tensors(inventory) or model_tensors(inventory, EMA)
    parts = _by_state_dict(inventory, tensors)
    # DeepSpeed saves its frozen parameters twice.
    copies = {where for where in parts if is_kept_aside(where) or where.endswith("frozen_param_fragments")}
    trained = {where: inside for where, inside in parts.items() if where not in copies} or parts
    return {where: _parameters((tensor for _, tensor in inside), quantized=True) for where, inside in trained.items()}


def _by_state_dict(inventory: Inventory, tensors: Iterable[TensorRecord]) -> dict[str, list[tuple[str, TensorRecord]]]:
    """Group tensors by state_dict, with their keys there."""
    roots = RootKeys(inventory)
    parts: dict[str, list[tuple[str, TensorRecord]]] = {}
    for tensor in tensors:
        container, key = roots.split(tensor.name)
        parts.setdefault(container, []).append((key, tensor))
    return parts


def _first_parts(container: str, members: list[tuple[str, TensorRecord]]) -> dict[str, list[tuple[str, TensorRecord]]]:
    """Return the tensors of each submodule of the model, or nothing if it has many submodules."""
    parts: dict[str, list[tuple[str, TensorRecord]]] = {}
    for key, tensor in members:
        prefix, inner = strip_wrappers(key)
        first, _, rest = inner.partition(".")
        parts.setdefault(prefix + first, []).append((rest or first, tensor))
        if len(parts) > _MOST_PARTS:
            return {}
    return {f"{container}.{part}".lstrip("."): inside for part, inside in parts.items()}


def model_tensors(inventory: Inventory, roles: Container[Role] = _MODEL) -> tuple[TensorRecord, ...]:
    """Return the model's tensors in the order of the file, without EMA copies; a wrapper subclass is one tensor."""
    return tuple(tensor for tensor in without_inner(inventory.tensors) if tensor.role in roles)


def without_inner(tensors: Iterable[TensorRecord]) -> Iterator[TensorRecord]:
    """Iterate over the tensors that a script sees: a wrapper subclass without the tensors inside it."""
    records = tuple(tensors)
    if "wrapper-subclass" not in {record.kind for record in records}:  # nearly always
        return iter(records)
    return (record for record, outermost in with_wrappers(records) if outermost is None or record is outermost)


def with_wrappers(tensors: Iterable[TensorRecord]) -> Iterator[tuple[TensorRecord, TensorRecord | None]]:
    """Iterate over tensors, each with its outermost wrapper subclass (which can be itself), or None.

    In the order of the file, the tensors inside a wrapper follow it.
    """
    outermost, inside = None, ""
    for record in tensors:
        if outermost is not None and not record.name.startswith(inside):
            outermost = None
        if outermost is None and record.kind == "wrapper-subclass":
            outermost, inside = record, f"{record.name}." if record.name else ""
        yield record, outermost


def strip_wrappers(key: str) -> tuple[str, str]:
    """Split a key of a state_dict into the prefixes of wrappers and the rest."""
    end = 0
    while key.startswith(WRAPPERS, end):
        end = key.index(".", end) + 1
    return key[:end], key[end:]


def inner_wrappers(key: str) -> list[str]:
    """Return the prefixes in a key of a state_dict that only wrappers write, at any place."""
    return _INNER.findall(key)


def without_inner_wrappers(key: str, which: Container[str] = INNER_WRAPPERS) -> str:
    """Remove prefixes that only wrappers write from a key of a state_dict, at every place."""
    return _INNER.sub(lambda found: "" if found[0] in which else found[0], key)


def without_wrappers(key: str) -> str:
    """Remove all prefixes of wrappers from a key of a state_dict."""
    return without_inner_wrappers(strip_wrappers(key)[1])


def is_buffer(name: str) -> bool:
    """Whether a tensor has the name of a buffer of torch's own modules; others show it only beside their parameter."""
    leaf = name.rpartition(".")[2]
    return leaf in _BUFFERS or (leaf in _OF_PARAMETRIZATION and _PARAMETRIZATION.search(name) is not None)


def is_never_trained(name: str) -> bool:
    """Whether a tensor has the name of a parameter that its library always freezes."""
    return name.endswith(_FROZEN)


def buffers(tensors: Iterable[TensorRecord]) -> set[str]:
    """Return the names of the tensors that are buffers of torch's own modules, by their names."""
    names = [tensor.name for tensor in tensors]
    found = {name for name in names if is_buffer(name)}
    normed = [name for name in names if name.endswith(_OF_SPECTRAL_NORM)]
    weights = {name for name in names if name.endswith("_orig")} if normed else ()
    return found.union(name for name in normed if f"{name[:-2]}_orig" in weights)


def _parameters(tensors: Iterable[TensorRecord], *, quantized: bool = False) -> tuple[TensorRecord, ...]:
    """Return the floating tensors except known buffers, tied ones once; only Parameters if any is marked as one."""
    seen: set[object] = set()
    found = []
    listed = tuple(tensors)
    left_out = buffers(listed)
    for tensor in listed:
        is_weight = tensor.dtype.startswith(_PARAMETER_DTYPES) or (quantized and tensor.kind == "quantized")
        if not is_weight or tensor.kind == "storage" or tensor.name in left_out:
            continue
        view = (tensor.storage, tensor.storage_offset, tensor.shape, tensor.stride)
        if tensor.storage is None or view not in seen:
            seen.add(view)
            found.append(tensor)
    marked = tuple(tensor for tensor in found if tensor.kind == "parameter")
    return marked or tuple(found)

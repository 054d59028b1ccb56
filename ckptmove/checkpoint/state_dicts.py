"""The parts of a model that an optimizer may cover: containers of state_dicts, and the submodules in them.

Never knows an optimizer: matching is ``pairing``.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from ckptmove.model import Inventory, Role, TensorRecord

Shape: TypeAlias = "tuple[int, ...]"

#: What wrappers put before each key: DataParallel and DDP, torch.compile, FSDP, Lightning's DeepSpeed strategy.
WRAPPERS: Final = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")
#: Buffers of torch's own modules that are floating tensors, and so look like parameters.
_BUFFERS: Final = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_PARAMETER_DTYPES: Final = ("float", "bfloat", "complex")
#: Keys of a state_dict inside the model's own entry of the root.
_INNER_CONTAINERS: Final = frozenset({"state_dict", "model_state_dict", "model_state"})
#: The roles of the tensors of a model, where no others are asked for.
_MODEL: Final[frozenset[Role]] = frozenset({"model"})
#: A model with more first parts than this is no collection of networks with an optimizer each.
_MOST_PARTS: Final = 16


class Scope:
    """A run of model tensors that one optimizer may be for.

    Attributes:
        where: path that the tensors have in common.
        parameters: those that can be parameters, each view once, in the order of the file.
    """

    def __init__(self, where: str, members: Sequence[tuple[str, TensorRecord]]) -> None:
        """Gather a scope.

        Args:
            where: path that the tensors have in common.
            members: keys in the state_dict and their tensors.
        """
        self.where = where
        self._members = members
        self.parameters = _parameters(tensor for _, tensor in members)

    @cached_property
    def named(self) -> dict[str, TensorRecord]:
        """The tensors by their keys in the state_dict, without wrapper prefixes."""
        return {strip_wrappers(key)[1]: tensor for key, tensor in self._members}

    @cached_property
    def sorted_by_name(self) -> Scope:
        """The same tensors in the order of their keys."""
        return Scope(self.where, sorted(self._members, key=lambda member: member[0]))

    @cached_property
    def forward(self) -> Index:
        """The parameters' places by shape."""
        return Index(tensor.shape for tensor in self.parameters)

    @cached_property
    def backward(self) -> Index:
        """The same, counted from the end."""
        return Index(tensor.shape for tensor in reversed(self.parameters))


class Index:
    """Places of shapes in a sequence, in ascending order; None stands for any shape."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        listed = tuple(shapes)
        by_shape: dict[Shape | None, list[int]] = {}
        for place, shape in enumerate(listed):
            by_shape.setdefault(shape, []).append(place)
        self.places: dict[Shape | None, Sequence[int]] = {**by_shape, None: range(len(listed))}

    def all_free(self) -> FreePlaces:
        """A fresh account of which places are taken: none."""
        return FreePlaces(self.places)


class FreePlaces:
    """Places that are not taken yet; a run of taken ones is skipped in one step."""

    def __init__(self, places: dict[Shape | None, Sequence[int]]) -> None:
        self._places = places
        self._taken: set[int] = set()
        self._skip: dict[tuple[Shape | None, int], int] = {}

    def take(self, shape: Shape | None, after: int) -> int | None:
        """Take the first free place of a shape after a place; None where there is none."""
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
    """The keys of a checkpoint's root, which may hold dots as the paths below them do."""

    def __init__(self, inventory: Inventory) -> None:
        self._keys = frozenset(inventory.root_keys)
        self._has_dots = any("." in key for key in self._keys)

    @cached_property
    def _hashes(self) -> frozenset[int]:
        return frozenset([value for key in self._keys for end, value in _hashes(key) if end == len(key)])

    def first(self, path: str) -> int:
        """Where the shortest key of the root ends that a path begins with, a dot after it; -1 where none does."""
        if not self._has_dots:
            end = path.find(".")
            return end if path[: max(end, 0)] in self._keys else -1
        for end, value in _hashes(path):
            if end < len(path) and value in self._hashes and path[:end] in self._keys:
                return end
        return -1

    def split(self, name: str) -> tuple[str, str]:
        """A tensor's name as the path that its state_dict stands under, and its key there.

        The path is empty where the root itself is the state_dict.
        """
        end = -1 if name in self._keys or not self._keys else self.first(name)
        if end == -1:
            return "", name
        following, _, rest = name[end + 1 :].partition(".")
        if following in _INNER_CONTAINERS and rest:
            end += 1 + len(following)
        return name[:end], name[end + 1 :]


def _hashes(path: str) -> Iterator[tuple[int, int]]:
    """Where each part of a path ends, with a hash of all parts up to there: none is read twice, however many."""
    value = begin = 0
    while begin <= len(path):
        dot = path.find(".", begin)
        end = len(path) if dot == -1 else dot
        value = hash((value, path[begin:end]))
        yield end, value
        begin = end + 1


def model_scopes(inventory: Inventory, roles: Container[Role] = _MODEL) -> tuple[Scope, ...]:
    """The scopes of a checkpoint: each state_dict, or each first part of the only one, and last the whole model.

    Scopes without a parameter are left out.

    Args:
        inventory: of the checkpoint.
        roles: of the tensors that are looked at.
    """
    roots = RootKeys(inventory)
    parts: dict[str, list[tuple[str, TensorRecord]]] = {}
    for tensor in model_tensors(inventory, roles):
        container, key = roots.split(tensor.name)
        parts.setdefault(container, []).append((key, tensor))
    whole = Scope("", [member for inside in parts.values() for member in inside])
    if len(parts) == 1:
        parts = _first_parts(*parts.popitem())
    several = parts.items() if 1 < len(parts) <= _MOST_PARTS else ()
    scopes = [Scope(where, inside) for where, inside in several]
    return tuple(scope for scope in (*scopes, whole) if scope.parameters)


def _first_parts(container: str, members: list[tuple[str, TensorRecord]]) -> dict[str, list[tuple[str, TensorRecord]]]:
    """The submodules of the model, where there are few of them; otherwise nothing."""
    parts: dict[str, list[tuple[str, TensorRecord]]] = {}
    for key, tensor in members:
        prefix, inner = strip_wrappers(key)
        first, _, rest = inner.partition(".")
        parts.setdefault(prefix + first, []).append((rest or first, tensor))
        if len(parts) > _MOST_PARTS:
            return {}
    return {f"{container}.{part}".lstrip("."): inside for part, inside in parts.items()}


def model_tensors(inventory: Inventory, roles: Container[Role] = _MODEL) -> tuple[TensorRecord, ...]:
    """The model's tensors in the order of the file, without any EMA copy; a wrapper subclass counts as one tensor.

    Args:
        inventory: of the checkpoint.
        roles: of the tensors that are looked at.
    """
    return tuple(tensor for tensor in without_inner(inventory.tensors) if tensor.role in roles)


def without_inner(tensors: Iterable[TensorRecord]) -> Iterator[TensorRecord]:
    """The tensors that a script sees: a wrapper subclass stands for the tensors inside it.

    Args:
        tensors: in the order of the file.
    """
    return (record for record, outermost in with_wrappers(tensors) if outermost is None or record is outermost)


def with_wrappers(tensors: Iterable[TensorRecord]) -> Iterator[tuple[TensorRecord, TensorRecord | None]]:
    """Each tensor with the outermost wrapper subclass that it is, or is inside of; None for most.

    Args:
        tensors: in the order of the file, where what is inside of a wrapper follows it.
    """
    outermost, inside = None, ""
    for record in tensors:
        if outermost is not None and not record.name.startswith(inside):
            outermost = None
        if outermost is None and record.kind == "wrapper-subclass":
            outermost, inside = record, f"{record.name}." if record.name else ""
        yield record, outermost


def strip_wrappers(key: str) -> tuple[str, str]:
    """A key of a state_dict as the prefixes that wrappers have put before it, and the rest."""
    end = 0
    while key.startswith(WRAPPERS, end):
        end = key.index(".", end) + 1
    return key[:end], key[end:]


def is_buffer(name: str) -> bool:
    """Whether a tensor's name says that it is a buffer of one of torch's own modules."""
    return name.rpartition(".")[2] in _BUFFERS


def _parameters(tensors: Iterable[TensorRecord]) -> tuple[TensorRecord, ...]:
    """Floating tensors that are no known buffer, tied ones once; only Parameters where the file tells them apart."""
    seen: set[object] = set()
    found = []
    for tensor in tensors:
        if not tensor.dtype.startswith(_PARAMETER_DTYPES) or tensor.kind == "storage" or is_buffer(tensor.name):
            continue
        view = (tensor.storage, tensor.storage_offset, tensor.shape, tensor.stride)
        if tensor.storage is None or view not in seen:
            seen.add(view)
            found.append(tensor)
    marked = tuple(tensor for tensor in found if tensor.kind == "parameter")
    return marked or tuple(found)

"""The walk over the tree: names, roles and what hangs together, in the order of the file.

Never recurses, whatever the file nests, and never visits more nodes than the limits allow.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from ckptmove.errors import LimitExceeded
from ckptmove.inventory import mentions, shapes
from ckptmove.inventory.optimizers import draft_optimizer
from ckptmove.pickles.lore import TensorReader
from ckptmove.pickles.tree import Call, Dict, List, Node, Persistent, Sequence
from ckptmove.roles import role_of_key, role_of_leaf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.inventory.optimizers import EntryDraft, OptimizerDraft
    from ckptmove.inventory.shapes import Member
    from ckptmove.model import Limits, Mention, Role, TensorRecord
    from ckptmove.pickles.tree import Value

_COUNTERS: Final = frozenset({
    "epoch", "step", "global_step", "global_steps", "iter", "iteration", "iterations", "iter_num", "it", "num_updates",
    "steps", "frame", "batches_in_epoch_completed", "epochs_completed", "batch_num_total", "epoch_num", "n_iter",
})  # fmt: skip
_COUNTER_DEPTH: Final = 3
_DEVICE_RNG_WORDS: Final = ("cuda", "gpu", "device", "xpu", "npu")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the walk is.

    Attributes:
        path: path of the container.
        key: its last part.
        role: what it is for, as far as that is known.
        depth: how many containers are around its members.
        optimizer: the optimizer whose ``state`` the container is, or None.
        entry: the optimizer state that tensors in here belong to, or None.
        entry_path: length of the path that the names in ``entry`` leave out.
    """

    path: str = ""
    key: str = ""
    role: Role | None = None
    depth: int = 0
    optimizer: OptimizerDraft | None = None
    entry: EntryDraft | None = None
    entry_path: int = 0


@dataclass(slots=True)
class Walk:
    """What a walk gathers.

    Attributes:
        limits: bounds on visits and depth.
        reader: the storages met on the way.
        tensors: every tensor.
        mentions: devices named outside of tensors.
        optimizers: optimizers, while they are gathered.
        contents: parts of a resume that were seen.
        rng_devices: path and length of each list of per-device RNG states.
        modules: paths of pickled modules.
    """

    limits: Limits
    reader: TensorReader = field(default_factory=TensorReader)
    tensors: list[TensorRecord] = field(default_factory=list)
    mentions: list[Mention] = field(default_factory=list)
    optimizers: list[OptimizerDraft] = field(default_factory=list)
    contents: set[str] = field(default_factory=set)
    rng_devices: list[tuple[str, int]] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    _frames: list[tuple[Iterator[Member], _Place, int]] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)

    def run(self, root: Value) -> None:
        """Visit everything below the root.

        Raises:
            LimitExceeded: the tree is deeper or has more paths than the limits allow.
            DamagedPickle: a tensor is not written as torch writes it.
        """
        visits = 0
        self._visit("", root, -1, _Place())
        while self._frames:
            iterator, place, identity = self._frames[-1]
            for key, value, start in iterator:
                visits += 1
                before = len(self._frames)
                self._visit(key, value, start, place)
                if len(self._frames) != before:
                    break
            else:
                self._frames.pop()
                self._open.discard(identity)
            if visits > self.limits.visits:
                raise LimitExceeded("paths through the pickle", limit=self.limits.visits, actual=visits)

    def _visit(self, key: str, value: Value, start: int, place: _Place) -> None:
        if type(value) is Call:
            if self.reader.is_tensor(value):
                self._tensor(key, value, place)
            elif value.name == "torch.device":
                self._mention(mentions.device_mention(value, _join(place.path, key)))
            else:
                self._enter_call(key, value, place)
        elif type(value) is Dict:
            self._enter_dict(key, value, value, place)
        elif isinstance(value, Sequence):
            self._enter_sequence(key, value, place)
        elif type(value) is Persistent:
            record = self.reader.storage(value, _join(place.path, key), self._leaf_role(key, place))
            if record is not None:
                self._keep(record, key, place)
        elif not isinstance(value, Node):
            self._atom(key, value, start, place)

    # --- leaves ------------------------------------------------------------------------------------------------------

    def _tensor(self, key: str, call: Call, place: _Place) -> None:
        record = self.reader.tensor(call, _join(place.path, key), self._leaf_role(key, place))
        if record.role == "rng":
            self.contents.add("rng")
        self._keep(record, key, place)

    def _keep(self, record: TensorRecord, key: str, place: _Place) -> None:
        self.tensors.append(record)
        if place.entry is not None:
            inner = f"{place.path[place.entry_path :]}.{key}" if len(place.path) > place.entry_path else key
            place.entry.tensors.append((inner.removeprefix("."), record))

    def _leaf_role(self, key: str, place: _Place) -> Role:
        if place.role == "model":
            return role_of_leaf(key) or "model"
        return place.role or role_of_key(key) or "other"

    def _atom(self, key: str, value: Value, start: int, place: _Place) -> None:
        if place.entry is not None:
            place.entry.scalars.append((key, value))
        elif type(value) is str:
            self._mention(mentions.string_mention(key, value, _join(place.path, key), start))
        elif type(value) is int:
            if key in _COUNTERS and place.depth <= _COUNTER_DEPTH and place.role in {None, "other"}:
                self.contents.add("counter")
            self._mention(mentions.ids_mention(key, value, _join(place.path, key)))

    def _mention(self, mention: Mention | None) -> None:
        if mention is not None:
            self.mentions.append(mention)

    # --- containers --------------------------------------------------------------------------------------------------

    def _push(self, iterator: Iterator[Member], place: _Place, node: Node) -> None:
        """Go into a node, unless the walk is inside it already."""
        identity = id(node)
        if identity in self._open:
            return
        if len(self._frames) >= self.limits.depth:
            raise LimitExceeded("the depth of a pickle", limit=self.limits.depth, actual=len(self._frames) + 1)
        self._open.add(identity)
        self._frames.append((iterator, place, identity))

    def _inner(self, key: str, place: _Place) -> _Place:
        """The place of a container's members, with the role that its key points to."""
        role = place.role or (role_of_key(key) if key else None)
        if role == "rng":
            self.contents.add("rng")
        path = _join(place.path, key)
        if place.optimizer is not None:
            entry = place.optimizer.open_entry(key)
            return _Place(path, key, role, place.depth + 1, None, entry, len(path))
        return _Place(path, key, role, place.depth + 1, None, place.entry, place.entry_path)

    def _enter_dict(self, key: str, pairs: Dict, node: Node, place: _Place) -> None:
        inner = self._inner(key, place)
        keys = shapes.string_keys(pairs)
        if {"state", "param_groups"} <= keys and shapes.is_optimizer(pairs):
            self._enter_optimizer(pairs, node, inner)
            return
        if inner.role in {None, "scheduler", "scaler"}:
            inner = self._known_by_keys(keys, inner)
        if inner.role is None and self._looks_like_state_dict(pairs, keys, node):
            inner = replace(inner, role="model")
        self._push(shapes.members(pairs), inner, node)

    def _known_by_keys(self, keys: set[str], inner: _Place) -> _Place:
        if shapes.is_scheduler(keys):
            self.contents.add("scheduler")
            return replace(inner, role="scheduler")
        if shapes.is_scaler(keys):
            self.contents.add("scaler")
            return replace(inner, role="scaler")
        if shapes.is_rng_file(keys):
            self.contents.add("rng")
            return replace(inner, role="rng")
        return inner

    def _looks_like_state_dict(self, pairs: Dict, keys: set[str], node: Node) -> bool:
        """Tensors only, under the keys of a module: a dict of data has tensors too, but no dotted keys."""
        if not pairs.flat or not all(
            type(value) is Call and self.reader.is_tensor(value) for value in pairs.flat[1::2]
        ):
            return False
        return type(node) is Call or not keys.isdisjoint({"weight", "bias"}) or any("." in key for key in keys)

    def _enter_optimizer(self, pairs: Dict, node: Node, inner: _Place) -> None:
        draft = draft_optimizer(pairs, inner.path)
        self.optimizers.append(draft)
        inside = replace(inner, role="optimizer", entry=None)
        state = shapes.as_dict(pairs.get("state"))
        rest = [(name, value, start) for name, value, start in shapes.members(pairs) if name != "state"]
        self._push(iter(rest), inside, node)
        if state is not None:
            below = replace(inside, path=_join(inside.path, "state"), key="state", optimizer=draft)
            self._push(_state_members(state, draft), below, state)

    def _enter_sequence(self, key: str, value: Sequence, place: _Place) -> None:
        inner = self._inner(key, place)
        self._mention(mentions.ids_mention(key, value, inner.path))
        strings = mentions.speaks_of_devices(key)
        rows = [
            (str(index), item, start)
            for index, (item, start) in enumerate(zip(value.items, value.starts, strict=True))
            if isinstance(item, Node) or (strings and type(item) is str)
        ]
        if inner.role == "rng" and type(value) is List and rows and _is_per_device(key):
            self.rng_devices.append((inner.path, len(value.items)))
        if rows:
            self._push(iter(rows), inner, value)

    def _enter_call(self, key: str, call: Call, place: _Place) -> None:
        pairs = shapes.as_dict(call)
        if pairs is not None and call.state is None:
            self._enter_dict(key, pairs, call, place)
            return
        state = shapes.attributes(call)
        if state is not None and shapes.is_module(state):
            self._enter_module(key, call, state, place)
            return
        if pairs is not None:
            self._enter_dict(key, pairs, call, place)
            return
        if state is not None and shapes.is_optimizer(state):
            self._enter_optimizer(state, call, self._inner(key, place))
            return
        self._push(_object_members(call, state), self._inner(key, place), call)

    def _enter_module(self, key: str, call: Call, state: Dict, place: _Place) -> None:
        """A pickled ``nn.Module``: its tensors are named as its ``state_dict()`` would name them."""
        inner = self._inner(key, place)
        if inner.role in {None, "other"}:
            is_loss = call.name.startswith("torch.nn.modules.loss.")
            inner = replace(inner, role="criterion" if is_loss else "model")
        self.modules.append(inner.path)
        self._push(_module_members(state), inner, call)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path and key else path or key


def _is_per_device(key: str) -> bool:
    return any(word in key.lower() for word in _DEVICE_RNG_WORDS)


def _state_members(state: Dict, draft: OptimizerDraft) -> Iterator[Member]:
    """State by parameter; a pickled optimizer object keys it by the parameter itself."""
    for key, value, start in state.pairs():
        yield draft.object_keys.get(id(key)) or shapes.key_text(key), value, start


def _module_members(state: Dict) -> Iterator[Member]:
    """Parameters, buffers, submodules, and then the plain attributes that may hold tensors too."""
    attributes = {name: (value, start) for name, value, start in shapes.members(state)}
    for group in ("_parameters", "_buffers", "_modules"):
        pairs = shapes.as_dict(attributes.pop(group)[0])
        yield from shapes.members(pairs) if pairs is not None else ()
    for name, (value, start) in attributes.items():
        yield name, value, start


def _object_members(call: Call, state: Dict | None) -> Iterator[Member]:
    """Everything that an object of an unknown class was given: arguments, items and attributes."""
    for holder in (call.args, call.kwargs, call.appended, call.state if state is None else None):
        if isinstance(holder, Sequence):
            for index, (item, start) in enumerate(zip(holder.items, holder.starts, strict=True)):
                yield str(index), item, start
        elif isinstance(holder, Node):
            yield "state", holder, -1
    if call.assigned is not None:
        yield from shapes.members(call.assigned)
    if state is not None:
        yield from shapes.members(state)

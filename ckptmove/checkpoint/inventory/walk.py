"""Walk over the tree of a pickle and collect its tensors, optimizers and mentions, with names and roles.

The walk is not recursive, and the size of the pickle limits the number of visited paths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, cast

from ckptmove.checkpoint.inventory import mentions, objects, shapes
from ckptmove.checkpoint.inventory.budget import Budget
from ckptmove.checkpoint.inventory.numpy_scalars import scalar_value
from ckptmove.checkpoint.inventory.optimizers import draft_flat_optimizer, draft_optimizer
from ckptmove.checkpoint.inventory.place import MemberContext, settled_role
from ckptmove.checkpoint.roles import role_of_key, role_of_leaf
from ckptmove.checkpoint.trainers import COUNTER_KEYS
from ckptmove.errors import LimitExceeded
from ckptmove.model import Mention
from ckptmove.pickles.tensors import TensorReader
from ckptmove.pickles.tree import Call, Dict, Node, Opaque, Persistent, PlainTensor, Sequence
from ckptmove.torch_facts.devices import DEVICE_RNG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.checkpoint.inventory.flattened import FlatOptimizer
    from ckptmove.checkpoint.inventory.optimizers import EntryDraft, OptimizerDraft
    from ckptmove.checkpoint.inventory.shapes import Member
    from ckptmove.limits import Limits
    from ckptmove.model import BrokenNumber, Role, TensorRecord
    from ckptmove.pickles.tree import Value

_COUNTER_DEPTH: Final = 3
#: Fairseq's counter, in its ``optimizer_history``; no optimizer of torch has this key.
_UPDATES: Final = "num_updates"
#: The trained weights in a file of Lightning's WeightAveraging, whose ``state_dict`` is their average.
_TRAINED, _AVERAGE = "current_model_state", "state_dict"
#: Roles that a resume needs, with or without tensors.
_CONTENTS: Final = frozenset({"scheduler", "scaler", "rng"})
#: Cost of each kept record in paths: it takes memory, and more of it in a report.
_RECORD, _MENTION, _SCALAR = 32, 8, 4


@dataclass(slots=True, eq=False, repr=False)
class Walk:
    """One walk and its results."""

    limits: Limits  # resource limits for visits, depth and the length of names
    pickle_bytes: int  # size of the pickle
    reader: TensorReader = field(default_factory=TensorReader)  # reader of tensors, with their storages
    tensors: list[TensorRecord] = field(default_factory=list)  # every tensor
    mentions: list[Mention] = field(default_factory=list)  # devices outside of tensors
    optimizers: list[OptimizerDraft] = field(default_factory=list)  # drafts of the optimizers
    contents: set[str] = field(default_factory=set)  # parts of a resume that the file has
    rng_devices: list[tuple[str, int]] = field(default_factory=list)  # path and length of lists of RNG states
    last_rates: list[tuple[str, tuple[float, ...]]] = field(default_factory=list)  # by path
    broken_numbers: list[BrokenNumber] = field(default_factory=list)  # of schedulers and scalers
    counters: list[tuple[str, float]] = field(default_factory=list)  # path and value of each step counter
    modules: list[str] = field(default_factory=list)  # paths of pickled modules
    pickled_optimizers: list[str] = field(default_factory=list)  # paths of pickled optimizers
    sections: list[tuple[str, Role]] = field(default_factory=list)  # path and role of containers inside of another role
    _frames: list[tuple[Iterator[Member], MemberContext, int]] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)
    _objects: set[int] = field(default_factory=set)
    _registered: set[int] = field(default_factory=set)
    _average: str = ""
    _budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self._budget = Budget(self.limits, self.pickle_bytes)

    def run(self, root: Value) -> None:
        """Visit everything below the root."""
        frames = self._frames
        self._visit("", root, -1, MemberContext())
        while frames:
            iterator, place, identity = frames[-1]
            height = len(frames)
            for key, value, start in iterator:
                self._budget.spend(1)
                self._visit(key, value, start, place)
                if len(frames) != height:
                    break
            else:
                frames.pop()
                self._open.discard(identity)

    def _visit(self, key: str, value: Value, start: int, place: MemberContext) -> None:
        if type(value) is Call:
            if self.reader.is_tensor(value):
                self._tensor(key, value, place)
            elif value.name == "torch.device":
                self._device(key, value, place)
            else:
                self._enter_object(key, value, place)
        elif type(value) is Dict:
            self._enter_dict(key, value, value, place)
        elif isinstance(value, Sequence):
            self._enter_sequence(key, value, place)
        elif type(value) is Persistent:
            self._storage(key, value, place)
        elif type(value) is PlainTensor:
            self._tensor(key, value, place)
        elif not isinstance(value, Node):
            self._atom(key, value, start, place)
        elif type(value) is Opaque and role_of_key(key) == "rng":
            self.contents.add("rng")

    def _name(self, key: str, place: MemberContext) -> str:
        """Return the path of a member and count its letters: a deep tree with long keys has long paths."""
        name = place.prefix + key
        self._budget.write(len(name))
        return name

    # --- leaves ------------------------------------------------------------------------------------------------------

    def _tensor(self, key: str, call: Call | PlainTensor, place: MemberContext) -> None:
        if place.repeats and id(call) in self._registered:
            return
        role = place.role
        if role is None or role == "model":
            role = self._leaf_role(key, place)
        record = self.reader.tensor(call, self._name(key, place), role)
        if record is None:
            self._enter_object(key, cast("Call", call), place)  # a plain tensor has a record
            return
        settled = settled_role(record, key, place)
        if settled != role:
            record = record._replace(role=settled)
        if key in COUNTER_KEYS and not record.shape and place.entry is None and self._may_count(place):
            self.contents.add("counter")
        self._add_tensor(key, record, place)
        if self.modules:
            self._registered.add(id(call))
        if self.reader.attached:
            attached = [member for value in self.reader.attached for member in objects.attached_members(value)]
            self._push(iter(attached), self._inner(key, place), call)

    def _storage(self, key: str, node: Persistent, place: MemberContext) -> None:
        record = self.reader.storage(node, self._name(key, place), self._leaf_role(key, place))
        if record is not None:
            self._add_tensor(key, record, place)

    def _device(self, key: str, call: Call, place: MemberContext) -> None:
        self._note_container(key, place, call.name)
        mention = mentions.device_mention(call, self._name(key, place))
        if mention is not None:
            self._mention(mention)

    def _mention(self, mention: Mention) -> None:
        self._budget.spend(_MENTION)
        self.mentions.append(mention)

    def _add_tensor(self, key: str, record: TensorRecord, place: MemberContext) -> None:
        self._budget.spend(_RECORD + len(record.shape) + len(record.parts))
        self._budget.write(len(record.device) + len(record.storage or "") + len(record.subclass))
        self.tensors.append(record)
        if place.entry is not None:
            is_direct = len(place.prefix) == place.entry_length  # most are: their keys are shared
            place.entry.tensors.append((key if is_direct else record.name[place.entry_length :], record))
        elif record.role == "rng":
            self.contents.add("rng")

    def _entry_path(self, key: str, place: MemberContext) -> str:
        """Return the path of a member relative to its optimizer entry."""
        return key if len(place.prefix) == place.entry_length else self._name(key, place)[place.entry_length :]

    def _note_container(self, key: str, place: MemberContext, kind: str) -> None:
        """Record the class of a container in an optimizer entry."""
        if place.entry is not None:
            place.entry.nested.append((self._entry_path(key, place), kind))

    def _note_keys(self, pairs: Dict, entry: EntryDraft, inner: MemberContext) -> None:
        """Record the keys of a dict in an optimizer entry that are not strings; their path has only their text."""
        fault = shapes.key_fault(pairs)
        path = inner.prefix[inner.entry_length :]
        if fault and not path:
            entry.nested.append(("", fault))
        for key in () if fault else pairs.keys():
            if type(key) is not str:
                self._budget.spend(_SCALAR)
                entry.keys.append((path + shapes.key_text(key), key))

    def _leaf_role(self, key: str, place: MemberContext) -> Role:
        if place.role == "model":
            return role_of_leaf(key) or "model"
        return place.role or role_of_key(key) or "other"

    def _atom(self, key: str, value: Value, start: int, place: MemberContext) -> None:
        if place.entry is not None:
            self._budget.spend(_SCALAR)
            place.entry.scalars.append((self._entry_path(key, place), value))
        elif type(value) is str:
            if place.is_mesh and mentions.is_mesh_type(key, value):
                self._mention(Mention(self._name(key, place), "device_mesh", value, start))
            elif mentions.names_device(key, value):
                self._mention(Mention(self._name(key, place), "string", value, start))
        elif type(value) is int:
            self._count(key, value, place)
            self._device_ids(key, value, place)
        elif type(value) is float:
            self._count(key, value, place)

    def _count(self, key: str, value: float, place: MemberContext) -> None:
        if key not in COUNTER_KEYS or place.depth > _COUNTER_DEPTH:
            return
        if self._may_count(place):
            self.contents.add("counter")
        elif key != _UPDATES:
            return
        self._budget.spend(_SCALAR)
        self.counters.append((self._name(key, place), value))

    def _may_count(self, place: MemberContext) -> bool:
        """Whether a container may hold step counters of the training."""
        return place.role in {None, "other"} and place.depth <= _COUNTER_DEPTH

    def _device_ids(self, key: str, value: Value, place: MemberContext) -> None:
        ids = mentions.device_ids(key, value)
        if ids is not None:
            self._mention(Mention(self._name(key, place), "device_ids", ids))

    # --- containers --------------------------------------------------------------------------------------------------

    def _push(self, iterator: Iterator[Member], place: MemberContext, node: Node) -> None:
        """Enter a node, unless the walk is already inside it."""
        identity = id(node)
        if identity in self._open:
            return
        if len(self._frames) >= self.limits.depth:
            raise LimitExceeded("the depth of a pickle", limit=self.limits.depth, actual=len(self._frames) + 1)
        self._settle(place)
        self._open.add(identity)
        self._frames.append((iterator, place, identity))

    def _settle(self, inner: MemberContext) -> None:
        """Record the role of a container before it is entered; a module or an optimizer is entered in two steps."""
        if self._frames:
            outer = self._frames[-1][1]
            if inner.role == outer.role or inner.prefix == outer.prefix:
                return
        if inner.role is not None:
            self._budget.spend(_SCALAR)
            self.sections.append((inner.path, inner.role))

    def _inner(self, key: str, place: MemberContext) -> MemberContext:
        """Return the place for the members of a container, with the role of its key."""
        role = place.role
        if role is None or (place.is_bare and "." not in key):
            role = "ema" if key == self._average and place.depth == 1 else role_of_key(key)
        elif role == "model":
            role = role_of_leaf(key) or role
        prefix = f"{self._name(key, place)}." if place.depth else ""
        if place.optimizer is not None:
            return MemberContext(prefix, role, place.depth + 1, None, place.optimizer.open_entry(key), len(prefix))
        return MemberContext(prefix, role, place.depth + 1, None, place.entry, place.entry_length, place.repeats)

    def _enter_dict(self, key: str, pairs: Dict, node: Node, place: MemberContext) -> None:
        if id(node) in self._open:
            return
        self._budget.spend(len(pairs.flat))
        inner, flat = self._inner(key, place), None
        if place.entry is not None:
            self._note_container(key, place, objects.dict_kind(node, pairs))
        if inner.entry is not None:
            self._note_keys(pairs, inner.entry, inner)
        else:
            keys = shapes.string_keys(pairs)
            if not place.depth and _TRAINED in keys:
                self._average = _AVERAGE
            state = shapes.optimizer_state(pairs) if "param_groups" in keys else None
            if state is not None:
                self._enter_optimizer(pairs, state, node, inner)
                return
            if shapes.is_flat_optimizer(keys):
                from ckptmove.checkpoint.inventory.flattened import split_by_parameter

                self._budget.write(sum(map(len, keys)))  # the keys are split again for each path to the dict
                flat = split_by_parameter(pairs)
                pairs, keys = flat.others, shapes.string_keys(flat.others)
                inner.role = inner.role if keys else "optimizer"
            by_keys = shapes.role_of_keys(keys)
            self._note_broken(pairs, by_keys, inner)
            inner.role = by_keys or inner.role
            if inner.role is None and self._looks_like_state_dict(pairs, keys, node):
                inner.role, inner.is_bare = "model", not place.depth
            if inner.role in _CONTENTS and pairs.flat:
                self.contents.add(inner.role)
        members = objects.dict_members(node, pairs) if type(node) is Call else shapes.members(pairs)
        self._push(members, inner, node)
        if flat is not None:
            self._enter_flat_optimizer(flat, inner)

    def _note_broken(self, pairs: Dict, role: Role | None, inner: MemberContext) -> None:
        if role not in {"scheduler", "scaler"}:
            return
        from ckptmove.checkpoint.inventory.broken import broken_numbers

        for number in broken_numbers(pairs, role, inner.prefix):
            self._budget.spend(_SCALAR)
            self._budget.write(len(number.where))
            self.broken_numbers.append(number)

    def _looks_like_state_dict(self, pairs: Dict, keys: set[str], node: Node) -> bool:
        """Whether a dict is mostly tensors under keys of a module: dicts of data have no dotted keys."""
        if type(node) is Call and shapes.has_module_versions(node):
            return True
        values = pairs.flat[1::2]
        tensors = sum(map(self.reader.is_tensor, values))
        if tensors * 2 < len(values) or not tensors:
            return False
        if any("." in key for key in keys):
            return True
        return tensors == len(values) and (type(node) is Call or not keys.isdisjoint({"weight", "bias"}))

    def _enter_optimizer(self, pairs: Dict, state: Dict, node: Node, inner: MemberContext) -> None:
        draft = draft_optimizer(pairs, inner.path, self._budget.spend)
        self.optimizers.append(draft)
        inner.role = "optimizer"
        rest = (member for member in shapes.members(pairs) if member[0] != "state")
        self._push(rest, inner, node)
        below = MemberContext(f"{inner.prefix}state.", "optimizer", inner.depth + 1, draft)
        self._push(objects.state_members(state, draft), below, state)

    def _enter_flat_optimizer(self, flat: FlatOptimizer, inner: MemberContext) -> None:
        draft = draft_flat_optimizer(flat, inner.path, self._budget.spend)
        self.optimizers.append(draft)
        self._push(flat.option_members(), MemberContext(inner.prefix, "optimizer", inner.depth), flat.options)
        below = MemberContext(f"{inner.prefix}state.", "optimizer", inner.depth + 1, draft)
        self._push(objects.state_members(flat.state, draft), below, flat.state)

    def _enter_sequence(self, key: str, value: Sequence, place: MemberContext) -> None:
        if id(value) in self._open:
            return
        self._budget.spend(len(value.items))
        inner = self._inner(key, place)
        if inner.entry is None:
            self._device_ids(key, value, place)
            for index, item in enumerate(value.items):
                if type(item) is str and mentions.names_device(key, item):
                    self._mention(Mention(self._name(str(index), inner), "string", item, value.starts[index]))
        self._note_container(key, place, type(value).__name__.lower())
        has_rows = (place.entry is not None and bool(value.items)) or any(
            isinstance(item, Node) for item in value.items
        )
        if inner.role == "rng" and value.items:
            self.contents.add("rng")
            if has_rows and DEVICE_RNG.search(key):
                self.rng_devices.append((inner.path, len(value.items)))
        if key == "_last_lr" and value.items and all(type(rate) is float for rate in value.items):
            self.last_rates.append((inner.path, cast("tuple[float, ...]", tuple(value.items))))
        if has_rows:
            members = objects.sequence_members(value)
            rows = (member for member in members if place.entry is not None or isinstance(member[1], Node))
            self._push(rows, inner, value)
        else:
            self._settle(inner)

    def _enter_object(self, key: str, call: Call, place: MemberContext) -> None:
        if id(call) in self._open or id(call) in self._objects:
            return  # each object only once, as a graph has more paths than objects; dicts are listed at each path
        self._budget.spend(objects.extent(call))
        inside = objects.unwrapped(call)
        if inside is not None:
            self._visit(key, *inside, place)
            return
        module = objects.module_attributes(call)
        if module is not None:
            self._enter_module(key, call, module, place)
            return
        pairs = shapes.as_dict(call)
        if pairs is not None:
            self._enter_dict(key, pairs, call, place)
            return
        number = scalar_value(call)
        if number is not None and (place.entry is not None or key in COUNTER_KEYS):
            self._atom(key, number, -1, place)
            return
        self._note_container(key, place, call.name)
        self._objects.add(id(call))
        state = shapes.attributes(call)
        inner = self._inner(key, place)
        optimizer = shapes.optimizer_state(state) if state is not None else None
        if state is not None and optimizer is not None:
            self.pickled_optimizers.append(inner.path)
            self._enter_optimizer(state, optimizer, call, inner)
            return
        role = shapes.role_of_keys(shapes.string_keys(state)) if state is not None else None
        if state is not None and inner.role in _CONTENTS:
            role = role or inner.role
        if mentions.is_mesh(call):  # its tensors are ranks, not part of a model or of optimizer state
            inner = MemberContext(inner.prefix, "other", inner.depth, is_mesh=True)
        elif role is not None and state is not None:  # a pickled scheduler or scaler
            inner.role = role
            self._note_broken(state, role, inner)
            self.contents.add(role)
        self._push_object(call, inner)

    def _push_object(self, call: Call, inner: MemberContext) -> None:
        if not objects.is_enum(call):  # ``optim`` of transformers' TrainingArguments is no part of an optimizer
            self._push(objects.object_members(call), inner, call)

    def _enter_module(self, key: str, call: Call, pairs: Dict, place: MemberContext) -> None:
        """Enter a pickled ``nn.Module``; its tensors are named as in its ``state_dict()``."""
        if place.repeats and id(call) in self._registered:
            return
        self._registered.add(id(call))
        inner = self._inner(key, place)
        if inner.role in {None, "other"} and (call.name.startswith("torch.nn.modules.loss.") or key.lower() == "loss"):
            inner.role = "criterion"
        inner.role = inner.role or "model"
        self.modules.append(inner.path)
        # Pushed last, so visited first: registered members. Plain attributes that repeat them are skipped.
        self._push(objects.plain_members(pairs), replace(inner, repeats=True), pairs)
        self._push(objects.registered_members(pairs), inner, call)

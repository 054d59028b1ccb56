"""Decide on the device of each tensor, by an ordered table of rules that can be printed.

The device of optimizer scalars follows ``_init_group`` of each class in ``torch.optim``; a test runs these classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.conversion.keep import kept_sites, kept_tensors, wrapper_devices
from ckptmove.torch_facts.devices import is_accelerator, matches, split, supports_capturable, supports_fused
from ckptmove.torch_facts.optimizers import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckptmove.model import FlagValue, Inventory, OptimizerRecord, ParamGroup, StateEntry, TensorRecord
    from ckptmove.moves import MoveRequest

    Decide = Callable[["Policy", TensorRecord], "str | None"]


class Rule(NamedTuple):
    """A rule that decides on the device of tensors."""

    name: str  # kebab-case, as a plan prints it
    reason: str  # why, in one line
    decide: Decide  # returns the tag for a tensor, or None if the rule does not apply


class FollowRule(NamedTuple):
    """Why something that is not a tensor changes."""

    name: str  # kebab-case, as a plan prints it
    reason: str  # why, in one line


def _keep(policy: Policy, record: TensorRecord) -> str | None:
    return record.device if policy.keeps(record) else None


def _without_bytes(policy: Policy, record: TensorRecord) -> str | None:
    return record.device if policy.is_immovable(record) else None


def _rng_state(_: Policy, record: TensorRecord) -> str | None:
    return "cpu" if record.role == "rng" else None


def _nested_sizes(policy: Policy, record: TensorRecord) -> str | None:
    return "cpu" if record.name in policy.nested_sizes else None


def _optimizer_scalar(policy: Policy, record: TensorRecord) -> str | None:
    return policy.homes.get(record.name)


def _device_mesh(policy: Policy, record: TensorRecord) -> str | None:
    return "cpu" if record.name in policy.mesh_ranks else None


def _param_group(policy: Policy, record: TensorRecord) -> str | None:
    return record.device if record.name in policy.group_options else None


def _map(policy: Policy, record: TensorRecord) -> str | None:
    return policy.mapped(record.device)


def _target(policy: Policy, _: TensorRecord) -> str | None:
    return policy.request.to


def _unmapped(_: Policy, record: TensorRecord) -> str:
    return record.device


#: The first rule that applies decides. ``--keep`` names tensors, so it comes first. ``--map`` names devices, as
#: ``--to`` does, so it comes directly before ``--to``. If it came before the rules for kinds of tensors,
#: ``--map cpu=cuda:0`` would move a correct ``step`` to ``cuda:0`` and a misplaced one from there to the CPU, and the
#: next run would swap them again.
RULES: Final[tuple[Rule, ...]] = (
    Rule("keep", "matches --keep, and stays where it is", _keep),
    Rule("without-bytes", "tensors without bytes in the file (meta) have nothing to move", _without_bytes),
    Rule("rng-state", "RNG states are always CPU ByteTensors", _rng_state),
    Rule("nested-sizes", "torch keeps the sizes of a nested tensor on the CPU", _nested_sizes),
    Rule("device-mesh", "torch keeps the ranks of a DeviceMesh on the CPU", _device_mesh),
    Rule("optimizer-scalar", "step counters go to the device where this optimizer creates them", _optimizer_scalar),
    Rule("param-group", "torch leaves options of param_groups (a tensor lr) on the CPU", _param_group),
    Rule("map", "moves as --map requests", _map),
    Rule("target", "everything else moves to the device of --to", _target),
    Rule("unmapped", "no --map matches its device, and --to is not given", _unmapped),
)
#: Rules that move a tensor with its device, as the request says, and not by the kind of the tensor.
DESTINATION_RULES: Final = frozenset({"map", "target"})

GROUP_FLAG: Final = FollowRule("group-flag", "the optimizer refuses this option on the device of its parameters")
DEVICE_MENTION: Final = FollowRule("device-mention", "a named device follows the tensors on it")
MESH_TYPE: Final = FollowRule("mesh-type", "a DeviceMesh names the device type of its DTensors")

#: Lists in which a scheduler keeps a learning rate for each group (``LRScheduler.__init__`` and ``step``). They contain
#: clones of ``initial_lr`` and ``lr``: tensors if those are tensors, and on the same device.
_RATES: Final = frozenset({"base_lrs", "_last_lr"})
#: Path components that lead to a group's options, in a ``state_dict`` and in an optimizer pickled as an object.
_OPTIONS: Final = (".param_groups.", ".defaults.")
_SCALAR_SHAPES: Final = frozenset({(), (1,)})


class _GroupFacts(NamedTuple):
    """Facts about a group that decide on the tensors among its options."""

    is_captured: bool  # whether `capturable` or `fused` stays set
    is_on_accelerator: bool  # whether the group's parameters are on an accelerator in the file

    def keeps(self, record: TensorRecord) -> bool:
        """Whether an option that is a CPU tensor stays there.

        ``load_state_dict`` copies groups without moving anything. So an option that the run had on the CPU, with
        parameters on an accelerator, stays. If the parameters come from the CPU too, a scalar still stays: every
        optimizer accepts it there, and it costs no synchronization. A captured graph only sees it on the device.
        """
        return self.is_on_accelerator or (record.shape in _SCALAR_SHAPES and not self.is_captured)


class Policy:
    """The rules, applied to one checkpoint and one request.

    Attributes:
        homes: names of optimizer scalars, each with the tag of the device where its optimizer would create it.
        group_options: names of the tensors in ``param_groups``, and of a scheduler's copies, that stay on the CPU.
        mesh_ranks: names of the tensors of a ``DeviceMesh``.
        nested_sizes: names of the parts of nested tensors that describe their layout.
        refused: flags of groups that cannot stay set, each with the path of its value.
        wrappers: names of wrapper subclasses, each with the place of its device in the pickle.
    """

    __slots__ = (
        "_answers", "_kept_sites", "_kept_tensors", "_mapped", "group_options", "homes", "mesh_ranks", "nested_sizes",
        "refused", "request", "wrappers"
    )  # fmt: skip

    def __init__(self, inventory: Inventory, request: MoveRequest) -> None:
        self.request = request
        self.wrappers = wrapper_devices(inventory)
        self._kept_tensors = kept_tensors(inventory, request.keep)
        self._kept_sites = kept_sites(inventory, request.keep)
        self._mapped: dict[str, str | None] = {}
        self._answers: dict[tuple[object, ...], tuple[int, str]] = {}
        self.homes: dict[str, str] = {}
        self.nested_sizes = frozenset(
            part.name for record in inventory.tensors if record.kind == "nested" for part in record.parts[1:]
        )
        meshes = {mention.where.rpartition(".")[0] for mention in inventory.mentions if mention.kind == "device_mesh"}
        self.mesh_ranks = frozenset(
            record.name for record in inventory.tensors if meshes and record.name.rpartition(".")[0] in meshes
        )
        self.group_options: frozenset[str] = frozenset()
        self.refused: list[tuple[str, FlagValue]] = []
        has_accelerator = any(is_accelerator(record.device) for record in inventory.tensors if record.role == "model")
        groups = [self._settle(optimizer, has_accelerator=has_accelerator) for optimizer in inventory.optimizers]
        self.group_options = _staying_options(inventory, groups)

    def decide(self, record: TensorRecord) -> tuple[int, str]:
        """The rank in :data:`RULES` of the rule that decides on a tensor, and the tag that it gives."""
        name = record.name
        # Everything that rules read of a tensor. Answers are cached by it: a checkpoint has few kinds of tensors.
        kind = (
            record.device,
            record.role,
            record.storage is None and self.device_site(record) is None,
            self.homes.get(name),
            name in self.nested_sizes,
            name in self.mesh_ranks,
            name in self.group_options,
            name in self._kept_tensors,
        )
        answer = self._answers.get(kind)
        if answer is None:
            answer = self._answers[kind] = next(
                (rank, tag) for rank, rule in enumerate(RULES) if (tag := rule.decide(self, record)) is not None
            )
        return answer

    def keeps(self, record: TensorRecord) -> bool:
        """Whether ``--keep`` matches a tensor, by any of its names, or another one that it can only move with."""
        return record.name in self._kept_tensors

    def keeps_site(self, site: int) -> bool:
        """Whether ``--keep`` matches a value by any of the paths that lead to it.

        All of them lead to the same operation that pushes the value, whose start is the site.
        """
        return site in self._kept_sites

    def device_site(self, record: TensorRecord) -> int | None:
        """Place in the pickle of the device of a tensor whose storage has no tag; None for all others."""
        return self.wrappers.get(record.name, record.device_site)

    def is_immovable(self, record: TensorRecord) -> bool:
        """Whether a tensor cannot be moved: it is meta, or the file has no editable value for its device."""
        return record.device == "meta" or (record.storage is None and self.device_site(record) is None)

    def mapped(self, tag: str) -> str | None:
        """Target of a device by ``--map``; None if no pattern matches."""
        if tag not in self._mapped:
            self._mapped[tag] = next((target for glob, target in self.request.mapping if matches(glob, tag)), None)
        return self._mapped[tag]

    def destination(self, tag: str) -> str | None:
        """Target of a device by ``--map`` or ``--to``; None if neither applies."""
        return self.mapped(tag) or self.request.to

    # --- optimizers --------------------------------------------------------------------------------------------------

    def _settle(self, optimizer: OptimizerRecord, *, has_accelerator: bool) -> dict[str, _GroupFacts]:
        """Find the homes of an optimizer's scalars, after the flags that the target refuses are found."""
        row = BY_NAME.get(optimizer.algorithm or "")
        # ``load_state_dict`` treats the key "step" the same for every class, including those outside torch.
        scalar_keys = {"step"} | (row.scalars if row else frozenset())
        group_of = {key: index for index, group in reversed([*enumerate(optimizer.groups)]) for key in group.params}
        placed: list[tuple[int | None, str | None, StateEntry]] = []
        tags: list[set[str]] = [set() for _ in optimizer.groups]
        before: list[set[str]] = [set() for _ in optimizer.groups]
        for entry in optimizer.state:
            index = group_of.get(entry.key)
            # The first tensor that is on the device of its parameter.
            moment = next((one for key, one in entry.tensors if key not in scalar_keys and one.device != "meta"), None)
            tag = None if moment is None else self.decide(moment)[1]
            placed.append((index, tag, entry))
            if index is not None and moment is not None and tag is not None:
                tags[index].add(tag)
                before[index].add(moment.device)
        follows = [self._settle_flags(group, tags[index]) for index, group in enumerate(optimizer.groups)]
        on_device = row is not None and row.scalars_on_device
        for index, tag, entry in placed:
            with_parameter = on_device or (index is not None and follows[index])
            for record in _scalars(entry, scalar_keys):
                self.homes[record.name] = (
                    tag or self.destination(record.device) or record.device if with_parameter else "cpu"
                )
        return {
            group.where: _GroupFacts(
                follows[index],
                any(map(is_accelerator, before[index])) if before[index] else has_accelerator,
            )
            for index, group in enumerate(optimizer.groups)
        }

    def _settle_flags(self, group: ParamGroup, tags: set[str]) -> bool:
        """Record flags that cannot stay set; return whether one stays that puts scalars on the parameter's device."""
        wanted = tags or ({self.request.to} if self.request.to else set())
        stays = False
        for flag in group.flags:
            if not flag.value:
                continue
            where = f"{group.where}.{flag.name}"
            if all(map(_SUPPORT[flag.name], wanted)) or self.keeps_site(flag.site):
                stays = True
            else:
                self.refused.append((where, flag))
        return stays


_SUPPORT: Final = {"capturable": supports_capturable, "fused": supports_fused}


def _staying_options(inventory: Inventory, optimizers: list[dict[str, _GroupFacts]]) -> frozenset[str]:
    """Names of the tensors in ``param_groups``, and of their copies, that stay on the CPU.

    A scheduler copies the learning rates. An optimizer pickled as an object has ``defaults``, which share their tensors
    with the groups. An option that shares its storage with a tensor of another kind (a model that learns its ``lr``)
    moves with that tensor.
    """
    groups: dict[str, tuple[_GroupFacts, ...]] = {where: (facts,) for own in optimizers for where, facts in own.items()}
    for optimizer, own in zip(inventory.optimizers, optimizers, strict=True):
        groups[f"{optimizer.where}.defaults".removeprefix(".")] = (*own.values(),)
    numbered: dict[str, list[_GroupFacts]] = {}
    for own in optimizers:
        for place, facts in enumerate(own.values()):
            numbered.setdefault(str(place), []).append(facts)
    unknown = _GroupFacts(is_captured=False, is_on_accelerator=False)
    stay: set[str] = set()
    for record in inventory.tensors:
        if split(record.device)[0] != "cpu" or record.storage is None:
            continue
        path, _, number = record.name.rpartition(".")
        if any(part in f".{record.name}" for part in _OPTIONS):
            is_staying = any(one.keeps(record) for one in _groups_of(record.name, groups))
        else:
            is_rate = record.role == "scheduler" and path.rpartition(".")[2] in _RATES
            owners = numbered.get(number, [unknown])
            is_staying = is_rate and any(one.keeps(record) for one in owners)
        if is_staying:
            stay.add(record.name)
    if not stay:
        return frozenset()
    shared = {part.storage for record in inventory.tensors if record.name not in stay for part in record.dense()}
    return frozenset(one.name for one in inventory.tensors if one.name in stay and one.storage not in shared)


def _groups_of(name: str, groups: Mapping[str, tuple[_GroupFacts, ...]]) -> tuple[_GroupFacts, ...]:
    """Groups that have a tensor as an option; empty for the parameters that a pickled optimizer lists in groups."""
    path, key = name, ""
    while path and path not in groups:
        path, _, key = path.rpartition(".")
    return groups.get(path, ()) if key != "params" else ()


def _scalars(entry: StateEntry, keys: Iterable[str]) -> Iterator[TensorRecord]:
    """Scalar tensors with one of the keys; a wrapper subclass is left out, because it moves with its inner tensors."""
    return (
        record
        for key, record in entry.tensors
        if key in keys and record.shape in _SCALAR_SHAPES and record.kind != "wrapper-subclass"
    )

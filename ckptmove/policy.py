"""Where a tensor belongs when its checkpoint moves: the rules, in their order, as data that can be printed.

Never looks at storages or bytes: it answers for one tensor at a time, and ``plan`` makes one answer of several.

Where optimizers create their scalars is what ``_init_group`` of each class in ``torch.optim`` does; a test runs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.devices import matches, supports_capturable, supports_fused
from ckptmove.keep import kept_sites, kept_tensors, wrapper_devices
from ckptmove.optimizers import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptmove.model import FlagValue, Inventory, OptimizerRecord, ParamGroup, StateEntry, TensorRecord
    from ckptmove.moves import MoveRequest

    Decide = Callable[["Policy", TensorRecord], "str | None"]


class Rule(NamedTuple):
    """One rule.

    Attributes:
        name: kebab-case, as it stands in a plan.
        reason: why, in one line.
        decide: the tag that the rule gives a tensor, or None where the rule does not apply.
    """

    name: str
    reason: str
    decide: Decide


class FollowRule(NamedTuple):
    """Why something that is not a tensor changes.

    Attributes:
        name: kebab-case, as it stands in a plan.
        reason: why, in one line.
    """

    name: str
    reason: str


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


def _map(policy: Policy, record: TensorRecord) -> str | None:
    return policy.mapped(record.device)


def _target(policy: Policy, _: TensorRecord) -> str | None:
    return policy.request.to


def _unmapped(_: Policy, record: TensorRecord) -> str:
    return record.device


#: The first rule that applies decides. ``--keep`` names tensors, so it beats everything. ``--map`` names devices, as
#: ``--to`` does, so it beats that and nothing else: were it before the rules of a tensor's nature, ``--map cpu=cuda:0``
#: would send a right ``step`` to ``cuda:0`` and a spoiled one from there to the CPU, and the next run both back again.
RULES: Final[tuple[Rule, ...]] = (
    Rule("keep", "stays where it is, as --keep says", _keep),
    Rule("without-bytes", "a tensor without bytes in the file (meta) has nothing to move", _without_bytes),
    Rule("rng-state", "RNG states are CPU ByteTensors, whatever the device", _rng_state),
    Rule("nested-sizes", "torch keeps the sizes of a nested tensor on the CPU", _nested_sizes),
    Rule("optimizer-scalar", "step counters go where this optimizer creates them", _optimizer_scalar),
    Rule("map", "goes where --map sends its device", _map),
    Rule("target", "everything else goes where --to says", _target),
    Rule("unmapped", "no --map names its device, and there is no --to", _unmapped),
)
#: The rules under which a tensor goes where its device is sent, rather than where it belongs by its nature.
DESTINATION_RULES: Final = frozenset({"map", "target"})

GROUP_FLAG: Final = FollowRule("group-flag", "the optimizer refuses this option on the device of its parameters")
DEVICE_MENTION: Final = FollowRule("device-mention", "a named device follows the tensors that lie on it")


class Policy:
    """The rules, applied to one checkpoint and one request.

    Attributes:
        request: what the user asked for.
        homes: names of optimizer scalars, each with the tag where its optimizer would create it.
        nested_sizes: names of the parts of nested tensors that describe their layout.
        refused: flags of groups that cannot stay set, each with the path of its value.
        wrappers: names of wrapper subclasses, each with the place in the pickle where its device is said.
    """

    __slots__ = (
        "_answers", "_kept_sites", "_kept_tensors", "_mapped", "homes", "nested_sizes", "refused", "request", "wrappers"
    )  # fmt: skip

    def __init__(self, inventory: Inventory, request: MoveRequest) -> None:
        self.request = request
        self.wrappers = wrapper_devices(inventory)
        self._kept_tensors = kept_tensors(inventory, request.keep)
        self._kept_sites = kept_sites(inventory, request.keep)
        self._mapped: dict[str, str | None] = {}
        self._answers: dict[tuple[str, str, bool, str | None, bool, bool], tuple[int, str]] = {}
        self.homes: dict[str, str] = {}
        self.nested_sizes = frozenset(
            part.name for record in inventory.tensors if record.kind == "nested" for part in record.parts[1:]
        )
        self.refused: list[tuple[str, FlagValue]] = []
        for optimizer in inventory.optimizers:
            self._settle(optimizer)

    def decide(self, record: TensorRecord) -> tuple[int, str]:
        """The rank in :data:`RULES` of the rule that decides on a tensor, and the tag that it gives."""
        name = record.name
        # All that a rule looks at: a checkpoint has few kinds of tensors, and many of each.
        kind = (
            record.device,
            record.role,
            record.storage is None and self.device_site(record) is None,
            self.homes.get(name),
            name in self.nested_sizes,
            name in self._kept_tensors,
        )
        answer = self._answers.get(kind)
        if answer is None:
            answer = self._answers[kind] = next(
                (rank, tag) for rank, rule in enumerate(RULES) if (tag := rule.decide(self, record)) is not None
            )
        return answer

    def keeps(self, record: TensorRecord) -> bool:
        """Whether ``--keep`` names a tensor, by any of its names, or one that it cannot be parted from."""
        return record.name in self._kept_tensors

    def keeps_site(self, site: int) -> bool:
        """Whether ``--keep`` names a value by any of the paths that lead to it.

        Args:
            site: start of the operation that pushes the value: one for all paths.
        """
        return site in self._kept_sites

    def device_site(self, record: TensorRecord) -> int | None:
        """Where the pickle says the device of a tensor that is not tagged by its storage; None for all others."""
        return self.wrappers.get(record.name, record.device_site)

    def is_immovable(self, record: TensorRecord) -> bool:
        """Whether a tensor can be nowhere else: it is meta, or nothing in the file that could be edited says where."""
        return record.device == "meta" or (record.storage is None and self.device_site(record) is None)

    def mapped(self, tag: str) -> str | None:
        """Where ``--map`` sends a device; None where it says nothing."""
        if tag not in self._mapped:
            self._mapped[tag] = next((target for glob, target in self.request.mapping if matches(glob, tag)), None)
        return self._mapped[tag]

    def destination(self, tag: str) -> str | None:
        """Where a device is sent by ``--map`` or ``--to``; None where neither says."""
        return self.mapped(tag) or self.request.to

    # --- optimizers --------------------------------------------------------------------------------------------------

    def _settle(self, optimizer: OptimizerRecord) -> None:
        """Find the homes of an optimizer's scalars, after its flags are as the target takes them."""
        row = BY_NAME.get(optimizer.algorithm or "")
        # ``load_state_dict`` treats the key "step" alike for every class, a stranger's too.
        scalar_keys = {"step"} | (row.scalars if row else frozenset())
        group_of = {key: index for index, group in reversed([*enumerate(optimizer.groups)]) for key in group.params}
        placed = [
            (group_of.get(entry.key), self._parameter_device(entry, scalar_keys), entry) for entry in optimizer.state
        ]
        tags: list[set[str]] = [set() for _ in optimizer.groups]
        for index, tag, _ in placed:
            if index is not None and tag is not None:
                tags[index].add(tag)
        follows = [self._settle_flags(group, tags[index]) for index, group in enumerate(optimizer.groups)]
        on_device = row is not None and row.scalars_on_device
        for index, tag, entry in placed:
            with_parameter = on_device or (index is not None and follows[index])
            for record in _scalars(entry, scalar_keys):
                self.homes[record.name] = (
                    tag or self.destination(record.device) or record.device if with_parameter else "cpu"
                )

    def _parameter_device(self, entry: StateEntry, scalar_keys: Iterable[str]) -> str | None:
        """The planned device of a parameter, told from its moments; None where it has none."""
        for key, record in entry.tensors:
            if key not in scalar_keys:
                tag = self.decide(record)[1]
                if tag != "meta":
                    return tag
        return None

    def _settle_flags(self, group: ParamGroup, tags: set[str]) -> bool:
        """Note the flags that cannot stay set; return whether one stays that brings the scalars to the parameter."""
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


def _scalars(entry: StateEntry, keys: Iterable[str]) -> Iterator[TensorRecord]:
    """The bookkeeping tensors among some keys; a wrapper subclass goes as a whole, with what is inside of it."""
    return (
        record
        for key, record in entry.tensors
        if key in keys and record.shape in {(), (1,)} and record.kind != "wrapper-subclass"
    )

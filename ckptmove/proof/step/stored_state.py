"""Build the state_dicts that a script loads from a checkpoint, from the stored bytes and without unpickling.

State that does not match the user's model is reported, never guessed.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.roles import is_kept_aside
from ckptmove.checkpoint.state_dicts import RootKeys, without_wrappers
from ckptmove.model import OPAQUE
from ckptmove.proof.checks import Offenders
from ckptmove.proof.loading.objects import REJECTED, NotAllowed
from ckptmove.proof.loading.values import built, values_at
from ckptmove.proof.step.entries import each_tensor, foreign_kind, nested_state, tensor_options
from ckptmove.proof.tensors.pieces import is_dense
from ckptmove.proof.tensors.wrappers import copied

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import torch

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory, OptimizerRecord, TensorRecord
    from ckptmove.proof.step.entries import TensorOption
    from ckptmove.proof.tensors.pieces import TensorSource


class Mismatch(Exception):
    """The stored state does not fit the user's model or optimizer; the message says which part.

    Attributes:
        fix: text of the fix if the case has to choose a part; else empty.
        candidates: paths of the parts to choose from.
        module: the model that does not fit; None for an optimizer.
        part: path of the part of the checkpoint that the model takes; None for any.
    """

    def __init__(self, message: str, *, fix: str = "", candidates: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fix = fix
        self.candidates = candidates
        self.module: torch.nn.Module | None = None
        self.part: str | None = None


class Ambiguous(Mismatch):
    """Several parts of the checkpoint fit, and the user has to choose one."""


class NeedsUnpickling(Exception):
    """The stored state has values that only unpickling could rebuild; the message names them."""


class _Candidate(NamedTuple):
    """A state_dict in the checkpoint that a model might be restored from."""

    where: str  # its path
    stored: dict[str, TensorRecord]  # its tensors by key, without prefixes of wrappers
    found: int  # number of the model's keys that it has
    faults: Offenders  # differences from the model

    @property
    def is_copy(self) -> bool:
        """Whether no tensor has the role "model", as in an EMA, a teacher, or a module among the hyperparameters."""
        return all(record.role != "model" for record in self.stored.values())

    @property
    def views(self) -> frozenset[tuple[str, str | None, int]]:
        """Keys with storage and offset; equal for two ways to split the same names."""
        return frozenset((key, record.storage, record.storage_offset) for key, record in self.stored.items())


def model_state(
    own: Mapping[str, torch.Tensor],
    inventory: Inventory,
    source: TensorSource,
    part: str | None = None,
    *,
    name: str = "the model",
) -> tuple[str, dict[str, torch.Tensor]]:
    """Path and tensors of the state_dict inside a part that fits a model by keys and shapes, with the model's keys.

    It may contain tensors of any role, because a module may own its loss. A model is preferred to a copy of it.
    """
    wanted = {without_wrappers(key): key for key in own}
    tensors = [record for record in inventory.tensors if record.role != "optimizer"]
    inside = [record for record in tensors if is_inside(record.name, part)]
    if part is not None and not inside:
        names = tuple(dict.fromkeys(RootKeys(inventory).split(record.name)[0] for record in tensors))
        raise no_part(name, part, "part", tuple(filter(None, names)))
    candidates = _candidates(own, wanted, inside, part)
    if not candidates:
        raise Mismatch(
            f"{name} does not fit the checkpoint: {place_of(part)} has no key of the model; "
            f"{_example_keys(wanted, inside)}"
        )
    chosen = _select(candidates, name) or _sharded(candidates[0], inventory, own, wanted, inside)
    if chosen.faults:
        raise Mismatch(f"{name} does not fit {place_of(chosen.where)}: {chosen.faults}")
    state = {wanted[bare]: source.tensor(record) for bare, record in chosen.stored.items()}
    for key in [key for bare, key in wanted.items() if bare not in chosen.stored]:  # tied weights that are stored once
        state[key] = next(value for alike, value in state.items() if own[alike] is own[key])
    return chosen.where, state


def stored_groups(
    optimizer: OptimizerRecord, checkpoint: OpenCheckpoint, limits: Limits
) -> list[tuple[dict[str, Any], dict[str, TensorOption]]]:
    """For each group of an optimizer, its options without tensors, and those that are tensors.

    Options that are objects are built as ``load`` builds them; those that only unpickling could rebuild are ``OPAQUE``.
    """
    tensors = checkpoint.inventory.tensors
    records = {record.name: record for record in tensors if ".param_groups." in f".{record.name}"}
    opaque = {f"{group.where}.{key}" for group in optimizer.groups for key, one in group.options if one is OPAQUE}
    made: dict[str, Any] = {}
    for path, value in values_at(checkpoint, opaque - records.keys()).items():
        with suppress(NotAllowed, *REJECTED):
            made[path] = built(checkpoint, value, limits.depth)
    found = []
    for group in optimizer.groups:
        own = tensor_options(group, records)
        plain = {key: made.get(f"{group.where}.{key}", one) for key, one in group.options if key not in own}
        found.append((plain, own))
    return found


def optimizer_state_dict(
    optimizer: OptimizerRecord, checkpoint: OpenCheckpoint, source: TensorSource, limits: Limits
) -> dict[str, Any]:
    """The state_dict of an optimizer, for ``load_state_dict``, without options that only unpickling could rebuild.

    The source has wrapper subclasses as ``torch.load`` returned them.
    """
    groups = []
    for group, (plain, own) in zip(optimizer.groups, stored_groups(optimizer, checkpoint, limits), strict=True):
        options = {key: one for key, one in plain.items() if one is not OPAQUE}
        tensors = {key: each_tensor(option, source.tensor) for key, option in own.items()}
        groups.append({**options, **tensors, "params": list(group.params)})
    state = {}
    for entry in (one.without_inner() for one in optimizer.state):
        foreign = foreign_kind(entry)
        if foreign:
            named = optimizer.where or "the optimizer"
            raise NeedsUnpickling(
                f"the state of parameter {entry.key} in {named} needs unpickling to be rebuilt: {foreign}"
            )
        state[entry.key] = nested_state(entry, {key: _value(record, source) for key, record in entry.tensors})
    if optimizer.algorithm == "LBFGS":
        for values in state.values():
            values.pop("al", None)  # scratch space of the two-loop recursion, partly None; LBFGS makes it again
    return {"state": state, "param_groups": groups}


def left_out(optimizer: OptimizerRecord, state: Mapping[str, Any]) -> tuple[str, ...]:
    """The options of an optimizer that its state_dict lacks: only unpickling could rebuild them."""
    pairs = zip(optimizer.groups, state["param_groups"], strict=True)
    return tuple(dict.fromkeys(key for group, made in pairs for key, _ in group.options if key not in made))


def _value(record: TensorRecord, source: TensorSource) -> torch.Tensor:
    """A tensor of an optimizer's state; a copy of a wrapper subclass, because a step writes to it."""
    if record.kind != "wrapper-subclass":
        return source.tensor(record)
    try:
        return copied(source.tensor(record))
    except (LookupError, RuntimeError) as error:
        raise NeedsUnpickling(f"{record.name} is a {record.subclass}, which is not restored here: {error}") from error


def is_inside(name: str, part: str | None) -> bool:
    """Whether a path is a chosen part of the checkpoint, or inside it; in a directory a slash follows a file's name."""
    return part is None or name == part or name.startswith((f"{part}.", f"{part}/"))


def place_of(part: str | None) -> str:
    """A part of the checkpoint, as text for messages."""
    return f"the checkpoint's '{part}'" if part else "the checkpoint"


def no_part(what: str, part: str, field: str, candidates: tuple[str, ...]) -> Mismatch:
    """Error for a path that a case chooses and the checkpoint does not have."""
    has = f"it has {', '.join(candidates)}" if candidates else "it has no candidates"
    fix = (
        f"name one of them: ckptmove.Case(..., {field}={candidates[0]!r}), or as a key of a dict" if candidates else ""
    )
    return Mismatch(f"{what}: the checkpoint has no '{part}'; {has}", fix=fix, candidates=candidates)


def ambiguous(what: str, field: str, candidates: tuple[str, ...]) -> Ambiguous:
    """Error for a model or optimizer that several parts of a checkpoint fit."""
    choices = " or ".join(f"{field}={one!r}" for one in candidates)
    fix = f"choose one: ckptmove.Case(...) with {choices}, or as a key of a dict"
    return Ambiguous(
        f"{what} fits several parts of the checkpoint: {', '.join(candidates)}", fix=fix, candidates=candidates
    )


def _candidates(
    own: Mapping[str, torch.Tensor], wanted: Mapping[str, str], records: Collection[TensorRecord], part: str | None
) -> list[_Candidate]:
    """State_dicts with the most keys of a model, or with all (tied weights count once); the best first."""
    found = _found(wanted, records, part)
    if not found:
        return []
    enough = min(len({id(tensor) for tensor in own.values()}), max(found.values()))  # tied weights may be stored once
    likely = [where for where, count in found.items() if count >= enough]
    grouped = _grouped(likely, records)
    candidates = [
        _Candidate(where, grouped[where], found[where], _faults(grouped[where], own, wanted)) for where in likely
    ]
    return sorted(candidates, key=lambda one: (-one.found, one.faults.count, one.is_copy, len(one.where)))


def _found(wanted: Mapping[str, str], records: Iterable[TensorRecord], part: str | None = None) -> Counter[str]:
    """Number of a model's keys below each path."""
    return Counter(
        where
        for record in records
        for where, key in _splits(record.name)
        if is_inside(where, part) and without_wrappers(key) in wanted
    )


def _grouped(places: Collection[str], records: Iterable[TensorRecord]) -> dict[str, dict[str, TensorRecord]]:
    """Tensors below each of some paths, by key."""
    grouped: dict[str, dict[str, TensorRecord]] = {where: {} for where in places}
    for record in records:
        for where, key in _splits(record.name):
            if where in grouped:
                grouped[where][without_wrappers(key)] = record
    return grouped


def _faults(
    stored: Mapping[str, TensorRecord], own: Mapping[str, torch.Tensor], wanted: Mapping[str, str]
) -> Offenders:
    """Differences between a state_dict and a model: missing keys, unexpected keys, and shapes."""
    faults = Offenders()
    present = {id(own[key]) for bare, key in wanted.items() if bare in stored}
    for bare, key in wanted.items():
        if bare not in stored and id(own[key]) not in present:  # safetensors keeps one name of tied weights
            faults.add(f"missing {key}")
    for bare, record in stored.items():
        if bare not in wanted:
            faults.add(f"unexpected {record.name}")
        elif not is_dense(record):
            faults.add(f"{record.name} is a {record.kind}, without plain values")
        elif record.shape != tuple(own[wanted[bare]].shape):
            faults.add(f"{record.name} is {_sizes(record.shape)}, the model's {_sizes(own[wanted[bare]].shape)}")
    return faults


def _select(candidates: Iterable[_Candidate], name: str) -> _Candidate | None:
    """The state_dict that fits, preferring a model to its copies; None if none fits."""
    fitting: dict[object, _Candidate] = {}
    for one in candidates:
        if not one.faults:
            fitting.setdefault(one.views, one)
    models = [one for one in fitting.values() if not one.is_copy] or [*fitting.values()]
    chosen = [one for one in models if not is_kept_aside(one.where)] or models
    if len(chosen) > 1:
        raise ambiguous(name, "part", tuple(one.where for one in chosen))
    return next(iter(chosen), None)


def _sharded(
    best: _Candidate,
    inventory: Inventory,
    own: Mapping[str, torch.Tensor],
    wanted: Mapping[str, str],
    records: Collection[TensorRecord],
) -> _Candidate:
    """Merge a state_dict with those of other files, if a model is split across files."""
    files = {file.prefix for file in inventory.files} if isinstance(inventory, DirectoryInventory) else set()
    if best.where not in files:
        return best
    stored = dict(best.stored)
    for shard in _grouped([where for where in _found(wanted, records) if where in files], records).values():
        if not shard.keys() & stored.keys():
            stored.update(shard)
    return best._replace(stored=stored, faults=_faults(stored, own, wanted))


def _example_keys(wanted: Mapping[str, str], records: Iterable[TensorRecord]) -> str:
    """Example keys of the model and the checkpoint; with the same last names if possible."""
    stored = {_last_names(record.name): record.name for record in records}
    if not stored or not wanted:
        return f"the {'checkpoint' if wanted else 'model'} has none"
    key = next((key for key in wanted if _last_names(key) in stored), next(iter(wanted)))
    return f"the model has {wanted[key]}, the checkpoint {stored.get(_last_names(key), next(iter(stored.values())))}"


def _last_names(key: str) -> str:
    return ".".join(key.rsplit(".", 2)[-2:])


def _splits(name: str) -> Iterable[tuple[str, str]]:
    """Every split of a name into a path and a key below it."""
    yield "", name
    for dot, letter in enumerate(name):
        if letter == ".":
            yield name[:dot], name[dot + 1 :]


def _sizes(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"

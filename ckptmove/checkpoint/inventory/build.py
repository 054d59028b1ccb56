"""Build the inventory from a container and the tree of its pickle, without reading tensor bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.apart import SCRIPT_NAMES, find_apart, judged
from ckptmove.checkpoint.inventory.budget import Budget
from ckptmove.checkpoint.inventory.mentions import code_mentions
from ckptmove.checkpoint.inventory.partitions import of_partitions
from ckptmove.checkpoint.inventory.shapes import as_dict, key_text, string_keys
from ckptmove.checkpoint.inventory.walk import Walk
from ckptmove.checkpoint.roles import role_of_key
from ckptmove.checkpoint.trainers import read_counters, trainer_by_classes, trainer_by_keys
from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.formats.facts import facts_of
from ckptmove.model import ArchiveFact, Inventory, Mention
from ckptmove.pickles.calls import uses_in
from ckptmove.pickles.tree import Call, Global, Node, Persistent, nodes
from ckptmove.torch_facts.verdicts import dangerous, uses_of_names
from ckptmove.torch_facts.weights_only import modern_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.checkpoint.trainers import Trainer
    from ckptmove.formats.contract import Container
    from ckptmove.limits import Limits
    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Dict, Value

#: Last parts of names of optimizer state: moments of ``torch.optim``.
_MOMENTS: Final = frozenset({"exp_avg", "exp_avg_sq", "exp_inf", "square_avg", "momentum_buffer", "acc_delta"})
#: Key of the options of Megatron in one file that was made of its checkpoint: the name of ``common.pt``.
_COMMON: Final = "common"
_MOST_MENTIONS: Final = 100_000


def build_inventory(container: Container, machine: Machine, limits: Limits, *, keep_tree: bool = True) -> Inventory:
    """Build the inventory of a file. A tree that is not kept is freed before the storages are located."""
    found = machine_inventory(machine, container.name, limits, keep_tree=keep_tree)
    located = container.locate(found.storages)
    apart = find_apart(container, machine)
    inventory = replace(
        found,
        path=container.source.path,
        size_bytes=container.source.size,
        torch_version=container.torch_version or found.torch_version,
        producer=container.producer or found.producer,
        globals=judged(machine, container.opened),  # locating storages can add names
        apart=apart.uses,
        facts=(*(fact for fact in located if fact.record not in apart.strays), *apart.facts, *found.facts),
    )
    if not facts_of(container.name).is_script:
        return inventory
    return replace(
        inventory,
        layout="module",
        torch_version=container.torch_version,
        producer=container.producer,
        globals=tuple(use for use in inventory.globals if SCRIPT_NAMES.fullmatch(use.name) is None),
        mentions=tuple(_script_mentions(container, inventory.mentions, limits.factor * _MOST_MENTIONS)),
    )


def machine_inventory(machine: Machine, container: str, limits: Limits, *, keep_tree: bool = True) -> Inventory:
    """Build what an inventory has from a tree alone; what its files add is left out: path, size, imported names.

    ``container`` is the name of the format. A tree that is not kept is freed.
    """
    walk = Walk(limits, machine.end - machine.begin)
    walk.reader.gather(machine.persistents)
    try:
        walk.run(machine.root)
    except DamagedPickle as error:
        raise DamagedPickle(error.detail, offset=error.offset, runs=(*machine.runs,)) from error
    storages = walk.reader.storages()
    layout, producer, torch_version = _detect_layout(machine.root, walk.modules, machine.globals)
    root_keys = _root_keys(machine.root)
    own = of_partitions([draft.freeze() for draft in walk.optimizers], walk.tensors, machine.root)
    optimizers = own
    if any(key.rpartition("/")[2] == _COMMON for key in root_keys):
        from ckptmove.checkpoint.inventory.megatron import gathered_optimizers

        budget = Budget(limits, machine.end - machine.begin)
        optimizers = gathered_optimizers(own, walk.tensors, machine.root, budget.spend)
    if not keep_tree:
        machine.root, machine.persistents = None, []
    counters = read_counters(walk.counters)
    inventory = Inventory(
        path="",
        container=container,
        layout=layout if optimizers is own else "megatron",
        size_bytes=0,
        torch_version=torch_version,
        producer=producer,
        root_keys=root_keys,
        tensors=tuple(walk.tensors),
        storages=storages,
        mentions=tuple(walk.mentions),
        foreign_opcodes=tuple(_opcode_name(code) for code in machine.foreign),
        filled_classes=tuple(sorted(map(modern_name, machine.filled - {""}))),
        optimizers=optimizers,
        facts=(
            *(ArchiveFact("short-storage", name, missing) for name, missing in walk.reader.overruns),
            *_trailing_bytes(machine),
        ),
        contents=frozenset(walk.contents),
        rng_devices=tuple(walk.rng_devices),
        last_rates=tuple(walk.last_rates),
        broken_numbers=tuple(walk.broken_numbers),
        sections=tuple(walk.sections),
        objects=(*_outermost(walk.modules), *walk.pickled_optimizers),
        epoch=counters.epoch,
        step=counters.step,
    )
    return inventory if facts_of(container).has_devices else _complete(inventory)


def tree_inventory(root: Value, path: str, container: str, limits: Limits, pickle_bytes: int) -> Inventory:
    """Build the inventory of a tree that was changed, and is in no file yet, from pickles of this size."""
    walk = Walk(limits, pickle_bytes)
    found = tuple(nodes(root))
    walk.reader.gather(node for node in found if type(node) is Persistent)
    walk.run(root)
    names = dict.fromkeys(node.full_name for node in found if type(node) is Global)
    runs = dangerous(uses_in(found))
    return Inventory(
        path=path,
        container=container,
        layout="other",
        size_bytes=0,
        root_keys=_root_keys(root),
        tensors=tuple(walk.tensors),
        storages=walk.reader.storages(),
        mentions=tuple(walk.mentions),
        globals=uses_of_names(names, runs),
        optimizers=of_partitions([draft.freeze() for draft in walk.optimizers], walk.tensors, root),
        contents=frozenset(walk.contents),
        rng_devices=tuple(walk.rng_devices),
        last_rates=tuple(walk.last_rates),
        broken_numbers=tuple(walk.broken_numbers),
        sections=tuple(walk.sections),
    )


def _root_keys(root: Value) -> tuple[str, ...]:
    """Return the keys of the root; no path begins with the number of a plain value, and there may be millions."""
    pairs = as_dict(root)
    found = pairs.pairs() if pairs is not None else ()
    return tuple([key_text(key) for key, value, _ in found if type(key) is not int or isinstance(value, Node)])


def _outermost(modules: Iterable[str]) -> Iterator[str]:
    """Iterate over the paths of modules that are not part of another one; the walk lists a module before its parts."""
    around: str | None = None
    for path in modules:
        if around is None or not f"{path}.".startswith(f"{around}." if around else ""):
            around = path
            yield path


def _trailing_bytes(machine: Machine) -> tuple[ArchiveFact, ...]:
    """Report bytes after the end of the object pickle, where another pickle could be."""
    rest = machine.data_bytes - machine.end
    return (ArchiveFact("stray-bytes", "bytes after the end of data.pkl", rest),) if rest > 0 else ()


def _script_mentions(container: Container, found: Iterable[Mention], most: int) -> list[Mention]:
    """Return the devices in the attributes of a TorchScript module, then those in its code.

    From torch/csrc/jit/serialization/pickler.cpp ``pushDevice``: the only argument of the call is the whole tag.
    """
    in_code = chain.from_iterable(code_mentions(name, text) for name, text in container.code())
    more = list(islice(in_code, most + 1))
    if len(more) > most:
        raise LimitExceeded("devices named in code", limit=most, actual=len(more))
    devices = [one._replace(tuple_site=one.site) if one.kind == "torch.device" else one for one in found]
    return devices + more


def _opcode_name(code: int) -> str:
    import pickletools

    return next(opcode.name for opcode in pickletools.opcodes if ord(opcode.code) == code)


def _complete(inventory: Inventory) -> Inventory:
    """Set the roles of optimizer tensors by name, and remove the device tags."""
    parts = (tensor.name.rpartition(".") for tensor in inventory.tensors)
    states = {holder for holder, _, leaf in parts if leaf in _MOMENTS}
    tensors = tuple(
        [
            tensor._replace(role="optimizer")
            if (states and tensor.name.rpartition(".")[0] in states) or _is_in_optimizer(tensor.name)
            else tensor
            for tensor in inventory.tensors
        ]
    )
    storages = tuple(
        [
            storage._replace(tag_sites=(), class_sites=()) if storage.tag_sites else storage
            for storage in inventory.storages
        ]
    )
    return replace(inventory, tensors=tensors, storages=storages)


def _is_in_optimizer(name: str) -> bool:
    """Whether a name begins with the key of an optimizer, as in Megatron, which saves its state with the model."""
    from ckptmove.checkpoint.inventory.megatron import is_state

    first, dot, _ = name.partition(".")
    return bool(dot) and (role_of_key(first) == "optimizer" or is_state(name))


def _detect_layout(root: Value, modules: Sequence[str], globals_: Iterable[str]) -> tuple[str, str | None, str | None]:
    """The layout, and the versions of the library and of torch that wrote the file, if the root names them."""
    if "" in modules:
        return "module", None, None
    by_class = trainer_by_classes(globals_)
    pairs = as_dict(root)
    if pairs is None:
        return by_class.layout if by_class else "other", None, None
    trainer = trainer_by_keys(string_keys(pairs)) or by_class
    producer = _producer(pairs, trainer) if trainer else None
    return trainer.layout if trainer else "plain", producer, _torch_version(pairs)


def _producer(pairs: Dict, trainer: Trainer) -> str | None:
    """The library of the trainer with its version, if the root names one."""
    for library, path in trainer.library:
        holder: Dict | None = pairs
        for key in path[:-1]:
            holder = as_dict(holder.get(key)) if holder is not None else None
        version = holder.get(path[-1]) if holder is not None else None
        if type(version) is str:
            return f"{library} {version[:40]}"
    return None


def _torch_version(pairs: Dict) -> str | None:
    """Return ``torch_version`` of the root; a key ``version`` could be that of any library."""
    for holder in (pairs, as_dict(pairs.get("meta"))):
        value = holder.get("torch_version") if holder is not None else None
        if type(value) is Call and value.name == "torch.torch_version.TorchVersion":
            value = next(iter(value.arguments), None)
        if type(value) is str:
            return value[:40]
    return None

"""Rules about devices: D101 to D104."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory, sharding_of
from ckptmove.checkpoint.inventory.mentions import is_in_code, mesh_owners, named_ids
from ckptmove.checkpoint.state_dicts import with_wrappers
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import (
    census,
    convert_command,
    devices_needed,
    fullest_device,
    is_incomplete,
    is_out_of_range,
    is_placed,
    known_count,
    target_device,
)
from ckptmove.formats.facts import facts_of
from ckptmove.model import Severity
from ckptmove.text import Argument, amount
from ckptmove.torch_facts.devices import is_accelerator, same_device, split

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory, Mention, OptimizerRecord, TensorRecord


def mixed_devices(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """D101: tensors of model and loss, which one forward pass uses, are on several devices.

    Several checkpoints in one folder are not used together, so each is checked alone. An error for a pickled module
    with tensors on the CPU: it is used as it is, so nothing moves them.
    """
    tensors = [
        tensor
        for tensor in _without_inner_on_same_device(inventory.tensors)
        if tensor.role in {"model", "criterion"} and is_placed(tensor) and tensor.name not in context.kept
    ]
    for together in inventory.by_checkpoint(tensors) if isinstance(inventory, DirectoryInventory) else [tensors]:
        yield from _mixed(together, inventory, context)


def _mixed(tensors: list[TensorRecord], inventory: Inventory, context: Context) -> Iterator[Finding]:
    homes = _distinct(tensors)
    home = fullest_device(tensors) or "cpu"
    away = {tag for tag in {tensor.device for tensor in tensors} if not same_device(tag, home)}
    strays = [tensor.name for tensor in tensors if tensor.device in away]
    if not strays:
        return
    names = census(tensor.device for tensor in tensors)
    several = sum(map(is_accelerator, homes)) > 1
    why = "right for a model-parallel run only" if several else "one forward pass needs them on one"
    message = f"{amount(len(tensors), 'tensor')} of the model are on several devices: {names}; {why}"
    finding = found("D101", message, strays, convert_command(inventory, context, strays))
    is_unusable = not several and _has_mixed_module(tensors, inventory)
    yield finding._replace(severity=Severity.ERROR) if is_unusable else finding


def _has_mixed_module(tensors: Iterable[TensorRecord], inventory: Inventory) -> bool:
    """Whether one pickled module has tensors on several devices."""
    from ckptmove.checkpoint.pickled import PickledObjects

    modules, homes = PickledObjects(inventory), dict[str, str]()
    return any(
        not same_device(homes.setdefault(module, tensor.device), tensor.device)
        for tensor in tensors
        if (module := modules.around(tensor.name)) is not None
    )


def optimizer_device(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """D102: a moment is on another device than its parameter.

    If the whole model is on one device, so is each parameter. If not, only a certain pairing shows the device of a
    parameter; without one, a moment is wrong only on a device that has no part of the model. Moments that the user
    keeps, and those of parameters that the user keeps, do not count. An error for a pickled optimizer: only
    ``load_state_dict`` moves state to its parameter.
    """
    model = [tensor for tensor in inventory.tensors if tensor.role == "model" and is_placed(tensor)]
    homes = _distinct(model)
    if all(tensor.name in context.kept for tensor in model):
        return
    if sharding_of(inventory):
        return  # each rank has the moments of its own shard, and its own device
    pairings: tuple[Pairing | None, ...] = (None,) * len(inventory.optimizers)
    if len(homes) > 1:
        pairings = tuple(pairing if pairing.is_certain else None for pairing in context.pairings)
    for optimizer, pairing in zip(inventory.optimizers, pairings, strict=True):
        strays = list(_strays(optimizer, pairing, homes, context.kept))
        if strays:
            named = f"{optimizer.where}: " if len(inventory.optimizers) > 1 else ""
            message = named + _stray_message(optimizer, [(device, home) for _, device, home in strays])
            where = [name for name, _, _ in strays]
            finding = found("D102", message, where, convert_command(inventory, context, where))
            is_object = optimizer.where in inventory.objects
            yield finding._replace(severity=Severity.ERROR) if is_object else finding


def device_index(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """D103: ``torch.load`` without ``map_location`` raises for an index that the machine does not have.

    If the number of devices is not known, the finding is a note with the number that the file needs.
    """
    tags = {tensor.device for tensor in inventory.tensors} | {mention.value for mention in inventory.mentions}
    one_device = context._replace(device_count=1)
    missing = {tag for tag in tags if is_out_of_range(tag, context)}
    beyond = missing or {
        tag for tag in tags if known_count(split(tag)[0], context) is None and is_out_of_range(tag, one_device)
    }
    tensors = [tensor for tensor in inventory.tensors if tensor.device in beyond and tensor.name not in context.kept]
    objects = [mention for mention in inventory.mentions if mention.kind == "torch.device" and mention.value in beyond]
    if not tensors and not objects:
        return
    held = [census(tensor.device for tensor in tensors)] if tensors else []
    lines = [mention for mention in objects if is_in_code(inventory, mention)]
    others = [mention for mention in objects if mention not in lines]
    held += [f"torch.device objects for {census(mention.value for mention in others)}"] if others else []
    held += [f"code for {census(mention.value for mention in lines)}"] if lines else []
    kind = split(tensors[0].device if tensors else objects[0].value)[0]
    count = known_count(kind, context)
    if count is None:
        needed = devices_needed(tag for tag in beyond if split(tag)[0] == kind)
        end = f": needs a machine with {amount(needed, f'{kind} device')}"
    else:
        end = f", but the target machine has {amount(count, f'{kind} device')}"
    message = f"{'tensors on ' if tensors else ''}{' and '.join(held)}{end}"
    where = [*(tensor.name for tensor in tensors), *(mention.where for mention in objects)]
    machine = context if missing or context.target is not None else one_device
    fix = convert_command(inventory, machine, where) if tensors or others else _code_fix(lines)
    finding = found("D103", message, where, fix)
    yield finding if missing else finding._replace(severity=Severity.INFO)


def device_mention(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """D104: a config, a ``torch.device``, ``device_ids`` or a DeviceMesh names another device than the model's.

    The mesh of a DTensor is compared with that DTensor, which must have the device type of its mesh.
    """
    yield from _graph_device(inventory)
    model = [tensor for tensor in inventory.tensors if tensor.role == "model"]
    # Without a model, all tensors count but RNG states, which are always on the CPU.
    model = model or [tensor for tensor in inventory.tensors if tensor.role != "rng"]
    # Part of the model may be in a file that could not be read.
    places = () if is_incomplete(inventory) else (tensor.device for tensor in model if is_placed(tensor))
    tags = list(dict.fromkeys(places))
    owners = mesh_owners(inventory)
    homes = {tensor.name: tensor.device for tensor in inventory.tensors if tensor.kind == "wrapper-subclass"}
    strays = [
        mention
        for mention in inventory.mentions
        if (
            split(homes[owners[mention.where]])[0] != mention.value
            if mention.where in owners
            else tags and not _fits_model(mention, tags, context)
        )
    ]
    if not strays:
        return
    first = strays[0]
    more = f" and {len(strays) - 1} more" if len(strays) > 1 else ""
    named = first.value if first.kind != "device_ids" else f"devices {first.value}"
    if first.where in owners:
        message = f"{first.where} names {named}{more}, its DTensor is on {homes[owners[first.where]]}"
    else:
        message = f"{first.where} names {named}{more}, the model is on {', '.join(tags)}"
    yield found("D104", message, [mention.where for mention in strays], _mention_fix(inventory, context, strays))


def _graph_device(inventory: Inventory) -> Iterator[Finding]:
    """D104 for the graph of a ``torch.export`` archive that expects a weight on another device than the file's.

    An error, unlike other mentions: the program fails at its first operation, and no script can change that.
    """
    names = [fact.record for fact in inventory.facts if fact.kind == "graph-device"]
    if names:
        places = [tensor.device for tensor in inventory.tensors if tensor.role == "model"]
        named = [one.value for one in inventory.mentions if one.kind == "torch.device" and ".values." in one.where]
        home = next((tag for tag in named if not any(same_device(tag, place) for place in places)), "cpu")
        message = f"the graph expects {amount(len(names), 'tensor')} on {home}, but the file has them elsewhere"
        fix = facts_of("torch-export").unwritten_hint
        yield found("D104", message, names, fix)._replace(severity=Severity.ERROR)


# --- helpers ---------------------------------------------------------------------------------------------------------


def _without_inner_on_same_device(tensors: Iterable[TensorRecord]) -> Iterator[TensorRecord]:
    """Skip tensors inside a wrapper subclass that are on its device."""
    for tensor, outermost in with_wrappers(tensors):
        if outermost is None or tensor is outermost or not same_device(tensor.device, outermost.device):
            yield tensor


def _distinct(tensors: Iterable[TensorRecord]) -> list[str]:
    """Return one tag for each device of some tensors; a tag without an index means the first device of its type."""
    tags: list[str] = []
    for tag in dict.fromkeys(tensor.device for tensor in tensors):
        if not any(same_device(tag, other) for other in tags):
            tags.append(tag)
    return tags


def _strays(
    optimizer: OptimizerRecord, pairing: Pairing | None, homes: list[str], kept: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Iterate over moments on another device than their parameter: name, device, device of the parameter."""
    parameters = pairing.by_key() if pairing is not None else {}
    for entry in optimizer.state:
        parameter = parameters.get(entry.key)
        if parameter is not None and parameter.name in kept:
            continue
        possible = homes if parameter is None or not is_placed(parameter) else [parameter.device]
        away = any(tensor.device not in possible for _, tensor in entry.tensors)
        for tensor in _without_inner_on_same_device(tensor for _, tensor in entry.tensors) if away else ():
            if not tensor.shape or not is_placed(tensor) or tensor.device in possible or tensor.name in kept:
                continue
            if not any(same_device(tensor.device, home) for home in possible):
                yield tensor.name, tensor.device, " or ".join(possible)


def _stray_message(optimizer: OptimizerRecord, moves: list[tuple[str, str]]) -> str:
    own = [
        tensor
        for entry in optimizer.state
        for tensor in _without_inner_on_same_device(tensor for _, tensor in entry.tensors)
    ]
    total = sum(bool(tensor.shape) for tensor in own)
    parts = [
        f"{count} of {total} optimizer moments are on {device}, their parameters on {home}"
        for (device, home), count in Counter(moves).items()
    ]
    return "; ".join(parts)


def _fits_model(mention: Mention, tags: list[str], context: Context) -> bool:
    """Whether a mention fits the devices of the model.

    The CPU exists on every machine, and next to a model on a GPU it is mostly meant (``offload_device``). ``cuda``
    without an index fits every index. ``map_location`` is a target for loading, not a device of the model. A bare
    number under ``gpus`` or ``devices`` is a number of devices (Lightning). Device ids of DataParallel also name
    replicas: one of them has to fit, and all have to exist if the number of devices is known.
    """
    key = mention.where.rpartition(".")[2]
    if mention.kind != "device_ids":
        kind, index = split(mention.value)
        places = [split(tag) for tag in tags]
        return (
            key == "map_location"
            or not is_accelerator(mention.value)
            or any(kind == other and (index is None or index == (own or 0)) for other, own in places)
        )
    ids = named_ids(mention)
    if not ids:
        return True
    homes = [tag for tag in tags if is_accelerator(tag)]
    if not homes or ids.isdisjoint(split(tag)[1] or 0 for tag in homes):
        return False
    count = known_count(split(homes[0])[0], context)
    return count is None or max(ids) < max(count, devices_needed(homes))


def _mention_fix(inventory: Inventory, context: Context, strays: list[Mention]) -> str:
    """Return the fix: ``convert`` moves objects, and strings with a flag; device ids and code are changed by hand."""
    if all(is_in_code(inventory, mention) for mention in strays):
        return _code_fix(strays)
    kinds = {mention.kind for mention in strays}
    if kinds == {"device_ids"}:
        target = target_device(inventory, context) or "cpu"
        index = str(split(target)[1] or 0) if is_accelerator(target) else ""
        first = strays[0]
        value = f"[{index}]" if first.value.startswith("[") else index or "None"
        return f"in the script that reads it, set {first.where} to {value}"
    options = [Argument("rewrite_strings", True)] if "string" in kinds else []
    return convert_command(inventory, context, [mention.where for mention in strays], *options)


def _code_fix(lines: list[Mention]) -> str:
    """Return the fix for a device in TorchScript code: ``convert`` and ``map_location`` do not change code."""
    return (
        f"convert cannot change code: in the module's source, replace {lines[0].value} by x.device of an input x, "
        f"then torch.jit.save(torch.jit.script(module), ...) again"
    )


#: The rules, in the order of the codes.
RULES: Final = (mixed_devices, optimizer_device, device_index, device_mention)

"""Rules about optimizers: O201 to O208.

A file that a healthy run can write is never an error.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import sharding_of
from ckptmove.checkpoint.pairing import moments
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import convert_command, file_of, target_device
from ckptmove.text import amount, quoted, some
from ckptmove.torch_facts.devices import is_accelerator, supports_capturable, supports_fused
from ckptmove.torch_facts.optimizers import lost_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory, OptimizerRecord, ParamGroup, StateEntry, TensorRecord

#: Counters that torch keeps on the CPU unless the group is capturable or fused.
_COUNTERS: Final = ("step", "mu_product")


def step_on_accelerator(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """O201: counters on an accelerator cause a sync at each step. ASGD is skipped: torch creates its counters there."""
    for optimizer in inventory.optimizers:
        if optimizer.algorithm == "ASGD":
            continue
        strays = [
            (key, tensor)
            for group, key, tensor in _counters(optimizer)
            if is_accelerator(tensor.device) and not (group.is_set("capturable") or group.is_set("fused"))
        ]
        if strays:
            held = " and ".join(f"{count} '{key}'" for key, count in Counter(key for key, _ in strays).items())
            tags = ", ".join(dict.fromkeys(tensor.device for _, tensor in strays))
            message = (
                f"{held} tensors on {tags}, in groups that are neither capturable nor fused: a GPU sync for each step"
            )
            where = [tensor.name for _, tensor in strays]
            yield found("O201", message, where, convert_command(inventory, context, where))


def capturable_unsupported(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """O202: a capturable group that is not fused needs a device that supports capturable, or the first step raises."""
    target = target_device(inventory, context)
    if target is None or supports_capturable(target):
        return
    for optimizer in inventory.optimizers:
        where = [
            f"{group.where}.capturable"
            for group in optimizer.groups
            if group.is_set("capturable") and not (group.is_set("fused") and supports_fused(target))
        ]
        if where:
            count = f"{len(where)} of {amount(len(optimizer.groups), 'group')}"
            message = f"{count} with capturable=True, which {target} does not support: the first step raises"
            yield found("O202", message, where, convert_command(inventory, context, where))


def step_on_cpu(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """O203: counters of a capturable or fused group are on the CPU; torch moves them at load."""
    target = target_device(inventory, context)
    if target is None or not is_accelerator(target):
        return
    flags = [
        flag
        for flag, is_supported in (
            ("capturable", supports_capturable(target)),
            ("fused", supports_fused(target)),
        )
        if is_supported
    ]
    for optimizer in inventory.optimizers:
        if not any(group.is_set(flag) for group in optimizer.groups for flag in flags):
            continue
        names = [
            tensor.name
            for group, _, tensor in _counters(optimizer)
            if tensor.device == "cpu" and any(group.is_set(flag) for flag in flags)
        ]
        if names:
            message = (
                f"{amount(len(names), 'counter')} on the CPU in capturable or fused groups; torch moves them at load"
            )
            yield found("O203", message, names, convert_command(inventory, context, names))


def state_shape(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """O204: a moment has another shape than its parameter, or than any tensor that could be its parameter."""
    for optimizer, pairing, lacking in zip(inventory.optimizers, context.pairings, context.lacking, strict=True):
        parameters = pairing.by_key() if pairing.is_certain else {}
        parted = [
            (tensor, f"{parameter.name} is {list(parameter.shape)}")
            for entry in optimizer.state
            if (parameter := parameters.get(entry.key)) is not None
            for pair in entry.tensors
            if (tensor := pair[1]).shape and tensor.shape != parameter.shape  # first: true of few
            if pair in moments(entry, optimizer.algorithm)
        ]
        parted = parted or [
            (tensor, "and no tensor that could be its parameter has that shape")
            for shortage in lacking.shortages
            if not shortage.tensors
            for entry in shortage.entries
            for _, tensor in moments(entry, optimizer.algorithm)
        ]
        if parted:
            tensor, other = parted[0]
            more = f" and {len(parted) - 1} more" if len(parted) > 1 else ""
            message = f"{tensor.name} is {list(tensor.shape)}, {other}{more}"
            yield found(
                "O204", message, [tensor.name for tensor, _ in parted], _restore_model_only(inventory, optimizer)
            )


def state_missing(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """O205: part of a group has no state; in a flat optimizer, whose groups are not known, part of the optimizer.

    LBFGS is skipped: it keeps all its state on its first parameter. A rank has no state of parameters without elements
    on it.
    """
    for optimizer in () if sharding_of(inventory) else inventory.optimizers:
        if optimizer.algorithm == "LBFGS":
            continue
        known = {
            entry.key
            for entry in optimizer.state
            if entry.tensors or any(value is not None for _, value in entry.scalars)
        }
        is_one = optimizer.is_flat and bool(known)
        partial = [group for group in optimizer.groups if is_one or not known.isdisjoint(group.params)]
        missing = [(group, key) for group in partial for key in group.params if key not in known]
        if missing:
            total = sum(len(group.params) for group in partial)
            message = f"{len(missing)} of {amount(total, 'parameter')} have no state: frozen, or lost"
            where = [group.where if optimizer.is_flat else f"{group.where}.params.{key}" for group, key in missing]
            fix = f"save {inventory.path} again from the run; if those parameters were frozen, nothing is wrong"
            yield found("O205", message, where, fix)


def group_size(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """O206: more parameters than tensors that could be one, or state that no group lists.

    Fewer parameters than tensors is normal: buffers, frozen weights, tied weights, other optimizers. More is a fault,
    if ``candidates`` knows all tensors of the model. If the groups list numbers, state under a name belongs to no
    parameter: some optimizers keep values of their own there.
    """
    for optimizer, lacking in zip(inventory.optimizers, context.lacking, strict=True):
        unlisted = _unlisted(optimizer)
        root = f"{optimizer.where}." if optimizer.where else ""
        faults: dict[str, list[str]] = {}
        if lacking.listed:
            parameters, tensors = amount(lacking.listed, "parameter"), amount(lacking.candidates, "tensor")
            faults[f"{parameters} in the groups, {tensors} in the file that could be one"] = [f"{root}param_groups"]
        for shape, entries, count in lacking.shortages:
            if count:
                held = f"state of {len(entries)} parameters of shape {list(shape)}"
                faults[f"{held}, {amount(count, 'tensor')} in the file that could be one"] = [
                    f"{root}state.{entry.key}" for entry in entries
                ]
        if optimizer.mistyped:
            lost = f"state of {amount(len(optimizer.mistyped), 'parameter')} by keys of another type than in the groups"
            faults[f"{lost} (text and numbers): load_state_dict finds none of it"] = [
                f"{root}state.{key}" for key in optimizer.mistyped
            ]
        if unlisted:
            lost = f"state of {amount(len(unlisted), 'parameter')} that no group lists"
            faults[lost] = [f"{root}state.{entry.key}" for entry in unlisted]
        if faults:
            where = [path for paths in faults.values() for path in paths]
            is_mended = optimizer.mistyped and len(faults) == 1
            fix = _convert_keys(optimizer) if is_mended else _restore_model_only(inventory, optimizer)
            yield found("O206", "; ".join(faults), where, fix)


def state_incomplete(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """O207: a group or a state entry has lost a key that its optimizer reads."""
    for optimizer in inventory.optimizers:
        lost = lost_keys(optimizer.algorithm, optimizer.groups, optimizer.state, is_flat=optimizer.is_flat)
        if lost:
            where = [f"{optimizer.where}.{path}".lstrip(".") for path in lost]
            message = f"{optimizer.algorithm} reads {some(where)}: not in the file"
            yield found("O207", message, where, _restore_model_only(inventory, optimizer))


def state_order(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """O208: the moments fit the model's tensors, but in another order, by a choice of the script or by a fault."""
    for optimizer, pairing in zip(inventory.optimizers, context.pairings, strict=True):
        if pairing.how == "permuted":
            where = [tensor.name for entry in optimizer.state for _, tensor in moments(entry, optimizer.algorithm)]
            to = f" --to {quoted(context.target)}" if context.target is not None else ""
            fix = (
                "save it again from the run; if the script lists its parameters in this order: "
                f"ckptmove verify {quoted(inventory.path)}{to} --ignore O208"
            )
            yield found("O208", f"{pairing.reason}; load_state_dict goes by position", where, fix)


# --- helpers ---------------------------------------------------------------------------------------------------------


def _counters(optimizer: OptimizerRecord) -> Iterator[tuple[ParamGroup, str, TensorRecord]]:
    """Iterate over the counters of every listed parameter: group, state key, tensor."""
    groups = {key: group for group in optimizer.groups for key in group.params}
    for entry in optimizer.state:
        if entry.key in groups:
            for key, tensor in entry.tensors:
                if key in _COUNTERS:
                    yield groups[entry.key], key, tensor


def _unlisted(optimizer: OptimizerRecord) -> list[StateEntry]:
    """Return the state of parameters that no group lists."""
    listed = {key for group in optimizer.groups for key in group.params}
    is_by_number = all(key.isdecimal() for key in listed)
    unlisted = [entry for entry in optimizer.state if entry.key not in listed] if optimizer.groups else []
    return [entry for entry in unlisted if entry.key.isdecimal() or not is_by_number]


def _convert_keys(optimizer: OptimizerRecord) -> str:
    """Return the lines that give the state the keys of the groups: ``dcp_to_torch`` converts all keys to text."""
    keys = "{str(key): key for group in state['param_groups'] for key in group['params']}"
    mended = "{keys[str(key)]: value for key, value in state['state'].items()}"
    where = optimizer.where or "the file"
    return f"in the training script, with {where} as state: keys = {keys}; state['state'] = {mended}"


def _restore_model_only(inventory: Inventory, optimizer: OptimizerRecord) -> str:
    file = file_of(inventory, optimizer.where)
    from_file = "" if file is None else f" of {file.path}" if "model" in file.roles else f", without {file.path}"
    return f"restore only the model{from_file}: the optimizer state does not fit"

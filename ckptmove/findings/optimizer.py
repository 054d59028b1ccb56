"""Rules about optimizers: O201 to O208, O210 and O211.

A file that a healthy run can write is never an error.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import sharding_of
from ckptmove.checkpoint.pairing import moments
from ckptmove.checkpoint.state_dicts import EMA, is_never_trained, model_tensors
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import convert_command, file_of, target_device
from ckptmove.model import Severity
from ckptmove.text import amount, quoted, some
from ckptmove.torch_facts.devices import is_accelerator, supports_capturable, supports_fused
from ckptmove.torch_facts.dtypes import ITEM_BYTES
from ckptmove.torch_facts.optimizers import BY_NAME, lost_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory, OptimizerRecord, ParamGroup, TensorRecord

#: Counters that torch keeps on the CPU unless the group is capturable or fused.
_COUNTERS: Final = ("step", "mu_product")
#: Largest step count of a dtype that cannot hold every count of a training: one more is the same number.
_COUNTS_TO: Final = {"bfloat16": 256, "float16": 2048}


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
    """O202: the target does not support a group that is fused, or capturable and not fused: the first step raises."""
    target = target_device(inventory, context)
    if target is None:
        return
    is_fused = supports_fused(target)
    for optimizer in inventory.optimizers:
        refused = [(group, "fused") for group in optimizer.groups if group.is_set("fused") and not is_fused]
        if not supports_capturable(target):
            stepped = [group for group in optimizer.groups if not (group.is_set("fused") and is_fused)]
            refused += [(group, "capturable") for group in stepped if group.is_set("capturable")]
        if refused:
            count = f"{len({group.where for group, _ in refused})} of {amount(len(optimizer.groups), 'group')}"
            flags = " and ".join(f"{flag}=True" for flag in dict.fromkeys(flag for _, flag in refused))
            message = f"{count} with {flags}, which {target} does not support: the first step raises"
            where = [f"{group.where}.{flag}" for group, flag in refused]
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
            if not (shortage.tensors or lacking.is_adapter)
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


def state_missing(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """O205: part of a group has no state, or the whole optimizer has none after steps of the training.

    In a flat optimizer, whose groups are not known, part of the optimizer. LBFGS is skipped: it keeps all its state on
    its first parameter. A rank has no state of parameters without elements on it. A weight that its library always
    freezes has none.
    """
    if sharding_of(inventory):
        return
    for optimizer, pairing in zip(inventory.optimizers, context.pairings, strict=True):
        if optimizer.algorithm == "LBFGS":
            continue
        known = {
            entry.key
            for entry in optimizer.state
            if entry.tensors or any(value is not None for _, value in entry.scalars)
        }
        # A trainer that counts epochs from one may save epoch 1 before its first step.
        epoch = f"epoch {inventory.epoch:g}" if (inventory.epoch or 0) > 1 else ""
        after = f"step {inventory.step:,}" if inventory.step else epoch
        if not known and after and _writes_state(optimizer):
            listed = sum(len(group.params) for group in optimizer.groups)
            message = f"no parameter of {listed} has state, at {after}: the optimizer was never stepped, or lost it"
            fix = f"save {inventory.path} again from the run, with the optimizer that is stepped there"
            yield found("O205", message, [group.where for group in optimizer.groups], fix)
        is_one = optimizer.is_flat and bool(known)
        partial = [group for group in optimizer.groups if is_one or not known.isdisjoint(group.params)]
        missing = [(group, key) for group in partial for key in group.params if key not in known]
        if missing and not _are_never_trained(inventory, pairing, {key for _, key in missing}):
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
        listed = {key for group in optimizer.groups for key in group.params}
        is_by_number = all(key.isdecimal() for key in listed)
        unlisted = [entry for entry in optimizer.state if entry.key not in listed] if optimizer.groups else []
        unlisted = [entry for entry in unlisted if entry.key.isdecimal() or not is_by_number]
        root = f"{optimizer.where}." if optimizer.where else ""
        faults: dict[str, list[str]] = {}
        if lacking.listed:
            parameters, tensors = amount(lacking.listed, "parameter"), amount(lacking.candidates, "tensor")
            faults[f"{parameters} in the groups, {tensors} in the file that could be one"] = [f"{root}param_groups"]
        for shape, entries, count in lacking.shortages:
            if count or lacking.is_adapter:
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
            if lacking.is_adapter and not (optimizer.mistyped or unlisted):
                fix = (
                    "save it again from the run, with the modules of these parameters in modules_to_save of the adapter"
                )
                yield found("O206", "; ".join(faults), where, fix)._replace(severity=Severity.WARNING)
                continue
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
            fix = _give_step(inventory, optimizer, lost) + _restore_model_only(inventory, optimizer)
            yield found("O207", message, where, fix)


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


def state_precision(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """O210: a step count in half precision, or moments of lower precision than their parameters.

    bfloat16 counts to 256, and float16 to 2048: a step adds nothing then. torch casts moments to the dtype of their
    parameter when it loads them (torch/optim/optimizer.py ``_process_value_according_to_param_policy``), which does not
    bring back what was lost.
    """
    for optimizer, pairing in zip(inventory.optimizers, context.pairings, strict=True):
        counts = [tensor for _, key, tensor in _counters(optimizer) if key == "step" and tensor.dtype in _COUNTS_TO]
        parameters = pairing.by_key() if pairing.is_certain and optimizer.algorithm is not None else {}
        lower = [
            (tensor, parameter.dtype)
            for entry in optimizer.state
            if (parameter := parameters.get(entry.key)) is not None and "float" in parameter.dtype
            for _, tensor in moments(entry, optimizer.algorithm)
            if "float" in tensor.dtype and ITEM_BYTES[tensor.dtype] < ITEM_BYTES[parameter.dtype]
        ]
        most = min((_COUNTS_TO[tensor.dtype] for tensor in counts), default=0)
        held = f"{amount(len(counts), 'step count')} in {_dtypes(counts)}, which counts to {most}"
        parts = [held] if counts else []
        if lower:
            of = some([*dict.fromkeys(dtype for _, dtype in lower)], most=2)
            parts.append(f"{amount(len(lower), 'moment')} in {_dtypes(one for one, _ in lower)} of parameters in {of}")
        if parts:
            where = [tensor.name for tensor in (*counts, *(one for one, _ in lower))]
            fix = "save the optimizer's state in its own dtypes: cast only the model's state_dict before torch.save"
            yield found("O210", "; ".join(parts), where, fix)


def schedule_free_mode(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """O211: a schedule-free optimizer was saved in train mode: its model has the weights of training, not the average.

    From the optimizers of facebookresearch/schedule_free: each group has ``train_mode`` and ``weight_sum``.
    """
    for optimizer in inventory.optimizers:
        options = [(group, dict(group.options)) for group in optimizer.groups]
        where = [group.where for group, own in options if own.get("train_mode") is True and "weight_sum" in own]
        if where:
            message = f"{amount(len(where), 'group')} of a schedule-free optimizer saved in train mode"
            yield found(
                "O211", message, where, "call optimizer.eval() before torch.save, and optimizer.train() after it"
            )


# --- helpers ---------------------------------------------------------------------------------------------------------


def _counters(optimizer: OptimizerRecord) -> Iterator[tuple[ParamGroup, str, TensorRecord]]:
    """Iterate over the counters of every listed parameter: group, state key, tensor."""
    groups = {key: group for group in optimizer.groups for key in group.params}
    for entry in optimizer.state:
        if entry.key in groups:
            for key, tensor in entry.tensors:
                if key in _COUNTERS:
                    yield groups[entry.key], key, tensor


def _are_never_trained(inventory: Inventory, pairing: Pairing, keys: set[str]) -> bool:
    """Whether parameters are weights that their library always freezes; by their number if it is not known which."""
    if pairing.is_certain:
        tensors = [tensor for key, tensor in pairing.matches if key in keys]
        return all(tensor is not None and is_never_trained(tensor.name) for tensor in tensors)
    model = model_tensors(inventory) or model_tensors(inventory, EMA)
    return len(keys) <= sum(is_never_trained(tensor.name) for tensor in model)


def _writes_state(optimizer: OptimizerRecord) -> bool:
    """Whether every class that the optimizer can be writes state at its first step: SGD does with momentum alone."""
    rows = [BY_NAME[name] for name in optimizer.candidates]
    momentum = [dict(group.options).get("momentum") for group in optimizer.groups if group.params]
    return bool(rows and momentum) and all(bool(row.state) or all(momentum) for row in rows)


def _dtypes(tensors: Iterable[TensorRecord]) -> str:
    return some([*dict.fromkeys(tensor.dtype for tensor in tensors)], most=2)


def _convert_keys(optimizer: OptimizerRecord) -> str:
    """Return how the state gets the keys of the groups: ``dcp_to_torch`` converts all keys to text."""
    where = optimizer.where or "the file"
    return f"before load_state_dict, give the keys in the state of {where} the type that they have in its groups"


def _give_step(inventory: Inventory, optimizer: OptimizerRecord, lost: Sequence[str]) -> str:
    """Return where the step counts are, if entries of the state have lost nothing else; else empty."""
    if not all(path.endswith(".step") for path in lost):
        return ""
    counted = (entry for entry in optimizer.state if "step" in {**dict(entry.tensors), **dict(entry.scalars)})
    entry = next(counted, None)
    if entry is None and not inventory.step:
        return ""
    has_it = "" if entry is None else f"{optimizer.where}.state.{entry.key}".lstrip(".")
    step = f"that of {has_it}" if has_it else f"torch.tensor({inventory.step}.0)"
    return f"before load_state_dict, give each entry without a step {step}; or "


def _restore_model_only(inventory: Inventory, optimizer: OptimizerRecord) -> str:
    file = file_of(inventory, optimizer.where)
    from_file = "" if file is None else f" of {file.path}" if "model" in file.roles else f", without {file.path}"
    return f"restore only the model{from_file}: the optimizer state does not fit"


#: The rules, in the order of the codes.
RULES: Final = (
    step_on_accelerator,
    capturable_unsupported,
    step_on_cpu,
    state_shape,
    state_missing,
    group_size,
    state_incomplete,
    state_order,
    state_precision,
    schedule_free_mode,
)

"""The list of all rules, and the function that runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.checkpoint.pairing import pair_all
from ckptmove.findings import archive, beside, devices, dtypes, keys, numbers, optimizer, resume, safety
from ckptmove.findings.candidates import find_lacking
from ckptmove.findings.context import is_incomplete, target_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory

FindingRule: TypeAlias = "Callable[[Inventory, Context], Iterable[Finding]]"

#: Every rule, in the order of the codes.
RULES: Final[tuple[FindingRule, ...]] = (
    devices.mixed_devices,
    devices.optimizer_device,
    devices.device_index,
    devices.device_mention,
    optimizer.step_on_accelerator,
    optimizer.capturable_unsupported,
    optimizer.step_on_cpu,
    optimizer.state_shape,
    optimizer.state_missing,
    optimizer.group_size,
    optimizer.state_incomplete,
    optimizer.state_order,
    optimizer.state_precision,
    optimizer.schedule_free_mode,
    resume.rng_on_accelerator,
    resume.resume_incomplete,
    resume.rng_count,
    resume.scheduler_rate,
    dtypes.dtype_unsupported,
    dtypes.stored_scales,
    numbers.not_finite,
    numbers.scaler_scale,
    keys.wrapper_prefix,
    safety.weights_only,
    safety.dangerous_global,
    safety.weights_only_older,
    beside.code_beside,
    beside.unread_files,
    archive.crc_mismatch,
    archive.truncated,
    archive.compressed_records,
    archive.dead_bytes,
    archive.ambiguous_archive,
    archive.newer_files,
    archive.mixed_saves,
    archive.missing_ranks,
    archive.absent_shards,
    archive.other_replicas,
    beside.dangling_pointers,
    archive.unsafe_members,
)

#: Rules that compare files with each other: skipped if a file could not be read.
_OF_THE_WHOLE: Final[tuple[FindingRule, ...]] = (
    devices.mixed_devices,
    devices.optimizer_device,
    resume.resume_incomplete,
    resume.scheduler_rate,
)


def find_all(inventory: Inventory, context: Context) -> tuple[Finding, ...]:
    """Run all rules; return their findings in the order of the codes.

    If a file of a directory could not be read, no finding depends on its content.
    """
    context = context._replace(
        home=target_device(inventory, context) or "",
        pairings=context.pairings or pair_all(inventory),
        lacking=find_lacking(inventory),
    )
    left_out = _OF_THE_WHOLE if is_incomplete(inventory) else ()
    rules = [rule for rule in RULES if rule not in left_out]
    return tuple(one for rule in rules for one in rule(inventory, context))

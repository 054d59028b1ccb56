"""The checks that need no torch: the file itself, where its tensors are to lie, and whether its parts fit together.

Never imports torch and never reads a tensor, but for its CRC.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from ckptmove.errors import UnsupportedDtype
from ckptmove.model import Severity
from ckptmove.moves import MoveRequest
from ckptmove.plan import plan_move
from ckptmove.verification.checks import Offenders, amount, failed, passed, skipped
from ckptmove.verification.verdicts import NOTHING_TO_RESUME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.contracts import Container
    from ckptmove.evidence import CheckResult
    from ckptmove.model import ArchiveFact, Finding, Inventory, OptimizerRecord
    from ckptmove.pairing import Pairing

#: Facts about the bytes with which no tensor can be trusted.
_BROKEN: Final = frozenset({"short-storage", "missing-storage", "past-end", "crc-mismatch"})
_HOW: Final = {
    "names": "name",
    "order": "order",
    "position": "position",
    "ambiguous": "shape, in one of several ways",
}
_STRUCTURE_CODES: Final = frozenset({"O204", "O205", "O206"})


def check_file(container: Container, facts: Sequence[ArchiveFact]) -> CheckResult:
    """Whether every record is whole and has the bytes that its CRC speaks of.

    Args:
        container: the container.
        facts: what its directory and its CRCs showed.
    """
    broken = Offenders()
    for fact in facts:
        if fact.kind in _BROKEN:
            broken.add(f"{fact.record} ({fact.kind}, {amount(fact.nbytes, 'byte')})")
    size = container.source.size
    checked = container.has_checksums()
    if broken:
        return failed("file", f"{amount(broken.count, 'record')} broken: {broken}", bytes=size, broken=broken.count)
    crcs = "every CRC matches" if checked else "saved without CRCs, so that its bytes could not be compared with any"
    return passed("file", f"{container.name} of {amount(size, 'byte')}: {crcs}", bytes=size, checksums=checked)


def check_placement(inventory: Inventory, target: str) -> CheckResult:
    """Whether the file as it lies is placed for the target: a conversion would change nothing.

    A script's own ``map_location`` is not reckoned with, because for an accelerator it spoils what it moves
    (``step``, RNG states); for the CPU it does all but the flags, and the detail says so.
    """
    mend = f"mend: ckptmove convert {shlex.quote(inventory.path)} --to {target}"
    try:
        plan = plan_move(inventory, MoveRequest(to=target))
    except UnsupportedDtype as error:
        names = Offenders()
        for name, dtype in error.tensors:
            names.add(f"{name} is {dtype}")
        return failed("placement", f"{target} has no such dtype: {names}; {mend} --cast", misplaced=names.count)
    wrong = Offenders()
    for edit in plan.edits:
        for name in edit.names or (f"storage {edit.storage}",):
            wrong.add(f"{name} is on {edit.source}, belongs on {edit.target}")
    flags = Offenders()
    for flag in plan.flags:
        flags.add(f"{flag.where} is {flag.source}, has to be {flag.target}")
    figures = {"tensors": len(inventory.tensors), "misplaced": wrong.count, "flags": flags.count}
    if plan.is_empty:
        total = amount(len(inventory.tensors), "tensor")
        return passed("placement", f"all of {total} are where {target} wants them", **figures)
    parts = [f"{amount(wrong.count, 'tensor')} misplaced: {wrong}"] * bool(wrong)
    parts += [f"{amount(flags.count, 'option')} to follow: {flags}"] * bool(flags)
    if target == "cpu" and not flags:
        mend += ", or torch.load(..., map_location='cpu') in the script"
    return failed("placement", "; ".join([*parts, mend]), **figures)


def check_structure(
    inventory: Inventory, pairings: Sequence[tuple[OptimizerRecord, Pairing]], findings: Sequence[Finding]
) -> CheckResult:
    """Whether groups, state and parameters match in number and shape, before anything is loaded."""
    if not pairings:
        return skipped("structure", NOTHING_TO_RESUME)
    faults = Offenders()
    groups = listed = stated = paired = 0
    for optimizer, pairing in pairings:
        keys = [key for group in optimizer.groups for key in group.params]
        groups += len(optimizer.groups)
        listed += len(keys)
        stated += len(optimizer.state)
        paired += sum(record is not None for _, record in pairing.matches)
        for entry in optimizer.state:
            if entry.key not in set(keys):
                faults.add(f"{optimizer.where}.state.{entry.key} belongs to no group".lstrip("."))
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            faults.add(f"parameter {key} of {optimizer.where or 'the optimizer'} is listed more than once")
    for finding in findings:
        if finding.code in _STRUCTURE_CODES and finding.severity is Severity.ERROR:
            faults.add(f"{finding.message} ({finding.code})")
    models = sum(record.role == "model" for record in inventory.tensors)
    figures = {
        "optimizers": len(pairings), "groups": groups, "listed": listed, "with_state": stated, "paired": paired,
        "model_tensors": models,
    }  # fmt: skip
    if faults:
        return failed("structure", str(faults), **figures)
    found = f"{paired:,} found in the model by {_how(pairings)}" if paired else "none found in the model"
    found += "".join(f" ({pairing.reason})" for _, pairing in pairings if pairing.reason)
    detail = f"{amount(listed, 'parameter')} in {amount(groups, 'group')}, {stated:,} with state; {found}"
    return passed("structure", detail, **figures)


def _how(pairings: Sequence[tuple[OptimizerRecord, Pairing]]) -> str:
    return " and ".join(dict.fromkeys(_HOW[pairing.how] for _, pairing in pairings if pairing.how in _HOW))

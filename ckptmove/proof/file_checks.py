"""Make the checks ``file`` and ``structure``, which need no torch, and fail checks for findings of the file."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import checkpoints_in, sharding_of
from ckptmove.model import Severity
from ckptmove.proof.checks import NOTHING_TO_RESUME, Offenders, failed, passed, skipped
from ckptmove.text import Command, amount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import Finding, Inventory, OptimizerRecord
    from ckptmove.proof.evidence import CheckResult

_HOW: Final = {
    "names": "name",
    "order": "order",
    "sorted": "the order of their names",
    "shapes": "shape",
    "position": "position",
    "flat": "number, as flat fp32 partitions",
    "ambiguous": "shape, one of several possible matches",
}
#: The check that each finding fails: every error, and the warning that makes a proof impossible.
FAILED_BY: Final = {
    "D101": "placement", "D102": "placement", "D103": "placement", "D104": "placement", "O202": "placement",
    "R301": "placement", "T401": "placement",
    "O204": "structure", "O206": "structure", "O207": "structure", "O208": "structure",
    "S702": "file", "F801": "file", "F802": "file", "F805": "file", "F807": "file", "F808": "file", "F810": "file",
    "F815": "file", "F803": "restore", "N501": "numbers", "N502": "numbers", "N503": "numbers",
}  # fmt: skip
#: Findings that are often warnings, which fail no check.
_ONLY_ERRORS: Final = frozenset({"D101", "D102", "D104", "F805", "O206"})


def check_file(parts: Sequence[OpenPart], *, is_checked: bool = True) -> CheckResult:
    """The ``file`` check: container and size, and whether CRCs were compared."""
    size = sum(part.inventory.size_bytes for part in parts)
    unchecked = [part.name or part.path for part in parts if is_checked and not part.has_checksums]
    crcs = "every CRC matches"
    if any(part.is_distributed for part in parts):
        crcs += ", except that .metadata has none"
    if len(parts) > 1 or parts[0].name or (parts[0].is_assembled and not parts[0].is_distributed):
        distributed = sum(part.is_distributed for part in parts)
        files = sum(len(part.rows) for part in parts if not part.is_distributed)
        kinds = {"checkpoint file": files, "distributed checkpoint": distributed}
        what = " and ".join(amount(count, kind) for kind, count in kinds.items() if count)
        rest = f"saved without CRCs, so their bytes could not be checked: {', '.join(unchecked)}"
        crcs = rest if len(unchecked) == len(parts) else f"{crcs}; {rest}" if unchecked else crcs
    else:
        what = parts[0].inventory.container
        crcs = "saved without CRCs, so its bytes could not be checked" if unchecked else crcs
    if not is_checked:
        crcs = "no CRC compared, because only a sample is checked (ckptmove inspect --check compares them)"
    checksums = is_checked and not unchecked
    return passed("file", f"{what} of {amount(size, 'byte')}: {crcs}", bytes=size, checksums=checksums)


def fail_on_findings(check: CheckResult, findings: Sequence[Finding]) -> CheckResult:
    """Fail a check if any finding belongs to it; a check that failed already keeps its detail.

    Findings of severity "info" fail no check.
    """
    faults = Offenders()
    fix = ""
    for finding in findings:
        is_fault = finding.severity is Severity.ERROR or finding.code not in _ONLY_ERRORS
        if FAILED_BY.get(finding.code) == check.name and finding.severity is not Severity.INFO and is_fault:
            unnamed = finding.where[:1] if not any(path in finding.message for path in finding.where) else ()
            faults.add(": ".join([f"{finding.message} ({finding.code})", *unnamed]))
            fix = fix or (finding.fix if isinstance(finding.fix, Command) else "")
    if check.status == "failed" or not faults:
        return check
    return failed(check.name, faults.failures(), fix, **dict(check.evidence))


def check_structure(inventory: Inventory, pairings: Sequence[tuple[OptimizerRecord, Pairing]]) -> CheckResult:
    """The ``structure`` check: groups, state and parameters match in number and shape."""
    if not pairings:
        sharding = sharding_of(inventory)
        return skipped("structure", sharding or NOTHING_TO_RESUME, optimizers=0)
    faults = Offenders()
    groups = listed = stated = paired = 0
    for optimizer, pairing in pairings:
        keys = [key for group in optimizer.groups for key in group.params]
        groups += len(optimizer.groups)
        listed += len(keys)
        stated += len(optimizer.state)
        paired += sum(record is not None for _, record in pairing.matches)
        if optimizer.state and not keys and not optimizer.obstacle:
            faults.add(f"{optimizer.where or 'the optimizer'} has state, but its param_groups list no parameter")
        for key in sorted(key for key, count in Counter(keys).items() if count > 1):
            faults.add(f"parameter {key} of {optimizer.where or 'the optimizer'} is listed more than once")
    models = sum(record.role == "model" for record in inventory.tensors)
    figures = {
        "optimizers": len(pairings), "groups": groups, "listed": listed, "with_state": stated, "paired": paired,
        "model_tensors": models, "paired_by": ", ".join(dict.fromkeys(pairing.how for _, pairing in pairings)),
    }  # fmt: skip
    if faults:
        return failed("structure", faults.failures(), **figures)
    how = " and ".join(dict.fromkeys(_HOW[pairing.how] for _, pairing in pairings if pairing.how in _HOW))
    found = f"{paired:,} found in the model by {how}" if paired else "none found in the model"
    found += "".join(f" ({pairing.reason})" for _, pairing in pairings if pairing.reason)
    detail = f"{amount(listed, 'parameter')} in {amount(groups, 'group')}, {stated:,} with state; {found}"
    several = checkpoints_in(inventory)
    if several:
        detail += f"; {len(several):,} separate checkpoints, read as one here: give the path of one"
    return passed("structure", detail, **figures) if paired else skipped("structure", detail, **figures)

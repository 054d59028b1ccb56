"""The checks that need no torch: the file itself, where its tensors are to lie, and whether its parts fit together.

Never imports torch and never reads a tensor, but for its CRC.
"""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Final

from ckptmove.errors import UnsupportedDtype
from ckptmove.model import Severity
from ckptmove.moves import MoveRequest
from ckptmove.pairing import moments
from ckptmove.plan import plan_move
from ckptmove.verification.checks import Offenders, amount, failed, passed, skipped
from ckptmove.verification.verdicts import NOTHING_TO_RESUME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.contracts import Container
    from ckptmove.evidence import CheckResult
    from ckptmove.model import Finding, Inventory, OptimizerRecord
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


def check_file(container: Container, inventory: Inventory) -> CheckResult:
    """Whether every record is whole and has the bytes that its CRC speaks of, and the pickle is none that attacks.

    Args:
        container: the container.
        inventory: with the facts that its directory and its CRCs showed.
    """
    broken = Offenders()
    for fact in inventory.facts:
        if fact.kind in _BROKEN:
            broken.add(f"{fact.record} ({fact.kind}, {amount(fact.nbytes, 'byte')})")
    for use in inventory.globals:
        if use.verdict == "dangerous":
            broken.add(f"the pickle would call {use.name} (S702)")
    size = container.source.size
    checked = container.has_checksums()
    if broken:
        return failed("file", str(broken), bytes=size, broken=broken.count)
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
    # Training does not compute with a stored metric: wherever it lies, the resume does not care.
    idle = {tensor.name for tensor in inventory.tensors if tensor.role == "other"}
    moves: dict[tuple[str, str], list[str]] = {}
    for edit in plan.edits:
        astray = [name for name in edit.names or (f"storage {edit.storage}",) if name not in idle]
        moves.setdefault((edit.source, edit.target), []).extend(astray)
    misplaced = sum(map(len, moves.values()))
    wrong = [_move_line(*ends, astray) for ends, astray in moves.items() if astray]
    flags = Offenders()
    for flag in plan.flags:
        flags.add(f"{flag.where} is {flag.source}, has to be {flag.target}")
    figures = {"tensors": len(inventory.tensors), "misplaced": misplaced, "flags": flags.count}
    if not wrong and not flags:
        total = amount(len(inventory.tensors), "tensor")
        return passed("placement", f"all of {total} are where {target} wants them", **figures)
    parts = [f"{amount(misplaced, 'tensor')} misplaced", *wrong] if wrong else []
    parts += [f"{amount(flags.count, 'option')} to follow: {flags}"] * bool(flags)
    if target == "cpu" and not flags:
        mend += ", or torch.load(..., map_location='cpu') in the script"
    return failed("placement", "; ".join([*parts, mend]), **figures)


def _move_line(source: str, target: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 2:,} more" if len(names) > 2 else ""  # noqa: PLR2004  two examples will do
    return f"{source} -> {target}: {', '.join(names[:2])}{more}"


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
        for fault in _misfiled(optimizer, keys):
            faults.add(fault)
    for finding in findings:
        if finding.code in _STRUCTURE_CODES and finding.severity is Severity.ERROR:
            faults.add(f"{finding.message} ({finding.code})")
    models = sum(record.role == "model" for record in inventory.tensors)
    figures = {
        "optimizers": len(pairings), "groups": groups, "listed": listed, "with_state": stated, "paired": paired,
        "model_tensors": models,
    }  # fmt: skip
    for fault in _homeless(inventory) if models and not paired else ():
        faults.add(fault)
    if faults:
        return failed("structure", str(faults), **figures)
    found = f"{paired:,} found in the model by {_how(pairings)}" if paired else "none found in the model"
    found += "".join(f" ({pairing.reason})" for _, pairing in pairings if pairing.reason)
    detail = f"{amount(listed, 'parameter')} in {amount(groups, 'group')}, {stated:,} with state; {found}"
    return passed("structure", detail, **figures) if paired else skipped("structure", detail)


def _misfiled(optimizer: OptimizerRecord, keys: Sequence[str]) -> Iterator[str]:
    """State that belongs to no group, and parameters that are in the groups twice."""
    counts = Counter(keys)
    for entry in optimizer.state:
        if entry.key not in counts:
            yield f"{optimizer.where}.state.{entry.key} belongs to no group".lstrip(".")
    for key in sorted(key for key, count in counts.items() if count > 1):
        yield f"parameter {key} of {optimizer.where or 'the optimizer'} is listed more than once"


def _homeless(inventory: Inventory) -> Iterator[str]:
    """Moments of a shape that no tensor outside of any state has: of a model of other widths, in whatever order."""
    state = {tensor.name for one in inventory.optimizers for entry in one.state for _, tensor in entry.tensors}
    shapes = {tensor.shape for tensor in inventory.tensors if tensor.name not in state}
    for optimizer in inventory.optimizers:
        for entry in optimizer.state:
            for _, tensor in moments(entry, optimizer.algorithm):
                if tensor.shape and tensor.shape not in shapes:
                    shape = list(tensor.shape)
                    yield f"{tensor.name} is {shape}, and no tensor that could be its parameter has that shape"


def _how(pairings: Sequence[tuple[OptimizerRecord, Pairing]]) -> str:
    return " and ".join(dict.fromkeys(_HOW[pairing.how] for _, pairing in pairings if pairing.how in _HOW))

"""Make the checks that need no torch: ``file``, ``placement`` and ``structure``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory, checkpoints_in, sharding_of
from ckptmove.conversion.keep import dragged_along
from ckptmove.conversion.plan import plan_for, plan_move
from ckptmove.conversion.policy import DESTINATION_RULES
from ckptmove.errors import UncastableDtype, UnsupportedDtype
from ckptmove.findings.context import Context, available_device
from ckptmove.formats.opening import container_class
from ckptmove.model import Severity
from ckptmove.text import Argument, Command, amount, quoted
from ckptmove.torch_facts.devices import is_accelerator
from ckptmove.verification.checks import NOTHING_TO_RESUME, Offenders, failed, passed, skipped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import Finding, Inventory, OptimizerRecord
    from ckptmove.moves import MoveRequest, StorageEdit
    from ckptmove.verification.evidence import CheckResult

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
    "D102": "placement", "D103": "placement", "O202": "placement", "R301": "placement", "T401": "placement",
    "O204": "structure", "O206": "structure", "O207": "structure", "O208": "structure",
    "S702": "file", "F801": "file", "F802": "file", "F805": "file", "F807": "file", "F808": "file", "F810": "file",
    "F815": "file", "F803": "restore", "N501": "numbers", "N502": "numbers",
}  # fmt: skip
#: Findings that are often warnings, which fail no check.
_ONLY_ERRORS: Final = frozenset({"F805"})


#: Scalars of the state, other than ``step``, that are on the CPU in healthy runs: ``mu_product`` of NAdam, and the
#: step size ``t`` of LBFGS if ``lr`` is a CPU tensor.
_MENDED: Final = frozenset({"mu_product", "t"})


def check_file(parts: Sequence[OpenPart], *, is_checked: bool = True) -> CheckResult:
    """The ``file`` check: container and size, and whether CRCs were compared."""
    size = sum(part.inventory.size_bytes for part in parts)
    unchecked = [part.name or part.path for part in parts if is_checked and not part.has_checksums]
    crcs = "every CRC matches"
    if any(part.is_distributed for part in parts):
        crcs += ", except that .metadata has none"
    if len(parts) > 1 or parts[0].name or (parts[0].is_assembled and not parts[0].is_distributed):
        what = _counted(parts)
        rest = f"saved without CRCs, so their bytes could not be checked: {', '.join(unchecked)}"
        crcs = rest if len(unchecked) == len(parts) else f"{crcs}; {rest}" if unchecked else crcs
    else:
        what = parts[0].inventory.container
        crcs = "saved without CRCs, so its bytes could not be checked" if unchecked else crcs
    if not is_checked:
        crcs = "no CRC compared, because only a sample is checked (ckptmove inspect --check compares them)"
    checksums = is_checked and not unchecked
    return passed("file", f"{what} of {amount(size, 'byte')}: {crcs}", bytes=size, checksums=checksums)


def _counted(parts: Sequence[OpenPart]) -> str:
    """Number of parts of each kind, as text."""
    distributed = sum(part.is_distributed for part in parts)
    files = sum(len(part.rows) for part in parts if not part.is_distributed)
    kinds = {"checkpoint file": files, "distributed checkpoint": distributed}
    return " and ".join(amount(count, kind) for kind, count in kinds.items() if count)


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


def check_placement(
    inventory: Inventory, request: MoveRequest, device_count: int | None = None, *, as_saved: bool = False
) -> CheckResult:
    """The ``placement`` check: passes if a conversion to the target would change nothing.

    The check ignores a script's own ``map_location``: for an accelerator it misplaces other values (``step``, RNG
    states). For the CPU it changes everything except the flags, and the detail says so.

    Args:
        inventory: the checkpoint.
        request: the conversion, with its target.
        device_count: number of devices of the target machine, to suggest no device that it lacks; None if unknown.
        as_saved: whether the target was detected and not requested. Each tensor is then right on the device that it
            was saved from, unless its kind belongs on another one (``step``, RNG states). A moment on another device
            than its parameter is a finding (D102).
    """
    target = request.to or "cpu"
    home = available_device(target, Context(device_count=device_count))
    keep = "".join(f" --keep {quoted(glob)}" for glob in request.keep)
    kind = container_class(inventory.container)
    mend = f"ckptmove convert {quoted(inventory.path)} --to {home}{keep}" if kind.is_editable else kind.unwritten_hint
    try:
        plan = plan_move(inventory, request._replace(to=None) if as_saved else request)
    except UnsupportedDtype as error:
        lacking = Offenders()
        for name, dtype in error.tensors:
            lacking.add(f"{name} is {dtype}")
        failures = lacking.failures(f"{error.target} has no such dtype: ")
        reasons = [error.reason] if isinstance(error, UncastableDtype) else []
        fix = "" if reasons else f"{mend} --cast"
        return failed("placement", [*failures, *reasons], fix, misplaced=lacking.count)
    if not inventory.storages:
        return skipped("placement", "there are no tensors")
    # A metric on the CPU next to a model takes no part in training, so it does not affect the resume.
    idle = {tensor.name for tensor in inventory.tensors if tensor.role == "other" and not is_accelerator(tensor.device)}
    if len(idle) == len(inventory.tensors):
        idle = set()
    moves: dict[tuple[str, str], list[str]] = {}
    mended = left = 0
    for edit in plan.edits:
        names = edit.names or (f"storage {edit.storage}",)
        astray = [name for name in names if name not in idle]
        left += len(names) - len(astray)
        own = [name for name in astray if not _is_mended_at_load(name, edit)]
        mended += len(astray) - len(own)
        moves.setdefault((edit.source, edit.target), []).extend(own)
    misplaced = sum(map(len, moves.values()))
    wrong = [_move_line(*ends, astray) for ends, astray in moves.items() if astray]
    settings = _settings(inventory)
    apart = [fact.record for fact in inventory.facts if fact.kind == "graph-device"]
    misplaced += len(apart)
    wrong += [f"on a device other than their graph expects: {_some(apart)}"] if apart else []
    tied = dragged_along(plan.kept, request.keep)
    for place in dict.fromkeys(one.device for one in tied):
        stuck = [one.name for one in tied if one.device == place]
        misplaced += len(stuck)
        wrong.append(f"on {place}, because they share storage with a match of {Argument('keep')}: {_some(stuck)}")
    flags = Offenders()
    for flag in (one for one in plan.flags if not one.where.startswith(settings)):
        flags.add(f"{flag.where} is {flag.source}, must be {flag.target}")
    figures = {"tensors": len(inventory.tensors), "misplaced": misplaced, "flags": flags.count}
    if not wrong and not flags:
        rest = f"; load_state_dict itself moves {amount(mended, 'counter')}" if mended else ""
        rest += f"; {amount(left, 'tensor')} of no known role may stay on the CPU" if left else ""
        total = amount(len(inventory.tensors) - left, "tensor")
        wanted = _as_saved(inventory, target, left) if as_saved else f"for {target}"
        return passed("placement", f"{total} placed {wanted}{rest}", **figures)
    parts = [f"{amount(misplaced, 'tensor')} misplaced", *wrong] if wrong else []
    parts += flags.failures(f"{amount(flags.count, 'option')} to change: ")
    if target == "cpu" and not flags and kind.is_editable:
        mend += ", or map_location='cpu' where the script loads it"
    return failed("placement", parts, mend, **figures)


def _as_saved(inventory: Inventory, target: str, left: int) -> str:
    """Placement of a file as saved, as text: number of tensors on each device that a conversion would move."""
    edits = (edit for edit in plan_for(inventory, target).edits if edit.reason in DESTINATION_RULES)
    moved = {name: edit.source for edit in edits for name in edit.names}
    elsewhere = Counter(moved[record.name] for record in inventory.tensors if record.name in moved)
    wanted = f"for {target}"
    others = "".join(f", {count:,} on {tag}" for tag, count in sorted(elsewhere.items()))
    rest = len(inventory.tensors) - left - sum(elsewhere.values())
    return f"as saved: {rest:,} {wanted}{others}" if elsewhere else wanted


def _settings(inventory: Inventory) -> tuple[str, ...]:
    """Path prefixes of files in a directory whose devices no resume reads (``training_args.bin``)."""
    files = inventory.files if isinstance(inventory, DirectoryInventory) else ()
    return tuple(f"{file.prefix}." for file in files if file.roles == ("other",))


def _is_mended_at_load(name: str, edit: StorageEdit) -> bool:
    """Whether ``load_state_dict`` moves a counter to the right device, wherever the file has it.

    ``_process_value_according_to_param_policy`` in ``torch/optim/optimizer.py`` moves ``step`` to the device of a
    parameter whose group is capturable or fused, and moves any other tensor of the state always.
    """
    to_accelerator = edit.reason == "optimizer-scalar" and is_accelerator(edit.target)
    return to_accelerator or (".state." in f".{name}" and name.rpartition(".")[2] in _MENDED)


def _move_line(source: str, target: str, names: Sequence[str]) -> str:
    return f"{source} -> {target}: {_some(names)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2:,} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more}"


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
    found = f"{paired:,} found in the model by {_how(pairings)}" if paired else "none found in the model"
    found += "".join(f" ({pairing.reason})" for _, pairing in pairings if pairing.reason)
    detail = f"{amount(listed, 'parameter')} in {amount(groups, 'group')}, {stated:,} with state; {found}"
    several = checkpoints_in(inventory)
    if several:
        detail += f"; {len(several):,} separate checkpoints, read as one here: give the path of one"
    return passed("structure", detail, **figures) if paired else skipped("structure", detail, **figures)


def _how(pairings: Sequence[tuple[OptimizerRecord, Pairing]]) -> str:
    return " and ".join(dict.fromkeys(_HOW[pairing.how] for _, pairing in pairings if pairing.how in _HOW))

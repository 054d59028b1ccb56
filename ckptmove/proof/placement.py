"""Make the ``placement`` check: whether torch's own restore repairs what the file has on other devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.pickled import PickledObjects
from ckptmove.conversion.plan import plan_before_remap
from ckptmove.conversion.policy import DESTINATION_RULES, MESH_TYPE
from ckptmove.findings.context import Context, available_device, is_out_of_range
from ckptmove.formats.facts import facts_of
from ckptmove.proof.checks import Offenders, failed, passed, skipped
from ckptmove.text import amount, quoted, some
from ckptmove.torch_facts.devices import is_accelerator, split

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.model import Inventory
    from ckptmove.moves import MoveRequest, StorageEdit
    from ckptmove.proof.evidence import CheckResult

#: Scalars of the state, other than ``step``, that are on the CPU in healthy runs: ``mu_product`` of NAdam, and the
#: step size ``t`` of LBFGS if ``lr`` is a CPU tensor.
_MENDED: Final = frozenset({"mu_product", "t"})
#: Rules of a conversion about tensors that torch needs on the CPU, and that no load moves there.
_NEEDS_CPU: Final = frozenset({"nested-sizes", "device-mesh"})
#: Roles of the state_dicts of modules and optimizers. ``Module._load_from_state_dict`` copies each tensor into that of
#: the module, and ``Optimizer._process_value_according_to_param_policy`` moves state to its parameter.
_COPIED: Final = frozenset({"model", "ema", "criterion", "optimizer"})


@dataclass(slots=True)
class _Tally:
    """Tensors that a conversion would move, counted by device, or by device and target."""

    #: tensors that ``load_state_dict`` copies to the device of the model.
    copied: Counter[str] = field(default_factory=Counter)
    unmoved: Counter[str] = field(default_factory=Counter)  # tensors that stay there unless the program moves them
    #: step counts that ``load_state_dict`` leaves on an accelerator.
    counters: Counter[str] = field(default_factory=Counter)
    mended: int = 0  # counters that `load_state_dict` moves
    #: names of the tensors that no restore of torch repairs, by the device in the file and the right one.
    stuck: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def lines(self, context: Context) -> Iterator[str]:
        """Iterate over what is not on the target, and who moves it."""
        for tag, count in self.copied.items():
            them = "it" if count == 1 else "them"
            yield f"{amount(count, 'tensor')} on {tag}: load_state_dict copies {them} to the model's device"
        absent = dict.fromkeys(filter(None, (_absent(tag, context) for tag in (*self.copied, *self.unmoved))))
        if absent:
            yield f"torch.load needs map_location on a machine without {' or '.join(absent)}"
        for tag, count in self.unmoved.items():
            yield f"{amount(count, 'tensor')} on {tag}: no load_state_dict moves {'it' if count == 1 else 'them'}"
        for tag, count in self.counters.items():
            yield f"{amount(count, 'counter')} on {tag}: load_state_dict leaves {'it' if count == 1 else 'them'} there"
        if self.mended:
            yield f"load_state_dict itself moves {amount(self.mended, 'counter')}"


def _absent(tag: str, context: Context) -> str:
    """The device or the type of devices that the target machine lacks, or may lack; empty if it has the device."""
    kind, _ = split(tag)
    is_other = is_accelerator(tag) and kind != split(context.target or tag)[0]
    return kind if is_other else tag if is_out_of_range(tag, context) else ""


def check_placement(
    inventory: Inventory, request: MoveRequest, device_count: int | None = None, *, as_saved: bool = False
) -> CheckResult:
    """The ``placement`` check: fails only for what torch's own restore would not repair.

    These are pickled modules and optimizers, which are used as they are; tensor options of ``param_groups`` on another
    accelerator, which ``load_state_dict`` leaves there; and tensors that must be on the CPU. Device indices that the
    machine lacks, RNG states, dtypes and refused flags are findings, which fail this check too. All else is a line in
    the detail.

    Args:
        device_count: number of devices of the target machine, to suggest no device that it lacks; None if unknown.
        as_saved: whether the target was detected and not requested: each object is then used on the device that it was
            saved from.
    """
    if not inventory.storages:
        return skipped("placement", "there are no tensors")
    target = request.to or "cpu"
    plan = plan_before_remap(inventory, request)  # a dtype that the target lacks is a finding
    # A metric on the CPU next to a model takes no part in training, so it does not affect the resume.
    idle = {tensor.name for tensor in inventory.tensors if tensor.role == "other" and not is_accelerator(tensor.device)}
    if len(idle) == len(inventory.tensors):
        idle = set()
    edits = [edit._replace(names=tuple([name for name in edit.names if name not in idle])) for edit in plan.edits]
    tally = _tally(inventory, edits, as_saved=as_saved)
    left = sum(len(edit.names) for edit in plan.edits) - sum(len(edit.names) for edit in edits)
    meshes = Offenders()
    for flag in plan_before_remap(inventory, request._replace(to=None)).flags if as_saved else plan.flags:
        if flag.reason == MESH_TYPE.name:
            meshes.add(f"{flag.where} is {flag.source}, must be {flag.target}")
    kept = Counter(one.device for one in plan.kept if one.reason == "keep")
    stuck = sum(map(len, tally.stuck.values()))
    elsewhere = tally.copied + tally.unmoved + tally.counters + kept
    figures = {
        "tensors": len(inventory.tensors), "misplaced": stuck + meshes.count, "elsewhere": dict(elsewhere),
    }  # fmt: skip
    placed = len(inventory.tensors) - left - stuck - sum(elsewhere.values())
    lines = [f"{amount(placed, 'tensor')} placed for {target}"] if placed else []
    lines += tally.lines(Context(None if as_saved else target, device_count))
    lines += [f"{amount(count, 'tensor')} on {tag}, kept there" for tag, count in kept.items()]
    lines += [f"{amount(left, 'tensor')} of no known role may stay on the CPU"] if left else []
    if not stuck and not meshes:
        return passed("placement", "; ".join(lines), **figures)
    faults = [f"{amount(stuck, 'tensor')} that no load_state_dict moves"] if stuck else []
    faults += [f"{source} -> {goal}: {some(names, 2)}" for (source, goal), names in tally.stuck.items()]
    faults += meshes.failures("load_state_dict refuses another mesh: ")
    home = available_device(target, Context(device_count=device_count))
    mend = f"ckptmove convert {quoted(inventory.path)} --to {home}"
    mend += "".join(f" --keep {quoted(glob)}" for glob in request.keep)
    kind = facts_of(inventory.container)
    return failed("placement", [*faults, *lines], mend if kind.is_editable else kind.unwritten_hint, **figures)


def _tally(inventory: Inventory, edits: Sequence[StorageEdit], *, as_saved: bool) -> _Tally:
    objects, tally = PickledObjects(inventory), _Tally()
    roles = {tensor.name: tensor.role for tensor in inventory.tensors}
    for edit in edits:
        ends = (edit.source, edit.target)
        for name in edit.names:
            # No step accepts one, such as `lr`, on another accelerator.
            is_option = is_accelerator(edit.source) and ".param_groups." in f".{name}"
            if edit.reason in _NEEDS_CPU:
                tally.stuck.setdefault(ends, []).append(name)
            elif edit.reason not in DESTINATION_RULES:
                _count_scalar(name, edit, tally)
            elif not as_saved and (objects.around(name) is not None or is_option):
                tally.stuck.setdefault(ends, []).append(name)
            else:
                (tally.copied if roles[name] in _COPIED else tally.unmoved)[edit.source] += 1
    return tally


def _count_scalar(name: str, edit: StorageEdit, tally: _Tally) -> None:
    """Count a tensor whose device its kind decides: a counter, or an RNG state, which is a finding.

    ``_process_value_according_to_param_policy`` in ``torch/optim/optimizer.py`` moves ``step`` to the device of a
    parameter whose group is capturable or fused, and moves any other tensor of the state always.
    """
    if edit.reason != "optimizer-scalar":
        return
    to_accelerator = is_accelerator(edit.target)
    if to_accelerator or (".state." in f".{name}" and name.rpartition(".")[2] in _MENDED):
        tally.mended += 1
    else:
        tally.counters[edit.source] += 1

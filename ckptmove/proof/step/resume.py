"""Make the ``step``, ``parity`` and ``fresh`` checks for every optimizer of a checkpoint.

Only optimizers of torch and classes named by the user are stepped.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory, sharding_of
from ckptmove.checkpoint.elements import overlaps
from ckptmove.checkpoint.inventory.partitions import one_of_ranks
from ckptmove.checkpoint.state_dicts import RootKeys
from ckptmove.conversion.plan import plan_move
from ckptmove.errors import UncastableDtype, UnreadableInput, UnsupportedDtype
from ckptmove.findings.context import Context, available_device, tried_command
from ckptmove.findings.trials import Source
from ckptmove.formats.facts import facts_of
from ckptmove.lazy.geometry import extent_numel
from ckptmove.model import OPAQUE
from ckptmove.moves import MoveRequest
from ckptmove.proof.checks import NOTHING_TO_RESUME
from ckptmove.proof.place import TorchDevice
from ckptmove.proof.processes.shares import ONE_PROCESS
from ckptmove.proof.restored.survey import LoadedTensors
from ckptmove.proof.step.entries import tensors_of
from ckptmove.proof.step.optimizers import Choice, choose_optimizer
from ckptmove.proof.step.recipe import (
    IMPLEMENTATION_FLAGS,
    CannotBuild,
    is_foreign,
    make_recipe,
    refused_options,
)
from ckptmove.proof.step.tally import Trial, TrialTally
from ckptmove.proof.step.trial import STEP_ERRORS, error_text, try_optimizer
from ckptmove.proof.step.verdicts import StepReport, conclude, not_proven, without_step
from ckptmove.proof.tensors.pieces import WINDOW_ELEMENTS, is_dense, select
from ckptmove.proof.tensors.stored import StoredTensors
from ckptmove.proof.tensors.wrappers import WithWrappers, copied
from ckptmove.text import Argument, amount, some
from ckptmove.torch_facts.devices import supports_capturable
from ckptmove.torch_facts.optimizers import BY_NAME, is_elementwise, keeps_state_on_first, steps_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import Inventory, OptimizerRecord, ParamGroup, TensorRecord
    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.original.against import OriginalTensors
    from ckptmove.proof.place import Site, StepDevice
    from ckptmove.proof.processes.shares import ProcessGroup, Share
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.proof.restored.loaded import LoadedFiles
    from ckptmove.proof.sampling import Sample
    from ckptmove.proof.step.recipe import Recipe
    from ckptmove.proof.tensors.pieces import ParameterPiece, TensorSource


#: Elements of padding in a group: fewer than two for each rank, of more ranks than anybody has.
_MOST_PADDING: Final = 2**16


class Bench(NamedTuple):
    """Inputs of the steps."""

    request: VerifyRequest  # the options
    site: Site  # target and device mode of the step
    checkpoint: OpenCheckpoint  # the open checkpoint
    stored: StoredTensors  # its tensors as stored
    loaded: LoadedFiles  # its tensors as `torch.load` returned them
    original: OriginalTensors | None  # tensors of the original, or None
    pairings: list[tuple[OptimizerRecord, Pairing]]  # its optimizers, each with its parameters
    sample: Sample | None = None  # parameters to step; None for all
    share: Share | None = None  # the part of the checkpoint that this process steps; None for all of it


class _NotStepped(Exception):
    """Why an optimizer is not stepped, which is no fault of its state."""


class _Refused(Exception):
    """Why torch does not make a step."""


class _ExtraTensors:
    """Tensors that optimizers keep outside the state of their parameters, which no step of a torch class reads.

    Examples are slow weights of Lookahead, master weights in another precision, and state under names of a wrapper.
    """

    def __init__(self, inventory: Inventory) -> None:
        state = {record.name for one in inventory.optimizers for entry in one.state for _, record in entry.tensors}
        names = (record.name for record in inventory.tensors if record.role == "optimizer")
        self._tensors = [name for name in names if name not in state and ".param_groups." not in f".{name}"]
        self._roots = RootKeys(inventory)

    def of(self, optimizer: OptimizerRecord) -> list[str]:
        """Paths of the extra tensors of one optimizer; a wrapper keeps them one level above it."""
        where = optimizer.where
        is_inner = self._roots.first(where) not in {-1, len(where)}
        prefix = f"{where.rpartition('.')[0] if is_inner else where}.".lstrip(".")
        listed = {key for group in optimizer.groups for key in group.params}
        unlisted = [f"{where}.state.{entry.key}".lstrip(".") for entry in optimizer.state if entry.key not in listed]
        return unlisted + [name for name in self._tensors if name.startswith(prefix)]


def resume(bench: Bench, group: ProcessGroup = ONE_PROCESS) -> tuple[CheckResult, CheckResult, CheckResult]:
    """The ``step``, ``parity`` and ``fresh`` checks.

    Args:
        group: the processes that step the other parts of the checkpoint; only that of rank 0 returns all results.
    """
    inventory = bench.checkpoint.inventory
    report = StepReport(
        site=bench.site,
        require_device=bench.request.require_device,
        seed=bench.request.seed,
        fix=_fix_command(bench),
        has_model=any(record.role == "model" for record in inventory.tensors),
    )
    sharding = sharding_of(inventory)
    if any(pairing.how == "flat" for _, pairing in bench.pairings):
        sharding = ""  # a flat partition is a parameter with its state
    nothing = sharding or ("" if bench.pairings else NOTHING_TO_RESUME)
    # A case steps its model even if the file has nothing to resume.
    if bench.site.reason and (not nothing or bench.request.runs_training):
        return not_proven(report)
    if nothing:
        return without_step(nothing, report)
    kinds = {fact.kind for fact in inventory.facts}
    if "encoded-storage" in kinds:
        reason = "no step from tensors encoded as text, which pickle protocols 0 to 2 write for bytes"
        return without_step(f"{reason}: torch.save them, or pickle them with protocol 4", report)
    if "compressed-storage" in kinds:
        inflated = _command(bench)
        mend = f"; to store them uncompressed: {inflated}" if inflated else ""
        return without_step(f"no step from deflated storages{mend}", report)
    tally = TrialTally()
    place = bench.site.place()
    extra_tensors = _ExtraTensors(inventory)
    parts = bench.checkpoint.parts
    with StoredTensors(parts, keeps=True) as stored, StoredTensors(parts, mapped=False, keeps=True) as again:
        own = bench._replace(stored=stored)
        second = _second_source(own, again, report)
        first = 0
        for index in range(len(bench.pairings)):
            tally.set_index(first)
            optimizer, _ = bench.pairings[index]
            try:
                _try(own, index, first, second, place, extra_tensors, report, tally)
            except _NotStepped as reason:
                tally.left_out[index] = f"{optimizer.where or 'the optimizer'} was not stepped: {reason}"
            except _Refused as error:
                tally.add_error(str(error), is_unread=isinstance(error.__cause__, UnreadableInput))
            first += sum(len(group.params) for group in optimizer.groups)
    group.join(tally)
    report.left_out = [tally.left_out[index] for index in sorted(tally.left_out)]
    if tally.error:  # other steps do not count: how many were made before it depends on the batches
        tally = TrialTally(error=tally.error, unread_errors=tally.unread_errors)
    return conclude(tally, report)


def _fix_command(bench: Bench) -> str:
    """The command that fixes an option or a dtype that the target refuses; empty if the file has none."""
    try:
        plan = plan_move(bench.checkpoint.inventory, MoveRequest(to=bench.site.target))
    except UncastableDtype:
        return ""
    except UnsupportedDtype:
        return _command(bench, Argument("cast", True))
    return _command(bench) if any(flag.mention is None for flag in plan.flags) else ""


def _command(bench: Bench, *options: Argument) -> str:
    """The command that converts the checkpoint for the target; empty if it would fail."""
    request = bench.request
    if not facts_of(bench.checkpoint.inventory.container).is_editable:
        return ""
    context = Context(device_count=request.devices, source=Source(request.path, bench.checkpoint, request.limits))
    target = Argument("to", available_device(bench.site.target, context))
    return tried_command(bench.checkpoint.inventory, context, request.path, target, *options)


def _second_source(bench: Bench, again: StoredTensors, report: StepReport) -> TensorSource:
    """The tensors that the parity step starts from; also sets its description in the report."""
    where = "the same step" if bench.site.mode == "cpu" else "the same step on the plain CPU"
    if bench.original is not None:
        report.compared_with = (
            f"{where} from {bench.request.against}" + ", cast like this file" * bench.original.is_cast
        )
        return bench.original
    if bench.site.mode != "cpu":
        report.compared_with = where
        return bench.stored
    stepped = {
        part.name
        for part in bench.checkpoint.parts
        if any(record.role in {"model", "optimizer"} for record in part.inventory.tensors)
    } - bench.loaded.left_out
    missing = sorted(stepped & bench.loaded.missing)
    if stepped & bench.loaded.released and not missing:
        report.compared_with = f"{where} after a second reading (the result of torch.load was released)"
        return again
    if stepped - bench.loaded.missing:
        read = f", {', '.join(missing)} read a second time instead" if missing else ""
        report.compared_with = f"{where} from what {bench.loaded.what}{read}"
        return LoadedTensors(bench.loaded, bench.stored, bench.checkpoint.inventory, again)
    files = "the file" if missing == [""] else "these files"
    report.compared_with = f"{where} after a second reading, because torch.load refuses {files}"
    return again


def _try(
    bench: Bench,
    index: int,
    first: int,
    second: TensorSource,
    place: StepDevice,
    extra_tensors: _ExtraTensors,
    report: StepReport,
    tally: TrialTally,
) -> None:
    """Step one optimizer.

    Args:
        index: its index.
        first: index of its first parameter among those of all optimizers.
    """
    optimizer, pairing = bench.pairings[index]
    choice = _choose(bench, optimizer, pairing)
    recipe = _recipe(bench, optimizer, choice)
    overlapping = _overlapping(optimizer, pairing, recipe)
    if overlapping:
        raise _Refused(overlapping)
    source = WithWrappers(bench.stored, bench.loaded)

    def obstacle(record: TensorRecord) -> str:
        return _obstacle(record, choice.name, source)

    chosen = None if bench.sample is None else bench.sample.keys[index]
    shared = _shared(bench, index, choice.name)
    selection = select(optimizer, pairing.by_key(), choice.name, chosen, obstacle, shared)
    if pairing.how == "flat":
        stepped = [piece for piece in selection.pieces if not _is_padding(piece, bench.stored)]
        selection = selection._replace(pieces=stepped)
    listed = sum(len(group.params) for group in optimizer.groups)
    if keeps_state_on_first(choice.name) and selection.left_out:
        lost = f"{sum(map(len, selection.left_out.values()))} of {amount(listed, 'parameter')} not found in the file"
        raise _NotStepped(f"{choice.name} steps all parameters as one vector, and {lost}")
    try:
        refused = refused_options(recipe, optimizer, bench.stored) or _refused_flag(bench, recipe, optimizer)
    except UnreadableInput as error:  # an option that is a tensor
        raise _Refused(error_text(error)) from error
    if refused:
        raise _Refused(refused)
    report.classes.append(choice.name)
    report.notes += [note for note in (choice.note, recipe.cut) if note]
    report.leave_out(selection.left_out)
    own = {record.name for _, record in pairing.matches if record is not None}
    extra = [name for name in extra_tensors.of(optimizer) if name not in own]
    report.assumed += _doubts(bench.checkpoint.inventory, optimizer, pairing, recipe, extra)
    reference = recipe if bench.site.mode == "cpu" else _for_cpu(recipe)
    # A sum over a whole tensor depends on its memory address, and classes of other libraries may compute one.
    exact = bench.site.mode != "real" and reference.groups == recipe.groups and not recipe.is_foreign
    report.exact &= exact
    if bench.original is not None:
        groups = bench.original.groups(optimizer)
        reference = _with_options(reference, groups)
        report.notes += [] if groups else [f"{bench.request.against} is stepped with the options of this checkpoint"]
    trial = Trial(
        optimizer=optimizer,
        recipe=recipe,
        reference=reference,
        source=source,
        second=second if bench.original is not None else WithWrappers(second, bench.loaded),
        place=place,
        other=TorchDevice("cpu"),
        exact=exact,
        first=first,
    )
    limit = try_optimizer(trial, iter(selection.pieces), tally)
    if limit:
        raise _NotStepped(f"not proven, because {limit}")


def _shared(bench: Bench, index: int, algorithm: str) -> frozenset[str] | None:
    """Keys of the parameters that this process steps; None for all. One process steps those that step together."""
    if bench.share is None:
        return None
    keys = [key for group in bench.pairings[index][0].groups for key in group.params]
    own = bench.share.keys[index]
    if steps_together(algorithm):
        return frozenset(keys if keys and keys[0] in own else ())
    return own


def _is_padding(piece: ParameterPiece, source: TensorSource) -> bool:
    """Whether a partition of ZeRO has only the zeros that its group was padded with: at most two for each rank."""
    records = [piece.parameter, *(record for _, record in piece.entry.tensors if record.shape)] if piece.entry else []
    if not records or piece.elements > _MOST_PADDING:
        return False
    return not any(bool(source.tensor(record).count_nonzero()) for record in records)


def _obstacle(record: TensorRecord, algorithm: str, source: TensorSource) -> str:
    """Why state that is not dense cannot be restored for a step; empty if it can."""
    if record.kind != "wrapper-subclass":
        return f"it keeps a {record.kind} tensor, without plain values to step"
    if algorithm in BY_NAME:
        own = Argument("optimizer")
        return f"it keeps a {record.subclass}: name the class of another library that reads it with {own}"
    try:
        # A trial copies it, reads its values, and replaces them.
        values = copied(source.tensor(record))
        values.copy_(values.dequantize())
    except STEP_ERRORS as error:
        return f"it keeps a {record.subclass}, which is not restored here: {error_text(error)}"
    return ""


def _choose(bench: Bench, optimizer: OptimizerRecord, pairing: Pairing) -> Choice:
    one_rank = one_of_ranks(bench.checkpoint.inventory, optimizer)
    if one_rank:
        return Choice(reason=one_rank)
    named = bench.request.optimizer
    is_known = optimizer.algorithm is not None and any(one.algorithm is None for one, _ in bench.pairings)
    is_of_other = named is not None and is_foreign(named) and is_known  # it can only be meant for another optimizer
    choice = choose_optimizer(optimizer, None if is_of_other else named)
    if pairing.how != "flat" or not choice.name or is_elementwise(choice.name):
        return choice
    return Choice(reason=f"a step of {choice.name} is not elementwise, and a flat partition joins parts of parameters")


def _recipe(bench: Bench, optimizer: OptimizerRecord, choice: Choice) -> Recipe:
    """The recipe of an optimizer."""
    if not choice.name:
        raise _NotStepped(choice.reason)
    try:
        recipe = make_recipe(bench.checkpoint, optimizer, choice.name, bench.request)
    except CannotBuild as error:
        raise _NotStepped(f"not proven, because {choice.name} cannot be made: {error_text(error)}") from error
    except STEP_ERRORS as error:
        raise _Refused(f"{choice.name} cannot be made: {error_text(error)}") from error
    if recipe is None:
        raise _NotStepped(f"this torch has no {choice.name}")
    return recipe


def _doubts(
    inventory: Inventory, optimizer: OptimizerRecord, pairing: Pairing, recipe: Recipe, extra: list[str]
) -> list[str]:
    """Facts about an optimizer that the file does not record, and what was assumed instead."""
    doubts = _other_folder(inventory, optimizer, pairing)
    if recipe.assumed:
        doubts.append(f"options that need unpickling ({', '.join(recipe.assumed)}): defaults used instead")
    if extra:
        doubts.append(f"the optimizer's own {some(extra)} not stepped")
    if pairing.how == "ambiguous":
        where = optimizer.where or "the optimizer"
        doubts.append(f"which tensors {where} trains is ambiguous: {pairing.reason}")
    return doubts


def _overlapping(optimizer: OptimizerRecord, pairing: Pairing, recipe: Recipe) -> str:
    """A large tensor whose values overlap: no optimizer can write to it, and a copy may not fit in memory."""
    parameters = (record for _, record in pairing.matches if record is not None)
    state = (record for entry in optimizer.state for _, record in entry.tensors)
    options = (record for group in recipe.tensors for option in group.values() for record in tensors_of(option))
    for record in (*parameters, *state, *options):
        count = prod(record.shape)
        if count > WINDOW_ELEMENTS and is_dense(record) and overlaps(record):
            held = amount(extent_numel(record.shape, record.stride), "element")
            return f"{record.name}: {amount(count, 'value')} overlap in {held} of memory"
    return ""


def _for_cpu(recipe: Recipe) -> Recipe:
    """The same recipe without ``capturable``, which the CPU refuses."""
    return recipe._replace(
        groups=tuple(group | ({"capturable": False} if "capturable" in group else {}) for group in recipe.groups)
    )


def _with_options(recipe: Recipe, groups: Sequence[ParamGroup]) -> Recipe:
    """The recipe with the original's options, except implementation flags; a recipe with reduced options stays."""
    if not groups or recipe.cut:
        return recipe
    options = [
        {name: value for name, value in group.options if name not in IMPLEMENTATION_FLAGS and value is not OPAQUE}
        for group in groups
    ]
    return recipe._replace(
        groups=tuple(
            {name: theirs.get(name, value) for name, value in ours.items()}
            for ours, theirs in zip(recipe.groups, options, strict=True)
        ),
    )


def _refused_flag(bench: Bench, recipe: Recipe, optimizer: OptimizerRecord) -> str:
    """An option that torch refuses on the target, but a simulated device accepts."""
    if bench.site.mode != "simulated" or supports_capturable(bench.site.target):
        return ""
    for group, options in zip(optimizer.groups, recipe.groups, strict=True):
        if options.get("capturable"):
            return f"{group.where}.capturable=True is not supported there"
    return ""


def _other_folder(inventory: Inventory, optimizer: OptimizerRecord, pairing: Pairing) -> list[str]:
    """A doubt if the model is in another folder than its optimizer: it may come from another save."""
    if not isinstance(inventory, DirectoryInventory):
        return []
    home = inventory.folder_of(optimizer.where)
    folders = {inventory.folder_of(tensor.name) for _, tensor in pairing.matches if tensor is not None}
    others = sorted(folders - {home})
    return [f"its parameters are in another folder, '{others[0]}', and may come from another save"] if others else []

"""The resume itself: every optimizer of a checkpoint set up for its step, its parallel step and its fresh one.

Never steps an optimizer that neither torch has nor the user has named.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.state_dicts import RootKeys
from ckptmove.conversion.plan import plan_move
from ckptmove.errors import UncastableDtype, UnreadableInput, UnsupportedDtype
from ckptmove.findings.context import Context, within_reach
from ckptmove.model import OPAQUE
from ckptmove.moves import MoveRequest
from ckptmove.text import amount, quoted
from ckptmove.torch_facts.devices import supports_capturable
from ckptmove.torch_facts.optimizers import BY_NAME, keeps_state_on_first
from ckptmove.verification.checks import NOTHING_TO_RESUME
from ckptmove.verification.pieces import WINDOW_ELEMENTS, is_dense, select
from ckptmove.verification.place import TorchDevice
from ckptmove.verification.restore import LoadedTensors
from ckptmove.verification.state import StoredTensors, extent_elements, overlaps
from ckptmove.verification.step.entries import tensors_of
from ckptmove.verification.step.optimizers import choose
from ckptmove.verification.step.recipe import HOW, CannotBuild, is_foreign, make_recipe, refused_options
from ckptmove.verification.step.tally import Trial, TrialTally
from ckptmove.verification.step.trial import STEP_ERRORS, error_text, try_optimizer
from ckptmove.verification.step.verdicts import Circumstances, conclude, not_proven, without_step
from ckptmove.verification.wrappers import WithWrappers, copied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import Inventory, OptimizerRecord, ParamGroup, TensorRecord
    from ckptmove.verification.against import OriginalTensors
    from ckptmove.verification.evidence import CheckResult
    from ckptmove.verification.loaded import LoadedFiles
    from ckptmove.verification.pieces import TensorSource
    from ckptmove.verification.place import Place, Site
    from ckptmove.verification.request import VerifyRequest
    from ckptmove.verification.sampling import Sample
    from ckptmove.verification.step.optimizers import Choice
    from ckptmove.verification.step.recipe import Recipe


class Bench(NamedTuple):
    """All that the steps are made from.

    Attributes:
        request: what was asked for.
        site: where the step is made.
        checkpoint: the open checkpoint.
        stored: its tensors.
        loaded: what ``torch.load`` made of it.
        original: the tensors of the original, where there is one.
        pairings: its optimizers, each with its parameters.
        sample: the parameters that are stepped; None for all.
    """

    request: VerifyRequest
    site: Site
    checkpoint: OpenCheckpoint
    stored: StoredTensors
    loaded: LoadedFiles
    original: OriginalTensors | None
    pairings: list[tuple[OptimizerRecord, Pairing]]
    sample: Sample | None = None


class _OwnValues:
    """What optimizers keep beside the state of their parameters, which no step of one torch class reads.

    Slow weights of Lookahead, master weights in another precision, and state by names of the optimizer's own.
    """

    def __init__(self, inventory: Inventory) -> None:
        state = {record.name for one in inventory.optimizers for entry in one.state for _, record in entry.tensors}
        names = (record.name for record in inventory.tensors if record.role == "optimizer")
        self._tensors = [name for name in names if name not in state and ".param_groups." not in f".{name}"]
        self._roots = RootKeys(inventory)

    def of(self, optimizer: OptimizerRecord) -> list[str]:
        """The paths of those of one optimizer, which a wrapper keeps one level above it."""
        where = optimizer.where
        is_inner = self._roots.first(where) not in {-1, len(where)}
        prefix = f"{where.rpartition('.')[0] if is_inner else where}.".lstrip(".")
        listed = {key for group in optimizer.groups for key in group.params}
        unlisted = [f"{where}.state.{entry.key}".lstrip(".") for entry in optimizer.state if entry.key not in listed]
        return unlisted + [name for name in self._tensors if name.startswith(prefix)]


def resume(bench: Bench) -> tuple[CheckResult, CheckResult, CheckResult]:
    """The outcomes of step, parity and fresh."""
    inventory = bench.checkpoint.inventory
    around = Circumstances(
        site=bench.site,
        require_device=bench.request.require_device,
        seed=bench.request.seed,
        mend=_mend(bench),
        has_model=any(record.role == "model" for record in inventory.tensors),
    )
    sharding = inventory.sharding if isinstance(inventory, DirectoryInventory) else ""
    nothing = sharding or ("" if bench.pairings else NOTHING_TO_RESUME)
    # A case steps its model where the file has nothing to resume, too.
    if bench.site.reason and (not nothing or bench.request.case is not None):
        return not_proven(around)
    if nothing:
        return without_step(nothing, around)
    kinds = {fact.kind for fact in inventory.facts}
    if "encoded-storage" in kinds:
        reason = "no step from tensors written as text, as pickle protocols 0 to 2 write bytes"
        return without_step(f"{reason}: torch.save them, or pickle them with protocol 4", around)
    if "compressed-storage" in kinds:
        return without_step(f"no step from storages that are deflated; {_command(bench)} stores them plainly", around)
    tally = TrialTally()
    place = bench.site.place()
    own_values = _OwnValues(inventory)
    with StoredTensors(bench.checkpoint.parts, mapped=False) as again:
        second = _second_source(bench, again, around)
        for index, (optimizer, pairing) in enumerate(bench.pairings):
            if not tally.error:
                chosen = None if bench.sample is None else bench.sample.keys[index]
                _try(bench, optimizer, pairing, chosen, second, place, own_values, around, tally)
    return conclude(tally, around)


def _mend(bench: Bench) -> str:
    """The command for an option or a dtype that the target refuses; empty where the file holds none of them."""
    if bench.checkpoint.inventory.container == "dcp":
        return ""  # no conversion changes one
    command = _command(bench)
    try:
        plan = plan_move(bench.checkpoint.inventory, MoveRequest(to=bench.site.target))
    except UncastableDtype:
        return ""
    except UnsupportedDtype:
        return f"{command} --cast"
    return command if any(flag.mention is None for flag in plan.flags) else ""


def _command(bench: Bench) -> str:
    target = within_reach(bench.site.target, Context(device_count=bench.request.devices))
    return f"ckptmove convert {quoted(bench.request.path)} --to {target}"


def _second_source(bench: Bench, again: StoredTensors, around: Circumstances) -> TensorSource:
    """What the parity step begins from, and its name for people."""
    where = "the same step" if bench.site.mode == "cpu" else "the same step on the plain CPU"
    if bench.original is not None:
        around.compared_with = (
            f"{where} from {bench.request.against}" + ", cast as this file is" * bench.original.is_cast
        )
        return bench.original
    if bench.site.mode != "cpu":
        around.compared_with = where
        return bench.stored
    stepped = {
        part.name
        for part in bench.checkpoint.parts
        if any(record.role in {"model", "optimizer"} for record in part.inventory.tensors)
    } - bench.loaded.left_out
    missing = sorted(stepped & bench.loaded.missing)
    if stepped & bench.loaded.released and not missing:
        around.compared_with = f"{where} after a second reading; what torch.load returned was let go, once compared"
        return again
    if stepped - bench.loaded.missing:
        read = f", {', '.join(missing)} read a second time in its place" if missing else ""
        around.compared_with = f"{where} from what {bench.loaded.what}{read}"
        return LoadedTensors(bench.loaded, bench.stored, bench.checkpoint.inventory, again)
    files = "the file" if missing == [""] else "these files"
    around.compared_with = f"{where} after a second reading; torch.load refuses {files}, so that it shows no more"
    return again


def _try(
    bench: Bench,
    optimizer: OptimizerRecord,
    pairing: Pairing,
    chosen: frozenset[str] | None,
    second: TensorSource,
    place: Place,
    own_values: _OwnValues,
    around: Circumstances,
    tally: TrialTally,
) -> None:
    named = f"{optimizer.where or 'the optimizer'} was not stepped: "
    choice = choose(optimizer, _override(bench, optimizer))
    recipe = _recipe(bench, optimizer, choice, named, around, tally)
    if recipe is None:
        return
    tally.error = _written_over(optimizer, pairing, recipe)
    if tally.error:
        return
    source = WithWrappers(bench.stored, bench.loaded)

    def obstacle(record: TensorRecord) -> str:
        return _obstacle(record, choice.name, source)

    selection = select(optimizer, pairing.by_key(), choice.name, chosen, obstacle)
    listed = sum(len(group.params) for group in optimizer.groups)
    if keeps_state_on_first(choice.name) and selection.left_out:
        lost = f"{sum(map(len, selection.left_out.values()))} of {amount(listed, 'parameter')} not found in the file"
        around.left_out.append(f"{named}{choice.name} steps all parameters as one vector, and {lost}")
        return
    try:
        tally.error = refused_options(recipe, optimizer, bench.stored) or _refused_flag(bench, recipe, optimizer)
    except UnreadableInput as error:  # an option that is a tensor
        tally.error, tally.unread = error_text(error), True
    if tally.error:
        return
    around.classes.append(choice.name)
    around.notes += [note for note in (choice.note, recipe.cut) if note]
    around.leave_out(selection.left_out)
    around.assumed += _doubts(bench.checkpoint.inventory, optimizer, pairing, recipe, own_values.of(optimizer))
    reference = recipe if bench.site.mode == "cpu" else _for_cpu(recipe)
    # A sum over a whole tensor depends on where it is in memory, and classes of other libraries may make any.
    exact = bench.site.mode != "real" and reference.groups == recipe.groups and not recipe.is_foreign
    around.exact &= exact
    if bench.original is not None:
        groups = bench.original.groups(optimizer)
        reference = _with_options(reference, groups)
        around.notes += [] if groups else [f"{bench.request.against} is stepped with the options of this checkpoint"]
    trial = Trial(
        optimizer=optimizer,
        recipe=recipe,
        reference=reference,
        source=source,
        second=second if bench.original is not None else WithWrappers(second, bench.loaded),
        place=place,
        other=TorchDevice("cpu"),
        exact=exact,
    )
    try_optimizer(trial, iter(selection.pieces), tally)
    if tally.limit:
        around.left_out.append(f"{named}not proven, because {tally.limit}")
        tally.limit = ""


def _obstacle(record: TensorRecord, algorithm: str, source: TensorSource) -> str:
    """Why state that is not dense cannot be restored for a step; empty where it can."""
    if record.kind != "wrapper-subclass":
        return f"it keeps a {record.kind} tensor, without plain values to step"
    if algorithm in BY_NAME:
        return f"it keeps a {record.subclass}: --optimizer has to name the class of another library that reads one"
    try:
        # All that a trial does with one: it is copied, its values are read, and others are put in their place.
        values = copied(source.tensor(record))
        values.copy_(values.dequantize())
    except STEP_ERRORS as error:
        return f"it keeps a {record.subclass}, which is not restored here: {error_text(error)}"
    return ""


def _override(bench: Bench, optimizer: OptimizerRecord) -> str | None:
    """The class that the user has named, unless it can only be meant for another optimizer of the checkpoint."""
    named = bench.request.optimizer
    is_told = optimizer.algorithm is not None and any(one.algorithm is None for one, _ in bench.pairings)
    return None if named is not None and is_foreign(named) and is_told else named


def _recipe(
    bench: Bench, optimizer: OptimizerRecord, choice: Choice, named: str, around: Circumstances, tally: TrialTally
) -> Recipe | None:
    """What the optimizer is stepped with; None where it is not, with the reason."""
    if not choice.name:
        around.left_out.append(named + choice.reason)
        return None
    try:
        recipe = make_recipe(bench.checkpoint.inventory, optimizer, choice.name, bench.request.seed)
    except CannotBuild as error:
        around.left_out.append(f"{named}not proven, because {choice.name} cannot be made: {error_text(error)}")
    except STEP_ERRORS as error:
        tally.error = f"{choice.name} cannot be made: {error_text(error)}"
    else:
        if recipe is None:
            around.left_out.append(f"{named}this torch has no {choice.name}")
        return recipe
    return None


def _doubts(
    inventory: Inventory, optimizer: OptimizerRecord, pairing: Pairing, recipe: Recipe, beside: list[str]
) -> list[str]:
    """What the file does not tell of an optimizer, and what was done in its place."""
    doubts = _elsewhere(inventory, optimizer, pairing)
    if recipe.assumed:
        doubts.append(f"{', '.join(recipe.assumed)} not stored as plain values: the defaults stood in")
    if beside:
        more = f" and {len(beside) - 1} more" if len(beside) > 1 else ""
        doubts.append(f"the optimizer's own {beside[0]}{more} not stepped")
    if pairing.how == "ambiguous":
        where = optimizer.where or "the optimizer"
        doubts.append(f"which tensors {where} trains is ambiguous: {pairing.reason}")
    return doubts


def _written_over(optimizer: OptimizerRecord, pairing: Pairing, recipe: Recipe) -> str:
    """A large tensor whose values lie over each other: no optimizer writes to one, and a copy of it may fit nowhere."""
    parameters = (record for _, record in pairing.matches if record is not None)
    state = (record for entry in optimizer.state for _, record in entry.tensors)
    options = (record for group in recipe.tensors for option in group.values() for record in tensors_of(option))
    for record in (*parameters, *state, *options):
        count = prod(record.shape)
        if count > WINDOW_ELEMENTS and is_dense(record) and overlaps(record):
            held = amount(extent_elements(record.shape, record.stride), "element")
            return f"{record.name}: {amount(count, 'value')} lie over each other in {held} of memory"
    return ""


def _for_cpu(recipe: Recipe) -> Recipe:
    """The same recipe without ``capturable``, which the CPU refuses."""
    return recipe._replace(
        groups=tuple(
            {name: False if name == "capturable" else value for name, value in group.items()} for group in recipe.groups
        ),
    )


def _with_options(recipe: Recipe, groups: Sequence[ParamGroup]) -> Recipe:
    """The same recipe with the original's options, but for those that say how a step is made; a cut one as it is."""
    if not groups or recipe.cut:
        return recipe
    options = [
        {name: value for name, value in group.options if name not in HOW and value is not OPAQUE} for group in groups
    ]
    return recipe._replace(
        groups=tuple(
            {name: theirs.get(name, value) for name, value in ours.items()}
            for ours, theirs in zip(recipe.groups, options, strict=True)
        ),
    )


def _refused_flag(bench: Bench, recipe: Recipe, optimizer: OptimizerRecord) -> str:
    """The option that torch refuses on the target, where a simulated device would take it."""
    if bench.site.mode != "simulated" or supports_capturable(bench.site.target):
        return ""
    for group, options in zip(optimizer.groups, recipe.groups, strict=True):
        if options.get("capturable"):
            return f"{group.where}.capturable=True is not supported there"
    return ""


def _elsewhere(inventory: Inventory, optimizer: OptimizerRecord, pairing: Pairing) -> list[str]:
    """What is to be doubted where a model lies in another folder than its optimizer: another save, perhaps."""
    if not isinstance(inventory, DirectoryInventory):
        return []
    home = inventory.folder_of(optimizer.where)
    folders = {inventory.folder_of(tensor.name) for _, tensor in pairing.matches if tensor is not None}
    others = sorted(folders - {home})
    return [f"its parameters lie in another folder, '{others[0]}', and may be those of another save"] if others else []

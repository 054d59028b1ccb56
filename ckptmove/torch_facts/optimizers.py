"""Table of the classes in ``torch.optim``: the keys that each writes, and the meaning of their values.

Keys of groups and states are those of torch 2.4 to 2.14. Older versions write fewer group keys, so that a class is
matched by the keys that it requires, not by all that it writes. Tests compare the table with the real classes.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ckptmove.model import OPAQUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.model import ParamGroup, StateEntry

#: Options of a group that depend on the device.
DEVICE_FLAGS: Final = frozenset({"capturable", "fused"})


class OptimizerFacts(NamedTuple):
    """A class of ``torch.optim``."""

    name: str  # name of the class
    group: frozenset[str]  # group keys that it always writes and that distinguish it from the others
    state: frozenset[str]  # state keys that every entry has after a step
    #: pairs of an option and the state key that is added if the option is set.
    state_by_option: tuple[tuple[str, str], ...]
    optional: frozenset[str]  # state keys that only some versions write
    scalars: frozenset[str]  # state keys of 0-d bookkeeping tensors
    numbers: frozenset[str]  # other state keys whose values are no moments, of any type
    scalars_on_device: bool  # whether torch creates these on the parameter's device instead of the CPU
    absent: frozenset[str]  # group keys that it never writes, unlike others with the same state
    #: state keys whose values are sums or maxima of squares or magnitudes, and so never negative.
    magnitudes: frozenset[str]
    nonzero_initial: frozenset[str]  # state keys whose initial value is not zero
    #: the input for the update of an element: that ``element``, its whole ``parameter``, or the ``model``.
    update: Literal["element", "parameter", "model"]
    shapes: Literal["parameter", "other"]  # whether moments have the shape of their `parameter`, or `other` shapes
    gradients: Literal["dense", "sparse"]  # whether it accepts `dense` gradients, or only `sparse` ones
    #: whether ``each`` parameter has its own state, or the ``first`` has the state of all.
    state_on: Literal["each", "first"]

    @property
    def known_state(self) -> frozenset[str]:
        """Every state key that the class may write."""
        return self.state | self.optional | self.scalars | {key for _, key in self.state_by_option}


def _row(
    name: str,
    group: str,
    state: str,
    *,
    state_by_option: tuple[tuple[str, str], ...] = (),
    optional: str = "",
    scalars: str = "step",
    numbers: str = "",
    scalars_on_device: bool = False,
    absent: str = "",
    magnitudes: str = "",
    nonzero_initial: str = "",
    update: Literal["element", "parameter", "model"] = "element",
    shapes: Literal["parameter", "other"] = "parameter",
    gradients: Literal["dense", "sparse"] = "dense",
    state_on: Literal["each", "first"] = "each",
) -> OptimizerFacts:
    return OptimizerFacts(
        name=name,
        group=frozenset(group.split()),
        state=frozenset(state.split()),
        state_by_option=state_by_option,
        optional=frozenset(optional.split()),
        scalars=frozenset(scalars.split()),
        numbers=frozenset(numbers.split()),
        scalars_on_device=scalars_on_device,
        absent=frozenset(absent.split()),
        magnitudes=frozenset(magnitudes.split()),
        nonzero_initial=frozenset(nonzero_initial.split()),
        update=update,
        shapes=shapes,
        gradients=gradients,
        state_on=state_on,
    )


_ADAM: Final = "step exp_avg exp_avg_sq"
_AMSGRAD: Final = (("amsgrad", "max_exp_avg_sq"),)

#: Rows with more required keys come first: the first match is the class.
TABLE: Final[tuple[OptimizerFacts, ...]] = (
    _row("LBFGS", "max_iter history_size line_search_fn", "n_iter", scalars="", update="model", shapes="other",
         state_on="first", optional="func_evals al d t old_dirs old_stps ro H_diag prev_flat_grad prev_loss",
         numbers="n_iter func_evals al t ro H_diag prev_loss"),
    _row("Muon", "ns_coefficients ns_steps", "momentum_buffer", scalars="", update="parameter"),
    _row("Adafactor", "beta2_decay d", "step", optional="row_var col_var variance", update="parameter",
         shapes="other", magnitudes="row_var col_var variance"),
    _row("ASGD", "lambd alpha t0", "step eta mu ax", scalars="step eta mu", scalars_on_device=True,
         nonzero_initial="eta mu"),
    _row("NAdam", "betas momentum_decay", _ADAM + " mu_product", scalars="step mu_product", magnitudes="exp_avg_sq",
         nonzero_initial="mu_product"),
    _row("Rprop", "etas step_sizes", "step prev step_size", nonzero_initial="step_size", magnitudes="step_size"),
    _row("Adagrad", "lr_decay initial_accumulator_value", "step sum", magnitudes="sum", nonzero_initial="sum"),
    _row("Adadelta", "rho eps", "square_avg acc_delta", optional="step", magnitudes="square_avg acc_delta"),
    _row("RMSprop", "alpha centered momentum", "square_avg", optional="step", magnitudes="square_avg",
         state_by_option=(("momentum", "momentum_buffer"), ("centered", "grad_avg"))),
    _row("Adamax", "betas eps weight_decay", "step exp_avg exp_inf", magnitudes="exp_inf",
         absent="amsgrad momentum_decay decoupled_weight_decay"),
    _row("AdamW", "betas eps amsgrad", _ADAM, state_by_option=_AMSGRAD, magnitudes="exp_avg_sq max_exp_avg_sq"),
    _row("Adam", "betas eps amsgrad", _ADAM, state_by_option=_AMSGRAD, magnitudes="exp_avg_sq max_exp_avg_sq"),
    _row("RAdam", "betas eps weight_decay foreach differentiable", _ADAM, magnitudes="exp_avg_sq",
         absent="amsgrad momentum_decay fused"),
    _row("SparseAdam", "betas eps maximize", _ADAM, scalars="", magnitudes="exp_avg_sq", absent="weight_decay",
         gradients="sparse"),
    _row("SGD", "momentum dampening nesterov", "", optional="momentum_buffer", scalars="", absent="eps"),
)  # fmt: skip
BY_NAME: Final = {row.name: row for row in TABLE}

#: Group keys of optimizers in other libraries that otherwise match a class of torch.
_FOREIGN: Final = frozenset({
    "bias_correction", "correct_bias", "grad_averaging", "trust_coefficient", "decoupled_decay", "lr_in_momentum",
    "weight_decouple", "wd_ratio", "rectify", "degenerated_to_sgd", "n_sma_threshold", "optim_bits", "use_muon",
    "caution", "clip_exp", "corrected_weight_decay", "decouple", "decoupled", "fixed_decay", "max_grad_norm",
})  # fmt: skip
#: Options of FusedAdam and DeepSpeedCPUAdam, and their state for each parameter (deepspeed/ops/adam/).
_FUSED: Final = frozenset({"lr", "betas", "eps", "weight_decay", "bias_correction"})
_FUSED_STATE: Final = frozenset(_ADAM.split())
#: Group keys that all classes of torch have since 2.0; no other library is known to write all of them.
_TORCH_ONLY: Final = frozenset({"foreach", "differentiable", "maximize"})
#: Group keys that a step does not need, because ``__setstate__`` sets a default: in every class (``""``), or in one.
_DEFAULTED: Final = {
    "": frozenset({"amsgrad", "centered", "differentiable", "foreach", "maximize", "nesterov"}),
    "RMSprop": frozenset({"momentum"}),
    # Keys that only the constructor reads.
    "Adagrad": frozenset({"initial_accumulator_value"}),
    "Rprop": frozenset({"lr"}),
}
#: State keys of second moments in optimizers of other libraries that use torch's names.
_BORROWED_MAGNITUDES: Final = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf"})


def candidates(groups: tuple[ParamGroup, ...], state: tuple[StateEntry, ...]) -> tuple[str, ...]:
    """Return the classes of ``torch.optim`` that could have written a state_dict, most likely first.

    A class is matched by the keys of all groups together, and by the keys that most state entries have. One entry
    without a key does not change the match; :func:`lost_keys` reports it.

    Old files of Adam and AdamW are identical; ``decoupled_weight_decay`` in the groups distinguishes them. For classes
    of DeepSpeed, the classes of torch that make the same step are returned.
    """
    if not groups:
        return ()
    options = frozenset(name for group in groups for name, _ in group.options)
    entries = Counter(keys for entry in state if (keys := state_keys(entry)))
    usual = entries.most_common(1)[0][0] if entries else None
    found = (
        [row.name for row in TABLE if _fits(row, options) and (usual is None or row.state <= usual <= row.known_state)]
        or [row.name for row in TABLE if _fits(row, options) and usual is not None and usual <= row.known_state]
        or [row.name for row in TABLE if usual is not None and _fits_but_for_one(row, options, usual)]
    )
    if "AdamW" in found and "Adam" in found:
        return _adam_or_adamw([dict(group.options) for group in groups])
    if not found and usual == _FUSED_STATE and all(is_fused_adam(group) for group in groups):
        return "AdamW", "Adam"
    return tuple(found[:1])


def is_fused_adam(group: ParamGroup) -> bool:
    """Whether a group has the options of FusedAdam or DeepSpeedCPUAdam, which step as AdamW or Adam of torch.

    Both have the argument ``adam_w_mode``, True by default, and do not save it.
    """
    options = dict(group.options)
    return (
        options.keys() >= _FUSED
        and options["bias_correction"] is True
        and not options.get("amsgrad")
        and not options.keys() & (_FOREIGN - {"bias_correction"})
    )


def state_keys(entry: StateEntry) -> frozenset[str]:
    """Return the state keys of an entry; for a list of tensors (``old_dirs.0``) only the key of the list."""
    return _first_parts(tuple([name for name, _ in (*entry.tensors, *entry.scalars)]))


@lru_cache(maxsize=64)
def _first_parts(names: tuple[str, ...]) -> frozenset[str]:
    """First parts of dotted names, cached: usually all entries of an optimizer have the same names."""
    return frozenset(name.partition(".")[0] for name in names)


def lost_keys(
    algorithm: str | None, groups: Iterable[ParamGroup], state: Iterable[StateEntry], *, is_flat: bool = False
) -> list[str]:
    """Return the missing keys that an optimizer's step needs, relative to the optimizer: ``state.3.exp_avg_sq``.

    Empty for an unknown optimizer, for entries without any value (parameters that were never stepped), and for entries
    that no group lists. An option with an unknown value is treated as not set. With ``is_flat``, options are stored
    under the name of their parameter instead of the number of their group.
    """
    row = BY_NAME.get(algorithm or "")
    if row is None:
        return []
    lost: list[str] = []
    needed: dict[str, frozenset[str]] = {}
    for index, group in enumerate(groups):
        options = dict(group.options)
        needed_options = (row.group | {"lr"}) - _DEFAULTED.get(row.name, frozenset()) - _DEFAULTED[""]
        place = group.params[0] if is_flat else index
        lost += (f"param_groups.{place}.{key}" for key in sorted(needed_options - options.keys()))
        own = row.state | {key for option, key in row.state_by_option if _is_set(options.get(option))}
        needed.update(dict.fromkeys(group.params, own))
    for entry in state:
        if entry.key in needed and (entry.tensors or any(value is not None for _, value in entry.scalars)):
            lost += (f"state.{entry.key}.{key}" for key in sorted(needed[entry.key] - state_keys(entry)))
    return lost


def _is_set(option: object) -> bool:
    return bool(option) and option is not OPAQUE


def is_elementwise(algorithm: str) -> bool:
    """Whether the update of each element is independent of the others; False for an unknown class."""
    return algorithm in BY_NAME and BY_NAME[algorithm].update == "element"


def steps_together(algorithm: str) -> bool:
    """Whether all parameters must be stepped at once; True for an unknown class, to be safe."""
    return algorithm not in BY_NAME or BY_NAME[algorithm].update == "model"


def keeps_state_on_first(algorithm: str) -> bool:
    """Whether the first parameter has the state of all parameters."""
    return algorithm in BY_NAME and BY_NAME[algorithm].state_on == "first"


def wants_sparse(algorithm: str) -> bool:
    """Whether an optimizer accepts only sparse gradients."""
    return algorithm in BY_NAME and BY_NAME[algorithm].gradients == "sparse"


def magnitudes(algorithm: str | None) -> frozenset[str]:
    """Return the state keys whose values cannot be negative, for an unknown optimizer too."""
    return BY_NAME[algorithm].magnitudes if algorithm in BY_NAME else _BORROWED_MAGNITUDES


def is_moment(algorithm: str, key: str, shape: Sequence[int]) -> bool:
    """Whether a tensor in the state of a parameter is a moment, and no number such as a step count.

    In a class of torch the key shows it: moments of a 0-d parameter are 0-d too. In a class of another library, the
    meaning of a 0-d tensor is unknown, and it is not taken for a moment.
    """
    row = BY_NAME.get(algorithm)
    if row is None:
        return bool(shape)
    own = key.partition(".")[0]
    return own != "step" and own not in row.scalars and own not in row.numbers


def _fits(row: OptimizerFacts, options: frozenset[str]) -> bool:
    return row.group <= options and not options & (_FOREIGN | row.absent)


def _fits_but_for_one(row: OptimizerFacts, options: frozenset[str], usual: frozenset[str]) -> bool:
    """Whether the state matches, and the groups, written by torch, lack only one group key."""
    if not options >= _TORCH_ONLY or options & (_FOREIGN | row.absent):
        return False
    return len(row.group - options) == 1 and row.state <= usual <= row.known_state


def _adam_or_adamw(groups: list[dict[str, object]]) -> tuple[str, ...]:
    decoupled = groups[0].get("decoupled_weight_decay")
    if decoupled is not None and decoupled is not OPAQUE:
        return ("AdamW",) if decoupled else ("Adam",)
    # Without weight decay both compute the same; the defaults are 1e-2 for AdamW and 0 for Adam.
    decays = any(group.get("weight_decay") for group in groups)  # often set in one group only, not for the biases
    return ("AdamW", "Adam") if decays else ("Adam", "AdamW")

"""Which class of ``torch.optim`` writes which keys: enough to name an optimizer by its state_dict.

Never imports torch; a test holds the table against the real classes.

Keys of groups and of states as torch 2.4 to 2.13 write them; older ones write fewer group keys, which is why a
class is found by what it needs and not by what it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ckptmove.model import ParamGroup, StateEntry


@dataclass(frozen=True, slots=True)
class OptimizerKeys:
    """How the state_dict of a class is told.

    Attributes:
        name: class in ``torch.optim``.
        group: group keys that it always writes and that tell it from the others.
        state: state keys that every entry has, once a step was made.
        optional: further state keys that some options bring.
        scalars: state keys of 0-d bookkeeping tensors.
        scalars_on_device: whether torch creates those on the parameter's device rather than on the CPU.
    """

    name: str
    group: frozenset[str]
    state: frozenset[str]
    optional: frozenset[str]
    scalars: frozenset[str] = frozenset({"step"})
    scalars_on_device: bool = False


def _row(
    name: str, group: str, state: str, optional: str = "", scalars: str = "step", *, on_device: bool = False
) -> OptimizerKeys:
    return OptimizerKeys(
        name,
        frozenset(group.split()),
        frozenset(state.split()),
        frozenset(optional.split()),
        frozenset(scalars.split()),
        on_device,
    )


#: Group keys of other libraries' optimizers that otherwise look like one of torch's.
_FOREIGN: Final = frozenset({
    "bias_correction", "correct_bias", "grad_averaging", "trust_coefficient", "decoupled_decay", "lr_in_momentum",
    "weight_decouple", "wd_ratio", "rectify", "degenerated_to_sgd", "n_sma_threshold", "optim_bits", "use_muon",
})  # fmt: skip
#: Group keys that the class lacks, where others that write the same state have them.
_WITHOUT: Final[dict[str, frozenset[str]]] = {
    "SparseAdam": frozenset({"weight_decay"}),
    "RAdam": frozenset({"amsgrad", "momentum_decay"}),
    "Adamax": frozenset({"amsgrad", "momentum_decay", "decoupled_weight_decay"}),
    "SGD": frozenset({"eps"}),
}


#: The more a row asks for, the earlier it stands: the first that fits is the class.
TABLE: Final[tuple[OptimizerKeys, ...]] = (
    _row("LBFGS", "max_iter history_size line_search_fn", "n_iter", "func_evals al d t old_dirs old_stps ro H_diag "
         "prev_flat_grad prev_loss", ""),
    _row("Muon", "ns_coefficients ns_steps", "momentum_buffer", "", ""),
    _row("Adafactor", "beta2_decay d", "step", "row_var col_var variance"),
    _row("ASGD", "lambd alpha t0", "step eta mu ax", "", "step eta mu", on_device=True),
    _row("NAdam", "betas momentum_decay", "step exp_avg exp_avg_sq mu_product", "", "step mu_product"),
    _row("Rprop", "etas step_sizes", "step prev step_size"),
    _row("Adagrad", "lr_decay initial_accumulator_value", "step sum"),
    _row("Adadelta", "rho eps", "square_avg acc_delta", "step"),
    _row("RMSprop", "alpha centered momentum", "square_avg", "step momentum_buffer grad_avg"),
    _row("Adamax", "betas eps weight_decay", "step exp_avg exp_inf"),
    _row("AdamW", "betas eps amsgrad", "step exp_avg exp_avg_sq", "max_exp_avg_sq"),
    _row("Adam", "betas eps amsgrad", "step exp_avg exp_avg_sq", "max_exp_avg_sq"),
    _row("RAdam", "betas eps weight_decay foreach", "step exp_avg exp_avg_sq"),
    _row("SparseAdam", "betas eps maximize", "step exp_avg exp_avg_sq", "", ""),
    _row("SGD", "momentum dampening nesterov", "", "momentum_buffer", ""),
)  # fmt: skip


def candidates(groups: tuple[ParamGroup, ...], state: tuple[StateEntry, ...]) -> tuple[str, ...]:
    """The classes of ``torch.optim`` that could have written a state_dict, best first.

    Old files of Adam and AdamW look alike; with ``decoupled_weight_decay`` in the group there is no doubt.
    """
    if not groups:
        return ()
    options = dict(groups[0].options)
    shared = frozenset.intersection(*(frozenset(name for name, _ in group.options) for group in groups))
    entries = {frozenset(name.partition(".")[0] for name, _ in (*entry.tensors, *entry.scalars)) for entry in state}
    found = [row.name for row in TABLE if _fits(row, shared, entries)]
    if "AdamW" in found and "Adam" in found:
        return _adam_or_adamw(options)
    return tuple(found[:1])


def _fits(row: OptimizerKeys, options: frozenset[str], entries: set[frozenset[str]]) -> bool:
    if not row.group <= options or options & (_FOREIGN | _WITHOUT.get(row.name, frozenset())):
        return False
    return all(row.state <= entry <= row.state | row.optional for entry in entries if entry)


def _adam_or_adamw(options: dict[str, object]) -> tuple[str, ...]:
    decoupled = options.get("decoupled_weight_decay")
    if decoupled is not None:
        return ("AdamW",) if decoupled else ("Adam",)
    # Without weight decay the two compute the same; the defaults are 1e-2 for AdamW and 0 for Adam.
    return ("AdamW", "Adam") if options.get("weight_decay") else ("Adam", "AdamW")

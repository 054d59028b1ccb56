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
        scalars: state keys of 0-d bookkeeping tensors.
        scalars_on_device: whether torch creates those on the parameter's device rather than on the CPU.
    """

    name: str
    group: frozenset[str]
    state: frozenset[str]
    scalars: frozenset[str] = frozenset({"step"})
    scalars_on_device: bool = False


def _row(name: str, group: str, state: str, scalars: str = "step", *, on_device: bool = False) -> OptimizerKeys:
    return OptimizerKeys(
        name, frozenset(group.split()), frozenset(state.split()), frozenset(scalars.split()), on_device
    )


#: The more a row asks for, the earlier it stands: the first that fits is the class.
TABLE: Final[tuple[OptimizerKeys, ...]] = (
    _row("LBFGS", "max_iter history_size line_search_fn", "n_iter", ""),
    _row("Muon", "ns_coefficients ns_steps", "momentum_buffer", ""),
    _row("Adafactor", "beta2_decay d", "step"),
    _row("ASGD", "lambd alpha t0", "step eta mu ax", "step eta mu", on_device=True),
    _row("NAdam", "betas momentum_decay", "step exp_avg exp_avg_sq mu_product", "step mu_product"),
    _row("Rprop", "etas step_sizes", "step prev step_size"),
    _row("Adagrad", "lr_decay initial_accumulator_value", "step sum"),
    _row("Adadelta", "rho eps", "step square_avg acc_delta"),
    _row("RMSprop", "alpha centered momentum", "square_avg"),
    _row("Adamax", "betas eps", "step exp_avg exp_inf"),
    _row("AdamW", "betas eps amsgrad", "step exp_avg exp_avg_sq"),
    _row("Adam", "betas eps amsgrad", "step exp_avg exp_avg_sq"),
    _row("RAdam", "betas eps weight_decay", "step exp_avg exp_avg_sq"),
    _row("SparseAdam", "betas eps", "step exp_avg exp_avg_sq", ""),
    _row("SGD", "momentum dampening nesterov", ""),
)


def candidates(groups: tuple[ParamGroup, ...], state: tuple[StateEntry, ...]) -> tuple[str, ...]:
    """The classes of ``torch.optim`` that could have written a state_dict, best first.

    Old files of Adam and AdamW look alike; with ``decoupled_weight_decay`` in the group there is no doubt.
    """
    if not groups:
        return ()
    options = dict(groups[0].options)
    keys = set(options)
    first = state[0] if state else None
    entry = {key for key, _ in (*first.tensors, *first.scalars)} if first else None
    found = [
        row.name for row in TABLE if row.group <= keys and (entry is None or row.state <= entry) and _knows(row, entry)
    ]
    if "AdamW" in found and "Adam" in found:
        return _adam_or_adamw(options)
    return tuple(found[:1])


def _knows(row: OptimizerKeys, entry: set[str] | None) -> bool:
    """SGD asks for no state key, so it must not take the state of a stranger."""
    return row.name != "SGD" or entry is None or entry <= {"momentum_buffer"}


def _adam_or_adamw(options: dict[str, object]) -> tuple[str, ...]:
    decoupled = options.get("decoupled_weight_decay")
    if decoupled is not None:
        return ("AdamW",) if decoupled else ("Adam",)
    # Without weight decay the two compute the same; the defaults are 1e-2 for AdamW and 0 for Adam.
    return ("AdamW", "Adam") if options.get("weight_decay") else ("Adam", "AdamW")

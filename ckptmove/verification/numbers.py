"""Whether the stored values are numbers that training can go on from.

Never changes a value, and looks at one tensor at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from ckptmove.checkpoint.state_dicts import is_buffer
from ckptmove.findings.catalogue import found
from ckptmove.text import amount
from ckptmove.torch_facts.optimizers import magnitudes
from ckptmove.verification.checks import Offenders, failed, passed, skipped
from ckptmove.verification.state import distinct

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckptmove.model import Finding, Inventory, TensorRecord
    from ckptmove.verification.evidence import CheckResult
    from ckptmove.verification.step.counters import Counters, Uneven

#: Roles whose values training goes on from; a metric may well be infinite.
_ROLES: Final = frozenset({"model", "optimizer", "ema", "scaler", "scheduler", "criterion"})
#: Buffers of ``torch.ao.quantization``'s observers, infinite until they have seen a value.
_EXTREMES: Final = frozenset({"min_val", "max_val", "min_vals", "max_vals"})
#: Buffers of batch norm that the forward pass takes the root of.
_VARIANCE: Final = "running_var"
#: Two values in a byte: torch has no arithmetic for it.
_NOT_COMPARED: Final = frozenset({"float4_e2m1fn_x2"})


@dataclass(slots=True)
class NumbersTally:
    """What was seen of the values so far.

    Attributes:
        state_keys: by name of a state tensor: its key (``exp_avg_sq``), with the class of its optimizer.
        trained: names of the tensors that an optimizer trains; empty where that is not known.
        counters: the step counts.
    """

    state_keys: dict[str, tuple[str, str | None]]
    trained: frozenset[str]
    counters: Counters
    _tensors: int = 0
    _elements: int = 0
    _infinite_buffers: int = 0
    _not_finite: Offenders = field(default_factory=Offenders)
    _negative: Offenders = field(default_factory=Offenders)
    _where: dict[str, list[str]] = field(default_factory=lambda: {"N501": [], "N502": []})

    @classmethod
    def of(cls, inventory: Inventory, trained: frozenset[str], counters: Counters) -> NumbersTally:
        """A tally for one checkpoint."""
        tally = cls(
            {
                record.name: (key, optimizer.algorithm)
                for optimizer in inventory.optimizers
                for entry in optimizer.state
                for key, record in entry.tensors
            },
            trained,
            counters,
        )
        for path, count in counters.negative:
            tally.note_negative(path, count)
        return tally

    def look(self, record: TensorRecord, values: torch.Tensor) -> None:
        """Look at one dense tensor of the checkpoint."""
        if record.role not in _ROLES or record.dtype in _NOT_COMPARED:
            return
        if not (values.is_floating_point() or values.is_complex()):
            return
        self._tensors += 1
        self._elements += values.numel()
        if values.numel() == 0:
            return
        values = distinct(values)
        lowest, highest = _range(values)
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            self._note_not_finite(record, values)
        elif lowest < 0 and self._is_magnitude(record):
            self.note_negative(record.name, lowest)

    def note_negative(self, name: str, value: float) -> None:
        """Count a second moment, a variance or a step count below zero."""
        self._negative.add(f"{name} holds {value:.6g}")
        self._where["N502"].append(name)

    def check(self, ignored: Collection[str]) -> CheckResult:
        """The outcome; what belongs to an ignored code is no failure."""
        figures = {
            "tensors": self._tensors,
            "elements": self._elements,
            "not_finite": self._not_finite.count,
            "negative": self._negative.count,
            "infinite_buffers": self._infinite_buffers,
            "wrong_counts": self.counters.faults.count,
        }
        faults = []
        if self._not_finite and "N501" not in ignored:
            faults.append(f"not finite: {self._not_finite}")
        if self._negative and "N502" not in ignored:
            faults.append(f"below zero: {self._negative}")
        if self.counters.faults:
            faults.append(str(self.counters.faults))
        if faults:
            return failed("numbers", "; ".join(faults), **figures)
        if not self._tensors:
            return skipped("numbers", "nothing that could be read is known to be a weight or a state", **figures)
        values = f"{amount(self._elements, 'value')} in {amount(self._tensors, 'tensor')}"
        parts = [f"{values} are finite, second moments and step counts not negative"]
        if self._not_finite or self._negative:
            parts = [f"{values} looked at; what is not finite or below zero is ignored"]
        if self._infinite_buffers:
            parts.append(f"{amount(self._infinite_buffers, 'buffer')} with infinities, as masks have")
        return passed("numbers", "; ".join([*parts, *(group.told for group in self.counters.uneven)]), **figures)

    def findings(self) -> tuple[Finding, ...]:
        """O209, N501 and N502, where there is reason."""
        spoiled, negative = self._where["N501"], self._where["N502"]
        findings = [_uneven(group) for group in self.counters.uneven]
        if spoiled:
            message = f"NaN or Inf in {amount(self._not_finite.count, 'tensor')}: {self._not_finite}"
            fix = "resume from an earlier checkpoint: training cannot recover from these values"
            findings.append(found("N501", message, spoiled, fix))
        if negative:
            message = f"below zero, which no optimizer writes: {self._negative}"
            fix = "resume from an earlier checkpoint, or without this optimizer state"
            findings.append(found("N502", message, negative, fix))
        return tuple(findings)

    def _is_magnitude(self, record: TensorRecord) -> bool:
        key, algorithm = self.state_keys.get(record.name, ("", None))
        is_variance = record.role in {"model", "ema"} and record.name.rpartition(".")[2] == _VARIANCE
        return is_variance or key in magnitudes(algorithm)

    def _is_mask(self, name: str, values: torch.Tensor) -> bool:
        """Whether infinities are those of a mask that is added before a softmax.

        It has nothing but zeros besides, or it is a buffer, of which a normalisation's statistics are none that may.
        The extremes that an observer of quantization has not seen yet, and a best value so far, are infinite, too.
        """
        if is_buffer(name) or bool(values.isnan().any()):
            return False
        is_trained = name in self.trained or not self.trained
        if bool((values == math.inf).any()):
            is_unset = values.dim() == 0 or name.rpartition(".")[2] in _EXTREMES
            return is_unset and (name not in self.trained) and bool((values == values.reshape(-1)[0]).all())
        return not is_trained or name.rpartition(".")[2] in _EXTREMES or bool((values.isneginf() | (values == 0)).all())

    def _note_not_finite(self, record: TensorRecord, values: torch.Tensor) -> None:
        wide = comparable(values)
        nans = int(wide.isnan().sum())
        infinities = int(wide.isinf().sum())
        if record.role == "model" and self._is_mask(record.name, wide):
            self._infinite_buffers += 1
            return
        parts = [amount(nans, "NaN")] * bool(nans) + [f"{infinities:,} Inf"] * bool(infinities)
        self._not_finite.add(f"{record.name} holds {' and '.join(parts)} in {amount(values.numel(), 'value')}")
        self._where["N501"].append(record.name)


def _uneven(group: Uneven) -> Finding:
    message = f"{group}: {amount(len(group.behind), 'parameter')} behind the others"
    fix = "nothing, if these were frozen or unused for a time; if not, their state is stale: take another checkpoint"
    return found("O209", message, group.behind, fix)


def comparable(values: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that torch can compare on the CPU."""
    real = torch.view_as_real(values) if values.is_complex() else values
    return real.float() if real.is_floating_point() and real.element_size() == 1 else real


def _range(values: torch.Tensor) -> tuple[float, float]:
    """Lowest and highest value in one pass without a copy; NaN where there is one, as ``torch.aminmax`` has it."""
    lowest, highest = torch.aminmax(comparable(values))
    return lowest.item(), highest.item()

"""The ``numbers`` check: stored values are finite, second moments and step counts are not negative."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch

from ckptmove.checkpoint.state_dicts import is_buffer
from ckptmove.findings.catalogue import found
from ckptmove.proof.checks import Offenders, Tally, failed, passed, skipped
from ckptmove.proof.step.counters import CounterFaults
from ckptmove.proof.tensors.stored import distinct
from ckptmove.text import amount
from ckptmove.torch_facts.optimizers import magnitudes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import Finding, Inventory, OptimizerRecord, TensorRecord
    from ckptmove.proof.evidence import CheckResult

#: Roles whose values training continues from. Values of other roles, for example a metric, may be infinite.
_ROLES: Final = frozenset({"model", "optimizer", "ema", "scaler", "scheduler", "criterion"})
#: Buffers of the observers of ``torch.ao.quantization``, which are infinite until the first value is observed.
_EXTREMES: Final = frozenset({"min_val", "max_val", "min_vals", "max_vals"})
#: Buffer of batch norm; the forward pass takes its square root.
_VARIANCE: Final = "running_var"
#: Dtypes with two values in a byte, which have no arithmetic in torch.
_NOT_COMPARED: Final = frozenset({"float4_e2m1fn_x2"})


@dataclass(slots=True)
class NumbersTally(Tally):
    """Figures and faults of the values checked so far."""

    #: for each state tensor by name, its key (``exp_avg_sq``) and its optimizer's class.
    _state_keys: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    _trained: frozenset[str] = frozenset()  # names of the tensors that an optimizer trains; empty if unknown
    _counters: CounterFaults = field(default_factory=CounterFaults)  # step counts
    tensors: int = 0  # tensors checked
    elements: int = 0  # number of their values
    infinite_buffers: int = 0  # buffers with legitimate infinities
    not_finite: Offenders = field(default_factory=Offenders)  # tensors that are not finite
    #: tensors and step counts that are below zero and must not be.
    negative: Offenders = field(default_factory=Offenders)

    @classmethod
    def of(
        cls, inventory: Inventory, pairings: Iterable[tuple[OptimizerRecord, Pairing]], counters: CounterFaults
    ) -> NumbersTally:
        """An empty tally for a checkpoint."""
        matches = chain.from_iterable(pairing.matches for _, pairing in pairings if pairing.is_certain)
        tally = cls(
            {
                record.name: (key, optimizer.algorithm)
                for optimizer in inventory.optimizers
                for entry in optimizer.state
                for key, record in entry.tensors
            },
            frozenset(record.name for _, record in matches if record is not None),
            counters,
        )
        tally.set_index(-1)  # before the first tensor
        for path, count in counters.negative:
            tally.note_negative(path, count)
        return tally

    def look(self, record: TensorRecord, values: torch.Tensor) -> None:
        """Check the values of one dense tensor of the checkpoint."""
        if record.role not in _ROLES or record.dtype in _NOT_COMPARED:
            return
        if not (values.is_floating_point() or values.is_complex()):
            return
        self.tensors += 1
        self.elements += values.numel()
        if values.numel() == 0:
            return
        values = distinct(values)
        lowest, highest = (one.item() for one in torch.aminmax(comparable(values)))  # NaN if any value is
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            self._note_not_finite(record, values)
        elif lowest < 0 and self._is_magnitude(record):
            self.note_negative(record.name, lowest)

    def note_negative(self, name: str, value: float) -> None:
        """Add a second moment, a variance or a step count that is below zero."""
        self.negative.add(f"{name} holds {value:.6g}", name)

    def check(self, ignored: Collection[str]) -> CheckResult:
        """The result of the check. Faults whose finding code is ignored do not fail it."""
        wrong = self._wrong_counts()
        figures = {
            "tensors": self.tensors,
            "elements": self.elements,
            "not_finite": self.not_finite.count,
            "negative": self.negative.count,
            "infinite_buffers": self.infinite_buffers,
            "wrong_counts": wrong.count,
        }
        faults: list[str] = []
        if self.not_finite and "N501" not in ignored:
            faults += self.not_finite.failures("not finite: ")
        if self.negative and "N502" not in ignored:
            faults += self.negative.failures("below zero: ")
        if wrong and "N502" not in ignored:
            faults += wrong.failures()
        if faults:
            return failed("numbers", faults, **figures)
        if not self.tensors:
            return skipped("numbers", "no readable tensor is known to be a weight or optimizer state", **figures)
        values = f"{amount(self.elements, 'value')} in {amount(self.tensors, 'tensor')}"
        parts = [f"{values} are finite, second moments and step counts not negative"]
        if self.not_finite or self.negative or wrong:
            parts = [f"{values} checked; faults of ignored findings are not counted"]
        if self.infinite_buffers:
            parts.append(f"{amount(self.infinite_buffers, 'buffer')} with infinities, like those of masks")
        return passed("numbers", "; ".join([*parts, *(group.advice for group in self._counters.uneven)]), **figures)

    def findings(self) -> tuple[Finding, ...]:
        """Findings O209, N501 and N502."""
        fix = (
            "nothing, if these were frozen or unused for a time; if not, their state is stale: take another checkpoint"
        )
        findings = [
            found("O209", f"{group}: {amount(len(group.behind), 'parameter')} behind the others", group.behind, fix)
            for group in self._counters.uneven
        ]
        if self.not_finite:
            message = f"NaN or Inf in {amount(self.not_finite.count, 'tensor')}: {self.not_finite}"
            fix = "resume from an earlier checkpoint: training cannot recover from these values"
            findings.append(found("N501", message, self.not_finite.names, fix))
        wrong = self._wrong_counts()
        if self.negative or wrong:
            parts = [f"below zero, which no optimizer writes: {self.negative}"] if self.negative else []
            fix = "resume from an earlier checkpoint, or without this optimizer state"
            where = [*self.negative.names, *(name for name, _ in self._counters.wrong)]
            findings.append(found("N502", "; ".join([*parts, *wrong.failures()]), where, fix))
        return tuple(findings)

    def _wrong_counts(self) -> Offenders:
        faults = Offenders()
        for name, text in self._counters.wrong:
            faults.add(f"{name} is {text}")
        return faults

    def _is_magnitude(self, record: TensorRecord) -> bool:
        key, algorithm = self._state_keys.get(record.name, ("", None))
        is_variance = record.role in {"model", "ema"} and record.name.rpartition(".")[2] == _VARIANCE
        return is_variance or key in magnitudes(algorithm)

    def _is_mask(self, name: str, values: torch.Tensor) -> bool:
        """Whether infinities are legitimate.

        They are in a mask that is added before a softmax: an untrained tensor with -inf, or a tensor that contains
        only 0 and -inf. They also are in observers of quantization that have seen no value, and in a best value so
        far. They are not in the running statistics of a normalization layer.
        """
        if is_buffer(name) or bool(values.isnan().any()):
            return False
        is_trained = name in self._trained or not self._trained
        if bool((values == math.inf).any()):
            is_unset = values.dim() == 0 or name.rpartition(".")[2] in _EXTREMES
            return is_unset and (name not in self._trained) and bool((values == values.reshape(-1)[0]).all())
        return not is_trained or name.rpartition(".")[2] in _EXTREMES or bool((values.isneginf() | (values == 0)).all())

    def _note_not_finite(self, record: TensorRecord, values: torch.Tensor) -> None:
        wide = comparable(values)
        nans = int(wide.isnan().sum())
        infinities = int(wide.isinf().sum())
        if record.role == "model" and self._is_mask(record.name, wide):
            self.infinite_buffers += 1
            return
        parts = [amount(nans, "NaN")] * bool(nans) + [f"{infinities:,} Inf"] * bool(infinities)
        text = f"{record.name} holds {' and '.join(parts)} in {amount(values.numel(), 'value')}"
        self.not_finite.add(text, record.name)


def comparable(values: torch.Tensor) -> torch.Tensor:
    """Convert values to a dtype that torch can compare on the CPU."""
    real = torch.view_as_real(values) if values.is_complex() else values
    return real.float() if real.is_floating_point() and real.element_size() == 1 else real

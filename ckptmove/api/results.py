"""The results of the API: values with their JSON document and a table for notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ckptmove.api.figures import shares
from ckptmove.checkpoint.summary import CheckpointSummary
from ckptmove.comparison import differences
from ckptmove.conversion.results import Converted
from ckptmove.model import OneLine
from ckptmove.proof import evidence
from ckptmove.text import amount, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from ckptmove.api.document import Json
    from ckptmove.api.figures import Expectation
    from ckptmove.checkpoint.inventory.outline import OutlineLine
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.errors import LimitExceeded, UnreadableInput
    from ckptmove.findings.fit import Fit
    from ckptmove.io.contracts import Traffic
    from ckptmove.model import Finding, Inventory, TensorRecord
    from ckptmove.moves import MovePlan

#: Exit codes of a command that answers yes and no.
_YES, _NO = 0, 1


class _Shown(ABC):
    """Base class of results: true if the answer is yes, and shown as a small table in a notebook."""

    __slots__ = ()

    @property
    @abstractmethod
    def ok(self) -> bool:
        """Whether the command would exit with 0."""

    def __bool__(self) -> bool:
        return self.ok

    def _repr_html_(self) -> str:
        from ckptmove.api.tables import html_table

        header, rows = self._table()
        return html_table(str(self), header, rows)

    @abstractmethod
    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        """The header and the rows."""


class _Copied(_Shown):
    """Base class of results that a room below returns without their document."""

    __slots__ = ()

    @classmethod
    def of(cls, result: Any, **more: object) -> Self:
        """A copy of a result, with the fields that only this class has."""
        return cls(**{one.name: getattr(result, one.name) for one in fields(result)}, **more)


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(OneLine, _Shown):
    """The result of ``inspect``.

    Attributes:
        inventory: content of the checkpoint.
        findings: problems of the checkpoint.
        outline: the tree, with ``outline=True``.
        plan: what ``convert`` would change for the device of ``expect``, or None.
        unchecked: with ``check=True``, paths of files that have no CRCs to compare.
        unreadable: errors of the files of a directory or an archive that cannot be read and were left out.
        expectation: the tensors that are not on the device of ``expect``, or None.
        fit: the memory of a training on the devices of ``fit``, or None.
        traffic: requests for a checkpoint at a URL, and the bytes that they read; None for a local one.
        summary: parameters, dtypes, epoch, step, learning rates and optimizers.
        pairings: parameters of each optimizer, matched with the tensors of the model.
    """

    inventory: Inventory
    findings: tuple[Finding, ...]
    outline: tuple[OutlineLine, ...] = ()
    plan: MovePlan | None = None
    unchecked: tuple[str, ...] = ()
    unreadable: tuple[UnreadableInput | LimitExceeded, ...] = ()
    expectation: Expectation | None = None
    fit: Fit | None = None
    traffic: Traffic | None = None
    summary: CheckpointSummary = field(default_factory=CheckpointSummary)
    pairings: tuple[Pairing, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Number of elements of the model's parameters: :class:`ckptmove.checkpoint.summary.CheckpointSummary`."""
        return self.summary.parameters

    @property
    def ok(self) -> bool:
        """Whether the command would exit with 0: no error was found, and every file was readable."""
        return not (self.fails(strict=False) or self.unreadable)

    @property
    def tensors(self) -> tuple[TensorRecord, ...]:
        """Its tensors, in the order of the file."""
        return self.inventory.tensors

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of its tensors, in the order of the file."""
        return tuple(dict.fromkeys(tensor.device for tensor in self.inventory.tensors))

    def fails(self, *, strict: bool) -> bool:
        """Whether findings fail it, with ``strict`` warnings too, or ``expect`` or ``fit`` is not met."""
        is_misplaced = self.expectation is not None and bool(self.expectation.misplaced)
        is_large = self.fit is not None and not self.fit.fits
        return evidence.fails_run(self.findings, strict=strict) or is_misplaced or is_large

    def to_dict(self) -> Json:
        """The document of ``ckptmove inspect --json``."""
        from ckptmove.api.document import checkpoint, envelope
        from ckptmove.api.failures import failure_of

        failures = [failure_of(error) for error in self.unreadable]
        code = max([_NO if self.fails(strict=False) else _YES, *(failure.exit_code for failure in failures)])
        entry = checkpoint(
            self.inventory,
            self.findings,
            tensors=self.inventory.tensors,
            summary=self.summary,
            pairings=self.pairings,
            expectation=self.expectation,
            fit=self.fit,
            unchecked=self.unchecked,
            traffic=self.traffic,
        )
        return envelope("inspect", code, failures) | {"checkpoints": [entry]}

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        """The findings; without any, the tensors by device and role."""
        if self.findings:
            rows = [(one.code, one.severity.value, one.message, one.fix) for one in self.findings]
            return ("code", "severity", "message", "fix"), rows
        found = shares(self.inventory.tensors)
        rows = [(one.device, one.role, f"{one.tensors:,}", size(one.nbytes)) for one in found]
        return ("device", "role", "tensors", "size"), rows

    def __str__(self) -> str:
        """The path, the number of tensors and the codes of findings, in one line."""
        held, codes = self.inventory, ", ".join(dict.fromkeys(finding.code for finding in self.findings))
        return f"{held.path}: {amount(len(held.tensors), 'tensor')}, {f'findings {codes}' if codes else 'no findings'}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConvertResult(Converted, _Copied):
    """The result of ``convert``.

    Attributes:
        path: the source, as the caller passed it.
    """

    path: str

    @property
    def ok(self) -> bool:
        """True: a conversion that fails raises an error."""
        return True

    def to_dict(self) -> Json:
        """The document of ``ckptmove convert --json``."""
        from ckptmove.api.document import conversion, envelope

        keys = conversion(self)
        return envelope("convert", _YES, ()) | keys | {"conversions": [{"path": self.path, **keys}]}

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        """The storages and options that change."""
        plan = self.plan
        rows = [(", ".join(one.names) or one.storage, one.source, one.target, one.reason) for one in plan.edits]
        rows += [(one.where, one.source, one.target, one.reason) for one in plan.flags]
        return ("name", "from", "to", "reason"), rows


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifyResult(evidence.Verdict, _Copied):
    """The result of ``verify``."""

    @property
    def ok(self) -> bool:
        """Whether the command would exit with 0: no check failed."""
        return self.passed

    def to_dict(self) -> Json:
        """The document of ``ckptmove verify --json``."""
        from ckptmove.api.document import envelope, result_to_json

        return envelope("verify", _YES if self.ok else _NO, ()) | {"results": [result_to_json(self)]}

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        """The checks."""
        return ("check", "status", "detail"), [(one.name, one.status, one.detail) for one in self.checks]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiffResult(differences.Differences, _Copied):
    """The result of ``diff``."""

    @property
    def ok(self) -> bool:
        """Whether the command would exit with 0: nothing differs."""
        return self.same

    def to_dict(self) -> Json:
        """The document of ``ckptmove diff --json``."""
        from ckptmove.api.document import difference, envelope

        return envelope("diff", _YES if self.ok else _NO, ()) | difference(self)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        """The differences."""
        rows = [(name, "added", "", "") for name in self.added] + [(name, "removed", "", "") for name in self.removed]
        rows += [(one.name, one.what, one.source, one.target) for one in self.changed]
        return ("name", "what", "from", "to"), rows

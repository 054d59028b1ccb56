"""The results of ``convert``, ``verify`` and ``diff``: values with their JSON document and a table for notebooks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ckptmove.api.shown import Shown
from ckptmove.comparison import differences
from ckptmove.conversion.results import Converted
from ckptmove.proof import evidence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from ckptmove.api.document import Json

#: Exit codes of a command that answers yes and no.
_YES, _NO = 0, 1


class _Copied(Shown):
    """Base class of results that a room below returns without their document."""

    __slots__ = ()

    @classmethod
    def of(cls, result: Any, **more: object) -> Self:
        """A copy of a result, with the fields that only this class has."""
        return cls(**{one.name: getattr(result, one.name) for one in fields(result)}, **more)


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

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
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

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
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

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        """The differences."""
        rows = [(name, "added", "", "") for name in self.added] + [(name, "removed", "", "") for name in self.removed]
        rows += [(one.name, one.what, one.source, one.target) for one in self.changed]
        return ("name", "what", "from", "to"), rows

"""Build check results, and convert them to JSON for the pipe between child process and parent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ckptmove.model import Finding, Severity
from ckptmove.proof.evidence import CheckResult

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The check of ``--case``.
CASE: Final = "case"
#: The check of ``--script``.
SCRIPT: Final = "script"
#: All checks, in the order of the report.
ORDER: Final = (
    "file", "keys", "restore", "options", "placement", "structure", "numbers", "step", "parity", "fresh", CASE, SCRIPT,
)  # fmt: skip
#: The parent makes these, without torch.
_OF_PARENT: Final = frozenset({"file", "placement", "structure"})
#: The checks of a checkpoint, without code of the user.
CHECKS: Final = tuple(name for name in ORDER if name not in {"keys", "options", CASE, SCRIPT})
#: Those that the child makes.
CHILD_CHECKS: Final = tuple(name for name in CHECKS if name not in _OF_PARENT)
#: The checks that the children make of a case on several ranks.
MESH_CHECKS: Final = tuple(name for name in ORDER if name not in {*_OF_PARENT, "numbers", SCRIPT})
#: Why most checks are skipped for a file that contains only weights.
NOTHING_TO_RESUME: Final = "there is no optimizer state: nothing to resume"
_NAMED: Final = 5


@dataclass(slots=True)
class Offenders:
    """A list of faults: the first few as text, the rest as a number."""

    count: int = 0  # number of faults
    first: list[str] = field(default_factory=list)  # texts of the first few
    place: int = 0  # index of the tensor that is being checked, by which the faults of several processes are sorted
    _places: list[int] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Add a fault."""
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(text)
            self._places.append(self.place)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, for another process."""
        return {"count": self.count, "first": list(zip(self._places, self.first, strict=True))}

    def join(self, other: Mapping[str, Any]) -> None:
        """Add the faults of another process, from the result of :meth:`to_json`."""
        both = sorted([*zip(self._places, self.first, strict=True), *other["first"]], key=lambda one: one[0])[:_NAMED]
        self.count += other["count"]
        self._places, self.first = [place for place, _ in both], [text for _, text in both]

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        return "; ".join(self.failures())

    def failures(self, prefix: str = "") -> list[str]:
        """The texts, and the number of the others; the prefix goes before the first one."""
        rest = self.count - len(self.first)
        more = [f"and {rest:,} more"] if rest else []
        return [f"{prefix}{self.first[0]}", *self.first[1:], *more] if self.first else []


class Joined:
    """Base of a data class of counts and faults, to which those of other processes are added."""

    __slots__: tuple[str, ...] = ()

    def _joined(self) -> dict[str, Any]:
        """The fields that take part: all but private ones."""
        return {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}

    def set_place(self, place: int) -> None:
        """Set the index of the tensor that is being checked."""
        for value in self._joined().values():
            if isinstance(value, Joined):
                value.set_place(place)
            elif isinstance(value, Offenders):
                value.place = place

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, for another process."""
        return {
            name: value.to_json() if isinstance(value, Joined | Offenders) else value
            for name, value in self._joined().items()
        }

    def join(self, other: Mapping[str, Any]) -> None:
        """Add counts and faults of another process, from the result of :meth:`to_json`."""
        for name, mine in self._joined().items():
            if isinstance(mine, Joined | Offenders):
                mine.join(other[name])
            elif isinstance(mine, dict):
                mine.update(other[name])  # a Counter adds
            else:
                setattr(self, name, mine + other[name])


def passed(name: str, detail: str, fix: str = "", /, **evidence: object) -> CheckResult:
    """Result of a check that passed; the fix is that of a note in the detail."""
    return CheckResult(name, "passed", _with_fix(detail, fix), tuple(evidence.items()), fix=fix)


def failed(name: str, failures: str | list[str], fix: str = "", /, **evidence: object) -> CheckResult:
    """Result of a check that failed."""
    parts = (failures,) if isinstance(failures, str) else tuple(failures)
    return CheckResult(name, "failed", _with_fix("; ".join(parts), fix), tuple(evidence.items()), parts, fix)


def skipped(name: str, reason: str, fix: str = "", /, **evidence: object) -> CheckResult:
    """Result of a check that was not made, with the reason."""
    return CheckResult(name, "skipped", _with_fix(reason, fix), tuple(evidence.items()), fix=fix)


def _with_fix(text: str, fix: str) -> str:
    return f"{text}; fix: {fix}" if fix else text


def check_to_json(check: CheckResult) -> dict[str, object]:
    """A check as JSON, for the parent process."""
    return {**check._asdict(), "evidence": dict(check.evidence)}


def check_from_json(value: Mapping[str, Any]) -> CheckResult:
    """Convert the JSON object of :func:`check_to_json` back."""
    return CheckResult(**{**value, "evidence": tuple(value["evidence"].items()), "failures": tuple(value["failures"])})


def finding_to_json(finding: Finding) -> dict[str, object]:
    """A finding as JSON, for ``--json`` and for the parent process."""
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.value,
        "message": finding.message,
        "where": list(finding.where),
        "fix": finding.fix,
    }


def finding_from_json(value: Mapping[str, Any]) -> Finding:
    """Convert the JSON object of :func:`finding_to_json` back."""
    return Finding(**{**value, "severity": Severity(value["severity"]), "where": tuple(value["where"])})

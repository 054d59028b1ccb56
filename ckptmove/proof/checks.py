"""Build check results, and count the faults that they name, also in several processes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

from ckptmove.proof.evidence import CheckResult

if TYPE_CHECKING:
    from collections.abc import Mapping
    from dataclasses import Field

    from typing_extensions import Self

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


#: Metadata of a field of a tally: of two dicts with one key, both have the same value for it.
UNITED: Final[Mapping[str, Any]] = {"join": lambda one, other: one | other}


class Tally:
    """Base of a data class of figures and faults, to which those of other processes are added.

    A field declares in its metadata how it is joined; else numbers and lists are added, sets united, and dicts joined
    by key. Private fields stay with their process.
    """

    __slots__: tuple[str, ...] = ()

    def set_index(self, index: int) -> None:
        """Set the index of the tensor or parameter that is being checked."""
        for one in _fields(cast("Any", type(self))):
            value = getattr(self, one.name)
            if isinstance(value, Tally):
                value.set_index(index)

    def join(self, other: Self) -> None:
        """Add the figures and faults of another process."""
        for one in _fields(cast("Any", type(self))):
            how, value = one.metadata.get("join", _added), getattr(self, one.name)
            setattr(self, one.name, how(value, getattr(other, one.name)))


@cache
def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return tuple(one for one in fields(kind) if not one.name.startswith("_"))


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, Tally):
        one.join(other)
        return one
    if isinstance(one, dict):
        for key, value in other.items():
            one[key] = _added(one[key], value) if key in one else value
        return one
    return one | other if isinstance(one, set) else one + other


@dataclass(slots=True)
class Offenders(Tally):
    """A list of faults: the first few as text, the rest as a number."""

    count: int = 0  # number of faults
    #: texts of the first few, each with the index of its tensor or parameter, by which those of processes are sorted.
    first: list[tuple[int, str]] = field(
        default_factory=list,
        metadata={"join": lambda one, other: sorted([*one, *other], key=lambda fault: fault[0])[:_NAMED]},
    )
    named: list[tuple[int, str]] = field(default_factory=list)  # names of tensors with a fault, likewise
    _index: int = 0  # that of the tensor or parameter that is being checked

    def set_index(self, index: int) -> None:
        """Set the index for the faults that follow."""
        self._index = index

    def add(self, text: str, name: str = "") -> None:
        """Add a fault, and the name of its tensor, if all names are needed."""
        self.count += 1
        self.named += [(self._index, name)] * bool(name)
        if len(self.first) < _NAMED:
            self.first.append((self._index, text))

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        return "; ".join(self.failures())

    @property
    def names(self) -> list[str]:
        """The names, in the order of the tensors."""
        return [name for _, name in sorted(self.named, key=lambda one: one[0])]

    def failures(self, prefix: str = "") -> list[str]:
        """The texts, and the number of the others; the prefix goes before the first one."""
        rest = self.count - len(self.first)
        more = [f"and {rest:,} more"] if rest else []
        return [f"{prefix}{self.first[0][1]}", *(text for _, text in self.first[1:]), *more] if self.first else []


class First(Offenders):
    """The first fault; later ones are dropped."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.first[0][1] if self.first else ""


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

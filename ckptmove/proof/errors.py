"""Errors of a proof: of the machine that runs it, and of a conversion that it refutes."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from ckptmove.errors import CkptMoveError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


class PackageMissing(UsageError, ImportError):
    """A command needs a package that is not installed.

    Attributes:
        package: name of the package, as pip takes it.
    """

    kind = "package-missing"

    def __init__(self, package: str, needs: str = "verify needs") -> None:
        super().__init__(f"{needs} {package}, which is not installed here")
        self.package = package


class TorchBroken(UsageError, ImportError):
    """torch cannot be imported. ``reason`` is the last line of the error, or the signal that ended the process."""

    kind = "torch-broken"

    def __init__(self, reason: str) -> None:
        super().__init__(f"torch is installed here but cannot be imported: {reason}")
        self.reason = reason


class ChildKilled(CkptMoveError):
    """A process of ``verify`` was killed from outside before it could answer.

    Attributes:
        number: number of the signal.
    """

    kind = "child-killed"

    def __init__(self, process: str, number: int) -> None:
        super().__init__(f"{process} was ended by {signal.Signals(number).name}")
        self.number = number


class ConversionDiffers(CkptMoveError):
    """A tensor that a conversion has written differs from its source, so that the output was not kept.

    Attributes:
        faults: the first differences, and the number of the others.
    """

    kind = "conversion-differs"

    def __init__(self, path: str, faults: Sequence[str]) -> None:
        super().__init__(f"the output differs from it, and was not kept: {'; '.join(faults)}", path=path)
        self.faults = tuple(faults)

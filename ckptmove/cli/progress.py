"""The progress bar: bytes done of a long conversion, on a terminal, on stderr.

Never shows itself for work that is done within about a second, and never off a terminal.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_PATIENCE_SECONDS: Final = 1.0


class ProgressBar:
    """A callback for :data:`ckptmove.contracts.Progress`, and the time during which its bar may be seen.

    Attributes:
        patience: seconds that pass before there is a bar.
    """

    __slots__ = ("_bar", "_began", "_enabled", "_task", "patience")

    def __init__(self, *, wanted: bool, patience: float = _PATIENCE_SECONDS) -> None:
        self.patience = patience
        self._enabled = wanted and sys.stderr.isatty()
        self._began = time.monotonic()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBar:  # noqa: PYI034  Self came with Python 3.11
        """Begin to wait."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show how far it is."""
        if not self._enabled or time.monotonic() - self._began < self.patience:
            return
        if self._bar is None:
            self._bar, self._task = _open_bar(total)
        if self._task is not None:
            self._bar.update(self._task, completed=done)


def _open_bar(total: int) -> tuple[RichProgress, TaskID]:
    from rich.console import Console  # noqa: PLC0415  only long work pays for it
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn  # noqa: PLC0415

    bar = Progress(
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    task = bar.add_task("copying", total=total)
    bar.start()
    return bar, task

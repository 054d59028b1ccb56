"""The progress bar: bytes done of a long conversion, on a terminal, on stderr.

Never shows itself for work that is done within about a second, and never off a terminal.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress

_PATIENCE_SECONDS: Final = 1.0


class ProgressBar:
    """A callback of :data:`ckptmove.contracts.Progress`, and the time during which its bar may be seen."""

    __slots__ = ("_bar", "_due", "_wanted")

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted and sys.stderr.isatty()
        self._due = time.monotonic() + _PATIENCE_SECONDS
        self._bar: Progress | None = None

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
        """Show how far it is, in bytes."""
        if self._bar is None:
            if not self._wanted or time.monotonic() < self._due:
                return
            self._bar = _open_bar(total)
        self._bar.update(self._bar.task_ids[0], completed=done)


def _open_bar(total: int) -> Progress:
    from rich import progress  # noqa: PLC0415  only long work pays for it
    from rich.console import Console  # noqa: PLC0415  likewise

    bar = progress.Progress(
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    bar.add_task("copying", total=total)
    bar.start()
    return bar

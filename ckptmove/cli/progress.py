"""The progress bar on stderr: bytes, or the current stage. Only on a terminal, and only after a second."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, ProgressColumn

_PATIENCE_SECONDS: Final = 1.0


class ProgressBar:
    """A progress bar; callable as :data:`ckptmove.io.contracts.Progress`, and a context manager that removes it."""

    __slots__ = ("_bar", "_due", "_has_stages", "_wanted")

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted and sys.stderr.isatty()
        self._due = time.monotonic() + _PATIENCE_SECONDS
        self._bar: Progress | None = None
        self._has_stages = False

    def __enter__(self) -> ProgressBar:
        """Start."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        self._close()

    def __call__(self, done: int, total: int) -> None:
        """Show the bytes done and the total."""
        if not self._is_due():
            return
        if self._bar is None:
            self._bar = _open_bar(_byte_columns(), "", total)
        self._bar.update(self._bar.task_ids[0], completed=done)

    def stage(self, name: str) -> None:
        """Show the name of a stage of unknown length."""
        if not self._is_due():
            return
        if self._bar is None or not self._has_stages:
            self._close()
            self._bar, self._has_stages = _open_bar(_stage_columns(), name, None), True
        self._bar.update(self._bar.task_ids[0], description=name)

    def _is_due(self) -> bool:
        return self._wanted and time.monotonic() >= self._due

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _byte_columns() -> list[ProgressColumn]:
    from rich import progress

    return [
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    ]


def _stage_columns() -> list[ProgressColumn]:
    from rich import progress

    return [progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.TimeElapsedColumn()]


def _open_bar(columns: list[ProgressColumn], name: str, total: int | None) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(*columns, console=Console(file=sys.stderr), transient=True)
    bar.add_task(name, total=total)
    bar.start()
    return bar

"""The error of a run under torchrun in which another rank failed."""

from __future__ import annotations

from ckptmove.errors import CkptMoveError


class RankFailed(CkptMoveError):
    """An error of another rank, which ends the run of all ranks.

    Attributes:
        exit_code: exit code of the command.
    """

    kind = "rank-failed"

    def __init__(self, rank: int, message: str, *, path: str | None, hint: str, exit_code: int) -> None:
        super().__init__(f"rank {rank}: {message}", path=path)
        self.hint = hint
        self.exit_code = exit_code

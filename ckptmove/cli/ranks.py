"""The command ``verify`` in the processes that torchrun starts: rank 0 writes the report, and all exit alike."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from ckptmove.cli.signals import Terminated
from ckptmove.errors import UsageError
from ckptmove.io.remote.address import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptmove.io.contracts import Progress
    from ckptmove.proof.evidence import Verdict
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.training.mesh.run import Rank


class Verify(Protocol):
    """Verifies a checkpoint, as :func:`ckptmove.training.run.verify_checkpoint`."""

    def __call__(
        self, request: VerifyRequest, *, progress: Progress | None, stage: Callable[[str], None] | None
    ) -> Verdict:
        """The verdict."""
        ...


def own_rank() -> Rank | None:
    """The rank of this process; None if torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    from ckptmove.training.mesh.run import this_rank  # for torchrun only

    return this_rank()


def require_one(requests: Sequence[VerifyRequest], *, fix: bool) -> None:
    """Raise UsageError for what ``verify`` does not do under torchrun: several checkpoints, a URL, fixes."""
    if len(requests) > 1:
        raise UsageError(f"under torchrun, verify takes one checkpoint, not {len(requests)}")
    if isinstance(requests[0].path, Address) or requests[0].download is not None:
        raise UsageError("under torchrun, verify takes a local path")
    if fix:
        raise UsageError("--fix cannot be used under torchrun")


def on_ranks(rank: Rank) -> Verify:
    """Verify with all ranks. If torchrun ends this process because another rank was killed, the error names that."""

    def verify(request: VerifyRequest, *, progress: Progress | None, stage: Callable[[str], None] | None) -> Verdict:
        try:
            return rank.verify(request, progress, stage)
        except Terminated as error:
            killed = rank.killed_rank()
            if killed is None:
                raise
            raise killed from error

    return verify

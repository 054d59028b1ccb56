"""The files of a verification, open, with what every check has to know about them. Without torch."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.pairing import pair_all
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.sampling import choose_sample
from ckptmove.proof.step.tensor_sizes import limit_tensor_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import OptimizerRecord
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.proof.sampling import Sample


class Opened(NamedTuple):
    """The open files of a verification. A fork of the process that has opened them needs no other."""

    checkpoint: OpenCheckpoint
    original: OpenCheckpoint | None  # that of `--against`, or None
    nbytes: int  # size of all files
    pairings: list[tuple[OptimizerRecord, Pairing]]  # its optimizers, each with its parameters
    sample: Sample | None  # the tensors and parameters to check; None for all


@contextmanager
def open_files(request: VerifyRequest) -> Iterator[Opened]:
    """Open the files of a request.

    Raises:
        LimitExceeded: tensors take far more memory than the files have bytes.
        SourceChanged: at the end, a file was written, replaced or removed: a process may have read parts of both.
    """
    limits = request.limits
    with ExitStack() as stack:
        original = None
        if request.against is not None:
            original = stack.enter_context(open_checkpoint(request.against, limits, keep_trees=True))
        checkpoint = stack.enter_context(
            open_checkpoint(request.path, limits, keep_trees=True, exclude=request.exclude)
        )
        files = [one for one in (original, checkpoint) if one is not None]
        for one in files:
            limit_tensor_sizes(one, limits)
        inventory = checkpoint.inventory
        paired = pair_all(inventory, None if original is None else original.inventory)
        pairings = list(zip(inventory.optimizers, paired, strict=True))
        sample = choose_sample(inventory, pairings, request.sample, request.seed) if request.sample else None
        yield Opened(checkpoint, original, sum(one.nbytes for one in files), pairings, sample)
        for one in files:
            one.require_unchanged()

"""The options of ``verify``."""

from __future__ import annotations

from typing import NamedTuple

from ckptmove.limits import Limits
from ckptmove.proof.source_edits import Edit  # noqa: TC001  # the codec reads the annotations
from ckptmove.torch_facts.optimizers import BY_NAME


class VerifyRequest(NamedTuple):
    """The options of ``verify`` for one checkpoint."""

    path: str  # a file, a directory or an archive
    #: folders in the directory that are checkpoints of their own, by their paths in it: they are not read.
    exclude: tuple[str, ...] = ()
    to: str | None = None  # target device, or None for the device of most of the model
    against: str | None = None  # checkpoint whose values must be equal, or None
    #: optimizer class to step with: the name of one of ``torch.optim``, or ``pkg.mod:CLASS``; None to detect it.
    optimizer: str | None = None
    require_device: bool = False  # whether a simulated target is a failure
    seed: int = 0  # seed of the gradients and of the sample
    ignore: tuple[str, ...] = ()  # codes of findings that are not failures
    keep: tuple[str, ...] = ()  # globs of tensor names that may stay on another device
    #: number of devices of the target machine, or None for as many as ``to`` needs, or else the file.
    devices: int | None = None
    case: str | None = None  # the user's function that returns a case, `FILE.py:FUNC` or `pkg.mod:FUNC`, or None
    script: str | None = None  # the user's training script, or None
    script_args: tuple[str, ...] = ()  # command-line arguments of the script
    #: edits of the user's files, with which the case or the script runs. They are not written.
    edits: tuple[Edit, ...] = ()
    timeout: float | None = None  # longest time of the child process in seconds, or None
    download: str | None = None  # local path of the copy, if `path` is a URL, or None
    sample: int | None = None  # number of parameters of each optimizer, and of other tensors, to check; None for all
    #: largest number of processes that make the checks with torch, or None for as many as there are cores; for one of
    #: them, their number.
    jobs: int | None = None
    rank: int = 0  # index of a process among them
    limits: Limits = Limits()  # resource limits for reading each file
    nbytes: int = 0  # size of all files of the checkpoint and of `against`; it bounds the memory of the child process
    deadline: float | None = None  # when the script has to end, in seconds since the epoch; None for no limit
    in_python: bool = False  # whether the texts name arguments of `ckptmove.verify` in place of options

    @property
    def runs_training(self) -> bool:
        """Whether the child process runs the user's own training."""
        return self.case is not None or self.script is not None

    @property
    def runs_own_code(self) -> bool:
        """Whether the child process runs any code of the user: a training or an optimizer."""
        return self.runs_training or not (self.optimizer is None or self.optimizer in BY_NAME)

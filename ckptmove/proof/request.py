"""The options of ``verify``, and their JSON for the child process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ckptmove.limits import Limits
from ckptmove.moves import Remap
from ckptmove.proof.source_edits import Edit
from ckptmove.torch_facts.optimizers import BY_NAME


class VerifyRequest(NamedTuple):
    """The options of ``verify`` for one checkpoint.

    Attributes:
        path: a file, a directory or an archive.
        exclude: folders in the directory that are checkpoints of their own, by their paths in it: they are not read.
        to: target device, or None for the device of most of the model.
        against: checkpoint whose values must be equal, or None.
        remap: how the checkpoint was remapped from ``against``.
        optimizer: optimizer class to step with: the name of one of ``torch.optim``, or ``pkg.mod:CLASS``; None to
            detect it.
        require_device: whether a simulated target is a failure.
        seed: seed of the gradients and of the sample.
        ignore: codes of findings that are not failures.
        keep: globs of tensor names that may stay on another device.
        devices: number of devices of the target machine, or None for as many as ``to`` needs, or else the file.
        case: the user's function that returns a case, ``FILE.py:FUNC`` or ``pkg.mod:FUNC``, or None.
        script: the user's training script, or None.
        script_args: command-line arguments of the script.
        edits: edits of the user's files, with which the case or the script runs. They are not written.
        timeout: longest time of the child process in seconds, or None.
        download: local path of the copy, if ``path`` is a URL, or None.
        sample: number of parameters of each optimizer, and of other tensors, to check; None for all.
        jobs: largest number of processes that make the checks with torch, or None for as many as there are cores; for
            one of them, their number.
        rank: index of a process among them.
        limits: resource limits for reading each file.
        nbytes: size of all files of the checkpoint and of ``against``; it bounds the memory of the child process.
        deadline: when the script has to end, in seconds since the epoch; None for no limit.
        in_python: whether the texts name arguments of ``ckptmove.verify`` in place of options.
    """

    path: str
    exclude: tuple[str, ...] = ()
    to: str | None = None
    against: str | None = None
    remap: Remap = Remap()
    optimizer: str | None = None
    require_device: bool = False
    seed: int = 0
    ignore: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    devices: int | None = None
    case: str | None = None
    script: str | None = None
    script_args: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    timeout: float | None = None
    download: str | None = None
    sample: int | None = None
    jobs: int | None = None
    rank: int = 0
    limits: Limits = Limits()
    nbytes: int = 0
    deadline: float | None = None
    in_python: bool = False

    @property
    def runs_training(self) -> bool:
        """Whether the child process runs the user's own training."""
        return self.case is not None or self.script is not None

    @property
    def runs_own_code(self) -> bool:
        """Whether the child process runs any code of the user: a training or an optimizer."""
        return self.runs_training or not (self.optimizer is None or self.optimizer in BY_NAME)

    def to_json(self) -> str:
        """Convert to a JSON document."""
        return json.dumps({**self._asdict(), "remap": self.remap._asdict(), "limits": self.limits._asdict()})

    @classmethod
    def from_json(cls, text: str) -> VerifyRequest:
        """Parse the result of :meth:`to_json`."""
        facts = json.loads(text)
        changed = {
            "exclude": tuple(facts["exclude"]),
            "keep": tuple(facts["keep"]),
            "ignore": tuple(facts["ignore"]),
            "edits": tuple(Edit(*one) for one in facts["edits"]),
            "script_args": tuple(facts["script_args"]),
            "remap": Remap(**{name: _frozen(value) for name, value in facts["remap"].items()}),
            "limits": Limits(**facts["limits"]),
        }
        return cls(**{**facts, **changed})


def _frozen(value: Any) -> Any:
    """A value with tuples in place of the lists that JSON has."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value

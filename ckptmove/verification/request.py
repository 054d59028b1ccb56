"""The options of one ``verify`` run, and their JSON form for the child process."""

from __future__ import annotations

import json
from typing import NamedTuple

from ckptmove.limits import Limits


class VerifyRequest(NamedTuple):
    """Options of one ``verify`` run.

    Attributes:
        path: checkpoint file or directory.
        to: device tag of the target; None for the device of most of the model.
        against: path of the original to compare values with, or None.
        optimizer: optimizer class to use instead of the detected one: a name of ``torch.optim`` or ``pkg.mod:CLASS``.
        require_device: whether a simulated target fails the step.
        seed: seed of the gradients.
        ignore: finding codes that fail nothing.
        keep: globs of tensor names that may stay on their device.
        devices: number of devices of the target machine; None for as many as ``to`` and the file name.
        case: the user's function that returns a case, ``FILE.py:FUNC`` or ``pkg.mod:FUNC``, or None.
        timeout: seconds that the child may run, or None for no limit.
        sample: number of parameters of each optimizer, and of other tensors, to check; None for all.
        limits: resource limits for reading each file.
        nbytes: total size of the files, including the original's; the memory limit of the child depends on it.
    """

    path: str
    to: str | None = None
    against: str | None = None
    optimizer: str | None = None
    require_device: bool = False
    seed: int = 0
    ignore: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    devices: int | None = None
    case: str | None = None
    timeout: float | None = None
    sample: int | None = None
    limits: Limits = Limits()
    nbytes: int = 0

    def to_json(self) -> str:
        """Convert to a JSON document."""
        return json.dumps({**self._asdict(), "limits": self.limits._asdict()})

    @classmethod
    def from_json(cls, text: str) -> VerifyRequest:
        """Read the document of :meth:`to_json`."""
        facts = json.loads(text)
        globs, codes = tuple(facts["keep"]), tuple(facts["ignore"])
        return cls(**{**facts, "ignore": codes, "keep": globs, "limits": Limits(**facts["limits"])})

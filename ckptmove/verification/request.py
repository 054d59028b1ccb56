"""What ``verify`` is asked, and how the question reaches the child process.

Never opens a file and never imports torch.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from ckptmove.limits import Limits


class VerifyRequest(NamedTuple):
    """What the user asked ``verify`` for.

    Attributes:
        path: a checkpoint: a file or a directory.
        to: tag of the target, or None for the device where most of the model lies.
        against: the original that the values must equal, or None.
        optimizer: class to use in place of the one that the keys point to, of ``torch.optim`` by its name or any other
            as ``pkg.mod:CLASS``, or None.
        require_device: whether a simulated target is a failure.
        seed: of the gradient.
        ignore: codes of findings that are no failure.
        keep: globs of tensor names that may lie where they are.
        devices: how many devices the target machine has, or None for as many as ``to`` and the file name.
        case: the user's function that returns a case, ``FILE.py:FUNC`` or ``pkg.mod:FUNC``, or None.
        timeout: seconds that the child may take, or None for as many as it needs.
        sample: how many parameters of each optimizer, and how many other tensors, are looked at; None for all.
        limits: what each file may ask for.
        nbytes: size of all files, of the original's too: the memory of the child follows it.
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
        """The request as one JSON document."""
        return json.dumps({**self._asdict(), "limits": self.limits._asdict()})

    @classmethod
    def from_json(cls, text: str) -> VerifyRequest:
        """The request of a document that :meth:`to_json` made."""
        facts = json.loads(text)
        globs, codes = tuple(facts["keep"]), tuple(facts["ignore"])
        return cls(**{**facts, "ignore": codes, "keep": globs, "limits": Limits(**facts["limits"])})

"""Assertions for the tests of those who train: that a checkpoint resumes.

Never prints, and never passes where nothing was proven, unless it is told to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove import api
from ckptmove.cli.render.verification import brief_line
from ckptmove.errors import CkptMoveError
from ckptmove.model import Severity

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from ckptmove.case import Case
    from ckptmove.verification.evidence import VerifyResult


def assert_resumes(  # the options of verify that change its verdict, each by name
    path: str | os.PathLike[str],
    *,
    to: str | None = None,
    against: str | os.PathLike[str] | None = None,
    optimizer: str | None = None,
    devices: int | None = None,
    case: str | Callable[..., Case] | None = None,
    keep: Sequence[str] = (),
    ignore: Sequence[str] = (),
    require_device: bool = False,
    require_proof: bool = True,
    strict: bool = False,
) -> VerifyResult:
    """Verify a checkpoint, and fail the test that calls this where it does not resume.

    Args:
        path: the checkpoint.
        to: the target; by default the device where the model lies.
        against: the original that the values must equal.
        optimizer: class of the optimizer in place of the one that the keys point to.
        devices: how many devices the target machine has; by default as many as ``to`` and the file name.
        case: a function that returns a :class:`ckptmove.Case`, or its name, ``FILE.py:FUNC`` or ``pkg.mod:FUNC``.
        keep: globs of tensor names that may lie where they are.
        ignore: codes of findings that are no failure.
        require_device: whether a simulated target is a failure.
        require_proof: whether it is a failure, too, where no step could be made: without optimizer state for example.
        strict: as ``--strict`` of every command: warnings are a failure too, and what is not proven.

    Returns:
        The verdict, for whoever wants its figures.

    Raises:
        AssertionError: it does not resume; every check that failed is in the message, and with ``strict`` every
            warning.
        CkptMoveError: as :func:`ckptmove.api.verify`.
    """
    __tracebackhide__ = True
    try:
        result = api.verify(
            path,
            to=to,
            against=against,
            optimizer=optimizer,
            devices=devices,
            case=case,
            keep=keep,
            ignore=ignore,
            require_device=require_device,
        )
    except CkptMoveError as error:
        raise error.with_traceback(None) from None  # where in here it was seen says nothing to the test
    if result.fails(strict=strict) or (require_proof and not result.proven):
        failed = [f"  {check.name}: {check.detail}" for check in result.checks if check.status == "failed"]
        warnings = [one for one in result.findings if strict and one.severity is Severity.WARNING]
        failed += [f"  {one.code}: {one.message}" for one in warnings]
        raise AssertionError("\n".join([brief_line(result, strict=strict), *failed]))
    return result

"""Assert in a test that a checkpoint resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptmove.api import functions as api
from ckptmove.cli.render.verification import brief_line
from ckptmove.errors import CkptMoveError
from ckptmove.model import Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptmove.api.arguments import Device, FilePath
    from ckptmove.case import Case
    from ckptmove.proof.evidence import Verdict


def assert_resumes(  # the options of verify that change its verdict, each by name
    path: FilePath,
    *,
    to: Device | None = None,
    against: FilePath | None = None,
    optimizer: str | type[Any] | None = None,
    devices: int | None = None,
    case: str | Callable[..., Case] | None = None,
    script: FilePath | None = None,
    script_args: str | Sequence[str] = (),
    keep: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    require_device: bool = False,
    require_proof: bool = True,
    strict: bool = False,
) -> Verdict:
    """Verify a checkpoint, and fail the calling test if it does not resume.

    Args:
        path: the checkpoint.
        to: target device (default: the device of the model).
        against: checkpoint whose values must be equal.
        optimizer: optimizer class to step with (default: detected).
        devices: number of devices of the target machine (default: as many as ``to`` needs, or else the file).
        case: a function that returns a :class:`ckptmove.Case`, or its name, ``FILE.py:FUNC`` or ``pkg.mod:FUNC``.
        script: training script to run up to its first optimizer step after it loaded the checkpoint.
        script_args: its command-line arguments.
        keep: globs of tensor names that may stay on another device.
        ignore: codes of findings that are not failures.
        require_device: whether a simulated target is a failure.
        require_proof: whether an unproven resume is a failure, for example of a file without optimizer state.
        strict: as ``--strict``: whether warnings, and an unproven resume, are failures.

    Returns:
        The verdict, with its evidence.

    Raises:
        AssertionError: if it does not resume. The message has every failed check, and with ``strict`` every warning.
        CkptMoveError: as :func:`ckptmove.verify`.
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
            script=script,
            script_args=script_args,
            keep=keep,
            ignore=ignore,
            require_device=require_device,
        )
    except CkptMoveError as error:
        raise error.with_traceback(None) from None  # frames of this package do not help the test
    if result.fails(strict=strict) or (require_proof and not result.proven):
        failed = [f"  {check.name}: {check.detail}" for check in result.checks if check.status == "failed"]
        warnings = [one for one in result.findings if strict and one.severity is Severity.WARNING]
        failed += [f"  {one.code}: {one.message}" for one in warnings]
        raise AssertionError("\n".join([brief_line(result, strict=strict), *failed]))
    return result

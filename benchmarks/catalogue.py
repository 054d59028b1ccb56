"""Two catalogues and one table: faults made on purpose that are found, and healthy files that raise no alarm.

    python benchmarks/catalogue.py

Every checkpoint is of real training, and verified as `ckptmove verify` does, but in this process. What is not found and
every false alarm is listed below the table, and makes the exit code 1.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from faults import FAULTS
from trained import LAYOUTS, OF_OTHERS, OPTIMIZERS, Training, device_by_path

from ckptmove.model import Severity
from ckptmove.verification import child, run, worker
from ckptmove.verification.checks import CHECKS
from ckptmove.verification.place import find_site
from ckptmove.verification.request import VerifyRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults import Fault

    from ckptmove.evidence import VerifyResult

#: Those that a step can be made for: torch before 2.10 simulates no device.
TARGETS = tuple(target for target in ("cpu", "cuda:0", "mps") if not find_site(target).reason)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Healthy:
    """A checkpoint with nothing wrong.

    Attributes:
        optimizer: class in ``torch.optim``, or another one, which is named for the step.
        layout: how it is saved.
        dtype: of the model, and so of its moments.
        target: where it was trained, and is to go on.
    """

    optimizer: str
    layout: str
    dtype: str
    target: str

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.layout}, {self.dtype}, {self.target}"

    def make(self, folder: Path) -> str:
        """The file or directory."""
        tree = Training(self.optimizer, getattr(torch, self.dtype)).train(3).tree()
        return LAYOUTS[self.layout](tree, folder, device_by_path(self.target, self.optimizer))


HEALTHY = tuple(itertools.starmap(Healthy, itertools.product((*OPTIMIZERS, *OF_OTHERS), LAYOUTS, DTYPES, TARGETS)))


def verdict(path: str, **options: Any) -> VerifyResult:
    """What ``verify`` says, its steps made in this process."""

    @contextmanager
    def started(_command: object, request: str) -> Iterator[list[dict[str, object]]]:
        messages: list[dict[str, object]] = []
        worker.run(VerifyRequest.from_json(request), messages.append)
        yield messages

    def collected(messages: list[dict[str, object]], _stage: object, *_wanted: object) -> child.Answers:
        answers = child.Answers()
        for message in messages:
            child._take(json.dumps(message), answers)  # noqa: SLF001  # as the process's own lines are taken
        return answers

    with patch.object(run, "child", started), patch.object(run, "collect", collected), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of the state that it restores
        return run.verify_checkpoint(VerifyRequest(path=path, **options))


def is_found(fault: Fault, folder: Path) -> bool:
    """Whether a fault is caught by what has to catch it."""
    path, options = fault.make(folder)
    result = verdict(path, **options)
    if fault.caught_by in CHECKS:
        return any(check.name == fault.caught_by and check.status == "failed" for check in result.checks)
    return any(finding.code == fault.caught_by for finding in result.findings)


def alarms(healthy: Healthy, folder: Path) -> list[str]:
    """What is said against a healthy checkpoint."""
    named = {"optimizer": healthy.optimizer} if healthy.optimizer in OF_OTHERS else {}
    result = verdict(healthy.make(folder), to=healthy.target, **named)
    failed = [f"{check.name}: {check.detail}" for check in result.checks if check.status == "failed"]
    loud = [f"{one.code}: {one.message}" for one in result.findings if one.severity is not Severity.INFO]
    return [*failed, *loud, *["the resume is not proven"] * (not result.proven)]


def main() -> int:
    """Print the table; returns the exit code."""
    missed: list[str] = []
    false: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for index, fault in enumerate(FAULTS):
            if is_found(fault, Path(scratch) / f"fault{index}") == bool(fault.unseen):
                missed.append(f"{'found after all' if fault.unseen else 'not found'}: {fault.name} ({fault.caught_by})")
        for index, healthy in enumerate(HEALTHY):
            false += [f"{healthy}: {text}" for text in alarms(healthy, Path(scratch) / f"healthy{index}")]
    unseen = [fault for fault in FAULTS if fault.unseen]
    found = len(FAULTS) - len(unseen) - len(missed)
    print("| catalogue | checkpoints | found | false alarms |")
    print("|---|---:|---:|---:|")
    print(f"| faults made on purpose | {len(FAULTS)} | {found} of {len(FAULTS)} | |")
    print(f"| healthy: optimizer, layout, dtype, device | {len(HEALTHY)} | | {len(false)} |")
    print(f"\nwith torch {torch.__version__}, steps on {', '.join(TARGETS)}")
    print("\nNot told by a file alone:")
    print("\n".join(f"* {fault.name}: {fault.unseen}" for fault in unseen))
    print("\n".join(["", *missed, *false]))
    return 1 if missed or false else 0


if __name__ == "__main__":
    sys.exit(main())

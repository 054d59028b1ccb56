"""Verify checkpoints with injected faults, which must be found, and healthy ones, which must raise no alarm.

    python benchmarks/catalogue.py

Every checkpoint comes from a real training run. It is verified as `ckptmove verify` does, but in this process. Faults
that are not found and false alarms are listed below the table, and make the exit code 1.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from unittest.mock import patch

import torch
from faults import FAULTS
from situations import SITUATIONS
from trained import (
    EXAMPLES,
    LAYOUTS,
    LOW_BIT,
    OF_OTHERS,
    OPTIMIZERS,
    Training,
    device_by_path,
    example_tree,
    low_bit_tree,
)

import ckptmove
from ckptmove.api.functions import convert
from ckptmove.model import Severity
from ckptmove.proof.checks import CASE, CHECKS
from ckptmove.proof.codec import loads
from ckptmove.proof.place import find_site
from ckptmove.proof.processes import child
from ckptmove.proof.processes.messages import Message, read_message
from ckptmove.proof.request import VerifyRequest
from ckptmove.training import run, worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from faults import Fault

    from ckptmove.model import Finding
    from ckptmove.proof.evidence import Verdict

#: Devices that a step can run on: torch before 2.10 cannot simulate one.
TARGETS = tuple(target for target in ("cpu", "cuda:0", "mps") if not find_site(target).reason)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Healthy:
    """A checkpoint with nothing wrong.

    Attributes:
        optimizer: class in ``torch.optim``, or in another library, which is then passed to ``--optimizer``.
        layout: key of ``LAYOUTS``.
        dtype: dtype of the model, and of its moments.
        target: device of the training run, and of the resume.
        tensors: options of the optimizer that are tensors, which torch leaves on the CPU.
    """

    optimizer: str
    layout: str
    dtype: str
    target: str
    tensors: tuple[str, ...] = ()

    @property
    def is_low_bit(self) -> bool:
        """Whether the optimizer keeps its moments in 8 or 4 bits."""
        return self.optimizer in LOW_BIT

    def __str__(self) -> str:
        options = "".join(f", tensor {name}" for name in self.tensors)
        return f"{self.optimizer}, {self.layout}, {self.dtype}, {self.target}{options}"

    def make(self, folder: Path) -> str:
        """Write the checkpoint; return its path."""
        if self.is_low_bit:
            # Without an accelerator, only a conversion makes a wrapper subclass with its device.
            tree = low_bit_tree(self.optimizer, getattr(torch, self.dtype))
            path = LAYOUTS[self.layout](tree, folder, lambda _: "cpu")
            return path if self.target == "cpu" else str(convert(path, to=self.target).output)
        options: dict[str, Any] = {name: _TENSORS[name]() for name in self.tensors}
        tree = Training(self.optimizer, getattr(torch, self.dtype), **options).train(3).tree()
        return LAYOUTS[self.layout](tree, folder, device_by_path(self.target, self.optimizer))


_TENSORS: dict[str, Callable[[], Any]] = {
    "lr": lambda: torch.tensor(1e-3),
    "betas": lambda: (torch.tensor(0.9), torch.tensor(0.99)),
}
#: Layouts of files. A distributed checkpoint stores a tuple of tensors as an object: its values are not proven.
_FILES = tuple(layout for layout in LAYOUTS if layout != "distributed")
#: Layouts whose wrapper subclasses torch.load returns.
_LOADED = ("plain", "lightning", "hf-trainer")
HEALTHY = tuple(
    itertools.starmap(
        Healthy,
        [
            *itertools.product((*OPTIMIZERS, *OF_OTHERS), LAYOUTS, DTYPES, TARGETS),
            *itertools.product(LOW_BIT, _LOADED, DTYPES, TARGETS),
            *itertools.product(OPTIMIZERS, LAYOUTS, DTYPES[:1], TARGETS, [("lr",)]),
            *itertools.product(("Adam", "AdamW"), _FILES, DTYPES[:1], TARGETS, [("lr", "betas")]),
        ],
    )
)
#: A correct finding for torchao's subclasses: torch.load accepts them only after torchao is imported.
_NEEDS_IMPORT = "S701"


@dataclass(frozen=True)
class OneOfSeveral:
    """A healthy run on one GPU of several. The file has the index of this GPU, and an RNG state for each GPU.

    Attributes:
        optimizer: class in ``torch.optim``.
        layout: key of ``LAYOUTS``.
        device: device of the training run.
        states: number of per-device RNG states that ``torch.cuda.get_rng_state_all`` returned.
    """

    optimizer: str
    layout: str
    device: str
    states: int

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.layout}, {self.device}, {self.states} RNG states"

    def make(self, folder: Path) -> str:
        """Write the checkpoint; return its path."""
        tree = Training(self.optimizer).train(3).tree()
        tree["rng"]["cuda"] = [torch.zeros(16, dtype=torch.uint8) for _ in range(self.states)]
        return LAYOUTS[self.layout](tree, folder, device_by_path(self.device, self.optimizer))


#: Only in the layouts that keep RNG states.
ON_ONE_OF_SEVERAL = tuple(
    itertools.starmap(
        OneOfSeveral,
        itertools.product(("AdamW", "SGD", "ASGD"), ("plain", "lightning"), ("cuda:1", "cuda:3"), (1, 4, 8)),
    )
)


@dataclass(frozen=True)
class HealthyCase:
    """A checkpoint of a script in `examples/`, verified with the script's own case.

    Attributes:
        example: name of the script.
        target: device of the training run, and of the resume.
    """

    example: str
    target: str

    def __str__(self) -> str:
        return f"{self.example}, {self.target}"

    def make(self, folder: Path) -> str:
        """Write the checkpoint; return its path."""
        return LAYOUTS["plain"](example_tree(self.example), folder, device_by_path(self.target, "AdamW"))

    @property
    def case(self) -> str:
        """The value of ``--case``."""
        return f"{EXAMPLES / self.example}.py:case"


@dataclass(frozen=True)
class Situation:
    """A healthy checkpoint that looks like a fault, saved on the CPU.

    Attributes:
        name: key of ``SITUATIONS``.
        target: device of the resume.
    """

    name: str
    target: str

    def __str__(self) -> str:
        return f"{self.name}, {self.target}"

    def make(self, folder: Path) -> str:
        """Write the checkpoint; return its path."""
        return LAYOUTS["plain"](SITUATIONS[self.name](), folder, lambda _: "cpu")


AnyHealthy: TypeAlias = "Healthy | OneOfSeveral | HealthyCase | Situation"

HEALTHY_CASES = tuple(itertools.starmap(HealthyCase, itertools.product(("gan", "lightning_module"), TARGETS)))


HEALTHY_SITUATIONS = tuple(itertools.starmap(Situation, itertools.product(SITUATIONS, TARGETS)))


def verdict(path: str, **options: Any) -> Verdict:
    """The result of ``verify``, with its steps in this process."""

    @contextmanager
    def started(_command: object, request: str, _variables: object = None) -> Iterator[SimpleNamespace]:
        messages: list[Message] = []
        worker.run(loads(VerifyRequest, request), messages.append)
        answers = child.Answers()
        for message in messages:
            answers.take(cast("Message", read_message(message.line())))
        yield SimpleNamespace(collect=lambda *_: answers)

    with patch.object(run, "child", started), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the restored state
        return run.verify_checkpoint(VerifyRequest(path=path, **options))


def is_found(fault: Fault, folder: Path) -> bool:
    """Whether a fault is found by its finding or check."""
    path, options = fault.make(folder)
    result = verdict(path, **options)
    if fault.caught_by in {*CHECKS, CASE}:
        return any(check.name == fault.caught_by and check.status == "failed" for check in result.checks)
    return any(finding.code == fault.caught_by for finding in result.findings)


def alarms(healthy: AnyHealthy, folder: Path) -> list[str]:
    """False alarms for a healthy checkpoint."""
    path = healthy.make(folder)
    if isinstance(healthy, HealthyCase):
        result = verdict(path, to=healthy.target, case=healthy.case)
        stepped = {check.name: dict(check.evidence) for check in result.checks}[CASE].get("proven") is True
        return [*_against(result), *["the case is not proven"] * (not stepped)]
    if isinstance(healthy, Situation):
        return _against(verdict(path, to=healthy.target))
    if isinstance(healthy, Healthy):
        named: dict[str, Any] = {"optimizer": healthy.optimizer} if ":" in healthy.optimizer else {}
        with torch.compiler.set_stance("force_eager") if named else nullcontext():
            raised = _against(verdict(path, to=healthy.target, **named))
        needs_import = healthy.optimizer.startswith("torchao.")
        return [text for text in raised if not (needs_import and text.startswith(_NEEDS_IMPORT))]
    found = [finding for count in (None, 8) for finding in ckptmove.inspect(path, device_count=count).findings]
    asked: tuple[dict[str, Any], ...] = ({}, {"devices": 8}, {"to": healthy.device})
    raised = [text for options in asked for text in _against(verdict(path, **options))] if TARGETS != ("cpu",) else []
    return [*_loud(found), *raised]


def _against(result: Verdict) -> list[str]:
    failed = [f"{check.name}: {check.detail}" for check in result.checks if check.status == "failed"]
    return [*failed, *_loud(result.findings), *["the resume is not proven"] * (not result.proven)]


def _loud(findings: Iterable[Finding]) -> list[str]:
    return [f"{one.code}: {one.message}" for one in findings if one.severity is not Severity.INFO]


def main() -> int:
    """Print the table; return the exit code."""
    missed: list[str] = []
    false: list[str] = []
    every: tuple[AnyHealthy, ...] = (*HEALTHY, *ON_ONE_OF_SEVERAL, *HEALTHY_CASES, *HEALTHY_SITUATIONS)
    with tempfile.TemporaryDirectory() as scratch:
        for index, fault in enumerate(FAULTS):
            if is_found(fault, Path(scratch) / f"fault{index}") == bool(fault.unseen):
                missed.append(
                    f"{'unexpectedly found' if fault.unseen else 'not found'}: {fault.name} ({fault.caught_by})"
                )
        for index, healthy in enumerate(every):
            false += [f"{healthy}: {text}" for text in alarms(healthy, Path(scratch) / f"healthy{index}")]
    unseen = [fault for fault in FAULTS if fault.unseen]
    found = len(FAULTS) - len(unseen) - len(missed)
    print("| catalogue | checkpoints | found | false alarms |")
    print("|---|---:|---:|---:|")
    print(f"| injected faults | {len(FAULTS)} | {found} of {len(FAULTS)} | |")
    own = [text for text in false if text.startswith(tuple(map(str, HEALTHY_CASES)))]
    likely = [text for text in false if text.startswith(tuple(map(str, HEALTHY_SITUATIONS)))]
    rest = len(every) - len(HEALTHY_CASES) - len(HEALTHY_SITUATIONS)
    print(f"| healthy: optimizer, layout, dtype, device | {rest} | | {len(false) - len(own) - len(likely)} |")
    print(f"| healthy: script with a case, device | {len(HEALTHY_CASES)} | | {len(own)} |")
    print(f"| healthy: situation that looks like a fault, device | {len(HEALTHY_SITUATIONS)} | | {len(likely)} |")
    print(f"\nwith torch {torch.__version__}, steps on {', '.join(TARGETS)}")
    print("\nNot visible in a file alone:")
    print("\n".join(f"* {fault.name}: {fault.unseen}" for fault in unseen))
    print("\n".join(["", *missed, *false]))
    return 1 if missed or false else 0


if __name__ == "__main__":
    sys.exit(main())

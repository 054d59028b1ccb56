"""Factories of inventories: a model of two layers, its optimizer, and variations of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import pytest

from ckptmove.findings.context import Context
from ckptmove.findings.registry import find_all
from ckptmove.model import FlagValue, Inventory, OptimizerRecord, ParamGroup, StateEntry, StorageRef, TensorRecord
from ckptmove.torch_facts.dtypes import ITEM_BYTES
from ckptmove.torch_facts.optimizers import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.model import Finding

LAYERS = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)}
#: State of each class of torch.optim after a real step: moments, and 0-d counters.
STATES: dict[str, tuple[str, str]] = {
    "ASGD": ("ax", "step eta mu"),
    "Adadelta": ("square_avg acc_delta", "step"),
    "Adafactor": ("", "step"),
    "Adagrad": ("sum", "step"),
    "Adam": ("exp_avg exp_avg_sq", "step"),
    "AdamW": ("exp_avg exp_avg_sq max_exp_avg_sq", "step"),
    "Adamax": ("exp_avg exp_inf", "step"),
    "LBFGS": ("", ""),
    "NAdam": ("exp_avg exp_avg_sq", "step mu_product"),
    "RAdam": ("exp_avg exp_avg_sq", "step"),
    "RMSprop": ("square_avg momentum_buffer grad_avg", "step"),
    "Rprop": ("prev step_size", "step"),
    "SGD": ("momentum_buffer", ""),
    "SparseAdam": ("exp_avg exp_avg_sq", ""),
}


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class Make:
    """Makes inventories and findings."""

    path: str = "runs/my run.pth"
    layers = LAYERS

    def tensor(self, name: str, shape: tuple[int, ...] = (4,), **changes: Any) -> TensorRecord:
        dtype = changes.get("dtype", "float32")
        facts: dict[str, Any] = {
            "role": "model", "device": "cuda:0", "dtype": dtype, "shape": shape, "stride": strides(shape),
            "storage": name, "storage_offset": 0, "nbytes": prod(shape) * ITEM_BYTES[dtype],
        }  # fmt: skip
        return TensorRecord(name=name, **{**facts, **changes})

    def wrapped(self, held: TensorRecord) -> tuple[TensorRecord, TensorRecord]:
        """A wrapper subclass (a DTensor) in place of a tensor, and the tensor inside it."""
        inner = held._replace(name=f"{held.name}._local_tensor")
        return held._replace(kind="wrapper-subclass", storage=None, nbytes=0), inner

    def storage(self, key: str, nbytes: int, device: str = "cuda:0") -> StorageRef:
        return StorageRef(key, device, "float32", nbytes // 4, nbytes, (), ())

    def model(self, prefix: str = "model.", device: str = "cuda:0", **changes: Any) -> tuple[TensorRecord, ...]:
        return tuple(self.tensor(f"{prefix}{key}", shape, device=device, **changes) for key, shape in LAYERS.items())

    def group(
        self,
        params: Sequence[str],
        index: int = 0,
        where: str = "optimizer",
        algorithm: str | None = "Adam",
        **flags: bool,
    ) -> ParamGroup:
        names = tuple(FlagValue(name, value, 0) for name, value in flags.items())
        own = sorted(BY_NAME[algorithm].group) if algorithm else []
        options = (("lr", 0.1), *((name, 0) for name in own))
        return ParamGroup(f"{where}.param_groups.{index}".lstrip("."), tuple(params), (), options, names)

    def entry(
        self,
        key: str,
        shape: tuple[int, ...],
        algorithm: str | None = "Adam",
        device: str = "cuda:0",
        *,
        step: str = "cpu",
        where: str = "optimizer",
    ) -> StateEntry:
        root = f"{where}.state.{key}".lstrip(".")
        moments, counters = (words.split() for words in STATES[algorithm or "Adam"])
        tensors = [(name, (), step) for name in counters] + [(name, shape, device) for name in moments]
        if algorithm == "Adafactor":
            tensors += (
                [("row_var", (*shape[:-1], 1), device), ("col_var", (1, shape[-1]), device)]
                if len(shape) > 1
                else [("variance", shape, device)]
            )
        if algorithm == "LBFGS":
            tensors = [("d", (30,), device), ("old_dirs.0", (30,), device)]
        records = tuple(
            (name, self.tensor(f"{root}.{name}", size, role="optimizer", device=place)) for name, size, place in tensors
        )
        plain = {"LBFGS": (("n_iter", 3),), "SparseAdam": (("step", 3),)}
        return StateEntry(key, records, plain.get(algorithm or "", ()))

    def optimizer(
        self,
        shapes: Sequence[tuple[int, ...] | None] = tuple(LAYERS.values()),
        algorithm: str | None = "Adam",
        device: str = "cuda:0",
        *,
        step: str = "cpu",
        where: str = "optimizer",
        **flags: bool,
    ) -> OptimizerRecord:
        """One group of parameters with state; None for one that has no state."""
        state = [
            self.entry(str(index), shape, algorithm, device, step=step, where=where)
            for index, shape in enumerate(shapes)
            if shape is not None
        ]
        group = self.group([str(index) for index in range(len(shapes))], where=where, algorithm=algorithm, **flags)
        names = (algorithm,) if algorithm else ()
        return OptimizerRecord(where, (group,), tuple(state), algorithm, names)

    def inventory(
        self,
        tensors: Sequence[TensorRecord] | None = None,
        optimizers: Sequence[OptimizerRecord] = (),
        **changes: Any,
    ) -> Inventory:
        """A file of tensors, each with its own storage, and of optimizers with the tensors of their state."""
        state = [tensor for one in optimizers for entry in one.state for _, tensor in entry.tensors]
        every = (*(self.model() if tensors is None else tensors), *state)
        keys = tuple(dict.fromkeys(tensor.name.partition(".")[0] for tensor in every))
        dense = [one for tensor in every for one in tensor.dense() if one.storage is not None]
        storages = {
            one.storage: StorageRef(
                one.storage, one.device, one.dtype, prod(one.shape), one.nbytes, (2 * site,), (2 * site + 1,)
            )
            for site, one in enumerate(dense)
        }
        facts: dict[str, Any] = {
            "path": self.path, "container": "torch-zip", "layout": "plain", "size_bytes": 10_000, "root_keys": keys,
            "tensors": every, "storages": tuple(storages.values()), "optimizers": tuple(optimizers),
            "contents": frozenset({"scheduler", "scaler", "rng", "counter"}),
        }  # fmt: skip
        return Inventory(**{**facts, **changes})

    def findings(self, inventory: Inventory, code: str | None = None, **context: Any) -> tuple[Finding, ...]:
        found = find_all(inventory, Context(**context))
        return found if code is None else tuple(finding for finding in found if finding.code == code)

    def without(self, optimizer: OptimizerRecord, key: str, state_key: str) -> OptimizerRecord:
        """The optimizer without one tensor in the state of one parameter."""
        state = tuple(
            entry._replace(tensors=tuple(pair for pair in entry.tensors if (entry.key, pair[0]) != (key, state_key)))
            for entry in optimizer.state
        )
        return optimizer._replace(state=state)

    def cast(self, optimizer: OptimizerRecord, state_key: str, dtype: str) -> OptimizerRecord:
        """The optimizer with another dtype of one tensor in the state of each parameter."""
        state = tuple(
            entry._replace(
                tensors=tuple(
                    (key, record._replace(dtype=dtype) if key == state_key else record) for key, record in entry.tensors
                )
            )
            for entry in optimizer.state
        )
        return optimizer._replace(state=state)

    def with_options(self, optimizer: OptimizerRecord, **options: object) -> OptimizerRecord:
        groups = (group._replace(options=(*group.options, *options.items())) for group in optimizer.groups)
        return optimizer._replace(groups=tuple(groups))

    def replace(self, value: Any, **changes: Any) -> Any:
        is_tuple = isinstance(value, tuple)  # all except the inventory
        return value._replace(**changes) if is_tuple else replace(value, **changes)


@pytest.fixture
def make() -> Make:
    return Make()

"""Build the tree nodes of tensors for formats that have no pickle and no device.

The nodes have no place in any file, so that an edit cannot touch them.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from ckptmove.model import StorageRef
from ckptmove.pickles.build import new_tuple, ordered_dict
from ckptmove.pickles.rebuild_arguments import contiguous
from ckptmove.pickles.state import Machine
from ckptmove.pickles.tree import Call, Dict, Global, Persistent, PlainStorage, PlainTensor
from ckptmove.torch_facts.devices import NO_DEVICE
from ckptmove.torch_facts.dtypes import DTYPE_STORAGE, ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.limits import Limits
    from ckptmove.pickles.tree import Starts, Value

    #: Name, torch's dtype and shape of each tensor of a table.
    Rows = Iterable[tuple[str, str, tuple[int, ...]]]


def rebuild_call(name: str, dtype: str, shape: tuple[int, ...], *, requires_grad: bool = False) -> Call:
    """The call that rebuilds a contiguous tensor; its storage has the same name."""
    storage = DTYPE_STORAGE.get(dtype)
    numel = prod(shape)
    count = numel if storage else numel * ITEM_BYTES[dtype]
    storage_class = Global("torch", storage) if storage else Global("torch.storage", "UntypedStorage")
    pid = new_tuple("storage", storage_class, name, NO_DEVICE, count)
    arguments: list[Value] = [Persistent(pid, -1), 0, new_tuple(*shape), new_tuple(*contiguous(shape))]
    arguments += requires_grad, None
    if storage is None:
        arguments.append(Global("torch", dtype))
    function = Global("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3")
    return Call(function, new_tuple(*arguments), -1)


def table_machine(rows: Rows, limits: Limits, nbytes: int) -> Machine:
    """A machine with the tree of a state_dict; the size of the table limits the walks over the tree."""
    flat: list[Value] = []
    for name, dtype, shape in rows:
        flat += name, rebuild_call(name, dtype, shape)
    return _machine(flat, [-1] * len(flat), limits, nbytes)


def plain_table_machine(rows: Rows, limits: Limits, nbytes: int) -> Machine:
    """As :func:`table_machine`, with plain tensors: a tree that is not edited."""
    flat: list[Value] = []
    storages: list[Persistent] = []
    for name, dtype, shape in rows:
        stored, numel, size, stride, nbytes_of_one = _plain_form(dtype, shape)
        storage = PlainStorage(StorageRef(name, NO_DEVICE, stored, numel, nbytes_of_one, (), ()))
        storages.append(storage)
        flat += name, PlainTensor(storage, 0, size, stride, dtype=dtype, requires_grad=False)
    machine = _machine(flat, array("q", [-1]) * len(flat), limits, nbytes)
    machine.persistents = storages
    return machine


@lru_cache(maxsize=1 << 14)
def _plain_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, int, tuple[int, ...], tuple[int, ...], int]:
    """Dtype and number of elements of a storage, shape, stride and size in bytes: most tensors have those of others."""
    numel = prod(shape)
    nbytes = numel * ITEM_BYTES[dtype]
    is_typed = dtype in DTYPE_STORAGE
    return dtype if is_typed else "uint8", numel if is_typed else nbytes, shape, contiguous(shape), nbytes


def _machine(flat: list[Value], starts: Starts, limits: Limits, nbytes: int) -> Machine:
    machine = Machine(b"", limits)
    machine.end = nbytes
    machine.root = ordered_dict(Dict(flat, starts))
    return machine

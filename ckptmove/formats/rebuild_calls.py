"""Build the tree nodes of tensors for formats that have no pickle and no device.

The nodes have no place in any file, so that an edit cannot touch them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ckptmove.pickles.rebuild_arguments import contiguous
from ckptmove.pickles.tree import Call, Global, Persistent, Tuple
from ckptmove.torch_facts.devices import NO_DEVICE
from ckptmove.torch_facts.dtypes import DTYPE_STORAGE, ITEM_BYTES

if TYPE_CHECKING:
    from ckptmove.pickles.tree import Value


def rebuild_call(name: str, dtype: str, shape: tuple[int, ...], *, requires_grad: bool = False) -> Call:
    """The call that rebuilds a contiguous tensor; its storage has the same name.

    Args:
        name: name of the tensor and of its storage.
        dtype: torch's name without ``torch.``.
        shape: sizes of the tensor.
        requires_grad: as saved.
    """
    storage = DTYPE_STORAGE.get(dtype)
    numel = prod(shape)
    count = numel if storage else numel * ITEM_BYTES[dtype]
    storage_class = Global("torch", storage) if storage else Global("torch.storage", "UntypedStorage")
    pid = _tuple("storage", storage_class, name, NO_DEVICE, count)
    arguments: list[Value] = [Persistent(pid, -1), 0, _tuple(*shape), _tuple(*contiguous(shape))]
    arguments += requires_grad, None
    if storage is None:
        arguments.append(Global("torch", dtype))
    function = Global("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3")
    return Call(function, _tuple(*arguments), -1)


def _tuple(*items: Value) -> Tuple:
    return Tuple(items, (-1,) * len(items))

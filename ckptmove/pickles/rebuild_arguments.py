"""Read and check the arguments of torch's rebuild functions."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from ckptmove.pickles.tree import Call, Dict, Global, Persistent, Sequence, Tuple
from ckptmove.torch_facts.dtypes import ITEM_BYTES
from ckptmove.torch_facts.layouts import SPARSE_PARTS

if TYPE_CHECKING:
    from ckptmove.pickles.tree import Value

#: torch counts elements and bytes in a signed 64-bit integer.
LARGEST: Final = 2**63 - 1
#: Far more than any operator supports, and few enough that a product stays cheap.
_MOST_AXES: Final = 1000
#: Index of the view in a persistent id.
_VIEW_FIELD: Final = 5
#: c10's ``Layout`` enum, whose numbers TorchScript writes.
_SCRIPT_LAYOUTS: Final[dict[int, str]] = {1: "sparse_coo", 2: "sparse_csr"}


class NotATensor(Exception):
    """The arguments are not what torch writes."""


def arguments(call: Call) -> Tuple:
    """Return the argument tuple of a call."""
    if type(call.args) is not Tuple:
        raise NotATensor
    return call.args


def items(value: Value) -> list[Value] | tuple[Value, ...]:
    """Return the items of a tuple or a list."""
    if not isinstance(value, Sequence):
        raise NotATensor
    return value.items


def count(value: Value) -> int:
    """Return a number of elements, or an offset in elements."""
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise NotATensor
    return value


def view_of(value: Value) -> tuple[int, int] | None:
    """Return the part of a storage that a persistent id names: first element and number of elements; None for all.

    Before torch 0.4, a storage in a legacy stream could be a view of another storage. Its persistent id is that of the
    other storage, with ``(view_key, offset, view_size)`` as sixth field.
    """
    pid = value.pid if type(value) is Persistent else None
    if type(pid) is not Tuple or len(pid.items) <= _VIEW_FIELD or pid.items[_VIEW_FIELD] is None:
        return None
    _, first, numel = items(pid.items[_VIEW_FIELD])
    return count(first), count(numel)


def sizes(value: Value) -> tuple[int, ...]:
    """Return a size or a stride, from a tuple of ints or a ``torch.Size`` call."""
    if type(value) is Call and value.name == "torch.Size":
        value = arguments(value).items[0]
    if not isinstance(value, Sequence) or len(value.items) > _MOST_AXES:
        raise NotATensor
    found = tuple(value.items)
    for size in found:
        if type(size) is not int or not 0 <= size <= LARGEST:
            raise NotATensor
    return found  # type: ignore[return-value]  # the loop checked that each is an int


def geometry(size: Value, stride: Value) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Return shape, stride and number of elements of a dense tensor, and how many lie from the first to the last."""
    lengths = size.items if type(size) is Tuple else sizes(size)
    steps = stride.items if type(stride) is Tuple else sizes(stride)
    if len(lengths) != len(steps) or len(lengths) > _MOST_AXES:
        raise NotATensor
    numel = span = 1
    for length, step in zip(lengths, steps):  # noqa: B905  # the lengths are equal, and this runs for each tensor
        if type(length) is not int or type(step) is not int or not (0 <= length <= LARGEST and 0 <= step <= LARGEST):
            raise NotATensor
        numel *= length
        span += (length - 1) * step
    # The loop checked that each item is an int.
    return tuple(lengths), tuple(steps), numel, span if numel else 0  # type: ignore[arg-type]


def bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Return the number of bytes of a tensor's values."""
    nbytes = prod(shape) * ITEM_BYTES[dtype]
    if nbytes > LARGEST:
        raise NotATensor
    return nbytes


def dtype_name(value: Value) -> str:
    """Return the name of a dtype without ``torch.``."""
    if type(value) is not Global or value.name not in ITEM_BYTES:
        raise NotATensor
    return value.name


def sparse_parts(args: Tuple) -> tuple[str, tuple[Value, ...], Value]:
    """Return the layout of a sparse tensor, its dense tensors, and its size.

    Python writes ``(layout, (indices, values, size[, is_coalesced]))``, or ``(layout, (compressed, plain, values,
    size))``. TorchScript (torch/csrc/jit/serialization/pickler.cpp ``pushLiteralSparseTensor``) writes ``(layout, size,
    requires_grad, indices, values, hooks)``, or the same with ``compressed, plain, values``.
    """
    first = args.items[0]
    layout = _SCRIPT_LAYOUTS.get(first, "") if type(first) is int else layout_name(first)
    labels = SPARSE_PARTS.get(layout)
    if labels is None:
        raise NotATensor
    if type(first) is int:
        return layout, args.items[3 : 3 + len(labels)], args.items[1]
    data = items(args.items[1])
    return layout, tuple(data[: len(labels)]), data[len(labels)]


def layout_name(value: Value) -> str:
    """Return the name in ``torch.serialization._get_layout('torch.sparse_coo')`` without ``torch.``."""
    if type(value) is not Call:
        raise NotATensor
    text = arguments(value).items[0]
    return text.removeprefix("torch.") if type(text) is str else ""


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a contiguous tensor."""
    stride = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        stride[axis] = stride[axis + 1] * max(shape[axis + 1], 1)
    return tuple(stride)


def numpy_shape(data: Call) -> tuple[int, ...]:
    """Return the shape of a pickled ndarray.

    Its state is ``(version, shape, dtype, is_fortran, bytes)``; from protocol 5 on it is the call
    ``_frombuffer(bytes, dtype, shape, order)``.
    """
    if data.name.endswith("._frombuffer"):
        return sizes(arguments(data).items[2])
    return sizes(items(data.state)[1])


def device_text(value: Value) -> str | None:
    """Return the text of a ``torch.device(type[, index])`` call, or None for any other value."""
    if type(value) is not Call or value.name != "torch.device" or not isinstance(value.args, Sequence):
        return None
    found = value.args.items
    if not found or type(found[0]) is not str:
        return None
    if len(found) > 1 and type(found[1]) is int and 0 <= found[1] <= LARGEST:
        return f"{found[0]}:{found[1]}"
    return found[0] if len(found) == 1 else None


def lazy_kind(metadata: Value) -> str:
    """Return the kind of a dense tensor from its lazy operations: ``conj()`` and negation set a bit and change no byte.

    From torch/_utils.py, ``get_tensor_metadata``.
    """
    lazy = [key for key in ("conj", "neg") if type(metadata) is Dict and metadata.get(key) is True]
    return "-".join(lazy) or "tensor"

"""Compare two loaded checkpoints: structure, types, tensors bit for bit, and the sharing of objects and storages."""

from __future__ import annotations

from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

_ALWAYS_EQUAL = (int, float, str, bytes, bool, type(None), tuple, torch.dtype)


def loaded_differences(first: Any, second: Any) -> list[str]:  # noqa: C901, PLR0912  # a branch for each kind of value
    """Paths of values that differ, and how. NaN equals NaN; an OrderedDict at the root equals a dict."""
    found: list[str] = []
    partners: dict[int, Any] = {}
    alive: list[Any] = []  # an `id` may be used again
    places: dict[int, int] = {}
    stack: list[tuple[str, Any, Any]] = [("", first, second)]
    while stack:
        path, one, other = stack.pop()
        if id(one) in partners:
            if partners[id(one)] is not other and not isinstance(one, _ALWAYS_EQUAL):
                found.append(f"{path}: one object is two")
            continue
        if type(one) is not type(other) and not (path == "" and isinstance(one, dict) and isinstance(other, dict)):
            found.append(f"{path}: {type(one)} is {type(other)}")
            continue
        partners[id(one)] = other
        alive.append(one)
        if isinstance(one, torch.Tensor):
            facts = [_facts(tensor) for tensor in (one, other)]
            if facts[0] != facts[1]:
                found.append(f"{path}: {facts}")
                continue
            parts = [_parts(tensor) for tensor in (one, other)]
            stack += [(f"{path}/{index}", *pair) for index, pair in enumerate(zip(*parts, strict=True))]
            if not parts[0] and one.device.type == "cpu" and not _same_bytes(one, other, places):
                found.append(f"{path}: other bytes, or storages shared otherwise")
            stack.append((f"{path}.__dict__", dict(one.__dict__), dict(other.__dict__)))
        elif isinstance(one, TypedStorage):
            if one.dtype != other.dtype or bytes(one.untyped()) != bytes(other.untyped()):
                found.append(f"{path}: storage")
        elif isinstance(one, UntypedStorage):
            if bytes(one) != bytes(other):
                found.append(f"{path}: storage")
        elif isinstance(one, dict):
            if repr([*one]) != repr([*other]):
                found.append(f"{path}: keys")
                continue
            stack += [(f"{path}.{key}", *pair) for key, *pair in zip(one, one.values(), other.values(), strict=True)]
            if hasattr(one, "__dict__") and hasattr(other, "__dict__"):
                stack.append((f"{path}.__dict__", dict(vars(one)), dict(vars(other))))
        elif isinstance(one, list | tuple):
            if len(one) != len(other):
                found.append(f"{path}: length")
                continue
            stack += [(f"{path}.{index}", *pair) for index, pair in enumerate(zip(one, other, strict=True))]
        elif one != other and not (one != one and other != other):  # noqa: PLR0124  # NaN
            found.append(f"{path}: {one!r} is {other!r}")
    return found


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    facts = (tensor.dtype, tensor.layout, tensor.device, tensor.requires_grad, tensor.is_quantized, tensor.is_nested)
    if tensor.is_nested:
        return facts
    facts = (*facts, tensor.shape, tensor.is_conj(), tensor.is_neg())
    if tensor.layout != torch.strided:
        return facts
    return (*facts, tensor.stride(), tensor.storage_offset())


def _parts(tensor: Any) -> list[torch.Tensor]:
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _same_bytes(one: torch.Tensor, other: torch.Tensor, places: dict[int, int]) -> bool:
    storages = one.untyped_storage(), other.untyped_storage()
    start, end = storages[0].data_ptr(), storages[1].data_ptr()
    if storages[0].nbytes() and places.setdefault(start, end) != end:
        return False
    raw = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages]
    return torch.equal(*raw)

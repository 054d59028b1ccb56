"""Compare what ckptmove and torch read from the same file.

Files are unpickled by torch in weights-only mode only. The tests and ``corpus.py`` use the comparisons.
"""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING, Any

import torch
from older_torch import safetensors_table

from ckptmove.api.functions import convert, inspect
from ckptmove.torch_facts.devices import NO_DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptmove.model import Inventory, TensorRecord

SAFETENSORS_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip


class NotComparableError(Exception):
    """torch cannot read the file."""


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a loaded object, with its name in ckptmove."""
    if isinstance(value, torch.Tensor):
        yield prefix[:-1], value
        return
    if isinstance(value, dict):
        members: Any = value.items()
    elif isinstance(value, list | tuple | set):
        members = enumerate(value)
    else:
        return
    for key, item in members:
        yield from flatten(item, f"{prefix}{key}.")


def differences(path: Path, inventory: Inventory) -> list[str]:
    """Differences between an inventory and torch: in names, dtypes, shapes, strides, offsets and devices.

    Raises:
        NotComparableError: if torch refuses the file, or has no reader for its format.
    """
    if inventory.container in {"torch-zip", "torch-legacy"}:
        return _of_torch_load(path, inventory)
    if inventory.container == "torchscript":
        return _of_jit_load(path, inventory)
    if inventory.container == "safetensors":
        return _of_header(path, inventory)
    raise NotComparableError(f"torch has no reader for {inventory.container} alone")


def _of_torch_load(path: Path, inventory: Inventory) -> list[str]:
    tags: dict[int, str] = {}

    def record(storage: Any, tag: str) -> Any:
        tags[storage.data_ptr()] = tag
        return storage

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about old files
            expected = dict(flatten(torch.load(path, map_location=record, weights_only=True)))
    except (pickle.UnpicklingError, RuntimeError, AttributeError) as error:
        raise NotComparableError(_first_line(error)) from error
    found = {tensor.name: tensor for tensor in inventory.tensors}
    if list(found) != list(expected):
        return [f"other names: {sorted(found.keys() ^ expected.keys())[:3]}"]
    differing = []
    for name, tensor in expected.items():
        differing += _tensor(found[name], tensor)
        if found[name].requires_grad != tensor.requires_grad:
            differing.append(f"{name}: requires_grad is {tensor.requires_grad}")
        if tensor.untyped_storage().nbytes() and tags[tensor.untyped_storage().data_ptr()] != found[name].device:
            differing.append(f"{name}: is on {tags[tensor.untyped_storage().data_ptr()]}")
    return differing


def _of_jit_load(path: Path, inventory: Inventory) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that TorchScript is deprecated
            expected = torch.jit.load(path, map_location="cpu").state_dict()  # torch.jit has no annotations
    except RuntimeError as error:
        raise NotComparableError(_first_line(error)) from error
    found = {tensor.name: tensor for tensor in inventory.tensors}
    missing = [f"{name}: is not found" for name in expected if name not in found]
    return missing or [line for name, tensor in expected.items() for line in _tensor(found[name], tensor)]


def _of_header(path: Path, inventory: Inventory) -> list[str]:
    with path.open("rb") as file:
        table, _ = safetensors_table(file)
    table.pop("__metadata__", None)
    found = {tensor.name: (tensor.dtype, list(tensor.shape)) for tensor in inventory.tensors}
    expected = {name: (SAFETENSORS_DTYPES[row["dtype"]], row["shape"]) for name, row in table.items()}
    return [] if found == expected else ["other names, dtypes or shapes than in its header"]


def _tensor(own: TensorRecord, tensor: torch.Tensor) -> list[str]:
    facts = (own.dtype, own.shape, own.stride, own.storage_offset)
    dtype = str(tensor.dtype).removeprefix("torch.")
    theirs = (dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    return [] if facts == theirs else [f"{own.name}: {facts} is {theirs} to torch"]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:80]


def round_trip(path: Path, folder: Path) -> str:
    """Convert a file to other devices and back, and compare the result with the file.

    Returns:
        ``same bytes``; ``same tensors`` if only the pickle differs (a device string that was shared by a device that
        moved and one that did not is then written twice); ``other tensors``.

    Raises:
        CkptMoveError: if the file cannot be converted.
    """
    homes = {tensor.device for tensor in inspect(str(path)).inventory.tensors} - {NO_DEVICE} or {"cpu"}
    there = {home: f"hpu:{index}" for index, home in enumerate(sorted(homes), start=5)}
    away, back = folder / "away", folder / "back"
    plan = convert(str(path), map_location=there, output=str(away), force=True).plan
    convert(str(away), map_location={there[home]: home for home in there}, output=str(back), force=True)
    if back.read_bytes() == path.read_bytes():
        return "same bytes"
    # A tensor on a wrong device, such as a step counter on a GPU, is moved to the right one and stays there.
    corrected = {name for edit in plan.edits if edit.target not in there.values() for name in edit.names}
    return "same tensors" if _contents(back, corrected) == _contents(path, corrected) else "other tensors"


def _contents(path: Path, corrected: set[str]) -> list[tuple[object, ...]]:
    return [
        (one.name, one.name in corrected or one.device, one.dtype, one.shape, one.stride, one.storage_offset)
        for one in inspect(str(path), check=True).inventory.tensors
    ]

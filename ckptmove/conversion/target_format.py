"""Decide on the format of the output, by its suffix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.errors import OutputSuffix
from ckptmove.formats.facts import TORCH_SUFFIXES, facts_of
from ckptmove.io.locations import split_suffix

if TYPE_CHECKING:
    from ckptmove.model import Inventory

#: ``same``: the format of the source. ``shards``: a directory of safetensors files with an index.
TargetFormat: TypeAlias = Literal["same", "torch", "safetensors", "shards"]

#: Suffixes of formats that ckptmove does not write: an output has one only if the source has it.
_FOREIGN_SUFFIXES: Final = frozenset(
    {".safetensor", ".gguf", ".onnx", ".h5", ".npz", ".npy", ".msgpack", ".gz", ".tgz"}
)
#: Suffixes that name a format.
_SUFFIXES: Final = {*TORCH_SUFFIXES, ".safetensors", ".pt2", ".zip", ".tar", *_FOREIGN_SUFFIXES}


def names_format(output: str | None) -> bool:
    """Whether the suffix of an output names a format, which may be another one than that of the source."""
    return output is not None and split_suffix(output)[1].lower() in _SUFFIXES


def target_format(
    output: str | None, default_output: str, inventory: Inventory, *, is_sharded: bool, in_place: bool
) -> TargetFormat:
    """The format of the output. The default output has the suffix of the source, which is always right."""
    if is_sharded:
        if output is not None and split_suffix(output)[1].lower() in _SUFFIXES:
            raise OutputSuffix(output, split_suffix(output)[1], "directory", split_suffix(output)[0])
        return "shards"
    form = inventory.form if isinstance(inventory, DirectoryInventory) else None
    kind = facts_of(inventory.container)
    same: TargetFormat = "same"
    if kind.rewritten_as and not (kind.is_written or in_place):
        kind, same = facts_of(kind.rewritten_as), "torch"
    if output is None:
        return same
    (root, typed), source = split_suffix(output), split_suffix(default_output)[1]
    suffix = typed.lower()
    own = kind.suffixes if form is None else (f".{form}",)
    is_source = suffix in _FOREIGN_SUFFIXES and suffix == source.lower()
    if suffix not in _SUFFIXES or suffix in own or is_source:
        return same
    if suffix == ".safetensors":
        return "safetensors"
    if suffix in TORCH_SUFFIXES:
        return "torch"
    container = form or inventory.container
    is_folder = form is None and isinstance(inventory, DirectoryInventory)
    raise OutputSuffix(output, typed, container, root + ("" if is_folder else source))

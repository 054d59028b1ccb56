"""Decide on the format of the output, by its suffix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.errors import OutputSuffix
from ckptmove.io.locations import split_suffix

if TYPE_CHECKING:
    from ckptmove.model import Inventory

#: ``same``: the format of the source. ``shards``: a directory of safetensors files with an index.
TargetFormat: TypeAlias = Literal["same", "torch", "safetensors", "shards"]

_TORCH: Final = frozenset({"torch-zip", "torch-legacy", "torch-tar", "torchscript", "pickle"})
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
#: Suffixes that name a format, with the containers they fit; for an archive, its form.
_SUFFIXES: Final[dict[str, frozenset[str]]] = {
    ".safetensors": frozenset({"safetensors"}),
    **dict.fromkeys(_TORCH_SUFFIXES, _TORCH),
    ".pt2": frozenset({"torch-export"}),
    ".zip": frozenset({"zip", "torch-zip", "torchscript", "torch-export"}),
    ".tar": frozenset({"tar"}) | _TORCH,  # model.pth.tar is a common name for what torch.save writes
    **dict.fromkeys((".safetensor", ".gguf", ".onnx", ".h5", ".npz", ".npy", ".msgpack", ".gz", ".tgz"), frozenset()),
}


def names_format(output: str | None) -> bool:
    """Whether the suffix of an output names a format, which may be another one than that of the source."""
    return output is not None and split_suffix(output)[1].lower() in _SUFFIXES


def target_format(output: str | None, default_output: str, inventory: Inventory, *, is_sharded: bool) -> TargetFormat:
    """The format of the output.

    Args:
        output: the output that the user typed, or None.
        default_output: the default output, with the suffix of the source, which is always right.
        inventory: the source.
        is_sharded: whether a size of shards is given.

    Raises:
        OutputSuffix: if readers that use the suffix would fail on the output.
    """
    if is_sharded:
        if output is not None and split_suffix(output)[1].lower() in _SUFFIXES:
            raise OutputSuffix(output, split_suffix(output)[1], "directory", split_suffix(output)[0])
        return "shards"
    if output is None:
        return "same"
    (root, suffix), source = split_suffix(output), split_suffix(default_output)[1]
    form = inventory.form if isinstance(inventory, DirectoryInventory) else None
    container = form or inventory.container
    named = _SUFFIXES.get(suffix.lower())
    if named is None or container in named or (not named and suffix.lower() == source.lower()):
        return "same"
    if suffix.lower() == ".safetensors":
        return "safetensors"
    if suffix.lower() in _TORCH_SUFFIXES:
        return "torch"
    raise OutputSuffix(output, suffix, container, root + ("" if container == "directory" else source))

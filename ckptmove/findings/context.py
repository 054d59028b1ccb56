"""What the findings judge a file for, and the words that several rules need to say so.

Never looks at the machine it runs on: the target is what the caller names, or where the model lies.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.state_dicts import RootKeys
from ckptmove.errors import UsageError
from ckptmove.formats.opening import container_class
from ckptmove.text import Command, quoted
from ckptmove.torch_facts.devices import NO_DEVICE, is_accelerator, parse_target, split

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ckptmove.checkpoint.directories import FileRecord
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.findings.candidates import Lacking
    from ckptmove.formats.contract import Container
    from ckptmove.model import Inventory, TensorRecord


class Context(NamedTuple):
    """The machine that a file is judged for.

    Attributes:
        target: device that training is to resume on, or None for the devices in the file.
        device_count: how many devices of one type that machine has, where the user said so; None for a machine with
            the devices that the target and the file name.
        kept: names of the tensors that may stay on their device.
        home: device where most bytes of the model lie; every rule asks, so it is looked up once for all.
        pairings: the parameters of each optimizer, matched with the model; likewise.
        lacking: the parameters of each optimizer that the checkpoint cannot hold; likewise.
    """

    target: str | None = None
    device_count: int | None = None
    kept: Collection[str] = frozenset()
    home: str | None = None
    pairings: tuple[Pairing, ...] = ()
    lacking: tuple[Lacking, ...] = ()


def is_incomplete(inventory: Inventory) -> bool:
    """Whether a file of a directory or an archive could not be read, so that nothing can be said to be missing."""
    return isinstance(inventory, DirectoryInventory) and inventory.is_incomplete


def target_device(inventory: Inventory, context: Context) -> str | None:
    """The target, or else the device where most bytes of the model lie; None where no tensor lies anywhere.

    A file without a model goes by its optimizer's state, and one without that by everything it holds. Meta tensors lie
    nowhere, and neither does a tensor whose file does not say where.

    Returns:
        A tag as the file has it. :func:`ckptmove.torch_facts.devices.parse_target` does not take every one.
    """
    known = context.target or context.home
    if known is not None:
        return known
    model = (tensor for tensor in inventory.tensors if tensor.role == "model")
    state = (tensor for tensor in inventory.tensors if tensor.role == "optimizer" and tensor.shape)
    return next(
        (home for some in (model, state, inventory.tensors) if (home := fullest_device(some)) is not None), None
    )


def fullest_device(tensors: Iterable[TensorRecord]) -> str | None:
    """The device with most bytes of some tensors; None for none."""
    nbytes: dict[str, int] = {}
    for tensor in tensors:
        if is_placed(tensor):
            nbytes[tensor.device] = nbytes.get(tensor.device, 0) + tensor.nbytes
    return max(nbytes, key=lambda device: nbytes[device], default=None)


def is_placed(tensor: TensorRecord) -> bool:
    """Whether a tensor lies on a device, and the file says on which."""
    return tensor.device not in {"meta", NO_DEVICE}


def devices_needed(tags: Iterable[str]) -> int:
    """Number of devices of one type on a machine that has all of these; at least 1."""
    return max((1 + (split(tag)[1] or 0) for tag in tags if is_accelerator(tag)), default=1)


def known_count(kind: str, context: Context) -> int | None:
    """Number of devices of a type on the target machine, or None where nothing was said about it.

    A target ``cuda:3`` without a number means a machine with four cuda devices, and says nothing about other types.
    """
    if context.device_count is not None or context.target is None or split(context.target)[0] != kind:
        return context.device_count
    return devices_needed([context.target])


def is_out_of_range(tag: str, context: Context) -> bool:
    """Whether a tag has an index that the target machine lacks, as far as its number of devices is known."""
    kind, index = split(tag)
    count = known_count(kind, context)
    return count is not None and index is not None and index >= count and is_accelerator(tag)


def available_device(tag: str, context: Context) -> str:
    """The tag, or the first device of its type where the target machine lacks it."""
    return f"{split(tag)[0]}:0" if is_out_of_range(tag, context) else tag


def convert_command(inventory: Inventory, context: Context, *options: str) -> str:
    """The command that moves the file to where it is to resume, on a device that the machine and a file can have.

    None changes what a distributed checkpoint holds: it is passed on as it is.
    """
    if not container_class(inventory.container).is_editable:
        return "no conversion changes a distributed checkpoint: mend it in the script, once it is loaded"
    try:
        target = parse_target(available_device(target_device(inventory, context) or "cpu", context))
    except UsageError:
        target = "cpu"
    return Command(" ".join(["ckptmove convert", quoted(inventory.path), "--to", quoted(target), *options]))


def load_expression(inventory: Inventory, where: str = "") -> str:
    """Python that loads the file without running what is in it, and takes what stands at a path of nested dicts.

    torch reads a tar, and pickle a bare pickle, only by running it: :func:`ckptmove.findings.safety.cautioned` says so.

    Of a directory or an archive it is the file that the path begins with; without a path, the first that ``torch.save``
    wrote.
    """
    source, container, keys = _located(inventory, where)
    rest = "".join(f"[{key!r}]" for key in keys)
    call = container.load_call(source)
    if container.loader == "torch.export.load":  # an ExportedProgram has no keys
        return f"{call})"
    mode = "" if container.weights_only is None else f", weights_only={container.weights_only}"
    return f"{call}{mode}){rest}"


def open_load(inventory: Inventory, file: str = "") -> str:
    """The call that loads the file, or a file of a directory, without its end."""
    source, container, _ = _located(inventory, file)
    return container.load_call(source)


def _located(inventory: Inventory, where: str) -> tuple[str, type[Container], list[str]]:
    """The file that something is in, as Python; its container, and the keys that lead there."""
    if not isinstance(inventory, DirectoryInventory):
        return repr(inventory.path), container_class(inventory.container), _keys(inventory, where) if where else []
    saved = (file for file in inventory.files if container_class(file.container).is_torch_save)
    first = next(saved, inventory.files[0])
    file = file_of(inventory, where) or first
    rest = where.removeprefix(file.path).removeprefix(".")
    if file.path in inventory.root_keys and any(tensor.name == where for tensor in inventory.tensors):
        keys = [rest]  # of a state_dict that is all of the file
    else:
        roots = tuple(key[len(file.path) + 1 :] for key in inventory.root_keys if key.startswith(f"{file.path}."))
        keys = _keys(replace(inventory, root_keys=roots), rest) if rest else []
    source = file.expression or repr(posixpath.join(inventory.path, file.path))
    return source, container_class(file.container), keys


def load_whole(inventory: Inventory, where: str) -> str:
    """Python that loads all of the file that a tensor, an object or a record is in, by its path from the root."""
    file = file_of(inventory, where)
    return load_expression(inventory, "" if file is None else file.path)


def file_of(inventory: Inventory, where: str) -> FileRecord | None:
    """The file of a directory, or of an archive, that something is in by its path from the root; None of a file."""
    files = inventory.files if isinstance(inventory, DirectoryInventory) else ()
    around = [file for file in files if where == file.path or where.startswith((f"{file.path}.", f"{file.path}/"))]
    return max(around, key=lambda file: len(file.path), default=None)


def _keys(inventory: Inventory, where: str) -> list[str]:
    """The keys of nested dicts in a path; only those of the root hold dots."""
    end = RootKeys(inventory).first(where)
    if end != -1:
        return [where[:end], *where[end + 1 :].split(".")]
    return [where] if where in inventory.root_keys else where.split(".")


def census(tags: Iterable[str]) -> str:
    """Devices with counts, the most frequent first: ``cuda:0 (10), cpu (2)``."""
    return ", ".join(f"{tag} ({count})" for tag, count in Counter(tags).most_common())

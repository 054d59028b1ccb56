"""The target machine of the rules, and the fix commands that several rules share.

The machine that runs ckptmove does not matter: the target is named by the caller, or is the device of the model.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.errors import UsageError
from ckptmove.formats.facts import facts_of
from ckptmove.text import Argument, Command, command_line, quoted
from ckptmove.torch_facts.devices import NO_DEVICE, is_accelerator, parse_target, split

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ckptmove.checkpoint.directories import FileRecord
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.findings.candidates import Lacking
    from ckptmove.findings.trials import Source
    from ckptmove.model import Inventory, TensorRecord


class Context(NamedTuple):
    """The target machine, and facts that several rules need."""

    target: str | None = None  # device to resume on, or None for the devices in the file
    #: number of devices of one type on that machine, if the user gave it; None for a machine with the devices that the
    #: target and the file name.
    device_count: int | None = None
    kept: Collection[str] = frozenset()  # names of the tensors that may stay on their device
    home: str | None = None  # device with most bytes of the model, computed once; empty if no tensor has a device
    pairings: tuple[Pairing, ...] = ()  # parameters of each optimizer, matched with the model; computed once
    lacking: tuple[Lacking, ...] = ()  # parameters of each optimizer without a tensor in the checkpoint; computed once
    source: Source | None = None  # the open checkpoint, to try remedies on it; None for an inventory alone


def is_incomplete(inventory: Inventory) -> bool:
    """Whether a file of a directory or an archive could not be read, so that nothing can be reported as missing."""
    return isinstance(inventory, DirectoryInventory) and inventory.is_incomplete


def target_device(inventory: Inventory, context: Context) -> str | None:
    """Return the target, or else the device with most bytes of the model; None if no tensor has a device.

    Without a model, the state of the optimizers counts; without that, all tensors. Meta tensors, and tensors of formats
    without devices, do not count. A tag from the file may be none that
    :func:`ckptmove.torch_facts.devices.parse_target` accepts.
    """
    known = context.target or context.home
    if known is not None:
        return known or None
    model = (tensor for tensor in inventory.tensors if tensor.role == "model")
    state = (tensor for tensor in inventory.tensors if tensor.role == "optimizer" and tensor.shape)
    return next(
        (home for some in (model, state, inventory.tensors) if (home := fullest_device(some)) is not None), None
    )


def fullest_device(tensors: Iterable[TensorRecord]) -> str | None:
    """Return the device with most bytes of some tensors, or None if no tensor has a device."""
    nbytes: dict[str, int] = {}
    for tensor in tensors:
        if is_placed(tensor):
            nbytes[tensor.device] = nbytes.get(tensor.device, 0) + tensor.nbytes
    return max(nbytes, key=lambda device: nbytes[device], default=None)


def is_placed(tensor: TensorRecord) -> bool:
    """Whether the file names a device for a tensor, other than meta."""
    return tensor.device not in {"meta", NO_DEVICE}


def devices_needed(tags: Iterable[str]) -> int:
    """Return the number of devices of one type that a machine needs for all tags; at least 1."""
    return max((1 + (split(tag)[1] or 0) for tag in tags if is_accelerator(tag)), default=1)


def known_count(kind: str, context: Context) -> int | None:
    """Return the number of devices of a type on the target machine, or None if it is not known.

    A target ``cuda:3`` alone means a machine with four cuda devices; other types are then not known.
    """
    if context.device_count is not None or context.target is None or split(context.target)[0] != kind:
        return context.device_count
    return devices_needed([context.target])


def is_out_of_range(tag: str, context: Context) -> bool:
    """Whether the target machine is known to lack the index of a tag."""
    kind, index = split(tag)
    count = known_count(kind, context)
    return count is not None and index is not None and index >= count and is_accelerator(tag)


def available_device(tag: str, context: Context) -> str:
    """Return the tag, or the first device of its type if the target machine lacks it."""
    return f"{split(tag)[0]}:0" if is_out_of_range(tag, context) else tag


def convert_command(inventory: Inventory, context: Context, where: Sequence[str], *options: Argument) -> str:
    """Return the command that converts the checkpoint for the target device; empty if ``convert`` refuses it.

    Of a directory of several checkpoints, one is converted, because the others may be right as they are.
    """
    container = facts_of(inventory.container)
    if not container.is_editable:
        return container.unwritten_hint
    subject = checkpoint_of(inventory, where)
    if subject is None:
        return look_at_each(inventory)
    path, own = subject
    if own is not inventory:
        context = context._replace(home=None)
    try:
        target = parse_target(available_device(target_device(own, context) or "cpu", context))
    except UsageError:
        target = "cpu"
    return tried_command(inventory, context, path, Argument("to", target), *options)


def remap_command(inventory: Inventory, context: Context, where: Sequence[str], *options: Argument) -> str:
    """Return the command that writes a new file with some changes; empty if ``convert`` cannot make it.

    It does not change keys or storages of files with code, nor those of a distributed checkpoint. Arguments as for
    :func:`convert_command`.
    """
    container = facts_of(inventory.container)
    if container.has_code or not container.is_editable:
        return ""
    subject = checkpoint_of(inventory, where)
    if subject is None:
        return look_at_each(inventory)
    return tried_command(inventory, context, subject[0], *options)


def tried_command(inventory: Inventory, context: Context, path: str, *options: Argument) -> str:
    """The command that converts a checkpoint, or one of a directory; empty if it would fail."""
    if context.source is not None and not context.source.converts(inventory, path, *options):
        return ""
    return Command(" ".join(["ckptmove convert", quoted(path), *(one.in_shell for one in options)]))


def checkpoint_of(inventory: Inventory, where: Sequence[str]) -> tuple[str, Inventory] | None:
    """Return path and inventory of the checkpoint that contains all paths; None if no single one does."""
    if not isinstance(inventory, DirectoryInventory) or inventory.form is not None or not inventory.checkpoints:
        return inventory.path, inventory
    owners = {*inventory.owners(where)}
    if len(owners) != 1 or "" in owners:
        return None
    (owner,) = owners
    return posixpath.join(inventory.path, owner), replace(inventory, tensors=inventory.below(owner))


def look_at_each(inventory: Inventory) -> str:
    """Return the command that inspects each checkpoint of a directory alone."""
    return Command(command_line(["ckptmove", "inspect", posixpath.join(inventory.path, "**")]))


def file_of(inventory: Inventory, where: str) -> FileRecord | None:
    """Return the file of a directory or an archive that a path is in; None if the checkpoint is one file."""
    files = inventory.files if isinstance(inventory, DirectoryInventory) else ()
    around = [
        file
        for file in files
        if where in {file.prefix, file.path} or where.startswith((f"{file.prefix}.", f"{file.path}/"))
    ]
    return max(around, key=lambda file: len(file.prefix), default=None)


def census(tags: Iterable[str]) -> str:
    """Return devices with counts, most frequent first: ``cuda:0 (10), cpu (2)``."""
    return ", ".join(f"{tag} ({count})" for tag, count in Counter(tags).most_common())

"""Opening a checkpoint: its container, the tree of its pickle and its inventory, side by side.

Never executes a pickle and never reads a tensor's bytes.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from traceback import clear_frames
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.inventory.build import build_inventory
from ckptmove.checkpoint.inventory.outline import outline as make_outline
from ckptmove.errors import CkptMoveError, DamagedArchive, DistributedFile, OutOfMemory
from ckptmove.formats.opening import container_class, open_container
from ckptmove.io.counted import CountedSource
from ckptmove.io.recovery import recover
from ckptmove.limits import Limits
from ckptmove.pickles.collector import collector_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptmove.checkpoint.inventory.outline import OutlineLine
    from ckptmove.formats.contract import Container
    from ckptmove.io.contracts import ByteSource, Progress
    from ckptmove.model import Inventory
    from ckptmove.pickles.state import Machine


class Checkpoint(NamedTuple):
    """An open checkpoint.

    Attributes:
        container: its bytes.
        machine: its object pickle, as read; without one, at rest with the tree that the file stands for.
        inventory: what it holds.
    """

    container: Container
    machine: Machine
    inventory: Inventory


@contextmanager
def open_checkpoint(path: str, limits: Limits | None = None, source: ByteSource | None = None) -> Iterator[Checkpoint]:
    """Read the directory and the pickle of a checkpoint, once an interrupted conversion in place is taken back.

    Args:
        path: a file.
        limits: what it may ask for.
        source: its bytes, where they are at hand; closed in the end.

    Raises:
        UnreadableInput: it cannot be read, is damaged, or is no checkpoint.
        LimitExceeded: it asks for more than the limits allow.
        BeingConverted, RollbackFailed: as :func:`ckptmove.io.recovery.recover`.
    """
    limits = limits or Limits()
    with naming(path):
        if source is None:
            recover(path)
        container = _opened(path, limits, source)
        try:
            if container.name == "torch-zip" and path.endswith(".distcp"):
                raise DistributedFile(path)  # with one piece in it, it looks like any other torch.save
            with collector_paused():
                machine = container.read()
                checkpoint = Checkpoint(container, machine, build_inventory(container, machine, limits))
            yield checkpoint
        finally:
            container.source.close()


def _opened(path: str, limits: Limits, source: ByteSource | None) -> Container:
    try:
        return open_container(path, limits, source)
    except DamagedArchive as error:
        if path.endswith(".distcp"):  # between its archives may stand objects that wrote their own bytes
            raise DistributedFile(path) from error
        raise


class Survey(NamedTuple):
    """What was read of a checkpoint that is closed again.

    Attributes:
        inventory: what it holds.
        outline: its tree, where that was asked for.
        pickle_bytes: length of what its sites point into.
        has_checksums: whether it holds CRCs of its own.
    """

    inventory: Inventory
    outline: tuple[OutlineLine, ...]
    pickle_bytes: int
    has_checksums: bool


def survey(
    path: str,
    limits: Limits,
    *,
    source: ByteSource | None = None,
    check: bool = False,
    outline: bool = False,
    progress: Progress | None = None,
    visit: Callable[[Checkpoint], None] | None = None,
) -> Survey:
    """Read a checkpoint as data and close it.

    Args:
        path: a file.
        limits: what it may ask for.
        source: its bytes, where they are at hand; closed in the end.
        check: whether to read every record and compare its CRC.
        outline: whether to make the outline too.
        progress: told of bytes checked and bytes in all.
        visit: shown the checkpoint while it is open.

    Raises:
        UnreadableInput: it cannot be read, is damaged, or is no checkpoint.
        LimitExceeded: it asks for more than the limits allow.
    """
    with open_checkpoint(path, limits, source) as checkpoint:
        if visit is not None:
            visit(checkpoint)
        inventory, container = checkpoint.inventory, checkpoint.container
        if check:
            if progress is not None:
                container.source = CountedSource(container.source, progress)
            inventory = replace(inventory, facts=inventory.facts + container.check())
        nbytes = len(checkpoint.machine.data)
        lines = make_outline(checkpoint.machine.root, limits, nbytes) if outline else ()
        return Survey(inventory, lines, nbytes, container.has_checksums())


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Give an error that does not know its file the path of the file at hand, and running out of memory too.

    Raises:
        OutOfMemory: there is not enough memory for what the file asks for.
    """
    try:
        yield
    except CkptMoveError as error:
        error.path = error.path or path
        raise
    except MemoryError as error:
        clear_frames(error.__traceback__)  # the frames hold what filled the memory
        raise OutOfMemory(path) from None


def no_devices(inventory: Inventory) -> str:
    """Why there is no device in a file that could be another one; empty where there is one.

    A file of ``torch.save`` without tensors is none of those: its conversion is a copy, as of any that needs no change.
    """
    reason = container_class(inventory.container).why_no_devices
    if reason:
        return reason
    if inventory.container == "pickle" and not inventory.tensors and not inventory.storages:
        return "there is no tensor in the pickle, and so no device to rewrite"
    return ""

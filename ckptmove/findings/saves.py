"""Rules about the files of one save: F806 to F811, and F815."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.findings.catalogue import found
from ckptmove.model import Severity
from ckptmove.text import amount, quoted, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.findings.context import Context
    from ckptmove.model import FactKind, Finding, Inventory

#: Files that a message names.
_SHOWN: Final = 4


def _records(inventory: Inventory, kind: FactKind) -> list[str]:
    """The files, members or tensors with a fact of a kind."""
    return [fact.record for fact in inventory.facts if fact.kind == kind]


def newer_files(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """F806: files of a distributed checkpoint were written after its ``.metadata``, which a save writes last."""
    newer = _records(inventory, "newer-file")
    if newer:
        message = f"{amount(len(newer), 'file')} newer than .metadata: copied, or left by an interrupted save"
        fix = "compare it with the checkpoint before it, with diff"
        yield found("F806", message, newer, fix)


def mixed_saves(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """F807: files of a distributed checkpoint, or of several ranks, are of two saves."""
    fix = f"resume from another checkpoint: {quoted(inventory.path)} holds files of two saves"
    steps = _records(inventory, "other-step")
    if steps:
        message = f"{amount(len(steps), 'file')} with another step count than the files of the other ranks: two saves"
        yield found("F807", message, steps, fix)
    newer = _records(inventory, "other-save")
    if newer:
        files = amount(len(newer), "file")
        message = f"{files} newer than .metadata, with another step count than the rest: two saves in one folder"
        yield found("F807", message, newer, fix)


def missing_ranks(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """F808: some ranks have no file, and others of the same save have one."""
    lost = _records(inventory, "missing-rank")
    if lost:
        message = f"{amount(len(lost), 'file')} of ranks missing: {some(lost, _SHOWN)}"
        fix = f"copy them from the machines of these ranks, then: ckptmove inspect --check {quoted(inventory.path)}"
        yield found("F808", message, lost, fix)
    replicas = _records(inventory, "missing-replica")
    if replicas:
        message = f"{amount(len(replicas), 'file')} of ranks missing, only replicas: {some(replicas, _SHOWN)}"
        fix = "no tensor needs them; to resume on the same ranks, copy them from the machines of these ranks"
        yield found("F808", message, replicas, fix)._replace(severity=Severity.INFO)


def absent_shards(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """F809: shards in safetensors may be missing."""
    lost = _records(inventory, "absent-shard")
    if lost:
        message = f"shards may be missing at the end of tensors: {some(lost, _SHOWN)}"
        fix = f"compare the shapes of the tensors with the model: ckptmove inspect {quoted(inventory.path)} --tensors"
        yield found("F809", message, lost, fix)


def other_replicas(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """F810: replicas of a shard differ."""
    names = _records(inventory, "other-replica")
    if names:
        message = f"replicas of {amount(len(names), 'tensor')} differ between ranks: {some(names, _SHOWN)}"
        fix = (
            f"resume from another checkpoint: the files of some ranks in {quoted(inventory.path)} are of another state"
        )
        files = _records(inventory, "replica-file")
        yield found("F810", message, [*files, *names], fix)


def dangling_pointers(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """F811: a file that a trainer reads first when it resumes names a checkpoint that is not there."""
    for pointer in inventory.pointers if isinstance(inventory, DirectoryInventory) else ():
        newest = f"; the newest there is {pointer.newest}" if pointer.newest else ""
        message = f"{pointer.path} names {pointer.names}, but there is no such checkpoint beside it{newest}"
        fix = f"copy that checkpoint to its place, or write the name of one that is there into {pointer.path}"
        yield found("F811", message, [pointer.path], fix)


def unsafe_members(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """F815: unpacking an archive would write outside of the folder, or make a file with special rights."""
    outside = _records(inventory, "outside-member")
    special = _records(inventory, "special-member")
    parts = [f"{amount(len(outside), 'member')} leading out of the folder: {some(outside, _SHOWN)}"] if outside else []
    parts += [f"{amount(len(special), 'member')} with setuid, or a device: {some(special, _SHOWN)}"] if special else []
    if parts:
        fix = f"do not unpack {quoted(inventory.path)}: ask for an archive without such members"
        yield found("F815", f"the archive has {' and '.join(parts)}", [*outside, *special], fix)


#: The rules, in the order of the codes.
RULES: Final = (
    newer_files,
    mixed_saves,
    missing_ranks,
    absent_shards,
    other_replicas,
    dangling_pointers,
    unsafe_members,
)

"""Rules about the bytes of the file: F801 to F805."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import convert_command, remap_command
from ckptmove.findings.safety import dangerous_global
from ckptmove.formats.facts import facts_of
from ckptmove.model import Severity
from ckptmove.text import Argument, amount, quoted, some
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.findings.context import Context
    from ckptmove.model import ArchiveFact, Finding, Inventory, TensorRecord

#: Wasted bytes, and share of the file, below which nothing is reported: small tensors share storages in every file.
_WORTH_BYTES: Final = 1024
_WORTH_SHARE: Final = 0.01
#: Files that a message names.
_SHOWN: Final = 4
#: Fix for files with code, which ``convert`` does not write anew.
_SAVE_AGAIN: Final = "save it again in the program that made it"


def crc_mismatch(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """F801: bytes differ from their CRC; only known if the records were read."""
    facts = [fact for fact in inventory.facts if fact.kind == "crc-mismatch"]
    if facts:
        nbytes = sum(fact.nbytes for fact in facts)
        message = f"{amount(len(facts), 'record')} ({nbytes:,} bytes) differ from the CRC in the archive"
        fix = f"copy or download it again, then: ckptmove inspect --check {quoted(inventory.path)}"
        yield found("F801", message, _where(inventory, facts), fix)


def truncated(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """F802: records or storages are cut off, absent or of another save, or the end of a tar is missing."""
    check = f"then: ckptmove inspect --check {quoted(inventory.path)}"
    fix = f"copy or download it again, {check}"
    endings = [fact for fact in inventory.facts if fact.kind == "missing-end"]
    if endings:
        message = (
            "the tar has no end marker (blocks of zeros): the rest of its last member, or more members, may be cut off"
        )
        finding = found("F802", message, [fact.record for fact in endings], fix)
        yield finding._replace(severity=Severity.WARNING)
    words = {
        "past-end": "record reaches past the end",
        "short-storage": "storage is shorter than its tensors",
        "missing-storage": "storage is absent",
        "damaged-piece": "piece differs from .metadata",
    }
    facts = [fact for fact in inventory.facts if fact.kind in words]
    if facts:
        if any(fact.kind == "damaged-piece" for fact in facts):
            fix = f"copy or download the whole directory of one save again, {check}"
        parts = []
        for kind, text in words.items():
            own = [fact for fact in facts if fact.kind == kind]
            if own:
                parts.append(f"{text} ({len(own)}x, {sum(fact.nbytes for fact in own):,} bytes)")
        yield found("F802", "; ".join(parts), _where(inventory, facts), fix)


def compressed_records(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """F803: ``torch.load(mmap=True)`` reads compressed bytes as numbers; ``torch.jit.load`` does not use mmap."""
    facts = [fact for fact in inventory.facts if fact.kind == "compressed-storage"]
    if facts:
        nbytes = sum(fact.nbytes for fact in facts)
        container = facts_of(inventory.container)
        is_script = container.has_code
        harm = f"{container.loader} inflates them, mmap is impossible" if is_script else "mmap=True reads garbage"
        message = f"{amount(len(facts), 'storage')} compressed in the archive ({nbytes:,} bytes): {harm}"
        # A conversion for a target inflates them too.
        where = _where(inventory, facts)
        compact = (
            "" if context.target is not None else remap_command(inventory, context, where, Argument("compact", True))
        )
        fix = compact or convert_command(inventory, context, where)
        finding = found("F803", message, where, fix)
        yield finding._replace(severity=Severity.INFO) if is_script else finding


def dead_bytes(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """F804: bytes that no tensor uses: kept for an undo, unused parts of storages, orphan records, unnamed files."""
    yield from _kept_for_undo(inventory)
    yield from _unnamed_files(inventory)
    yield from _inner_archives(inventory, context)
    wasted = _wasted(inventory)
    nbytes = sum(unreached for unreached, _ in wasted.values())
    if nbytes < max(_WORTH_BYTES, _WORTH_SHARE * inventory.size_bytes):
        wasted, nbytes = {}, 0
    orphans = [fact for fact in inventory.facts if fact.kind == "orphan-record"]
    if not wasted and not orphans:
        return
    parts = [f"{nbytes:,} bytes in {amount(len(wasted), 'storage')} are reached by no tensor"] if wasted else []
    if orphans:
        held = sum(fact.nbytes for fact in orphans)
        parts.append(f"{held:,} bytes in {amount(len(orphans), 'record')} belong to no storage")
    where = [tensor.name for tensor in inventory.tensors if any(one.storage in wasted for one in tensor.dense())]
    places = [*where, *(fact.record for fact in orphans)]
    # A loaded view still has its whole storage, and torch.save would write all of it again.
    cloned = (
        f"save it again with .clone() of {amount(len(where), 'view')}: torch.save writes the storage under a view whole"
    )
    is_cut = bool(orphans) or any(at_ends for _, at_ends in wasted.values())
    compact = remap_command(inventory, context, places, Argument("compact", True)) if is_cut else ""
    yield found("F804", "; ".join(parts), places, compact or (cloned if wasted else _SAVE_AGAIN))


def _kept_for_undo(inventory: Inventory) -> Iterator[Finding]:
    """F804 for the replaced pickle and zip directory that a conversion in place keeps for ``--undo``."""
    facts = [fact for fact in inventory.facts if fact.kind == "kept-for-undo"]
    if facts:
        nbytes = sum(fact.nbytes for fact in facts)
        # In a directory the name of a record begins with its file.
        files = [fact.record.rpartition("/")[0] for fact in facts]
        first = f"{inventory.path.rstrip('/')}/{files[0]}" if files[0] else inventory.path
        undo = f"ckptmove convert {quoted(first)} --undo"
        message = f"converted in place: {nbytes:,} bytes were added, and the old pickle is kept for {undo}"
        yield found("F804", message, [name for name in files if name], "")


def _unnamed_files(inventory: Inventory) -> Iterator[Finding]:
    """F804 for files in a distributed checkpoint that its ``.metadata`` does not name: a load ignores them."""
    facts = [fact for fact in inventory.facts if fact.kind == "unnamed-file"]
    if facts:
        nbytes = sum(fact.nbytes for fact in facts)
        message = f"{nbytes:,} bytes in {amount(len(facts), 'file')} that the .metadata does not name"
        yield found("F804", message, [fact.record for fact in facts], "")


def _inner_archives(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """F804 for archives in an archive: checkpoints in them are not read, converted or verified."""
    inner = [fact for fact in inventory.facts if fact.kind == "inner-archive"]
    if inner:
        nbytes = sum(fact.nbytes for fact in inner)
        message = (
            f"{amount(len(inner), 'archive')} in this one ({nbytes:,} bytes): "
            "checkpoints inside are not read, converted or verified"
        )
        first, last = inner[0].record, posixpath.basename(inner[0].record)
        out = f"unpack {quoted(first)} from {quoted(inventory.path)}"
        is_safe = next(dangerous_global(inventory, context), None) is None
        fix = f"{out}, then inspect {quoted(last)}" if is_safe else ""
        yield found("F804", message, [fact.record for fact in inner], fix)._replace(severity=Severity.WARNING)


def ambiguous_archive(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """F805: another reader sees something else in the file, or may see it in bytes that torch ignores."""
    readings = [fact.record for fact in inventory.facts if fact.kind == "second-reading"]
    if readings:
        message = f"two readers see different content: {inventory.container}, and {some(readings, _SHOWN)}"
        finding = found("F805", message, readings, "trust no copy of it: ask its author for a file in one format")
        yield finding._replace(severity=Severity.ERROR)
    if isinstance(inventory, DirectoryInventory):
        from ckptmove.findings.beside import ambiguous_beside

        yield from ambiguous_beside(inventory)
    facts = [fact for fact in inventory.facts if fact.kind == "stray-bytes"]
    if facts:
        nbytes = sum(fact.nbytes for fact in facts)
        message = f"{nbytes:,} bytes in {amount(len(facts), 'place')} belong to no record and to no pickle"
        where = [fact.record for fact in facts]
        fix = remap_command(inventory, context, where, Argument("compact", True)) or _SAVE_AGAIN
        yield found("F805", message, where, fix)


def _where(inventory: Inventory, facts: Sequence[ArchiveFact]) -> list[str]:
    """Return the names of the tensors in some records, or the name of the record if it has no tensor."""
    names: dict[str, list[str]] = {storage.key: [] for storage in inventory.storages}
    for tensor in inventory.tensors:
        for one in tensor.dense():
            if one.storage in names:
                names[one.storage].append(tensor.name)
    found_names: list[str] = []
    for fact in facts:
        found_names += names.get(fact.storage_key) or [fact.record]
    return list(dict.fromkeys(found_names))


def _wasted(inventory: Inventory) -> dict[str, tuple[int, int]]:
    """Return the number of bytes of each storage that no tensor uses, and of those at its ends.

    ``--compact`` cuts off the bytes before the first and after the last element that a tensor reaches. Tensors use at
    most the union of their extents, and at most the sum of their bytes.
    """
    own: dict[str, int] = {}
    shared: set[str] = set()
    for tensor in inventory.tensors:
        for one in tensor.parts or (tensor,):
            if one.storage is not None:
                if one.storage in own:
                    shared.add(one.storage)
                own[one.storage] = own.get(one.storage, 0) + one.nbytes
    # Most tensors fill their own storage. Only other storages are examined.
    doubtful = {
        storage.key: storage.nbytes
        for storage in inventory.storages
        if storage.key in shared or own.get(storage.key, storage.nbytes) != storage.nbytes
    }
    extents: dict[str, list[tuple[int, int]]] = {key: [] for key in doubtful}
    for tensor in inventory.tensors if doubtful else ():
        for one in tensor.dense():
            if one.storage in extents:
                extents[one.storage].append(_extent(one))
    wasted = {
        key: (nbytes - min(_union(extents[key]), own[key]), nbytes - _reach(extents[key]))
        for key, nbytes in doubtful.items()
    }
    return {key: (unreached, at_ends) for key, (unreached, at_ends) in wasted.items() if unreached > 0}


def _extent(tensor: TensorRecord) -> tuple[int, int]:
    """Return the first and the last byte (exclusive) of a tensor in its storage."""
    if 0 in tensor.shape:
        return 0, 0
    item = ITEM_BYTES.get(tensor.dtype, 1)
    last = tensor.storage_offset + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=False)
    )
    return tensor.storage_offset * item, (last + 1) * item


def _reach(extents: list[tuple[int, int]]) -> int:
    """Return the number of bytes from the first to the last of some extents."""
    used = [extent for extent in extents if extent[0] < extent[1]]
    return max(last for _, last in used) - min(first for first, _ in used) if used else 0


def _union(extents: list[tuple[int, int]]) -> int:
    total = end = 0
    for first, last in sorted(extents):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


#: The rules, in the order of the codes.
RULES: Final = (crc_mismatch, truncated, compressed_records, dead_bytes, ambiguous_archive)

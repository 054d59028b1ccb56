"""Read the sampled tensors of a remote checkpoint into a local copy with holes, which torch loads."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Final, cast

from ckptmove.checkpoint.pairing import pair_all
from ckptmove.formats.opening import container_class
from ckptmove.io.at_once import at_once
from ckptmove.io.remote.address import Address
from ckptmove.verification.sample.choice import choose_sample
from ckptmove.verification.sample.downloading import WholeNeeded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.io.contracts import Progress
    from ckptmove.io.remote.partial_copy import PartialCopy
    from ckptmove.io.remote.source import RemoteSource
    from ckptmove.model import Inventory, Span
    from ckptmove.verification.evidence import Verdict
    from ckptmove.verification.request import VerifyRequest

#: Files that are read at once.
_JOBS: Final = 8


@contextmanager
def copy_of_sample(path: str) -> Iterator[PartialCopy | None]:
    """A copy for the sample of a checkpoint at a URL; None for a local path."""
    if not isinstance(path, Address):
        yield None
        return
    from ckptmove.io.remote.partial_copy import partial_copy

    with partial_copy(path) as copy:
        yield copy


def filled(
    checkpoint: OpenCheckpoint, copy: PartialCopy | None, asked: VerifyRequest, progress: Progress | None
) -> VerifyRequest:
    """Read the sampled tensors, and tensors in the options of optimizers, into a copy.

    Args:
        checkpoint: the checkpoint; opening it has written what it read to the copy.
        copy: the copy, which is complete afterwards; None for a local checkpoint.
        asked: the options, with the sample.
        progress: called with the bytes read so far and their number.

    Returns:
        The options for the child process.

    Raises:
        WholeNeeded: if torch reads more of a file than its sampled tensors.
        RemoteFailed, SourceChanged: if the server or the network fails, or a file was written since it was opened.
        CopyFailed: if the system refuses to write.
    """
    if copy is None:
        return asked
    inventory, listing = checkpoint.inventory, checkpoint.listing
    if listing is not None and listing.form is not None:
        raise WholeNeeded(checkpoint.path, "verify reads archives of files as a whole")
    pairings = list(zip(inventory.optimizers, pair_all(inventory), strict=True))
    names = choose_sample(inventory, pairings, cast("int", asked.sample), asked.seed).names
    wanted: dict[str, list[Span]] = defaultdict(list)
    for part in checkpoint.parts:
        keys = _keys(part, inventory, names)
        if keys:
            _require_holes(checkpoint, part)
            for file, span in part.extents(keys):
                wanted[file].append(span)
        for file, pieces in part.stand_ins():
            wanted[file] += copy.stand_in(file, pieces)
    if listing is not None:
        copy.complete(listing)
    with ExitStack() as stack:
        requests: list[tuple[RemoteSource, list[Span]]] = []
        for file, spans in wanted.items():
            missing = copy.missing(file, spans)
            if missing:
                requests.append((stack.enter_context(closing(_source(checkpoint, file))), missing))
        _read(requests, progress)
    return asked._replace(path=copy.path, is_partial=True)


def of_whole(result: Verdict, checkpoint: OpenCheckpoint, copy: PartialCopy | None) -> Verdict:
    """The verdict on a copy as that on its checkpoint, with the requests."""
    if copy is None:
        return result

    def named(text: str) -> str:
        return text.replace(copy.path, checkpoint.path)

    checks = tuple(
        check._replace(detail=named(check.detail), failures=tuple(map(named, check.failures)), fix=named(check.fix))
        for check in result.checks
    )
    nbytes = checkpoint.inventory.size_bytes
    return replace(result, path=checkpoint.path, checks=checks, traffic=checkpoint.traffic, size_bytes=nbytes)


def _keys(part: OpenPart, inventory: Inventory, names: frozenset[str]) -> frozenset[str]:
    """Keys in a part of the storages that the checks of a sample read."""
    wrappers = [one.name for one in inventory.tensors if one.kind == "wrapper-subclass" and one.name in names]
    options = [group.where for optimizer in inventory.optimizers for group in optimizer.groups]
    prefixes = tuple(f"{name}." for name in (*wrappers, *options))
    dense = (
        tensor
        for record in part.inventory.tensors
        if record.name in names or record.name.startswith(prefixes)
        for tensor in record.dense()
    )
    return frozenset(key for key in map(part.own_key, dense) if key is not None)


def _require_holes(checkpoint: OpenCheckpoint, part: OpenPart) -> None:
    """Raise WholeNeeded if torch cannot load a part with the bytes of some tensors alone."""
    inventory = part.inventory
    if not container_class(inventory.container).allows_holes:
        raise WholeNeeded(checkpoint.path, f"verify reads a {inventory.container} file as a whole")
    if any(fact.kind == "compressed-storage" for fact in inventory.facts):
        raise WholeNeeded(checkpoint.path, "verify reads a file with compressed records as a whole")


def _source(checkpoint: OpenCheckpoint, file: str) -> RemoteSource:
    source = checkpoint.file.source if checkpoint.listing is None else checkpoint.listing.open(file)
    return cast("RemoteSource", source)


def _read(requests: list[tuple[RemoteSource, list[Span]]], progress: Progress | None) -> None:
    """Read spans of several files at once, those of a file one after the other."""
    done, total, lock = 0, sum(span.nbytes for _, spans in requests for span in spans), Lock()

    def read(one: tuple[RemoteSource, list[Span]]) -> None:
        nonlocal done
        source, spans = one
        for span in spans:
            source.fetch(*span)
            if progress is not None:
                with lock:
                    done += span.nbytes
                    progress(done, total)

    for _ in at_once(read, requests, _JOBS):
        pass

"""Download a remote checkpoint: the local copy appears under its name only when it is complete and durable."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

from ckptmove.io.contracts import CopySegment
from ckptmove.io.directory_sink import DirectorySink
from ckptmove.io.locations import make_folder
from ckptmove.io.new_output import require_new_file, require_new_folder
from ckptmove.io.outputs import do_nothing
from ckptmove.io.remote.filesystem import open_remote
from ckptmove.io.remote.source import RemoteSource
from ckptmove.io.rewrite import write_segments
from ckptmove.io.sink import FileSink
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ckptmove.io.contracts import Progress
    from ckptmove.io.listing import Listing
    from ckptmove.io.remote.address import Address
    from ckptmove.limits import Limits


def download(
    address: Address,
    target: str,
    limits: Limits,
    exclude: Collection[str] = (),
    progress: Progress | None = None,
    settle: Callable[[], None] = do_nothing,
) -> None:
    """Download a file, or a directory without the folders of ``exclude``. Folders above the target are created.

    ``settle`` is called before the last step, which cannot be undone: signals must not raise exceptions after it.
    """
    found = open_remote(address, limits)
    make_folder(os.path.dirname(target) or ".")
    if not isinstance(found, RemoteSource):
        _download_folder(found.without(exclude), target, progress, settle)
        return
    with closing(found):
        require_new_file("", target, target, force=False)
        with FileSink(target, force=False) as sink:
            write_segments(found, [CopySegment(Span(0, found.size))], sink, progress)
            sink.commit(settle)


def _download_folder(listing: Listing, target: str, progress: Progress | None, settle: Callable[[], None]) -> None:
    require_new_folder(listing.path, target, force=False)
    done, total = 0, listing.size_bytes
    with DirectorySink(target, listing.names, force=False) as sink:
        sink.reserve(total)
        for folder in listing.folders:
            sink.folder(folder.path, folder.mode)
        for file in listing.files:
            with closing(listing.open(file.path)) as source, sink.file(file.path, file.mode) as new:
                write_segments(source, [CopySegment(Span(0, source.size))], new)
            done += source.size
            if progress is not None:
                progress(done, total)
        sink.commit(settle)

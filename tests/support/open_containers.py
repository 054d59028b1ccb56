"""Open the containers of files on the disk."""

from __future__ import annotations

from ckptmove.errors import CkptMoveError
from ckptmove.formats.opening import container_of
from ckptmove.io.source import open_source


def open_container(path, limits):
    """Open the container of a file; the caller closes its source."""
    source = open_source(path)
    try:
        return container_of(source, limits)
    except CkptMoveError:
        source.close()
        raise

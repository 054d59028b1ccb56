"""Download a checkpoint before it is verified: torch reads local files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.errors import OutputExists
from ckptmove.io.remote.address import Address
from ckptmove.io.remote.errors import NotLocal
from ckptmove.text import Argument, Phrase

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.io.contracts import Progress
    from ckptmove.proof.request import VerifyRequest


class CopyExists(OutputExists):
    """The local copy of a checkpoint that ``verify`` would download already exists."""


class NotDownloaded(NotLocal):
    """The checkpoint is at a URL, and torch reads local files."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "verify reads local files")


def require_local(request: VerifyRequest) -> None:
    """Require that all files are local, or will be downloaded."""
    if isinstance(request.against, Address):
        raise NotLocal(request.against, Phrase(Argument("against"), " reads local files"))
    if isinstance(request.path, Address) and request.download is None:
        raise NotDownloaded(request.path)


def downloaded(request: VerifyRequest, progress: Progress | None, settle: Callable[[], None]) -> VerifyRequest:
    """The request with a local path in place of a URL, which is downloaded to ``request.download``.

    Args:
        request: the options of ``verify``.
        progress: called with the bytes downloaded so far and the total.
        settle: called before the copy gets its name, which cannot be undone.
    """
    require_local(request)
    if request.download is None or not isinstance(request.path, Address):
        return request
    from ckptmove.io.remote.download import download

    try:
        download(request.path, request.download, request.limits, request.exclude, progress, settle)
    except OutputExists as error:
        raise CopyExists(request.download) from error
    return request._replace(path=request.download, download=None)

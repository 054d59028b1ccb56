"""Download a checkpoint before it is verified, unless only a sample of it is read: torch reads local files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import OutputExists
from ckptmove.io.remote.address import Address
from ckptmove.io.remote.errors import NotLocal
from ckptmove.text import Argument, Phrase

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.io.contracts import Progress
    from ckptmove.verification.request import VerifyRequest

#: Beginning of the message where ``download`` would help.
VERIFY_IS_LOCAL: Final = "verify reads local files"


class CopyExists(OutputExists):
    """The local copy of a checkpoint that ``verify`` would download already exists."""


class WholeNeeded(NotLocal):
    """The checks need more of a checkpoint at a URL than a sample of its tensors."""


def downloaded(request: VerifyRequest, progress: Progress | None, settle: Callable[[], None]) -> VerifyRequest:
    """The request with a local path in place of a URL, which is downloaded to ``request.download``.

    Without ``download``, the URL stays if only the metadata (``fit``) or a sample is read.

    Args:
        request: the options of ``verify``.
        progress: called with the bytes downloaded so far and the total.
        settle: called before the copy gets its name, which cannot be undone.

    Raises:
        CopyExists: if the copy exists.
        NotLocal: if the path is a URL and neither ``download`` nor ``sample`` is set, or the original is a URL.
        WholeNeeded: if the path is a URL, ``download`` is not set, and a sample is not enough.
        CkptMoveError: as of :func:`ckptmove.io.remote.download.download`.
    """
    if isinstance(request.against, Address):
        raise NotLocal(request.against, Phrase(Argument("against"), " reads local files"))
    if not isinstance(request.path, Address) or request.fit is not None:  # --fit reads only the metadata
        return request
    if request.download is None:
        for option, value in (("against", request.against), ("case", request.case), ("script", request.script)):
            if value is not None:
                raise WholeNeeded(request.path, Phrase(Argument(option), " needs the whole checkpoint"))
        if request.sample is None:
            raise NotLocal(request.path, VERIFY_IS_LOCAL)
        return request
    from ckptmove.io.remote.download import download

    try:
        download(request.path, request.download, request.limits, request.exclude, progress, settle)
    except OutputExists as error:
        raise CopyExists(request.download) from error
    return request._replace(path=request.download, download=None)

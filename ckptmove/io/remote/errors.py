"""Errors of checkpoints at a URL."""

from __future__ import annotations

from ckptmove.errors import AccessFailed, UnreadableInput, UsageError
from ckptmove.text import Phrase, size


class RemoteMissing(UsageError):
    """A package that reads the URL is not installed.

    Attributes:
        scheme: protocol of the URL.
        package: its name.
        is_extra: whether the extra ``remote`` installs it.
    """

    kind = "remote-missing"
    is_of_checkpoint = True

    def __init__(self, path: str, scheme: str, package: str, *, is_extra: bool) -> None:
        super().__init__(f"{scheme}:// needs {package}, which is not installed", path=path)
        self.scheme = scheme
        self.package = package
        self.is_extra = is_extra


class UnknownScheme(UsageError):
    """fsspec has no file system for the protocol of the URL.

    Attributes:
        scheme: the protocol.
        suggestion: a similar protocol of fsspec, or empty.
    """

    kind = "unknown-scheme"
    is_of_checkpoint = True

    def __init__(self, path: str, scheme: str, suggestion: str) -> None:
        super().__init__(f"fsspec knows no protocol '{scheme:.40}'", path=path)
        self.scheme = scheme
        self.suggestion = suggestion


class ArtifactAddress(UsageError):
    """The address names an artifact of an experiment tracker, which its own tool downloads.

    Attributes:
        command: the words of the command that downloads it.
    """

    kind = "artifact-address"
    is_of_checkpoint = True

    def __init__(self, path: str, tracker: str, command: tuple[str, ...]) -> None:
        super().__init__(f"an artifact of {tracker}, which must be downloaded first", path=path)
        self.command = command


class NotLocal(UsageError):
    """The operation needs a local path. ``operation`` begins the message: ``verify reads local files``."""

    kind = "not-local"
    is_of_checkpoint = True

    def __init__(self, path: str, operation: str) -> None:
        super().__init__(Phrase(operation, ", and this is a URL"), path=path)


class RemoteFailed(AccessFailed):
    """A server or a network refuses or fails to send the input.

    Attributes:
        scheme: protocol of the URL.
        is_denied: whether the server wants other credentials.
    """

    kind = "remote-failed"

    def __init__(self, path: str, reason: str, scheme: str, *, is_denied: bool = False) -> None:
        super().__init__(path, reason)
        self.scheme = scheme
        self.is_denied = is_denied


class NoRanges(UnreadableInput):
    """The server does not send the requested range of a file.

    Attributes:
        nbytes: size of the file; None if the server does not tell it.
    """

    kind = "no-ranges"

    def __init__(self, path: str, nbytes: int | None, flaw: str = "") -> None:
        whole = "the whole file" if nbytes is None else f"all {size(nbytes)} of it"
        super().__init__(flaw or f"the server ignores Range requests and would send {whole}", path=path)
        self.nbytes = nbytes

"""Name the failures of servers, networks and fsspec's file systems, each of which has errors of its own."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from ckptmove.errors import CkptMoveError, MissingFile, SourceChanged
from ckptmove.io.remote.address import redacted
from ckptmove.io.remote.errors import RemoteFailed, RemoteMissing

if TYPE_CHECKING:
    from types import TracebackType

    from ckptmove.io.remote.address import Address

#: Status codes: unauthorized and forbidden, not found and gone, precondition failed.
DENIED: Final = frozenset({401, 403})
MISSING: Final = frozenset({404, 410})
_CHANGED: Final = 412
#: No library nests its errors deeper.
_MOST_CAUSES: Final = 10
#: Packages of the extra ``remote``, by protocol.
_PACKAGES: Final = {
    "http": "fsspec[http]",
    "https": "fsspec[http]",
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
}
#: Classes of errors, by name, of a file that changed (s3fs), of absent or expired credentials (botocore, google-auth)
#: and of a repository that must be asked for (huggingface_hub).
_CHANGES: Final = frozenset({"FileExpired"})
_DENIALS: Final = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "UnauthorizedSSOTokenError",
    "DefaultCredentialsError", "RefreshError", "GatedRepoError", "LocalTokenNotFoundError",
})  # fmt: skip
_CERTIFICATES: Final = frozenset({"ClientConnectorCertificateError", "SSLCertVerificationError"})
#: Reasons by class, by name.
_REASONS: Final = {
    **dict.fromkeys(
        ("TimeoutError", "FSTimeoutError", "ReadTimeoutError", "ConnectTimeoutError"),
        "the server did not answer in time",
    ),
    **dict.fromkeys(
        ("ClientPayloadError", "ServerDisconnectedError", "IncompleteReadError", "ConnectionResetError"),
        "the server closed the connection before the end of its answer",
    ),
    "TooManyRedirects": "the server redirects in a circle",
    "RedirectClientError": "the server redirects to an address that is not of a web server",
    "ClientConnectorSSLError": "the server does not answer in TLS",
}
_LONGEST: Final = 200


class failures_named(AbstractContextManager[None]):  # noqa: N801  # reads like a function
    """Turn the errors of a file system into those of ckptmove. Their own texts may hold credentials."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Replace an error; interruptions and errors of ckptmove stay."""
        if isinstance(error, Exception) and not isinstance(error, CkptMoveError | MemoryError):
            raise _named(error, self._address) from None


def _named(error: Exception, address: Address) -> CkptMoveError:
    path, scheme = str(address), address.scheme
    names = {one.__name__ for one in type(error).__mro__}
    status = _status(error)
    if isinstance(error, ImportError):
        module = error.name or getattr(error.__cause__, "name", None) or ""  # what fsspec could not import
        package = _PACKAGES.get(scheme) or module.partition(".")[0] or "a package of fsspec"
        return RemoteMissing(path, scheme, package, is_extra=scheme in _PACKAGES or package == "fsspec")
    if names & _CHANGES or status == _CHANGED:
        return SourceChanged(path)
    if isinstance(error, FileNotFoundError) or status in MISSING:
        return MissingFile(path)
    if isinstance(error, PermissionError) or status in DENIED or names & _DENIALS:
        return RemoteFailed(path, f"access denied: {_first_line(error)}", scheme, is_denied=True)
    return RemoteFailed(path, _reason(error, names), scheme)


def _reason(error: Exception, names: set[str]) -> str:
    if _caused_by_name(error):
        return "the name of the host cannot be resolved"
    if names & _CERTIFICATES:
        return f"its TLS certificate is not valid: {_first_line(error)}"
    if "ClientConnectorError" in names and "ClientConnectorSSLError" not in names:
        number = getattr(error, "errno", None)
        return os.strerror(number) if number else "no connection to the host"
    known = next((reason for name, reason in _REASONS.items() if name in names), "")
    return known or _first_line(error)


def _status(error: Exception) -> int | None:
    """The status code of an error of aiohttp, gcsfs or huggingface_hub."""
    found = getattr(error, "status", None)
    if found is None:  # `code` is deprecated in aiohttp
        found = getattr(error, "code", None)
    if found is None:
        found = getattr(getattr(error, "response", None), "status_code", None)
    return int(str(found)) if str(found).isdecimal() else None


def _caused_by_name(error: BaseException | None) -> bool:
    """Whether the name of a host could not be resolved: the first cause tells."""
    seen = 0
    while error is not None and seen < _MOST_CAUSES:
        if isinstance(error, socket.gaierror):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _first_line(error: Exception) -> str:
    lines = redacted(str(error)).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:_LONGEST]

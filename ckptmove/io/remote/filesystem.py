"""Open and list what fsspec reaches: the file system of a URL, its files, its folders and its globs."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ckptmove.errors import LimitExceeded, MissingFile, SourceChanged
from ckptmove.io.contracts import Traffic
from ckptmove.io.leftovers import is_unfinished
from ckptmove.io.listing import DEEPEST, ListedFile, ListedFolder, Listing
from ckptmove.io.locations import leads_out
from ckptmove.io.remote.address import Address, Place
from ckptmove.io.remote.errors import ArtifactAddress, RemoteFailed, UnknownScheme
from ckptmove.io.remote.failures import failures_named
from ckptmove.io.remote.http import HttpFile
from ckptmove.io.remote.source import RemoteSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptmove.io.remote.source import RemoteFile
    from ckptmove.io.source import DiskPlace
    from ckptmove.limits import Limits

#: What identifies a version of a file, by file fs.
_VERSIONS: Final = (
    "ETag", "etag", "generation", "version_id", "LastModified", "last_modified", "mtime", "updated", "blob_id",
    "created",
)  # fmt: skip
#: Options of aiohttp: proxies of the environment and passwords of ``.netrc``, as curl and pip use them.
_CLIENT: Final = {"trust_env": True}
_READABLE: Final = 0o644
_SEARCHABLE: Final = 0o755


def find_place(address: Address) -> Place:
    """The file system of a URL, with the credentials that fsspec finds.

    Raises:
        ArtifactAddress: if it names an artifact of an experiment tracker.
        RemoteMissing: if fsspec, or its package for the protocol, is not installed.
        UnknownScheme: if fsspec does not know the protocol.
    """
    if address.place is not None:
        return address.place
    if address.is_artifact:
        raise _artifact(address)
    with failures_named(address):
        from fsspec.config import conf
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations, registry

        known = {*known_implementations, *registry}
        if address.scheme not in known:
            raise UnknownScheme(str(address), address.scheme, *get_close_matches(address.scheme, known, n=1) or [""])
        options = {"client_kwargs": _CLIENT} if address.is_http and address.scheme not in conf else {}
        return Place(*url_to_fs(address.scheme + address.url[len(address.scheme) :], **options))


def _artifact(address: Address) -> ArtifactAddress:
    scheme, _, rest = address.url.partition(":")
    if scheme.startswith("wandb"):
        return ArtifactAddress(str(address), "Weights & Biases", ("wandb", "artifact", "get", rest.lstrip("/")))
    uri = rest if scheme == "mlflow" else address.url
    command = ("mlflow", "artifacts", "download", "--artifact-uri", uri, "--dst-path", ".")
    return ArtifactAddress(str(address), "MLflow", command)


def open_remote(address: Address, limits: Limits) -> RemoteSource | RemoteListing:
    """Open a remote file, or list a remote directory.

    Raises:
        UsageError: as of :func:`find_place`.
        MissingFile: if it does not exist.
        RemoteFailed, NoRanges: if the server or the network fails, or sends only whole files.
        LimitExceeded: if a directory has more entries than the limits allow.
    """
    place = find_place(address)
    traffic = Traffic()
    if address.place is None and not address.is_http:
        place.fs.invalidate_cache()  # of an earlier call in this process
    if address.url.endswith("/"):
        return _list_directory(address, place, limits, traffic)
    if address.is_http:
        return RemoteSource(HttpFile(address, place.fs, traffic), traffic)
    traffic.add(requests=address.place is None)
    file = _open(address, place, traffic)
    return _list_directory(address, place, limits, traffic) if file is None else RemoteSource(file, traffic)


def expand(address: Address) -> list[str]:
    """The URLs that match a glob, sorted; the glob itself without a match.

    Raises:
        UsageError: as of :func:`find_place`.
        RemoteFailed: if the server or the network fails.
    """
    place = find_place(address)
    with failures_named(address):
        fs, path = place
        found = sorted(fs.glob(path))
        return [Address(fs.unstrip_protocol(one), Place(fs, one)) for one in found] or [address]


class _SystemFile:
    """A file of a file system of fsspec.

    Attributes:
        path: its URL without credentials.
        size: its length in bytes.
        head: empty.
    """

    head = b""

    def __init__(self, address: Address, place: Place, file: Any, details: Mapping[str, Any], traffic: Traffic) -> None:
        self.path, self.size = str(address), int(details["size"])
        self._address, self._place, self._file, self._traffic = address, place, file, traffic
        self._version = _version(details)
        #: Each request of s3fs names the ETag of the file that it opened.
        self._is_pinned = "s3" in place.fs.protocol

    def fetch(self, start: int, end: int) -> bytes:
        """Request the bytes from ``start`` to ``end`` (exclusive); errors as of :class:`RemoteFile`."""
        self._traffic.add(requests=1)
        with failures_named(self._address):
            self._file.seek(start)
            data: bytes = self._file.read(end - start)
        self._traffic.add(nbytes=len(data))
        if len(data) != end - start:
            raise SourceChanged(self.path)
        return data

    def require_unchanged(self) -> None:
        """Compare its version with the one now, unless each request has asked for the same version."""
        if self._is_pinned:
            return
        self._traffic.add(requests=1)
        with failures_named(self._address):
            self._place.fs.invalidate_cache()
            details = self._place.fs.info(self._place.path)
        if _version(details) != self._version:
            raise SourceChanged(self.path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _version(details: Mapping[str, Any]) -> tuple[object, ...]:
    return (details["size"], *(details.get(key) for key in _VERSIONS))


def _open(address: Address, place: Place, traffic: Traffic) -> RemoteFile | None:
    """Open a file; None for a directory."""
    with failures_named(address):
        try:
            file = place.fs.open(place.path, "rb", cache_type="none")
        except (FileNotFoundError, IsADirectoryError):
            if place.fs.isdir(place.path):
                return None
            raise
        # A file of s3fs or gcsfs has asked for its details already.
        details = getattr(file, "details", None) or place.fs.info(place.path)
        if details["type"] == "directory":
            file.close()
            return None
        if details["size"] is None:
            file.close()
            raise RemoteFailed(str(address), "the server does not tell its size", address.scheme)
        return _SystemFile(address, place, file, details, traffic)


@dataclass(frozen=True)
class RemoteListing(Listing):
    """The content of a remote directory.

    Attributes:
        addresses: the address of each file, by its path in the directory.
        traffic: requests for the directory and its files.
        heads: files of a web server whose first bytes were read for their sizes.
    """

    is_remote: ClassVar[bool] = True
    addresses: Mapping[str, Address] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    heads: dict[str, HttpFile] = field(default_factory=dict)

    def full(self, path: str) -> str:
        """URL of something in the directory, without credentials."""
        return f"{self.path.rstrip('/')}/{path}" if path else self.path

    def open(self, path: str) -> RemoteSource:
        """The bytes of a file; the caller closes them. Errors as of :func:`open_remote`."""
        address = self.addresses.get(path)
        if address is None:
            raise MissingFile(self.full(path))
        if address.is_http:
            file = self.heads.pop(path, None) or HttpFile(address, find_place(address).fs, self.traffic)
            return RemoteSource(file, self.traffic)
        found = _open(address, find_place(address), self.traffic)
        if found is None:
            raise SourceChanged(str(address))
        return RemoteSource(found, self.traffic)

    def disk(self, file: ListedFile) -> DiskPlace | None:
        """None: its bytes are not on a disk."""
        del file
        return None

    def read_from(self, files: Iterable[ListedFile]) -> tuple[DiskPlace, ...]:
        """No files on the disk."""
        del files
        return ()

    def require_unchanged(self, file: ListedFile) -> None:
        """Do nothing: a file is compared with itself while it is read."""


def _list_directory(address: Address, place: Place, limits: Limits, traffic: Traffic) -> RemoteListing:
    """List a remote directory with everything below it."""
    traffic.add(requests=1)
    fs, top = place
    with failures_named(address):
        # Without a depth, stores of objects list all levels at once; the links of web pages may form a circle.
        depth = {"maxdepth": DEEPEST} if address.is_http else {}
        found: dict[str, Any] = fs.find(top, detail=True, **depth)
    if len(found) > limits.entries:
        raise LimitExceeded("entries of a directory", limit=limits.entries, actual=len(found), path=str(address))
    if not found:
        raise MissingFile(str(address))
    top = top.rstrip("/")
    files: list[ListedFile] = []
    addresses: dict[str, Address] = {}
    heads: dict[str, HttpFile] = {}
    for name, details in found.items():
        if address.is_http and not name.startswith(f"{top}/"):  # fsspec follows links from https to http
            continue
        path = name.removeprefix(top).lstrip("/")
        folders, last = path.split("/")[:-1], path.rpartition("/")[2]
        if not last or is_unfinished(last) or leads_out(path):
            continue
        addresses[path] = Address(fs.unstrip_protocol(name), Place(fs, name))
        nbytes = details["size"]
        if nbytes is None:  # an index of a web server tells no sizes
            heads[path] = HttpFile(addresses[path], fs, traffic)
            nbytes = heads[path].size
        is_hidden = any(folder.startswith(".") for folder in folders)
        files.append(ListedFile(path, int(nbytes), _READABLE, (0, 0, int(nbytes), 0), is_hidden))
    named = {""}
    for path in addresses:
        parts = path.split("/")[:-1]
        named |= {"/".join(parts[: at + 1]) for at in range(len(parts))}
    return RemoteListing(
        str(address),
        tuple(sorted(files, key=lambda file: file.path)),
        tuple(ListedFolder(folder, _SEARCHABLE) for folder in sorted(named)),
        (),
        addresses,
        traffic,
        heads,
    )

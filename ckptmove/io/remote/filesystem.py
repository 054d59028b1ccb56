"""Open and list what fsspec reaches: the file system of a URL, its files, its folders and its globs."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ckptmove.errors import LimitExceeded, MissingFile, SourceChanged
from ckptmove.io.at_once import at_once, started
from ckptmove.io.contracts import Traffic
from ckptmove.io.leftovers import is_unfinished
from ckptmove.io.listing import DEEPEST, ListedFile, ListedFolder, Listing
from ckptmove.io.locations import leads_out
from ckptmove.io.remote.address import Address, RemotePath
from ckptmove.io.remote.errors import ArtifactAddress, RemoteFailed, UnknownScheme
from ckptmove.io.remote.failures import failures_named
from ckptmove.io.remote.http import HttpFile
from ckptmove.io.remote.source import RemoteSource
from ckptmove.io.remote.time_limits import LISTING_SECONDS, SECONDS, range_seconds, timed
from ckptmove.io.walk import WalkedFile, fingerprint, is_left_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from ckptmove.io.remote.source import RemoteFile
    from ckptmove.io.source import DiskPlace
    from ckptmove.limits import Limits

#: What identifies a version of a file, by file fs.
_VERSIONS: Final = (
    "ETag", "etag", "generation", "version_id", "LastModified", "last_modified", "mtime", "updated", "blob_id",
    "created",
)  # fmt: skip
#: s3fs sends a request up to five times, and botocore each of those up to five times, with 15 seconds for an answer.
#: Two of botocore's are enough: a server that does not answer would take six minutes for each file.
_ATTEMPTS: Final = {"retries": {"mode": "standard", "total_max_attempts": 2}}
_READABLE: Final = 0o644
#: Files of a directory that are kept after they were read.
_MOST_OPENED: Final = 64
#: Files of a directory that are requested at once.
_AHEAD: Final = 16
#: Beginning of a zip archive, whose directory is at its end.
_ZIP: Final = b"PK"
_SEARCHABLE: Final = 0o755
#: Endings of files next to checkpoints that are text: to see that, each would take a request.
_TEXTS: Final = (".json", ".jsonl", ".md", ".txt", ".log", ".py", ".yaml", ".yml", ".toml", ".csv", ".jinja")


def find_place(address: Address) -> RemotePath:
    """The file system of a URL, with the credentials that fsspec finds."""
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
        options = {} if address.scheme in conf else _options(address)
        found = RemotePath(*url_to_fs(address.scheme + address.url[len(address.scheme) :], **options))
        _end_silently()
        return found


@cache
def _end_silently() -> None:
    """Keep asyncio from writing a line at exit for each request that an interrupted program did not wait for."""
    from fsspec.asyn import loop

    atexit.register(_silence, loop)


def _silence(loops: Sequence[Any]) -> None:
    """Silence the event loop of fsspec: the first of a list, None until it is needed and after a fork."""
    for loop in filter(None, loops):
        loop.set_exception_handler(lambda _loop, _context: None)


def _options(address: Address) -> dict[str, Any]:
    """Options of the file system that the configuration of fsspec does not set."""
    if address.is_http:
        from aiohttp import ClientTimeout

        # Proxies of the environment and passwords of ``.netrc``, as curl and pip use them; a time for each index page.
        return {"client_kwargs": {"trust_env": True, "timeout": ClientTimeout(total=SECONDS)}}
    if address.scheme in {"s3", "s3a"} and not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & os.environ.keys():
        return {"config_kwargs": _ATTEMPTS}
    return {}


def _artifact(address: Address) -> ArtifactAddress:
    scheme, _, rest = address.url.partition(":")
    if scheme.startswith("wandb"):
        return ArtifactAddress(str(address), "Weights & Biases", ("wandb", "artifact", "get", rest.lstrip("/")))
    uri = rest if scheme == "mlflow" else address.url
    command = ("mlflow", "artifacts", "download", "--artifact-uri", uri, "--dst-path", ".")
    return ArtifactAddress(str(address), "MLflow", command)


def open_remote(address: Address, limits: Limits) -> RemoteSource | RemoteListing:
    """Open a remote file, or list a remote directory."""
    place = find_place(address)
    traffic = Traffic()
    if address.place is None and not address.is_http:
        place.fs.invalidate_cache()  # of an earlier call in this process
    listing, is_folder = None, address.url.endswith("/")
    # Folders of checkpoints seldom have a dot in their names, and files without one are rare.
    if is_folder or not (address.is_http or address.place or "." in address.name):
        listing = _list_directory(address, place, limits, traffic)
        if listing.files or is_folder:
            return _not_empty(listing)
    if address.is_http:
        file: RemoteFile | None = HttpFile(address, place.fs, traffic)
    else:
        traffic.add(requests=address.place is None)
        file = _open(address, place, traffic)
    if file is None:
        return _not_empty(listing or _list_directory(address, place, limits, traffic))
    return RemoteSource(file, traffic)


def expand(address: Address) -> list[str]:
    """The URLs that match a glob, sorted; the glob itself without a match."""
    place = find_place(address)
    with failures_named(address):
        fs, path = place
        found = sorted(timed(address, lambda: fs.glob(path), LISTING_SECONDS))
        return [Address(fs.unstrip_protocol(one), RemotePath(fs, one)) for one in found] or [address]


class _SystemFile:
    head = b""

    def __init__(
        self, address: Address, place: RemotePath, file: Any, details: Mapping[str, Any], traffic: Traffic
    ) -> None:
        self.path, self.size = str(address), int(details["size"])
        self._address, self._place, self._file, self._traffic = address, place, file, traffic
        self.version = _version(details)
        #: Each request of s3fs names the ETag of the file that it opened.
        self._is_pinned = "s3" in place.fs.protocol

    def fetch(self, start: int, end: int, *, is_bulk: bool = False) -> bytes:
        """Request the bytes from ``start`` to ``end`` (exclusive); errors as of :class:`RemoteFile`."""
        self._traffic.add(requests=1)

        def read() -> bytes:
            self._file.seek(start)
            data: bytes = self._file.read(end - start)
            return data

        with failures_named(self._address):
            data = timed(self._address, read, range_seconds(end - start, is_bulk=is_bulk))
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
            details = timed(self._address, lambda: self._place.fs.info(self._place.path))
        if _version(details) != self.version:
            raise SourceChanged(self.path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _version(details: Mapping[str, Any]) -> tuple[object, ...]:
    return (details["size"], *(details.get(key) for key in _VERSIONS))


def _open(address: Address, place: RemotePath, traffic: Traffic) -> RemoteFile | None:
    """Open a file; None for a directory."""
    with failures_named(address):
        found = timed(address, lambda: _looked_up(place))
    if found is None:
        return None
    file, details = found
    if details["size"] is None:
        file.close()
        raise RemoteFailed(str(address), "the server does not tell its size", address.scheme)
    return _SystemFile(address, place, file, details, traffic)


def _looked_up(place: RemotePath) -> tuple[Any, Mapping[str, Any]] | None:
    """The file and its details; None for a directory."""
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
    return file, details


@dataclass(frozen=True)
class RemoteListing(Listing):
    """The content of a remote directory."""

    is_remote: ClassVar[bool] = True
    #: the address of each file, by its path in the directory.
    addresses: Mapping[str, Address] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)  # requests for the directory and its files
    #: files of a web server whose first bytes were read for their sizes.
    heads: dict[str, HttpFile] = field(default_factory=dict)
    #: the files that were opened last. Inventory, objects and step counts are read in turn, and most files are
    #: answered from one window.
    opened: dict[str, RemoteSource] = field(default_factory=dict)
    #: the version of each file when it was first opened.
    versions: dict[str, tuple[object, ...]] = field(default_factory=dict)
    #: whether several threads can read its files. Those of FTP and of ``tar://`` share a position.
    answers_at_once: bool = False
    #: files that are read ahead, and not yet opened.
    begun: dict[str, Future[RemoteSource]] = field(default_factory=dict)

    @property
    def jobs(self) -> int:
        """Number of files to read at a time."""
        return _AHEAD if self.answers_at_once else 1

    def full(self, path: str) -> str:
        """URL of something in the directory, without credentials."""
        return f"{self.path.rstrip('/')}/{path}" if path else self.path

    def open(self, path: str) -> RemoteSource:
        """The bytes of a file; the caller closes them."""
        source = self.opened.pop(path, None)
        if source is None:
            begun = self.begun.pop(path, None)
            source = self._source(path) if begun is None else begun.result()
        while len(self.opened) >= _MOST_OPENED:
            self.opened.pop(next(iter(self.opened)))
        self.opened[path] = source
        return source

    def _source(self, path: str) -> RemoteSource:
        file = self._file(path)
        if self.versions.setdefault(path, file.version) != file.version:
            raise SourceChanged(file.path)
        return RemoteSource(file, self.traffic, is_shared=True)

    def read_ahead(self, paths: Iterable[str]) -> Iterator[str]:
        """The paths, in order, after the first bytes of each file were requested, and the last ones of an archive.

        Every reader requests these first, one after the other. An error is raised when its file is opened.
        """
        if not self.answers_at_once:
            yield from paths
            return
        left = iter(paths)
        while batch := [*islice(left, _AHEAD)]:
            for path, found in zip(batch, [started(self._begun, path) for path in batch], strict=True):
                self.begun[path] = found
            yield from batch

    def _begun(self, path: str) -> RemoteSource:
        """A file whose windows are read."""
        source = self._source(path)
        if source.read(0, min(len(_ZIP), source.size)) == _ZIP:
            source.read(source.size - 1, source.size)
        return source

    def is_text(self, path: str) -> bool:
        """Whether a file is text, by its name."""
        return path.endswith(_TEXTS)

    def _file(self, path: str) -> RemoteFile:
        address = self.addresses.get(path)
        if address is None:
            raise MissingFile(self.full(path))
        if address.is_http:
            return self.heads.pop(path, None) or HttpFile(address, find_place(address).fs, self.traffic)
        found = _open(address, find_place(address), self.traffic)
        if found is None:
            raise SourceChanged(str(address))
        return found

    def disk(self, file: ListedFile) -> DiskPlace | None:
        """None: its bytes are not on a disk."""
        del file
        return None

    def read_from(self, files: Iterable[ListedFile]) -> tuple[DiskPlace, ...]:
        """No files on the disk."""
        del files
        return ()

    def require_unchanged(self, file: ListedFile) -> None:
        """Do nothing: a file is compared when it is opened again, and all of them at the end."""

    def require_opened_unchanged(self) -> None:
        """Raise SourceChanged if a file was written since it was first opened; each answer over HTTP tells that."""
        for path in [*self.versions]:
            if not self.addresses[path].is_http:
                self.open(path).require_unchanged()


def _list_directory(address: Address, place: RemotePath, limits: Limits, traffic: Traffic) -> RemoteListing:
    traffic.add(requests=1)
    found = _find(address, place)
    if len(found) > limits.entries:
        raise LimitExceeded("entries of a directory", limit=limits.entries, actual=len(found), path=str(address))
    whole = {path: one for path, one in found.items() if not is_unfinished(path.rpartition("/")[2])}
    return _listing(address, place, {path: (name, one["size"]) for path, (name, one) in whole.items()}, traffic)


def _not_empty(listing: RemoteListing) -> RemoteListing:
    """Raise MissingFile if nothing is in a directory: stores of objects have no empty ones."""
    if not listing.files:
        raise MissingFile(listing.path)
    return listing


def _find(address: Address, place: RemotePath) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Everything below a folder: the name of each file and what the file system tells of it, by its path there."""
    fs, top = place
    with failures_named(address):
        # Without a depth, stores of objects list all levels at once; the links of web pages may form a circle.
        depth = {"maxdepth": DEEPEST} if address.is_http else {}
        found: dict[str, Any] = timed(address, lambda: fs.find(top, detail=True, **depth), LISTING_SECONDS)
    top = top.rstrip("/")
    if address.is_http:  # fsspec follows links from https to http
        found = {name: details for name, details in found.items() if name.startswith(f"{top}/")}
    paths = {name.removeprefix(top).lstrip("/"): (name, details) for name, details in found.items()}
    return {path: one for path, one in paths.items() if path.rpartition("/")[2] and not leads_out(path)}


def _listing(
    address: Address, place: RemotePath, found: Mapping[str, tuple[str, int | None]], traffic: Traffic
) -> RemoteListing:
    """The listing of a folder with these files: for each path in it, the name and the size."""
    fs = place.fs
    files: list[ListedFile] = []
    addresses: dict[str, Address] = {}
    for path, (name, _) in found.items():
        addresses[path] = Address(fs.unstrip_protocol(name), RemotePath(fs, name))
    # The index of a web server has no sizes.
    unknown = [path for path, (_, listed) in found.items() if listed is None]
    new = at_once(lambda path: HttpFile(addresses[path], fs, traffic), unknown, _AHEAD)
    heads: dict[str, HttpFile] = dict(zip(unknown, new, strict=True))
    for path, (_, listed) in found.items():
        nbytes = heads[path].size if listed is None else listed
        is_hidden = any(folder.startswith(".") for folder in path.split("/")[:-1])
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
        answers_at_once=bool(fs.async_impl),
    )


def walk_remote(address: Address) -> tuple[Address, list[WalkedFile]]:
    """The address of a folder with its file system, and the files below it, without hidden ones."""
    place = find_place(address)
    if address.place is None and not address.is_http:
        place.fs.invalidate_cache()  # of an earlier call in this process
    found = _find(address, place)
    files = [
        WalkedFile(path, None if details["size"] is None else int(details["size"]), _named_version(details))
        for path, (_, details) in found.items()
        if not any(map(is_left_out, path.split("/")))
    ]
    return Address(address.url, place), files


def list_members(address: Address, members: Sequence[WalkedFile]) -> RemoteListing:
    """The listing of a folder with files that :func:`walk_remote` has found there, without another request."""
    place = find_place(address)
    found = {member.path: (_name_in(place, member.path), member.size_bytes) for member in members}
    return _listing(address, place, found, Traffic())


def child(address: Address, path: str) -> Address:
    """The address of a file or folder in the folder of an address that :func:`walk_remote` has returned."""
    place = find_place(address)
    name = _name_in(place, path)
    return Address(place.fs.unstrip_protocol(name), RemotePath(place.fs, name)) if path else address


def _name_in(place: RemotePath, path: str) -> str:
    """The name of a file or folder in a folder, as the file system knows it."""
    return f"{place.path.rstrip('/')}/{path}" if place.path else path


def identify(address: Address) -> tuple[Address, tuple[WalkedFile, ...] | None, str | None]:
    """Look a file or a folder up once, before it is opened; a web server is not asked.

    Returns the address with its file system, the files of a folder, and the fingerprint.
    """
    if address.is_http:
        return address, None, None
    place = find_place(address)
    with failures_named(address):
        details = timed(address, lambda: place.fs.info(place.path))
    if details["type"] == "directory":
        known, files = walk_remote(address)
        return known, tuple(files), fingerprint(files)
    file = WalkedFile("", details["size"], _named_version(details))
    return Address(address.url, place), None, fingerprint([file])


def _named_version(details: Mapping[str, Any]) -> str:
    return str(next((details[key] for key in _VERSIONS if details.get(key)), ""))

"""Read a file of a web server by ranges, through the session that fsspec keeps for HTTP.

fsspec asks for the size first. Here the first range tells it, so that opening a file costs no request.
"""

from __future__ import annotations

import re
from time import sleep
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptmove.errors import MissingFile, SourceChanged
from ckptmove.io.remote.errors import NoRanges, RemoteFailed
from ckptmove.io.remote.failures import DENIED, MISSING, failures_named
from ckptmove.io.remote.source import WINDOW
from ckptmove.io.remote.time_limits import TimeLimit

if TYPE_CHECKING:
    from ckptmove.io.contracts import Traffic
    from ckptmove.io.remote.address import Address

#: Seconds before each new attempt, after a connection was dropped or a server was busy.
PAUSES: Final = [0.25, 1.0]
#: Seconds to connect.
CONNECT_SECONDS: Final = 30.0
#: A whole file of this size is read, if the server ignores ranges.
MOST_WHOLE: Final = 1 << 20
_OK, _PARTIAL, _UNSATISFIABLE = 200, 206, 416
#: Request timeout, too many requests, and failures of a server or a gateway.
_BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


class _Answer(NamedTuple):
    """The answer to one request."""

    status: int  # status code
    reason: str  # its meaning in words
    begin: int  # offset of the first byte of the body
    end: int  # offset of the byte after the body, as the server tells it
    total: int | None  # size of the file; None if the server does not tell it
    version: str  # ETag or time of the last change; empty if the server tells neither
    body: bytes | None  # the bytes; None if they are more than asked for
    flaw: str  # why these are not the bytes of the range; empty if they are, or if the server ignores ranges


class HttpFile:
    """A file of a web server. Each answer tells its ETag, so that a change between two of them is noticed."""

    def __init__(self, address: Address, fs: Any, traffic: Traffic) -> None:
        """Request the first window."""
        self.path = str(address)
        self._address, self._fs, self._traffic = address, fs, traffic
        answer = self._answer(0, WINDOW)
        self.size = 0
        self.version: tuple[object, ...] = (answer.version, answer.total)
        self.head = b""
        if answer.status == _UNSATISFIABLE and answer.total == 0:  # an empty file has no range
            return
        if answer.body is None or answer.total is None or (answer.flaw and len(answer.body) != answer.end):
            raise NoRanges(self.path, answer.total, answer.flaw)
        if len(answer.body) != answer.end:
            reason = f"the server sent {len(answer.body):,} of {answer.end:,} bytes"
            raise RemoteFailed(self.path, reason, address.scheme)
        self.size, self.head = answer.total, answer.body

    def fetch(self, start: int, end: int, *, is_bulk: bool = False) -> bytes:
        """Request the bytes from ``start`` to ``end`` (exclusive); ``is_bulk`` as of :class:`RemoteFile`."""
        answer = self._answer(start, end, is_bulk=is_bulk)
        is_asked_for = answer.body is not None and answer.begin == start and len(answer.body) == end - start
        if (answer.version, answer.total) != self.version and (is_asked_for or not answer.flaw):
            raise SourceChanged(self.path)
        if answer.body is None or not is_asked_for:
            raise NoRanges(self.path, self.size, answer.flaw)
        return answer.body

    def require_unchanged(self) -> None:
        """Do nothing: each answer was compared with the first."""

    def close(self) -> None:
        """Do nothing: fsspec closes the session."""

    def _answer(self, start: int, end: int, *, is_bulk: bool = False) -> _Answer:
        """Request a range, again if the connection is dropped or the server is busy."""
        from aiohttp import ClientConnectorError, ClientError
        from fsspec.asyn import sync

        pauses = iter(PAUSES)
        limit = TimeLimit(self._address, end - start, is_bulk=is_bulk)
        while True:
            pause = next(pauses, None)
            with failures_named(self._address):
                try:
                    answer: _Answer = sync(self._fs.loop, self._get, start, end, limit)
                except ClientConnectorError:  # refused, unknown host, TLS
                    raise
                except (ClientError, TimeoutError, ConnectionError):
                    if pause is None:
                        raise
                else:
                    if pause is None or answer.status not in _BUSY:
                        break
            sleep(pause)
        if answer.status in MISSING:
            raise MissingFile(self.path)
        if answer.status not in {_OK, _PARTIAL, _UNSATISFIABLE}:
            is_denied = answer.status in DENIED
            reason = f"{answer.status} {answer.reason}"
            raise RemoteFailed(self.path, reason, self._address.scheme, is_denied=is_denied)
        return answer

    async def _get(self, start: int, end: int, limit: TimeLimit) -> _Answer:
        from aiohttp import ClientTimeout

        session = await self._fs.set_session()
        options = {**self._fs.kwargs}
        # Compressed bytes would have other offsets.
        wanted = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        options["headers"] = {**(options.get("headers") or {}), **wanted}
        options.setdefault("timeout", ClientTimeout(total=None, connect=CONNECT_SECONDS))
        self._traffic.add(requests=1)
        async with await limit.wait(session.get(self._fs.encode_url(self._address.url), **options)) as response:
            self._traffic.add(requests=len(response.history))
            headers = response.headers
            content_range = _CONTENT_RANGE.match(headers.get("Content-Range", ""))
            begin, total, most = 0, response.content_length, MOST_WHOLE
            until = 0
            if content_range is not None:
                begin, until, total = int(content_range[1] or 0), int(content_range[2] or -1) + 1, int(content_range[3])
            if response.status == _PARTIAL:
                total, most = (total, end - start) if content_range is not None else (None, 0)
            is_wanted = response.status in {_OK, _PARTIAL} and (response.content_length or 0) <= most
            body = await _at_most(response.content, most, limit) if is_wanted else None
            self._traffic.add(nbytes=len(body or b""))
            if body is not None and response.status == _OK:
                total = until = len(body)
            version = headers.get("ETag") or headers.get("Last-Modified") or ""
            flaw = _flaw(response, range(start, end), range(begin, until))
            return _Answer(response.status, response.reason or "", begin, until, total, version, body, flaw)


def _flaw(response: Any, asked: range, sent: range) -> str:
    """Why the body of an answer is not the range that was asked for, or cannot be."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        return f"the server compresses the file ({encoding:.40}), so that it cannot be read by ranges"
    if response.status != _PARTIAL or (sent and sent[0] == asked[0] and sent[-1] <= asked[-1]):
        return ""
    stated = f"Content-Range {response.headers.get('Content-Range', ''):.80}".strip()
    named = stated if " " in stated else f"no {stated}"
    return f"the server sent another range: asked for bytes {asked[0]}-{asked[-1]}, it answered with {named}"


async def _at_most(stream: Any, most: int, limit: TimeLimit) -> bytes | None:
    """All bytes of a body; None if they are more."""
    body = bytearray()
    while block := await limit.wait(stream.read(most + 1 - len(body))):
        body += block
        limit.receive(len(block))
        if len(body) > most:
            return None
    return bytes(body)

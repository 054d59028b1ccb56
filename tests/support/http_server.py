"""A web server of files on localhost, with range requests, and faults that a test can enable."""

from __future__ import annotations

import os
import re
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class FileServer:
    """Serves the files of a folder.

    Attributes:
        root: the folder.
        url: its URL, without a trailing slash.
        log: method, path and Range of each request.
        sent: number of bytes of all bodies.
        faults: functions that can answer a request instead of the server. Each gets the handler, and returns whether
            it has answered.
        etag: returns the ETag of a file, or None.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clear()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            server_of_files = server

            def do_GET(self):
                with suppress(ConnectionError):  # the client has disconnected
                    server.answer(self)

            do_HEAD = do_GET  # noqa: N815  # named by http.server

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def clear(self):
        """Clear the log, and disable all faults."""
        self.log, self.sent, self.faults, self.lock = [], 0, [], threading.Lock()
        self.etag = lambda path: f'"{path.stat().st_mtime_ns:x}-{path.stat().st_size:x}"'

    def close(self):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, handler):
        path = unquote(urlsplit(handler.path).path)
        with self.lock:
            self.log.append((handler.command, path, handler.headers.get("Range")))
        if any(fault(handler) for fault in self.faults):
            return
        file = self.root / path.lstrip("/")
        if file.is_dir():
            links = "".join(f'<a href="{one.name}{"/" * one.is_dir()}">x</a>\n' for one in sorted(file.iterdir()))
            self.send(handler, 200, links.encode(), {"Content-Type": "text/html"})
        elif not file.is_file():
            self.send(handler, 404, b"not found")
        else:
            self.send_file(handler, file)

    def send_file(self, handler, file, *, ranges=True):
        size = file.stat().st_size
        etag = self.etag(file)
        headers = {"Accept-Ranges": "bytes", **({"ETag": etag} if etag else {})}
        found = _RANGE.fullmatch(handler.headers.get("Range") or "")
        if found is None or not ranges:
            self.send(handler, 200, file.read_bytes(), headers)
            return
        start, end = int(found[1]), min(int(found[2] or size), size - 1)
        if start >= size:
            self.send(handler, 416, b"", {"Content-Range": f"bytes */{size}"})
            return
        with file.open("rb") as opened:
            opened.seek(start)
            data = opened.read(end + 1 - start)
        self.send(handler, 206, data, {**headers, "Content-Range": f"bytes {start}-{end}/{size}"})

    def send(self, handler, status, body, headers=None, *, length=None):
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        if handler.command != "HEAD":
            with self.lock:
                self.sent += len(body)
            handler.wfile.write(body)


@contextmanager
def serving(root: Path):
    """A server of a folder."""
    server = FileServer(root)
    try:
        yield server
    finally:
        server.close()


def sparse(path: Path, size: int) -> Path:
    """A file of zeros that takes no space."""
    with path.open("wb") as file:
        os.truncate(file.fileno(), size)
    return path

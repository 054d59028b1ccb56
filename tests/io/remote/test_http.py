from __future__ import annotations

import errno
import gzip
import os
import socket
import threading
from time import monotonic, sleep

import pytest
from aiohttp import ClientSession, ServerTimeoutError

from ckptmove.errors import MissingFile, SourceChanged
from ckptmove.io.remote import http, time_limits
from ckptmove.io.remote.address import Address
from ckptmove.io.remote.errors import NoRanges, RemoteFailed
from ckptmove.io.remote.filesystem import open_remote
from ckptmove.io.remote.source import WINDOW
from ckptmove.limits import Limits
from ckptmove.model import Span

DATA = os.urandom(5 * WINDOW)


def opened(url):
    return open_remote(Address(url), Limits())


@pytest.fixture
def url(server):
    (server.root / "a.pth").write_bytes(DATA)
    return f"{server.url}/a.pth"


def once(answer):
    """A fault of the first request only."""
    left = [answer]
    return lambda handler: bool(left) and left.pop()(handler) is not False


def always(status, body=b"", headers=None):
    def fault(handler):
        handler.server_of_files.send(handler, status, body, headers)
        return True

    return fault


def dropping(nbytes):
    """Promise the range, and close the connection after some bytes of it."""

    def fault(handler):
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-{WINDOW - 1}/{len(DATA)}")
        handler.send_header("Content-Length", str(WINDOW))
        handler.end_headers()
        handler.wfile.write(DATA[:nbytes])
        handler.close_connection = True
        return True

    return fault


def test_two_requests_read_both_ends(server, url) -> None:
    source = opened(url)
    assert source.size == len(DATA)
    assert source.read(0, 4096) == DATA[:4096]
    assert source.read(len(DATA) - 9, len(DATA)) == DATA[-9:]
    assert [(method, span) for method, _, span in server.log] == [
        ("GET", f"bytes=0-{WINDOW - 1}"),
        ("GET", f"bytes={len(DATA) - WINDOW}-{len(DATA) - 1}"),
    ]
    assert (source.traffic.requests, source.traffic.nbytes) == (2, 2 * WINDOW) == (len(server.log), server.sent)


def test_a_small_file_takes_one_request(server) -> None:
    (server.root / "small").write_bytes(b"12345")
    source = opened(f"{server.url}/small")
    assert source.read(0, 5) == b"12345"
    assert len(server.log) == 1


def test_an_empty_file(server) -> None:
    (server.root / "empty").write_bytes(b"")
    assert opened(f"{server.url}/empty").size == 0


@pytest.mark.parametrize(
    ("status", "is_denied"), [(401, True), (403, True), (400, False), (451, False), (500, False), (503, False)]
)
def test_an_error_of_the_server_is_named(server, url, status, is_denied) -> None:
    server.faults.append(always(status))
    with pytest.raises(RemoteFailed, match=str(status)) as raised:
        opened(url)
    assert raised.value.is_denied is is_denied
    assert len(server.log) == (3 if status >= 500 else 1)


@pytest.mark.parametrize("status", [404, 410])
def test_a_missing_file(server, url, status) -> None:
    server.faults.append(always(status))
    with pytest.raises(MissingFile):
        opened(url)


@pytest.mark.parametrize("fault", [always(503), dropping(0), dropping(1000)], ids=["busy", "no body", "half a body"])
def test_one_failure_is_repeated(server, url, fault) -> None:
    server.faults.append(once(fault))
    source = opened(url)
    assert source.read(0, WINDOW) == DATA[:WINDOW]
    assert source.traffic.requests == 2 == len(server.log)


def test_a_server_that_always_drops_the_connection(server, url) -> None:
    server.faults.append(dropping(1000))
    with pytest.raises(RemoteFailed):
        opened(url)
    assert len(server.log) == 3


def test_redirects_are_followed_and_counted(server, url) -> None:
    (server.root / "old.pth").write_bytes(b"")

    def redirect(handler):
        if handler.path != "/old.pth":
            return False
        server.send(handler, 302, b"", {"Location": "/a.pth?X-Amz-Signature=1"})
        return True

    server.faults.append(redirect)
    source = opened(f"{server.url}/old.pth")
    assert source.read(0, 10) == DATA[:10]
    assert source.traffic.requests == 2


def test_a_circle_of_redirects(server, url) -> None:
    server.faults.append(always(302, b"", {"Location": "/a.pth?token=tttt"}))
    with pytest.raises(RemoteFailed) as raised:
        opened(url)
    assert "tttt" not in str(raised.value)
    assert "redirects" in raised.value.reason


@pytest.mark.parametrize("address", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:text/plain,aaaa"])
def test_a_redirect_to_another_protocol_is_not_followed(server, url, address) -> None:
    server.faults.append(always(302, b"", {"Location": address}))
    with pytest.raises(RemoteFailed, match="redirects to an address that is not of a web server"):
        opened(url)
    assert len(server.log) <= 3


def test_credentials_do_not_go_to_another_host(server, url) -> None:
    sent = []

    def redirect(handler):
        sent.append((handler.path, handler.headers.get("Authorization")))
        if handler.path == "/a.pth":
            return False
        server.send(handler, 302, b"", {"Location": url.replace("127.0.0.1", "localhost")})
        return True

    server.faults.append(redirect)
    opened(f"{server.url}/old.pth".replace("//", "//user:pass@"))
    assert [(path, credentials is None) for path, credentials in sent] == [("/old.pth", False), ("/a.pth", True)]


def test_a_server_without_ranges_and_a_large_file(server, url) -> None:
    server.faults.append(lambda handler: server.send_file(handler, server.root / "a.pth", ranges=False) is None)
    with pytest.raises(NoRanges) as raised:
        opened(url)
    assert raised.value.nbytes == len(DATA)
    assert len(server.log) == 1


def test_a_server_without_ranges_and_a_small_file(server, url) -> None:
    (server.root / "a.pth").write_bytes(DATA[: 2 * WINDOW])
    server.faults.append(lambda handler: server.send_file(handler, server.root / "a.pth", ranges=False) is None)
    source = opened(url)
    assert source.read(0, source.size) == DATA[: 2 * WINDOW]
    assert source.traffic.requests == 1


@pytest.mark.parametrize("size", [1000, http.MOST_WHOLE + 1])
def test_a_server_without_ranges_that_does_not_tell_the_size(server, url, size) -> None:
    def stream(handler):
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(bytes(size))
        handler.close_connection = True
        return True

    server.faults.append(stream)
    if size < http.MOST_WHOLE:
        assert opened(url).size == size
    else:
        with pytest.raises(NoRanges) as raised:
            opened(url)
        assert raised.value.nbytes is None


WRONG_RANGES = {
    "none": (None, "no Content-Range"),
    "another": ("bytes 5-9/1310720", "Content-Range bytes 5-9/1310720"),
    "another size": ("bytes 5-9/9", "Content-Range bytes 5-9/9"),
    "no range": ("bytes */9", "Content-Range bytes */9"),
    "no size": ("bytes 0-4/*", "Content-Range bytes 0-4/*"),
    "other units": ("items 0-4/9", "Content-Range items 0-4/9"),
}


@pytest.mark.parametrize(("stated", "named"), WRONG_RANGES.values(), ids=WRONG_RANGES)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_a_range_that_was_not_asked_for_is_named(server, url, stated, named, is_first) -> None:
    source = None if is_first else opened(url)
    headers = {"ETag": server.etag(server.root / "a.pth"), **({"Content-Range": stated} if stated else {})}
    server.faults.append(always(206, b"12345", headers))
    with pytest.raises(NoRanges) as raised:
        opened(url) if source is None else source.read(3 * WINDOW, 4 * WINDOW)
    message = str(raised.value)
    assert "the server sent another range: asked for bytes " in message
    assert message.endswith(f", it answered with {named}")


@pytest.mark.parametrize("status", [200, 206])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_a_compressed_file_is_named(server, url, status, is_first) -> None:
    source = None if is_first else opened(url)
    server.faults.append(always(status, gzip.compress(DATA), {"Content-Encoding": "gzip", "ETag": "another"}))
    with pytest.raises(NoRanges, match=r"the server compresses the file \(gzip\), so that it cannot be read by ranges"):
        opened(url) if source is None else source.read(3 * WINDOW, 4 * WINDOW)


def test_a_small_compressed_file_is_read_whole(server, url) -> None:
    server.faults.append(always(200, gzip.compress(DATA[:WINDOW]), {"Content-Encoding": "gzip"}))
    assert opened(url).read(0, WINDOW) == DATA[:WINDOW]


def test_fewer_bytes_than_announced(server, url) -> None:
    server.faults.append(always(206, b"x" * 50, {"Content-Range": f"bytes 0-99/{len(DATA)}"}))
    with pytest.raises(RemoteFailed, match="50 of 100 bytes"):
        opened(url)


def test_more_bytes_than_asked_for(server, url) -> None:
    server.faults.append(always(206, DATA, {"Content-Range": f"bytes 0-{len(DATA) - 1}/{len(DATA)}"}))
    with pytest.raises(NoRanges):
        opened(url)


@pytest.mark.parametrize("change", ["etag", "size", "time", "shorter", "gone"])
def test_a_file_that_changes(server, url, change) -> None:
    if change in {"size", "shorter"}:
        server.etag = lambda _: None
    if change == "time":
        server.etag = lambda _: None

        def timed(handler):
            start, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
            headers = {
                "Content-Range": f"bytes {start}-{end}/{len(DATA)}",
                "Last-Modified": f"{len(server.log)} Jan 2024",
            }
            server.send(handler, 206, DATA[start : end + 1], headers)
            return True

        server.faults.append(timed)
    source = opened(url)
    if change == "etag":
        server.etag = lambda _: '"other"'
    elif change == "gone":
        (server.root / "a.pth").unlink()
    elif change != "time":
        (server.root / "a.pth").write_bytes(DATA + b"1" if change == "size" else DATA[:WINDOW])
    with pytest.raises(MissingFile if change == "gone" else SourceChanged):
        source.read(3 * WINDOW, 4 * WINDOW)
    source.require_unchanged()
    source.close()


def trickling(pause, *, beginning=b"", in_headers=False):
    """Send a beginning of the range, and then a byte now and then."""

    def fault(handler):
        left = handler.headers["Range"].removeprefix("bytes=").split("-")
        start, end = int(left[0]), int(left[1]) + 1
        head = f"HTTP/1.1 206 x\r\nContent-Range: bytes {start}-{end - 1}/{len(DATA)}\r\n".encode()
        head += f"ETag: {handler.server_of_files.etag(handler.server_of_files.root / 'a.pth')}\r\n".encode()
        head += f"Content-Length: {end - start}\r\n\r\n".encode()
        sent = b"" if in_headers else head + beginning
        handler.wfile.write(sent)
        for byte in (head + DATA[start:end])[len(sent) :]:
            if done.wait(pause):
                break
            handler.wfile.write(bytes([byte]))
        return True

    done = threading.Event()
    return fault, done


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pause": 9, "in_headers": True}, "did not answer in time"),
        ({"pause": 0.02, "in_headers": True}, "did not answer in time"),
        ({"pause": 9, "beginning": DATA[:1000]}, "sent 1000 B of 256.0 KiB in time"),
        ({"pause": 0.02}, r"sent \d+ B of 256.0 KiB in time"),
    ],
    ids=["no answer", "a trickle of headers", "a body that stalls", "a trickle"],
)
def test_a_server_that_takes_too_long_is_asked_once(server, url, monkeypatch, options, reason) -> None:
    monkeypatch.setattr(time_limits, "SECONDS", 0.3)
    fault, done = trickling(**options)
    server.faults.append(fault)
    before = monotonic()
    with pytest.raises(RemoteFailed, match=reason):
        opened(url)
    done.set()
    assert monotonic() - before < 1.5
    assert len(server.log) == 1


def test_attempts_share_the_time(server, url, monkeypatch) -> None:
    monkeypatch.setattr(time_limits, "SECONDS", 0.3)
    monkeypatch.setattr(http, "PAUSES", [0.2] * 20)
    server.faults.append(always(503))
    with pytest.raises(RemoteFailed, match="in time"):
        opened(url)
    assert len(server.log) <= 3


def test_a_connection_that_is_not_made_in_time_is_tried_again(server, url, monkeypatch) -> None:
    attempts = []

    async def get(*_args, **_options):
        attempts.append(1)
        raise ServerTimeoutError

    monkeypatch.setattr(ClientSession, "get", get)
    with pytest.raises(RemoteFailed, match="in time"):
        opened(url)
    assert len(attempts) == 3


def test_bytes_that_keep_coming_may_take_longer(server, url, monkeypatch) -> None:
    first, second = opened(url), opened(url)
    left = 3 * WINDOW

    def slow(handler):
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {WINDOW}-{WINDOW + left - 1}/{len(DATA)}")
        handler.send_header("Content-Length", str(left))
        handler.send_header("ETag", server.etag(server.root / "a.pth"))
        handler.end_headers()
        for at in range(0, left, left // 12):
            handler.wfile.write(DATA[WINDOW + at :][: left // 12])
            sleep(0.08)  # 12 of them are longer than the time for metadata
        return True

    server.faults.append(slow)
    monkeypatch.setattr(time_limits, "SECONDS", 0.5)
    assert b"".join(first.blocks(Span(WINDOW, WINDOW + left), 4096)) == DATA[WINDOW : WINDOW + left]
    with pytest.raises(RemoteFailed, match="in time"):  # the same range is metadata here
        second.read(WINDOW, WINDOW + left)


def test_bytes_that_no_longer_come_end_a_download(server, url, monkeypatch) -> None:
    source = opened(url)
    fault, done = trickling(0.01, beginning=DATA[WINDOW : 2 * WINDOW])
    server.faults.append(fault)
    monkeypatch.setattr(time_limits, "PACE_SECONDS", 0.4)
    with pytest.raises(RemoteFailed, match=r"sent 25\d\.\d KiB of 512.0 KiB in time"):
        list(source.blocks(Span(WINDOW, 3 * WINDOW), 4096))
    done.set()
    assert len(server.log) == 2


def test_nobody_listens(url) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RemoteFailed, match=os.strerror(errno.ECONNREFUSED)) as raised:
        opened(f"http://127.0.0.1:{port}/a.pth?token=tttt")
    assert "tttt" not in f"{raised.value}{raised.value.path}"


def test_an_unknown_host() -> None:
    with pytest.raises(RemoteFailed, match="resolved"):
        opened("http://no-such-host.invalid/a.pth")


def test_a_server_without_tls(server) -> None:
    with pytest.raises(RemoteFailed, match="TLS"):
        opened(f"https{server.url.removeprefix('http')}/a.pth")


def test_credentials_are_sent(server, url) -> None:
    sent = []
    server.faults.append(lambda handler: sent.append(handler.headers.get("Authorization")))
    source = opened(url.replace("//", "//user:pass@"))
    assert sent[0].startswith("Basic ")
    assert source.path == url.replace("//", "//***@")

from __future__ import annotations

import os

import pytest

from ckptmove.errors import LimitExceeded, MissingFile, OutputExists, SourceChanged
from ckptmove.io.remote.address import Address
from ckptmove.io.remote.download import download
from ckptmove.io.remote.errors import RemoteFailed
from ckptmove.io.remote.source import CHUNK
from ckptmove.limits import Limits

DATA = os.urandom(CHUNK + 5)


def test_a_file(server, tmp_path) -> None:
    (server.root / "a.pth").write_bytes(DATA)
    target, told = tmp_path / "new" / "folder" / "a.pth", []
    download(Address(f"{server.url}/a.pth"), str(target), Limits(), progress=lambda *of: told.append(of))
    assert target.read_bytes() == DATA
    assert [*target.parent.iterdir()] == [target]
    assert told[-1] == (len(DATA), len(DATA))
    assert server.sent == len(DATA)
    with pytest.raises(OutputExists):
        download(Address(f"{server.url}/a.pth"), str(target), Limits())


def test_a_directory(server, tmp_path) -> None:
    for name in ("a.pth", "sub/b.pth"):
        path = server.root / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    told = []
    for progress in (None, lambda *of: told.append(of)):
        target = tmp_path / f"run{len(told)}{progress is None}"
        download(Address(f"{server.url}/run/"), str(target), Limits(), progress=progress)
        found = {path.relative_to(target).as_posix(): path.read_text() for path in target.rglob("*.pth")}
        assert found == {"a.pth": "a.pth", "sub/b.pth": "sub/b.pth"}
    assert told == [(5, 14), (14, 14)]
    with pytest.raises(LimitExceeded):
        download(Address(f"{server.url}/run/"), str(tmp_path / "more"), Limits(entries=1))


@pytest.mark.parametrize(
    ("fault", "error"), [("changed", SourceChanged), ("broken", RemoteFailed), ("gone", MissingFile)]
)
def test_nothing_is_left_of_a_failed_download(server, tmp_path, fault, error) -> None:
    (server.root / "a.pth").write_bytes(DATA)
    versions = iter(['"1"', *['"2"'] * 9])
    if fault == "changed":
        server.etag = lambda _: next(versions)
    else:
        status = 500 if fault == "broken" else 404
        server.faults.append(lambda handler: len(server.log) > 1 and server.send(handler, status, b"") is None)
    with pytest.raises(error):
        download(Address(f"{server.url}/a.pth"), str(tmp_path / "out" / "a.pth"), Limits())
    assert not [*(tmp_path / "out").iterdir()]

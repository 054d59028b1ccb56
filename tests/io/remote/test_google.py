"""``gs://``, with an emulator of Google Cloud Storage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptmove
from ckptmove.errors import MissingFile, SourceChanged
from ckptmove.io.remote.address import Address
from ckptmove.io.remote.filesystem import expand, open_remote
from ckptmove.limits import Limits

RUN = Path(__file__).parents[3] / "sample_ckpts" / "adamw-cuda3.pth"


@pytest.fixture(scope="module")
def emulator():
    """The address of a running emulator with a bucket."""
    server_module = pytest.importorskip("gcp_storage_emulator.server")
    server = server_module.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    yield f"http://127.0.0.1:{server._api._httpd.server_address[1]}"
    server.stop()


@pytest.fixture
def put(emulator, monkeypatch):
    """Write an object."""
    from fsspec.config import conf
    from fsspec.registry import _registry
    from gcsfs.core import GCSFileSystem  # gcsfs itself asks for the kind of a bucket through gRPC

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator)
    monkeypatch.setitem(conf, "gs", {"token": "anon"})
    monkeypatch.setitem(_registry, "gs", GCSFileSystem)
    GCSFileSystem.clear_instance_cache()
    yield lambda path, data: GCSFileSystem(token="anon").pipe_file(f"bucket/{path}", data)
    GCSFileSystem.clear_instance_cache()


def test_files_directories_and_globs(put, tmp_path) -> None:
    put("run/a.pth", RUN.read_bytes())
    put("run/sub/b.pth", RUN.read_bytes())
    assert ckptmove.diff("gs://bucket/run/a.pth", RUN).same
    for name in ("a.pth", "sub/b.pth"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(RUN, tmp_path / name)
    there, here = (ckptmove.inspect(path).inventory.tensors for path in ("gs://bucket/run/", tmp_path))
    assert there == here
    assert expand(Address("gs://bucket/run/*.pth")) == ["gs://bucket/run/a.pth"]
    with pytest.raises(MissingFile):
        ckptmove.inspect("gs://bucket/none.pth")


def test_a_new_generation_during_the_read_is_a_change(put) -> None:
    put("a.pth", RUN.read_bytes())
    source = open_remote(Address("gs://bucket/a.pth"), Limits())
    source.require_unchanged()
    put("a.pth", RUN.read_bytes())  # equal bytes, another generation
    with pytest.raises(SourceChanged):
        source.require_unchanged()
    source.close()

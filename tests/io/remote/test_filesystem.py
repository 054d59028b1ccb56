from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import tarfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch
from distributed_checkpoints import Distributed
from safetensors.torch import save_file

import ckptmove
from ckptmove.errors import EmptyDirectory, LimitExceeded, MissingFile, SourceChanged
from ckptmove.io.remote import filesystem
from ckptmove.io.remote.address import Address
from ckptmove.io.remote.errors import ArtifactAddress, RemoteFailed, RemoteMissing, UnknownScheme
from ckptmove.io.remote.filesystem import RemoteListing, expand, find_place, open_remote
from ckptmove.io.remote.source import WINDOW, RemoteSource
from ckptmove.limits import Limits

SAMPLES = Path(__file__).parents[3] / "sample_ckpts"
RUN = SAMPLES / "adamw-cuda3.pth"
DATA = os.urandom(3 * WINDOW)


def opened(url, **limits):
    return open_remote(Address(url), Limits(**limits))


def facts(found):
    """A document of `inspect` without paths."""
    document = found.to_dict()["checkpoints"][0]
    return {key: value for key, value in document.items() if key not in {"path", "remote", "findings"}}


@pytest.fixture
def memory():
    """fsspec's file system in memory."""
    import fsspec

    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/", recursive=True)


@pytest.fixture
def bucket(moto, sent):
    """Fill the bucket; a leading key is its folder."""

    def fill(**files):
        for key, data in files.items():
            moto.put_object(Bucket="bucket", Key=key.replace("__", "/").replace("_pth", ".pth"), Body=data)

    listed = moto.list_objects_v2(Bucket="bucket").get("Contents", [])
    for one in listed:
        moto.delete_object(Bucket="bucket", Key=one["Key"])
    fill.put = lambda key, data: moto.put_object(Bucket="bucket", Key=key, Body=data)
    return fill


@pytest.mark.unmeasured
def test_s3_takes_a_lookup_and_two_requests(bucket, sent) -> None:
    bucket.put("a.pth", DATA)
    source = opened("s3://bucket/a.pth")
    assert source.read(0, 9) == DATA[:9]
    assert source.read(len(DATA) - 9, len(DATA)) == DATA[-9:]
    assert [(method, span) for method, _, span in sent] == [
        ("HEAD", None),
        ("GET", f"bytes=0-{WINDOW - 1}"),
        ("GET", f"bytes={len(DATA) - WINDOW}-{len(DATA) - 1}"),
    ]
    assert (source.traffic.requests, source.traffic.nbytes) == (3, 2 * WINDOW)
    source.require_unchanged()
    source.close()


def test_s3_names_the_version_in_each_request(bucket) -> None:
    bucket.put("a.pth", DATA)
    source = opened("s3://bucket/a.pth")
    bucket.put("a.pth", DATA[::-1])
    with pytest.raises(SourceChanged):
        source.read(0, 9)


def test_a_file_that_was_replaced_is_read_anew(bucket) -> None:
    for data in (DATA, DATA[:100]):
        bucket.put("a.pth", data)
        assert opened("s3://bucket/a.pth").size == len(data)


@pytest.mark.parametrize("url", ["s3://bucket/no.pth", "s3://nobody/a.pth", "s3://bucket/no/"])
def test_s3_without_the_file(bucket, url) -> None:
    with pytest.raises(MissingFile):
        opened(url)


def test_s3_without_credentials(moto, monkeypatch, tmp_path) -> None:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(RemoteFailed) as raised:
        opened("s3://bucket/a.pth")
    assert raised.value.is_denied


def test_a_glob_of_s3_is_listed_once(bucket, sent) -> None:
    for key in ("runs/2/last.pth", "runs/1/last.pth", "runs/1/other.txt"):
        bucket.put(key, RUN.read_bytes())
    found = expand(Address("s3://bucket/runs/*/last.pth"))
    assert found == ["s3://bucket/runs/1/last.pth", "s3://bucket/runs/2/last.pth"]
    listings = len(sent)
    for address in found:
        source = open_remote(address, Limits())
        source.read(0, 9)
        assert source.traffic.requests == 1
    assert [method for method, *_ in sent[listings:]] == ["GET", "GET"]


def test_a_glob_without_a_match(bucket, memory) -> None:
    assert expand(Address("s3://bucket/*.ckpt")) == ["s3://bucket/*.ckpt"]
    assert expand(Address("memory://none/*")) == ["memory://none/*"]


@pytest.mark.parametrize(("name", "looked_up"), [("run", 0), ("run/", 0), ("run.1", 1)])
def test_a_directory_of_s3(bucket, sent, tmp_path, name, looked_up) -> None:
    folder = tmp_path / "run"
    (folder / "sub").mkdir(parents=True)
    shutil.copy(RUN, folder / "sub" / "model.pth")
    (folder / "config.json").write_text("{}")
    for file in folder.rglob("*.*"):
        bucket.put(f"{name.rstrip('/')}/{file.relative_to(folder).as_posix()}", file.read_bytes())
    there = ckptmove.inspect(f"s3://bucket/{name}")
    assert facts(there) == facts(ckptmove.inspect(folder))
    assert sum("list-type" in path and "max-keys" not in path for _, path, _ in sent) == 1
    assert [method for method, path, span in sent if span is None and "list-type" not in path] == ["HEAD"] * looked_up
    assert there.traffic.nbytes <= sum(file.stat().st_size for file in folder.rglob("*.*"))


def test_a_file_that_has_the_name_of_a_folder(bucket, sent) -> None:
    bucket.put("run", RUN.read_bytes())
    assert facts(ckptmove.inspect("s3://bucket/run")) == facts(ckptmove.inspect(RUN))
    assert ckptmove.inspect("s3://bucket/run").traffic.requests == 3  # a listing, a lookup, and the file


def save_shards(folder, number):
    weights = {f"{at}.weight": torch.full((200, 200), at * 1.0) for at in range(number)}
    names = {name: f"model-{at + 1:05}-of-{number:05}.safetensors" for at, name in enumerate(weights)}
    for name, file in names.items():
        save_file({name: weights[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def save_distributed(folder, number):
    stream = io.BytesIO()
    torch.save({"lr": 0.1}, stream)
    chunks = [(rank, (2 * rank, 0), (2, 300)) for rank in range(number)]
    whole = torch.arange(600.0 * number).reshape(-1, 300)
    Distributed.save_ranks(folder, {"w": (whole, chunks)}, {"schedule": (0, stream.getvalue())})


def save_of_ranks(folder, number):
    for rank in range(number):
        torch.save({"w": torch.ones(300, 300 + rank)}, folder / f"model_world_size_{number}_rank_{rank}.pt")


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("save", "apart", "per_file"), [(save_shards, 1, 1), (save_distributed, 2, 0), (save_of_ranks, 0, 1)]
)
def test_requests_for_a_directory_of_many_files(bucket, sent, tmp_path, save, apart, per_file) -> None:
    for number in (2, 5):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        save(folder, number)
        for name in ("README.md", "tokenizer.json", "config.yaml"):
            (folder / name).write_text("{}")
        for file in folder.iterdir():
            bucket.put(f"{folder.name}/{file.name}", file.read_bytes())
        sent.clear()
        there = ckptmove.inspect(f"s3://bucket/{folder.name}")
        assert len(sent) == there.traffic.requests == 1 + apart + per_file * number
        assert facts(there) == facts(ckptmove.inspect(folder))


def test_checkpoints_with_the_names_of_text_files(memory, tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("a.txt", "epoch=3.log"):
        torch.save({name: torch.ones(3)}, folder / name)
    (folder / "config.json").write_text("{}")
    for file in folder.iterdir():
        memory.pipe(f"/run/{file.name}", file.read_bytes())
    there = ckptmove.inspect("memory://run/")
    assert facts(there) == facts(ckptmove.inspect(folder))
    assert {file.path for file in there.inventory.files} == {"a.txt", "epoch=3.log"}
    for name in ("a.txt", "epoch=3.log"):
        memory.pipe(f"/run/{name}", b"text")
    with pytest.raises(EmptyDirectory) as raised:
        ckptmove.inspect("memory://run/")
    assert raised.value.files == 3
    memory.pipe("/run/model.pth", RUN.read_bytes())
    listing = opened("memory://run/")
    assert [listing.is_text(file.path) for file in listing.files] == [True, True, True, False]
    assert [line.name for line in ckptmove.inspect("memory://run/", outline=True).outline if line.depth == 1] == [
        "model.pth", "a.txt", "config.json", "epoch=3.log"
    ]  # fmt: skip


def test_a_directory_over_the_limit(memory) -> None:
    for name in "abc":
        memory.pipe(f"/run/{name}.pth", b"1")
    assert len(opened("memory://run").files) == 3
    with pytest.raises(LimitExceeded):
        opened("memory://run", entries=2)


@pytest.mark.parametrize("name", ["run", "run/", "run.1"])
def test_an_empty_directory_is_listed_once(memory, monkeypatch, name) -> None:
    memory.mkdir(f"/{name.rstrip('/')}")
    listed, find = [], type(memory).find
    monkeypatch.setattr(type(memory), "find", lambda *of, **how: listed.append(of[1]) or find(*of, **how))
    with pytest.raises(MissingFile):
        opened(f"memory://{name}")
    assert len(listed) == 1


def test_a_listing(memory) -> None:
    for path in ("run/a.pth", "run/.git/b.pth", "run/sub/deep/c.pth", "run/.ckptmove-01234567-0123456789abcdef.part"):
        memory.pipe(f"/{path}", b"12345")
    listing = opened("memory://run/")
    assert isinstance(listing, RemoteListing)
    hidden = {file.path: file.is_hidden for file in listing.files}
    assert hidden == {"a.pth": False, ".git/b.pth": True, "sub/deep/c.pth": False}
    assert [folder.path for folder in listing.folders] == ["", ".git", "sub", "sub/deep"]
    assert listing.full("a.pth") == "memory://run/a.pth"
    assert listing.full("") == "memory://run/"
    assert listing.open(".git/b.pth").read(0, 5) == b"12345"
    assert listing.disk(listing.files[0]) is None
    assert listing.read_from(listing.files) == ()
    listing.require_unchanged(listing.files[0])
    with pytest.raises(MissingFile):
        listing.open("else.pth")
    memory.rm("/run/a.pth")
    memory.mkdir("/run/a.pth")
    with pytest.raises(SourceChanged):
        listing.open("a.pth")


def test_only_so_many_files_of_a_listing_are_kept(memory, monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.io.remote.filesystem._MOST_OPENED", 2)
    for name in "abc":
        memory.pipe(f"/run/{name}.pth", b"12345")
    listing = opened("memory://run/")
    first = listing.open("a.pth")
    assert [listing.open(f"{name}.pth").read(0, 5) for name in "abc"] == [b"12345"] * 3
    assert listing.open("c.pth") is listing.open("c.pth")
    assert listing.open("a.pth") is not first


def test_a_file_that_was_written_before_it_is_opened_again(memory, monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.io.remote.filesystem._MOST_OPENED", 2)
    for name in "abcd":
        memory.pipe(f"/run/{name}.pth", b"12345")
    listing = opened("memory://run/")
    for name in "abc":
        listing.open(f"{name}.pth")
    listing.require_opened_unchanged()
    memory.pipe("/run/d.pth", b"54321")  # it was not opened
    listing.require_opened_unchanged()
    memory.pipe("/run/a.pth", b"54321")
    with pytest.raises(SourceChanged):
        listing.open("a.pth")
    with pytest.raises(SourceChanged):
        listing.require_opened_unchanged()


def test_a_file_that_was_written_while_it_is_open(memory) -> None:
    for name in "ab":
        memory.pipe(f"/run/{name}.pth", b"12345")
    listing = opened("memory://run/")
    listing.open("a.pth")
    memory.pipe("/run/a.pth", b"54321")
    with pytest.raises(SourceChanged):
        listing.require_opened_unchanged()


def test_each_answer_of_a_web_server_tells_the_version(server, monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.io.remote.filesystem._MOST_OPENED", 1)
    etags = {}
    server.etag = lambda path: f'"{etags.get(path.name, 1)}"'
    (server.root / "versions").mkdir()
    for name in "ab":
        (server.root / "versions" / f"{name}.pth").write_bytes(DATA)
    listing = opened(f"{server.url}/versions/")
    for name in "aba":
        listing.open(f"{name}.pth")
    asked = len(server.log)
    listing.require_opened_unchanged()
    assert len(server.log) == asked
    listing.open("b.pth")
    etags["a.pth"] = 2
    with pytest.raises(SourceChanged):
        listing.open("a.pth")


def test_names_that_lead_out_of_a_listing(memory, monkeypatch) -> None:
    memory.pipe("/run/a.pth", b"12345")
    found = memory.find("/run", detail=True)
    out = dict.fromkeys(("/run/../b.pth", "/run/a/../../b.pth", "/run/.."), found["/run/a.pth"])
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: {**found, **out})
    assert [file.path for file in opened("memory://run/").files] == ["a.pth"]


def test_a_file_system_without_versions_is_asked_again(memory) -> None:
    memory.pipe("/a.pth", DATA)
    source = opened("memory://a.pth")
    source.require_unchanged()
    assert source.traffic.requests == 2
    memory.pipe("/a.pth", DATA[:-1])
    with pytest.raises(SourceChanged):
        source.require_unchanged()


def test_a_change_during_convert_or_diff_is_an_error(memory, monkeypatch, tmp_path) -> None:
    for work in (
        lambda: ckptmove.diff("memory://run.pth", RUN),
        lambda: ckptmove.convert("memory://run.pth", to="cpu", output=tmp_path / "out.pth"),
    ):
        memory.pipe("/run.pth", RUN.read_bytes())
        asked, info = [], type(memory).info

        def later(self, path, asked=asked, info=info, **more):
            asked.append(path)
            return {**info(self, path, **more), "ETag": len(asked) // 3}

        with monkeypatch.context() as patch:
            patch.setattr(type(memory), "info", later)
            with pytest.raises(SourceChanged):
                work()
    assert not (tmp_path / "out.pth").exists()


def test_a_protocol_in_capitals(memory) -> None:
    memory.pipe("/a.pth", DATA)
    assert opened("MEMORY://a.pth").size == len(DATA)


def test_a_short_answer_is_a_change(memory) -> None:
    memory.pipe("/a.pth", DATA)
    source = opened("memory://a.pth")
    source._file._file.truncate(100)
    with pytest.raises(SourceChanged):
        source.read(0, 200)


def test_a_file_of_unknown_size(memory, monkeypatch) -> None:
    memory.pipe("/a.pth", DATA)
    monkeypatch.setattr(type(memory), "info", lambda *_, **__: {"type": "file", "size": None})
    with pytest.raises(RemoteFailed, match="size"):
        opened("memory://a.pth")


def test_a_file_in_a_remote_zip(memory, tmp_path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(RUN, "in/run.pth")
    memory.pipe("/a.zip", (tmp_path / "a.zip").read_bytes())
    there = ckptmove.inspect("zip://in/run.pth::memory://a.zip")
    assert facts(there) == facts(ckptmove.inspect(RUN))


def test_results_have_no_credentials(server) -> None:
    shutil.copy(RUN, server.root / "run.pth")
    found = ckptmove.inspect(f"{server.url}/run.pth?token=hunter2".replace("//", "//user:hunter2@"))
    assert "hunter2" not in f"{found!r}{found}{json.dumps(found.to_dict())}"
    assert found.inventory.path.endswith("/run.pth?token=***")


def test_an_archive_of_checkpoints(server, tmp_path) -> None:
    archive = shutil.make_archive(str(server.root / "runs"), "zip", SAMPLES)
    there = ckptmove.inspect(f"{server.url}/runs.zip", keep_going=True)
    assert facts(there) == facts(ckptmove.inspect(archive, keep_going=True))


def test_an_index_of_a_web_server(server) -> None:
    run = server.root / "run"
    (run / "sub").mkdir(parents=True)
    shutil.copy(RUN, run / "model.pth")
    shutil.copy(RUN, run / "sub" / "model.pth")
    there = ckptmove.inspect(f"{server.url}/run/")
    assert facts(there) == facts(ckptmove.inspect(run))
    assert expand(Address(f"{server.url}/run/*.pth")) == [f"{server.url}/run/model.pth"]


def test_links_to_other_servers_are_not_followed(server) -> None:
    run = server.root / "linked"
    run.mkdir()
    shutil.copy(RUN, run / "model.pth")
    secure = server.url.replace("http", "https")
    links = ["model.pth", "http://127.0.0.1:9/linked/a.pth", "//127.0.0.1:9/b.pth", f"{secure}/linked/c.pth", "/d.pth"]
    page = "".join(f'<a href="{link}">x</a>' for link in links).encode()

    def index(handler):
        is_index = handler.path == "/linked/"
        if is_index:
            server.send(handler, 200, page, {"Content-Type": "text/html"})
        return is_index

    server.faults.append(index)
    listing = open_remote(Address(f"{server.url}/linked/"), Limits())
    assert [file.path for file in listing.files] == ["model.pth"]
    assert {path for _, path, _ in server.log} == {"/linked/", "/linked/model.pth"}


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("wandb:me/proj/model:v0", "wandb artifact get me/proj/model:v0"),
        ("wandb-artifact://me/proj/model:latest", "wandb artifact get me/proj/model:latest"),
        ("mlflow:runs:/1/a.pth", "mlflow artifacts download --artifact-uri runs:/1/a.pth --dst-path ."),
        ("runs:/1/a.pth", "mlflow artifacts download --artifact-uri runs:/1/a.pth --dst-path ."),
        ("models:/m/1", "mlflow artifacts download --artifact-uri models:/m/1 --dst-path ."),
        ("mlflow-artifacts:/1/a", "mlflow artifacts download --artifact-uri mlflow-artifacts:/1/a --dst-path ."),
    ],
)
def test_artifacts_of_trackers(address, command) -> None:
    with pytest.raises(ArtifactAddress) as raised:
        opened(address)
    assert " ".join(raised.value.command) == command


def test_an_unknown_scheme() -> None:
    with pytest.raises(UnknownScheme) as raised:
        opened("htps://h/a.pth")
    assert raised.value.suggestion == "https"
    with pytest.raises(UnknownScheme) as raised:
        opened("zzzzzzzz://h/a.pth")
    assert raised.value.suggestion == ""


@pytest.mark.parametrize(
    ("absent", "url", "is_extra"),
    [("fsspec", "s3://b/a", True), ("s3fs", "s3://b/a", True), ("fsspec.core", "adl://b/a", True)],
)
def test_a_package_that_is_not_installed(monkeypatch, absent, url, is_extra) -> None:
    import sys

    for name in [*sys.modules]:
        if name == absent or name.startswith(f"{absent}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    if absent == "s3fs":
        import fsspec.core  # noqa: F401

        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(RemoteMissing) as raised:
        find_place(Address(url))
    assert raised.value.is_extra is is_extra


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The part of the Hub's API that reading one public file needs, with the requests for files."""
    pytest.importorskip("huggingface_hub")
    import huggingface_hub
    from huggingface_hub import constants, hf_file_system

    data, log = RUN.read_bytes(), []
    commit = "0123456789abcdef0123456789abcdef01234567"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            if path.startswith("/org/repo/resolve/"):
                start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                log.append((start, end))
                self.reply(206, data[start : end + 1])
            elif path.startswith("/api/models/org/repo/tree"):
                entry = {"type": "file", "oid": "1" * 40, "size": len(data), "path": "run.pth"}
                self.reply(200, json.dumps([entry]).encode())
            elif path.startswith("/api/models/org/repo"):
                self.reply(200, json.dumps({"id": "org/repo", "sha": commit, "siblings": []}).encode())
            else:
                self.reply(404, b"{}")

        def reply(self, status, body):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    hf_file_system.HfFileSystem.clear_instance_cache()
    huggingface_hub.HfFileSystem(endpoint=endpoint)
    yield log
    server.shutdown()
    server.server_close()
    hf_file_system.HfFileSystem.clear_instance_cache()


def test_a_file_of_the_hub(hub) -> None:
    there = ckptmove.inspect("hf://org/repo/run.pth")
    assert facts(there) == facts(ckptmove.inspect(RUN))
    assert len(hub) <= 2
    with pytest.raises(MissingFile):
        ckptmove.inspect("hf://org/else/run.pth")


def test_the_source_of_a_file_is_remote(memory) -> None:
    memory.pipe("/a.pth", DATA)
    assert isinstance(opened("memory://a.pth"), RemoteSource)


def test_requests_that_are_not_awaited_are_silent_at_exit(caplog) -> None:
    loop = asyncio.new_event_loop()
    filesystem._silence([None])  # no request was made
    filesystem._silence([loop])
    loop.call_exception_handler({"message": "Task was destroyed but it is pending!"})
    loop.close()
    assert not caplog.records


def test_files_of_a_folder_are_requested_at_once(server) -> None:
    folder = server.root / "ahead"
    folder.mkdir(exist_ok=True)
    for at in range(4):
        torch.save({f"{at}.w": torch.zeros(200_000)}, folder / f"pytorch_model-0000{at + 1}-of-00004.bin")
    server.clear()
    ckptmove.inspect(f"{server.url}/ahead/")
    alone = len(server.log)
    assert alone == 1 + 2 * 4
    heads, tails = Barrier(4), Barrier(4)

    def wait(handler):
        if "Range" in handler.headers:
            is_head = handler.headers["Range"].startswith("bytes=0-")
            (heads if is_head else tails).wait(10)  # raises if the files are requested one after the other

    server.clear()
    server.faults.append(wait)
    found = ckptmove.inspect(f"{server.url}/ahead/")
    assert len(found.inventory.tensors) == 4
    assert len(server.log) == alone


def test_files_that_share_a_position_are_read_in_turn(tmp_path) -> None:
    with tarfile.open(tmp_path / "run.tar", "w") as archive:
        for at in range(8):
            path = tmp_path / f"pytorch_model-0000{at + 1}-of-00008.bin"
            torch.save({f"{at}.w": torch.full((100_000,), at)}, path)
            archive.add(path, f"run/{path.name}")
    for _ in range(5):
        found = ckptmove.inspect(f"tar://run::file://{tmp_path}/run.tar")
        assert [one.name.rpartition(".bin.")[2] for one in found.inventory.tensors] == [f"{at}.w" for at in range(8)]


def test_the_error_of_a_file_that_is_read_ahead_names_it(server) -> None:
    folder = server.root / "lost"
    folder.mkdir(exist_ok=True)
    for at in range(3):
        torch.save({f"{at}.w": torch.zeros(200_000)}, folder / f"pytorch_model-0000{at + 1}-of-00003.bin")

    def deny(handler):
        if "00002-of" not in handler.path or handler.headers["Range"].startswith("bytes=0-"):
            return False
        server.send(handler, 403, b"")
        return True

    server.faults.append(deny)
    with pytest.raises(RemoteFailed, match="403 Forbidden") as caught:
        ckptmove.inspect(f"{server.url}/lost/")
    assert caught.value.path.endswith("lost/pytorch_model-00002-of-00003.bin")

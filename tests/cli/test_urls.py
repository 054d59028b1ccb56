from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from http_server import serving
from safetensors.torch import save_file

import ckptmove
from ckptmove.cli.paths import download_paths
from ckptmove.io.remote import http
from ckptmove.io.remote.address import Address
from ckptmove.opening import reading
from ckptmove.proof.downloading import NotDownloaded
from ckptmove.text import command_line

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
SECRET = "hunter2hunter2"


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    shutil.copytree(SAMPLES, root, dirs_exist_ok=True)
    state = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(70_000)}
    save_file(state, root / "model.safetensors")
    torch.save(state, root / "legacy.pth", _use_new_zipfile_serialization=False)
    for folder in ("one", "two"):
        (root / "runs" / folder).mkdir(parents=True)
        shutil.copy(SAMPLES / "adamw-cuda3.pth", root / "runs" / folder / "last.pth")
    with serving(root) as server:
        yield server


@pytest.fixture
def server(started, monkeypatch):
    monkeypatch.setattr(http, "PAUSES", [0.0, 0.0])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    started.clear()
    return started


def without_place(document, root):
    """A document of `inspect` without the folder of the file."""
    found = {key: value for key, value in document["checkpoints"][0].items() if key != "remote"}
    return json.dumps(found).replace(str(root), "FOLDER")


FILES = [
    *sorted(path.name for path in SAMPLES.glob("*.p*") if path.suffix in {".pth", ".pt"}),
    "model.safetensors",
    "legacy.pth",
]


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("options", [(), ("--check",)], ids=" ".join)
def test_inspect_tells_of_a_url_what_it_tells_of_the_file(ask, server, name, options) -> None:
    there, here = ask("inspect", f"{server.url}/{name}", *options), ask("inspect", server.root / name, *options)
    if here["error"] is None:
        assert without_place(there, server.url) == without_place(here, server.root)
        read = there["checkpoints"][0]["remote"]
        assert read == {"requests": len(server.log), "bytes_read": server.sent}
        assert here["checkpoints"][0]["remote"] is None
    else:
        assert there["error"]["kind"] == here["error"]["kind"]
    assert there["exit_code"] == here["exit_code"]


def test_the_report_names_the_requests(say, server) -> None:
    said = say("inspect", f"{server.url}/legacy.pth")
    assert "\nread 273.9 KiB of 273.9 KiB in 2 requests\n" in said.out  # the start, and the end: it may be a zip too
    assert "--download" in said.next
    assert " request" not in say("inspect", server.root / "legacy.pth").out


def test_diff_takes_urls_on_either_side(ask, server) -> None:
    url, path = f"{server.url}/legacy.pth", server.root / "legacy.pth"
    for sides in ((url, path), (path, url), (url, url)):
        document = ask("diff", *sides)
        assert document["same"]
        assert sum("request" in note for note in document["notes"]) == sides.count(url)
    assert not ask("diff", f"{server.url}/adamw-cuda3.pth", f"{server.url}/map-location-dragged-all.pth")["same"]


def faulty(server, first, fault):
    """Enable a fault of all requests from the one with a number on, beginning with 0; None changes the ETag."""

    def answer(handler):
        if len(server.log) <= first:
            return False
        if fault is None:
            server.etag = lambda _: '"another"'
            return False
        if fault == "closed":
            handler.close_connection = True
            handler.connection.close()
        else:
            server.send(handler, fault, b"")
        return True

    server.faults.append(answer)


FAULTS = {
    403: ("remote-failed", "403"),
    404: ("missing-file", "no such file"),
    500: ("remote-failed", "500"),
    "closed": ("remote-failed", "the server closed the connection"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("side", [0, 1])
def test_diff_names_the_fault_of_a_server(ask, server, fault, first, side) -> None:
    torch.save({"w": torch.arange(400_000.0)}, server.root / "large.pth")  # more than a window
    url, path = f"{server.url}/large.pth", server.root / "large.pth"
    faulty(server, first, fault)
    document = ask("diff", *((url, path), (path, url))[side])
    kind, words = FAULTS[fault]
    assert (document["exit_code"], document["error"]["kind"]) == (3, kind)
    assert document["error"]["path"] == url
    assert words in document["error"]["message"]


@pytest.mark.parametrize("first", [1, 2])
def test_diff_refuses_a_file_whose_etag_changes(ask, server, first) -> None:
    torch.save({"w": torch.arange(400_000.0)}, server.root / "large.pth")
    faulty(server, first, None)
    document = ask("diff", f"{server.url}/large.pth", server.root / "large.pth")
    assert (document["exit_code"], document["error"]["kind"]) == (3, "source-changed")


@pytest.mark.parametrize("name", ["adamw-cuda3.pth", "legacy.pth"])
def test_convert_writes_the_same_file_as_from_a_local_one(ask, server, bench, name) -> None:
    there = ask("convert", f"{server.url}/{name}?token={SECRET}", "--to", "cpu")
    assert there["output"] == name.replace(".pth", ".cpu.pth")
    ask("convert", server.root / name, "--to", "cpu", "-o", "local.pth")
    assert (bench / there["output"]).read_bytes() == (bench / "local.pth").read_bytes()
    assert any("request" in note for note in there["notes"])
    assert ask("convert", f"{server.url}/{name}", "--to", "cpu")["error"]["kind"] == "output-exists"


def test_convert_of_a_remote_directory(ask, server, bench) -> None:
    there = ask("convert", f"{server.url}/runs/", "--to", "cpu")
    assert there["output"] == "runs.cpu"
    ask("convert", server.root / "runs", "--to", "cpu", "-o", "local")
    for path in Path("local").rglob("*.pth"):
        assert path.read_bytes() == Path("runs.cpu", path.relative_to("local")).read_bytes()


@pytest.mark.parametrize("kept", [1 << 21, 0], ids=["trees kept", "trees dropped"])
def test_a_remote_directory_is_the_local_one(ask, server, bench, monkeypatch, kept) -> None:
    monkeypatch.setattr(reading, "_MOST_KEPT", kept)
    for words in (("diff", f"{server.url}/runs/", server.root / "runs"), ("diff", f"{server.url}/runs/", "run.pth")):
        assert ask(*words)["same"] is (words[2] != "run.pth")
    there = ask("convert", f"{server.url}/runs/", "--to", "cpu", "-o", "there")
    assert there["error"] is None
    ask("convert", server.root / "runs", "--to", "cpu", "-o", "here")
    for path in Path("here").rglob("*.pth"):
        assert path.read_bytes() == Path("there", path.relative_to("here")).read_bytes()


def test_a_remote_archive_is_the_local_one(ask, server, bench) -> None:
    archive = shutil.make_archive(str(server.root / "packed"), "zip", server.root / "runs")
    assert ask("diff", f"{server.url}/packed.zip", archive)["same"]
    for source, output in ((f"{server.url}/packed.zip", "there.zip"), (archive, "here.zip")):
        assert ask("convert", source, "--to", "cpu", "-o", output)["error"] is None
    assert (bench / "there.zip").read_bytes() == (bench / "here.zip").read_bytes()


def test_a_remote_distributed_checkpoint_is_the_local_one(ask, server, bench) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.arange(9.0), "b": {"c": 3}}, checkpoint_id=str(server.root / "dcp"), no_dist=True)
    assert ask("diff", f"{server.url}/dcp/", server.root / "dcp")["same"]


def test_parts_that_are_dropped_are_not_read(ask, server) -> None:
    state = {"model": {"w": torch.ones(1 << 20)}, "optimizer": {"m": torch.zeros(1 << 20)}}
    torch.save(state, server.root / "both.pth")
    found = ask("convert", f"{server.url}/both.pth", "--only", "model", "-o", "model.pth")
    assert found["error"] is None
    assert torch.equal(torch.load("model.pth")["model"]["w"], state["model"]["w"])
    assert server.sent < 0.7 * (server.root / "both.pth").stat().st_size


def test_convert_into_a_folder(ask, server) -> None:
    ask("convert", f"{server.url}/runs/one/last.pth", f"{server.url}/legacy.pth", "--to", "cpu", "--output-dir", "out")
    assert sorted(path.name for path in Path("out").iterdir()) == ["last.pth", "legacy.pth"]


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (("convert", "{url}", "--to", "cpu", "--in-place"), "in-place-impossible", 4),
        (("convert", "{url}", "--undo"), "not-local", 2),
        (("convert", "run.pth", "--to", "cpu", "-o", "{url}"), "not-local", 2),
        (("verify", "{url}"), "not-local", 2),
        (("verify", "run.pth", "--against", "{url}"), "not-local", 2),
        (("inspect", "{base}/no.pth"), "missing-file", 3),
        (("inspect", "wandb:a/b/c:v0"), "artifact-address", 2),
        (("inspect", "htps://h/a.pth"), "unknown-scheme", 2),
    ],
)
def test_what_a_url_cannot_be(ask, server, words, kind, code) -> None:
    url = f"{server.url}/adamw-cuda3.pth?token={SECRET}"
    found = ask(*(word.format(url=url, base=server.url) for word in words))["error"]
    assert (found["kind"], found["exit_code"]) == (kind, code)
    assert found["hint"]


def test_verify_downloads_first(ask, server, simulates) -> None:
    found = ask("verify", f"{server.url}/adamw-cuda3.pth", "--download", "here")
    assert found["results"][0]["passed"]
    assert found["results"][0]["path"] == str(Path("here", "adamw-cuda3.pth"))
    assert Path("here", "adamw-cuda3.pth").read_bytes() == (SAMPLES / "adamw-cuda3.pth").read_bytes()
    again = ask("verify", f"{server.url}/adamw-cuda3.pth", "--download", "here", "--to", "cpu")
    assert again["error"]["kind"] == "output-exists"
    assert f"ckptmove verify {Path('here', 'adamw-cuda3.pth')} --to cpu --json;" in again["error"]["hint"]


def test_a_download_keeps_the_options_that_were_typed(say, server) -> None:
    url = f"{server.url}/adamw-cuda3.pth"
    hint = say("verify", url, "--to", "cpu", "--script", "train.py", "--", "--resume").err.splitlines()[-1]
    assert hint.endswith(f": ckptmove verify {url} --to cpu --script train.py --download . -- --resume")
    hint = say("verify", url, url, "--to", "cpu").err.splitlines()[1]
    assert "--download DIR" in hint


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["{url}"], []),
        (["{url}", "--sample", "1", "--to", "cpu"], []),
        (["run.pth", "{url}", "--keep", "a b"], []),
        (["{url}", "--against", "run.pth"], []),
        (["{url}", "--script", "train.py"], ["--", "--resume", "{url}"]),
    ],
    ids=" ".join,
)
def test_verify_of_a_url_is_typed_again_with_a_download(say, server, bench, words, rest) -> None:
    url = f"{server.url}/adamw-cuda3.pth?token={SECRET}"
    typed, more = ([word.format(url=url) for word in some] for some in (["verify", *words, "--json"], rest))
    said = say(*typed, *more)
    error = json.loads(said.out)["error"]
    assert (said.code, error["kind"], error["path"]) == (2, "not-local", url.replace(SECRET, "***"))
    command = command_line(["ckptmove", *typed, "--download", ".", *more])
    assert error["hint"].endswith(f": {command.replace(SECRET, '***')}")
    assert server.log == []


def test_verify_in_python_names_the_argument_that_downloads(server) -> None:
    with pytest.raises(NotDownloaded) as raised:
        ckptmove.verify(f"{server.url}/adamw-cuda3.pth", sample=1)
    assert "download='DIR'" in raised.value.hint
    assert "--" not in raised.value.hint


def test_verify_downloads_files_of_one_name_into_folders(ask, server, simulates) -> None:
    found = ask("verify", f"{server.url}/runs/*/last.pth", "run.pth", "--download", "here", "--to", "cpu")
    paths = [Path(result["path"]) for result in found["results"]]
    assert paths == [Path("here", "one", "last.pth"), Path("here", "two", "last.pth"), Path("run.pth")]


@pytest.mark.parametrize("jobs", [(), ("--jobs", "1"), ("--jobs", "3")], ids=" ".join)
def test_several_are_reported_in_order(ask, server, jobs) -> None:
    urls = [f"{server.url}/runs/*/last.pth", "run.pth", f"{server.url}/no.pth", f"{server.url}/legacy.pth"]
    found = ask("inspect", *urls, *jobs)
    names = ["runs/one/last.pth", "runs/two/last.pth", "run.pth", "legacy.pth"]
    assert [one["path"].removeprefix(f"{server.url}/") for one in found["checkpoints"]] == names
    assert [error["kind"] for error in found["errors"]] == ["missing-file"]
    assert found["exit_code"] == 3


def test_urls_that_differ_in_their_query_are_two(ask, server) -> None:
    urls = [f"{server.url}/legacy.pth?id={number}" for number in (1, 2, 1)]
    assert len(ask("inspect", *urls)["checkpoints"]) == 2


def test_a_glob_that_cannot_be_listed_is_an_error_among_others(ask, server) -> None:
    server.faults.append(lambda handler: server.send(handler, 403, b"") is None)
    found = ask("inspect", f"{server.url}/runs/*.pth", "run.pth")
    assert [error["kind"] for error in found["errors"]] == ["remote-failed"]
    assert len(found["checkpoints"]) == 1


def test_urls_of_the_configuration(ask, server, bench) -> None:
    (bench / "pyproject.toml").write_text(f'[tool.ckptmove]\ncheckpoints = ["{server.url}/legacy.pth"]\n')
    assert ask("inspect")["checkpoints"][0]["container"] == "torch-legacy"


def test_file_urls_are_local_files(ask, bench) -> None:
    found = ask("inspect", (bench / "run.pth").as_uri())["checkpoints"][0]
    assert (found["path"], found["remote"]) == (str(bench / "run.pth"), None)


@pytest.mark.parametrize("form", ["json", "human", "github"])
@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "{url}"),
        ("inspect", "{url}", "-q"),
        ("inspect", "{url}", "{missing}"),
        ("inspect", "{url}", "--expect", "cpu"),
        ("inspect", "{url}", "--bogus"),
        ("inspect", "{closed}"),
        ("convert", "{url}", "--to", "gpu"),
        ("convert", "{url}", "--to", "cpu", "--dry-run"),
        ("convert", "{url}", "--to", "cpu", "--in-place"),
        ("convert", "{url}", "-o", "{missing}", "--to", "cpu"),
        ("convert", "{url}", "cpu"),
        ("diff", "{url}", "{missing}"),
        ("diff", "{url}", "{url}", "{url}"),
        ("verify", "{url}"),
        ("{url}",),
    ],
    ids=" ".join,
)
def test_credentials_are_never_shown(say, server, words, form) -> None:
    address = server.url.removeprefix("http://")
    places = {
        "url": f"http://user:{SECRET}@{address}/adamw-cuda3.pth?X-Amz-Signature={SECRET}",
        "missing": f"http://{SECRET}@{address}/no.pth?{SECRET}",
        "closed": f"http://user:{SECRET}@127.0.0.1:9/a.pth?token={SECRET}",
    }
    said = say(*(word.format(**places) for word in words), *(["--format", form] if len(words) > 1 else []))
    assert SECRET not in said.out + said.err
    assert said.out + said.err


def test_no_fsspec_for_local_paths(bench) -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from ckptmove.cli.main import main\n"
        "sys.argv = ['ckptmove', 'inspect', 'run.pth']\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print([one for one in ('fsspec', 'aiohttp', 'urllib.request', 'ssl') if one in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=bench)
    assert ran.stdout.endswith("[]\n")


def test_copies_of_equal_names_that_differ_in_their_query_alone() -> None:
    paths = [Address("https://h/a.pth?id=1"), Address("https://h/a.pth?id=2"), "a.pth"]
    assert set(download_paths(paths, "here").values()) == {str(Path("here", "a.pth"))}
    assert download_paths(paths, None) == {}

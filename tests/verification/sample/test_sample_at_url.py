"""``verify --sample`` of a checkpoint at a URL reads only the sampled tensors. The oracle is the local checkpoint."""

from __future__ import annotations

import json
import tempfile
import warnings
import zipfile

import pytest
import torch
from http_server import serving
from safetensors.torch import save_file

import ckptmove
from ckptmove.errors import SourceChanged
from ckptmove.io.remote import http
from ckptmove.io.remote.errors import NotLocal, RemoteFailed
from ckptmove.io.remote.source import WINDOW
from ckptmove.verification.sample.downloading import WholeNeeded

pytest.importorskip("aiohttp")
WIDTH, LAYERS = 256, 16
FORMS = ["zip.pth", "legacy.pth", "table.safetensors", "dcp/", "hf/", "shards/", "parts/"]


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    model(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def save_shards(folder, model):
    """Two ranks' shards of each weight, as torch's HuggingFaceStorageWriter names them."""
    folder.mkdir()
    for rank in range(2):
        parts = {name: weight.chunk(2)[rank].contiguous() for name, weight in model.items()}
        offsets = {
            name: {"saved_offsets": [rank * (len(part)), *[0] * (part.dim() - 1)]} for name, part in parts.items()
        }
        notes = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(parts, folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", metadata=notes)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    model, optimizer = trained()
    tree = {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "epoch": 3}
    torch.save(tree, root / "zip.pth")
    torch.save(tree, root / "legacy.pth", _use_new_zipfile_serialization=False)
    save_file(model, root / "table.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=str(root / "dcp"), no_dist=True)
    save_shards(root / "shards", model)
    (root / "hf").mkdir()
    save_file(model, root / "hf" / "model.safetensors")
    torch.save(optimizer, root / "hf" / "optimizer.pt")
    (root / "hf" / "trainer_state.json").write_text('{"global_step": 7}')
    (root / "hf" / "README.md").write_text("x" * 2**20)
    (root / "parts").mkdir()
    for number, name in enumerate(model):
        torch.save({name: model[name]}, root / "parts" / f"part{number}.pth")
    with serving(root) as server:
        yield server


@pytest.fixture
def server(served, monkeypatch, tmp_path):
    monkeypatch.setattr(http, "PAUSES", [0.0, 0.0])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    served.clear()
    yield served
    assert not [one for one in tmp_path.iterdir() if one.name.startswith("ckptmove-")]


def both(server, name, **options):
    there = ckptmove.verify(f"{server.url}/{name}", to="cpu", **options)
    return there, ckptmove.verify(server.root / name, to="cpu", **options)


def told(result):
    return [(one.name, one.status, one.detail, one.fix) for one in result.checks]


@pytest.mark.parametrize("name", FORMS)
def test_the_verdict_is_that_of_the_local_checkpoint(server, name) -> None:
    there, here = both(server, name, sample=3)
    assert told(there) == told(here)
    assert (there.passed, there.sample, there.path) == (True, here.sample, f"{server.url}/{name}")
    indexes = server.sent - there.traffic.nbytes  # the pages that list a folder
    assert (0 < indexes < 1000) is name.endswith("/")
    assert there.to_dict()["results"][0]["remote"] == {
        "requests": len(server.log), "bytes_read": there.traffic.nbytes
    }  # fmt: skip
    sampled = next(dict(one.evidence)["bytes"] for one in there.checks if one.name == "restore")
    files = 1 if not name.endswith("/") else len(list((server.root / name).iterdir()))
    assert server.sent < sampled + (2 * files + 1) * WINDOW
    assert here.traffic is None


def test_neighbours_are_read_with_one_request(server) -> None:
    steps = []
    verified = ckptmove.verify(f"{server.url}/zip.pth", to="cpu", sample=3, progress=lambda *step: steps.append(step))
    assert steps[-1][0] == steps[-1][1] > 3 * WIDTH * WIDTH * 4
    inspected = ckptmove.inspect(f"{server.url}/zip.pth")
    # For each parameter one request for its values and one for its state, and one for each other tensor.
    assert verified.traffic.requests <= inspected.traffic.requests + 3 + 3 + 2


@pytest.mark.unmeasured
def test_faults_are_found_as_in_the_local_checkpoint(server) -> None:
    tree = torch.load(server.root / "zip.pth")
    for weight in tree["model"].values():
        weight[0] = torch.nan
    for entry in tree["optimizer"]["state"].values():
        entry["step"].fill_(-1.0)
    tree["rng"].zero_()
    torch.save(tree, server.root / "spoiled.pth")
    there, here = both(server, "spoiled.pth", sample=100)
    assert told(there) == told(here)
    assert {"restore", "numbers"} <= {one.name for one in there.checks if one.status == "failed"}


def test_values_outside_the_sample_are_not_missed(server) -> None:
    """Their step counts would be 0, and their random states refused."""
    tree = torch.load(server.root / "zip.pth")
    tree["states"] = {f"rng_state_{number}": torch.get_rng_state() for number in range(40)}
    for key in ("exp_avg", "exp_avg_sq"):
        assert tree["optimizer"]["state"][0][key].any()
    torch.save(tree, server.root / "states.pth")
    there, here = both(server, "states.pth", sample=1)
    assert told(there) == told(here)
    assert [one.code for one in there.findings] == [one.code for one in here.findings]


def test_views_of_one_storage_and_inner_tensors_of_a_subclass(server) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    whole = torch.arange(100.0)
    pair = TwoTensor(torch.ones(3, 3), torch.ones(3, 3))
    torch.save(
        {"model": {"a": whole[3:30], "b": whole[50:].reshape(5, 10), "c": whole[::2]}}, server.root / "views.pth"
    )
    torch.save({"model": {"pair": pair, "w": torch.ones(2)}}, server.root / "pair.pth")
    for name in ("views.pth", "pair.pth"):
        there, here = both(server, name, sample=2)
        assert told(there) == told(here)


def test_a_file_that_changes_while_it_is_read(server) -> None:
    server.etag = lambda _path: f'"{len(server.log) > 3}"'
    with pytest.raises(SourceChanged):
        ckptmove.verify(f"{server.url}/zip.pth", to="cpu", sample=3)


@pytest.mark.unmeasured
@pytest.mark.parametrize("most", [2, 64])
def test_shards_that_are_written_before_their_sample_is_read(server, monkeypatch, most) -> None:
    """With few open files, they are opened again; otherwise only the file system tells of the change."""
    fsspec = pytest.importorskip("fsspec")
    from ckptmove.verification.sample import copy as sample_copy

    memory, choose = fsspec.filesystem("memory"), sample_copy.choose_sample

    def write():
        for file in (server.root / "parts").iterdir():
            memory.pipe(f"/changing/{file.name}", file.read_bytes())

    def written(*facts):
        write()
        return choose(*facts)

    monkeypatch.setattr("ckptmove.io.remote.filesystem._MOST_OPENED", most)
    write()
    try:
        assert ckptmove.verify("memory://changing", to="cpu", sample=3).passed
        monkeypatch.setattr(sample_copy, "choose_sample", written)
        with pytest.raises(SourceChanged):
            ckptmove.verify("memory://changing", to="cpu", sample=3)
    finally:
        memory.rm("/changing", recursive=True)


def test_a_server_that_refuses_or_drops(server) -> None:
    def refuse(handler):
        return len(server.log) > 3 and server.send(handler, 403, b"") is None

    server.faults.append(refuse)
    with pytest.raises(RemoteFailed) as refused:
        ckptmove.verify(f"{server.url}/zip.pth", to="cpu", sample=3)
    assert refused.value.is_denied
    server.clear()
    dropped = []

    def drop(handler):
        if len(server.log) == 4 and not dropped:
            handler.close_connection = True
            dropped.append(handler.path)
            return True
        return False

    server.faults.append(drop)
    assert ckptmove.verify(f"{server.url}/zip.pth", to="cpu", sample=3).passed
    assert dropped


def packed(path):
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(path.with_name("packed.pth"), "w", 8) as new:
        for info in source.infolist():
            new.writestr(info.filename, source.read(info))


def test_what_is_read_as_a_whole_must_be_downloaded(server, tmp_path) -> None:
    packed(server.root / "zip.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), server.root / "script.pt")
    with zipfile.ZipFile(server.root / "files.zip", "w") as archive:
        archive.write(server.root / "table.safetensors", "run/table.safetensors")
    (tmp_path / "train.py").write_text("")
    for name, options in (
        ("packed.pth", {}),
        ("script.pt", {}),
        ("files.zip", {}),
        ("zip.pth", {"case": "train.py:case"}),
        ("zip.pth", {"script": tmp_path / "train.py"}),
        ("zip.pth", {"against": server.root / "zip.pth"}),
    ):
        with pytest.raises(WholeNeeded) as raised:
            ckptmove.verify(f"{server.url}/{name}", to="cpu", sample=3, **options)
        assert "download" in raised.value.hint
        assert "sample" not in raised.value.hint
    with pytest.raises(NotLocal) as raised:
        ckptmove.verify(f"{server.url}/zip.pth")
    assert "sample=N" in raised.value.hint
    assert "--" not in raised.value.hint

"""Payloads in every container and member, with every command: none is executed, here or in the child of verify."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptmove.cli.app import app
from ckptmove.errors import CkptMoveError
from ckptmove.pickles.scan import operations
from ckptmove.proof.request import VerifyRequest
from ckptmove.training.worker import run
from fuzz.payloads import BODIES, PERSISTENT, body, text
from fuzz.seeds import STORAGE, archive_of, program, zip_of
from fuzz.whole_seeds import old_members, saved, tar_of

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch warns and continues
NAMES = [*BODIES, *PERSISTENT]
DENSE = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE
BYTES = {"0": bytes(16)}


def around(*payloads):
    """A dict with payloads and a tensor on cuda:0, so that there is something to convert."""
    items = b"".join(text(f"evil{place}") + payload for place, payload in enumerate(payloads))
    return b"\x80\x02}(" + items + text("weight") + DENSE + b"u."


def legacy_with(place, payload):
    """A stream with the payload as one of its five pickles, or in the object."""
    stream = io.BytesIO()
    torch.save({"weight": torch.zeros(4)}, stream, _use_new_zipfile_serialization=False)
    data, pickles = stream.getvalue(), []
    end = 0
    for _ in range(5):
        begin, end = end, max(end for _, end, _ in operations(data, end))
        pickles.append(data[begin:end])
    pickles[place] = payload
    return b"".join(pickles) + data[end:]


def script_with(record, payload):
    sound = b"\x80\x02c__torch__\nModule\n)\x81}" + text("weight") + DENSE + b"sb."
    records = {"data.pkl": sound, "constants.pkl": b"\x80\x02(" + DENSE + b"t."} | {record: payload}
    code = "import trap_module\ntrap_module.spring()\nclass Module(Module):\n  weight : Tensor\n"
    return archive_of(
        records.pop("data.pkl"), BYTES, **records, **{"constants/0": bytes(16), "code/__torch__.py": code.encode()}
    )


class Stream:
    def __init__(self, data):
        self.data = data

    def __reduce__(self):
        return torch.storage._load_from_bytes, (self.data,)


def table_with(payload):
    row = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    words = payload.decode("latin-1")
    raw = json.dumps({words: row, "__metadata__": {"format": words, words: "__import__('trap_module')"}}).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(16)


HOSTS = {
    "torch-zip": lambda payload: archive_of(around(payload), BYTES),
    "torch-zip, the root": lambda payload: archive_of(b"\x80\x02" + payload + b".", BYTES),
    "torch-zip, in the persistent id": lambda payload: archive_of(
        around(DENSE.replace(b"ctorch\nFloatStorage\n", payload)), BYTES
    ),
    "torch-zip, in the arguments of a tensor": lambda payload: archive_of(
        around(DENSE.replace(b"ccollections\nOrderedDict\n)R", payload)), BYTES
    ),
    "torch-zip, after STOP": lambda payload: archive_of(around() + b"\x80\x02" + payload + b".", BYTES),
    "torch-zip, other records": lambda payload: archive_of(
        around(), BYTES, **{"byteorder": b"little", "evil.pkl": b"\x80\x02" + payload + b".", ".data/x": payload}
    ),
    **{
        f"torch-legacy, pickle {place}": lambda payload, place=place: legacy_with(place, b"\x80\x02" + payload + b".")
        for place in range(5)
    },
    **{
        f"torchscript, {record}": lambda payload, record=record: script_with(record, b"\x80\x02" + payload + b".")
        for record in ("data.pkl", "constants.pkl", "bytecode.pkl", "traced_inputs.pkl")
    },
    "torch-export, sample inputs": lambda payload: program(inputs=around(payload)),
    "torch-export, an object": lambda payload: program(opaque=b"\x80\x02" + payload + b"."),
    "pickle": lambda payload: b"\x80\x02" + payload + b".",
    "pickle, a stream in it": lambda payload: pickle.dumps(
        {"weight": Stream(legacy_with(3, b"\x80\x02" + payload + b"."))}, 4
    ),
    "pickle, an archive in it": lambda payload: pickle.dumps({"weight": Stream(archive_of(around(payload), BYTES))}, 4),
    "pickle, bytes in it": lambda payload: pickle.dumps({"evil": [b"\x80\x02" + payload + b"."]}, 4),
    "safetensors": table_with,
    **{
        f"torch-tar, {member}": lambda payload, member=member: tar_of(
            old_members() | {member: b"\x80\x02" + payload + b"."}
        )
        for member in ("sys_info", "pickle", "tensors", "storages")
    },
    "torch-tar, in the object": lambda payload: tar_of(
        old_members() | {"pickle": b"\x80\x02}(" + text("evil") + payload + text("weight") + text("21") + b"Qu."}
    ),
    **{
        f"torch-tar, a class in {member}": lambda payload, member=member, kind=kind: tar_of(
            old_members() | {member: old_members()[member].replace(b"ctorch\nFloat" + kind, payload)}
        )
        for member, kind in (("tensors", b"Tensor\n"), ("storages", b"Storage\n"))
    },
    "a zip of checkpoints": lambda payload: zip_of({"a.pth": archive_of(around(payload), BYTES), "evil.pkl": payload}),
    "a tar of checkpoints": lambda payload: tar_of({
        "a.pth": legacy_with(3, b"\x80\x02" + payload + b"."), "evil.pkl": b"\x80\x02" + payload + b".",
    }),
}  # fmt: skip
#: Files of directories by path.
FOLDERS = {
    "distributed, .metadata": lambda payload: PIECES | {".metadata": b"\x80\x02" + payload + b"."},
    "distributed, in .metadata": lambda payload: PIECES | {
        ".metadata": PIECES[".metadata"].replace(text("planner_data") + b"N", text("planner_data") + payload)
    },
    "distributed, a dtype": lambda payload: PIECES | {
        ".metadata": PIECES[".metadata"].replace(b"ctorch\nfloat32\n", payload)
    },
    "distributed, a piece": lambda payload: saved({"w": [("__0_0.distcp", (0,))]}, around(payload)),
    "distributed, without .metadata": lambda payload: {"__0_0.distcp": archive_of(around(payload), BYTES)},
}  # fmt: skip
PIECES = saved({"w": [("__0_0.distcp", (0,))]})
INSPECT = ["--tensors", "--tree", "--globals", "--check", "--expect", "cpu", "-v"]
MOVE = ["--to", "mps", "--cast", "--rewrite-strings", "--force", "-o", "out.pt"]


def said(*words):
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.exit_code in {0, 1, 3, 4}, result.output
    return result.stdout + result.stderr


@pytest.fixture
def unmoved(trap, tmp_path, monkeypatch):
    """Nothing was imported or called, and nothing was written but the output."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield trap
    assert not trap.exists()
    assert "trap_module" not in set(sys.modules) - before
    assert {one.name for one in tmp_path.iterdir()} <= {"hostile", "out.pt"}


@pytest.mark.unmeasured
@pytest.mark.parametrize("host", HOSTS)
def test_no_payload_runs(host, unmoved) -> None:
    """Each alone; all of them together are in the next test."""
    for name in NAMES:
        Path("hostile").write_bytes(HOSTS[host](body(name, str(unmoved))))
        said("inspect", "hostile", *INSPECT)
        said("convert", "hostile", *MOVE)
        said("diff", "hostile", "out.pt" if Path("out.pt").exists() else "hostile")
        with suppress(CkptMoveError):
            run(VerifyRequest(path="hostile", to="cuda:0"), lambda _: None)
        assert not unmoved.exists(), name


def every_payload(marker):
    return b"(" + b"".join(body(name, str(marker)) for name in NAMES) + b"l"


@pytest.mark.parametrize("host", HOSTS)
def test_no_payload_runs_whatever_is_asked(host, unmoved) -> None:
    Path("hostile").write_bytes(HOSTS[host](every_payload(unmoved)))
    said("inspect", "hostile", *INSPECT, "--json")
    said("inspect", "hostile", *INSPECT, "--format", "github")
    said("convert", "hostile", *MOVE, "--dry-run", "--json")


@pytest.mark.parametrize(
    "host",
    [
        "torch-zip",
        "torch-zip, the root",
        "torch-legacy, pickle 3",
        "pickle, an archive in it",
        "torch-tar, in the object",
        "torch-export, sample inputs",
        "a tar of checkpoints",
    ],
)
def test_no_payload_runs_in_the_child_of_verify(host, unmoved) -> None:
    Path("hostile").write_bytes(HOSTS[host](every_payload(unmoved)))
    said("verify", "hostile", "--to", "cuda:0")


def test_the_hosts_are_no_duds(unmoved) -> None:
    """A careless reader is caught by each of those that hold a pickle."""
    del unmoved
    springs = 0
    for host, make in HOSTS.items():
        data = make(body("REDUCE", ""))
        if host.startswith(("torch-zip", "torchscript")):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                data = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".pkl"))
        springs += b"ctrap_module\nspring\n" in data
    assert springs == len(HOSTS) - 1  # JSON escapes the newlines


@pytest.mark.unmeasured
@pytest.mark.parametrize("host", FOLDERS)
def test_no_payload_runs_in_a_folder(host, unmoved) -> None:
    for name in NAMES:
        Path("hostile").mkdir()
        for path, data in FOLDERS[host](body(name, str(unmoved))).items():
            Path("hostile", path).write_bytes(data)
        said("inspect", "hostile", *INSPECT)
        said("convert", "hostile", *MOVE)
        said("diff", "hostile", "hostile")
        with suppress(CkptMoveError):
            run(VerifyRequest(path="hostile", to="cuda:0", against="hostile"), lambda _: None)
        for path in Path("hostile").iterdir():
            said("diff", str(path), str(path))
        shutil.rmtree("hostile")
        assert not unmoved.exists(), name


@pytest.mark.parametrize("host", FOLDERS)
def test_no_payload_in_a_folder_runs_in_the_child_of_verify(host, unmoved) -> None:
    Path("hostile").mkdir()
    for path, data in FOLDERS[host](every_payload(unmoved)).items():
        Path("hostile", path).write_bytes(data)
    said("verify", "hostile", "--to", "cuda:0", "--against", "hostile")


def test_a_directory_of_payloads(trap, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    every = every_payload(trap)
    (folder / "pytorch_model.bin").write_bytes(HOSTS["torch-zip"](every))
    (folder / "optimizer.pt").write_bytes(HOSTS["torch-legacy, pickle 3"](every))
    (folder / "training_args.bin").write_bytes(HOSTS["torch-zip, the root"](every))
    (folder / "scheduler.pt").write_bytes(HOSTS["pickle"](every))
    (folder / "trainer_state.json").write_text('{"__class__": "trap_module.Spring", "global_step": 1}')
    (folder / "trap_module.py").write_text(f"open({str(trap)!r}, 'a').close()")
    (folder / "sitecustomize.py").write_text(f"open({str(trap)!r}, 'a').close()")
    (folder / "pyproject.toml").write_text('[tool.ckptmove]\nto = "trap_module"\n')
    monkeypatch.chdir(tmp_path)
    said("inspect", "run", *INSPECT)
    said("convert", "run", *MOVE[:-1], "out")
    said("verify", "run", "--to", "cuda:0", "--against", "out")
    assert not trap.exists()
    assert {one.name for one in tmp_path.iterdir()} <= {"run", "out"}


@pytest.mark.parametrize("shard", ["../evil.bin", "/etc/passwd", "a/../../evil.bin", "..", "", "evil\0.bin", "\ud800"])
def test_an_index_that_names_files_elsewhere(shard, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "evil.bin").write_bytes(HOSTS["torch-zip"](b"N"))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"weight": shard}}))
    (folder / "pytorch_model.bin").write_bytes(HOSTS["torch-zip"](b"N"))
    monkeypatch.chdir(tmp_path)
    output = said("inspect", "run", "--json")
    assert json.loads(output.splitlines()[0])["error"]["kind"] in {"missing-shard", "damaged-archive", "missing-file"}
    said("convert", "run", "--to", "mps", "-o", "out")
    assert {one.name for one in tmp_path.iterdir()} <= {"run", "evil.bin"}

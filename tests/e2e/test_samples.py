"""The sample checkpoints agree with torch, their manifest, their recipe and their table."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import pickle
import pickletools
import subprocess
import sys
import warnings
import zipfile
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import untraced

import ckptmove

torch = pytest.importorskip("torch")

from older_torch import safetensors_table
from weights_only_lists import numbers

pytestmark = pytest.mark.unmeasured

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
MANIFEST = json.loads((SAMPLES / "MANIFEST.json").read_text(encoding="utf-8"))
ENTRIES = {entry["file"]: entry for entry in MANIFEST["samples"]}
DIRECTORIES = {entry["directory"]: entry for entry in MANIFEST["directories"]}
FILES = [*ENTRIES, "MANIFEST.json", *(f"{name}/{file}" for name, one in DIRECTORIES.items() for file in one["sha256"])]
ADAM = ("zipped-again.pth", "big-endian.pth", "without-byteorder.pth", "without-crcs.pth", "renamed.pth")
FINDINGS = {
    *("D101", "D102", "D103", "D104", "O201", "O202", "O203", "O204", "O205", "O206"),
    *("R301", "R302", "R303", "T401", "K601", "S701", "F803", "F804"),
}
OPTIMIZERS = {
    "adamw-cuda3.pth": torch.optim.AdamW,
    "optimizer-left-on-cpu.pth": torch.optim.Adam,
    "map-location-dragged-all.pth": torch.optim.Adam,
    "dataparallel-two-gpus.pth": torch.optim.SGD,
    "adam-mps.pt": torch.optim.Adam,
    "tutorial-sgd-cpu.pth": torch.optim.SGD,
    "criterion-on-cpu.pth": torch.optim.Adam,
    "full-resume-cuda0.pt": torch.optim.AdamW,
    "namespace-memo-trap.pth": torch.optim.Adam,
    "float64-cpu.pt": torch.optim.Adam,
    "numpy-scalar-metric.pth": torch.optim.AdamW,
    "capturable-adam-cuda0.pt": torch.optim.Adam,
    "rmsprop-centered-cuda0.pt": torch.optim.RMSprop,
    "lightning-mapped-to-cpu.ckpt": torch.optim.AdamW,
    "nanogpt-compiled-fused.pt": torch.optim.AdamW,
    "legacy-adamw-cuda1.pth": torch.optim.AdamW,
    "bare-pickle-cuda2.pkl": torch.optim.Adam,
    **dict.fromkeys(ADAM, torch.optim.Adam),
}
made_by_this_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != MANIFEST["torch"],
    reason=f"the samples are written by torch {MANIFEST['torch']}, here is {torch.__version__}",
)


def load_with_tags(entry):
    """The object and, for each tag, how many storages carry it."""
    tags = Counter()

    def record(storage, location):
        tags[location] += 1
        return storage

    path = SAMPLES / entry["file"]
    if entry["container"] == "safetensors":  # torch reads one where the library is installed, and no tags at all
        return from_table(path), tags
    if entry["container"] == "torchscript":
        state = load_script(path).state_dict()
        tags.update(str(tensor.device) for tensor in state.values())
        return state, tags
    if entry["container"] == "pickle":
        with mock.patch.object(torch, "load", partial(torch.load, map_location=record)):
            return pickle.loads(path.read_bytes()), tags
    return torch.load(path, map_location=record, weights_only=entry["weights_only"]), tags


def load_script(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on the age of TorchScript
        return torch.jit.load(path)


def from_table(path):
    """The tensors of a safetensors file, by their table."""
    with path.open("rb") as file:
        table, start = safetensors_table(file)
        raw = file.read()
    assert start + len(raw) == path.stat().st_size
    table.pop("__metadata__")
    values = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    assert {row["dtype"] for row in table.values()} == {"F32"}
    bounds = {name: [offset // 4 for offset in row["data_offsets"]] for name, row in table.items()}
    return {name: values[slice(*bounds[name])].reshape(row["shape"]) for name, row in table.items()}


def count_tensors(tree):
    if isinstance(tree, torch.nn.Module):
        return len(tree.state_dict())
    if isinstance(tree, dict):
        return sum(count_tensors(value) for value in tree.values())
    if isinstance(tree, (list, tuple)):
        return sum(count_tensors(value) for value in tree)
    return int(isinstance(tree, torch.Tensor))


def first(tree, *keys):
    return next(tree[key] for key in keys if key in tree)


def run_recipe(*arguments):
    command = [sys.executable, str(SAMPLES / "make_samples.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=untraced.environment())


@pytest.fixture(params=ENTRIES)
def entry(request):
    return ENTRIES[request.param]


def test_manifest_lists_every_file_once():
    recipe = {"archives.py", "directories.py", "make_samples.py", "placement.py", "training.py", "README.md"}
    files = [path.relative_to(SAMPLES) for path in SAMPLES.rglob("*") if path.is_file()]
    found = sorted(path.as_posix() for path in files if path.parts[0] != "__pycache__" and str(path) not in recipe)
    assert found == sorted(FILES)


def test_there_are_enough_and_they_are_small():
    assert len(ENTRIES) >= 12
    assert {entry["container"] for entry in ENTRIES.values()} == {
        "torch-zip", "torch-legacy", "torchscript", "safetensors", "pickle",
    }  # fmt: skip
    assert max((SAMPLES / file).stat().st_size for file in FILES) < 30_000


def test_bytes_are_the_manifests(entry):
    content = (SAMPLES / entry["file"]).read_bytes()
    assert len(content) == entry["bytes"]
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]


def test_tags_and_tensors_are_the_manifests(entry):
    tree, tags = load_with_tags(entry)
    assert dict(tags) == entry["devices"]
    assert count_tensors(tree) == entry["tensors"]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch on one that is not its own
@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file")
def test_weights_only_is_the_truth(entry):
    assert entry["weights_only"] == ("S701" not in entry["findings"] and entry["container"] != "torchscript")
    if entry["container"] == "torchscript":
        refuses = pytest.raises(RuntimeError, match="TorchScript archives")
        with refuses if numbers(torch.__version__) >= (2, 6) else nullcontext():
            torch.load(SAMPLES / entry["file"], map_location="cpu", weights_only=True)
        return
    if entry["container"] == "safetensors":
        pytest.importorskip("safetensors")
        if "safetensors" not in inspect.getsource(torch.serialization.load):
            pytest.skip("this torch.load reads no safetensors")
    if entry["weights_only"]:
        torch.load(SAMPLES / entry["file"], map_location="cpu", weights_only=True)
    else:
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(SAMPLES / entry["file"], map_location="cpu", weights_only=True)


def test_expected_findings_are_codes_that_a_file_alone_can_show(entry):
    assert set(entry["findings"]) <= FINDINGS
    assert len(entry["findings"]) == len(set(entry["findings"]))


def test_every_named_trouble_has_a_sample():
    shown = {code for entry in ENTRIES.values() for code in entry["findings"]}
    troubles = {"D101", "D102", "D103", "D104", "O201", "R301", "R302", "K601", "S701", "F803", "F804"}
    assert troubles <= shown
    assert any(not entry["findings"] for entry in ENTRIES.values())


@pytest.mark.parametrize("file", OPTIMIZERS)
def test_a_real_optimizer_step_resumes(file):
    tree, _ = load_with_tags(ENTRIES[file])
    weights = first(tree, "model", "state_dict", "model_state_dict")
    state = first(tree, "optimizer", "optimizer_state_dict", "optimizer_states")
    state = state[0] if isinstance(state, list) else state
    distinct = {tensor.data_ptr(): torch.nn.Parameter(tensor.clone()) for tensor in weights.values()}
    # Matrices first, the rest after: nanoGPT's order of groups, which one group in model order does not need.
    several = len(state["param_groups"]) > 1
    parameters = sorted(distinct.values(), key=lambda weight: several and weight.dim() < 2)
    groups = []
    for saved in state["param_groups"]:
        size = len(saved["params"])
        groups.append({"params": parameters[:size]})
        parameters = parameters[size:]
        saved["capturable"] = False
    assert not parameters
    optimizer = OPTIMIZERS[file](groups, lr=0.1)
    optimizer.load_state_dict(state)
    before = [weight.clone() for weight in distinct.values()]
    for weight, held in optimizer.state.items():
        assert all(value.shape in {weight.shape, ()} for value in held.values() if value is not None)
        assert held.get("step", 3) == 3
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert len(optimizer.state) == len(distinct)
    assert all(not old.equal(new) for old, new in zip(before, distinct.values(), strict=True))


def test_namespace_reads_its_device_from_the_tags_memo():
    with zipfile.ZipFile(SAMPLES / "namespace-memo-trap.pth") as archive:
        operations = list(pickletools.genops(archive.read("namespace-memo-trap/data.pkl")))
    written = [at for at, (_, value, _) in enumerate(operations) if value == "cpu"]
    assert len(written) == 1
    put, memo, _ = operations[written[0] + 1]
    assert put.name == "BINPUT"
    # The one spelled-out "cpu" is a tag: it closes ('storage', class, key, location, numel) before BINPERSID.
    following = [opcode.name for opcode, _, _ in operations[written[0] : written[0] + 6]]
    assert following == ["BINUNICODE", "BINPUT", "BININT1", "TUPLE", "BINPUT", "BINPERSID"]
    key = next(at for at, (_, value, _) in enumerate(operations) if value == "device")
    reader, read, _ = operations[key + 2]
    assert (operations[key + 1][0].name, reader.name, read) == ("BINPUT", "BINGET", memo)
    tree, tags = load_with_tags(ENTRIES["namespace-memo-trap.pth"])
    assert tree["args"].device == "cpu"
    reads = sum(opcode.name == "BINGET" and value == memo for opcode, value, _ in operations)
    assert reads == tags["cpu"]  # every tag but the first, and the config


def test_absent_device_tags_are_a_string_each_as_cuda_writes_them():
    with zipfile.ZipFile(SAMPLES / "adamw-cuda3.pth") as archive:
        strings = Counter(value for _, value, _ in pickletools.genops(archive.read("adamw-cuda3/data.pkl")))
    assert strings["cuda:3"] == ENTRIES["adamw-cuda3.pth"]["devices"]["cuda:3"]
    assert strings["cpu"] == 1


def test_saved_view_drags_its_whole_storage():
    tree, _ = load_with_tags(ENTRIES["saved-view.pt"])
    view = tree["embedding.weight"]
    assert view.untyped_storage().nbytes() == 128 * view.numel() * view.element_size()


def test_legacy_views_share_one_storage():
    tree, tags = load_with_tags(ENTRIES["legacy-shared-views.pth"])
    assert tags == {"cuda:0": 1}
    assert len({tensor.untyped_storage().data_ptr() for tensor in tree["state_dict"].values()}) == 1
    assert (SAMPLES / "legacy-shared-views.pth").read_bytes().startswith(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")


def test_zoo_ties_storages_and_holds_the_rare_dtypes():
    zoo, _ = load_with_tags(ENTRIES["dtype-zoo.pt"])
    assert zoo["embed.weight"].data_ptr() == zoo["head.weight"].data_ptr()
    assert zoo["scale"].dim() == 0
    assert zoo["empty"].numel() == 0
    assert not zoo["transposed"].is_contiguous()
    rare = {torch.bfloat16, torch.float16, torch.complex64, torch.bool, torch.int64, torch.float8_e4m3fn}
    assert rare < {tensor.dtype for tensor in zoo.values()}


@pytest.mark.parametrize("name", [*ENTRIES, *DIRECTORIES])
def test_inspect_says_what_the_manifest_says(name):
    found = ckptmove.inspect(str(SAMPLES / name))
    entry = {**ENTRIES, **DIRECTORIES}[name]
    assert {finding.code for finding in found.findings} == set(entry["findings"])
    assert found.inventory.container == entry.get("container", "directory")
    assert found.inventory.layout == entry.get("layout", found.inventory.layout)
    assert len(found.inventory.tensors) == entry["tensors"]
    if entry["devices"]:
        assert Counter(storage.device for storage in found.inventory.storages) == entry["devices"]


@pytest.mark.parametrize("name", DIRECTORIES)
def test_files_of_a_directory_are_the_manifests(name):
    tags, tensors = Counter(), 0

    def record(storage, location):
        tags[location] += 1
        return storage

    for file, digest in DIRECTORIES[name]["sha256"].items():
        content = (SAMPLES / name / file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        if not file.endswith(".json"):
            tensors += count_tensors(torch.load(io.BytesIO(content), map_location=record, weights_only=True))
    assert (dict(tags), tensors) == (DIRECTORIES[name]["devices"], DIRECTORIES[name]["tensors"])


def test_archives_of_other_hands_are_what_they_are_said_to_be():
    names, orders, methods, crcs = {}, {}, {}, {}
    for file in ADAM:
        with zipfile.ZipFile(SAMPLES / file) as archive:
            names[file] = {name.partition("/")[0] for name in archive.namelist()}
            members = {one.filename.partition("/")[2]: one for one in archive.infolist()}
            methods[file] = {one.compress_type for one in members.values()}
            crcs[file] = any(one.CRC for one in members.values())
            orders[file] = archive.read(members["byteorder"]) if "byteorder" in members and crcs[file] else None
    assert [file for file in ADAM if names[file] != {Path(file).stem}] == ["renamed.pth"]
    assert [file for file in ADAM if zipfile.ZIP_DEFLATED in methods[file]] == ["zipped-again.pth"]
    assert [file for file in ADAM if orders[file] == b"big"] == ["big-endian.pth"]
    assert [file for file in ADAM if crcs[file] and orders[file] is None] == ["without-byteorder.pth"]
    assert [file for file in ADAM if not crcs[file]] == ["without-crcs.pth"]


def test_the_script_runs_but_for_the_line_that_names_a_gpu():
    module = load_script(SAMPLES / "script-code-cuda0.pt")
    assert module(torch.ones(2, 6)).shape == (2, 3)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            module.gates()


@pytest.mark.slow
@made_by_this_torch
def test_recipe_makes_the_same_bytes_elsewhere(tmp_path):
    made = run_recipe("--folder", str(tmp_path))
    assert made.returncode == 0, made.stderr
    made = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.as_posix() for path in made} == set(FILES)
    for path in made:
        assert (tmp_path / path).read_bytes() == (SAMPLES / path).read_bytes(), path


@pytest.mark.slow
@made_by_this_torch
def test_check_writes_nothing_and_names_what_differs(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((SAMPLES / name).read_bytes())
    assert run_recipe("--check", "--folder", str(tmp_path)).returncode == 0
    spoiled = bytearray((tmp_path / "adam-mps.pt").read_bytes())
    spoiled[-1] ^= 1
    (tmp_path / "adam-mps.pt").write_bytes(spoiled)
    (tmp_path / "dtype-zoo.pt").unlink()
    checked = run_recipe("--check", "--folder", str(tmp_path))
    assert checked.returncode == 1
    assert checked.stdout.splitlines() == ["differs: adam-mps.pt", "differs: dtype-zoo.pt"]
    assert (tmp_path / "adam-mps.pt").read_bytes() == bytes(spoiled)
    assert not (tmp_path / "dtype-zoo.pt").exists()


def test_readme_table_is_the_manifests():
    lines = (SAMPLES / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    named = list(ENTRIES.items())
    named += [(f"{name}/", entry) for name, entry in DIRECTORIES.items()]
    assert rows == [f"| `{name}` | {entry['holds']} | {entry['wrong'] or '-'} |" for name, entry in named]

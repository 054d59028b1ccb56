"""``ckptmove.load`` next to ``torch.load``."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from allow_list import restored_allow_list
from loaded_alike import loaded_differences
from safetensors.torch import load_file, save_file
from storage_views import viewed

import ckptmove
from ckptmove.errors import (
    CkptMoveError,
    DamagedArchive,
    DamagedPickle,
    LimitExceeded,
    OutOfMemory,
    UnsupportedDtype,
    UsageError,
)
from ckptmove.limits import Limits
from ckptmove.proof.loading.errors import MissingDevice, NotLoadable, NotRebuilt, NotWeightsOnly

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = ROOT / "sample_ckpts"
FILES = [
    entry["file"]
    for entry in json.loads((SAMPLES / "MANIFEST.json").read_text())["samples"]
    if (SAMPLES / entry["file"]).is_file()
]
LOADING = ("errors", "load", "objects", "storages")
#: Where the state remapping differs from ``map_location="cpu"``.
REMAPPED = {
    "capturable-adam-cuda0.pt": [".optimizer.param_groups.0.capturable: True is False"],
    "lightning-mapped-to-cpu.ckpt": [
        ".hyper_parameters.device: device(type='cuda', index=0) is device(type='cpu')"
    ],
}  # fmt: skip
CORPUS = ROOT.parent / "shared" / "corpus"


def both(path: Path, **options):
    """The results of torch and of ckptmove; None for an error."""
    try:
        with restored_allow_list(empty=True):  # modules of torch that another test imported have added theirs
            theirs = torch.load(path, **{"map_location": "cpu", "weights_only": True, **options})
    except Exception:
        theirs = None
    try:
        return theirs, ckptmove.load(path, options.get("map_location", "cpu"))
    except CkptMoveError:
        return theirs, None


@pytest.mark.parametrize("name", FILES)
def test_every_sample_that_torch_loads(name) -> None:
    theirs, ours = both(SAMPLES / name)
    if theirs is not None:
        assert loaded_differences(theirs, ours) == REMAPPED.get(name, [])
        assert loaded_differences(ours, ckptmove.load(SAMPLES / name, "cpu", mmap=True)) == []
        assert loaded_differences(ours, ckptmove.load(SAMPLES / name, {"*": "cpu"})) == []
    theirs, ours = both(SAMPLES / name, map_location=None)
    if theirs is not None:
        assert loaded_differences(theirs, ours) == []


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not next to the repository")
def test_every_file_of_the_corpus_that_torch_loads() -> None:
    compared = 0
    for path in sorted(CORPUS.rglob("*")):
        if path.is_file() and path.suffix not in {".md", ".tsv", ".json", ".txt"}:
            for map_location in ("cpu", None):
                theirs, ours = both(path, map_location=map_location)
                if theirs is not None:
                    assert loaded_differences(theirs, ours) == [], path
                    compared += 1
    assert compared > 250


def saved(path: Path, value: object, **options) -> Path:
    torch.save(value, path, **options)
    return path


def zoo() -> dict:
    base = torch.arange(24.0).reshape(4, 6)
    tied = torch.nn.Parameter(torch.ones(3))
    ordered = OrderedDict(weight=base)
    ordered._metadata = OrderedDict({"": {"version": 1}})
    shared: list = [1, "a"]
    return {
        "ordered": ordered, "row": base[1], "column": base[:, 2], "transposed": base.t(), "expanded": tied.expand(2, 3),
        "tied": [tied, tied], "again": base, "lists": (shared, shared), "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3), "complex": torch.ones(2, dtype=torch.complex64),
        "conj": torch.ones(2).cfloat().conj(), "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "sparse": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(), "csc": torch.eye(3).to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)), "bool": torch.tensor([True]),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8),
        "channels": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        "meta": torch.empty(2, device="meta"), "uint16": torch.ones(2, dtype=torch.uint16),
        "size": torch.Size([2, 3]), "device": torch.device("cpu"), "dtype": torch.float16, "counter": Counter("aab"),
        "set": {1, 2}, "bytes": b"\x00\xff", "complex number": 1 + 2j, "bytearray": bytearray(b"ab"), "none": None,
        "big": 2**70, 5: -1.5, (1, 2): True, "nan": float("nan"), "buffer": torch.nn.Buffer(torch.ones(2)),
        "layout": torch.sparse_coo,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|deprecated).*")
@pytest.mark.parametrize("legacy", [False, True])
def test_every_kind_of_value(tmp_path, legacy) -> None:
    value = zoo()
    del value["layout"]  # torch.save pickles a layout, and weights-only mode refuses it
    if legacy:
        del value["uint16"], value["float8"]  # of untyped storages, which torch cannot read in a legacy file
    path = saved(tmp_path / "zoo.pth", value, _use_new_zipfile_serialization=not legacy)
    theirs = torch.load(path, weights_only=True)
    ours = ckptmove.load(path)
    assert loaded_differences(theirs, ours) == []
    assert ours["lists"][0] is ours["lists"][1]
    assert ours["tied"][0] is ours["tied"][1]
    assert ours["ordered"]._metadata == theirs["ordered"]._metadata


def test_nested_tensors(tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once in a process
        nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    path = saved(tmp_path / "nested.pth", [nested])
    assert loaded_differences(torch.load(path, weights_only=True), ckptmove.load(path)) == []


def test_a_storage_by_itself(tmp_path) -> None:
    weight = torch.arange(4.0)
    path = saved(tmp_path / "storage.pth", {"typed": weight.storage(), "view": weight[1:]})
    ours = ckptmove.load(path)
    assert loaded_differences(torch.load(path, weights_only=True), ours) == []
    ours["view"][0] = 9
    assert ours["typed"][1] == 9


def test_views_of_storages_that_torch_before_0_4_saved(tmp_path) -> None:
    path = viewed(tmp_path / "old.pth")
    ours = ckptmove.load(path, "cpu")
    assert loaded_differences(torch.load(path, map_location="cpu", weights_only=True), ours) == []
    on_meta = ckptmove.load(path, "meta")["a.weight"]
    assert on_meta.is_meta
    assert on_meta.shape == ours["a.weight"].shape


def test_containers_that_contain_themselves(tmp_path) -> None:
    inner: list = [1]
    value = {"pair": (inner, 2), "list": inner, "ordered": OrderedDict()}
    inner.append(value["pair"])
    value["self"] = value
    value["ordered"]["back"] = value["ordered"]
    alone: list = []
    alone.append((alone,))
    assert (ours := ckptmove.load(saved(tmp_path / "alone.pth", alone[0])))[0][0] is ours
    ours = ckptmove.load(saved(tmp_path / "circle.pth", value))
    assert ours["self"] is ours
    assert ours["list"][1] is ours["pair"]
    assert ours["pair"][0] is ours["list"]
    assert ours["ordered"]["back"] is ours["ordered"]


def test_deep_values(tmp_path) -> None:
    """A value that is nested deeper than Python's recursion limit."""
    depth = 2 * sys.getrecursionlimit()
    pickled = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
    path = saved(tmp_path / "deep.pth", [])
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "new.pth", "w") as new:
        for record in old.infolist():
            new.writestr(record.filename, pickled if record.filename.endswith("data.pkl") else old.read(record))
    ours, levels = ckptmove.load(tmp_path / "new.pth"), 0
    while ours:
        (ours,), levels = ours, levels + 1
    assert levels == depth - 1


@pytest.mark.parametrize("options", [{}, {"map_location": "cpu"}], ids=["alone", "moved"])
def test_values_deeper_than_the_limit(tmp_path, options) -> None:
    path = tmp_path / "deep.pt"
    value: object = OrderedDict()
    for _ in range(100):
        value = [OrderedDict(a={"b": value})]
    torch.save(value, path)
    assert loaded_differences(value, ckptmove.load(path, limits=Limits(depth=301), **options)) == []
    with pytest.raises(LimitExceeded, match="depth"):
        ckptmove.load(path, limits=Limits(depth=300), **options)


def test_later_protocols(tmp_path) -> None:
    value = {"set": frozenset({1}), "text": "é", "bytes": b"a", "weight": torch.ones(2), "mutable": {2}}
    path = saved(tmp_path / "four.pth", value, pickle_protocol=4)
    assert loaded_differences(torch.load(path, weights_only=False), ckptmove.load(path)) == []


def test_the_state_is_remapped_as_convert_writes_it(tmp_path) -> None:
    for name in ("map-location-dragged-all.pth", "capturable-adam-cuda0.pt", "full-resume-cuda0.pt"):
        output = tmp_path / name
        ckptmove.convert(SAMPLES / name, to="cpu", output=output)
        theirs = torch.load(output, weights_only=True)
        assert loaded_differences(theirs, ckptmove.load(SAMPLES / name, "cpu")) == []
        assert loaded_differences(theirs, ckptmove.load(SAMPLES / name, {"cuda:*": torch.device("cpu")})) == []


@pytest.mark.parametrize("name", ["hf-trainer-cuda3", "sharded-two-gpus"])
def test_a_directory_becomes_one_value(tmp_path, name) -> None:
    output = tmp_path / "one.pth"
    ckptmove.convert(SAMPLES / name, to="cpu", output=output, plain=True)
    ours = ckptmove.load(SAMPLES / name, "cpu", plain=True)
    assert loaded_differences(torch.load(output, weights_only=True), ours) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint(tmp_path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    weights = {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}}
    save(weights, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    assert loaded_differences(weights, ckptmove.load(tmp_path / "dcp", "cpu")) == []


def test_a_safetensors_file(tmp_path) -> None:
    tensors = {"b": torch.ones(3, dtype=torch.uint8), "a": torch.arange(4.0)}
    tensors["small"] = torch.tensor([[1.0, 0.5], [2.0, 0.25]]).to(torch.float8_e5m2)  # has no class of storages
    save_file(tensors, tmp_path / "a.safetensors")
    for device in (None, "cpu"):
        ours = ckptmove.load(tmp_path / "a.safetensors", device)
        assert loaded_differences(load_file(tmp_path / "a.safetensors"), ours) == []


def test_an_archive_of_files(tmp_path) -> None:
    saved(tmp_path / "run.pth", {"weight": torch.ones(2)})
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "run.pth", "run.pth")
    assert ckptmove.load(tmp_path / "all.zip")["weight"].tolist() == [1, 1]


def test_tensors_are_mapped_and_the_file_never_changes(tmp_path) -> None:
    path = saved(tmp_path / "run.pth", {"weight": torch.zeros(1000)})
    before = path.read_bytes()
    ours = ckptmove.load(path, mmap=True)
    assert str(path) in Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else True
    ours["weight"] += 1
    assert path.read_bytes() == before
    assert ckptmove.load(path)["weight"].sum() == 0


def test_tensors_in_memory_are_those_of_torch(tmp_path) -> None:
    path = saved(tmp_path / "run.pth", {"weight": torch.zeros(1000)})
    ours = ckptmove.load(path)["weight"]
    assert str(path) not in Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else True
    assert ours.untyped_storage().resizable() == torch.load(path)["weight"].untyped_storage().resizable()
    ours += 1
    assert ours.sum() == 1000


#: In a process of its own: it would end with a signal.
OVERWRITE = "import ckptmove, sys, torch; torch.save(ckptmove.load(sys.argv[1], map_location='cpu'), sys.argv[1])"


@pytest.mark.slow
@pytest.mark.unmeasured
def test_the_file_may_be_saved_again_while_its_tensors_are_in_use(tmp_path) -> None:
    before = {"model": torch.rand(300, 300), "optimizer": [torch.rand(300, 300), torch.rand(300)]}
    path = saved(tmp_path / "run.pth", before)
    assert subprocess.run([sys.executable, "-c", OVERWRITE, path], check=False).returncode == 0
    assert loaded_differences(before, torch.load(path)) == []


@pytest.mark.slow
def test_without_other_changes_no_module_for_them_is_imported() -> None:
    path = str(SAMPLES / "tutorial-sgd-cpu.pth")
    loaded = f"[ckptmove.load({path!r}, to, mmap=True) for to in (None, 'cpu')]"
    code = f"import sys, ckptmove; {loaded}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    rooms = ("ckptmove.checkpoint.inventory", "ckptmove.conversion", "ckptmove.moves", "ckptmove.proof")
    needed = {
        "ckptmove.checkpoint.inventory", "ckptmove.checkpoint.inventory.apart",
        "ckptmove.checkpoint.inventory.storages", "ckptmove.proof",
        "ckptmove.proof.loading", *(f"ckptmove.proof.loading.{name}" for name in LOADING),
        "ckptmove.proof.errors",
        "ckptmove.proof.tensors", "ckptmove.proof.tensors.dtypes",
    }  # fmt: skip
    assert {name for name in found if name.startswith(rooms)} == needed


def test_too_little_memory(tmp_path, monkeypatch) -> None:
    path = saved(tmp_path / "run.pth", {"weight": torch.zeros(1000)})

    def refuse(*_args: object, **_options: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "UntypedStorage", refuse)
    with pytest.raises(MemoryError) as caught:
        ckptmove.load(path)
    assert isinstance(caught.value, OutOfMemory)


def test_weights_only(tmp_path) -> None:
    path = saved(tmp_path / "run.pth", {"weight": torch.zeros(1)})
    for accepted in (True, None):
        assert ckptmove.load(path, map_location="cpu", weights_only=accepted)["weight"].item() == 0
    with pytest.raises(UsageError) as caught:
        ckptmove.load(path, weights_only=False)
    assert "plain=True" in caught.value.hint


@pytest.mark.parametrize("mmap", [True, False])
def test_only_reads_only_those_bytes(tmp_path, monkeypatch, mmap) -> None:
    from ckptmove.proof.loading.storages import Storages
    from ckptmove.proof.tensors.stored import StoredTensors

    path = saved(tmp_path / "run.pth", {"model": {"weight": torch.ones(9)}, "other": torch.zeros(100)})
    seen: list[int] = []
    for owner, name in ((Storages, "_file"), (StoredTensors, "read_into")):
        real = getattr(owner, name)

        def noted(self, *args, real=real):
            seen.append(args[-1].nbytes)
            return real(self, *args)

        monkeypatch.setattr(owner, name, noted)
    ours = ckptmove.load(path, only="model", mmap=mmap)
    assert list(ours) == ["model"]
    assert seen == [path.stat().st_size if mmap else 36]
    assert list(ckptmove.load(path, only=["other"])) == ["other"]
    assert list(ckptmove.load(path, only="model.wei*")["model"]) == ["weight"]


def trained() -> dict:
    """Enough tensors that most of them are read in one step, and one that is not."""
    model = {f"layers.{number}.weight": torch.full((2, 3), float(number)) for number in range(40)}
    model["tied"], model["row"] = model["layers.39.weight"], model["layers.38.weight"][1]
    model["parameter"] = torch.nn.Parameter(torch.ones(2))
    state = {
        number: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3)}
        for number in range(40)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "capturable": True, "params": list(range(40))}
    return {"optimizer": {"state": state, "param_groups": [group]}, "model": model, "device": torch.device("cuda", 1)}


@pytest.mark.parametrize("mmap", [True, False])
def test_many_tensors(tmp_path, mmap) -> None:
    path = saved(tmp_path / "run.pth", trained())
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    assert loaded_differences(theirs, ckptmove.load(path, mmap=mmap)) == []
    remapped = [".optimizer.param_groups.0.capturable: True is False"]
    ours = ckptmove.load(path, {"cuda:1": "cpu", "cpu": "cpu"}, mmap=mmap)
    assert loaded_differences(theirs, ours) == [
        ".device: device(type='cuda', index=1) is device(type='cpu')",
        *remapped,
    ]
    assert ours["model"]["tied"] is ours["model"]["layers.39.weight"]
    for only in ("model", "model.layers.1*", ["optimizer", "model.row"]):
        part = ckptmove.load(path, "cpu", only=only, mmap=mmap)
        whole = ckptmove.load(path, "cpu", only=only, plain=True)  # every operation is read, as for a conversion
        assert loaded_differences(whole, part) == []
    assert all(one.is_meta for one in ckptmove.load(path, "meta", only="model")["model"].values())
    with pytest.raises(CkptMoveError):
        ckptmove.load(path, "cpu", only="ema")


def test_nothing_of_the_file_is_imported(tmp_path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('it was imported')")

    class Evil:
        def __reduce__(self):
            return exec, ("raise SystemExit('it was run')",)

    path = saved(tmp_path / "evil.pth", {"weight": torch.ones(1), "evil": Evil()})
    for plain in (False, True):
        with pytest.raises(CkptMoveError) as caught:
            ckptmove.load(path, plain=plain)
        assert caught.value.hint
    with pytest.raises(NotWeightsOnly) as refused:
        ckptmove.load(path)
    assert refused.value.is_dangerous
    assert isinstance(refused.value, pickle.UnpicklingError)


def test_a_global_that_the_user_allowed_is_not_called(tmp_path) -> None:
    path = saved(tmp_path / "run.pth", {"path": Path("a"), "weight": torch.ones(1)})
    with torch.serialization.safe_globals([*{type(Path("a")), Path}]), pytest.raises(NotWeightsOnly) as caught:
        ckptmove.load(path)
    assert "pathlib" in caught.value.names[0]
    assert "plain=True" in caught.value.hint
    assert ckptmove.load(path, plain=True)["path"] == "a"


def test_plain_replaces_a_module(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    ours = ckptmove.load(saved(tmp_path / "model.pth", model), plain=True)
    assert loaded_differences(dict(model.state_dict()), {k: v.detach() for k, v in ours.items()}) == []


def test_some_devices_become_meta() -> None:
    path = SAMPLES / "adamw-cuda3.pth"
    mapping = {"cuda:3": "meta", "*": "cpu"}
    ours, theirs = ckptmove.load(path, mapping), torch.load(path, map_location={"cuda:3": "meta"})
    flat = [(key, value.device) for key, value in ours["model"].items()]
    assert flat == [(key, value.device) for key, value in theirs["model"].items()]
    assert {device.type for _, device in flat} == {"meta"}
    assert ours["optimizer"]["state"][0]["step"].device.type == "cpu"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_meta(tmp_path) -> None:
    value = zoo()
    for name in ("layout", "quantized", "channels"):  # torch has no quantized meta tensors
        del value[name]
    path = saved(tmp_path / "run.pth", value)
    ours = ckptmove.load(path, torch.device("meta"))
    assert ours["row"].device.type == "meta"
    assert ours["row"].shape == (6,)
    assert loaded_differences(
        torch.load(SAMPLES / "adamw-cuda3.pth", map_location="meta"),
        ckptmove.load(SAMPLES / "adamw-cuda3.pth", "meta"),
    ) == []  # fmt: skip


def test_a_device_that_is_not_here() -> None:
    if torch.cuda.device_count() > 3:
        pytest.skip("cuda:3 is here")
    with pytest.raises(MissingDevice) as caught:
        ckptmove.load(SAMPLES / "adamw-cuda3.pth")
    assert isinstance(caught.value, RuntimeError)
    assert "map_location" in caught.value.hint
    assert not caught.value.is_requested
    for options in ({}, {"only": "model"}):
        with pytest.raises(MissingDevice) as caught:
            ckptmove.load(SAMPLES / "float64-cpu.pt", "cuda:3", **options)
        assert caught.value.is_requested


def test_errors(tmp_path) -> None:
    with pytest.raises(UsageError) as refused:
        ckptmove.load(SAMPLES / "adamw-cuda3.pth", lambda storage, _: storage)
    assert 'map_location="cpu"' in refused.value.hint
    with pytest.raises(UsageError):
        ckptmove.load(SAMPLES / "adamw-cuda3.pth", "cudaa")
    with pytest.raises(FileNotFoundError):
        ckptmove.load(tmp_path / "none.pth")
    with pytest.raises(NotLoadable) as caught:
        ckptmove.load(SAMPLES / "script-code-cuda0.pt", "cpu")
    assert caught.value.hint
    with pytest.raises(UnsupportedDtype):
        ckptmove.load(SAMPLES / "float64-cpu.pt", "mps")
    with pytest.raises(UnsupportedDtype):
        ckptmove.load(SAMPLES / "float64-cpu.pt", "mps", only="model")


def rewritten(path: Path, change, method: int = zipfile.ZIP_STORED) -> Path:
    """A copy of an archive with another pickle, and with storages of another compression method."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_name("new.pth"), "w") as new:
        for record in old.infolist():
            data = old.read(record)
            if record.filename.endswith("data.pkl"):
                new.writestr(record, change(data))
            else:
                new.writestr(record, data, method if "/data/" in record.filename else None)
    return path.with_name("new.pth")


def test_arguments_that_torch_rejects(tmp_path) -> None:
    path = saved(tmp_path / "run.pth", {"size": torch.device("cuda", 0)})
    with pytest.raises(NotRebuilt) as caught:
        ckptmove.load(rewritten(path, lambda data: data.replace(b"cuda", b"cudb")))
    assert caught.value.hint


class Rebuilt:
    """An object that is saved as a call of one of torch's rebuild functions."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.call = getattr(torch._utils, name), arguments

    def __reduce__(self):
        return self.call


def unchecked(layout: str) -> torch.Tensor:
    """A sparse tensor with an index outside of it, which crashes the process when it is used."""
    values = torch.ones(2)
    if layout == "coo":
        return torch.sparse_coo_tensor(torch.tensor([[0, 9**9]]), values, (4,), check_invariants=False)
    indices = torch.tensor([0, 1, 2]), torch.tensor([0, 9**9])
    return torch.sparse_csr_tensor(*indices, values, (2, 2), check_invariants=False)


@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse).*")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_indices_outside_of_a_sparse_tensor(tmp_path, layout) -> None:
    path = saved(tmp_path / "run.pth", {"a": unchecked(layout)})
    with pytest.raises(NotRebuilt):
        ckptmove.load(path)
    assert ckptmove.load(path, "meta")["a"].is_meta  # without indices
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("deflated", [False, True])
@pytest.mark.parametrize("numel", [0, 6])
@pytest.mark.parametrize("device", ["cpu", None, {"*": "cpu"}])
def test_a_tensor_larger_than_its_storage(tmp_path, device, numel, deflated, mmap) -> None:
    whole = torch.empty(numel).storage()
    path = saved(tmp_path / "run.pth", [Rebuilt("_rebuild_tensor_v2", whole, 0, (9,), (1,), False, OrderedDict())])
    if deflated:
        path = rewritten(path, lambda data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(NotRebuilt):
        ckptmove.load(path, device, mmap=mmap)


@pytest.mark.parametrize("device", ["cpu", None, "meta"])
@pytest.mark.parametrize(
    "change", [(b"FloatStorage", b"FloatStorag_"), (b"storage", b"storagf"), (b"K\x01\x85", b"J\xff\xff\xff\xff\x85")]
)
def test_a_damaged_pickle_is_named_as_inspect_names_it(tmp_path, change, device) -> None:
    path = rewritten(saved(tmp_path / "run.pth", {"weight": torch.ones(4)}), lambda data: data.replace(*change))
    with pytest.raises(DamagedPickle) as seen:
        ckptmove.inspect(path)
    with pytest.raises(DamagedPickle) as caught:
        ckptmove.load(path, device)
    assert str(caught.value) == str(seen.value)


def test_a_key_with_more_digits_than_python_prints(tmp_path) -> None:
    key = 10**5000
    assert ckptmove.load(saved(tmp_path / "run.pth", {key: True}), "cpu") == {key: True}


def test_a_device_that_torch_is_not_compiled_for(tmp_path) -> None:
    value = Rebuilt("_rebuild_device_tensor_from_cpu_tensor", torch.ones(1), torch.float32, "xpu:0", False)
    with pytest.raises(NotRebuilt):
        ckptmove.load(saved(tmp_path / "run.pth", [value]))


def test_missing_bytes(tmp_path) -> None:
    path = saved(tmp_path / "run.pth", {"weight": torch.ones(4)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "cut.pth", "w") as new:
        for record in old.infolist():
            data = old.read(record)
            new.writestr(record, data[:8] if record.filename.endswith("data/0") else data)
    with pytest.raises(DamagedArchive):
        ckptmove.load(tmp_path / "cut.pth")


def test_file_objects() -> None:
    expected = torch.load(SAMPLES / "adamw-cuda3.pth", map_location="cpu", weights_only=True)
    assert (
        loaded_differences(expected, ckptmove.load(io.BytesIO((SAMPLES / "adamw-cuda3.pth").read_bytes()), "cpu")) == []
    )
    with (SAMPLES / "adamw-cuda3.pth").open("rb") as file:
        assert loaded_differences(expected, ckptmove.load(file, "cpu")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_device(tmp_path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    path = saved(tmp_path / "run.pth", value)
    ours = ckptmove.load(path, "cuda")
    assert ours["rng"].device.type == "cpu"
    assert ours["optimizer"]["state"][0]["step"].device.type == "cpu"
    assert ours["optimizer"]["state"][0]["exp_avg"].device == ours["model"]["weight"].device == torch.device("cuda", 0)
    assert torch.equal(ours["model"]["weight"].cpu(), model.weight)
    on_gpu = saved(tmp_path / "gpu.pth", {name: tensor.cuda() for name, tensor in model.state_dict().items()})
    assert loaded_differences(torch.load(on_gpu, weights_only=True), ckptmove.load(on_gpu)) == []


@pytest.mark.parametrize("map_location", ["cuda", torch.device("cuda"), {"cpu": "cuda"}], ids=str)
def test_a_device_without_an_index_is_the_current_one(tmp_path, monkeypatch, map_location) -> None:
    path = saved(tmp_path / "w.pth", {"w": torch.ones(2)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with pytest.raises(MissingDevice) as caught:
        ckptmove.load(path, map_location)
    assert caught.value.device == "cuda:3"

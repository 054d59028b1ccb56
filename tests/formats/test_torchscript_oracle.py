"""Archives of ``torch.jit.save``, compared with ``torch.jit.load`` and with the bytes of the archive."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections import Counter

import pytest
import torch
from torch import nn

from ckptmove.api.functions import convert, inspect
from ckptmove.errors import UncastableDtype
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.tensors.stored import StoredTensors

OFFSET = torch.tensor([1.0, 2.0, 3.0, 4.0])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.linear(x) + self.transposed.sum()


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()
        self.again = self.layer
        self.pieces = [torch.ones(2), torch.zeros(3)]
        self.table = {"key": torch.ones(1)}
        self.pair = (torch.ones(4), 3)
        self.sizes = [1, 2]
        self.plain = torch.full((2,), 7.0)
        self.tied = self.layer.linear.weight
        self.view = nn.Parameter(torch.arange(10.0)[2:5])
        self.home = torch.device("cpu")

    def forward(self, x):
        for piece in self.pieces:
            x = x + piece.sum()
        x = x + torch.zeros(1, device=torch.device("cpu"))
        return self.layer(x) + self.table["key"] + self.pair[0] + self.plain.sum() + self.view.sum() + len(self.sizes)


class WithConstant(nn.Module):
    def forward(self, x):
        return x + OFFSET + torch.zeros(4, device="cpu")


def traced():
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return torch.jit.trace(nn.Sequential(layers, WithConstant()), torch.ones(2, 4))


def quantized():
    return torch.jit.script(
        torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear}, dtype=torch.qint8)
    )


def frozen():
    return torch.jit.freeze(torch.jit.script(Everything().eval()))


MODULES = {
    "scripted": lambda: torch.jit.script(Everything()),
    "traced": traced,
    "quantized": quantized,
    "frozen": frozen,
    "double": lambda: torch.jit.script(nn.Linear(2, 2).double()),
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on the age of TorchScript and of its quantization
        yield


@pytest.fixture(params=MODULES)
def saved(request, tmp_path):
    torch.manual_seed(1)
    path = tmp_path / "saved.pt"
    torch.jit.save(MODULES[request.param](), path)
    return path


@pytest.fixture
def lite(tmp_path):
    path = tmp_path / "saved.ptl"
    traced()._save_for_lite_interpreter(str(path))
    return path


def held(tensor):
    """A module with one buffer, as an archive."""
    module = nn.Module()
    module.register_buffer("held", tensor)
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(module), stream)
    return stream.getvalue()


def records(path):
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


class Tags(pickle.Unpickler):
    """Python's own, which calls nothing, and counts the tags of the storages."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data))
        self.tags = Counter()

    def find_class(self, module, name):
        return type("Stub", (), {"__init__": lambda *_: None, "__setstate__": lambda *_: None})

    def persistent_load(self, pid):
        self.tags[pid[3]] += 1


def tags(path):
    found = {}
    for name, data in records(path).items():
        if name.endswith(("/data.pkl", "/constants.pkl", "/bytecode.pkl", "/traced_inputs.pkl")):
            unpickler = Tags(data)
            unpickler.load()
            found[name.partition("/")[2]] = unpickler.tags
    return found


def test_names_and_facts_are_those_of_the_state_dict(saved):
    expected = torch.jit.load(saved, map_location="cpu").state_dict()
    found = {record.name: record for record in inspect(str(saved)).inventory.tensors}
    assert set(expected) <= set(found)
    for name, tensor in expected.items():
        own = found[name]
        facts = (own.shape, own.stride, own.storage_offset, own.dtype, own.device, own.role)
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert facts == (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), dtype, "cpu", "model")


def test_values_are_those_of_the_state_dict(saved):
    expected = torch.jit.load(saved, map_location="cpu").state_dict()
    with open_checkpoint(str(saved), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        for record in checkpoint.inventory.tensors:
            if record.name in expected:
                assert torch.equal(stored.tensor(record), expected[record.name])


def test_attributes_and_constants_have_names_too(tmp_path):
    names = {}
    for kind in ("scripted", "traced", "quantized"):
        torch.jit.save(MODULES[kind](), tmp_path / kind)
        module = torch.jit.load(tmp_path / kind)
        inventory = inspect(str(tmp_path / kind)).inventory
        names[kind] = {record.name for record in inventory.tensors} - set(module.state_dict())
        assert (inventory.container, inventory.layout, inventory.globals[0].verdict) == (
            "torchscript",
            "module",
            "safe",
        )
        assert all(use.weights_only for use in inventory.globals)
        assert inventory.facts == ()
    assert names["scripted"] == {"pieces.0", "pieces.1", "table.key", "pair.0", "plain"}
    assert names["traced"] == {"CONSTANTS.c0", "CONSTANTS.c1"}
    packed = {f"0._packed_params._packed_params.{index}" for index in (0, 1)}
    assert names["quantized"] >= packed


def test_a_shared_module_has_its_tensors_under_both_names(tmp_path):
    torch.jit.save(MODULES["scripted"](), tmp_path / "saved.pt")
    found = {record.name: record for record in inspect(str(tmp_path / "saved.pt")).inventory.tensors}
    assert found["again.linear.weight"].storage == found["layer.linear.weight"].storage == found["tied"].storage
    assert found["view"].storage_offset == 2


def test_devices_in_code_are_named_by_their_lines(tmp_path):
    torch.jit.save(MODULES["scripted"](), tmp_path / "saved.pt")
    mentions = inspect(str(tmp_path / "saved.pt")).inventory.mentions
    ((device,), in_code) = ([one for one in mentions if (one.site is None) is bare] for bare in (False, True))
    assert (device.where, device.value) == ("home", "cpu")
    code = records(tmp_path / "saved.pt")
    for mention in in_code:
        name, _, line = mention.where.rpartition(":")
        assert f'torch.device("{mention.value}")' in code[f"saved/{name}"].decode().splitlines()[int(line) - 1]
    assert len(in_code) == sum(text.count(b"torch.device(") for name, text in code.items() if name.endswith(".py")) == 1


def test_there_and_back_every_tag_and_no_other_byte(saved, tmp_path):
    away, back = tmp_path / "away.pt", tmp_path / "back.pt"
    before = records(saved)
    result = convert(str(saved), to="cuda:1", output=str(away))
    assert {tag for counts in tags(away).values() for tag in counts} == {"cuda:1"}
    after = records(away)
    assert list(after) == list(before)
    assert all(after[name] == before[name] or name.endswith(".pkl") for name in before)
    assert len(result.plan.edits) == len(inspect(str(saved)).inventory.storages)
    with zipfile.ZipFile(away) as archive:
        assert archive.testzip() is None
    convert(str(away), to="cpu", output=str(back))
    assert records(back).keys() == before.keys()
    assert tags(back) == tags(saved)
    if b"torch\ndevice" not in before["saved/data.pkl"]:
        assert back.read_bytes() == saved.read_bytes()


def test_storages_stay_aligned(saved, tmp_path):
    convert(str(saved), to="cuda:1", output=str(tmp_path / "away.pt"))
    reader = torch._C.PyTorchFileReader(str(tmp_path / "away.pt"))
    for name in reader.get_all_records():
        if name.startswith(("data/", "constants/")):
            assert reader.get_record_offset(name) % 64 == 0


def test_a_converted_module_is_the_same_module(saved, tmp_path):
    convert(str(saved), to="cuda:1", output=str(tmp_path / "away.pt"))
    before = torch.jit.load(saved)
    after = torch.jit.load(tmp_path / "away.pt", map_location="cpu")
    assert list(after.state_dict()) == list(before.state_dict())
    for name, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor)
    assert after.code == before.code


def test_a_module_brought_to_the_cpu_runs_without_a_mapping(tmp_path):
    there, here = tmp_path / "there.pt", tmp_path / "here.pt"
    torch.jit.save(MODULES["traced"](), tmp_path / "saved.pt")
    convert(str(tmp_path / "saved.pt"), to="cuda:0", output=str(there))
    with pytest.raises(RuntimeError):
        torch.jit.load(there)
    convert(str(there), to="cpu", output=str(here))
    x = torch.ones(2, 4)
    assert torch.equal(torch.jit.load(here)(x), torch.jit.load(tmp_path / "saved.pt")(x))


def test_a_device_among_the_attributes_follows_and_lines_of_code_are_told(tmp_path):
    torch.jit.save(MODULES["scripted"](), tmp_path / "saved.pt")
    result = convert(str(tmp_path / "saved.pt"), to="cuda:1", output=str(tmp_path / "away.pt"))
    assert [(flag.where, flag.source, flag.target) for flag in result.plan.flags] == [("home", "cpu", "cuda:1")]
    (note,) = result.notes
    assert "code/__torch__" in note
    assert note.endswith(" = cpu")
    module = torch.jit.load(tmp_path / "away.pt", map_location="cpu")
    assert module.home == torch.device("cuda:1")
    back = convert(str(tmp_path / "away.pt"), to="cpu", output=str(tmp_path / "back.pt"))
    assert [(flag.where, flag.target) for flag in back.plan.flags] == [("home", "cpu")]
    assert torch.jit.load(tmp_path / "back.pt").home == torch.device("cpu")


class AtHome(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x) + torch.ones(2, device=torch.device("cuda:0"))

    @torch.jit.export
    def plain(self, x):
        return self.linear(x)


def test_a_module_whose_code_names_a_device_is_loaded_and_fails_in_that_line_alone(tmp_path):
    module, moved = torch.jit.script(AtHome()), tmp_path / "moved.pt"
    torch.jit.save(module, tmp_path / "saved.pt")
    convert(str(tmp_path / "saved.pt"), to="cuda:0", output=str(tmp_path / "away.pt"))
    (note,) = convert(str(tmp_path / "away.pt"), to="cpu", output=str(moved)).notes
    assert "code/__torch__" in note
    (finding,) = inspect(str(moved)).findings
    assert (finding.code, finding.where) == ("D104", (note.partition(": ")[2].partition(" = ")[0],))
    assert finding.fix.endswith(" then torch.jit.save(torch.jit.script(module), ...) again")
    loaded, x = torch.jit.load(moved), torch.ones(3)
    assert torch.equal(loaded.plain(x), module.plain(x))
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            loaded(x)
    again = tmp_path / "again.pt"
    torch.jit.save(torch.jit.load(moved, map_location="cpu"), again)
    assert [one.fix for one in inspect(str(again)).findings] == [finding.fix], "torch changes no code either"


def test_the_lite_interpreter_reads_what_was_moved(lite, tmp_path):
    away = tmp_path / "away.ptl"
    inventory = inspect(str(lite)).inventory
    assert inventory.facts == ()
    assert {record.name for record in inventory.tensors} >= {"0.0.weight", "CONSTANTS.c0"}
    convert(str(lite), to="cuda:1", output=str(away))
    counts = tags(away)
    assert {name for name, found in counts.items() if found} == {
        "data.pkl", "constants.pkl", "bytecode.pkl", "traced_inputs.pkl",
    }  # fmt: skip
    assert {tag for found in counts.values() for tag in found} == {"cuda:1"}
    x = torch.ones(2, 4)
    expected = torch.jit.load(lite)(x)
    assert torch.equal(torch.jit.load(away, map_location="cpu")(x), expected)
    module = torch._C._load_for_lite_interpreter(str(away), torch.device("cpu"))
    assert torch.equal(module.forward((x,)), expected)


@pytest.mark.parametrize(
    "dtype",
    [
        *("bfloat16", "float16", "bool", "complex32", "complex64", "uint16", "uint32", "uint64", "bits8"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("bits16", "bits1x8", "bits2x4", "bits4x2"),
    ],
)
def test_every_dtype_that_torchscript_saves(tmp_path, dtype):
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    (tmp_path / "saved.pt").write_bytes(held(torch.empty(6, dtype=getattr(torch, dtype))))
    inventory = inspect(str(tmp_path / "saved.pt")).inventory
    loaded = torch.jit.load(tmp_path / "saved.pt").held
    (record,) = inventory.tensors
    assert (record.dtype, record.shape) == (dtype, tuple(loaded.shape))
    assert inventory.facts == ()


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_a_sparse_buffer_has_its_parts(tmp_path, layout):
    dense = torch.eye(3)[:, :2]
    sparse = dense.to_sparse() if layout == "sparse_coo" else dense.to_sparse_csr()
    (tmp_path / "saved.pt").write_bytes(held(sparse))
    (record,) = inspect(str(tmp_path / "saved.pt")).inventory.tensors
    assert (record.kind, record.shape) == (layout, tuple(torch.jit.load(tmp_path / "saved.pt").held.shape))
    assert record.parts[-1].name == "held.values"


def test_a_buffer_on_meta_lacks_no_bytes(tmp_path):
    (tmp_path / "saved.pt").write_bytes(held(torch.ones(3, device="meta")))
    inventory = inspect(str(tmp_path / "saved.pt")).inventory
    assert ([record.device for record in inventory.tensors], inventory.facts) == (["meta"], ())


def test_code_stands_in_the_way_of_a_cast(tmp_path):
    torch.jit.save(MODULES["double"](), tmp_path / "saved.pt")
    with pytest.raises(UncastableDtype, match="code"):
        convert(str(tmp_path / "saved.pt"), to="mps", cast=True, output=str(tmp_path / "away.pt"))

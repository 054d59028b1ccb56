"""Every fact of an inventory about a tensor, compared with ``torch.load``."""

from __future__ import annotations

import argparse
import warnings
from collections import OrderedDict, defaultdict
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ckptmove.api.figures import shares
from ckptmove.checkpoint.state_dicts import model_tensors
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from ckptmove.model import Inventory, TensorRecord


class Loaded(NamedTuple):
    root: object
    devices: dict[str, str]


def save_and_read(obj: object, folder: Path, **options: object) -> Inventory:
    path = folder / "saved.pt"
    torch.save(obj, path, **options)
    with open_checkpoint(str(path)) as checkpoint:
        return checkpoint.inventory


def load(folder: Path, *, weights_only: bool = False) -> Loaded:
    """The loaded object, and the location tag of each storage, in order."""
    tags: list[str] = []

    def record(storage, tag):
        tags.append(tag)
        return storage

    root = torch.load(folder / "saved.pt", map_location=record, weights_only=weights_only)
    return Loaded(root, {str(index): tag for index, tag in enumerate(tags)})


def assert_dense(record: TensorRecord, tensor: torch.Tensor) -> None:
    assert record.dtype == str(tensor.dtype).removeprefix("torch.")
    assert record.shape == tuple(tensor.shape)
    assert record.stride == tensor.stride()
    assert record.storage_offset == tensor.storage_offset()
    assert record.requires_grad == tensor.requires_grad
    assert record.nbytes == tensor.numel() * tensor.element_size()
    assert record.device == tensor.device.type


class Sub(torch.Tensor):
    """A subclass with nothing of its own."""


class Wrapper(torch.Tensor):
    """A subclass without a storage, as quantization libraries have them."""

    @staticmethod
    def __new__(cls, elem):
        return torch.Tensor._make_wrapper_subclass(
            cls, elem.size(), dtype=elem.dtype, device=elem.device, strides=elem.stride(), storage_offset=0
        )

    def __init__(self, elem):
        self.elem = elem

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[arg.elem if isinstance(arg, Wrapper) else arg for arg in args], **(kwargs or {}))


class Rebuilt:
    """Pickles itself as a call of a function with arguments."""

    def __init__(self, func, *args):
        self.call = (func, args)

    def __reduce__(self):
        return self.call


PLAIN_DTYPES = [
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # of newer torch
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype(dtype, tmp_path):
    try:
        inventory = save_and_read({"t": torch.zeros(3, 4, dtype=dtype)}, tmp_path)
    except KeyError:
        pytest.skip(f"this torch has {dtype} and does not save it")
    loaded = load(tmp_path, weights_only=True).root["t"]
    (record,) = inventory.tensors
    assert_dense(record, loaded)
    assert inventory.storages[0].nbytes == loaded.untyped_storage().nbytes()


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base, "scalar": torch.tensor(3.0), "empty": torch.empty(0), "empty_2d": torch.empty(0, 5),
        "transposed": base.t(), "row": base[2], "column": base[:, 3], "corner": base[1:3, 2:4],
        "expanded": torch.ones(1, 3).expand(5, 3), "strided": torch.arange(10)[::3],
        "grad": base.clone().requires_grad_(),
        "channels_last": torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), "tied": base,
        "conj": torch.zeros(2, dtype=torch.complex64).conj(), "neg": torch.zeros(2, dtype=torch.cfloat).conj().imag,
        "conj-neg": torch._neg_view(torch.zeros(2, dtype=torch.complex64).conj()),
    }  # fmt: skip


def test_views_of_all_shapes(tmp_path):
    inventory = save_and_read(views(), tmp_path)
    loaded = load(tmp_path, weights_only=True).root
    assert [record.name for record in inventory.tensors] == list(loaded)
    for record in inventory.tensors:
        assert_dense(record, loaded[record.name])
    assert [record.kind for record in inventory.tensors if record.kind != "tensor"] == ["conj", "neg", "conj-neg"]
    keys = {record.name: record.storage for record in inventory.tensors}
    assert len({keys[name] for name in ("base", "transposed", "row", "column", "corner", "tied")}) == 1
    assert len(set(keys.values())) == len(inventory.storages)
    assert inventory.facts == ()


def test_storages_carry_the_tags_that_map_location_is_told(tmp_path, monkeypatch):
    tags = iter(["cuda:3", "mps", "cpu"])
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: next(tags))
    inventory = save_and_read([torch.zeros(2), torch.zeros(3), torch.zeros(4)], tmp_path)
    loaded = load(tmp_path)
    assert {storage.key: storage.device for storage in inventory.storages} == loaded.devices
    assert [record.device for record in inventory.tensors] == ["cuda:3", "mps", "cpu"]


def test_one_storage_read_from_several_places_has_each_site_once(tmp_path):
    shared = torch.zeros(4)
    container = {"x": shared}
    inventory = save_and_read({"a": container, "b": container, "view": shared[1:]}, tmp_path)
    assert [record.name for record in inventory.tensors] == ["a.x", "b.x", "view"]
    (storage,) = inventory.storages
    assert len(storage.tag_sites) == len(set(storage.tag_sites)) == 2
    assert len(storage.class_sites) == 2


def test_parameters_with_and_without_attributes(tmp_path):
    plain, tagged, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    tagged.scale = torch.ones(3)
    frozen.requires_grad_(requires_grad=False)
    inventory = save_and_read({"plain": plain, "tagged": tagged, "frozen": frozen}, tmp_path)
    loaded = load(tmp_path, weights_only=True).root
    by_name = {record.name: record for record in inventory.tensors}
    assert list(by_name) == ["plain", "tagged", "tagged.scale", "frozen"]
    assert {by_name[name].kind for name in loaded} == {"parameter"}
    for name, tensor in loaded.items():
        assert_dense(by_name[name], tensor)
    assert_dense(by_name["tagged.scale"], loaded["tagged"].scale)


def test_subclasses_and_what_hangs_on_them(tmp_path):
    sub = torch.randn(3, 4).as_subclass(Sub)
    sub.extra = {"inner": torch.ones(2)}
    buffer = getattr(nn, "Buffer", nn.Parameter)(torch.zeros(3))  # the former in newer torch
    inventory = save_and_read({"sub": sub, "buffer": buffer, "wrapped": Wrapper(torch.randn(2, 5))}, tmp_path)
    loaded = torch.load(tmp_path / "saved.pt", weights_only=False)  # torch refuses a map_location that is a function
    by_name = {record.name: record for record in inventory.tensors}
    assert list(by_name) == ["sub", "sub.extra.inner", "buffer", "wrapped", "wrapped.elem"]
    assert_dense(by_name["sub"], loaded["sub"])
    assert by_name["sub"].subclass == f"{__name__}.Sub"
    assert_dense(by_name["buffer"], loaded["buffer"])
    assert by_name["buffer"].subclass == ""
    assert by_name["wrapped"].kind == "wrapper-subclass"
    assert by_name["wrapped"].storage is None
    assert by_name["wrapped"].subclass == f"{__name__}.Wrapper"
    wrapped = by_name["wrapped"]
    assert (wrapped.dtype, wrapped.shape, wrapped.nbytes) == ("float32", (2, 5), 0)  # the bytes are those of `elem`
    assert_dense(by_name["wrapped.elem"], loaded["wrapped"].elem)
    assert [(mention.where, mention.kind, mention.value) for mention in inventory.mentions] == [
        ("wrapped.device", "torch.device", "cpu")
    ]


def test_the_bytes_of_a_wrapper_count_once(tmp_path):
    inventory = save_and_read({"model": {"w": Wrapper(torch.randn(2, 5)), "tied.w": torch.randn(3)}}, tmp_path)
    (share,) = shares(inventory.tensors)
    assert (share.tensors, share.nbytes) == (3, sum(storage.nbytes for storage in inventory.storages))
    assert [tensor.name for tensor in model_tensors(inventory)] == ["model.w", "model.tied.w"]


@pytest.mark.parametrize(
    ("make", "kind", "parts"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo", {"indices": "_indices", "values": "_values"}),
        (
            lambda: torch.eye(3).to_sparse_csr(),
            "sparse_csr",
            {"crow_indices": "crow_indices", "col_indices": "col_indices", "values": "values"},
        ),
        (
            lambda: torch.eye(3).to_sparse_csc(),
            "sparse_csc",
            {"ccol_indices": "ccol_indices", "row_indices": "row_indices", "values": "values"},
        ),
        (
            lambda: torch.eye(4).to_sparse_bsr((2, 2)),
            "sparse_bsr",
            {"crow_indices": "crow_indices", "col_indices": "col_indices", "values": "values"},
        ),
        (
            lambda: torch.eye(4).to_sparse_bsc((2, 2)),
            "sparse_bsc",
            {"ccol_indices": "ccol_indices", "row_indices": "row_indices", "values": "values"},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("parameter", [False, True])
def test_sparse_layouts(make, kind, parts, parameter, tmp_path):
    tensor = nn.Parameter(make()) if parameter else make()
    (record,) = save_and_read({"s": tensor}, tmp_path).tensors
    loaded = load(tmp_path, weights_only=True).root["s"].detach()
    assert (record.kind, record.shape, record.stride) == (kind, tuple(loaded.shape), ())
    assert record.requires_grad == parameter
    found = {name: getattr(loaded, method)() for name, method in parts.items()}
    assert [part.name for part in record.dense()] == [f"s.{name}" for name in parts]
    for part in record.dense():
        assert_dense(part, found[part.name.removeprefix("s.")])
    assert record.nbytes == sum(part.nbytes for part in record.dense())


QUANTIZED = "ignore:.*(quantize|Quant|quantized|TypedStorage).*"


@pytest.mark.filterwarnings(QUANTIZED)
def test_quantized_tensors(tmp_path):
    saved = {
        "tensor": torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8),
        "tensor32": torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint32),
        "unsigned": torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8),
        "channel": torch.quantize_per_channel(torch.randn(3, 4), torch.ones(3), torch.zeros(3), 0, torch.qint8),
    }
    inventory = save_and_read(saved, tmp_path)
    loaded = load(tmp_path, weights_only=True).root
    for record in inventory.tensors:
        tensor = loaded[record.name]
        assert record.kind == "quantized"
        assert_dense(record, tensor)
    channel = inventory.tensors[-1]
    assert [part.name for part in channel.dense()] == ["channel.values", "channel.scales", "channel.zero_points"]
    assert_dense(channel.dense()[1], loaded["channel"].q_per_channel_scales())
    assert_dense(channel.dense()[2], loaded["channel"].q_per_channel_zero_points())
    assert inventory.facts == ()


@pytest.mark.filterwarnings(QUANTIZED)
def test_elements_smaller_than_a_byte_do_not_read_as_an_overrun(tmp_path):
    tensor = torch.quantize_per_channel(torch.randn(3, 8), torch.ones(3), torch.zeros(3), 0, torch.quint4x2)
    inventory = save_and_read(tensor, tmp_path)
    assert inventory.tensors[0].dtype == "quint4x2"
    assert inventory.facts == ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors(tmp_path):
    inventory = save_and_read({"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, tmp_path)
    name = "torch._utils._rebuild_nested_tensor"  # which torch refuses since 2.15
    refuses = name not in torch._weights_only_unpickler._get_allowed_globals()
    with torch.serialization.safe_globals([torch._utils._rebuild_nested_tensor]) if refuses else nullcontext():
        loaded = load(tmp_path, weights_only=True).root["n"]
    (record,) = inventory.tensors
    assert record.kind == "nested"
    labels = ["buffer", "sizes", "strides", "storage_offsets"]
    assert [part.name for part in record.dense()] == [f"n.{label}" for label in labels]
    parts = [loaded.values(), loaded._nested_tensor_size(), loaded._nested_tensor_strides()]
    for part, tensor in zip(record.dense(), [*parts, loaded._nested_tensor_storage_offsets()], strict=True):
        assert_dense(part, tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_subclass_with_a_rebuild_function_of_its_own_is_listed_by_its_storages(tmp_path):
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    inventory = save_and_read({"jagged": jagged}, tmp_path)
    assert {storage.key for storage in inventory.storages} == set(load(tmp_path).devices)


def test_meta_tensors_have_no_bytes(tmp_path):
    inventory = save_and_read({"m": nn.Parameter(torch.empty(3, 4, device="meta"))}, tmp_path)
    loaded = load(tmp_path, weights_only=True).root["m"]
    (record,) = inventory.tensors
    assert (record.kind, record.device, record.nbytes, record.storage) == ("meta", "meta", 0, None)
    assert (record.shape, record.stride) == (tuple(loaded.shape), loaded.stride())
    assert record.requires_grad


@pytest.mark.parametrize("protocol", [2, 5])
def test_tensors_of_backends_without_storages(protocol, tmp_path):
    rebuild = torch._utils._rebuild_device_tensor_from_numpy
    from_cpu = getattr(torch._utils, "_rebuild_device_tensor_from_cpu_tensor", None)
    if from_cpu is None:
        pytest.skip("this torch saves such tensors by way of NumPy alone")
    saved = {
        "numpy": Rebuilt(rebuild, np.ones((2, 3), np.float32), torch.float32, "cpu", True),
        "cpu": Rebuilt(from_cpu, torch.ones(2, 3, 4).transpose(0, 1), torch.bfloat16, "cpu", False),
    }
    inventory = save_and_read(saved, tmp_path, pickle_protocol=protocol)
    loaded = torch.load(tmp_path / "saved.pt", weights_only=False)  # torch refuses a map_location that is a function
    numpy, cpu = inventory.tensors
    assert_dense(numpy, loaded["numpy"])
    assert (numpy.kind, numpy.storage) == ("device-data", None)
    assert (cpu.kind, cpu.storage, cpu.dtype, cpu.shape) == ("device-data", "0", "bfloat16", (3, 2, 4))
    assert numpy.device_site != cpu.device_site is not None


def test_storages_by_themselves(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        inventory = save_and_read({"typed": torch.DoubleStorage(3), "untyped": torch.UntypedStorage(5)}, tmp_path)
    typed, untyped = inventory.tensors
    assert (typed.kind, typed.dtype, typed.shape, typed.nbytes) == ("storage", "float64", (3,), 24)
    assert (untyped.kind, untyped.dtype, untyped.shape, untyped.nbytes) == ("storage", "uint8", (5,), 5)


@pytest.mark.parametrize("function", ["_rebuild_tensor", "_rebuild_tensor_v2"])
def test_older_rebuild_functions(function, tmp_path):
    storage = torch.arange(6.0)._typed_storage()
    rest = (False, OrderedDict()) if function.endswith("v2") else ()
    args = (storage, 1, (2, 2), (2, 1), *rest)
    inventory = save_and_read({"t": Rebuilt(getattr(torch._utils, function), *args)}, tmp_path)
    assert_dense(inventory.tensors[0], load(tmp_path, weights_only=False).root["t"])


# --- names -----------------------------------------------------------------------------------------------------------


def flatten(value: object, prefix: str = "") -> dict[str, torch.Tensor]:
    """Names of the tensors in the result of torch.load."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(value, torch.Tensor):
        return {prefix[:-1]: value}
    if isinstance(value, nn.Module):
        return {f"{prefix}{name}": tensor for name, tensor in value.state_dict(keep_vars=True).items()}
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        members = enumerate(value)
    else:
        members = vars(value).items() if hasattr(value, "__dict__") else ()
    for key, item in members:
        text = key.decode() if isinstance(key, bytes) else str(key)
        found |= flatten(item, f"{prefix}{text}.")
    return found


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.rnn = nn.LSTM(2, 2)
        self.tied = nn.Linear(2, 3, bias=False)
        self.tied.weight = self.linear.weight
        self.blocks = nn.ModuleList([nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 2), nn.ReLU())])
        self.same = self.blocks[0]
        self.listed = [self.blocks[0], self.linear.weight]
        self.parent = [self]
        self.scale = nn.Parameter(torch.ones(1))


def share(container: object) -> object:
    return {"one": container, "two": {"three": container}}


NESTINGS = {
    "bare": lambda: torch.ones(2),
    "dicts": lambda: {"a": {"b": torch.ones(1), 3: torch.ones(2)}, "": torch.ones(3), b"bytes": torch.ones(1)},
    "sequences": lambda: [torch.ones(1), (torch.ones(2), [torch.ones(3)]), {"k": (torch.ones(1),)}],
    "odd_keys": lambda: {None: torch.ones(1), True: torch.ones(2), 2.5: torch.ones(3), -7: torch.ones(4)},
    "ordered": lambda: OrderedDict(a=torch.ones(1), b=OrderedDict({"c.d": torch.ones(2)})),
    "default": lambda: defaultdict(dict, {"x": {"y": torch.ones(1)}}),
    "namespace": lambda: argparse.Namespace(lr=torch.tensor(1.0), inner=argparse.Namespace(w=[torch.ones(2)])),
    "module": Block,
    "module_inside": lambda: {"net": Block(), "list": [nn.Linear(1, 1)]},
    "shared": lambda: share({"w": torch.ones(3)}),
}


@pytest.mark.parametrize("name", NESTINGS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_names_are_those_of_a_walk_over_the_loaded_object(name, protocol, tmp_path):
    inventory = save_and_read(NESTINGS[name](), tmp_path, pickle_protocol=protocol)
    expected = flatten(load(tmp_path).root)
    assert [record.name for record in inventory.tensors] == list(expected)
    for record in inventory.tensors:
        assert_dense(record, expected[record.name])


def test_a_traced_graph_module_is_a_module(tmp_path):
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    inventory = save_and_read(traced, tmp_path)
    assert [record.name for record in inventory.tensors] == list(traced.state_dict())
    assert inventory.layout == "module"


def test_tensors_that_are_keys_or_attributes_of_dicts_are_found(tmp_path):
    class_with_attributes = OrderedDict(a=torch.ones(1))
    class_with_attributes.a = class_with_attributes["a"]
    class_with_attributes.b = torch.ones(2)
    inventory = save_and_read({torch.ones(3): 1, "d": class_with_attributes}, tmp_path)
    assert {storage.key for storage in inventory.storages} == set(load(tmp_path).devices)
    assert [record.name for record in inventory.tensors] == ["<call>.key", "d.a", "d.b"]


def test_the_table_of_sizes_is_torchs():
    known = {name: nbytes for name, nbytes in ITEM_BYTES.items() if hasattr(torch, name)}
    assert {name: getattr(torch, name).itemsize for name in known} == known
    assert ITEM_BYTES.keys() - known.keys() <= {"bcomplex32", "float8_e8m0fnu", "float4_e2m1fn_x2"}, "of newer torches"

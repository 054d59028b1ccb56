"""Storages that are cut or cast in a tree: torch loads the new file, which is compared with the original."""

from __future__ import annotations

import copy
import zipfile
from contextlib import closing, contextmanager
from io import BytesIO
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from open_containers import open_container
from torch import nn

from ckptmove.checkpoint.inventory.walk import Walk
from ckptmove.conversion.remap.errors import NotCastable, ScaledWeightCast, SharedStorage
from ckptmove.conversion.remap.storages import StorageChange, changed_bytes, resize
from ckptmove.errors import DamagedArchive, UsageError
from ckptmove.formats.new_torch_zip import NewStorage, new_torch_file
from ckptmove.io.contracts import CastSegment, CopySegment, FromSource, StreamSegment
from ckptmove.io.part import MemorySource
from ckptmove.io.segments import blocks_of, length
from ckptmove.limits import Limits
from ckptmove.model import Span
from ckptmove.moves import Remap
from ckptmove.pickles.tree import Call, Global, Persistent, Tuple
from ckptmove.pickles.write import write_pickle

# torch warns of sparse, quantized and typed tensors.
pytestmark = pytest.mark.filterwarnings("ignore")
COMPACT = Remap(compact=True)


def cast_to(dtype, *roles):
    return Remap(dtype=tuple((role, dtype) for role in roles or ("",)))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tmp_path_factory.mktemp("storages") / "a.pth")


@contextmanager
def opened(path):
    with closing((container := open_container(path, Limits())).source):
        yield container, container.read()


def walked(root):
    walk = Walk(Limits(), 1 << 30)
    walk.run(root)
    return walk


def planned(path, remap, change=lambda root: None):
    """The plan of a file and its new tree."""
    with opened(path) as (_, machine):
        change(machine.root)
        walk = walked(machine.root)
        return resize(machine.root, walk.tensors, walk.reader.storages(), remap), machine.root


def resized(path, remap, *, weights_only=True):
    """The plan of a file, and the object that torch loads from a file with the new tree."""
    with opened(path) as (container, machine):
        walk = walked(machine.root)
        storages = walk.reader.storages()
        container.locate(storages)
        plan = resize(machine.root, walk.tensors, storages, remap)
        new = []
        for storage in storages:
            segment = container.storage_segment(storage.key)
            if storage.key in plan.changes:
                segment = changed_bytes(container.source, segment, plan.changes[storage.key], container.byteorder)
            new.append(NewStorage(storage.key, (segment,), None))
        segments = new_torch_file("b", write_pickle(machine.root), new)
        data = b"".join(map(bytes, blocks_of(container.source, segments)))
    return plan, torch.load(BytesIO(data), weights_only=weights_only)


def same(new, old):
    assert new.keys() == old.keys()
    for name, tensor in old.items():
        assert (new[name].dtype, new[name].shape, new[name].stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(new[name].float(), tensor.float())


def storage_sizes(tensors):
    return {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}


class Sub(torch.Tensor):
    """A subclass without anything of its own."""


# --- compact ---------------------------------------------------------------------------------------------------------


def test_each_storage_is_cut_to_its_tensors(path) -> None:
    base, shared = torch.arange(1000.0), torch.arange(100).reshape(10, 10)
    tensors = {
        "slice": base[100:110],
        "column": shared[2:5, 3],
        "row": shared[4],
        "parameter": nn.Parameter(base.clone()[5:6]),
        "buffer": getattr(nn, "Buffer", nn.Parameter)(base.clone()[990:]),
        "empty": base.clone()[7:7],
        "last": torch.arange(9.0)[8],
        "whole": torch.arange(9.0),
        "float8": torch.arange(64.0).to(torch.float8_e4m3fn)[3:9],
    }
    torch.save(tensors, path)
    plan, new = resized(path, COMPACT)
    same(new, tensors)
    assert storage_sizes(new) == {
        "slice": 40, "column": 8 * 27, "row": 8 * 27, "parameter": 4, "buffer": 40, "empty": 0, "last": 4,
        "whole": 36, "float8": 6,
    }  # fmt: skip
    assert isinstance(new["parameter"], nn.Parameter)
    assert {one.names: (one.source_nbytes, one.nbytes) for one in plan.trimmed}["column", "row"] == (800, 8 * 27)
    assert not plan.casts


def test_parts_of_sparse_and_quantized_tensors(path) -> None:
    indices, values = torch.arange(40).reshape(2, 20)[:, 4:7], torch.arange(30.0)[3:6]
    tensors = {
        "sparse": torch.sparse_coo_tensor(indices, values, (60, 60)),
        "quantized": torch.quantize_per_tensor(torch.ones(50), 0.1, 0, torch.qint8)[3:9],
    }
    torch.save(tensors, path)
    _, new = resized(path, COMPACT)
    assert torch.equal(new["sparse"].to_dense(), tensors["sparse"].to_dense())
    assert new["sparse"]._values().untyped_storage().nbytes() == 12
    assert torch.equal(new["quantized"].int_repr(), tensors["quantized"].int_repr())
    assert new["quantized"].untyped_storage().nbytes() == 6


@given(found=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 20), st.integers(1, 3)), min_size=1, max_size=4))
def test_views_of_one_storage_keep_sharing_it(path, found) -> None:
    base = torch.arange(20, dtype=torch.int16)
    tensors = {str(index): base[first : first + count : step] for index, (first, count, step) in enumerate(found)}
    torch.save(tensors, path)
    _, new = resized(path, COMPACT)
    same(new, tensors)
    reached = [number for tensor in tensors.values() for number in tensor.tolist()] or [-1]
    size = 2 * (max(reached) - min(reached) + 1) if reached != [-1] else 0
    assert set(storage_sizes(new).values()) == {size}
    assert len({tensor.untyped_storage().data_ptr() for tensor in new.values()}) == 1


def test_tensors_of_two_dtypes_stay_aligned(path) -> None:
    wide = torch.arange(64, dtype=torch.uint8).view(torch.uint32)
    tensors = {"a": wide[2:4], "b": wide.view(torch.uint16)[3:5]}
    torch.save(tensors, path)
    plan, new = resized(path, COMPACT)
    assert {name: tensor.tolist() for name, tensor in new.items()} == {"a": wide[2:4].tolist(), "b": [0x0706, 0x0908]}
    assert plan.changes == {"0": StorageChange(Span(4, 16), None)}


def test_a_storage_that_is_saved_itself_stays_whole(path) -> None:
    base = torch.arange(20.0)
    torch.save({"a": base[3:5], "b": base.storage(), "c": base.clone().untyped_storage()}, path)
    assert planned(path, COMPACT)[0] == ({}, (), ())


def test_packed_elements_and_a_tensor_past_the_end_keep_their_storage(path) -> None:
    packed = torch.quantize_per_channel(torch.ones(4, 4), torch.ones(4), torch.zeros(4), 0, torch.quint4x2)
    torch.save({"a": packed}, path)
    assert "0" not in planned(path, COMPACT)[0].changes
    torch.save({"a": torch.arange(20.0)[3:5]}, path)

    def reach_further(root):
        args = root.flat[1].args
        args.items = (args.items[0], 19, *args.items[2:])

    assert not planned(path, COMPACT, reach_further)[0].changes


def test_a_tensor_with_computed_arguments_keeps_its_storage(path) -> None:
    torch.save({"model": {"a": (base := torch.arange(20.0))[3:5], "b": base[4:6]}}, path)

    def compute(root):
        args = root.flat[1].flat[3].args
        args.items = (args.items[0], Call(Global("builtins", "int"), Tuple(("3",), (-1,)), -1), *args.items[2:])

    assert not planned(path, COMPACT, compute)[0].changes
    with pytest.raises(NotCastable):
        planned(path, cast_to("bfloat16"), compute)


def test_subclasses_are_cut_too(path) -> None:
    base = torch.arange(20.0)
    tensors = {"a": base[3:5].as_subclass(Sub), "b": nn.Parameter(base.clone()[2:3].as_subclass(Sub))}
    torch.save(tensors, path)
    plan, new = resized(path, COMPACT, weights_only=False)
    same(new, tensors)
    assert storage_sizes(new) == {"a": 8, "b": 4}
    assert type(new["a"]) is Sub
    assert len(plan.trimmed) == 2


def test_storages_of_a_legacy_stream(path) -> None:
    tensors = {"a.weight": torch.arange(20.0)[3:5]}
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    plan, root = planned(path, Remap(compact=True, dtype=(("", "bfloat16"),)))
    assert [one.span for one in plan.changes.values()] == [Span(12, 20)]
    (record,) = walked(root).tensors
    assert (record.dtype, record.storage_offset) == ("bfloat16", 0)


def test_a_view_of_another_storage_stays_in_it() -> None:
    pid = Tuple(("storage", Global("torch", "FloatStorage"), "0", "cpu", 9, Tuple(("v", 2, 3), (-1,) * 3)), (-1,) * 6)
    args = Tuple((Persistent(pid, -1), 0, Tuple((2,), (-1,)), Tuple((1,), (-1,))), (-1,) * 4)
    walk = walked(call := Call(Global("torch._utils", "_rebuild_tensor"), args, -1))
    assert resize(call, walk.tensors, walk.reader.storages(), COMPACT) == ({}, (), ())


def test_calls_and_ids_that_torch_does_not_write_are_ignored() -> None:
    def tuple_of(*items):
        return Tuple(items, (-1,) * len(items))

    inner = tuple_of()
    function = Global("torch._utils", "_rebuild_tensor_v2")
    from_type = Global("torch._tensor", "_rebuild_from_type_v2")
    for _ in range(20):
        inner, function = tuple_of(function, None, inner), from_type
    root = tuple_of(
        Persistent(tuple_of("storage", Global("torch", "FloatStorage"), -1, "cpu", 1), -1),
        Persistent(tuple_of("module", 1), -1),
        Persistent("a", -1),
        Call(None, None, -1),
        Call(Global("torch._utils", "_rebuild_tensor"), None, -1),
        Call(function, inner, -1),
        Call(from_type, tuple_of(None), -1),
    )
    assert resize(root, (), (), COMPACT) == ({}, (), ())


# --- dtype -----------------------------------------------------------------------------------------------------------


def checkpoint():
    model = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64))
    optimizer = torch.optim.NAdam(model.parameters())
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "ema": copy.deepcopy(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "rng_state": torch.get_rng_state(),
    }


def flattened(value, prefix=""):
    if isinstance(value, torch.Tensor):
        return {prefix[1:]: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {name: tensor for key, one in items for name, tensor in flattened(one, f"{prefix}.{key}").items()}


@pytest.mark.parametrize("asked", [("",), ("model",), ("ema",), ("optimizer",), ("", "ema", "optimizer")])
def test_the_tensors_of_a_role_are_cast(path, asked) -> None:
    saved = checkpoint()
    torch.save(saved, path)
    plan, new = resized(path, cast_to("float32", *asked))
    old, new = flattened(saved), flattened(new)
    roles = {role or "model" for role in asked}
    cast = {
        name
        for name, tensor in old.items()
        if tensor.dtype == torch.float64 and tensor.ndim and name.split(".")[0] in roles
    }
    assert cast
    same(new, {name: tensor.float() if name in cast else tensor for name, tensor in old.items()})
    assert {name for one in plan.casts for name in one.names} == cast
    assert all((one.cast, one.reason) == (("float64", "float32"), "dtype") for one in plan.casts)
    assert all(one.source == one.target == "cpu" for one in plan.casts)


@pytest.mark.parametrize(("weight", "scale"), [(torch.float8_e4m3fn, "weight_scale_inv"), (torch.int8, "SCB")])
def test_a_quantized_weight_and_its_scale_are_not_cast(path, weight, scale) -> None:
    saved = {"l.weight": torch.ones(4).to(weight), f"l.{scale}": torch.ones(1), "n.weight": torch.ones(4)}
    torch.save(saved, path)
    with pytest.raises(ScaledWeightCast) as caught:
        planned(path, cast_to("bfloat16"))
    assert (caught.value.weight, caught.value.scale) == ("l.weight", f"l.{scale}")
    assert planned(path, cast_to("bfloat16", "optimizer"))[0].casts == ()
    torch.save({"model": saved, "ema": {"n.weight": torch.ones(4)}}, path)
    assert len(planned(path, cast_to("bfloat16", "ema"))[0].casts) == 1


def test_cut_and_cast(path) -> None:
    base = torch.arange(100, dtype=torch.float64)
    tensors = {"a.weight": base[40:50], "b.weight": nn.Parameter(base[45:60]), "c.weight": base[:0]}
    torch.save(tensors, path)
    plan, new = resized(path, Remap(compact=True, dtype=(("", "float32"),)))
    same(new, {name: tensor.float() for name, tensor in tensors.items()})
    assert new["a.weight"].untyped_storage().nbytes() == 80
    assert plan.changes == {"0": StorageChange(Span(320, 480), ("float64", "float32"))}
    assert plan.trimmed[0].nbytes == 160


@pytest.mark.parametrize(("compact", "nbytes"), [(True, 44), (False, 396)])
def test_a_deflated_storage_is_cut_and_cast(path, compact, nbytes) -> None:
    torch.save({"a.weight": torch.arange(99, dtype=torch.float64)[9:20]}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    _, new = resized(path, Remap(compact=compact, dtype=(("", "float32"),)))
    same(new, {"a.weight": torch.arange(9.0, 20.0)})
    assert new["a.weight"].untyped_storage().nbytes() == nbytes


FLOATING = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("source", FLOATING)
@pytest.mark.parametrize("target", FLOATING)
def test_the_tree_of_a_cast_is_the_tree_that_torch_saves(path, source, target) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).to(getattr(torch, source))

    def build(values):
        return {"a.weight": values, "b.weight": nn.Parameter(values), "c.weight": values.as_subclass(Sub)}

    torch.save(build(tensor), path)
    plan, root = planned(path, cast_to(target))
    torch.save(build(tensor.to(getattr(torch, target))), path)
    with opened(path) as (_, machine):
        assert write_pickle(root) == write_pickle(machine.root)
    assert [one.cast for one in plan.casts] == ([] if source == target else [(source, target)])


def test_arguments_without_requires_grad_become_those_of_v3() -> None:
    pid = Tuple(("storage", Global("torch", "FloatStorage"), 0, "cpu", 2), (-1,) * 5)
    args = Tuple((Persistent(pid, -1), 0, Tuple((2,), (-1,)), Tuple((1,), (-1,))), (-1,) * 4)
    call = Call(Global("torch._utils", "_rebuild_tensor"), args, -1)
    walk = walked(call)
    resize(
        call,
        [record._replace(role="model") for record in walk.tensors],
        walk.reader.storages(),
        cast_to("float8_e5m2"),
    )
    assert call.name == "torch._utils._rebuild_tensor_v3"
    assert args.items[4] is False
    assert (args.items[5].name, args.items[6].name) == ("collections.OrderedDict", "float8_e5m2")
    assert (pid.items[1].name, pid.items[4]) == ("UntypedStorage", 2)


def test_integers_quantized_tensors_and_tensors_of_the_dtype_are_not_cast(path) -> None:
    tensors = {
        "a.weight": torch.ones(2),
        "b.weight": torch.ones(2, dtype=torch.int64),
        "c.weight": torch.ones(2, dtype=torch.complex64),
        "d.weight": torch.quantize_per_channel(
            torch.ones(2, 2), torch.ones(2).double(), torch.zeros(2), 0, torch.qint8
        ),
        "e.weight": torch.sparse_coo_tensor(torch.ones(1, 1, dtype=torch.int64), torch.ones(1).double(), (3,)),
    }
    torch.save(tensors, path)
    plan, new = resized(path, cast_to("float32"))
    assert [one.names for one in plan.casts] == [("e.weight",)]
    assert new["e.weight"].dtype == torch.float32


def test_a_shared_storage_is_refused_with_both_names(path) -> None:
    weight = torch.ones(2, 2)
    torch.save({"model": {"a.weight": weight}, "ema": {"a.weight": weight[0]}}, path)
    with pytest.raises(SharedStorage) as error:
        planned(path, cast_to("bfloat16"))
    assert (error.value.name, error.value.other, error.value.role) == ("model.a.weight", "ema.a.weight", "ema")
    with pytest.raises(SharedStorage):
        planned(path, Remap(dtype=(("", "bfloat16"), ("ema", "float16"))))
    assert len(planned(path, cast_to("bfloat16", "", "ema"))[0].casts) == 1


def test_a_tensor_whose_storage_is_saved_too_is_refused(path) -> None:
    weight = torch.ones(2)
    torch.save({"model": {"w": weight, "s": weight.storage(), "t": torch.ones(2).untyped_storage()}}, path)
    with pytest.raises(NotCastable) as error:
        planned(path, cast_to("float64"))
    assert error.value.name == "model.w"


def test_a_storage_with_an_unlisted_tensor_of_another_dtype_is_refused(path) -> None:
    tensor = torch.ones(4).to(torch.float8_e5m2)
    torch.save({"a.weight": tensor, "b.weight": tensor.view(torch.float8_e4m3fn)}, path)
    with opened(path) as (_, machine):
        walk = walked(machine.root)
        with pytest.raises(NotCastable):
            resize(machine.root, walk.tensors[:1], walk.reader.storages(), cast_to("float32"))


def test_a_tensor_that_names_its_dtype_elsewhere_is_refused(path) -> None:
    torch.save({"model": {"w": torch.ones(2, device="meta")}}, path)
    with pytest.raises(NotCastable):
        planned(path, cast_to("float64"))
    assert not planned(path, cast_to("float32"))[0].casts


def test_a_dtype_without_a_cast_is_refused(path) -> None:
    torch.save({"a.weight": torch.zeros(2, dtype=torch.uint8).view(torch.float8_e5m2fnuz)}, path)
    with pytest.raises(NotCastable) as error:
        planned(path, cast_to("float16"))
    assert error.value.name == "a.weight"


@pytest.mark.parametrize(
    "asked", [("rng", "float16"), ("modle", "float16"), ("", "int8"), ("model", "complex64"), ("", "half")]
)
def test_unknown_roles_and_dtypes(path, asked) -> None:
    torch.save({"w": torch.ones(2)}, path)
    with pytest.raises(UsageError):
        planned(path, Remap(dtype=(asked,)))


# --- bytes -----------------------------------------------------------------------------------------------------------

WIDE = torch.arange(99999, dtype=torch.float64)
SOURCE = MemorySource("a", WIDE.numpy().tobytes())
WHOLE = CopySegment(Span(0, SOURCE.size))


@pytest.mark.parametrize(
    "segment",
    [WHOLE, FromSource(SOURCE, WHOLE), StreamSegment(SOURCE.size, lambda: SOURCE.blocks(WHOLE.span, 1001))],
)
def test_the_bytes_of_a_change(segment) -> None:
    change = StorageChange(Span(80, 799_920), ("float64", "float32"))
    new = changed_bytes(SOURCE, segment, change, "little")
    assert b"".join(map(bytes, blocks_of(SOURCE, (new,)))) == WIDE[10:99990].float().numpy().tobytes()
    assert length(new) == 4 * 99980
    new = changed_bytes(SOURCE, segment, StorageChange(Span(8, 16), None), "little")
    assert b"".join(map(bytes, blocks_of(SOURCE, (new,)))) == WIDE[1:2].numpy().tobytes()
    with pytest.raises(DamagedArchive):
        changed_bytes(SOURCE, segment, StorageChange(Span(0, SOURCE.size + 8), None), "little")


def test_overflows_of_streamed_bytes_are_counted() -> None:
    wide = torch.tensor([1.0, 1e300, -1e300, 2.0], dtype=torch.float64).numpy().tobytes()
    segment = StreamSegment(len(wide), lambda: iter([wide]))
    counted = []
    change = StorageChange(Span(8, 32), ("float64", "float32"))
    new = changed_bytes(SOURCE, segment, change, "little")
    assert len(b"".join(blocks_of(SOURCE, (new,), counted.append))) == 12
    assert counted == [2]


def test_a_whole_cast_keeps_the_check() -> None:
    segment = CopySegment(WHOLE.span, (SimpleNamespace(crc=1),))
    whole = StorageChange(WHOLE.span, ("float64", "float32"))
    assert changed_bytes(SOURCE, segment, whole, "big") == CastSegment(segment, "float64", "float32", "big")

"""State_dicts as safetensors files, compared with the library: ``save_file``, ``save_model`` and its tied names."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from contextlib import closing, contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from open_containers import open_container
from safetensors.torch import _remove_duplicate_names, load, load_model, save_file, save_model
from torch import nn

from ckptmove.conversion.remap.errors import NotInFormat
from ckptmove.conversion.to_safetensors import dense_records, flat_state
from ckptmove.errors import CrcMismatch
from ckptmove.formats.safetensors_new import new_safetensors
from ckptmove.io.contracts import CastSegment, CopySegment, FromSource, StreamSegment
from ckptmove.io.part import CountedSource, MemorySource
from ckptmove.io.segments import blocks_of, without_checks
from ckptmove.io.spool import Spool
from ckptmove.limits import Limits


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tmp_path_factory.mktemp("flat") / "a.pth")


@contextmanager
def opened(path):
    """The container of a file and the tensors of its state_dict."""
    container = open_container(path, Limits())
    with closing(container.source):
        records = dense_records(container.read().root)
        container.locate(())
        yield container, records


def file_of(source, state, metadata):
    return b"".join(map(bytes, blocks_of(source, new_safetensors(state.tensors, metadata))))


def flat(path):
    """The plan and the file of the state_dict in a file."""
    with opened(path) as (container, records), closing(Spool()) as spool:
        state = flat_state(
            records, lambda key: (container.storage_segment(key), container.byteorder), container.source, spool
        )
        return state, file_of(container.source, state, {**state.tied, "format": "pt"})


def same(loaded, tensors):
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor.detach())


def refused(path):
    with pytest.raises(NotInFormat) as error:
        flat(path)
    return error.value


def test_a_state_dict_is_written_as_the_library_writes_it(path, tmp_path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    torch.save(model.state_dict(), path)
    state, data = flat(path)
    save_file(model.state_dict(), tmp_path / "b", metadata={"format": "pt"})
    assert data == (tmp_path / "b").read_bytes()
    assert state.dropped == ()
    assert all(isinstance(tensor.segments[0], CopySegment) and tensor.segments[0].checks for tensor in state.tensors)


@pytest.mark.parametrize("byteorder", ["little", "big"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.uint8, torch.float64])
def test_every_view_has_its_elements(path, byteorder, dtype) -> None:
    base = torch.arange(24).to(dtype).reshape(4, 6)
    tensors = {
        "transposed": base.clone().t(),
        "part": base.clone()[1:3],
        "column": base.clone()[:, 1],
        "expanded": base[:1].clone().expand(3, 6),
        "empty": base.clone()[:0],
        "scalar": base[1, 2].clone(),
        "parameter": nn.Parameter(base.clone(), requires_grad=False),
        "whole": base,
    }
    torch.save(tensors, path)
    if byteorder == "big":
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in records.items():
                swapped = data
                if "/data/" in name and dtype != torch.uint8:
                    word = torch.empty(0, dtype=dtype).to(dtype).real.element_size()
                    swapped = b"".join(data[at : at + word][::-1] for at in range(0, len(data), word))
                archive.writestr(name, b"big" if name.endswith("byteorder") else swapped)
    state, data = flat(path)
    same(load(data), tensors)
    streamed = {one.name for one in state.tensors if one.segments and isinstance(one.segments[0], StreamSegment)}
    if byteorder == "little" or dtype == torch.uint8:
        assert streamed == {"transposed", "column", "expanded", "part"}  # a part is read with its whole record


def test_bytes_of_other_sources_and_casts(path) -> None:
    wide = torch.tensor([[1.5, 1e300, 2.0], [3.0, 4.0, 5.0]], dtype=torch.float64)
    tensors = {"whole": wide, "transposed": wide.clone().t(), "part": wide.clone()[1:]}
    torch.save(tensors, path)

    def narrow(key):
        segment = container.storage_segment(key)
        return CastSegment(segment, "float64", "float32", "little")

    counted = []
    nowhere = MemorySource("b", b"")
    with opened(path) as (container, records), closing(Spool()) as spool:
        narrowed = [record._replace(dtype="float32", nbytes=record.nbytes // 2) for record in records]
        state = flat_state(
            narrowed,
            lambda key: (FromSource(container.source, narrow(key)), "little"),
            nowhere,
            spool,
            counted.append,
        )
        data = file_of(nowhere, state, {})
        unchecked = flat_state(
            narrowed[1:2], lambda key: (*without_checks([narrow(key)]), "little"), container.source, spool
        )
        again = file_of(container.source, unchecked, {})
    same(load(data), {name: tensor.float() for name, tensor in tensors.items()})
    same(load(again), {"transposed": tensors["transposed"].float()})
    assert counted == [1]


def test_deflated_storages_are_inflated(path, tmp_path) -> None:
    tensors = {"a": torch.arange(3000.0), "b": torch.zeros(50, 60).t()}
    torch.save(tensors, path)
    deflated = str(tmp_path / "a.pth")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    same(load(flat(deflated)[1]), tensors)


def test_a_deflated_storage_with_several_views_is_inflated_once(path, tmp_path) -> None:
    base = torch.arange(100_000.0)
    tensors = {f"{number:02}": base[number * 1000 : number * 1000 + 900] for number in range(100)}
    tensors["t"] = base[99_900:].view(10, 10).t()
    tensors["single"] = torch.zeros(9)
    torch.save(tensors, path)
    deflated = str(tmp_path / "a.pth")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    read = []
    with opened(deflated) as (container, records), closing(Spool()) as spool:
        counted = CountedSource(container.source, lambda done, total: read.append(done))
        state = flat_state(records, lambda key: (container.storage_segment(key), "little"), counted, spool)
        data = file_of(counted, state, {})
    same(load(data), tensors)
    assert read[-1] < (tmp_path / "a.pth").stat().st_size


@pytest.mark.parametrize("cast", [False, True])
def test_a_large_tensor_that_is_not_contiguous(path, cast) -> None:
    tensors = {"a": torch.arange(1 << 17, dtype=torch.float64).view(512, 256).t()}
    torch.save(tensors, path)
    read = []

    def found(key):
        segment = container.storage_segment(key)
        if cast:
            return CastSegment(segment, "float64", "float32", "little"), "little"
        return FromSource(counted, segment), "little"

    with opened(path) as (container, records), closing(Spool()) as spool:
        counted = CountedSource(container.source, lambda done, total: read.append(done))
        narrowed = [record._replace(dtype="float32", nbytes=record.nbytes // 2) for record in records]
        state = flat_state(narrowed if cast else records, found, counted, spool)
        data = file_of(counted, state, {})
    same(load(data), {"a": tensors["a"].float()} if cast else tensors)
    assert read[-1] == 1 << 20  # the pass that checks the CRC or casts


@pytest.mark.parametrize("cast", [False, True])
def test_the_crc_of_a_tensor_that_is_made_contiguous_is_checked(path, cast) -> None:
    torch.save({"a": torch.ones(8, 9, dtype=torch.float64).t()}, path)

    def wrong(key):
        segment = container.storage_segment(key)
        check = segment.checks[0]._replace(crc=segment.checks[0].crc ^ 1)
        segment = segment._replace(checks=(check,))
        return CastSegment(segment, "float64", "float32", "little") if cast else segment, "little"

    with opened(path) as (container, records), closing(Spool()) as spool:
        narrowed = [record._replace(dtype="float32", nbytes=record.nbytes // 2) for record in records]
        state = flat_state(narrowed if cast else records, wrong, container.source, spool)
        with pytest.raises(CrcMismatch):
            file_of(container.source, state, {})


# --- tied weights ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A language model whose head shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight


def test_tied_weights_as_save_model_writes_them(path, tmp_path) -> None:
    model = Tied()
    torch.save(model.state_dict(), path)
    state, data = flat(path)
    save_model(model, str(tmp_path / "b"), metadata={"format": "pt"})
    expected = (tmp_path / "b").read_bytes()
    same(load(data), load(expected))
    assert {**state.tied} == {"head.weight": "embedding.weight"}
    assert [(one.name, one.nbytes, one.reason) for one in state.dropped] == [("head.weight", 0, "tied")]
    (tmp_path / "c").write_bytes(data)
    again = Tied()
    assert load_model(again, str(tmp_path / "c")) == (set(), [])
    same(again.state_dict(), model.state_dict())


#: First element, number of elements, and whether every second one is left out.
VIEWS = st.tuples(st.integers(0, 4), st.sampled_from([0, 2, 8]), st.booleans())


@given(found=st.dictionaries(st.sampled_from("abcde"), VIEWS, min_size=1), whole=st.booleans())
def test_overlapping_views_as_the_library_keeps_them(path, found, whole) -> None:
    base = torch.arange(8.0)
    views = {
        name: base[start : start + count : 2 if has_gaps else 1] for name, (start, count, has_gaps) in found.items()
    }
    if whole:
        views["whole"] = base
    torch.save(views, path)
    try:
        expected = len(views) - sum(map(len, _remove_duplicate_names(views).values()))
    except RuntimeError:
        expected = None  # the library also refuses parts of a storage that do not overlap
    try:
        state, data = flat(path)
    except NotInFormat:
        assert expected is None
        return
    assert expected in (None, len(views) - len(state.tied))
    assert all(
        len(views[kept]) == len(base) or torch.equal(views[kept], views[name]) for name, kept in state.tied.items()
    )
    same(load(data), {name: view for name, view in views.items() if name not in state.tied})


def test_equal_parts_of_a_storage_are_tied(path) -> None:
    base = torch.arange(8.0)
    torch.save({"b": base[2:4], "a": base[2:4], "c": base[6:]}, path)
    state, data = flat(path)
    assert {**state.tied} == {"a": "b"}
    same(load(data), {"b": base[2:4], "c": base[6:]})


@pytest.mark.parametrize(
    "views",
    [
        {"a": (slice(0, 6),), "b": (slice(3, 8),)},
        {"a": (slice(0, 8), slice(0, 2)), "b": (slice(0, 8), slice(1, 3))},
        {"a": (slice(0, 8),), "b": (slice(0, 8), slice(1, 3))},
    ],
)
def test_overlapping_views_that_the_library_cannot_save_are_refused(path, views) -> None:
    base = torch.arange(24.0).reshape(8, 3)
    tensors = {name: base[view] for name, view in views.items()}
    torch.save(tensors, path)
    with pytest.raises(RuntimeError):
        _remove_duplicate_names(tensors)
    assert [name for name, _ in refused(path).entries] == ["b"]


def test_a_tied_tensor_named_as_the_metadata_does_not_replace_it(path) -> None:
    weight = torch.ones(2)
    torch.save({"a": weight, "format": weight}, path)
    state, _ = flat(path)
    assert [one.name for one in state.dropped] == ["format"]


# --- limits of the format --------------------------------------------------------------------------------------------

OTHERS = {
    "number": 3,
    "none": None,
    "dict": {"a": 1},
    "ordered": OrderedDict(),
    "list": [1],
    "storage": torch.UntypedStorage(3),
    "object": torch.device("cpu"),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "conj": torch.ones(2, dtype=torch.complex64).conj(),
    "complex128": torch.ones(2, dtype=torch.complex128),
    "\ud800": torch.ones(2),
    "__metadata__": torch.ones(2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
)
def test_a_tensor_of_another_layout_is_refused_by_name(path, build) -> None:
    torch.save({"w": torch.ones(2), "a": build()}, path)
    assert [key for key, _ in refused(path).entries] == ["a"]


@pytest.mark.parametrize("name", OTHERS)
def test_an_entry_that_the_format_lacks_is_refused_by_name(path, name) -> None:
    torch.save({"w": torch.ones(2), name: OTHERS[name]}, path)
    error = refused(path)
    assert [key for key, _ in error.entries] == [name]
    assert not error.root


def test_keys_that_are_not_strings_are_refused(path) -> None:
    torch.save({0: torch.ones(2), "w": torch.ones(2)}, path)
    assert [key for key, _ in refused(path).entries] == ["0"]


def test_a_training_checkpoint_is_refused_with_the_key_of_its_state_dict(path) -> None:
    torch.save({"epoch": 3, "state_dict": nn.Linear(2, 2).state_dict(), "ema": nn.Linear(2, 2).state_dict()}, path)
    error = refused(path)
    assert [key for key, _ in error.entries] == ["epoch", "state_dict", "ema"]
    assert [found for _, found in error.entries[1:]] == ["a dict"] * 2  # no objects
    assert error.root == "state_dict"


@pytest.mark.parametrize("root", [[torch.ones(2)], torch.ones(2), 3])
def test_a_root_that_is_not_a_dict_is_refused(path, root) -> None:
    torch.save(root, path)
    assert [key for key, _ in refused(path).entries] == [""]

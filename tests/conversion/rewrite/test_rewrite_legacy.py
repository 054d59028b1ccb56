"""Rewrites of streams of torch before 1.6; the oracle is torch."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_views import viewed

import ckptmove
from ckptmove.errors import DamagedPickle, UnsupportedDtype
from ckptmove.opening.checkpoint import open_checkpoint

STATE = {
    "model": OrderedDict([("a.weight", torch.randn(5, 7)), ("a.bias", torch.randn(7).to(torch.bfloat16))]),
    "tied": torch.arange(12).reshape(3, 4).t(),
    "empty": torch.empty(0, 3),
    "mask": torch.tensor([True, False]),
    "phase": torch.randn(4, dtype=torch.complex64),
    "epoch": 3,
}


def save(path, state=STATE, **options):
    torch.save(state, path, _use_new_zipfile_serialization=False, **options)
    return path


def load(path, *, weights_only=True):
    """The object, and the tag of each storage in the order of the pickle."""
    tags = []

    def record(storage, tag):
        tags.append(tag)
        return storage

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on protocols, and on sources that have changed
        return torch.load(path, map_location=record, weights_only=weights_only), tags


def same(first, second):
    if isinstance(first, torch.Tensor):
        assert (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
        return torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    return first == second


@pytest.mark.parametrize("target", ["cuda:0", "cuda:11", "mps", "hpu:0"])
@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_torch_sees_the_planned_tags_and_the_same_values(tmp_path, protocol, target):
    source, output = save(tmp_path / "a.pth", pickle_protocol=protocol), tmp_path / "b.pth"
    result = ckptmove.convert(str(source), to=target, output=str(output))
    assert result.bytes_copied == output.stat().st_size
    assert "the file has no CRCs: its bytes were copied unchecked" in result.notes
    for weights_only in {False, protocol in {2, 3}}:
        moved, tags = load(output, weights_only=weights_only)
        assert tags == [target] * 6
        assert same(moved, STATE)
    ckptmove.convert(str(output), to="cpu", output=str(tmp_path / "c.pth"))
    assert (tmp_path / "c.pth").read_bytes() == source.read_bytes()


def test_what_moves_nothing_is_the_same_file(tmp_path):
    source = save(tmp_path / "a.pth")
    ckptmove.convert(str(source), to="cpu", output=str(tmp_path / "b.pth"))
    assert (tmp_path / "b.pth").read_bytes() == source.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numels=st.lists(st.integers(0, 2000), max_size=6),
    targets=st.lists(st.sampled_from(["cpu", "cuda:0", "cuda:123", "mps", "xpu:1"]), min_size=1, max_size=4),
)
def test_any_way_there_leads_back(tmp_path, numels, targets):
    state = [torch.arange(numel, dtype=torch.int16) for numel in numels]
    source = current = save(tmp_path / "a.pth", state)
    for step, target in enumerate([*targets, "cpu"]):
        following = tmp_path / f"{step}.pth"
        ckptmove.convert(str(current), to=target, output=str(following), force=True)
        moved, tags = load(following)
        assert tags == [target] * len(numels)
        assert all(map(torch.equal, moved, state))
        current = following
    assert current.read_bytes() == source.read_bytes()


def test_bytes_behind_the_last_storage_stay(tmp_path):
    source = save(tmp_path / "a.pth")
    source.write_bytes(source.read_bytes() + b"what torch never reads")
    ckptmove.convert(str(source), to="mps", output=str(tmp_path / "b.pth"))
    assert (tmp_path / "b.pth").read_bytes().endswith(b"what torch never reads")
    assert same(load(tmp_path / "b.pth")[0], STATE)


def test_numbers_are_little_endian_whatever_the_stream_says_of_its_machine(tmp_path):
    source = save(tmp_path / "a.pth", {"w": torch.arange(5, dtype=torch.float64)})
    data = source.read_bytes()
    source.write_bytes(data.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"))
    assert source.read_bytes() != data
    ckptmove.convert(str(source), to="mps", output=str(tmp_path / "b.pth"), cast=True)
    assert torch.equal(load(source)[0]["w"], torch.arange(5, dtype=torch.float64))
    assert torch.equal(load(tmp_path / "b.pth")[0]["w"], torch.arange(5.0))


def test_casts_give_what_torch_gives(tmp_path):
    state = {"a": torch.randn(7, dtype=torch.float64), "b": torch.ones(5), "c": torch.randn(3, dtype=torch.complex128)}
    source, output = save(tmp_path / "a.pth", state), tmp_path / "b.pth"
    with pytest.raises(UnsupportedDtype):
        ckptmove.convert(str(source), to="mps", output=str(output))
    ckptmove.convert(str(source), to="mps", output=str(output), cast=True)
    moved, tags = load(output)
    assert tags == ["mps"] * 3
    assert same(moved, {"a": state["a"].float(), "b": state["b"], "c": state["c"].to(torch.complex64)})


# --- pickled modules, with the source of their classes ---------------------------------------------------------------


SCRIPT = """
import torch

class Net(torch.nn.Module):
    device = 'cuda:7'  # no tag

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 2)
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules, one of a class of a user's script: torch saves its source too."""
    (tmp_path / "script_of_a_user.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("script_of_a_user").Net()
    yield {"net": net, "objective": torch.nn.BCEWithLogitsLoss(pos_weight=torch.ones(2))}
    sys.modules.pop("script_of_a_user")


def test_pickled_modules_and_their_sources(tmp_path, modules):
    path = save(tmp_path / "net.pth", modules)
    data = path.read_bytes()
    assert data.count(b"X\x06\x00\x00\x00module") == 1  # read from the memo after that
    assert b"class Linear(Module)" in data
    assert b"device = 'cuda:7'" in data
    found = ckptmove.inspect(str(path)).inventory
    assert [(tensor.name, tensor.role) for tensor in found.tensors] == [
        ("net.first.weight", "model"),
        ("net.first.bias", "model"),
        ("objective.pos_weight", "criterion"),
    ]
    torch.save(modules, tmp_path / "zip.pth")
    of_the_zip = ckptmove.inspect(str(tmp_path / "zip.pth")).inventory
    assert [tensor.name for tensor in found.tensors] == [tensor.name for tensor in of_the_zip.tensors]
    assert (found.layout, found.mentions, found.globals) == (of_the_zip.layout, (), of_the_zip.globals)

    ckptmove.convert(str(path), to="cuda:3", output=str(tmp_path / "moved.pth"))
    moved, tags = load(tmp_path / "moved.pth", weights_only=False)
    assert tags == ["cuda:3"] * 3
    assert all(same(dict(moved[key].state_dict()), dict(modules[key].state_dict())) for key in modules)
    ckptmove.convert(str(tmp_path / "moved.pth"), to="cpu", output=str(tmp_path / "back.pth"))
    assert (tmp_path / "back.pth").read_bytes() == data


# --- storage views, which torch wrote before 0.4 ---------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [1, 2, 4])
def test_views_are_parts_of_their_storage(tmp_path, protocol):
    path = viewed(tmp_path / "views.pth", protocol=protocol)
    with open_checkpoint(str(path)) as checkpoint:
        inventory = checkpoint.inventory
        span = checkpoint.file.span("77")
    data = path.read_bytes()
    tree, tags = load(path, weights_only=False)
    assert tags == ["cuda:1", "cpu"]
    assert [(storage.key, storage.device, storage.numel) for storage in inventory.storages] == [
        ("77", "cuda:1", 20),
        ("80", "cpu", 3),
    ]
    records = {tensor.name: tensor for tensor in inventory.tensors}
    assert records["bare"].shape == (16,)
    for name in ("a.weight", "a.bias", "b.weight"):
        record, own = records[name], tree[name]
        assert (record.shape, record.stride) == (tuple(own.shape), own.stride())
        stored = torch.frombuffer(bytearray(data[span.start : span.end]), dtype=torch.float32)
        assert torch.equal(stored.as_strided(record.shape, record.stride, record.storage_offset), own)
    assert (records["a.weight"].storage_offset, records["a.bias"].storage_offset) == (3, 4)
    assert inventory.facts == ()


@pytest.mark.parametrize("protocol", [1, 2, 4])
def test_views_move_with_their_storage(tmp_path, protocol):
    path = viewed(tmp_path / "views.pth", protocol=protocol)
    result = ckptmove.convert(str(path), to="hpu:0", output=str(tmp_path / "hpu.pth"))
    assert [(edit.storage, edit.source, edit.target) for edit in result.plan.edits] == [
        ("77", "cuda:1", "hpu:0"),
        ("80", "cpu", "hpu:0"),
    ]
    moved, tags = load(tmp_path / "hpu.pth", weights_only=False)
    assert tags == ["hpu:0", "hpu:0"]
    assert b"cuda:1" not in (tmp_path / "hpu.pth").read_bytes()
    tree, _ = load(path, weights_only=False)
    assert all(torch.equal(moved[name], tree[name]) for name in tree if name != "bare")
    ckptmove.convert(
        str(tmp_path / "hpu.pth"),
        map_location={"hpu:0": "cuda:1"},
        keep=["b.bias"],
        output=str(tmp_path / "back.pth"),
    )
    ckptmove.convert(str(tmp_path / "back.pth"), map_location={"hpu:0": "cpu"}, output=str(tmp_path / "home.pth"))
    assert (tmp_path / "home.pth").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"first": (2, 4)}, 1),  # elements 1 to 4 of a view of four
        ({"first": (18, 6)}, 3),  # a view that reaches past its storage
        ({"second": (8, 12)}, 1),
        ({"offset": 3}, 1),
    ],
)
def test_a_tensor_that_reaches_past_its_view_is_short(tmp_path, change, missing):
    path = viewed(tmp_path / "views.pth", **change)
    with open_checkpoint(str(path)) as checkpoint:
        facts = [(fact.kind, fact.nbytes) for fact in checkpoint.inventory.facts]
    assert facts == [("short-storage", 4 * missing)]
    with pytest.raises(RuntimeError, match="resize storage that is not resizable"):
        load(path, weights_only=False)


@pytest.mark.parametrize("span", [(2,), (2, 6, 1), (-1, 6), (2, "6"), (2, None)])
def test_a_view_that_is_none(tmp_path, span):
    path = viewed(tmp_path / "views.pth", first=span)
    with pytest.raises(DamagedPickle, match=r"'a\.weight' is not written as torch does"):
        ckptmove.inspect(str(path))


# --- storages that nothing reachable views, and that torch makes all the same ----------------------------------------


class Twice:
    """A dict of one key that is set twice."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    def __reduce__(self):
        return OrderedDict, (), None, None, iter([("w", self.first), ("w", self.second)])


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_storage_that_was_thrown_away_moves_too(tmp_path, is_zip):
    path, output = tmp_path / "twice.pth", tmp_path / "moved.pth"
    torch.save(Twice(torch.ones(3), torch.arange(50)), path, _use_new_zipfile_serialization=is_zip)
    inventory = ckptmove.inspect(str(path)).inventory
    assert [tensor.shape for tensor in inventory.tensors] == [(50,)]
    assert [storage.numel for storage in inventory.storages] == [3, 50]
    assert inventory.facts == ()
    ckptmove.convert(str(path), to="cuda:0", output=str(output))
    moved, tags = load(output)
    assert tags == ["cuda:0", "cuda:0"]
    assert torch.equal(moved["w"], torch.arange(50))

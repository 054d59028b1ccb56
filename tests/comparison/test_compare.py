"""``diff`` of two checkpoints: differences are found, and equal content is not reported."""

from __future__ import annotations

import argparse
import builtins
import json
import math
import pickle
import shutil
import warnings
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import ckptmove
from ckptmove.checkpoint.state_dicts import WRAPPERS
from ckptmove.comparison import compare as comparison
from ckptmove.comparison.differences import Change, Gap, LoneNan, Uncompared
from ckptmove.errors import LimitExceeded, MissingFile
from ckptmove.limits import Limits
from ckptmove.proof.tensors import measuring

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"


@pytest.fixture
def compare(tmp_path):
    """Save two objects with options, and compare them."""

    def run(first, second, **options):
        try:
            torch.save(first, tmp_path / "a.pt", **options)
            torch.save(second, tmp_path / "b.pt", **options)
        except KeyError as error:
            pytest.skip(f"this torch has {error} and does not save it")
        return ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))

    return run


def whats(result):
    return [(change.name, change.what) for change in result.changed]


def test_a_copy_is_the_same(compare):
    value = {"w": torch.arange(6.0), "n": torch.tensor([math.nan]), "epoch": 3}
    result = compare(value, value)
    assert result.same
    assert result.tensors == 2
    assert str(result).endswith("b.pt: the same")


def test_what_shares_its_storage_on_one_side_alone_is_told(compare):
    tied = torch.arange(6.0)
    for first, second in (({"a": tied, "b": tied}, {"a": tied, "b": tied.clone()}), ([tied, tied], [tied, tied + 0])):
        for result in (compare(first, second), compare(second, first)):
            assert result.same
            assert len(result.notes) == 1
            assert result.notes[0].endswith(
                ": storage shared with another tensor on one side only (tied weights or a view)"
            )
    assert compare(first, [one * 1 for one in first]).notes[0].startswith("1: ")
    views = compare([tied[:2], tied[2:4], tied[4:]], [tied[:2].clone(), tied[2:4].clone(), tied[4:].clone()])
    assert views.notes[0].startswith("1 and 1 more: ")
    assert compare([tied, tied[:3]], [tied, tied[:3]]).notes == ()


def test_a_conversion_changes_devices_alone(tmp_path):
    source = str(SAMPLES / "adamw-cuda3.pth")
    ckptmove.convert(source, to="cuda:0", output=tmp_path / "out.pth")
    result = ckptmove.diff(source, str(tmp_path / "out.pth"))
    assert {(change.what, change.source, change.target) for change in result.changed} == {
        ("device", "cuda:3", "cuda:0")
    }
    assert not result.same
    assert str(result).endswith("0 added, 0 removed, 12 changed")
    unknown = replace(result, changed=(), uncompared=(Uncompared("a", "encoded"),))
    assert str(unknown).endswith("0 changed, 1 not compared")


def test_names_that_only_one_has(compare):
    result = compare({"a": torch.ones(1), "b": torch.ones(1)}, {"b": torch.ones(1), "c": {"d": torch.ones(1)}})
    assert (result.removed, result.added, result.changed) == (("a",), ("c.d",), ())


def test_paths_that_read_alike_are_counted(compare):
    result = compare({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, {"a.b": torch.ones(1)})
    assert result.removed == ("a.b",)


ONES, ZEROS, FIVES = torch.ones(2), torch.zeros(2), torch.full((2,), 5.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({0: ONES, "0": ZEROS}, {"0": ZEROS, 0: ONES}),
        ({"m": {0: ONES, "0": ZEROS, "l": [ONES, {1: ONES, "1": FIVES}]}},) * 2,
        ({"l": [{1: ONES, "1": FIVES, b"1": ZEROS}]}, {"l": [{"1": FIVES, 1: ONES, b"1": ZEROS}]}),
        ({0: torch.eye(3).to_sparse(), "0": ONES}, {"0": ONES, 0: torch.eye(3).to_sparse()}),
        ({0: ONES, "0": ONES[:1]}, {"0": ONES[:1], 0: ONES}),
        ({0: FIVES.untyped_storage(), "0": ONES}, {"0": ONES, 0: FIVES.untyped_storage()}),
        (
            {"o": {"state": {0: {"exp_avg": ONES}, "0": {"exp_avg": ZEROS}}, "param_groups": []}},
            {"o": {"state": {"0": {"exp_avg": ZEROS}, 0: {"exp_avg": ONES}}, "param_groups": []}},
        ),
    ],
)
def test_paths_that_read_alike_go_by_the_types_of_their_keys(compare, first, second):
    result = compare(first, second)
    assert [change for change in result.changed if change.what == "value"] == []
    assert (result.added, result.removed) == ((), ())


def test_values_under_keys_of_one_type_are_counterparts(compare):
    changes = compare({0: ONES, "0": ZEROS}, {"0": FIVES, 0: ONES}).changed
    assert [(change.name, change.gap) for change in changes] == [("0", Gap(5.0, 1.0))]


def test_of_paths_that_read_alike_the_one_that_is_left_is_another(compare):
    assert compare({0: ONES, "0": ZEROS}, {"0": ZEROS}).removed == ("0",)
    assert compare({0: ONES, "0": ZEROS}, {"0": ZEROS}).changed == ()
    result = compare({"a": {"b": ZEROS}}, {"a.b": FIVES, "a": {"b": ZEROS}})
    assert (result.added, result.changed) == (("a.b",), ())


@pytest.mark.parametrize(
    "wrap", [lambda value: argparse.Namespace(x=value), lambda value: torch.nn.ParameterList([value])]
)
def test_names_in_objects_and_modules_that_read_like_a_key(compare, wrap):
    inside = {"n": wrap(torch.nn.Parameter(ONES.clone()))}
    name = "n.x" if isinstance(inside["n"], argparse.Namespace) else "n.0"
    result = compare({name: ZEROS, **inside}, {**inside, name: ZEROS})
    assert [change.name for change in result.changed] == ["the order in the root"]


def test_names_that_no_key_spells_are_compared_in_order(compare):
    held = torch.nn.Parameter(ONES.clone())
    held.extra = ZEROS
    result = compare({"p": held, "p.extra": FIVES}, {"p.extra": FIVES, "p": held})
    assert (result.tensors, result.added, result.removed) == (3, (), ())


def test_a_key_of_another_type_is_a_difference(compare):
    kind = Change("the type of the key 0", "object", "'int'", "'str'")
    assert compare({0: ONES}, {"0": ONES}).changed == (kind,)
    value = Change("0", "value", "[2]", "[2]", Gap(1.0, 1.0))
    assert compare({0: ONES}, {"0": ZEROS}).changed == (value, kind)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (2**53 + 1, 2**53, 1),
        (2**63 - 1, -(2**63), 2**64 - 1),
        (-(2**52) - 1, 2**52, 2**53 + 1),
        (2**52, -(2**52), 2**53),
        (7, 4, 3),
    ],
)
def test_integers_are_measured_exactly(compare, first, second, expected):
    pair = ({"w": torch.tensor([5, value])} for value in (first, second))
    [change] = compare(*pair).changed
    assert change.gap == Gap(expected, expected / max(abs(first), abs(second)))
    assert change.gap.max_abs == expected


def test_unsigned_integers_and_casts_of_integers_are_measured_exactly(compare):
    wide = torch.tensor([-1, 3]).view(torch.uint64)
    assert compare({"w": wide}, {"w": torch.tensor([1, 3]).view(torch.uint64)}).changed[0].gap.max_abs == 2**64 - 2
    small = compare({"w": torch.tensor([8, 3]).view(torch.uint64)}, {"w": torch.tensor([1, 3], dtype=torch.int8)})
    assert [change.gap for change in small.changed if change.what == "value"] == [Gap(7.0, 7 / 8)]
    cast = compare({"w": torch.tensor([2**53 + 1, 0])}, {"w": torch.tensor([2**53 + 1, 0]).view(torch.uint64)})
    assert "value" not in [change.what for change in cast.changed]
    cast = compare({"w": torch.tensor([2**53 + 1, -1])}, {"w": torch.tensor([2**53, 1], dtype=torch.uint64)})
    assert [change.gap for change in cast.changed if change.what == "value"] == [Gap(2, 2.0)]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (torch.ones(3), Change("w", "shape", "[2]", "[3]")),
        (torch.ones(2, dtype=torch.float64), Change("w", "dtype", "float32", "float64")),
        (torch.ones(2).to_sparse(), Change("w", "object", "tensor", "sparse_coo")),
        (torch.tensor([1.0, 3.0]), Change("w", "value", "[2]", "[2]", Gap(2.0, 2 / 3))),
        (
            torch.tensor([1.0, math.nan]),
            Change("w", "value", "[2]", "[2]", Gap(math.inf, math.inf, LoneNan(0, 1, 2, 0.0, 0.0))),
        ),
        (torch.tensor([1.0, math.inf]), Change("w", "value", "[2]", "[2]", Gap(math.inf, math.inf))),
    ],
)
def test_each_property_of_a_tensor(compare, second, expected):
    assert expected in compare({"w": torch.ones(2)}, {"w": second}).changed


def test_a_parameter_has_values_as_a_tensor_has(compare):
    same = compare({"w": torch.ones(2)}, {"w": torch.nn.Parameter(torch.ones(2))})
    assert (whats(same), same.uncompared) == ([("w", "object")], ())
    other = compare({"w": torch.ones(2)}, {"w": torch.nn.Parameter(torch.zeros(2))})
    assert whats(other) == [("w", "object"), ("w", "value")]


@pytest.mark.parametrize(
    ("second", "kind"),
    [(torch.ones(2, dtype=torch.cfloat).conj(), "conj"), (torch.ones(2, dtype=torch.cfloat).to_sparse(), "sparse_coo")],
)
def test_values_of_two_kinds_are_not_called_the_same(compare, second, kind):
    result = compare({"w": torch.ones(2, dtype=torch.cfloat)}, {"w": second})
    assert result.uncompared == (Uncompared("w", f"stored as tensor on one side, as {kind} on the other"),)
    assert compare({"w": second}, {"w": second}).same


def test_what_a_wrapper_puts_before_the_keys_is_said(compare):
    plain = {"fc.weight": torch.ones(2), "fc.bias": torch.ones(1), "fc.more": torch.ones(3)}
    wrapped = {f"module._orig_mod.{key}": value for key, value in plain.items() if key != "fc.more"}
    result = compare({"model": plain}, {"model": {**wrapped, "module.else": torch.ones(1)}})
    assert (len(result.removed), len(result.added)) == (3, 3)
    [note] = [note for note in result.notes if ": 2 tensors" in note]
    assert all(prefix in note for prefix in WRAPPERS)


def test_roles_differ_with_the_place(compare):
    result = compare({"x": torch.ones(2)}, {"x": torch.ones(2), "epoch": 1})
    assert whats(result) == [("epoch", "object")]
    result = compare({"model": {"ema": torch.ones(2)}}, {"model": {"ema": torch.ones(2)}, "optimizer": None})
    assert ("optimizer", "object") in whats(result)


def test_other_bits_of_equal_numbers_are_a_difference(compare):
    result = compare({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])})
    assert result.changed == (Change("w", "value", "[1]", "[1]", Gap(0.0, 0.0)),)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int8,
        torch.int64,
        torch.uint16,
        torch.float16,
        torch.bfloat16,
        torch.float8_e5m2,
        torch.float64,
    ],
)
def test_numbers_of_every_kind_are_measured(compare, dtype):
    one, two = torch.tensor([1, 0, 1]).to(dtype), torch.tensor([1, 1, 1]).to(dtype)
    assert compare({"w": one}, {"w": two}).changed == (Change("w", "value", "[3]", "[3]", Gap(1.0, 1.0)),)


def test_complex_numbers_are_measured_in_the_plane(compare):
    one, two = torch.tensor([3 + 4j, 0j]), torch.tensor([0j, 0j])
    assert compare({"w": one}, {"w": two}).changed == (Change("w", "value", "[2]", "[2]", Gap(5.0, 1.0)),)
    wide = torch.arange(6).to(torch.complex128).reshape(2, 3)
    assert compare({"w": wide.t()}, {"w": wide.t().contiguous()}).changed[0].what != "value"


def test_a_cast_is_measured_by_what_it_rounds(compare):
    exact, rounded = torch.tensor([0.5], dtype=torch.float64), torch.tensor([0.1], dtype=torch.float64)
    assert whats(compare({"w": exact}, {"w": exact.float()})) == [("w", "dtype")]
    changes = compare({"w": rounded}, {"w": rounded.float()}).changed
    assert [change.what for change in changes] == ["dtype", "value"]
    assert 0 < changes[1].gap.max_rel < 1e-7


def test_strides_are_no_values(compare):
    square = torch.arange(12.0).reshape(3, 4)
    result = compare({"w": square.t()}, {"w": square.t().contiguous()})
    assert "value" not in [change.what for change in result.changed]
    assert [change for change in compare({"w": square.t()}, {"w": square.t() + 1}).changed if change.what == "value"]


def test_gaps_between_the_elements_of_a_view_do_not_count(compare):
    one, two = torch.zeros(8), torch.zeros(8)
    two[1::2] = 7
    assert compare({"w": one[::2]}, {"w": two[::2]}).same
    column, other = torch.zeros(3, 5)[:, 2], torch.zeros(3, 5)[:, 2]
    assert compare({"w": column}, {"w": other}).same


def test_expanded_views_are_compared_by_what_lies_under_them(compare):
    one, two = torch.ones(3, 1).expand(3, 10**12), torch.zeros(3, 1).expand(3, 10**12)
    assert compare({"w": one}, {"w": one}).same
    assert compare({"w": one}, {"w": two}).changed[0].gap == Gap(1.0, 1.0)
    other = torch.ones(1, 4).expand(3, 4)
    assert compare({"w": other}, {"w": torch.ones(3, 1).expand(3, 4)}).uncompared == (
        Uncompared("w", "its elements overlap in a different way on each side"),
    )


def test_the_gaps_under_an_expanded_view_count_for_nothing(compare):
    one, two = torch.arange(6.0), torch.arange(6.0)
    two[1::2] = 9
    assert compare({"w": one[::2].expand(5, 3)}, {"w": two[::2].expand(5, 3)}).same


def test_an_expanded_view_against_what_holds_each_element(compare):
    view = torch.arange(3.0)[:, None].expand(3, 2)
    assert whats(compare({"w": view}, {"w": view.contiguous()})) == [("w", "object")]  # the strides
    assert compare({"w": view.contiguous() + 1}, {"w": view}).changed[-1].gap == Gap(1.0, 1.0)


def test_nan_is_counted_wherever_it_stands(compare):
    nan, numbers = torch.tensor([math.nan, 1.0])[:, None], torch.ones(2, 1)
    found = compare({"w": nan.expand(2, 5)}, {"w": numbers.expand(2, 5)}).changed
    assert [change.gap.lone_nan for change in found] == [LoneNan(5, 0, 10, 0.0, 0.0)]
    assert compare({"w": nan.expand(2, 5)}, {"w": torch.ones(2, 5)}).changed[-1].gap.lone_nan == found[0].gap.lone_nan


def test_a_view_that_repeats_some_rows_only(compare):
    rows = torch.arange(6.0).as_strided((2, 3), (5, 0))
    assert compare({"w": rows}, {"w": rows}).same
    assert "value" not in [change.what for change in compare({"w": rows}, {"w": rows.contiguous()}).changed]
    planes = torch.arange(7.0).as_strided((2, 3, 1), (6, 0, 1))
    assert "value" not in [change.what for change in compare({"w": planes}, {"w": planes.contiguous()}).changed]


def test_empty_and_scalar_tensors(compare):
    value = {"e": torch.empty(0, 3), "t": torch.empty(3, 0).t(), "s": torch.tensor(2.0)}
    assert compare(value, value).same


def test_large_tensors_are_read_block_by_block(compare):
    one = torch.zeros(3 * 2**16 + 5)
    two = one.clone()
    two[-1], two[2] = 4, 1
    [change] = compare({"w": one}, {"w": two}).changed
    assert change.gap == Gap(4.0, 1.0)
    whole = torch.zeros(2, 2**16)
    assert compare({"w": whole.t()}, {"w": whole.t()}).same
    turned = torch.zeros(300, 700)
    [change] = compare({"w": turned.t()}, {"w": turned.t() + 2.0}).changed
    assert change.gap == Gap(2.0, 1.0)


def test_a_sparse_tensor_is_compared_part_by_part(compare):
    one, two = torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()
    assert whats(compare({"w": one}, {"w": two})) == [("w.values", "value")]


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_quantized_numbers_are_compared_and_not_measured(compare):
    one = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.qint8)
    two = torch.quantize_per_tensor(torch.tensor([1.0, 3.0]), 0.5, 0, torch.qint8)
    [change] = compare({"w": one}, {"w": two}).changed
    assert (change.what, change.gap) == ("value", None)


def test_tensors_without_bytes_have_no_values(compare):
    assert compare({"w": torch.empty(3, device="meta")}, {"w": torch.empty(3, device="meta")}).same


def test_the_byte_order_is_no_difference(compare, tmp_path):
    values = {"w": torch.arange(5.0), "c": torch.tensor([1 + 2j]), "b": torch.tensor([True])}
    compare(values, values)
    with zipfile.ZipFile(tmp_path / "a.pt") as little, zipfile.ZipFile(tmp_path / "big.pt", "w") as big:
        folder = little.namelist()[0].partition("/")[0]
        for name in little.namelist():
            data = little.read(name)
            if name == f"{folder}/byteorder":
                data = b"big"
            if name.startswith(f"{folder}/data/") and len(data) > 1:
                words = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, 4).flip(1)
                data = bytes(words.reshape(-1).tolist())
            big.writestr(name, data)
    result = ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / "big.pt"))
    assert result.changed == ()


def test_bytes_that_are_not_stored_plainly_are_not_compared(compare, tmp_path):
    compare({"w": torch.ones(2)}, {"w": torch.ones(2)})
    with zipfile.ZipFile(tmp_path / "a.pt") as source, zipfile.ZipFile(tmp_path / "c.pt", "w") as target:
        for name in source.namelist():
            if "/data/" not in name:
                target.writestr(name, source.read(name))
    result = ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / "c.pt"))
    assert result.uncompared == (Uncompared("w", f"missing or cut off in {tmp_path / 'c.pt'}"),)
    assert not result.same


def test_everything_else_in_the_trees_is_compared(compare):
    one = {"args": argparse.Namespace(lr=0.1, device="cuda:0"), "betas": (0.9, 0.95), "w": torch.ones(1)}
    two = {"args": argparse.Namespace(lr=0.2, device="cuda:1"), "betas": (0.9, 0.95), "w": torch.ones(1)}
    changes = {(change.name, change.source, change.target) for change in compare(one, two).changed}
    assert changes == {("args.lr", "0.1", "0.2"), ("args.device", "'cuda:0'", "'cuda:1'")}


def test_a_tensor_of_a_pickled_module_is_told_of_once(compare):
    one, two = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.Linear(3, 2))
    two[0].in_features = 2
    names = whats(compare(one, two))
    assert ("0.weight", "shape") in names
    assert not [name for name, what in names if what == "object" and "weight" in name]


def test_without_torch_values_differ_by_an_unknown_amount(compare, tmp_path, monkeypatch):
    compare({"w": torch.ones(2), "d": torch.ones(2)}, {"w": torch.zeros(2), "d": torch.ones(2).double()})
    real = builtins.__import__

    def without(name, *rest):
        if name == "ckptmove.proof.tensors.magnitude":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    measuring.measure_of_torch.cache_clear()
    try:
        result = ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))
    finally:
        measuring.measure_of_torch.cache_clear()
    assert result.changed == (
        Change("w", "value", "[2]", "[2]"),
        Change("d", "dtype", "float32", "float64"),
    )


def test_files_of_different_kinds_are_compared_by_their_tensors(tmp_path):
    values = {"w": torch.arange(3.0)}
    torch.save(values, tmp_path / "a.pt")
    torch.save(values, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    with (tmp_path / "c.pkl").open("wb") as stream:
        pickle.dump(values, stream)
    for other in ("b.pt", "c.pkl"):
        assert ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / other)).same


def test_progress_counts_the_tensors_of_the_first(compare, tmp_path):
    compare({"a": torch.ones(2), "b": torch.ones(4)}, {"a": torch.ones(2), "b": torch.ones(4)})
    told: list[tuple[int, int]] = []
    ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), progress=lambda *figures: told.append(figures))
    assert told == [(8, 24), (24, 24)]


def test_what_cannot_be_compared_is_an_error(tmp_path):
    torch.save({}, tmp_path / "a.pt")
    with pytest.raises(MissingFile):
        ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))


def test_compressed_bytes_are_not_compared_and_the_way_is_named(compare, tmp_path):
    compare({"w": torch.ones(2)}, {"w": torch.ones(2)})
    with zipfile.ZipFile(tmp_path / "a.pt") as source, zipfile.ZipFile(tmp_path / "d.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name), zipfile.ZIP_DEFLATED)
    packed = str(tmp_path / "d.pt")
    (one,) = ckptmove.diff(packed, packed).uncompared
    told = f"compressed in {packed}: convert stores it uncompressed"
    assert one == Uncompared("w", f"{told}; {told}")
    ckptmove.convert(packed, to="cpu", output=tmp_path / "plain.pt")
    assert ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / "plain.pt")).same


def test_keys_that_no_spelling_tells_apart_are_paired_in_order(compare):
    keys = [(torch.zeros(1), 0), (torch.ones(1), 0)]
    tree = {key: torch.full((2,), float(place)) for place, key in enumerate(keys)}
    assert compare(tree, tree).same


def test_bytes_that_are_written_as_text_are_not_compared(tmp_path):
    for protocol in (2, 4):
        (tmp_path / f"{protocol}.pkl").write_bytes(pickle.dumps({"w": torch.ones(2)}, protocol))
    (one,) = ckptmove.diff(str(tmp_path / "2.pkl"), str(tmp_path / "4.pkl")).uncompared
    told = f"written as text in {tmp_path / '2.pkl'}, as pickle protocols 0 to 2 write bytes"
    assert one == Uncompared("w", told)


def test_sparse_tensors_with_other_numbers_of_values_differ(compare):
    one, two = torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()
    assert compare({"w": one}, {"w": two}).changed == (Change("w", "value", "[3, 3]", "[3, 3]"),)


def test_elements_in_one_order_are_compared_as_they_lie(compare, monkeypatch):
    def refuse(*_arguments):
        raise AssertionError("put into another order first")

    monkeypatch.setattr("ckptmove.lazy.strided.read_strided", refuse)
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    [change] = compare({"w": image}, {"w": (image + 2).to(memory_format=torch.channels_last)}).changed
    assert change.gap == Gap(2.0, 1.0)


def test_what_is_in_no_tree_is_compared_too(tmp_path):
    for name, long, epoch in (("a", b"x" * 500, 1), ("b", b"y" * 500, 1), ("c", b"x" * 500, 2)):
        (tmp_path / f"{name}.pkl").write_bytes(pickle.dumps({"w": torch.ones(1), "long": long, "epoch": epoch}))
    [change] = ckptmove.diff(str(tmp_path / "a.pkl"), str(tmp_path / "b.pkl")).changed
    assert (change.what, change.name.partition(" ")[0]) == ("object", "long")
    assert whats(ckptmove.diff(str(tmp_path / "a.pkl"), str(tmp_path / "c.pkl"))) == [("epoch", "object")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_code_of_a_script_is_compared(tmp_path):
    class Adds(torch.nn.Module):
        def forward(self, x):
            return x + 1

    class Subtracts(torch.nn.Module):
        def forward(self, x):
            return x - 1

    for name, kind in (("a", Adds), ("b", Subtracts)):
        kind.__qualname__ = kind.__name__ = "Steps"
        torch.jit.save(torch.jit.trace(kind(), torch.ones(1)), tmp_path / f"{name}.pt")
    names = [name for name, _ in whats(ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / "b.pt")))]
    assert [name for name in names if name.startswith("code/") and name.endswith(".py")]
    names = whats(ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / "a.pt")))
    assert names == []


def test_records_and_metadata_are_compared(compare, tmp_path):
    compare({"w": torch.ones(1)}, {"w": torch.ones(1)})
    with zipfile.ZipFile(tmp_path / "b.pt", "a") as archive:
        archive.writestr("b/notes.txt", "by hand")
    [change] = ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / "b.pt")).changed
    assert (change.name, change.source) == ("notes.txt", "absent")
    assert change.target.startswith("sha256 ")
    for name, metadata in (("a", {"format": "pt"}), ("b", {"format": "np"}), ("c", None)):
        safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors", metadata)
    paths = [str(tmp_path / f"{name}.safetensors") for name in "abc"]
    assert whats(ckptmove.diff(paths[0], paths[1])) == [("__metadata__", "object")]
    assert ckptmove.diff(paths[2], paths[2]).same


def test_many_elements_with_gaps_between_them_are_read_in_blocks(compare):
    one = torch.zeros(2**18 + 6)
    two = one.clone()
    two[2**18 + 4] = 3
    two[1::2] = 9
    [change] = compare({"w": one[::2]}, {"w": two[::2]}).changed
    assert change.gap == Gap(3.0, 1.0)
    assert compare({"w": one[: 2**17 : 2]}, {"w": one[: 2**17 : 2]}).same


def test_elements_that_several_names_share_are_compared_once(compare, monkeypatch):
    asked = []
    real = comparison.blocks
    monkeypatch.setattr(comparison, "blocks", lambda one: asked.append(one.offset) or real(one))
    ours, theirs = torch.zeros(6), torch.ones(6)
    names = [f"w{place}" for place in range(50)]
    result = compare(dict.fromkeys(names, ours), dict.fromkeys(names, theirs))
    assert whats(result) == [(name, "value") for name in names]
    assert {change.gap for change in result.changed} == {Gap(1.0, 1.0)}
    assert asked == [0, 0]


def test_elements_that_lie_otherwise_are_others(compare, monkeypatch):
    held = torch.zeros(12)
    held[7] = 1.0
    views = {
        "w": held[:6],
        "behind": held[6:],
        "rows": held[:6].reshape(2, 3),
        "turned": held[:6].reshape(3, 2).t(),
    }
    asked = []
    real = comparison.blocks
    monkeypatch.setattr(comparison, "blocks", lambda one: asked.append(one.offset) or real(one))
    assert compare(views, views).same
    assert sorted(asked) == [*[0] * 6, 6, 6]
    other = compare(views, {**views, "behind": torch.zeros(6), "w": torch.ones(6)})
    assert [change for change in whats(other) if change[1] == "value"] == [("w", "value"), ("behind", "value")]


def quantized(scale, zero_point):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch._make_per_tensor_quantized_tensor(torch.tensor([1, 2, 3], dtype=torch.int8), scale, zero_point)


def by_channel(axis):
    scales, zeros = torch.tensor([0.1, 0.5], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch._make_per_channel_quantized_tensor(torch.ones(2, 2, dtype=torch.int8), scales, zeros, axis)


def attributed(tensor, **attributes):
    vars(tensor).update(attributes)
    return tensor


def parameter(**attributes):
    return attributed(torch.nn.Parameter(torch.ones(2)), **attributes)


class Around(torch.Tensor):
    """A subclass without a storage, as quantization libraries have them."""

    @staticmethod
    def __new__(cls, codes, **_more):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, *, signed=True):
        self.codes, self.signed = codes, signed

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


CODES = torch.tensor([1, 2], dtype=torch.uint8)


def test_a_wrapper_subclass_is_the_same_as_itself(compare):
    result = compare({"w": Around(CODES)}, {"w": Around(CODES)})
    assert (result.same, result.tensors, result.uncompared) == (True, 2, ())


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Around(CODES + 1), [("w.codes", "value")]),
        (Around(CODES, signed=False), [("w.signed", "object")]),
        (Around(CODES.int()), [("w.codes", "dtype"), ("w.codes", "value")]),
    ],
)
def test_what_differs_inside_of_a_wrapper_subclass_is_named(compare, other, expected):
    result = compare({"w": Around(CODES)}, {"w": other})
    assert not result.same
    assert [one for one in whats(result) if one in expected] == whats(result)
    assert whats(result)
    assert result.uncompared == ()


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
def test_a_dtensor_is_the_same_as_itself_and_its_shard_is_compared(compare, mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    values = torch.arange(6.0)
    first = {"w": DTensor.from_local(values, mesh, [Shard(0)])}
    assert compare(first, first).same
    assert compare(first, first).uncompared == ()
    result = compare(first, {"w": DTensor.from_local(values + 1, mesh, [Shard(0)])})
    assert whats(result) == [("w._local_tensor", "value")]
    result = compare(first, {"w": DTensor.from_local(values, mesh, [Replicate()])})
    assert not result.same
    assert {what for name, what in whats(result) if "._spec.placements.0" in name} == {"object"}


class Subclass(torch.Tensor):
    pass


def subclass(**attributes):
    return attributed(torch.ones(2).as_subclass(Subclass), **attributes)


def wrapped(layout, offset=0):
    arguments = (Subclass, torch.float32, (2,), (1,), offset, layout, torch.device("cpu"), False)
    return ByCall(torch._utils._rebuild_wrapper_subclass, arguments)


def from_numpy(values):
    arguments = (np.array(values), torch.float32, "xla:0", False)
    return ByCall(torch._utils._rebuild_device_tensor_from_numpy, arguments)


class ByCall:
    def __init__(self, function, arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


COMPLEX = torch.tensor([1 + 2j, 3j])
INDICES = torch.tensor([[0, 1]])


def sparse(values, *, flag=True):
    return torch.sparse_coo_tensor(INDICES, values, (3,), is_coalesced=flag, check_invariants=False)


LAZY = [("x.conj", "True", "absent")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (quantized(0.1, 3), quantized(0.2, 3), [("x.scales", "0.1", "0.2")]),
        (quantized(0.1, 3), quantized(0.1, 4), [("x.zero_points", "3", "4")]),
        (by_channel(0), by_channel(1), [("x.axis", "0", "1")]),
        (COMPLEX.conj(), torch._neg_view(COMPLEX), [("x", "conj", "neg"), *LAZY, ("x.neg", "absent", "True")]),
        (COMPLEX.conj(), COMPLEX, [("x", "conj", "tensor"), *LAZY]),
        (parameter(foo=1), parameter(foo=2), [("x.foo", "1", "2")]),
        (parameter(foo=1), parameter(), [("x.foo", "1", "absent")]),
        (subclass(foo=1), subclass(foo=2), [("x.foo", "1", "2")]),
        (sparse(ONES), sparse(ONES, flag=False), [("x.is_coalesced", "True", "False")]),
        (wrapped(torch.strided), wrapped(torch.sparse_coo), None),
        (wrapped(torch.strided), wrapped(torch.strided, 1), [("x.storage_offset", "0", "1")]),
        (from_numpy([1.0]), from_numpy([2.0]), None),
    ],
)
def test_what_a_tensor_is_besides_its_record_counts(compare, first, second, expected):
    changed = compare({"x": first}, {"x": second}).changed
    assert changed
    assert {change.what for change in changed} == {"object"}
    assert all(change.name == "x" or change.name.startswith("x.") for change in changed)
    if expected is not None:
        assert sorted((change.name, change.source, change.target) for change in changed) == expected
    for one in (first, second):
        assert compare({"x": one}, {"x": one}).changed == ()


class First(torch.nn.Linear):
    pass


class Second(torch.nn.Linear):
    pass


def linear(kind):
    layer = kind(1, 1)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    return layer


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"a": ONES, "a.b": 5}, {"a": ONES, "a.b": 6}, ("a.b", "5", "6")),
        ({"a.b": ONES, "a": 5}, {"a.b": ONES, "a": 6}, ("a", "5", "6")),
        ({"m": OrderedDict(w=ONES)}, {"m": {"w": ONES}}, ("m", "a collections.OrderedDict", "a dict")),
        ({"m": [ONES]}, {"m": (ONES,)}, ("m", "a list", "a tuple")),
        (
            {"m": linear(First)},
            {"m": linear(Second)},
            ("m", repr(f"{__name__}.First"), repr(f"{__name__}.Second")),
        ),
        ({"m": [ONES, 1]}, {"m": [ONES, 2]}, ("m.1", "1", "2")),
        ({"m": 5}, {"m": ONES}, ("m", "5", "a torch._utils._rebuild_tensor_v2")),
    ],
)
def test_nothing_hides_behind_the_name_of_a_tensor(compare, tmp_path, first, second, expected):
    changed = [change for change in compare(first, second).changed if change.what != "role"]
    assert [(change.name, change.source, change.target) for change in changed] == [expected]
    for name in "ab":
        (tmp_path / f"run-{name}").mkdir()
        (tmp_path / f"{name}.pt").rename(tmp_path / f"run-{name}" / "m.pt")
    changed = ckptmove.diff(str(tmp_path / "run-a"), str(tmp_path / "run-b")).changed
    assert [change.name for change in changed if change.what != "role"] == [f"m.pt.{expected[0]}"]


def test_the_type_of_what_a_file_in_a_directory_holds_counts(tmp_path):
    for name, value in (("a", OrderedDict(w=ONES)), ("b", {"w": ONES})):
        (tmp_path / name).mkdir()
        torch.save(value, tmp_path / name / "model.bin")
    [change] = ckptmove.diff(str(tmp_path / "a"), str(tmp_path / "b")).changed
    assert change == Change("model.bin", "object", "a collections.OrderedDict", "a dict")


def test_what_stood_beside_tensors_that_are_gone_is_told(compare):
    shared = OrderedDict(w=ONES, rates=[0.1], more=[[ZEROS], 3])
    held = {"x": ONES, "m": [shared], "again": [shared, shared]}
    result = compare(held, {"x": ONES})
    assert result.removed == tuple(
        f"{place}.{name}" for place in ("m.0", "again.0", "again.1") for name in ("w", "more.0.0")
    )
    told = [(change.name, change.source, change.target) for change in result.changed]
    assert sorted(name.rpartition(".")[2] for name, _, _ in told) == ["1", "rates"]
    assert {change.target for change in result.changed} == {"absent"}
    assert {change.source for change in compare({"x": ONES}, held).changed} == {"absent"}


def test_a_tensor_that_is_listed_nowhere_is_told_where_it_is_lost(compare):
    shared = argparse.Namespace(w=ONES)
    result = compare({"a": shared, "b": shared}, {"a": shared, "b": argparse.Namespace(v=1)})
    assert result.removed == ()
    assert sorted((change.name, change.target) for change in result.changed) == [("b.v", "1"), ("b.w", "absent")]


def test_a_tensor_that_torch_would_not_make_is_compared_as_it_is_written(compare):
    def versions(*arguments):
        state = OrderedDict(w=ONES)
        state._metadata = ByCall(torch._utils._rebuild_sparse_tensor, arguments)
        return state

    assert compare(versions(1), versions(1)).same
    for layout in (1, 99):
        assert [change.what for change in compare(versions(layout, 5), versions(layout, 6)).changed] == ["object"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", [quantized(0.1, 3), COMPLEX.conj(), parameter(foo=1), sparse(ONES)])
def test_the_same_tensor_in_another_container_is_the_same(tmp_path, value):
    held = {"m": OrderedDict(x=value), "storage": torch.ones(4).untyped_storage()}
    for name, options in (("a", {}), ("b", {"_use_new_zipfile_serialization": False}), ("c", {"pickle_protocol": 4})):
        torch.save(held, tmp_path / f"{name}.pt", **options)
    for other in "abc":
        assert ckptmove.diff(str(tmp_path / "a.pt"), str(tmp_path / f"{other}.pt")).same


def test_views_that_lie_over_each_other_are_compared_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "_IN_ANY_CASE", 0)
    path = str(tmp_path / "a.pt")
    large = torch.ones(2**14)
    torch.save([large[index:] for index in range(30)], path)
    assert ckptmove.diff(path, path).same
    torch.save([large[index:] for index in range(80)], path)
    with pytest.raises(LimitExceeded, match="the bytes of overlapping tensors") as caught:
        ckptmove.diff(path, path)
    assert caught.value.path == path
    assert ckptmove.diff(path, path, limits=Limits().times(2)).same


def test_names_of_one_view_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "_IN_ANY_CASE", 0)
    path = str(tmp_path / "a.pt")
    torch.save([torch.ones(2**14)] * 200, path)
    assert ckptmove.diff(path, path).same


def test_a_cast_of_a_tensor_in_another_order_is_measured(compare):
    values = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)
    assert [change.what for change in compare({"w": values}, {"w": values.half()}).changed] == ["dtype"]
    [_, change] = compare({"w": values}, {"w": (values + 2).half()}).changed
    assert change == Change("w", "value", "[4, 3, 2]", "[4, 3, 2]", Gap(2.0, 1.0))


@pytest.mark.parametrize("is_link", [True, False])
def test_a_link_is_no_index_of_other_metadata(tmp_path, is_link):
    for name, size in (("a", 8), ("b", 9)):
        folder = tmp_path / name
        folder.mkdir()
        safetensors.torch.save_file({"w": torch.ones(2)}, folder / "model-00001-of-00001.safetensors")
        index = {"metadata": {"total_size": size}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if is_link:
        (tmp_path / "a" / "model.safetensors.index.json").rename(tmp_path / "a" / "kept.json")
        (tmp_path / "a" / "model.safetensors.index.json").symlink_to("kept.json")
        shutil.copy(tmp_path / "a" / "kept.json", tmp_path / "b" / "kept.json")
    result = ckptmove.diff(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [change.name for change in result.changed] == ["model.safetensors.index.json"] * is_link

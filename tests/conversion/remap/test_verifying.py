"""``verify --against`` accepts the output of ``convert`` with the same options, and nothing else."""

from __future__ import annotations

import argparse

import pytest
import remaps
import torch

import ckptmove
from ckptmove.conversion.remap.errors import NoMatch
from ckptmove.errors import UsageError
from ckptmove.proof.codec import dumps, loads
from ckptmove.proof.request import VerifyRequest

OPTIONS = {"strip_prefix": True, "drop": ["rng", "epoch"], "plain": True, "dtype": {"model": "half"}, "compact": True}


@pytest.fixture
def source(tmp_path):
    torch.save(remaps.run(), tmp_path / "old.pth")
    return tmp_path / "old.pth"


@pytest.fixture
def output(source, tmp_path):
    ckptmove.convert(source, output=tmp_path / "new.pth", **OPTIONS)
    return tmp_path / "new.pth"


def saved_again(path, change):
    tree = remaps.load(path)
    change(tree)
    torch.save(tree, path)


def flip_a_bit(tree):
    tree["model"]["a.weight"].view(torch.int16)[0, 0] ^= 1


def flip_a_bit_of_the_optimizer(tree):
    tree["optimizer"]["state"][0]["exp_avg"].view(torch.int32)[0, 0] ^= 1


def rename_a_key(tree):
    tree["model"]["a.other"] = tree["model"].pop("a.weight")


def remove_a_key(tree):
    del tree["ema"]["a.bias"]


def add_an_entry(tree):
    tree["more"] = 1


def change_an_option(tree):
    tree["args"]["lr"] = 0.2


def restore_an_object(tree):
    tree["args"] = argparse.Namespace(**tree["args"])


CHANGES = [
    flip_a_bit, flip_a_bit_of_the_optimizer, rename_a_key, remove_a_key, add_an_entry, change_an_option,
    restore_an_object,
]  # fmt: skip


def test_the_same_options_pass(source, output):
    result = ckptmove.verify(output, against=source, **OPTIONS)
    assert result.passed
    assert result.proven


def test_weights_that_equal_their_original_are_proven(tmp_path):
    """A file for inference has no state to resume from."""
    source, output = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save(torch.nn.DataParallel(torch.nn.Linear(3, 2)).state_dict(), source)
    ckptmove.convert(source, output=output, strip_prefix=True)
    alone, compared, other = (
        ckptmove.verify(output),
        ckptmove.verify(output, against=source, strip_prefix=True),
        ckptmove.verify(output, against=source),
    )
    assert [(one.passed, one.proven) for one in (alone, compared, other)] == [
        (True, False), (True, True), (False, False),
    ]  # fmt: skip


@pytest.mark.parametrize(("options", "is_suggested"), [({}, True), ({"strip_prefix": True}, False)])
def test_options_that_no_command_repeats_are_suggested(source, output, options, is_suggested):
    checks = {one.name: one for one in ckptmove.verify(output, against=source, **options).checks}
    assert checks["restore"].status == "failed"
    assert ("strip_prefix=True" in checks["restore"].fix) == is_suggested
    assert "LookupError" not in checks["parity"].detail


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_change_fails(source, output, change, compared):
    assert compared(output, source, **OPTIONS) == 0
    saved_again(output, change)
    assert compared(output, source, **OPTIONS) > 0


@pytest.mark.parametrize("left_out", OPTIONS)
def test_an_option_that_is_left_out_fails(source, output, left_out, compared):
    options = {key: value for key, value in OPTIONS.items() if key != left_out}
    if left_out == "compact":  # the values are the same
        assert compared(output, source, **options) == 0
    else:
        assert compared(output, source, **options) > 0


@pytest.mark.parametrize("name", ["torch", "directory"])
def test_a_file_that_was_not_compacted_fails(name, tmp_path, compared):
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    torch.save({"a": torch.arange(1000.0)[:4], "b": torch.ones(2)}, source / "a.pth")
    if name == "torch":
        source, output = source / "a.pth", tmp_path / "out.pth"
    assert compared(source, source) == 0
    assert compared(source, source, compact=True) == 1
    ckptmove.convert(source, output=output, compact=True)
    assert compared(output, source, compact=True) == 0


def test_a_compact_table_may_have_larger_storages(tmp_path, compared):
    """safetensors writes all elements of an expanded tensor, and a storage for each view."""
    whole = torch.arange(6.0)
    torch.save({"a": torch.ones(1).expand(8), "b": whole[:3], "c": whole[3:]}, tmp_path / "in.pth")
    ckptmove.convert(tmp_path / "in.pth", output=tmp_path / "out.safetensors", compact=True)
    assert compared(tmp_path / "out.safetensors", tmp_path / "in.pth", compact=True) == 0


def test_another_option_fails(source, output, compared):
    assert compared(output, source, **OPTIONS, add_prefix="net.") > 0
    with pytest.raises(NoMatch):
        compared(output, source, **OPTIONS, rename={"nothing": "else"})


def test_a_bit_of_each_source_is_seen(tmp_path, compared):
    """The bytes of a deflated, a big-endian and a cut storage are read from the original."""
    for name in ("deflated", "big-endian", "torch-legacy"):
        source, output = tmp_path / f"{name}.pth", tmp_path / f"{name}.new.pth"
        source.write_bytes(remaps.FILES[name](remaps.run(objects=False)))
        ckptmove.convert(source, output=output, compact=True, dtype="double")
        assert compared(output, source, compact=True, dtype="double") == 0

        def change(tree):
            tree["model"]["module.rows"].view(torch.int64)[1, 1] ^= 1

        saved_again(output, change)
        assert compared(output, source, compact=True, dtype="double") > 0


def test_options_need_an_original(output):
    with pytest.raises(UsageError):
        ckptmove.verify(output, strip_prefix=True)


@pytest.mark.parametrize(
    "remap",
    [
        {"strip_prefix": ()},
        {"strip_prefix": ("a.", "b.")},
        {"rename": (("a.*", "b.*"),), "only": ("model",), "dtype": (("", "float16"), ("ema", "float32"))},
        {"add_prefix": "x.", "drop": ("rng",), "as_root": "ema", "compact": True, "plain": True},
    ],
)
def test_options_pass_through_json(remap):
    request = VerifyRequest("a.pth", exclude=("checkpoint-5", "b"), against="b.pth", keep=("x",))
    request = request._replace(remap=request.remap._replace(**remap))
    assert loads(VerifyRequest, dumps(request)) == request

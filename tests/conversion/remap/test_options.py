"""The options of a remapping, as users type them and as the functions take them."""

from __future__ import annotations

import pytest
import torch

import ckptmove
from ckptmove.conversion.remap.errors import KeysCollide, NoMatch, NothingLeft, PartialPrefix
from ckptmove.conversion.remap.options import remap_options, with_options
from ckptmove.errors import UsageError
from ckptmove.moves import MoveRequest, Remap, RemapOptions
from ckptmove.text import Argument


def test_options_are_added_to_a_request():
    options = [
        Argument("to", "cpu"),
        Argument("drop", "a"),
        Argument("drop", "b"),
        Argument("plain", True),
        Argument("dtype", "ema=bf16"),
        Argument("strip_prefix", True),
    ]
    found = with_options(MoveRequest(None, keep=("k",), remap=Remap(drop=("own",))), options)
    expected = Remap(drop=("own", "a", "b"), plain=True, dtype=(("ema", "bfloat16"),), strip_prefix=())
    assert found == MoveRequest("cpu", keep=("k",), remap=expected)
    assert with_options(found, [Argument("strip_prefix", False)]).remap.strip_prefix is None
    assert with_options(found, [Argument("strip_prefix", "x.")]).remap.strip_prefix == ("x.",)


@pytest.mark.parametrize(
    ("typed", "parsed"),
    [
        ({}, Remap()),
        ({"strip_prefix": []}, Remap(strip_prefix=())),
        ({"strip_prefix": [""]}, Remap(strip_prefix=())),
        ({"strip_prefix": ["a.", "b."]}, Remap(strip_prefix=("a.", "b."))),
        ({"rename": ["a.*=b.*", "c=d=e"]}, Remap(rename=(("a.*", "b.*"), ("c", "d=e")))),
        ({"dtype": ["bf16", "ema=torch.half"]}, Remap(dtype=(("", "bfloat16"), ("ema", "float16")))),
        ({"dtype": ["optimizer=double", "float"]}, Remap(dtype=(("optimizer", "float64"), ("", "float32")))),
        ({"dtype": ["fp16", "half"]}, Remap(dtype=(("", "float16"), ("", "float16")))),
        ({"only": ["model"], "drop": ["*.x"], "as_root": "ema"}, Remap(only=("model",), drop=("*.x",), as_root="ema")),
        ({"add_prefix": "a.", "compact": True, "plain": True}, Remap(add_prefix="a.", compact=True, plain=True)),
    ],
)
def test_options_are_parsed(typed, parsed):
    assert remap_options(**typed) == parsed


@pytest.mark.parametrize(
    "typed",
    [
        {"rename": ["a"]}, {"rename": ["=b"]}, {"rename": ["a="]}, {"rename": ["a.*=b"]}, {"rename": ["a=b.*"]},
        {"dtype": ["int8"]}, {"dtype": ["bfloat61"]}, {"dtype": ["nothing=bf16"]}, {"dtype": [""]},
        {"dtype": ["bf16", "fp16"]},
    ],
)  # fmt: skip
def test_invalid_options_are_refused(typed):
    with pytest.raises(UsageError):
        remap_options(**typed)


def test_a_mistyped_dtype_is_corrected():
    with pytest.raises(UsageError, match="bfloat16"):
        remap_options(dtype=["bflaot16"])


@pytest.fixture
def source(tmp_path):
    state = {"module.a": torch.ones(2), "module.b": torch.ones(3)}
    torch.save({"state_dict": state, "epoch": torch.tensor(1), "steps": [1]}, tmp_path / "a.pth")
    return tmp_path / "a.pth"


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"strip_prefix": True}, ["a", "b"]),
        ({"strip_prefix": "module."}, ["a", "b"]),
        ({"strip_prefix": ["module."]}, ["a", "b"]),
        ({"rename": {"module.a": "x"}}, ["x", "module.b"]),
        ({"drop": "steps", "only": ["state_dict", "steps"]}, ["module.a", "module.b"]),
    ],
)
def test_functions_take_one_word_or_several(source, options, keys, tmp_path):
    ckptmove.convert(source, output=tmp_path / "b.pth", verify=True, **options)
    assert list(torch.load(tmp_path / "b.pth", weights_only=True)["state_dict"]) == keys


def test_an_unknown_argument_is_an_error(source):
    with pytest.raises(TypeError, match="'stirp_prefix'; did you mean 'strip_prefix'"):
        ckptmove.convert(source, stirp_prefix=True)


def test_the_functions_take_every_option():
    assert RemapOptions.__optional_keys__ == set(Remap._fields)


def test_a_dtype_is_for_the_model_or_for_roles(source, tmp_path):
    for name, dtype in (("b.pth", "bf16"), ("c.pth", {"model": "bfloat16"})):
        ckptmove.convert(source, output=tmp_path / name, dtype=dtype)
        found = torch.load(tmp_path / name, weights_only=True)["state_dict"]
        assert {one.dtype for one in found.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rename": {"module.a": "module.b"}}, KeysCollide),
        ({"only": "nothing"}, NoMatch),
        ({"drop": "ema"}, NoMatch),
        ({"as_root": "ema"}, NoMatch),
        ({"dtype": {"ema": "bf16"}}, NoMatch),
        ({"strip_prefix": "net."}, NoMatch),
        ({"drop": "*"}, NothingLeft),
        ({"dtype": "int4"}, UsageError),
        ({"shard_size": "5 parsecs", "output": "x"}, UsageError),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_refusals_write_nothing(source, options, error, dry_run, tmp_path):
    with pytest.raises(error):
        ckptmove.convert(source, **{"output": tmp_path / "b.pth", **options}, dry_run=dry_run)
    assert list(tmp_path.iterdir()) == [source]


def test_a_prefix_that_only_some_keys_have_is_refused(tmp_path):
    torch.save({"module.a.weight": torch.ones(1), "b.weight": torch.ones(1)}, tmp_path / "a.pth")
    with pytest.raises(PartialPrefix):
        ckptmove.convert(tmp_path / "a.pth", strip_prefix="module.")


def test_the_default_output_is_next_to_the_source(source, tmp_path):
    result = ckptmove.convert(source, strip_prefix=True)
    assert result.output == str(tmp_path / "a.new.pth")

"""One file, in every format of torch, with every option; the oracle is the same change in torch."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import pytest
import remaps
import torch

import ckptmove

pytestmark = pytest.mark.unmeasured

SAMPLES = Path(__file__).parents[3] / "sample_ckpts"
PREFIX = "module."


def state_dicts(change):
    def apply(tree):
        return {**tree, "model": change(tree["model"]), "ema": change(tree["ema"])}

    return apply


def stripped(state):
    new = type(state)(state)
    if hasattr(state, "_metadata"):
        new._metadata = OrderedDict(state._metadata)
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(new, PREFIX)
    return new


def renamed(change):
    """A state_dict with other keys, and the modules of ``_metadata`` with them."""

    def apply(state):
        new = type(state)((change(key), value) for key, value in state.items())
        if hasattr(state, "_metadata"):
            modules = {path: change(f"{path}.").removesuffix(".") if path else path for path in state._metadata}
            new._metadata = OrderedDict((modules[path], facts) for path, facts in state._metadata.items())
        return new

    return apply


def added(state):
    new = type(state)((f"net.{key}", value) for key, value in state.items())
    if hasattr(state, "_metadata"):
        new._metadata = OrderedDict((f"net.{path}".removesuffix("."), one) for path, one in state._metadata.items())
    return new


def cast(dtype, *keys, skip=()):
    """Storages of floating tensors in another dtype, by ``Tensor.to``; views stay views."""

    def apply(tree):
        made = {}

        def visit(value, key=""):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and key not in skip:
                base = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
                new = made.setdefault(value.untyped_storage().data_ptr(), base.to(dtype)) if value.numel() else base
                return new.to(dtype).as_strided(value.shape, value.stride(), value.storage_offset())
            if isinstance(value, dict):
                new = type(value)((key, visit(one, key)) for key, one in value.items())
                vars(new).update(vars(value)) if hasattr(value, "__dict__") else None
                return new
            return [visit(one) for one in value] if isinstance(value, list) else value

        return {key: visit(value) if key in keys else value for key, value in tree.items()}

    return apply


def without(*keys):
    return lambda tree: {key: value for key, value in tree.items() if key not in keys}


def plain(tree):
    return {key: vars(one) if isinstance(one, argparse.Namespace) else one for key, one in tree.items()}


def everything(tree):
    return cast(torch.float16, "model")(state_dicts(stripped)(plain(without("optimizer", "rng")(tree))))


#: Options, and their effect on a loaded tree.
CHANGES = {
    "strip-known": ({"strip_prefix": True}, state_dicts(stripped)),
    "strip-one": ({"strip_prefix": "module."}, state_dicts(stripped)),
    "add": ({"add_prefix": "net."}, state_dicts(added)),
    "rename": (
        {"rename": {"module.a.*": "module.b.*"}},
        state_dicts(renamed(lambda key: key.replace("module.a.", "module.b."))),
    ),
    "drop-role": ({"drop": "optimizer"}, without("optimizer")),
    "drop-glob": ({"drop": ["arg*", "epoch"]}, without("args", "epoch")),
    "only": ({"only": ["model", "epoch"]}, without("optimizer", "ema", "rng", "args")),
    "root": ({"as_root": "ema"}, lambda tree: tree["ema"]),
    "compact": ({"compact": True}, lambda tree: tree),
    "plain": ({"plain": True}, plain),
    "dtype": ({"dtype": "bf16"}, cast(torch.bfloat16, "model")),
    "dtype-of-role": ({"dtype": {"ema": "fp16"}}, cast(torch.float16, "ema")),
    "dtype-of-optimizer": ({"dtype": {"optimizer": "double"}}, cast(torch.float64, "optimizer", skip=("step",))),
    "dtype-up": (
        {"dtype": "float64", "only": "model"},
        lambda tree: cast(torch.float64, "model")({"model": tree["model"]}),
    ),
    "all": (
        {"strip_prefix": True, "drop": ["optimizer", "rng"], "plain": True, "dtype": "half", "compact": True},
        everything,
    ),
}


#: Each change of a third of the formats, and all changes at once of each.
PAIRS = [
    (kind, name)
    for turn, kind in enumerate(remaps.FILES)
    for index, name in enumerate(CHANGES)
    if (turn + index) % 3 == 0 or name == "all"
]


@pytest.fixture
def source(kind, tmp_path):
    path = tmp_path / "model.pth"
    path.write_bytes(remaps.FILES[kind](remaps.run()))
    return path


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_torch_loads_what_it_would_have_made(source, name, tmp_path, compared):
    options, change = CHANGES[name]
    before, output = source.read_bytes(), tmp_path / "out.pth"
    original = remaps.load_any(source)
    dry = ckptmove.convert(source, output=output, dry_run=True, **options)
    assert not output.exists()
    result = ckptmove.convert(source, output=output, **options)
    assert result.plan == dry.plan
    assert source.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pth", "out.pth"]
    remaps.assert_equal(remaps.load(output), change(original), sizes="compact" not in options)
    is_simple = "plain" in options or "only" in options or "as_root" in options or name == "drop-glob"
    remaps.assert_equal(remaps.load(output, weights_only=is_simple, mmap=True), change(original), sizes=False)
    assert not {one.code for one in ckptmove.inspect(output, check=True).findings} & remaps.FORBIDDEN
    assert compared(output, source, **options) == 0


def test_what_is_dropped_is_no_more_in_the_plan():
    sample = str(SAMPLES / "full-resume-cuda0.pt")
    kept = [tensor.name for tensor in ckptmove.convert(sample, to="mps", dry_run=True).plan.kept]
    left = ckptmove.convert(sample, to="mps", drop=["optimizer", "rng.torch"], dry_run=True).plan
    assert {"rng.torch", "optimizer.state.0.step"} <= {*kept}
    assert [tensor.name for tensor in left.kept] == [
        name for name in kept if name != "rng.torch" and not name.startswith("optimizer.")
    ]

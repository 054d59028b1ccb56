"""Splitting a name into the path of a state_dict and a key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.checkpoint.state_dicts import RootKeys, buffers, strip_wrappers, without_wrappers
from ckptmove.model import Inventory, TensorRecord

PATHS = st.text("ab.", max_size=8)


def root_keys(*keys: str) -> RootKeys:
    return RootKeys(Inventory(path="x", container="torch-zip", layout="plain", size_bytes=0, root_keys=keys))


def tensor(name: str) -> TensorRecord:
    return TensorRecord(
        name=name, role="model", device="cpu", dtype="float32", shape=(4,), stride=(1,), storage=name,
        storage_offset=0, nbytes=16,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "name", "expected"),
    [
        ((), "a.b", ("", "a.b")),
        (("model", "epoch"), "model.0.weight", ("model", "0.weight")),
        (("a.b", "c"), "a.b", ("", "a.b")),
        (("a.b", "c"), "a.b.c", ("a.b", "c")),
        (("a.b", "a"), "a.b.c", ("a", "b.c")),
        (("model",), "models.w", ("", "models.w")),
        (("nets",), "nets.state_dict.w", ("nets.state_dict", "w")),
        (("nets",), "nets.state_dict", ("nets", "state_dict")),
    ],
)
def test_a_name_divides_after_a_key_of_the_root(keys, name, expected) -> None:
    assert root_keys(*keys).split(name) == expected


@given(st.lists(PATHS, max_size=4), PATHS)
def test_the_shortest_key_that_a_path_begins_with_counts(keys, path) -> None:
    ends = [end for end, letter in enumerate(path) if letter == "." and path[:end] in keys]
    assert root_keys(*keys).first(path) == min(ends, default=-1)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("0.weight", ("", "0.weight")),
        ("module.0.weight", ("module.", "0.weight")),
        ("module._orig_mod.module.w", ("module._orig_mod.module.", "w")),
        ("module.", ("module.", "")),
        ("modules.w", ("", "modules.w")),
    ],
)
def test_the_prefixes_of_wrappers_come_off(key, expected) -> None:
    assert strip_wrappers(key) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("module.a._orig_mod.module.w", "a.module.w"),
        ("a._fsdp_wrapped_module._checkpoint_wrapped_module.w", "a.w"),
        ("a._forward_module._orig_mod", "a._orig_mod"),
        ("a_orig_mod.w", "a_orig_mod.w"),
    ],
)
def test_the_prefixes_of_wrappers_come_off_at_any_place_and_module_in_front(key, expected) -> None:
    assert without_wrappers(key) == expected


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_buffers_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.utils import parametrizations, spectral_norm, weight_norm

    model = torch.nn.ModuleList(
        [
            torch.nn.BatchNorm1d(4),
            spectral_norm(torch.nn.Linear(4, 4)),
            weight_norm(torch.nn.Linear(4, 4)),
            parametrizations.spectral_norm(torch.nn.Linear(4, 4)),
            parametrizations.weight_norm(torch.nn.Linear(4, 4)),
            parametrizations.orthogonal(torch.nn.Linear(4, 4)),
        ]
    )
    tensors = [tensor(name) for name in model.state_dict()]
    assert buffers(tensors) == {name for name, _ in model.named_buffers()}
    assert buffers([tensor("base"), tensor("a._u"), tensor("a.weight_u")]) == set()


class Counted(str):
    """Text that counts the letters that are copied out of it."""

    __slots__ = ()
    copied = 0

    def __getitem__(self, place):
        part = super().__getitem__(place)
        Counted.copied += len(part)
        return Counted(part)


@pytest.mark.parametrize("work", [root_keys("other", "a.b").split, strip_wrappers], ids=["split", "strip"])
@pytest.mark.parametrize("part", ["a.", "module."])
def test_a_name_of_many_parts_is_read_once(work, part) -> None:
    Counted.copied = 0
    name = Counted(part * 1000 + "w")
    work(name)
    assert Counted.copied <= len(name)

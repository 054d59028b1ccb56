"""Values that current torch does not write, and calls that weights-only mode does not make."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import pytest
import torch

from ckptmove.pickles.tree import (
    NEWOBJ,
    NEWOBJ_EX,
    ByteArray,
    Call,
    Dict,
    FrozenSet,
    Global,
    List,
    Opaque,
    Persistent,
    Python2Str,
    Set,
    Tuple,
)
from ckptmove.proof.loading import objects
from ckptmove.proof.loading.objects import NotAllowed
from ckptmove.proof.loading.storages import _inflated

STORAGE = Persistent("storage", -1)
build = partial(objects.build, deepest=1_000_000)


def a_storage(_node):
    values = torch.tensor([1.0, 2.0]).untyped_storage()
    return torch.storage.TypedStorage(wrap_storage=values, dtype=torch.float32, _internal=True)  # without its warning


def of(*items) -> Tuple:
    return Tuple(items, (-1,) * len(items))


def call(module: str, name: str, *args, opcode: int = NEWOBJ, **more) -> Call:
    made = Call(Global(module, name), of(*args), -1, opcode)
    for key, value in more.items():
        setattr(made, key, value)
    return made


def test_atoms() -> None:
    text = Python2Str("é")
    text.raw = b"\xc3\xa9"
    found = build(List([text, ByteArray(b"a"), 1], [-1] * 3), a_storage)
    assert found == ["é", bytearray(b"a"), 1]
    assert type(found[0]) is str
    assert build(None, a_storage) is None


def test_names_of_python_2() -> None:
    assert build(call("__builtin__", "set", List([1], [-1]), opcode=ord("R")), a_storage) == {1}


def test_a_tensor_that_gets_its_storage_later() -> None:
    made = build(call("torch", "Tensor", state=of(STORAGE, 0, of(2), of(1))), a_storage)
    assert made.tolist() == [1, 2]


def test_a_parameter_with_a_state() -> None:
    tensor = call("torch._utils", "_rebuild_tensor_v2", STORAGE, 0, of(2), of(1), False, None, opcode=ord("R"))
    made = build(call("torch.nn.parameter", "Parameter", tensor, False), a_storage)
    assert type(made) is torch.nn.Parameter
    assert not made.requires_grad
    state = of(tensor, False)
    with pytest.raises((RuntimeError, TypeError, ValueError)):  # torch's own refusal, of a state that no torch writes
        build(call("torch.nn.parameter", "Parameter", tensor, False, state=state), a_storage)


def test_hooks_are_no_shortcut() -> None:
    hooks = call("collections", "OrderedDict", opcode=ord("R"), assigned=Dict([1, 2], [-1, -1]))
    for value in (hooks, of()):
        made = build(
            call("torch._utils", "_rebuild_tensor_v2", STORAGE, 0, of(2), of(1), False, value, opcode=ord("R")),
            a_storage,
        )
        assert made.tolist() == [1, 2]
    sizes = call("torch", "Size", of(2), opcode=ord("R"))
    hooks = call("collections", "OrderedDict", opcode=ord("R"))
    made = build(
        call("torch._utils", "_rebuild_tensor_v2", STORAGE, 0, sizes, of(1), False, hooks, opcode=ord("R")), a_storage
    )
    assert made.tolist() == [1, 2]


def test_state_of_an_ordered_dict() -> None:
    made = build(call("collections", "OrderedDict", state=Dict(["_metadata", 1], [-1, -1])), a_storage)
    assert type(made) is OrderedDict
    assert vars(made) == {"_metadata": 1}


@pytest.mark.parametrize(
    "value",
    [
        Opaque("a buffer"),
        Global("os", "system"),
        Call(Opaque("a function"), of(), -1),
        call("os", "system", "true"),
        call("torch", "Size", of(1), opcode=NEWOBJ_EX, kwargs=Dict([], [])),
        Call(Global("torch", "Size"), List([], []), -1),
        call("collections", "OrderedDict", appended=List([1], [-1])),
        call("torch", "Size", of(1), assigned=Dict([1, 2], [-1, -1])),
        call("collections", "Counter", state=Dict([], [])),
        Persistent(of("module", Global("train", "Net"), "train.py", ""), -1),
        call("_codecs", "encode", "a", "rot13", opcode=ord("R")),
    ],
)
def test_what_weights_only_mode_does_not_do(value) -> None:
    with pytest.raises(NotAllowed):
        build(value, a_storage)


def dense(storage, size: int, **more) -> Call:
    hooks = call("collections", "OrderedDict", opcode=ord("R"))
    arguments = (storage, 0, of(size), of(1), False, hooks)
    return call("torch._utils", "_rebuild_tensor_v2", *arguments, opcode=ord("R"), **more)


def test_the_state_of_a_tensor_is_no_shortcut() -> None:
    assert build(dense(STORAGE, 2, state=of(STORAGE, 1, of(1), of(1))), a_storage).tolist() == [2]


def nested(depth: int, width: int = 1) -> Tuple:
    value = of(1)
    for _ in range(depth):
        value = of(*([value] * width))
    return value


@pytest.mark.slow
@pytest.mark.parametrize("key", [nested(20_000), nested(60, 2)], ids=["deep", "shared"])
def test_hashes_that_would_not_end(key) -> None:
    values = [
        Dict([key, 1], [-1, -1]),
        Set([key], [-1]),
        FrozenSet([key], [-1]),
        call("collections", "Counter", of(key), opcode=ord("R")),
        call("collections", "OrderedDict", List([List([key, 1], [-1] * 2)], [-1]), opcode=ord("R")),
    ]
    for value in values:
        with pytest.raises(ValueError, match="nested"):
            build(value, a_storage)
    assert build(Dict([of(1, of(2)), 1], [-1, -1]), a_storage) == {(1, (2,)): 1}


def test_only_files_have_deflated_storages() -> None:
    assert _inflated(object(), "0").nbytes() == 0

from __future__ import annotations

import argparse
import codecs
import collections
import enum
import io
import os
import pathlib
import pickle
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from allow_list import restored_allow_list
from hypothesis import given
from hypothesis import strategies as st
from plain_files import foreign, loaded, plain, saved

from ckptmove.conversion.remap.errors import NotPlain
from ckptmove.conversion.remap.plain import make_plain
from ckptmove.errors import LimitExceeded
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.tree import Call, Dict, Global, List, Opaque, Persistent, Tuple
from ckptmove.pickles.write import write_pickle

torch = pytest.importorskip("torch")

__all__ = ["foreign"]
SAMPLES = Path(__file__).parents[3] / "sample_ckpts"
REJECTED = ["namespace-memo-trap.pth", "numpy-scalar-metric.pth", "pickled-module-cuda0.pt"]


class Anything:
    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("__dict__", "size")

    def __init__(self, size: int) -> None:
        self.size = size


class Listed:
    """An object whose state is not a dict."""

    def __init__(self, state: object) -> None:
        self.value = state

    def __getstate__(self) -> object:
        return self.value


@dataclass
class Config:
    width: int = 3
    names: list[str] = field(default_factory=lambda: ["a"])


class Color(enum.Enum):
    RED = 1
    GREEN = "1"


class Subclass(torch.Tensor):
    pass


def slotted() -> Slotted:
    made = Slotted(3)
    made.extra = 4
    return made


ALLOWED = [
    torch.Size([1, 2]), torch.float16, torch.device("cpu"), collections.Counter("aa"), 1j, bytearray(b"a\0"), b"",
    b"\xff", 2**2000, 1 - 2**2039, 1.5, None, True, "ü\ud800",
]  # fmt: skip
OBJECTS = [
    (argparse.Namespace(lr=0.1, name="x"), {"lr": 0.1, "name": "x"}),
    (types.SimpleNamespace(a=Config()), {"a": {"width": 3, "names": ["a"]}}),
    (Anything(), {}),
    (slotted(), {"extra": 4, "size": 3}),
    (Slotted(3), {"size": 3}),
    (Listed((1, "a")), (1, "a")),
    (Listed([None, {"a": 1}]), [None, {"a": 1}]),
    (Listed((None, {})), {}),
    (collections.OrderedDict(a=Color.RED), collections.OrderedDict(a=1)),
    ({Color.RED: "a", "RED": "b"}, {1: "a", "RED": "b"}),
    ({(Color.RED, 2): 3}, {(1, 2): 3}),
    *(([value, Color.RED], [value, 1]) for value in ALLOWED),
]


@pytest.fixture(autouse=True, scope="module")
def allowed():
    """Torch before 2.6 needs permission for these types."""
    with restored_allow_list():
        if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
            torch.serialization.add_safe_globals([complex, bytearray, codecs.encode])
        yield


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(("value", "expected"), OBJECTS, ids=range(len(OBJECTS)))
def test_objects(value, expected, protocol) -> None:
    found = plain([value], protocol)
    assert found == [expected]
    assert type(found[0]) is type(expected)


@pytest.mark.parametrize("protocol", [2, 5])
def test_sets_become_lists(protocol) -> None:
    found = loaded(saved({"a": {1}, "b": frozenset({2}), "c": Color.RED}, protocol))
    assert found.value == {"a": [1], "b": [2], "c": 1}
    assert [(one.where, one.target) for one in found.replaced] == [("a", "list"), ("b", "list"), ("c", "int")]


def test_the_replacements_are_in_the_order_of_the_file() -> None:
    made = Anything(first=Config(), second=[pathlib.PurePosixPath("a"), Color.GREEN])
    found = loaded(saved({"made": made, Color.RED: len}))
    here = Anything.__module__
    assert found.replaced == (
        ("made", f"{here}.Anything", "dict"),
        ("made.first", f"{here}.Config", "dict"),
        ("made.second.0", "pathlib.PurePosixPath", "str"),
        ("made.second.1", f"{here}.Color", "str"),
        ("<call>.key", f"{here}.Color", "int"),
        ("<call>", "builtins.len", "str"),
    )


def test_dicts_of_other_libraries(foreign) -> None:
    for name in ("easydict.EasyDict", "munch.Munch", "yacs.config.CfgNode", "lightning.AttributeDict"):
        kind = foreign(name, dict)
        made = kind(a=1)
        made.a = 1
        assert plain([made, kind()]) == [{"a": 1}, {}]


def test_configs_of_omegaconf(foreign) -> None:
    node, listed, mapping = (
        foreign(f"omegaconf.{name}", Anything)
        for name in ("nodes.AnyNode", "listconfig.ListConfig", "dictconfig.DictConfig")
    )
    config = mapping(_metadata=Anything(ref_type=int), _parent=None, _content={})
    config._content["sizes"] = listed(_parent=config, _content=[node(_val=1, _parent=config), node(_val=Color.GREEN)])
    config._content["kind"] = Color.RED
    found = loaded(saved({"config": config}))
    assert found.value == {"config": {"sizes": [1, "1"], "kind": 1}}
    assert ("config", "omegaconf.dictconfig.DictConfig", "dict") in found.replaced
    assert plain([mapping(_content=torch.ones(2))])[0].sum() == 2
    assert plain([Anything(meta=foreign("omegaconf.base.Metadata", Anything)(key=1))]) == [{"meta": {"key": 1}}]


# --- sharing and cycles ----------------------------------------------------------------------------------------------


def test_shared_objects_stay_shared() -> None:
    shared, tensor = Anything(a=1), torch.arange(3.0)
    found = plain({"a": shared, "b": (shared, tensor), "c": tensor[1:], "raw": [b"ab"] * 2})
    assert found["a"] is found["b"][0]
    assert found["c"].untyped_storage().data_ptr() == found["b"][1].untyped_storage().data_ptr()
    assert found["raw"][0] is found["raw"][1]


def test_cycles() -> None:
    parent = Anything()
    parent.children = [Anything(parent=parent)]
    found = plain(parent)
    assert found["children"][0]["parent"] is found


def test_an_object_whose_value_is_itself_is_refused() -> None:
    for length in (1, 2):
        nodes = [call("omegaconf.nodes.AnyNode") for _ in range(length)]
        for node, value in zip(nodes, reversed(nodes), strict=True):
            node.state = dict_of(_val=value)
        with pytest.raises(NotPlain) as refused:
            make_plain(nodes[0], Limits())
        assert [one[:2] for one in refused.value.objects] == [("", "omegaconf.nodes.AnyNode")]


def test_the_types_of_replacements() -> None:
    tensor = call("torch._utils._rebuild_tensor_v2", Persistent(tuple_of("storage"), -1), 0, tuple_of(), tuple_of())
    values = [b"a", tensor, call("collections.OrderedDict"), None, tuple_of(), call("torch.device", "cpu")]
    nodes = []
    for value in values:
        nodes.append(call("omegaconf.nodes.AnyNode"))
        nodes[-1].state = dict_of(_val=value)
    nodes.append(call("omegaconf.Flag", 1))
    _, replaced = make_plain(List(nodes, [-1] * len(nodes)), Limits())
    kinds = ["bytes", "torch.Tensor", "dict", "None", "tuple", "torch.device", "int"]
    assert [one.target for one in replaced] == kinds


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_tensor_subclasses_become_tensors() -> None:
    value = torch.arange(4.0)
    parameter = torch.nn.Parameter(torch.arange(2.0))
    attached = torch.arange(3.0)
    attached.tag = Config()
    found = loaded(saved({"a": value.as_subclass(Subclass), "b": parameter, "c": attached}))
    assert type(found.value["a"]) is torch.Tensor
    assert torch.equal(found.value["a"], value)
    assert torch.equal(found.value["b"], parameter)
    assert type(found.value["b"]) is torch.nn.Parameter
    assert found.value["c"].tag == {"width": 3, "names": ["a"]}
    here = Subclass.__module__
    assert found.replaced == (("a", f"{here}.Subclass", "torch.Tensor"), ("c.tag", f"{here}.Config", "dict"))


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_tensors_of_every_kind_stay() -> None:
    tensors = {
        "buffer": torch.nn.Buffer(torch.ones(2)) if hasattr(torch.nn, "Buffer") else torch.ones(2),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
        "storage": torch.ones(2).untyped_storage(),
    }
    found = loaded(saved({**tensors, "a": Anything()}))
    assert len(found.replaced) == 1
    assert found.value["conjugated"].is_conj()
    assert torch.equal(found.value["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(found.value["quantized"].dequantize(), torch.ones(2))
    assert bytes(found.value["storage"]) == bytes(tensors["storage"])


def call(name: str, *args: object) -> Call:
    module, _, attribute = name.rpartition(".")
    return Call(Global(module, attribute), Tuple(args, (-1,) * len(args)), -1)  # type: ignore[arg-type]  # any values


def dict_of(**values: object) -> Dict:
    flat = [item for pair in values.items() for item in pair]
    return Dict(flat, [-1] * len(flat))  # type: ignore[arg-type]  # any values


def tuple_of(*items: object) -> Tuple:
    return Tuple(items, (-1,) * len(items))  # type: ignore[arg-type]  # any values


V2 = Global("torch._utils", "_rebuild_tensor_v2")
NESTED = Global("torch._utils", "_rebuild_nested_tensor")
WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")


def test_a_tensor_subclass_of_an_old_torch() -> None:
    inner = tuple_of(
        Persistent(tuple_of("storage"), -1), 0, tuple_of(), tuple_of(), False, call("collections.OrderedDict")
    )
    old = call("torch.tensor._rebuild_from_type", V2, Global("library", "Image"), inner, dict_of())
    root, replaced = make_plain(List([old], [-1]), Limits())
    assert root.items[0].name == V2.full_name
    assert replaced == (("0", "library.Image", "torch.Tensor"),)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (call("torch._tensor._rebuild_from_type_v2", V2), "torch._tensor._rebuild_from_type_v2"),
        (call("torch._tensor._rebuild_from_type_v2", Global("a", "f"), Global("a", "B"), tuple_of(), None), "a.B"),
        (call("torch._tensor._rebuild_from_type_v2", WRAPPER, Global("a", "B"), tuple_of(), None), "a.B"),
        (
            call("torch._tensor._rebuild_from_type_v2", NESTED, Global("torch", "Tensor"), tuple_of(), None),
            "torch.Tensor",
        ),
        (call(WRAPPER.full_name, Global("a", "B")), WRAPPER.full_name),
        (call("torch._utils._rebuild_nested_tensor"), "torch._utils._rebuild_nested_tensor"),
        (call("torch._utils._rebuild_device_tensor_from_numpy"), "torch._utils._rebuild_device_tensor_from_numpy"),
    ],
)
def test_tensors_that_only_their_class_rebuilds_are_refused(value, name) -> None:
    with pytest.raises(NotPlain) as refused:
        make_plain(dict_of(weight=value), Limits())
    assert [one[:2] for one in refused.value.objects] == [("weight", name)]


def test_objects_in_unusual_arguments_of_a_tensor() -> None:
    hooks = call("library.Hooks")
    storage = Persistent(tuple_of("storage"), -1)
    tensor = call(V2.full_name, storage, 0, tuple_of(), tuple_of(), False, hooks)
    root, replaced = make_plain(tensor, Limits())
    assert isinstance(root.args.items[5], Dict)
    assert replaced == (("", "library.Hooks", "dict"),)


class FromArguments:
    """An object whose ``__reduce__`` names the arguments of its class."""

    def __init__(self, size: int, name: str) -> None:
        self.size, self.name = size, name

    def __reduce__(self) -> tuple[object, ...]:
        return FromArguments, (self.size, self.name)


def test_an_object_that_its_class_makes_becomes_its_arguments() -> None:
    found = loaded(saved({"weight": torch.ones(2), "config": FromArguments(3, "small")}))
    assert found.value["config"] == (3, "small")


class DictOfAttributes(dict):  # type: ignore[type-arg]  # any items
    """A dict whose items are its attributes too, as many configs are."""

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self.__dict__ = self


def test_a_dict_whose_attributes_are_its_items() -> None:
    found = loaded(saved({"weight": torch.ones(2), "config": DictOfAttributes(lr=0.1)}))
    assert found.value["config"] == {"lr": 0.1}


# --- refusals --------------------------------------------------------------------------------------------------------


def filled(made: Call, **values: object) -> Call:
    for name, value in values.items():
        setattr(made, name, value)
    return made


def with_kwargs() -> Call:
    made = call("collections.OrderedDict")
    made.kwargs = dict_of(a=1)
    return made


REFUSED = [
    (call("library.compute"), "library.compute"),
    (call("library.compute", 1, 2), "library.compute"),
    (filled(call("library.Class", 1), state=dict_of(a=1)), "library.Class"),
    (filled(call("library.Items"), state=dict_of(a=1), appended=List([1], [-1])), "library.Items"),
    (filled(call("library.Items"), state=dict_of(a=1), assigned=dict_of(b=1)), "library.Items"),
    (Call(None, tuple_of(), -1), "a call"),
    (Call(call("a.B"), tuple_of(), -1), "a call"),
    (with_kwargs(), "collections.OrderedDict"),
    (Opaque("an out-of-band buffer"), "opaque"),
    (Persistent(tuple_of("other"), -1), "persistent"),
    (2**2040, "builtins.int"),
]


@pytest.mark.parametrize(("value", "name"), REFUSED, ids=range(len(REFUSED)))
def test_values_without_a_plain_form_are_refused(value, name) -> None:
    with pytest.raises(NotPlain) as refused:
        make_plain(dict_of(part=List([value], [-1])), Limits())
    assert [one[:2] for one in refused.value.objects] == [("part.0", name)]
    assert not refused.value.is_dangerous


def test_attributes_of_an_object_that_is_built_from_others_are_not_enough() -> None:
    made = call("library.Class", List([], []))
    made.state = dict_of(a=1)
    with pytest.raises(NotPlain):
        make_plain(made, Limits())


class Label(str):  # noqa: SLOT000  # it has attributes
    pass


def test_a_value_with_attributes_is_refused() -> None:
    label = Label("a")
    label.language = "en"
    with pytest.raises(NotPlain) as refused:
        loaded(saved([label]))
    assert [one[:2] for one in refused.value.objects] == [("0", f"{Label.__module__}.Label")]


def test_every_refused_object_is_named() -> None:
    objects = [call("library.compute") for _ in range(6)]
    with pytest.raises(NotPlain) as refused:
        make_plain(List(objects, [-1] * 6), Limits())
    assert [one[0] for one in refused.value.objects] == list("012345")
    assert "3 more" in str(refused.value)


class Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize("hide", [lambda value: value, Color, lambda value: argparse.Namespace(a=value)])
def test_dangerous_names_are_refused_wherever_they_are(hide) -> None:
    module = torch.nn.ReLU()
    module.lost = [Runs()] if hide is not Color else [os.system]
    for value in (module, {"a": [module]}):
        with pytest.raises(NotPlain) as refused:
            loaded(saved(value))
        assert refused.value.is_dangerous
        assert {one[1] for one in refused.value.objects} == {f"{os.name}.system"}
        assert all(one[0].endswith("lost.0") for one in refused.value.objects)


def test_keys_that_would_collide_or_cannot_be_hashed_are_refused() -> None:
    for value in ({Color.RED: 1, 1: 2}, {Anything(): 1}, {(Config, (Anything(),)): 1}):
        with pytest.raises(NotPlain) as refused:
            loaded(saved({"a": value}))
        assert [one[:2] for one in refused.value.objects] == [("a", "builtins.dict")]


def test_keys_that_take_forever_to_hash_are_refused() -> None:
    key: object = call("library.Leaf")
    for _ in range(64):
        key = tuple_of(key, key)
    with pytest.raises(NotPlain):
        make_plain(Dict([key, 1], [-1, -1]), Limits())


def test_equal_keys_of_the_source_are_no_collision() -> None:
    root = Dict([tuple_of(1), "a", tuple_of(1), "b"], [-1] * 4)
    assert make_plain(root, Limits()) == (root, ())


# --- pickles that torch does not write -------------------------------------------------------------------------------


def unpickled(data: bytes) -> object:
    root, _ = make_plain(interpret(data, Limits()).root, Limits())
    return torch._weights_only_unpickler.load(io.BytesIO(write_pickle(root)), encoding="utf-8")


def test_classes_of_a_legacy_stream() -> None:
    kind = Persistent(tuple_of("module", Global("library", "Net"), "net.py", "class Net: ..."), -1)
    made = Call(kind, tuple_of(), -1)
    made.state, made.state_start = dict_of(a=1), 0
    root, replaced = make_plain(List([made, kind], [-1, -1]), Limits())
    assert root.items[1] == "library.Net"
    assert replaced == (("0", "library.Net", "dict"), ("1", "library.Net", "str"))


def test_calls_of_protocol_0_and_of_old_classes() -> None:
    assert unpickled(b"(ilibrary\nOld\np0\n(dp1\nS'a'\nI1\nsb.") == {"a": 1}
    assert unpickled(b"(icollections\nOrderedDict\n.") == collections.OrderedDict()
    assert unpickled(b"\x80\x02ccopy_reg\n__newobj__\nclibrary\nPoint\nK\x01K\x02\x87R.") == (1, 2)


def test_arguments_by_name_are_refused() -> None:
    with pytest.raises(NotPlain):
        unpickled(b"\x80\x04\x8c\x07library\x8c\x05Point\x93)}\x8c\x01aK\x01s\x92.")


def test_text_of_python_2() -> None:
    assert unpickled(b"\x80\x02]q\x00(U\x02\xc3\xbcU\x01ae.") == ["ü", "a"]
    assert unpickled(b"\x80\x02}U\x02\xc3\xbcK\x01s.") == {"ü": 1}


def test_a_bare_atom() -> None:
    assert unpickled(pickle.dumps(b"ab", 4)) == b"ab"
    assert unpickled(pickle.dumps(5)) == 5


def test_arguments_in_a_list() -> None:
    root = Call(Global("collections", "OrderedDict"), List([List([], [])], [-1]), -1)
    assert make_plain(root, Limits()) == (root, ())


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.unmeasured
def test_deep_trees_and_long_chains() -> None:
    root, chain = call("library.Leaf"), "end"
    for _ in range(20_000):
        root = List([root], [-1])
        node = call("omegaconf.nodes.AnyNode")
        node.state, chain = dict_of(_val=chain), node
    found, replaced = make_plain(tuple_of(root, chain), Limits())
    assert found.items[1] == "end"
    assert len(replaced) == 20_001


def test_more_values_than_the_limits_allow_are_refused() -> None:
    with pytest.raises(LimitExceeded):
        make_plain(List([1] * 100, [-1] * 100), Limits()._replace(visits=99))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REJECTED)
def test_samples(name) -> None:
    path = SAMPLES / name
    original = torch.load(path, map_location="cpu", weights_only=False)
    found = loaded(path.read_bytes())
    expected = original.state_dict() if isinstance(original, torch.nn.Module) else original
    assert found.replaced
    assert list(found.value) == list(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found.value[key], value)
        elif isinstance(value, argparse.Namespace):
            assert found.value[key] == vars(value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.sampled_from([Color.RED, Color.GREEN, pathlib.PurePosixPath("a/b"), torch.float32]),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner)
    | st.dictionaries(st.from_regex("[a-z]+", fullmatch=True), inner).map(lambda values: Anything(**values)),
    max_leaves=12,
)  # fmt: skip


def simplified(value: object) -> object:
    if isinstance(value, Color):
        return value.value
    if isinstance(value, Anything):
        value = vars(value)
    if isinstance(value, dict):
        return {key: simplified(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(simplified, value))
    return str(value) if isinstance(value, pathlib.PurePath) else value


@given(VALUES, st.integers(2, 5))
def test_any_objects(value, protocol) -> None:
    assert unpickled(pickle.dumps(value, protocol)) == simplified(value)

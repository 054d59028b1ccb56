"""Trees that no training script writes: cycles, bombs, odd keys, and tensors with wrong arguments."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.checkpoint.inventory.build import build_inventory
from ckptmove.checkpoint.inventory.outline import outline
from ckptmove.checkpoint.inventory.walk import Walk
from ckptmove.errors import CkptMoveError, DamagedPickle, LimitExceeded
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.machine import interpret

HOOKS = b"ccollections\nOrderedDict\n)R"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def storage(kind: str = "FloatStorage", key: bytes = text("0"), device: bytes = text("cpu"), numel: int = 4) -> bytes:
    return tuple_of(text("storage"), f"ctorch\n{kind}\n".encode(), key, device, number(numel)) + b"Q"


def sizes(*values: int) -> bytes:
    return tuple_of(*map(number, values))


def call(name: str, *arguments: bytes) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode() + tuple_of(*arguments) + b"R"


def tensor(
    store: bytes | None = None, offset: bytes = b"K\x00", size: bytes = sizes(4), stride: bytes = sizes(1)
) -> bytes:
    return call("torch._utils._rebuild_tensor_v2", store or storage(), offset, size, stride, b"\x89", HOOKS)


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


# --- shapes of the tree ----------------------------------------------------------------------------------------------


def test_a_dict_inside_itself(read_pickle):
    inventory = read_pickle(pickled(b"}q\x00" + text("me") + b"h\x00s" + text("w") + tensor() + b"s"))
    assert [found.name for found in inventory.tensors] == ["w"]


def test_modules_and_lists_inside_themselves(inventory_of):
    module = torch.nn.Linear(2, 2)
    module.ring = [module]
    module.ring.append(module.ring)
    module.attribute_of_another = torch.nn.Linear(1, 1)
    inventory = inventory_of(module)
    names = ["weight", "bias", "attribute_of_another.weight", "attribute_of_another.bias"]
    assert sorted(found.name for found in inventory.tensors) == sorted(names)


def bomb(opening: bytes, closing: bytes, levels: int = 40) -> bytes:
    """A container in which each level contains the one below twice."""
    body = b"]q\x00"
    for level in range(1, levels + 1):
        before = b"h" + bytes([level - 1])
        body += b"0" + opening + before + before + closing + b"q" + bytes([level])
    return pickled(body)


@pytest.mark.unmeasured
@pytest.mark.parametrize(("opening", "closing"), [(b"](", b"e"), (b"(", b"t"), (b"(", b"l")])
def test_a_bomb_of_shared_containers_is_refused_soon(opening, closing, read_pickle):
    with pytest.raises(LimitExceeded, match="paths") as caught:
        read_pickle(bomb(opening, closing))
    assert caught.value.actual <= caught.value.limit + 2  # only the container itself


def test_a_web_of_objects_is_walked_once(read_pickle):
    body = b"capp\nNode\n)\x81q\x00"
    for level in range(1, 100):
        before = b"h" + bytes([level - 1])
        body += b"0capp\nNode\n)\x81q" + bytes([level]) + b"}(" + text("a") + before + text("b") + before + b"ub"
    assert read_pickle(pickled(body)).tensors == ()


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        (b"}K\x01", b"s"),
        (b"]", b"a"),
        (b"", b"\x85"),
        (b"capp\nf\n", b"\x85R"),
        (b"capp\nNode\n)\x81", b"b"),
        (b"ctorch._utils\n_rebuild_parameter\n", b"\x89N\x87R"),
    ],
)
@pytest.mark.parametrize("depth", [5, 20_000])
def test_depth(opening, closing, depth, read_pickle):
    data = pickled(opening * depth + b"N" + closing * depth)
    try:
        inventory = read_pickle(data)
    except (LimitExceeded, DamagedPickle):
        assert depth > 5 or b"parameter" in opening
    else:
        assert depth == 5
        assert inventory.tensors == ()


def test_long_keys_in_a_deep_tree_do_not_fill_the_memory(read_pickle):
    key = text("k" * 1_000_000) + b"q\x01"
    body = b"}" + key + b"}h\x01" * 5000 + b"N" + b"s" * 5001
    with pytest.raises(LimitExceeded, match="length"):
        read_pickle(pickled(body))


# --- keys ------------------------------------------------------------------------------------------------------------


def names_of(body, read_pickle):
    return [found.name for found in read_pickle(pickled(body)).tensors]


def test_the_last_of_equal_keys_counts_at_the_place_of_the_first(read_pickle):
    body = b"}(" + text("a") + tensor(storage(key=text("0"))) + text("b") + tensor() + text("a")
    inventory = read_pickle(pickled(body + tensor(storage(key=text("1"))) + b"u"))
    assert [(found.name, found.storage) for found in inventory.tensors] == [("a", "1"), ("b", "0")]


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ([number(1), b"\x88"], ["1"]),  # True equals 1, and the first of equal keys stays
        ([b"(K\x01K\x02t", b"(K\x01K\x02t"], ["(1, 2)"]),
        ([b"(K\x01)t", b"(K\x01)t"], ["(1)", "(1)"]),
        ([b"N"], ["None"]),
        ([b"G" + struct.pack(">d", math.nan), b"G" + struct.pack(">d", math.nan)], ["nan", "nan"]),
        ([b"C\x02\xff\x41"], ["\\xffA"]),
        ([number(2**100_000)], [hex(2**100_000)[:1000]]),
        ([b"ctorch\nfloat32\n"], ["torch.float32"]),
        ([call("_codecs.encode", text("abc"), text("latin1"))], ["abc"]),
        ([call("_codecs.encode")], ["<bytes>"]),
    ],
)
def test_keys_that_are_no_strings(keys, names, read_pickle):
    body = b"}(" + b"".join(key + tensor() for key in keys) + b"u"
    assert names_of(body, read_pickle) == names


def test_a_key_that_is_an_object(read_pickle):
    body = b"}(" + call("app.Key", tensor()) + tensor() + b"u"
    assert names_of(body, read_pickle) == ["<call>", "<call>.key.0"]


# --- objects ---------------------------------------------------------------------------------------------------------


def test_everything_that_an_object_is_given_is_looked_at(read_pickle):
    body = (
        b"capp\nC\n" + tuple_of(tensor()) + b"}" + text("kw") + tensor() + b"s\x92"  # arguments and keyword arguments
        b"(" + text("item") + tensor() + b"u" + tensor() + b"a"  # pairs and items
        b"}" + text("attribute") + tensor() + b"sb"
    )
    inventory = read_pickle(pickled(body))
    # An object with pairs is a dict; its other contents are added to it.
    assert [found.name for found in inventory.tensors] == ["item", "0", "0", "kw", "attribute"]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (call("app.C", tensor()) + tensor() + b"a", ["0", "0"]),
        (b"capp\nC\n" + tensor() + b"R", ["args"]),
        (call("app.C") + tensor() + b"b", ["state"]),
        (call("app.C") + tuple_of(tensor(), b"N") + b"b", ["0"]),
        (call("app.C") + tuple_of(b"N", b"}" + text("slot") + tensor() + b"s") + b"b", ["slot"]),
        (b"capp\nC\n)}" + text("kw") + tensor() + b"s\x92", ["kw"]),
        (call("app.make", tensor()) + b")R", ["func.0"]),
        (call("collections.Counter", b"}" + text("a") + tensor() + b"s"), ["a"]),
        (call("collections.OrderedDict", b"]" + tuple_of(text("a"), tensor()) + b"aNa"), ["a"]),
        (b"ccollections\nOrderedDict\nNR", []),
        (b"c__builtin__\nset\n](" + tensor() + b"e\x85R", ["0.0"]),
        (b"(" + tensor() + b"\x91", ["0"]),
        (text("stray") + b"Q", []),
        (b"ctorch\nfloat32\n", []),
    ],
)
def test_objects(body, names, read_pickle):
    assert names_of(body, read_pickle) == names


def test_an_optimizer_of_odd_groups_and_state(inventory_of):
    odd = {"state": {0: torch.ones(1), 1: {"a": [torch.ones(1)], "b": ["x"]}}, "param_groups": [3, {"params": 5}]}
    inventory = inventory_of(odd)
    (optimizer,) = inventory.optimizers
    assert [group.params for group in optimizer.groups] == [()]
    assert [(entry.key, [key for key, _ in entry.tensors]) for entry in optimizer.state] == [("1", ["a.0"])]
    assert [found.name for found in inventory.tensors] == ["state.0", "state.1.a.0"]
    assert inventory_of({"param_groups": 1, "state": {}}).optimizers == ()


# --- tensors ---------------------------------------------------------------------------------------------------------

HUGE = 2**62
MALFORMED = {
    "negative size": tensor(size=sizes(-1)),
    "text size": tensor(size=tuple_of(text("4"))),
    "bool size": tensor(size=tuple_of(b"\x88")),
    "no sizes": tensor(size=b"N"),
    "ranks differ": tensor(stride=sizes(1, 1)),
    "too large a product": tensor(size=sizes(HUGE, HUGE), stride=sizes(1, 1)),
    "too large for 64 bits": tensor(size=sizes(2**63)),
    "too many axes": tensor(size=sizes(*[1] * 2000), stride=sizes(*[1] * 2000)),
    "astronomic": tensor(size=b"(" + number(2**80_000) + b"q\x07" + b"h\x07" * 900 + b"t"),
    "negative offset": tensor(offset=number(-1)),
    "text offset": tensor(offset=text("0")),
    "no such storage class": tensor(storage(kind="StringStorage")),
    "negative numel": tensor(storage(numel=-1)),
    "astronomic numel": tensor(storage(numel=2**80_000)),
    "numel of too many bytes": tensor(storage(numel=HUGE)),
    "storage is text": tensor(text("0")),
    "pid is text": tensor(text("0") + b"Q"),
    "pid too short": tensor(tuple_of(text("storage"), b"ctorch\nFloatStorage\n") + b"Q"),
    "pid of a module": tensor(tuple_of(text("module"), b"NNNN") + b"Q"),
    "device is a number": tensor(storage(device=number(0))),
    "key is None": tensor(storage(key=b"N")),
    "key is negative": tensor(storage(key=number(-1))),
    "no arguments": b"ctorch._utils\n_rebuild_tensor_v2\n)R",
    "arguments are None": b"ctorch._utils\n_rebuild_tensor_v2\nNR",
    "too few arguments": call("torch._utils._rebuild_tensor_v2", storage(), b"K\x00"),
    "unknown dtype": call(
        "torch._utils._rebuild_tensor_v3", storage(), b"K\x00", sizes(4), sizes(1), b"\x89", HOOKS, b"ctorch\nint3\n"
    ),
    "parameter of nothing": call("torch._utils._rebuild_parameter", b"N", b"\x88", HOOKS),
    "no layout": call("torch._utils._rebuild_sparse_tensor", b"N", b"N"),
    "odd layout": call("torch._utils._rebuild_sparse_tensor", call("torch.serialization._get_layout", b"N"), b")"),
    "sparse without sizes": call(
        "torch._utils._rebuild_sparse_tensor",
        call("torch.serialization._get_layout", text("torch.sparse_coo")),
        tuple_of(tensor(), tensor()),
    ),
    "wrapper of no class": call("torch._utils._rebuild_wrapper_subclass", b"N", b"ctorch\nint8\n", b"))K\x00NN\x89"),
    "meta of negative size": call("torch._utils._rebuild_meta_tensor_no_storage", b"ctorch\nint8\n", sizes(-1), b")"),
    "wrapper of too many bytes": call(
        "torch._utils._rebuild_wrapper_subclass",
        b"capp\nT\n",
        b"ctorch\nint8\n",
        sizes(HUGE, 4),
        sizes(1, 1),
        b"K\x00",
        b"N",
        b"N",
        b"\x89",
    ),
    "device data without data": call(
        "torch._utils._rebuild_device_tensor_from_numpy", b"N", b"ctorch\nint8\n", text("xla:0"), b"\x89"
    ),
    "subclass of no arguments": call("torch._tensor._rebuild_from_type_v2", b"ctorch._utils\n_rebuild_tensor_v2\n"),
    "subclass of no class": call(
        "torch._tensor._rebuild_from_type_v2", b"ctorch._utils\n_rebuild_tensor_v2\n", b"N", b")", b"}"
    ),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_malformed_tensors_are_one_line(body, read_pickle):
    with pytest.raises(DamagedPickle, match="tensor 'w' ") as caught:
        read_pickle(pickled(b"}" + text("w") + body + b"s"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        call("torch._tensor._rebuild_from_type_v2"),
        b"ctorch._tensor\n_rebuild_from_type_v2\nNR",
        call("torch._tensor._rebuild_from_type_v2", b"capp\nrebuild\n", b"capp\nT\n", b")", b"}"),
    ],
)
def test_subclasses_that_nobody_knows_are_objects(body, read_pickle):
    assert read_pickle(pickled(body)).tensors == ()


@pytest.mark.parametrize("levels", [3, 40])
def test_a_part_may_not_have_parts(levels, read_pickle):
    layout = call("torch.serialization._get_layout", text("torch.sparse_coo"))
    body = tensor() + b"q\x00"
    for level in range(1, levels):
        before = b"h" + bytes([level - 1])
        body += b"0" + call("torch._utils._rebuild_sparse_tensor", layout, tuple_of(before, before, sizes(2, 2)))
        body += b"q" + bytes([level])
    with pytest.raises(DamagedPickle):
        read_pickle(pickled(b"]" + body + b"a"))


def test_sizes_of_zero_may_stand_beside_large_ones(read_pickle):
    (found,) = read_pickle(pickled(tensor(size=sizes(0, HUGE, HUGE), stride=sizes(1, 1, 1)))).tensors
    assert (found.nbytes, found.shape) == (0, (0, HUGE, HUGE))


def test_a_size_object_is_a_size(read_pickle):
    assert read_pickle(pickled(tensor(size=call("torch.Size", sizes(4))))).tensors[0].shape == (4,)


def test_keys_of_storages_may_be_numbers(read_pickle):
    assert read_pickle(pickled(tensor(storage(key=number(7))))).storages[0].key == "7"


@pytest.mark.parametrize(
    ("store", "offset", "size", "stride", "missing"),
    [
        (storage(numel=4), 0, (4,), (1,), None),
        (storage(numel=4), 1, (4,), (1,), 4),
        (storage(numel=4), 0, (2, 3), (3, 1), 8),
        (storage(numel=4), 0, (2, 2), (100, 1), 98 * 4),
        (storage(numel=4), 0, (100, 4), (0, 1), None),
        (storage(numel=0), 0, (0,), (1,), None),
        (storage(numel=0), 50, (0, 3), (3, 1), None),
        (storage(numel=0), 0, (), (), 4),
        (storage("DoubleStorage", numel=4), 4, (1,), (1,), 8),
        (storage("QUInt4x2Storage", numel=4), 0, (9,), (1,), 1),
        (storage("QUInt4x2Storage", numel=4), 0, (8,), (1,), None),
    ],
)
def test_a_tensor_that_reaches_past_its_storage(store, offset, size, stride, missing, read_pickle):
    body = tensor(store, number(offset), sizes(*size), sizes(*stride))
    inventory = read_pickle(pickled(b"}" + text("w") + body + b"s"))
    overruns = [(fact.record, fact.nbytes) for fact in inventory.facts if fact.kind == "short-storage"]
    assert overruns == ([] if missing is None else [("w", missing)])


def test_opcodes_that_weights_only_mode_lacks_are_named(read_pickle):
    assert read_pickle(b"\x80\x04\x95\x03\0\0\0\0\0\0\0N\x94.").foreign_opcodes == ("FRAME", "MEMOIZE")


@pytest.mark.parametrize(
    ("body", "classes"),
    [
        (b"capp\nD\n)\x81K\x01K\x02s", ("app.D",)),
        (b"capp\nD\n)\x81(K\x01K\x02u", ("app.D",)),
        (b"capp\nL\n)\x81K\x01a", ("app.L",)),
        (b"capp\nL\n)\x81(K\x01e", ("app.L",)),
        (b"c__builtin__\nset\n)RK\x01a", ("builtins.set",)),
        (b"ccollections\nOrderedDict\n)RK\x01K\x02s", ()),
        (b"ccollections\nCounter\n)RK\x01K\x02s", ()),
        (b"K\x05)RK\x01a", ()),
        (b"}K\x01K\x02s", ()),
        (b"]K\x01a", ()),
        (b"capp\nD\n)\x81", ()),
    ],
)
def test_classes_that_items_are_put_into_are_named(body, classes, read_pickle):
    assert read_pickle(pickled(body)).filled_classes == classes


LAYOUT = call("torch.serialization._get_layout", text("torch.sparse_coo"))
WHOLE = [
    tensor(),
    storage(),
    call("torch.device", text("cuda"), b"K\x01"),
    call("torch._utils._rebuild_parameter", tensor(), b"\x88", HOOKS),
    call("torch._utils._rebuild_sparse_tensor", LAYOUT, tuple_of(tensor(), tensor(), sizes(2, 2), b"\x88")),
    call("torch._tensor._rebuild_from_type_v2", b"ctorch._utils\n_rebuild_tensor_v2\n", b"capp\nT\n", b")", b"}"),
    b"}(" + text("state") + b"}K\x00}" + text("step") + tensor() + b"ss" + text("param_groups") + b"]}au",
]


@given(data=st.data())
def test_a_damaged_pickle_is_an_error_of_ours(data, tmp_path_factory):
    whole = bytearray(pickled(b"}(" + text("w") + tensor() + text("o") + data.draw(st.sampled_from(WHOLE)) + b"u"))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    limits = Limits(operations=10_000)
    try:
        machine = interpret(bytes(whole), limits)
        build_inventory(Bare(), machine, limits)
        outline(machine.root, limits, len(machine.data))
    except CkptMoveError:
        pass


class Bare:
    """A container of nothing but a pickle."""

    name = "pickle"
    torch_version = None
    producer = None
    has_devices = True
    is_script = has_code = False
    opened = frozenset()
    source = MemorySource("x", b"")
    limits = Limits()

    @staticmethod
    def locate(storages):
        return ()

    @staticmethod
    def strays():
        return ()

    @staticmethod
    def apart():
        return ()

    @staticmethod
    def object_pickle():
        return b""


def test_the_collector_is_as_it_was(inventory_of, tmp_path):
    import gc

    inventory_of({"w": torch.ones(1)})
    assert gc.isenabled()
    gc.disable()
    try:
        inventory_of({"w": torch.ones(1)})
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(DamagedPickle):
        inventory_of(BadTensor())
    assert gc.isenabled()


class BadTensor:
    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (1, 2, 3, 4)


def test_an_error_carries_the_path(tmp_path):
    path = tmp_path / "bad.pt"
    torch.save(BadTensor(), path)
    with pytest.raises(DamagedPickle) as caught, open_checkpoint(str(path)):
        pass
    assert caught.value.path == str(path)


def test_a_storage_class_of_another_module_is_none(read_pickle):
    # torch looks at the class's name alone; a conversion that casts would write the module again.
    with pytest.raises(DamagedPickle):
        read_pickle(pickled(tensor().replace(b"ctorch\nFloatStorage\n", b"cevil\nFloatStorage\n")))


def test_a_subclass_around_an_unknown_function_is_none(read_pickle):
    inner = tuple_of(b"cnobody\nknows\n", b"capp\nT\n", b")", b"}")
    outer = (b"ctorch._tensor\n_rebuild_from_type_v2\n", b"capp\nT\n", inner, b"}")
    with pytest.raises(DamagedPickle):
        read_pickle(pickled(call("torch._tensor._rebuild_from_type_v2", *outer)))


def generator_state(length: int) -> bytes:
    return tensor(storage("ByteStorage", numel=length), size=sizes(length))


@pytest.mark.parametrize(
    ("path", "value", "role"),
    [
        (("rng_state",), generator_state(5056), "rng"),
        (("sampler", "generator"), generator_state(5056), "rng"),
        (("model", "rng"), generator_state(16), "rng"),
        (("model", "mask"), generator_state(5056), "rng"),
        (("model", "mask"), generator_state(16), "model"),
        (("rng", "step"), tensor(size=sizes(), stride=sizes()), "other"),
        (("rng", "cast"), tensor(storage(numel=5056), size=sizes(5056)), "rng"),
        (("rng", "weight"), tensor(), "other"),
        (("seed_42", "layer.weight"), tensor(), "model"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_the_state_of_a_generator(path, value, role, read_pickle):
    body = value
    for key in reversed(path):
        body = b"}" + text(key) + body + b"s"
    [record] = read_pickle(pickled(body)).tensors
    assert record.role == role


def test_the_depth_of_a_tree_is_bounded():
    root = interpret(pickled(b"]" * 8 + b"a" * 7), Limits()).root
    Walk(Limits(depth=7), 100).run(root)
    with pytest.raises(LimitExceeded, match="depth"):
        Walk(Limits(depth=6), 100).run(root)

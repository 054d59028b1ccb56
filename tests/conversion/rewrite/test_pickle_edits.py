from __future__ import annotations

import argparse
import io
import itertools
import pickle
import zipfile
from collections import OrderedDict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import UneditablePickle
from ckptmove.limits import Limits
from ckptmove.model import Mention
from ckptmove.moves import FlagEdit, MovePlan, MoveRequest, StorageEdit
from ckptmove.pickles.edits import apply_plan
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import WEIGHTS_ONLY_OPCODES, operations
from ckptmove.pickles.tree import Dict, Global, Persistent, Sequence
from ckptmove.torch_facts.dtypes import STORAGE_DTYPE

CPU = "cpu"  # the constant that torch's ``_cpu_tag`` hands out for every storage
CUDA = "cuda:3"
WORDS = [CPU, CUDA, "weight", "bias", "", "it's \\ \n \x1a \0 \u00e9 \u20ac", "x" * 300]
FRAME = 0x95
NEW_WORDS = ["cuda:0", "cpu", "mps", "\u20ac\\u\n", "y" * 300]


class Storage:
    def __init__(self, kind, tag):
        self.kind = kind
        self.tag = tag


def pickled(value, protocol, pickler=pickle.Pickler):
    """As ``torch.save`` writes it: storages become persistent ids."""

    class Saver(pickler):
        def persistent_id(self, item):
            return ("storage", item.kind, "0", item.tag, 4) if isinstance(item, Storage) else None

    buffer = io.BytesIO()
    Saver(buffer, protocol).dump(value)
    return buffer.getvalue()


def loaded(data):
    class Loader(pickle.Unpickler):
        def find_class(self, module, name):
            return ("global", module, name)

        def persistent_load(self, pid):
            return ("persistent", pid)

    return Loader(io.BytesIO(data)).load()


def evaluated(value, start, values):
    """The object of a tree, with other values at some sites; equal to :func:`loaded` of its bytes."""
    value = values.get(start, value)
    if isinstance(value, Global):
        return ("global", value.module, value.name)
    if isinstance(value, Persistent):
        return ("persistent", evaluated(value.pid, value.pid_start, values))
    if isinstance(value, Sequence):
        items = [evaluated(*pair, values) for pair in zip(value.items, value.starts, strict=True)]
        return items if type(value).__name__ == "List" else tuple(items)
    if isinstance(value, Dict):
        flat = [evaluated(*pair, values) for pair in zip(value.flat, value.starts, strict=True)]
        return dict(zip(flat[::2], flat[1::2], strict=True))
    return value


def sites(value, start, found):
    """Every place of a string, a global or a boolean."""
    if isinstance(value, (str, Global, bool)):
        found[start] = value
    elif isinstance(value, Persistent):
        sites(value.pid, value.pid_start, found)
    elif isinstance(value, (Sequence, Dict)):
        items = value.items if isinstance(value, Sequence) else value.flat
        for pair in zip(items, value.starts, strict=True):
            sites(*pair, found)
    return found


def interpreted(data, begin=0):
    return interpret(data, Limits(), begin)


def edited_at(machine, values):
    """Carry out a plan that asks for these values, by site: strings, storage classes and flags."""
    edits, flags = [], []
    for site, value in values.items():
        if isinstance(value, bool):
            flags.append(FlagEdit("flag", str(not value), str(value), "group-flag", None, site))
        elif isinstance(value, Global):
            edits.append(storage_edit((), cast=("any", STORAGE_DTYPE[value.name]), classes=[site]))
        else:
            mention = Mention("string", "string", "", site)
            flags.append(FlagEdit("string", "", value, "device-mention", mention))
    return apply_plan(machine, plan(*edits, flags=tuple(flags)))


def plan(*edits, flags=()):
    return MovePlan(request=MoveRequest(to="cpu"), edits=edits, flags=flags)


def storage_edit(sites_, target="cpu", *, source="any", cast=None, classes=()):
    return StorageEdit("0", ("w",), source, target, 8, "target", cast, tuple(sites_), tuple(classes))


def opcodes(data, begin=0):
    return {code for _, _, code in operations(data, begin)}


CONSTANTS = st.sampled_from(WORDS)
STORAGES = st.builds(Storage, st.sampled_from([OrderedDict, deque]), st.sampled_from([CPU, CUDA]))
LEAVES = CONSTANTS | st.booleans() | st.integers(0, 70_000) | STORAGES | st.sampled_from([OrderedDict, deque])


def nested(inner):
    return (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(CONSTANTS, inner, max_size=4)
        | inner.map(lambda item: [item, item])
    )


GRAPHS = st.recursive(LEAVES, nested, max_leaves=30).map(lambda graph: [graph])
PICKLERS = st.sampled_from([pickle.Pickler, pickle._Pickler])
PROTOCOLS = st.integers(1, pickle.HIGHEST_PROTOCOL)  # protocol 0 has no tuples as persistent ids


@st.composite
def chosen(draw, machine):
    values = {}
    shared = {start for one in machine.reread.values() for start in one.starts}
    for site, value in sites(machine.root, -1, {}).items():
        if draw(st.booleans()) and not (isinstance(value, Global) and site in shared):
            if isinstance(value, bool):
                values[site] = draw(st.booleans())
            elif isinstance(value, str):
                values[site] = draw(st.sampled_from(NEW_WORDS))
            else:
                values[site] = Global(value.module, draw(st.sampled_from(["FloatStorage", "ComplexFloatStorage"])))
    return values


@given(GRAPHS, PROTOCOLS, PICKLERS, st.data(), st.binary(max_size=3), st.binary(max_size=3))
def test_the_chosen_readers_change_and_nothing_else(graph, protocol, pickler, data, before, after):
    source = before + pickled(graph, protocol, pickler) + after
    machine = interpreted(source, len(before))
    values = data.draw(chosen(machine))
    assert evaluated(machine.root, -1, {}) == loaded(source[len(before) :])

    edited = edited_at(machine, values)
    assert edited[: len(before)] == before
    assert edited[interpreted(edited, len(before)).end :] == after
    expected = evaluated(machine.root, -1, values)
    assert loaded(edited[len(before) :]) == expected
    again = interpreted(edited, len(before))
    assert evaluated(again.root, -1, {}) == expected
    if opcodes(source, len(before)) <= WEIGHTS_ONLY_OPCODES:
        assert opcodes(edited, len(before)) <= WEIGHTS_ONLY_OPCODES


@given(st.recursive(CONSTANTS | st.booleans(), nested, max_leaves=20).map(lambda graph: [graph]), PICKLERS, st.data())
def test_the_chosen_readers_change_in_protocol_0(graph, pickler, data):
    source = pickled(graph, 0, pickler)
    machine = interpreted(source)
    values = data.draw(chosen(machine))
    assert loaded(edited_at(machine, values)) == evaluated(machine.root, -1, values)


@given(GRAPHS, PROTOCOLS, PICKLERS)
def test_bytes_outside_of_the_edited_operations_are_the_same(graph, protocol, pickler):
    source = pickled(graph, protocol, pickler)
    machine = interpreted(source)
    values = {site: "mps" for site, value in sites(machine.root, -1, {}).items() if value in ("cpu", CUDA)}
    edited = edited_at(machine, values)
    pairs = zip(machine.reads[::2], machine.reads[1::2], strict=True)
    touched = set(values) | {read for read, definition in pairs if definition in values}
    before, after = list(operations(source)), list(operations(edited))
    assert len(before) == len(after)
    for (start, end, code), (new_start, new_end, _) in zip(before, after, strict=True):
        if start not in touched and code != FRAME:
            assert edited[new_start:new_end] == source[start:end]


@given(st.lists(st.sampled_from([OrderedDict, deque]), max_size=5), PROTOCOLS, PICKLERS)
def test_there_and_back_is_the_same_where_nothing_was_shared(kinds, protocol, pickler):
    """Each storage has a tag of its own, as ``torch.save`` writes them for accelerators."""
    graph = {f"w{index}": Storage(kind, "cuda" + ":3") for index, kind in enumerate(kinds)} | {"device": "cuda:0"}
    source = pickled(graph, protocol, pickler)

    def moved(data, before, after):
        machine = interpreted(data)
        tags = [value.pid.starts[3] for _, value, _ in machine.root.pairs() if isinstance(value, Persistent)]
        found = sites(machine.root, -1, {})
        return edited_at(machine, {site: after for site in tags if found[site] == before})

    there = moved(source, "cuda:3", "cpu")
    assert (there == source) is (not kinds)
    assert moved(there, "cpu", "cuda:3") == source


# --- the memo trap, by hand ------------------------------------------------------------------------------------------


def sites_of(machine, word):
    return sorted(site for site, value in sites(machine.root, -1, {}).items() if value == word)


@pytest.mark.parametrize("protocol", range(6))
def test_a_literal_can_change_for_its_consumer_alone(protocol):
    source = pickle.dumps([CPU, CPU, CPU], protocol)
    machine = interpreted(source)
    literal, *_ = sites_of(machine, CPU)
    assert pickle.loads(edited_at(machine, {literal: "mps"})) == ["mps", "cpu", "cpu"]


@pytest.mark.parametrize("protocol", range(6))
def test_a_reader_can_change_alone(protocol):
    source = pickle.dumps([CPU, CPU, CPU], protocol)
    machine = interpreted(source)
    _, second, _ = sites_of(machine, CPU)
    assert pickle.loads(edited_at(machine, {second: "mps"})) == ["cpu", "mps", "cpu"]


def test_readers_that_change_with_their_literal_stay_readers():
    source = pickle.dumps([CPU, CPU, CPU], 2)
    machine = interpreted(source)
    edited = edited_at(machine, dict.fromkeys(sites_of(machine, CPU), "mps"))
    assert edited == source.replace(b"cpu", b"mps")
    equal = {site: str(bytearray(b"mps"), "ascii") for site in sites_of(machine, CPU)}  # equal, and not one object
    assert edited_at(machine, equal) == edited


def test_a_value_that_is_there_already_changes_nothing():
    source = pickle.dumps([CPU, CPU, True], 2)
    machine = interpreted(source)
    first, second = sites_of(machine, CPU)
    assert edited_at(machine, {first: "cpu", machine.root.starts[2]: True}) == source
    assert edited_at(machine, {second: "cpu"}) == source


def test_a_reader_that_is_memoised_itself_defines_for_those_after_it():
    source = b"\x80\x02](X\x03\x00\x00\x00cpuq\x01h\x01q\x02h\x02h\x01e."
    machine = interpreted(source)
    first, second, third, fourth = machine.root.starts
    assert loaded(source) == ["cpu"] * 4
    assert loaded(edited_at(machine, {second: "mps"})) == ["cpu", "mps", "cpu", "cpu"]
    assert loaded(edited_at(machine, {second: "mps", third: "mps"})) == ["cpu", "mps", "mps", "cpu"]
    assert loaded(edited_at(machine, {first: "mps"})) == ["mps", "cpu", "cpu", "cpu"]
    assert loaded(edited_at(machine, {first: "mps", fourth: "mps"})) == ["mps", "cpu", "cpu", "mps"]


def test_a_duplicate_is_a_reader_too():
    source = b"\x80\x02](X\x03\x00\x00\x00cpu2\x882e."
    machine = interpreted(source)
    first, second, third, fourth = machine.root.starts
    assert loaded(source) == ["cpu", "cpu", True, True]
    assert loaded(edited_at(machine, {first: "mps", third: False})) == ["mps", "cpu", False, True]
    assert loaded(edited_at(machine, {second: "mps", fourth: False})) == ["cpu", "mps", True, False]


@pytest.mark.parametrize("head", [b"U\x03cpu", b"T\x03\x00\x00\x00cpu", b"S'cpu'\n", b"Vcpu\n", b"\x8c\x03cpu"])
def test_a_literal_keeps_its_style(head):
    source = b"\x80\x02](" + head + b"q\x01h\x01e."
    machine = interpreted(source)
    first, second = machine.root.starts
    edited = edited_at(machine, {first: "cuda:0"})
    assert loaded(edited) == ["cuda:0", "cpu"]
    assert edited[4:5] == head[:1]
    assert loaded(edited_at(machine, {second: "\u00e9\n'"})) == ["cpu", "\u00e9\n'"]
    assert edited_at(interpreted(edited), {first: "cpu"}) == source.replace(b"h\x01", head)


def test_the_longest_form_of_a_string_stays():
    source = b"\x80\x04\x8d\x03\x00\x00\x00\x00\x00\x00\x00cpu."
    edited = edited_at(interpreted(source), {2: "cuda"})
    assert edited == b"\x80\x04\x8d\x04\x00\x00\x00\x00\x00\x00\x00cuda."


def test_a_frame_that_grows_says_so():
    source = pickle.dumps(["cpu", "x" * 70_000, "cpu!", b"z"], 4)
    machine = interpreted(source)
    assert len(machine.frames) > 1
    edited = edited_at(machine, {machine.root.starts[0]: "cuda:0", machine.root.starts[2]: "c"})
    assert pickle._loads(edited) == ["cuda:0", "x" * 70_000, "c", b"z"]  # the one in Python checks the frames


@pytest.mark.parametrize(
    ("source", "site", "value"),
    [
        (b"\x80\x02N.", 2, "cpu"),
        (b"\x80\x02).", 2, "cpu"),
        (b"\x80\x02X\x03\x00\x00\x00cpu.", 2, True),
        (b"\x80\x02](X\x03\x00\x00\x00cpuq\x01h\x01e.", 14, True),
        (b"\x80\x02\x88q\x01.", 2, False),
    ],
)
def test_what_no_pickler_writes_is_left_alone(source, site, value):
    with pytest.raises(UneditablePickle) as caught:
        edited_at(interpreted(source), {site: value})
    assert caught.value.offset == site


@pytest.mark.parametrize("memoised", [b"", b"\x94", b"q\x00K\x01q\x00"])
def test_a_global_of_two_strings_is_another_one_memoised_or_not(memoised):
    source = b"\x80\x04](\x8c\x01a\x8c\x01b\x93%be." % memoised
    edited = edited_at(interpreted(source), {10: Global("a", "FloatStorage")})
    assert edited == source.replace(b"\x93", b"\x930ca\nFloatStorage\n")


def test_offsets_count_from_the_start_of_the_pickle():
    with pytest.raises(UneditablePickle) as caught:
        edited_at(interpreted(b"headN.", 4), {4: "cpu"})
    assert caught.value.offset == 0


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_cast_changes_the_class_inside_its_module(protocol):
    from torch import DoubleStorage, FloatStorage

    source = pickled([Storage(DoubleStorage, CPU), Storage(DoubleStorage, CPU), DoubleStorage], protocol)
    machine = interpreted(source)
    first, second, _ = machine.root.items
    module = "torch" if protocol == 2 else DoubleStorage.__module__
    assert module == FloatStorage.__module__
    classes = [first.pid.starts[1], second.pid.starts[1]]
    for some in (classes, classes[1:]):
        edited = apply_plan(
            machine, plan(storage_edit((), "cpu", source="cpu", cast=("float64", "float32"), classes=some))
        )
        kinds = [item[1][1] for item in loaded(edited)[:2]]
        expected = ["Double", "Float"] if len(some) == 1 else ["Float", "Float"]
        assert kinds == [("global", module, f"{name}Storage") for name in expected]
        assert loaded(edited)[2] == ("global", module, "DoubleStorage")


def test_a_cast_needs_a_global():
    machine = interpreted(pickle.dumps("DoubleStorage", 2))
    with pytest.raises(UneditablePickle, match="not a global"):
        apply_plan(machine, plan(storage_edit((), "cpu", source="cpu", cast=("float64", "float32"), classes=(2,))))


def test_flags_and_strings_change_in_place():
    for protocol in range(6):
        machine = interpreted(pickle.dumps({"capturable": True, "fused": True, "device": "cuda:3"}, protocol))
        capturable, _, device = machine.root.starts[1::2]
        text = FlagEdit("device", "cuda:3", "cpu", "device-mention", Mention("device", "string", "cuda:3", device))
        edits = plan(flags=(FlagEdit("capturable", "True", "False", "group-flag", None, capturable), text))
        assert pickle.loads(apply_plan(machine, edits)) == {"capturable": False, "fused": True, "device": "cpu"}


def test_a_change_without_a_place_is_refused():
    machine = interpreted(pickle.dumps(True, 2))
    with pytest.raises(UneditablePickle, match="capturable"):
        apply_plan(machine, plan(flags=(FlagEdit("capturable", "True", "False", "group-flag"),)))


def test_one_place_cannot_get_two_values():
    machine = interpreted(pickle.dumps("cuda:3", 2))
    assert pickle.loads(apply_plan(machine, plan(storage_edit((2,)), storage_edit((2,))))) == "cpu"
    with pytest.raises(UneditablePickle, match="two uses"):
        apply_plan(machine, plan(storage_edit((2,)), storage_edit((2,), "mps")))


@pytest.mark.parametrize("again", [b"q\x01Qh\x01\x86.", b"2Q\x86."])
def test_a_persistent_id_with_another_reader_is_left_alone(again):
    # The tuple has other uses too: for example, as the key of a dict.
    machine = interpreted(b"\x80\x02(Vstorage\nctorch\nDoubleStorage\nV0\nVcuda:0\nK\x04t" + again)
    (node,) = machine.persistents
    _, kind, _, tag, _ = node.pid.starts
    for edit in (storage_edit([tag]), storage_edit([], "any", cast=("float64", "float32"), classes=[kind])):
        with pytest.raises(UneditablePickle, match="another use"):
            apply_plan(machine, plan(edit))


# --- torch.device ----------------------------------------------------------------------------------------------------


def device_mention(machine, call):
    starts = call.args.starts
    index = starts[1] if len(starts) > 1 else None
    return Mention("device", "torch.device", "", starts[0], index, call.args_start)


def with_device(machine, call, target):
    mention = device_mention(machine, call)
    return apply_plan(machine, plan(flags=(FlagEdit("device", "", target, "device-mention", mention),)))


@pytest.mark.parametrize("protocol", range(6))
def test_a_device_object_becomes_another(protocol):
    import torch

    for source, target in itertools.product(
        ["cpu", "cuda", "cuda:0", "cuda:3", "mps", "mps:0"], ["cpu", "cuda:0", "cuda:1", "mps"]
    ):
        data = pickle.dumps(torch.device(source), protocol)
        machine = interpreted(data)
        edited = with_device(machine, machine.root, target)
        assert edited == pickle.dumps(torch.device(target), protocol), source
        again = interpreted(edited)
        assert with_device(again, again.root, source) == data, target


@pytest.mark.parametrize(("index", "written"), [(255, b"K\xff"), (256, b"M\x00\x01"), (70_000, b"J\x70\x11\x01\x00")])
def test_an_index_takes_the_shortest_form(index, written):
    source = b"\x80\x02ctorch\ndevice\nX\x04\x00\x00\x00cudaK\x03\x86R."
    machine = interpreted(source)
    assert with_device(machine, machine.root, f"cuda:{index}") == source.replace(b"K\x03", written)


def test_an_index_of_protocol_0_may_be_long():
    source = b"ctorch\ndevice\n(Vcuda\nL3L\ntR."
    machine = interpreted(source)
    assert with_device(machine, machine.root, "cuda:1") == source.replace(b"L3L", b"L1L")


HEAD = b"\x80\x02ctorch\ndevice\nX\x04\x00\x00\x00cuda"


@pytest.mark.parametrize(
    ("body", "target", "why"),
    [
        (b"K\x03q\x01\x86R.", "cpu", "another use"),
        (b"K\x03q\x01\x86R.", "cuda:1", "memoised"),
        (b"K\x03\x86q\x010h\x01R.", "cpu", "another use"),
        (b"\x85q\x010h\x01R.", "cuda:1", "another use"),
    ],
)
def test_device_arguments_with_another_use_are_left_alone(body, target, why):
    machine = interpreted(HEAD + body)
    with pytest.raises(UneditablePickle, match=why):
        with_device(machine, machine.root, target)


def test_a_device_without_the_place_of_its_arguments_gets_no_index():
    machine = interpreted(HEAD + b"\x85R.")
    mention = Mention("device", "torch.device", "cuda", machine.root.args.starts[0])
    with pytest.raises(UneditablePickle, match="in place"):
        apply_plan(machine, plan(flags=(FlagEdit("device", "cuda", "cuda:1", "device-mention", mention),)))


# --- compared with torch ---------------------------------------------------------------------------------------------


def replaced_pickle(path, new):
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, new if name.endswith("/data.pkl") else data)


def test_torch_reads_another_tag_and_the_same_namespace(tmp_path):
    import torch
    from torch import serialization

    tags_of = (tagger(torch.zeros(1).untyped_storage()) for _, tagger, _ in serialization._package_registry)
    tag = next(tag for tag in tags_of if tag is not None)  # the very string that torch.save writes for each storage
    path = tmp_path / "model.pt"
    args = argparse.Namespace(device=tag)
    torch.save({"args": args, "w": torch.arange(3.0), "b": torch.ones(2), "again": tag}, path)
    with zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        machine = interpreted(archive.read(name))
    pids = [value.args.items[0].pid for _, value, _ in machine.root.pairs() if hasattr(value, "args_start") and
            value.name == "torch._utils._rebuild_tensor_v2"]  # fmt: skip
    tags = [pid.starts[3] for pid in pids]
    assert len(tags) == 2
    assert set(machine.reads[::2]) & set(tags), "the tag is shared with the Namespace"

    edited = apply_plan(machine, plan(storage_edit(tags, "cuda:5", source="cpu")))
    replaced_pickle(path, edited)
    seen = []

    def record(storage, location):
        seen.append(location)
        return storage

    found = torch.load(path, map_location=record, weights_only=False)
    assert set(seen) == {"cuda:5"}
    assert (found["args"].device, found["again"]) == ("cpu", "cpu")
    assert torch.equal(found["w"], torch.arange(3.0))
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(path, map_location="cpu", weights_only=True)["args"].device == "cpu"

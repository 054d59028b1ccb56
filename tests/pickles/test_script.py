"""Several pickles, read as one tree."""

from __future__ import annotations

import pytest

from ckptmove.errors import DamagedPickle
from ckptmove.limits import Limits
from ckptmove.model import Span
from ckptmove.pickles.script import PicklePart, interpret_parts, split_parts
from ckptmove.pickles.tree import Call, Dict

MODULE = b"\x80\x02c__torch__\nM\n)\x81}X\x01\x00\x00\x00aK\x01sb."
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"


def read(*pickles, folder="constants/", attribute="CONSTANTS"):
    parts, end = [], 0
    for index, pickle in enumerate(pickles):
        names = (folder, attribute) if index else ("", "")
        parts.append(PicklePart(Span(end, end + len(pickle)), f"part{index}", *names))
        end += len(pickle)
    return interpret_parts(b"".join(pickles), parts, Limits())


def keys(machine):
    return [node.pid.items[2] for node in machine.persistents]


def test_the_others_hang_on_the_object_of_the_first():
    root = read(MODULE, b"\x80\x02K\x07K\x08\x86.").root
    assert type(root) is Call
    assert root.name == "__torch__.M"
    assert list(root.state.keys()) == ["a", "CONSTANTS"]
    pairs = root.state.get("CONSTANTS").pairs()
    assert list(pairs) == [("c0", 7, len(MODULE) + 2), ("c1", 8, len(MODULE) + 4)]


@pytest.mark.parametrize("more", [b"\x80\x02).", b"\x80\x02K\x01."])
def test_where_nothing_is_to_hang_the_object_is_as_it_is(more):
    assert list(read(MODULE, more).root.state.keys()) == ["a"]


@pytest.mark.parametrize("first", [b"\x80\x02K\x01.", b"\x80\x02c__torch__\nM\n)\x81K\x01\x85b."])
def test_an_object_without_a_dict_stands_beside_them(first):
    root = read(first, b"\x80\x02K\x07\x85.").root
    assert type(root) is Dict
    assert list(root.keys()) == ["data", "CONSTANTS"]


def test_keys_of_storages_are_led_by_their_folder():
    pickle = b"\x80\x02" + STORAGE + b"."
    assert keys(read(pickle, pickle)) == ["0", "constants/0"]


@pytest.mark.parametrize("pid", [b"K\x01Q", b"K\x01\x85Q", b"K\x01K\x02K\x03\x87Q"])
def test_what_is_no_key_stays(pid):
    machine = read(MODULE, b"\x80\x02" + pid + b".")
    node = machine.persistents[0]
    assert node.pid == 1 or node.pid.items in {(1,), (1, 2, 3)}


def test_starts_count_from_the_first_byte_of_all():
    pickle = b"\x80\x02" + STORAGE + b"."
    machine = read(pickle, pickle)
    first, second = (node.pid.starts[3] for node in machine.persistents)
    assert second - first == len(pickle)
    assert machine.data[second : second + 8] == b"X\x03\x00\x00\x00cpu"


def test_memos_are_apart_and_what_they_hold_is_told():
    machine = read(
        b"\x80\x04\x8c\x02os\x8c\x01a\x93\x940h\x00.",
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x01b\x93\x940h\x00.",
    )
    assert {start: value.full_name for start, value in machine.stacked.items()} == {9: "os.a", 33: "os.b"}
    assert list(machine.globals) == ["os.a", "os.b"]
    assert list(machine.reads) == [12, 9, 36, 33]
    assert len(machine.frames) == 1
    assert 0x94 in machine.foreign
    with pytest.raises(DamagedPickle, match=r"memo .* part1"):
        read(b"\x80\x02K\x01q\x00.", b"\x80\x02h\x00.")


@pytest.mark.parametrize(
    ("second", "message"),
    [(b"\x80\x02", "in part1 at byte 2"), (b"\x80\x02N.N.", "bytes after STOP in part1 at byte 4")],
)
def test_damage_is_told_with_the_name_of_the_part(second, message):
    with pytest.raises(DamagedPickle, match=message):
        read(MODULE, second)


def test_a_row_of_pickles_is_taken_apart():
    assert split_parts(MODULE + b"N." + b"K\x01.", 3) == (MODULE, b"N.", b"K\x01.")
    assert split_parts(MODULE, 1) == (MODULE,)
    with pytest.raises(DamagedPickle):
        split_parts(b"NN", 2)

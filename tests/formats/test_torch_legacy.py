"""Streams that are cut off, inconsistent or incomplete: their errors, and that torch agrees."""

from __future__ import annotations

import io
import os
import pickle
import struct
from contextlib import closing, suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_containers import open_container

import ckptmove
from ckptmove.errors import CkptMoveError, DamagedArchive, DamagedPickle, LimitExceeded
from ckptmove.formats.torch_legacy import TorchLegacy
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint

MAGIC = 0x1950A86A20F9469CFC6C
STATE = {"a.weight": torch.arange(50.0), "a.bias": torch.ones(3, dtype=torch.float64)}


def saved(state=STATE, **options):
    stream = io.BytesIO()
    torch.save(state, stream, _use_new_zipfile_serialization=False, **options)
    return stream.getvalue()


class Anything:
    """Replaces every class and function of a pickle."""

    def __init__(self, *arguments):
        pass


class Passing(pickle.Unpickler):
    """Python's own reader, which calls nothing."""

    def find_class(self, module, name):
        return Anything

    def persistent_load(self, pid):
        pass


def parts(data):
    """The five pickles, the counts and the bytes of the storages by key."""
    stream = io.BytesIO(data)
    ends = [0]
    for _ in range(3):
        pickle.load(stream)
        ends.append(stream.tell())

    Passing(stream).load()
    ends.append(stream.tell())
    keys = pickle.load(stream)
    ends.append(stream.tell())
    return [data[begin:end] for begin, end in pairwise(ends)], keys, data[ends[-1] :]


@pytest.fixture
def facts_of(tmp_path):
    def read(data, limits=None):
        (tmp_path / "x.pth").write_bytes(data)
        with open_checkpoint(str(tmp_path / "x.pth"), limits) as checkpoint:
            return [(fact.kind, fact.record, fact.nbytes) for fact in checkpoint.inventory.facts]

    return read


@pytest.fixture
def refused_by_torch(tmp_path):
    def is_refused(data):
        (tmp_path / "t.pth").write_bytes(data)
        try:
            torch.load(tmp_path / "t.pth", weights_only=True)
        except (RuntimeError, AssertionError, EOFError, pickle.UnpicklingError, IndexError, struct.error):
            return True
        return False

    return is_refused


def test_a_sound_stream_has_no_facts(facts_of):
    assert facts_of(saved()) == []
    assert facts_of(saved({})) == []


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.parametrize("protocol", [1, 2, 4])
def test_cut_off_anywhere(tmp_path, facts_of, refused_by_torch, protocol):
    data = saved(pickle_protocol=protocol)
    heads, keys, storages = parts(data)
    begin = sum(map(len, heads))
    ends = begin + 8 + (200 if len(storages) and storages[0] == 50 else 24)
    for length in range(30, len(data)):
        if protocol == 2:
            assert refused_by_torch(data[:length])
        if length < begin:
            with pytest.raises((DamagedArchive, DamagedPickle)):
                facts_of(data[:length])
            continue
        facts = facts_of(data[:length])
        assert {kind for kind, _, _ in facts} == {"past-end"}
        assert [record for _, record, _ in facts] == (keys if length < ends else keys[1:])
        with pytest.raises(DamagedArchive, match=f"storage '{facts[0][1]}'"):
            ckptmove.convert(str(tmp_path / "x.pth"), to="cuda:0", output=str(tmp_path / "y.pth"))
        assert not (tmp_path / "y.pth").exists()


def test_bytes_that_are_missing_are_counted(facts_of):
    data = saved({"w": torch.arange(50.0)})
    _, (key,), _ = parts(data)
    assert facts_of(data[:-1]) == [("past-end", key, 1)]
    assert facts_of(data[:-200]) == [("past-end", key, 200)]
    assert facts_of(data[:-201]) == [("past-end", key, 200)]
    assert facts_of(data[:-208]) == [("past-end", key, 200)]


def test_what_is_cut_off_is_a_finding(tmp_path):
    (tmp_path / "x.pth").write_bytes(saved()[:-1])
    (finding,) = ckptmove.inspect(str(tmp_path / "x.pth")).findings
    assert (finding.code, finding.where) in {("F802", ("a.weight",)), ("F802", ("a.bias",))}
    with pytest.raises(DamagedArchive, match="ends before the end of storage"):
        ckptmove.convert(tmp_path / "x.pth", to="cuda:0", output=tmp_path / "y.pth")


def test_bytes_behind_the_last_storage(tmp_path, facts_of):
    facts = facts_of(saved() + b"more")
    assert facts == [("orphan-record", "bytes after the last storage", 4)]
    (finding,) = ckptmove.inspect(str(tmp_path / "x.pth")).findings
    assert (finding.code, finding.where) == ("F804", (facts[0][1],))
    assert "4 bytes in 1 record" in finding.message
    assert set(torch.load(tmp_path / "x.pth", weights_only=True)) == set(STATE)


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, kept=None):
        self.kept = kept

    def __reduce__(self):
        return os.system, ("true",)


class Magic:
    """Becomes torch's magic number when it is unpickled."""

    def __reduce__(self):
        return int, (str(MAGIC),)


def made(stream):
    """A stream whose magic number a call makes."""
    return pickle.dumps(Magic(), 2) + stream[stream.index(b".") + 1 :]


@pytest.mark.parametrize(
    ("behind", "is_found"),
    [
        (saved(Runs()), True),
        (saved() + saved({}) + saved({"w": torch.ones(2), "x": Runs()}), True),
        (saved() + pickle.dumps(3, 2) + pickle.dumps(Runs(), 2), True),
        (saved(Runs())[:-20], True),
        (made(saved({"x": Runs()})), True),
        (saved() + made(saved()) + pickle.dumps(Runs(), 2), True),
        (pickle.dumps(MAGIC, 2) + pickle.dumps(Runs(), 2), True),
        (b"\x80\x02cposix\nsystem\n(X\x04\0\0\0truetR", True),
        (saved() + saved({}), False),
        (saved()[:-20], False),
        (pickle.dumps([1, 2], 2), False),
        (pickle.dumps(MAGIC, 2), False),
        (bytes(64), False),
    ],
)
def test_names_behind_the_last_storage_are_found(tmp_path, behind, is_found):
    (tmp_path / "x.pth").write_bytes(saved() + behind)
    found = ckptmove.inspect(str(tmp_path / "x.pth"))
    assert {one.code for one in found.findings} == ({"S701", "S702", "F804"} if is_found else {"F804"})
    assert [one.name for one in found.inventory.tensors] == list(STATE)


def test_torch_loads_one_stream_after_another(tmp_path):
    (tmp_path / "x.pth").write_bytes(saved() + saved({"x": torch.ones(3)}))
    with (tmp_path / "x.pth").open("rb") as file:
        assert [set(torch.load(file, weights_only=True)) for _ in range(2)] == [set(STATE), {"x"}]


@pytest.mark.parametrize("count", [0, 49, 51, -1, 2**40, 2**63 - 1, -(2**63)])
def test_a_count_that_is_not_the_pickles(facts_of, refused_by_torch, count):
    heads, _, _ = parts(saved({"w": torch.arange(50.0)}))
    data = b"".join(heads) + struct.pack("<q", count) + bytes(200)
    assert refused_by_torch(data)
    with pytest.raises(DamagedArchive, match="elements"):
        facts_of(data)


def test_a_pickle_that_asks_for_more_than_there_could_be(facts_of):
    heads, keys, _ = parts(saved({"w": torch.arange(50.0)}))
    huge = heads[3].replace(b"K2N", b"\x8a\x08" + struct.pack("<q", 2**60) + b"N")
    assert huge != heads[3]
    data = b"".join([*heads[:3], huge, heads[4]]) + struct.pack("<q", 2**60) + bytes(200)
    assert facts_of(data) == [("past-end", keys[0], 2**62 - 200)]


def with_keys(keys):
    heads, own, storages = parts(saved({"w": torch.arange(50.0)}))
    renamed = [own[0] if key == "own" else key for key in keys] if isinstance(keys, list) else keys
    return b"".join(heads[:4]) + pickle.dumps(renamed, 2) + storages


@pytest.mark.parametrize("keys", [["own", "own"], ["own", 5], "own", {"own": 1}, None, [["own"]]])
def test_a_list_of_keys_that_is_none(facts_of, keys):
    with pytest.raises(DamagedArchive, match="duplicate"):
        facts_of(with_keys(keys))


@pytest.mark.parametrize("keys", [["unknown"], ["own", "unknown"]])
def test_a_key_that_the_pickle_does_not_name(facts_of, refused_by_torch, keys):
    assert refused_by_torch(with_keys(keys))
    with pytest.raises(DamagedArchive, match="storage 'unknown'"):
        facts_of(with_keys(keys))


def test_a_key_that_the_list_does_not_have(facts_of):
    _, (key,), storages = parts(saved({"w": torch.arange(50.0)}))
    del key
    kinds = [(kind, nbytes) for kind, _, nbytes in facts_of(with_keys([]))]
    assert kinds == [("missing-storage", 200), ("orphan-record", len(storages))]


@pytest.mark.parametrize(
    ("place", "pickled", "said"),
    [
        (0, b"\x80\x02U\x0d" + pickle.dumps(MAGIC, 2)[2:] + b".", "magic number is not"),
        (1, pickle.dumps(1002, 2), "protocol version is not 1001"),
        (1, pickle.dumps(None, 2), "protocol version is not 1001"),
        (1, b"\x80\x02\xff.", "protocol version is not a valid pickle: no such opcode 0xff at byte"),
        (2, b"\x80\x02R.", "system information is not a valid pickle"),
        (4, b"\x80\x02", "list of keys is not a valid pickle"),
    ],
)
def test_a_pickle_around_the_object_that_torch_does_not_write(facts_of, place, pickled, said):
    heads, _, storages = parts(saved())
    heads[place] = pickled
    with pytest.raises(DamagedArchive, match=said):
        facts_of(b"".join(heads) + (storages if place < 4 else b""))


def test_system_information_is_read_by_nobody(facts_of, refused_by_torch):
    heads, _, storages = parts(saved())
    heads[2] = pickle.dumps(["what", 1, "will"], 2)
    data = b"".join(heads) + storages
    assert facts_of(data) == []
    assert not refused_by_torch(data)


def test_tensors_of_protocol_0_are_refused_as_torch_refuses_them(facts_of, refused_by_torch):
    data = saved(pickle_protocol=0)
    assert refused_by_torch(data)
    with pytest.raises(DamagedPickle, match=r"'a\.weight' is not written as torch does"):
        facts_of(data)


def test_what_protocol_0_can_write_is_read(tmp_path):
    (tmp_path / "x.pth").write_bytes(saved({"epoch": 3}, pickle_protocol=0))
    with open_checkpoint(str(tmp_path / "x.pth")) as checkpoint:
        assert checkpoint.inventory.root_keys == ("epoch",)


def test_the_limits_hold(facts_of):
    with pytest.raises(LimitExceeded, match="size of a pickle"):
        facts_of(saved(), Limits(pickle_bytes=200))
    with pytest.raises(LimitExceeded, match="storages"):
        facts_of(saved(), Limits(records=1))
    with pytest.raises(LimitExceeded, match="size of a string"):
        facts_of(saved(), Limits(string_bytes=4))


def test_before_anything_is_located_nothing_is(tmp_path):
    (tmp_path / "x.pth").write_bytes(saved())
    with closing(open_container(str(tmp_path / "x.pth"), Limits()).source) as source:
        container = TorchLegacy(source, Limits())
        assert container.storage_span(parts(saved())[1][0]) is None
        with pytest.raises(DamagedArchive, match="storage 'k'"):
            container.lay_out(b"", {"k": ("float64", "float32")})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_broken_only_our_errors_escape(tmp_path, data):
    good = saved({"w": torch.arange(4), "v": torch.ones(2, dtype=torch.float64)})
    broken = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(good) - 1))
        broken[at] = data.draw(st.sampled_from([0, 1, ord("."), ord("X"), 0x7F, 0xFF]))
    (tmp_path / "x.pt").write_bytes(broken[: data.draw(st.integers(20, len(good)))])
    with suppress(CkptMoveError):
        ckptmove.inspect(str(tmp_path / "x.pt"), outline=True)
        ckptmove.convert(str(tmp_path / "x.pt"), to="mps", cast=True, output=str(tmp_path / "y.pt"), force=True)

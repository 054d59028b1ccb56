"""Tars of torch 0.1 that are cut off, inconsistent or hostile: each is a one-line error."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from old_tar import FIRST_ADDRESS, archive, members_of, tar_of

from ckptmove.api.functions import convert
from ckptmove.errors import CkptMoveError, DamagedArchive, DamagedPickle, LimitExceeded
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint

BASE = torch.arange(6.0)
STATE = {"a.weight": BASE, "a.part": BASE[2:4], "b": torch.ones(3, dtype=torch.int64)}
MEMBERS = members_of(STATE)
TENSOR, STORAGE = FIRST_ADDRESS, FIRST_ADDRESS + 64


def dumped(*values):
    return b"".join(value if isinstance(value, bytes) else pickle.dumps(value, 2) for value in values)


def storages(*entries, count=None, views=()):
    """The member `storages`: entries are keys, tags, classes and the raw bytes with their count."""
    rows = [dumped((key, tag, kind)) + struct.pack("<q", numel) + raw for key, tag, kind, numel, raw in entries]
    return dumped(len(rows) if count is None else count, *rows, [*views])


def storage(key=STORAGE, tag="cpu", kind=torch.FloatStorage, numel=6, raw=bytes(24)):
    return key, tag, kind, numel, raw


def tensors(*entries, count=None):
    """The member `tensors`: entries are keys, storages, numbers of axes and all numbers after them."""
    rows = [
        dumped((key, where, torch.FloatTensor)) + struct.pack(f"<q{len(rest)}q", axes, *rest)
        for key, where, axes, *rest in entries
    ]
    return dumped(len(rows) if count is None else count, *rows)


SOUND = {
    "pickle": pickle.dumps({}, 2),
    "tensors": tensors((TENSOR, STORAGE, 1, 6, 1, 0)),
    "storages": storages(storage()),
}


class Id:
    """Pickled as a persistent id."""

    def __init__(self, pid):
        self.pid = pid


def naming(pid, protocol=2):
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol)
    pickler.persistent_id = lambda value: value.pid if isinstance(value, Id) else None
    pickler.dump({"w": Id(pid)})
    return stream.getvalue()


def changed(**members):
    return archive({**SOUND, "pickle": naming(str(TENSOR)), **members})


@pytest.fixture
def read(tmp_path):
    def opened(data, limits=None):
        (tmp_path / "x.pth").write_bytes(data)
        with open_checkpoint(str(tmp_path / "x.pth"), limits) as checkpoint:
            return checkpoint.inventory

    return opened


def test_what_is_made_by_hand_here_is_sound(read, tmp_path):
    inventory = read(changed())
    assert [(one.name, one.shape, one.storage) for one in inventory.tensors] == [("w", (6,), str(STORAGE))]
    assert inventory.facts == ()
    assert torch.equal(torch.load(tmp_path / "x.pth", weights_only=False)["w"], torch.zeros(6))


def test_a_storage_that_no_tensor_reaches_is_there_too(read):
    inventory = read(archive(SOUND))
    assert (inventory.tensors, [one.key for one in inventory.storages]) == ((), [str(STORAGE)])


@pytest.mark.parametrize("pid", [str(TENSOR), TENSOR, str(STORAGE)])
def test_ids_are_numbers_or_their_digits(read, pid):
    assert [one.shape for one in read(changed(pickle=naming(pid))).tensors] == [(6,)]


def test_a_storage_may_be_saved_as_a_part_of_another(read):
    inventory = read(changed(pickle=naming("7"), storages=storages(storage(), views=[(7, STORAGE, 2, 3)])))
    assert [(one.kind, one.storage_offset, one.shape) for one in inventory.tensors] == [("storage", 2, (3,))]


def test_names_in_every_pickle_are_seen(read):
    evil = b"cos\nsystem\n0" + dumped(1)[2:]  # pushed and popped before the number that is asked for
    inventory = read(changed(tensors=b"\x80\x02" + evil + tensors((TENSOR, STORAGE, 1, 6, 1, 0))[len(dumped(1)) :]))
    assert {one.name for one in inventory.globals if one.verdict == "dangerous"} == {"os.system"}


WRONG = {
    "no-number": ({"storages": dumped("many")}, "member 'storages': it does not start with a number"),
    "negative": ({"tensors": dumped(-1)}, "member 'tensors': it does not start with a number"),
    "more-than-there-are": ({"tensors": tensors(count=3)}, "member 'tensors': it ends before STOP"),
    "no-pickle": ({"storages": b"\xff"}, "member 'storages': no such opcode 0xff at byte 0"),
    "empty": ({"tensors": b""}, "member 'tensors': it ends before STOP"),
    "storage-of-two": ({"storages": dumped(1, (1, "cpu"))}, "the pickle of a storage is invalid"),
    "storage-is-a-list": ({"storages": dumped(1, [1, "cpu", 2])}, "the pickle of a storage is invalid"),
    "key-is-text": ({"storages": storages(storage(key="1"))}, "a key in it is not a number"),
    "key-is-negative": ({"storages": storages(storage(key=-1))}, "a key in it is not a number"),
    "no-tag": ({"storages": storages(storage(tag=None))}, "has no class or no device, or exists twice"),
    "no-class": ({"storages": storages(storage(kind="F"))}, "has no class or no device, or exists twice"),
    "another-class": ({"storages": storages(storage(kind=torch.Tensor))}, "has no class or no device"),
    "storage-twice": ({"storages": storages(storage(), storage())}, "has no class or no device, or exists twice"),
    "negative-count": ({"storages": storages(storage(numel=-1))}, "has -1 elements"),
    "huge-count": ({"storages": storages(storage(numel=2**62))}, "member 'storages': it ends too early"),
    "no-count": ({"storages": dumped(1, (1, "cpu", torch.FloatStorage))}, "it ends too early"),
    "views-are-none": ({"storages": dumped(0, None)}, "the list of views is invalid"),
    "view-of-three": ({"storages": storages(storage(), views=[(7, STORAGE, 2)])}, "a view in it is not part"),
    "view-is-a-number": ({"storages": storages(storage(), views=[7])}, "a view in it is not part of a storage"),
    "view-of-nothing": ({"storages": storages(storage(), views=[(7, 8, 0, 1)])}, "a view in it is not part"),
    "view-past-the-end": ({"storages": storages(storage(), views=[(7, STORAGE, 2, 5)])}, "a view in it is not part"),
    "view-twice": ({"storages": storages(storage(), views=[(7, STORAGE, 2, 3)] * 2)}, "storage '7' exists twice"),
    "view-of-itself": ({"storages": storages(storage(), views=[(STORAGE, STORAGE, 0, 1)])}, "exists twice"),
    "axes": ({"tensors": tensors((1, STORAGE, 1001))}, "tensor '1' has 1001 axes, or exists twice"),
    "negative-axes": ({"tensors": tensors((1, STORAGE, 0xFFFFFFFF))}, "tensor '1' has -1 axes, or exists twice"),
    "tensor-twice": ({"tensors": tensors(*[(1, STORAGE, 0, 0)] * 2)}, "tensor '1' has 0 axes, or exists twice"),
    "no-strides": ({"tensors": tensors((1, STORAGE, 2, 3, 2, 1))}, "member 'tensors': it ends too early"),
    "in-no-storage": ({"tensors": tensors((1, 2, 0, 0))}, "tensor '1' has an unknown storage"),
    "in-none": ({"tensors": tensors((1, None, 0, 0))}, "a key in it is not a number"),
    "tensor-is-a-storage": ({"tensors": tensors((STORAGE, STORAGE, 0, 0))}, "or the key of another"),
    "unknown-id": ({"pickle": naming("12")}, "its object pickle names '12', which is not in the other members"),
    "signed-id": ({"pickle": naming("+1")}, r"its object pickle names '\+1', which"),
    "long-id": ({"pickle": naming("1" * 5000)}, "its object pickle names '1{39}, which"),
    "id-of-nothing": ({"pickle": naming([])}, "its object pickle names an object instead of a key"),
    "sizes": ({"tensors": tensors((TENSOR, STORAGE, 1, -6, 1, 0))}, "tensor 'w' is not written as torch does"),
    "offset": ({"tensors": tensors((TENSOR, STORAGE, 1, 6, 1, -1))}, "tensor 'w' is not written as torch does"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_torch_does_not_write_is_refused_as_torch_refuses_it(read, kind, tmp_path):
    members, message = WRONG[kind]
    with pytest.raises((DamagedArchive, DamagedPickle), match=message) as caught:
        read(changed(**members))
    assert caught.value.path.endswith("x.pth")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pickle", "tensors", "storages"])
def test_every_member_is_needed(read, name):
    with pytest.raises(DamagedArchive, match=f"without its member '{name}'"):
        read(archive({"sys_info": b"", **{own: data for own, data in SOUND.items() if own != name}}))


def tricked(*members):
    """A tar that begins like torch's and continues with other members (name, type, data)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as writer:
        for name, data, fields in (*((name, data, {}) for name, data in SOUND.items()), *members):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            writer.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def test_a_member_that_is_there_twice(read):
    with pytest.raises(DamagedArchive, match="two members 'storages'"):
        read(tricked(("storages", SOUND["storages"], {})))


@pytest.mark.parametrize(
    ("kind", "said"), [(tarfile.SYMTYPE, "symlink"), (tarfile.LNKTYPE, "link"), (tarfile.DIRTYPE, "folder")]
)
def test_a_member_that_is_no_file(read, kind, said):
    with pytest.raises(DamagedArchive, match=f"'sys_info' .*: {said}"):
        read(tricked(("sys_info", b"", {"type": kind, "linkname": "/etc/passwd"})))


def test_members_that_torch_does_not_know_are_told(read):
    inventory = read(tricked(("/absolute", b"1", {}), ("link", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc"})))
    assert [(one.kind, one.record, one.nbytes) for one in inventory.facts] == [
        ("orphan-record", "/absolute", 1),
        ("orphan-record", "link", 0),
    ]


def test_names_in_a_folder_are_not_those_that_torch_asks_for(read, tmp_path):
    data = archive({f"./{name}": content for name, content in SOUND.items()})
    with pytest.raises(DamagedArchive, match="member 'pickle'"):
        read(data)
    with pytest.raises(KeyError, match="storages"):
        torch.load(tmp_path / "x.pth", weights_only=False)


def test_bytes_that_no_tensor_reaches_are_told(read):
    loose = {name: data + b"more" for name, data in SOUND.items()}
    facts = {one.record.split("'")[1]: one.nbytes for one in read(archive(loose)).facts}
    assert facts == dict.fromkeys(SOUND, 4)


@pytest.mark.parametrize("tail", [b"hidden", bytes(1 << 20) + b"hidden", bytes(1 << 21)])
def test_bytes_behind_the_archive_are_told(read, tail):
    data = archive(SOUND)
    (fact,) = read(data + tail).facts
    assert (fact.kind, fact.record) == ("orphan-record", "bytes after the last member")


@pytest.mark.parametrize("tail", [b"", bytes(512), bytes(9 * 10240)])
def test_an_archive_may_end_in_any_number_of_zeros(read, tail):
    data = archive(SOUND)
    with tarfile.open(fileobj=io.BytesIO(data)) as reader:
        end = reader.getmembers()[-1].offset_data + 1024
    assert data[end:].strip(b"\0") == b""
    assert read(data[:end] + tail).facts == ()


def test_a_tensor_that_reaches_past_its_storage_is_told(read):
    (fact,) = read(changed(tensors=tensors((TENSOR, STORAGE, 1, 7, 1, 0)))).facts
    assert (fact.kind, fact.record, fact.nbytes) == ("short-storage", "w", 4)


@pytest.mark.parametrize("name", ["storages", "tensors"])
def test_the_number_of_entries_is_limited(read, name):
    with pytest.raises(LimitExceeded, match=f"'{name}': {1 << 40} >"):
        read(changed(**{name: dumped(1 << 40)}))


def test_the_pickles_together_are_limited(read):
    with pytest.raises(LimitExceeded, match="pickle") as caught:
        read(archive(SOUND), Limits(pickle_bytes=100))
    assert caught.value.limit == 100


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_cut_anywhere_only_our_errors_escape(read, form):
    data = tar_of(STATE, form=form)
    with tarfile.open(fileobj=io.BytesIO(data)) as reader:
        end = reader.getmembers()[-1]
    for length in range(1, end.offset_data + end.size, 41):
        with pytest.raises(CkptMoveError):
            read(data[:length])


def patched(data, changes):
    """The data with bytes changed, and every header signed again."""
    with tarfile.open(fileobj=io.BytesIO(data)) as reader:
        heads = [info.offset_data - 512 for info in reader]
    raw = bytearray(data)
    for place, value in changes:
        raw[place % len(raw)] = value
    for head in heads:
        raw[head + 148 : head + 156] = b"%06o\0 " % (
            sum(raw[head : head + 148]) + 256 + sum(raw[head + 156 : head + 512])
        )
    return bytes(raw)


PATCHES = st.lists(st.tuples(st.integers(0, 10240), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.mark.unmeasured
@given(PATCHES, st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_bytes_change_only_our_errors_escape(tmp_path, changes, is_pax):
    data = tar_of(STATE, form=tarfile.PAX_FORMAT if is_pax else tarfile.USTAR_FORMAT)
    (tmp_path / "x.pth").write_bytes(patched(data, changes))
    with suppress(CkptMoveError):
        convert(str(tmp_path / "x.pth"), to="cuda:1", output=str(tmp_path / "y.pth"), force=True)

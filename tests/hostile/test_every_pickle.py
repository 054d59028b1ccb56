"""Every pickle that a load would execute is read: dangerous names are findings, also in damaged files."""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.conversion.remap.errors import NotRemappable
from ckptmove.errors import CkptMoveError, DamagedArchive, DamagedPickle, LimitExceeded
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import operations
from fuzz.payloads import text
from fuzz.seeds import STORAGE, archive_of
from fuzz.whole_seeds import old_members, tar_of

DENSE = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE
BYTES = {"0": bytes(16)}


def system(marker):
    return b"cos\nsystem\n(" + text(f"touch {marker}") + b"tR"


def legacy_with(place, change):
    """A stream with one of its five pickles changed."""
    stream = io.BytesIO()
    torch.save({"weight": torch.zeros(4)}, stream, _use_new_zipfile_serialization=False)
    data, pickles, end = stream.getvalue(), [], 0
    for _ in range(5):
        begin, end = end, max(end for _, end, _ in operations(data, end))
        pickles.append(data[begin:end])
    pickles[place] = change(pickles[place])
    return b"".join(pickles) + data[end:]


def leading(payload):
    """A pickle that runs a payload, pops its result, and continues as before."""
    return lambda own: own[:2] + payload + b"0" + own[2:]


def with_tensor(payload):
    return archive_of(b"\x80\x02}(" + text("evil") + payload + text("weight") + DENSE + b"u.", BYTES)


def within(old, payload):
    return archive_of(b"\x80\x02}(" + text("weight") + DENSE.replace(old, payload) + b"u.", BYTES)


@pytest.fixture
def judged(tmp_path):
    def judge(data):
        path = tmp_path / "hostile.pt"
        path.write_bytes(data)
        result = ckptmove.inspect(path)
        errors = {one.code: one.where for one in result.findings if one.code == "S702"}
        return errors.get("S702", ()), {use.name for use in result.inventory.globals}

    return judge


def runs(data, marker, tmp_path):
    """Whether torch.load runs the payload, also if the load fails."""
    path = tmp_path / "run.pt"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with suppress(Exception):  # anything at all may become of it
            torch.load(path, weights_only=False)
    ran = marker.exists()
    marker.unlink(missing_ok=True)
    return ran


@pytest.mark.parametrize("place", range(5))
def test_every_pickle_of_a_legacy_stream(judged, tmp_path, place) -> None:
    marker = tmp_path / "marker"
    data = legacy_with(place, leading(system(marker)))
    assert judged(data)[0] == ("os.system",)
    assert "os.system" in judged(data)[1]
    assert runs(data, marker, tmp_path)


@pytest.mark.parametrize("place", [0, 1])
def test_a_number_that_code_computes_is_no_damage(judged, place) -> None:
    magic = [0x1950A86A20F9469CFC6C, 1001][place]
    change = lambda _: b"\x80\x02cbuiltins\neval\n" + text(str(magic)) + b"\x85R."  # noqa: E731  # in one line
    data = legacy_with(place, change)
    if place:
        torch.load(io.BytesIO(data), weights_only=False)
    assert judged(data)[0] == ("builtins.eval",)


def test_keys_that_code_computes_are_no_damage(judged) -> None:
    keys = b"\x80\x02cbuiltins\neval\n" + text("[]") + b"\x85R."
    assert judged(legacy_with(4, lambda _: keys))[0] == ("builtins.eval",)


def test_a_damaged_stream_names_what_runs_before_the_damage(tmp_path) -> None:
    path = tmp_path / "hostile.pt"
    for place, rest in ((1, b"0K\1."), (2, b"\xff"), (4, b"a.")):
        path.write_bytes(legacy_with(place, lambda own, rest=rest: own[:2] + system("x") + rest))
        with pytest.raises(DamagedArchive) as caught:
            ckptmove.inspect(path)
        assert caught.value.runs == ("os.system",)


@pytest.mark.parametrize("damage", [b"\xff", b"a."])
def test_a_damaged_object_names_what_the_pickles_before_it_run(tmp_path, damage) -> None:
    path = tmp_path / "hostile.pt"
    data = legacy_with(2, leading(system("x")))
    end = 0
    for _ in range(3):
        end = max(end for _, end, _ in operations(data, end))
    path.write_bytes(data[:end] + b"\x80\x02" + damage + b"\x80\x02].")
    with pytest.raises(DamagedPickle) as caught:
        ckptmove.inspect(path)
    assert caught.value.runs == ("os.system",)
    assert "os.system" in str(caught.value)


@pytest.mark.parametrize("member", ["storages", "tensors", "pickle"])
def test_every_member_of_a_tar(judged, tmp_path, member) -> None:
    own = old_members()[member]
    data = tar_of(old_members() | {member: leading(system("x"))(own)})
    assert judged(data)[0] == ("os.system",)
    path = tmp_path / "hostile.pt"
    path.write_bytes(tar_of(old_members() | {"storages": b"\x80\x02" + system("x") + b"."}))
    with pytest.raises(DamagedArchive) as caught:
        ckptmove.inspect(path)
    assert caught.value.runs == ("os.system",)
    assert tarfile.is_tarfile(path)


@pytest.mark.parametrize(("opcode", "code"), [(b"\x82\x05", 5), (b"\x83\x05\x01", 261), (b"\x84\x05\x01\0\0", 261)])
def test_extension_codes_are_dangerous(judged, tmp_path, opcode, code) -> None:
    marker = tmp_path / "marker"
    payload = opcode + b"(" + text(f"touch {marker}") + b"tR"
    copyreg.add_extension("os", "system", code)
    try:
        assert runs(with_tensor(payload), marker, tmp_path)
    finally:
        copyreg.remove_extension("os", "system", code)
        copyreg.clear_extension_cache()
    for data in (with_tensor(payload), legacy_with(1, leading(payload)), b"\x80\x02" + payload + b"."):
        assert judged(data)[0] == (f"copyreg.extension.{code}",)


@pytest.mark.parametrize(
    "old",
    [b"ctorch\nFloatStorage\n", b"K\x04\x85", b"K\x01\x85", text("cuda:0")],
    ids=["class", "size", "stride", "device"],
)
def test_code_in_the_arguments_of_a_tensor_is_no_damage(judged, tmp_path, old) -> None:
    marker = tmp_path / "marker"
    tensor = DENSE.replace(old, system(marker)).replace(text("cuda:0"), text("cpu"))
    data = archive_of(b"\x80\x02}(" + text("weight") + tensor + b"u.", BYTES)
    assert runs(data, marker, tmp_path)
    assert judged(data)[0] == ("os.system",)


@pytest.mark.parametrize("old", [b"ctorch\nFloatStorage\n", text("cuda:0")], ids=["class", "device"])
@pytest.mark.parametrize("options", [{"compact": True}, {"output": "new.safetensors"}], ids=["compact", "format"])
def test_a_storage_that_code_describes_is_not_rewritten(tmp_path, monkeypatch, old, options) -> None:
    monkeypatch.chdir(tmp_path)
    tensor = DENSE.replace(old, system(tmp_path / "marker")).replace(text("cuda:0"), text("cpu"))
    Path("run.pt").write_bytes(archive_of(b"\x80\x02}(" + text("weight") + tensor + b"u.", BYTES))
    with pytest.raises(NotRemappable):
        ckptmove.convert("run.pt", **options)
    assert [*tmp_path.iterdir()] == [tmp_path / "run.pt"]


def test_arguments_that_no_code_makes_stay_damage(judged) -> None:
    damaged = within(b"K\x04\x85", b"NK\x04\x86")
    with pytest.raises(DamagedPickle) as caught:
        judged(damaged)
    assert caught.value.runs == ()
    both = b"\x80\x02}(" + text("e") + system("x") + text("w") + DENSE.replace(b"K\x04\x85", b"N") + b"u."
    with pytest.raises(DamagedPickle) as caught:
        judged(archive_of(both, BYTES))
    assert caught.value.runs == ("os.system",)


@pytest.mark.unmeasured
def test_odd_arguments_are_looked_at_within_bounds(judged) -> None:
    shared = b"](" + b"]" * 5000 + b"eq\x05"
    odd = DENSE.replace(b"K\x04\x85", b"h\x05")
    data = archive_of(b"\x80\x02](" + shared + odd * 40 + b"e.", BYTES)
    with pytest.raises(DamagedPickle):
        judged(data)
    many = b"](" + b"]" * 120_000 + b"e"
    assert judged(within(b"K\x04\x85", many))[0] == ()


def test_a_name_that_code_computes_is_dangerous(judged, tmp_path) -> None:
    marker = tmp_path / "marker"
    module = b"cbuiltins\nstr\n" + text("os") + b"\x85R"
    data = with_tensor(module + text("system") + b"\x93(" + text(f"touch {marker}") + b"tR")
    assert runs(data, marker, tmp_path)
    assert judged(data)[0] == ("<computed>.system",)


def test_the_pickles_behind_the_first_are_looked_at(judged) -> None:
    first = pickle.dumps([1])
    assert judged(first + b"\x80\x02" + system("x") + b".")[0] == ("os.system",)
    assert judged(first * 3 + b"\x80\x02" + system("x"))[0] == ("os.system",)
    assert judged(first * 3 + b"\xffjunk")[0] == ()
    assert judged(first + pickle.dumps({"a": 1}))[0] == ()


class Stream:
    def __init__(self, data):
        self.data = data

    def __reduce__(self):
        return torch.storage._load_from_bytes, (self.data,)


def test_streams_inside_of_pickles(judged) -> None:
    loader = "torch.storage._load_from_bytes"
    sound = legacy_with(2, lambda own: own)
    dangerous, names = judged(pickle.dumps({"w": Stream(sound)}))
    assert (dangerous, loader in names) == ((), True)
    for place, before in ((2, b""), (3, pickle.dumps([1]))):
        stream = Stream(legacy_with(place, leading(system("x"))))
        assert "os.system" in judged(before + pickle.dumps({"w": stream}))[0]
    # Nothing looks into it there: torch.save writes none.
    called = b"ctorch.storage\n_load_from_bytes\n" + pickle.dumps(sound, 3)[2:-3] + b"\x85R"
    assert judged(with_tensor(called))[0] == (loader,)
    assert loader in judged(b"\x80\x03" + called + b"0N.")[0]
    with pytest.raises(CkptMoveError) as caught:
        judged(pickle.dumps({"w": Stream(b"\x80\x02" + system("x") + b".")}))
    assert caught.value.runs == ("os.system", loader)


@pytest.mark.parametrize("name", ["legacy", "extension", "argument"])
def test_verify_fails_a_dangerous_file(tmp_path, name) -> None:
    data = {
        "legacy": legacy_with(2, leading(system("x"))),
        "extension": with_tensor(b"\x82\x05"),
        "argument": within(b"K\x04\x85", system("x")),
    }[name]
    path = tmp_path / "hostile.pt"
    path.write_bytes(data)
    result = ckptmove.verify(path)
    assert not result.passed
    assert {check.name: check.status for check in result.checks}["file"] == "failed"


# --- bombs -----------------------------------------------------------------------------------------------------------

FAMILIES = [
    b"]", b"}", b"\x8f", b")", b"N", b"]\x94", b"\x8f\x94", b"(l", b"(t", b"(d", b"(Nt", b"NN\x86", b"\x85", b")R",
    b"Nb", b"Q", b"2", b"K\1K\2\x86\x94", b"ca\nb\n", b"(ia\nb\n", b"\x97", b"U\0", b"h\0",
]  # fmt: skip


@pytest.mark.unmeasured
@pytest.mark.parametrize("unit", FAMILIES, ids=repr)
def test_cheap_operations_are_refused(unit) -> None:
    limits = Limits(tree_bytes=1 << 21, depth=1 << 20)
    with pytest.raises(LimitExceeded) as caught:
        interpret(b"Nq\0" + unit * 150_000 + b".", limits)
    assert caught.value.limit == limits.tree_bytes
    assert caught.value.actual < 2 * limits.tree_bytes


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda place: place % 3 == 0, 12_000_000),
        (lambda place: place % 200, 18_000_000),
        (lambda place: (place % 200, 7), 6_000_000),
        (lambda _: {}, 2_800_000),
    ],
    ids=["bools", "small ints", "pairs", "dicts"],
)
def test_large_lists_of_plain_values_are_within_the_limit(make, count) -> None:
    """A hundredth of each is read: the estimate grows with their number."""
    data = pickle.dumps([make(place) for place in range(count // 100)], 2)
    assert interpret(data, Limits()).excess * 100 < Limits().tree_bytes


@pytest.mark.unmeasured
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("kind", ["dict", "list", "parameters", "views"])
def test_tensors_account_for_themselves(protocol, kind) -> None:
    """However many there are, their memory is not counted against a file: a million must be read."""
    base = torch.zeros(4000)
    views = [base[place] for place in range(4000)]
    tree = {
        "dict": {f"layer.{place}": one.clone() for place, one in enumerate(views)},
        "list": [one.clone() for one in views],
        "parameters": [torch.nn.Parameter(one.clone()) for one in views],
        "views": views,
    }[kind]
    stream = io.BytesIO()
    torch.save(tree, stream, pickle_protocol=protocol)
    with zipfile.ZipFile(stream) as archive:
        data = archive.read("archive/data.pkl")
    assert interpret(data, Limits()).excess < 0


def test_the_pickles_of_one_file_are_counted_together(tmp_path) -> None:
    limits = Limits(tree_bytes=1 << 20)
    part = b"\x80\x02(" + b"N" * 10_000 + b"l."
    assert interpret(part, limits).excess > 0
    with pytest.raises(LimitExceeded):
        interpret(part, limits, excess=limits.tree_bytes - 1000)
    assert Limits().times(3).tree_excess(100, 10, 0, 0, 0) == 640 - 3 * 1600


def test_a_header_that_is_not_there_is_a_cut_file(tmp_path) -> None:
    """Only records before the directory have a header to look at; the rest is F802."""
    data = with_tensor(b"N")
    at = data.index(b"PK\1\2", data.index(b"PK\1\2") + 1) + 42
    path = tmp_path / "hostile.pt"
    path.write_bytes(data[:at] + struct.pack("<I", len(data) - 30) + data[at + 4 :])
    assert "F802" in {one.code for one in ckptmove.inspect(path).findings}

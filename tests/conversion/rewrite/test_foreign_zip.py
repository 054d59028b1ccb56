"""Archives that torch did not write: by hand, by other programs, or hostile."""

from __future__ import annotations

import struct
import zipfile
import zlib

import pytest

from ckptmove.errors import CkptMoveError, CrcMismatch, DamagedArchive, LimitExceeded


def local(name, data, *, flags=0, method=0, crc=None, extra=b"", size=None):
    crc = zlib.crc32(data) if crc is None else crc
    sizes = (0, 0, 0) if flags & 8 else (crc, len(data), len(data) if size is None else size)
    head = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, flags, method, 0, 33, *sizes, len(name), len(extra))
    return head + name + extra


def central(name, data, offset, *, flags=0, method=0, crc=None, size=None):
    crc = zlib.crc32(data) if crc is None else crc
    size = len(data) if size is None else size
    head = (b"PK\x01\x02", 20, 20, flags, method, 0, 33, crc, len(data), size, len(name), 0, 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3L5H2L", *head) + name


def build(pieces):
    """An archive of (name, data, options, bytes after the data), and of bytes between records."""
    body, directory, count = bytearray(), bytearray(), 0
    for piece in pieces:
        if isinstance(piece, bytes):
            body += piece
            continue
        name, data, options, behind = piece
        directory += central(name, data, len(body), **{k: v for k, v in options.items() if k != "extra"})
        body += local(name, data, **options) + data + behind
        count += 1
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(directory), len(body), 0)
    return bytes(body + directory + end)


PICKLE = b"\x80\x02}q\x00."


def descriptor(data, *, signature=b"PK\x07\x08", lengths="<2L"):
    return signature + struct.pack("<L", zlib.crc32(data)) + struct.pack(lengths, len(data), len(data))


@pytest.mark.parametrize(
    ("flags", "behind"),
    [
        (0, b""),
        (8, descriptor(PICKLE)),
        (8, descriptor(PICKLE, lengths="<2Q")),
        (8, descriptor(PICKLE, signature=b"")),
        (8, descriptor(PICKLE, signature=b"", lengths="<2Q")),
        (8, b""),
    ],
)
def test_descriptors_of_every_kind(tmp_path, flags, behind, rewrite):
    gap = b"between the records"
    storage = bytes(range(200))
    pieces = [(b"a/data.pkl", PICKLE, {"flags": flags}, behind), gap, (b"a/data/0", storage, {}, b""), b"at the end"]
    (tmp_path / "a.pt").write_bytes(build(pieces))
    new = PICKLE * 9
    output = rewrite(tmp_path / "a.pt", tmp_path / "b.pt", lambda _: new)
    with zipfile.ZipFile(output) as archive:
        assert archive.testzip() is None
        assert archive.read("a/data.pkl") == new
        assert archive.read("a/data/0") == storage
        second = archive.getinfo("a/data/0").header_offset
    data = output.read_bytes()
    assert data[:second].endswith(gap)
    assert b"at the end" in data
    start = data.index(new) + len(new)
    assert data[start : second - len(gap)] == (b"" if not flags else descriptor(new))


def test_bytes_before_and_the_pickle_behind_its_storages(tmp_path, rewrite):
    storage = bytes(range(100))
    pieces = [
        b"PK\x03\x04 a dead record",
        (b"a/data/0", storage, {}, b""),
        (b"a/data.pkl", PICKLE, {}, b""),
        (b"a/version", b"3\n", {}, b""),
    ]
    (tmp_path / "a.pt").write_bytes(build(pieces))
    output = rewrite(tmp_path / "a.pt", tmp_path / "b.pt", lambda pickle: pickle * 30)
    assert output.read_bytes().startswith((tmp_path / "a.pt").read_bytes()[: output.read_bytes().index(storage) + 100])
    assert zipfile.ZipFile(output).testzip() is None
    assert zipfile.ZipFile(output).read("a/data.pkl") == PICKLE * 30


def test_other_extra_fields_are_kept(tmp_path, rewrite):
    stamp = struct.pack("<HHBL", 0x5455, 5, 1, 1_700_000_000)
    pieces = [(b"a/data.pkl", PICKLE, {"extra": stamp}, b""), (b"a/data/0", b"0123", {"extra": stamp}, b"")]
    (tmp_path / "a.pt").write_bytes(build(pieces))
    output = rewrite(tmp_path / "a.pt", tmp_path / "b.pt", lambda pickle: pickle * 2)
    assert output.read_bytes().count(stamp) == 2
    assert zipfile.ZipFile(output).testzip() is None


FULL = struct.pack("<HH", 0x9999, 65_500) + bytes(65_500)


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (build([(b"a/data.pkl", PICKLE, {}, b""), (b"a/data/0", b"1", {}, b"")])[1:], "not a checkpoint"),
        (build([(b"a/data.pkl", PICKLE, {}, b""), (b"a/x", b"1" * 9, {"extra": FULL}, b"")]), "no room"),
        (build([(b"a/data.pkl", PICKLE, {}, b""), (b"a/x", b"1", {}, b""), (b"a/x", b"2", {}, b"")]), "same name"),
        (build([(b"a/data.pkl", PICKLE, {}, b""), (b"a/byteorder", b"mixed", {}, b"")]), "byte order 'mixed'"),
        # torch's reader folds case: it would open the one where we open the other.
        (
            build([(b"a/DATA.PKL", PICKLE, {}, b""), (b"a/data.pkl", PICKLE, {}, b"")]),
            "read record 'a/DATA.PKL' as 'data.pkl'",
        ),
        (
            build([(b"a/data.pkl", PICKLE, {}, b""), (b"a/x", b"1", {}, b""), (b"a/X", b"2", {}, b"")]),
            "apart from case",
        ),
        (build([(b"a/data.pkl", PICKLE, {}, b""), (b"a/BYTEORDER", b"big", {}, b"")]), "as 'byteorder'"),
    ],
)
def test_archives_that_cannot_be_moved(tmp_path, data, detail, rewrite):
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CkptMoveError, match=detail):
        rewrite(tmp_path / "a.pt", tmp_path / "b.pt", lambda pickle: pickle + b" ")


def patched(data, at, layout, value):
    return data[:at] + struct.pack(layout, value) + data[at + struct.calcsize(layout) :]


def test_two_entries_for_the_same_bytes(tmp_path, rewrite):
    data = build([(b"a/data.pkl", PICKLE, {}, b""), (b"a/d/1", b"1234", {}, b""), (b"a/d/2", b"1234", {}, b"")])
    entry = data.rfind(b"PK\x01\x02")
    data = patched(data, entry + 42, "<L", data.index(b"PK\x03\x04", 10))
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(DamagedArchive, match="another record"):
        rewrite(tmp_path / "a.pt", tmp_path / "b.pt")


def test_a_record_inside_another_one(tmp_path, rewrite):
    inner = local(b"a/d/2", b"")
    data = build([(b"a/data.pkl", PICKLE, {}, b""), (b"a/d/1", inner, {}, b""), (b"a/d/2", b"", {}, b"")])
    entry = data.rfind(b"PK\x01\x02")
    (tmp_path / "a.pt").write_bytes(patched(data, entry + 42, "<L", data.index(inner)))
    with pytest.raises(DamagedArchive, match="overlaps another"):
        rewrite(tmp_path / "a.pt", tmp_path / "b.pt")


@pytest.mark.parametrize(
    ("offset", "detail"),
    [(1, "another record"), (10_000_000, "reaches past"), (None, "contradicts the directory")],
)
def test_headers_that_are_elsewhere(tmp_path, offset, detail, opened):
    data = build([(b"a/data.pkl", PICKLE, {}, b""), (b"a/data/0", b"1234", {}, b"")])
    entry = data.rfind(b"PK\x01\x02")
    if offset is None:
        data = patched(patched(data, entry + 20, "<L", 5000), entry + 24, "<L", 5000)
    else:
        data = patched(data, entry + 42, "<L", offset)
    (tmp_path / "a.pt").write_bytes(data)
    with opened(tmp_path / "a.pt") as container:
        at_once = {1: "overlaps another", None: "contradicts"}
        if offset in at_once:
            with pytest.raises(DamagedArchive, match=at_once[offset]):
                container.locate(())
        else:
            assert {fact.kind for fact in container.locate(())} >= {"orphan-record", "past-end"}
        with pytest.raises(DamagedArchive, match=detail):
            container.storage_span("0")
        with pytest.raises(DamagedArchive, match=detail):
            container.check()
        with pytest.raises(DamagedArchive, match=detail):
            container.lay_out(PICKLE, {})


def test_data_that_overlaps_the_directory(tmp_path, opened):
    data = build([(b"a/data.pkl", PICKLE, {}, b""), (b"a/data/0", b"1234", {"flags": 8}, b"")])
    entry = data.rfind(b"PK\x01\x02")
    data = patched(patched(data, entry + 20, "<L", 5000), entry + 24, "<L", 5000)
    (tmp_path / "a.pt").write_bytes(data)
    with opened(tmp_path / "a.pt") as container:
        assert [fact.nbytes for fact in container.locate(()) if fact.kind == "past-end"] == [
            5000 - 4 - len(b"a/data/0")
        ]
        for use in (lambda: container.storage_span("0"), container.check, lambda: container.lay_out(PICKLE, {})):
            with pytest.raises(DamagedArchive, match="record 'a/data/0' overlaps"):
                use()


@pytest.mark.parametrize("word", [b"", b"0", b"many", b"99999999", b"6" * 100, b"\xb2"])
def test_an_alignment_that_cannot_be_is_torchs_own(tmp_path, word, rewrite):
    pieces = [
        (b"a/data.pkl", PICKLE, {}, b""),
        (b"a/.storage_alignment", word, {}, b""),
        (b"a/data/0", bytes(range(90)), {}, b""),
    ]
    (tmp_path / "a.pt").write_bytes(build(pieces))
    output = rewrite(tmp_path / "a.pt", tmp_path / "b.pt", lambda pickle: pickle * 20)
    moved = output.read_bytes().index(bytes(range(90))) - (tmp_path / "a.pt").read_bytes().index(bytes(range(90)))
    assert moved % 64 == 0


def deflated(data, *, claimed=None, raw=None):
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    raw = packer.compress(data) + packer.flush() if raw is None else raw
    options = {"method": 8, "size": len(data) if claimed is None else claimed, "crc": zlib.crc32(data)}
    head = local(b"a/data.pkl", raw, method=8, crc=options["crc"], size=options["size"])
    body = head + raw
    directory = central(b"a/data.pkl", raw, 0, **options)
    return body + directory + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), len(body), 0)


@pytest.mark.parametrize("size", [1, 1 << 20, (1 << 20) + 1, 4_000_000])
def test_a_deflated_pickle_of_any_size(tmp_path, size, rewrite, opened):
    pickle = b"\x80\x02" + b"N" * size
    (tmp_path / "a.pt").write_bytes(deflated(pickle))
    with opened(tmp_path / "a.pt") as container:
        assert container.object_pickle() == pickle
        assert container.check() == ()
    output = rewrite(tmp_path / "a.pt", tmp_path / "b.pt", lambda pickle: pickle + b".")
    with zipfile.ZipFile(output) as archive:
        assert archive.getinfo("a/data.pkl").compress_type == zipfile.ZIP_STORED
        assert archive.read("a/data.pkl") == pickle + b"."


@pytest.mark.parametrize(
    "data",
    [
        deflated(PICKLE, raw=b"\xff\xff\xff"),
        deflated(PICKLE, raw=b"\x4b"),
        deflated(bytes(10_000_000), claimed=50),
        deflated(PICKLE, claimed=50),
    ],
    ids=["no-deflate", "cut", "bomb", "short"],
)
def test_a_deflated_pickle_that_lies(tmp_path, data, opened):
    (tmp_path / "a.pt").write_bytes(data)
    with opened(tmp_path / "a.pt") as container:
        with pytest.raises(CrcMismatch):
            container.object_pickle()
        assert [fact.kind for fact in container.check()] == ["crc-mismatch"]


@pytest.mark.unmeasured
def test_fifty_thousand_records(tmp_path, rewrite):
    storages = [(b"a/data/%d" % number, b"%d" % number, {}, b"") for number in range(50_000)]
    (tmp_path / "a.pt").write_bytes(build([(b"a/data.pkl", PICKLE, {}, b""), *storages]))
    output = rewrite(tmp_path / "a.pt", tmp_path / "b.pt", lambda pickle: pickle * 50)
    with zipfile.ZipFile(output) as archive:
        assert len(archive.infolist()) == 50_001
        assert archive.read("a/data/49999") == b"49999"


def zipped(tmp_path, name, data, spoil=False):
    path = tmp_path / "deflated.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", PICKLE if name != "a/data.pkl" else data)
        if name != "a/data.pkl":
            archive.writestr(name, data)
    if spoil:
        whole = bytearray(path.read_bytes())
        for crc in whole.rfind(b"PK\x01\x02") + 16, whole.rfind(b"PK\x03\x04") + 14:
            whole[crc] ^= 1  # of the last record, in the directory and before its data
        path.write_bytes(whole)
    return path


def test_a_deflated_record_is_checked_before_it_is_copied(tmp_path, rewrite):
    sound = zipped(tmp_path, "a/data/0", bytes(1000))
    rewrite(sound, tmp_path / "b.pt")
    with pytest.raises(CrcMismatch, match="data/0"):
        rewrite(zipped(tmp_path, "a/data/0", bytes(1000), spoil=True), tmp_path / "c.pt")
    assert not (tmp_path / "c.pt").exists()


def test_a_pickle_that_inflates_beyond_measure_is_refused(tmp_path, opened):
    path = zipped(tmp_path, "a/data.pkl", bytes(80 << 20))
    with opened(path) as container, pytest.raises(LimitExceeded):
        container.object_pickle()

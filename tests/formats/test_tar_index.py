"""Members of a tar: equal to those of ``tarfile``, refused if a header is wrong, and headers with other sizes."""

from __future__ import annotations

import io
import tarfile

import pytest

from ckptmove.errors import CkptMoveError, DamagedArchive, LimitExceeded
from ckptmove.formats.tar_index import padded, read_members, read_to_end, resized_header
from ckptmove.limits import Limits

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
LONG = "a/" * 40 + "b" * 90
KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.CONTTYPE: "file",
    tarfile.DIRTYPE: "folder",
    tarfile.LNKTYPE: "link",
    tarfile.SYMTYPE: "symlink",
    tarfile.FIFOTYPE: "other",
    tarfile.CHRTYPE: "other",
    b"V": "other",
}


class Memory:
    """A source in memory."""

    def __init__(self, data):
        self.path, self.size, self._data = "m.tar", len(data), data

    def read(self, start, end):
        assert 0 <= start <= end <= self.size
        return self._data[start:end]


class Large(Memory):
    """A source that continues with terabytes of zeros; only small parts of it may be read."""

    def __init__(self, data):
        super().__init__(data)
        self.size = 1 << 45

    def read(self, start, end):
        assert end - start <= 1 << 21
        return self._data[start:end].ljust(end - start, b"\0")


def member(name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def archive(*members, form="gnu", **options):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=FORMATS[form], **options) as writer:
        for info, data in members:
            writer.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def block(name, size=0, *, kind=b"0", data=b"", **fields):
    """A ustar header with any fields, and its data in whole blocks."""
    info, _ = member(name, type=kind, **fields)
    header = info.tobuf(tarfile.USTAR_FORMAT)
    field = size if isinstance(size, bytes) else b"%011o\0" % (size or len(data))
    return signed(header[:124] + field + header[136:]) + data.ljust(padded(len(data)), b"\0")


def signed(header):
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:]


def record(keyword, value):
    body = b" " + keyword + b"=" + value + b"\n"
    return next(b"%d" % n + body for n in range(len(body) + 5) if n == len(body) + len(b"%d" % n))


def pax(*records, kind=b"x", **fields):
    return block("PaxHeader", kind=kind, data=b"".join(records), **fields)


def read(data, limits=None):
    return read_members(Memory(data), limits or Limits())


def as_tarfile(data):
    """Name, kind and spans as Python's own reader has them."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as reader:
        return [
            (info.name, KINDS[info.type], info.offset, info.offset_data, info.offset_data + info.size)
            for info in reader
        ]


def as_ours(data):
    return [
        (one.name, one.kind, one.header.start, one.header.end, one.span.end)
        for one in read(data)
        if one.header.end == one.span.start
    ]


MIXED = (
    member("./", type=tarfile.DIRTYPE),
    member("sys_info", b"x" * 300, mtime=1e9 + 0.25),
    member("empty"),
    member(LONG, b"y" * 512),
    member("vérité", b"z" * 513),
    member("soft", type=tarfile.SYMTYPE, linkname="../" + LONG),
    member("hard", type=tarfile.LNKTYPE, linkname="sys_info"),
    member("pipe", type=tarfile.FIFOTYPE),
    member("device", type=tarfile.CHRTYPE),
    member("old", b"o" * 3, type=tarfile.AREGTYPE),
    member("whole", b"c", type=tarfile.CONTTYPE),
    member("/absolute", b"1", uname="ü" * 10),
    member("../above", b"2"),
    member("twice", b"3"),
    member("twice", b"4"),
    member("volume", b"5" * 9, type=b"V"),
    member("folder/" + "f" * 99 + "/", type=tarfile.DIRTYPE),
)


@pytest.mark.parametrize("form", FORMATS)
def test_it_agrees_with_tarfile(form):
    members = [one for one in MIXED if form != "ustar" or len(one[0].linkname) < 100]
    data = archive(*members, form=form)
    assert as_ours(data) == as_tarfile(data)
    assert len(as_ours(data)) == len(members)


def test_a_global_header_belongs_to_no_member():
    data = archive(member("a", b"1"), member("b", b"2"), form="pax", pax_headers={"comment": "by hand"})
    assert as_ours(data) == as_tarfile(data)


@pytest.mark.parametrize("size", [b"%011o\0" % 5, b"5" + bytes(11), b"          5 ", b"\x80" + (5).to_bytes(11, "big")])
def test_a_size_in_any_writing(size):
    data = block("a", size, data=b"12345") + block("b", data=b"6") + bytes(1024)
    assert as_ours(data) == as_tarfile(data)


def test_a_pax_size_counts_and_the_field_beside_it_does_not():
    data = pax(record(b"size", b"5")) + block("a") + b"12345".ljust(512, b"\0") + block("b") + bytes(1024)
    assert as_ours(data) == as_tarfile(data)


def test_a_pax_path_counts():
    data = pax(record(b"path", b"long/name/"), kind=b"X") + block("a", data=b"1") + bytes(1024)
    assert as_ours(data) == as_tarfile(data)


@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_sparse_member_is_called_so_and_what_follows_it_is_found(more):
    field = b"%011o\0" % 3
    hole = signed(block("s", field, kind=b"S")[:482] + bytes([more > 0]) + b"%011o\0" % 4096 + bytes(17))
    maps = b"".join(bytes(504) + bytes([left > 1]) + bytes(7) for left in range(more, 0, -1))
    data = hole + maps + b"abc".ljust(512, b"\0") + block("after", data=b"1") + bytes(1024)
    sparse, after = read(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as reader:
        infos = reader.getmembers()
    assert sparse.kind == "sparse"
    assert [one.span.start for one in (sparse, after)] == [info.offset_data for info in infos]
    assert data[sparse.span.start : sparse.span.end] == b"abc"


def test_a_sparse_member_of_pax_is_called_so():
    data = (
        pax(record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0")) + block("s", data=b"1") + bytes(512)
    )
    assert [one.kind for one in read(data)] == ["sparse"]


@pytest.mark.parametrize("end", [b"", bytes(100), bytes(512), bytes(1024), bytes(1024) + b"whatever"])
def test_it_ends_at_zeros_or_with_the_file(end):
    assert [one.name for one in read(block("a", data=b"1") + end)] == ["a"]


ONE = block("a", data=b"1")
GLOBAL = pax(record(b"comment", b"c"), kind=b"g")


@pytest.mark.parametrize(
    ("data", "lacking"),
    [
        *((archive(member("a", b"1"), form=form), 0) for form in FORMATS),  # filled up to 10,240 bytes
        (ONE + bytes(1024), 0),
        (ONE + bytes(1024) + b"bytes after the end", 0),
        (ONE + bytes(1024) + archive(member("b", b"2")), 0),  # one archive after the other
        (ONE + bytes(512), 0),  # GNU tar warns of a lone block of zeros
        (GLOBAL + ONE + GLOBAL + bytes(512), 0),
        (ONE + bytes(511), 1),
        (ONE + bytes(100), 412),
        (ONE, 512),
        (ONE * 2, 512),
        (ONE + GLOBAL, 512),
        (b"", 512),
    ],
)
def test_what_its_end_lacks(data, lacking):
    assert read_to_end(Memory(data), Limits()) == (read(data), lacking)


def test_names_that_are_no_utf_8_are_told_apart():
    first, second = read(_named(b"\xfe") + _named(b"\xff"))
    assert (first.name, second.name) == ("\\xfe", "\\xff")


def _named(raw):
    return signed(raw + block("a")[len(raw) :])


NEGATIVE = b"\xff" * 12
HOSTILE = {
    "no-tar": (b"x" * 512, "no valid tar header at byte 0"),
    "second-header": (block("a", data=b"1") + b"x" * 512, "no valid tar header at byte 1024"),
    "half-a-header": (block("a") + block("b")[:300], "no valid tar header at byte 512"),
    "checksum": (block("a").replace(b"a", b"b", 1), "no valid tar header"),
    "negative": (block("a", NEGATIVE), "a negative size"),
    "huge": (block("a", b"\x80" + b"\xff" * 11), "ends before the end of member 'a'"),
    "cut-off": (block("a", data=b"1" * 600)[:-512], "ends before the end of member 'a'"),
    "no-padding": (block("a", data=b"1")[:600], "ends before the end of member 'a'"),
    "folder-size": (block("a", 7, kind=b"5"), "member 'a' is a folder, but has a size"),
    "link-size": (block("a", 7, kind=b"1"), "member 'a' is a link, but has a size"),
    "pax-link-size": (pax(record(b"size", b"9")) + block("a", kind=b"2"), "is a symlink, but has a size"),
    "pax-cut-off": (pax(record(b"path", b"n"))[:600], "ends within the header at byte 0"),
    "pax-size": (pax(record(b"size", b"-1")) + block("a"), "has a size that is not a number"),
    "pax-size-digits": (pax(record(b"size", b"1" * 30)) + block("a"), "has a size that is not a number"),
    "pax-zero-length": (pax(b"0 path=x\n") + block("a"), "an invalid record"),
    "pax-no-length": (pax(b"path=x\n") + block("a"), "an invalid record"),
    "pax-too-long": (pax(b"99 path=x\n") + block("a"), "an invalid record"),
    "pax-no-value": (pax(b"7 path\n") + block("a"), "an invalid record"),
    "pax-no-keyword": (pax(b"5 =x\n") + block("a"), "an invalid record"),
    "pax-no-line-feed": (pax(b"8 path=x") + block("a"), "an invalid record"),
    "pax-nul": (pax(record(b"path", b"a\0b")) + block("a"), "invalid name, or two"),
    "pax-path-too-long": (pax(record(b"path", b"n" * 5000)) + block("a"), "invalid name, or two"),
    "two-pax": (pax(record(b"a", b"b")) * 2 + block("a"), "two extensions of one kind"),
    "two-names": (block("L", kind=b"L", data=b"n\0") + pax(record(b"path", b"m")) + block("a"), "invalid name, or two"),
    "chain": (block("L", kind=b"L") * 5000, "two extensions of one kind"),
    "global-between": (pax(record(b"a", b"b")) + pax(record(b"c", b"d"), kind=b"g"), "two extensions of one kind"),
    "global-size": (pax(record(b"size", b"9"), kind=b"g") + block("a"), "has one size for all"),
    "global-path": (pax(record(b"path", b"9"), kind=b"g") + block("a"), "has one path for all"),
    "global-sparse": (pax(record(b"GNU.sparse.name", b"9"), kind=b"g"), "has one GNU.sparse.name for all"),
    "global-record": (pax(b"0 a=b\n", kind=b"g"), "an invalid record"),
    "nothing-extended": (pax(record(b"path", b"n")) + bytes(512), "has an extension, but no member"),
    "sparse-cut-off": (signed(block("s", kind=b"S")[:482] + b"\1" + bytes(29)) + bytes(504) + b"\1" * 8, ""),
}


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "sparse-cut-off"])
def test_what_lies_is_refused(kind):
    data, message = HOSTILE[kind]
    with pytest.raises(DamagedArchive, match=message):
        read(data)


def test_a_map_of_holes_that_never_ends_ends_with_the_file():
    assert [one.span.nbytes for one in read(HOSTILE["sparse-cut-off"][0])] == [0]


def test_a_long_extension_is_not_read():
    with pytest.raises(LimitExceeded, match="header") as caught:
        read_members(Large(block("x", b"\x80" + (1 << 40).to_bytes(11, "big"), kind=b"x")), Limits())
    assert caught.value.actual == 1 << 40


def test_nothing_of_a_long_member_is_read():
    (found,) = read_members(Large(block("a", b"\x80" + (1 << 44).to_bytes(11, "big"))), Limits())
    assert found.span.nbytes == 1 << 44


def test_the_number_of_members_is_limited():
    assert len(read(block("a") * 3, Limits(entries=3))) == 3
    with pytest.raises(LimitExceeded, match="members of a tar: 4 > 3"):
        read(block("a") * 4, Limits(entries=3))


@pytest.mark.parametrize("form", FORMATS)
def test_cut_anywhere_only_our_errors_escape(form):
    data = archive(*(one for one in MIXED if len(one[0].linkname) < 100), form=form)
    for length in range(0, len(data), 37):
        try:
            found = as_ours(data[:length])
        except CkptMoveError:
            continue
        assert found == as_tarfile(data)[: len(found)]


# --- other sizes -----------------------------------------------------------------------------------------------------


def header_of(data):
    one = read(data)[-1]
    return data[one.header.start : one.header.end]


def size_of(header, nbytes):
    """The size that tarfile reads from a header."""
    with tarfile.open(fileobj=io.BytesIO(header + bytes(min(nbytes, 4096)))) as reader:
        return reader.next().size


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["storages", LONG])
@pytest.mark.parametrize("nbytes", [0, 1, 512, 70_000, 8**11 - 1, 8**11, 1 << 50])
def test_a_header_with_another_size_and_back(form, name, nbytes):
    header = header_of(archive(member(name, b"x" * 100, mtime=1e9 + 0.5), form=form))
    resized = resized_header(header, nbytes)
    assert size_of(resized, nbytes) == nbytes
    assert len(resized) == len(header)
    assert resized_header(resized, 100) == header


@pytest.mark.parametrize("nbytes", [9, 99, 10**6, 8**11 + 5])
def test_a_size_in_a_pax_header_is_the_one_that_changes(nbytes):
    data = pax(record(b"comment", b"c" * 485), record(b"size", b"5"), mtime=9) + block("a") + b"12345".ljust(512)
    header = header_of(data)
    resized = resized_header(header, nbytes)
    assert size_of(resized, nbytes) == nbytes
    assert resized[-512:] == header[-512:]
    assert resized_header(resized, 5) == header


@pytest.mark.parametrize(
    "field",
    [b"%011o\0" % 5, b"%011o " % 5, b"%012o" % 5, b"%11o " % 5, b"\x80" + (5).to_bytes(11, "big"), b"5" + bytes(11)],
)
@pytest.mark.parametrize("checksum", [b"%06o\0 ", b"%06o \0", b"%07o\0", b"%6o\0 "])
def test_a_field_keeps_its_style(field, checksum):
    header = block("a", field)
    header = header[:148] + checksum % (sum(header[:148]) + 256 + sum(header[156:])) + header[156:]
    resized = resized_header(header, 7)
    assert size_of(resized, 7) == 7
    assert resized_header(resized, 5) == header


def test_a_size_that_outgrows_its_digits_gets_them_all():
    resized = resized_header(block("a", b"5" + bytes(11)), 64)
    assert resized[124:136] == b"00000000100\0"
    assert size_of(resized, 64) == 64

"""Mutators that know the structure of a format, so that readers reach the changed part.

A change of random bytes rarely passes a CRC, an offset or a count. Each mutator parses a file, changes a part, and
writes the file with correct counts; sometimes with a wrong one. The caller passes the source of random numbers.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptmove.errors import CkptMoveError
from ckptmove.pickles.scan import SHAPE_OF, operations

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    #: Changes bytes without knowing the format.
    Plain: TypeAlias = Callable[[bytes], bytes]
    Mutator: TypeAlias = Callable[[bytes, Random, Plain], bytes]

NUMBERS: Final = (0, 1, 2, 7, 8, 63, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63)
WORDS: Final = (
    b"cpu", b"cuda", b"cuda:0", b"cuda:1", b"mps", b"meta", b"storage", b"module", b"state", b"step", b"param_groups",
    b"params", b"rng", b"device", b"0", b"1", b"", b"data", b"../x", b"\x1b[2J", "\u202e".encode(), b"\xed\xa0\x80",
    b"a" * 300,
)  # fmt: skip
_GLOBALS: Final = (
    b"torch._utils\n_rebuild_tensor_v2\n", b"torch._utils\n_rebuild_parameter\n", b"torch._utils\n_rebuild_qtensor\n",
    b"torch._utils\n_rebuild_sparse_tensor\n", b"torch._utils\n_rebuild_nested_tensor\n",
    b"torch._utils\n_rebuild_wrapper_subclass\n", b"torch._utils\n_rebuild_device_tensor_from_numpy\n",
    b"torch._utils\n_rebuild_meta_tensor_no_storage\n", b"torch._utils\n_rebuild_tensor_v3\n", b"torch\nFloatStorage\n",
    b"torch\nDoubleStorage\n", b"torch\nQUInt8Storage\n", b"torch\nSize\n", b"torch\ndevice\n", b"torch\nfloat64\n",
    b"torch\nper_channel_affine\n", b"torch._tensor\n_rebuild_from_type_v2\n", b"torch.storage\nUntypedStorage\n",
    b"torch.storage\n_load_from_bytes\n", b"collections\nOrderedDict\n", b"_codecs\nencode\n", b"os\nsystem\n",
    b"torch.nn.modules.linear\nLinear\n", b"numpy.core.multiarray\n_reconstruct\n", b"argparse\nNamespace\n",
)  # fmt: skip

_METADATA: Final[tuple[Any, ...]] = (
    {}, {"format": "\x1b[2J"}, {"a": 1}, [], None, {"format": ""}, {f"{one:x}": "" for one in range(3_000)},
    {"a\\": '"[{\\' * 3_000},
)  # fmt: skip

#: Exceptions of zipfile for an archive that it cannot read.
_NO_ARCHIVE: Final = (zipfile.BadZipFile, zlib.error, OSError, ValueError, RuntimeError, EOFError, struct.error)


def pickle_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Remove, repeat, swap, insert or change operations of a pickle."""
    try:
        spans = [(start, end) for start, end, _ in operations(data)]
    except CkptMoveError:
        return plain(data)
    pieces, rest = [data[start:end] for start, end in spans], data[spans[-1][1] :]
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(pieces))
        match random.randrange(8):
            case 0:
                del pieces[at : at + random.randint(1, 3)]
            case 1:
                pieces[at:at] = pieces[at : at + random.randint(1, 8)]
            case 2:
                other = random.randrange(len(pieces))
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case 3:
                pieces.insert(at, _operation(random))
            case 4:
                pieces[at] = _operation(random)
            case 5:
                begin = random.randrange(len(pieces))
                pieces[at:at] = pieces[begin : begin + random.randint(1, 40)]
            case _:
                pieces[at] = _other_argument(pieces[at], random)
        if not pieces:
            break
    return b"".join(pieces) + rest


def _operation(random: Random) -> bytes:  # noqa: PLR0911  # a case for each kind
    """One complete operation."""
    word, number = random.choice(WORDS), random.choice(NUMBERS)
    match random.randrange(7):
        case 0:
            return b"X" + len(word).to_bytes(4, "little") + word
        case 1:
            return b"c" + random.choice(_GLOBALS)
        case 2:
            return b"\x8a\x09" + number.to_bytes(9, "little")
        case 3:
            return b"(" + random.choice(_GLOBALS).join((b"i", b""))
        case 4:
            return b"h" + bytes([random.randrange(64)])
        case 5:
            return b"q" + bytes([random.randrange(64)])
        case _:
            code = random.choice([code for code, shape in SHAPE_OF.items() if shape == 0])
            return bytes([code])


def _other_argument(operation: bytes, random: Random) -> bytes:
    """The same operation with another argument, if it has one."""
    code, shape = operation[0], SHAPE_OF[operation[0]]
    word = random.choice(WORDS)
    if shape > 0:
        return operation[:1] + random.choice(NUMBERS).to_bytes(9, "little")[:shape]
    if code in b"ci":
        return operation[:1] + random.choice(_GLOBALS)
    widths = {ord("X"): 4, ord("B"): 4, 0x8C: 1, 0x8D: 8, 0x8E: 8, ord("U"): 1, ord("C"): 1, 0x8A: 1}
    if code in widths:
        word = word[: 1 << 8 * widths[code] - 1]
        return operation[:1] + len(word).to_bytes(widths[code], "little") + word
    return operation if shape == 0 else operation[:1] + str(random.choice(NUMBERS)).encode() + b"\n"


def zip_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change, rename, repeat or remove records of an archive, with correct CRCs and offsets or one wrong field."""
    records = records_of(data)
    if not records:
        return plain(data)
    names = [name for name, _, _ in records]
    for _ in range(random.randint(1, 2)):
        at = random.randrange(len(records))
        if random.random() < 0.6:
            at = next((place for place, name in enumerate(names) if name.endswith(".pkl")), at) % len(records)
        name, body, method = records[at]
        match random.randrange(10):
            case 0:
                records[at] = name, body, zipfile.ZIP_DEFLATED - method
            case 1:
                records.insert(at, (random.choice(names), body, method))
            case 2:
                del records[at]
            case 3:
                records[at] = _other_name(name, random), body, method
            case 4:
                records[at] = name, body[: random.randrange(len(body) + 1)], method
            case 5 if name.endswith(".pkl"):  # lists, which compress well
                records[at] = name, body[:2] + b"(" + b"]" * 3_000 + b"l0" + body[2:], zipfile.ZIP_DEFLATED
            case _ if name.endswith(".pkl"):
                records[at] = name, pickle_mutator(body, random, plain), method
            case _:
                records[at] = name, plain(body), method
        if not records:
            break
    built = zipped(records)
    return _with_other_field(built, random) if random.random() < 0.3 else built


def records_of(data: bytes) -> list[tuple[str, bytes, int]]:
    """Name, content and method of each record of an archive; empty if it cannot be read."""
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            return [(one.filename, archive.read(one), one.compress_type) for one in archive.infolist()]
    except _NO_ARCHIVE:
        return []


def _other_name(name: str, random: Random) -> str:
    folder, _, own = name.partition("/")
    return random.choice(
        (f"{folder}/{own.upper()}", f"{folder}x/{own}", f"{name}/", own, f"{folder}/../{own}", f"{name}\x1b[2J")
    )


def zipped(records: list[tuple[str, bytes, int]]) -> bytes:
    """Write an archive with the data of each record at a multiple of 64, as torch does."""
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, body, method in records:
            entry = zipfile.ZipInfo(name.replace("\0", ""))
            entry.compress_type = method
            missing = -(stream.tell() + 30 + len(entry.filename.encode()) + 4) % 64
            entry.extra = b"FB" + missing.to_bytes(2, "little") + b"Z" * missing
            # Repeated names are intended.
            archive._didModify = True  # type: ignore[attr-defined]  # noqa: SLF001  # else an empty archive has no end record
            archive.NameToInfo.pop(entry.filename, None)
            archive.writestr(entry, body)
    return stream.getvalue()


def _with_other_field(data: bytes, random: Random) -> bytes:
    """Flip a bit of a local header, a central entry or the end record, or change a field."""
    changed = bytearray(data)
    signature = random.choice((b"PK\x03\x04", b"PK\x01\x02", b"PK\x01\x02", b"PK\x05\x06"))
    places = [at for at in range(len(data) - 3) if data[at : at + 4] == signature]
    if not places:
        return data
    if random.random() < 0.3:
        at = random.choice(places) + random.randrange(4, {b"PK\x03\x04": 30, b"PK\x01\x02": 46}.get(signature, 22))
        changed[min(at, len(changed) - 1)] ^= 1 << random.randrange(8)
        return bytes(changed)
    fields = {
        b"PK\x03\x04": ((6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
        b"PK\x01\x02": ((8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4)),
        b"PK\x05\x06": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    }[signature]
    offset, size = random.choice(fields)
    at = random.choice(places) + offset
    old = int.from_bytes(changed[at : at + size], "little")
    new = random.choice((*NUMBERS, old + 1, max(old - 1, 0), old + 64, old ^ 0x800))
    changed[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(changed)


def legacy_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change one of the five pickles of a stream, most often the object pickle, or the bytes after them."""
    ends = [0]
    try:
        for _ in range(5):
            ends.append(max(end for _, end, _ in operations(data, ends[-1])))
    except CkptMoveError:
        return plain(data)
    pickles, rest = [data[begin:end] for begin, end in pairwise(ends)], data[ends[-1] :]
    place = random.choice((2, 3, 3, 3, 3, 3, 4, 5))
    if place == 5:
        return b"".join(pickles) + plain(rest)
    pickles[place] = pickle_mutator(pickles[place], random, plain)
    return b"".join(pickles) + rest


def bare_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change the pickle, or one of the streams in it, and update the length of the stream."""
    try:
        strings = [
            (start, end, code) for start, end, code in operations(data) if code in b"BC\x8e" and end - start > 64
        ]
    except CkptMoveError:
        return plain(data)
    if not strings or random.random() < 0.5:
        return pickle_mutator(data, random, plain)
    start, end, code = random.choice(strings)
    body = data[start + {ord("B"): 5, ord("C"): 2, 0x8E: 9}[code] : end]
    inner = zip_mutator if body.startswith(b"PK") else legacy_mutator
    body = inner(body, random, plain)
    return data[:start] + b"B" + len(body).to_bytes(4, "little") + body + data[end:]


def safetensors_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change an entry of the header, and update the length of the header."""
    length = int.from_bytes(data[:8], "little")
    try:
        header: Any = json.loads(data[8 : 8 + length])
        name = random.choice(sorted(header))
        row = header[name]
        match random.randrange(6):
            case 0:
                row["shape"] = random.choice(([], [0], [2**62, 4], [-1], [1.5], [True], ["2"], [1] * 70))
            case 1:
                row["data_offsets"][random.randrange(2)] = random.choice((*NUMBERS, -1, 1e3, None))
            case 2:
                row["dtype"] = random.choice(("F4", "F64", "BOOL", "F8_E8M0", "X", "", None, "F6_E2M3"))
            case 3:
                header[random.choice(WORDS).decode("utf-8", "replace")] = header.pop(name)
            case 4:
                header["__metadata__"] = random.choice(_METADATA)
            case _:
                header[name] = random.choice(([], {}, None, row, {"dtype": "F32"}, 0))
    except (ValueError, LookupError, TypeError, RecursionError):
        return plain(data)
    raw = json.dumps(header, ensure_ascii=random.random() < 0.5).encode()
    return len(raw).to_bytes(8, "little") + raw + data[8 + length :]


def mixed(mutator: Mutator, data: bytes, random: Random, plain: Plain) -> bytes:
    """Apply the mutator of the format; sometimes, the one that knows no format."""
    return plain(data) if not data or random.random() < 0.15 else mutator(data, random, plain)

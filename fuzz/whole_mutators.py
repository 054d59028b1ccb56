"""Mutators of tars, archives of checkpoints and directories, which keep them readable.

They change a member or a file with the mutator of its format.
"""

from __future__ import annotations

import json
import tarfile
import zipfile
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from ckptmove.errors import CkptMoveError
from ckptmove.formats.dcp.checkpoint import DistributedCheckpoint
from ckptmove.formats.head import BLOCK
from ckptmove.formats.tar_index import padded, read_members, resized_header
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from ckptmove.pickles.scan import operations
from fuzz import mutators
from fuzz.mutators import NUMBERS, WORDS
from fuzz.packing import Entry, pack, unpack
from fuzz.seeds import deflated, zip_of
from fuzz.whole_seeds import tar_of

if TYPE_CHECKING:
    from random import Random

    from fuzz.mutators import Mutator, Plain

_TYPES: Final = b"0\x001234567xgLKSVDMXA"
#: Offset and length of fields of a tar header to change.
_FIELDS: Final = ((0, 100), (100, 8), (124, 12), (136, 12), (157, 100), (257, 8), (345, 155))
_SIZE: Final = 124, 12
_TYPE: Final = 156
_CHECKSUM: Final = slice(148, 156)
_PAX: Final = (b"size", b"path", b"linkpath", b"mtime", b"GNU.sparse.size", b"GNU.sparse.name", b"hdrcharset", b"x")
#: Members of torch 0.1 with several pickles and raw bytes between them.
_RUNS: Final = frozenset({"tensors", "storages"})
_PICKLES: Final = frozenset({"pickle", "sys_info"})
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_NAMES: Final = (
    b"pytorch_model.bin", b"model.safetensors", b"optimizer.pt", b"optimizer.bin", b"scheduler.pt", b"scaler.pt",
    b"rng_state_0.pth", b"random_states_1.pkl", b"training_args.bin", b"trainer_state.json", b"config.json",
    b"pytorch_model.bin.index.json", b"model.safetensors.index.json", b"pytorch_model-00001-of-00002.bin",
    b"mp_rank_01_model_states.pt", b"bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", b"latest", b"last_checkpoint",
    b".metadata", b"__1.metadata", b"__0_0.distcp", b".metadata.tmp", b"model_weights.ckpt", b"common.pt",
    b"_stable_baselines3_version", b".hidden/model.pt", b"a/b/c/d.pt", b"snapshots/x/model.pt", b"\xff\x1b[2J.pt",
    b"\xe2\x80\xae.pth", b"ema.pt", b"policy.optimizer.pth",
)  # fmt: skip
_BODIES: Final = (
    b"",
    b"\0" * 99,
    b"version https://git-lfs.github.com/spec/v1\n",
    b"<html>",
    b"{}",
    b"N.",
    b"\x80\x02}.",
)


def tar_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change, rename, repeat or remove a member of a tar, with correct sizes and checksums or one wrong field."""
    try:
        members = read_members(MemorySource("input", data), Limits())
    except CkptMoveError:
        return _summed_again(plain(data))
    pieces = [
        (one.name.removeprefix("./"), data[one.header.start : one.header.end], data[one.span.start : one.span.end])
        for one in members
    ]
    if not pieces:
        return plain(data)
    tail = data[padded(members[-1].span.end) :]
    at = random.randrange(len(pieces))
    name, header, body = pieces[at]
    match random.randrange(16):
        case 0:
            del pieces[at]
        case 1:
            pieces.insert(random.randrange(len(pieces) + 1), pieces[at])
        case 2:
            other = random.randrange(len(pieces))
            pieces[at], pieces[other] = pieces[other], pieces[at]
        case 3:
            pieces[at] = name, _other_field(header, random), body
        case 4:
            pieces[at] = name, _extension(random) + header, body
        case 5:
            tail = random.choice((plain(tail), tail[: random.randrange(len(tail) + 1)], b""))
        case 7:
            del pieces[at:]  # cut off before a member
            tail = b""
        case 6:
            pieces[at] = name, header, body[: random.randrange(len(body) + 1)]  # less than the size in its header
        case _:
            body = _member_mutator(name)(body, random, plain)
            pieces[at] = name, _resized(header, len(body)), body
    return b"".join(header + body.ljust(padded(len(body)), b"\0") for _, header, body in pieces) + tail


def archive_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change a member of a zip or a tar with the mutator of its format."""
    if not data.startswith(b"PK"):
        return tar_mutator(data, random, plain)
    records = mutators.records_of(data)
    if not records or random.random() < 0.3:
        return mutators.zip_mutator(data, random, plain)
    at = random.randrange(len(records))
    name, body, method = records[at]
    if random.random() < 0.1:
        form = random.choice((tar_of, zip_of, deflated))
        records[at] = name, form({name.rpartition("/")[2] or "x": body}), method
    elif random.random() < 0.2:
        name = random.choice((name, *(one.decode("latin-1") for one in _NAMES)))
        records.insert(at, (name, body, zipfile.ZIP_DEFLATED - method))
    else:
        records[at] = name, content_mutator(body, random, plain), method
    return mutators.zipped(records)


def content_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change a file with the mutator of its format."""
    return _mutator_of(data)(data, random, plain) if random.random() < 0.9 else plain(data)


def directory_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change, rename, repeat, remove or link a file of a directory, and update ``.metadata``."""
    entries = unpack(data)
    if not entries:
        return plain(data)
    at = random.randrange(len(entries))
    kind, name, body = entries[at]
    folder, slash, _ = name.rpartition(b"/")
    match random.randrange(16):
        case 0:
            del entries[at]
        case 1:
            entries.insert(0, Entry(kind, folder + slash + random.choice(_NAMES), body))
        case 2:
            entries[at] = Entry(kind, random.choice((b"", folder + slash, b"x/")) + random.choice(_NAMES), body)
        case 3:
            entries.append(Entry(1, random.choice(_NAMES), random.choice((name, folder, b"nowhere"))))
        case 4:
            entries.append(Entry(0, folder + slash + random.choice(_NAMES), random.choice(_BODIES)))
        case 5:
            other = random.randrange(len(entries))
            entries[at], entries[other] = (
                entries[at]._replace(body=entries[other].body),
                entries[other]._replace(body=body),
            )
        case 6:
            entries[at] = Entry(kind, b"sub/" + name, body)
        case 7:
            entries[at] = Entry(random.randrange(4), name, body)
        case _ if name.endswith(b".distcp"):
            entries = _with_other_piece(entries, at, random, plain)
        case _ if name.endswith(b"metadata"):
            entries[at] = Entry(kind, name, mutators.pickle_mutator(body, random, plain))
        case _:
            entries[at] = Entry(kind, name, content_mutator(body, random, plain))
    return pack(entries)


def json_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change a value or a key of a JSON document."""
    try:
        document: Any = json.loads(data)
        inner = document
        while isinstance(inner, dict) and inner and random.random() < 0.7:
            parent, key = inner, random.choice(sorted(inner))
            inner = inner[key]
        name = random.choice(_NAMES).decode("latin-1")
        value: object = random.choice(("../x", "/etc/passwd", "", None, 1e999, [], {}, 2**70, name, "\ud800"))
        if random.random() < 0.3:
            parent[random.choice(WORDS).decode("latin-1")] = value
        else:
            parent[key] = value
        return json.dumps(document).encode()
    except (ValueError, LookupError, TypeError, RecursionError, UnboundLocalError):
        return plain(data)


def _mutator_of(data: bytes) -> Mutator:
    if data.startswith(b"PK"):
        return archive_mutator
    if data[257:262] == b"ustar":
        return tar_mutator
    if data.startswith(_LEGACY):
        return mutators.legacy_mutator
    if data.startswith(b"\x80"):
        return mutators.bare_mutator
    return json_mutator if data.startswith(b"{") else mutators.safetensors_mutator


# --- tar -------------------------------------------------------------------------------------------------------------


def _member_mutator(name: str) -> Mutator:
    if name in _PICKLES:
        return mutators.pickle_mutator
    return _run_mutator if name in _RUNS else content_mutator


def _run_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change one of several pickles, or a number in the raw bytes between them."""
    ends = [0]
    while (begin := data.find(b"\x80\x02", ends[-1])) >= 0:
        try:
            end = max(end for _, end, _ in operations(data, begin))
        except CkptMoveError:
            break
        ends += begin, end
    pieces = [data[begin:end] for begin, end in pairwise([*ends, len(data)])]
    at = random.randrange(len(pieces))
    piece = pieces[at]
    if at % 2:
        pieces[at] = mutators.pickle_mutator(piece, random, plain)
    elif len(piece) >= 8 and random.random() < 0.7:
        word = 8 * random.randrange(len(piece) // 8)
        number = random.choice((*NUMBERS, 3, 2**64 - 1)) % 2**64
        pieces[at] = piece[:word] + number.to_bytes(8, "little") + piece[word + 8 :]
    else:
        pieces[at] = plain(piece)
    return b"".join(pieces)


def _resized(header: bytes, nbytes: int) -> bytes:
    try:
        return resized_header(header, nbytes)
    except (tarfile.TarError, ValueError):  # a sparse member
        return header


def _other_field(header: bytes, random: Random) -> bytes:
    """Change a field of a header, and update the checksum."""
    block = bytearray(header[-BLOCK:])
    if random.random() < 0.3:
        block[_TYPE] = random.choice(_TYPES)
        return header[:-BLOCK] + _summed(bytes(block))
    offset, length = random.choice((_SIZE, *_FIELDS))
    number = random.choice(NUMBERS)
    words = (
        *WORDS, b"%o" % number, b"%011o\0" % number, b"\x80" + number.to_bytes(11, "big"), b"\xff" * 12, b"-1", b" 7 ",
        b"a/" * 50, b"ustar  \0",
    )  # fmt: skip
    block[offset : offset + length] = random.choice(words)[:length].ljust(length, b"\0")
    return header[:-BLOCK] + _summed(bytes(block))


def _extension(random: Random) -> bytes:
    """An extension header of pax or GNU tar, which precedes the header of a member."""
    if random.random() < 0.3:
        kind, data = random.choice((tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)), random.choice(WORDS) * 9
    else:
        kind = random.choice((tarfile.XHDTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE))
        data = b"".join(_pax_record(random) for _ in range(random.randint(1, 3)))
    info = tarfile.TarInfo("extension")
    info.type, info.size = kind, len(data)
    return info.tobuf(tarfile.GNU_FORMAT) + data.ljust(padded(len(data)), b"\0")


def _pax_record(random: Random) -> bytes:
    number = b"%d" % random.choice(NUMBERS)
    body = b" " + random.choice(_PAX) + b"=" + random.choice((number, number, *WORDS)) + b"\n"
    length = len(body) + 2 + (len(body) > 97)
    return b"%d" % random.choice((length, length, length, *NUMBERS)) + body


def _summed(block: bytes) -> bytes:
    blank = block[: _CHECKSUM.start] + b" " * 8 + block[_CHECKSUM.stop :]
    return block[: _CHECKSUM.start] + b"%06o\0 " % sum(blank) + block[_CHECKSUM.stop :]


def _summed_again(data: bytes) -> bytes:
    """Update the checksum of every block that looks like a header."""
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    return b"".join(_summed(block) if block[257:262] == b"ustar" and len(block) == BLOCK else block for block in blocks)


# --- distributed checkpoints -----------------------------------------------------------------------------------------


def _with_other_piece(entries: list[Entry], at: int, random: Random, plain: Plain) -> list[Entry]:
    """Change one piece in a file, and update its offset and length in ``.metadata``."""
    kind, name, body = entries[at]
    folder, slash, own = name.rpartition(b"/")
    table = next((one for one in entries if one.name == folder + slash + b".metadata"), None)
    try:
        sizes = {one.name.rpartition(b"/")[2].decode(): len(one.body) for one in entries}
        table_source = MemorySource("input", table.body if table else b"")
        pieces = DistributedCheckpoint(table_source, sizes, Limits()).metadata.pieces
        mine = [piece.span for piece in pieces if piece.file.encode() == own and piece.span.end <= sizes[piece.file]]
    except (CkptMoveError, UnicodeDecodeError):
        mine = []
    if not mine or table is None:
        return [*entries[:at], Entry(kind, name, content_mutator(body, random, plain)), *entries[at + 1 :]]
    span = random.choice(mine)
    new = content_mutator(body[span.start : span.end], random, plain)
    growth = len(new) - span.nbytes
    moved = {one.start: one.start + growth for one in mine if one.start >= span.end} | {span.nbytes: len(new)}
    changed = list(entries)
    changed[at] = Entry(kind, name, body[: span.start] + new + body[span.end :])
    changed[entries.index(table)] = Entry(table.kind, table.name, _renumbered(table.body, moved))
    return changed


def _renumbered(pickled: bytes, numbers: dict[int, int]) -> bytes:
    """Replace integers of two or four bytes in a pickle: lengths and offsets of pieces are no smaller."""
    pieces: list[bytes] = []
    for start, end, code in operations(pickled):
        value = int.from_bytes(pickled[start + 1 : end], "little")
        is_one = code in b"JM" and value in numbers
        pieces.append(b"J" + numbers[value].to_bytes(4, "little") if is_one else pickled[start:end])
    return b"".join(pieces)

"""Read a safetensors file: a JSON table of names, dtypes, shapes and offsets, then the bytes of the tensors.

Tensors are not read. The table must cover the file exactly once.

From the format's description and ``safetensors/src/tensor.rs`` (``Metadata::validate``, ``Dtype``). The library itself
does not return offsets.
"""

from __future__ import annotations

import hashlib
import json
import re
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

from ckptmove.errors import DamagedArchive, LimitExceeded, UnsupportedContainer
from ckptmove.formats.contract import Container
from ckptmove.formats.rebuild_calls import plain_table_machine, table_machine
from ckptmove.io.contracts import CopySegment
from ckptmove.model import ArchiveFact, Span
from ckptmove.pickles.rebuild_arguments import LARGEST
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import StorageRef
    from ckptmove.pickles.state import Machine

_LENGTH_BYTES: Final = 8
METADATA: Final = "__metadata__"
#: Sizes are signed 64-bit integers.
_MOST_DIGITS: Final = 19
#: Far more than any operator takes, and few enough that a product stays cheap.
_MOST_AXES: Final = 1000
_LONGEST_PRODUCER: Final = 40
#: Keys of a row; its offsets are two. Other keys are ignored, as by the library.
_ROW: Final = ["dtype", "shape", "data_offsets"]
_ENDS: Final = 2
_ALL_INT: Final = frozenset({int})
#: Forms that are kept to be used again.
_MOST_FORMS: Final = 1 << 14
#: The shortest row, '"":{"dtype":"U8","shape":[],"data_offsets":[0,0]}', has three objects and lists in 49 bytes.
_BYTES_PER_OPENING: Final = 16
_OPENINGS: Final = b"{["
#: Contents of a row: an object and two lists; its name, three keys and a dtype.
_OPENINGS_PER_ROW: Final = 3
_STRINGS_PER_ROW: Final = 5
#: Maximum number of strings in the metadata, two for each entry: enough for one entry per tensor.
_OTHER_STRINGS: Final = 1 << 19
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(_OPENINGS + b'"'))
#: Openings, or a string with its content.
_RUN: Final = re.compile(rb'([{\[]+)|"[^"]*"?')
DTYPES: Final[dict[str, str]] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
#: Numbers in one element of torch's dtype: the table counts numbers, torch counts bytes.
NUMBERS: Final[dict[str, int]] = {"float4_e2m1fn_x2": 2}


class _Row(NamedTuple):
    """A row of the table; one object for each tensor, because there may be millions."""

    dtype: str  # as written
    shape: tuple[int, ...]  # as written: numbers of any type
    start: int  # offset of its first byte from the end of the header
    end: int  # offset after its last byte


#: What the dtype and the shape of a row mean in torch, and their length in bytes; None if that is no whole number.
_Form: TypeAlias = tuple[str, tuple[int, ...], int | None]


class SafetensorsFile(Container):
    """A file of ``safetensors.torch.save_file``, which is little-endian."""

    name = "safetensors"

    @classmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> SafetensorsFile:
        return cls(source, limits)

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        self.source = source
        self.limits = limits
        length = int.from_bytes(source.read(0, _LENGTH_BYTES), "little")
        self._data_start = _LENGTH_BYTES + length
        if self._data_start > source.size:
            raise self._damage(f"its header has {length} bytes, but the file ends before")
        header = self._parse(source.read(_LENGTH_BYTES, self._data_start))
        found = header.pop(METADATA, None)
        self.producer = self._format(found)
        self.notes = found or {}
        if len(header) > limits.records:
            raise LimitExceeded("the number of tensors", limit=limits.records, actual=len(header))
        self._forms: dict[tuple[str, tuple[int, ...]], _Form] = {}
        self._rows: dict[str, _Row] = header
        for name, row in header.items():
            self._check_row(name, row)
        self._check_cover()

    def read(self) -> Machine:
        """The tree that ``load_file(path)`` would return: a state_dict, without a place in any pickle."""
        return table_machine(self._tensors(), self.limits, self._data_start)

    def read_compact(self) -> Machine:
        return plain_table_machine(self._tensors(), self.limits, self._data_start)

    def _tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each tensor, as in torch."""
        for name, row in self._rows.items():
            dtype, shape, _ = self._form(name, row)
            yield name, dtype, shape

    def object_pickle(self) -> bytes:
        """Empty: the format has no pickle."""
        return b""

    def extras(self) -> tuple[tuple[str, bytes], ...]:
        """The metadata: a dict of strings."""
        text = json.dumps(self.notes, sort_keys=True)
        return ((METADATA, hashlib.sha256(text.encode()).digest()),) if self.notes else ()

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Storages that the file lacks; the table itself is already checked."""
        return tuple(
            ArchiveFact("missing-storage", storage.key, storage.nbytes)
            for storage in storages
            if storage.key not in self._rows
        )

    def storage_span(self, key: str) -> Span | None:
        row = self._rows.get(key)
        return None if row is None else Span(self._data_start + row.start, self._data_start + row.end)

    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The file unchanged: it stores no device."""
        return (CopySegment(Span(0, self.source.size)),)

    def _parse(self, raw: bytes) -> dict[str, Any]:
        self._bound(raw)
        try:
            header: Any = json.loads(
                raw.decode("utf-8"),
                object_pairs_hook=_object,
                parse_int=_integer,
                parse_float=_refuse,
                parse_constant=_refuse,
            )
        except RecursionError as error:
            raise self._damage("its header is nested too deeply") from error
        except ValueError as error:
            raise self._damage(f"its header is not JSON of safetensors: {error}") from error
        if type(header) is _Row:
            header = header._asdict()
        # Starts with a brace: otherwise the file would be of another format.
        return cast("dict[str, Any]", header)

    def _bound(self, raw: bytes) -> None:
        """Check the header before parsing: its objects, lists and strings take far more memory in Python."""
        openings, strings = sum(raw.count(opening) for opening in (b"{", b"[")), raw.count(b'"') // 2
        most = len(raw) // _BYTES_PER_OPENING + len(_OPENINGS)
        factor = self.limits.factor
        if openings > factor * most or strings > factor * _OTHER_STRINGS:  # or they are inside strings
            openings, strings = _count(raw)
            self._require("objects and lists in the header", openings, factor * most)
            others = strings - _STRINGS_PER_ROW * (openings // _OPENINGS_PER_ROW)
            self._require("strings in the header outside of tensors", others, factor * _OTHER_STRINGS)

    def _require(self, what: str, actual: int, most: int) -> None:
        if actual > most:
            raise LimitExceeded(f"the number of {what}", limit=most, actual=actual, path=self.source.path)

    def _format(self, metadata: object) -> str | None:
        """The library that the metadata names."""
        if metadata is None:
            return None
        if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
            raise self._damage(f"its {METADATA} is not a dict of strings")
        name = metadata.get("format")
        return f"format {name[:_LONGEST_PRODUCER]}" if name else None

    def _check_row(self, name: str, row: object) -> None:
        if type(row) is not _Row:
            raise self._damage(f"the row of tensor {name[:40]!r} is not as safetensors writes it")
        is_long = len(row.shape) > _MOST_AXES
        if is_long or not _ALL_INT.issuperset(map(type, (*row.shape, row.start, row.end))):  # True equals 1
            raise self._damage(f"a size or an offset of tensor {name[:40]!r} is invalid")
        if self._form(name, row)[2] != row.end - row.start:
            raise self._damage(f"tensor {name[:40]!r} has {row.end - row.start} bytes, which do not match its shape")

    def _form(self, name: str, row: _Row) -> _Form:
        return self._forms.get((row.dtype, row.shape)) or self._new_form(name, row)  # most have that of another row

    def _new_form(self, name: str, row: _Row) -> _Form:
        shape = row.shape
        if any(size < 0 for size in (*shape, row.start, row.end)):
            raise self._damage(f"a size or an offset of tensor {name[:40]!r} is invalid")
        dtype = DTYPES.get(row.dtype)
        if dtype is None:
            raise UnsupportedContainer(self.source.path, self.name, f"a safetensors file with dtype {row.dtype[:40]!r}")
        numbers = NUMBERS.get(dtype, 1)
        nbytes, rest = divmod(prod(shape) * ITEM_BYTES[dtype], numbers)
        is_whole = not rest and (numbers == 1 or shape[-1] % numbers == 0)
        if is_whole and numbers > 1:
            shape = (*shape[:-1], shape[-1] // numbers)
        if len(self._forms) > _MOST_FORMS:
            self._forms.clear()
        form = self._forms[row.dtype, row.shape] = dtype, shape, nbytes if is_whole else None
        return form

    def _check_cover(self) -> None:
        """Raise DamagedArchive unless every byte after the header belongs to exactly one tensor."""
        position = 0
        for name, row in sorted(self._rows.items(), key=lambda item: (item[1].start, item[1].end)):
            if row.start != position:
                what = "overlaps the one before it" if row.start < position else "has a hole before it"
                raise self._damage(f"tensor {name[:40]!r} {what}")
            position = row.end
        there = self.source.size - self._data_start
        if there != position:
            raise self._damage(f"its tensors have {position} bytes, but the file has {there}")

    def _damage(self, detail: str) -> DamagedArchive:
        return DamagedArchive(self.source.path, detail)


def _count(raw: bytes) -> tuple[int, int]:
    """Number of objects and lists in JSON, and number of strings."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two adjacent quotes are an empty string, or the end of one string and the start of the next: remove both.
    structure = unescaped.translate(None, _NOT_STRUCTURE)
    runs = _RUN.finditer(structure.replace(b'""', b""))
    return sum(len(run[1] or b"") for run in runs), structure.count(b'"') // 2


def _object(pairs: list[tuple[str, Any]]) -> _Row | dict[str, Any]:
    """An object of the header: a row at once, which takes a quarter of the memory of its dict and lists."""
    found = dict(pairs) if [key for key, _ in pairs] == _ROW else _once(pairs)
    dtype, shape, offsets = map(found.get, _ROW)
    if type(dtype) is str and type(shape) is list and type(offsets) is list and len(offsets) == _ENDS:
        return _Row(dtype, tuple(shape), *offsets)
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        key.encode("utf-8")  # Rust rejects half a surrogate pair
        if key in found:
            raise ValueError(f"duplicate key {key[:40]!r}")
        found[key] = value
    return found


def _integer(text: str) -> int:
    return (
        int(text) if len(text) < _MOST_DIGITS or (len(text) == _MOST_DIGITS and int(text) <= LARGEST) else _refuse(text)
    )


def _refuse(text: str) -> int:
    raise ValueError(f"{text[:40]} is not a size")

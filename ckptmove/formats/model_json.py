"""Read the archive that ``torch.jit.save`` wrote from 1.0 to 1.2: ``model.json`` lists the module and its tensors.

It is read-only: torch no longer reads this form, so that an edited file could not be verified.

Fields from caffe2/proto/torch.proto ``ModelDef``, in protobuf's JSON form, where numbers are strings.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Final, cast

from ckptmove.errors import DamagedArchive, LimitExceeded, UneditablePickle
from ckptmove.formats.export_pickle import push_int, push_ints
from ckptmove.formats.torchscript import TorchScript
from ckptmove.model import Span
from ckptmove.pickles.script import PicklePart

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.formats.zip_archive.index import ZipDirectory, ZipRecord
    from ckptmove.io.changes import Patch
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits

_LIST: Final = "model.json"
_ONLY_READ: Final = "torch before 1.3 kept it in model.json, which is only read,"
#: caffe2/proto/caffe2.proto ``TensorProto.DataType``.
_STORAGES: Final[dict[str, str]] = {
    "FLOAT": "FloatStorage", "INT32": "IntStorage", "UINT8": "ByteStorage", "INT8": "CharStorage",
    "INT16": "ShortStorage", "INT64": "LongStorage", "FLOAT16": "HalfStorage", "DOUBLE": "DoubleStorage",
    "BOOL": "BoolStorage",
}  # fmt: skip
#: Maximum length of a tensor's pickle operations; several modules may repeat them.
_TENSOR_BYTES: Final = 1 << 12
#: Maximum length of the pickle: a constant, and an allowance for each byte of the JSON. For a file of torch it is
#: shorter than the JSON.
_PICKLE_BYTES: Final = 1 << 20
_PICKLE_BYTES_PER_BYTE: Final = 8
_ITEM_BYTES: Final[dict[str, int]] = {
    "FLOAT": 4, "INT32": 4, "UINT8": 1, "INT8": 1, "INT16": 2, "INT64": 8, "FLOAT16": 2, "DOUBLE": 8, "BOOL": 1,
}  # fmt: skip


class ModelJson(TorchScript):
    """A module of ``torch.jit.save`` before 1.3; ``model.json`` names the version of torch."""

    _main = _LIST
    _own_pickles = (_LIST,)

    @classmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> TorchScript:
        """Open a TorchScript archive of either form."""
        records = cast("ZipDirectory", directory).records
        is_listed = any(name.partition("/")[2] == _LIST for name in records.names())
        return (cls if is_listed else TorchScript)(source, cast("ZipDirectory", directory), limits)

    def __init__(self, source: ByteSource, directory: ZipDirectory, limits: Limits) -> None:
        super().__init__(source, directory, limits)
        stored = {f"tensors/{key}": record for key, record in self._within("tensors/").items()}
        self._storages = {key: record.place for key, record in stored.items()}
        record = self._inside[_LIST]
        limit = self.limits.max_inflated_bytes(0)
        if record.nbytes > limit:
            raise LimitExceeded("the size of model.json in bytes", limit=limit, actual=record.nbytes)
        text = self._read(record, "the size of model.json in bytes")
        try:
            model = json.loads(text)
            self.torch_version = str(model["producerVersion"])[:40] if "producerVersion" in model else None
            pieces = _module(model["mainModule"], _Tensors(model, stored))
            self._pickle = b"\x80\x02" + self._joined(pieces, len(text)) + b"."
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
            raise DamagedArchive(source.path, "its model.json is not as torch writes it") from error

    def _joined(self, pieces: Iterator[bytes], text_bytes: int) -> bytes:
        """Join the pieces, with a limit: any number of modules may name one tensor, which takes kilobytes each time."""
        limit = min(
            self.limits.pickle_bytes, self.limits.factor * (_PICKLE_BYTES + _PICKLE_BYTES_PER_BYTE * text_bytes)
        )
        pickle = bytearray()
        for piece in pieces:
            pickle += piece
            if len(pickle) > limit:
                raise LimitExceeded("the size of a pickle in bytes", limit=limit, actual=len(pickle))
        return bytes(pickle)

    def object_pickle(self) -> bytes:
        """The module in ``model.json``, as the pickle that torch 1.3 would have written for it."""
        return self._pickle

    def _parts(self) -> tuple[PicklePart, ...]:
        return (PicklePart(Span(0, len(self._pickle)), _LIST),)

    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The same archive."""
        if casts or pickle != self._pickle:
            raise UneditablePickle(_ONLY_READ, offset=0)
        return super().lay_out(pickle, casts)

    def patch(self, pickle: bytes) -> Patch:
        """Raise UneditablePickle: this form is read-only."""
        raise UneditablePickle(_ONLY_READ, offset=0)


class _Tensors:
    """The tensors of ``model.json`` as pickle operations; it tracks which of them a module names."""

    def __init__(self, model: Any, records: Mapping[str, ZipRecord]) -> None:
        self._tensors: list[Any] = model.get("tensors", [])
        self._records = records
        self._named: set[int] = set()

    def by_name(self, index: int) -> bytes:
        """A tensor that a module names."""
        self._named.add(index)
        return self._rebuild(self._tensors[index])

    def constants(self) -> Iterator[bytes]:
        """The other tensors, by the names that the code has for them."""
        for index, tensor in enumerate(self._tensors):
            if index not in self._named:
                yield _text(f"c{index}") + self._rebuild(tensor)

    def _rebuild(self, tensor: Any) -> bytes:
        kind, key = tensor["dataType"], tensor["data"]["key"]
        record = self._records.get(key)
        sizes = [int(size) for size in tensor.get("dims", [])]
        strides = [int(step) for step in tensor.get("strides", [])]
        reach = int(tensor.get("offset", 0)) + 1 + sum((a - 1) * b for a, b in zip(sizes, strides, strict=True))
        numel = record.nbytes // _ITEM_BYTES[kind] if record is not None else reach
        storage = f"ctorch\n{_STORAGES[kind]}\n".encode()
        written = b"".join((
            b"ctorch._utils\n_rebuild_tensor_v2\n((", _text("storage"), storage, _text(key), _text(tensor["device"]),
            push_int(numel), b"tQ", push_int(int(tensor.get("offset", 0))), push_ints(sizes), push_ints(strides),
            b"\x88" if tensor.get("requiresGrad") else b"\x89", b"ccollections\nOrderedDict\n)RtR",
        ))  # fmt: skip
        if len(written) > _TENSOR_BYTES:
            raise ValueError(key)
        return written


def _module(module: Any, tensors: _Tensors, *, is_root: bool = True) -> Iterator[bytes]:
    """An object with the parameters, buffers and submodules of a module as its attributes."""
    yield b"c__torch__\nModule\n)\x81}("
    for parameter in module.get("parameters", []):
        yield _text(parameter["name"])
        yield tensors.by_name(int(parameter.get("tensorId", 0)))
    for child in module.get("submodules", []):
        yield _text(child["name"])
        yield from _module(child, tensors, is_root=False)
    if is_root:
        yield _text("CONSTANTS") + b"}("
        yield from tensors.constants()
        yield b"u"
    yield b"ub"


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw

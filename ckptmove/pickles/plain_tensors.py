"""Read a plain tensor in one step, as one small node.

A tensor of ``torch.save`` takes about thirty operations, from ``Tensor.__reduce_ex__`` and ``persistent_id`` of
torch/serialization.py. A pattern matches all of them at once. Other tensors are read operation by operation: those
before the memo has 256 values, with attributes or hooks, of a subclass, or past the end of their storage.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import TYPE_CHECKING, Final

from ckptmove.model import StorageRef
from ckptmove.pickles import structure
from ckptmove.pickles.compact_memo import HANDLERS, NeedsOneOperation, number, recalled
from ckptmove.pickles.machine import interpret_with
from ckptmove.pickles.rebuild_arguments import LARGEST, NotATensor, geometry
from ckptmove.pickles.tree import WITHIN, Global, PlainStorage, PlainTensor, Tuple
from ckptmove.torch_facts.dtypes import ITEM_BYTES, STORAGE_DTYPE

if TYPE_CHECKING:
    from ckptmove.limits import Limits
    from ckptmove.pickles.state import Handler, Machine
    from ckptmove.pickles.tree import Value

_MARK: Final = ord("(")
_REBUILD: Final = "torch._utils._rebuild_tensor_v2"
_GET: Final = rb"(?:h.|j.{4})"
_PUT: Final = rb"r.{4}"
_INT: Final = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
#: A tuple of numbers: a size or a stride. The pattern takes twice as long to compile if it has one for each length.
_SIZE: Final = rb"\(?%b{0,64}[)t\x85-\x87]" % _INT
#: First and last operation of a tuple by its length: EMPTY_TUPLE, TUPLE1 to TUPLE3; longer ones have MARK and TUPLE.
_SHORT_TUPLES: Final = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}
_TENSOR: Final = re.compile(
    rb"(?s)\(\("
    rb"(?P<word>%(get)b)(?P<kind>%(get)b)"
    rb"(?:X(?P<key_bytes>.{4})(?P<key>[0-9]{1,20})(?P<put_key>%(put)b)|(?P<known_key>%(get)b))"
    rb"(?:X(?P<tag_bytes>.{4})(?P<tag>[a-z]{1,20}:[0-9]{1,9})(?P<put_tag>%(put)b)|(?P<known_tag>%(get)b))"
    rb"(?P<numel>%(int)b)t(?P<put_pid>%(put)b)Q"
    rb"(?P<offset>%(int)b)(?P<size>%(size)b)(?P<put_size>%(put)b)?(?P<stride>%(size)b)(?P<put_stride>%(put)b)?"
    rb"(?P<requires_grad>[\x88\x89])(?P<hooks>%(get)b)\)R(?P<put_hooks>%(put)b)"
    rb"t(?P<put_args>%(put)b)R(?P<put_tensor>%(put)b)" % {b"get": _GET, b"put": _PUT, b"int": _INT, b"size": _SIZE}
)
_NUMBERS: Final = re.compile(rb"(?s)" + _INT)
_TRUE: Final = b"\x88"
#: Sites of a storage: it has some, but a tree that cannot be edited does not need them.
_UNKNOWN: Final = (-1,)
#: Indices of a number of LONG_BINPUT operations.
_INDICES: Final = {count: Struct("<" + "xI" * count).unpack for count in range(4, 9)}
#: Geometries that are kept to be used again: most tensors have the shape of others.
_MOST_KNOWN: Final = 1 << 14
#: Classes of ``torch.save``; ``torch.storage`` has those without a dtype, which another function rebuilds.
_STORAGE_MODULES: Final = frozenset({"torch", "torch.cuda"})


def interpret_tensors(data: bytes, limits: Limits) -> Machine:
    """Read one pickle as data, with plain tensors as :class:`PlainTensor`, for an inventory.

    Its tree cannot be edited, and its storages have no sites.

    Arguments and errors as of :func:`~ckptmove.pickles.machine.interpret`.
    """
    machine = interpret_with(data, limits, PlainTensors().handlers())
    machine.data = b""
    return machine


class PlainTensors:
    """Reader of plain tensors for one pickle."""

    def __init__(self) -> None:
        # By their bytes in the pickle, see `compact_memo`.
        self._dtypes: dict[bytes, str] = {}
        self._fixed: set[tuple[bytes, bytes]] = set()
        self._geometries: dict[tuple[bytes, bytes], tuple[tuple[int, ...], tuple[int, ...], int, int]] = {}
        self._storages: dict[str, PlainStorage] = {}
        self._tags: dict[str, str] = {}

    def handlers(self) -> dict[int, Handler]:
        """Handlers that replace those of the machine."""
        return HANDLERS | {_MARK: self._handle}

    def _handle(self, machine: Machine, position: int) -> int:
        """Handle MARK, which follows the function if a tensor begins."""
        function = machine.stack[-1] if machine.stack else None
        if type(function) is Global and function.full_name == _REBUILD:
            match = _TENSOR.match(machine.data, position)
            if match is not None:
                try:
                    self._push(machine, match.groups())
                except (NeedsOneOperation, NotATensor, IndexError):  # IndexError: an index that the memo does not have
                    pass
                else:
                    return match.end()
        return structure.HANDLERS[_MARK](machine, position)

    def _push(self, machine: Machine, found: tuple[bytes, ...]) -> None:
        """Replace the function on top of the stack with its tensor."""
        (
            word, kind, key_bytes, key_text, put_key, known_key, tag_bytes, tag_text, put_tag, known_tag, numel,
            put_pid, offset, size, put_size, stride, put_stride, requires_grad, hooks, put_hooks, put_args, put_tensor,
        ) = found  # fmt: skip
        if (word, hooks) not in self._fixed:
            self._check_fixed(machine, word, hooks)
        key = _recalled_text(machine, known_key) if known_key else _text(key_bytes, key_text)
        tag = _recalled_text(machine, known_tag) if known_tag else self._tag(tag_bytes, tag_text)
        storage = self._storage(key, tag, self._dtypes.get(kind) or self._new_dtype(machine, kind), number(numel))
        shape, steps, _, span = self._geometries.get((size, stride)) or self._new_geometry(size, stride)
        first, ref = number(offset), storage.ref
        if first < 0 or (span and (first + span) * ITEM_BYTES[ref.dtype] > ref.nbytes):
            raise NeedsOneOperation
        tensor = PlainTensor(storage, first, shape, steps, dtype=ref.dtype, requires_grad=requires_grad == _TRUE)
        memo: list[Value] = [key] if put_key else []
        if put_tag:
            memo.append(tag)
        puts = [
            put for put in (put_key, put_tag, put_pid, put_size, put_stride, put_hooks, put_args, put_tensor) if put
        ]
        memo += [WITHIN] * (len(puts) - len(memo) - 1)
        memo.append(tensor)
        begin = len(machine.memo)
        if _INDICES[len(puts)](b"".join(puts)) != tuple(range(begin, begin + len(puts))):
            raise NeedsOneOperation
        machine.memo += memo
        machine.persistents.append(storage)
        machine.storages += 1
        machine.stack[-1], machine.starts[-1] = tensor, -1

    def _storage(self, key: str, tag: str, dtype: str, numel: int) -> PlainStorage:
        storage = self._storages.get(key)
        if storage is None:
            nbytes = numel * ITEM_BYTES[dtype]
            if not 0 <= nbytes <= LARGEST:
                raise NeedsOneOperation
            storage = self._storages[key] = PlainStorage(StorageRef(key, tag, dtype, numel, nbytes, _UNKNOWN, _UNKNOWN))
        elif (storage.ref.device, storage.ref.dtype, storage.ref.numel) != (tag, dtype, numel):
            raise NeedsOneOperation
        return storage

    def _check_fixed(self, machine: Machine, word: bytes, hooks: bytes) -> None:
        function = recalled(machine, hooks)
        is_hooks = type(function) is Global and function.full_name == "collections.OrderedDict"
        if recalled(machine, word) != "storage" or not is_hooks:
            raise NeedsOneOperation
        self._fixed.add((word, hooks))

    def _tag(self, length: bytes, raw: bytes) -> str:
        tag = _text(length, raw)
        return self._tags.setdefault(tag, tag)

    def _new_dtype(self, machine: Machine, raw: bytes) -> str:
        kind = recalled(machine, raw)
        dtype = STORAGE_DTYPE.get(kind.name) if type(kind) is Global and kind.module in _STORAGE_MODULES else None
        if dtype is None:
            raise NeedsOneOperation
        return self._dtypes.setdefault(raw, dtype)

    def _new_geometry(self, size: bytes, stride: bytes) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        if len(self._geometries) > _MOST_KNOWN:
            self._geometries.clear()
        shape, steps = map(_numbers, (size, stride))
        found = self._geometries[size, stride] = geometry(Tuple(shape, ()), Tuple(steps, ()))
        return found


def _numbers(raw: bytes) -> tuple[int, ...]:
    """The numbers of a tuple, if it is written as its length requires."""
    found = tuple(map(number, _NUMBERS.findall(raw)))
    last = _SHORT_TUPLES.get(len(found))
    if raw[-1:] != (last or b"t") or raw.startswith(b"(") == (last is not None):
        raise NeedsOneOperation
    return found


def _text(length: bytes, raw: bytes) -> str:
    """The argument of BINUNICODE, if it ends where the pattern ends."""
    if int.from_bytes(length, "little") != len(raw):
        raise NeedsOneOperation
    return raw.decode()


def _recalled_text(machine: Machine, raw: bytes) -> str:
    value = recalled(machine, raw)
    if type(value) is not str:
        raise NeedsOneOperation
    return value

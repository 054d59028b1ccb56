"""Parse the ``.metadata`` of torch.distributed.checkpoint: its tensors, their chunks, and the places of the chunks.

No class is imported, and every number is validated.

From torch/distributed/checkpoint/metadata.py, filesystem.py (``_StorageInfo``) and default_planner.py.
"""

from __future__ import annotations

from itertools import chain, starmap
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, TypeAlias, cast

from ckptmove.errors import DamagedArchive, LimitExceeded, UnsupportedContainer
from ckptmove.formats.chunks import Chunk, flaw_of
from ckptmove.formats.dcp.classes import METADATA, differs_by_one, is_plain, properties_of, require_loadable
from ckptmove.formats.dcp.pieces import Pieces
from ckptmove.pickles.rebuild_arguments import LARGEST, NotATensor, bytes_of, items, sizes
from ckptmove.pickles.tree import Call, Dict, PlainObject, tuple_items
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.formats.dcp.pieces import PieceRow
    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import PlainKind, Value

Path: TypeAlias = tuple[str | int, ...]
#: Shape of a tensor, and its chunks.
_Grid: TypeAlias = "tuple[tuple[int, ...], tuple[Chunk, ...]]"

_TENSOR: Final = f"{METADATA}.TensorStorageMetadata"
_OBJECT: Final = f"{METADATA}.BytesStorageMetadata"
_ROOT: Final = f"{METADATA}.Metadata"
_CHUNK: Final = f"{METADATA}.ChunkStorageMetadata"
_INDEX: Final = f"{METADATA}.MetadataIndex"
_PLACE: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
#: Maximum number of keys and values of an object. Torch's classes have up to six fields, and trainers add a few.
_MOST_FIELDS: Final = 128
#: As many as torch's operators take.
_MOST_AXES: Final = 64
#: A state_dict nests five or six levels deep; a deeper path counts as one name.
_DEEPEST_PATH: Final = 64
#: Maximum length of the names of all pieces: a constant, and an allowance for each byte of the file. The pickle may
#: share one long name between many pieces.
_LETTERS: Final = 1 << 20
_LETTERS_PER_BYTE: Final = 8
_SHOWN: Final = 80
#: Classes with several objects for each piece.
REPEATED: Final = frozenset({_CHUNK, _INDEX, _PLACE})


class StoredTensor(NamedTuple):
    """A tensor that is saved in chunks."""

    name: str  # its fully qualified name, as written
    #: keys of its place in the saved object; joined by dots, they are the name. A number is an index of a list.
    path: Path
    dtype: str  # torch's name without `torch.`
    shape: tuple[int, ...]  # shape of the whole tensor
    requires_grad: bool  # as saved
    chunks: tuple[Chunk, ...]  # its chunks, which do not overlap

    def nbytes(self, chunk: Chunk) -> int:
        """Length in bytes of the elements of one of its chunks."""
        return chunk.volume * ITEM_BYTES[self.dtype]

    @property
    def uncovered(self) -> int:
        """Length in bytes of the elements in no chunk; negative if several ranks saved a tensor without axes."""
        return (prod(self.shape) - sum(chunk.volume for chunk in self.chunks)) * ITEM_BYTES[self.dtype]


class StoredObject(NamedTuple):
    """An object that is not a tensor; it is saved whole."""

    name: str  # as of a tensor
    path: Path  # as of a tensor


class DistributedMetadata(NamedTuple):
    """Contents of ``.metadata``."""

    entries: tuple[StoredTensor | StoredObject, ...]  # tensors and objects, in order
    pieces: Pieces  # places of their bytes, in order

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """The entries that are tensors."""
        return tuple(entry for entry in self.entries if isinstance(entry, StoredTensor))

    @property
    def is_share(self) -> bool:
        """Whether a tensor has elements in no chunk: those of other ranks, or lost ones."""
        return any(tensor.uncovered > 0 for tensor in self.tensors)


def union(tables: Sequence[DistributedMetadata], path: str) -> DistributedMetadata:
    """Merge the contents of ``__R.metadata`` of ranks that saved one state_dict without collectives.

    Each rank loads its own objects and its own copy of a replicated chunk; here those of the first rank count. Errors
    name the path of its file.
    """
    merged: dict[str, StoredTensor | StoredObject] = {}
    chunks: dict[str, dict[Chunk, None]] = {}
    for entry in chain.from_iterable(table.entries for table in tables):
        first = merged.setdefault(entry.name, entry)
        if _kind_of(first) != _kind_of(entry):
            raise DamagedArchive(path, f"the ranks saved different things as {entry.name[:_SHOWN]!r}")
        if isinstance(entry, StoredTensor):
            chunks.setdefault(entry.name, {}).update(dict.fromkeys(entry.chunks))
    for name, own in chunks.items():
        tensor = cast("StoredTensor", merged[name])
        flaw = flaw_of(tensor.shape, tuple(own))
        if flaw:
            raise DamagedArchive(path, f"{flaw} tensor {name[:_SHOWN]!r}")
        merged[name] = tensor._replace(chunks=tuple(own))
    # Of two pieces with one name, the last counts.
    pieces = Pieces(row for table in reversed(tables) for row in table.pieces.rows())
    return DistributedMetadata(tuple(merged.values()), pieces)


def _kind_of(entry: StoredTensor | StoredObject) -> tuple[str, tuple[int, ...]] | None:
    return (entry.dtype, entry.shape) if isinstance(entry, StoredTensor) else None


def parse_metadata(machine: Machine, path: str) -> DistributedMetadata:
    """Parse the tree of a ``.metadata``."""
    require_loadable(machine)
    return _Parser(machine, path).run()


class _Parser:
    def __init__(self, machine: Machine, path: str) -> None:
        self._root = machine.root
        self._path = path
        self._chunks = 0
        # By the ``id`` of a node: tensors share the nodes of equal chunks, and their grids of chunks are often equal.
        self._known_chunks: dict[int, Chunk] = {}
        #: Where the fields of an index or a place are.
        self._places: dict[PlainKind, list[int]] = {}
        self._known_grids: dict[_Grid, tuple[_Grid, str]] = {}
        # Each chunk takes more than a byte, unless tensors share a list of chunks, which torch never writes.
        self._most_chunks = machine.limits.factor * (machine.end - machine.begin)
        self._letters = 0
        # A custom planner may join keys by a slash: then no name consists of keys joined by dots.
        self._misnamed: tuple[str, str] | None = None
        self._has_joined = False
        self._most_letters = machine.limits.factor * _LETTERS + _LETTERS_PER_BYTE * self._most_chunks

    def run(self) -> DistributedMetadata:
        root = self._fields(self._root, "the root", _ROOT)
        entries = self._table(root, "state_dict_metadata")
        planner = root.get("planner_data")
        paths = {key: value for key, value, _ in planner.pairs()} if type(planner) is Dict else {}
        read = tuple(self._entry(name, value, self._keys(name, paths.get(name))) for name, value in entries)
        if self._misnamed and self._has_joined:
            name, joined = self._misnamed
            self._damage(f"the name {name[:_SHOWN]!r} does not match its keys, {joined[:_SHOWN]!r}")
        return DistributedMetadata(read, Pieces(starmap(self._piece, self._pairs(root, "storage_data"))))

    def _entry(self, name: str, value: Value, path: Path) -> StoredTensor | StoredObject:
        kind = value.name if type(value) is Call and is_plain(value) else ""
        if kind == _OBJECT:
            return StoredObject(name, path)
        if kind != _TENSOR:
            self._damage(f"{name[:_SHOWN]!r} is neither a tensor nor an object")
        fields = self._fields(value, name, _TENSOR)
        dtype, requires_grad = self._properties(fields.get("properties"), name)
        try:
            shape = sizes(fields.get("size"))
            bytes_of(shape[:_MOST_AXES], dtype)
            chunks = tuple([self._chunk(one) for one in self._counted(items(fields.get("chunks")))])
        except (NotATensor, IndexError):
            self._damage(f"the sizes of tensor {name[:_SHOWN]!r} are not as torch writes them")
        if len(shape) > _MOST_AXES:
            self._damage(f"tensor {name[:_SHOWN]!r} has {len(shape)} axes")
        grid = shape, chunks
        if grid not in self._known_grids:
            self._known_grids[grid] = grid, flaw_of(*grid)
        (shape, chunks), flaw = self._known_grids[grid]
        if flaw:
            self._damage(f"{flaw} tensor {name[:_SHOWN]!r}")
        return StoredTensor(name, path, dtype, shape, requires_grad, chunks)

    def _properties(self, value: Value, name: str) -> tuple[str, bool]:
        state = properties_of(value)
        if state is None:
            self._damage(f"the properties of tensor {name[:_SHOWN]!r} are not as torch writes them")
        dtype, requires_grad = state
        if dtype not in ITEM_BYTES:
            described = f"a distributed checkpoint with dtype {dtype[:_SHOWN]!r}"
            raise UnsupportedContainer(self._path, "dcp", described)
        return dtype, requires_grad

    def _counted(self, chunks: list[Value] | tuple[Value, ...]) -> list[Value] | tuple[Value, ...]:
        self._chunks += len(chunks)
        if self._chunks > self._most_chunks:
            raise LimitExceeded("chunks of tensors", limit=self._most_chunks, actual=self._chunks, path=self._path)
        return chunks

    def _chunk(self, value: Value) -> Chunk:
        fields = self._fields(value, "a chunk", _CHUNK)
        if id(fields) not in self._known_chunks:
            self._known_chunks[id(fields)] = Chunk(sizes(fields.get("offsets")), sizes(fields.get("sizes")))
        return self._known_chunks[id(fields)]

    def _piece(self, index: Value, info: Value) -> PieceRow:
        name, offsets = self._values(index, "an index", _INDEX, ("fqn", "offset"))
        wanted = "relative_path", "offset", "length", "transform_descriptors"
        file, start, length, transform = self._values(info, "a place", _PLACE, wanted)
        if type(name) is not str or type(file) is not str or type(start) is not int or type(length) is not int:
            self._damage("a place in it is not as torch writes it")
        self._letters += len(name)
        if self._letters > self._most_letters:
            resource = "the length of all names"
            raise LimitExceeded(resource, limit=self._most_letters, actual=self._letters, path=self._path)
        if not (0 <= start <= LARGEST and 0 <= length <= LARGEST):
            self._damage(f"the place of {name[:_SHOWN]!r} is invalid: {_number(length)} bytes from {_number(start)}")
        if transform is not None:
            described = "a distributed checkpoint whose pieces are compressed or encrypted (transform_descriptors)"
            raise UnsupportedContainer(self._path, "dcp", described)
        try:
            at = sizes(offsets) if offsets is not None else None
        except (NotATensor, IndexError):
            self._damage(f"the offset of a chunk of {name[:_SHOWN]!r} is invalid")
        return name, at, file, start, start + length

    def _keys(self, name: str, path: Value) -> Path:
        """The keys of an entry if they make up its name; else the name is the only key."""
        keys = tuple_items(path)
        if 0 < len(keys) <= _DEEPEST_PATH:
            texts = tuple(key if type(key) is str else _number(key) if type(key) is int else "" for key in keys)
            # Join only if the length matches: many paths may share long texts.
            joined = ".".join(texts) if sum(map(len, texts)) + len(texts) - 1 == len(name) else ""
            if joined == name:
                self._has_joined = self._has_joined or len(texts) > 1
                return tuple(key if type(key) is int else text for key, text in zip(keys, texts, strict=True))
            if joined and differs_by_one(joined, name):
                self._misnamed = self._misnamed or (name, joined)
        return (name,)

    def _fields(self, value: Value, what: str, name: str) -> Dict | PlainObject:
        """The fields of an object of a class of torch, or of a class of another package in its place."""
        if type(value) is PlainObject and value.kind.name == name:
            return value
        is_one = type(value) is Call and is_plain(value) and (value.name == name or not value.name.startswith("torch."))
        state = value.state if type(value) is Call and is_one else None
        if type(state) is not Dict or len(state.flat) > _MOST_FIELDS:
            self._damage(f"{what[:_SHOWN]!r} in it is not as torch writes it")
        return state

    def _values(self, value: Value, what: str, name: str, wanted: tuple[str, ...]) -> list[Value]:
        """Some fields of an object, None for those that are absent."""
        if type(value) is not PlainObject or value.kind.name != name:
            fields = self._fields(value, what, name)
            return [fields.get(field) for field in wanted]
        places = self._places.get(value.kind)
        if places is None:
            own = value.kind.fields
            places = self._places[value.kind] = [own.index(field) if field in own else -1 for field in wanted]
        values = *value.values, None
        return [values[place] for place in places]

    def _pairs(self, root: Dict | PlainObject, field: str) -> Iterator[tuple[Value, Value]]:
        table = root.get(field)
        if type(table) is not Dict:
            self._damage(f"it has no {field}")
        return ((key, value) for key, value, _ in table.pairs())

    def _table(self, root: Dict | PlainObject, field: str) -> list[tuple[str, Value]]:
        found: dict[str, Value] = {}
        for key, value in self._pairs(root, field):
            if type(key) is not str:
                self._damage(f"a name in its {field} is not a string")
            found[key] = value
        return list(found.items())

    def _damage(self, detail: str) -> NoReturn:
        raise DamagedArchive(self._path, detail)


def _number(value: int) -> str:
    """A number as text; Python refuses to print very long ones."""
    return str(value) if value.bit_length() <= LARGEST.bit_length() else f"a number of {value.bit_length()} bits"

"""Read the archive that ``torch.export.save`` writes since 2.8: raw weights, and metadata as JSON.

Its content is never run, imported or evaluated; ``torch.export.load`` does all three.

Record names from torch/csrc/export/pt2_archive_constants.h, their contents from torch/export/pt2_archive/_package.py.
The archive is the zip of ``torch.save`` with other records. A device occurs in up to four places: in the metadata of
each weight, in the metadata of each value of the graph, in arguments of nodes, and in the pickles of the sample inputs.
"""

from __future__ import annotations

import hashlib
import re
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptmove.errors import DamagedArchive, UnsupportedContainer
from ckptmove.formats.contract import ReadOnlyFormat
from ckptmove.formats.export_code import called_names
from ckptmove.formats.export_json import ExportDevice, ExportJson, JsonBudget
from ckptmove.formats.export_pickle import ExportPickle
from ckptmove.formats.facts import facts_of
from ckptmove.formats.nested_streams import NestedStream, insert_streams, open_stream, split_key
from ckptmove.formats.torch_zip import TorchZip
from ckptmove.formats.zip_archive.index import DEFLATED, STORED
from ckptmove.formats.zip_archive.names import EXPORT_RECORD, export_form
from ckptmove.io.part import MemorySource, PartSource
from ckptmove.model import ArchiveFact, Span
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.rebuild_arguments import LARGEST
from ckptmove.pickles.tree import Call, Tuple, nodes
from ckptmove.torch_facts.devices import same_device
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.formats.zip_archive.index import ZipDirectory, ZipRecord
    from ckptmove.formats.zip_archive.layout import NewRecord
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits
    from ckptmove.model import StorageRef
    from ckptmove.pickles.state import Machine

_VERSION: Final = "0"
#: Major number of ``SCHEMA_VERSION`` in torch/_export/serde/schema.py.
_SCHEMA: Final = 8
_MODEL: Final = re.compile(r"models/(.+)\.json")
#: Folders in ``data/``, each with the program's attribute for its payloads.
_FOLDERS: Final = (("weights", "state_dict"), ("constants", "constants"))
_RAW: Final = re.compile(r"weights/weight_\d{1,9}|constants/tensor_\d{1,9}")
_OBJECTS: Final = ("custom_obj_", "opaque_obj_")
_OPAQUE: Final = "opaque_obj_"
#: The only layout whose bytes are the elements in order.
_STRIDED: Final = 7
#: torch/_export/serde/schema.py ``ScalarType``.
_DTYPES: Final[dict[int, str]] = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn",
    30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
_DEFECTS: Final = (KeyError, TypeError, AttributeError, IndexError, ValueError)


class _Payload(NamedTuple):
    """A weight or a constant."""

    name: str  # its full name in the program
    tag: str  # the device of its row; if several rows share a payload, the device of the first
    is_pickled: bool = False  # whether its bytes are a pickle, which stores the device too


class TorchExport(TorchZip):
    """A program of ``torch.export.save``, or several of ``package_pt2``; the graph names the version of torch."""

    name = "torch-export"
    _own_pickles = ()

    def __init__(self, source: ByteSource, directory: ZipDirectory, limits: Limits) -> None:
        """Read the JSON of the programs, and the pickles."""
        self.source = source
        form = export_form([*directory.records.names()])
        if form:
            raise self._unsupported(form)
        folder = directory.records[0].name.partition("/")[0] + "/"
        if directory.shift:
            raise DamagedArchive(source.path, f"{directory.shift} unexpected bytes before its first record")
        super().__init__(source, directory, limits, folder)
        kind, version = (self._short_text(self._inside.get(name)) for name in (EXPORT_RECORD, "archive_version"))
        if (kind, version) != ("pt2", _VERSION):
            raise self._unsupported(f"a torch.export archive of version {version!r}")
        self._inside |= {f"data/{key}": directory.records[place] for key, place in self._storages.items()}
        self._storages = {key: place for key, place in self._storages.items() if _RAW.fullmatch(key)}
        raw = {*self._storages.values()}
        packed = [one for one in directory.records if one.method == DEFLATED and one.place not in raw]
        if packed:
            self.limits = limits.for_packed(sum(one.stored_bytes for one in packed), len(packed))
        self._budget = JsonBudget(source.path, limits.factor)
        self._payloads: dict[str, list[_Payload]] = {}
        self._graphs: dict[str, ExportJson] = {}
        self._objects: dict[str, str] = {}
        #: Weights whose graph expects them on another device.
        self._apart: list[str] = []
        self._called: tuple[str, ...] = ()
        self._pickle = ExportPickle()
        models = [match for match in map(_MODEL.fullmatch, self._inside) if match]
        if not models:
            raise self._unsupported("a torch.export archive without a program")
        self._pickle.data += b"}("
        for match in models:
            is_only = match[1] == "model" and len(models) == 1
            if not is_only:
                self._pickle.text(match[1])
                self._pickle.data += b"}("
            self._read_program(match[1], match[0])
            self._pickle.data += b"" if is_only else b"u"
        self._pickle.data += b"u."
        self._machine = self._join()

    def object_pickle(self) -> bytes:
        """A pickle built from the JSON, followed by the pickles of the archive."""
        return self._machine.data

    def read_compact(self) -> Machine:
        return self.read()

    def read(self) -> Machine:
        """The machine that has read :meth:`object_pickle`; its tree has the names of an ``ExportedProgram``."""
        return self._machine

    def extras(self) -> Iterator[tuple[str, bytes]]:
        """The graphs without their devices, and the other records that are not tensors."""
        for graph in self._graphs.values():
            yield graph.name, hashlib.sha256(graph.without_devices()).digest()
        for name, record in self._inside.items():
            is_object = name.startswith(tuple(f"data/constants/{prefix}" for prefix in _OBJECTS))
            if is_object or not name.startswith(("data/", ".data/", "models/", "archive_", "byteorder", ".")):
                yield name, hashlib.sha256(self._read(record, "record bytes")).digest()

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Problems with the records of the storages, and weights on another device than their graph expects.

        In a pickle, the key of a storage is ``0:KEY``, with the place of the pickle and its key there.
        """
        inner: list[list[StorageRef]] = [[] for _ in self._streams]
        own: list[StorageRef] = []
        for storage in storages:
            place, key = split_key(storage.key, len(self._streams))
            if place is None:
                own.append(storage)
            else:
                inner[place].append(storage._replace(key=key))
        facts = [*super().locate(own)]
        for at, (stream, named) in enumerate(zip(self._streams, inner, strict=True)):
            facts += (fact._replace(record=f"{at}:{fact.storage_key}") for fact in stream.container.locate(named))
        facts += (ArchiveFact("graph-device", name, 0) for name in self._apart)
        return tuple(facts)

    def _read_places(self) -> set[int]:
        opaque = (self._inside[f"data/constants/{path}"].place for path in self._objects.values())
        return {*self._storages.values(), *(record.place for record in self._stream_records.values()), *opaque}

    def storage_span(self, key: str) -> Span | None:
        place, inner = split_key(key, len(self._streams))
        if place is None:
            return super().storage_span(key)
        stream = self._streams[place]
        span = stream.container.storage_span(inner) if stream.string is not None else None
        return None if span is None else Span(stream.start + span.start, stream.start + span.end)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _unsupported(self, what: str) -> UnsupportedContainer:
        return UnsupportedContainer(self.source.path, self.name, what)

    def _json(self, name: str) -> ExportJson:
        record = self._inside.get(name)
        if record is None:
            raise DamagedArchive(self.source.path, f"it has no {name}")
        self._budget.take(bytes=record.nbytes)
        return ExportJson(name, self._read(record, f"bytes of {name}"), self.source.path, self._budget)

    def _read_program(self, model: str, name: str) -> None:
        graph = self._graphs[model] = self._json(name)
        try:
            self._read_graph(graph)
            self._payloads[model] = []
            for folder, attribute in _FOLDERS:
                self._pickle.text(attribute)
                whole = f"{folder}/{model}.pt"  # torch 2.8 pickled all of them at once
                if f"data/{whole}" in self._inside:
                    self._pickled(whole)
                else:
                    self._read_payloads(model, self._json(f"data/{folder}/{model}_{folder}_config.json"))
            self._pickle.text("example_inputs")
            self._pickled(f"sample_inputs/{model}.pt")
            self._pickle.text("graph")
            self._push_devices(model)
            tags = {one.name: one.tag for one in self._payloads[model]}
            values = graph.value["graph_module"]["graph"]["tensor_values"]
            for weight, value in _inputs(graph):
                if weight in tags and not same_device(tags[weight], _tag(values[value])):
                    self._apart.append(weight)
        except _DEFECTS as error:
            raise graph.damage("or a record of the same program is not as torch writes it") from error

    def _read_graph(self, graph: ExportJson) -> None:
        schema = graph.value["schema_version"]["major"]
        if schema != _SCHEMA:
            raise self._unsupported(f"a torch.export archive of schema {schema!s:.20}")
        self.torch_version = str(graph.value.get("torch_version", ""))[:40] or None
        guards = [text for text in graph.value.get("guards_code", ()) if type(text) is str]
        strings = graph.strings
        names = called_names(sorted(strings["expr_str"]), guards, sorted(strings["target"]))
        self._called = (*self._called, *names)

    def _read_payloads(self, model: str, config: ExportJson) -> None:
        folder = config.name.split("/")[1]
        first: dict[str, tuple[str, str]] = {}
        self._pickle.data += b"}("
        for name, row in config.value["config"].items():
            path = row["path_name"]
            self._pickle.text(name)
            if folder == "constants" and path.startswith(_OBJECTS):
                self._objects[name] = path
                self._pickle.text(path)
                continue
            record, meta = f"{folder}/{path}", row["tensor_meta"]
            if not _RAW.fullmatch(record):
                raise DamagedArchive(self.source.path, f"'{name:.80}' points to '{path:.80}', which is not a payload")
            if row["use_pickle"]:
                self._pickled(record)
                self._payloads[model].append(_Payload(name, _tag(meta), is_pickled=True))
                continue
            if meta["layout"] != _STRIDED:
                raise self._unsupported(f"a torch.export archive with a weight of layout {meta['layout']!r:.20}")
            self._payloads[model].append(_Payload(name, self._tensor(record, row, first)))
        self._pickle.data += b"u"

    def _tensor(self, record: str, row: dict[str, Any], first: dict[str, tuple[str, str]]) -> str:
        """Push a tensor, and return its device.

        The first row of a payload sets dtype and device for all, as in ``_build_file_map``.
        """
        meta = row["tensor_meta"]
        tag, shape, stride = _tag(meta), _integers(meta["sizes"]), _integers(meta["strides"])
        if len(shape) != len(stride):
            raise ValueError(record)
        dtype, tag = first.setdefault(record, (_DTYPES.get(meta["dtype"], ""), tag))
        if not dtype:
            raise self._unsupported(f"a torch.export archive with dtype {meta['dtype']!r:.20}")
        held, item = self._inside.get(f"data/{record}"), ITEM_BYTES[dtype]
        (offset,) = _integers([meta["storage_offset"]])
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        numel = offset + extent
        if max(numel, prod(shape)) > LARGEST // item:
            raise ValueError(record)
        if held is not None:
            if held.nbytes % item:
                raise DamagedArchive(self.source.path, f"record '{record}' is not a whole number of {dtype} elements")
            numel = held.nbytes // item or numel
        self._pickle.tensor(
            record, tag, dtype, numel, offset, shape, stride,
            requires_grad=bool(meta["requires_grad"]), is_parameter=bool(row["is_param"]),
        )  # fmt: skip
        return tag

    def _pickled(self, record: str) -> None:
        """Push a call, to be replaced by the pickle's tree; without sample inputs, torch writes an empty record."""
        held = self._inside.get(f"data/{record}")
        if held is None:
            raise DamagedArchive(self.source.path, f"it has no data/{record}")
        self._storages.pop(record, None)
        if held.nbytes:
            self._pickle.call("load", record)
        else:
            self._pickle.data += b"N"

    def _push_devices(self, model: str) -> None:
        """Push the devices of a program that are in no storage, each once."""
        groups: dict[str, dict[str, None]] = {"values": {}, "arguments": {}, "payloads": {}}
        for one in self._graphs[model].devices:
            if not one.is_string:
                groups["values" if one.is_value else "arguments"][one.tag] = None
        groups["payloads"] = {one.tag: None for one in self._payloads[model] if one.is_pickled}
        self._pickle.data += b"}("
        for group, tags in groups.items():
            if tags:
                self._pickle.text(group)
                self._pickle.data += b"]("
                for tag in tags:
                    self._pickle.device(tag)
                self._pickle.data += b"e"
        self._pickle.data += b"u"

    def _join(self) -> Machine:
        """Read all pickles, and put their trees into one tree."""
        machine = interpret(bytes(self._pickle.data), self.limits)
        machine.globals.clear()  # the JSON imports nothing
        machine.runs.clear()
        streams: dict[str, NestedStream] = {}
        for node in nodes(machine.root):
            if type(node) is Call and node.name == "torch.load" and type(node.args) is Tuple:
                name = str(node.args.items[0])
                if name in streams:
                    raise DamagedArchive(self.source.path, f"two names point to data/{name}")
                streams[name] = self._stream(node, self._inside[f"data/{name}"])
        self._stream_records = {name: self._inside[f"data/{name}"] for name in sorted(streams)}
        self._streams = tuple(streams[name] for name in self._stream_records)
        insert_streams(machine, self._streams, self.limits)
        machine.globals |= dict.fromkeys(self._called, 0)
        machine.note_uses((name, "called") for name in self._called)
        for path in self._objects.values():
            self._scan(path, machine)
        return machine

    def _stream(self, call: Call, record: ZipRecord) -> NestedStream:
        if record.method == STORED:
            span = self._span(record.place)
            return NestedStream(call, open_stream(PartSource(self.source, span), self.limits), 0, span.start)
        self._budget.take(bytes=record.nbytes)
        data = self._read(record, f"bytes of {record.name}")
        return NestedStream(call, open_stream(MemorySource(self.source.path, data), self.limits), None, 0)

    def _scan(self, path: str, machine: Machine) -> None:
        """Note the names that an opaque object would import: ``pickle.loads`` reads it. C++ reads a script object."""
        record = self._inside.get(f"data/constants/{path}")
        if record is None:
            raise DamagedArchive(self.source.path, f"it has no data/constants/{path:.80}")
        if path.startswith(_OPAQUE):
            self._budget.take(bytes=record.nbytes)
            found = interpret(self._read(record, "pickle bytes"), self.limits)
            machine.globals |= dict.fromkeys(found.globals, 0)
            machine.runs |= found.runs

    def _pickle_records(self, pickle: bytes) -> dict[int, NewRecord]:
        """Raise ReadOnlyFormat: a graph and its operators may be bound to a device in places that no plan knows."""
        raise ReadOnlyFormat(self.source.path, self.name, facts_of(self.name).unwritten_hint)


def _inputs(graph: ExportJson) -> Iterator[tuple[str, str]]:
    """Full names of weights and constants, each with the name of its input in the graph."""
    for spec in graph.value["graph_module"]["signature"]["input_specs"]:
        for kind, key in (
            ("parameter", "parameter_name"), ("buffer", "buffer_name"), ("tensor_constant", "tensor_constant_name"),
        ):  # fmt: skip
            if kind in spec:
                yield spec[kind][key], spec[kind]["arg"]["name"]


def _tag(meta: dict[str, Any]) -> str:
    device = meta["device"]
    if type(device) is not ExportDevice:
        raise TypeError
    return device.tag


def _integers(values: Sequence[dict[str, int]]) -> list[int]:
    """The numbers of ``SymInt`` objects; a weight has no symbolic sizes."""
    found = [value["as_int"] for value in values]
    if any(type(number) is not int or not 0 <= number <= LARGEST for number in found):
        raise ValueError
    return found

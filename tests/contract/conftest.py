"""Specimens of each container for the contract tests, with an independent reader."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import tarfile
import warnings
import zipfile
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import exporting
import old_tar
import pytest
import saving
import torch
from open_containers import open_container

from ckptmove.io.contracts import BytesSegment, InflateSegment
from ckptmove.limits import Limits
from ckptmove.model import StorageRef

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _state():
    generator = torch.Generator().manual_seed(1)
    tensors = {f"layer.{n}": torch.randn(n * 7, generator=generator, dtype=torch.float64) for n in (3, 0, 1, 40)}
    return tensors | {"ids": torch.arange(300), "mask": torch.ones(3, dtype=torch.bool)}


def _saved():
    stream = io.BytesIO()
    torch.save(_state(), stream)
    return stream.getvalue()


def _without_crcs():
    with saving.crcs(written=False):
        return _saved()


def _aligned():
    with saving.aligned(4096):
        return _saved()


def _rezipped(compression, *, folder="archive", change=lambda name, data: data):
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_saved())) as old, zipfile.ZipFile(stream, "w", compression) as new:
        new.writestr(f"{folder}/", b"")
        for name in old.namelist():
            inside = name.partition("/")[2]
            new.writestr(f"{folder}/{inside}", change(inside, old.read(name)))
    return stream.getvalue()


def _big_endian():
    return _rezipped(zipfile.ZIP_STORED, change=lambda name, data: b"big" if name == "byteorder" else data)


def _legacy(protocol=2):
    stream = io.BytesIO()
    torch.save(_state(), stream, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    return stream.getvalue()


def _legacy_of_another_machine():
    data = _legacy()
    flag = b"little_endianq\x02\x88"
    assert data.count(flag) == 1
    return data.replace(flag, flag[:-1] + b"\x89")


def _script():
    module = torch.nn.Module()
    for name, tensor in _state().items():
        module.register_buffer(name.replace(".", "_"), tensor)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that TorchScript is deprecated
        torch.jit.save(torch.jit.script(module), stream)
    return stream.getvalue()


@dataclass(frozen=True)
class Specimen:
    """A file of a container, and an independent reader of it."""

    make: Callable[[], bytes]
    look: Callable[[bytes, bytes], Seen]
    name: str = "torch-zip"
    byteorder: str = "little"
    checksums: bool = True
    deflated: bool = False
    alignment: int = 64
    #: Pickles after that of the object, in the run of bytes with all of them.
    more_pickles: bytes = b""
    #: Kinds of facts about an undamaged file.
    facts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Seen:
    """The pickle of a file, and the bytes of its storages by key, from an independent reader.

    The pickle is None for a container that reads it without its long strings: no other reader does.
    """

    pickle: bytes | None
    storages: dict[str, bytes]


def _records(data):
    """Records by name without the folder, from zipfile, which does not check CRCs here: some are left out."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = {}
        for info in archive.infolist():
            if info.filename.endswith("/"):
                continue
            stream = archive.open(info)
            stream._expected_crc = None
            found[info.filename.partition("/")[2]] = stream.read()
        return found


def look_into_zip(data, original):
    found = _records(data)
    storages = {name.removeprefix("data/"): raw for name, raw in found.items() if name.startswith("data/")}
    return Seen(found["data.pkl"], storages)


def look_into_script(data, original):
    found = _records(data)
    storages = {name.removeprefix("data/"): raw for name, raw in found.items() if name.startswith("data/")}
    return Seen(found["data.pkl"] + found["constants.pkl"], storages)


class _Anything:
    """Replaces every class and function of a pickle."""

    def __init__(self, *arguments):
        pass


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, which calls nothing, and records the size of the elements of each storage."""

    def __init__(self, stream):
        super().__init__(stream)
        self.item_bytes = {}

    def find_class(self, module, name):
        return torch.serialization.StorageType(name) if name.endswith("Storage") else _Anything

    def persistent_load(self, pid):
        self.item_bytes[pid[2]] = torch._utils._element_size(pid[1].dtype)


def look_into_legacy(data, original):
    """Each storage follows the number of its elements; their size is only in the original pickle."""
    stream = io.BytesIO(original)
    for _ in range(3):
        pickle.load(stream)
    unpickler = _Unpickler(stream)
    unpickler.load()
    stream = io.BytesIO(data)
    for _ in range(3):
        pickle.load(stream)
    begin = stream.tell()
    _Unpickler(stream).load()
    own = data[begin : stream.tell()]
    storages = {}
    for key in pickle.load(stream):
        numel = int.from_bytes(stream.read(8), "little")
        storages[key] = stream.read(numel * unpickler.item_bytes[key])
    return Seen(own, storages)


def _table():
    header, data = {"__metadata__": {"format": "pt"}}, b""
    codes = {torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL"}
    for name, tensor in _state().items():
        raw = bytes(tensor.untyped_storage())
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def look_into_safetensors(data, original):
    """There is no pickle. Each tensor has its own storage."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__")
    offsets = {name: row["data_offsets"] for name, row in header.items()}
    return Seen(b"", {name: data[start + first : start + end] for name, (first, end) in offsets.items()})


def look_into_pickle(data, original):
    """The bytes objects that are streams of torch. The index of a stream is the prefix of its storages' keys."""
    found = [value for _, value, _ in pickletools.genops(data) if isinstance(value, bytes)]
    streams = [look_into_legacy(stream, stream) for stream in found]
    storages = {f"{place}:{key}": raw for place, one in enumerate(streams) for key, raw in one.storages.items()}
    return Seen(None, storages)


class _Program(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, tensor in _state().items():
            self.register_buffer(name.replace(".", "_"), tensor)

    def forward(self, x):
        return x + self.mask.sum()


def _exported():
    return exporting.saved(_Program(), (torch.ones(1),))


def look_into_export(data, original):
    """There is no pickle in the file. Sample inputs are an archive in the archive."""
    found = exporting.records(data)
    storages = {
        name.removeprefix("data/"): raw for name, raw in found.items() if "/weight_" in name or "/tensor_" in name
    }
    inner = look_into_zip(found["data/sample_inputs/model.pt"], b"").storages
    return Seen(None, storages | {f"0:{key}": raw for key, raw in inner.items()})


def _tar(form=tarfile.PAX_FORMAT, protocol=2):
    return old_tar.tar_of(_state(), form=form, protocol=protocol)


def look_into_tar(data, original):
    """The object's pickle, and those of the other members, which alternate with raw bytes."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found, tensors, stream = (archive.extractfile(name).read() for name in ("pickle", "tensors", "storages"))
    run, storages = [found], {}
    stream = io.BytesIO(stream)
    run.append(_next_pickle(stream))
    for _ in range(pickle.loads(run[-1])):
        run.append(_next_pickle(stream))
        key, _, kind = pickle.loads(run[-1])
        numel = int.from_bytes(stream.read(8), "little")
        storages[str(key)] = stream.read(numel * torch._utils._element_size(kind._dtype))
    run.append(_next_pickle(stream))
    stream = io.BytesIO(tensors)
    run.append(_next_pickle(stream))
    for _ in range(pickle.loads(run[-1])):
        run.append(_next_pickle(stream))
        axes = int.from_bytes(stream.read(8), "little")
        stream.read(8 * (2 * axes + 1))
    return Seen(b"".join(run), storages)


def _next_pickle(stream):
    begin = stream.tell()
    pickle.load(stream)
    end = stream.tell()
    stream.seek(begin)
    return stream.read(end - begin)


_ZIP = Specimen(_saved, look_into_zip)
_LEGACY = Specimen(_legacy, look_into_legacy, name="torch-legacy", checksums=False, alignment=1)
ZIPS = {
    "saved": _ZIP,
    "without-crcs": replace(_ZIP, make=_without_crcs, checksums=False),
    "aligned-4096": replace(_ZIP, make=_aligned, alignment=4096),
    "stored-by-hand": replace(_ZIP, make=lambda: _rezipped(zipfile.ZIP_STORED)),
    "deflated-by-hand": replace(
        _ZIP,
        make=lambda: _rezipped(zipfile.ZIP_DEFLATED),
        deflated=True,
        facts=frozenset({"compressed-storage"}),
    ),
    "big-endian": replace(_ZIP, make=_big_endian, byteorder="big"),
}
LEGACY = {
    "legacy": _LEGACY,
    **{f"legacy-protocol-{one}": replace(_LEGACY, make=lambda one=one: _legacy(one)) for one in (1, 3, 4, 5)},
    # torch reads and writes little-endian storages on every machine.
    "legacy-of-a-big-endian-machine": replace(_LEGACY, make=_legacy_of_another_machine),
    "legacy-and-more": replace(_LEGACY, make=lambda: _legacy() + b"more", facts=frozenset({"orphan-record"})),
}

SCRIPTS = {"script": Specimen(_script, look_into_script, name="torchscript", more_pickles=b"\x80\x02).")}
TARS = {
    **{
        f"tar-{name}": replace(
            _LEGACY,
            make=lambda form=form: _tar(form),
            look=look_into_tar,
            name="torch-tar",
        )
        for name, form in (("pax", tarfile.PAX_FORMAT), ("gnu", tarfile.GNU_FORMAT), ("ustar", tarfile.USTAR_FORMAT))
    },
    "tar-protocol-0": replace(
        _LEGACY,
        make=lambda: _tar(protocol=0),
        look=look_into_tar,
        name="torch-tar",
    ),
}
PLAIN = {
    "torch-export": replace(_ZIP, make=_exported, look=look_into_export, name="torch-export"),
    "safetensors": replace(_LEGACY, make=_table, look=look_into_safetensors, name="safetensors"),
    **{
        f"pickle-protocol-{one}": replace(
            _LEGACY, make=lambda one=one: pickle.dumps(_state(), one), look=look_into_pickle, name="pickle"
        )
        for one in (3, 4, 5)
    },
}


@dataclass(frozen=True)
class Opened:
    """A container, its file, and the result of an independent reader."""

    specimen: Specimen
    path: Path
    container: object
    seen: Seen

    def storages(self):
        """Storages with the names of the pickle."""
        return tuple(_reference(key, raw) for key, raw in self.seen.storages.items())

    def look(self, data):
        """Read an output with the independent reader."""
        return self.specimen.look(data, self.path.read_bytes())

    def output(self, segments):
        """The bytes of segments without casts."""
        data = self.path.read_bytes()
        pieces = []
        for segment in segments:
            if isinstance(segment, BytesSegment):
                pieces.append(segment.data)
            else:
                raw = data[segment.span.start : segment.span.end]
                pieces.append(zlib.decompress(raw, -15) if isinstance(segment, InflateSegment) else raw)
        return b"".join(pieces)

    def records(self, data=None):
        """The records of a zip archive, by name without the folder."""
        return _records(self.path.read_bytes() if data is None else data)


_DTYPES = {2400: ("int64", 8), 3: ("bool", 1)}


def _reference(key, raw):
    dtype, item_bytes = _DTYPES.get(len(raw), ("float64", 8))
    return StorageRef(key, "cpu", dtype, len(raw) // item_bytes, len(raw), (), ())


def _open(specimen, path):
    path.write_bytes(specimen.make())
    container = open_container(str(path), Limits())
    yield Opened(specimen, path, container, specimen.look(path.read_bytes(), path.read_bytes()))
    container.source.close()


@pytest.fixture(params=ZIPS | LEGACY | SCRIPTS | TARS | PLAIN)
def opened(request, tmp_path):
    yield from _open((ZIPS | LEGACY | SCRIPTS | TARS | PLAIN)[request.param], tmp_path / "specimen.pt")


@pytest.fixture(params=ZIPS | LEGACY | SCRIPTS)
def pickled(request, tmp_path):
    yield from _open((ZIPS | LEGACY | SCRIPTS)[request.param], tmp_path / "specimen.pt")


@pytest.fixture(params=[name for name, specimen in (ZIPS | SCRIPTS).items() if not specimen.deflated])
def roomy(request, tmp_path):
    """A specimen that can take another pickle of any length."""
    yield from _open((ZIPS | SCRIPTS)[request.param], tmp_path / "specimen.pt")


READ_ONLY = {**TARS, "torch-export": PLAIN["torch-export"]}


@pytest.fixture(params=READ_ONLY)
def read_only(request, tmp_path):
    """A specimen of a format that is not written."""
    yield from _open(READ_ONLY[request.param], tmp_path / "specimen.pt")


@pytest.fixture(params=LEGACY)
def stream(request, tmp_path):
    """A specimen whose storages follow the pickle."""
    yield from _open(LEGACY[request.param], tmp_path / "specimen.pt")


@pytest.fixture(params=ZIPS)
def opened_zip(request, tmp_path):
    yield from _open(ZIPS[request.param], tmp_path / "specimen.pt")


@pytest.fixture
def pickle_of():
    """Make a pickle of at least 14 bytes, which only the test reads."""

    def make(nbytes):
        return pickle.dumps("x", 2)[:2] + b"N" * (nbytes - 3) + b"."

    return make

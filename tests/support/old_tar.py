"""Write the tar format of torch 0.1, which torch can still load but not write.

The source is ``torch.serialization.save`` of v0.1.9: ``pickle_objects``, ``save_tensors`` and ``save_storages``.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import tarfile
from dataclasses import dataclass, field

import torch

#: Storages and tensors are identified by addresses.
FIRST_ADDRESS = 94_000_000_000_000


@dataclass(frozen=True)
class Part:
    """A flat tensor whose storage is a part of another tensor's storage."""

    base: torch.Tensor
    offset: int
    numel: int


@dataclass
class Saved:
    """Objects that the pickle refers to, for the other members.

    Attributes:
        devices: tags of storages, by their addresses in memory. All storages are on the CPU.
        addresses: addresses in the file.
        storages: a tensor over each storage, by address.
        views: root, offset and number of elements of each view, by address.
        tensors: storage, dtype, shape, stride and offset of each tensor, by address.
        alive: references that keep an ``id`` from being used again.
    """

    devices: dict[int, str]
    addresses: dict[object, int] = field(default_factory=dict)
    storages: dict[int, torch.Tensor] = field(default_factory=dict)
    views: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    tensors: dict[int, tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]] = field(default_factory=dict)
    alive: list[object] = field(default_factory=list)

    def address(self, what):
        return self.addresses.setdefault(what, FIRST_ADDRESS + 64 * len(self.addresses))

    def storage(self, tensor):
        key = self.address(("storage", tensor.untyped_storage()._cdata))
        self.storages.setdefault(key, tensor)
        return key

    def tensor(self, tensor):
        key = self.address(("tensor", id(tensor)))
        facts = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        self.tensors.setdefault(key, (self.storage(tensor), tensor.dtype, *facts))
        return key

    def part(self, part):
        key, view = self.address(("tensor", id(part))), self.address(("view", id(part)))
        self.views.setdefault(view, (self.storage(part.base), part.offset, part.numel))
        self.tensors.setdefault(key, (view, part.base.dtype, (part.numel,), (1,), 0))
        return key


class Pickler(pickle.Pickler):
    """The pickler of torch 0.1: persistent ids for tensors, storages and sources of modules."""

    def __init__(self, stream, protocol, saved):
        super().__init__(stream, protocol)
        self._saved = saved
        self._modules = set()

    def persistent_id(self, value):
        self._saved.alive.append(value)
        if isinstance(value, torch.Tensor):
            return str(self._saved.tensor(value))
        if isinstance(value, Part):
            return str(self._saved.part(value))
        if isinstance(value, torch.storage.TypedStorage):
            return str(self._saved.storage(torch.empty(0, dtype=value.dtype).set_(value)))
        if isinstance(value, type) and issubclass(value, torch.nn.Module) and value not in self._modules:
            self._modules.add(value)
            return value, None, None
        return None


def storage_name(dtype):
    return torch.storage._dtype_to_storage_type_map()[dtype]


def members_of(value, *, devices=(), protocol=2):
    """The four members by name.

    Args:
        value: the object to save, with tensors on the CPU, `Part`s and storages in it.
        devices: pairs of a tensor and the tag of its storage.
        protocol: protocol of every pickle.
    """
    saved = Saved({tensor.untyped_storage()._cdata: tag for tensor, tag in devices})
    stream = io.BytesIO()
    Pickler(stream, protocol, saved).dump(value)
    tensors = [pickle.dumps(len(saved.tensors), protocol)]
    for key, (storage, dtype, shape, stride, offset) in saved.tensors.items():
        kind = getattr(torch, storage_name(dtype).replace("Storage", "Tensor"))
        tensors.append(pickle.dumps((key, storage, kind), protocol))
        axes = len(shape)
        tensors.append(struct.pack(f"<q{2 * axes}qq", axes, *shape, *stride, offset))
    storages = [pickle.dumps(len(saved.storages), protocol)]
    for key, tensor in saved.storages.items():
        kind = getattr(torch, storage_name(tensor.dtype))
        storages.append(pickle.dumps((key, saved.devices.get(tensor.untyped_storage()._cdata, "cpu"), kind), protocol))
        data = bytes(tensor.untyped_storage())
        storages.append(struct.pack("<q", len(data) // tensor.element_size()) + data)
    views = [(key, root, offset, numel) for key, (root, offset, numel) in saved.views.items()]
    storages.append(pickle.dumps(views, protocol))
    info = {
        "protocol_version": 1000,
        "little_endian": sys.byteorder == "little",
        "type_sizes": {"short": 2, "int": 4, "long": 8},
    }
    return {
        "sys_info": pickle.dumps(info, protocol),
        "pickle": stream.getvalue(),
        "tensors": b"".join(tensors),
        "storages": b"".join(storages),
    }


def archive(members, *, form=tarfile.PAX_FORMAT, mtime=1_490_000_000.25):
    """A tar of members, as ``tarfile.open(mode='w:', format=PAX_FORMAT)`` and ``add`` write it.

    Python 3 stores fractions of a second, so each member has a pax header for them.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:", format=form) as writer:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(data), mtime, 0o600
            info.uname = info.gname = "someone"
            writer.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def tar_of(value, *, devices=(), protocol=2, form=tarfile.PAX_FORMAT):
    """A checkpoint of torch 0.1; the arguments are those of :func:`members_of` and :func:`archive`."""
    return archive(members_of(value, devices=devices, protocol=protocol), form=form)

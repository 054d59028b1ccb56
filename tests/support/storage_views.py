"""Streams of torch 0.3, whose storages can be views of other storages."""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict

import torch

MAGIC = 0x1950A86A20F9469CFC6C


class Stored:
    """A storage, or a view of one."""

    def __init__(self, kind, root, location, numel, view=None):
        self.pid = ("storage", kind, root, location, numel, view)


class OldTensor:
    """A tensor that is pickled as torch 0.3 did."""

    def __init__(self, storage, offset, size, stride):
        self.arguments = (storage, offset, size, stride)

    def __reduce__(self):
        return torch._utils._rebuild_tensor, self.arguments


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return value.pid if isinstance(value, Stored) else None


def stream(path, root, storages, protocol=2):
    """Write a stream by hand. Its storages are pairs of a key and a tensor."""
    out = io.BytesIO()
    for value in (MAGIC, 1001, {"protocol_version": 1001, "little_endian": True}):
        pickle.dump(value, out, protocol)
    Pickler(out, protocol).dump(root)
    pickle.dump([key for key, _ in storages], out, protocol)
    for _, tensor in storages:
        out.write(struct.pack("<q", tensor.numel()) + tensor.numpy().tobytes())
    path.write_bytes(out.getvalue())
    return path


def viewed(path, location="cuda:1", first=(2, 6), second=(4, 16), offset=1, **options):
    """Two views of one storage of twenty floats, a tensor over all of it, and a storage of its own."""

    def view(key, span, tag):
        return Stored(torch.FloatStorage, "77", tag, 20, (key, *span))

    root = OrderedDict(
        [
            ("a.weight", OldTensor(view("78", first, location), offset, (2, 2), (2, 1))),
            # torch creates the root with the first tag that it reads; here another string has the same tag.
            ("a.bias", OldTensor(view("79", second, "".join(location)), 0, (4,), (4,))),
            ("b.weight", OldTensor(Stored(torch.FloatStorage, "77", location, 20), 0, (20,), (1,))),
            ("b.bias", OldTensor(Stored(torch.DoubleStorage, "80", "cpu", 3), 0, (3,), (1,))),
            ("bare", view("79", second, location)),
        ]
    )
    storages = [("77", torch.arange(20.0)), ("80", torch.ones(3, dtype=torch.float64))]
    return stream(path, root, storages, **options)

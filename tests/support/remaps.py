"""A checkpoint of a small training run in every file format, and comparisons of loaded trees."""

from __future__ import annotations

import argparse
import io
import pickle
import tarfile
import warnings
import zipfile
from collections import OrderedDict

import old_tar
import saving
import torch

#: Findings about archives; a converted file must have none.
FORBIDDEN = frozenset({"F801", "F802", "F803", "F804", "F805"})


def run(*, objects=True):
    """Model with a prefix, a tied weight, views and several dtypes; AdamW; EMA; and more."""
    torch.manual_seed(0)
    weights = {"module.a.weight": torch.randn(6, 5), "module.a.bias": torch.randn(6)}
    parameters = [torch.nn.Parameter(one.clone()) for one in weights.values()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(2):
        for one in parameters:
            one.grad = torch.randn_like(one)
        optimizer.step()
    whole = torch.randn(8, 5)
    model = OrderedDict(
        {
            **weights,
            "module.tied": weights["module.a.weight"],
            "module.rows": whole[2:4],
            "module.column": whole[:, 1],
            "module.transposed": torch.randn(3, 4).t(),
            "module.half": torch.randn(5).bfloat16(),
            "module.double": torch.randn(3, dtype=torch.float64),
            "module.count": torch.arange(3),
            "module.empty": torch.ones(0, 3),
            "module.flag": torch.tensor([True, False]),
        }
    )
    model._metadata = OrderedDict({"": {"version": 1}, "module": {"version": 1}, "module.a": {"version": 1}})
    state = {
        "model": model,
        "optimizer": optimizer.state_dict(),
        "ema": {name: tensor + 1 for name, tensor in weights.items()},
        "rng": torch.get_rng_state(),
        "epoch": 3,
    }
    return {**state, "args": argparse.Namespace(lr=0.1, name="x")} if objects else state


def tensors(value, path=()):
    """Paths and tensors of a tree."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | argparse.Namespace):
        for key, item in (value if isinstance(value, dict) else vars(value)).items():
            yield from tensors(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors(item, (*path, index))


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def outline(value, *, sizes=True):
    """All of a tree except the values of tensors: types, keys in order, other values, sizes and sharing of storages."""
    storages = {}

    def visit(value):
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            shared = storages.setdefault(storage.data_ptr(), len(storages)) if value.numel() else -1
            memory = (shared, storage.nbytes() if sizes else -1)
            return type(value), value.dtype, value.shape, value.stride(), memory, value.requires_grad
        if isinstance(value, dict):
            attributes = {key: visit(one) for key, one in getattr(value, "__dict__", {}).items()}
            return type(value), [(key, visit(item)) for key, item in value.items()], attributes
        if isinstance(value, list | tuple):
            return type(value), [visit(item) for item in value]
        if isinstance(value, argparse.Namespace):
            return type(value), visit(vars(value))
        return value

    return visit(value)


def assert_equal(found, wanted, *, sizes=True):
    """Check that two loaded trees are equal, bit for bit, with the same sharing (and sizes) of storages."""
    assert outline(found, sizes=sizes) == outline(wanted, sizes=sizes)
    assert {path: bits(one) for path, one in tensors(found)} == {path: bits(one) for path, one in tensors(wanted)}


# --- files ------------------------------------------------------------------------------------------------------------


def zipped(tree, **options):
    stream = io.BytesIO()
    torch.save(tree, stream, **options)
    return stream.getvalue()


def without_crcs(tree):
    with saving.crcs(written=False):
        return zipped(tree)


def rezipped(tree, compression, change=lambda name, data: data):
    """An archive of ``torch.save`` that zipfile wrote again."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(zipped(tree))) as old, zipfile.ZipFile(stream, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return stream.getvalue()


def deflated(tree):
    return rezipped(tree, zipfile.ZIP_DEFLATED)


class _ItemSizes(pickle.Unpickler):
    """Reads the sizes of the elements of storages by their keys."""

    def __init__(self, stream):
        super().__init__(stream)
        self.sizes = {}

    def find_class(self, module, name):
        if name.endswith("Storage"):
            return torch.serialization.StorageType(name)
        return (lambda *_: None) if name.startswith("_rebuild") else super().find_class(module, name)

    def persistent_load(self, pid):
        self.sizes[pid[2]] = torch._utils._element_size(pid[1].dtype)


def big_endian(tree):
    """Save as a big-endian machine does."""
    with zipfile.ZipFile(io.BytesIO(zipped(tree))) as archive:
        reader = _ItemSizes(io.BytesIO(archive.read("archive/data.pkl")))
        reader.load()

    def swapped(name, data):
        folder, _, key = name.rpartition("/")
        if name.endswith("/byteorder"):
            return b"big"
        width = reader.sizes[key] if folder.endswith("/data") else 1
        return b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))

    return rezipped(tree, zipfile.ZIP_STORED, swapped)


def legacy(tree):
    return zipped(tree, _use_new_zipfile_serialization=False)


def tar(tree):
    """Save as torch 0.1 did; it has no bfloat16."""
    return old_tar.tar_of({**tree, "model": {key: one for key, one in tree["model"].items() if "half" not in key}})


#: Functions that save a tree and return the file.
FILES = {
    "torch-zip": zipped,
    "without-crcs": without_crcs,
    "deflated": deflated,
    "big-endian": big_endian,
    "torch-legacy": legacy,
    "torch-tar": tar,
    "pickle": pickle.dumps,
}


def load(path, *, weights_only=False, **options):
    """Load a file with torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=weights_only, **options)


def load_any(path):
    """Load a file with torch, or a bare pickle with Python."""
    return pickle.loads(path.read_bytes()) if path.read_bytes().startswith(b"\x80\x04\x95") else load(path)


def archive(path, members):
    """Write a tar or zip archive of these bytes, by the suffix of the path; a ``deflated.zip`` is compressed."""
    method = zipfile.ZIP_DEFLATED if path.stem == "deflated" else zipfile.ZIP_STORED
    if path.suffix == ".tar":
        with tarfile.open(path, "w") as tar:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    else:
        with zipfile.ZipFile(path, "w", method) as file:
            for name, data in members.items():
                file.writestr(name, data)
    return path

"""Programs of ``torch.export.save``, and their archives with changed records."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from functools import cache

import torch

GRAPH = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
INPUTS = "data/sample_inputs/model.pt"


class Net(torch.nn.Module):
    """Tied, transposed and shared weights, buffers of both kinds, a constant, and devices that the graph names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin = torch.nn.Linear(3, 4)
        self.out = torch.nn.Linear(4, 4)
        self.out.weight = torch.nn.Parameter(torch.randn(4, 4).t())
        self.tied = self.out.weight
        self.frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("big", torch.arange(12.0).reshape(3, 4))
        self.register_buffer("view", self.big[1:])
        self.register_buffer("small", torch.ones(5, dtype=torch.bfloat16))
        self.register_buffer("kept", torch.ones(2), persistent=False)
        self.const = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x, scale=None):
        y = self.lin(x) + self.const + torch.arange(4, device=x.device) + torch.zeros(4).to(x.device)
        y = y + torch.ones(4, device=torch.device("cpu")) + self.frozen.sum() + self.small.sum()
        y = self.out(y) + self.big.sum() + self.view.sum() + self.kept.sum() + y @ self.tied
        return y if scale is None else y * scale


def saved(module, inputs, **options):
    """Bytes of an exported module."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own code
        program = torch.export.export(module, inputs, **options)
        torch.export.save(program, stream)
    return stream.getvalue()


@cache
def net():
    """Bytes of the exported :class:`Net`."""
    return saved(Net(), (torch.ones(2, 3),), kwargs={"scale": torch.full((4,), 2.0)})


def loaded(path):
    """Load a file or bytes with ``torch.export.load``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.load(io.BytesIO(path) if isinstance(path, bytes) else str(path))


def records(data):
    """The records, by name without the folder."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def archive_of(found, folder="archive", compression=zipfile.ZIP_STORED):
    """An archive of records."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in found.items():
            archive.writestr(f"{folder}/{name}" if folder else name, data)
    return stream.getvalue()


def changed(data, **new):
    """An archive with other records: ``graph``, ``weights``, ``constants`` or ``inputs``; None leaves one out."""
    names = {"graph": GRAPH, "weights": WEIGHTS, "constants": CONSTANTS, "inputs": INPUTS}
    found = records(data)
    for key, value in new.items():
        found[names[key]] = value
    return archive_of({name: value for name, value in found.items() if value is not None})


def edited(data, name, change):
    """An archive after a function changed one of its JSON records in place."""
    found = records(data)
    value = json.loads(found[name])
    change(value)
    return archive_of(found | {name: json.dumps(value).encode()})

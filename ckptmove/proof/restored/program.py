"""Read the tensors of a ``torch.export`` archive with torch's archive reader.

``torch.export.load`` is never called: it evaluates strings of the file. Weights are read as it reads them, with
``get_storage_from_record``, and placed on the CPU; pickles with ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ckptmove.proof.tensors.dtypes import dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.checkpoint.parts import OpenPart

_FOLDERS = {"weights": "state_dict", "constants": "constants"}


def program_tensors(part: OpenPart, place: str | BinaryIO) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and constants that are stored as raw bytes, by name."""
    reader = torch._C.PyTorchFileReader(place)
    sizes = {storage.key: storage.nbytes for storage in part.inventory.storages}
    storages: dict[str, torch.UntypedStorage] = {}
    for record in part.inventory.tensors:
        key = part.own_key(record)
        if key is None or ":" in key:
            continue
        if key not in storages:
            nbytes = sizes[str(record.storage)]
            raw: Any = reader.get_storage_from_record(f"data/{key}", nbytes, torch.uint8) if nbytes else torch.empty(0)
            storages[key] = raw.untyped_storage()
        values = torch.empty(0, dtype=dtype_of(record.dtype))
        yield part.own_name(record.name), values.set_(storages[key], record.storage_offset, record.shape, record.stride)


def program_pickles(place: str | BinaryIO) -> Iterator[tuple[str, object]]:
    """Contents of each pickle of the archive, by path in the tree."""
    reader = torch._C.PyTorchFileReader(place)
    names = frozenset(reader.get_all_records())
    models = [name[len("models/") : -len(".json")] for name in names if name.startswith("models/")]
    for model in models:
        inside = "" if models == ["model"] else f"{model}."
        records = {f"{inside}example_inputs": f"data/sample_inputs/{model}.pt"}
        for folder, attribute in _FOLDERS.items():
            config = f"data/{folder}/{model}_{folder}_config.json"
            records[f"{inside}{attribute}"] = f"data/{folder}/{model}.pt"
            rows = json.loads(reader.get_record(config))["config"] if config in names else {}
            for name, row in rows.items():
                if row["use_pickle"] and row["tensor_meta"] is not None:
                    records[f"{inside}{attribute}.{name}"] = f"data/{folder}/{row['path_name']}"
        for path, record in records.items():
            data = reader.get_record(record) if record in names else b""
            if data:
                yield path, torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

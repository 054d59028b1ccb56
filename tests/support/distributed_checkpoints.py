"""Distributed checkpoints of one or several ranks, and changes of their metadata."""

from __future__ import annotations

import io
import pickle
import warnings

import torch
import torch.distributed.checkpoint as dcp
from older_torch import IN_ONE_PROCESS
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

HALVES = {"w": (torch.arange(12.0).reshape(4, 3), [(0, (0, 0), (2, 3)), (1, (2, 0), (2, 3))])}


class Distributed:
    """Makes distributed checkpoints."""

    @staticmethod
    def save(folder, tree, **options):
        """Save a tree with ``torch.distributed.checkpoint.save`` in one process."""
        folder.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A device that an earlier test simulated in this process has no streams to copy with.
            writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0, **options)
            dcp.save(tree, storage_writer=writer, **IN_ONE_PROCESS)
        return folder

    @staticmethod
    def load(tree, folder):
        """Fill a tree as ``torch.distributed.checkpoint.load`` does in one process."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tree, checkpoint_id=folder, **IN_ONE_PROCESS)

    @staticmethod
    def save_ranks(folder, tensors, objects=None):
        """A checkpoint of several ranks.

        Args:
            folder: its folder.
            tensors: by name: the whole tensor, and its chunks as (rank, offsets, sizes).
            objects: by name: the rank that writes the object, and its bytes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files, said, places = {}, {}, {}

        def write(name, offsets, rank, data):
            stream = files.setdefault(f"__{rank}_0.distcp", io.BytesIO())
            places[MetadataIndex(name, offsets)] = _StorageInfo(f"__{rank}_0.distcp", stream.tell(), len(data))
            stream.write(data)

        for name, (whole, chunks) in tensors.items():
            boxes = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for _, offsets, sizes in chunks]
            said[name] = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.size(), boxes)
            for rank, offsets, sizes in chunks:
                buffer = io.BytesIO()
                box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
                torch.save(whole[box].clone(), buffer)
                write(name, offsets, rank, buffer.getvalue())
        for name, (rank, data) in (objects or {}).items():
            said[name] = BytesStorageMetadata()
            write(name, None, rank, data)
        for name, stream in files.items():
            (folder / name).write_bytes(stream.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(Metadata(said, None, places)))
        return folder

    @staticmethod
    def halve(folder):
        """Cut each tensor with rows into two chunks, the second in another file."""
        metadata, data = Distributed.metadata_of(folder), (folder / "__0_0.distcp").read_bytes()
        streams, places = [io.BytesIO(), io.BytesIO()], {}

        def write(index, rank, content):
            places[index] = _StorageInfo(f"__{rank}_0.distcp", streams[rank].tell(), len(content))
            streams[rank].write(content)

        for index, info in metadata.storage_data.items():
            content = data[info.offset : info.offset + info.length]
            entry = metadata.state_dict_metadata[index.fqn]
            if isinstance(entry, BytesStorageMetadata) or not entry.size or entry.size[0] < 2:
                write(index, 0, content)
                continue
            whole, rows = torch.load(io.BytesIO(content)), entry.size[0] // 2
            zeros = (0,) * (whole.dim() - 1)
            entry.chunks = []
            for rank, (start, half) in enumerate(((0, whole[:rows]), (rows, whole[rows:]))):
                buffer = io.BytesIO()
                torch.save(half.clone(), buffer)
                offsets = torch.Size((start, *zeros))
                entry.chunks.append(ChunkStorageMetadata(offsets, half.shape))
                write(MetadataIndex(index.fqn, offsets), rank, buffer.getvalue())
        metadata.storage_data = places
        for rank, stream in enumerate(streams):
            (folder / f"__{rank}_0.distcp").write_bytes(stream.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return folder

    @staticmethod
    def share_out(folder):
        """Replace the metadata by one file for each rank, as ``save(use_collectives=False)`` does."""
        whole = Distributed.metadata_of(folder)
        for rank in sorted({info.relative_path.split("_")[2] for info in whole.storage_data.values()}):
            places = {at: info for at, info in whole.storage_data.items() if info.relative_path == f"__{rank}_0.distcp"}
            own = {(at.fqn, at.offset) for at in places}
            entries = {}
            for name, entry in whole.state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    chunks = [chunk for chunk in entry.chunks if (name, chunk.offsets) in own]
                    entries[name] = TensorStorageMetadata(entry.properties, entry.size, chunks)
                elif (name, None) in own:
                    entries[name] = entry
            kept = {name: entry for name, entry in entries.items() if getattr(entry, "chunks", True)}
            (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(Metadata(kept, None, places)))
        (folder / ".metadata").unlink()
        return folder

    @staticmethod
    def metadata_of(folder):
        return pickle.loads((folder / ".metadata").read_bytes())

    @staticmethod
    def change(folder, edit):
        """Change the metadata of a checkpoint with a function."""
        metadata = Distributed.metadata_of(folder)
        edit(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return folder

    @staticmethod
    def trained_tree():
        """The state of ``get_state_dict`` for a model and its AdamW, a scheduler, and more."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        names = [name for name, _ in model.named_parameters()]
        state = dict(zip(names, optimizer.state_dict()["state"].values(), strict=True))
        return {
            "model": model.state_dict(),
            "optimizer": {"state": state, "param_groups": [{"lr": 0.001, "params": names}]},
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict(),
            "step": 3,
            "rng": torch.get_rng_state(),
            "pair": [torch.ones(2), torch.ones(3)],
            "half": torch.ones(3, dtype=torch.bfloat16),
            "small": torch.ones(3).to(torch.float8_e5m2),
            "empty": torch.ones(0, 3),
            "scalar": torch.tensor(3.0),
        }

"""Seeds of the fuzzers of tars, archives and directories.

They are written without torch, so that fuzzers run without it. It no longer writes the format of torch 0.1.
"""

from __future__ import annotations

import gzip
import json
import pickle
import struct
import tarfile
from typing import TYPE_CHECKING, Final, Literal

from ckptmove.formats.tar_index import padded
from fuzz.packing import Entry, pack, packed
from fuzz.payloads import text
from fuzz.seeds import STORAGE, archive_of, deflated, table, tensors, zip_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_TAR_FORMS: Final[tuple[Literal[0, 1, 2], ...]] = (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT)
_BYTES: Final = {"0": bytes(16)}
_NODES: Final = deflated({"a/data.pkl": b"\x80\x02(" + b"]" * 4_000 + b"l.", "a/version": b"3\n"})
_CHUNK: Final = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE + b"."
_MODEL, _, _, _OPTIMIZER, _ARGUMENTS, _ = (archive_of(pickled, _BYTES) for pickled in tensors())


def old_members() -> dict[str, bytes]:
    """The members of a checkpoint of torch 0.1, by name.

    Three tensors share a storage, one of them through a view of the storage. The fourth has a storage of doubles.
    """
    return {
        "sys_info": pickle.dumps({"protocol_version": 1000, "little_endian": True}, 2),
        "pickle": b"\x80\x02}(" + b"".join(text(name) + text(name) + b"Q" for name in ("21", "22", "23", "24")) + b"u.",
        "tensors": _run(4, (
            _entry(key, storage, f"{kind}Tensor") + struct.pack("<qqqq", 1, size, 1, offset)
            for key, storage, kind, size, offset in (
                (21, 11, "Float", 4, 0), (22, 11, "Float", 2, 1), (23, 13, "Float", 2, 0), (24, 12, "Double", 2, 0),
            )
        )),
        "storages": _run(2, (
            _entry(11, "cuda:0", "FloatStorage") + struct.pack("<q4f", 4, 1, 2, 3, 4),
            _entry(12, "cpu", "DoubleStorage") + struct.pack("<q2d", 2, 5, 6),
        )) + pickle.dumps([(13, 11, 2, 2)], 2),
    }  # fmt: skip


def old_tars() -> Iterable[bytes]:
    """Checkpoints of torch 0.1."""
    for form in _TAR_FORMS:
        yield tar_of(old_members(), form)
    yield tar_of(old_members() | {"beside": b"x"}, tarfile.GNU_FORMAT)
    yield without_end(tar_of(old_members()))


def _run(count: int, entries: Iterable[bytes]) -> bytes:
    return pickle.dumps(count, 2) + b"".join(entries)


def _entry(key: int, second: int | str, kind: str) -> bytes:
    """The pickle of ``(key, storage or device, class)``."""
    value = text(second) if isinstance(second, str) else stored_number(second)
    return b"\x80\x02(" + stored_number(key) + value + b"ctorch\n" + kind.encode() + b"\nt."


def stored_number(value: int) -> bytes:
    """An integer of 32 bits."""
    return b"J" + struct.pack("<i", value)


def tar_of(files: dict[str, bytes], form: Literal[0, 1, 2] = tarfile.PAX_FORMAT) -> bytes:
    """A tar of files."""
    blocks: list[bytes] = []
    for name, data in files.items():
        info = tarfile.TarInfo(name)
        info.size, info.mtime = len(data), 1_490_000_000.25
        blocks += info.tobuf(form), data.ljust(padded(len(data)), b"\0")
    return b"".join(blocks) + bytes(2 * tarfile.BLOCKSIZE)


def without_end(tar: bytes) -> bytes:
    """A tar cut off after its last member."""
    return tar[: -2 * tarfile.BLOCKSIZE]


def _trainer() -> dict[str, bytes]:
    """The files of the HF Trainer."""
    return {
        "pytorch_model.bin": _MODEL,
        "optimizer.pt": _OPTIMIZER,
        "training_args.bin": _ARGUMENTS,
        "rng_state.pth": archive_of(b"\x80\x02}" + text("cpu") + _byte_tensor() + b"s.", _BYTES),
        "trainer_state.json": b'{"global_step": 2}',
        "vocab.txt": b"a\nb\n",
    }


def _byte_tensor() -> bytes:
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE
    return tensor.replace(b"Float", b"Byte").replace(text("cuda:0"), text("cpu"))


def archives() -> Iterable[bytes]:
    """Archives of files: of Stable-Baselines3, of NeMo, and made by hand."""
    agent = {
        "data": b"{}", "policy.pth": _MODEL, "policy.optimizer.pth": _OPTIMIZER, "_stable_baselines3_version": b"2.3.0",
    }  # fmt: skip
    nemo = {"./model_config.yaml": b"a: 1\n", "./model_weights.ckpt": _MODEL}
    weights = {"run/model.safetensors": table(), "run/optimizer.pt": _OPTIMIZER, "__MACOSX/._model.pt": b"x"}
    for form in (zip_of, deflated):
        yield form(agent)
        yield form(weights)
        yield form(agent | {"all.tar": tar_of(nemo), "x.tar.gz": gzip.compress(tar_of(nemo), mtime=0)})
    for kind in _TAR_FORMS:
        yield tar_of(nemo, kind)
    yield tar_of(_trainer())
    yield without_end(tar_of(nemo))
    yield tar_of({"all.tar": tar_of(nemo), "agent.zip": deflated(agent), "old.pt": next(iter(old_tars()))})


def distributed() -> Iterable[bytes]:
    """Folders of torch.distributed.checkpoint: in one file, in two, and written by independent ranks."""
    halves = saved({"w": [("__0_0.distcp", (0,)), ("__1_0.distcp", (4,))]})
    yield packed(saved({"w": [("__0_0.distcp", (0,))], "v": [("__0_0.distcp", (0,))]}))
    yield packed(halves)
    yield packed({"common.pt": _ARGUMENTS, **{f"pytorch_model_fsdp_0/{name}": data for name, data in halves.items()}})
    yield packed(
        saved({"w": [("__0_0.distcp", (0,))]}, objects={"step": archive_of(b"\x80\x02K\x03.", {}), "more": _NODES})
    )
    yield packed({"__0.metadata" if name == ".metadata" else name: data for name, data in halves.items()})


def saved(
    chunks: dict[str, list[tuple[str, tuple[int, ...]]]],
    pickled: bytes = _CHUNK,
    objects: dict[str, bytes] | None = None,
) -> dict[str, bytes]:
    """A distributed checkpoint of tensors, with four floats in each chunk, and of objects.

    Args:
        chunks: for each tensor, the file and the offsets of its chunks.
        pickled: the pickle of each chunk.
        objects: other objects by name, as archives of torch.save; by default, a number of steps.
    """
    piece = archive_of(pickled, _BYTES)
    files: dict[str, bytes] = {}
    entries, places = b"", b""
    for name, places_of in chunks.items():
        boxes = b"".join(stored_chunk(offsets, (4,)) + b"a" for _, offsets in places_of)
        entries += text(name) + stored_tensor((4 * len(places_of),), b"]" + boxes)
        for file, offsets in places_of:
            before = files.get(file, b"")
            places += stored_index(name, offsets) + stored_place(file, len(before), len(piece))
            files[file] = before + piece
    for name, data in (objects or {"step": archive_of(b"\x80\x02K\x03.", {})}).items():
        entries += text(name) + _object("metadata", "BytesStorageMetadata")
        places += stored_index(name, None) + stored_place(file, len(files[file]), len(data))
        files[file] += data
    return {".metadata": stored_metadata(entries, places), **files}


def stored_metadata(entries: bytes, places: bytes) -> bytes:
    """The pickle of ``.metadata``: the entry of each name, and the place of each index."""
    tables = {
        "state_dict_metadata": b"}(" + entries + b"u",
        "planner_data": b"N",
        "storage_data": b"}(" + places + b"u",
    }
    return b"\x80\x02" + _object("metadata", "Metadata", **tables) + b"."


def stored_tensor(sizes: tuple[int, ...], chunks: bytes) -> bytes:
    """The entry of a tensor of floats in ``.metadata``."""
    size = stored_size(sizes)
    return _object("metadata", "TensorStorageMetadata", properties=_PROPERTIES, size=size, chunks=chunks)


def stored_chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bytes:
    """The entry of a chunk."""
    return _object("metadata", "ChunkStorageMetadata", offsets=stored_size(offsets), sizes=stored_size(sizes))


def stored_index(name: str, offsets: tuple[int, ...] | None) -> bytes:
    """The index of a chunk, or of an object."""
    offset = b"N" if offsets is None else stored_size(offsets)
    return _object("metadata", "MetadataIndex", fqn=text(name), offset=offset, index=b"N")


def stored_place(file: str, start: int, nbytes: int) -> bytes:
    """The file, offset and length of a piece."""
    places = {"relative_path": text(file), "offset": stored_number(start), "length": stored_number(nbytes)}
    return _object("filesystem", "_StorageInfo", **places)


def stored_size(sizes: tuple[int, ...]) -> bytes:
    """A ``torch.Size``."""
    return b"ctorch\nSize\n((" + b"".join(map(stored_number, sizes)) + b"ttR"


def _object(module: str, name: str, **fields: bytes) -> bytes:
    """An object of a class of torch.distributed.checkpoint."""
    state = b"".join(text(field) + value for field, value in fields.items())
    return f"ctorch.distributed.checkpoint.{module}\n{name}\n".encode() + b")\x81}(" + state + b"ub"


_PROPERTIES: Final = (
    b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81(ctorch\nfloat32\nctorch.serialization\n"
    b"_get_layout\n"
    + text("torch.strided")
    + b"\x85R\x89ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    b"K\x00\x85R\x89tb"
)


def directories() -> Iterable[bytes]:
    """Directories of trainers."""
    shards = {f"pytorch_model-0000{place}-of-00002.bin": _MODEL for place in (1, 2)}
    weights = {f"model-0000{place}-of-00002.safetensors": table() for place in (1, 2)}
    indices = [json.dumps({"weight_map": dict(zip("ab", files, strict=True))}).encode() for files in (shards, weights)]
    rank = b"iter_10/mp_rank_00/model_optim_rng.pt"
    yield packed(_trainer())
    yield packed({**shards, "pytorch_model.bin.index.json": indices[0]})
    yield packed({
        **weights, "model.safetensors.index.json": indices[1], "optimizer.bin": _OPTIMIZER,
        "random_states_0.pkl": pickle.dumps({"step": 1, "random_state": (3,)}),
    })  # fmt: skip
    yield packed(
        {
            "latest": b"global_step2",
            "global_step2/mp_rank_00_model_states.pt": _MODEL,
            "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt": _OPTIMIZER,
        }
    )
    yield packed({"last_checkpoint": b"/gone/epoch_2.pth", "epoch_2.pth": _MODEL, "old.pt": next(iter(old_tars()))})
    yield pack([
        Entry(0, rank, _MODEL), Entry(1, b"last.pt", rank), Entry(1, b"lost", b"nowhere"), Entry(2, b"empty", b""),
    ])  # fmt: skip

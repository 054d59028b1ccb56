"""Recipes for tars, archives of checkpoints and distributed checkpoints that need much time or memory."""

from __future__ import annotations

import gzip
import pickle
import struct
import tarfile
from typing import TYPE_CHECKING, Final

from ckptmove.formats.tar_index import padded
from fuzz.payloads import text
from fuzz.seeds import STORAGE, archive_of, deflated, zip_of
from fuzz.whole_seeds import (
    old_members,
    saved,
    stored_chunk,
    stored_index,
    stored_metadata,
    stored_number,
    stored_place,
    stored_tensor,
    tar_of,
    without_end,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PICKLE: Final = b"\x80\x02}" + text("weight") + b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE + b"s."
_SOUND: Final = archive_of(_PICKLE, {"0": bytes(16)})


def by_family(size: int) -> dict[str, dict[str, Callable[[], bytes]]]:
    """Recipes of files by family and name.

    Args:
        size: number of members of an archive, or of entries of a table.
    """
    return {
        "tars of torch 0.1": _old_tars(size),
        "archives of checkpoints": _archives(size),
        "archives in archives": _inner(size),
    }


def _old_tars(size: int) -> dict[str, Callable[[], bytes]]:
    def with_member(name: str, data: Callable[[], bytes]) -> Callable[[], bytes]:
        return lambda: tar_of(old_members() | {name: data()}, tarfile.GNU_FORMAT)

    few = size // 20
    storages, tensors = old_members()["storages"], old_members()["tensors"]
    count = len(pickle.dumps(2, 2))
    head = tensors[count : tensors.index(b"t.") + 2]
    return {
        "a number of 2**62 storages": with_member("storages", lambda: pickle.dumps(2**62, 2) + storages[count:]),
        "a number of a million digits": with_member("storages", lambda: b"\x80\x02L" + b"9" * size + b"L\n."),
        "many storages": with_member(
            "storages",
            lambda: pickle.dumps(2 + few, 2) + b"".join(
                b"\x80\x02(" + stored_number(100 + one) + text("cuda:0") + b"ctorch\nByteStorage\nt." + bytes(8)
                for one in range(few)
            ) + storages[count:],
        ),
        "many views": with_member(
            "storages",
            lambda: storages[: storages.rindex(b"\x80\x02")] + b"\x80\x02]((K\rK\x0bK\2K\2t"
            + b"".join(b"(" + stored_number(100 + one) + b"K\x0bK\0K\4t" for one in range(few)) + b"e.",
        ),
        "many tensors": with_member(
            "tensors",
            lambda: pickle.dumps(4 + few, 2) + b"".join(
                head.replace(stored_number(21), stored_number(100 + one)) + struct.pack("<4q", 1, 4, 1, 0)
                for one in range(few)
            ) + tensors[count:],
        ),
        "tensors of 1000 axes": with_member(
            "tensors",
            lambda: pickle.dumps(4 + few // 100, 2) + b"".join(
                head.replace(stored_number(21), stored_number(100 + one))
                + struct.pack("<2002q", 1000, *[2**62] * 1000, *[2**62] * 1000, 2**62)
                for one in range(few // 100)
            ) + tensors[count:],
        ),
        "one tensor many times": with_member("pickle", lambda: b"\x80\x02(" + (text("21") + b"Q") * few + b"l."),
        "keys of many digits": with_member(
            "pickle", lambda: b"\x80\x02(" + (text("9" * 10_000) + b"Q") * (size // 10_000) + b"l."
        ),
        "a pickle without an end": with_member("pickle", lambda: b"\x80\x02" + b"N0" * (size * 5)),
    }  # fmt: skip


def _extended(kind: bytes, data: bytes, count: int, declared: int | None = None) -> bytes:
    """Repeated extension headers, which declare a number of bytes."""
    info = tarfile.TarInfo("extension")
    info.type, info.size = kind, len(data) if declared is None else declared
    return (info.tobuf(tarfile.GNU_FORMAT) + data.ljust(padded(len(data)), b"\0")) * count


def _archives(size: int) -> dict[str, Callable[[], bytes]]:
    few = size // 100
    files = {"model.pt": _SOUND}
    record = b"11 mtime=1\n" * (min(size, 90_000) // 11)
    nodes = b"\x80\x02(" + b"]" * (10 * size) + b"l."

    def nested() -> bytes:
        inner = zip_of(files)
        for _ in range(50):
            inner = deflated({"model.pt": inner})
        return inner

    return {
        "zip: many members": lambda: zip_of(files | {str(one): b"" for one in range(size // 10)}),
        "zip: many checkpoints": lambda: zip_of({f"{one}.pt": _SOUND for one in range(few)}),
        "zip: members that inflate": lambda: deflated(
            files | {f"{one}.bin": b"\x80\x02" + b"N0" * (10 * size) + b"N." for one in range(5)}
        ),
        "zip: a storage that inflates": lambda: deflated({"model.pt": archive_of(_PICKLE, {"0": bytes(50 * size)})}),
        "zip: a pickle of nodes that inflates": lambda: deflated({"model.pt": archive_of(nodes, {})}),
        "zip: zips in zips": nested,
        "zip: tars": lambda: zip_of({f"{one}.pt": tar_of(files) for one in range(few // 10)}),
        "tar: without its end": lambda: without_end(tar_of({f"{one}.pt": _SOUND for one in range(few)})),
        "tar: cut off before its first checkpoint": lambda: without_end(tar_of({str(one): b"" for one in range(few)})),
        "tar: cut off within a checkpoint": lambda: tar_of(files)[: 512 + len(_SOUND) // 2],
        "tar of torch 0.1: without its end": lambda: without_end(tar_of(old_members())),
        "tar: many members": lambda: tar_of(files | {str(one): b"" for one in range(size // 20)}),
        "tar: many checkpoints": lambda: tar_of({f"{one}.pt": _SOUND for one in range(few)}),
        "tar: long names": lambda: tar_of(files | {"a" * 90_000 + str(one): b"" for one in range(size // 100_000)}),
        "tar: many global headers": lambda: _extended(tarfile.XGLTYPE, b"11 mtime=1\n", size // 20) + tar_of(files),
        "tar: a header of many records": lambda: (
            _extended(tarfile.XHDTYPE, record, 1) + tar_of(files, tarfile.GNU_FORMAT)
        ),
        "tar: a header of 8 GiB": lambda: _extended(tarfile.XHDTYPE, b"", 1, 2**33 - 1) + tar_of(files),
        "tar: tars of torch 0.1": lambda: tar_of({f"{one}.pt": tar_of(old_members()) for one in range(few // 10)}),
    }  # fmt: skip


def _inner(size: int) -> dict[str, Callable[[], bytes]]:
    """Archives in archives: readers have to stop early."""
    few, files = size // 100, {"model.pt": _SOUND}
    one, texts = zip_of(files), {str(one): b"" for one in range(size // 20)}
    every = {"x.zip": deflated(texts), "x.tar": tar_of(texts), "x.tar.gz": gzip.compress(tar_of(texts))}
    return {
        "one of each": lambda: zip_of(every | files),
        "one of each, compressed": lambda: deflated(every | files),
        "one of each, in a tar": lambda: tar_of(every | files),
        "many": lambda: zip_of(files | {f"{place}.zip": one for place in range(few)}),
        "many, compressed": lambda: deflated(files | {f"{place}.zip": one for place in range(few)}),
        "many, without an end": lambda: tar_of(
            files | {f"{place}.tar": without_end(tar_of({"a": b""})) for place in range(few)}
        ),
        "one many times": lambda: _same(deflated({str(place): b"" for place in range(few)}), few),
        "of zeros": lambda: deflated({"x.zip": zip_of({"model.pt": bytes(50 * size)}), **files}),
        "gzip of zeros": lambda: zip_of({"x.gz": gzip.compress(bytes(50 * size)), **files}),
        "of members that inflate": lambda: zip_of(
            {"x.zip": deflated({f"{place}.pt": b"PK\3\4" + bytes(50 * size) for place in range(9)}), **files}
        ),
    }


def _same(inner: bytes, count: int) -> bytes:
    """A zip with many central entries for one member."""
    sound = zip_of({"000000.zip": inner})
    start, end = sound.rindex(b"PK\1\2"), sound.rindex(b"PK\5\6")
    entries = b"".join(sound[start:end].replace(b"000000", b"%06d" % place) for place in range(count))
    return sound[:start] + entries + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(entries), start, 0)


def folders(size: int) -> dict[str, Callable[[Path], None]]:
    """Recipes of distributed checkpoints by name: each makes a directory at a path."""
    few = size // 40

    def folder(make: Callable[[], bytes]) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            path.mkdir()
            for name, data in (saved({"w": [("__0_0.distcp", (0,))]}) | {".metadata": make()}).items():
                (path / name).write_bytes(data)

        return write

    def objects(count: int, data: bytes) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            path.mkdir()
            chunks: dict[str, list[tuple[str, tuple[int, ...]]]] = {"w": [("__0_0.distcp", (0,))]}
            for name, content in saved(chunks, objects=dict.fromkeys(map(str, range(count)), data)).items():
                (path / name).write_bytes(content)

        return write

    def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> bytes:
        return b"](" + b"".join(stored_chunk(*box) for box in boxes) + b"e"

    def named(tensors: bytes, places: bytes = b"") -> Callable[[], bytes]:
        return lambda: stored_metadata(tensors, places)

    thin = [((one, 0), (few, 1)) for one in range(few)]
    one = stored_tensor((4,), chunks(((0,), (4,))))
    nodes = b"\x80\x02(" + b"]" * size + b"l."
    return {
        "an object of nodes": objects(1, archive_of(nodes, {})),
        "an object of nodes that inflates": objects(1, deflated({"a/data.pkl": nodes})),
        "many objects of nodes that inflate": objects(few // 100, deflated({"a/data.pkl": nodes})),
        "an object of a bare pickle of nodes": objects(1, nodes),
        "many tensors": folder(named(b"".join(text(f"w{place}") + one for place in range(few // 4)))),
        "one tensor many times": folder(
            named(text("w") + one + b"q\x01" + b"".join(text(f"w{place}") + b"h\x01" for place in range(few)))
        ),
        "many chunks": folder(
            named(text("w") + stored_tensor((few, 1), chunks(*(((place, 0), (1, 1)) for place in range(few)))))
        ),
        "chunks in adjacent columns": folder(named(text("w") + stored_tensor((2 * few, few), chunks(
            *((start, (few, 1)) for start in ((place, place) for place in range(few)))
        )))),
        "chunks that overlap": folder(named(text("w") + stored_tensor((2 * few, 1), chunks(*thin)))),
        "many pieces": folder(named(text("w") + one, b"".join(
            stored_index("w", (place,)) + stored_place("__0_0.distcp", 0, 0) for place in range(few // 4)
        ))),
        "pieces of one long name": folder(named(text("w") + one, b"".join(
            (text("n" * size) + b"q\x020" if not place else b"")
            + stored_index("w", (place,)).replace(text("w"), b"h\x02") + stored_place("__0_0.distcp", 0, 0)
            for place in range(few // 4)
        ))),
        "names of dots": folder(named(b"".join(text("." * 60 + str(place)) + one for place in range(few // 10)))),
        "a size of 2**62": folder(named(text("w") + stored_tensor((2**30,) * 60, chunks()))),
    }  # fmt: skip

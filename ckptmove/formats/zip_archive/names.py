"""Names of the records in an archive of torch: the folder of the object, and names that are ambiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import ArchiveOfFiles, DamagedArchive
from ckptmove.formats.zip_archive.index import obstacle
from ckptmove.text import some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.formats.zip_archive.index import ZipRecords

#: Records other than storages that ckptmove or torch reads.
KNOWN_RECORDS: Final = frozenset({
    "data.pkl", "byteorder", "version", ".storage_alignment", ".format_version", "constants.pkl", "bytecode.pkl",
    "traced_inputs.pkl", "model.json",
})  # fmt: skip
#: Record in the folder of a ``torch.export`` archive; and records of unsupported forms, in the folder or at the root.
EXPORT_RECORD: Final = "archive_format"
EXPORT_FORMS: Final = {
    "data/aotinductor/": "an AOTInductor package, compiled for one kind of device",
    "serialized_exported_program.json": "a torch.export archive of torch 2.7 or older",
}
_CHECKPOINT_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def object_folder(names: Sequence[str], path: str) -> str:
    """The folder of the archive that holds ``data.pkl``, with its slash.

    It is the stem of the file's name at the time of saving.
    """
    folders = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(folders) > 1:
        raise DamagedArchive(path, f"it holds data.pkl {len(folders)} times")
    if not folders:
        # For example, stable-baselines3 zips whole checkpoints.
        held = [name for name in names if name.endswith(_CHECKPOINT_SUFFIXES)]
        found = "a zip archive without data.pkl" + (f"; it holds {some(held)}" if held else "")
        raise ArchiveOfFiles(path, found, "zip")
    return folders[0]


def export_form(names: Sequence[str]) -> str | None:
    """Form of a torch.export archive: empty for the form that ckptmove reads, None for any other zip."""
    whole = "\n".join(names)
    if not any(text in whole for text in (EXPORT_RECORD, *EXPORT_FORMS)):
        return None  # a fast answer for archives of many storages
    parts = [part for name in names for part in (name, name.partition("/")[2])]
    for start, what in EXPORT_FORMS.items():
        if any(part.startswith(start) for part in parts):
            return f"{what} ({start.rstrip('/')})"
    return "" if EXPORT_RECORD in parts else None


def refuse_doubles(records: ZipRecords, names: Sequence[str], path: str) -> None:
    """Raise DamagedArchive if torch's reader, which ignores ASCII case, could take one record for another."""
    whole = "".join(names)
    if whole.isascii() and "\0" not in whole and whole == whole.lower() and len(set(names)) == len(names):
        return  # a fast answer for the names that torch writes
    seen: set[str | bytes] = set()
    for place, name in enumerate(names):
        lowered = name.lower()
        folded = lowered if name.isascii() else records.raw_name(place).lower()
        if folded in seen:
            raise DamagedArchive(path, f"two of its records have the same name, apart from case: {lowered}")
        seen.add(folded)
        own = lowered.rpartition("/")[2] if lowered != name else ""
        if own in KNOWN_RECORDS and not name.endswith(own):
            raise DamagedArchive(path, f"torch could read record '{name}' as '{own}'")
        if "\0" in lowered:
            raise DamagedArchive(path, f"the name of record '{name}' contains a NUL character")


def refuse_obstacles(records: ZipRecords, path: str) -> None:
    """Raise DamagedArchive if a record is encrypted or uses a method other than deflate: torch could not read it."""
    if any(obstacle(*kind) for kind in set(zip(records.flags, records.methods, strict=True))):
        name, what = next((record.name, found) for record in records if (found := record.obstacle))
        raise DamagedArchive(path, f"record '{name}' is {what}")


def refuse_strays(names: Sequence[str], folder: str, path: str) -> None:
    """Raise DamagedArchive if records are in several folders: torch uses the first record's folder for all of them.

    From caffe2/serialize/inline_container.cc ``PyTorchStreamReader::init`` and ``getAllRecords``.
    """
    stray = next((name for name in names if not name.startswith(folder)), None)
    if stray is not None:
        raise DamagedArchive(
            path, f"record '{stray}' is not in the folder '{folder}' of the other records: torch refuses it"
        )

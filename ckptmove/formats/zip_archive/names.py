"""The names of the records in an archive of torch's: where its object lies, and what they could be taken for.

Never reads a record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import ArchiveOfFiles, DamagedArchive

if TYPE_CHECKING:
    from ckptmove.formats.zip_archive.index import ZipDirectory

#: Records that are read for what they say.
KNOWN_RECORDS: Final = frozenset({
    "data.pkl", "byteorder", "version", ".storage_alignment", ".format_version", "constants.pkl", "bytecode.pkl",
    "traced_inputs.pkl", "model.json",
})  # fmt: skip
#: In the folder of an archive of ``torch.export``; and what other forms of it have there or at the root, with what they
#: are.
EXPORT_RECORD: Final = "archive_format"
EXPORT_FORMS: Final = {
    "data/aotinductor/": "an AOTInductor package, compiled for one kind of device",
    "serialized_exported_program.json": "a torch.export archive of torch 2.7 or older",
}
_CHECKPOINT_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def object_folder(directory: ZipDirectory, path: str) -> str:
    """The folder of the archive that holds ``data.pkl``, with its slash.

    It is the stem that the file had when it was saved, whatever it is called now.

    Raises:
        ArchiveOfFiles: there is none.
        DamagedArchive: there are several.
    """
    names = [record.name for record in directory.records if record.name.endswith("/data.pkl")]
    folders = [name.removesuffix("data.pkl") for name in names if name.count("/") == 1]
    if len(folders) > 1:
        raise DamagedArchive(path, f"data.pkl stands in it {len(folders)} times")
    if not folders:
        # stable-baselines3 and others zip whole checkpoints.
        held = [record.name for record in directory.records if record.name.endswith(_CHECKPOINT_SUFFIXES)]
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        found = "a zip archive without data.pkl" + (f"; it holds {held[0]}{more}" if held else "")
        raise ArchiveOfFiles(path, found, "zip")
    return folders[0]


def export_form(directory: ZipDirectory) -> str | None:
    """What a zip is of torch.export: empty for the form that is read, None where it is not of torch.export at all."""
    names = [part for record in directory.records for part in (record.name, record.name.partition("/")[2])]
    for start, what in EXPORT_FORMS.items():
        if any(name.startswith(start) for name in names):
            return f"{what} ({start.rstrip('/')})"
    return "" if EXPORT_RECORD in names else None


def refuse_doubles(directory: ZipDirectory, path: str) -> None:
    """Refuse names that torch's reader, which folds the case of ASCII letters, could take for another record's.

    Raises:
        DamagedArchive: there is one.
    """
    names = [record.name for record in directory.records]
    whole = "".join(names)
    if whole.isascii() and "\0" not in whole and whole == whole.lower() and len(set(names)) == len(names):
        return  # as torch writes them, and a hundred thousand of them at once
    seen: set[str | bytes] = set()
    for record in directory.records:
        lowered = record.name.lower()
        folded = lowered if record.name.isascii() else directory.raw_name(record).lower()
        if folded in seen:
            raise DamagedArchive(path, f"two of its records have the same name but for its case: {lowered}")
        seen.add(folded)
        own = lowered.rpartition("/")[2] if lowered != record.name else ""
        if own in KNOWN_RECORDS and not record.name.endswith(own):
            raise DamagedArchive(path, f"record '{record.name}' would be taken for '{own}'")
        if "\0" in lowered:
            raise DamagedArchive(path, f"the name of record '{record.name}' goes on behind its end")


def refuse_obstacles(directory: ZipDirectory, path: str) -> None:
    """Refuse records that no version of torch reads.

    Raises:
        DamagedArchive: one is encrypted, or compressed otherwise than by deflate.
    """
    for record in directory.records:
        if record.obstacle:
            raise DamagedArchive(path, f"record '{record.name}' is {record.obstacle}")


def refuse_strays(directory: ZipDirectory, folder: str, path: str) -> None:
    """Refuse what torch's reader refuses: it takes the first record's folder for that of all.

    From caffe2/serialize/inline_container.cc ``PyTorchStreamReader::init`` and ``getAllRecords``.

    Raises:
        DamagedArchive: there is some.
    """
    stray = next((record.name for record in directory.records if not record.name.startswith(folder)), None)
    if stray is not None:
        raise DamagedArchive(path, f"record '{stray}' is not in the folder '{folder}' of the others: torch refuses it")

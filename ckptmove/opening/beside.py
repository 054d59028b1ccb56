"""Find unread files and code next to the checkpoints of a directory or an archive.

Code is looked for in local files only, because each file at a URL takes a request.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import CodeBeside, UnreadFile
from ckptmove.checkpoint.parts import read_file
from ckptmove.errors import ArchiveOfFiles, LimitExceeded, NotACheckpoint, UnreadableInput
from ckptmove.opening.archive import look_inside
from ckptmove.opening.detect import read_small
from ckptmove.opening.members import Members

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.listing import ListedFile, Listing
    from ckptmove.limits import Limits
    from ckptmove.opening.archive import Inside

#: Endings of files that programs unpickle.
PICKLED: Final = (".bin", ".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".th", ".joblib", ".dill")
#: Names of files in hidden folders that are read: also arrays, and what is compressed or packed.
_HIDDEN: Final = re.compile(
    rf".*(?:(?:{'|'.join(map(re.escape, PICKLED))}|\.npy|\.npz)(?:\.(?:gz|bz2|xz|zst|z))?|\.zip|\.tar|\.tgz|\.nemo)",
    re.IGNORECASE,
)
_WHERE_HIDDEN: Final = "in a hidden folder"
#: Size limit of a file that names code.
_MOST_BYTES: Final = 1 << 20
_PROJECT: Final = "pyproject.toml"
_INDICES: Final = frozenset({"model_index.json", "modules.json"})


def unread_file(listing: Listing, file: ListedFile, error: NotACheckpoint, inside: Inside) -> UnreadFile | None:
    """A file that was not read, if a loader may unpickle it or what is inside of it; None for any other file."""
    runs = error.runs or inside.runs
    is_pointer = error.found == "a git-lfs pointer"
    # An archive in an archive has a finding of its own.
    is_archive = inside.is_unread and not isinstance(listing, Members)
    is_named_so = file.name.lower().endswith(PICKLED) and not isinstance(error, ArchiveOfFiles)
    if not (runs or error.holds_pickle or inside.holds_pickle or is_pointer or is_archive or is_named_so):
        return None
    return UnreadFile(file.path, error.found, runs)


def hidden_pickles(listing: Listing, limits: Limits) -> Iterator[UnreadFile]:
    """Checkpoints and pickles in hidden folders, by their endings and their content; at URLs, by their endings alone.

    They are no part of the checkpoint, but a loader can open them by name.
    """
    for file in listing.files:
        if file.is_hidden and _HIDDEN.fullmatch(file.name):
            found = UnreadFile(file.path, _WHERE_HIDDEN) if listing.is_remote else _hidden(listing, file, limits)
            if found is not None:
                yield found


def _hidden(listing: Listing, file: ListedFile, limits: Limits) -> UnreadFile | None:
    """A file in a hidden folder; None if it is neither a checkpoint nor a pickle, and holds none."""
    unread, path = UnreadFile(file.path, _WHERE_HIDDEN), file.path
    try:
        listing.look(path)
        with closing(listing.open(path)) as source:
            inventory = read_file(source, listing.limits(path, limits), tree="inventory").inventory
    except NotACheckpoint as error:
        inside = look_inside(listing, file, error, limits)
        runs = error.runs or inside.runs
        is_told = runs or error.holds_pickle or inside.holds_pickle or inside.is_unread
        return unread._replace(runs=runs) if is_told else None
    except (UnreadableInput, LimitExceeded) as error:
        return unread._replace(runs=error.runs)
    names = (use.name for use in (*inventory.globals, *inventory.apart) if use.verdict == "dangerous")
    readings = tuple(fact.record for fact in inventory.facts if fact.kind == "second-reading")
    return unread._replace(runs=tuple(dict.fromkeys(names)), readings=readings)


def code_beside(listing: Listing) -> Iterator[CodeBeside]:
    """Code in a listing that a loader would import."""
    if listing.is_remote:
        return
    modules = {file.path for file in listing.files if file.name.endswith(".py")}
    for file in listing.files:
        if file.name == _PROJECT and not file.is_hidden:
            if keys := _code_keys(_text(listing, file.path)):
                yield CodeBeside(file.path, f"{keys} of [tool.ckptmove]", ())
        elif modules and not file.is_hidden and (file.name.endswith("config.json") or file.name in _INDICES):
            prefix = f"{file.folder}/" if file.folder else ""
            named = {f"{prefix}{module.replace('.', '/')}.py" for module in _modules(_text(listing, file.path))}
            if found := sorted(named & modules):
                yield CodeBeside(file.path, "", tuple(found))


def _text(listing: Listing, path: str) -> str:
    try:
        return read_small(listing, path, _MOST_BYTES).decode("utf-8", "replace")
    except (UnreadableInput, LimitExceeded):
        return ""


def _code_keys(text: str) -> str:
    """The keys of ``[tool.ckptmove]`` that name code; empty if none does, or ``ckptmove verify`` refuses the file."""
    import tomli

    try:
        tools = tomli.loads(text).get("tool")
    except (tomli.TOMLDecodeError, RecursionError):  # arrays in arrays
        return ""
    table = tools.get("ckptmove") if isinstance(tools, dict) else None
    named = table if isinstance(table, dict) else {}
    keys = [key for key in ("case", "script") if key in named]
    keys += ["optimizer"] if ":" in str(named.get("optimizer")) else []  # without a colon, it is a class of torch
    return ", ".join(f"'{key}'" for key in keys)


def _modules(text: str) -> Iterator[str]:
    """The modules that a JSON file names.

    ``auto_map`` of transformers maps a class to ``module.Class``, to a list of these, or to the same in another
    repository, after ``--``. ``model_index.json`` of diffusers maps a component to ``[module, Class]``, and
    ``modules.json`` of sentence-transformers is a list of components with a ``type``.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return
    names: list[object] = []
    if isinstance(found, dict):
        mapped = found.get("auto_map")
        for value in mapped.values() if isinstance(mapped, dict) else ():
            names += value if isinstance(value, list) else [value]
        names += [f"{value[0]}.{value[-1]}" for value in found.values() if isinstance(value, list) and value]
    elif isinstance(found, list):
        names += [one.get("type") for one in found if isinstance(one, dict)]
    for name in names:
        if isinstance(name, str):
            yield name.rpartition("--")[2].rpartition(".")[0]

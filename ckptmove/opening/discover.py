"""Find the checkpoints below a folder by the names of its files, without opening one.

A folder is one checkpoint if a file in it has a name that only a part of a checkpoint has: ``.metadata``, a shard, the
state of a trainer, the file of a rank. Any other file is a checkpoint of its own if its ending promises one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.assembled.dcp_folder import is_distributed
from ckptmove.checkpoint.file_names import INDEX_FILE, SHARD_FILE
from ckptmove.checkpoint.trainers import ACCELERATE_OPTIMIZER, TRAINERS, file_role
from ckptmove.formats.safetensors_shards import shard_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.io.walk import WalkedFile

#: Endings of checkpoints of one file. Archives of any content (``.zip``, ``.tar``) are left out: to look inside takes a
#: request for each of their files.
ENDINGS: Final = (
    ".pt", ".pth", ".pth.tar", ".ckpt", ".safetensors", ".bin", ".pkl", ".pickle", ".pt2", ".nemo", ".th",
)  # fmt: skip
#: A file of one rank: ``model_world_size_8_rank_0.pt``, ``rank0.pth``.
_RANK_FILE: Final = re.compile(r"(?:.*[._-])?rank[_-]?\d+(?:[._-].*)?\.(?:pt|pth|bin|ckpt)")
#: A folder of a rank of model parallelism (Megatron).
_RANK_FOLDER: Final = re.compile(r"mp_rank_\d+(?:_\d+)*")
#: Layouts whose folders do not contain the parts of one checkpoint in other folders.
_FLAT: Final = frozenset({"dcp", "sharded", "ranks"})


class FoundCheckpoint(NamedTuple):
    """A checkpoint below a folder."""

    path: str  # its path in the folder; empty for the folder itself
    #: the file, with an empty path, or the files of a folder that belong to it, by their paths in that folder.
    files: tuple[WalkedFile, ...]
    is_folder: bool


class Found(NamedTuple):
    """The result of a search."""

    checkpoints: tuple[FoundCheckpoint, ...]  # the checkpoints, by path
    left_out: int  # number of files that are no part of one by their names


def find_checkpoints(files: Sequence[WalkedFile]) -> Found:
    """Group the files below a folder into checkpoints.

    A folder inside of a trainer's checkpoint is a part of it (``checkpoint-5/pytorch_model_fsdp_0``), unless it has the
    signs of the same trainer: then the upper folder holds the results of a run next to its checkpoints, and only its
    own files belong to it.
    """
    signs: dict[str, set[str]] = defaultdict(set)
    for file in files:
        folder, _, name = file.path.rpartition("/")
        kinds = set(_signs(name))
        if kinds:
            signs[_whole(folder)] |= kinds
    consolidated = _consolidated(files)
    for folder, upper in consolidated.items():
        signs[upper] |= signs.pop(folder)
    tops = {folder for folder, kinds in signs.items() if not _is_part(folder, kinds, signs)}
    homes = {above for top in tops for above in _above(top) if above in tops}  # with checkpoints inside of them
    homes |= tops.intersection(consolidated.values())
    members: dict[str, list[WalkedFile]] = defaultdict(list)
    alone: list[FoundCheckpoint] = []
    left_out = 0
    for file in files:
        folder = file.path.rpartition("/")[0]
        top = next((one for one in (folder, *_above(folder)) if one in tops), None)
        if top is not None and (
            top not in homes or folder == top or top in {_whole(folder), consolidated.get(folder)} or folder in signs
        ):
            members[top].append(file._replace(path=file.path[len(top) :].lstrip("/")))
        elif file.path.endswith(ENDINGS):
            alone.append(FoundCheckpoint(file.path, (file._replace(path=""),), is_folder=False))
        else:
            left_out += 1
    folders = [FoundCheckpoint(top, tuple(sorted(own)), is_folder=True) for top, own in members.items()]
    return Found(tuple(sorted([*folders, *alone])), left_out)


def _consolidated(files: Sequence[WalkedFile]) -> dict[str, str]:
    """Folders with shards that torch has consolidated, each with the folder above it, which has the whole tensors."""
    shards, tables = set(), set()
    for file in files:
        folder, _, name = file.path.rpartition("/")
        if shard_name(name) is not None:
            shards.add(folder)
        elif name.endswith(".safetensors"):
            tables.add(folder)
    return {one: one.rpartition("/")[0] for one in shards if one and one.rpartition("/")[0] in tables}


def _signs(name: str) -> Iterator[str]:
    """The layouts that the name of a file is a sign of."""
    if is_distributed(name):
        yield "dcp"
    if INDEX_FILE.fullmatch(name) or SHARD_FILE.fullmatch(name):
        yield "sharded"
    if name == ACCELERATE_OPTIMIZER:
        yield "accelerate"
    known = [trainer.layout for trainer in TRAINERS if trainer.sign and re.fullmatch(trainer.sign, name)]
    yield from known
    if not known and _RANK_FILE.fullmatch(name):
        yield "ranks"


def _is_part(folder: str, kinds: set[str], signs: dict[str, set[str]]) -> bool:
    """Whether a folder belongs to the checkpoint of a trainer above it."""
    above = next((one for one in _above(folder) if one in signs), None)
    return above is not None and bool(signs[above] - _FLAT) and kinds.isdisjoint(signs[above])


def _whole(folder: str) -> str:
    """The folder of the whole checkpoint, for a folder that is named as a part of one; otherwise the folder."""
    upper, _, name = folder.rpartition("/")
    is_part = _RANK_FOLDER.fullmatch(name) is not None or file_role(name) in {"model", "optimizer"}
    return upper if is_part else folder


def _above(folder: str) -> Iterator[str]:
    """The folders above a folder, the nearest first."""
    while folder:
        folder = folder.rpartition("/")[0]
        yield folder

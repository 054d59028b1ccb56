"""Inventory of a directory or an archive: its files, facts about them, and the checkpoints among them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.file_names import MODEL_PARALLEL_FILE, UNIVERSAL_FILE, ZERO_FILE
from ckptmove.checkpoint.trainers import file_role
from ckptmove.formats.facts import facts_of
from ckptmove.model import OLDEST_TORCH, ArchiveForm, Inventory
from ckptmove.text import amount
from ckptmove.torch_facts.weights_only import SHARDED_TENSOR

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ckptmove.model import Role, TensorRecord

#: A file that one rank writes of a distributed checkpoint (``torch/distributed/checkpoint/filesystem.py``).
_SHARD: Final = re.compile(r"((?:.*/)?)__(\d+)_\d+\.distcp")

#: Name of the flattened parameters of a module, from torch/distributed/fsdp/_common_utils.py.
_FLAT_PARAM: Final = "_flat_param"

#: The numbers in a name, without their leading zeros.
_NUMBERS: Final = re.compile(r"0*([0-9]+)")


class FileRecord(NamedTuple):
    """A checkpoint file of a directory."""

    path: str  # its path in the directory, with slashes
    roles: tuple[Role, ...]  # roles of its content
    container: str
    layout: str  # layout of the file alone
    size_bytes: int
    tensors: int  # number of its tensors
    devices: tuple[str, ...]  # device tags of its tensors, in the order of the file
    #: first version of torch, 2.4 or later, whose ``torch.load(weights_only=True)`` accepts its pickle without further
    #: options; None if no version does.
    weights_only_since: str | None = OLDEST_TORCH
    refused: tuple[str, ...] = ()  # the globals in it that no version accepts; empty if no version accepts its opcodes
    runs: tuple[str, ...] = ()  # the dangerous names in it
    part: str | None = None  # name of the part that begins the names of its tensors; None unless it is a file of a rank
    is_piece: bool = False  # whether its tensors belong to its folder, and not to the file alone

    @property
    def folder(self) -> str:
        """Folder of the file, or of the distributed checkpoint that a trainer saves like a file (``optimizer_0``)."""
        folder = self.path.rpartition("/")[0]
        outer, _, name = folder.rpartition("/")
        return outer if self.is_piece and file_role(name) in {"model", "optimizer"} else folder

    @property
    def prefix(self) -> str:
        """Beginning of the names of its tensors: its path, or the name that files of several ranks share."""
        return self.path if self.part is None else self.part


class UnreadFile(NamedTuple):
    """A file that was not read, although a loader may unpickle it."""

    path: str  # its path in the directory
    found: str  # why it was not read, as a noun phrase for its content
    runs: tuple[str, ...] = ()  # the dangerous names in the pickle that it holds
    readings: tuple[str, ...] = ()  # what another reader sees in it, as noun phrases


class CodeBeside(NamedTuple):
    """Code that a loader would import."""

    path: str  # the file that names it
    key: str  # what names it there; empty for a class of a model
    files: tuple[str, ...]  # the files with the code; empty if they may be anywhere


class DanglingPointer(NamedTuple):
    """A text file that names a checkpoint which is not there."""

    path: str  # its path in the directory
    names: str  # what it names: a folder, or the number of one
    newest: str  # the name with the highest number among the checkpoints of its folder; empty without any


@dataclass(frozen=True, kw_only=True, repr=False)
class DirectoryInventory(Inventory):
    """Inventory of a directory or an archive, as one dict that maps the path of each file to its content.

    Names begin with the path of their file and a dot; keys of storages begin with the path and a slash. ``root_keys``
    are the names of the state_dicts: the path of a file, or the path and a key of the file's root. Sites are offsets in
    all pickles concatenated.
    """

    files: tuple[FileRecord, ...]  # files that are checkpoints, in the order of their tensors
    form: ArchiveForm | None = None  # format of the archive; None for a directory
    is_incomplete: bool = False  # whether a file could not be read and was left out
    #: numbers of elements of the parameters in ZeRO's partitions, by dtype; of one checkpoint if all have the same.
    partitioned: Mapping[str, int] = field(default_factory=dict)
    unread: tuple[UnreadFile, ...] = ()  # files that were not read, although a loader may unpickle them
    code: tuple[CodeBeside, ...] = ()  # code beside the checkpoints
    pointers: tuple[DanglingPointer, ...] = ()  # text files that name a checkpoint which is not there

    @property
    def sharding(self) -> str:
        """Why no file holds an optimizer with the state of whole parameters; empty if one may.

        ZeRO concatenates the state of all parameters and cuts it into one run for each rank, even for a single rank
        (``deepspeed/runtime/zero/stage_1_and_2.py``). Model parallelism cuts the parameters themselves.
        """
        paths = [file.path for file in self.files]
        if any(map(ZERO_FILE.fullmatch, paths)):
            count = sum(ZERO_FILE.fullmatch(path) is not None for path in paths)
            return f"ZeRO keeps the optimizer's state in flat runs ({amount(count, 'file')}), and not by parameter"
        if any(map(UNIVERSAL_FILE.fullmatch, paths)):
            return "a universal checkpoint of DeepSpeed keeps the state of each parameter in files of its own"
        ranks = {match[1] for path in paths if (match := MODEL_PARALLEL_FILE.fullmatch(path)) is not None}
        if len(ranks) > 1:
            return f"parameters and their state are cut into parts, over {len(ranks)} ranks of model parallelism"
        return _why_not_whole(self)

    @property
    def order_lost(self) -> str:
        """Why the model's tensors are not in the order of the model; empty if they may be.

        Ranks that hold equal tensors each save some of them (``torch/distributed/checkpoint/_dedup_save_plans.py``).
        """
        if any(facts_of(file.container).is_table and "model" in file.roles for file in self.files):
            return "safetensors has sorted the model's tensors"
        ranks: dict[str, set[str]] = {}
        for file in self.files:
            match = _SHARD.fullmatch(file.path)
            if match is not None and file.is_piece and "model" in file.roles:
                ranks.setdefault(match[1], set()).add(match[2])
        if any(len(own) > 1 for own in ranks.values()):
            return "several ranks have saved a share of the model's tensors each"
        return ""

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Folders or files that each contain a model with its optimizer; empty if there are fewer than two.

        Sorted by number. These are files and distributed checkpoints if a folder contains several of them, and folders
        otherwise.
        """
        if self.sharding:
            return ()  # its folders belong to ranks
        roles: dict[str, set[Role]] = {}
        folders: dict[str, set[Role]] = {}
        for file in self.files:
            # Each rank saves only a part of a distributed checkpoint.
            roles.setdefault(file.folder if file.is_piece else file.prefix, set()).update(file.roles)
            folders.setdefault(file.folder, set()).update(file.roles)
        whole = [path for path, own in roles.items() if path and own.issuperset({"model", "optimizer"})]
        if len({path.rpartition("/")[0] for path in whole}) < len(whole):
            return tuple(sorted(whole, key=_by_number))
        found = [folder for folder, own in folders.items() if folder and own.issuperset({"model", "optimizer"})]
        return tuple(sorted(found, key=_by_number)) if len(found) > 1 else ()

    def folder_of(self, where: str) -> str:
        """The folder of the file that contains a name."""
        return _home(where, self._homes())

    def in_folder(self, folder: str) -> DirectoryInventory:
        """A copy with the tensors and files of one folder only, without its subfolders; other fields are unchanged."""
        homes = self._homes()
        tensors = tuple(tensor for tensor in self.tensors if _home(tensor.name, homes) == folder)
        files = tuple(file for file in self.files if file.folder == folder)
        return replace(self, tensors=tensors, files=files)

    def file_at(self, where: str) -> FileRecord | None:
        """The file that contains a name; None in a distributed checkpoint."""
        homes = {file.prefix: file.prefix for file in self.files if not file.is_piece}
        return next((file for file in self.files if file.prefix == _home(where, homes)), None)

    def below(self, path: str) -> tuple[TensorRecord, ...]:
        """The tensors of a file, or of all files in a folder and its subfolders."""
        homes = {folder: folder for folder in self._homes()}
        own = {home for home in homes if not path or home == path or home.startswith(f"{path}/")}
        return tuple(tensor for tensor in self.tensors if _home(tensor.name, homes) in own)

    def by_checkpoint(self, tensors: Iterable[TensorRecord]) -> Iterable[list[TensorRecord]]:
        """Tensors grouped by ``checkpoints``, or by the ranks of FSDP1; all others form one more group."""
        own = set(self.checkpoints)
        if any(one.subclass == SHARDED_TENSOR for one in self.tensors):
            own = {file.path for file in self.files}
        homes = self._homes_in(own)
        groups: dict[str, list[TensorRecord]] = {}
        for tensor in tensors:
            groups.setdefault(_home(tensor.name, homes), []).append(tensor)
        return groups.values()

    def owners(self, names: Iterable[str]) -> Iterable[str]:
        """The one of ``checkpoints`` that contains each name; empty for none."""
        homes = self._homes_in({*self.checkpoints})
        return (_home(name, homes) for name in names)

    def in_one_format(self, tensors: Iterable[TensorRecord]) -> list[TensorRecord]:
        """Tensors without those that a folder holds again in another format: ``model.safetensors`` and ``*.bin``."""
        files = {file.prefix: file for file in self.files}
        homes = {path: path for path in files}
        groups: dict[tuple[str, str], list[TensorRecord]] = {}
        keys: dict[tuple[str, str], Counter[tuple[str, tuple[int, ...]]]] = {}
        for tensor in tensors:
            path = _home(tensor.name, homes)
            place = path.rpartition("/")[0], files[path].container if path else ""
            groups.setdefault(place, []).append(tensor)
            keys.setdefault(place, Counter())[tensor.name.removeprefix(path), tensor.shape] += 1
        first = {(place[0], frozenset(count.items())): place for place, count in reversed(keys.items())}
        kept = set(first.values())
        return [tensor for place in groups if place in kept for tensor in groups[place]]

    def _homes_in(self, checkpoints: Collection[str]) -> dict[str, str]:
        """The one of some files and folders that each prefix of names is, or is in; empty for none."""
        folders = self._homes().items()
        return {
            path: path if path in checkpoints else folder if folder in checkpoints else "" for path, folder in folders
        }

    def _homes(self) -> dict[str, str]:
        """Folder of each checkpoint, by the prefix of its names: its path, or the folder if it is distributed."""
        own = ((file, file.path.rpartition("/")[0]) for file in self.files)
        return {folder if file.is_piece else file.prefix: file.folder for file, folder in own}


def unread_of(inventory: Inventory) -> tuple[UnreadFile, ...]:
    """The files of a directory that were not read, although a loader may unpickle them."""
    return inventory.unread if isinstance(inventory, DirectoryInventory) else ()


def checkpoints_in(inventory: Inventory) -> tuple[str, ...]:
    """The checkpoints of a directory that contains several; empty for one checkpoint."""
    return inventory.checkpoints if isinstance(inventory, DirectoryInventory) else ()


def sharding_of(inventory: Inventory) -> str:
    """Why an optimizer in a checkpoint has not the state of whole parameters; empty if it may have."""
    return inventory.sharding if isinstance(inventory, DirectoryInventory) else _why_not_whole(inventory)


def _why_not_whole(inventory: Inventory) -> str:
    """What FSDP1 has saved in place of whole parameters or their state; empty if it has not."""
    if any(one.subclass == SHARDED_TENSOR for one in inventory.tensors):
        return "each rank of FSDP1 has saved its own shards as ShardedTensor: the files of all ranks are read together"
    is_sharded = any(use.name == SHARDED_TENSOR for use in inventory.globals)
    is_numbered = [key.isdigit() for one in inventory.optimizers for group in one.groups for key in group.params]
    if is_sharded and any(is_numbered):
        return (
            "optimizer.state_dict() of FSDP1 has only the elements of one rank: save the result of "
            "FullyShardedDataParallel.optim_state_dict()"
        )
    if (is_sharded or not all(is_numbered)) and any(one.name.endswith(_FLAT_PARAM) for one in inventory.tensors):
        return (
            "LOCAL_STATE_DICT of FSDP1 has flattened parameters, without their names and shapes: save with "
            "StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    return ""


def _by_number(folder: str) -> list[tuple[int, str]]:
    """Sort key of a folder: ``checkpoint-500`` is before ``checkpoint-1000``."""
    return [(len(part) if index % 2 else 0, part) for index, part in enumerate(_NUMBERS.split(folder))]


def _home(where: str, homes: Mapping[str, str]) -> str:
    while where and where not in homes:
        where = where[: max(where.rfind("."), where.rfind("/"), 0)]  # ranks may each have a .metadata in one folder
    return homes.get(where, "")  # no prefix if the directory is one distributed checkpoint

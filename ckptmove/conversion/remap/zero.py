"""Gather the partitions of a DeepSpeed ZeRO checkpoint into whole parameters and their optimizer state.

The result is a checkpoint of one file with the keys that DeepSpeed writes without ZeRO: ``module`` with the fp32
weights, ``optimizer`` with the state_dict of the optimizer, and the other keys of the model states of rank 0. The
algorithm is that of deepspeed/utils/zero_to_fp32.py, also for the moments.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil, prod
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.checkpoint.inventory.partitions import HOLDER, PARTITIONS, is_partitioned, partitions
from ckptmove.checkpoint.inventory.shapes import as_dict, key_text
from ckptmove.checkpoint.layouts.gathered_part import GatheredPart, Run
from ckptmove.checkpoint.layouts.zero_files import MODEL_FILE, OPTIMIZER_FILE
from ckptmove.checkpoint.parts import FilePart
from ckptmove.conversion.remap.combine import rename_storages, set_devices
from ckptmove.conversion.remap.errors import NotGathered
from ckptmove.errors import DamagedArchive
from ckptmove.formats.rebuild_calls import rebuild_call
from ckptmove.model import TensorRecord
from ckptmove.pickles.rebuild_arguments import NotATensor, sizes
from ckptmove.pickles.tree import Dict, List, items_of, nodes
from ckptmove.torch_facts.optimizers import is_elementwise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.limits import Limits
    from ckptmove.model import OptimizerRecord
    from ckptmove.pickles.tree import Value

#: Keys of the model states that describe the partitions.
_OF_PARTITIONS: Final = frozenset({"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"})
_DIGITS: Final = re.compile(r"\d+")


class _Rank(NamedTuple):
    """The partitions of one rank.

    Attributes:
        part: its file.
        optimizer: its optimizer; the state is cut to the length of the partitions.
        partitions: its partitions of the weights.
    """

    part: FilePart
    optimizer: OptimizerRecord
    partitions: Sequence[TensorRecord]


class _Slice(NamedTuple):
    """A run of elements in the partition of one rank.

    Attributes:
        rank: the rank.
        start: first element.
        end: end (exclusive).
    """

    rank: int
    start: int
    end: int


class _Files(NamedTuple):
    """The files of one ZeRO checkpoint.

    Attributes:
        ranks: files with partitions, by rank.
        models: files of the model states, by rank; of stages 1 and 2 only one.
    """

    ranks: Sequence[FilePart]
    models: Sequence[FilePart]


def gather_partitions(checkpoint: OpenCheckpoint, limits: Limits) -> OpenCheckpoint | None:
    """The checkpoint with whole parameters, as one file; None if it has no partitions of ZeRO.

    Args:
        checkpoint: a directory or an archive, with its trees, which are changed.
        limits: resource limits for the new tree.

    Raises:
        NotGathered: if it has several checkpoints, ranks of model parallelism, or state that is not per element.
        DamagedArchive: if the partitions do not have the sizes of the parameters.
    """
    files = _files(checkpoint)
    if files is None:
        return None
    gathering = _Gathering(checkpoint, files)
    root = gathering.root()
    part = GatheredPart(checkpoint.path, root, gathering.storages, limits)
    inventory = replace(part.inventory, container=checkpoint.inventory.container, layout="deepspeed")
    return replace(
        checkpoint, inventory=inventory, parts=(part,), listing=None, links={}, others=(), outside=(), top=""
    )


def _files(checkpoint: OpenCheckpoint) -> _Files | None:
    """The files of the one ZeRO checkpoint in a directory; None if there is none."""
    ranks: dict[str, dict[tuple[int, int], FilePart]] = {}
    models: dict[str, dict[tuple[int, int], FilePart]] = {}
    for part in checkpoint.parts:
        folder, _, name = part.name.rpartition("/")
        optimizer, model = OPTIMIZER_FILE.fullmatch(name), MODEL_FILE.fullmatch(name)
        if optimizer is not None and isinstance(part, FilePart):
            ranks.setdefault(folder, {})[int(optimizer[3]), int(optimizer[2])] = part
        if model is not None and isinstance(part, FilePart):
            models.setdefault(folder, {})[int(model[2]), int(model[1] or 0)] = part
    if not ranks:
        return None
    last = max(ranks, key=lambda folder: ([int(number) for number in _DIGITS.findall(folder)], folder))
    if len(ranks) > 1:
        raise NotGathered(checkpoint.path, "it holds several checkpoints", last)
    own = ranks[last]
    parallel = {model_rank for model_rank, _ in own}
    if len(parallel) > 1:
        reason = f"parameters are cut into parts, over {len(parallel)} ranks of model parallelism"
        raise NotGathered(checkpoint.path, reason)
    return _Files([own[key] for key in sorted(own)], [models[last][key] for key in sorted(models.get(last, {}))])


class _Gathering:
    """The new tree and its storages, under construction."""

    def __init__(self, checkpoint: OpenCheckpoint, files: _Files) -> None:
        self._path = checkpoint.path
        self._models = files.models
        self._tensors = {record.name: record for record in checkpoint.inventory.tensors}
        self._ranks = [self._rank(part, checkpoint) for part in files.ranks]
        first = self._ranks[0]
        self._is_stage_3 = f"{first.part.name}.{HOLDER}.{PARTITIONS[0]}.0" in self._tensors
        self._state = cast("Dict", as_dict(cast("Dict", as_dict(first.part.tree())).get(HOLDER)))
        self._model = as_dict(files.models[0].tree()) or Dict([], [])
        algorithm = first.optimizer.algorithm
        if algorithm is not None and not is_elementwise(algorithm):
            raise NotGathered(self._path, f"{algorithm} keeps other state for a partition than for its parameters")
        if any(len(one.partitions) != len(first.partitions) for one in self._ranks):
            raise NotGathered(self._path, "its ranks have partitions of different groups")
        #: Runs of each storage of the new tree.
        self.storages: dict[str, Sequence[Run]] = {}

    def root(self) -> Value:
        """The new tree."""
        shapes = self._shapes()
        slices = [self._slices(index, own) for index, own in enumerate(shapes)]
        weights = {
            name: self._gathered(shape, [rank.partitions[index] for rank in self._ranks], slices[index][name])
            for index, own in enumerate(shapes)
            for name, shape in own.items()
        }
        weights.update(self._frozen())
        module = as_dict(self._model.get("module"))
        if module is None:
            raise NotGathered(self._path, f"{self._models[0].name} has no module: its layers are in other files")
        shared = as_dict(self._model.get("shared_params")) or Dict([], [])
        sources = {key_text(name): key_text(source) for name, source, _ in shared.pairs()}
        kept = {key_text(key): value for key, value, _ in module.pairs()}
        found = {name: weights.get(sources.get(name, name), value) for name, value in kept.items()}
        found |= {name: value for name, value in weights.items() if name not in found}
        values = {"module": _dict(found.items()), "optimizer": self._optimizer(shapes, slices)}
        pairs = [(key, values.get(key_text(key), value)) for key, value, _ in self._model.pairs()]
        root = _dict((key, value) for key, value in pairs if key_text(key) not in _OF_PARTITIONS)
        self._keep_storages(root)
        set_devices(root, {})
        return root

    def _rank(self, part: FilePart, checkpoint: OpenCheckpoint) -> _Rank:
        for optimizer in checkpoint.inventory.optimizers:
            if optimizer.where.startswith(f"{part.name}.") and is_partitioned(optimizer):
                own = partitions(optimizer, self._tensors)
                if own:
                    return _Rank(part, optimizer, own)
        raise NotGathered(self._path, f"{part.name} has no optimizer with a state for each partition")

    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of the parameters in each partition."""
        stored = self._model.get("param_shapes")
        found = []
        for one in items_of(stored) or (stored,):
            pairs = as_dict(one)
            if pairs is None:
                raise NotGathered(self._path, f"{self._models[0].name} has no param_shapes")
            found.append(self._sizes(pairs))
        if len(found) != len(self._ranks[0].partitions):
            raise self._unfit()
        return found

    def _sizes(self, pairs: Dict) -> dict[str, tuple[int, ...]]:
        try:
            return {key_text(name): sizes(shape) for name, shape, _ in pairs.pairs()}
        except NotATensor as error:
            raise self._unfit() from error

    def _unfit(self) -> DamagedArchive:
        return DamagedArchive(self._path, "its partitions do not have the sizes in its param_shapes")

    def _slices(self, index: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[_Slice]]:
        """Where the elements of each parameter of a partition are, in order."""
        lengths = [rank.partitions[index].shape[0] for rank in self._ranks]
        found, end = {}, 0
        paddings = self._paddings(index, len(shapes))
        if self._is_stage_3:
            for name, shape in shapes.items():
                numel = prod(shape)
                each = ceil(numel / len(lengths))
                ends = [min(each, max(numel - rank * each, 0)) for rank in range(len(lengths))]
                found[name] = [_Slice(rank, end, end + own) for rank, own in enumerate(ends) if own]
                end += each
            if any(length != end for length in lengths):
                raise self._unfit()
            return found
        starts = list(accumulate(lengths, initial=0))
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            start, end = end, end + prod(shape)
            found[name] = [
                _Slice(rank, max(start - first, 0), min(end, last) - first)
                for rank, (first, last) in enumerate(pairwise(starts))
                if start < last and end > first
            ]
            end += padding
        # The end of the last partition is padded to a multiple of this, or was cut off.
        align = 2 * len(lengths)
        if ceil(end / align) != ceil(starts[-1] / align) or end - paddings[-1] > starts[-1]:
            raise self._unfit()
        return found

    def _paddings(self, index: int, count: int) -> list[int]:
        """Elements after each parameter that belong to none."""
        stored = items_of(self._state.get("param_alignment_paddings"))
        own = [one for one in items_of(stored[index]) if type(one) is int] if index < len(stored) else [0] * count
        if len(own) != count:
            raise self._unfit()
        return own

    def _gathered(self, shape: tuple[int, ...], records: Sequence[TensorRecord], slices: Sequence[_Slice]) -> Value:
        """A new tensor of runs of the tensors of all ranks."""
        runs = [Run.of(self._ranks[one.rank].part, records[one.rank], one.start, one.end) for one in slices]
        return self._tensor(records[0].dtype, shape, runs)

    def _tensor(self, dtype: str, shape: tuple[int, ...], runs: Sequence[Run]) -> Value:
        if any(run.record.dtype != dtype for run in runs):
            raise NotGathered(self._path, "its ranks have different dtypes")
        key = f"gathered.{len(self.storages)}"
        self.storages[key] = runs
        return rebuild_call(key, dtype, shape)

    def _frozen(self) -> Iterator[tuple[str, Value]]:
        """Frozen parameters of stage 3, of which each rank has a fragment; those of other stages are in the module."""
        shapes = as_dict(self._model.get("frozen_param_shapes")) if self._is_stage_3 else None
        for name, shape in (self._sizes(shapes) if shapes is not None else {}).items():
            rest, runs = prod(shape), []
            for part in self._models:
                record = self._tensors.get(f"{part.name}.frozen_param_fragments.{name}")
                if record is None:
                    raise self._unfit()
                runs.append(Run.of(part, record, 0, min(prod(record.shape), rest)))
                rest -= runs[-1].record.shape[0]
            if rest:
                raise self._unfit()
            yield name, self._tensor(runs[0].record.dtype, shape, runs)

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def _optimizer(
        self, shapes: Sequence[Mapping[str, tuple[int, ...]]], slices: Sequence[Mapping[str, list[_Slice]]]
    ) -> Value:
        """The state_dict of the optimizer with whole parameters, numbered in the order of its groups."""
        optimizer = self._ranks[0].optimizer
        inner = cast("Dict", as_dict(self._state.get(optimizer.where.rpartition(".")[2])))
        keys = [key for group in optimizer.groups for key in group.params]
        index_of = {key: index for index, key in enumerate(keys)}
        state: list[tuple[Value, Value]] = []
        groups: list[Value] = []
        for stored, group in zip(items_of(inner.get("param_groups")), optimizer.groups, strict=True):
            owners = [(name, index_of[key]) for key in group.params for name in shapes[index_of[key]]]
            owners = self._in_order(owners)
            numbers = range(len(state), len(state) + len(owners))
            for number, (name, index) in zip(numbers, owners, strict=True):
                state.append((number, self._entry(keys[index], index, shapes[index][name], slices[index][name])))
            options = [(key, value) for key, value, _ in cast("Dict", as_dict(stored)).pairs() if key != "params"]
            names: list[Value] = [name for name, _ in owners]
            groups.append(_dict([*options, ("params", _list(numbers)), ("param_names", _list(names))]))
        return _dict([("state", _dict(pair for pair in state if pair[1] is not None)), ("param_groups", _list(groups))])

    def _in_order(self, owners: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """The parameters of a group in the order of the script.

        ``round_robin_gradients`` puts them into another order (``_round_robin_reorder`` in stage_1_and_2.py).
        """
        config = as_dict(self._model.get("ds_config"))
        options = None if config is None else as_dict(config.get("zero_optimization"))
        if self._is_stage_3 or options is None or options.get("round_robin_gradients") is not True:
            return owners
        ranks = len(self._ranks)
        places = [place for first in range(ranks) for place in range(first, len(owners), ranks)]
        return [owner for _, owner in sorted(zip(places, owners, strict=True))]

    def _entry(self, key: str, index: int, shape: tuple[int, ...], slices: Sequence[_Slice]) -> Value:
        """The state of one parameter; None if its partition has none."""
        entries = [{entry.key: entry for entry in rank.optimizer.state}.get(key) for rank in self._ranks]
        first = entries[0]
        if first is None:
            return None
        found: list[tuple[Value, Value]] = list(first.scalars)  # type: ignore[arg-type]  # plain values
        if first.nested or any(one is None or one.scalars != first.scalars for one in entries):
            raise NotGathered(self._path, "its ranks have different state")
        for name, record in first.tensors:
            own = [cast("TensorRecord", one.tensor(name)) for one in entries if one is not None]
            if any(one is None for one in own):
                raise NotGathered(self._path, f"not all ranks have {name}")
            lengths = [rank.partitions[index].shape for rank in self._ranks]
            if [one.shape for one in own] == lengths:
                found.append((name, self._gathered(shape, own, slices)))
            elif prod(record.shape) == 1:
                found.append((name, self._number(name, own)))
            else:
                raise NotGathered(self._path, f"{record.name} is not state of single elements")
        return _dict(found)

    def _number(self, name: str, records: Sequence[TensorRecord]) -> Value:
        """A tensor of one element, which all ranks have, in a storage of its own: a step changes it in place."""
        values = {rank.part.number(one) for rank, one in zip(self._ranks, records, strict=True)}
        if len(values) > 1:
            raise NotGathered(self._path, f"its ranks have different values of {name}: they are of different steps")
        run = Run.of(self._ranks[0].part, records[0], 0, 1)
        return self._tensor(records[0].dtype, records[0].shape, [run])

    def _keep_storages(self, root: Value) -> None:
        """Add the storages of values that are kept, under keys of their own."""
        part = self._models[0]
        prefix = f"{part.name}/"
        for storage in part.inventory.storages:
            flat = TensorRecord(
                storage.key, "other", storage.device, storage.dtype, (storage.numel,), (1,), storage.key, 0,
                storage.nbytes,
            )  # fmt: skip
            self.storages[storage.key] = [Run(part, flat)]
        rename_storages(nodes(root), lambda key: key if key in self.storages else prefix + key)


def _dict(pairs: Iterable[tuple[Value, Value]]) -> Dict:
    flat: list[Value] = [item for pair in pairs for item in pair]
    return Dict(flat, [-1] * len(flat))


def _list(items: Iterable[Value]) -> List:
    listed = [*items]
    return List(listed, [-1] * len(listed))

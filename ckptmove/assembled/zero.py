"""Gather the partitions of a DeepSpeed ZeRO checkpoint into whole parameters and their optimizer state.

The result is a checkpoint of one file with the keys that DeepSpeed writes without ZeRO: ``module`` with the fp32
weights, ``optimizer`` with the state_dict of the optimizer, and the other keys of the model states of rank 0. With
model parallelism, it has these for each model-parallel rank, under ``mp_rank_00`` and so on. The algorithm is that of
deepspeed/utils/zero_to_fp32.py, also for the moments.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import ceil, prod
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.assembled.experts import Experts, shares_of
from ckptmove.assembled.gathered_part import GatheredPart, Run
from ckptmove.assembled.zero_files import EXPERT_FILE, MODEL_FILE, OPTIMIZER_FILE
from ckptmove.checkpoint.inventory.partitions import HOLDER, PARTITIONS, is_partitioned, partitions
from ckptmove.checkpoint.inventory.shapes import as_dict, key_text
from ckptmove.checkpoint.parts import FilePart
from ckptmove.errors import DamagedArchive, NotGathered
from ckptmove.formats.rebuild_calls import rebuild_call
from ckptmove.model import TensorRecord
from ckptmove.pickles.build import new_dict, new_list
from ckptmove.pickles.rebuild_arguments import NotATensor, sizes
from ckptmove.pickles.storage_id import rename_storages, set_devices
from ckptmove.pickles.tree import Dict, items_of, nodes
from ckptmove.torch_facts.optimizers import is_elementwise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.limits import Limits
    from ckptmove.model import OptimizerRecord, StateEntry
    from ckptmove.pickles.tree import Value

#: Keys of the model states that describe the partitions.
_OF_PARTITIONS: Final = frozenset({"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"})
#: A number in a name that int() reads: its limit is 4,300 digits.
_DIGITS: Final = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


class _RankPartitions(NamedTuple):
    """The partitions of one rank."""

    part: FilePart  # its file
    optimizer: OptimizerRecord
    state: Mapping[str, StateEntry]  # its state for each partition, by key; cut to the length of the partition
    partitions: Sequence[TensorRecord]  # its partitions of the weights


class _Slice(NamedTuple):
    """A run of elements in the partition of one rank."""

    rank: int
    start: int  # first element
    end: int  # end (exclusive)


class _Parameter(NamedTuple):
    """A whole parameter."""

    shape: tuple[int, ...]
    slices: Sequence[_Slice]  # where its elements are, in order


class _State(NamedTuple):
    """The state for one partition, which all ranks have."""

    scalars: Sequence[tuple[str, object]]  # plain values, by key
    #: tensors of all ranks, by key, and whether they have a value for each element of the partition.
    tensors: dict[str, tuple[Sequence[TensorRecord], bool]]


class _Files(NamedTuple):
    """The files of one model-parallel rank."""

    name: str  # its name in the file
    ranks: Sequence[FilePart]  # files with partitions, by rank
    models: Sequence[FilePart]  # files of the model states, by rank; of stages 1 and 2 only one
    experts: Sequence[FilePart]  # files of the experts of a model, by layer and number


def gather_partitions(checkpoint: OpenCheckpoint, limits: Limits) -> OpenCheckpoint | None:
    """The checkpoint with whole parameters, as one file; None if it has no partitions of ZeRO.

    The trees of the directory or the archive are changed.
    """
    found = _files(checkpoint)
    if not found:
        return None
    storages: dict[str, Callable[[], Iterable[Run]]] = {}
    roots: list[tuple[Value, Value]] = [(own.name, _Gathering(checkpoint, own, storages).root()) for own in found]
    root = new_dict(roots) if len(roots) > 1 else roots[0][1]
    part = GatheredPart(checkpoint.path, root, storages, limits)
    container, facts = checkpoint.inventory.container, checkpoint.outside
    inventory = replace(part.inventory, container=container, layout="deepspeed", facts=facts)
    return replace(
        checkpoint, inventory=inventory, parts=(part,), listing=None, links={}, others=(), outside=(), top=""
    )


def _files(checkpoint: OpenCheckpoint) -> list[_Files]:
    """The files of the one ZeRO checkpoint in a directory, by model-parallel rank; empty if there is none."""
    ranks: dict[str, dict[tuple[int, ...], FilePart]] = {}
    models: dict[str, dict[tuple[int, ...], FilePart]] = {}
    experts: dict[str, dict[tuple[int, ...], FilePart]] = {}
    for part in [one for one in checkpoint.parts if isinstance(one, FilePart)]:
        folder, _, name = part.name.rpartition("/")
        optimizer, model, expert = (one.fullmatch(name) for one in (OPTIMIZER_FILE, MODEL_FILE, EXPERT_FILE))
        if optimizer is not None:
            ranks.setdefault(folder, {})[int(optimizer[3]), int(optimizer[2])] = part
        if model is not None:
            models.setdefault(folder, {})[int(model[2]), int(model[1] or 0)] = part
        if expert is not None:
            experts.setdefault(folder, {})[int(expert[3]), int(expert[1] or 0), int(expert[2])] = part
    if not ranks:
        return []
    last = max(ranks, key=lambda folder: ([int(number) for number in _DIGITS.findall(folder)], folder))
    if len(ranks) > 1:
        raise NotGathered(checkpoint.path, "it holds several checkpoints", last)
    of_all = ranks[last], models.get(last, {}), experts.get(last, {})
    found = []
    for rank in sorted({key[0] for key in ranks[last]}):
        of_rank = [[files[key] for key in sorted(files) if key[0] == rank] for files in of_all]
        if not of_rank[1]:
            raise NotGathered(checkpoint.path, "its model states are in no file that is a checkpoint")
        found.append(_Files(f"mp_rank_{rank:02}", *of_rank))
    return found


class _Gathering:
    """The new tree and its storages, under construction."""

    def __init__(
        self, checkpoint: OpenCheckpoint, files: _Files, storages: dict[str, Callable[[], Iterable[Run]]]
    ) -> None:
        self._path = checkpoint.path
        self._models = files.models
        self._tensors = {record.name: record for record in checkpoint.inventory.tensors}
        self._ranks = [self._rank(part, checkpoint) for part in files.ranks]
        first = self._ranks[0]
        self._is_stage_3 = f"{first.part.name}.{HOLDER}.{PARTITIONS[0]}.0" in self._tensors
        #: Runs of each storage of the new tree.
        self._storages = storages
        self._state = self._pairs(self._kept(first.part).get(HOLDER), HOLDER)
        self._model = self._kept(files.models[0])
        self._config = as_dict(self._model.get("ds_config")) or new_dict()
        self._experts = [self._kept(part) for part in files.experts]
        algorithm = first.optimizer.algorithm
        if algorithm is not None and not is_elementwise(algorithm):
            raise NotGathered(self._path, f"{algorithm} keeps other state for a partition than for its parameters")
        if any(len(one.partitions) != len(first.partitions) for one in self._ranks):
            raise NotGathered(self._path, "its ranks have partitions of different groups")

    def root(self) -> Value:
        """The new tree."""
        stored = self._shapes()
        experts = Experts(key_text(key) for one in self._experts for key in one.keys())
        whole = [self._whole(index, own, experts) for index, own in enumerate(stored)]
        weights = {
            name: self._gathered(*parameter, [rank.partitions[index] for rank in self._ranks])
            for index, own in enumerate(whole)
            for name, parameter in own.items()
        }
        weights.update(self._frozen())
        module = self._pairs(self._model.get("module"), "module")
        shared = as_dict(self._model.get("shared_params")) or new_dict()
        sources = {key_text(name): key_text(source) for name, source, _ in shared.pairs()}
        kept = {key_text(key): value for one in (module, *self._experts) for key, value, _ in one.pairs()}
        found = {name: weights.get(sources.get(name, name), value) for name, value in kept.items()}
        found |= {name: value for name, value in weights.items() if name not in found}
        values = {"module": new_dict(found.items()), "optimizer": self._optimizer(whole)}
        pairs = [(key, values.get(key_text(key), value)) for key, value, _ in self._model.pairs()]
        root = new_dict((key, value) for key, value in pairs if key_text(key) not in _OF_PARTITIONS)
        set_devices(root, {})
        return root

    def _rank(self, part: FilePart, checkpoint: OpenCheckpoint) -> _RankPartitions:
        for optimizer in checkpoint.inventory.optimizers:
            if optimizer.where.startswith(f"{part.name}.") and is_partitioned(optimizer):
                own = partitions(optimizer, self._tensors)
                if own:
                    return _RankPartitions(part, optimizer, {entry.key: entry for entry in optimizer.state}, own)
        raise NotGathered(self._path, f"{part.name} has no optimizer with a state for each partition")

    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of the parameters in each partition."""
        stored = self._model.get("param_shapes")
        found = [self._sizes(self._pairs(one, "param_shapes")) for one in items_of(stored) or (stored,)]
        if len(found) != len(self._ranks[0].partitions):
            raise self._unfit()
        return found

    def _pairs(self, value: Value, name: str) -> Dict:
        """The pairs of a dict that DeepSpeed writes; pipelines have no ``module``, but files for their layers."""
        pairs = as_dict(value)
        if pairs is None:
            raise NotGathered(self._path, f"it has no {name} as DeepSpeed writes it")
        return pairs

    def _kept(self, part: FilePart) -> Dict:
        """The root of a file whose values are kept. Its storages get keys of the whole checkpoint."""
        root = self._pairs(part.tree(), part.name)
        prefix = f"{part.name}/"
        rename_storages(nodes(root), lambda key: prefix + key)
        for storage in part.inventory.storages:
            key, count = storage.key, storage.numel
            flat = TensorRecord(key, "other", storage.device, storage.dtype, (count,), (1,), key, 0, storage.nbytes)
            self._storages[key] = partial(tuple, [Run(part, flat, 0)])
        return root

    def _sizes(self, pairs: Dict) -> dict[str, tuple[int, ...]]:
        try:
            return {key_text(name): sizes(shape) for name, shape, _ in pairs.pairs()}
        except NotATensor as error:
            raise self._unfit() from error

    def _unfit(self) -> DamagedArchive:
        return DamagedArchive(self._path, "its partitions do not have the sizes in its param_shapes")

    def _whole(self, index: int, shapes: Mapping[str, tuple[int, ...]], experts: Experts) -> dict[str, _Parameter]:
        """The parameters of a group in the order of the script, from their shapes on the first rank."""
        shares = self._shares(index)
        names = self._in_order(list(shapes), len(shares[0]))
        try:
            everywhere = (
                experts.everywhere(names, len(shares)) if len(shares) > 1 else [(name, 0, name) for name in names]
            )
        except ValueError as error:
            reason = "it partitions parameters over fewer ranks that are not those of experts in its files"
            raise NotGathered(self._path, reason) from error
        slices = [self._slices(index, shapes, ranks) for ranks in shares]
        return {name: _Parameter(shapes[own], slices[share][own]) for name, share, own in everywhere}

    def _shares(self, index: int) -> list[range]:
        """The ranks that share the partitions of the same parameters: all, or of experts those that have the same."""
        counted, ranks = self._state.get("partition_count"), len(self._ranks)
        each = items_of(counted)  # stages 1 and 2 count the partitions of each group
        count = each[index] if index < len(each) else counted
        if type(count) is not int or count == ranks:
            return [range(ranks)]
        if not each or count < 1 or ranks % count:
            raise NotGathered(self._path, f"its parameters are in {count} partitions, and it has {ranks} ranks")
        return shares_of(ranks, count, data_first=self._config.get("use_data_before_expert_parallelism") is True)

    def _slices(self, index: int, shapes: Mapping[str, tuple[int, ...]], ranks: range) -> dict[str, list[_Slice]]:
        """Where the elements of each parameter of a partition are, in order."""
        lengths = [self._ranks[rank].partitions[index].shape[0] for rank in ranks]
        found, end, padding = {}, 0, 0
        paddings = self._paddings(index, len(shapes))
        if self._is_stage_3:
            for name, shape in shapes.items():
                numel = prod(shape)
                each = ceil(numel / len(lengths))
                ends = [min(each, max(numel - place * each, 0)) for place in range(len(lengths))]
                found[name] = [_Slice(rank, end, end + own) for rank, own in zip(ranks, ends, strict=True) if own]
                end += each
            if any(length != end for length in lengths):
                raise self._unfit()
            return found
        starts = list(accumulate(lengths, initial=0))
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            start, end = end, end + prod(shape)
            places = range(bisect_right(starts, start) - 1, min(bisect_left(starts, end), len(lengths)))
            found[name] = [
                _Slice(ranks[place], max(start - starts[place], 0), min(end, starts[place + 1]) - starts[place])
                for place in places
            ]
            end += padding
        # The end of the last partition is padded to a multiple of this, or was cut off.
        align = 2 * len(lengths)
        if ceil(end / align) != ceil(starts[-1] / align) or end - padding > starts[-1]:
            raise self._unfit()
        return found

    def _paddings(self, index: int, count: int) -> list[int]:
        """Elements after each parameter that belong to none."""
        stored = items_of(self._state.get("param_alignment_paddings"))
        own = [one for one in items_of(stored[index]) if type(one) is int] if index < len(stored) else [0] * count
        if len(own) != count:
            raise self._unfit()
        return own

    def _gathered(self, shape: tuple[int, ...], slices: Sequence[_Slice], records: Sequence[TensorRecord]) -> Value:
        """A new tensor of slices of the tensors of all ranks."""
        if any(record.dtype != records[0].dtype for record in records):
            raise NotGathered(self._path, "its ranks have different dtypes")

        def runs() -> Iterator[Run]:
            return (Run.of(self._ranks[one.rank].part, records[one.rank], one.start, one.end) for one in slices)

        return self._tensor(records[0].dtype, shape, runs)

    def _tensor(self, dtype: str, shape: tuple[int, ...], runs: Callable[[], Iterable[Run]]) -> Value:
        key = f"gathered.{len(self._storages)}"
        self._storages[key] = runs
        return rebuild_call(key, dtype, shape)

    def _frozen(self) -> Iterator[tuple[str, Value]]:
        """Frozen parameters of stage 3. Each rank has a fragment of each; in other stages, they are in the module."""
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
            if any(run.record.dtype != runs[0].record.dtype for run in runs):
                raise self._unfit()
            yield name, self._tensor(runs[0].record.dtype, shape, partial(tuple, runs))

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def _optimizer(self, parameters: Sequence[Mapping[str, _Parameter]]) -> Value:
        """The state_dict of the optimizer with whole parameters, numbered in the order of its groups."""
        optimizer = self._ranks[0].optimizer
        name = optimizer.where.rpartition(".")[2]
        inner = self._pairs(self._state.get(name), name)
        keys = [key for group in optimizer.groups for key in group.params]
        states = {key: self._state_of(key, index) for index, key in enumerate(keys)}
        places = {key: index for index, key in enumerate(keys)}
        state: list[tuple[Value, Value]] = []
        groups: list[Value] = []
        count = 0
        listed = [pairs for one in items_of(inner.get("param_groups")) if (pairs := as_dict(one)) is not None]
        for stored, group in zip(listed, optimizer.groups, strict=True):
            owners = [(name, key) for key in group.params for name in parameters[places[key]]]
            numbers = range(count, count + len(owners))
            count = numbers.stop
            for number, (name, key) in zip(numbers, owners, strict=True):
                own = states[key]
                if own is not None:
                    state.append((number, self._entry(own, parameters[places[key]][name])))
            options = [(key, value) for key, value, _ in stored.pairs() if key != "params"]
            names: list[Value] = [name for name, _ in owners]
            groups.append(new_dict([*options, ("params", new_list(numbers)), ("param_names", new_list(names))]))
        return new_dict([("state", new_dict(state)), ("param_groups", new_list(groups))])

    def _in_order(self, names: list[str], ranks: int) -> list[str]:
        """The parameters of a group in the order of the script.

        ``round_robin_gradients`` puts them into another order (``_round_robin_reorder`` in stage_1_and_2.py).
        """
        options = as_dict(self._config.get("zero_optimization"))
        if self._is_stage_3 or options is None or options.get("round_robin_gradients") is not True:
            return names
        places = [place for first in range(ranks) for place in range(first, len(names), ranks)]
        return [name for _, name in sorted(zip(places, names, strict=True))]

    def _entry(self, state: _State, parameter: _Parameter) -> Value:
        """The state of one parameter. Its numbers have storages of their own, because a step changes them in place."""
        found = dict(state.scalars)
        for key, (own, is_whole) in state.tensors.items():
            found[key] = self._gathered(*(parameter if is_whole else _Parameter(own[0].shape, [_Slice(0, 0, 1)])), own)
        return new_dict(cast("Iterable[tuple[Value, Value]]", found.items()))

    def _state_of(self, key: str, index: int) -> _State | None:
        """The state for a partition; None if no rank has any."""
        entries = [entry for rank in self._ranks if (entry := rank.state.get(key)) is not None]
        if not entries:
            return None
        first = entries[0]
        if len(entries) < len(self._ranks) or first.nested or any(one.scalars != first.scalars for one in entries):
            raise NotGathered(self._path, "its ranks have different state")
        lengths = [rank.partitions[index].shape for rank in self._ranks]
        state = _State(first.scalars, {})
        for name, record in first.tensors:
            own = [one for entry in entries if (one := entry.tensor(name)) is not None]
            if [one.shape for one in own] == lengths:
                state.tensors[name] = own, True
            elif len(own) == len(entries) and all(prod(one.shape) == 1 for one in own):
                values = {rank.part.number(one) for rank, one in zip(self._ranks, own, strict=True)}
                if len(values) > 1:
                    reason = f"its ranks have different values of {name}: they are of different steps"
                    raise NotGathered(self._path, reason)
                state.tensors[name] = own, False
            else:
                raise NotGathered(self._path, f"{record.name} is not state of single elements, or not of all ranks")
        return state

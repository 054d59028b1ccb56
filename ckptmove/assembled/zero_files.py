"""The files of a DeepSpeed checkpoint: which ranks and experts have one, and which are missing.

Names from deepspeed/runtime/engine.py, ``_get_zero_ckpt_name`` and ``_get_ckpt_name``.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from itertools import count, islice
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.partitions import rank_count
from ckptmove.checkpoint.inventory.shapes import as_dict, key_text
from ckptmove.checkpoint.parts import RANKS_MISSING
from ckptmove.errors import MissingShard
from ckptmove.pickles.rebuild_arguments import NotATensor, sizes
from ckptmove.pickles.tree import items_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.checkpoint.parts import FilePart
    from ckptmove.io.listing import Listing
    from ckptmove.pickles.tree import Value

#: Prefix, data-parallel rank and model-parallel rank; every rank writes its partition of the optimizer. The limit for
#: digits is far below that of int().
OPTIMIZER_FILE: Final = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt")
#: Data-parallel rank, which only stage 3 has, and model-parallel rank.
MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt")
#: Layer of an expert, which old versions do not name, its number, and model-parallel rank; ``_get_expert_ckpt_name``.
EXPERT_FILE: Final = re.compile(r"(?:layer_(\d{1,9})_)?expert_(\d{1,9})_mp_rank_(\d{1,9})_model_states\.pt")
#: Number of experts of each layer, in the model states.
_EXPERTS: Final = "num_experts"
#: Layers that DeepSpeed itself replaced by layers of experts. It may write their experts into other files.
_REPLACED: Final = "ds_autoep_layers"
#: Missing files that an error names.
_NAMED: Final = 3


class ZeroFile(NamedTuple):
    """What one file states about the ranks and the experts of its run."""

    folder: str  # its folder in the directory
    name: str
    ranks: int  # number of data-parallel ranks; 0 if the file does not state it
    model_ranks: int  # number of model-parallel ranks; 0 if the file does not state it
    experts: tuple[int, ...] = ()  # number of experts of each layer that has any; empty if the file does not state it


def is_zero_file(name: str) -> bool:
    """Whether a file has the name of a file that a rank of DeepSpeed writes."""
    return OPTIMIZER_FILE.fullmatch(name) is not None or MODEL_FILE.fullmatch(name) is not None


def is_expert_file(name: str) -> bool:
    """Whether a file has the name of one with the weights of an expert."""
    return EXPERT_FILE.fullmatch(name) is not None


def is_later_rank(name: str) -> bool:
    """Whether a file has partitions, or model states, of another rank than the first: its tree is that of the first."""
    optimizer, model = OPTIMIZER_FILE.fullmatch(name), MODEL_FILE.fullmatch(name)
    rank = optimizer[2] if optimizer is not None else model[1] if model is not None else None
    return rank is not None and int(rank) > 0


def zero_file(path: str, root: Value) -> ZeroFile | None:
    """What a file states about its ranks; None if it does not have the name of a DeepSpeed file."""
    folder, _, name = path.rpartition("/")
    pairs = as_dict(root)
    if pairs is None or not is_zero_file(name):
        return None
    state = as_dict(pairs.get("optimizer_state_dict"))
    world, model_ranks = pairs.get("dp_world_size"), pairs.get("mp_world_size")
    ranks = 0 if state is None else rank_count(state)
    ranks = ranks or (world if type(world) is int else 0)
    layers = items_of(pairs.get(_EXPERTS)) if pairs.get(_REPLACED) is None else ()
    experts = tuple(one if type(one) is int else 0 for one in layers)
    return ZeroFile(folder, name, ranks, model_ranks if type(model_ranks) is int else 0, experts)


def partitioned_parameters(path: str, part: FilePart) -> Counter[str]:
    """Count the elements of the parameters that stage 3 leaves empty in the model states of the first rank, by dtype.

    Their shapes are in ``param_shapes``, a dict for each group of the optimizer, and in ``frozen_param_shapes``.
    """
    found: Counter[str] = Counter()
    match, pairs = MODEL_FILE.fullmatch(path.rpartition("/")[2]), as_dict(part.tree())
    if match is None or not match[1] or int(match[1]) or pairs is None:
        return found
    empty = {record.name: record.dtype for record in part.inventory.tensors if record.shape == (0,)}
    stored = pairs.get("param_shapes")
    for group in (*(items_of(stored) or (stored,)), pairs.get("frozen_param_shapes")):
        shapes = as_dict(group)
        for name, shape, _ in () if shapes is None else shapes.pairs():
            dtype = empty.get(f"module.{key_text(name)}")
            if dtype is not None:
                with suppress(NotATensor):
                    found[dtype] += prod(sizes(shape))
    return found


def require_ranks(listing: Listing, files: Iterable[ZeroFile]) -> None:
    """Check that no file of a rank is missing in a folder with ZeRO partitions, and none of an expert."""
    folders: dict[str, list[ZeroFile]] = {}
    for file in files:
        folders.setdefault(file.folder, []).append(file)
    for path in sorted(listing.names) if folders else ():
        folder, _, name = path.rpartition("/")
        if folder in folders:  # a file that could not be read is not missing
            folders[folder].append(ZeroFile(folder, name, 0, 0))
    for folder, own in folders.items():
        absent = [*_absent(own), *_absent_experts(own)]
        missing = sum(number for number, _ in absent)
        if missing:
            named = [name for _, names in absent for name in names][:_NAMED]
            path = listing.full(f"{folder}/{own[0].name}".lstrip("/"))
            raise MissingShard(path, "', '".join(named), missing - len(named), RANKS_MISSING)


def _absent(files: Sequence[ZeroFile]) -> Iterator[tuple[int, list[str]]]:
    """The number of missing files of each kind in one folder, and the first of their names."""
    optimizers = [(match, file.ranks) for file in files if (match := OPTIMIZER_FILE.fullmatch(file.name))]
    models = [match for file in files if (match := MODEL_FILE.fullmatch(file.name))]
    if not optimizers:
        return  # trained without ZeRO, or kept without its optimizer
    ranks = max(ranks for _, ranks in optimizers) or max(file.ranks for file in files)
    ranks = max(ranks, *(int(match[2]) + 1 for match, _ in optimizers))
    model_ranks = {int(match[3]) for match, _ in optimizers}
    stated = max(file.model_ranks for file in files)
    model_ranks.update(range(min(stated, len(files) + _NAMED)))
    is_sharded = any(match[1] for match in models)
    prefix = optimizers[0][0][1]
    for model_rank in sorted(model_ranks):
        end = f"mp_rank_{model_rank:02}"
        own = {int(match[2]) for match, _ in optimizers if int(match[3]) == model_rank}
        missing, absent = _absent_ranks(own, ranks)
        yield missing, [f"{prefix}zero_pp_rank_{rank}_{end}_optim_states.pt" for rank in absent]
        own = {int(match[1] or 0) for match in models if int(match[2]) == model_rank}
        missing, absent = _absent_ranks(own, ranks if is_sharded else 1)
        starts = [f"zero_pp_rank_{rank}_" if is_sharded else "" for rank in absent]
        yield missing, [f"{start}{end}_model_states.pt" for start in starts]


def _absent_experts(files: Sequence[ZeroFile]) -> Iterator[tuple[int, list[str]]]:
    """The number of missing files of the experts of each layer in one folder, and the first of their names.

    Without tensor parallelism of experts, each is in the file of only one model-parallel rank.
    """
    found = [match for file in files if (match := EXPERT_FILE.fullmatch(file.name))]
    if not found and not any(OPTIMIZER_FILE.fullmatch(file.name) for file in files):
        return  # the model states alone were kept
    rank = min((match[3] for match in found), default="00")
    for layer, experts in enumerate(max(file.experts for file in files)):
        own = {number for match in found if int(match[1] or 0) == layer and (number := int(match[2])) < experts}
        missing, absent = _absent_ranks(own, max(experts, 0))
        yield missing, [f"layer_{layer}_expert_{number}_mp_rank_{rank}_model_states.pt" for number in absent]


def _absent_ranks(there: set[int], ranks: int) -> tuple[int, list[int]]:
    """How many ranks, or experts, have no file, and the first of them."""
    missing = ranks - len(there)
    return missing, list(islice((rank for rank in count() if rank not in there), min(missing, _NAMED)))

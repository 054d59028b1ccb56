"""Find optimizer parameters for which the checkpoint has no tensor, by shape.

An optimizer is not reported if its model may be in another file, or may be stored in other shapes than in training.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory, sharding_of
from ckptmove.checkpoint.pairing import moments
from ckptmove.checkpoint.state_dicts import buffers, without_inner
from ckptmove.checkpoint.trainers import trainer_of
from ckptmove.formats.facts import facts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.state_dicts import Shape
    from ckptmove.model import Inventory, OptimizerRecord, StateEntry, TensorRecord

#: Integers that several weights are packed into: bitsandbytes, GPTQ, AWQ.
_PACKED: Final = frozenset({"uint8", "int8", "int16", "int32"})
#: Parts of names in adapters that do not hold their parameters as they are trained.
_NOT_AS_TRAINED: Final = ("prompt_embeddings", "prompt_encoder", "lora_E", "vblora")
#: The trainer of this library also trains parameters of the loss, but does not save them.
_TRAINS_ITS_LOSS: Final = "sentence_transformers."


class Shortage(NamedTuple):
    """A shape with fewer tensors than parameters."""

    shape: Shape
    entries: list[StateEntry]  # state of every parameter with this shape
    tensors: int  # number of tensors with this shape


class Lacking(NamedTuple):
    """Parameters of an optimizer without a tensor in the checkpoint; all empty if nothing is known to be wrong."""

    listed: int = 0  # number of parameters in the groups if it is too large, else 0
    candidates: int = 0  # number of tensors that can be a parameter
    shortages: tuple[Shortage, ...] = ()  # shapes with too few tensors
    is_adapter: bool = False  # whether the tensors are an adapter, next to a model that is stored elsewhere


def find_lacking(inventory: Inventory) -> tuple[Lacking, ...]:
    """Match each optimizer with every tensor that can be a parameter, by shape alone.

    Loss, EMA, quantized and tied weights, and parameters of other optimizers, are all candidates: an optimizer lacks a
    tensor only if no assignment exists.
    """
    state = {tensor.name for one in inventory.optimizers for entry in one.state for _, tensor in entry.tensors}
    pools: dict[str, _Pool | None] = {}
    found = []
    for optimizer in inventory.optimizers:
        place = _place(inventory, optimizer)
        if place not in pools:
            pools[place] = _pool(inventory, place, state)
        pool = pools[place]
        found.append(Lacking() if pool is None else pool.lacking(optimizer))
    return tuple(found)


class _Pool:
    """Tensors that can be parameters, counted by shape."""

    def __init__(self, tensors: Sequence[TensorRecord], *, converts: bool, is_adapter: bool) -> None:
        self._count = len(tensors)
        self._shapes = Counter(tensor.shape for tensor in tensors)
        self._weights = Counter(tensor.shape for tensor in tensors if "float" in tensor.dtype and 0 not in tensor.shape)
        self._is_packed = any(tensor.dtype in _PACKED and len(tensor.shape) > 1 for tensor in tensors)
        self._has_matrices = any(len(shape) > 1 for shape in self._shapes)
        self._converts, self._is_adapter = converts, is_adapter

    def lacking(self, optimizer: OptimizerRecord) -> Lacking:
        """Return the parameters of an optimizer for which the pool has no tensor."""
        listed = {key for group in optimizer.groups for key in group.params}
        entries = {} if self._is_packed else _by_shape(optimizer, listed)
        if self._has_matrices and all(len(shape) == 1 for shape in entries):
            entries = {}  # each is several flattened parameters: FSDP, apex, fairseq
        counts = ((shape, own, self._shapes[shape]) for shape, own in entries.items())
        short = tuple(Shortage(shape, own, count) for shape, own, count in counts if len(own) > count)
        if self._converts:
            left = self._weights - Counter({shape: len(own) for shape, own in entries.items()})
            if left and all(_is_converted(one, left) for one in short):
                return Lacking()
        return Lacking(len(listed) if len(listed) > self._count else 0, self._count, short, self._is_adapter)


def _place(inventory: Inventory, optimizer: OptimizerRecord) -> str:
    """Return the file or folder of a directory with the model of an optimizer; empty for the whole checkpoint."""
    if not isinstance(inventory, DirectoryInventory):
        return ""
    file = inventory.file_at(optimizer.where)
    is_alone = file is not None and "model" in file.roles and not trainer_of(file.layout).is_spread
    return file.prefix if file is not None and is_alone else inventory.folder_of(optimizer.where)


def _pool(inventory: Inventory, place: str, state: set[str]) -> _Pool | None:
    """Return the candidates at a place, or None if it may not have the whole model."""
    tensors: Sequence[TensorRecord] = inventory.tensors
    is_whole = not trainer_of(inventory.layout).is_spread or facts_of(inventory.container).is_distributed
    if isinstance(inventory, DirectoryInventory):
        files = {file.prefix: file for file in inventory.files}
        if place in files:
            is_whole = True
            tensors = inventory.below(place)
        else:
            trainer = trainer_of(inventory.layout)
            is_whole = (trainer.is_spread and not trainer.is_sharded) or inventory.form is not None
            is_whole = is_whole and not inventory.is_incomplete
            near = inventory.below(place)
            tensors = near if _has_model(near) else tensors
    trains_its_loss = any(use.name.startswith(_TRAINS_ITS_LOSS) for use in inventory.globals)
    if not is_whole or sharding_of(inventory) or trains_its_loss or not _has_model(tensors):
        return None
    is_adapter = _is_adapter(tensors)
    if is_adapter and not (inventory.layout == "hf-trainer" and _is_whole_adapter(tensors)):
        return None
    left_out = state | buffers(tensors)
    # Tensors of any dtype can be parameters: quantized weights are integers, ML-Agents trains counts.
    others = {"rng", "scheduler", "scaler"}
    candidates = [one for one in without_inner(tensors) if one.name not in left_out and one.role not in others]
    return _Pool(candidates, converts=inventory.layout == "hf-trainer", is_adapter=is_adapter)


def _has_model(tensors: Sequence[TensorRecord]) -> bool:
    return any(tensor.role == "model" for tensor in tensors)


def _is_adapter(tensors: Sequence[TensorRecord]) -> bool:
    """Whether it is an adapter (PEFT, diffusers), whose file may lack other trained parameters."""
    return any("lora" in name or "adapter_model." in name for name in (tensor.name.lower() for tensor in tensors))


def _is_whole_adapter(tensors: Sequence[TensorRecord]) -> bool:
    """Whether an adapter has each trained parameter, in its shape, unless one was forgotten.

    From peft/utils/save_and_load.py ``get_peft_model_state_dict``: prompt tuning saves what its encoder returns,
    AdaLoRA cuts its matrices to their rank, and VB-LoRA may save indices in place of logits.
    """
    names = [tensor.name for tensor in tensors if "adapter_model." in tensor.name]
    return bool(names) and not any(word in name for name in names for word in _NOT_AS_TRAINED)


def _by_shape(optimizer: OptimizerRecord, listed: set[str]) -> dict[Shape, list[StateEntry]]:
    """Group the state of listed parameters by shape; empty if an entry has keys or shapes that torch never writes.

    0-d state does not show the shape of its parameter, and is skipped.
    """
    found: dict[Shape, list[StateEntry]] = {}
    for entry in optimizer.state:
        own = entry.without_inner().tensors if entry.key in listed else ()
        shapes = {tensor.shape for _, tensor in own if tensor.shape}
        if not shapes:
            continue
        if len(shapes) > 1 or not moments(entry, optimizer.algorithm):
            return {}
        found.setdefault(shapes.pop(), []).append(entry)
    return found


def _is_converted(shortage: Shortage, left: Counter[Shape]) -> bool:
    """Whether parameters may be stored as tensors of another shape.

    transformers splits and joins weights when it saves them (``conversion_mapping.py``): all experts of a layer are
    one parameter in training, but one tensor each in the file. The number of elements and one dimension stay the same.
    """
    shape, size = shortage.shape, prod(shortage.shape)
    count = len(shortage.entries) - shortage.tensors
    for other, number in left.items():
        own = prod(other)
        is_joined = size % own == 0 and number * own >= count * size
        is_split = bool(size) and own % size == 0 and count * size >= own
        is_flat = len(shape) == len(other) == 1
        if (is_joined or is_split) and (is_flat or (set(shape) & set(other)) - {1}):
            return True
    return False

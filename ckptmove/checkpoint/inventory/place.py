"""Position of the walk in the tree, and the role of a tensor there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ckptmove.checkpoint.inventory.optimizers import EntryDraft, OptimizerDraft
    from ckptmove.model import Role, TensorRecord

#: Bytes in the state of torch's generators: mt19937 on the CPU, CUDA, and CUDA until torch 1.5.
_CPU_GENERATOR_BYTES: Final = 5056
_GENERATOR_BYTES: Final = frozenset({_CPU_GENERATOR_BYTES, 16, 816})


@dataclass(slots=True, eq=False, repr=False)
class MemberContext:
    """Context for the members of one container."""

    prefix: str = ""  # path of the container with a dot at its end; empty for the root
    role: Role | None = None  # role of the container, or None if it is not known
    depth: int = 0  # number of containers around the members
    optimizer: OptimizerDraft | None = None  # optimizer whose `state` the container is, or None
    entry: EntryDraft | None = None  # optimizer state that the tensors belong to, or None
    entry_length: int = 0  # length of the prefix that names in `entry` omit
    repeats: bool = False  # whether this is a plain attribute of a module, which may contain registered tensors again
    is_mesh: bool = False  # whether the container is a `DeviceMesh`
    is_bare: bool = False  # whether it is the root and a state_dict: torchtitan puts other parts of a run into it

    @property
    def path(self) -> str:
        """Path of the container."""
        return self.prefix[:-1]


def settled_role(record: TensorRecord, key: str, place: MemberContext) -> Role:
    """Return the role of a tensor by its shape: the state of a generator is a 1-d tensor of bytes with a known length.

    A seed or a label under a word like ``rng`` is not a generator state. A state inside a model or an optimizer is one.
    """
    is_vector = len(record.shape) == 1 and record.storage is not None
    length = record.shape[0] if is_vector else 0
    known = length == _CPU_GENERATOR_BYTES or (length in _GENERATOR_BYTES and _speaks_of_generators(key, place))
    if known and record.dtype == "uint8":
        return "rng"
    if record.role == "rng" and not (is_vector and (record.dtype == "uint8" or length in _GENERATOR_BYTES)):
        return "other"
    return record.role


def _speaks_of_generators(key: str, place: MemberContext) -> bool:
    words = f"{place.path.rpartition('.')[2]} {key}".lower()
    return "rng" in words or "generator" in words

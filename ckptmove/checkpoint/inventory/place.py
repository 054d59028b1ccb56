"""Where the walk over the tree is, and what that says of a tensor.

Never looks at the tree itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ckptmove.checkpoint.inventory.optimizers import EntryDraft, OptimizerDraft
    from ckptmove.model import Role, TensorRecord

#: Bytes in the state of torch's generators: mt19937 on the CPU, CUDA's of today, and CUDA's until torch 1.5.
_CPU_GENERATOR_BYTES: Final = 5056
_GENERATOR_BYTES: Final = frozenset({_CPU_GENERATOR_BYTES, 16, 816})


@dataclass(slots=True)
class Place:
    """Where the walk is: a container, seen from its members.

    Attributes:
        prefix: path of the container with a dot at its end; empty for the root.
        role: what it is for, as far as that is known.
        depth: how many containers are around its members.
        optimizer: the optimizer whose ``state`` the container is, or None.
        entry: the optimizer state that tensors in here belong to, or None.
        entry_length: length of the prefix that the names in ``entry`` leave out.
        repeats: whether this is a module's plain attribute: what the module has registered may come again.
        is_mesh: whether the container is a ``DeviceMesh``.
    """

    prefix: str = ""
    role: Role | None = None
    depth: int = 0
    optimizer: OptimizerDraft | None = None
    entry: EntryDraft | None = None
    entry_length: int = 0
    repeats: bool = False
    is_mesh: bool = False

    @property
    def path(self) -> str:
        """Path of the container."""
        return self.prefix[:-1]


def settled_role(record: TensorRecord, key: str, place: Place) -> Role:
    """The role of a tensor, now that its shape is known: the state of a generator is a vector of bytes, wherever it is.

    A seed or a label under a word like ``rng`` is none, and a state inside of a model or an optimizer is one.
    """
    is_vector = len(record.shape) == 1 and record.storage is not None
    length = record.shape[0] if is_vector else 0
    known = length == _CPU_GENERATOR_BYTES or (length in _GENERATOR_BYTES and _speaks_of_generators(key, place))
    if known and record.dtype == "uint8":
        return "rng"
    if record.role == "rng" and not (is_vector and (record.dtype == "uint8" or length in _GENERATOR_BYTES)):
        return "other"
    return record.role


def _speaks_of_generators(key: str, place: Place) -> bool:
    words = f"{place.path.rpartition('.')[2]} {key}".lower()
    return "rng" in words or "generator" in words

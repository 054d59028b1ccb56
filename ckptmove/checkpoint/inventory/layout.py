"""Find the trainer that wrote a checkpoint, by its root keys and classes.

File names do not count: ``.pth.tar`` is not a tar, and ``.bin`` can be anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.inventory.shapes import as_dict, string_keys
from ckptmove.checkpoint.trainers import trainer_by_classes, trainer_by_keys
from ckptmove.pickles.tree import Call

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.checkpoint.trainers import Trainer
    from ckptmove.model import LayoutName
    from ckptmove.pickles.tree import Dict, Value


class DetectedLayout(NamedTuple):
    """Layout and producer of a checkpoint.

    Attributes:
        layout: layout of the trainer or library.
        producer: library and version, if the root names one.
        torch_version: version of the torch that wrote the file, if the root names it.
    """

    layout: LayoutName
    producer: str | None = None
    torch_version: str | None = None


def detect_layout(root: Value, modules: Sequence[str], globals_: Iterable[str]) -> DetectedLayout:
    """Detect the layout of a checkpoint.

    Args:
        root: root of the tree.
        modules: paths of the pickled modules.
        globals_: full names that the pickle imports.
    """
    if "" in modules:
        return DetectedLayout("module")
    by_class = trainer_by_classes(globals_)
    pairs = as_dict(root)
    if pairs is None:
        return DetectedLayout(by_class.layout if by_class else "other")
    trainer = trainer_by_keys(string_keys(pairs)) or by_class
    return DetectedLayout(
        trainer.layout if trainer else "plain", _producer(pairs, trainer) if trainer else None, _torch_version(pairs)
    )


def _producer(pairs: Dict, trainer: Trainer) -> str | None:
    """The library of the trainer with its version, if the root names one."""
    for library, path in trainer.library:
        holder: Dict | None = pairs
        for key in path[:-1]:
            holder = as_dict(holder.get(key)) if holder is not None else None
        version = holder.get(path[-1]) if holder is not None else None
        if type(version) is str:
            return f"{library} {version[:40]}"
    return None


def _torch_version(pairs: Dict) -> str | None:
    """Return ``torch_version`` of the root; a key ``version`` could be that of any library."""
    for holder in (pairs, as_dict(pairs.get("meta"))):
        value = holder.get("torch_version") if holder is not None else None
        if type(value) is Call and value.name == "torch.torch_version.TorchVersion":
            value = next(iter(getattr(value.args, "items", ())), None)
        if type(value) is str:
            return value[:40]
    return None

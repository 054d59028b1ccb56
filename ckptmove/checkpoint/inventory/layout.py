"""Detect the layout and the producer of a checkpoint from the keys of its root.

File names do not count: ``.pth.tar`` is not a tar, and ``.bin`` can be anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.shapes import as_dict, string_keys
from ckptmove.pickles.tree import Call

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.model import LayoutName
    from ckptmove.pickles.tree import Dict, Value


class Origin(NamedTuple):
    """Layout and producer of a checkpoint.

    Attributes:
        layout: layout of the trainer or library.
        producer: library and version, if the root names one.
        torch_version: version of the torch that wrote the file, if the root names it.
    """

    layout: LayoutName
    producer: str | None = None
    torch_version: str | None = None


#: Modules with the classes of a library.
_CLASSES: Final[tuple[tuple[LayoutName, tuple[str, ...]], ...]] = (
    ("ultralytics", ("ultralytics.", "models.yolo.")),
    ("hf-trainer", ("transformers.training_args.", "transformers.trainer")),
    ("stable-baselines3", ("stable_baselines3.",)),
    ("nemo", ("nemo.",)),
)
#: Keys of a layout, all of which must be present; the first match counts.
_ROOT_KEYS: Final[tuple[tuple[LayoutName, frozenset[str]], ...]] = (
    ("lightning", frozenset({"pytorch-lightning_version"})),
    ("ultralytics", frozenset({"train_args", "ema", "model"})),
    ("ultralytics", frozenset({"updates", "ema", "model"})),
    ("fairseq", frozenset({"optimizer_history", "model"})),
    ("detectron2", frozenset({"model", "iteration", "scheduler"})),
    ("mmengine", frozenset({"message_hub", "state_dict"})),
    ("mmengine", frozenset({"meta", "state_dict"})),
    ("megatron", frozenset({"checkpoint_version", "args", "iteration"})),
    ("hf-trainer", frozenset({"python", "numpy", "cpu"})),
    ("accelerate", frozenset({"random_state", "numpy_random_seed", "torch_manual_seed"})),
    ("deepspeed", frozenset({"ds_version"})),
    ("deepspeed", frozenset({"ds_config", "module"})),
)


def find_origin(root: Value, modules: Sequence[str], globals_: Iterable[str]) -> Origin:
    """Detect the origin of a checkpoint.

    Args:
        root: root of the tree.
        modules: paths of the pickled modules.
        globals_: full names that the pickle imports.
    """
    if "" in modules:
        return Origin("module")
    named = tuple(globals_)
    by_class = next((layout for layout, homes in _CLASSES if any(name.startswith(homes) for name in named)), None)
    pairs = as_dict(root)
    if pairs is None:
        return Origin(by_class or "other")
    keys = string_keys(pairs)
    layout = next((name for name, wanted in _ROOT_KEYS if wanted <= keys), None) or by_class
    return Origin(layout or "plain", _producer(pairs, layout), _torch_version(pairs))


def _producer(pairs: Dict, layout: LayoutName | None) -> str | None:
    if layout == "lightning":
        return _versioned("pytorch-lightning", pairs.get("pytorch-lightning_version"))
    meta = as_dict(pairs.get("meta"))
    if layout == "mmengine" and meta is not None:
        return _versioned("mmengine", meta.get("mmengine_version")) or _versioned("mmcv", meta.get("mmcv_version"))
    if layout == "ultralytics":
        return _versioned("ultralytics", pairs.get("version"))
    return _versioned("deepspeed", pairs.get("ds_version")) if layout == "deepspeed" else None


def _versioned(library: str, version: Value) -> str | None:
    return f"{library} {version[:40]}" if type(version) is str else None


def _torch_version(pairs: Dict) -> str | None:
    """Return ``torch_version`` of the root; a key ``version`` could be that of any library."""
    for holder in (pairs, as_dict(pairs.get("meta"))):
        value = holder.get("torch_version") if holder is not None else None
        if type(value) is Call and value.name == "torch.torch_version.TorchVersion":
            value = next(iter(getattr(value.args, "items", ())), None)
        if type(value) is str:
            return value[:40]
    return None

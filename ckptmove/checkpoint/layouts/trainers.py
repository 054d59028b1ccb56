"""What a file of a checkpoint directory is for, told from its name: the names that trainers give.

Never looks into a file: what its content says of itself is in its inventory.

Names from transformers/trainer.py, accelerate/utils/constants.py and deepspeed/runtime/engine.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.roles import role_of_key

if TYPE_CHECKING:
    from ckptmove.model import Role, TensorRecord

_PLACES: Final[tuple[tuple[Role, re.Pattern[str]], ...]] = (
    (
        "optimizer",
        re.compile(r"optimizer(_\d+)?\.(pt|bin)|optimizer_\d+|.*zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt"),
    ),
    ("scheduler", re.compile(r"scheduler(_\d+)?\.(pt|bin)")),
    ("scaler", re.compile(r"scaler\.pt")),
    ("rng", re.compile(r"rng_state(_\d+)?\.pth|random_states_\d+\.pkl")),
    (
        "model",
        re.compile(
            r"pytorch_model_fsdp_\d+|(pytorch_model|model|adapter_model)(_\d+)?(-\d{5}-of-\d{5})?\.(bin|safetensors)"
        ),
    ),
)
#: Endings that promise a checkpoint; ``.bin`` and ``.pkl`` are anything.
_ENDINGS: Final = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp")
#: What a save, a copy or a download leaves where a checkpoint was to be.
_SPOILED: Final = frozenset({
    "an empty file", "bytes that cannot be inflated", "nothing but zero bytes", "a git-lfs pointer", "an HTML page",
    "bytes of no known format",
})  # fmt: skip


def place_of(name: str) -> Role | None:
    """The role that a trainer gives to files of a name, or to a folder that is one checkpoint, or None."""
    named = next((role for role, pattern in _PLACES if pattern.fullmatch(name)), None)
    # Of all words in other names only this one is worth more than the content: a copy of a model looks like a model.
    return named or ("ema" if role_of_key(name) == "ema" else None)


def is_spoiled(name: str, found: str) -> bool:
    """Whether a file that is no checkpoint must have been one.

    Args:
        name: of the file.
        found: what its bytes are, as ``NotACheckpoint`` has it.
    """
    return found in _SPOILED and (name.endswith(_ENDINGS) or place_of(name) is not None)


def in_place(record: TensorRecord, place: Role | None) -> TensorRecord:
    """A tensor with the role that its file gives it, where the content does not know better.

    Whatever looks like a state_dict is the model's to those who see the content alone. A seed or a count among random
    states is none: only a vector of bytes is.
    """
    if place is None or record.role not in {"model", "other"} or record.role == place:
        return record
    if place == "rng" and not (record.dtype == "uint8" and len(record.shape) == 1):
        return record
    if place == "ema" and record.role == "other":
        return record
    return record._replace(role=place)

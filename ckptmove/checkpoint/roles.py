"""What a part of a checkpoint is for, told from the key it stands under: an ordered table.

Never looks at a tensor: what follows from structure (an optimizer's ``param_groups``) is seen while walking.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ckptmove.model import Role

#: Role and the words that point to it; the first row with a word of the key decides. ``a+b`` asks for both words.
ROLE_WORDS: Final[tuple[tuple[Role, tuple[str, ...]], ...]] = (
    ("rng", ("rng", "rngs", "manual+seed", "random+seed", "random+state", "random+states")),
    ("ema", ("ema", "swa", "averaged", "shadow", "teacher")),
    ("scaler", ("amp+scaler", "grad+scaler", "loss+scaler", "scaler+state", "gradscaler", "mixedprecision",
                "amp+scaling")),
    ("scheduler", ("scheduler", "schedulers", "lr+schedule", "sched")),
    ("optimizer", ("optimizer", "optimizers", "optim", "optims", "optimizerstate", "opt+state")),
    ("criterion", ("criterion", "criterions", "loss+fn", "loss+func", "loss+module")),
    ("model", (
        "model", "models", "net", "network", "netg", "netd", "module", "state+dict", "weights", "param", "params",
        "generator", "discriminator", "encoder", "decoder", "backbone", "head", "policy", "actor", "critic", "student",
        "unet", "vae", "transformer",
    )),
)  # fmt: skip
#: A key that is nothing but this word.
_WHOLE_KEYS: Final[dict[str, Role]] = {
    "scaler": "scaler", "amp": "scaler", "g": "model", "d": "model", "generator_state": "rng",
    "hyper_parameters": "other", "hparams": "other",
}  # fmt: skip
#: What is kept beside the model that is trained: an earlier one, or the target network of a DQN.
_KEPT_ASIDE: Final = frozenset({"best", "prev", "previous", "old", "initial", "backup", "target"})
_DIGITS: Final = "0123456789"
#: Lightning keeps a callback's state under its class, which is named for what it watches and not for what it holds.
_CALLBACK: Final = re.compile(r"(?:.*\.)?(?:ModelCheckpoint|EarlyStopping|LearningRateMonitor)\b")


def role_of_key(key: str) -> Role | None:
    """The role that a key points to, or None where it says nothing.

    Args:
        key: one part of a path: ``optimizer_state_dict``, ``model_ema``, ``MixedPrecisionPlugin``.
    """
    # Indices of lists are many, all different, and hold no word: they would only drive the others out of the cache. So
    # would c0, c1 and so on, to which it is all one what number they have.
    if key.isdecimal():
        return None
    return _role_of_words(f"{key[:200].rstrip(_DIGITS)}0" if key[-1:] in _DIGITS else key[:200])


@lru_cache(maxsize=4096)
def _role_of_words(key: str) -> Role | None:
    whole = _WHOLE_KEYS.get(key.lower())
    if whole is not None:
        return whole
    if _CALLBACK.match(key):
        return "other"
    words = _words(key) | {key.lower()}
    for role, options in ROLE_WORDS:
        for option in options:
            if words.issuperset(option.split("+")):
                return role
    return None


def is_kept_aside(path: str) -> bool:
    """Whether a path names a copy that is not trained any more: ``best_model``, ``prev.state_dict``."""
    return not _KEPT_ASIDE.isdisjoint(_words(path))


def _words(key: str) -> set[str]:
    """The words of a key in lower case: those of ``bestModel`` are ``best`` and ``model``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", key)
    return set(re.split(r"[^a-z0-9]+", spaced.lower()))


def role_of_leaf(name: str) -> Role | None:
    """The role of a tensor by its own dotted key in a state_dict, where it is not the model's."""
    first = name.partition(".")[0].lower()
    return "criterion" if first in {"criterion", "loss_fn", "loss_func"} else None

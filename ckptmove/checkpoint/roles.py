"""Find the role of a part of a checkpoint by its key."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ckptmove.model import Role

#: Roles and their words; the first row with a word of the key decides. ``a+b`` needs both words.
ROLE_WORDS: Final[tuple[tuple[Role, tuple[str, ...]], ...]] = (
    ("rng", ("rng", "rngs", "manual+seed", "random+seed", "random+state", "random+states")),
    ("scheduler", ("scheduler", "schedulers", "lr+schedule", "sched")),
    ("ema", ("ema", "swa", "averaged", "shadow", "teacher")),
    ("scaler", ("amp+scaler", "grad+scaler", "loss+scaler", "scaler+state", "gradscaler", "mixedprecision",
                "amp+scaling")),
    ("optimizer", ("optimizer", "optimizers", "optim", "optims", "optimizerstate", "opt+state")),
    ("criterion", ("criterion", "criterions", "loss+fn", "loss+func", "loss+module")),
    ("model", (
        "model", "models", "net", "network", "netg", "netd", "module", "state+dict", "weights", "param", "params",
        "generator", "discriminator", "encoder", "decoder", "backbone", "head", "policy", "actor", "critic", "student",
        "unet", "vae", "transformer",
    )),
)  # fmt: skip
#: Roles of keys that are only this word.
_WHOLE_KEYS: Final[dict[str, Role]] = {
    "scaler": "scaler", "amp": "scaler", "g": "model", "d": "model", "generator_state": "rng",
    "hyper_parameters": "other", "hparams": "other",
}  # fmt: skip
#: Words for copies next to the trained model: an earlier one, or the target network of a DQN.
_KEPT_ASIDE: Final = frozenset({"best", "prev", "previous", "old", "initial", "backup", "target"})
#: Words for the arguments of a run or of a constructor.
_ARGUMENTS: Final = frozenset({
    "args", "arguments", "cfg", "config", "configuration", "hparams", "hyper", "hyperparameters", "kwargs",
})  # fmt: skip
_DIGITS: Final = "0123456789"
#: Lightning saves the state of a callback under its class, whose name does not describe the state.
_CALLBACK: Final = re.compile(r"(?:.*\.)?(?:ModelCheckpoint|EarlyStopping|LearningRateMonitor)\b")


def role_of_key(key: str) -> Role | None:
    """Return the role that one part of a path shows: ``optimizer_state_dict``, ``model_ema``; or None."""
    # Indices of lists have no words, and would only evict other keys from the cache. So would c0, c1 and so on, whose
    # numbers do not matter.
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
    """Whether a path names a copy that is no longer trained: ``best_model``, ``prev.state_dict``."""
    return not _KEPT_ASIDE.isdisjoint(_words(path))


def is_argument(path: str) -> bool:
    """Whether a path is among the arguments of a run: ``hyper_parameters.encoder``, ``config.backbone``."""
    return not _ARGUMENTS.isdisjoint(_words(path))


def _words(key: str) -> set[str]:
    """Return the words of a key in lower case: ``best`` and ``model`` for ``bestModel``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", key)
    return set(re.split(r"[^a-z0-9]+", spaced.lower()))


def role_of_leaf(name: str) -> Role | None:
    """Return the role of a tensor by its dotted key in a state_dict, or None for a tensor of the model."""
    if name.startswith("optimizer.state."):  # Megatron keeps it next to the parameters
        return "optimizer"
    first = name.partition(".")[0].lower()
    return "criterion" if first in {"criterion", "loss_fn", "loss_func"} else None

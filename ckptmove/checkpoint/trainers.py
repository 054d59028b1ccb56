"""File names, root keys and classes of each training library, one row for each, and the keys of step counters.

Names from transformers/trainer.py, accelerate/utils/constants.py, deepspeed/runtime/engine.py and
megatron/training/checkpointing.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.roles import role_of_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ckptmove.model import Role, TensorRecord


class Trainer(NamedTuple):
    """How to recognize the checkpoints of one library."""

    layout: str
    root_keys: tuple[frozenset[str], ...] = ()  # sets of root keys; a file with all keys of one set has the layout
    classes: tuple[str, ...] = ()  # beginnings of the full names of its pickled classes
    sign: str = ""  # pattern of names of files that only its directories have; empty, as all patterns, if none
    roles: tuple[tuple[Role, str], ...] = ()  # roles of files and folders, by patterns of their names
    library: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name as a producer, paths of root keys to its version
    counters: str = ""  # name of the JSON file with its step counters
    is_spread: bool = False  # whether model and optimizer are in different files
    is_sharded: bool = False  # whether no file holds a whole parameter of the model
    is_pointed: bool = False  # whether a file `last_checkpoint` names the checkpoint to resume from
    allows: str = ""  # pattern of names of files in which the library itself allows `NUMPY_STATE` when it resumes
    skips: str = ""  # pattern of names of files that the library writes, but does not read when it resumes


#: Globals of NumPy's generator state that transformers (``trainer_pt_utils.safe_globals``) and accelerate
#: (``utils/other.py``, ``TORCH_SAFE_GLOBALS``) allow with NumPy 2. With it, they refuse the names of NumPy 1.
NUMPY_STATE: Final = frozenset({"numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"})
#: Accelerate's optimizer, whose name no other library uses in a directory with a model.
ACCELERATE_OPTIMIZER: Final = "optimizer.bin"
#: Written by Megatron-Core next to a distributed checkpoint (dist_checkpointing/strategies/common.py).
MEGATRON_COMMON: Final = "common.pt"
#: Holds the name of the checkpoint to resume from: a path of mmengine, a file name of Detectron2.
POINTER_FILE: Final = "last_checkpoint"

#: The first row that fits counts.
TRAINERS: Final[tuple[Trainer, ...]] = (
    Trainer(
        "lightning",
        root_keys=(frozenset({"pytorch-lightning_version"}),),
        library=(("pytorch-lightning", ("pytorch-lightning_version",)),),
    ),
    Trainer(
        "ultralytics",
        root_keys=(frozenset({"train_args", "ema", "model"}), frozenset({"updates", "ema", "model"})),
        classes=("ultralytics.", "models.yolo."),
        library=(("ultralytics", ("version",)),),
    ),
    Trainer("fairseq", root_keys=(frozenset({"optimizer_history", "model"}),)),
    Trainer("detectron2", root_keys=(frozenset({"model", "iteration", "scheduler"}),), is_pointed=True),
    Trainer(
        "mmengine",
        root_keys=(frozenset({"message_hub", "state_dict"}), frozenset({"meta", "state_dict"})),
        library=(("mmengine", ("meta", "mmengine_version")), ("mmcv", ("meta", "mmcv_version"))),
        is_pointed=True,
    ),
    Trainer(
        "hf-trainer",
        root_keys=(frozenset({"python", "numpy", "cpu"}),),
        classes=("transformers.training_args.", "transformers.trainer"),
        sign=r"trainer_state\.json",
        roles=(
            ("scaler", r"scaler\.pt"),
            ("rng", r"rng_state(_\d+)?\.pth"),
            (
                "model",
                r"(pytorch_model|model|adapter_model)(_\d+)?(-\d{5}-of-\d{5})?\.(bin|safetensors)",
            ),
        ),
        counters="trainer_state.json",
        is_spread=True,
        allows=r"rng_state(_\d+)?\.pth",
        skips=r"training_args\.bin",
    ),
    Trainer(
        "accelerate",
        root_keys=(frozenset({"random_state", "numpy_random_seed", "torch_manual_seed"}),),
        sign=r"random_states_\d+\.pkl",
        roles=(
            ("optimizer", r"optimizer(_\d+)?\.(pt|bin)|optimizer_\d+"),
            ("scheduler", r"scheduler(_\d+)?\.(pt|bin)"),
            ("rng", r"random_states_\d+\.pkl"),
            ("model", r"pytorch_model_fsdp_\d+"),
        ),
        is_spread=True,
        allows=r"random_states_\d+\.pkl",
    ),
    Trainer(
        "megatron",
        # Before DeepSpeed: Megatron-DeepSpeed writes ds_version next to these keys.
        root_keys=(frozenset({"checkpoint_version", "args", "iteration"}),),
        sign=r"model_(optim_)?rng\.pt",
        is_spread=True,
        is_sharded=True,
    ),
    Trainer(
        "deepspeed",
        root_keys=(frozenset({"ds_version"}), frozenset({"ds_config", "module"})),
        sign=r"(.*zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|.*_mp_rank_\d+_optim_states\.pt",
        roles=(("optimizer", r".*zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt"),),
        library=(("deepspeed", ("ds_version",)),),
        is_spread=True,
        is_sharded=True,
    ),
    Trainer(
        "stable-baselines3",
        classes=("stable_baselines3.",),
        sign=r"_stable_baselines3_version",
        counters="data",
    ),
    Trainer("nemo", classes=("nemo.",), sign=r"model_weights\.ckpt"),
    Trainer("dcp", is_spread=True),
    Trainer("sharded", is_spread=True),
)
#: Keys of the epoch and of the step, the most precise names first: ``step`` may also count within an epoch.
_EPOCH_KEYS: Final = ("epoch", "current_epoch", "cur_epoch", "epoch_num", "epochs_run", "epochs_completed")
_STEP_KEYS: Final = (
    "global_step", "global_steps", "num_updates", "iteration", "iter_num", "train_iter", "iter", "iterations", "step",
    "steps", "it", "n_iter", "global_iter", "train_step", "total_steps", "batch_num_total", "num_timesteps", "frame",
    "_GlobalSteps__global_step",
)  # fmt: skip
#: Dicts with the counters: the root; of mmengine, fairseq, torchtitan, ML-Agents, Megatron; and common names.
_COUNTER_DICTS: Final = (
    "", "meta.", "extra_state.", "extra_state.train_iterator.", "optimizer_history.", "train_state.", "global_step.",
    "trainer_state.", "training_state.", "trainer.", "progress.", "common.",
)  # fmt: skip
#: Every key of a counter; the last counts within an epoch.
COUNTER_KEYS: Final = frozenset({*_EPOCH_KEYS, *_STEP_KEYS, "batches_in_epoch_completed"})
#: A larger number, or a NaN, counts nothing.
_MOST_STEPS: Final = 1 << 63
#: Indices in a path.
_INDICES: Final = r"\.\d+(?=\.)"
_BY_LAYOUT: Final[Mapping[str, Trainer]] = {trainer.layout: trainer for trainer in TRAINERS}

#: Endings that promise a checkpoint; ``.bin`` and ``.pkl`` can be anything.
_ENDINGS: Final = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp")
#: Contents of a file that a failed save, copy or download leaves in place of a checkpoint.
_SPOILED: Final = frozenset({
    "an empty file", "bytes that cannot be inflated", "nothing but zero bytes", "a git-lfs pointer", "an HTML page",
    "bytes of no known format",
})  # fmt: skip
# Compiled on first use, for a file that cannot be read.
#: Names of files that these libraries load by themselves, whatever the files hold: transformers, peft, diffusers,
#: accelerate (utils/constants.py of each), DeepSpeed, Megatron, and stable-baselines3 (common/save_util.py).
_LOADED: Final = r"""(?x)
    .*\.(?:safetensors|distcp)
    | training_args\.bin | (?:optimizer|scheduler|scaler|sampler|dl_state_dict)(?:_\d+)?\.(?:pt|bin)
    | rng_state(?:_\d+)?\.pth | random_states_\d+\.pkl | custom_checkpoint_\d+\.pkl
    | (?:diffusion_)?pytorch_model[\w.-]*\.bin | (?:adapter_)?model(?:_\d+)?(?:-\d{5}-of-\d{5})?\.bin
    | (?:optimizer|pytorch_lora_weights|learned_embeds|prompt_encoder|value_head|heads)(?:_\w+)?\.bin
    | (?:\w+_)?(?:zero_pp_rank_\d+_)?mp_rank_\d+\w*\.pt | (?:layer|expert)_.*model_states\.pt
    | (?:model_optim_rng|model_rng|distrib_optim|common)\.pt
    | consolidated(?:\.\d+)?\.pth | policy(?:\.optimizer)?\.pth | pytorch_variables\.pth
    """
#: SpeechBrain writes these as text: core.py, utils/epoch_loop.py, dataio/dataloader.py, dataio/encoder.py. Copies
#: may have a prefix.
_TEXTS: Final = re.compile(r"(?:.*_)?(?:brain|counter|label_encoder|dataloader-[\w-]+)\.ckpt")


def trainer_of(layout: str) -> Trainer:
    """The row of a layout; an empty one if no library is known for it."""
    return _BY_LAYOUT.get(layout, Trainer(layout))


def trainer_by_keys(keys: set[str]) -> Trainer | None:
    """The trainer that writes these root keys."""
    return next((trainer for trainer in TRAINERS if any(map(keys.issuperset, trainer.root_keys))), None)


def trainer_by_classes(names: Iterable[str]) -> Trainer | None:
    """The trainer that one of these classes belongs to."""
    listed = tuple(names)
    return next((one for one in TRAINERS if any(name.startswith(one.classes) for name in listed)), None)


def resumes_despite(layout: str, path: str, refused: Collection[str]) -> bool:
    """Whether a trainer resumes although weights-only mode refuses one of its files.

    ``refused`` are the globals that it refuses; empty if it refuses an opcode.
    """
    trainer, name = trainer_of(layout), re.split(r"[\\/]", path)[-1]
    if trainer.skips and re.fullmatch(trainer.skips, name):
        return True
    is_allowed = bool(trainer.allows) and re.fullmatch(trainer.allows, name) is not None
    return is_allowed and bool(refused) and NUMPY_STATE.issuperset(refused)


class Counters(NamedTuple):
    """How far a training has come, as its trainer counts."""

    epoch: float | None = None  # the epoch; transformers counts parts of it. None if unknown.
    step: int | None = None  # the number of steps, or None if unknown


def read_counters(found: Iterable[tuple[str, float]]) -> Counters:
    """Choose the epoch and the step among numbers of a file, by their paths from the root.

    Only the root and dicts that hold counters are considered: in a dict of options, ``steps`` is a plan.
    """
    # The last item of a list counts: each run of fairseq adds one to optimizer_history.
    values = {re.sub(_INDICES, "", path): value for path, value in found if 0 <= value < _MOST_STEPS}
    epoch, step = _first(values, _EPOCH_KEYS), _first(values, _STEP_KEYS)
    return Counters(
        int(epoch) if epoch is not None and epoch == int(epoch) else epoch, None if step is None else int(step)
    )


def agreed(found: Iterable[Counters]) -> Counters:
    """Combine the counters of several files: what differs is unknown."""
    listed = tuple(found)
    epochs = {one.epoch for one in listed if one.epoch is not None}
    steps = {one.step for one in listed if one.step is not None}
    return Counters(epochs.pop() if len(epochs) == 1 else None, steps.pop() if len(steps) == 1 else None)


def _first(values: Mapping[str, float], keys: Sequence[str]) -> float | None:
    paths = (f"{holder}{key}" for holder in _COUNTER_DICTS for key in keys)
    return next((values[path] for path in paths if path in values), None)


def file_role(name: str) -> Role | None:
    """The role that a trainer's name gives to a file, or to a folder that is one checkpoint."""
    for trainer in TRAINERS:
        for role, pattern in trainer.roles:
            if re.fullmatch(pattern, name):
                return role
    # By content, an EMA copy is a model: of all words in other names, only this one adds information.
    return "ema" if role_of_key(name) == "ema" else None


def is_spoiled(name: str, found: str) -> bool:
    """Whether a file without a checkpoint should have held one; ``found`` is its content, as in ``NotACheckpoint``."""
    if re.fullmatch(_LOADED, name) is not None:
        return True
    if name.endswith(".ckpt"):
        return found != "a text file" or _TEXTS.fullmatch(name) is None
    return found in _SPOILED and is_checkpoint_name(name)


def is_checkpoint_name(name: str) -> bool:
    """Whether the name of a file promises a checkpoint."""
    return name.endswith(_ENDINGS) or file_role(name) is not None


def with_file_role(record: TensorRecord, role: Role | None) -> TensorRecord:
    """The tensor with the role of its file, unless its content is more specific.

    Anything that looks like a state_dict has the role ``model`` by content. A random state is a vector of bytes: a
    seed or a count next to it keeps its role.
    """
    if role is None or record.role not in {"model", "other"} or record.role == role:
        return record
    if role == "rng" and not (record.dtype == "uint8" and len(record.shape) == 1):
        return record
    if role == "ema" and record.role == "other":
        return record
    return record._replace(role=role)

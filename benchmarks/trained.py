"""Checkpoints of real training runs on the CPU, saved with the tags of any device."""

from __future__ import annotations

import copy
import importlib.util
import json
import warnings
import zipfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from older_torch import IN_ONE_PROCESS
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptmove import Case

    Tree = dict[str, Any]

#: Classes of other libraries: one with train and eval modes, and one with an infinite default.
OF_OTHERS = ("schedulefree:AdamWScheduleFree", "prodigyopt:Prodigy")
OPTIMIZERS = tuple(
    name
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)
#: Classes of other libraries that keep the moments of large parameters in 8 or 4 bits.
LOW_BIT = tuple(
    name
    for name in (
        "torchao.optim:AdamW8bit",
        "torchao.optim:AdamW4bit",
        "bitsandbytes.optim:AdamW8bit",
    )
    if importlib.util.find_spec(name.partition(".")[0]) is not None
)
#: Options that make a class keep all of its state.
OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.01},
    "LBFGS": {"max_iter": 4, "history_size": 5, "line_search_fn": "strong_wolfe"},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
#: Share of the elements of a batch that a step uses.
_KEPT = 0.8
#: State that torch keeps on the CPU.
_ON_CPU = frozenset({"step", "mu_product"})
#: Keys of a tensor lr: in the groups, and in a scheduler. torch never moves it.
_RATES = frozenset({"param_groups", "base_lrs", "_last_lr"})
_PLACED: dict[int, tuple[torch.Tensor, str]] = {}


def _tag(storage: Any) -> str | None:
    return _PLACED.get(storage.data_ptr(), (None, None))[1]


def _no_place(_storage: Any, _location: str) -> None:
    return None


# Priorities of torch's taggers begin at 10. Each priority can be used once.
torch.serialization.register_package(7, _tag, _no_place)


def model_for(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """Four layers of two shapes; without a bias for an optimizer that only takes matrices."""
    bias = name != "Muon"
    layers = [torch.nn.Linear(*shape, bias=bias) for shape in ((6, 5), (5, 6), (6, 5), (5, 6))]
    return torch.nn.Sequential(*layers).to(dtype)


def class_of(name: str) -> Any:
    """A class of ``torch.optim``, or one of another library as ``pkg:CLASS``."""
    module, _, last = name.rpartition(":")
    return getattr(import_module(module or "torch.optim"), last)


class Training:
    """A training run, with everything that a resume restores. Its batches come from torch's generator.

    Attributes:
        model: the model.
        optimizer: its optimizer.
        scheduler: scheduler of the learning rate.
        scaler: scaler of the loss, which grows at every second step.
        ema: moving average of the parameters.
        steps: number of steps made.
    """

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> None:
        torch.manual_seed(0)
        self.name, self.device = name, device
        self.model = model_for(name, dtype).to(device)
        self.optimizer: torch.optim.Optimizer = class_of(name)(
            self.model.parameters(), **(OPTIONS.get(name, {}) | options)
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        # torch's kernel for the CPU has no half precision; such runs have no scaler.
        self.scaler = torch.amp.GradScaler(
            torch.device(device).type, 1024.0, growth_interval=2, enabled=dtype == torch.float32
        )
        self.ema = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.steps = 0

    def train(self, steps: int) -> Training:
        """Train for a number of steps."""
        self._set_mode("train")
        for _ in range(steps):
            batch = torch.randn(8, 6).to(self.device, next(self.model.parameters()).dtype)
            self._step(batch)
            self.scheduler.step()
            self.steps += 1
            for key, value in self.model.state_dict().items():
                self.ema[key].lerp_(value, 0.1)
        return self

    def _step(self, batch: torch.Tensor) -> None:
        kept = torch.rand(batch.shape[0], 1).to(self.device) < _KEPT

        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = ((self.model(batch) - batch) * kept).pow(2).mean()
            scaled: Any = self.scaler.scale(loss) if self.name != "LBFGS" else loss
            scaled.backward()
            if self.name == "SparseAdam":
                for parameter in self.model.parameters():
                    parameter.grad = None if parameter.grad is None else parameter.grad.to_sparse(1)
            return loss

        if self.name == "LBFGS":  # it calls the closure, which a GradScaler does not support
            self.optimizer.step(closure)
        else:
            closure()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def tree(self) -> Tree:
        """The checkpoint: everything that a resume needs."""
        self._set_mode("eval")  # schedulefree requires it
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
                "ema": self.ema,
                "rng": {"cpu": torch.get_rng_state()},
                "epoch": self.steps,
            }
        )

    def _set_mode(self, mode: str) -> None:
        """Set the mode of an optimizer that has modes; this changes the parameters."""
        change = getattr(self.optimizer, mode, None)
        if change is not None:
            change()

    def resume(self, tree: Tree) -> Training:
        """Restore the checkpoint that :meth:`tree` returned."""
        self.model.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])
        self.scheduler.load_state_dict(tree["scheduler"])
        self.scaler.load_state_dict(tree["scaler"])
        self.ema, self.steps = dict(tree["ema"]), tree["epoch"]
        torch.set_rng_state(tree["rng"]["cpu"])
        return self


def low_bit_tree(name: str, dtype: torch.dtype) -> Tree:
    """The checkpoint after three steps of an optimizer in :data:`LOW_BIT`, on the CPU.

    Both libraries quantize the state of parameters with at least 4096 values.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 6)).to(dtype)
    optimizer = class_of(name)(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles each step
        for _ in range(3):
            model(torch.randn(8, 64, dtype=dtype)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(), "rng": {"cpu": torch.get_rng_state()}, "epoch": 3,
    }  # fmt: skip


#: Folder of the scripts with a case.
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def case_of(example: str, function: str = "case") -> Case:
    """The case of a script, on the CPU."""
    spec = importlib.util.spec_from_file_location(f"example_{example}", EXAMPLES / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Case = getattr(module, function)(torch.device("cpu"))
    return found


def parts_of(case: Case) -> dict[str, Any]:
    """The models and optimizers of a case, each under its key in the checkpoint."""
    models = case.model if isinstance(case.model, dict) else {"model": case.model}
    optimizers = case.optimizer if isinstance(case.optimizer, dict) else {"optimizer": case.optimizer}
    return {**models, **optimizers}


def example_tree(example: str) -> Tree:
    """The checkpoint of a script after three calls of the ``step`` of its case."""
    torch.manual_seed(0)
    case = case_of(example)
    assert case.step is not None
    for _ in range(3):
        if isinstance(case.optimizer, torch.optim.Optimizer):
            case.optimizer.zero_grad()
            case.step(case.batch).backward()
            case.optimizer.step()
        else:
            case.step(case.batch)
    return {**{key: copy.deepcopy(part.state_dict()) for key, part in parts_of(case).items()}, "epoch": 3}


def tensors_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Every tensor in a value, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_of(member, (*path, str(key)))


def device_by_path(device: str, name: str) -> Callable[[tuple[str, ...]], str]:
    """A function from the path of a tensor to its device, for a run on a device."""

    def place(path: tuple[str, ...]) -> str:
        stays = "rng" in path or (path[-1] in _ON_CPU and name != "ASGD") or not _RATES.isdisjoint(path)
        return "cpu" if stays else device

    return place


def save(tree: Any, path: Path, place: Callable[[tuple[str, ...]], str], **options: Any) -> str:
    """Save a tree, with the device of each tensor from a function; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _PLACED.clear()
    for where, tensor in tensors_of(tree):
        device = place(where)
        if device != "cpu":
            _PLACED[tensor.untyped_storage().data_ptr()] = tensor, device
    torch.save(tree, path, **options)
    _PLACED.clear()
    return str(path)


def as_plain(tree: Tree, folder: Path, place: Callable[[tuple[str, ...]], str]) -> str:
    """Save one dict, as PyTorch's tutorials do."""
    return save(tree, folder / "checkpoint.pth", place)


def as_lightning(tree: Tree, folder: Path, place: Callable[[tuple[str, ...]], str]) -> str:
    """Save as Lightning's Trainer does."""
    whole = {
        "epoch": tree["epoch"], "global_step": tree["epoch"], "pytorch-lightning_version": "2.5.1", "loops": {},
        "callbacks": {}, "state_dict": tree["model"], "optimizer_states": [tree["optimizer"]],
        "lr_schedulers": [tree["scheduler"]], "MixedPrecision": tree["scaler"], "rng": tree["rng"],
    }  # fmt: skip
    return save(whole, folder / "last.ckpt", place)


def as_hf_folder(tree: Tree, folder: Path, place: Callable[[tuple[str, ...]], str]) -> str:
    """Save as the Trainer of transformers does."""
    run = folder / "checkpoint-500"
    save(tree["model"], run / "pytorch_model.bin", place)
    save(tree["optimizer"], run / "optimizer.pt", place)
    save(tree["scheduler"], run / "scheduler.pt", place)
    save({"cpu": tree["rng"]["cpu"]}, run / "rng_state.pth", lambda _: "cpu")
    (run / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (run / "trainer_state.json").write_text(json.dumps({"global_step": tree["epoch"], "epoch": 1.0}))
    return str(run)


def as_archive(tree: Tree, folder: Path, place: Callable[[tuple[str, ...]], str]) -> str:
    """Save a zip of files, as stable-baselines3 does."""
    members = {
        "policy.pth": tree["model"],
        "policy.optimizer.pth": tree["optimizer"],
        "scheduler.pt": tree["scheduler"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "model.zip", "w") as archive:
        archive.writestr("data", json.dumps({"policy_class": "MlpPolicy", "num_timesteps": tree["epoch"]}))
        for name, member in members.items():
            archive.write(save(member, folder / "members" / name, place), name)
    return str(folder / "model.zip")


def as_distributed(tree: Tree, folder: Path, _place: Callable[[tuple[str, ...]], str]) -> str:
    """Save with torch.distributed.checkpoint, which stores no devices."""
    run = folder / "step-500"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that one process saves everything
        dcp_save(tree, storage_writer=FileSystemWriter(run, per_thread_copy_ahead=0), **IN_ONE_PROCESS)
    return str(run)


LAYOUTS: dict[str, Callable[[Tree, Path, Callable[[tuple[str, ...]], str]], str]] = {
    "plain": as_plain,
    "lightning": as_lightning,
    "hf-trainer": as_hf_folder,
    "archive": as_archive,
    "distributed": as_distributed,
}

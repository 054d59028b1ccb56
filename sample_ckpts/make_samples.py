"""Make the sample checkpoints: small files from real training steps, with tags of absent devices.

The bytes do not depend on the time, the processor or earlier runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import archives
import numpy as np
import placement
import torch
from directories import DIRECTORIES
from placement import place
from torch import nn
from training import Gate, TiedHead, adam, adamw, full_resume, train

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

#: Formats: the zip of torch, its stream before 1.6, safetensors, a bare pickle, and the archives of `archives`.
Form = Literal[
    "zip", "legacy", "safetensors", "pickle",
    "big-endian", "without-byteorder", "without-crcs", "renamed", "deflated", "script",
]  # fmt: skip
CONTAINERS = {"legacy": "torch-legacy", "safetensors": "safetensors", "pickle": "pickle", "script": "torchscript"}
WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "big-endian": archives.big_endian,
    "without-byteorder": archives.without_byteorder,
    "without-crcs": archives.without_crcs,
    "renamed": archives.renamed,
    "deflated": archives.deflated,
    "script": archives.script,
}

HERE = Path(__file__).resolve().parent
MANIFEST = "MANIFEST.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A file. `build` returns the object to save. Its docstring is the description."""

    file: str
    wrong: str | None
    findings: tuple[str, ...]
    build: Callable[[], Any]
    form: Form = "zip"


SAMPLES: list[Sample] = []


def sample(
    file: str, *findings: str, wrong: str | None = None, form: Form = "zip"
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Add a sample to the list, with the findings to expect without a target."""

    def enter(build: Callable[[], object]) -> Callable[[], object]:
        SAMPLES.append(Sample(file=file, wrong=wrong, findings=findings, build=build, form=form))
        return build

    return enter


@sample("adamw-cuda3.pth", "D103", "R302")
def adamw_cuda3() -> object:
    """A healthy AdamW run on the fourth GPU: model, optimizer with `step` on the CPU, scheduler."""
    run = train(adamw, seed=1)
    model, state = place(run.weights(), "cuda:3"), place(run.state(), "cuda:3")
    return {"epoch": 2, "model": model, "optimizer": state, "scheduler": run.scheduler.state_dict()}


@sample("optimizer-left-on-cpu.pth", "D102", "R302", wrong="the moments stayed on the CPU, the model is on cuda:0")
def optimizer_left_on_cpu() -> object:
    """An Adam run whose model was moved to the GPU after the optimizer was restored."""
    run = train(adam, seed=2)
    return {"epoch": 2, "model": place(run.weights(), "cuda:0"), "optimizer": run.state()}


@sample(
    "map-location-dragged-all.pth",
    "O201",
    "R301",
    wrong="map_location='cuda:0' took Adam's `step` and the RNG states along",
)
def map_location_dragged_all() -> object:
    """A complete resume file that was loaded with map_location='cuda:0' and saved again."""
    return place(full_resume(train(adam, seed=3)), "cuda:0", but=())


@sample(
    "dataparallel-two-gpus.pth",
    "D101",
    "D103",
    "K601",
    "R302",
    wrong="layers on cuda:0 and cuda:1, every key begins with `module.`",
)
def dataparallel_two_gpus() -> object:
    """A DataParallel-wrapped SGD run whose two layers, and their momenta, are on two GPUs."""
    run = train(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), seed=4)
    weights, state = run.weights("module."), run.state()
    for index, name in enumerate(weights):
        device = "cuda:0" if name.startswith("module.0.") else "cuda:1"
        place([weights[name], state["state"][index]], device)
    return {"state_dict": weights, "optimizer": state, "epoch": 2}


@sample("adam-mps.pt", "R302")
def adam_mps() -> object:
    """A healthy Adam run from a Mac: float32 on `mps`."""
    run = train(adam, seed=5)
    return {"epoch": 2, "model": place(run.weights(), "mps"), "optimizer": place(run.state(), "mps")}


@sample("tutorial-sgd-cpu.pth", "R302")
def tutorial_sgd_cpu() -> object:
    """The four keys of PyTorch's tutorial, SGD with momentum, all on the CPU."""
    run = train(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), seed=6)
    state = {"model_state_dict": run.weights(), "optimizer_state_dict": run.state()}
    return {"epoch": 2, **state, "loss": run.loss}


@sample(
    "criterion-on-cpu.pth",
    "D101",
    "R302",
    wrong="`criterion.pos_weight` stayed on the CPU, the model is on cuda:0",
)
def criterion_on_cpu() -> object:
    """A loss with its own tensor (`pos_weight`) next to the model and Adam."""
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.5, 4.0]))
    run = train(adam, criterion=criterion, seed=7)
    model, state = place(run.weights(), "cuda:0"), place(run.state(), "cuda:0")
    return {"epoch": 2, "model": model, "optimizer": state, "criterion": criterion.float().state_dict()}


@sample("full-resume-cuda0.pt")
def full_resume_cuda0() -> object:
    """Everything an exact resume needs, on cuda:0: scheduler, GradScaler, counters, RNG states on the CPU."""
    saved = full_resume(train(adamw, seed=8))
    place([saved["model"], saved["optimizer"]], "cuda:0")
    return saved


@sample(
    "namespace-memo-trap.pth",
    "R302",
    "S701",
    wrong="`args.device` and the storage tags are one pickled string",
)
def namespace_memo_trap() -> object:
    """A CPU run with its argparse.Namespace, whose device='cpu' is the same string object as the tags."""
    run = train(adam, seed=9)
    args = Namespace(device="cpu", lr=1e-3, epochs=5)
    return {"epoch": 2, "model": run.weights(), "optimizer": run.state(), "args": args}


@sample("float64-cpu.pt", "R302", wrong="double precision: mps has no float64")
def float64_cpu() -> object:
    """A float64 model with float64 Adam moments, on the CPU."""
    run = train(adam, seed=10)
    run.model.double()
    for state in run.optimizer.state.values():
        state.update({name: held.double() for name, held in state.items() if name != "step"})
    return {"epoch": 2, "model": run.weights(), "optimizer": run.state()}


@sample("saved-view.pt", "F804", wrong="four rows are reachable, all 512 were written")
def saved_view() -> object:
    """Four rows of an embedding table, saved as a view."""
    table = torch.arange(4096, dtype=torch.float32).reshape(512, 8) / 512
    return {"embedding.weight": table[100:104]}


@sample(
    "numpy-scalar-metric.pth",
    "R302",
    "S701",
    wrong="the best metric is a NumPy scalar: weights_only refuses it",
)
def numpy_scalar_metric() -> object:
    """An AdamW run on cuda:0 that keeps its best accuracy as numpy.float64."""
    run = train(adamw, seed=12)
    model, state = place(run.weights(), "cuda:0"), place(run.state(), "cuda:0")
    return {"epoch": 2, "best_acc": np.float64(0.8125), "model": model, "optimizer": state}


@sample("capturable-adam-cuda0.pt", "R302")
def capturable_adam_cuda0() -> object:
    """Adam under CUDA graphs: capturable=True, so its `step` belongs on cuda:0."""
    run = train(adam, seed=13)
    state = run.state()
    state["param_groups"][0]["capturable"] = True
    place(state, "cuda:0", but=())
    return {"epoch": 2, "model": place(run.weights(), "cuda:0"), "optimizer": state}


@sample("rmsprop-centered-cuda0.pt", "R302")
def rmsprop_centered_cuda0() -> object:
    """RMSprop, centered and with momentum: three moments for each parameter, on cuda:0."""
    run = train(lambda model: torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.9), seed=14)
    return {"epoch": 2, "model": place(run.weights(), "cuda:0"), "optimizer": place(run.state(), "cuda:0")}


@sample(
    "lightning-mapped-to-cpu.ckpt",
    "D104",
    "R302",
    wrong="the tensors were mapped to the CPU, hyper_parameters still says torch.device('cuda:0')",
)
def lightning_mapped_to_cpu() -> object:
    """A Lightning-shaped checkpoint, written without Lightning."""
    run = train(adamw, seed=15)
    progress = {"total": {"ready": 3, "completed": 3}, "current": {"ready": 3, "completed": 3}}
    return {
        "epoch": 2,
        "global_step": 3,
        "pytorch-lightning_version": "2.5.1",
        "state_dict": run.weights("model."),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": progress}},
        "callbacks": {"ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_score": torch.tensor(0.125).float()}},
        "optimizer_states": [run.state()],
        "lr_schedulers": [run.scheduler.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"learning_rate": 1e-3, "device": torch.device("cuda", 0)},
    }


@sample("pickled-module-cuda0.pt", "S701", wrong="a whole nn.Module, not its state_dict: weights_only refuses it")
def pickled_module_cuda0() -> object:
    """A whole nn.Sequential with BatchNorm buffers, on cuda:0."""
    layers = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return place(train(adam, make=lambda: nn.Sequential(*layers), seed=16).model, "cuda:0")


@sample("nanogpt-compiled-fused.pt", "K601", "R302", wrong="every model key begins with torch.compile's `_orig_mod.`")
def nanogpt_compiled_fused() -> object:
    """nanoGPT-shaped, tied embedding, two AdamW groups; fused=True, so `step` belongs on cuda:0."""

    def grouped(model: nn.Module) -> Optimizer:
        weights = list(model.parameters())
        decayed = {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": 0.1}
        plain = {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0}
        return torch.optim.AdamW([decayed, plain], lr=6e-4, betas=(0.9, 0.95))

    run = train(grouped, make=TiedHead, seed=17)
    state = run.state()
    for group in state["param_groups"]:
        group["fused"] = True
    return {
        "model": place(run.weights("_orig_mod."), "cuda:0"),
        "optimizer": place(state, "cuda:0", but=()),
        "model_args": {
            "n_layer": 0,
            "n_embd": 6,
            "block_size": 16,
            "bias": True,
            "vocab_size": 12,
            "dropout": 0.0,
        },
        "iter_num": 3,
        "best_val_loss": torch.tensor(2.5).float(),
        "config": {"device": "cuda", "dtype": "bfloat16", "compile": True, "backend": "nccl"},
    }


@sample("dtype-zoo.pt")
def dtype_zoo() -> object:
    """Tied bfloat16 weights; 0-d, empty, transposed, complex, bool, int64, half and float8 tensors."""
    tied = (torch.arange(24) / 8).reshape(4, 6).to(torch.bfloat16)
    zoo = {
        "embed.weight": tied,
        "head.weight": tied,
        "scale": torch.tensor(0.5).float(),
        "empty": torch.empty((0, 4), dtype=torch.float32),
        "transposed": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
        "rotary": torch.complex(torch.arange(4).float(), torch.ones(4).float()),
        "mask": torch.tensor([True, False, True]),
        "position_ids": torch.arange(5),
        "half": torch.arange(6).to(torch.float16),
        "fp8": (torch.arange(8) / 4).to(torch.float8_e4m3fn),
    }
    return place(zoo, "cuda:0")


@sample("legacy-adamw-cuda1.pth", "D103", "R302", form="legacy")
def legacy_adamw_cuda1() -> object:
    """A healthy AdamW run on the second GPU, saved by torch 1.4: a stream, `step` is a plain number."""
    run = train(adamw, seed=19)
    state = run.state()
    for held in state["state"].values():
        held["step"] = int(held["step"])
    known = ("lr", "betas", "eps", "weight_decay", "amsgrad", "params")
    state["param_groups"] = [{name: group[name] for name in known} for group in state["param_groups"]]
    return {"epoch": 2, "state_dict": place(run.weights(), "cuda:1"), "optimizer": place(state, "cuda:1")}


@sample("legacy-shared-views.pth", form="legacy")
def legacy_shared_views() -> object:
    """Weights that are views of one buffer, as cuDNN flattens an RNN's: a stream with one storage."""
    weights = train(adam, seed=20).weights()
    buffer = torch.cat([weight.reshape(-1) for weight in weights.values()])
    views, start = {}, 0
    for name, weight in weights.items():
        views[name] = buffer[start : start + weight.numel()].view(weight.shape)
        start += weight.numel()
    return {"epoch": 2, "state_dict": place(views, "cuda:0")}


@sample("weights.safetensors", form="safetensors")
def weights_safetensors() -> object:
    """A model's weights, saved with `save_file`: the format stores no device."""
    return train(adam, seed=21).weights()


@sample("bare-pickle-cuda2.pkl", "D103", "S701", "R302", form="pickle", wrong="pickle.dump, not torch.save")
def bare_pickle_cuda2() -> object:
    """An Adam run on the third GPU, saved with `pickle.dump`: each tensor is a stream inside the pickle."""
    run = train(adam, seed=22)
    return {"epoch": 2, "model": place(run.weights(), "cuda:2"), "optimizer": place(run.state(), "cuda:2")}


def on_cuda0(seed: int) -> dict[str, object]:
    """A healthy Adam run on the first GPU."""
    run = train(adam, seed=seed)
    return {"epoch": 2, "model": place(run.weights(), "cuda:0"), "optimizer": place(run.state(), "cuda:0")}


@sample("zipped-again.pth", "F803", "R302", form="deflated", wrong="zipped again: mmap=True reads garbage")
def zipped_again() -> object:
    """An Adam run whose archive was unpacked and zipped again with compression, as zip programs do."""
    return on_cuda0(23)


@sample("big-endian.pth", "R302", form="big-endian")
def big_endian() -> object:
    """An Adam run saved on an IBM Z: numbers are big-endian."""
    return on_cuda0(24)


@sample("without-byteorder.pth", "R302", form="without-byteorder")
def without_byteorder() -> object:
    """An Adam run saved by torch 1.6 to 2.0: the archive has no byteorder record."""
    return on_cuda0(25)


@sample("without-crcs.pth", "R302", form="without-crcs")
def without_crcs() -> object:
    """An Adam run saved with `torch.serialization.set_crc32_options(False)`."""
    return on_cuda0(26)


@sample("renamed.pth", "R302", form="renamed")
def renamed() -> object:
    """An Adam run in a file that was renamed: the folder inside is called `archive`."""
    return on_cuda0(27)


@sample(
    "script-code-cuda0.pt", "D104", form="script", wrong="a line of its code names cuda:0, its tensors are on the CPU"
)
def script_code_cuda0() -> object:
    """A module of `torch.jit.save`, with code and tensors."""
    return train(adam, make=Gate, seed=28).model


def as_safetensors(weights: dict[str, torch.Tensor]) -> bytes:
    """Lay out float32 tensors as `safetensors.torch.save_file` does: by name, the header padded to eight bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in sorted(weights.items()):
        raw = tensor.detach().contiguous().numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    table = json.dumps(header, separators=(",", ":")).encode()
    table += b" " * (-len(table) % 8)
    return len(table).to_bytes(8, "little") + table + data


def save(one: Sample, tree: Any, path: Path) -> None:
    """Write the object of a sample."""
    with placement.numbered_storages():
        if one.form == "safetensors":
            path.write_bytes(as_safetensors(tree))
        elif one.form == "pickle":
            path.write_bytes(pickle.dumps(tree, 4))
        elif one.form in WRITERS:
            WRITERS[one.form](tree, path)
        else:
            torch.save(tree, path, _use_new_zipfile_serialization=one.form == "zip")


def write(folder: Path) -> dict[str, Any]:
    """Write every sample and the manifest into `folder`; return the manifest."""
    torch.set_default_dtype(torch.float64)
    placement.register()
    entries = []
    for one in SAMPLES:
        placement.clear()
        tree = one.build()
        save(one, tree, folder / one.file)
        content, tensors = (folder / one.file).read_bytes(), sum(1 for _ in placement.named_tensors(tree))
        entry = {
            "file": one.file,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "holds": one.build.__doc__,
            "wrong": one.wrong,
            "findings": list(one.findings),
            "container": CONTAINERS.get(one.form, "torch-zip"),
            # torch.jit.save calls no tagger. Its tensors are on the CPU, each with its own storage.
            "devices": {"cpu": tensors} if one.form == "script" else placement.saved_devices(),
            "tensors": tensors,
            "weights_only": "S701" not in one.findings and one.form != "script",
        }
        entries.append(entry)
    kept = write_directories(folder)
    manifest = {"torch": torch.__version__.partition("+")[0], "samples": entries, "directories": kept}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def write_directories(folder: Path) -> list[dict[str, Any]]:
    """Write every directory into `folder`; return their entries in the manifest."""
    entries = []
    for one in DIRECTORIES:
        placement.clear()
        (folder / one.name).mkdir(exist_ok=True)
        files, tensors = {}, 0
        for name, content in one.build().items():
            path = folder / one.name / name
            if isinstance(content, str):
                path.write_text(content, encoding="utf-8")
            else:
                torch.save(content, path)
                tensors += sum(1 for _ in placement.named_tensors(content))
            files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        entries.append({
            "directory": one.name,
            "sha256": files,
            "holds": one.build.__doc__,
            "wrong": one.wrong,
            "findings": list(one.findings),
            "layout": one.layout,
            "devices": placement.saved_devices(),
            "tensors": tensors,
        })  # fmt: skip
    placement.clear()
    return entries


def differences(folder: Path) -> list[str]:
    """Make all samples in another folder; return the files in `folder` that differ."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        write(fresh)
        made = sorted(path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file())
        return [
            path.as_posix()
            for path in made
            if not (folder / path).is_file() or (folder / path).read_bytes() != (fresh / path).read_bytes()
        ]


def main() -> int:
    """Write the samples and their manifest, or compare them with --check; return the exit code."""
    parser = argparse.ArgumentParser(description="Make the sample checkpoints, or compare them with their recipe.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    parser.add_argument(
        "--folder", type=Path, default=HERE, help="folder of the samples (default: that of this script)"
    )
    options = parser.parse_args()
    if options.check:
        differing = differences(options.folder)
        for name in differing:
            print(f"differs: {name}")
        return 1 if differing else 0
    for entry in write(options.folder)["samples"]:
        print(f"{entry['bytes']:>7}  {entry['file']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

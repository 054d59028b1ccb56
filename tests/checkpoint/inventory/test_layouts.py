"""The common one-file layouts: layout, producer, and the role of each part."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def stepped(module: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> torch.optim.Optimizer:
    optimizer = kind(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def scheduler_state(module: nn.Module) -> dict[str, object]:
    return torch.optim.lr_scheduler.StepLR(stepped(module), 1).state_dict()


SCALER = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}


class Expected(NamedTuple):
    layout: str
    roles: dict[str, str]
    contents: set[str]
    optimizers: tuple[tuple[str, str | None], ...] = ()
    producer: str | None = None
    rng_devices: tuple[tuple[str, int], ...] = ()
    torch_version: str | None = None


def tutorial():
    net = model()
    saved = {
        "epoch": 5, "model_state_dict": net.state_dict(), "optimizer_state_dict": stepped(net).state_dict(),
        "scheduler_state_dict": scheduler_state(net), "loss": torch.tensor(0.3),
    }  # fmt: skip
    roles = {"model_state_dict": "model", "optimizer_state_dict": "optimizer", "loss": "other"}
    return saved, Expected("plain", roles, {"counter", "scheduler"}, (("optimizer_state_dict", "Adam"),))


def nano_gpt():
    net = model()
    saved = {
        "model": {f"_orig_mod.{key}": value for key, value in net.state_dict().items()},
        "optimizer": stepped(net, torch.optim.AdamW).state_dict(), "model_args": {"n_layer": 2}, "iter_num": 100,
        "best_val_loss": torch.tensor(3.2), "config": {"device": "cuda", "dtype": "bfloat16"},
    }  # fmt: skip
    roles = {"model": "model", "optimizer": "optimizer", "best_val_loss": "other"}
    return saved, Expected("plain", roles, {"counter"}, (("optimizer", "AdamW"),))


def lightning():
    net = model()
    saved = {
        "epoch": 1, "global_step": 10, "pytorch-lightning_version": "2.1.0", "state_dict": net.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_score": torch.tensor(1.0), "best_k_models": {}},
            "EarlyStopping{'monitor': 'val_loss'}": {"best_score": torch.tensor(1.0), "wait_count": 0},
        },
        "optimizer_states": [stepped(net).state_dict(), stepped(net, torch.optim.SGD).state_dict()],
        "lr_schedulers": [scheduler_state(net)], "MixedPrecision": SCALER,
        "hyper_parameters": {"loss": nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), "net": nn.Linear(1, 1)},
    }  # fmt: skip
    roles = {
        "state_dict": "model", "optimizer_states": "optimizer", "callbacks": "other",
        "hyper_parameters.loss": "criterion", "hyper_parameters.net": "other",
    }  # fmt: skip
    found = (("optimizer_states.0", "Adam"), ("optimizer_states.1", "SGD"))
    return saved, Expected("lightning", roles, {"counter", "scheduler", "scaler"}, found, "pytorch-lightning 2.1.0")


def timm():
    net = model()
    saved = {
        "epoch": 3, "arch": "resnet18", "state_dict": net.state_dict(), "optimizer": stepped(net).state_dict(),
        "version": 2, "args": Namespace(model="resnet18", device="cuda:0", opt="adam"), "amp_scaler": SCALER,
        "state_dict_ema": net.state_dict(), "metric": 70.1,
    }  # fmt: skip
    roles = {"state_dict.": "model", "optimizer": "optimizer", "state_dict_ema": "ema"}
    return saved, Expected("plain", roles, {"counter", "scaler"}, (("optimizer", "Adam"),))


def mmengine():
    net = model()
    saved = {
        "meta": {"mmengine_version": "0.10.1", "torch_version": "2.1.0", "epoch": 3, "seed": 1},
        "state_dict": net.state_dict(), "message_hub": {"log_scalars": {}, "runtime_info": {"iter": 10}},
        "optimizer": stepped(net).state_dict(), "param_schedulers": [scheduler_state(net)],
        "ema_state_dict": {"module.0.weight": torch.ones(1), "steps": torch.tensor(3)},
    }  # fmt: skip
    roles = {"state_dict": "model", "optimizer": "optimizer", "ema_state_dict": "ema"}
    contents = {"counter", "scheduler"}
    return saved, Expected("mmengine", roles, contents, (("optimizer", "Adam"),), "mmengine 0.10.1", (), "2.1.0")


def mmcv():
    saved = {"meta": {"mmcv_version": "1.7.0", "epoch": 12, "CLASSES": ["a"]}, "state_dict": model().state_dict()}
    return saved, Expected("mmengine", {"state_dict": "model"}, {"counter"}, (), "mmcv 1.7.0")


def detectron2():
    net = model()
    saved = {
        "model": net.state_dict(), "optimizer": stepped(net, torch.optim.SGD).state_dict(),
        "scheduler": scheduler_state(net), "iteration": 99,
    }  # fmt: skip
    return saved, Expected("detectron2", {"model": "model"}, {"counter", "scheduler"}, (("optimizer", "SGD"),))


def fairseq():
    net = model()
    saved = {
        "args": Namespace(arch="transformer"), "model": net.state_dict(), "criterion": {"weight": torch.ones(2)},
        "optimizer_history": [{"num_updates": 3, "lr_scheduler_state": {"best": None}}],
        "extra_state": {"train_iterator": {"epoch": 2}}, "last_optimizer_state": stepped(net).state_dict(),
    }  # fmt: skip
    roles = {"model": "model", "criterion": "criterion", "last_optimizer_state": "optimizer"}
    return saved, Expected("fairseq", roles, {"counter"}, (("last_optimizer_state", "Adam"),))


def ultralytics():
    net = model()
    saved = {
        "epoch": -1, "model": None, "ema": model().half(), "updates": 10, "optimizer": stepped(net).state_dict(),
        "train_args": {"device": "0"}, "date": "2024", "version": "8.1.0",
    }  # fmt: skip
    expected = Expected("ultralytics", {"ema": "ema"}, {"counter"}, (("optimizer", "Adam"),), "ultralytics 8.1.0")
    return saved, expected


def bare():
    return model().state_dict(), Expected("plain", {"": "model"}, set())


def bare_without_versions():
    saved = {"0.weight": torch.ones(1), "0.bias": torch.ones(1), "0.packed": None}
    return saved, Expected("plain", {"": "model"}, set())


def data():
    return {"inputs": torch.ones(2), "targets": torch.ones(2)}, Expected("plain", {"": "other"}, set())


def state_dict_with_criterion():
    saved = OrderedDict({"net.weight": torch.ones(1), "criterion.pos_weight": torch.ones(1)})
    return saved, Expected("plain", {"net": "model", "criterion": "criterion"}, set())


def optimizer_file():
    return stepped(model()).state_dict(), Expected("plain", {"": "optimizer"}, set(), (("", "Adam"),))


def pickled_module():
    net = model()
    net.criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    return net, Expected("module", {"0": "model", "criterion": "criterion"}, set())


def pickled_loss():
    return {"fn": nn.CrossEntropyLoss(weight=torch.ones(3))}, Expected("plain", {"fn": "criterion"}, set())


def gan():
    first, second = model(), model()
    saved = {
        "generator_state_dict": first.state_dict(), "discriminator_state_dict": second.state_dict(),
        "optimizer_G": stepped(first).state_dict(), "optimizer_D": stepped(second, torch.optim.RMSprop).state_dict(),
        "netG_ema": first.state_dict(), "iteration": 3,
    }  # fmt: skip
    roles = {
        "generator_state_dict": "model", "discriminator_state_dict": "model", "optimizer_G": "optimizer",
        "netG_ema": "ema",
    }  # fmt: skip
    return saved, Expected("plain", roles, {"counter"}, (("optimizer_G", "Adam"), ("optimizer_D", "RMSprop")))


def hf_rng():
    saved = {
        "python": (3, (1, 2), None), "numpy": np.random.RandomState(0).get_state(), "cpu": torch.get_rng_state(),
        "cuda": [torch.get_rng_state(), torch.get_rng_state()],
    }  # fmt: skip
    return saved, Expected("hf-trainer", {"": "rng"}, {"rng"}, rng_devices=(("cuda", 2),))


def accelerate_rng():
    saved = {
        "step": 0, "random_state": (3, (1, 2), None), "numpy_random_seed": np.random.RandomState(0).get_state(),
        "torch_manual_seed": torch.get_rng_state(), "torch_cuda_manual_seed": [torch.get_rng_state()],
    }  # fmt: skip
    rng_devices = (("torch_cuda_manual_seed", 1),)
    return saved, Expected("accelerate", {"": "rng"}, {"rng"}, rng_devices=rng_devices)


def own_rng():
    saved = {
        "model": model().state_dict(), "rng_state": torch.get_rng_state(), "cuda_rng_states": (torch.get_rng_state(),),
        "seed": 3, "numpy_rng": ("MT19937", [1, 2]), "scaler": {}, "scheduler": {},
    }  # fmt: skip
    roles = {"model": "model", "rng_state": "rng", "cuda_rng_states": "rng"}
    return saved, Expected("plain", roles, {"rng"}, rng_devices=(("cuda_rng_states", 1),))


def deepspeed():
    saved = {"module": model().state_dict(), "ds_config": {}, "ds_version": "0.12.0", "global_steps": 3}
    return saved, Expected("deepspeed", {"module": "model"}, {"counter"}, (), "deepspeed 0.12.0")


def megatron():
    saved = {"checkpoint_version": 3.0, "args": Namespace(), "iteration": 5, "model": {"lm.w": torch.ones(1)}}
    return saved, Expected("megatron", {"model": "model"}, {"counter"})


def scheduler_object():
    net = model()
    saved = {"sched": torch.optim.lr_scheduler.StepLR(stepped(net), 1)}
    return saved, Expected("plain", {"": "optimizer"}, {"scheduler"}, (("sched.optimizer", "Adam"),))


class OwnScheduler:
    def __init__(self) -> None:
        self.calls = 3


def own_scheduler_object():
    return {"scheduler": OwnScheduler()}, Expected("plain", {}, {"scheduler"})


def schedulers_by_their_keys():
    saved = {"policy": scheduler_state(model()), "model": model().state_dict()}
    return saved, Expected("plain", {"model": "model"}, {"scheduler"})


def speechbrain_scheduler():
    return {"losses": [], "n_steps": 8}, Expected("plain", {}, {"scheduler"})


def losses_of_a_script():
    saved = {"losses": [], "n_steps": 8, "model": model().state_dict()}
    return saved, Expected("plain", {"model": "model"}, set())


def weight_averaging():
    net = model()
    saved = {
        "state_dict": net.state_dict(), "current_model_state": net.state_dict(),
        "averaging_state": {"n_averaged": torch.tensor(3)},
    }  # fmt: skip
    roles = {"state_dict": "ema", "current_model_state": "model", "averaging_state": "ema"}
    return saved, Expected("plain", roles, set())


def versions_that_are_objects():
    saved = {"torch_version": torch.torch_version.TorchVersion("2.4.0"), "meta": "x", "w": torch.ones(1)}
    return saved, Expected("plain", {"": "other"}, set(), torch_version="2.4.0")


def a_tensor():
    return torch.ones(1), Expected("other", {"": "other"}, set())


LAYOUTS: list[Callable[[], tuple[object, Expected]]] = [
    tutorial, nano_gpt, lightning, timm, mmengine, mmcv, detectron2, fairseq, ultralytics, bare, bare_without_versions,
    data, state_dict_with_criterion, optimizer_file, pickled_module, pickled_loss, gan, hf_rng, accelerate_rng, own_rng,
    deepspeed, megatron, scheduler_object, own_scheduler_object, schedulers_by_their_keys, speechbrain_scheduler,
    losses_of_a_script, weight_averaging, versions_that_are_objects, a_tensor,
]  # fmt: skip


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
def test_layout(make, inventory_of):
    saved, expected = make()
    inventory = inventory_of(saved)
    assert (inventory.layout, inventory.producer) == (expected.layout, expected.producer)
    assert inventory.torch_version == expected.torch_version
    for prefix, role in expected.roles.items():
        roles = {tensor.role for tensor in inventory.tensors if tensor.name.startswith(prefix)}
        assert (prefix, roles) == (prefix, {role})
    assert inventory.contents == expected.contents
    assert inventory.rng_devices == expected.rng_devices
    assert [(found.where, found.algorithm) for found in inventory.optimizers] == list(expected.optimizers)
    for optimizer in inventory.optimizers:
        for entry in optimizer.state:
            assert {tensor.role for _, tensor in entry.tensors} <= {"optimizer"}
    assert inventory.root_keys == (tuple(saved) if isinstance(saved, dict) else ())


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        ("ultralytics.nn.tasks", "ultralytics"),
        ("models.yolo", "ultralytics"),
        ("transformers.training_args", "hf-trainer"),
        ("stable_baselines3.common", "stable-baselines3"),
        ("my.own", "other"),
    ],
)
def test_a_library_is_known_by_its_classes(module, layout, read_pickle):
    pickle = f"\x80\x02c{module}\nThing\n)\x81.".encode("latin-1")
    assert read_pickle(pickle).layout == layout


def test_older_lightning_keys_callbacks_by_class(inventory_of, read_pickle):
    name = b"cpytorch_lightning.callbacks.model_checkpoint\nModelCheckpoint\n"
    inner = b"}X\x05\x00\x00\x00score" + TENSOR + b"s"
    (tensor,) = read_pickle(b"\x80\x02}X\x09\x00\x00\x00callbacks}" + name + inner + b"ss.").tensors
    assert tensor.name == "callbacks.pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint.score"
    assert tensor.role == "other"


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK\x04tQK\x00K\x04\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
)

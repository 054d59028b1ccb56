"""The roles of keys by their words."""

from __future__ import annotations

from typing import get_args

import pytest

from ckptmove.checkpoint import roles
from ckptmove.checkpoint.roles import ROLE_WORDS, role_of_key, role_of_leaf
from ckptmove.model import Role

KEYS = {
    "model": "model", "model_state_dict": "model", "state_dict": "model", "net": "model", "netG": "model",
    "modelState": "model", "unet": "model", "policy": "model", "G": "model", "generator": "model",
    "generator_state_dict": "model", "emb_params": "model", "string_to_param": "model", "encoder.layer": "model",
    "optimizer": "optimizer", "optimizer_state_dict": "optimizer", "optimizerD_state_dict": "optimizer",
    "optim": "optimizer", "opt_state": "optimizer", "Optimizer:adam": "optimizer", "last_optimizer_state": "optimizer",
    "generator_optimizer": "optimizer", "optimizer_G": "optimizer",
    "lr_scheduler": "scheduler", "lr_schedulers": "scheduler", "scheduler_state_dict": "scheduler",
    "optimizer_scheduler": "scheduler", "swa_scheduler": "scheduler", "ema_sched": "scheduler",
    "ema": "ema", "model_ema": "ema", "state_dict_ema": "ema", "EMACallback": "ema", "swa_model": "ema",
    "scaler": "scaler", "amp_scaler": "scaler", "grad_scaler": "scaler", "amp": "scaler", "scaler_state_dict": "scaler",
    "native_amp_scaling_state": "scaler",
    "rng_state": "rng", "cuda_rng_state": "rng", "torch_manual_seed": "rng", "random_states": "rng",
    "generator_state": "rng",
    "criterion": "criterion", "loss_fn": "criterion", "criterion_state_dict": "criterion",
    "ModelCheckpoint{'monitor': 'loss'}": "other", "EarlyStopping": "other", "hyper_parameters": "other",
    "a.b.ModelCheckpoint": "other", "model_checkpoint": "model",
    "epoch": None, "": None, "loss": None, "args": None, "normalizer": None, "data_scaler": None, "remodel": None,
    "best_val_loss": None, "x" * 500 + "model": None,
}  # fmt: skip


@pytest.mark.parametrize(("key", "role"), KEYS.items())
def test_role_of_key(key, role):
    assert role_of_key(key) == role


def test_indices_of_lists_do_not_drive_words_out_of_the_cache():
    before = roles._role_of_words.cache_info()
    assert {role_of_key(str(index)) for index in range(10)} == {None}
    assert roles._role_of_words.cache_info() == before


def test_every_role_has_its_words():
    assert {role for role, _ in ROLE_WORDS} == set(get_args(Role)) - {"other"}


@pytest.mark.parametrize(
    ("name", "role"),
    [("criterion.weight", "criterion"), ("loss_fn.w", "criterion"), ("Criterion", "criterion"), ("layer.weight", None)],
)
def test_role_of_leaf(name, role):
    assert role_of_leaf(name) == role


def test_names_that_differ_by_a_number_alone_are_looked_at_once():
    """A file may have millions of them: c0, c1 and so on."""
    roles._role_of_words.cache_clear()
    assert {role_of_key(f"constant{number}") for number in range(1000)} == {None}
    assert roles._role_of_words.cache_info().currsize == 1
    assert role_of_key("model2") is role_of_key("model17") is None
    assert role_of_key("optimizer_2") == role_of_key("optimizer_17") == "optimizer"

"""Flat buckets of Megatron-Core's distributed optimizer (``sharded_state_dict`` in distrib_optimizer.py)."""

from __future__ import annotations

import io

import pytest
import torch

import ckptmove
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.opening.checkpoint import open_checkpoint

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True, "step": 3}
DTYPES = (torch.bfloat16, torch.float32)
KEYS = ("param", "exp_avg", "exp_avg_sq")


def buffers(numel=192):
    torch.manual_seed(0)
    moment = torch.randn(numel)
    return dict(zip(KEYS, (torch.randn(numel), moment, moment.square() * 9), strict=True))


@pytest.fixture
def save(distributed, tmp_path):
    """Save a checkpoint of two data-parallel ranks.

    ``chunks`` are the ends of the pieces of the bucket, ``groups`` the options of the optimizer; objects of a rank are
    in a list. Without ``chunks``, the buckets are gathered on the first rank, in one object.
    """

    def write(*, chunks=(), groups=(OPTIONS,), common=None, prefix="", own=None, extra=None, folder="run"):
        base = f"{prefix}optimizer.distributed.dp_group_idx_0"
        own = buffers() if own is None else own
        objects = {f"{base}.optimizer/shard_0_1": [{"param_groups": list(groups)}]} if groups else {}
        tensors = {"a.weight": (torch.ones(4, 3).bfloat16(), [(0, (0, 0), (4, 3))])}
        if chunks:
            starts = (0, *chunks[:-1])
            for key, value in own.items():
                name = f"{base}.gbuf_idx_0.dtype_{DTYPES}.bucket_idx_0.{key}"
                boxes = [(start >= 96, (start,), (end - start,)) for start, end in zip(starts, chunks, strict=True)]
                tensors[name] = value, [(int(rank), *box) for rank, *box in boxes]
            objects[f"{base}.per_bucket_numel/shard_0_1"] = [[{DTYPES: [192]}]]
        else:
            state = {"buckets_coalesced": True, 0: {DTYPES: {**own, "numel_unpadded": 192}}}
            objects[f"{base}.param_state/shard_0_1"] = [state]
        objects |= extra or {}
        written = {}
        for name, value in objects.items():
            data = io.BytesIO()
            torch.save(value, data)
            written[name] = 0, data.getvalue()
        path = distributed.save_ranks(tmp_path / folder, tensors, written)

        def as_megatron(metadata):
            metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}

        distributed.change(path, as_megatron)
        torch.save({"optimizer": common or {"param_state_sharding_type": "x"}, "iteration": 7}, path / "common.pt")
        return path

    return write


@pytest.mark.parametrize("prefix", ["", "chained_1."])
def test_buckets_are_stepped(save, answers, prefix):
    path = save(prefix=prefix)
    with open_checkpoint(str(path)) as found:
        (optimizer,) = found.inventory.optimizers
        (pairing,) = pair_all(found.inventory)
    assert optimizer.where == f"{prefix}optimizer.distributed.dp_group_idx_0"
    assert (optimizer.algorithm, pairing.how) == ("AdamW", "flat")
    ((key, parameter),) = pairing.matches
    assert parameter.name == f"{optimizer.where}.{key}.param"
    results = answers(path)
    assert [results[name]["status"] for name in ("restore", "step", "parity", "fresh")] == ["passed"] * 4
    assert (results["step"]["evidence"]["elements"], results["step"]["evidence"]["proven"]) == (192, True)


@pytest.mark.unmeasured
def test_the_state_is_used(save):
    path = save()
    for key in KEYS:
        own = buffers()
        own[key] = own[key] * 1.5
        assert not ckptmove.verify(save(own=own, folder=key), against=path).ok
    wrong = {**buffers(), "exp_avg_sq": -torch.ones(192)}
    assert {check.name for check in ckptmove.verify(save(own=wrong, folder="wrong")).checks if check.status == "failed"}


def test_options_may_be_in_the_common_file(save, answers):
    path = save(groups=(), common={"optimizer": {"param_groups": [OPTIONS]}})
    assert answers(path)["step"]["status"] == "passed"


def test_an_optimizer_that_is_not_elementwise_is_not_stepped(save):
    checks = {check.name: check for check in ckptmove.verify(save(), optimizer="Muon").checks}
    assert (checks["step"].status, "flat" in checks["step"].detail) == ("skipped", True)


def test_options_that_are_no_dicts_are_passed_over(save):
    path = save(groups=(), extra={"optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1": ["x"]})
    assert "param_groups" in ckptmove.inspect(path).inventory.optimizers[0].obstacle


def test_an_object_need_not_be_in_a_list(save, answers):
    path = save(groups=(), extra={"optimizer.distributed.dp_group_idx_0.optimizer/s": {"param_groups": [OPTIONS]}})
    assert answers(path)["step"]["status"] == "passed"


NO_STEP = {
    "padding": {"chunks": (96, 192)},
    "groups": {"groups": (OPTIONS, {**OPTIONS, "weight_decay": 0.0})},
    "no options": {"groups": ()},
    "no parameters": {"own": {key: value for key, value in buffers().items() if key != "param"}},
    "other lengths": {"own": {**buffers(), "exp_avg": torch.ones(3)}},
    "no state": {"own": {"param": torch.ones(3)}},
    "matrices": {"own": {key: value.reshape(12, 16) for key, value in buffers().items()}},
}


@pytest.mark.unmeasured
@pytest.mark.parametrize("options", NO_STEP.values(), ids=NO_STEP)
def test_why_buckets_are_not_stepped(save, options):
    path = save(**options)
    (optimizer,) = ckptmove.inspect(path).inventory.optimizers
    assert optimizer.algorithm is None
    assert optimizer.obstacle
    checks = {check.name: check for check in ckptmove.verify(path).checks}
    assert (checks["step"].status, optimizer.obstacle in checks["step"].detail) == ("skipped", True)


@pytest.mark.parametrize("place", [slice(50, 64), slice(158, None)])
def test_values_of_padding_are_not_those_of_an_optimizer(save, place):
    own = buffers()
    own["exp_avg_sq"][place] = -1
    path = save(own=own, chunks=(96, 192))
    assert "padding" in ckptmove.inspect(path).inventory.optimizers[0].obstacle
    assert ckptmove.verify(path).ok


@pytest.mark.parametrize("folder", ["run", "run/iter_0000007"])
def test_one_file_of_gathered_buckets(save, answers, tmp_path, folder):
    save(folder=folder)
    ckptmove.convert(tmp_path / "run", output=tmp_path / "one.pth")
    results = answers(tmp_path / "one.pth", against=str(tmp_path / "run"))
    assert [results[name]["status"] for name in ("restore", "step", "parity", "fresh")] == ["passed"] * 4
    assert ckptmove.diff(tmp_path / "run", tmp_path / "one.pth").same


def test_one_file_of_padded_buckets(save, tmp_path):
    ckptmove.convert(save(chunks=(96, 192)), output=tmp_path / "one.pth")
    (optimizer,) = ckptmove.inspect(tmp_path / "one.pth").inventory.optimizers
    assert "padding" in optimizer.obstacle


def test_whole_parameters_of_the_distributed_optimizer(distributed, answers, tmp_path):
    """``sharded_param_state_fully_reshardable`` names the fp32 copies ``param``."""
    torch.manual_seed(0)
    values = torch.randn(4, 3)
    tree = {"a.weight": values.bfloat16()}
    tree |= {
        f"optimizer.state.{key}.a.weight": value
        for key, value in zip(KEYS, (values, values, values**2 * 9), strict=True)
    }
    path = distributed.save(tmp_path / "run", tree)
    torch.save({"optimizer": {"optimizer": {"param_groups": [OPTIONS]}}}, path / "common.pt")
    results = answers(path)
    assert results["step"]["status"] == "passed"
    with open_checkpoint(str(path)) as found:
        (pairing,) = pair_all(found.inventory)
    assert pairing.matches[0][1].name == "optimizer.state.param.a.weight"

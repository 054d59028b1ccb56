"""Checkpoints of DeepSpeed ZeRO that become one file."""

from __future__ import annotations

import argparse
import shutil
import zipfile
from dataclasses import replace

import pytest
import torch
import zero_runs
from safetensors.torch import load_file
from typer.testing import CliRunner

import ckptmove
from ckptmove.assembled import zero
from ckptmove.cli.app import app
from ckptmove.errors import DamagedArchive, NotGathered
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint


def gathered(folder, output, **options):
    ckptmove.convert(folder, output=output, **options)
    return torch.load(output, weights_only=True)


def by_name(optimizer, key):
    """State of one kind by the names of the parameters."""
    return {
        name: optimizer["state"][number][key]
        for group in optimizer["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }


def all_equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[name]) for name, value in one.items())


#: Runs without a reference: DeepSpeed does not gather them, or gathers them in the wrong order.
WITHOUT_REFERENCE = {"bf16-optimizer", "experts-round-robin"}


@pytest.mark.parametrize("name", [name for name in zero_runs.REAL if name not in WITHOUT_REFERENCE])
def test_a_run_is_what_deepspeed_gathers(name, tmp_path):
    folder, reference = zero_runs.real(name, tmp_path / "run")
    found = gathered(folder, tmp_path / "run.pth")
    # DeepSpeed casts the floating buffers and frozen weights to float32.
    as_float = {key: one.to(reference["fp32"][key].dtype) for key, one in found["module"].items()}
    assert all_equal(as_float, reference["fp32"])
    assert found["module"]["head.weight"].data_ptr() == found["module"]["emb.weight"].data_ptr()
    for key in ("exp_avg", "exp_avg_sq"):
        own = {name: value for name, value in reference[key].items() if name != "head.weight"}
        assert all_equal(by_name(found["optimizer"], key), own)
    assert (found["note"], found["global_steps"]) == ("hi", 3)
    assert not found.keys() & {"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}


@pytest.mark.parametrize("name", sorted(WITHOUT_REFERENCE))
def test_what_deepspeed_itself_does_not_gather(name, tmp_path):
    folder, _ = zero_runs.real(name, tmp_path / "run")
    files = [torch.load(path, weights_only=True) for path in folder.glob("*/*model_states.pt")]
    stored = {key: value for file in files for key, value in file.get("module", file).items()}
    found = gathered(folder, tmp_path / "run.pth")["module"]
    assert {value.dtype for name, value in found.items() if name not in {"seen", "count"}} == {torch.float32}
    assert all_equal({name: value.to(stored[name].dtype) for name, value in found.items()}, dict(stored))


@pytest.mark.parametrize("name", ["stage2-frozen", "stage3-subgroups", "stage2-round-robin", "stage2-fused-adam"])
def test_an_optimizer_loads_it(name, tmp_path):
    folder, reference = zero_runs.real(name, tmp_path / "run")
    state = gathered(folder, tmp_path / "run.pth")["optimizer"]
    # In the order of the model and of the groups in training, without frozen parameters.
    order = ["scale", "emb.weight", "l1.weight", "l1.bias", "bn.weight", "bn.bias", "l2.weight", "l2.bias"]
    names = [one for one in order if one in reference["exp_avg"]]
    values = {one: torch.nn.Parameter(reference["fp32"][one]) for one in names}
    groups = [names]
    if name in {"stage2-frozen", "stage3-subgroups"}:
        groups = [[one for one in names if (values[one].dim() > 1) == is_matrix] for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": [values[one] for one in group]} for group in groups])
    optimizer.load_state_dict(state)
    for one, value in values.items():
        assert torch.equal(optimizer.state[value]["exp_avg"], reference["exp_avg"][one])
        value.grad = torch.ones_like(value)
    optimizer.step()
    assert {float(own["step"]) for own in optimizer.state.values()} == {4.0}


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", zero_runs.REAL)
def test_the_new_file_does_not_differ_from_the_run(name, tmp_path):
    folder, path = str(zero_runs.real(name, tmp_path / "run")[0]), str(tmp_path / "run.pth")
    runner = CliRunner()
    assert runner.invoke(app, ["convert", folder, "-o", path]).exit_code == 0
    for words in (["diff", folder, path], ["diff", path, folder], ["verify", path, "--against", folder]):
        found = runner.invoke(app, words)
        assert found.exit_code == 0, (words, found.output)


def test_other_options_apply_to_whole_parameters(tmp_path):
    folder, reference = zero_runs.real("stage3-frozen", tmp_path / "run")
    ckptmove.convert(folder, output=tmp_path / "model.safetensors", as_root="module", dtype="bfloat16")
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["emb.weight"], reference["fp32"]["emb.weight"].bfloat16())
    ckptmove.convert(folder, output=tmp_path / "model.pth", to="cuda:0", drop=["optimizer"])
    tensors = ckptmove.inspect(tmp_path / "model.pth").inventory.tensors
    assert {tensor.device for tensor in tensors} == {"cuda:0"}
    assert {tensor.name.partition(".")[0] for tensor in tensors} == {"module"}


def test_files_that_are_left_out_are_named(tmp_path):
    zero_runs.made(tmp_path / "run" / "global_step2")
    # A frozen parameter of an expert is in its own file only.
    torch.save({"frozen": torch.ones(2)}, tmp_path / "run/global_step2/layer_0_expert_1_mp_rank_00_model_states.pt")
    assert not ckptmove.convert(tmp_path / "run", output=tmp_path / "one.pth").notes
    assert torch.load(tmp_path / "one.pth", weights_only=True)["module"]["frozen"].tolist() == [1, 1]
    torch.save({"cpu": torch.get_rng_state()}, tmp_path / "run" / "rng_state_0.pth")
    (note,) = ckptmove.convert(tmp_path / "run", output=tmp_path / "run.pth").notes
    assert note.endswith(": rng_state_0.pth")


def test_the_files_of_a_directory_are_kept_without_a_suffix(tmp_path):
    folder = zero_runs.made(tmp_path / "run")
    ckptmove.convert(folder, output=tmp_path / "out", to="cuda:0")
    assert len(list((tmp_path / "out").iterdir())) == 3


EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts"


@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("is_data_first", [False, True])
def test_experts_of_both_topologies(tmp_path, is_data_first, frozen):
    """Four ranks, of which two have the same experts: two of four each, in two layers. One of layer x may be frozen."""
    own_names = [f"{layer}.{EXPERT}.{number}.w" for layer in "xy" for number in range(2)]
    mine = [{name: (3, 2) for name in own_names if name != f"x.{EXPERT}.{frozen}.w"}]
    values = [zero_runs.whole(seed, mine) for seed in (1, 2)]

    def change(name, tree):
        state = tree.get("optimizer_state_dict")
        if state is not None:
            rank = int(name.split("_")[3])
            share, place = (rank // 2, rank % 2) if is_data_first else (rank % 2, rank // 2)
            own = zero_runs.partitions(values[share], mine[0], 2, 2)[place]
            inner = state["base_optimizer_state"]
            inner["state"][1] = {"step": torch.tensor(2.0), "exp_avg": own * 2, "exp_avg_sq": own * 3}
            inner["param_groups"].append({**inner["param_groups"][0], "params": [1], "moe": True, "name": "ep_size_2"})
            state["single_partition_of_fp32_groups"].append(own)
            state["group_paddings"].append(0)
            state["partition_count"] = [4, 2]
        else:
            tree["param_shapes"].append({key: torch.Size(shape) for key, shape in mine[0].items()})
            tree["ds_config"] = {"use_data_before_expert_parallelism": is_data_first}

    folder = zero_runs.made(tmp_path / "run", ranks=4, shapes=zero_runs.SHAPES[:1], change=change)
    names = [f"{layer}.{EXPERT}.{number}.w" for layer in "xy" for number in range(4)]
    home = next(folder.rglob("mp_rank_00_model_states.pt")).parent
    for at, name in enumerate(names):
        own = {name: torch.full((3, 2), at).bfloat16()}
        torch.save(own, home / f"layer_{at // 4}_expert_{at % 4}_mp_rank_00_model_states.pt")
    found = gathered(folder, tmp_path / "run.pth")
    trained = [name for name in names if not (name[0] == "x" and int(name.split(".")[5]) % 2 == frozen)]
    assert found["optimizer"]["param_groups"][1]["param_names"] == trained
    first = by_name(found["optimizer"], "exp_avg")
    for at, name in enumerate(names):
        if name not in trained:
            assert torch.equal(found["module"][name], torch.full((3, 2), at).bfloat16())
            continue
        layer, number = name[0], int(name.split(".")[5])
        expected = values[number // 2][f"{layer}.{EXPERT}.{number % 2}.w"]
        assert torch.equal(found["module"][name], expected)
        assert torch.equal(first[name], expected * 2)
    assert ckptmove.diff(tmp_path / "run.pth", folder).same


# --- made runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("stage", [2, 3])
def test_any_number_of_ranks(tmp_path, stage, ranks):
    folder = zero_runs.made(tmp_path / "run", stage=stage, ranks=ranks)
    found = gathered(folder, tmp_path / "run.pth")
    assert all_equal(dict(found["module"]), zero_runs.whole(0))
    assert all_equal(by_name(found["optimizer"], "exp_avg_sq"), zero_runs.whole(2))
    state = found["optimizer"]["state"]
    assert len({own["step"].data_ptr() for own in state.values()}) == len(state)


def in_optimizers(**new):
    def change(name, tree):
        if "optimizer_state_dict" in tree:
            tree["optimizer_state_dict"].update(new)

    return change


def in_models(**new):
    def change(name, tree):
        if "module" in tree:
            tree.update(new)

    return change


def test_paddings_between_parameters(tmp_path):
    def change(name, tree):
        state = tree.get("optimizer_state_dict")
        if state is not None:
            own = torch.tensor([1.0, 2, 0, 0, 3, 4, 5, 0])
            state["single_partition_of_fp32_groups"] = [own]
            for key in ("exp_avg", "exp_avg_sq"):
                state["base_optimizer_state"]["state"][0][key] = own
            state |= {"group_paddings": [0], "param_alignment_paddings": [[2, 1]]}

    shapes = ({"a": (2,), "b": (3,)},)
    folder = zero_runs.made(tmp_path / "run", ranks=1, shapes=shapes, change=change)
    found = gathered(folder, tmp_path / "run.pth")["module"]
    assert {name: value.tolist() for name, value in found.items()} == {"a": [1, 2], "b": [3, 4, 5]}
    folder = zero_runs.made(
        tmp_path / "other", ranks=1, shapes=shapes, change=in_optimizers(param_alignment_paddings=[[2]])
    )
    with pytest.raises(DamagedArchive):
        gathered(folder, tmp_path / "other.pth")


def test_parameters_without_state_have_none(tmp_path):
    def change(name, tree):
        if "optimizer_state_dict" in tree:
            tree["optimizer_state_dict"]["base_optimizer_state"]["state"].pop(1)

    found = gathered(zero_runs.made(tmp_path / "run", change=change), tmp_path / "run.pth")["optimizer"]
    assert list(found["state"]) == [0, 1]
    assert [group["params"] for group in found["param_groups"]] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "change",
    [
        in_models(param_shapes=[{"a": torch.Size((3, 5)), "b": torch.Size((7,))}]),
        in_models(param_shapes=[{"a": torch.Size((3, 50)), "b": torch.Size((7,))}, {"c": torch.Size((1,))}]),
        in_models(param_shapes=[{"a": "3, 5"}, {"b": torch.Size((7,))}]),
        in_models(param_shapes=[{"a": torch.Size((3, 5))}, {"b": torch.Size((1 << 62,))}]),
    ],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_shapes_that_do_not_fit_are_damage(tmp_path, stage, change):
    with pytest.raises(DamagedArchive):
        gathered(zero_runs.made(tmp_path / "run", stage=stage, change=change), tmp_path / "run.pth")


@pytest.mark.parametrize("fragment", [None, torch.ones(1)])
def test_a_lost_fragment_of_a_frozen_parameter_is_damage(tmp_path, fragment):
    fragments = {} if fragment is None else {"z": fragment}
    change = in_models(frozen_param_shapes={"z": torch.Size((4,))}, frozen_param_fragments=fragments)
    with pytest.raises(DamagedArchive):
        gathered(zero_runs.made(tmp_path / "run", stage=3, change=change), tmp_path / "run.pth")


def test_fragments_of_different_dtypes_are_damage(tmp_path):
    def change(name, tree):
        dtype = torch.float32 if "pp_rank_0" in name else torch.bfloat16
        in_models(
            frozen_param_shapes={"z": torch.Size((4,))}, frozen_param_fragments={"z": torch.ones(2, dtype=dtype)}
        )(name, tree)

    with pytest.raises(DamagedArchive):
        gathered(zero_runs.made(tmp_path / "run", stage=3, change=change), tmp_path / "run.pth")


def of_rank_1(edit):
    """Change the optimizer of rank 1."""

    def change(name, tree):
        if name.startswith("zero_pp_rank_1") and "optimizer_state_dict" in tree:
            edit(tree["optimizer_state_dict"])

    return change


def adafactor(name, tree):
    own = tree.get("optimizer_state_dict")
    if own is not None:
        values = [torch.nn.Parameter(one.clone()) for one in own["single_partition_of_fp32_groups"]]
        optimizer = torch.optim.Adafactor([{"params": [one]} for one in values])
        sum(one.sum() for one in values).backward()
        optimizer.step()
        own["base_optimizer_state"] = optimizer.state_dict()


def set_state(key, value):
    return lambda own: own["base_optimizer_state"]["state"][0].update({key: value(own)})


REFUSED = {
    "not elementwise": adafactor,
    "fewer ranks, without experts": in_optimizers(partition_count=[2, 1]),
    "fewer ranks, of all groups": in_optimizers(partition_count=1),
    "no ranks": in_optimizers(partition_count=[0, 2]),
    "an object": in_optimizers(base_optimizer_state=argparse.Namespace(state={}, param_groups=[])),
    "no shapes": in_models(param_shapes=None),
    "no module": in_models(module=None),
    "other groups": of_rank_1(
        lambda own: (
            own["single_partition_of_fp32_groups"].pop(),
            own["base_optimizer_state"]["state"].pop(1),
            own["base_optimizer_state"]["param_groups"].pop(),
        )
    ),
    "other steps": of_rank_1(set_state("step", lambda own: torch.tensor(7.0))),
    "other numbers": of_rank_1(set_state("count", lambda own: 7)),
    "other keys": of_rank_1(lambda own: own["base_optimizer_state"]["state"][0].pop("exp_avg_sq")),
    "no entry": of_rank_1(lambda own: own["base_optimizer_state"]["state"].pop(0)),
    "other dtypes": of_rank_1(
        set_state("exp_avg", lambda own: own["base_optimizer_state"]["state"][0]["exp_avg"].double())
    ),
    "no partitions": in_optimizers(single_partition_of_fp32_groups=[]),
    "not per element": of_rank_1(set_state("exp_avg", lambda own: torch.ones(3, 2))),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_gathered_is_refused(tmp_path, change):
    folder = zero_runs.made(tmp_path / "run", change=change)
    with pytest.raises(NotGathered):
        gathered(folder, tmp_path / "run.pth")
    assert not (tmp_path / "run.pth").exists()


def test_options_may_be_tensors(tmp_path):
    def change(name, tree):
        if "optimizer_state_dict" in tree:
            for group in tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
                group["lr"] = torch.tensor(0.25)

    found = gathered(zero_runs.made(tmp_path / "run", change=change), tmp_path / "run.pth")["optimizer"]
    assert [float(group["lr"]) for group in found["param_groups"]] == [0.25, 0.25]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_group_may_have_no_parameters(tmp_path, stage):
    folder = zero_runs.made(tmp_path / "run", stage=stage, shapes=(*zero_runs.SHAPES, {}, {"e": (0, 2)}))
    found = gathered(folder, tmp_path / "run.pth")["module"]
    assert found.pop("e").shape == (0, 2)
    assert all_equal(dict(found), zero_runs.whole(0))


def test_keys_of_storages_may_be_anything(tmp_path):
    folder = zero_runs.made(tmp_path / "run", change=in_models(more=torch.arange(5.0)))
    path = folder / "mp_rank_00_model_states.pt"
    found = gathered(folder, tmp_path / "run.pth")
    assert found["more"].tolist() == [0, 1, 2, 3, 4]
    with open_checkpoint(str(folder), Limits(), keep_trees=True) as checkpoint:
        parts = tuple(part for part in checkpoint.parts if not part.name.endswith(path.name))
        with pytest.raises(NotGathered):
            zero._files(replace(checkpoint, parts=parts))


def test_a_folder_with_thousands_of_digits(tmp_path):
    folder = zero_runs.made(tmp_path / "run")
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"global_step{'1' * 5000}/{path.name}")
    assert gathered(tmp_path / "run.zip", tmp_path / "run.pth").keys() == gathered(folder, tmp_path / "like.pth").keys()


def test_several_checkpoints_are_refused(tmp_path):
    for step in (9, 10):
        zero_runs.made(tmp_path / "run" / f"global_step{step}")
    with pytest.raises(NotGathered) as caught:
        gathered(tmp_path / "run", tmp_path / "run.pth")
    assert caught.value.folder == "global_step10"


def of_two_model_ranks(tmp_path, stage=2):
    """A run of two ranks of model parallelism, each with parameters of its own shapes."""
    folder = zero_runs.made(tmp_path / "run", stage=stage)
    for path in zero_runs.made(tmp_path / "other", stage=stage, shapes=OTHER).iterdir():
        shutil.copy(path, folder / path.name.replace("mp_rank_00", "mp_rank_01"))
    return folder


OTHER = ({"a": (3, 2), "b": (7,)}, {"c": (), "d": (4, 2)})


@pytest.mark.parametrize("stage", [2, 3])
def test_each_rank_of_model_parallelism_has_an_entry(tmp_path, stage):
    folder = of_two_model_ranks(tmp_path, stage)
    result = ckptmove.convert(folder, output=tmp_path / "run.pth")
    assert any("mp_rank_01" in note for note in result.notes)
    found = torch.load(tmp_path / "run.pth", weights_only=True)
    assert list(found) == ["mp_rank_00", "mp_rank_01"]
    for own, shapes in zip(found.values(), (zero_runs.SHAPES, OTHER), strict=True):
        assert all_equal(dict(own["module"]), zero_runs.whole(0, shapes))
        assert all_equal(by_name(own["optimizer"], "exp_avg_sq"), zero_runs.whole(2, shapes))
    assert ckptmove.diff(tmp_path / "run.pth", folder).same
    assert "K601" not in {finding.code for finding in ckptmove.inspect(tmp_path / "run.pth").findings}
    ckptmove.convert(folder, output=tmp_path / "model.safetensors", as_root="mp_rank_01.module")
    assert all_equal(load_file(tmp_path / "model.safetensors"), zero_runs.whole(0, OTHER))


def test_a_rank_of_model_parallelism_without_a_model_is_refused(tmp_path):
    folder = of_two_model_ranks(tmp_path)
    torch.save({"note": 1}, folder / "mp_rank_01_model_states.pt")
    with pytest.raises(NotGathered):
        gathered(folder, tmp_path / "run.pth")


def test_bytes_that_no_tensor_reaches_are_no_damage(tmp_path):
    folder = zero_runs.made(tmp_path / "run")
    with zipfile.ZipFile(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt", "a") as archive:
        archive.writestr(archive.namelist()[0].partition("/")[0] + "/data/99", b"more")
    gathered(folder, tmp_path / "run.pth")


def test_files_of_that_name_may_be_anything(tmp_path):
    folder = zero_runs.made(tmp_path / "run")
    torch.save([torch.ones(1)], folder / "mp_rank_00_model_states.pt")
    with pytest.raises(NotGathered):
        gathered(folder, tmp_path / "run.pth")


def test_missing_bytes_are_damage(tmp_path):
    from ckptmove.assembled.gathered_part import GatheredPart, Run
    from ckptmove.formats.rebuild_calls import rebuild_call
    from ckptmove.limits import Limits
    from ckptmove.opening.checkpoint import open_checkpoint

    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with open_checkpoint(str(tmp_path)) as found:
        (record,) = found.inventory.tensors
        runs = [Run.of(found.parts[0], record, 2, 5)]
        part = GatheredPart("x", rebuild_call("k", "float32", (3,)), {"k": lambda: runs}, Limits())
        assert part.span("k") is None
        runs = [Run.of(found.parts[0], record, 2, 3), Run.of(found.parts[0], record, 0, 0)]
        part = GatheredPart("x", rebuild_call("k", "float32", (1,)), {"k": lambda: runs}, Limits())
        assert (part.span("k").nbytes, part.check(), part.extras()) == (4, (), {})
        elements = part.storage("k").source
        assert elements.read(0, 4) == elements.read(0, 4) == b"\0\0\x80?"
        assert elements.read(0, 0) == b""
        part.budget().spend(1)
        part.close()

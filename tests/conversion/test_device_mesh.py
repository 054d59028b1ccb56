"""Files with DTensors: a mesh names the device type of its tensors, and its ranks stay on the CPU."""

from __future__ import annotations

import subprocess
import sys

import catalogue
import pytest
import torch

import ckptmove
from ckptmove.checkpoint.pairing import pair_all

distributed = pytest.importorskip("torch.distributed.tensor")
if not hasattr(distributed, "distribute_tensor") or not torch.distributed.is_available():
    pytest.skip("this torch has its sharded tensors elsewhere", allow_module_level=True)

#: A process group changes the process that it is made in.
MAKE = """
import sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
square = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
model = {key: distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)]) for key in ("a.weight", "b.weight")}
model["c.weight"] = distribute_tensor(torch.ones(2, 3), square, [Shard(0), Replicate()])
parameters = [torch.nn.Parameter(value) for value in model.values()]
optimizer = torch.optim.AdamW(parameters, foreach=False)
for parameter in parameters:
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
whole = {"model": model, "optimizer": optimizer.state_dict(), "device": "cpu"}
torch.save(whole, sys.argv[1] + "/whole.pth")
torch.save({"optimizer": optimizer.state_dict(), "model": model}, sys.argv[1] + "/turned.pth")
torch.save({"model": {"a.weight": torch.ones(3)}, "mesh": mesh}, sys.argv[1] + "/alone.pth")
torch.save(model["a.weight"], sys.argv[1] + "/root.pth")
older = DeviceMesh.__new__(DeviceMesh)
names = {"mesh_dim_names": None, "_flatten_mesh_list": (0,), "_thread_id": None}
older.__dict__.update(device_type="cpu", mesh=torch.tensor([0], dtype=torch.int32), **names)
object.__setattr__(model["a.weight"]._spec, "mesh", older)
torch.save({"model": {"a.weight": model["a.weight"]}}, sys.argv[1] + "/older.pth")
"""
NAMES = ("whole.pth", "turned.pth", "root.pth")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("meshes")
    subprocess.run([sys.executable, "-c", MAKE, str(made)], check=True, capture_output=True, text=True)
    return made


def convert(path, to, tmp_path, **options):
    return ckptmove.convert(path, to=to, output=tmp_path / f"{path.stem}.{to.partition(':')[0]}.pth", **options)


def dtensors(value):
    if isinstance(value, distributed.DTensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from dtensors(item)


def mesh_of(value):
    """Device type and ranks, by the names that they have had."""
    state = value.device_mesh.__dict__
    return state.get("_device_type", state.get("device_type")), state.get("_rank_map", state.get("mesh"))


def meshes(path):
    return {one.where: one.value for one in ckptmove.inspect(path).inventory.mentions if one.kind == "device_mesh"}


def ranks(path):
    return [one for one in ckptmove.inspect(path).inventory.tensors if one.name.endswith(("._rank_map", ".mesh"))]


@pytest.mark.slow
@pytest.mark.unmeasured
def test_each_dtensor_is_one_parameter(folder):
    [pairing] = pair_all(ckptmove.inspect(folder / "whole.pth").inventory)

    assert (pairing.how, pairing.reason) == ("order", "")
    assert [one.name for _, one in pairing.matches] == ["model.a.weight", "model.b.weight", "model.c.weight"]


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("to", ["cuda:0", "cuda:3", "mps", "xpu:1"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_has_the_type_of_the_target_and_its_ranks_on_the_cpu(name, to, weights_only, folder, tmp_path):
    moved = convert(folder / name, to, tmp_path).output
    before = list(dtensors(torch.load(folder / name, weights_only=weights_only)))
    after = list(dtensors(torch.load(moved, weights_only=weights_only, map_location="cpu")))
    assert {one.device for one in ckptmove.inspect(moved).inventory.storages} == {"cpu", to}
    assert len(after) == len(before) > 0
    for old, new in zip(before, after, strict=True):
        kind, held = mesh_of(new)
        assert kind == to.partition(":")[0]
        assert held.device.type == "cpu"
        assert torch.equal(held, mesh_of(old)[1])
        assert torch.equal(new.to_local(), old.to_local())
        same = {**old.device_mesh.__dict__, **new.device_mesh.__dict__}
        assert same.keys() == old.device_mesh.__dict__.keys()
    assert {one.device for one in ranks(moved)} == {"cpu"}
    assert ckptmove.convert(moved, to=to, dry_run=True).plan.is_empty
    assert ckptmove.inspect(moved, expect=to).plan.is_empty


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_it_is_the_same(name, folder, tmp_path):
    moved = convert(folder / name, "cuda:0", tmp_path).output
    back = ckptmove.convert(moved, to="cpu", output=tmp_path / "back.pth").output
    assert ckptmove.diff(folder / name, moved).changed
    first, second = (ckptmove.inspect(path).inventory for path in (folder / name, back))
    assert second.tensors == tuple(
        one._replace(device_site=there.device_site) for one, there in zip(first.tensors, second.tensors, strict=True)
    )
    assert [(one.where, one.value) for one in second.mentions] == [(one.where, one.value) for one in first.mentions]
    for old, new in zip(dtensors(torch.load(folder / name)), dtensors(torch.load(back)), strict=True):
        assert old.device_mesh == new.device_mesh
        assert torch.equal(old.to_local(), new.to_local())


def test_its_ranks_are_of_no_model_and_of_no_state(folder):
    for name in ("whole.pth", "turned.pth"):
        inventory = ckptmove.inspect(folder / name).inventory
        assert {one.role for one in ranks(folder / name)} == {"other"}
        held = {record.name for one in inventory.optimizers for entry in one.state for _, record in entry.tensors}
        assert held.isdisjoint(one.name for one in ranks(folder / name))


def test_verify_agrees_with_convert(folder, tmp_path):
    moved = convert(folder / "whole.pth", "cuda:0", tmp_path).output
    for path, status in ((moved, "passed"), (folder / "whole.pth", "failed")):
        [placement] = [one for one in catalogue.verdict(str(path), to="cuda:0").checks if one.name == "placement"]
        assert placement.status == status
    assert not [one for one in ckptmove.inspect(moved).findings if one.code.startswith("D")]


def test_a_mesh_of_another_type_than_its_tensors_is_found_and_mended(folder, tmp_path):
    """As earlier conversions, and scripts that move the tensors alone, have left it."""
    sites = sorted(meshes(folder / "whole.pth"))
    spoiled = convert(folder / "whole.pth", "cuda:0", tmp_path, keep=sites).output
    assert set(meshes(spoiled).values()) == {"cpu"}
    [finding] = [one for one in ckptmove.inspect(spoiled).findings if one.code == "D104"]
    assert sorted(finding.where) == sites
    [placement] = [one for one in catalogue.verdict(spoiled, to="cuda:0").checks if one.name == "placement"]
    assert placement.status == "failed"
    plan = ckptmove.convert(spoiled, to="cuda:0", output=tmp_path / "mended.pth").plan
    assert {(one.where, one.source, one.target, one.reason) for one in plan.flags} == {
        (site, "cpu", "cuda", "mesh-type") for site in sites
    }
    assert not plan.edits


def test_a_mesh_stays_with_a_tensor_that_is_kept(folder, tmp_path):
    plan = convert(folder / "root.pth", "cuda:0", tmp_path, keep=["*"]).plan
    assert plan.is_empty


def test_a_mesh_beside_plain_tensors_follows_them(folder, tmp_path):
    [site] = meshes(folder / "alone.pth")
    moved = convert(folder / "alone.pth", "cuda:1", tmp_path).output
    assert meshes(moved) == {site: "cuda"}
    assert {one.device for one in ranks(moved)} == {"cpu"}
    assert ckptmove.convert(moved, to="cuda:1", dry_run=True).plan.is_empty


def test_a_mesh_has_other_attributes_before_torch_2_9(folder, tmp_path):
    """``device_type`` and ``mesh``, in place of ``_device_type`` and ``_rank_map``."""
    site = "model.a.weight._spec.mesh.device_type"
    assert meshes(folder / "older.pth") == {site: "cpu"}
    plan = convert(folder / "older.pth", "cuda:0", tmp_path).plan
    assert (site, "cpu", "cuda", "mesh-type") in {(one.where, one.source, one.target, one.reason) for one in plan.flags}
    assert ("model.a.weight._spec.mesh.mesh", "device-mesh") in {(one.name, one.reason) for one in plan.kept}

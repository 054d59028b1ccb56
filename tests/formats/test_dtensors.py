"""DTensors in a tree: the shard of each rank by its placements, and objects that are not DTensors."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.formats.dtensors import local_tensor, read_shard
from ckptmove.formats.local_shards import shard_call
from ckptmove.pickles.rebuild_arguments import NotATensor
from ckptmove.pickles.tree import Call, Dict, Global, List, Tuple

placement_types = pytest.importorskip("torch.distributed.tensor.placement_types")
Replicate, Shard = placement_types.Replicate, placement_types.Shard
_StridedShard = getattr(placement_types, "_StridedShard", None)
PLACEMENTS = "torch.distributed.tensor.placement_types."
MESHES = "torch.distributed.device_mesh.DeviceMesh"


def items(*values):
    return Tuple(values, (-1,) * len(values))


def pairs(**values):
    flat = [item for pair in values.items() for item in pair]
    return Dict(flat, [-1] * len(flat))


def made(name, **state):
    module, _, kind = name.rpartition(".")
    call = Call(Global(module, kind), items(), -1)
    call.state = pairs(**state)
    return call


def mesh_of(sizes, coordinate, **others):
    axes = (made("torch.distributed._mesh_layout._FlatLayout", shape=items(size)) for size in sizes)
    layout = made("torch.distributed._mesh_layout._MeshLayout", axes=items(*axes))
    ranks = items(*range(torch.Size(sizes).numel()))
    known = {"_layout": layout, "_coordinate_on_dim": items(*coordinate), "_flatten_rank_map": ranks, "_rank": 0}
    return made(MESHES, **{**known, **others})


def placed(placement):
    state = {} if isinstance(placement, Replicate) else {"dim": placement.dim}
    if _StridedShard is not None and isinstance(placement, _StridedShard):
        state["split_factor"] = placement.split_factor
    return made(PLACEMENTS + type(placement).__name__, **state)


def node(shape, mesh, placements, **others):
    spec = made("spec.Spec", mesh=mesh, placements=items(*placements), **others)
    wrapper = items(None, None, items(*shape), None, 0, None, None, False)
    state = items(None, pairs(_local_tensor=Call(Global("torch", "x"), items(), -1), _spec=spec))
    kind = Global("torch.distributed.tensor", "DTensor")
    arguments = items(Global("torch._utils", "_rebuild_wrapper_subclass"), kind, wrapper, state)
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), arguments, -1)


def box(start, sizes):
    return tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))


@st.composite
def meshes(draw):
    """A shape, a mesh, and a placement for each of its dimensions."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    kinds = [Replicate(), *(Shard(axis) for axis in range(len(shape)))]
    if _StridedShard is not None:
        kinds += [_StridedShard(axis, split_factor=factor) for axis in range(len(shape)) for factor in (2, 3)]
    return shape, sizes, [draw(st.sampled_from(kinds)) for _ in sizes]


@given(meshes())
def test_each_rank_has_what_torch_splits_for_it(drawn) -> None:
    shape, sizes, placements = drawn
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for coordinate in product(*map(range, sizes)):
        local = whole
        for number, index, placement in zip(sizes, coordinate, placements, strict=True):
            if not isinstance(placement, Replicate):
                local = placement._split_tensor(local, number, with_padding=False)[0][index]
        shard = read_shard(node(shape, mesh_of(sizes, coordinate), map(placed, placements)))
        assert (shard.shape, shard.mesh, shard.coordinate) == (tuple(shape), tuple(sizes), coordinate)
        assert shard.local_shape == tuple(local.shape)
        assembled = torch.full_like(local, -1)
        for chunk, offsets in shard.boxes():
            assembled[box(offsets, chunk.sizes)] = whole[box(chunk.offsets, chunk.sizes)]
        assert torch.equal(assembled, local)


def test_the_order_of_two_splits_of_one_axis_may_be_another() -> None:
    entry = Call(Global("spec", "ShardOrderEntry"), items(0, items(1, 0)), -1)
    shard = read_shard(node((8,), mesh_of((2, 2), (1, 0)), [placed(Shard(0))] * 2, shard_order=items(entry)))
    assert shard.runs == (((2, 4),),)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ({"_layout": made("m._MeshLayout", shape=items(2, items(2, 2)))}, (2, 4)),
        ({"mesh": Call(Global("torch._utils", "f"), items(None, 0, items(2, 4), items(4, 1)), -1)}, (2, 4)),
    ],
)
def test_an_older_mesh_has_its_sizes_elsewhere(layout, sizes) -> None:
    others = {"_coordinate_on_dim": List([1, 2], [-1, -1]), "_flatten_rank_map": items(*range(8)), **layout}
    shard = read_shard(node((9,), made(MESHES, **others), [placed(Shard(0)), placed(Replicate())]))
    assert (shard.mesh, shard.coordinate, shard.rank) == (sizes, (1, 2), 6)
    del others["_flatten_rank_map"]
    others["_flatten_mesh_list"] = items(*range(10, 18))
    assert read_shard(node((9,), made(MESHES, **others), [placed(Replicate())] * 2)).rank == 16


def test_a_call_is_that_of_the_tensor_in_a_parameter() -> None:
    tensor = node((2,), mesh_of((1,), (0,)), [placed(Replicate())])
    parameter = Call(Global("torch._utils", "_rebuild_parameter"), items(tensor, True, None), -1)
    assert shard_call(tensor) is shard_call(parameter) is tensor
    assert local_tensor(tensor).name == "torch.x"
    others = [node((2,), None, []) for _ in range(3)]
    for place, other in enumerate(others[:2]):
        changed = [*other.args.items]
        changed[place] = Global("my", "name")
        other.args = items(*changed)
    others[2].args = items(*others[2].args.items[:3])
    assert [shard_call(value) for value in (*others, items(), None)] == [None] * 5


ONE = mesh_of((1,), (0,))


@pytest.mark.parametrize(
    "wrong",
    [
        node((2,), mesh_of((2,), (2,)), [placed(Shard(0))]),
        node((2,), mesh_of((2,), (0, 0)), [placed(Shard(0))]),
        node((2,), ONE, [placed(Shard(0))] * 2),
        node((2,), ONE, [placed(Shard(1))]),
        node((2,), ONE, [made(PLACEMENTS + "Partial", reduce_op="sum")]),
        node((2,), ONE, [made(PLACEMENTS + "_StridedShard", dim=0, split_factor=0)]),
        node((10_000,), ONE, [made(PLACEMENTS + "_StridedShard", dim=0, split_factor=5000)]),
        node(
            (900, 900),
            mesh_of((2, 2), (0, 0)),
            [made(PLACEMENTS + "_StridedShard", dim=axis, split_factor=300) for axis in range(2)],
        ),
        node(
            (2**20,),
            mesh_of((2, 2), (0, 0)),
            [made(PLACEMENTS + "_StridedShard", dim=0, split_factor=factor) for factor in (512, 64)],
        ),
        node((2,), ONE, ["Shard"]),
        node((2,), "a mesh", [placed(Shard(0))]),
        node((2,), mesh_of((1,), (0,), mesh=None), [placed(Shard(0))]),
        node((2,), mesh_of((1,), (0,), _rank="0"), [placed(Shard(0))]),
        node((2,), ONE, [placed(Shard(0))], shard_order=items(Call(Global("s", "E"), items(0, items(3)), -1))),
        node((8,), ONE, [placed(Shard(0))], shard_order=items(Call(Global("s", "E"), items(0, items(0, 0)), -1))),
    ],
)  # fmt: skip
def test_what_torch_does_not_write_so(wrong) -> None:
    with pytest.raises(NotATensor):
        read_shard(wrong)

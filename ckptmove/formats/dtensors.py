"""Read the part of a DTensor that one rank has saved: its local tensor, the device mesh, and the placements.

From torch/distributed/tensor/_dtensor_spec.py, torch/distributed/tensor/placement_types.py and
torch/distributed/device_mesh.py. Up to torch 2.8, a mesh stores its ranks as a tensor.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from ckptmove.formats.local_shards import LocalShard, Placement, attributes, slots
from ckptmove.pickles.rebuild_arguments import NotATensor, arguments, count, items, sizes
from ckptmove.pickles.tree import Call, Sequence, Tuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.formats.local_shards import Run
    from ckptmove.pickles.tree import Value


#: Modules of the placements; the older one up to torch 2.4.
_PLACEMENTS: Final = ("torch.distributed.tensor.placement_types.", "torch.distributed._tensor.placement_types.")
#: Limit for the runs of indices that a rank holds: one on each axis, or one for each part of a strided shard.
_MOST_RUNS: Final = 4096


def read_shard(call: Call) -> LocalShard:
    """Read the part of a DTensor that a file holds, given the result of :func:`shard_call`."""
    _, _, wrapper, state = arguments(call).items
    spec = attributes(slots(state).get("_spec"))
    mesh = attributes(spec.get("mesh"))
    shape, mesh_sizes = sizes(items(wrapper)[2]), _mesh_sizes(mesh)
    coordinate = sizes(mesh.get("_coordinate_on_dim"))
    placements = [_placement(one, len(shape)) for one in items(spec.get("placements"))]
    if not len(placements) == len(coordinate) == len(mesh_sizes) or any(map(int.__ge__, coordinate, mesh_sizes)):
        raise NotATensor
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for at in _order(spec.get("shard_order"), len(placements)):
        one = placements[at]
        if one.axis is not None:
            runs[one.axis] = _split(runs[one.axis], mesh_sizes[at], coordinate[at], one.factor)
        if prod(map(len, runs)) > _MOST_RUNS:
            raise NotATensor
    ranks = tuple(map(count, items(mesh.get("_flatten_rank_map", mesh.get("_flatten_mesh_list")))))
    rank = mesh.get("_rank")
    if rank is None:  # up to torch 2.8, the ranks are those of this mesh
        rank = ranks[sum(place * prod(mesh_sizes[at + 1 :]) for at, place in enumerate(coordinate))]
    return LocalShard(shape, mesh_sizes, coordinate, count(rank), ranks, tuple(placements), tuple(map(tuple, runs)))


def local_tensor(call: Call) -> Value:
    """The node of the local tensor of a DTensor, given the result of :func:`shard_call`."""
    return slots(call.arguments[3]).get("_local_tensor")


def _mesh_sizes(mesh: Mapping[str, Value]) -> tuple[int, ...]:
    """Size of a mesh along each dimension; a dimension may be several ones of the larger mesh, flattened."""
    if "mesh" in mesh:
        tensor = mesh["mesh"]
        return sizes(arguments(tensor).items[2] if type(tensor) is Call else None)
    layout = attributes(mesh.get("_layout"))
    if "axes" not in layout:  # torch 2.9 to 2.12
        return tuple(
            prod(sizes(one)) if isinstance(one, Sequence) else count(one) for one in items(layout.get("shape"))
        )
    return tuple(prod(sizes(attributes(one).get("shape"))) for one in items(layout["axes"]))


def _placement(value: Value, axes: int) -> Placement:
    """The placement of an object; ``axes`` of the tensor."""
    name = value.name.rpartition(".")[2] if type(value) is Call and value.name.startswith(_PLACEMENTS) else ""
    if name == "Replicate":
        return Placement(None)
    state = attributes(value) if name in {"Shard", "_StridedShard"} else {}
    axis, factor = count(state.get("dim")), count(state.get("split_factor", 1))
    if axis >= axes or not factor:
        raise NotATensor
    return Placement(axis, factor)


def _order(value: Value, dimensions: int) -> list[int]:
    """Dimensions of the mesh in the order in which they split the tensor: ``shard_order`` changes it for one axis."""
    found = [at for entry in items(value or Tuple((), ())) if type(entry) is Call for at in sizes(entry.arguments[1])]
    rest = [at for at in range(dimensions) if at not in found]
    if any(at >= dimensions for at in found) or len(set(found)) < len(found):
        raise NotATensor
    return [*found, *rest]


def _split(runs: list[Run], number: int, index: int, factor: int) -> list[Run]:
    """The runs that one rank has, where ``torch.chunk`` splits each of ``factor`` parts over a number of ranks."""
    total = sum(end - first for first, end in runs)
    found: list[Run] = []
    part = -(-total // factor)
    if total and factor * len(runs) > _MOST_RUNS:  # each part is looked for in each run
        raise NotATensor
    for start in range(0, total, part) if total else ():
        own = -(-min(part, total - start) // number)
        low = start + min(own * index, part)
        for run in _taken(runs, low, min(low + own, start + part, total)):
            if found and found[-1][1] == run[0]:
                found[-1] = found[-1][0], run[1]
            else:
                found.append(run)
    return found


def _taken(runs: list[Run], low: int, high: int) -> Iterator[Run]:
    """The part of some runs between two positions in their indices, one after the other."""
    before = 0
    for first, end in runs:
        start, stop = max(low - before, 0) + first, min(high - before + first, end)
        if start < stop:
            yield start, stop
        before += end - first

"""Name the optimizer state of a file as ``get_state_dict`` does, if ``optimizer.state_dict()`` has numbered it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.pairing import pair_all

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import OptimizerRecord


class Named(NamedTuple):
    """The names of a part's optimizer state in the state of a case."""

    optimizers: list[OptimizerRecord]  # the optimizers, with parameters by name
    names: dict[str, str]  # names of values in the state, by their names in the part
    params: dict[str, list[str]]  # parameters of each group, by the name of their list in the part


def named(part: OpenPart, asked: Collection[str]) -> Named:
    """Name the state of the optimizers whose parameters are known; others keep their numbers.

    Args:
        asked: names in the state of any rank, joined by dots.
    """
    stems = {end for name in asked for end in ends_of(name.rpartition(".")[0])}
    found = Named([], {}, {})
    for optimizer, pairing in zip(part.inventory.optimizers, pair_all(part.inventory), strict=True):
        stem = f"{part.own_name(optimizer.where)}.state.".lstrip(".")
        known = [(key, record) for key, record in pairing.matches if record is not None and pairing.is_certain]
        ends = {
            key: [one for one in ends_of(part.own_name(tensor.name)) if stem + one in stems] for key, tensor in known
        }
        own = {key: fitting[0] for key, fitting in ends.items() if fitting}
        for entry in optimizer.state if own else ():
            for name, _ in (*entry.tensors, *entry.scalars):
                found.names[f"{stem}{entry.key}.{name}"] = f"{stem}{own.get(entry.key, entry.key)}.{name}"
        groups = tuple(
            group._replace(params=tuple([own.get(key, key) for key in group.params])) for group in optimizer.groups
        )
        found.optimizers.append(optimizer._replace(groups=groups))
        if own:
            found.params.update((f"{part.own_name(group.where)}.params", [*group.params]) for group in groups)
    return found


def ends_of(name: str) -> Iterator[str]:
    """A name, and what follows each of its dots."""
    yield name
    for at, letter in enumerate(name):
        if letter == ".":
            yield name[at + 1 :]

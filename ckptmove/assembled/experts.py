"""Number the experts of DeepSpeed's MoE layer. Each rank of expert parallelism holds some of them.

A rank numbers its own experts from 0. From deepspeed: ``_save_moe_checkpoint`` in runtime/engine.py,
``_create_expert_and_data_parallel`` in utils/groups.py.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: The experts of a layer, the number of one, and the rest of the name.
_NAME: Final = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,9})(\..+)")


class Experts:
    """The number of experts of each layer."""

    def __init__(self, names: Iterable[str]) -> None:
        """Count the experts in the files of all, also those whose parameters are frozen and in no partition."""
        self._counts: dict[str, int] = {}
        for layer, number, _ in map(_parsed, names):
            if layer:
                self._counts[layer] = max(self._counts.get(layer, 0), number + 1)

    def everywhere(self, names: Sequence[str], shares: int) -> list[tuple[str, int, str]]:
        """Name the parameters of all ranks in the order of a model that has all experts.

        Args:
            names: names of parameters of experts, with the numbers of one rank, in the order of the model.
            shares: number of ranks of expert parallelism.

        Returns:
            For each parameter its name, its share, and its name there.
        """
        found = []
        for layer, own in groupby(map(_parsed, names), lambda name: name[0]):
            count, rest = divmod(self._counts.get(layer, 0), shares)
            if not count or rest:
                raise ValueError
            local = list(own)
            for share in range(shares):
                first = share * count
                found += [(f"{layer}{first + one}{rest}", share, f"{layer}{one}{rest}") for _, one, rest in local]
        return found


def shares_of(ranks: int, count: int, *, data_first: bool) -> list[range]:
    """The data-parallel ranks with the same experts, for each rank of expert parallelism.

    ``count`` of the ranks have the same experts; it is a divisor. ``data_first`` is the option
    ``use_data_before_expert_parallelism`` of DeepSpeed.
    """
    shares = ranks // count
    if data_first:
        return [range(share * count, (share + 1) * count) for share in range(shares)]
    return [range(share, ranks, shares) for share in range(shares)]


def _parsed(name: str) -> tuple[str, int, str]:
    """The prefix of all experts of a layer, empty for other names; the number of one on its rank; the rest."""
    match = _NAME.fullmatch(name)
    return ("", 0, name) if match is None else (match[1], int(match[2]), match[3])

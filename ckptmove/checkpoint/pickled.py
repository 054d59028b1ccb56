"""Find the tensors of pickled modules and optimizers, which a program uses on the devices that the file names."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.roles import is_argument

if TYPE_CHECKING:
    from ckptmove.model import Inventory

#: Layouts of scripts. Other trainers move a pickled module, or take its state_dict.
_OF_SCRIPTS: Final = frozenset({"module", "plain", "other"})


class PickledObjects:
    """The pickled modules and optimizers of a checkpoint that a script uses as they are."""

    def __init__(self, inventory: Inventory) -> None:
        paths = inventory.objects if inventory.layout in _OF_SCRIPTS else ()
        self._starts = sorted(f"{path}." if path else "" for path in paths)
        around = [(record.role, self.around(record.name)) for record in inventory.tensors]
        if ("model", None) in around:
            # Next to the state_dict of a model, a loss and an argument of the model's constructor are built anew.
            losses = {start for role, start in around if role == "criterion"}
            self._starts = [start for start in self._starts if start not in losses and not is_argument(start)]

    def around(self, name: str) -> str | None:
        """Return the start of the names in the object that a tensor is part of; None for other tensors.

        No start is the beginning of another one, so at most the last one before a name is its beginning.
        """
        index = bisect_right(self._starts, name)
        return self._starts[index - 1] if index and name.startswith(self._starts[index - 1]) else None

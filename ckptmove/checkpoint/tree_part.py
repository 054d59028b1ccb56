"""The base class of parts whose trees are in no file yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.checkpoint.inventory.budget import Budget
from ckptmove.checkpoint.inventory.build import tree_inventory
from ckptmove.checkpoint.parts import OpenPart
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.write import write_pickle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.io.contracts import Progress
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, Span
    from ckptmove.pickles.tree import Value


class NewTreePart(OpenPart):
    """A new tree; the bytes of its storages are read from the files that the tree was made of."""

    def __init__(self, name: str, path: str, root: Value, limits: Limits) -> None:
        """Hold a new tree. ``name`` is empty for the whole checkpoint; ``path`` is the same as users see it."""
        self.name, self.path, self.rows, self.base = name, path, (), 0
        # Read back, so that each value has a place of its own: those of the tree are in several pickles.
        data = write_pickle(root)
        self._machine = interpret(data, limits)
        self._limits = limits
        self.pickle_bytes = len(data)
        self.inventory = tree_inventory(self._machine.root, path, "torch-zip", limits, len(data))

    def close(self) -> None:
        """Do nothing: the files belong to the checkpoint."""

    def span(self, key: str) -> Span | None:
        stored = self.storage(key)
        return None if stored is None else stored.span

    def tree(self) -> Value:
        return self._machine.root

    def check(self, progress: Progress | None = None, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        """Return no facts: the files are checked."""
        del progress, jobs
        return ()

    def budget(self) -> Budget:
        return Budget(self._limits, self.pickle_bytes)

    def extras(self) -> Mapping[str, bytes]:
        """Return nothing: the new file has no content outside its tree."""
        return {}

"""What all results of the API have in common: their truth, and a table for notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Shown(ABC):
    """Base class of results: true if the answer is yes, and shown as a small table in a notebook."""

    __slots__ = ()

    @property
    @abstractmethod
    def ok(self) -> bool:
        """Whether the command would exit with 0."""

    def __bool__(self) -> bool:
        return self.ok

    def _repr_html_(self) -> str:
        from ckptmove.api.tables import html_table

        header, rows = self.table()
        return html_table(str(self), header, rows)

    @abstractmethod
    def table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        """The header and the rows."""

"""Groups of options in ``--help``, and the declaration of an option in its group."""

from __future__ import annotations

from enum import Enum
from typing import Any

import typer


class Group(str, Enum):
    """Headings of ``--help``, in their order."""

    QUESTION = "Question"
    TARGET = "Target"
    CONTENTS = "Keys, parts and dtypes"
    CODE = "Your code"
    OUTPUT = "Output"
    SCALE = "Scale"
    REPORTS = "Reports"
    HELP = "Help"

    __str__ = str.__str__

    def flag(self, names: str, help: str, **more: Any) -> Any:  # noqa: A002  # Typer's name
        """An option without a value; ``names`` are its spellings, separated by spaces."""
        return typer.Option(*names.split(), help=help, rich_help_panel=self, **more)

    def option(self, metavar: str, help: str, *names: str, **more: Any) -> Any:  # noqa: A002  # Typer's name
        """An option with a value. Its help says what happens without one, unless ``show_default`` does."""
        return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=self, **{"show_default": False, **more})

"""Reports as one HTML file, which loads nothing and runs from a disk."""

from __future__ import annotations

from typing import Final

#: First bytes of every page.
HEAD: Final = b"<!doctype html>\n<!-- ckptmove report -->\n"

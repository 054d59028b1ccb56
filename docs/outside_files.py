"""Hook of mkdocs: put the files that the pages link to outside of docs/ into the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_LINK = re.compile(r"\]\(\.\./([^)]+)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add each file that a page links to with ``../``."""
    pages = Path(config.docs_dir)
    for path in sorted({path for page in pages.glob("*.md") for path in _LINK.findall(page.read_text("utf-8"))}):
        files.append(File.generated(config, path, abs_src_path=str(pages.parent / path)))


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let the links point to those files in the site."""
    return _LINK.sub(r"](\1)", markdown)

"""Human-readable report of ``rules``: the catalogue of findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.cli.render.inspection import STYLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.cli.render.text import Page
    from ckptmove.findings.catalogue import Entry


def catalogue_lines(page: Page, entries: Sequence[Entry]) -> Iterator[str]:
    """One paragraph for each code, wrapped; a table would cut the sentences."""
    names = max(len(entry.name) for entry in entries)
    for entry in entries:
        label = f"{entry.code}  {entry.name:<{names}}  {entry.severity.value:<7}  "
        # All others are found by a plain inspect, or their text names the option that they need.
        finder = "" if entry.found_by == "inspect" else f" (only {entry.found_by} finds it)"
        first, *rest = page.wrap(f"{label}{entry.when}{finder}", len(label))
        yield page.paint(entry.code, STYLES[entry.severity]) + first[len(entry.code) :]
        yield from rest


def entry_lines(page: Page, entry: Entry) -> Iterator[str]:
    """Everything about one code."""
    yield page.paint(f"{entry.code} {entry.name} ({entry.severity.value})", STYLES[entry.severity])
    for label, text in (("when", entry.when), ("why", entry.why), ("fix", entry.mend)):
        yield from page.wrap(f"{label:<4}  {text}", 6)
    if entry.found_by != "inspect":
        yield f"found by ckptmove {entry.found_by}"


def brief_line(entry: Entry) -> str:
    """One code in one line."""
    return f"{entry.code} {entry.name}"

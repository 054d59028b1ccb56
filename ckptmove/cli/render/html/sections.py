"""Parts that the sections of several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.html.markup import Markup, element, joined
from ckptmove.cli.render.html.page import data_block
from ckptmove.cli.render.text import clean, sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptmove.api.document import Json

#: Rows of a table that the scripts do not draw.
_MOST: Final = 1000
#: Fewer checkpoints need no overview.
_SEVERAL: Final = 2


def part(title: str, *content: str) -> Markup:
    """Return content below a heading."""
    return element("div", element("h3", title), *content, class_="part")


def facts(values: Mapping[str, str], style: str = "facts") -> Markup:
    """Return pairs of a key and its value; those without a value are left out."""
    pairs = (element("div", element("dt", key), element("dd", value)) for key, value in values.items() if value)
    return element("dl", *pairs, class_=style) if any(values.values()) else Markup()


def closed_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Return a table that opens with a click, with the first rows if there are many; nothing without rows."""
    if not rows:
        return Markup()
    head = element("thead", element("tr", *(element("th", cell, scope="col") for cell in heads)))
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows[:_MOST]))
    table = element("div", element("table", head, body, class_="plain"), class_="wide")
    rest = element("p", f"and {len(rows) - _MOST:,} more", class_="note") if len(rows) > _MOST else ""
    return element("details", element("summary", title), table, rest)


def searchable_table(name: str, data: Json) -> Markup:
    """Return a place for a table that the scripts draw, with its data; ``name`` is unique in the page."""
    without = element("noscript", element("p", "This table needs scripts, which are not allowed here.", class_="none"))
    return joined([element("div", class_="table script", data_source=name), without, data_block(name, data)])


def notes(texts: Iterable[str]) -> Markup:
    """Return sentences, one in a line."""
    return joined(element("p", sentence(one), class_="note") for one in texts)


def preformatted(lines: Iterable[str]) -> Markup:
    """Return lines of text; nothing without lines."""
    text = joined(joined([sentence(line), Markup("\n")]) for line in lines)
    return element("pre", text) if text else text


def failures(errors: Sequence[Json]) -> Markup:
    """Return the errors of a command, with their hints."""
    return joined(
        element(
            "section",
            element("h2", element("bdi", clean(error["path"] or error["kind"]))),
            element("p", element("span", "error", class_="badge"), f" {sentence(error['message'])}"),
            element("p", sentence(error["hint"]), class_="hint") if error["hint"] else "",
            class_="failure",
            id=f"error-{number}",
        )
        for number, error in enumerate(errors, start=1)
    )


def overview(entries: Sequence[tuple[str, str, str]], errors: Sequence[Json]) -> Markup:
    """Return a list of the checkpoints without an answer, then of all sections; nothing for a single one.

    An entry is a path, an outcome, and ``passed``, ``failed``, ``warning`` or ``unproven``.
    """
    links = [
        (f"error-{number}", error["path"], error["message"], "failed")
        for number, error in enumerate(errors, start=1)
        if error["path"]
    ]
    links += ((f"section-{number}", *entry) for number, entry in enumerate(entries, start=1))
    if len(links) < _SEVERAL:
        return Markup()
    rows = (
        element(
            "li",
            element("a", element("bdi", clean(path)), href=f"#{name}"),
            element("span", sentence(outcome), class_=f"outcome {status}"),
        )
        for name, path, outcome, status in links
    )
    return element("nav", element("h2", "Overview"), element("ol", *rows), class_="overview")


def lines_section(path: str, outcome: str, lines: Iterable[str], status: str, name: str) -> Markup:
    """Return the section of an answer that is text; its status is ``passed`` or ``failed``."""
    return element(
        "section",
        element("h2", element("bdi", clean(path))),
        element("p", outcome, class_=f"verdict {status}"),
        preformatted(lines),
        id=name,
    )

"""Findings, with their places and a button that copies the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.html.markup import Markup, element, joined
from ckptmove.cli.render.html.sections import part
from ckptmove.cli.render.inspection import counted
from ckptmove.cli.render.text import clean, sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api.document import Json

_SEVERITIES: Final = ("error", "warning", "info")
#: Places that are shown at once, and after a click.
_FIRST: Final = 3
_MOST: Final = 200


def finding_part(findings: Sequence[Json], rows: frozenset[str] = frozenset()) -> Markup:
    """Return the findings below a heading, the most severe first; the codes in ``rows`` filter the table."""
    if not findings:
        return part("Findings", element("p", "No findings.", class_="none"))
    title = f"Findings: {counted(one['severity'] for one in findings)}"
    found = sorted(findings, key=lambda one: _SEVERITIES.index(one["severity"]))
    articles = (_finding(one, has_rows=one["code"] in rows) for one in found)
    return part(title, element("div", *articles, class_="findings"))


def copyable(text: str) -> Markup:
    """Return a text with a button that copies it."""
    button = element("button", "Copy", type="button", class_="copy")
    words = (element("span", word) for word in text.split(" "))
    return element("div", element("code", Markup(" ".join(words))), button, class_="fix")


def _finding(finding: Json, *, has_rows: bool) -> Markup:
    severity, code, where, fix = finding["severity"], finding["code"], finding["where"], sentence(finding["fix"])
    show = element("button", "Show in the table", type="button", class_="link script", data_filter=f"findings:{code}")
    title = (element("span", severity, class_="badge"), f" {code} ", element("span", finding["name"]))
    return element(
        "article",
        element("h4", *title),
        element("p", sentence(finding["message"])),
        _places(where),
        show if has_rows else "",
        copyable(fix) if fix else "",
        class_=f"finding {severity}",
    )


def _places(where: Sequence[str]) -> Markup:
    shown, rest = where[:_FIRST], where[_FIRST:_MOST]
    more = [element("summary", f"{len(where) - len(shown):,} more"), _names(rest)]
    if len(where) > _MOST:
        more.append(element("p", f"and {len(where) - _MOST:,} others"))
    return joined([_names(shown), element("details", *more) if rest else ""])


def _names(where: Sequence[str]) -> Markup:
    if not where:
        return Markup()
    return element("ul", *(element("li", element("code", clean(name) or "(root)")) for name in where), class_="where")

"""The number of tensors by role and device, now and after a conversion, as tables with bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.cli.render.html.findings import copyable
from ckptmove.cli.render.html.markup import Markup, element, joined
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.api.document import Json
    from ckptmove.cli.render.html.devices import Palette
    from ckptmove.cli.render.planned import ConversionEffect

#: Number of tensors by role and device.
_Counts: TypeAlias = "Mapping[tuple[str, str], int]"
#: More devices than this fill the width of the page.
_MANY: Final = 4
#: Width of the longest bar, and of the shortest: one tensor of many is still seen.
_LONGEST: Final = 100
_SHORTEST: Final = 2


def matrices(devices: Sequence[Json], conversion: ConversionEffect | None, palette: Palette) -> Markup:
    """Return a table of the tensors by role and device, and a second one if a conversion changes it."""
    now = {(share["role"], share["device"]): share["tensors"] for share in devices}
    if not now:
        return element("p", "No tensors.", class_="none")
    after = now if conversion is None else conversion.counts
    columns = palette.ordered(device for counts in (now, after) for _, device in counts)
    shown = [_matrix(element("caption", "Now"), now, now, columns, palette)]
    note = Markup()
    if conversion is not None and after == now:
        note = element("p", element("code", conversion.command), " would move no tensor.", class_="none")
    elif conversion is not None:
        caption = element("caption", "After ", copyable(conversion.command))
        shown.append(_matrix(caption, after, now, columns, palette))
    tables = (element("div", table, class_="wide") for table in shown)
    style = "matrices many" if len(columns) > _MANY else "matrices"
    return joined([element("div", *tables, class_=style), note])


def _matrix(caption: Markup, counts: _Counts, now: _Counts, devices: Sequence[str], palette: Palette) -> Markup:
    longest = max(*counts.values(), *now.values())
    rows = []
    for role in dict.fromkeys(role for role, _ in now):
        cells = [
            _cell(role, device, counts.get((role, device), 0), now.get((role, device), 0), longest, palette)
            for device in devices
        ]
        rows.append(element("tr", element("th", role, scope="row"), *cells))
    heads = (element("th", palette.label(device), scope="col") for device in devices)
    head = element("thead", element("tr", element("td"), *heads))
    return element("table", caption, head, element("tbody", *rows), class_="matrix")


def _cell(role: str, device: str, count: int, now: int, longest: int, palette: Palette) -> Markup:
    """The cell of a role and a device: its count, the difference from now, and a bar."""
    if not count and not now:
        return element("td", "·", class_="empty")
    number = element(
        "button",
        f"{count:,}",
        type="button",
        class_="count",
        data_filter=f"role:{role} device:{device}",
        title=f"{amount(count, 'tensor')} of the {role} on {device}",
        disabled=count != now or not count,
    )
    width = max(round(_LONGEST * count / longest, 1), _SHORTEST) if count else 0
    rect = element("rect", width=width, height=1)
    bar = element("svg", rect, viewBox=f"0 0 {_LONGEST} 1", preserveAspectRatio="none", aria_hidden="true",
                  class_=f"bar {palette.slot(device)}")  # fmt: skip
    difference = element("ins" if count > now else "del", f"{count - now:+,}") if count != now else ""
    return element("td", number, difference, bar)

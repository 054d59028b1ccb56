"""The section of the answer of ``diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.cli.render.html import columns
from ckptmove.cli.render.html.markup import Markup, element
from ckptmove.cli.render.html.sections import closed_table, notes, part, searchable_table
from ckptmove.cli.render.text import clean, sentence
from ckptmove.text import amount

if TYPE_CHECKING:
    from ckptmove.api.document import Json


def difference_section(difference: Json, paths: tuple[str, str], verdict: str) -> Markup:
    """Return the report on two checkpoints."""
    changed, uncompared = difference["changed"], difference["uncompared"]
    gone = [(name, "removed") for name in difference["removed"]] + [(name, "added") for name in difference["added"]]
    is_measured = any(change["max_abs"] is not None for change in changed)
    first, second = map(clean, paths)
    table: Json = {
        "rows": len(gone) + len(changed),
        "columns": [
            columns.names("name", [*(name for name, _ in gone), *(change["name"] for change in changed)]),
            columns.words("what", [*(what for _, what in gone), *(change["what"] for change in changed)]),
            *(
                columns.words(side, ["" for _ in gone] + [clean(one[side]) for one in changed])
                for side in ("from", "to")
            ),
            *(
                columns.numbers(key.replace("_", " "), [None for _ in gone] + [one[key] for one in changed])
                for key in ("max_abs", "max_rel")
                if is_measured
            ),
        ],
    }
    reasons = [(clean(one["name"]), sentence(one["reason"])) for one in uncompared]
    return element(
        "section",
        element("h2", element("bdi", first), " → ", element("bdi", second)),
        element("p", verdict, class_=f"verdict {'passed' if difference['same'] else 'unproven'}"),
        notes(difference["notes"]),
        part(amount(table["rows"], "difference"), searchable_table("differences", table)) if table["rows"] else "",
        closed_table(f"not compared: {len(uncompared):,}", ("name", "reason"), reasons),
    )

"""Print rules.md: every finding of the catalogue. ``make docs`` writes the file."""

from __future__ import annotations

from ckptmove.findings.catalogue import CATALOGUE

HEAD = """\
# Findings

<!-- Written by docs/make_rules.py from ckptmove/findings/catalogue.py. Do not edit. -->

`inspect` and `verify` report findings. An *error* means that a resume fails or goes wrong. A *warning* means that it
may. An *info* is worth knowing. `ckptmove rules` lists the findings, and `ckptmove rules D102` explains one.
`--ignore D104` makes one not count. `--select D` counts only those with codes that begin with D.
"""


def page() -> str:
    """The page as Markdown: a table of all codes, then a section for each."""
    rows = [f"| [{e.code}](#{e.code.lower()}-{e.name}) | {e.name} | {e.severity.value} |" for e in CATALOGUE.values()]
    parts = [HEAD, "\n".join(["| code | name | severity |", "|---|---|---|", *rows]) + "\n"]
    for entry in CATALOGUE.values():
        finder = "" if entry.found_by == "inspect" else f", found by `{entry.found_by}` only"
        parts += [
            f"## {entry.code} {entry.name}\n",
            f"*{entry.severity.value}{finder}*\n",
            f"- **When:** {literal(entry.when)}.",
            f"- **Why:** {literal(entry.why)}",
            f"- **Remedy:** {literal(entry.mend)}\n",
        ]
    return "\n".join(parts).rstrip() + "\n"


def literal(text: str) -> str:
    """Text as Markdown that shows exactly its characters."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#|" else letter for letter in text)


if __name__ == "__main__":
    print(page(), end="")

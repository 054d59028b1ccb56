"""``--report html=FILE``: one page with the answers of a command, for a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ckptmove import __version__
from ckptmove.cli.render.html import HEAD
from ckptmove.cli.render.renderer import Document

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.cli.render.html.markup import Markup
    from ckptmove.cli.render.renderer import ConvertAnswer, InspectAnswer, Summary, VerifyAnswer
    from ckptmove.comparison.differences import Differences


class HtmlDocument(Document):
    """Collects a section for each answer."""

    title: ClassVar = "an HTML report of ckptmove"
    head: ClassVar = HEAD

    def __init__(self) -> None:
        from ckptmove.cli.render.html.devices import Palette

        self._palette = Palette()
        self._sections: list[Markup] = []
        #: Path, outcome and status of each section.
        self._entries: list[tuple[str, str, str]] = []

    def inspect(self, answer: InspectAnswer) -> None:
        """Add an inventory with its findings, and what ``convert`` would move."""
        from ckptmove.cli.render.html.inspection import checkpoint_section
        from ckptmove.cli.render.inspection import counted, summary_figures
        from ckptmove.cli.render.planned import conversion_of

        checkpoint = answer.entry()
        severities = [one["severity"] for one in checkpoint["findings"]]
        status = "failed" if answer.exit_code else "warning" if "warning" in severities else "passed"
        figures = summary_figures(answer.result.summary)
        name = self._enter(checkpoint["path"], counted(severities), status)
        self._sections.append(checkpoint_section(checkpoint, figures, conversion_of(answer), self._palette, name))

    def convert(self, answer: ConvertAnswer) -> None:
        """Add a plan and its outcome."""
        from ckptmove.cli.render import conversion
        from ckptmove.cli.render.text import Page

        path, result = answer.request.path, answer.result
        warnings = *map(str, result.unmatched), *result.warnings
        lines = [*warnings, *conversion.plan_lines(Page(), result.plan, verbose=True), *result.notes]
        status = "failed" if answer.exit_code else "passed"
        self._add_lines(path, conversion.brief_line(path, result), lines, status)

    def skipped(self, path: str, output: str) -> None:
        """Add a checkpoint that was left out because its output exists."""
        from ckptmove.cli.render import conversion

        self._add_lines(path, conversion.skipped_line(path, output))

    def verify(self, answer: VerifyAnswer) -> None:
        """Add checks, findings and a verdict."""
        from ckptmove.cli.render import verification
        from ckptmove.cli.render.html.verification import result_section

        result = answer.result
        verdict = verification.outcome(result, strict=answer.strict)
        status = verification.status_of(result, strict=answer.strict)
        name = self._enter(result.path, verdict, status)
        self._sections.append(result_section(result, verdict, status, name))

    def diff(self, result: Differences) -> None:
        """Add the differences between two checkpoints."""
        from ckptmove.api import document
        from ckptmove.cli.render import difference
        from ckptmove.cli.render.html.difference import difference_section

        verdict = difference.answer_line(result)
        paths = result.first, result.second
        self._enter(" → ".join(paths), verdict, "passed" if result.same else "failed")
        self._sections.append(difference_section(document.difference(result), paths, verdict))

    def document(self, summary: Summary) -> str:
        """Return the page, with an overview if it has several sections."""
        from ckptmove.api import document
        from ckptmove.cli.render.html.markup import element
        from ckptmove.cli.render.html.page import whole_page
        from ckptmove.cli.render.html.sections import failures, overview

        command = f"ckptmove {summary.command}"
        errors = document.envelope(summary.command, summary.exit_code, summary.failures)["errors"]
        head = element("header", element("h1", command), element("p", f"ckptmove {__version__}", class_="version"))
        content = [overview(self._entries, errors), failures(errors), *self._sections]
        first = ", ".join(path for path, _, _ in self._entries[:1])
        about = f"{summary.checkpoints:,} checkpoints" if summary.checkpoints > 1 else first
        return whole_page(f"{command} {about}", [head, element("main", *content)])

    def _enter(self, path: str, outcome: str, status: str) -> str:
        """Add a line to the overview, and return the ``id`` of its section."""
        self._entries.append((path, outcome, status))
        return f"section-{len(self._entries)}"

    def _add_lines(self, path: str, outcome: str, lines: Iterable[str] = (), status: str = "passed") -> None:
        from ckptmove.cli.render.html.sections import lines_section

        name = self._enter(path, outcome, status)
        self._sections.append(lines_section(path, outcome, lines, status, name))

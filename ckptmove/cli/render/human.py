"""``--format human``: human-readable reports on stdout, hints on stderr."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.renderer import Renderer, printed, with_findings
from ckptmove.cli.render.text import clean
from ckptmove.cli.selection import ON_REQUEST
from ckptmove.cli.streams import page_of, say, suggest_command, write_patch
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.renderer import ConvertAnswer, FoundAnswer, InspectAnswer, Summary, VerifyAnswer
    from ckptmove.cli.streams import Output
    from ckptmove.comparison.differences import Differences
    from ckptmove.conversion.results import UndoResult
    from ckptmove.findings.catalogue import Entry
    from ckptmove.proof.evidence import FixedFile

#: Verdict in the last line for the exit code 0, by command.
_GOOD: Final = {"inspect": "fine", "convert": "converted", "verify": "passed"}


#: Why a checkpoint has no answer, by exit code.
_NO_ANSWER: Final = {2: "refused", 3: "unreadable", 4: "refused", 5: "not written"}


class HumanRenderer(Renderer):
    """Writes each answer as a report; with ``--quiet``, in one line."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.shows_progress = not out.quiet
        self._noted: Counter[tuple[str, str]] = Counter()

    def inspect(self, answer: InspectAnswer) -> None:
        from ckptmove.cli.next_command import after_inspection
        from ckptmove.cli.render import inspection

        out = self._out
        answer = self._each_once(printed(answer))
        if out.quiet:
            out.lines([inspection.brief_line(answer), *inspection.optional_lines(out.page, answer)])
            return
        out.report(inspection.inspection_lines(out.page, answer))
        command = after_inspection(answer)
        if command:
            suggest_command(command)

    def convert(self, answer: ConvertAnswer) -> None:
        from ckptmove.cli.next_command import after_conversion
        from ckptmove.cli.render import conversion

        out, path, result = self._out, answer.request.path, answer.result
        for line in conversion.warning_lines(answer):  # --quiet does not hide them: as a rule a name is mistyped
            say(line)
        if out.quiet:
            out.lines([conversion.brief_line(path, result)])
            return
        out.lines(conversion.conversion_lines(out.page, path, result, verbose=out.verbose))
        for line in after_conversion(answer):
            say(line)

    def skipped(self, path: str, output: str) -> None:
        from ckptmove.cli.render import conversion

        self._out.lines([conversion.skipped_line(path, output)])

    def undo(self, result: UndoResult) -> None:
        from ckptmove.cli.render import conversion

        self._out.lines(conversion.undo_lines(self._out.page, result))

    def edits(self, files: Sequence[FixedFile]) -> None:
        from ckptmove.cli.render import verification

        if not self._out.quiet:
            for line in verification.diff_lines(page_of(sys.stderr), files):
                say(line)

    def verify(self, answer: VerifyAnswer) -> None:
        from ckptmove.cli.render import verification

        answer = self._each_once(printed(answer))
        out, result = self._out, answer.result
        if answer.dry_run:
            self._patch(answer)
            return
        if out.quiet:
            out.lines([verification.brief_line(result, strict=answer.strict)])
            for line in verification.fixed_lines(result):
                say(line)
            return
        out.report(verification.verification_lines(out.page, result, verbose=out.verbose, strict=answer.strict))
        if verification.needs_case(answer):
            say("hint: --case FILE.py:FUNC or --script FILE.py proves it with your own model and optimizer")
        if verification.has_edit(result):
            say("hint: --fix edits your files, and --fix --dry-run prints the patch")

    def _each_once(self, answer: FoundAnswer) -> FoundAnswer:
        """The answer without notes that the report of an earlier checkpoint has; :meth:`finish` counts those.

        With ``--quiet``, there is a line for each checkpoint, which names all.
        """
        if self._out.quiet:
            return answer
        findings = answer.result.findings
        self._noted.update((one.code, one.message) for one in findings if one.code in ON_REQUEST)
        return with_findings(answer, [one for one in findings if self._noted[one.code, one.message] < 2])

    def _patch(self, answer: VerifyAnswer) -> None:
        """Write the patch of a dry run to stdout, and the report to stderr."""
        from ckptmove.cli.render import verification

        out, result, page = self._out, answer.result, page_of(sys.stderr)
        if sys.stdout.isatty():
            out.lines(verification.diff_lines(out.page, result.fixed))
        else:
            write_patch("".join(one.diff for one in result.fixed))
        if out.quiet:
            lines = iter([verification.brief_line(result, strict=answer.strict), *verification.fixed_lines(result)])
        else:
            lines = verification.verification_lines(page, result, verbose=out.verbose, strict=answer.strict)
        for line in lines:
            say(line)

    def diff(self, result: Differences) -> None:
        from ckptmove.cli.render import difference

        out = self._out
        if out.quiet:
            out.lines([difference.brief_line(result)])
        else:
            out.report(difference.difference_lines(out.page, result, verbose=out.verbose))

    def rules(self, entries: Sequence[Entry]) -> None:
        from ckptmove.cli.render import rules

        out = self._out
        if out.quiet:
            out.lines(rules.brief_line(entry) for entry in entries)
        elif len(entries) == 1 or out.verbose:
            for entry in entries:
                out.report(rules.entry_lines(out.page, entry))
        else:
            out.lines(rules.catalogue_lines(out.page, entries))
            suggest_command(f"ckptmove rules {entries[0].code}")

    def failure(self, failure: Failure) -> None:
        self._out.failure(failure)

    def no_answer(self, path: str, exit_code: int) -> None:
        """With ``--quiet``, still write one line for this checkpoint."""
        if self._out.quiet:
            self._out.lines([f"{clean(path)}: {_NO_ANSWER.get(exit_code, 'failed')}"])

    def finish(self, summary: Summary) -> int:
        """Write how many checkpoints have a note of an earlier one, and how many of several the exit code 0."""
        again = {key: count - 1 for key, count in self._noted.items() if count > 1}
        self._out.lines(f"{code}: also in {amount(more, 'checkpoint')}: {text}" for (code, text), more in again.items())
        if summary.checkpoints > 1 and summary.is_complete:
            self._count(summary)
        return super().finish(summary)

    def _count(self, summary: Summary) -> None:
        doubt = f", {summary.unproven:,} of them not proven" if summary.unproven else ""
        rest = f", {summary.skipped:,} skipped" if summary.skipped else ""
        rest += f", {summary.unwritten:,} without a change" if summary.unwritten else ""
        done = summary.good - summary.skipped - summary.unwritten
        good = "planned, nothing written" if summary.is_planned else _GOOD[summary.command or ""]
        line = f"{done:,} of {summary.checkpoints:,} {good}{doubt}{rest}"
        if self._out.quiet:
            self._out.lines([line])
        else:
            style = "red" if summary.good < summary.checkpoints else "yellow" if summary.unproven else "green"
            self._out.report([self._out.page.paint(line, f"bold {style}")])

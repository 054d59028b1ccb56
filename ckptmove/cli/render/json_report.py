"""``--format json`` and ``--report json=FILE``: one JSON document per command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckptmove.cli.render.renderer import Document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api.document import Json
    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.renderer import ConvertAnswer, InspectAnswer, Summary, VerifyAnswer
    from ckptmove.cli.streams import Output
    from ckptmove.comparison.differences import Differences
    from ckptmove.conversion.results import UndoResult
    from ckptmove.findings.catalogue import Entry


class JsonDocument(Document):
    """The document for a file."""

    title = "a JSON report of ckptmove"
    head = b'{"schema_version": 1, "command": "'

    def __init__(self) -> None:
        self._keys: Json = {}

    def inspect(self, answer: InspectAnswer) -> None:
        self._keys.setdefault("checkpoints", []).append(answer.entry())

    def convert(self, answer: ConvertAnswer) -> None:
        from ckptmove.api.document import conversion

        keys = conversion(answer.result)
        conversions = [*self._keys.get("conversions", []), {"path": answer.request.path, **keys}]
        self._keys = {**(self._keys or keys), "conversions": conversions}

    def skipped(self, path: str, output: str) -> None:
        from ckptmove.api.document import not_converted

        conversions = [*self._keys.get("conversions", []), {"path": path, **not_converted(output)}]
        self._keys = {**not_converted(output), **self._keys, "conversions": conversions}

    def undo(self, result: UndoResult) -> None:
        from ckptmove.api.document import undone

        self._keys = undone(result)

    def verify(self, answer: VerifyAnswer) -> None:
        from ckptmove.api.document import result_to_json

        self._keys.setdefault("results", []).append(result_to_json(answer.result))

    def diff(self, result: Differences) -> None:
        from ckptmove.api.document import difference

        self._keys = difference(result)

    def rules(self, entries: Sequence[Entry]) -> None:
        from ckptmove.api.document import rule

        self._keys = {"rules": [rule(entry) for entry in entries]}

    def document(self, summary: Summary) -> str:
        from ckptmove.api.document import dumps

        return f"{dumps(self.keys(summary))}\n"

    def keys(self, summary: Summary) -> Json:
        """The document as a dict."""
        from ckptmove.api.document import envelope

        return envelope(summary.command, summary.exit_code, summary.failures) | self._keys


class JsonRenderer(JsonDocument):
    """The document on stdout. Errors and warnings are also written to stderr, as text."""

    def __init__(self, out: Output) -> None:
        super().__init__()
        self._out = out

    def convert(self, answer: ConvertAnswer) -> None:
        from ckptmove.cli.render.conversion import warning_lines
        from ckptmove.cli.streams import say

        for line in warning_lines(answer):
            say(line)
        super().convert(answer)

    def failure(self, failure: Failure) -> None:
        self._out.failure(failure)

    def finish(self, summary: Summary) -> int:
        """Write the document: on one line for programs, indented on a terminal."""
        from ckptmove.api.document import dumps

        self._out.lines([dumps(self.keys(summary), indent=2 if sys.stdout.isatty() else None)])
        return super().finish(summary)

"""``--format jsonl``: one line of JSON per checkpoint, written when it is done, and a summary on stderr."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from ckptmove.cli.render.renderer import Renderer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api.document import Json
    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.renderer import InspectAnswer, Summary, VerifyAnswer
    from ckptmove.cli.streams import Output


class JsonLinesRenderer(Renderer):
    """Writes the objects that the document of ``--json`` lists: of a checkpoint, of a result or of an error."""

    is_stream = True
    #: The commands with this format.
    commands: ClassVar = ("inspect", "verify")

    def __init__(self, out: Output) -> None:
        self._out = out
        self._findings: Counter[tuple[str, str, str]] = Counter()
        self._errors: Counter[str] = Counter()
        self._devices: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def inspect(self, answer: InspectAnswer) -> None:
        entry = answer.entry()
        self._line(entry)
        self._findings.update({(one["code"], one["name"], one["severity"]) for one in entry["findings"]})
        self._devices.update({one["device"] for one in entry["devices"]})
        for one in entry["devices"]:
            self._bytes[one["device"]] += one["bytes"]

    def verify(self, answer: VerifyAnswer) -> None:
        from ckptmove.api.document import result_to_json

        self._line(result_to_json(answer.result))
        self._findings.update({(one.code, one.name, one.severity.value) for one in answer.result.findings})

    def failure(self, failure: Failure) -> None:
        """Write an error with the path of its checkpoint, which is null for an error of the command.

        A file in the checkpoint is named in the message.
        """
        from ckptmove.api.document import failure_to_json

        entry, checkpoint = failure_to_json(failure), failure.checkpoint
        inner = None if checkpoint is None else _inside(checkpoint, failure.path or "")
        if inner:
            entry |= {"path": checkpoint, "message": f"{inner}: {entry['message']}"}
        self._line(entry | {"checkpoint": checkpoint})
        self._out.failure(failure)
        self._errors[failure.kind] += 1

    def finish(self, summary: Summary) -> int:
        """Write the number of checkpoints by finding, by error and by device to stderr."""
        if not self._out.quiet:
            self._write_summary(summary)
        return super().finish(summary)

    def _line(self, keys: Json) -> None:
        from ckptmove.api.document import dumps
        from ckptmove.cli.signals import signals_held

        with signals_held():
            self._out.lines([dumps(keys)])

    def _write_summary(self, summary: Summary) -> None:
        from ckptmove.cli.streams import say
        from ckptmove.text import size

        rest = f", {summary.skipped:,} skipped as seen" if summary.skipped else ""
        doubt = f", {summary.unproven:,} of them not proven" if summary.unproven else ""
        end = "" if summary.is_complete else ", interrupted"
        good, inspected = (number - summary.skipped for number in (summary.good, summary.checkpoints))
        say(f"{good:,} of {inspected:,} fine{doubt}{rest}{end}")
        rows = [
            (code, severity, name, f"{number:,}") for (code, name, severity), number in sorted(self._findings.items())
        ]
        rows += [("", "error", kind, f"{number:,}") for kind, number in sorted(self._errors.items())]
        _say_table(("code", "severity", "name", "checkpoints"), rows)
        devices = [(device, f"{number:,}", size(self._bytes[device])) for device, number in self._devices.most_common()]
        _say_table(("device", "checkpoints", "bytes"), devices)


def _inside(folder: str, path: str) -> str:
    """The path of a file relative to a folder; empty if it is not in the folder."""
    top = folder.rstrip("/" + os.sep)
    return path[len(top) + 1 :] if path.startswith((f"{top}/", f"{top}{os.sep}")) else ""


def _say_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to stderr; nothing without rows."""
    from ckptmove.cli.render.text import Column, Page, clean, table
    from ckptmove.cli.streams import say

    for line in table(Page(), [*map(Column, heads)], [[*map(clean, row)] for row in rows]) if rows else ():
        say(line)

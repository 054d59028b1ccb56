"""``--skip-seen FILE``: the checkpoints of an earlier ``inspect --format jsonl``."""

from __future__ import annotations

import hashlib
import json

from ckptmove.errors import UsageError, reason_of


class Seen:
    """The paths of an earlier report with the fingerprints that they had. A line with an error is not kept.

    Keeps 16 bytes for each, however long a line is.
    """

    def __init__(self, path: str) -> None:
        """Read the report. A line that is not complete, after a kill, counts nothing."""
        self._seen: set[bytes] = set()
        lines = known = 0
        try:
            with open(path, "rb") as file:
                for line in file:
                    lines += bool(line.strip())
                    known += self._add(line)
        except OSError as error:
            raise UsageError(f"--skip-seen: cannot be read: {reason_of(error)}", path=path) from error
        if lines > 1 and not known:
            raise UsageError("--skip-seen takes the lines of an earlier inspect --format jsonl", path=path)

    def has(self, path: str, version: str | None) -> bool:
        """Whether the report has this version of a checkpoint."""
        return version is not None and _digest(path, version) in self._seen

    def _add(self, line: bytes) -> bool:
        """Add the checkpoint of a line. Returns whether it is a line of the report."""
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str | None):
            return False
        if isinstance(entry.get("version"), str) and isinstance(entry["path"], str):
            self._seen.add(_digest(entry["path"], entry["version"]))
        return not {"version", "exit_code"}.isdisjoint(entry)


def _digest(path: str, version: str) -> bytes:
    return hashlib.sha256(f"{version}\0{path}".encode("utf-8", "surrogatepass")).digest()[:16]

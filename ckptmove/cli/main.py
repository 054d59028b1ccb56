"""The door of the program, open before anything is imported: until then nobody else can take a Ctrl-C.

Never imports the program where it is imported itself.
"""

from __future__ import annotations

import sys

#: As a shell has it of a program that SIGINT ended.
_INTERRUPTED = 130


def main() -> None:
    """Run the program."""
    try:
        from ckptmove.cli.app import main as run  # noqa: PLC0415  # what takes the time in which it is interrupted
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(_INTERRUPTED)
    run(ends=True)

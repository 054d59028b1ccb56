"""The entry point. It imports the program inside a function, so that Ctrl-C during the imports is handled too."""

from __future__ import annotations

import sys

#: Exit code that a shell uses for a program ended by SIGINT.
_INTERRUPTED = 130


def main() -> None:
    """Run the program."""
    try:
        from ckptmove.cli.app import main as run  # the imports may be interrupted
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(_INTERRUPTED)
    run(ends=True)

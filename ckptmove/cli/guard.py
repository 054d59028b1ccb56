"""The group of commands: however a command ends, the program exits with an exit code of ours."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from ckptmove.cli.outcome import PROGRAM
from ckptmove.cli.signals import Terminated, settle
from ckptmove.cli.streams import open_closed_streams, say
from ckptmove.io.outputs import LeftoversRemoved
from ckptmove.pickles.collector import collector_paused

if TYPE_CHECKING:
    from collections.abc import Sequence


class GuardedGroup(TyperGroup):
    """The group of commands; exits with the exit code of the command, however it is called.

    What reports an error is imported only for an error.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line, and exit with its exit code."""
        del prog_name, standalone_mode  # always our name, and always standalone
        words = sys.argv[1:] if args is None else [*args]
        code: int | None = None
        try:
            open_closed_streams()
            with collector_paused(), warnings.catch_warnings():  # a command ends before reference cycles matter
                warnings.simplefilter("always", LeftoversRemoved)
                warnings.showwarning = _show
                answer: Any = 0
                ended: BaseException | None = None
                try:
                    answer = super().main(words, PROGRAM, complete_var, False, windows_expand_args, **extra)
                except MemoryError as error:
                    ended = error.with_traceback(None)  # its frames hold the memory
                except (Exception, KeyboardInterrupt, Terminated) as error:  # noqa: BLE001  # bugs have an exit code too
                    ended = error
                code = _report(ended, words) if ended is not None else answer if isinstance(answer, int) else 0
                if "verify" in words:  # torchrun may have started it
                    from ckptmove.cli.ended import agreed

                    code = agreed(code, words)
                settle()
        except (KeyboardInterrupt, Terminated) as error:  # after the answer: it stays valid
            settle()
            code = _report(error, words) if code is None else code
        sys.exit(code)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        from ckptmove.cli.examples import epilog

        self.epilog = epilog()
        super().format_epilog(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Ctrl-C becomes an exception, because Typer's exit code for it could be an answer."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Abort from error


def _report(error: BaseException, words: Sequence[str]) -> int:
    from ckptmove.cli.ended import report

    return report(error, words)


def _show(message: Warning | str, *_where: object, **_more: object) -> None:
    """Write a warning to stderr, without the line of code that it comes from."""
    from ckptmove.cli.render.text import clean, sentence

    say(f"warning: {sentence(clean(str(message)))}")

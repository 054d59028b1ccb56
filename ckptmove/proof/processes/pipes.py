"""The pipes of a child process, on its side."""

from __future__ import annotations

import os
import signal
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptmove.proof.processes.messages import Message


class Pipes:
    """The standard input and output of a child process, which nothing else in it finds.

    Code that reads standard input finds it empty. Output of libraries goes to standard error.
    """

    def __init__(self) -> None:
        """Wait for lines, and for the end of the parent."""
        self.lines: SimpleQueue[str] = SimpleQueue()  # lines of the parent
        self._lines, self._answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        Thread(target=self._follow, daemon=True).start()

    def tell(self, message: Message) -> None:
        """Send a message to the parent."""
        self._answers.write(message.line().encode())
        self._answers.flush()

    def _follow(self) -> None:
        """Pass on each line, and kill this process group when the parent has ended, which closes the pipe."""
        with self._lines:
            for line in self._lines:
                self.lines.put(line.rstrip("\n"))
        if hasattr(os, "getpgrp") and os.getpgrp() == os.getpid():  # false if it was not started by ``child``
            os.killpg(os.getpgrp(), signal.SIGKILL)

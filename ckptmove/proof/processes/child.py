"""Run the child process that imports torch, and collect its answers.

A crash of the child becomes a failed check; it never ends this process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import subprocess
import sys
import traceback
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import IO, TYPE_CHECKING, Final, NamedTuple, NoReturn, cast

from ckptmove.errors import CaseUnusable, UsageError
from ckptmove.proof.checks import CASE, CHILD_CHECKS, SCRIPT, failed, skipped
from ckptmove.proof.errors import ChildKilled, TorchBroken
from ckptmove.proof.evidence import RanksOfRun
from ckptmove.proof.processes.forking import Forked, fork
from ckptmove.proof.processes.messages import Message, read_message
from ckptmove.proof.processes.strays import MARK, end_strays
from ckptmove.text import Argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckptmove.model import Finding
    from ckptmove.proof.evidence import CheckResult, Mode
    from ckptmove.proof.processes.messages import Late

#: The Windows counterpart of `start_new_session`: Ctrl-C in the console does not reach the child.
_OWN_GROUP: Final[int] = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
_LONGEST_LINE: Final = 300
#: Settings of glibc for a process that allocates tensors of a few megabytes again and again: the memory of a freed one
#: is kept for the next one (``man 3 mallopt``). By default, the system has to clear new pages each time.
_MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": "67108864", "MALLOC_TRIM_THRESHOLD_": "67108864"}
#: The same settings as arguments of ``mallopt``: ``M_MMAP_THRESHOLD`` and ``M_TRIM_THRESHOLD``.
_MALLOPT: Final = {-3: 2**26, -1: 2**26}
#: Settings for a process that runs no code of the user: the import of torch starts no threads of NumPy.
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}
_LONGEST_END: Final = 2**16
#: The user's code that a check runs.
_OWN_CODE: Final = {CASE: "your case", SCRIPT: "your script"}
#: Signals by which a process is ended from outside: by the system when memory runs out, by a scheduler, by a person.
#: SIGABRT and SIGSEGV are its own faults.
KILLED_BY: Final = frozenset({signal.SIGTERM, *([signal.SIGKILL] if hasattr(signal, "SIGKILL") else [])})
#: Message of the C++ runtime when a user's hook raises in backward on a simulated device.
_ABORTED: Final = "terminate called without an active exception"
#: `-m` would put the current folder first on the child's path; the child must import the modules of this process.
_START: Final = """\
import sys
sys.path[:] = sys.argv[1].split(sys.argv[2])
from ckptmove.proof.processes.child import begin

def load():
    from WORKER import main
    return main

begin(load)
"""
#: Seconds that the exit functions of a child have.
_EXIT_SECONDS: Final = 2


@dataclass(slots=True)
class Answers:
    """Answers of a child process."""

    torch: str = ""  # progress of the import: `importing`, `imported`, or empty before it begins
    torch_failure: str = ""  # error that ended the child while it imported torch, or empty
    imports: str = ""  # the user's optimizer class while it is being imported, else empty
    refusal: str = ""  # why the request cannot be fulfilled, or empty
    mode: Mode | None = None  # device mode of the step; None if the child ended before it reported one
    unusable: str = ""  # why the user's function returns no usable case, or empty
    killed: ChildKilled | None = None  # the error of a child that was killed from outside, or None
    #: results by name. Checks that the child did not reach are failed or skipped.
    checks: dict[str, CheckResult] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # findings about the stored values
    run: RanksOfRun = field(default_factory=lambda: RanksOfRun(0))  # facts about the ranks, if there are several
    late: Late | None = None  # what the process was doing when its time was over

    def take(self, message: Message) -> None:
        """Add a message."""
        if message.check is not None:
            self.checks[message.check.name] = message.check
        elif message.finding is not None:
            self.findings.append(message.finding)
        self.run = self.run.updated(message.run or self.run)
        self.late = message.late or self.late
        self.torch = message.torch or self.torch
        self.mode = message.mode or self.mode
        self.unusable = message.unusable or self.unusable
        if message.imports is not None:
            self.imports = message.imports
        if message.refusal is not None:
            self.imports, self.refusal = "", message.refusal

    def require_usable(self) -> None:
        """Check that the child could begin, and that nothing outside has ended it."""
        if self.killed is not None:
            raise self.killed
        if self.torch_failure:
            raise TorchBroken(self.torch_failure)
        if self.unusable:
            raise CaseUnusable(self.unusable)
        if self.refusal:
            raise UsageError(self.refusal)


def worker_command(worker: str = "ckptmove.training.worker") -> list[str]:
    """Command line of a child that runs the ``main`` of a module, with the same ``sys.path`` as this process."""
    return [sys.executable, "-c", _START.replace("WORKER", worker), os.pathsep.join(sys.path), os.pathsep]


class Ending(NamedTuple):
    """How a child process has ended."""

    code: int  # exit code; negative for a signal
    output: str  # beginning of its standard output that was not a message
    errors: str  # end of its standard error


@dataclass(slots=True)
class Child:
    """A child process, while the context of :func:`child` or :func:`forked` lasts."""

    process: subprocess.Popen[str] | Forked  # the process itself
    _mark: str = ""  # mark of the processes that it starts; empty for a fork, which starts none
    _is_over: bool = False  # whether the context has exited: another process may have its id then

    def give(self, line: str) -> None:
        """Write a line to its standard input, which stays open."""
        stdin = cast("IO[str]", self.process.stdin)
        stdin.write(f"{line}\n")
        stdin.flush()

    def end(self) -> None:
        """Kill it and every process that it started, also those that left its group. Any thread may call this."""
        if self._is_over:
            return
        if not hasattr(os, "killpg"):  # Windows has no process groups
            self.process.kill()
        else:
            with suppress(ProcessLookupError, PermissionError):  # the group is gone; on macOS, only ended ones remain
                os.killpg(self.process.pid, signal.SIGKILL)
        if self._mark:
            end_strays(self._mark)

    def collect(
        self,
        stage: Callable[[str], None] | None = None,
        wanted: Sequence[str] = CHILD_CHECKS,
        timeout: float | None = None,
    ) -> Answers:
        """Wait for the child and collect its answers. A missing answer becomes a failed check.

        A timeout is a failed check and not an input limit (exit code 4), so that the verdict keeps the checks that were
        answered in time.

        Args:
            stage: called after each message with the name of the child's next stage.
            wanted: the expected checks, in order.
            timeout: seconds after which the child is killed; None for no limit.
        """
        late: list[bool] = []
        guard = Thread(target=lambda: late.append(self._outlast(timeout)), daemon=True)
        guard.start()
        answers = Answers()

        def take(message: Message) -> None:
            answers.take(message)
            if stage is not None:
                pending = next((name for name in wanted if name not in answers.checks), "finishing")
                stage("importing torch" if answers.mode is None else pending)

        ending = self.read(take)
        guard.join()
        _fill_missing(answers, ending, timeout if any(late) else None, wanted)
        return answers

    def read(self, take: Callable[[Message], None]) -> Ending:
        """Call a function with each message, until the process ends."""
        errors: list[str] = []
        # Read in a thread: a child whose standard error pipe is full would block forever.
        drain = Thread(target=lambda: errors.append(end_of(cast("IO[str]", self.process.stderr))), daemon=True)
        drain.start()
        output = ""
        for line in self.process.stdout or ():
            message = read_message(line)
            if message is None:
                output = (output + line)[:_LONGEST_LINE]
            else:
                take(message)
        drain.join()
        return Ending(self.process.wait(), output, "".join(errors))

    def _outlast(self, timeout: float | None) -> bool:
        """Wait until the child ends, and kill its group, which may keep its pipes open. Return whether it timed out."""
        try:
            self.process.wait(timeout)
        except (subprocess.TimeoutExpired, TimeoutError):
            return True
        finally:
            self.end()
        return False


@contextmanager
def _killed_at_exit(started: Child) -> Iterator[Child]:
    with started.process:
        try:
            yield started
        finally:
            started.end()
            started._is_over = True


@contextmanager
def child(command: Sequence[str], request: str, variables: Mapping[str, str] | None = None) -> Iterator[Child]:
    """Start a child with the request as its last argument, and kill it when the context exits.

    The child leads its own process group, which also contains the workers of a user's data loader. The whole group is
    killed with it, and Ctrl-C reaches the group only through this process. The child's standard input stays open while
    this process lives; the child ends when it is closed.

    Args:
        variables: variables of its environment, unless this process has them.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(  # noqa: S603  # the command is this package's own
        [*command, request],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**_MALLOC, **(variables or {}), **os.environ, MARK: mark},
        creationflags=_OWN_GROUP,
    )
    with _killed_at_exit(Child(process, mark)) as started:
        yield started


@contextmanager
def forked(load: Callable[[], Callable[[], object]]) -> Iterator[Child]:
    """Fork a child that imports torch and then works, and kill it when the context exits.

    It may run no code of the user, which would find the modules and the exit functions of this process.

    Args:
        load: imports modules that need torch, and returns the function that works.
    """
    process = fork(leads=True)
    if process is None:
        begin(load, is_fork=True)
    with _killed_at_exit(Child(process)) as started:
        yield started


def begin(load: Callable[[], Callable[[], object]], *, is_fork: bool = False) -> NoReturn:
    """Import torch, work, and end this process.

    If it ends between its two messages, torch is broken, whether by an exception or a signal. It does not wait for
    threads of the user's code or for torch's own cleanup. Exit functions still get two seconds, because otherwise the
    folders of `tempfile` would remain.

    Args:
        load: imports modules that need torch, and returns the function that works.
        is_fork: whether this process is a fork, whose exit functions are those of its parent.
    """
    code, trace = 1, ""
    try:
        if is_fork:
            _set_as_started()
        os.write(1, Message(torch="importing").line().encode())
        # The garbage collector would take a tenth of the time of the imports, and later visit their objects in vain.
        gc.disable()
        import torch  # noqa: F401  # an error of the import is not one of the work

        os.write(1, Message(torch="imported").line().encode())
        work = load()
        gc.freeze()
        gc.enable()
        work()
        code = 0
    except BaseException:  # noqa: BLE001  # the parent reports the last line
        trace = traceback.format_exc()
    try:
        if not is_fork:
            last = Thread(target=atexit._run_exitfuncs, daemon=True)
            last.start()
            last.join(_EXIT_SECONDS)
        sys.stderr.write(trace)
        sys.stderr.flush()
    finally:
        os._exit(code)


def _set_as_started() -> None:
    """Give this fork the settings that :func:`child` gives a new process in its environment."""
    with suppress(OSError, AttributeError):  # a C library without it
        for option, nbytes in _MALLOPT.items():
            ctypes.CDLL(None).mallopt(option, nbytes)
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)


def end_of(stream: IO[str]) -> str:
    """Read a stream to its end, and return the last part of it."""
    tail = ""
    with suppress(ValueError):  # closed: this process was interrupted
        while more := stream.read(_LONGEST_END):
            tail = (tail + more)[-_LONGEST_END:]
    return tail


def _fill_missing(answers: Answers, ending: Ending, timeout: float | None, wanted: Sequence[str]) -> None:
    """Add a failed or skipped result for each check that the child did not answer.

    Args:
        timeout: the timeout in seconds, if it was exceeded; else None.
    """
    missing = [name for name in wanted if name not in answers.checks]
    if missing and timeout is None and -ending.code in KILLED_BY:
        answers.killed = ChildKilled(_process(missing[0]), -ending.code)
        return
    last = _last_line(ending.errors) or _reason(ending.code, ending.output, "")
    if answers.torch == "importing" and timeout is None:
        answers.torch_failure = last
    if answers.imports and timeout is None:
        answers.refusal = f"{Argument('optimizer', answers.imports)} cannot be imported: {last}"
    if not missing or answers.unusable:
        return
    if timeout is not None:
        before = ", before torch was imported" * (answers.torch == "importing")
        late = f"took longer than {timeout:g} s ({Argument('timeout')}){before}"
        answers.checks[missing[0]] = failed(missing[0], late, timeout=timeout)
    else:
        reason = _reason(ending.code, ending.output, ending.errors, missing[0])
        answers.checks[missing[0]] = failed(missing[0], reason, exit_code=ending.code)
    for name in missing[1:]:
        answers.checks[name] = skipped(name, "not reached: the process that runs this check has ended")


def _last_line(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1][:_LONGEST_LINE] if lines else ""


def _reason(code: int, output: str, errors: str, check: str = "") -> str:
    line = _last_line(errors)
    last = f": {line}" if line else ""
    if code == -signal.SIGABRT and line == _ABORTED:
        return (
            "one of your backward hooks raised an exception, which ends the process on a simulated device: "
            "call the hook's function directly to see the exception"
        )
    process = _process(check)
    if code < 0:
        name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
        return f"{process} was ended by {name}{last}"
    if code > 0:
        return f"{process} ended with exit code {code}{last}"
    return f"{process} ended without an answer" + (f"; it printed {output!r}" if output else "")


def _process(check: str) -> str:
    return f"the process that runs {_OWN_CODE.get(check, 'torch')}"

"""The child process in which torch runs, and what came back from it.

Never lets the child's death be this process's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

from ckptmove.verification.checks import check_from_json, failed, finding_from_json, skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptmove.model import Finding
    from ckptmove.verification.evidence import CheckResult

#: What the child answers for, in the order in which it answers.
CHILD_CHECKS: Final = ("restore", "numbers", "step", "parity", "fresh")
#: On Windows, what `start_new_session` is elsewhere: no Ctrl-C of the console reaches the child.
_OWN_GROUP: Final[int] = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
_LONGEST_LINE: Final = 300
_LONGEST_END: Final = 2**16
#: What C++ says of an exception that leaves a hook of the user's in backward, on a simulated device.
_ABORTED: Final = "terminate called without an active exception"
# `-m` would put the folder at hand before everything else on the child's path; it is to import what this process does.
# A child that ends between the two messages has told that torch is broken, by whatever exception or signal.
# However that ends, nobody waits for what a user's code has left running, or for torch to take itself down. What the
# user has left to do at the end is done meanwhile, as the folders of `tempfile` would stay: that itself may wait.
_START: Final = """\
import os, sys
sys.path[:] = sys.argv[1].split(sys.argv[2])
import atexit, threading, traceback
code = 1
try:
    print('{"torch": "importing"}', flush=True)
    import torch
    print('{"torch": "imported"}', flush=True)
    from ckptmove.verification.worker import main
    main()
    code = 0
except BaseException:
    said = traceback.format_exc()
try:
    last = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    last.start()
    last.join(2)
    if code:
        sys.stderr.write(said)
    sys.stderr.flush()
finally:
    os._exit(code)
"""


@dataclass(slots=True)
class Answers:
    """What a child said before it ended.

    Attributes:
        torch: how far it came with it: ``importing``, ``imported``, or empty where it did not say.
        torch_failure: what ended it while it imported torch; empty where nothing did.
        imports: the class of the user's that it imports, until it has; else empty.
        refusal: why what was asked for cannot be done; empty where it can.
        mode: where it made the step, or None where it never came to say.
        unusable: why the function that the user names makes no case; empty where it does.
        checks: its checks by name; one that it did not come to is failed or skipped.
        findings: what it found in the values.
    """

    torch: str = ""
    torch_failure: str = ""
    imports: str = ""
    refusal: str = ""
    mode: str | None = None
    unusable: str = ""
    checks: dict[str, CheckResult] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def worker_command() -> list[str]:
    """The command line of a child that imports what this process imports."""
    return [sys.executable, "-c", _START, os.pathsep.join(sys.path), os.pathsep]


@contextmanager
def child(command: Sequence[str], request: str) -> Iterator[subprocess.Popen[str]]:
    """A child that is given its request as last argument; killed, where it still runs, when the context is left.

    It leads a process group of its own, in which the workers of a user's loader are, too: all of them are ended with
    it, and no Ctrl-C reaches them but through this process. Its standard input is open for as long as this process
    lives, by which it knows when it is left alone.
    """
    process = subprocess.Popen(  # noqa: S603  # the command is this package's own
        [*command, request],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        creationflags=_OWN_GROUP,
    )
    with process:
        try:
            yield process
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[str]) -> None:
    """Kill whatever is left of a child and of the processes that it has started."""
    if not hasattr(os, "killpg"):  # Windows has no such groups
        process.kill()
        return
    with suppress(ProcessLookupError, PermissionError):  # nobody is left; on macOS, none but those that have ended
        os.killpg(process.pid, signal.SIGKILL)


def collect(
    process: subprocess.Popen[str],
    stage: Callable[[str], None] | None = None,
    wanted: Sequence[str] = CHILD_CHECKS,
    timeout: float | None = None,
) -> Answers:
    """Wait for a child and sort what it said; what it did not come to say is its failure.

    A child that takes too long has failed, and is no file that was refused: what it has answered before stands in the
    verdict, which a limit of the input (exit 4) would not have.

    Args:
        process: the child.
        stage: told, whenever it says something, what it does next.
        wanted: the checks that it is to answer for, in their order.
        timeout: seconds after which it is ended; None for never.
    """
    errors: list[str] = []
    late: list[bool] = []
    # Meanwhile: a child whose standard error is full would wait for ever.
    drain = Thread(target=lambda: errors.append(_end_of(cast("IO[str]", process.stderr))), daemon=True)
    guard = Thread(target=lambda: late.append(_outlast(process, timeout)), daemon=True)
    for thread in (drain, guard):
        thread.start()
    answers = Answers()
    output = ""
    for line in process.stdout or ():
        if not _take(line, answers):
            output = (output + line)[:_LONGEST_LINE]
        if stage is not None:
            stage(_next_stage(answers, wanted))
    for thread in (drain, guard):
        thread.join()
    told = _Told(process.wait(), output, "".join(errors), timeout if any(late) else None)
    _account(answers, told, wanted)
    return answers


class _Told(NamedTuple):
    """How a child ended.

    Attributes:
        code: its exit code, negative for a signal.
        output: the beginning of what it wrote to standard output.
        errors: the end of what it wrote to standard error.
        timeout: seconds after which it was ended; None where it ended by itself.
    """

    code: int
    output: str
    errors: str
    timeout: float | None


def _end_of(stream: IO[str]) -> str:
    """The last of what a stream says, however much that is."""
    said = ""
    while more := stream.read(_LONGEST_END):
        said = (said + more)[-_LONGEST_END:]
    return said


def _outlast(process: subprocess.Popen[str], timeout: float | None) -> bool:
    """Wait until a child ends, and see to it that it does; then nobody that it has started keeps its pipes open."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return True
    finally:
        _end_group(process)
    return False


def _account(answers: Answers, told: _Told, wanted: Sequence[str]) -> None:
    """Turn what a child did not come to say into failures."""
    last = _last_line(told.errors) or _reason(told.code, told.output, "")
    if answers.torch == "importing" and told.timeout is None:
        answers.torch_failure = last
    if answers.imports and told.timeout is None:
        answers.refusal = f"--optimizer {answers.imports} cannot be imported: {last}"
    missing = [name for name in wanted if name not in answers.checks]
    if not missing or answers.unusable:
        return
    if told.timeout is not None:
        before = ", before torch was imported" * (answers.torch == "importing")
        late = f"took longer than {told.timeout:g} s (--timeout){before}"
        answers.checks[missing[0]] = failed(missing[0], late, timeout=told.timeout)
    else:
        reason = _reason(told.code, told.output, told.errors)
        answers.checks[missing[0]] = failed(missing[0], reason, exit_code=told.code)
    for name in missing[1:]:
        answers.checks[name] = skipped(name, "not reached: the process that makes this check has ended")


def _take(line: str, answers: Answers) -> bool:
    """Sort one line of the child's, and say whether it was an answer."""
    try:
        message: dict[str, Any] = json.loads(line)
        if "check" in message:
            check = check_from_json(message["check"])
            answers.checks[check.name] = check
        elif "finding" in message:
            answers.findings.append(finding_from_json(message["finding"]))
        elif "unusable" in message:
            answers.unusable = message["unusable"]
        elif "imports" in message:
            answers.imports = message["imports"]
        elif "refusal" in message:
            answers.imports, answers.refusal = "", message["refusal"]
        elif "torch" in message:
            answers.torch = message["torch"]
        else:
            answers.mode = message["mode"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _next_stage(answers: Answers, wanted: Sequence[str]) -> str:
    if answers.mode is None:
        return "importing torch"
    return next((name for name in wanted if name not in answers.checks), "finishing")


def _last_line(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1][:_LONGEST_LINE] if lines else ""


def _reason(code: int, output: str, errors: str) -> str:
    line = _last_line(errors)
    last = f": {line}" if line else ""
    if code == -signal.SIGABRT and line == _ABORTED:
        return (
            "in backward a hook of yours raised an exception, which ends the process on a simulated device: "
            "call the hook's function by itself to see which"
        )
    if code < 0:
        return f"the process that runs torch was ended by {_signal_name(-code)}{last}"
    if code > 0:
        return f"the process that runs torch ended with exit code {code}{last}"
    return "the process that runs torch ended without an answer" + (f"; it said {output!r}" if output else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

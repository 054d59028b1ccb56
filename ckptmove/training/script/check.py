"""Check a checkpoint by running a training script up to its first optimizer step after the load."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Final

import torch

from ckptmove.conversion.notes import is_refused
from ckptmove.findings.remedies import choose
from ckptmove.findings.trials import Source
from ckptmove.formats.facts import facts_of
from ckptmove.proof.checks import SCRIPT, failed, skipped
from ckptmove.text import Argument, some
from ckptmove.training.case.blame import Blame, blame
from ckptmove.training.case.check import on_target
from ckptmove.training.case.name import CaseName
from ckptmove.training.code.entrance import Entrance, code_of
from ckptmove.training.code.source import line_of
from ckptmove.training.fixes import prefixes
from ckptmove.training.fixes.scene import Scene
from ckptmove.training.fixes.training import of_other_class, of_scheduler
from ckptmove.training.script.hooks import (
    ScriptWatch,
    Steps,
    how_to_resume,
    never_loaded,
    recorded,
    skipped_by_scaler,
)
from ckptmove.training.script.protection import protected
from ckptmove.training.script.session import Session, Stopped
from ckptmove.training.script.step import ScriptStep, scene_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.step.resume import Bench

_LONGEST_LINE: Final = 300
#: Seconds for exit functions, as at the end of a child process.
_LONGEST_EXIT: Final = 2.0
#: Modules of torch whose classes a ``.metadata`` contains. A checkpoint with another name of the first three is not
#: opened at all.
_PLAIN: Final = frozenset({
    "pathlib", "pathlib._local",
    "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner", "torch.distributed._shard.sharded_tensor.metadata",
})  # fmt: skip
#: Lines after the start of a program that asks the terminal, in which its answer is read.
_LINES_AFTER: Final = 2
#: Python's message for ``input()`` without input.
_NO_INPUT: Final = "EOF when reading a line"
#: torch's message for a build without NCCL, which is one for the CPU.
_NO_NCCL: Final = "doesn't have NCCL built in"
_DEVICE: Final = re.compile(r"\b(device|cuda|mps|xpu)\b", re.IGNORECASE)
#: Errors of a machine without the script's data, network or packages, by the names of their classes.
_MISSING: Final = frozenset({
    "FileNotFoundError", "NotADirectoryError", "ModuleNotFoundError", "ConnectionError", "URLError", "HTTPError",
    "HfHubHTTPError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "gaierror", "ConnectTimeout", "ConnectError",
})  # fmt: skip


def check_script(
    bench: Bench, path: str, arguments: tuple[str, ...], answer: Callable[[CheckResult], None]
) -> CheckResult:
    """Make the check. ``answer`` sends the result of a script that does not end; the process ends then."""

    def end(check: CheckResult) -> None:
        answer(check._replace(evidence=tuple({**figures, **dict(check.evidence)}.items())))
        # Exit functions remove temporary folders; they may hang.
        last = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
        last.start()
        last.join(_LONGEST_EXIT)
        os._exit(0)

    site = bench.site
    if site.reason:
        return skipped(SCRIPT, site.missing)
    entrance = Entrance(CaseName(path, "", is_file=True))
    entrance.is_loaded = True  # no fix may assume that the script is only imported
    home = line_of(str(Path(path).absolute()), 0)
    session = Session(bench.request.path, entrance, home, end, arguments, _foreign(bench), _remedy(bench))
    figures: dict[str, object] = {"script": path, "arguments": list(arguments), "device": site.target}
    figures["simulated"] = site.mode == "simulated"
    started = time.perf_counter()
    with ExitStack() as stack:
        output = stack.enter_context(_output())
        stack.enter_context(protected((place.path for place in bench.checkpoint.read_from), session.note_program))
        stack.enter_context(_watched(bench.request.deadline, session, end))
        place = stack.enter_context(on_target(site, bench.request.devices))
        watch = ScriptWatch(place.device, entrance, session)
        step = ScriptStep(bench, place, session, figures)

        def explain(error: BaseException) -> CheckResult:
            scene = Scene(watch, entrance, {}, place, home, home)
            return _of_exception(error, scene, session, Path(path).name, _source(bench))

        steps = Steps(session, step.begin, step.finish, explain, watch.refusals)
        torch.manual_seed(bench.request.seed)
        error: BaseException | None = None
        try:
            with (
                recorded(session, steps),
                torch.autograd.set_detect_anomaly(mode=True, check_nan=False),
                watch,
            ):
                error = _run_as_main(path, arguments)
                steps.judge_raised()
        except Stopped:
            pass
        except BaseException as caught:  # noqa: BLE001  # any exception of the script is an answer
            error = caught
        session.close()
        # The script may end while an optimizer that it loaded has not made a step.
        is_regular = error is None or (isinstance(error, SystemExit) and not error.code)
        check = session.check or (step.conclude() if session.passed is None and is_regular else None)
        if check is None:
            if error is None or isinstance(error, SystemExit):
                check = _without_step(error, session, _last_line(output), Path(path).name)
            else:
                check = explain(error)
            if session.passed is not None and not (check.status == "failed" and _names_device(error)):
                check = session.passed
    kept = list(dict.fromkeys(session.kept))
    own = {**dict(check.evidence), "not_written": kept, "seconds": round(time.perf_counter() - started, 3)}
    note = f"; not written, because it was there before: {some(kept, 3)}" if kept else ""
    return check._replace(detail=f"{check.detail}{note}", evidence=tuple({**figures, **own}.items()))


def _names_device(error: BaseException | None) -> bool:
    """Whether an exception is one of torch about a device, its memory or an operation that it lacks."""
    is_of_torch = isinstance(error, (RuntimeError, TypeError, ValueError))
    return is_of_torch and _DEVICE.search(str(error)) is not None


def _foreign(bench: Bench) -> list[str]:
    """The names in the ``.metadata`` files of a checkpoint that are neither torch's own for it nor paths."""
    inventories = [part.inventory for part in bench.checkpoint.parts if part.inventory.container == "dcp"]
    uses = [use for one in inventories for use in one.globals if not (use.weights_only and use.verdict == "safe")]
    return [use.name for use in uses if use.verdict != "safe" or use.name.rpartition(".")[0] not in _PLAIN]


def _remedy(bench: Bench) -> str:
    """What helps a script that loads objects of the checkpoint, tried before the script runs; empty if nothing does."""
    inventory = bench.checkpoint.inventory
    if facts_of(inventory.container).weights_only and not is_refused(inventory):
        return ""
    found = choose(inventory, _source(bench))
    return "" if found is None else found.command


def _source(bench: Bench) -> Source:
    return Source(bench.request.path, bench.checkpoint, bench.request.limits)


def _run_as_main(path: str, arguments: tuple[str, ...]) -> SystemExit | None:
    """Run a file as ``python FILE ARGS`` does, and return the exception of ``sys.exit``."""
    file = str(Path(path).absolute())
    main = ModuleType("__main__")
    main.__file__ = file
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    sys.modules["__main__"], sys.argv = main, [path, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    try:
        exec(code_of(file), vars(main))  # noqa: S102  # the user's own script
    except SystemExit as error:
        return error
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before
    return None


@contextlib.contextmanager
def _output() -> Iterator[IO[str]]:
    """Send the script's output to a file while the context is open."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace", buffering=1) as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        yield file


def _last_line(output: IO[str]) -> str:
    output.flush()
    output.seek(0)
    last = ""
    for line in output:
        last = line.strip() or last
    return last[-_LONGEST_LINE:]


@contextlib.contextmanager
def _watched(deadline: float | None, session: Session, end: Callable[[CheckResult], None]) -> Iterator[None]:
    """End the process at a time in seconds since the epoch, and name the line that the script has reached."""
    if deadline is None:
        yield
        return
    runner, limit = threading.get_ident(), str(Argument("timeout"))

    def expire() -> None:
        line = session.line_in(sys._current_frames().get(runner))  # the only way to see another thread
        fault = f"no optimizer step after the load within the time limit ({limit}); it was at {line.quoted}"
        fault += session.but_loaded()
        figures = {**line.evidence, "loaded": session.loaded_instead, "timed_out": True, "proven": False}
        end(session.passed or failed(SCRIPT, fault, **figures))

    timer = threading.Timer(max(deadline - time.time(), 0), expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _without_step(error: BaseException | None, session: Session, last: str, name: str) -> CheckResult:
    """Result for a script that ended, by itself or by ``sys.exit``, before the step."""
    printed = f"; the last line that it printed: {last}" if last else ""
    code = getattr(error, "code", None)
    how = "ended" if error is None else f"called sys.exit({'' if code is None else repr(code)})"
    if not session.loads:
        return never_loaded(session, f"{name} {how} without loading the checkpoint{printed}")
    fault = f"{name} {how} before an optimizer step; it loaded the checkpoint at {session.loads[-1]}{printed}"
    fix = ""
    if session.skipped_steps:
        fault = f"{name} {how} without an optimizer step: {skipped_by_scaler(session)}{printed}"
    elif session.optimizers and not code:
        fix = "if the saved run was complete, nothing is left to train: pass more epochs or steps, after --"
    return failed(SCRIPT, fault, fix, proven=False)


def _of_exception(error: BaseException, scene: Scene, session: Session, name: str, source: Source) -> CheckResult:
    """Result for an exception: a fault, or a check that was not made for a reason outside of the script."""
    found = blame(error, scene_of(scene, scene.entrance.frames(error.__traceback__)))
    fault, fix = [found.fault + session.but_loaded(), *found.failures[1:]], str(found.fix)
    figures = {**found.evidence, "loaded": session.loaded_instead, "proven": False}
    reason = found.fault if found.is_limit else _reason_outside(error, found, session, name)
    if reason:
        return skipped(SCRIPT, f"not proven: {reason}", **figures)
    if wrong := _wrong_argument(error, session):
        fault, fix = [f"{name} opens {wrong}, which does not exist: {found.fault}"], how_to_resume()
    elif any(one is session.refusal for one in _chain(error)):
        fix = session.remedy
    elif session.loads and (command := prefixes.of_error(error, source)).text:
        fix, figures = command.text, {**figures, **command.evidence}
    elif (other := of_other_class(error, source.checkpoint.inventory)) is not None:
        stored, built = other
        fault.append(
            f"the checkpoint has the state of {stored}, and the script builds {built}: "
            "load_state_dict replaced its options and state by those of the file"
        )
        fix = f"build {stored} to resume, or load the model alone, and let a new {built} begin without state"
        figures |= {"stored": stored, "built": built}
    elif remedy := of_scheduler(str(error), source.checkpoint.inventory):
        fix = remedy
    elif _NO_INPUT in str(error):
        fault = [f"{name} reads standard input, which is empty: {found.fault}"]
    return failed(SCRIPT, fault, fix, **figures)


def _reason_outside(error: BaseException, found: Blame, session: Session, name: str) -> str:
    """The reason outside of the script for an exception; empty if the script is at fault."""
    is_inside = any(isinstance(one, OSError) and session.is_checkpoint(one.filename) for one in _chain(error))
    kinds = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    if _NO_NCCL in str(error):
        return f"not supported by the simulation: {found.fault}"
    if "PermissionError" in kinds and is_inside:
        return f"{name} changes the checkpoint before its step: verify a copy of the checkpoint: {found.fault}"
    if _asks_terminal(error, session, found.evidence):
        return f"{name} asks the terminal, and standard input is none here: {found.fault}"
    if not kinds.isdisjoint(_MISSING) and not is_inside and not _wrong_argument(error, session):
        return f"{name} needs something that this machine does not have: {found.fault}"
    return ""


def _asks_terminal(error: BaseException, session: Session, at: Mapping[str, object]) -> bool:
    """Whether an exception is of a call for a terminal, or of a line that reads what a program printed about it."""
    if any(isinstance(one, OSError) and one.errno == errno.ENOTTY for one in _chain(error)):
        return True
    asked, line = session.terminal, at.get("line")
    if asked is None or at.get("file") != asked.file or not isinstance(line, int):
        return False
    return asked.number <= line <= asked.number + _LINES_AFTER


def _wrong_argument(error: BaseException, session: Session) -> str:
    """The missing file that an argument of the script names, before the checkpoint was loaded; empty for none."""
    names = [str(one.filename) for one in _chain(error) if isinstance(one, FileNotFoundError) and one.filename]
    return next((one for one in names if not session.loads and any(one in given for given in session.arguments)), "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it was raised from. An exception that was only handled is not a cause."""
    while error is not None:
        yield error
        error = error.__cause__

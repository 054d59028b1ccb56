"""Record the loads and optimizer steps of a training script, and end the script after its step.

Functions of torch and safetensors are replaced while the script runs.
"""

from __future__ import annotations

import contextlib
import filecmp
import functools
import io
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import safetensors
import safetensors.torch as safetensors_torch
import torch
from torch import nn
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]  # pickle stays outside
from torch.distributed.checkpoint import filesystem
from torch.optim import optimizer as optimizers

from ckptmove.verification.case.blame import line_evidence
from ckptmove.verification.case.source import line_of
from ckptmove.verification.case.watch import Watch
from ckptmove.verification.checks import SCRIPT, failed, listed, skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptmove.verification.case.source import Line
    from ckptmove.verification.case.user_code import Entrance
    from ckptmove.verification.evidence import CheckResult

    #: Called with an optimizer; the result of the check ends the script, None lets it go on.
    Observe = Callable[[torch.optim.Optimizer], CheckResult | None]

#: Seconds in which a script has to end when its check is decided, and seconds that it goes on after a step that passed;
#: then the process ends.
GRACE: Final = 5.0
#: Optimizer steps that a script may make before it loads the checkpoint.
_STEPS_BEFORE: Final = 20
#: Steps that a gradient scaler may skip because gradients are not finite.
_SKIPPED_STEPS: Final = 40
#: Environment variable that makes ``torch.load`` unpickle by default, and its values.
_NO_WEIGHTS_ONLY: Final = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_TRUE: Final = frozenset({"1", "y", "yes", "true"})


HOW_TO_RESUME: Final = "pass the checkpoint by the script's own option, after --: -- --resume PATH"


class Stopped(BaseException):
    """Ends a script when its check is decided. Every later call of torch raises it again."""


class Session:
    """What a script has loaded so far, and the result of the check.

    Attributes:
        entrance: knows which files are the user's.
        arguments: command-line arguments of the script.
        check: the result; None until it is known.
        passed: the result of a step that passed, after which the script goes on up to its next step or save.
        loads: the user's lines that loaded the checkpoint.
        others: other files that were loaded.
        kept: files that were there before, and that the script did not get to overwrite.
        modules: modules whose ``load_state_dict`` was called after the load, in order.
        buffers: copies of the buffers of these modules after the call, by the module's identity and the buffer's key.
        optimizers: optimizers whose ``load_state_dict`` was called after the load.
    """

    def __init__(
        self,
        path: str,
        entrance: Entrance,
        home: Line,
        end: Callable[[CheckResult], None],
        arguments: Sequence[str],
        foreign: Sequence[str] = (),
    ) -> None:
        """Begin with nothing loaded.

        Args:
            path: the checkpoint.
            entrance: knows which files are the user's.
            home: line to report if no line of the user's code is known.
            end: sends the result and ends the process, for a script that does not end.
            arguments: command-line arguments of the script.
            foreign: names in a ``.metadata`` of the checkpoint whose code unpickling might run.
        """
        self.entrance = entrance
        self.check: CheckResult | None = None
        self.passed: CheckResult | None = None
        self.loads: list[Line] = []
        self.others: list[str] = []
        self.kept: list[str] = []
        self._written: set[str] = set()
        self.modules: list[nn.Module] = []
        self.buffers: dict[int, dict[str, torch.Tensor]] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self._path = os.path.realpath(path)
        self._home = home
        self._end = end
        self.arguments = arguments
        self._foreign = foreign
        self._timer: threading.Timer | None = None

    def stop(self, check: CheckResult) -> NoReturn:
        """Decide the check, and end the script.

        Raises:
            Stopped: always.
        """
        self.check = check
        self._end_later(check)
        raise Stopped

    def go_on(self, check: CheckResult) -> None:
        """Let the script finish its iteration after a step that passed: the rest may have faults of its own."""
        self.passed = check
        self._end_later(check)

    def stop_if_passed(self) -> None:
        """End the script if its step has passed.

        Raises:
            Stopped: if it has.
        """
        if self.passed is not None:
            self.stop(self.passed)

    def _end_later(self, check: CheckResult) -> None:
        self.close()
        self._timer = threading.Timer(GRACE, self._end, [check])
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Let the process live: the script has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def raise_if_stopped(self) -> None:
        """Raise Stopped again, if the script has caught it."""
        if self.check is not None:
            raise Stopped

    def here(self) -> Line:
        """The user's line that runs in this thread."""
        frame = self.entrance.caller(sys._getframe(1))  # noqa: SLF001  # the frame, without a traceback
        return self._home if frame is None else line_of(frame.f_code.co_filename, frame.f_lineno)

    def is_checkpoint(self, file: object) -> bool:
        """Whether a path or an open file is the checkpoint, a file inside it, or a copy of it."""
        if isinstance(file, io.BytesIO):
            own, data = Path(self._path), file.getbuffer()
            return own.is_file() and data.nbytes == own.stat().st_size and data == own.read_bytes()
        path = _path_of(file)
        if path is None:
            return False
        if self.is_inside(path):
            return True
        return Path(self._path).is_file() and Path(path).is_file() and filecmp.cmp(path, self._path, shallow=False)

    def is_inside(self, file: object) -> bool:
        """Whether a path or an open file is the checkpoint or a file inside it."""
        real = os.path.realpath(_path_of(file) or os.devnull)
        return real == self._path or real.startswith(self._path + os.sep)

    def may_save(self, path: str) -> bool:
        """Whether a file or a directory may be written: only one that the script itself has made.

        Raises:
            Stopped: after a step that passed.
        """
        self.raise_if_stopped()
        self.stop_if_passed()
        real = os.path.realpath(path)
        if real not in self._written and os.path.lexists(path):
            self.kept.append(path)
            return False
        self._written.add(real)
        return True

    def may_hold_piece(self, file: object) -> bool:
        """Whether a file in memory may have bytes of the checkpoint, as of an object in a distributed one."""
        return isinstance(file, io.BytesIO) and bool(self.loads) and Path(self._path).is_dir()

    def refuse_foreign(self) -> None:
        """Stop a script that would unpickle a ``.metadata`` with names that are not torch's."""
        if self._foreign:
            self.stop_unpickling(f".metadata names {listed(self._foreign)}")

    def stop_unpickling(self, reason: str) -> NoReturn:
        """Stop a script that would unpickle the checkpoint.

        Raises:
            Stopped: always.
        """
        line = self.here()
        self.stop(
            skipped(
                SCRIPT,
                f"not proven: {line} would unpickle the checkpoint: {reason}",
                "verify a copy without objects: ckptmove convert --plain",
                proven=False,
                **line_evidence(line),
            )
        )

    def note_load(self, file: object) -> bool:
        """Record a load, and return whether it is of the checkpoint."""
        is_own = self.is_checkpoint(file)
        if is_own:
            self.loads.append(self.here())
        elif (path := _path_of(file)) is not None:
            self.others.append(path)
        return is_own


def _path_of(file: object) -> str | None:
    named = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    return os.fspath(named) if isinstance(named, (str, os.PathLike)) else None


class ScriptWatch(Watch):
    """Record of the calls of torch, which end a script that caught :class:`Stopped`."""

    def __init__(self, device: torch.device, entrance: Entrance, session: Session) -> None:
        super().__init__(device, entrance)
        self._session = session

    def before_call(self) -> None:
        """Raise Stopped again, if the script has caught it."""
        self._session.raise_if_stopped()


@contextlib.contextmanager
def recorded(session: Session, begin: Observe, finish: Observe) -> Iterator[None]:
    """Replace the functions that load, save and step, while the context is open.

    Args:
        session: the record.
        begin: called before an optimizer's step, after the checkpoint was loaded.
        finish: called after it.
    """
    with contextlib.ExitStack() as stack:
        for owner in (torch, torch.serialization):
            stack.enter_context(_replaced(owner, "load", functools.partial(_torch_load, session)))
            stack.enter_context(_replaced(owner, "save", functools.partial(_save, session)))
        stack.enter_context(_replaced(safetensors_torch, "load_file", functools.partial(_noted, session)))
        stack.enter_context(_replaced(safetensors_torch, "save_file", functools.partial(_save_file, session)))
        for owner in (safetensors, safetensors_torch):
            stack.enter_context(_replaced(owner, "safe_open", functools.partial(_noted, session)))
        for name in ("_is_complete", "_end_ptr"):
            stack.enter_context(_replaced(safetensors_torch, name, _of_host))
        stack.enter_context(_replaced(filesystem.FileSystemReader, "read_metadata", _metadata(session)))
        stack.enter_context(_replaced(filesystem.FileSystemWriter, "prepare_local_plan", _plan(session)))
        for name in ("spawn", "start_processes"):
            stack.enter_context(_replaced(torch.multiprocessing, name, functools.partial(_start, session)))
        stack.enter_context(_replaced(nn.Module, "load_state_dict", _of_module(session)))
        stack.enter_context(_replaced(torch.optim.Optimizer, "load_state_dict", _of_optimizer(session)))
        stack.enter_context(_replaced(torch.amp.GradScaler, "update", _update(session)))
        steps = _Steps(session, begin, finish)
        stack.callback(optimizers.register_optimizer_step_pre_hook(steps.before).remove)
        stack.callback(optimizers.register_optimizer_step_post_hook(steps.after).remove)
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, make: Any) -> Iterator[None]:
    """Replace a function by one that is given the original as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original, updated=())
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return make(original, *args, **kwargs)

    made = _as_class(original, replacement) if isinstance(original, type) else replacement
    setattr(owner, name, made)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _as_class(original: type, call: Callable[..., Any]) -> type:
    """A class whose calls are those of a function. ``isinstance`` accepts instances of the original."""

    class Kind(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, original)

    return Kind(original.__name__, (), {})


def _of_host(original: Any, tensor: torch.Tensor) -> Any:
    """Call a function that reads a tensor's address, which a simulated tensor has on the CPU."""
    return original(getattr(tensor, "host", tensor))


def _torch_load(session: Session, original: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a file. The checkpoint is never unpickled, also if the script asks for it."""
    session.raise_if_stopped()
    if not session.note_load(f) and not session.may_hold_piece(f):
        return original(f, *args, **kwargs)
    safe = {key: value for key, value in kwargs.items() if key != "pickle_module"}
    try:
        return original(f, *args[:1], **{**safe, "weights_only": True})
    except UnpicklingError as error:
        if not _unpickles(*args[1:2], **kwargs):
            raise
        session.stop_unpickling(str(error.__context__ or error).strip().partition("\n")[0])


def _unpickles(pickle_module: Any = None, *, weights_only: Any = None, **_options: Any) -> bool:
    """Whether ``torch.load`` unpickles with these arguments. From torch/serialization.py (``load``)."""
    if weights_only is not None:
        return not weights_only
    by_default = getattr(torch.serialization, "_default_to_weights_only", bool)  # torch 2.4 and 2.5 unpickle
    return os.environ.get(_NO_WEIGHTS_ONLY, "0") in _TRUE or not by_default(pickle_module)


def _noted(session: Session, original: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
    session.raise_if_stopped()
    session.note_load(filename)
    return original(filename, *args, **kwargs)


def _save(session: Session, original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a file, but not over one that was there before. What a script opens itself, it may write."""
    is_path = isinstance(f, (str, os.PathLike))
    if not is_path:
        session.raise_if_stopped()
        session.stop_if_passed()
    return original(obj, f, *args, **kwargs) if not is_path or session.may_save(os.fspath(f)) else None


def _save_file(session: Session, original: Any, tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
    """The same with the arguments of safetensors."""
    return _save(session, original, tensors, filename, *args, **kwargs)


def _start(session: Session, _original: Any, fn: Any, args: Any = (), nprocs: int = 1, **_options: Any) -> Any:
    """Call a function that would run in a process for each device, if there is one device."""
    session.raise_if_stopped()
    if nprocs == 1:
        return fn(0, *args)
    line = session.here()
    reason = f"not proven: it starts {nprocs} processes, which are not followed, at {line}: {line.source}"
    return session.stop(skipped(SCRIPT, reason, proven=False, **line_evidence(line)))


def _metadata(session: Session) -> Any:
    def read_metadata(original: Any, reader: Any, *args: Any, **kwargs: Any) -> Any:
        session.raise_if_stopped()
        if session.note_load(reader.path):
            session.refuse_foreign()
        return original(reader, *args, **kwargs)

    return read_metadata


def _plan(session: Session) -> Any:
    def prepare_local_plan(original: Any, writer: Any, *args: Any, **kwargs: Any) -> Any:
        # Before a file is opened, and so truncated.
        if (Path(writer.path) / ".metadata").exists() and not session.may_save(os.fspath(writer.path)):
            line = session.here()
            reason = f"not proven: it would overwrite {writer.path} before its step, at {line}: {line.source}"
            session.stop(skipped(SCRIPT, reason, proven=False, **line_evidence(line)))
        session.may_save(os.fspath(Path(writer.path) / ".metadata"))
        return original(writer, *args, **kwargs)

    return prepare_local_plan


def _of_module(session: Session) -> Any:
    depth = 0

    def load_state_dict(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        session.raise_if_stopped()
        depth += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            depth -= 1
        if not depth and session.loads:
            session.modules.append(module)
            buffers = module.named_buffers(remove_duplicate=False)
            session.buffers[id(module)] = {name: one.detach().clone() for name, one in buffers}
        return result

    return load_state_dict


def _of_optimizer(session: Session) -> Any:
    def load_state_dict(original: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        session.raise_if_stopped()
        result = original(optimizer, *args, **kwargs)
        if session.loads:
            session.optimizers.append(optimizer)
        return result

    return load_state_dict


def _update(session: Session) -> Any:
    """Count the updates of a gradient scaler, one for each step that it made or skipped."""
    count = 0

    def update(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        session.raise_if_stopped()
        count += bool(session.loads)
        if count >= _SKIPPED_STEPS:
            line = session.here()
            fault = f"the gradient scaler skipped {count} steps, because gradients are not finite, at {line}"
            session.stop(failed(SCRIPT, fault, proven=False, **line_evidence(line)))
        return original(scaler, *args, **kwargs)

    return update


class _Steps:
    """Hooks around the steps of all optimizers. The step of a subclass may call that of its parent."""

    def __init__(self, session: Session, begin: Observe, finish: Observe) -> None:
        self._session = session
        self._begin = begin
        self._finish = finish
        self._open: list[torch.optim.Optimizer] = []
        self._early = 0

    def before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Hook before a step."""
        self._session.raise_if_stopped()
        is_outer = not any(one is optimizer for one in self._open)
        self._open.append(optimizer)
        if not is_outer:
            return
        self._session.stop_if_passed()
        if self._session.loads:
            self._decide(self._begin(optimizer))
        else:
            self._early += 1
            if self._early > _STEPS_BEFORE:
                fault = f"it made {_STEPS_BEFORE} optimizer steps without loading the checkpoint"
                self._session.stop(never_loaded(self._session, fault))

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Hook after a step."""
        self._session.raise_if_stopped()
        self._open.pop()
        if self._session.loads and not any(one is optimizer for one in self._open):
            self._decide(self._finish(optimizer))

    def _decide(self, check: CheckResult | None) -> None:
        if check is None:
            return
        if check.status == "passed":
            self._session.go_on(check)
        else:
            self._session.stop(check)


def never_loaded(session: Session, fault: str) -> CheckResult:
    """Result for a script that did not load the checkpoint."""
    others = ", ".join(dict.fromkeys(session.others))
    fault += f"; it loaded {others}" if others else ""
    is_named = any(session.is_inside(one.rpartition("=")[2]) for one in session.arguments)
    fault += "; its arguments name the checkpoint, but it never opens it" if is_named else ""
    fix = "" if is_named else HOW_TO_RESUME
    return failed(SCRIPT, fault, fix, loaded=list(dict.fromkeys(session.others)), proven=False)

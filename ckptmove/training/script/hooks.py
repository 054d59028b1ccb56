"""Record the loads and optimizer steps of a training script, and end the script after its step.

Functions of torch, safetensors and ckptmove are replaced while the script runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import sys
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import safetensors
import safetensors.torch as safetensors_torch
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.optim import optimizer as optimizers

from ckptmove.io.locations import OpenFile
from ckptmove.proof.checks import SCRIPT, failed
from ckptmove.proof.loading import load as loading
from ckptmove.proof.refusal import UnpicklingError, reason_of
from ckptmove.simulation.generator import DeviceGenerator
from ckptmove.simulation.replaced import replaced
from ckptmove.text import Argument, amount, some
from ckptmove.training.case.options import record_options
from ckptmove.training.case.taken import SOURCES
from ckptmove.training.code.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.loading.load import LoadRequest
    from ckptmove.training.code.entrance import Entrance
    from ckptmove.training.code.source import Line
    from ckptmove.training.code.watch import Refusal
    from ckptmove.training.script.session import Session

    #: Called with an optimizer; the result of the check ends the script, None lets it go on.
    Observe = Callable[[torch.optim.Optimizer], CheckResult | None]
    #: Called with an exception that ended a step; returns the result of the check.
    Explain = Callable[[BaseException], CheckResult]

#: Steps that a gradient scaler may skip because gradients are not finite.
_SKIPPED_STEPS: Final = 40
#: Environment variable that makes ``torch.load`` unpickle by default, and its values.
_NO_WEIGHTS_ONLY: Final = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_TRUE: Final = frozenset({"1", "y", "yes", "true"})
#: Optimizer steps that a script may make before it loads the checkpoint.
_STEPS_BEFORE: Final = 20
#: Steps that may raise an exception, which the script catches.
_CAUGHT_STEPS: Final = 10


class ScriptWatch(Watch):
    """Record of the calls of torch, which end a script that caught :class:`Stopped`."""

    def __init__(self, device: torch.device, entrance: Entrance, session: Session) -> None:
        super().__init__(device, entrance)
        self._session = session

    def before_call(self) -> None:
        """Raise Stopped again, if the script has caught it."""
        self._session.raise_if_stopped()


@contextlib.contextmanager
def recorded(session: Session, steps: Steps) -> Iterator[None]:
    """Replace the functions that load, save and step, while the context is open."""
    pickles = sys.modules["pickle"]
    reader, writer = filesystem.FileSystemReader, filesystem.FileSystemWriter
    functions: list[tuple[Any, str, Callable[..., Any]]] = [
        *((owner, "load", _torch_load) for owner in (torch, torch.serialization)),
        *((owner, "save", _save) for owner in (torch, torch.serialization)),
        *((owner, "safe_open", _noted) for owner in (safetensors, safetensors_torch)),
        (safetensors_torch, "load_file", _noted),
        (safetensors_torch, "save_file", _save_file),
        *((safetensors_torch, name, _of_host) for name in ("_is_complete", "_end_ptr")),
        (loading, "load_checkpoint", _load_checkpoint),
        (reader, "read_metadata", _read_metadata),
        (writer, "prepare_local_plan", _prepare_plan),
        *((pickles, name, _unpickle) for name in ("load", "loads")),
        # Of joblib, dill and others. Attributes of the class written in C cannot be set.
        *((kind, "__init__", _construct) for kind in (pickles._Unpickler, *pickles.Unpickler.__subclasses__())),
        *((torch.multiprocessing, name, _start) for name in ("spawn", "start_processes")),
        (nn.Module, "load_state_dict", _load_module),
        (torch.optim.Optimizer, "load_state_dict", _load_optimizer),
        (torch.optim.Optimizer, "__setstate__", _set_state),
        *_generators(),
        (torch, "Generator", _make_generator),
        (torch.amp.GradScaler, "update", _update_scaler),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, function in functions:
            stack.enter_context(_wrapped(session, owner, name, function))
        session.note_first = functools.partial(_note_classes, session, stack)
        stack.enter_context(replaced(pickles, Unpickler=_watched_unpickler(session, pickles.Unpickler)))
        stack.callback(optimizers.register_optimizer_step_pre_hook(steps.before).remove)
        stack.callback(optimizers.register_optimizer_step_post_hook(steps.after).remove)
        yield


def _wrapped(session: Session, owner: Any, name: str, make: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace a function by one that is given the session and the original as its first arguments."""
    original = getattr(owner, name)

    @functools.wraps(original, updated=())
    def replacement(*args: Any, **kwargs: Any) -> Any:
        session.raise_if_stopped()
        return make(session, original, *args, **kwargs)

    made = _as_class(original, replacement) if isinstance(original, type) else replacement
    return replaced(owner, **{name: made})


def _as_class(original: type, call: Callable[..., Any]) -> type:
    """A class whose calls are those of a function. ``isinstance`` accepts instances of the original."""

    class Kind(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, original)

    return Kind(original.__name__, (), {})


def _of_host(_session: Session, original: Any, tensor: torch.Tensor) -> Any:
    """Call a function that reads a tensor's address, which a simulated tensor has on the CPU."""
    return original(getattr(tensor, "host", tensor))


def _torch_load(session: Session, original: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a file. The checkpoint is never unpickled, also if the script asks for it."""
    if not session.note_load(f) and not session.may_hold_piece(f):
        value = original(f, *args, **kwargs)
        session.note_tensors(value, is_own=False)
        return value
    safe = {key: value for key, value in kwargs.items() if key != "pickle_module"}
    try:
        value = original(f, *args[:1], **{**safe, "weights_only": True})
    except UnpicklingError as error:
        if not _unpickles(*args[1:2], **kwargs):
            session.refusal = error
            raise
        session.stop_unpickling(reason_of(error))
    session.note_tensors(value, is_own=True)
    return value


def _unpickles(pickle_module: Any = None, *, weights_only: Any = None, **_options: Any) -> bool:
    """Whether ``torch.load`` unpickles with these arguments. From torch/serialization.py (``load``)."""
    if weights_only is not None:
        return not weights_only
    by_default = getattr(torch.serialization, "_default_to_weights_only", bool)  # torch 2.4 and 2.5 unpickle
    return os.environ.get(_NO_WEIGHTS_ONLY, "0") in _TRUE or not by_default(pickle_module)


def _unpickle(session: Session, original: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that unpickles a file or bytes, but not with the checkpoint."""
    if not session.is_harmless and session.note_load(file):
        session.stop_unpickling("pickle runs the code that a file names")
    return original(file, *args, **kwargs)


def _construct(session: Session, original: Any, unpickler: Any, *args: Any, **kwargs: Any) -> None:
    _unpickle(session, functools.partial(original, unpickler), *args, **kwargs)


def _watched_unpickler(session: Session, original: Any) -> Any:
    """A subclass of an unpickler, for scripts that inherit from it."""

    class Watched(original):  # type: ignore[misc]  # the class of this process
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            session.raise_if_stopped()
            _unpickle(session, super().__init__, *args, **kwargs)

    return Watched


def _noted(session: Session, original: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
    is_own = session.note_load(filename)
    value = original(filename, *args, **kwargs)
    session.note_tensors(value, is_own=is_own)
    return value


def _load_checkpoint(session: Session, original: Any, request: LoadRequest) -> Any:
    """Run a request of ``ckptmove.load``, which unpickles nothing."""
    path = request.path
    return _noted(session, lambda _file: original(request), path.file if isinstance(path, OpenFile) else path)


def _save(session: Session, original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a file, but not over one that was there before. What a script opens itself, it may write."""
    session.stop_if_passed()
    may_save = not isinstance(f, (str, os.PathLike)) or session.may_save(os.fspath(f))
    return original(obj, f, *args, **kwargs) if may_save else None


def _save_file(session: Session, original: Any, tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
    return _save(session, original, tensors, filename, *args, **kwargs)


def _start(session: Session, _original: Any, fn: Any, args: Any = (), nprocs: int = 1, **_options: Any) -> Any:
    """Call a function that would run in a process for each device, if there is one device."""
    if nprocs == 1:
        return fn(0, *args)
    return session.stop_unproven(f"it starts {nprocs} processes, which are not followed")


def _read_metadata(session: Session, original: Any, reader: Any, *args: Any, **kwargs: Any) -> Any:
    session.is_harmless = session.note_load(reader.path)
    if session.is_harmless:
        session.refuse_foreign()
    try:
        return original(reader, *args, **kwargs)
    finally:
        session.is_harmless = False


def _prepare_plan(session: Session, original: Any, writer: Any, *args: Any, **kwargs: Any) -> Any:
    session.stop_if_passed()
    # Before a file is opened, and so truncated.
    if (Path(writer.path) / ".metadata").exists() and not session.may_save(os.fspath(writer.path)):
        session.stop_unproven(f"it would overwrite {writer.path} before its step")
    session.may_save(os.fspath(Path(writer.path) / ".metadata"))
    return original(writer, *args, **kwargs)


def _load_module(session: Session, original: Any, module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a module, and record it unless another one is being loaded, which it may be a part of."""
    is_outer, session.is_loading = not session.is_loading, True
    if is_outer and session.loads:
        session.note_taken(state_dict)
    is_of_other_file = is_outer and session.is_of_other_file(state_dict)
    try:
        result = original(module, state_dict, *args, **kwargs)
    finally:
        session.is_loading = not is_outer
    if is_of_other_file:
        session.elsewhere.append(module)
    elif is_outer and session.loads:
        session.modules.append(module)
        buffers = module.named_buffers(remove_duplicate=False)
        session.buffers[id(module)] = {name: one.detach().clone() for name, one in buffers}
    return result


def _load_optimizer(
    session: Session, original: Any, optimizer: torch.optim.Optimizer, state_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(optimizer, state_dict, *args, **kwargs)
    if session.loads and not session.is_of_other_file(state_dict):
        session.optimizers.append(optimizer)
    return result


def _set_state(session: Session, original: Any, optimizer: torch.optim.Optimizer, *args: Any) -> None:
    """Restore an optimizer, as its ``load_state_dict`` does; some classes have one of their own, which calls this."""
    original(optimizer, *args)
    if session.loads:
        record_options(optimizer, session.line_in)


def _generators() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """The functions that restore an RNG state, each with its owner and its replacement."""
    modules: list[Any] = [torch, *(getattr(torch, kind, None) for kind in ("cuda", "mps", "xpu"))]
    modules += [getattr(one, "random", None) for one in modules]
    modules += [random, sys.modules.get("numpy.random")]
    for owner in modules:
        source = next((one for one in SOURCES if one in str(getattr(owner, "__name__", "")).split(".")[:1]), "")
        for name in ("set_rng_state", "set_rng_state_all", "setstate", "set_state"):
            if hasattr(owner, name):
                yield owner, name, functools.partial(_take, source=source)
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
            if hasattr(owner, name):
                yield owner, name, functools.partial(_seed, source=source)
    yield random.Random, "setstate", _take_into
    yield DeviceGenerator, "set_state", _take_into


def _take(session: Session, original: Any, *args: Any, receiver: object = None, source: str = "", **kwargs: Any) -> Any:
    """Call a function that restores something, which is its first argument."""
    result = original(*args, **kwargs)
    if session.loads:
        session.note_taken(next(chain(args, kwargs.values()), None), receiver, source)
    return result


def _take_into(session: Session, original: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    return _take(session, functools.partial(original, target), *args, receiver=target, **kwargs)


def _seed(session: Session, original: Any, *args: Any, source: str, **kwargs: Any) -> Any:
    if session.loads:
        session.note_seeded(source)
    return original(*args, **kwargs)


def _make_generator(session: Session, original: Any, *args: Any, **kwargs: Any) -> torch.Generator:
    """Make a generator whose ``set_state`` is noted. That of a simulated device is a class of Python already."""
    made: torch.Generator = original(*args, **kwargs)
    if type(made) is not torch._C.Generator:
        return made

    class Noted(torch._C.Generator):
        def set_state(self, *args: Any, **kwargs: Any) -> torch.Generator:
            _take(session, super().set_state, *args, receiver=self, **kwargs)
            return self

    return Noted(made.device)


def _note_classes(session: Session, stack: contextlib.ExitStack) -> None:
    """Note the calls of ``load_state_dict`` of every class, once the checkpoint is loaded."""
    kinds: set[type] = {object}
    pending: list[type] = [object]
    for kind in pending:  # the list grows
        children: list[type] = type.__subclasses__(kind)
        pending += (one for one in children if one not in kinds)
        kinds.update(children)
        is_settable = type(kind).__setattr__ is type.__setattr__
        is_own = inspect.isfunction(vars(kind).get("load_state_dict"))
        if is_own and is_settable and kind not in {nn.Module, torch.optim.Optimizer}:
            stack.enter_context(_wrapped(session, kind, "load_state_dict", _take_into))


def _update_scaler(session: Session, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
    """Count the updates of a gradient scaler, one for each step that it made or skipped."""
    session.skipped_steps += bool(session.loads)
    if session.skipped_steps >= _SKIPPED_STEPS:
        line = session.here()
        fault = f"{skipped_by_scaler(session)}, at {line.quoted}"
        session.stop(failed(SCRIPT, fault, proven=False, **line.evidence))
    return original(scaler, *args, **kwargs)


def how_to_resume() -> str:
    """Fix for a script that does not load the checkpoint."""
    return f"pass the checkpoint by the script's own option: {Argument('script_args', '--resume PATH')}"


class Started(NamedTuple):
    """A step that has begun."""

    optimizer: torch.optim.Optimizer
    frame: FrameType  # the frame that calls the hooks, which runs as long as the step
    line: Line  # the user's line that called it


class Steps:
    """Hooks around the steps of all optimizers. The step of a subclass may call that of its parent."""

    def __init__(
        self, session: Session, begin: Observe, finish: Observe, explain: Explain, refusals: Sequence[Refusal]
    ) -> None:
        """Begin without a step.

        Args:
            begin: called before an optimizer's step, after the checkpoint was loaded.
            finish: called after it.
            explain: called with an exception of torch that ended a step, and that the script caught.
            refusals: the calls that torch refused so far.
        """
        self._session = session
        self._begin = begin
        self._finish = finish
        self._explain = explain
        self._refusals = refusals
        self._open: list[Started] = []
        self._early = 0
        self._caught = 0

    def before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Hook before a step."""
        self._session.raise_if_stopped()
        self.judge_raised()
        is_outer = not self._is_open(optimizer)
        self._open.append(Started(optimizer, sys._getframe(1), self._session.here()))  # the caller
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
        self.judge_raised()
        self._open.pop()
        if self._session.loads and not self._is_open(optimizer):
            self._session.raised.pop(id(optimizer), None)
            self._decide(self._finish(optimizer))

    def judge_raised(self) -> None:
        """Judge the steps that raised an exception, which the script caught: no hook is called after them.

        A script may try again, for example with a smaller batch.
        """
        running = set[FrameType]()
        for frame in sys._current_frames().values():  # of all threads
            one: FrameType | None = frame
            while one is not None:
                running.add(one)
                one = one.f_back
        raised = [one for one in self._open if one.frame not in running]
        self._open = [one for one in self._open if one.frame in running]
        for step in raised if self._session.loads else ():
            error = next((one.error for one in self._refusals if _is_raised_in(step.frame, one.error)), None)
            self._decide(None if error is None else self._explain(error))
            kind = type(step.optimizer).__name__
            fault = f"the step of {kind} raised an exception, which the script caught, at {step.line.quoted}"
            self._session.raised[id(step.optimizer)] = fault
            self._caught += 1
            if self._caught >= _CAUGHT_STEPS:
                self._session.stop(failed(SCRIPT, fault, proven=False, **step.line.evidence))

    def _is_open(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(one.optimizer is optimizer for one in self._open)

    def _decide(self, check: CheckResult | None) -> None:
        if check is None:
            return
        if check.status == "passed":
            self._session.go_on(check)
        else:
            self._session.stop(check)


def _is_raised_in(frame: FrameType, error: BaseException) -> bool:
    """Whether an exception was raised in a frame, or in one that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame is not frame:
        trace = trace.tb_next
    return trace is not None


def never_loaded(session: Session, fault: str) -> CheckResult:
    """Result for a script that did not load the checkpoint."""
    fault += f"; it loaded {some(session.loaded_instead, 3)}" if session.loaded_instead else ""
    is_named = any(session.is_inside(one.rpartition("=")[2]) for one in session.arguments)
    fault += "; its arguments name the checkpoint, but it never opens it" if is_named else ""
    fix = "" if is_named else how_to_resume()
    return failed(SCRIPT, fault, fix, loaded=session.loaded_instead, proven=False)


def skipped_by_scaler(session: Session) -> str:
    """Fault of a script whose gradient scaler skipped each step."""
    steps = amount(session.skipped_steps, "step")
    return f"its gradient scaler skipped all {steps} after the load: the gradients, and so the loss, are not finite"

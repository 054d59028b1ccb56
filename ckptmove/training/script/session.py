"""What a training script has loaded so far, and the result of its check."""

from __future__ import annotations

import filecmp
import gc
import io
import os
import sys
import threading
import weakref
from itertools import chain
from pathlib import Path
from types import CellType, FrameType, GeneratorType
from typing import TYPE_CHECKING, Final, NoReturn

import torch

from ckptmove.proof.checks import SCRIPT, skipped
from ckptmove.text import some
from ckptmove.training.code.containers import MAPPINGS
from ckptmove.training.code.source import line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from ckptmove.proof.evidence import CheckResult
    from ckptmove.training.code.entrance import Entrance
    from ckptmove.training.code.source import Line

#: Seconds in which a script has to end when its check is decided, and seconds that it goes on after a step that passed;
#: then the process ends.
GRACE: Final = 5.0
#: Module of this package, whose records of the script's calls hold tensors.
_PACKAGE: Final = f"{__name__.partition('.')[0]}."
#: Programs that ask the terminal, of which there is none here: for its size, its settings, its name.
_TERMINAL: Final = frozenset({"stty", "tput", "tty"})


class Stopped(BaseException):
    """Ends a script when its check is decided. Every later call of torch raises it again."""


class Session:
    """What a script has loaded so far, and the result of the check.

    Attributes:
        path: the checkpoint.
        entrance: knows which files are the user's.
        arguments: command-line arguments of the script.
        check: the result; None until it is known.
        passed: the result of a step that passed, after which the script goes on up to its next step or save.
        loads: the user's lines that loaded the checkpoint.
        others: other files that were loaded.
        refusal: exception of torch for the checkpoint, which weights-only mode refuses; None if it was not refused.
        kept: files that were there before, and that the script did not get to overwrite.
        modules: modules whose ``load_state_dict`` was called after the load, in order; without those of other files.
        elsewhere: modules that took the state_dict of another file.
        buffers: copies of the buffers of these modules after the call, by the module's identity and the buffer's key.
        optimizers: optimizers whose ``load_state_dict`` was called after the load; without those of other files.
        raised: faults of optimizers whose steps so far raised exceptions that the script caught, by their identity.
        terminal: the user's line that last started a program that asks the terminal; None for none.
        is_loading: whether a module is being loaded.
        is_harmless: whether the ``.metadata`` of the checkpoint is being unpickled, which names nothing foreign.
        skipped_steps: number of steps that gradient scalers skipped after the load.
        note_taken: called with the argument of each call that restores something after the load, with the object or
            the library that takes it.
        note_seeded: called with each library that is seeded after the load.
        note_first: called when the checkpoint is loaded for the first time.
    """

    def __init__(
        self,
        path: str,
        entrance: Entrance,
        home: Line,
        end: Callable[[CheckResult], None],
        arguments: Sequence[str],
        foreign: Sequence[str] = (),
        remedy: str = "",
    ) -> None:
        """Begin with nothing loaded.

        Args:
            entrance: knows which files are the user's.
            home: line to report if no line of the user's code is known.
            end: sends the result and ends the process, for a script that does not end.
            foreign: names in a ``.metadata`` of the checkpoint whose code unpickling might run.
            remedy: command that helps if weights-only mode refuses the checkpoint; empty if none does.
        """
        self.entrance = entrance
        self.check: CheckResult | None = None
        self.passed: CheckResult | None = None
        self.loads: list[Line] = []
        self.others: list[str] = []
        self.refusal: BaseException | None = None
        self.kept: list[str] = []
        self._written: set[str] = set()
        self.modules: list[nn.Module] = []
        self.elsewhere: list[nn.Module] = []
        # By the tensor's identity, with whether its file is the checkpoint.
        self._loaded: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}
        self._containers: set[int] = set()  # identities of the dicts and lists of the checkpoint
        self.buffers: dict[int, dict[str, torch.Tensor]] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.raised: dict[int, str] = {}
        self.terminal: Line | None = None
        self.is_loading = False
        self.is_harmless = False
        self.skipped_steps = 0
        self.note_taken: Callable[..., None] = lambda *_: None
        self.note_seeded: Callable[[str], None] = lambda _: None
        self.note_first: Callable[[], None] = lambda: None
        self._path = os.path.realpath(path)
        self._home = home
        self._end = end
        self.arguments = arguments
        self._foreign = foreign
        self.remedy = remedy
        self._timer: threading.Timer | None = None

    def stop(self, check: CheckResult) -> NoReturn:
        """Decide the check, and end the script."""
        self.check = check
        self._end_later(check)
        raise Stopped

    def go_on(self, check: CheckResult) -> None:
        """Let the script finish its iteration after a step that passed: the rest may have faults of its own."""
        self.passed = check
        self._end_later(check)

    def stop_if_passed(self) -> None:
        """End the script if its step has passed."""
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
        return self.line_in(sys._getframe(1))  # the frame, without a traceback

    def line_in(self, frame: FrameType | None) -> Line:
        """The user's line that runs in a frame or its callers."""
        own = self.entrance.caller(frame)
        return self._home if own is None else line_of(own.f_code.co_filename, own.f_lineno)

    def is_checkpoint(self, file: object) -> bool:
        """Whether a path, an open file or bytes are the checkpoint, a file inside it, or a copy of it."""
        if isinstance(file, (io.BytesIO, bytes, bytearray)):
            own, data = Path(self._path), file.getbuffer() if isinstance(file, io.BytesIO) else memoryview(file)
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
        """Whether a file or a directory may be written: only one that the script itself has made."""
        real = os.path.realpath(path)
        if real not in self._written and os.path.lexists(path):
            self.kept.append(path)
            return False
        self._written.add(real)
        return True

    def may_hold_piece(self, file: object) -> bool:
        """Whether a file in memory may have bytes of the checkpoint, as of an object in a distributed one."""
        return isinstance(file, io.BytesIO) and bool(self.loads) and Path(self._path).is_dir()

    @property
    def loaded_instead(self) -> list[str]:
        """The other files that were loaded, if the checkpoint was not."""
        return [] if self.loads else list(dict.fromkeys(self.others))

    def but_loaded(self) -> str:
        """Clause for a fault that names the files of ``loaded_instead``; empty without one."""
        return f"; it loaded {some(self.loaded_instead, 3)}, not the checkpoint" if self.loaded_instead else ""

    def refuse_foreign(self) -> None:
        """Stop a script that would unpickle a ``.metadata`` with names that are not torch's."""
        if self._foreign:
            self.stop_unpickling(f".metadata names {some(self._foreign, 3)}")

    def stop_unpickling(self, reason: str) -> NoReturn:
        """Stop a script that would unpickle the checkpoint."""
        self.stop_unproven(f"it would unpickle the checkpoint ({reason})", self.remedy)

    def note_program(self, words: Sequence[str]) -> None:
        """Record a program that asks the terminal, and stop a script that would start one with the checkpoint."""
        if not _TERMINAL.isdisjoint(map(os.path.basename, words)):
            self.terminal = self.here()
        if self.check is None and any(map(self.is_inside, words)):
            self.stop_unproven("it starts a program with the checkpoint, which is not followed")

    def stop_unproven(self, reason: str, fix: str = "") -> NoReturn:
        """Stop a script at a line after which nothing can be proven."""
        line = self.here()
        reason = f"not proven: {reason}, at {line.quoted}"
        self.stop(skipped(SCRIPT, reason, fix, proven=False, **line.evidence))

    def note_load(self, file: object) -> bool:
        """Record a load, and return whether it is of the checkpoint."""
        is_own = self.is_checkpoint(file)
        if is_own:
            if not self.loads:
                self.note_first()
            self.loads.append(self.here())
        elif (path := _path_of(file)) is not None:
            self.others.append(path)
        return is_own

    def note_tensors(self, value: object, *, is_own: bool) -> None:
        """Record which file the tensors of a loaded value are of."""
        for holder, tensors in _holders_of(value):
            if is_own or isinstance(holder, MAPPINGS):  # those in a list may be a dataset of many
                self._loaded.update((id(one), (weakref.ref(one), is_own)) for one in tensors)
            if is_own:
                self._containers.add(id(holder))

    def is_idle(self, tensor: torch.Tensor) -> bool:
        """Whether only variables hold a tensor, or the value that was loaded from the checkpoint and nothing uses."""
        holders = [one for one in gc.get_referrers(tensor) if _is_owner(one)]
        outer = [one for holder in holders for one in gc.get_referrers(holder) if one is not holders]
        loaded, is_own = self._loaded.get(id(tensor), (None, False))
        if loaded is None or loaded() is not tensor or not is_own:
            return not holders
        return all(id(one) in self._containers for one in (*holders, *filter(_is_owner, outer)))

    def is_of_other_file(self, state: object) -> bool:
        """Whether a state_dict has tensors of another file, and none of the checkpoint."""
        named = (tensors for holder, tensors in _holders_of(state) if isinstance(holder, MAPPINGS))
        known = [(one, self._loaded[id(one)]) for one in chain.from_iterable(named) if id(one) in self._loaded]
        found = {is_own for one, (loaded, is_own) in known if loaded() is one}
        return found == {False}


def _holders_of(value: object) -> Iterator[tuple[object, list[torch.Tensor]]]:
    """The dicts, lists and tuples in a value, each with the tensors in it."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        one = pending.pop()
        inner = [*one.values()] if isinstance(one, MAPPINGS) else one if isinstance(one, (list, tuple)) else ()
        if not inner or id(one) in seen:
            continue
        seen.add(id(one))
        pending += (each for each in inner if isinstance(each, (*MAPPINGS, list, tuple)))
        yield one, [each for each in inner if isinstance(each, torch.Tensor)]


def _is_owner(holder: object) -> bool:
    """Whether an object that refers to a value is neither the variables of a function or module nor of this package."""
    if isinstance(holder, dict):
        return "__builtins__" not in holder
    return not isinstance(holder, (FrameType, CellType, GeneratorType)) and not type(holder).__module__.startswith(
        _PACKAGE
    )


def _path_of(file: object) -> str | None:
    named = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    return os.fspath(named) if isinstance(named, (str, os.PathLike)) else None

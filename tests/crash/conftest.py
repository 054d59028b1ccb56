"""Compute the states of a folder after a crash at any instant, and make system calls fail.

A change is made once, on a real folder, and every call that writes is recorded. The possible states after a crash
follow from the record: the change stops after any call, and each call that was not synced until then is made, lost or
torn.
"""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import random
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from system_calls import spread

#: Maximum number of combinations of lost calls; of more, a sample of this size is drawn. Some tests draw fewer, except
#: in the complete test.
MOST_COMBINATIONS = 400
_REAL = {
    name: getattr(os, name)
    for name in (
        "open", "close", "write", "ftruncate", "fsync", "link", "rename", "replace", "unlink", "remove",
    )
}  # fmt: skip
#: The accessor that pathlib uses in Python 3.10; later versions use os.
_ACCESSOR = getattr(pathlib, "_NormalAccessor", None)


@dataclass(frozen=True)
class Call:
    """A call that changes the disk: a file (by its node) or the folder (by names)."""

    kind: str
    node: int = -1
    start: int = 0
    data: bytes = b""
    name: str = ""
    old_name: str = ""

    @property
    def is_of_folder(self):
        return self.kind in {"create", "rename", "link", "unlink"}


@dataclass
class Recorder:
    """Records every system call in a folder, and makes a chosen one fail.

    ``fail_at`` is the index of that call and ``error`` its exception. ``lasting``: all later calls fail too. ``late``:
    the call is made before it raises, like a signal.
    """

    folder: pathlib.Path
    fail_at: int = -1
    error: BaseException | None = None
    lasting: bool = False
    late: bool = False
    most_bytes: int = 1 << 30
    calls: list[Call] = field(default_factory=list)
    seen: int = 0

    def __post_init__(self):
        self._open = {}
        self._nodes = {}
        self.initial = {}
        for path in sorted(self.folder.iterdir()):
            self._nodes[path.name] = len(self._nodes)
            self.initial[path.name] = path.read_bytes()
        self._next = len(self._nodes)

    def _turn(self):
        """Raise the error before the chosen call."""
        place, self.seen = self.seen, self.seen + 1
        if self.late or self.error is None:
            return
        if place == self.fail_at or (self.lasting and place > self.fail_at >= 0):
            raise self.error

    def _made(self, call):
        """Record a call that was made."""
        self.calls.append(call)
        if self.late and self.error is not None and self.seen == self.fail_at + 1:
            raise self.error

    def _inside(self, path):
        path = pathlib.Path(path).resolve()
        return path.parent == self.folder, path.name

    def open(self, path, flags, mode=0o777, **options):
        inside, name = self._inside(path)
        is_folder = pathlib.Path(path) == self.folder
        if not inside and not is_folder:
            return _REAL["open"](path, flags, mode, **options)
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        if is_new:
            self._turn()
        fd = _REAL["open"](path, flags, mode, **options)
        if is_new:
            self._nodes[name], self._next = self._next, self._next + 1
            self._made(Call("create", self._nodes[name], name=name))
        self._open[fd] = -1 if is_folder else self._nodes[name]
        return fd

    def close(self, fd):
        self._open.pop(fd, None)
        _REAL["close"](fd)

    def write(self, fd, data):
        if fd not in self._open:
            return _REAL["write"](fd, data)
        start = os.lseek(fd, 0, os.SEEK_CUR)
        return self._written(fd, start, _REAL["write"], data)

    def _written(self, fd, start, real, data):
        self._turn()
        count = real(fd, bytes(data)[: self.most_bytes])
        self._made(Call("write", self._open[fd], start, bytes(data)[:count]))
        return count

    def ftruncate(self, fd, size):
        self._turn()
        _REAL["ftruncate"](fd, size)
        self._made(Call("truncate", self._open[fd], size))

    def fsync(self, fd):
        if fd not in self._open:
            return _REAL["fsync"](fd)
        self._turn()
        node = self._open[fd]
        _REAL["fsync"](fd)
        self._made(Call("sync-folder" if node < 0 else "sync", node))
        return None

    def link(self, source, target, **options):
        self._turn()
        _REAL["link"](source, target, **options)
        name = pathlib.Path(target).name
        self._nodes[name] = self._nodes[pathlib.Path(source).name]
        self._made(Call("link", self._nodes[name], name=name))

    def rename(self, source, target, **options):
        self._turn()
        _REAL["replace"](source, target, **options)
        name, old_name = pathlib.Path(target).name, pathlib.Path(source).name
        self._nodes[name] = self._nodes.pop(old_name)
        self._made(Call("rename", self._nodes[name], name=name, old_name=old_name))

    replace = rename

    def unlink(self, path, **options):
        inside, name = self._inside(path)
        if not inside or not os.path.lexists(path):
            return _REAL["unlink"](path, **options)
        self._turn()
        _REAL["unlink"](path, **options)
        self._made(Call("unlink", self._nodes.pop(name), name=name))
        return None

    remove = unlink


@contextmanager
def _standing_before(recorder, monkeypatch):
    with monkeypatch.context() as patches:
        for name in _REAL:
            patches.setattr(os, name, getattr(recorder, name))
            if _ACCESSOR is not None:
                patches.setattr(_ACCESSOR, name, staticmethod(getattr(recorder, name)), raising=False)
        yield recorder


def _pending(calls):
    """Indices of the calls that are not durable yet."""
    pending = []
    for place, call in enumerate(calls):
        if call.kind == "sync":
            pending = [one for one in pending if calls[one].is_of_folder or calls[one].node != call.node]
        elif call.kind == "sync-folder":
            pending = [one for one in pending if not calls[one].is_of_folder]
        else:
            pending.append(place)
    return pending


def _fates(call):
    """Possible outcomes of a call that is not durable: made, lost or torn."""
    if call.kind != "write":
        return (call, None)
    middle, size = len(call.data) // 2, len(call.data)
    torn = (
        call.data[:middle],
        bytes(size),
        bytes(middle) + call.data[middle:],
        call.data[:middle] + bytes(size - middle),
    )
    return (call, None, *(replace(call, data=data) for data in torn))


def _combinations(calls, generator, most):
    """The calls that remain after a crash, with every combination of outcomes."""
    pending = _pending(calls)
    fates = [_fates(calls[place]) for place in pending]
    count = 1
    for each in fates:
        count *= len(each)
    if count <= most:
        drawn = itertools.product(*fates)
    else:
        drawn = [tuple(each[0] for each in fates), tuple(None for _ in fates)]
        drawn += [tuple(map(generator.choice, fates)) for _ in range(most)]
    for fate in drawn:
        instead = dict(zip(pending, fate, strict=True))
        yield [instead.get(place, call) for place, call in enumerate(calls)]


def _contents(initial, calls):
    """Content of the folder after some calls: bytes by name."""
    names = {name: node for node, name in enumerate(initial)}
    files = {names[name]: bytearray(data) for name, data in initial.items()}
    for call in calls:
        if call is None or call.kind.startswith("sync"):
            continue
        data = files.setdefault(call.node, bytearray())
        if call.kind == "write":
            data.extend(bytes(max(0, call.start - len(data))))
            data[call.start : call.start + len(call.data)] = call.data
        elif call.kind == "truncate":
            data.extend(bytes(max(0, call.start - len(data))))
            del data[call.start :]
        else:
            names.pop(call.old_name or call.name, None)
            if call.kind != "unlink":
                names[call.name] = call.node
    return {name: bytes(files[node]) for name, node in names.items()}


class Crashes:
    """Makes a change, and computes the states that a crash can leave."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self._monkeypatch = monkeypatch

    def record(self, change, **options):
        """Make a change and record its calls; exceptions pass through."""
        recorder = Recorder(self.folder, **options)
        with _standing_before(recorder, self._monkeypatch):
            change()
        return recorder

    def killed(self, recorder):
        """States after the process alone is killed: the system keeps all calls that were made."""
        return [_contents(recorder.initial, recorder.calls[:count]) for count in range(len(recorder.calls) + 1)]

    def states(self, recorder, fast=MOST_COMBINATIONS):
        """Distinct states that a crash of the machine can leave, with at most so many combinations after each call."""
        generator, most = random.Random(0), len(spread(MOST_COMBINATIONS, fast))
        found = {}
        for count in range(len(recorder.calls) + 1):
            for left in _combinations(recorder.calls[:count], generator, most):
                contents = _contents(recorder.initial, left)
                found.setdefault(tuple(sorted(contents.items())), contents)
        return list(found.values())

    def put(self, contents):
        """Replace the content of the folder by these files."""
        for path in self.folder.iterdir():
            path.unlink()
        for name, data in contents.items():
            (self.folder / name).write_bytes(data)

    def held(self):
        """Content of the folder: bytes by name."""
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def each_failure(self, change, make_error, **options):
        """Make the first call fail, then the second, and so on until the change succeeds; yield each exception.

        The folder is restored before each attempt.
        """
        initial = self.held()
        for place in itertools.count():
            self.put(initial)
            recorder = Recorder(self.folder, fail_at=place, error=make_error(), **options)
            raised = None
            try:
                with _standing_before(recorder, self._monkeypatch):
                    change()
            except BaseException as error:  # interruptions are tried too
                raised = error
            if recorder.seen <= place:
                return
            yield raised


@pytest.fixture
def crashes(tmp_path, monkeypatch):
    """A folder for changes that are interrupted."""
    folder = tmp_path.resolve() / "disk"
    folder.mkdir()
    return Crashes(folder, monkeypatch)


CODES = [errno.EIO, errno.ENOSPC, errno.EROFS]


@pytest.fixture(params=[CODES[place] for place in spread(len(CODES), 2)], ids=errno.errorcode.get)
def failure(request):
    """An error of the system."""
    return lambda: OSError(request.param, os.strerror(request.param))

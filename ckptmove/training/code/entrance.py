"""Import the function named by ``--case``, and tell the user's frames from those of libraries."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import os
import sys
import sysconfig
import tempfile
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ckptmove.errors import CaseUnusable
from ckptmove.proof.source_edits import lines_of
from ckptmove.simulation.replaced import replaced
from ckptmove.training.code.source import Running, spot_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CodeType, FrameType, TracebackType

    from ckptmove.proof.source_edits import Edit
    from ckptmove.training.case.name import CaseName

_LIBRARIES: Final = tuple(
    {os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
#: Folders of libraries outside of this environment: of the user, of the system, of Debian.
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
#: Folder of this package, wherever in it this module is.
_OURS: Final = os.path.realpath(sys.modules[__name__.partition(".")[0]].__path__[0]) + os.sep
#: Folders of temporary files; that of `tempfile` is another one.
_TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  # compared with, not written to
#: ``train`` and ``random`` may be modules that the script imports; this name is not.
_MODULE: Final = "_ckptmove_case"


def is_installed(path: str) -> bool:
    """Whether a file, by its real path, is of an installed library or of the standard library."""
    return path.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(Path(path).parts)


def is_generated(path: str, home: str) -> bool:
    """Whether a file, by its real path, is in a hidden or temporary folder.

    Hidden folders that also contain the user's code or the working directory do not count. Nor does a temporary folder
    if the file is next to or below one of these; in the temporary folder itself, only next to.

    Args:
        home: real path of the folder with the case or script.
    """
    homes = (home, os.path.realpath(os.curdir))
    if all(_is_hidden(path, one) for one in homes):
        return True
    temporary = {os.path.realpath(one) for one in (tempfile.gettempdir(), *_TEMPORARY)}
    folder = str(Path(path).parent)
    is_near = any(folder == one or (one not in temporary and folder.startswith(one + os.sep)) for one in homes)
    return not is_near and path.startswith(tuple(one + os.sep for one in temporary))


def _is_hidden(path: str, home: str) -> bool:
    """Whether a file is below a hidden folder, as ``~/.cache``, that does not contain a folder."""
    parts, own = Path(path).parts, Path(home).parts
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parts, own, strict=False)))
    return any(part.startswith(".") for part in parts[shared:])


@contextmanager
def edited_sources(edits: Sequence[Edit]) -> Iterator[None]:
    """Import files of the user with edits that are not written. Their lines in tracebacks are the edited ones."""
    sources: dict[str, bytes] = {}
    for edit in edits:
        path = os.path.realpath(edit.path)
        sources[path] = edit.applied(sources.get(path) or Path(path).read_bytes())
    read, named = SourceFileLoader.get_code, set[str]()

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        path = loader.get_filename(fullname)
        data = sources.get(os.path.realpath(path))
        if data is None:
            return read(loader, fullname)
        # Without a modification time, the entry is not compared with the file.
        linecache.cache[path] = (len(data), None, [f"{line}\n" for line in lines_of(data)], path)
        named.add(path)
        return loader.source_to_code(data, path)

    try:
        with replaced(SourceFileLoader, get_code=get_code):
            yield
    finally:
        for path in named:
            linecache.cache.pop(path, None)


class _MainLoader(SourceFileLoader):
    """Loader without a bytecode cache: Python has none for the file that it runs."""

    def path_stats(self, path: str) -> NoReturn:
        """Raise OSError, so that no ``.pyc`` is read or written."""
        raise OSError(path)


def code_of(path: str) -> CodeType:
    """Code of a file that runs as ``__main__``, with the edits of :func:`edited_sources`."""
    code: CodeType = _MainLoader("__main__", path).get_code("__main__")  # type: ignore[assignment]  # not None
    return code


class Entrance:
    """The case function, and the files of the user's code."""

    def __init__(self, name: CaseName) -> None:
        self._name = name
        self._file = os.path.realpath(name.home) if name.is_file else ""
        self._known: dict[str, bool] = {}
        self._home = os.path.realpath(Path(name.home).parent if name.is_file else Path.cwd())
        self.is_loaded = False  # whether the import has ended

    def load(self) -> Callable[..., Any]:
        """Import the function, with the import path of ``python FILE.py`` or ``python -m pkg.mod``."""
        module = self._load_file() if self._name.is_file else self._load_module()
        self.is_loaded = True
        self._file = os.path.realpath(getattr(module, "__file__", None) or "")
        function = getattr(module, self._name.function, None)
        if not callable(function):
            raise CaseUnusable(f"{self._name.home} has no function '{self._name.function}'")
        found: Callable[..., Any] = function
        return found

    def _load_file(self) -> Any:
        path = Path(self._name.home)
        sys.path.insert(0, str(path.parent.absolute()))
        spec = importlib.util.spec_from_file_location(_MODULE, path.absolute())
        if spec is None or spec.loader is None:
            raise CaseUnusable("its name does not end in .py", path=str(path))
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module  # dataclasses resolve annotations there
        spec.loader.exec_module(module)
        return module

    def _load_module(self) -> Any:
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(self._name.home)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self._name.home}.".startswith(f"{error.name}."):
                raise  # an import of the module itself
            raise CaseUnusable(f"there is no module '{self._name.home}' here") from error

    def is_own(self, file: str) -> bool:
        """Whether a file is the user's: not of a library or this package, and not generated."""
        if file not in self._known:
            real = os.path.realpath(file)
            is_foreign = file.startswith("<") or is_generated(real, self._home)
            is_foreign = is_foreign or is_installed(real) or real.startswith(_OURS)
            self._known[file] = real == self._file or not is_foreign
        return self._known[file]

    def frames(self, trace: TracebackType | None) -> list[Running]:
        """Frames of the user's code in a traceback, the innermost last."""
        found = []
        while trace is not None:
            if self.is_own(trace.tb_frame.f_code.co_filename):
                found.append(Running(trace.tb_frame, spot_of(trace)))
            trace = trace.tb_next
        return found

    def caller(self, frame: FrameType | None) -> FrameType | None:
        """Innermost frame of the user's code among a frame and its callers; None for none."""
        while frame is not None and not self.is_own(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

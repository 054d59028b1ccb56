"""Remove the features that Windows lacks from a Python that imports this module first.

Some names of ``os``, ``signal`` and ``mmap`` are missing, and some modules. A file that is open or mapped can be
neither renamed nor removed, no folder can be opened, an entry of a folder has no inode, and ``O_BINARY`` is required.
The separator of paths stays, and the locks of filelock, which has them on Windows too.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys

import filelock  # noqa: F401  # imports fcntl here, and LockFileEx on Windows

MODULES = {"fcntl", "grp", "pwd", "resource", "termios"}
OS_NAMES = (
    "O_ASYNC", "O_CLOEXEC", "O_DIRECT", "O_DIRECTORY", "O_DSYNC", "O_NOATIME", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC",
    "POSIX_FADV_DONTNEED", "chown", "copy_file_range", "fchmod", "fchown", "fdatasync", "fork", "fstatvfs", "getegid",
    "geteuid", "getgid", "getpgid", "getpgrp", "getuid", "killpg", "lchown", "memfd_create", "mkfifo", "mknod",
    "pidfd_open", "posix_fadvise", "posix_fallocate", "pread", "preadv", "pwrite", "pwritev", "readv", "sendfile",
    "setpgid", "setsid", "splice", "statvfs", "sync", "sysconf", "uname", "writev",
)  # fmt: skip
SIGNAL_NAMES = (
    "SIGALRM", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm", "pthread_sigmask", "setitimer",
)  # fmt: skip
#: O_LARGEFILE, which changes nothing here.
O_BINARY = 0o100000
PACKAGE = f"{os.sep}ckptmove{os.sep}"


class _Absent:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


class _Entry:
    """An entry of a folder without device and inode, which Windows does not store in it."""

    def __init__(self, entry):
        self._entry = entry

    def __getattr__(self, name):
        return getattr(self._entry, name)

    def __fspath__(self):
        return self._entry.path

    def stat(self, *, follow_symlinks=True):
        found = self._entry.stat(follow_symlinks=follow_symlinks)
        return os.stat_result((found.st_mode, 0, 0, 0, *found[4:]), {"st_mtime_ns": found.st_mtime_ns})


class _Entries:
    def __init__(self, entries):
        self._entries = entries

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self._entries.close()

    def __iter__(self):
        return self

    def __next__(self):
        return _Entry(next(self._entries))

    def close(self):
        self._entries.close()


def _is_ours():
    """Whether a module of the package calls the replaced function."""
    return PACKAGE in sys._getframe(2).f_code.co_filename


def _held():
    """Files that this process has open or mapped."""
    for number in os.listdir("/proc/self/fd"):
        try:
            yield _REAL["readlink"](f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the folder itself, which was open for the listing
    with open("/proc/self/maps", encoding="utf-8") as maps:
        yield from (line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count(" /"))


def _refuse_open(*paths):
    held = set(_held())
    for path in paths:
        folder, name = os.path.split(os.path.abspath(path))
        real = os.path.join(os.path.realpath(folder), name)
        if any(one == real or one.startswith(f"{real}{os.sep}") for one in held):
            raise PermissionError(errno.EACCES, "The process cannot access the file", str(path))


_REAL = {
    name: getattr(os, name)
    for name in ("link", "open", "readlink", "remove", "rename", "replace", "rmdir", "scandir", "unlink")
}


def _open(path, flags, mode=0o777, *, dir_fd=None):
    is_there = isinstance(path, (str, os.PathLike)) and os.path.lexists(path)
    if is_there and stat.S_ISDIR(os.stat(path).st_mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    if _is_ours() and os.fspath(path) != os.devnull and not flags & O_BINARY:
        raise AssertionError(f"{path} is not opened for bytes")
    return _REAL["open"](path, flags, mode, dir_fd=dir_fd)


def _replace(source, target, **_options):
    _refuse_open(source, target)
    _REAL["replace"](source, target)


def _rename(source, target, **_options):
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(source))
    _replace(source, target)


def _removing(name):
    def remove(path, **_options):
        _refuse_open(path)
        _REAL[name](path)

    return remove


def _usage(statvfs):
    def disk_usage(path):
        found = statvfs(path)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return shutil._ntuple_diskusage(total, total - free, free)

    return disk_usage


class _Library(ctypes.CDLL):
    def __init__(self, name, *rest, **options):
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")
        super().__init__(name, *rest, **options)


def install():
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "1")  # else numpy, which was built for Linux, calls os.uname
    shutil.disk_usage = _usage(os.statvfs)
    shutil._use_fd_functions = False
    subprocess.Popen.kill = lambda process: process.send_signal(9)
    ctypes.CDLL = _Library
    sys.meta_path.insert(0, _Absent())
    for name in MODULES:
        sys.modules.pop(name, None)
    for module, names in ((os, OS_NAMES), (signal, SIGNAL_NAMES), (mmap, [n for n in vars(mmap) if n[:4] == "MADV"])):
        for name in [name for name in names if hasattr(module, name)]:
            delattr(module, name)
    os.O_BINARY = O_BINARY
    os.open, os.replace, os.rename = _open, _replace, _rename
    os.scandir = lambda path=".": _Entries(_REAL["scandir"](path))
    for name in ("remove", "unlink", "rmdir"):
        setattr(os, name, _removing(name))


install()

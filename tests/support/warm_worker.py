"""Fork the children of `verify` from one process that has imported torch.

A forked child runs the program of its command line with the same arguments, folder, environment and streams as a
started one, in a session of its own. Only the import of torch is shared.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from ckptmove.torch_facts.optimizers import BY_NAME

#: Modules that every child imports.
_MODULES = ("torch", "ckptmove.training.worker")
#: Modules that a child also imports for a case, or for an optimizer of the user.
_CASE_MODULES = ("torch._dynamo", "ckptmove.training.case.check")
#: Variables that Python, torch and its libraries read when they are imported.
_READ_ON_IMPORT = ("COVERAGE_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH")
_HEADER = 8


class Servers:
    """The servers of one test process: for children with and without code of the user."""

    def __init__(self):
        self._found = _find_packages(sys.path)
        self._servers = {}

    def start(self, command, **options):
        """Replace `subprocess.Popen` in `ckptmove.proof.processes.child`.

        A child that imports another torch or ckptmove is started as usual. Each environment that changes these imports
        has a server of its own.
        """
        if len(command) != 6 or _find_packages(command[3].split(command[4])) != self._found:
            return subprocess.Popen(command, **options)
        request = json.loads(command[5])
        is_users = request.get("optimizer") not in {None, *BY_NAME}
        with_case = is_users or "case" in request or "script" in request
        kind = (
            with_case,
            *((name, value) for name, value in os.environ.items() if name.startswith(_READ_ON_IMPORT)),
        )
        if kind not in self._servers:
            self._servers[kind] = _Server((*_MODULES, *_CASE_MODULES) if with_case else _MODULES)
        return _Forked(self._servers[kind], command, options["errors"])

    def stop(self):
        """End the servers, and wait until they have saved what coverage measured in them."""
        for server in self._servers.values():
            server.stop()


class _Forked:
    """The part of `subprocess.Popen` that `verification.processes.child` uses, for a process that the server forks."""

    def __init__(self, server, command, errors):
        self.args, self.returncode = command, None
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_err, theirs_err = os.pipe()
        self.stdin = os.fdopen(ours_in, "w", errors=errors)
        self.stdout = os.fdopen(ours_out, errors=errors)
        self.stderr = os.fdopen(ours_err, errors=errors)
        self._state, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            server.fork(command, [theirs_in, theirs_out, theirs_err, theirs.fileno()])
        for descriptor in (theirs_in, theirs_out, theirs_err):
            os.close(descriptor)
        self.pid = json.loads(self._state.recv(100))

    def __enter__(self):
        return self

    def __exit__(self, *_raised):
        self.stdout.close()
        self.stderr.close()
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.wait()
        self._state.close()

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._state], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = json.loads(self._state.recv(100, socket.MSG_PEEK))
        return self.returncode

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


class _Server:
    def __init__(self, modules):
        self._requests, theirs = socket.socketpair()
        code = "import sys; sys.path[:] = sys.argv[1].split(sys.argv[2]); import warm_worker; warm_worker.serve()"
        command = [sys.executable, "-c", code, os.pathsep.join(sys.path), os.pathsep, *modules]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL)

    def fork(self, command, descriptors):
        request = {
            "program": command[2],
            "arguments": ["-c", *command[3:]],
            "folder": str(Path.cwd()),
            "environment": dict(os.environ),
        }
        data = json.dumps(request).encode()
        socket.send_fds(self._requests, [len(data).to_bytes(_HEADER, "big")], descriptors)
        self._requests.sendall(data)

    def stop(self):
        self._requests.close()
        self._process.wait()


def _find_packages(path):
    return [getattr(PathFinder.find_spec(name, path), "origin", None) for name in ("torch", "ckptmove")]


def serve():
    """Answer requests, one after the other, that come with standard input until it ends."""
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            header, descriptors, _, _ = socket.recv_fds(requests, _HEADER, 4)
            if not header:
                return
            request = json.loads(requests.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL))
            pid = os.fork()
            if pid == 0:
                requests.close()
                _become(request, descriptors)
            with socket.socket(fileno=descriptors.pop()) as told:
                for descriptor in descriptors:
                    os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                with suppress(BrokenPipeError):
                    told.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _become(request, descriptors):
    """Run the program of a request in this process, as Python would with `-c`."""
    try:
        os.setsid()
        # Only now that it leads a session: the parent ends the session.
        os.write(descriptors[3], json.dumps(os.getpid()).encode())
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = request["arguments"]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(request["program"], vars(main))
    finally:
        os._exit(1)

"""Connect the ``verify`` processes of all ranks, so that one report is written and all exit with the same code.

Each rank has a process without torch, which starts a child with torch. These processes are connected here: rank 0
listens, and the others connect to it. They do not use the process group of the children: the report has to be written
also if a child dies or hangs. A connection that closes without a last message means that the process was killed.
"""

from __future__ import annotations

import json
import queue
import secrets
import socket
import time
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptmove.proof.codec import dumps, loads
from ckptmove.proof.processes.messages import Message
from ckptmove.proof.request import VerifyRequest  # noqa: TC001  # the codec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from ckptmove.training.mesh.launch import Launch

#: Seconds to wait for the other ranks: until all have started, and for their last messages once one has failed.
START_SECONDS: Final = 300.0
GRACE_SECONDS: Final = 10.0
#: Bounds of the first message, which a stranger may send: seconds between its parts, and characters.
_TOKEN_SECONDS: Final = 30.0
_LONGEST_FIRST: Final = 2**20
_LOCAL: Final = "127.0.0.1"


class Hello(NamedTuple):
    """The first message of a rank."""

    token: str
    rank: int
    request: VerifyRequest | None = None  # its options
    failure: dict[str, Any] | None = None  # the error that ended the command before


class Host:
    """The connections of rank 0 to the other ranks."""

    def __init__(self, launch: Launch) -> None:
        self._size = launch.size
        is_local = launch.local_size == launch.size
        self._token = secrets.token_hex(16)
        self._server = _listen(_LOCAL if is_local else "")
        host, port = _LOCAL if is_local else launch.host, self._server.getsockname()[1]
        #: Where to connect: host, port and token.
        self.address = f"{host} {port} {self._token}"
        #: Messages of the other ranks; None if the process of a rank ended without a last one.
        self._news: queue.SimpleQueue[tuple[int, Hello | Message | None]] = queue.SimpleQueue()
        self._connections: dict[int, socket.socket] = {}
        #: First messages of the ranks.
        self.hellos: dict[int, Hello] = {}
        #: Last messages.
        self.endings: dict[int, Message | None] = {}
        #: Whether the child of this rank was ended because another rank had failed.
        self.has_ended_child = False
        self._failed = Event()
        Thread(target=self._accept, daemon=True).start()

    @property
    def others(self) -> range:
        """The other ranks."""
        return range(1, self._size)

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                Thread(target=self._listen_to, args=(connection,), daemon=True).start()

    def _listen_to(self, connection: socket.socket) -> None:
        rank = None
        connection.settimeout(_TOKEN_SECONDS)
        with suppress(OSError, ValueError), connection, _reader(connection) as reader:
            first = loads(Hello, reader.readline(_LONGEST_FIRST))
            if not secrets.compare_digest(first.token.encode(), self._token.encode()):
                return  # a stranger
            connection.settimeout(None)
            rank = first.rank
            self._connections[rank] = connection
            self._news.put((rank, first))
            for line in reader:
                self._hear(rank, loads(Message, line))
        if rank is not None:
            self._hear(rank, None)

    def _hear(self, rank: int, ending: Message | None) -> None:
        """Note a last message. If the rank failed, the others may wait for it forever."""
        self._news.put((rank, ending))
        if ending is None or ending.has_failed:
            self._failed.set()

    def end_after_failure(self, end: Callable[[], None]) -> None:
        """Call a function some seconds after a rank has failed."""

        def wait() -> None:
            self._failed.wait()
            time.sleep(GRACE_SECONDS)
            self.has_ended_child = True
            end()

        Thread(target=wait, daemon=True).start()

    def _take(self, until: float) -> bool:
        """Take a message; False if none arrives in time."""
        try:
            rank, content = self._news.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return False
        if isinstance(content, Hello):
            self.hellos[rank] = content
        else:
            self.endings.setdefault(rank, content)
        return True

    def _wait(self, seconds: float, is_done: Callable[[], bool]) -> None:
        """Take messages until something is done, or for some seconds."""
        until = time.monotonic() + seconds
        while not is_done() and self._take(until):
            pass

    def wait_for_start(self) -> None:
        """Wait until every other rank has sent its first message, or one of them has ended."""
        self._wait(START_SECONDS, lambda: len(self.hellos) == self._size - 1 or bool(self.endings))

    def wait_for_end(self) -> None:
        """Wait a while until every other rank has sent its last message."""
        self._wait(GRACE_SECONDS, lambda: len(self.endings) == self._size - 1)

    def killed(self) -> list[int]:
        """Ranks whose processes ended without a last message, if there are any within a few seconds."""
        self._wait(GRACE_SECONDS, lambda: len(self.endings) == self._size - 1 or None in self.endings.values())
        return [rank for rank, ending in self.endings.items() if ending is None]

    def tell(self, code: int | None) -> None:
        """Send an exit code, which ends the run, or None, which starts it, to the other ranks that have connected."""
        for rank in self.others:
            _send(self._connections.get(rank), code)

    def dismiss(self, code: int) -> None:
        """Send the exit code to every other rank, and stop to listen.

        A rank that is late to connect finds nobody. It then writes its own error, unless torchrun ends it before.
        """
        self._wait(GRACE_SECONDS, lambda: len(self.hellos) == self._size - 1)
        self.tell(code)
        with suppress(OSError):  # wakes the thread that accepts; macOS refuses it for a socket that listens
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


class Guest:
    """The connection of another rank to rank 0."""

    def __init__(self, address: str, hello: Hello) -> None:
        host, port, token = address.split(" ")
        connection = socket.create_connection((host, int(port)), timeout=START_SECONDS)
        connection.settimeout(None)
        self._connection = connection
        self._started, self._ended = Event(), Event()
        self._end: Callable[[], None] | None = None  # ends the child
        #: Exit code of all ranks; None if rank 0 ended without a message.
        self.exit_code: int | None = None
        _send(connection, hello._replace(token=token))
        Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._connection, _reader(self._connection) as reader:
            for line in reader:
                self.exit_code = json.loads(line)
                if self.exit_code is not None:
                    break
                self._started.set()
        self._ended.set()
        self._started.set()
        if self._end is not None:
            self._end()

    def wait_for_start(self, end: Callable[[], None]) -> bool:
        """Wait until all ranks have started; False if rank 0 has ended the run.

        Args:
            end: called when rank 0 ends the run later.
        """
        self._end = end
        self._started.wait()
        return not self._ended.is_set()

    def send(self, ending: Message) -> None:
        """Send the last message to rank 0."""
        _send(self._connection, ending)

    def wait_for_exit_code(self) -> int | None:
        """The exit code of all ranks; None if rank 0 has ended without one."""
        self._ended.wait()
        return self.exit_code


def _listen(host: str) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, 0))


def _reader(connection: socket.socket) -> TextIO:
    return connection.makefile("r", encoding="utf-8", newline="\n")


def _send(connection: socket.socket | None, message: Message | Hello | int | None) -> None:
    """Send a message; one to a process that has ended is lost."""
    if connection is not None:
        with suppress(OSError):
            connection.sendall(f"{dumps(message)}\n".encode())

"""Verify a sharded case with the ranks that torchrun started.

Each rank runs the command. Its process has no torch: it starts a child, which joins the process group of the children.
Rank 0 writes the only report.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

from ckptmove.errors import CaseUnusable, UsageError
from ckptmove.proof.checks import CASE, CHILD_CHECKS, MESH_CHECKS, failed, passed, skipped
from ckptmove.proof.codec import dumps, to_plain
from ckptmove.proof.errors import TorchBroken
from ckptmove.proof.evidence import RankFault
from ckptmove.proof.opened import open_files
from ckptmove.proof.processes.child import KILLED_BY, child, worker_command
from ckptmove.proof.processes.messages import Message, read_message
from ckptmove.training.mesh.errors import RankFailed
from ckptmove.training.mesh.faults import RANK, rank_failure
from ckptmove.training.mesh.launch import find_launch
from ckptmove.training.mesh.meeting import GRACE_SECONDS, START_SECONDS, Guest, Hello, Host
from ckptmove.training.run import LATE_SHARE, checks_without_torch, refuse_request, settled, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckptmove.io.contracts import Progress
    from ckptmove.model import Finding
    from ckptmove.proof.evidence import CheckResult, Verdict
    from ckptmove.proof.processes.child import Answers, Child
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.training.mesh.launch import Launch

_WORKER: Final = "ckptmove.training.mesh.worker"
#: Kinds of devices that a machine has several of, one for each rank.
_INDEXED: Final = frozenset({"cuda", "xpu"})
#: Exit code of a rank that cannot reach rank 0.
_UNREACHED: Final = 3
_PORTS: Final = "any TCP port of the machine of rank 0 must be open to the machines of the other ranks"
_KILLED: Final = "its process was killed"
#: Exit code of all ranks, and the hint, if one was killed from outside.
_KILLED_FROM_OUTSIDE: Final = 70
_MEMORY: Final = "the system kills a process when memory runs out: see dmesg on the machine of that rank"


@cache
def this_rank() -> Rank | None:
    """The rank of this process; None if torchrun did not start it."""
    launch = find_launch(os.environ)
    return None if launch is None else Rank(launch)


class Rank:
    """The process of one rank."""

    def __init__(self, launch: Launch, command: Sequence[str] = ()) -> None:
        """Begin without a connection to the others.

        Args:
            command: command line of the child; by default the worker of this package.
        """
        self._launch = launch
        self._command = command or worker_command(_WORKER)
        self._stack = ExitStack()
        self._child: Child | None = None
        self._host = Host(launch) if launch.is_first else None
        self._guest: Guest | None = None
        #: Error that ended the command on this rank, for the report of rank 0.
        self.failure: dict[str, Any] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the report."""
        return self._launch.is_first

    def verify(
        self,
        request: VerifyRequest,
        progress: Progress | None = None,
        stage: Callable[[str], None] | None = None,
    ) -> Verdict:
        """Verify the checkpoint with all ranks. Call it on rank 0; the others :meth:`attend`."""
        host = cast("Host", self._host)
        _refuse_options(request)
        with open_files(request) as opened:
            asked = settled(request, opened.checkpoint.inventory)
            started = self._join()
            self._agree(host, request)
            host.tell(None)
            self._send(started, asked)
            host.end_after_failure(started.end)
            findings, here = checks_without_torch(opened, opened.checkpoint.check(progress), request)
            answers = started.collect(stage, (RANK,), request.timeout)
        host.wait_for_end()
        return self._result(asked, answers, here, findings)

    def attend(self, request: VerifyRequest) -> None:
        """Take part in the verification of rank 0."""
        _refuse_options(request)
        with open_files(request) as opened:
            asked = settled(request, opened.checkpoint.inventory)
        started = self._join(request=request)
        guest = cast("Guest", self._guest)
        if not guest.wait_for_start(started.end):
            return
        self._send(started, asked)
        answers = started.collect(None, (RANK,), request.timeout)
        guest.send(_ending_of(answers))

    def killed_rank(self) -> RankFailed | None:
        """The error for a rank that was killed, after which torchrun ends this one; None if there is none."""
        killed = self._host.killed() if self._host is not None else []
        if not killed:
            return None
        return RankFailed(killed[0], _KILLED, path=None, hint=_MEMORY, exit_code=_KILLED_FROM_OUTSIDE)

    def reports(self, failure: dict[str, Any]) -> bool:
        """Keep an error that ended the command on this rank. Returns whether this rank writes it."""
        if not self.is_first and self.failure is None:
            self.failure = failure
        return self.is_first

    def finish(self, code: int) -> int | None:
        """Wait for the other ranks, and return the exit code of all; None if rank 0 cannot be reached.

        Args:
            code: exit code of this rank; that of rank 0 counts.
        """
        with self._stack:
            if self._host is not None:
                self._join()
                self._host.dismiss(code)  # a rank that has not connected yet gets the code when it does
                return code
            with suppress(OSError, TorchBroken, RankFailed):
                self._join(failure=self.failure or {})
            if self._guest is None:
                return None
            if self.failure is not None:
                self._guest.send(Message(failure=self.failure))
            return self._guest.wait_for_exit_code()

    def _join(self, request: VerifyRequest | None = None, failure: dict[str, Any] | None = None) -> Child:
        """Start the child, and connect to rank 0. Does nothing if that is done."""
        if self._child is not None:
            return self._child
        started = self._child = self._stack.enter_context(child(self._command, ""))
        if self._host is not None:
            with suppress(OSError):  # it has died, which its missing answers show
                started.give(self._host.address)  # with a token, which its command line would show to all users
            return started
        for line in iter(cast("Any", started.process.stdout).readline, ""):
            message = read_message(line)
            if message is not None and message.address:
                try:
                    self._guest = Guest(message.address, Hello("", self._launch.rank, request, failure))
                except OSError as error:
                    reason = f"its process cannot be reached from rank {self._launch.rank}: {error}"
                    raise RankFailed(0, reason, path=None, hint=_PORTS, exit_code=_UNREACHED) from error
                return started
        raise TorchBroken(f"rank {self._launch.rank} cannot reach the store of torchrun")

    def _send(self, started: Child, request: VerifyRequest) -> None:
        """Give the child its request. The accelerator of a rank is the one with its index on its machine."""
        kind = _kind_of_each(request)
        target = f"{kind}:{self._launch.local_rank}" if kind else request.to
        deadline = None if request.timeout is None else time.time() + request.timeout * LATE_SHARE
        with suppress(OSError):  # it has died, which its missing answers show
            started.give(dumps(request._replace(to=target, deadline=deadline)))

    def _agree(self, host: Host, request: VerifyRequest) -> None:
        """Wait for the other ranks, and compare their options."""
        host.wait_for_start()
        for rank, hello in sorted(host.hellos.items()):
            if hello.failure is not None:
                facts = {name: hello.failure[name] for name in ("path", "hint", "exit_code")}
                raise RankFailed(rank, hello.failure["message"], **facts)
            for name, one, other in zip(request._fields, request, hello.request or request, strict=True):
                if one != other:
                    raise UsageError(
                        f"the ranks have different options: {name} is {to_plain(other)!r} on rank {rank}, "
                        f"and {to_plain(one)!r} on rank 0"
                    )
        missing = {*host.others} - {*host.hellos}
        if missing and host.endings:
            ended = min(host.endings)
            raise RankFailed(ended, "it ended before all ranks had started", path=None, hint="", exit_code=1)
        if missing:
            late = f"it did not start within {START_SECONDS:g} s"
            raise RankFailed(min(missing), late, path=None, hint=_PORTS, exit_code=1)

    def _result(
        self,
        asked: VerifyRequest,
        answers: Answers,
        here: tuple[CheckResult, ...],
        findings: tuple[Finding, ...],
    ) -> Verdict:
        endings = dict(self._endings(answers))
        if answers.torch_failure:
            raise TorchBroken(answers.torch_failure)
        for rank, ending in endings.items():
            of_rank = "" if rank == 0 else f"rank {rank}: "
            if ending.unusable:
                raise CaseUnusable(f"{of_rank}{ending.unusable}")
            if ending.refusal:
                raise UsageError(f"{of_rank}{ending.refusal}")
        checks = answers.checks
        names = CHILD_CHECKS if asked.case is None else MESH_CHECKS
        ended = _root_causes(endings)
        missing = [name for name in names if name not in checks]
        killed = [rank for rank in ended if -_exit_code(endings[rank]) in KILLED_BY]
        if killed:
            raise RankFailed(killed[0], ended[killed[0]], path=None, hint=_MEMORY, exit_code=_KILLED_FROM_OUTSIDE)
        if ended:
            name = next(
                (one for rank in ended if (one := _check_of(endings[rank])) in missing), (*missing, names[-1])[0]
            )
            texts = [[ended[rank]] if rank in ended else [] for rank in range(self._launch.size)]
            checks[name] = rank_failure(name, texts, self._launch.size)
            checks |= {one: skipped(one, f"not reached: {name} failed") for one in missing if one != name}
        # An optimizer that has state after a step, and none in the checkpoint, began without it.
        is_proven = checks["parity"].status == "passed" and not dict(checks["fresh"].evidence).get("anew")
        if asked.case is not None:
            simulated = answers.mode == "simulated"
            figures = {"proven": is_proven, "resumed": is_proven, "device": asked.to, "simulated": simulated}
            checks[CASE] = checks[CASE]._replace(evidence=tuple({**dict(checks[CASE].evidence), **figures}.items()))
        faults = (*answers.run.faults, *(RankFault(rank, name, text) for rank, text in ended.items()))
        run = answers.run._replace(ranks=self._launch.size, faults=faults)
        named = asked._replace(to=_kind_of_each(asked) or asked.to)
        result = replace(verdict(named, answers, here, findings), run=run)
        return result if asked.case is None else replace(result, proven=result.passed and is_proven)

    def _endings(self, answers: Answers) -> Iterator[tuple[int, Message]]:
        host = cast("Host", self._host)
        own = _ending_of(answers)
        if host.has_ended_child and _exit_code(own) < 0:
            own = own._replace(check=failed(RANK, "it still ran when another rank had failed", lost=True))
        yield 0, own
        for rank in host.others:
            ending = host.endings.get(
                rank, Message(check=failed(RANK, f"it did not end within {GRACE_SECONDS:g} s", lost=True))
            )
            if ending is None or ending.check is None:
                reason = _KILLED if ending is None or ending.failure is None else ending.failure["message"]
                ending = Message(check=failed(RANK, reason))
            yield rank, ending


def _kind_of_each(request: VerifyRequest) -> str:
    """Kind of the devices of which each rank of a case has its own; empty if all have the same."""
    kind = (request.to or "cpu").partition(":")[0]
    return kind if kind in _INDEXED and request.case is not None else ""


def _refuse_options(request: VerifyRequest) -> None:
    refuse_request(request)
    used = {
        "--script": request.script is not None,
        "--against": request.against is not None,
        "--sample": request.sample is not None,
        "--fix": bool(request.edits),
        "--optimizer": request.optimizer is not None,
    }
    refused = [name for name, is_used in used.items() if is_used]
    if refused:
        raise UsageError(f"{refused[0]} cannot be used under torchrun")
    kind = _kind_of_each(request)
    if kind and request.to not in {kind, f"{kind}:0"}:
        raise UsageError(f"--to {request.to} names one device, but each rank of a case has its own: use --to {kind}")


def _ending_of(answers: Answers) -> Message:
    """How the child of this rank ended; one without a usable case or request has no such answer."""
    check = answers.checks.get(RANK) or passed(RANK, "ended")
    if answers.killed is not None:
        check = failed(RANK, answers.killed.message, exit_code=-answers.killed.number)
    return Message(check=check, unusable=answers.unusable, refusal=answers.refusal, late=answers.late)


def _evidence(ending: Message) -> dict[str, Any]:
    return dict(ending.check.evidence if ending.check is not None else ())


def _check_of(ending: Message) -> str:
    """Name of the check that a rank was making when it failed; empty if unknown."""
    return ending.late.check if ending.late is not None else str(_evidence(ending).get("check", ""))


def _exit_code(ending: Message) -> int:
    """Exit code of the process of a rank, negative for a signal; 0 if it ended with an answer."""
    return int(_evidence(ending).get("exit_code", 0))


def _root_causes(endings: Mapping[int, Message]) -> dict[int, str]:
    """Why ranks failed. Those that only lost the connection to another one, or waited for it, are left out."""
    failing: dict[int, str] = {}
    waiting: dict[int, str] = {}
    for rank, ending in endings.items():
        if ending.check is None or ending.check.status != "failed":
            continue
        figures, late = _evidence(ending), ending.late
        waits = late is not None and late.waits if "timeout" in figures else figures.get("lost")
        (waiting if waits else failing)[rank] = ending.check.detail + (late.where if late is not None else "")
    return failing or waiting

"""Main function of the child process of a rank. It joins the process group and makes the checks with torch."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from threading import Thread, main_thread
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ckptmove.errors import CaseUnusable, CkptMoveError, UsageError
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.checks import MESH_CHECKS, failed, passed, skipped
from ckptmove.proof.codec import from_plain, loads, to_plain
from ckptmove.proof.place import find_site
from ckptmove.proof.processes.messages import Late, Message
from ckptmove.proof.processes.pipes import Pipes
from ckptmove.proof.processes.shares import ProcessGroup
from ckptmove.proof.processes.uncompiled import torch_for
from ckptmove.proof.request import VerifyRequest
from ckptmove.proof.step.verdicts import missing_device
from ckptmove.simulation.errors import CrossDeviceError
from ckptmove.training.case.check import called, on_target
from ckptmove.training.case.name import parse_case
from ckptmove.training.code.entrance import Entrance
from ckptmove.training.code.source import line_of
from ckptmove.training.code.tensor_names import names_of
from ckptmove.training.mesh.faults import RANK
from ckptmove.training.mesh.group import Ranks, collective_timeout, group_is_there, is_lost
from ckptmove.training.mesh.launch import find_launch
from ckptmove.training.mesh.proof import Proof, Setting
from ckptmove.training.worker import run as share_checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.case import Case
    from ckptmove.proof.checks import Tally
    from ckptmove.training.mesh.launch import Launch

    Emit = Callable[[Message], None]

_ADDRESS: Final = "address"
_SHOWN: Final = 300


def main() -> None:
    """Join the other ranks, wait for the request on standard input, and answer it.

    The first rank gets the address of its parent on the line before.
    """
    pipes = Pipes()
    launch = cast("Launch", find_launch(os.environ))  # its parent has one
    is_master = launch.is_first and not launch.has_store
    shared = TCPStore(launch.host, launch.port, launch.size, is_master=is_master, wait_for_workers=False)
    store = PrefixStore(f"ckptmove/{launch.attempt}", shared)  # the keys of this attempt only
    if launch.is_first:
        store.set(_ADDRESS, pipes.lines.get())
    else:
        pipes.tell(Message(address=store.get(_ADDRESS).decode()))
    request = loads(VerifyRequest, pipes.lines.get())
    with torch_for(request):
        site = find_site(request.to or "cpu")
        pipes.tell(Message(mode=site.mode))
        backend = "gloo" if site.mode != "real" else f"cpu:gloo,{site.target.partition(':')[0]}:nccl"
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.size, timeout=collective_timeout(request.timeout)
        )
        answer(request, pipes.tell)


def answer(request: VerifyRequest, emit: Emit) -> None:
    """Make the checks of this rank, in the process group that it has joined.

    Args:
        emit: called with each answer; the last one tells how the checks of this rank ended.
    """
    _Rank(request, emit).run()


class _Shares(ProcessGroup):
    """The ranks as processes that check a checkpoint together, each its share."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size

    def join(self, tally: Tally) -> None:
        """Send a tally to rank 0; there, add those of the other ranks."""
        found = self._ranks.gather(to_plain(tally))
        for other in found[1:] if self.rank == 0 else ():
            tally.join(from_plain(type(tally), other))


class _Rank:
    def __init__(self, request: VerifyRequest, emit: Emit) -> None:
        self._request, self._emit = request, emit
        self._check = "case"
        self._case: Case | None = None
        self._entrance = None if request.case is None else Entrance(parse_case(request.case))

    def run(self) -> None:
        """Make the checks, and answer whether this rank ended without an error."""
        if self._request.deadline is not None:
            Thread(target=self._report_late, args=(self._request.deadline,), daemon=True).start()
        try:
            if self._entrance is None:
                self._share()
            else:
                self._prove(self._entrance, self._request.case or "")
        except CaseUnusable as error:
            self._emit(Message(unusable=error.message.removeprefix("--case: ")))
        except UsageError as error:
            self._emit(Message(refusal=str(error)))
        except BaseException as error:  # noqa: BLE001  # any exception of the user's code, or of torch in it
            self._emit(Message(check=self._fault(error)))
        else:
            self._emit(Message(check=passed(RANK, "ended")))

    def _share(self) -> None:
        """Make the checks of a checkpoint without a case; on a real accelerator, rank 0 makes all of them."""
        ranks = Ranks(self._enter, self._request.timeout)
        if find_site(self._request.to or "cpu").mode != "real":
            share_checks(self._request, self._emit, _Shares(ranks))
            return
        ranks.gather(None)  # a rank that ends while another one still connects would fail that
        if ranks.rank == 0:
            share_checks(self._request, self._emit)

    def _prove(self, entrance: Entrance, case_name: str) -> None:
        request = self._request
        ranks = Ranks(self._enter, request.timeout)
        site = find_site(request.to or "cpu")
        lacking = missing_device(site) if request.require_device and site.mode == "simulated" else ""
        if site.reason:
            for name in MESH_CHECKS if ranks.rank == 0 else ():
                fails = lacking and name == "step"
                self._emit(Message(check=failed(name, lacking) if fails else skipped(name, site.missing)))
            return
        with ExitStack() as stack:
            checkpoint = stack.enter_context(open_checkpoint(request.path, request.limits, keep_trees=True))
            place = stack.enter_context(on_target(site, ranks.size))
            if site.mode == "simulated":
                from ckptmove.training.mesh.simulated import sharding  # for a simulated device

                stack.enter_context(sharding(place.device))
            else:
                torch.get_device_module(place.device).set_device(place.device)
            torch.manual_seed(request.seed)
            with group_is_there():
                case = self._case = called(entrance.load(), place.device, case_name)
            label = site._replace(target=site.target.partition(":")[0]).label  # each rank has a device of its own
            exact = site.mode != "real"
            setting = Setting(ranks, checkpoint, place, label, lacking, request.seed, exact, self._emit)
            Proof(setting).run(case)

    def _enter(self, check: str) -> None:
        self._check = check

    def _fault(self, error: BaseException) -> Any:
        """The last answer of this rank, after an exception."""
        kind = "" if isinstance(error, CkptMoveError) else f"{type(error).__name__}: "
        text = f"{kind}{' '.join(str(error).split())[:_SHOWN]}"
        frames = [] if self._entrance is None else self._entrance.frames(error.__traceback__)
        figures: dict[str, object] = {"check": self._check, "lost": is_lost(error)}
        if isinstance(error, CrossDeviceError) and self._case is not None:
            known = names_of(self._case)
            found = [known[id(one)].name for one in error.strays if id(one) in known]
            text += f": {', '.join(found)} is on another device" * bool(found)
        if frames:
            line = frames[-1].spot.line
            text = f"{text}, at {line}: {line.source}"
            figures |= {"file": line.path, "line": line.number}
        return failed(RANK, text, **figures)

    def _report_late(self, deadline: float) -> None:
        """Report the line that the main thread has reached, shortly before the timeout."""
        time.sleep(max(0.0, deadline - time.time()))
        frame = sys._current_frames().get(main_thread().ident or 0)  # the only way to see a thread
        own = None if self._entrance is None else self._entrance.caller(frame)
        where = "" if own is None else f" at {line_of(own.f_code.co_filename, own.f_lineno)}"
        waits = False
        while frame is not None:
            waits = waits or f"torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename
            frame = frame.f_back
        self._emit(Message(late=Late(self._check, where, waits)))

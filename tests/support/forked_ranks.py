"""Fork the ranks of a process group from one process that has imported torch."""

import os
import signal
import subprocess
from contextlib import suppress

import torch.distributed as dist


def ended(command, *, timeout, **options):
    """Run a program that forks ranks, which end with it, also after a timeout.

    Args:
        command: the command line.
        timeout: seconds to wait.
        options: options of ``subprocess.Popen``.

    Returns:
        its exit code and its standard error.
    """
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            _, errors = process.communicate(timeout=timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, errors


def run(main, folder, size):
    """Call ``main`` with the folder in a process for each rank of a gloo group, and wait for all of them.

    A rank that fails ends the others, which may wait for it.

    Returns:
        whether a rank failed.
    """
    started = set()
    for rank in range(size):
        started.add(child := os.fork())
        if child == 0:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
            main(folder)
            os._exit(0)  # without waiting for threads of gloo
    has_failed = False
    while started:
        ended, status = os.wait()
        started.remove(ended)
        if status and not has_failed:
            has_failed = True
            for other in started:
                os.kill(other, signal.SIGKILL)
    return has_failed

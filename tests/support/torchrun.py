"""Start programs with torchrun on this machine, on any free port."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent


def torchrun(words, *, ranks, folder, nodes="1", rdzv="127.0.0.1:0"):
    """Start a run.

    Args:
        words: the script, or ``-m`` and the module, and its arguments.
        ranks: number of ranks on this node.
        folder: working directory.
        nodes: number of agents of the run.
        rdzv: rendezvous endpoint; port 0 for any free port.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--nnodes", nodes,
        "--rdzv-backend", "c10d", "--rdzv-endpoint", rdzv, "--rdzv-id", "test", "--local-addr", "127.0.0.1",
    ]  # fmt: skip
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [*command, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """Wait for a run. Returns its exit code, its standard output and its standard error."""
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()  # after a timeout; its ranks end too
    return process.returncode, output, errors

"""Programs that fork ranks, as the tests of this folder start them: no rank outlives its program."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import forked_ranks
import pytest
from torchrun import SUPPORT

#: Ranks without torch: the last one fails, and the others wait.
RANKS = """
import sys, time, types

own = {}
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.distributed = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
torch.distributed.init_process_group = lambda *_, rank, **options: own.update(rank=rank)
import forked_ranks


def main(folder):
    if own["rank"] == 1:
        raise ValueError("no data")
    time.sleep(600)


sys.exit(forked_ranks.run(main, "", 3))
"""


def test_after_a_timeout_the_ranks_end():
    reading, writing = os.pipe()
    program = "import os, time; os.fork(); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        forked_ranks.ended([sys.executable, "-S", "-c", program], timeout=2, pass_fds=[writing])
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 60)
    assert ready  # no process has the other end
    os.close(reading)


def test_a_rank_that_fails_ends_the_others():
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    code, errors = forked_ranks.ended([sys.executable, "-c", RANKS], timeout=60, env=environment)
    assert code == 1
    assert "no data" in errors

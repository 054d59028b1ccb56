from __future__ import annotations

from ckptmove.training.mesh.launch import find_launch, ranks_of
from ckptmove.training.mesh.run import this_rank

ENVIRON = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


def test_the_launch_of_torchrun():
    launch = find_launch(ENVIRON)
    assert launch == (3, 8, 3, 4, "node0", 29500, "run/0", True)
    assert not launch.is_first
    assert find_launch({**ENVIRON, "TORCHELASTIC_RESTART_COUNT": "2", "RANK": "0"}).attempt == "run/2"


def test_ranks_of_a_scheduler_are_no_launch():
    assert find_launch({name: value for name, value in ENVIRON.items() if name != "TORCHELASTIC_RUN_ID"}) is None


def test_the_rank_of_this_process(monkeypatch):
    this_rank.cache_clear()
    assert this_rank() is None
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    this_rank.cache_clear()
    assert not this_rank().is_first
    this_rank.cache_clear()


def test_ranks_that_saved_a_checkpoint():
    assert ranks_of(["__0_0.distcp", "a/__5_0.distcp", ".metadata"]) == 6
    assert ranks_of(["model-00001.safetensors"]) is None

"""What torchrun tells a process about its rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: A file of ``dcp.save``: the rank that wrote it, and a number.
_FILE: Final = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")


class Launch(NamedTuple):
    """A process that torchrun started."""

    rank: int
    size: int  # number of ranks
    local_rank: int  # its index on this machine
    local_size: int  # number of ranks on this machine
    host: str  # address of the machine of rank 0
    port: int  # port of the store there
    attempt: str  # name of the run and number of restarts, the same for all ranks
    has_store: bool  # whether torchrun holds the store; otherwise rank 0 makes it

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the report."""
        return self.rank == 0


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """The launch that an environment describes; None if torchrun did not start this process.

    From ``LocalElasticAgent._start_workers`` of torch.distributed.elastic. Rank variables alone do not count: a job of
    a scheduler also sets them for a command that is typed in it.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return Launch(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_size=int(environ["LOCAL_WORLD_SIZE"]),
        host=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        attempt=f"{environ['TORCHELASTIC_RUN_ID']}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def ranks_of(files: Iterable[str]) -> int | None:
    """Number of ranks that saved a distributed checkpoint, by the names of its files; None if these have other names.

    A rank without elements of its own writes no file.
    """
    ranks = [int(match[1]) for match in map(_FILE.fullmatch, files) if match is not None]
    return max(ranks) + 1 if ranks else None

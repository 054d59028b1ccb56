"""Hold what was converted against its source."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrapped import data_parallel_on_cpu  # noqa: F401  # a fixture for every test here

from ckptmove.api.arguments import move_request, remap_of
from ckptmove.conversion.conversion import ConvertRequest
from ckptmove.proof.errors import ConversionDiffers
from ckptmove.proof.original.written import proof_of


def _shard_bytes(output):
    """A size of shards if the output is a directory with shards alone."""
    is_sharded = any(output.glob("model*.safetensors")) and not [*output.rglob("*.p*"), *output.rglob("*.bin")]
    return 1 if is_sharded else None


@pytest.fixture
def compared():
    """The number of differences between an output and what a conversion with the options makes of its source."""

    def compare(output, source, **options):
        move = move_request(None, {}, (), cast=False, rewrite_strings=False, remap=remap_of(options))
        request = ConvertRequest(
            path=str(source), output=str(output), move=move, shard_bytes=_shard_bytes(Path(output))
        )
        with proof_of(request) as prove:
            try:
                prove(str(output))
            except ConversionDiffers as error:
                return len(error.faults)
        return 0

    return compare

"""Hold what was converted against its source."""

from __future__ import annotations

import pytest
from wrapped import data_parallel_on_cpu  # noqa: F401  # a fixture for every test here

from ckptmove.api.arguments import move_request, remap_of
from ckptmove.conversion.conversion import ConvertRequest
from ckptmove.proof.errors import ConversionDiffers
from ckptmove.proof.original.written import proof_of


@pytest.fixture
def compared():
    """The number of differences between an output and what a conversion with the options makes of its source."""

    def compare(output, source, **options):
        move = move_request(None, {}, (), cast=False, rewrite_strings=False, remap=remap_of(options))
        with proof_of(ConvertRequest(path=str(source), output=str(output), move=move)) as prove:
            try:
                prove(str(output))
            except ConversionDiffers as error:
                return len(error.faults)
        return 0

    return compare

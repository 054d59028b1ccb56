"""Fixtures of the tests with a checkpoint, a simulated device or the checks of the worker."""

from __future__ import annotations

import verifying

skip_what_this_torch_cannot_simulate = verifying.skip_what_this_torch_cannot_simulate
cuda_first, cuda, mps, make, answers = (
    verifying.cuda_first,
    verifying.cuda,
    verifying.mps,
    verifying.make,
    verifying.answers,
)
mended, fault_of = verifying.mended, verifying.fault_of

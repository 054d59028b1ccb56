"""Skip tests that need a simulated device if this torch (before 2.10) cannot simulate one."""

from __future__ import annotations

import pytest

from ckptmove.proof import place
from ckptmove.simulation import device as simulated

#: For a test whose step runs in a child process.
on_a_simulated_device = pytest.mark.skipif(
    simulated.unavailable_reason() is not None, reason=simulated.unavailable_reason() or ""
)


@pytest.fixture(autouse=True, scope="module")
def skip_what_this_torch_cannot_simulate():
    """Skip a test that asks for a simulated device."""
    reason = simulated.unavailable_reason()
    with pytest.MonkeyPatch.context() as patch:
        for module in (place, simulated) if reason is not None else ():
            patch.setattr(module, "unavailable_reason", lambda: pytest.skip(reason))
        yield

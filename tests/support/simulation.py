"""What a torch that cannot simulate a device (before 2.10) is not asked."""

from __future__ import annotations

import pytest

from ckptmove.verification import place
from ckptmove.verification.simulated import device as simulated

#: For a test whose step is made in a child process.
on_a_simulated_device = pytest.mark.skipif(
    simulated.unavailable_reason() is not None, reason=simulated.unavailable_reason() or ""
)


@pytest.fixture(autouse=True, scope="module")
def skip_what_this_torch_cannot_simulate():
    """A test that asks for a simulated device is skipped: no step is made that it could look at."""
    reason = simulated.unavailable_reason()
    with pytest.MonkeyPatch.context() as patch:
        for module in (place, simulated) if reason is not None else ():
            patch.setattr(module, "unavailable_reason", lambda: pytest.skip(reason))
        yield

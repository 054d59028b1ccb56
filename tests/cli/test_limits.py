"""`--limit-factor`: limits for a file, and how to raise them."""

from __future__ import annotations

import re

import pytest

from ckptmove.checkpoint.inventory.budget import Budget
from ckptmove.errors import LimitExceeded
from ckptmove.limits import Limits
from ckptmove.proof.codec import dumps, loads, to_plain
from ckptmove.proof.request import VerifyRequest

DEEP = 10_001


@pytest.fixture
def deep(bench):
    """One more mark is open at once than is allowed of a file that nobody trusts."""
    (bench / "deep.pkl").write_bytes(b"\x80\x02" + b"(" * DEEP + b"1" * DEEP + b"N.")
    return "deep.pkl"


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "words",
    [
        ["inspect"], ["convert", "--to", "cpu", "--output", "out.pkl"],
        ["convert", "--to", "cpu", "--in-place"], ["convert", "--undo"], ["diff", "deep.pkl"], ["verify"],
    ],
)  # fmt: skip
def test_every_command_takes_it(say, deep, words) -> None:
    if words[0] == "verify":
        pytest.importorskip("torch")
    refused = say(*words, deep)
    assert refused.code == 4
    assert re.search(r"^error: deep.pkl: .*: 10001 > 10000$", refused.err, re.MULTILINE)
    assert "--limit-factor 10" in refused.err
    raised = say(*words, deep, "--limit-factor", "2")
    assert "limit" not in raised.err
    assert raised.code == (4 if "--undo" in words else 0)  # which a bare pickle does not have


@pytest.mark.parametrize("word", ["0", "-1", "1001", "x"])
def test_a_factor_is_a_number_of_reason(say, deep, word) -> None:
    assert say("inspect", deep, "--limit-factor", word).code == 2


def test_the_factor_raises_every_bound_and_reaches_the_child() -> None:
    raised = Limits().times(3)
    assert (raised.depth, raised.entries, raised.factor) == (30_000, 600_000, 3)
    request = VerifyRequest(path="a", limits=raised)
    assert loads(VerifyRequest, dumps(request)) == request
    assert to_plain(request)["limits"]["factor"] == 3


@pytest.mark.parametrize("count", [Budget.spend, Budget.write])
def test_what_follows_from_the_size_of_a_pickle_is_raised_too(count) -> None:
    with pytest.raises(LimitExceeded) as usual:
        count(Budget(Limits(), 100), 1 << 40)
    with pytest.raises(LimitExceeded) as raised:
        count(Budget(Limits().times(2), 100), 1 << 40)
    assert raised.value.limit == 2 * usual.value.limit

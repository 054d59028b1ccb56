"""The messages of a worker of `verify` that a test runs in its own process."""

from __future__ import annotations

from ckptmove.proof.evidence import RanksOfRun


def check_of(check):
    """A check as a dict, with its evidence as another."""
    return {**check._asdict(), "evidence": dict(check.evidence)}


def checks_of(messages):
    """The checks in messages, by name."""
    return {one.check.name: check_of(one.check) for one in messages if one.check is not None}


def run_of(messages):
    """The facts about a run of several ranks in messages."""
    run = RanksOfRun(0)
    for one in messages:
        run = run.updated(one.run or run)
    return run

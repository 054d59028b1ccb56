"""The messages of a worker of `verify` that a test runs in its own process."""

from __future__ import annotations

from ckptmove.proof.processes.messages import RunFacts


def check_of(check):
    """A check as a dict, with its evidence as another."""
    return {**check._asdict(), "evidence": dict(check.evidence)}


def checks_of(messages):
    """The checks in messages, by name."""
    return {one.check.name: check_of(one.check) for one in messages if one.check is not None}


def facts_of(messages):
    """The facts about a run of several ranks in messages."""
    facts = RunFacts()
    for one in messages:
        facts = facts.updated(one.facts or RunFacts())
    return facts

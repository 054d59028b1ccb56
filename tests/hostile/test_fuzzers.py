"""The fuzzers' harness over their seeds, over mutations of them, and over everything that they have ever found."""

from __future__ import annotations

import io
import pickle
from random import Random

import pytest
import torch

from fuzz.harness import examine_file, guarded
from fuzz.mutators import mixed
from fuzz.seeds import STORAGE, archive_of
from fuzz.targets import TARGETS, seeds_by_target

SEEDS = seeds_by_target()
DENSE = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE


def bare(value):
    return pickle.dumps(value, 4)


#: By what was wrong.
FOUND = {
    "the end of a directory in a file too short for one": lambda: b"PK\3\4\x14\0\0ZZVPK\5\6\0\0\0",
    "a long key of a bare pickle had a name that changed with the file": lambda: bare(
        {b"k" * 200: torch.zeros(2), "x" * 70_000: torch.ones(2), "device": torch.device("cuda:1")}
    ),
    "a long key within another key, likewise": lambda: bare(
        {(b"k" * 200, 1): torch.zeros(2), "device": torch.device("cuda:1")}
    ),
    "a long key that is written as text, likewise": lambda: pickle.dumps(
        {b"k" * 70_000: torch.zeros(2), "device": torch.device("cuda:1")}, 2
    ),
    "a key of a dict changed with the persistent id that it was": lambda: archive_of(
        b"\x80\x02}" + DENSE.replace(b"K\x04tQ", b"K\x04tq\x01Q") + b"0h\x01" + DENSE + b"s.", {"0": bytes(16)}
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_mended(name) -> None:
    assert guarded(examine_file, FOUND[name]()) in {"ok", "damaged-archive", "uneditable-pickle"}


@pytest.mark.parametrize("target", TARGETS)
def test_every_seed_holds(target) -> None:
    outcomes = {guarded(TARGETS[target].run, data) for data in SEEDS[target]}
    assert "ok" in outcomes
    assert outcomes <= {"ok", "unsupported-dtype", "uncastable-dtype", "uneditable-pickle"}


@pytest.mark.parametrize("target", TARGETS)
def test_mutations_of_seeds_hold(target) -> None:
    random = Random(target)

    def plain(data):
        changed = bytearray(data)
        for _ in range(random.randint(1, 3)):
            if changed:
                changed[random.randrange(len(changed))] = random.randrange(256)
        return bytes(changed)

    outcomes = set()
    for _ in range(100):
        data = random.choice(SEEDS[target])
        for _ in range(random.randint(1, 3)):
            data = mixed(TARGETS[target].mutator, data, random, plain)
        outcomes.add(guarded(TARGETS[target].run, data))
    assert len(outcomes) > 1, "the mutations are all of one kind"


def test_a_fault_is_not_passed_over() -> None:
    def broken(data):
        raise KeyError(len(data))

    with pytest.raises(KeyError):
        guarded(broken, b"")


def test_the_samples_are_among_the_seeds() -> None:
    stream = io.BytesIO()
    torch.save({}, stream)
    assert stream.getvalue()[:4] == SEEDS["torch-zip"][0][:4]
    assert sum(map(len, SEEDS.values())) > 30

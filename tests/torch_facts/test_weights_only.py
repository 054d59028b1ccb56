"""The names that weights-only mode accepts, compared with torch's own list."""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path
from pickle import PROTO

import pytest
import torch
import weights_only_lists
from weights_only_lists import numbers

from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import WEIGHTS_ONLY_OPCODES
from ckptmove.torch_facts.verdicts import classify
from ckptmove.torch_facts.weights_only import WEIGHTS_ONLY_SINCE, WEIGHTS_ONLY_UNTIL, modern_name, newest

IMPORT_MAPPING = torch._utils.IMPORT_MAPPING
NAME_MAPPING = torch._utils.NAME_MAPPING


RECORDED = weights_only_lists.read(Path(__file__).with_name("weights_only_lists.json"))
OPCODES = {opcode.name for opcode in pickletools.opcodes if ord(opcode.code) in WEIGHTS_ONLY_OPCODES}


def taken_by(version: str) -> set[str]:
    names = {name for name, since in WEIGHTS_ONLY_SINCE.items() if numbers(since) <= numbers(version)}
    still = {name for name, until in WEIGHTS_ONLY_UNTIL.items() if numbers(version) < numbers(until)}
    return names | still | OPCODES


def test_the_lists_are_those_of_the_torch_that_is_installed():
    assert set(weights_only_lists.taken_here()) == taken_by(torch.__version__)


@pytest.mark.parametrize("version", RECORDED)
def test_the_lists_are_those_of_every_torch(version):
    assert RECORDED[version] == taken_by(version)


def test_every_version_that_a_name_came_with_is_recorded():
    assert {".".join(version.split(".")[:2]) for version in RECORDED} >= {
        *WEIGHTS_ONLY_SINCE.values(),
        *WEIGHTS_ONLY_UNTIL.values(),
    }


def test_what_is_recorded_can_be_written_again(tmp_path):
    weights_only_lists.write(tmp_path / "lists.json", RECORDED)
    assert weights_only_lists.read(tmp_path / "lists.json") == RECORDED


def test_versions_are_numbers_and_no_text():
    assert newest(["2.9", "2.10", None, "2.6"]) == "2.10"
    assert newest([]) == "2.4"


def test_what_torch_allows_is_safe():
    uses = {name: classify(name) for name in WEIGHTS_ONLY_SINCE}
    assert {name: use.weights_only_since for name, use in uses.items()} == WEIGHTS_ONLY_SINCE
    assert {(use.weights_only, use.verdict) for use in uses.values()} == {(True, "safe")}


def test_names_of_python_2_are_looked_up_as_torch_does():
    assert {name: modern_name(".".join(name)) for name in NAME_MAPPING} == {
        name: ".".join(modern) for name, modern in NAME_MAPPING.items()
    }
    assert {name: modern_name(f"{name}.something") for name in IMPORT_MAPPING} == {
        name: f"{modern}.something" for name, modern in IMPORT_MAPPING.items()
    }


@pytest.mark.parametrize("name", ["__builtin__.set", "builtins.set", "my_package.Net", "collections.OrderedDict"])
def test_the_answer_is_that_of_torch_load(name):
    module, _, attribute = name.rpartition(".")
    pickle = PROTO + b"\x02" + f"c{module}\n{attribute}\n.".encode()
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("a/data.pkl", pickle)
        archive.writestr("a/version", "3")
    saved.seek(0)
    (found,) = interpret(pickle, Limits()).globals
    try:
        torch.load(saved, weights_only=True)
        accepted = True
    except torch.serialization.pickle.UnpicklingError:
        accepted = False
    since = classify(found).weights_only_since
    assert accepted is (since is not None and numbers(since) <= numbers(torch.__version__))

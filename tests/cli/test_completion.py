"""Shell completion, called as by a shell, and the groups and the end of each help text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from typer.core import TyperOption
from typer.testing import CliRunner

import ckptmove
from ckptmove.cli import completion
from ckptmove.cli.app import app
from ckptmove.cli.examples import EXAMPLES, epilog
from ckptmove.cli.options import Group
from ckptmove.cli.render.formats import DOCUMENTS, RENDERERS
from ckptmove.conversion.remap.options import remap_options
from ckptmove.findings.catalogue import CATALOGUE
from ckptmove.torch_facts.devices import parse_target

PAGES = Path(ckptmove.__file__).parent.parent


def completed(typed):
    """The words that bash is offered for the last word of a command line."""
    asked = {"_CKPTMOVE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    return CliRunner().invoke(app, [], env=asked).stdout.split()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("ckptmove convert run.pth --to cu", ["cuda:0", "cuda:1"]),
        ("ckptmove inspect run.pth --expect m", ["mps", "mtia:0"]),
        ("ckptmove verify --optimizer Adam", ["Adam", "AdamW", "Adamax"]),
        ("ckptmove inspect --ignore R3", ["R301", "R302", "R303", "R304"]),
        ("ckptmove convert run.pth --only o", ["optimizer", "other"]),
        ("ckptmove convert run.pth --drop sch", ["scheduler"]),
        ("ckptmove convert run.pth --dtype bf", ["bfloat16"]),
        ("ckptmove convert run.pth --dtype ema=b", ["ema=bfloat16"]),
        ("ckptmove rules D1", ["D101", "D102", "D103", "D104"]),
        ("ckptmove inspect --format g", ["github"]),
        ("ckptmove inspect --report j", ["json=", "junit="]),
    ],
)
def test_values_are_completed(typed, expected) -> None:
    assert sorted(completed(typed)) == sorted(expected)


def test_every_completed_value_is_valid() -> None:
    for device in completion.devices():
        assert parse_target(device) == device
    for name in completion.optimizers():
        assert issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    assert [code for code, _ in completion.codes()] == [*CATALOGUE]
    for part in completion.parts():
        assert remap_options(only=[part]).only == (part,)
    for dtype in completion.dtypes():
        (pair,) = remap_options(dtype=[dtype]).dtype
        assert "=".join(filter(None, pair)) == dtype
    assert completion.formats() == [*RENDERERS]
    assert completion.report_kinds() == [f"{kind}=" for kind in DOCUMENTS]


def test_every_help_ends_with_examples(say) -> None:
    names = [str(command.name or command.callback.__name__) for command in app.registered_commands]
    assert [*EXAMPLES] == ["", *names]
    for name, (examples, page) in EXAMPLES.items():
        shown = say(*filter(None, [name]), "--help").out
        assert shown.rstrip().endswith(f"{page} of the source.")
        assert all(line in shown for line, _ in examples)
        assert max(map(len, epilog(name).splitlines())) < 79  # the help indents it by two
        assert (PAGES / page).is_file()


def test_each_option_is_shown_once_under_the_heading_of_its_group(say) -> None:
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        declared = {heading: [] for heading in Group}
        for option in command.params:
            if isinstance(option, TyperOption) and not option.hidden:
                declared[option.rich_help_panel].append(option.opts[0])
        shown = {}
        for line in say(name, "--help").out.partition("\n\n  Examples:")[0].splitlines():
            if line and not line.startswith((" ", "Usage:")):
                shown[line.rstrip(":")] = []
            elif found := re.match(r"  (?:-\w, )?(--[a-z-]+)", line):
                shown[[*shown][-1]].append(found[1])
        assert [*shown.items()] == [("Arguments", []), *((key, found) for key, found in declared.items() if found)]


@pytest.mark.unmeasured
def test_every_example_is_a_command_line(say) -> None:
    for examples, _ in EXAMPLES.values():
        for line, _ in examples:
            program, *words = shlex.split(line)
            assert program == "ckptmove"
            assert say(*words, "--help").code == 0 or "--" in words
            assert say(*words).code != 2 or "--case" in words or "--script" in words

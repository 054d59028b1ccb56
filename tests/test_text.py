"""Counts, sizes, and quoted commands: a shell reads a quoted word as the word."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess

import pytest

from ckptmove.cli.render.text import sentence
from ckptmove.text import (
    Argument,
    Phrase,
    ShellOnly,
    amount,
    command_line,
    in_python,
    quoted,
    size,
    spelled,
    spelled_for_python,
    spelled_in_python,
)

WORDS = ["a b", "x\ny.pt", "it's\t\\n\n", "\x1b[0m", "é\u202ex", "\udcff\udc80", "$HOME\n`id`", "-x", "", "\x1b0"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_what_a_shell_makes_of_it(word):
    line = sentence(quoted(word))
    assert "\n" not in line
    done = subprocess.run(["bash", "-c", f"printf %s {line}"], capture_output=True, check=True)
    assert done.stdout == os.fsencode(word)


def test_a_surrogate_that_is_no_byte_is_written_somehow():
    assert quoted("\ud800") == r"$'\xed\xa0\x80'"


def test_options_are_spelled_for_a_shell_or_for_python():
    drop, plain = Argument("drop", "a b"), Argument("plain", True)
    phrase = Phrase("use ", drop, ", ", plain, ShellOnly(", or -q"), "; leave out ", Argument.typed("--as-root"))
    assert phrase == "use --drop 'a b', --plain, or -q; leave out --as-root"
    assert phrase.in_python == "use drop='a b', plain=True; leave out as_root"
    assert spelled_in_python(Phrase(phrase, "!")) == f"{phrase.in_python}!"
    assert spelled_in_python("--drop") == "--drop"
    assert Argument("limit_factor", "10").in_python.endswith(".times(10)")


def test_words_become_a_line():
    assert command_line(["ckptmove", "inspect", "a b", "x\ny"]) == r"ckptmove inspect 'a b' $'x\x0ay'"


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (6987, "6.8 KiB"),
        (1023.4, "1023 B"),
        (1023.6, "1.0 KiB"),
        (2**20, "1.0 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20 - 52, "1023.9 KiB"),
        (2**30 - 368, "1.0 GiB"),
        (2**50 - 1, "1.0 PiB"),
        (-5, "-5 B"),
        (80 * 2**30, "80.0 GiB"),
        (2**70, "1024.0 EiB"),
        (10**100, f"{10**100 / 2**60:.1f} EiB"),
    ],
)
def test_sizes(nbytes, expected) -> None:
    assert size(nbytes) == expected


def test_amounts() -> None:
    assert [amount(n, "tensor") for n in (0, 1, 2048)] == ["0 tensors", "1 tensor", "2,048 tensors"]


def test_an_argument_in_any_text_is_spelled_for_its_reader() -> None:
    def texts():
        resume, drop = Argument("script_args", "--resume PATH"), Argument("drop", "a b")
        return f"{drop}, {Argument('keep')}, {resume}", spelled(Phrase("use ", drop)), spelled("--drop")

    assert texts() == ("--drop 'a b', --keep, -- --resume PATH", "use --drop 'a b'", "--drop")
    with spelled_for_python():
        assert texts() == ("drop='a b', keep, script_args=['--resume', 'PATH']", "use drop='a b'", "--drop")
        with spelled_for_python(False):
            assert texts()[1] == "use --drop 'a b'"
    assert texts()[1] == "use --drop 'a b'"


@pytest.mark.parametrize(("separator", "quote"), [("/", '"'), ("\\", "'")])
def test_a_text_as_python_stands_in_the_quotes_that_a_command_does_not_use(separator, quote):
    literal = in_python('it\'s "a"', separator)
    assert (literal[0], literal[-1]) == (quote, quote)
    assert ast.literal_eval(literal) == 'it\'s "a"'

"""Options that are given twice, and options in the place of values."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("inspect", "run.pth", "--expect", "cpu", "--expect=cuda:0"), "--expect"),
        (("convert", "run.pth", "--to", "cpu", "--to", "cpu"), "--to"),
        (("convert", "run.pth", "--to", "cpu", "-o", "a.pth", "--output", "b.pth"), "--output"),
        (("convert", "run.pth", "--to", "cpu", "-oa.pth", "-o", "b.pth"), "--output"),
        (("verify", "run.pth", "--seed", "1", "--seed", "2"), "--seed"),
        (("diff", "run.pth", "run.pth", "--limit-factor", "1", "--limit-factor", "2"), "--limit-factor"),
        (("rules", "--format", "human", "--format", "github"), "--format"),
    ],
)
def test_an_option_with_one_value_is_typed_once(say, words, option) -> None:
    said = say(*words)
    assert said.code == 2
    assert f"'{option}'" in said.err


def test_repeatable_options_and_flags_may_be_repeated(ask) -> None:
    words = ("--ignore", "D103", "--ignore", "R302", "-v", "-v")
    assert ask("inspect", "run.pth", *words)["checkpoints"][0]["findings"] == []


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("convert", "run.pth", "--only", "-o", "new.pth"), "'--only'"),
        (("convert", "run.pth", "--to", "--force"), "'--to'"),
        (("verify", "run.pth", "--optimizer", "--to=cpu"), "'--optimizer'"),
        (("inspect", "run.pth", "--match", "-q"), "'--match'"),
    ],
)
def test_an_option_is_no_value(say, words, option) -> None:
    said = say(*words)
    assert said.code == 2
    assert option in said.err


def test_a_value_may_look_like_an_option(ask) -> None:
    assert ask("inspect", "run.pth", "--match=--force")["checkpoints"][0]["tensors"] == []
    assert ask("inspect", "run.pth", "--match", "-other")["checkpoints"][0]["tensors"] == []
    assert ask("convert", "run.pth", "--to", "cpu", "--keep", "-other", "-o", "new.pth")["exit_code"] == 0


def test_words_after_two_dashes_are_no_options(say) -> None:
    said = say("inspect", "--expect", "cpu", "--", "--expect", "--expect")
    assert said.code == 3
    assert "./--expect: no such file" in said.err

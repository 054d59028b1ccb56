from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.cli.render.text import LONGEST_NAME, clean, sentence, shorten, width


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.0.weight", "model.0.weight"),
        ("größe.权重", "größe.权重"),
        ("[red]x[/red]", "[red]x[/red]"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\r\nb\tc\x00", "a\\x0d\\x0ab\\x09c\\x00"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2066x\u2069", "\\u2066x\\u2069"),
        ("a\u200bb", "a\\u200bb"),
        ("a\u2028b", "a\\u2028b"),
        ("\udc80", "\\udc80"),
        ("\U000e0001", "\\U000e0001"),
        ("::add-mask::x", "\\x3a:add-mask::x"),
        ("  ##[error]x", "  \\x23#[error]x"),
        ("a::b", "a::b"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text, expected) -> None:
    assert clean(text) == expected


@given(st.text(st.characters(exclude_categories=[])))
def test_the_result_is_printable_whatever_comes_in(text) -> None:
    for result in (clean(text), sentence(text)):
        assert result.isprintable()
        result.encode()


def test_long_names_are_cut_in_the_middle() -> None:
    name = "a" * 600 + "b" * 600
    cut = clean(name)
    assert len(cut) == LONGEST_NAME + 1
    assert (cut[0], cut[LONGEST_NAME // 2], cut[-1]) == ("a", "…", "b")
    assert sentence(name) == name


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("model.layer.weight", 18, "model.layer.weight"),
        ("model.layer.weight", 11, "model…eight"),
        ("权重权重权重", 7, "权…重"),
        ("abc", 1, "…"),
    ],
)
def test_what_is_too_wide_loses_its_middle(text, columns, expected) -> None:
    assert shorten(text, columns) == expected


@given(st.text(st.characters(categories=["L", "N"])), st.integers(min_value=1, max_value=40), st.data())
def test_a_shortened_text_fits(text, columns, data) -> None:
    assert width(shorten(text, columns)) <= columns
    tail = data.draw(st.integers(min_value=0, max_value=columns - 1))
    found = shorten(text, columns, tail)
    assert width(found) <= columns
    assert found == text or text.endswith(found.partition("…")[2])

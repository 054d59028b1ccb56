from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.cli.render.html.markup import Markup, element, joined, text
from ckptmove.text import escaped


class Parsed(HTMLParser):
    def __init__(self, source):
        super().__init__()
        self.tags, self.texts, self.attributes = [], [], []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


@given(st.text(st.characters(exclude_categories=[])))
def test_a_text_stays_a_text(words) -> None:
    parsed = Parsed(element("p", words, title=words))
    assert parsed.tags == ["p"]
    assert "".join(parsed.texts) == escaped(words)
    assert parsed.attributes == [("title", escaped(words))]


def test_markup_is_not_escaped_again() -> None:
    assert element("p", element("b", "<"), "<") == "<p><b>&lt;</b>&lt;</p>"
    assert joined([Markup("<i>"), "<i>"]) == "<i>&lt;i&gt;"
    assert isinstance(text("<"), Markup)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"class_": "a b"}, '<p class="a b"></p>'),
        ({"aria_hidden": "true"}, '<p aria-hidden="true"></p>'),
        ({"hidden": True, "disabled": False}, "<p hidden></p>"),
        ({"width": 1.5}, '<p width="1.5"></p>'),
    ],
)
def test_attributes(attributes, expected) -> None:
    assert element("p", **attributes) == expected


def test_an_element_without_content_has_no_end() -> None:
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'

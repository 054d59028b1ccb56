from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptmove.cli.render.html import columns
from ckptmove.cli.render.text import LONGEST_NAME, clean


def cells(column):
    return [column["words"][number] for number in column["at"]]


@given(st.lists(st.text(st.characters(exclude_categories=[]))))
def test_names_are_divided_at_the_last_dot(names) -> None:
    column = columns.names("name", names)
    heads, tails = cells(column["heads"]), cells(column["tails"])
    assert [head + tail for head, tail in zip(heads, tails, strict=True)] == [clean(name) for name in names]
    assert all(head == "" or head.endswith(".") for head in heads)
    assert not any("." in tail for tail in tails)


@given(st.lists(st.sampled_from("abc")))
def test_a_text_is_stored_once(words) -> None:
    column = columns.words("device", words, extra=1)
    assert cells(column) == words
    assert len(set(column["words"])) == len(column["words"])
    assert (column["title"], column["kind"], column["extra"]) == ("device", "words", 1)


def test_a_name_is_limited() -> None:
    assert sum(map(len, columns.names("name", ["x" * 10**6])["tails"]["words"])) <= LONGEST_NAME + 1


def test_numbers() -> None:
    assert columns.numbers("bytes", [1, None], "bytes") == {"title": "bytes", "kind": "bytes", "values": [1, None]}
    assert columns.numbers("max abs", [])["kind"] == "numbers"

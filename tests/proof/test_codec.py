from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import pytest

from ckptmove.model import Severity
from ckptmove.proof.codec import dumps, loads, to_plain


class Point(NamedTuple):
    """A named tuple in others."""

    x: int
    name: str = ""


class Record(NamedTuple):
    """One field of each kind of annotation."""

    of_all: object = None
    number: float = 0.0
    flag: bool = False
    word: Literal["a", "b"] = "a"
    severity: Severity = Severity.INFO
    point: Point | None = None
    points: tuple[Point, ...] = ()
    pair: tuple[int, str] = (0, "")
    names: frozenset[str] = frozenset()
    by_name: dict[str, list[int]] | None = None
    by_pair: dict[tuple[int, str], int] | None = None


@dataclass
class Figures:
    """A data class with a private field."""

    count: int = 0
    _open: list[int] = field(default_factory=list)


FULL = Record(
    of_all={"a": [1, None, "b"]},
    number=1.5,
    flag=True,
    word="b",
    severity=Severity.ERROR,
    point=Point(1),
    points=(Point(1, "a"), Point(2)),
    pair=(3, "c"),
    names=frozenset({"a\udcff", "\u202e"}),
    by_name={"a": [1], "b": []},
    by_pair={(1, "a"): 2},
)


@pytest.mark.parametrize("value", [Record(), FULL, *(Record(**{name: one}) for name, one in FULL._asdict().items())])
def test_values_return_as_they_were(value) -> None:
    assert loads(Record, dumps(value)) == value
    assert dumps(value).isascii()


def test_defaults_and_private_fields_are_left_out() -> None:
    assert to_plain(Record(number=2.0)) == {"number": 2.0}
    assert to_plain(Figures(3, [1])) == {"count": 3}
    assert loads(Figures, '{"count": 3}') == Figures(3)
    assert loads(Record, '{"number": 2}').number == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "[]",
        "[" * 100_000,
        '{"_open": []}',
        '{"nothing": 1}',
        '{"number": "1"}',
        '{"flag": 1}',
        '{"word": "c"}',
        '{"severity": "grave"}',
        '{"point": {}}',
        '{"points": "ab"}',
        '{"points": [3]}',
        '{"pair": [1]}',
        '{"pair": ["a", 1]}',
        '{"names": {"a": 1}}',
        '{"by_name": 3}',
        '{"by_pair": [[1, 2, 3]]}',
    ],
)
def test_anything_else_is_refused(text) -> None:
    with pytest.raises(ValueError):
        loads(Record, text)

"""The mutants of `benchmarks/mutants.py`."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys

import pytest
from mutants import FIRST, TREE, Copy, choose, mutants

SOURCE = '''
LIMIT = 1

@dataclass(frozen=True)
class Row:
    size: int = 1

    def __repr__(self) -> str:
        return self.size == 1

@cache
def once() -> int:
    return 1

def run(rows: Literal[1], start: int = 1) -> {returns}:
    """Say 1 == 1."""
    rest: Literal[1]
    {line}
'''


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x = (a) <  (b)", {"x = (a) <=  (b)"}),
        ("x = a  # is\n    x = b is c", {"x = a  # is\n    x = b is not c"}),
        ("x = a not in b != c", {"x = a in b != c", "x = a not in b == c"}),
        (
            "x = (ä  # or and\n        or b and c)",
            {"x = (ä  # or and\n        and b and c)", "x = (ä  # or and\n        or b or c)"},
        ),
        ("x = not(a)", {"x = (a)"}),
        ("x = True", {"x = False"}),
        ("x = -2, 0.5", {"x = -3, 0.5", "x = -2, 1.5"}),
        ('x = f"{a == 1}"', set()),
        ("f(\n        a\n    )", {"pass\n\n"}),
        ("if a: x = b", {"if not (a): x = b"}),
        ("while f(\n    ): x = b", {"while not (f(\n    )): x = b"}),
        ("x = b if a else c", {"x = b if not (a) else c"}),
        ("if a == b: x = c", {"if a != b: x = c"}),
        ("return a", {"return None"}),
        ("return (\n        a,\n    )", {"return None\n\n"}),
        ("class Inner:\n        x = 1", set()),
    ],
)
def test_each_mutant_changes_one_node_of_the_body_and_keeps_the_lines(line, found):
    source = SOURCE.format(returns="str", line=line).encode()
    all_found = mutants("ckptmove/io/rows.py", source)
    assert {it.applied(source) for it in all_found} == {SOURCE.format(returns="str", line=it).encode() for it in found}
    for mutant in all_found:
        ast.parse(mutant.applied(source))


def test_what_may_return_none_has_no_mutant_that_does():
    assert not mutants("rows.py", SOURCE.format(returns="str | None", line="return a").encode())


def test_each_room_has_mutants_by_its_share_and_unchanged_lines_keep_theirs():
    lines = [f"    x{number} = {number}\n" for number in range(100)]
    sources = {
        "ckptmove/text.py": b"def small(): f()\n",
        "ckptmove/io/a.py": ("def large():\n" + "".join(lines)).encode(),
        "ckptmove/pickles/b.py": ("def half():\n" + "".join(lines[:50])).encode(),
    }
    chosen = choose(sources, 16, seed=0)
    assert [it.path for it in chosen] == [
        *["ckptmove/io/a.py"] * 10,
        *["ckptmove/pickles/b.py"] * 5,
        "ckptmove/text.py",
    ]
    moved = {"ckptmove/lazy/a.py": b"import x\n" + sources["ckptmove/io/a.py"]}
    assert [it.what for it in choose(moved, 10, seed=0)] == [it.what for it in chosen[:10]]
    assert choose(sources, 16, seed=1) != chosen


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Judge a mutant by a pytest that ends with the given codes; return the answer, and how pytest was started."""
    monkeypatch.setattr(Copy, "__init__", lambda *_: None)
    copy = Copy(tmp_path)
    copy.tree, copy.selection = tmp_path, tmp_path / "selection.json"
    mutant = mutants("ckptmove/text.py", source := (TREE / "ckptmove" / "text.py").read_bytes())[0]
    target = tmp_path / mutant.path
    target.parent.mkdir()

    def judge(codes, tests, *options):
        codes, started = iter(codes), []

        def pytest_in_the_copy(*arguments, **_streams):
            is_broken = target.read_bytes() == mutant.applied(source)
            started.append((is_broken, json.loads(copy.selection.read_text()), arguments))
            return subprocess.CompletedProcess(arguments, next(codes))

        shutil.copy2(TREE / mutant.path, target)
        monkeypatch.setattr(copy, "pytest", pytest_in_the_copy)
        try:
            return copy.judge(mutant, tests, 9, *options), started
        finally:
            assert target.read_bytes() == source
            assert not [*codes]

    return judge


@pytest.mark.skipif(sys.platform != "linux", reason="mutants run on Linux")
def test_a_mutant_is_caught_by_a_pytest_that_ran_tests(judged):
    for codes, answer in [
        ([0], "survives"),
        *(([code], "caught") for code in (1, 2, 3, -11)),
        ([-14], "timeout"),
        *(([code, 0], "caught") for code in (4, 5)),  # without the mutant, pytest collects the tests
    ]:
        found, started = judged(codes, ["tests/test_text.py::test_a"])
        assert (codes, found) == (codes, answer)
        assert [is_broken for is_broken, *_ in started] == [True, False][: len(codes)]
        assert ["--collect-only" in arguments for *_, arguments in started] == [False, True][: len(codes)]
    for codes in ([4, 4], [5, 5], [5, 4]):
        with pytest.raises(SystemExit, match=f"ends with {codes[0]} "):
            judged(codes, ["tests/test_text.py::test_a"])


@pytest.mark.skipif(sys.platform != "linux", reason="mutants run on Linux")
def test_each_pytest_of_a_mutant_has_the_options_and_its_part_of_the_tests(judged):
    tests = [f"tests/test_text.py::test_{number}" for number in range(FIRST + 1)]
    assert judged([], [], "--quick") == ("survives", [])
    answer, started = judged([0, 1], tests, "--quick")
    assert answer == "caught"
    assert [selection for _, selection, _ in started] == [[9, tests[:FIRST]], [9, tests[FIRST:]]]
    for *_, arguments in started:
        assert arguments[-2:] == ("--quick", "tests/test_text.py")

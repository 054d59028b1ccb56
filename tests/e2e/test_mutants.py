"""The mutants of `benchmarks/mutants.py`."""

from __future__ import annotations

import ast
import subprocess

import pytest
from mutants import TREE, Copy, choose, mutants, reaching

SOURCE = '''
LIMIT = 1

@dataclass(frozen=True)
class Row:
    size: int = 1

    def __repr__(self) -> str:
        return self.size == 1

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
        ("x = zip(a, strict=True)", set()),
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


@pytest.mark.parametrize(
    ("codes", "answer"),
    [
        ([0, 0, 0], ("survives", "survives")),
        ([0, 0, 1], ("survives", "caught")),
        ([0, -11], ("caught", "caught")),
        *(([code], ("caught", "caught")) for code in (1, 2, 3, 4)),
        ([5, 5, 5], ("survives", "survives")),  # all of these tests are slow
        ([-14], ("timeout", "timeout")),
    ],
)
def test_a_mutant_is_judged_by_the_tests_of_its_module_then_of_its_room_then_by_all(
    tmp_path, monkeypatch, codes, answer
):
    monkeypatch.setattr(Copy, "__init__", lambda *_: None)
    copy = Copy(tmp_path)
    copy.folder = copy.tree = tmp_path
    mutant = mutants("ckptmove/io/cut.py", source := (TREE / "ckptmove/io/cut.py").read_bytes())[0]
    (target := tmp_path / mutant.path).parent.mkdir(parents=True)
    target.write_bytes(source)
    started = []

    def pytest_in_the_copy(command, **_options):
        started.append(command[command.index("mutants") + 1 :])
        assert target.read_bytes() == mutant.applied(source)
        return subprocess.CompletedProcess(command, codes[len(started) - 1])

    monkeypatch.setattr(subprocess, "run", pytest_in_the_copy)
    monkeypatch.setattr("mutants.end_processes", lambda _: None)
    assert copy.judge(mutant) == answer
    assert target.read_bytes() == source
    near, room = reaching(mutant.path)
    assert "tests/io/test_cut.py" in near
    assert {*near} < {*room}
    assert started == [["--quick", *near], ["--quick", *room], room][: len(codes)]


def test_each_room_has_its_tests():
    assert "tests/test_text.py" in reaching("ckptmove/text.py")[1]
    assert {it.split("/")[1] for it in reaching("ckptmove/formats/torch_zip.py")[1]} == {"formats", "contract"}
    assert reaching("ckptmove/new/room.py") == ([], [])

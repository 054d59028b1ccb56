"""Edits of files: what they insert, and that nothing else changes."""

from __future__ import annotations

import linecache
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.proof.source_edits import Edit, diff_of, digest, lines_of

HOWS = ["before", "after", "in place of"]
#: By kind of file: the content, the edit, and the content with it.
CASES = {
    "before a line": (b"a = 1\nb = 2\n", ("before", 2, 2, "n = 0"), b"a = 1\nn = 0\nb = 2\n"),
    "after several lines": (b"f(\n  1\n)\nb\n", ("after", 1, 3, "n"), b"f(\n  1\n)\nn\nb\n"),
    "in place of several lines": (b"a\nf(\n  1\n)\nb\n", ("in place of", 2, 4, "n"), b"a\nn\nb\n"),
    "CRLF": (b"if a:\r\n    b\r\nc\r\n", ("before", 2, 2, "n"), b"if a:\r\n    n\r\n    b\r\nc\r\n"),
    "CRLF in place": (b"a\r\nb\r\n", ("in place of", 1, 1, "n"), b"n\r\nb\r\n"),
    "one CRLF among LF": (b"a\r\nb\nc\n", ("after", 1, 1, "n"), b"a\r\nn\r\nb\nc\n"),
    "CR": (b"a\rb\r", ("after", 1, 1, "n"), b"a\rn\rb\r"),
    "CR before an empty line": (b"a\rb\n\n", ("after", 1, 2, "n"), b"a\rb\nn\r\n\n"),
    "tabs": (b"if a:\n\tif b:\n\t\tc\n", ("after", 3, 3, "n"), b"if a:\n\tif b:\n\t\tc\n\t\tn\n"),
    "after the last line": (b"a\r\n\tb", ("after", 2, 2, "n"), b"a\r\n\tb\r\n\tn"),
    "before the last line": (b"a\r\nb", ("before", 2, 2, "n"), b"a\r\nn\r\nb"),
    "in place of the last line": (b"a\nb", ("in place of", 2, 2, "n"), b"a\nn"),
    "after the only line": (b"a", ("after", 1, 1, "n"), b"a\nn"),
    "a BOM": (b"\xef\xbb\xbfa = '\xc3\xa9'\n", ("before", 1, 1, "n"), b"\xef\xbb\xbfn\na = '\xc3\xa9'\n"),
    "a coding cookie": (
        b"# coding: latin-1\na = '\xe9'\n",
        ("in place of", 2, 2, "a = 'é' + 'ü'"),
        b"# coding: latin-1\na = '\xe9' + '\xfc'\n",
    ),
    "a form feed": (b"a\x0cb\n\x0c\nc\n", ("before", 3, 3, "n"), b"a\x0cb\n\x0c\nn\nc\n"),
}


@pytest.mark.parametrize("kind", CASES)
def test_an_edit_changes_its_lines_only(kind):
    before, edit, after = CASES[kind]
    edit = Edit("train.py", *edit)
    assert edit.applied(before) == after
    assert edit.edited(lines_of(before)) == lines_of(after)


LINES = st.lists(st.tuples(st.text("ab \t\x0cé", max_size=4), st.sampled_from(["\n", "\r\n", "\r"])), min_size=1)


@given(data=st.data(), lines=LINES, is_ended=st.booleans(), how=st.sampled_from(HOWS))
def test_lines_and_numbers_follow_from_the_edit(data, lines, is_ended, how):
    text = "x" + "".join(line + end for line, end in lines) + "" * is_ended + "y" * (not is_ended)
    source = text.encode()
    known = lines_of(source)
    first = data.draw(st.integers(1, len(known)))
    edit = Edit("train.py", how, first, data.draw(st.integers(first, len(known))), "new")
    edited = edit.edited(known)
    assert lines_of(edit.applied(source)) == edited
    begin, _ = edit.span
    for number, line in enumerate(edited, 1):
        if number != begin + 1:
            assert known[edit.number_before(number) - 1] == line


@pytest.mark.parametrize("kind", CASES)
def test_the_digest_is_that_of_the_lines_that_python_reads(tmp_path, kind):
    path = tmp_path / "train.py"
    path.write_bytes(CASES[kind][0])
    read = [line.removesuffix("\n") for line in linecache.getlines(str(path))]
    assert digest(lines_of(path.read_bytes())) == digest(read)
    assert digest(read) != digest(lines_of(CASES[kind][2]))


def test_a_text_that_the_encoding_lacks_is_refused():
    with pytest.raises(UnicodeError):
        Edit("train.py", "after", 1, 1, "a = 'é'").applied(b"# coding: ascii\n")


def test_an_encoding_that_would_change_other_bytes_is_refused():
    with pytest.raises(UnicodeError):
        lines_of(b"# coding: cp932\na = '\xee\xf9'\n")


@pytest.mark.parametrize("name", ["train.py", "my scripts/train step.py"])
@pytest.mark.parametrize("kind", sorted(CASES.keys() - {"CR"}))
def test_git_applies_the_diff(tmp_path, kind, name):
    git = shutil.which("git") or pytest.skip("git is not installed")
    before, _, after = CASES[kind]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(before)
    diff = diff_of(name, before, after).encode("utf-8", "surrogateescape")
    subprocess.run([git, "apply"], input=diff, cwd=tmp_path, check=True)
    assert path.read_bytes() == after


def test_the_diff_of_equal_files_is_empty():
    assert not diff_of("train.py", b"a\n", b"a\n")

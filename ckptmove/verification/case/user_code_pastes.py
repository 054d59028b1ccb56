"""Whether a line can be pasted: the file is Python after it, and all that the line reads has a value there.

Never runs the file, and never writes it: what it would say is parsed, no more.
"""

from __future__ import annotations

import ast
import linecache
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.verification.case.user_code import parsed, statements_at, statements_in, tree_of
from ckptmove.verification.case.user_code_bindings import bound_within, has_value, read_in, set_in, spot_of, way_to

if TYPE_CHECKING:
    from ckptmove.verification.case.user_code import Line
    from ckptmove.verification.case.user_code_bindings import Spot


class Paste(NamedTuple):
    """A line, and where it goes.

    Attributes:
        line: one of the file.
        how: ``before``, ``after`` or ``in place of``.
        first, last: the lines that it goes to.
        text: what it says, without indentation.
        added: the statement in it that the file did not have; empty where only an expression is another one.
        spot: where that statement begins, once it is pasted.
    """

    line: Line
    how: str
    first: int
    last: int
    text: str
    added: str = ""
    spot: Spot = (0, 0)


def is_right(paste: Paste) -> bool:
    """Whether a file is Python once a line is pasted, and the line finds what it reads, and is not there already."""
    tree = parsed(_edited(paste))
    return _is_at_home(paste, tree) if paste.added else _reads_no_more(paste, tree)


def can_read(line: Line, expression: str) -> bool:
    """Whether the names in an expression have a value where a line stands."""
    tree, statements = tree_of(line.path), statements_at(line)
    if not statements:
        return False
    own, way = statements[-1], way_to(tree, spot_of(statements[-1]))
    late = {one.target.id for one in ast.walk(own) if isinstance(one, ast.NamedExpr)}
    known = (read_in(own) - late) | bound_within(own)
    return all(name in known or has_value(way, name, tree) for name in read_in(parsed(expression).body[0]))


def _edited(paste: Paste) -> str:
    lines = linecache.getlines(paste.line.path)
    begin, end = paste.first - 1, paste.last
    head = lines[begin][: len(lines[begin]) - len(lines[begin].lstrip())]
    at = {"before": slice(begin, begin), "after": slice(end, end)}.get(paste.how, slice(begin, end))
    return "".join([*lines[: at.start], f"{head}{paste.text}\n", *lines[at.stop :]])


def _is_at_home(paste: Paste, tree: ast.Module) -> bool:
    way = way_to(tree, paste.spot)
    if not way:
        return False  # it is no Python, or the line went into a text of several lines
    said = [ast.unparse(one) for one in parsed(paste.added).body]
    block, end = way[-1], way[-1].number + len(said)
    body = [ast.unparse(one) for one in block.body[max(block.number - 1, 0) : end + 1]]
    if body.count(said[-1]) > 1:
        return False  # once more would be of no more use
    brought: set[str] = set()
    for one in block.body[block.number : end]:
        if not all(name in brought or has_value(way, name, tree_of(paste.line.path)) for name in read_in(one)):
            return False
        brought |= set_in(one)
    return True


def _reads_no_more(paste: Paste, tree: ast.Module) -> bool:
    """Whether the statements of a line are as many as before, and what they read that they did not has a value."""
    old, new = statements_at(paste.line._replace(number=paste.first)), statements_in(tree, paste.first)
    return len(old) == len(new) > 0 and all(
        has_value(way_to(tree, spot_of(after)), name, tree_of(paste.line.path))
        for before, after in zip(old, new, strict=True)
        for name in read_in(after) - read_in(before)
    )

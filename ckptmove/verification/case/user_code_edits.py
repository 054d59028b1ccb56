"""Changes to the user's lines: what to paste, and where it goes, so that nothing is left to guess.

Never writes a file: it says what a file is to say.
"""

from __future__ import annotations

import ast
import linecache
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.verification.case.user_code import (
    SCOPES,
    Line,
    assigned,
    callee,
    full_name,
    line_of,
    own_nodes,
    parsed,
    statements_at,
    tree_of,
)
from ckptmove.verification.case.user_code_bindings import spot_of
from ckptmove.verification.case.user_code_pastes import Paste, is_right

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.verification.case.user_code_bindings import Spot

#: What takes ``.to(device)`` behind it as it is; anything else needs brackets.
_ATOMS: Final = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
#: What gives a dict of tensors more often than a tensor.
LOADS: Final = frozenset({"load", "load_file"})
#: What moves a tensor already.
MOVES: Final = frozenset({"to", "cuda"})


class Fix(NamedTuple):
    """What mends a fault.

    Attributes:
        text: one line of code; words where there is no such line.
        where: ``before``, ``after`` or ``in place of``, and the lines in question: ``after train.py:7-9``. What is
            pasted is indented as the first of them. Empty with words.
    """

    text: str = ""
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


#: Where nothing is known that would mend it.
NO_FIX: Final = Fix()


def before(line: Line, text: str, name: str = "") -> Fix:
    """A statement before the one that a line is in, in the same line where it shares one; words for none in time.

    Args:
        line: the line; of several statements in it, the first one that reads a name, and before which there is one.
        text: the statement.
        name: the name.
    """
    every = statements_at(line)
    reading = [one for one in every if not isinstance(one, SCOPES) and _reads(one, name)]
    fixes = (before_statement(line, one, text) for one in reading or every)
    return next((fix for fix in fixes if fix.where), Fix(f"work this into {line}: {text}"))


def before_statement(line: Line, statement: ast.stmt, text: str) -> Fix:
    """A statement before another one of the file that a line is of; words where what it reads has no value there."""
    statement = _chained(line, statement)
    first, column = spot_of(statement)
    if not _source(line, first).encode()[:column].strip():
        return _fix(Paste(line, "before", first, first, text, text, (first, column)))
    return _spliced(line, [_Change(first, column, column, f"{text}; ")], text, (first, column))


def _reads(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(one, ast.expr) and _is_read(one, name) for one in ast.walk(statement))


def after(line: Line, statement: ast.stmt, text: str) -> Fix:
    """A statement after another one; in the same line where that shares one."""
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    head = _source(line, first).encode()[: statement.col_offset]
    tail = _source(line, last).encode()[statement.end_col_offset :].strip()
    if not head.strip() and (not tail or tail.startswith(b"#")):
        return _fix(Paste(line, "after", first, last, text, text, (last + 1, statement.col_offset)))
    end = statement.end_col_offset or 0
    return _spliced(line, [_Change(last, end, end, f"; {text}")], text, (last, end + 2))


def replaced(line: Line, *changes: tuple[ast.expr | ast.stmt, str]) -> Fix:
    """The line of some nodes with other text in their place: of one in another the outer, of several lines the first.

    Words where the line would be none, or would read what has no value.
    """
    first, last = changes[0][0].lineno, changes[0][0].end_lineno or changes[0][0].lineno
    node, text = changes[0]
    words = f"work this into {line_of(line.path, first)}: {text} in place of {text_of(line, node)}"
    if first != last:
        head, tail = _source(line, first).encode(), _source(line, last).encode()
        whole = head[: node.col_offset] + text.encode() + tail[node.end_col_offset :]
        return _fix(Paste(line, "in place of", first, last, whole.decode().strip()), words)
    same = [(node, text) for node, text in changes if (node.lineno, node.end_lineno) == (first, first)]
    outer = [(node, text) for node, text in same if not any(node in _inside(other) for other, _ in same)]
    if not all(_is_written_so(line, node) for node, _ in outer):
        return Fix(words)  # where Python tells another place of what is in an f-string
    edits = [_Change(first, one.col_offset, one.end_col_offset or 0, text) for one, text in outer]
    return _spliced(line, edits, words=words)


def _inside(node: ast.AST) -> list[ast.AST]:
    return [one for one in ast.walk(node) if one is not node]


def _is_written_so(line: Line, node: ast.expr | ast.stmt) -> bool:
    """Whether a node stands where Python says that it does."""
    text, whole = (
        (f"({text_of(line, node)})", ast.Expr(node)) if isinstance(node, ast.expr) else (text_of(line, node), node)
    )
    return [ast.unparse(one) for one in parsed(text).body] == [ast.unparse(whole)]


def text_of(line: Line, node: ast.AST) -> str:
    """A node as it is written, or as Python would write it where it takes several lines."""
    if isinstance(node, (ast.expr, ast.stmt)) and node.lineno == node.end_lineno:
        return _source(line, node.lineno).encode()[node.col_offset : node.end_col_offset].decode()
    return ast.unparse(node)


def moved(line: Line, node: ast.expr, device: str) -> str:
    """An expression with ``.to(device)`` behind it."""
    text = text_of(line, node)
    return f"{text}.to({device})" if isinstance(node, _ATOMS) else f"({text}).to({device})"


def with_move(
    line: Line, expressions: Sequence[str], device: str, *, code: str = "", taken: bool = False, written: bool = False
) -> Fix | None:
    """The user's line with a tensor moved where it is read; None where it is not, or is moved or written to there.

    Args:
        line: where.
        expressions: what the tensor is called; the first one that is there is taken.
        device: an expression for the target.
        code: what Python calls the code that was run there.
        taken: whether what the line uses was made of the tensor: then rows that it takes of it are moved instead.
        written: whether only a line that writes to it is sought.
    """
    nodes = list(own_nodes(line, code))
    for expression in expressions:
        read = [node for node in nodes if isinstance(node, ast.expr) and _is_read(node, expression)]
        is_written = any(_is_written(node, one) for node in nodes for one in read)
        if is_written is not written:
            continue
        moves = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in MOVES]
        rows = [node for node in nodes if taken and isinstance(node, ast.Subscript) and node.value in read]
        read = [*rows, *(one for one in read if not any(row.value is one for row in rows))]
        read = [one for one in read if one not in moves]
        fix = replaced(line, *((node, moved(line, node, device)) for node in read)) if read else NO_FIX
        if fix.where:
            return fix
    return None


def with_expression(line: Line, name: str, text: str, code: str) -> Fix | None:
    """The user's line with something else where a variable is read; None where it is not."""
    read = [node for node in own_nodes(line, code) if isinstance(node, ast.expr) and _is_read(node, name)]
    fix = replaced(line, *((node, text) for node in read)) if read else NO_FIX
    return fix if fix.where else None


def _is_read(node: ast.expr, expression: str) -> bool:
    return isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and ast.unparse(node) == expression


def _is_written(node: ast.AST, sought: ast.expr) -> bool:
    """Whether a node writes into what an expression names: ``mask[0] = 1``, ``mask.add_(1)``."""
    if isinstance(node, ast.Attribute) and node.value is sought:
        return node.attr.endswith("_") or not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Subscript) and node.value is sought and not isinstance(node.ctx, ast.Load)


def calls_of(line: Line, operation: str) -> list[ast.Call]:
    """The calls of an operation of torch's in a line, by its name without what it is in."""
    short = operation.rpartition(".")[2]
    calls = [one for one in own_nodes(line) if isinstance(one, ast.Call) and callee(one) == short]
    return [one for one in calls if one.lineno <= line.number <= (one.end_lineno or one.lineno)]


def with_device(line: Line, operation: str, device: str) -> Fix:
    """The user's line with the device in the calls that make a tensor; nothing where no such call is to be seen."""
    calls = calls_of(line, operation)
    if calls and (operation.startswith("torch.Tensor.") or any(_has(one, "generator") for one in calls)):
        return replaced(line, (calls[0], moved(line, calls[0], device)))
    changes = [(one, _on_device(line, one, device)) for one in calls]
    missing = [(one, text) for one, text in changes if text != text_of(line, one)]
    if missing:
        return replaced(line, *missing)
    if calls:  # as a parameter of a function that is called without it
        return Fix(f"{device} is not the target at {line}: hand the device of the case to what calls it")
    for statement in statements_at(line):  # it is called by another name
        target, value = assigned(statement) or (None, None)
        if isinstance(target, (ast.Name, ast.Attribute)) and not (value is not None and _is_loaded(line, value)):
            name = ast.unparse(target)
            return after(line, statement, f"{name} = {name}.to({device})")
    return NO_FIX


def _is_loaded(line: Line, value: ast.expr) -> bool:
    """Whether an expression is what torch or safetensors reads from a file, and so perhaps a dict."""
    return callee(value) in LOADS and is_of_torch(line, value)


def is_of_torch(line: Line, call: ast.expr) -> bool:
    """Whether it is torch or safetensors that is called, by what a file imports."""
    return full_name(line, getattr(call, "func", call)).partition(".")[0] in {"torch", "safetensors"}


def _has(call: ast.Call, keyword: str) -> bool:
    return any(one.arg == keyword for one in call.keywords)


def _on_device(line: Line, call: ast.Call, device: str) -> str:
    given = next((one for one in call.keywords if one.arg == "device"), None)
    if given is None and any(one.arg is None for one in call.keywords):
        return moved(line, call, device)  # the device may be in what two asterisks bring
    if call.lineno != call.end_lineno:
        others = [one for one in call.keywords if one is not given]
        return ast.unparse(ast.Call(call.func, call.args, [*others, ast.keyword("device", ast.Name(device))]))
    raw = _source(line, call.lineno).encode()
    if given is not None:
        start, end = given.value.col_offset, given.value.end_col_offset
        return (raw[call.col_offset : start] + device.encode() + raw[end : call.end_col_offset]).decode()
    head = raw[call.col_offset : call.end_col_offset].decode()[:-1].rstrip(" ,")
    return f"{head}{', ' if call.args or call.keywords else ''}device={device})"


class _Change(NamedTuple):
    """What stands between two columns of a line, in bytes of UTF-8, and is to be replaced."""

    number: int
    start: int
    stop: int
    text: str


def _spliced(line: Line, changes: list[_Change], added: str = "", spot: Spot = (0, 0), words: str = "") -> Fix:
    raw, end, made = _source(line, changes[0].number).encode(), None, b""
    for one in sorted(changes, key=lambda change: change.start, reverse=True):
        made, end = one.text.encode() + raw[one.stop : end] + made, one.start
    number = changes[0].number
    return _fix(Paste(line, "in place of", number, number, (raw[:end] + made).decode().strip(), added, spot), words)


def _fix(paste: Paste, words: str = "") -> Fix:
    """What is to be pasted, if it can be; words, if not."""
    spot = _spot(paste.line, paste.first, paste.last)
    if is_right(paste):
        return Fix(paste.text, f"{paste.how} {spot}")
    return Fix(words or f"work this into {spot}: {paste.added}")


def _chained(line: Line, statement: ast.stmt) -> ast.stmt:
    """A statement, or of an ``elif`` the ``if`` that it belongs to, before which alone there is room."""
    every = [one for one in ast.walk(tree_of(line.path)) if isinstance(one, ast.If) and len(one.orelse) == 1]
    outer = {(one.orelse[0].lineno, one.orelse[0].col_offset): one for one in every}
    while isinstance(statement, ast.If) and _source(line, statement.lineno).strip().startswith("elif"):
        statement = outer[statement.lineno, statement.col_offset]
    return statement


def _source(line: Line, number: int) -> str:
    return linecache.getline(line.path, number)


def _spot(line: Line, first: int, last: int | None = None) -> str:
    whole = str(line_of(line.path, first))
    return whole if last in {None, first} else f"{whole}-{last}"

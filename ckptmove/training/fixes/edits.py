"""Edits of the user's lines: the text to paste and the lines where it goes. No file is written."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from executing import Source

from ckptmove.proof.source_edits import Edit, digest
from ckptmove.training.code.source import (
    assigned,
    block_of,
    callee,
    full_name,
    function_of,
    line_of,
    nodes_of,
    parameters_of,
    tree_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.training.code.source import Spot

#: Expressions that need no parentheses before ``.to(device)``.
_ATOMS: Final = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
#: Functions that return a dict of tensors more often than a tensor.
LOADS: Final = frozenset({"load", "load_file"})
#: Functions that draw random numbers from the generator of the device that they are given.
_RANDOM: Final = frozenset({"normal", "rand", "randint", "randn", "randperm"})
#: Methods that move a tensor.
MOVES: Final = frozenset({"to", "cuda"})


class Fix(NamedTuple):
    """A correction of the user's code."""

    text: str = ""  # one line of code; a sentence if no edit of a line is known
    edit: Edit | None = None  # the edit with that line; None for a sentence
    prefix: str = ""  # what the command of the text removes from keys of the file; empty for others

    @property
    def where(self) -> str:
        """Where the line goes: ``after train.py:7-9``; empty for a sentence."""
        if self.edit is None:
            return ""
        _, how, first, last, *_ = self.edit
        return f"{how} {line_of(self.edit.path, first)}" + f"-{last}" * (last != first)

    @property
    def evidence(self) -> dict[str, object]:
        """Evidence for the JSON report; empty for `NO_FIX`."""
        if not self.text:
            return {}
        edit = {} if self.edit is None else {"edit": self.edit._asdict()}
        prefix = {"prefix": self.prefix} if self.prefix else {}
        return {"fix": self.text, "fix_at": self.where, **edit, **prefix}

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


NO_FIX: Final = Fix()


def before(path: str, statement: ast.stmt, text: str) -> Fix:
    """A statement before another one; in the same line if that does not begin its line."""
    parent: Any = statement
    while _lines(path)[parent.lineno - 1].lstrip().startswith("elif"):
        parent = parent.parent  # an `elif` has no room before it, its `if` has
    if _is_there(parent, text, -1):
        return _words(path, parent.lineno, text)
    number, (start, _) = parent.lineno, _range(path, parent)
    if not _lines(path)[number - 1][: start - _offset(path, number)].strip():
        return _checked(path, "before", number, number, text, added=text)
    return _replaced(path, number, number, [(start, start, f"{text}; ")], added=text)


def after(path: str, statement: ast.stmt, text: str) -> Fix:
    """A statement after another one; in the same line if that shares its line."""
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    start, end = _range(path, statement)
    head = _lines(path)[first - 1][: start - _offset(path, first)].strip()
    tail = _lines(path)[last - 1][end - _offset(path, last) :].strip()
    if _is_there(statement, text, 1):
        return _words(path, first, text)
    if not head and (not tail or tail.startswith("#")):
        return _checked(path, "after", first, last, text, added=text)
    return _replaced(path, last, last, [(end, end, f"; {text}")], added=text)


def replaced(path: str, *changes: tuple[Any, str]) -> Fix:
    """Lines of a file with other text in place of nodes.

    The lines are those of the first node. Nodes of other lines, and nodes inside another one, stay.
    """
    node, text = changes[0]
    first, last = node.lineno, node.end_lineno or node.lineno
    same = [(one, new) for one, new in changes if (one.lineno, one.end_lineno) == (first, last)]
    outer = [(one, new) for one, new in same if not any(one in list(ast.walk(other))[1:] for other, _ in same)]
    words = f"at {line_of(path, first)}, replace {text_of(path, node)} with {text}"
    ranges = [(*_range(path, one), new) for one, new in outer]
    if any(start == end for start, end, _ in ranges):
        return Fix(words)  # inside an f-string: Python has no positions for these nodes before 3.12
    return _replaced(path, first, last, ranges, words=words)


def text_of(path: str, node: ast.AST) -> str:
    """Source text of a node; in the form of ``ast.unparse`` if it takes several lines."""
    text: str = Source.for_filename(path).asttokens().get_text(node)
    return text if text and "\n" not in text else ast.unparse(node)


def with_to(path: str, node: ast.expr, device: str) -> str:
    """Source text of an expression followed by ``.to(device)``."""
    return called(path, node, f"to({device})")


def called(path: str, node: ast.expr, call: str) -> str:
    """Source text of an expression followed by the call of one of its methods."""
    return f"{operand(path, node)}.{call}"


def operand(path: str, node: ast.expr) -> str:
    """Source text of an expression, in parentheses unless it binds as strongly as a name."""
    text = text_of(path, node)
    return text if isinstance(node, _ATOMS) else f"({text})"


def with_move(
    spot: Spot, expressions: Sequence[str], device: str, *, taken: bool = False, nodes: Sequence[ast.AST] = ()
) -> Fix | None:
    """The user's line with ``.to(device)`` after each read of a tensor; None if it writes to the tensor there.

    Args:
        expressions: expressions for the tensor; the first that the line reads is taken.
        device: expression for the target.
        taken: whether the failing operand was computed from the tensor; then its indexed rows are moved.
        nodes: where to look; by default what runs with the spot.
    """
    nodes, path = nodes or nodes_of(spot), spot.line.path
    own = set() if spot.node is None else set(ast.walk(spot.node))
    for expression in expressions:
        found = reads(nodes, expression)
        if is_written(nodes, expression):
            continue
        moves = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in MOVES]
        rows = [node for node in nodes if taken and isinstance(node, ast.Subscript) and node.value in found]
        found = [*rows, *(one for one in found if not any(row.value is one for row in rows))]
        found = sorted((one for one in found if one not in moves), key=lambda one: one not in own)
        fix = replaced(path, *((node, with_to(path, node, device)) for node in found)) if found else NO_FIX
        if fix.where:
            return fix
    return None


def with_expression(spot: Spot, name: str, text: str) -> Fix | None:
    """The user's line with an expression in place of a variable; None if it does not read the variable."""
    found = reads(nodes_of(spot), name)
    fix = replaced(spot.line.path, *((node, text) for node in found)) if found else NO_FIX
    return fix if fix.where else None


def reads(nodes: Sequence[ast.AST], expression: str) -> list[ast.expr]:
    """The nodes that read an expression."""
    found = [
        one for one in nodes if isinstance(one, ast.expr) and isinstance(getattr(one, "ctx", ast.Load()), ast.Load)
    ]
    return [one for one in found if ast.unparse(one) == expression]


def is_written(nodes: Sequence[ast.AST], expression: str) -> bool:
    """Whether a node writes to the tensor of an expression: ``mask[0] = 1``, ``mask.add_(1)``."""
    owners = [one for one in nodes if isinstance(one, (ast.Attribute, ast.Subscript))]
    return any(
        ast.unparse(one.value) == expression
        and (not isinstance(one.ctx, ast.Load) or (isinstance(one, ast.Attribute) and one.attr.endswith("_")))
        for one in owners
    )


def with_device(spot: Spot, operation: str, device: str) -> Fix:
    """The user's line with the device in the call that makes a tensor; `NO_FIX` if no such call is known."""
    path, call = spot.line.path, spot.node
    if isinstance(call, ast.Call) and callee(call) == operation.rpartition(".")[2]:
        calls = [one for one in nodes_of(spot) if isinstance(one, ast.Call) and callee(one) == callee(call)]
        if operation.startswith("torch.Tensor.") or _has(call, "generator"):
            return replaced(path, (call, with_to(path, call, device)))
        # Also the other calls of the line that make a tensor in the same way, except arguments of this one, and those
        # that the line moves itself.
        inner = set(ast.walk(call))
        moved = [one.value for one in nodes_of(spot) if isinstance(one, ast.Attribute) and one.attr in MOVES]
        left = [one for one in calls if one not in inner and one not in moved]
        same = [call, *(one for one in left if one.lineno == call.lineno)]
        given, function = _given_device(call), function_of(call)
        text = "" if given is None else text_of(path, given)
        if text == device or (function is not None and text in parameters_of(function)):
            advice = "pass the target device when you call this function"
            return Fix(f"{text} is not the target here: {advice} ({spot.line})")
        return replaced(path, *(on_device(path, one, device) for one in same))
    target, value = assigned(spot.statement)  # torch.ones is called by another name
    if isinstance(target, (ast.Name, ast.Attribute)) and spot.statement is not None and not is_loaded(path, value):
        name = ast.unparse(target)
        return after(path, spot.statement, f"{name} = {name}.to({device})")
    return NO_FIX


def is_loaded(path: str, value: ast.AST | None) -> bool:
    """Whether an expression is a call of torch or safetensors that reads a file, and may return a dict."""
    return callee(value) in LOADS and is_of_torch(path, value)


def is_of_torch(path: str, call: ast.AST | None) -> bool:
    """Whether a call is of torch or safetensors, by the imports of the file."""
    function = getattr(call, "func", None)
    return function is not None and full_name(path, function).partition(".")[0] in {"torch", "safetensors"}


def _has(call: ast.Call, keyword: str | None) -> bool:
    return any(one.arg == keyword for one in call.keywords)


def _given_device(call: ast.Call) -> ast.expr | None:
    return next((one.value for one in call.keywords if one.arg == "device"), None)


def on_device(path: str, call: ast.Call, device: str) -> tuple[ast.expr, str]:
    """The change that gives a call the device.

    Returns:
        The node, and the text in its place.
    """
    given = _given_device(call)
    if given is not None:
        return given, device
    # `**options` may contain the device, and the generator of another device draws other numbers.
    if _has(call, None) or (callee(call) in _RANDOM and not _has(call, "generator")):
        return call, with_to(path, call, device)
    more = ", " * bool(call.args or call.keywords) + f"device={device})"
    return call, text_of(path, call)[:-1].rstrip(" ,") + more


def _lines(path: str) -> list[str]:
    return list(Source.for_filename(path).lines)


def _offset(path: str, number: int) -> int:
    """Offset of a line in the text of its file."""
    return sum(len(line) + 1 for line in _lines(path)[: number - 1])


def _range(path: str, node: ast.AST) -> tuple[int, int]:
    start, end = Source.for_filename(path).asttokens().get_text_range(node, padded=False)
    return start, end


def _is_there(statement: ast.stmt, text: str, step: int) -> bool:
    """Whether a statement or its neighbour is the same already: once more would not help."""
    body = block_of(statement)
    index = body.index(statement)
    near = [body[one] for one in (index, index + step) if 0 <= one < len(body)]
    return ast.unparse(_parsed(text)).rpartition("\n")[2] in map(ast.unparse, near)


def _replaced(
    path: str, first: int, last: int, ranges: list[tuple[int, int, str]], *, added: str = "", words: str = ""
) -> Fix:
    """Some lines with other text in place of ranges of the file's text."""
    begin, text = _offset(path, first), "\n".join(_lines(path)[first - 1 : last])
    for start, end, new in sorted(ranges, reverse=True):
        text = text[: start - begin] + new + text[end - begin :]
    return _checked(path, "in place of", first, last, text.strip(), added=added, words=words)


def _checked(path: str, how: str, first: int, last: int, text: str, *, added: str = "", words: str = "") -> Fix:
    """A fix, if the file is valid Python with it and has as many statements more as the fix adds; else a sentence."""
    lines = _lines(path)
    edit = Edit(path, how, first, last, text, digest(lines))
    expected = _count(tree_of(path)) + _count(_parsed(added))
    if _count(_parsed("\n".join(edit.edited(lines)))) != expected:
        return Fix(words) if words else _words(path, first, added)
    return Fix(text, edit)


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def _count(tree: ast.Module) -> int:
    return sum(isinstance(one, ast.stmt) for one in ast.walk(tree))


def _words(path: str, number: int, text: str) -> Fix:
    return Fix(f"at {line_of(path, number)}, add: {text}")

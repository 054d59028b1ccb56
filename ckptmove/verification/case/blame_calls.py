"""What the user's line calls that makes a tensor of what torch does not tell of: an array, a file.

Never moves what may be a dict of tensors, as a file has: only what is taken of it.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from ckptmove.verification.case.user_code import callee, full_name, own_nodes
from ckptmove.verification.case.user_code_edits import LOADS, MOVES, calls_of, is_of_torch, moved, replaced

if TYPE_CHECKING:
    from ckptmove.verification.case.user_code import Line
    from ckptmove.verification.case.user_code_edits import Fix
    from ckptmove.verification.case.watch import Origin

#: What makes a tensor out of something else, and calls no function that torch tells of, or calls those of its own.
_UNTOLD: Final = frozenset({"from_numpy", "frombuffer", "from_dlpack", "Tensor", "FloatTensor", "LongTensor", *LOADS})


def made_by(origin: Origin) -> str:
    """What the user called that made a tensor: ``torch.load``, whatever that calls."""
    told = calls_of(origin.line, origin.operation)
    names = [] if told else [full_name(origin.line, one.func) for one in _untold(origin.line)]
    return next(iter(names), origin.operation)


def _untold(line: Line) -> list[ast.Call]:
    """The calls in a line that make a tensor, and that torch does not tell of."""
    every = [one for one in own_nodes(line) if isinstance(one, ast.Call)]
    return [one for one in every if callee(one) in _UNTOLD and is_of_torch(line, one)]


def where_untold(line: Line, device: str) -> Fix | None:
    """A line with what such calls give moved; of what is read from a file what it takes of that, or counts with."""
    nodes = list(own_nodes(line))
    taken = {one.value: one for one in nodes if isinstance(one, ast.Subscript)}
    counted = [part for one in nodes if isinstance(one, ast.BinOp) for part in (one.left, one.right)]
    is_moved = [one.value for one in nodes if isinstance(one, ast.Attribute) and one.attr in MOVES]
    changes: list[tuple[ast.expr, str]] = []
    for call in _untold(line):
        whole: ast.expr = call
        while whole in taken:
            whole = taken[whole]
        is_sure = callee(call) not in LOADS or whole is not call or call in counted
        if is_sure and whole not in is_moved:
            changes.append((whole, moved(line, whole, device)))
    fix = replaced(line, *changes) if changes else None
    return fix if fix is not None and fix.where else None

"""What mends a tensor that a module of the user's has as a plain attribute, or in a plain list or dict.

Never registers what the class has under that name already: torch refuses that.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import nn

from ckptmove.verification.case.tensor_names import leaves
from ckptmove.verification.case.user_code import (
    Line,
    assigned,
    assignments,
    called,
    callee,
    function_of,
    line_of,
    statements_at,
    tree_of,
    written_in,
)
from ckptmove.verification.case.user_code_bindings import spot_of, way_to
from ckptmove.verification.case.user_code_edits import Fix, after, replaced, text_of

if TYPE_CHECKING:
    from ckptmove.verification.case.tensor_names import NamedTensor
    from ckptmove.verification.case.watch import Origin

#: Behind a line that gives a model what its checkpoint does not have.
_NOTE: Final = "  # the checkpoint lacks what was never registered: train and save again"


class _Setting(NamedTuple):
    """A statement that sets the attribute, and a line of it."""

    line: Line
    statement: ast.stmt

    @property
    def target(self) -> ast.Attribute:
        found: Any = assigned(self.statement)
        target: ast.Attribute = found[0]
        return target

    @property
    def value(self) -> ast.expr:
        found: Any = assigned(self.statement)
        value: ast.expr = found[1]
        return value

    @property
    def home(self) -> tuple[str, int]:
        """The function that it is in."""
        function = function_of(self.line)
        return self.line.path, 0 if function is None else function.lineno


def _settings(known: NamedTensor, root: Origin | None) -> list[_Setting]:
    """Where the attribute is set: by the line that made the tensor, if it is that, and in the class."""
    here = (
        [] if root is None else [_Setting(root.line, one) for one in assignments(statements_at(root.line), known.key)]
    )
    inside = _inside(known)
    beside = [one for one in inside if not here or one.home == here[0].home]
    if not here:
        return inside
    return sorted({one.statement.lineno: one for one in (*beside, *here)}.values(), key=lambda one: one.line.number)


def _inside(known: NamedTensor) -> list[_Setting]:
    """Where the class sets the attribute."""
    return [
        _Setting(line_of(line.path, one.lineno), one)
        for line, node in written_in(type(known.holder))
        for one in assignments([node], known.key)
    ]


def as_buffer(known: NamedTensor, root: Origin | None) -> Fix | None:
    """The assignment of an attribute as one of a buffer, where it is first set; None where that is not to be told."""
    sets = _settings(known, root)
    is_of_class = any(known.key in vars(one) for one in type(known.holder).__mro__)
    if not sets or is_of_class or len({one.home for one in sets}) > 1:
        return None
    first = sets[0]
    is_sure = len(sets) == 1 or ast.unparse(first.value) == "None"
    if not is_sure or _is_too_early(first) or _is_too_late(first, _inside(known)):
        return None
    of, value = text_of(first.line, first.target.value), text_of(first.line, first.value)
    fix = replaced(first.line, (first.statement, f"{of}.register_buffer({known.key!r}, {value}, persistent=False)"))
    return _placed(fix)


def _is_too_early(one: _Setting) -> bool:
    """Whether a module is not one yet where the attribute is set: its ``__init__`` calls that of torch further down."""
    function = function_of(one.line)
    calls = [part for part in ast.walk(function or one.statement) if isinstance(part, ast.Call)]
    begins = [part.lineno for part in calls if callee(part) == "__init__"]
    return bool(begins) and one.statement.lineno < min(begins)


def _is_too_late(one: _Setting, every: list[_Setting]) -> bool:
    """Whether the attribute may have a value by then of another function: of any, but after an ``__init__``."""
    others = [function_of(other.line) for other in every if other.home != one.home]
    own = function_of(one.line)
    starts = [getattr(function, "name", "__init__") == "__init__" for function in (own, *others)]
    return bool(others) and starts != [True, *[False] * len(others)]


def as_container(known: NamedTensor, root: Origin | None) -> Fix | None:
    """A plain list or dict as one of torch's, which a module knows, or with one beside it; None for plain tensors."""
    held: Any = known.held
    sets = _settings(known, root)
    if not sets or len({one.home for one in sets}) > 1:
        return None
    last = sets[-1]
    whole = _last_statement(last) if _is_too_early(last) else _around(sets)
    of = text_of(last.line, last.target.value)
    name, prefix = f"{of}.{known.key}", _prefix(known.holder, last.line)
    note = _NOTE * (not known.name.startswith("criterion."))
    kind = _kind(held)
    if kind:
        return _placed(after(last.line, whole, f"{name} = {prefix}.{kind}({name}){note}"))
    given = _registered(held, name, prefix)
    if not given:
        return None
    text = f"{name}_registered = {prefix}.{given}{note}"
    return _placed(after(last.line, _last_statement(last), text))


def _placed(fix: Fix) -> Fix | None:
    return fix if fix.where else None


def _around(sets: list[_Setting]) -> ast.stmt:
    """The last one that sets an attribute; what has all that do in its branches, where they are in such."""
    ways = [way_to(tree_of(one.line.path), spot_of(one.statement)) for one in sets]
    spots = [{spot_of(block.body[0]) for block in way} for way in ways]
    shared = set.intersection(*spots)
    return [block.statement for block in ways[-1] if spot_of(block.body[0]) in shared][-1]


def _prefix(holder: object, line: Line) -> str:
    """What the file of a class calls ``torch.nn``."""
    module = sys.modules.get(type(holder).__module__)
    return "nn" if getattr(module, "nn", None) is nn else f"{called(line, 'torch')}.nn"


def _kind(held: Any) -> str:
    """The class of torch's that takes all that is in a list or dict; empty for none."""
    is_dict = isinstance(held, Mapping)
    values = list(held.values() if is_dict else held)
    of_modules: Any = nn.ModuleDict if is_dict else nn.ModuleList
    of_parameters: Any = nn.ParameterDict if is_dict else nn.ParameterList
    for part, kind in ((nn.Module, of_modules), (nn.Parameter, of_parameters)):
        if all(isinstance(value, part) for value in values):
            with suppress(KeyError, TypeError):  # of a dict: a key that no attribute can have
                kind(held)
                return str(kind.__name__)
    return ""


def _registered(held: Any, name: str, prefix: str) -> str:
    """What registers the modules or parameters in a list or dict that stays as it is; empty where none are in it."""
    source = f"{name}.values()" if isinstance(held, Mapping) else name
    values = list(held.values() if isinstance(held, Mapping) else held)
    rows = [one for one in values if isinstance(one, (list, tuple))]
    if rows and len(rows) == len(values):
        source, values = f"(one for row in {source} for one in row)", [one for row in rows for one in row]
    for part, kind in ((nn.Module, "Module"), (nn.Parameter, "Parameter")):
        if values and all(isinstance(one, part) for one in values):
            return f"{kind}List({source})"
        if any(isinstance(one, part) for one in values):
            return f"{kind}List(one for one in {source} if isinstance(one, {prefix}.{kind}))"
    return ""


def _last_statement(one: _Setting) -> ast.stmt:
    """The last one of its function, before which the list may have been filled; itself, outside of one."""
    function = function_of(one.line)
    body = [] if function is None else [part for part in function.body if not isinstance(part, ast.Return)]
    return body[-1] if body else one.statement


def is_plain(known: NamedTensor) -> bool:
    """Whether a list or dict holds the tensor itself, and it is no parameter: torch has no list of buffers."""
    is_parameter = isinstance(known.tensor, nn.Parameter)
    return not is_parameter and any(one is known.tensor for _, one in leaves(known.held))

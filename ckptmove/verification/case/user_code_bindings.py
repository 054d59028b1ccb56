"""Which names have a value where a statement stands, whatever way the program took to it.

Never takes a branch for granted: what one of two ways sets, and the other does not, has no value.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ckptmove.verification.case.user_code import SCOPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    Spot: TypeAlias = tuple[int, int]

_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_WITHS: Final = (ast.With, ast.AsyncWith)
_TRIES: Final = (ast.Try, getattr(ast, "TryStar", ast.Try))
#: What may give a name a value, or not.
_UNSURE: Final = (ast.For, ast.AsyncFor, ast.While, ast.Expr, ast.Delete)
_LEAVES: Final = (ast.Return, ast.Raise, ast.Continue, ast.Break)
#: What Python has everywhere, as far as a fix brings it along.
_BUILTINS: Final = frozenset({"isinstance", "iter", "next", "tuple"})


class Block(NamedTuple):
    """Statements one after another.

    Attributes:
        owner: what they are in: a function, a branch of an ``if``, a handler.
        body: the statements.
        number: of the one in question.
    """

    owner: ast.AST
    body: list[ast.stmt]
    number: int

    @property
    def statement(self) -> ast.stmt:
        """The one in question."""
        return self.body[self.number]


def spot_of(statement: ast.stmt) -> Spot:
    """Where a statement begins: the line from 1, the column in bytes of UTF-8."""
    return statement.lineno, statement.col_offset


def way_to(part: ast.AST, spot: Spot) -> list[Block]:
    """The blocks that the statement at a spot is in, the innermost last; none where no statement begins there."""
    for owner, body in blocks(part):
        for number, one in enumerate(body):
            if spot_of(one) == spot:
                return [Block(owner, body, number)]
            inner = way_to(one, spot)
            if inner:
                return [Block(owner, body, number), *inner]
    return []


def blocks(part: ast.AST) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """What a statement has under it, each with what it is in."""
    for body in (getattr(part, "body", None), getattr(part, "orelse", None), getattr(part, "finalbody", None)):
        if isinstance(body, list):
            yield part, body
    for one in (*getattr(part, "handlers", ()), *getattr(part, "cases", ())):
        yield one, one.body


def read_in(node: ast.AST) -> set[str]:
    """The names that an expression, or a statement without those under it, takes from around it."""
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    parts = [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.stmt)]
    found = set().union(*map(read_in, parts))
    if isinstance(node, ast.Lambda):
        return (found - _arguments(node.args)) | read_in(node.args)
    if isinstance(node, _COMPREHENSIONS):
        own = set().union(*(_targets(one.target) for one in node.generators))
        return (found - own) | read_in(node.generators[0].iter)
    return found


def bound_within(node: ast.AST) -> set[str]:
    """The names that a lambda or a comprehension, or any that a node has in it, keeps to itself."""
    found: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Lambda):
            found |= _arguments(one.args)
        elif isinstance(one, ast.comprehension):
            found |= _targets(one.target)
    return found


def set_in(node: ast.AST) -> set[str]:
    """The names that a statement, or one under it, gives a value to in the scope that it is in."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, ast.comprehension):
        return set_in(node.iter).union(*map(set_in, node.ifs))
    is_named = isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping))
    found = {str(one) for one in (getattr(node, "name", ""), getattr(node, "rest", "")) if is_named and one}
    parts = [] if isinstance(node, ast.Lambda) else ast.iter_child_nodes(node)
    return found.union(*map(set_in, parts))


def has_value(way: list[Block], name: str, file: ast.Module) -> bool:
    """Whether a name has a value before the statement that a way leads to.

    Args:
        way: to the statement.
        name: the name.
        file: as it is, before anything is pasted into it.
    """
    starts = [n for n, block in enumerate(way) if isinstance(block.owner, (*SCOPES, ast.Module))]
    spans = [way[start:end] for start, end in zip(starts, [*starts[1:], len(way)], strict=True)]
    inner = spans.pop()
    declared = _declared(inner[0].owner, name)
    if declared is None and name in _of_scope(inner[0].owner):
        return _is_set_before(inner, name)
    outer = [span for span in spans if not isinstance(span[0].owner, ast.ClassDef)]
    for span in reversed(outer[:1] if declared is ast.Global else outer):
        if name in _of_scope(span[0].owner):
            return name in _parameters(span[0].owner) or any(
                name in (_sure(one) | _head(block)) for block in span for one in block.body
            )
    return name in _BUILTINS or _is_from_outside(name, file)


def _is_from_outside(name: str, file: ast.Module) -> bool:
    """Whether a file reads a name that no line of it gives a value to: Python's own, or one of an import of all."""
    every = [one for one in ast.walk(file) if isinstance(one, ast.stmt)]
    return any(name in read_in(one) for one in every) and not any(
        name in set_in(one) | _parameters(one) for one in every
    )


def _is_set_before(span: list[Block], name: str) -> bool:
    """Whether statements before that of the last of some blocks give a name a value, or the heads of the blocks do."""
    here = span[-1].statement.lineno
    every = (one for one in _own(span[0].owner) if isinstance(one, ast.Delete) and one.lineno < here)
    is_gone = any(name in set_in(one) for one in every)
    earlier = (one for block in span for one in block.body[: block.number])
    heads = set().union(*map(_head, span)) | _parameters(span[0].owner)
    return not is_gone and (name in heads or any(name in _sure(one) for one in earlier))


def _own(part: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a scope, but not those of a scope in it."""
    for _, body in blocks(part):
        for one in body:
            yield one
            yield from () if isinstance(one, SCOPES) else _own(one)


def _declared(scope: ast.AST, name: str) -> type[ast.stmt] | None:
    """``Global`` or ``Nonlocal``, where a scope says so of a name."""
    every = (one for one in _own(scope) if isinstance(one, (ast.Global, ast.Nonlocal)) and name in one.names)
    return next((type(one) for one in every), None)


def _of_scope(scope: ast.AST) -> set[str]:
    parts: list[ast.stmt] = getattr(scope, "body", [])
    return _parameters(scope).union(*map(set_in, parts))


def _parameters(scope: ast.AST) -> set[str]:
    return _arguments(scope.args) if isinstance(scope, _FUNCTIONS) else set()


def _arguments(given: ast.arguments) -> set[str]:
    return {one.arg for one in ast.walk(given) if isinstance(one, ast.arg)}


def _targets(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}


def _head(block: Block) -> set[str]:
    """What the head of a block has given a value to by the time that the block is entered."""
    owner, found = block.owner, set()
    is_first = block.body is getattr(owner, "body", None)
    if isinstance(owner, (ast.For, ast.AsyncFor)) and is_first:
        found = _targets(owner.target)
    elif isinstance(owner, _WITHS):
        found = _taken(owner)
    elif isinstance(owner, (ast.If, ast.While)) and is_first:
        found = _set_by(owner.test)
    elif isinstance(owner, _TRIES) and block.body is owner.orelse:
        found = _sure_of(owner.body)
    elif isinstance(owner, (ast.ExceptHandler, ast.match_case)):
        found = set_in(owner.pattern) if isinstance(owner, ast.match_case) else {owner.name or ""}
    return found


def _taken(one: ast.With | ast.AsyncWith) -> set[str]:
    return set().union(*(_targets(item.optional_vars) for item in one.items if item.optional_vars is not None))


def _set_by(test: ast.expr) -> set[str]:
    """What a condition that is met has given a value to by ``:=``."""
    if isinstance(test, ast.BoolOp):
        return set().union(*map(_set_by, test.values if isinstance(test.op, ast.And) else test.values[:1]))
    if isinstance(test, (ast.Lambda, ast.IfExp, *_COMPREHENSIONS)):
        return set()
    if isinstance(test, ast.NamedExpr):
        return {test.target.id} | _set_by(test.value)
    return set().union(*(_set_by(one) for one in ast.iter_child_nodes(test) if isinstance(one, ast.expr)))


def _sure(one: ast.stmt) -> set[str]:
    """What has a value after a statement, whatever way it went."""
    if isinstance(one, ast.If):
        return _meeting([one.body, one.orelse])
    if isinstance(one, _WITHS):
        is_quiet = any("suppress" in ast.unparse(item.context_expr) for item in one.items)
        return _taken(one) | (set() if is_quiet else _sure_of(one.body))
    if isinstance(one, _TRIES):
        ways = [[*one.body, *one.orelse], *(handler.body for handler in one.handlers)]
        return _meeting(ways) | _sure_of(one.finalbody)
    if isinstance(one, ast.Match):
        last = one.cases[-1]
        is_every = last.guard is None and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        return _meeting([case.body for case in one.cases]) if is_every else set()
    is_nothing = isinstance(one, _UNSURE) or (isinstance(one, ast.AnnAssign) and one.value is None)
    targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", one)]
    return set() if is_nothing else set().union(*map(set_in, targets))


def _sure_of(body: list[ast.stmt]) -> set[str]:
    return set().union(*map(_sure, body))


def _meeting(ways: list[list[ast.stmt]]) -> set[str]:
    """What every one of some ways gives a value to, but for those that leave."""
    staying = [_sure_of(way) for way in ways if not (way and isinstance(way[-1], _LEAVES))]
    return set.intersection(*staying) if staying else set()

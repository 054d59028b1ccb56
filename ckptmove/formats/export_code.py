"""Find the names that ``torch.export.load``, or the program that it returns, looks up or calls.

Texts are parsed, and never evaluated.

From torch/_export/serde/serialize.py: ``_parse_sym_expr`` passes ``expr_str`` to ``sympy.sympify``, which evaluates it;
``deserialize_operator`` looks any target up in ``torch``, ``math`` or ``operator``. From torch/export/_unlift.py:
``guards_code`` is executed.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_EVAL: Final = "builtins.eval"
_LONGEST: Final = 1 << 14
#: Targets that are operators or functions of numbers. ``torch.ops.load_library`` is not one.
_OPERATOR: Final = re.compile(
    r"torch\.ops\.(?!__)\w+(?:\.\w+)+|torch\._?sym_\w+|torch\._C\._functorch\.\w+|math\.(?!__)\w+"
    r"|_operator\.(?!__|methodcaller$|attrgetter$|itemgetter$|call$)\w+"
)
_MODULES: Final = ("torch", "math", "_operator")
#: Functions of sympy and of torch/utils/_sympy/functions.py start with a capital letter, except these.
_FUNCTIONS: Final = frozenset({
    "abs", "acos", "asin", "atan", "atan2", "bool", "ceil", "ceiling", "cos", "cosh", "exp", "float", "floor", "int",
    "isinstance", "len", "list", "log", "log2", "max", "min", "round", "sin", "sinh", "sqrt", "tan", "tanh", "tuple",
    "type",
})  # fmt: skip
#: Methods of tensors in guards, and functions of ``math``.
_METHODS: Final = frozenset({
    "ceil", "dim", "floor", "isinf", "isnan", "item", "ndimension", "numel", "pow", "size", "sqrt", "storage_offset",
    "stride", "trunc",
})  # fmt: skip


def called_names(expressions: Iterable[str], guards: Iterable[str], targets: Iterable[str]) -> tuple[str, ...]:
    """Full names that are looked up or called, each once, without torch's operators and the functions of shapes.

    ``builtins.eval`` replaces a text that is more than a calculation.
    """
    found: dict[str, None] = {}
    for text in (*expressions, *guards):
        found.update(dict.fromkeys(_calls(text)))
    for target in targets:
        module = next((module for module in _MODULES if target.startswith(module)), None)
        if module is not None and not _OPERATOR.fullmatch(target):
            found[".".join((module.lstrip("_"), *target.split(".")[1:]))] = None
    return tuple(found)


def _calls(text: str) -> Iterator[str]:
    if len(text) > _LONGEST:
        yield _EVAL
        return
    try:
        tree = ast.parse(text.strip(), mode="eval")
        for node in ast.walk(tree):
            yield from _calls_of(node)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        yield _EVAL


def _calls_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Attribute, ast.Name)):
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        if name.startswith("__"):
            yield _EVAL
    elif isinstance(node, (ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.JoinedStr)):
        yield _EVAL
    elif isinstance(node, ast.Call):
        name = _dotted(node.func)
        last = name.rpartition(".")[2]
        is_function = name in _FUNCTIONS or (name[:1].isupper() and name.isidentifier())
        is_method = isinstance(node.func, ast.Attribute) and last in _METHODS
        if not (is_function or is_method or _OPERATOR.fullmatch(name)):
            yield name if "." in name else f"builtins.{name}" if name else _EVAL


def _dotted(node: ast.AST) -> str:
    """``a.b`` for a name and its attributes; else empty, or the name of an allowed method."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return ".".join((node.id, *reversed(parts)))
    return parts[0] if parts and parts[0] in _METHODS else ""

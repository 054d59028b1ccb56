"""What has a value where a statement stands: as much as is sure, whatever way the program took."""

from __future__ import annotations

import ast
import textwrap

import pytest

from ckptmove.verification.case.user_code_bindings import bound_within, has_value, read_in, set_in, spot_of, way_to

SURE = {
    "a parameter": "def f(x): HERE",
    "a parameter behind others": "def f(a, *, x=1): HERE",
    "an assignment": "x = 1\nHERE",
    "one of several": "x, *y = 1, 2\nHERE",
    "with a kind": "x: int = 1\nHERE",
    "an import": "import x.y\nHERE",
    "an import by another name": "import y as x\nHERE",
    "a function": "def x(): pass\nHERE",
    "a class": "class x: pass\nHERE",
    "both branches": "if a: x = 1\nelse: x = 2\nHERE",
    "the branch that stays": "def f():\n    if a: x = 1\n    else: return\n    HERE",
    "the same branch": "if a:\n    x = 1\n    HERE",
    "around a branch": "x = 1\nif a:\n    HERE",
    "a with": "with a as x: pass\nHERE",
    "in a with": "with a:\n    x = 1\nHERE",
    "the head of a with": "with a as x: HERE",
    "a try and its handlers": "try: x = 1\nexcept KeyError: x = 2\nHERE",
    "a try whose handlers leave": "try: x = 1\nexcept KeyError: raise\nHERE",
    "a try behind its handlers": "try: pass\nexcept KeyError: raise\nelse: x = 1\nHERE",
    "a finally": "try: pass\nfinally: x = 1\nHERE",
    "the rest of a try": "try: x = 1\nexcept KeyError: pass\nelse: HERE",
    "a handler": "try: pass\nexcept KeyError as x: HERE",
    "a loop over it": "for x in a: HERE",
    "every case": "match a:\n    case 1: x = 1\n    case _: x = 2\nHERE",
    "what a case takes": "match a:\n    case [x, *_]: HERE",
    "the rest of what a case takes": "match a:\n    case {1: _, **x}: HERE",
    "a condition": "if (x := a) and b: HERE",
    "all of a condition": "if b and (x := a) > (c := 1): HERE",
    "the condition of a loop": "while (x := a): HERE",
    "the start of a choice": "if (x := a) or b: HERE",
    "a name of the file": "x = 1\ndef f(): HERE",
    "a name of the file, further down": "def f(): HERE\nx = 1",
    "a name of the function around": "def f(x):\n    def g(): HERE",
    "a variable of the function around": "def f():\n    def g(): HERE\n    x = 1",
    "a branch of the function around": "def f():\n    if a:\n        x = 1\n        def g(): HERE",
    "of the file, as it says": "x = 1\ndef f():\n    global x\n    HERE\n    x = 2",
    "of the function around, as it says": "def f():\n    x = 1\n    def g():\n        nonlocal x; HERE; x = 2",
    "of the file, in a class": "x = 1\nclass A:\n    HERE",
    "of Python": "print(x)\nHERE",
    "deleted further down": "def f(x):\n    HERE\n    del x",
    "of an inner function that says nonlocal": "def f():\n    x = 1\n    def g(): nonlocal x\n    HERE",
}
UNSURE = {
    "nothing": "HERE",
    "further down": "HERE\nx = 1",
    "further down, of the file too": "x = 1\ndef f():\n    HERE\n    x = 2",
    "one branch": "if a: x = 1\nHERE",
    "the other branch": "if a: x = 1\nelse: HERE",
    "a loop": "for b in a: x = 1\nHERE",
    "a loop over it, behind it": "for x in a: pass\nHERE",
    "what follows a loop over it": "for x in a: pass\nelse: HERE",
    "a while": "while a: x = 1\nHERE",
    "a try": "try: x = 1\nexcept KeyError: pass\nHERE",
    "a handler of a try": "try: x = 1\nexcept KeyError: HERE",
    "a handler, behind it": "try: pass\nexcept KeyError as x: pass\nHERE",
    "a handler without a name": "x: int\ntry: pass\nexcept KeyError: HERE",
    "a with that hides what is raised": "with suppress(KeyError): x = 1\nHERE",
    "some cases": "match a:\n    case 1: x = 1\nHERE",
    "some cases but the last": "match a:\n    case 1: pass\n    case _: x = 1\nHERE",
    "a kind alone": "x: int\nHERE",
    "deleted": "def f(x):\n    del x\n    HERE",
    "a part of a condition": "if a or (x := b): HERE",
    "a choice in a condition": "if b if a else (x := 1): HERE",
    "the end of a loop's condition": "while a and (x := b): pass\nHERE",
    "the names of another function": "def f(): x = 1\nHERE",
    "a parameter of another function": "def f(x): return x\nHERE",
    "an import of another function": "def f():\n    import x\n    return x.y\nHERE",
    "the names of a class around": "class A:\n    x = 1\n    def f(self): HERE",
    "a comprehension": "y = [x for x in a]\nx: int\nHERE",
    "the statement itself": "def f():\n    HERE; x = 1",
    "a function of which only some branches give it": "def f():\n    def g(): HERE\n    if a: x = 1",
    "all leave": "def f():\n    if a: return\n    else: raise\n    HERE\n    x = 1",
}


def is_sure(source):
    tree = ast.parse(textwrap.dedent(source))
    (here,) = (one for one in ast.walk(tree) if isinstance(one, ast.Expr) and ast.unparse(one) == "HERE")
    return has_value(way_to(tree, spot_of(here)), "x", tree)


@pytest.mark.parametrize("source", SURE.values(), ids=SURE)
def test_what_every_way_gives_a_value_has_one(source):
    assert is_sure(source)


@pytest.mark.parametrize("source", UNSURE.values(), ids=UNSURE)
def test_what_some_way_does_not_give_a_value_has_none(source):
    assert not is_sure(source)


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("a.b + c[d]", {"a", "c", "d"}),
        ("[x * a for x in b if x]", {"a", "b"}),
        ("[x for x in x]", {"x"}),
        ("lambda x, y=a: x + b", {"a", "b"}),
        ("[(lambda a: a)(b) + a for b in c]", {"a", "c"}),
        ("x = a", {"a"}),
        ("if a:\n    b", {"a"}),
        ("@a\ndef f(x=b): return c", {"a", "b"}),
    ],
)
def test_what_is_taken_from_around(source, read):
    assert read_in(ast.parse(source).body[0]) == read


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x, (y, *z) = a", {"x", "y", "z"}),
        ("x[0] = y.a = 1", set()),
        ("for x in a:\n    with b as y: z = 1", {"x", "y", "z"}),
        ("def f(x): y = 1", {"f"}),
        ("lambda: (x := 1)", set()),
        ("[x for x in (y := a) if (z := x)]", {"y", "z"}),
        ("from a import b as x, c", {"x", "c"}),
        ("try: pass\nexcept E as x: y = 1", {"x", "y"}),
        ("match a:\n    case [x, *y] | {'a': z, **w}: pass\n    case _: pass", {"x", "y", "z", "w"}),
    ],
)
def test_what_a_statement_sets(source, names):
    assert set_in(ast.parse(source).body[0]) == names


def test_what_an_expression_keeps_to_itself():
    assert bound_within(ast.parse("(lambda a, *b: [c for c in d])(e)")) == {"a", "b", "c"}

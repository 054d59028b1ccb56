"""The dangerous names that a pickle reaches, however it calls them."""

from __future__ import annotations

import pytest

from ckptmove.errors import DamagedPickle
from ckptmove.limits import Limits
from ckptmove.pickles.calls import uses_in
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.tree import nodes
from ckptmove.torch_facts.verdicts import dangerous


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def name(full: str) -> bytes:
    module, _, leaf = full.rpartition(".")
    return b"c" + f"{module}\n{leaf}\n".encode()


def call(function: str, *args: bytes) -> bytes:
    return name(function) + b"(" + b"".join(args) + b"tR"


RUN = name("pkg.run")
REBUILD = name("torch._tensor._rebuild_from_type_v2")
PARTIAL = call("functools.partial", RUN)
NET = name("pkg.Net") + b")\x81"
SET_PARTIAL = b"(" + name("pkg.other") + b"(K\x01t}" + text("f") + RUN + b"sNtb"
HOOK = text("__setstate__") + RUN + b"s"


def held(key: str, value: bytes = RUN) -> bytes:
    """An object with an attribute."""
    return NET + b"}" + text(key) + value + b"sb"


KEYS_OF_ALL = name("functools.partial") + b"(" + name("builtins.all") + b"t}" + text("key") + RUN + b"s\x92"

DANGEROUS = {
    "what an optimizer calls when it is read": (
        name("torch.optim.sgd.SGD") + b")\x81}" + text("_patch_step_function") + PARTIAL + b"sb", "pkg.run",
    ),
    "an attribute of a namespace": (
        name("types.SimpleNamespace") + b"(}" + text("append") + RUN + b"stRNa", "types.SimpleNamespace.<computed>",
    ),
    "a function of another package": (call("pkg.run"), "pkg.run"),
    "by INST": (b"(ipkg\nrun\n", "pkg.run"),
    "by OBJ": (b"(" + RUN + b"o", "pkg.run"),
    "a class that opens a file, by NEWOBJ_EX": (name("pkg.FileHandler") + b")}\x92", "pkg.FileHandler"),
    "a partial": (PARTIAL + b")R", "pkg.run"),
    "a partial with a state": (call("functools.partial", name("builtins.len")) + SET_PARTIAL + b")R", "pkg.other"),
    "an argument of a partial": (
        call("functools.partial", name("builtins.len")) + b"(" + name("builtins.all") + b")}" + text("key") + RUN
        + b"sNtb)R",
        "pkg.run",
    ),
    "a keyword of a partial": (KEYS_OF_ALL + b"(]tR", "pkg.run"),
    "a partial with a computed state": (
        call("functools.partial", name("builtins.len")) + call("builtins.tuple", b"]" + RUN + b"a") + b"b)R",
        "<computed>",
    ),
    "a keyword of a class of torch": (
        name("torch.optim.lr_scheduler.LambdaLR") + b")}" + text("lr_lambda") + RUN + b"s\x92", "pkg.run",
    ),
    "a method of copies": (call("torch.optim.swa_utils.AveragedModel", held("__deepcopy__")), "pkg.run"),
    "a method of dicts": (call("builtins.dict", held("keys")), "pkg.run"),
    "a method of an OrderedDict": (call("collections.OrderedDict", held("keys", KEYS_OF_ALL)), "pkg.run"),
    "a method among slots": (NET + b"N}" + text("items") + RUN + b"s\x86b", "pkg.run"),
    "a method in an OrderedDict": (NET + call("collections.OrderedDict") + text("keys") + RUN + b"sb", "pkg.run"),
    "a method of items": (call("builtins.dict", NET + text("keys") + RUN + b"s"), "pkg.run"),
    "a method with a computed name": (NET + b"}" + call("builtins.str", text("keys")) + RUN + b"sb", "pkg.run"),
    "a computed state": (
        NET + call("builtins.dict", b"]" + text("keys") + RUN + b"\x86a") + b"b", "pkg.run",
    ),
    "a method that is a layer": (held("keys", held("forward")), "pkg.run"),
    "a method that changes later": (
        b"(" + held("keys", call("functools.partial", name("builtins.len")) + b"q\x00") + b"h\x00" + SET_PARTIAL
        + b"t", "pkg.other",
    ),
    "any method of an argument": (call("torch.nn.DataParallel", b"]" + held("parameters") + b"a"), "pkg.run"),
    "an argument that stands twice": (call("uuid.UUID", b"]" + RUN + b"\x86q\x00", b"h\x00"), "pkg.run"),
    "a method with a computed function": (
        held("keys", name("functools.partial") + call("builtins.tuple", b"]" + RUN + b"a") + b"R"), "pkg.run",
    ),
    "a method that uuid calls": (call("uuid.UUID", held("replace")), "pkg.run"),
    "a method that numpy calls": (call("numpy.sin", held("sin")), "pkg.run"),
    "a method of a parameter": (call("torch._utils._rebuild_parameter", held("detach")), "pkg.run"),
    "a method of a tensor with a state": (
        call("torch._utils._rebuild_parameter_with_state", b"N", b"N", b"N", b"}" + text("keys") + RUN + b"s"),
        "pkg.run",
    ),
    "a state in computed arguments": (
        name("torch._utils._rebuild_parameter_with_state") + call("builtins.tuple", b"]" + RUN + b"a") + b"R",
        "pkg.run",
    ),
    "a method of a partial": (
        call("functools.partial", name("builtins.len")) + b"(" + name("builtins.len") + b")N}" + text("keys") + RUN
        + b"stb", "pkg.run",
    ),
    "a method of a location": (
        b"(" + text("storage") + name("torch.FloatStorage") + text("0") + held("startswith") + b"K\x01tQ", "pkg.run",
    ),
    "a partial without a function": (name("functools.partial") + b")R)R", "<computed>"),
    "an attribute of a partial": (call("builtins.getattr", PARTIAL, text("func")), "builtins.getattr"),
    "a method of a class": (call("builtins.getattr", name("pkg.Net"), text("load")) + b")R", "pkg.Net.load"),
    "an attribute that reaches everything": (
        call("builtins.getattr", name("pkg.Net"), text("__globals__")), "pkg.Net.__globals__",
    ),
    "an attribute of an object": (call("builtins.getattr", NET, text("x")), "builtins.getattr"),
    "getattr with a default": (call("builtins.getattr", name("pkg.Net"), text("x"), b"N"), "builtins.getattr"),
    "getattr with computed arguments": (
        name("builtins.getattr") + call("builtins.tuple", b"]") + b"R", "builtins.getattr",
    ),
    "a new class": (call("builtins.type", text("X"), b")", b"}"), "builtins.type"),
    "a result of a call": (call("collections.OrderedDict") + b")R", "collections.OrderedDict.<computed>"),
    "a computed ufunc": (call("numpy.core._ufunc_reconstruct", text("numpy"), b"N"), "numpy.core._ufunc_reconstruct"),
    "no ufunc": (call("numpy.core._ufunc_reconstruct", text("os"), text("system")), "os.system"),
    "a type that dill knows": (call("dill._dill._load_type", text("CodeType")), "builtins.CodeType"),
    "a tensor that a function makes": (
        call("torch._tensor._rebuild_from_type_v2", RUN, name("torch.Tensor"), b")", b"}"), "pkg.run",
    ),
    "the same with computed arguments": (REBUILD + call("builtins.tuple", b"]") + b"R", "<computed>"),
    "an array of dill": (call("dill._dill._create_array", RUN, b")", b"}", b"N"), "pkg.run"),
    "an argument of a scheduler": (call("torch.optim.lr_scheduler.LambdaLR", NET, b"]" + RUN + b"a"), "pkg.run"),
    "one of many arguments": (
        call("torch.optim.lr_scheduler.LambdaLR", NET, b"](" + b"N" * 65 + RUN + b"e"), "pkg.run",
    ),
    "a bit generator": (call("numpy.random._pickle.__bit_generator_ctor", PARTIAL), "pkg.run"),
    "a legacy class of a module": (
        b"(" + text("module") + name("torch.nn.init.Any") + b"NNtQ)R", "torch.nn.init.Any",
    ),
    "BUILD on a module": (name("pkg.module") + b"}b", "pkg.module.__setstate__"),
    "BUILD on a persistent id": (text("0") + b"Q}b", "<computed>.__setstate__"),
    "BUILD on an attribute": (
        call("builtins.getattr", name("pkg.Net"), text("part")) + b"}b", "builtins.getattr.__setstate__",
    ),
    "a second BUILD": (NET + b"}b}b", "pkg.Net.__setstate__"),
    "an item that is called as a method": (NET + HOOK + b"}b", "pkg.run"),
    "APPEND after BUILD": (NET + b"}bNa", "pkg.Net.<computed>"),
    "APPEND after SETITEM": (NET + text("append") + RUN + b"sNa", "pkg.Net.<computed>"),
    "a deep chain": ((name("functools.partial") + b"(") * 120 + RUN + b"tR" * 120 + b")R", "<computed>"),
    "functions that call one another": (
        REBUILD + (b"(" + REBUILD + b"N") * 120 + b"(" + RUN + b"N)Nt" + b"Nt" * 120 + b"R", "<computed>",
    ),
}  # fmt: skip

HARMLESS = {
    "a function that is stored": RUN,
    "a class": call("pkg.Net", RUN),
    "a class with a lower-case name": name("pkg.net") + b")\x81",
    "a partial that is stored": PARTIAL,
    "a partial of a class": call("functools.partial", name("pkg.Net")) + b")R",
    "a member of an enum": call("builtins.getattr", name("pkg.Kind"), text("A")),
    "a function of torch": call("builtins.getattr", name("torch._C._VariableFunctionsClass"), text("relu")),
    "too few arguments": call("torch._tensor._rebuild_from_type_v2", RUN),
    "the type of None": call("builtins.type", b"N"),
    "a ufunc": call("numpy.core._ufunc_reconstruct", text("numpy"), text("less")),
    "a set of dill": call("dill._dill._load_type", text("set")) + b")R",
    "an object of copyreg": call("copyreg._reconstructor", name("pkg.net"), name("builtins.object"), b"N"),
    "an old object": b"(ipkg\nNet\n",
    "a generator": call(
        "numpy.random._pickle.__generator_ctor",
        call("numpy.random._pickle.__bit_generator_ctor", name("numpy.random._pcg64.PCG64")),
    ),
    "a scheduler": call("torch.optim.lr_scheduler.LambdaLR", NET, b"]N a".replace(b" ", b"")),
    "a stored factory": call("collections.defaultdict", RUN),
    "items and a state": NET + b"Na" + text("k") + RUN + b"s}b",
    "items of an OrderedDict": call("collections.OrderedDict") + HOOK,
    "an attribute": held("activation"),
    "an attribute that is no method": held("keys", b"]" + RUN + b"a"),
    "a keyword that is stored": (
        call("functools.partial", name("builtins.max"))
        + b"("
        + name("builtins.max")
        + b")}"
        + text("keys")
        + RUN
        + b"sNtb"
    ),
    "an attribute of a tensor": call(
        "torch._utils._rebuild_parameter_with_state",
        b"N",
        b"N",
        b"N",
        b"}" + text("loader") + RUN + b"s",
    ),
    "items that are an object": held("items", held("activation")),
    "a decorator": held("__wrapped__"),
    "a dict of objects": call("builtins.dict", b"]" + text("net") + held("activation") + b"\x86a"),
    "a layer in a layer": name("torch.nn.Sequential") + b")\x81}" + text("0") + held("activation") + b"sb",
    "a storage": b"("
    + text("storage")
    + name("torch.FloatStorage")
    + text("0")
    + text("cpu")
    + b"K\x01tQ"
    + b"0"
    + RUN,
    "a legacy module": b"(" + text("module") + name("pkg.Net") + b"NNtQ)R",
}


@pytest.mark.parametrize(("pickle", "expected"), DANGEROUS.values(), ids=DANGEROUS)
def test_dangerous_names_are_found(pickle, expected):
    machine = interpret(b"\x80\x04" + pickle + b".", Limits())
    assert expected in machine.runs
    in_tree = dangerous(uses_in(nodes(machine.root)))
    assert expected in in_tree or pickle.endswith(b"a"), "a tree does not show when an item was appended"


@pytest.mark.parametrize("pickle", HARMLESS.values(), ids=HARMLESS)
def test_other_uses_are_not_dangerous(pickle):
    machine = interpret(b"\x80\x04" + pickle + b".", Limits())
    assert not machine.runs
    assert not dangerous(uses_in(nodes(machine.root)))


def test_a_popped_argument_counts():
    pickle = call("torch.optim.lr_scheduler.LambdaLR", NET, RUN)
    assert [*interpret(b"\x80\x04" + pickle + b"0N.", Limits()).runs] == ["pkg.run"]


def test_what_is_given_counts_before_the_damage():
    with pytest.raises(DamagedPickle) as raised:
        interpret(b"\x80\x04" + call("builtins.dict", held("keys")) + b"0.", Limits())
    assert raised.value.runs == ("pkg.run",)


def test_an_extension_code_is_dangerous_by_its_own_name():
    machine = interpret(b"\x80\x04\x82\x01)R.", Limits())
    assert [*machine.runs] == ["copyreg.extension.1"]


def test_a_class_that_is_made_may_be_called_later():
    """The verdict on the first use of a name is not that of all."""
    machine = interpret(b"\x80\x04(" + RUN + b"q\x00)\x81h\x00)Rt.", Limits())
    assert [*machine.runs] == ["pkg.run"]


def test_a_popped_call_counts():
    assert [*interpret(b"\x80\x04" + call("pkg.run") + b"0N.", Limits()).runs] == ["pkg.run"]

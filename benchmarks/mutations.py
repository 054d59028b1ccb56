"""Device bugs, inserted into training scripts by editing their source at nodes of its syntax tree.

Each kind is a bug that goes unnoticed on the CPU. A kind is inserted at the first place of a script that has room for
it; a script without a place for it has no mutant of that kind.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    #: Names whose tensors are passed on, and the names that receive them.
    _Flow = tuple[AbstractSet[str], AbstractSet[str]]

#: Description of each kind, in the order of the table.
KINDS: Final = {
    "input": "the input is not moved",
    "target": "the target is not moved",
    "batch": "an object, a dict or a list of tensors is not moved",
    "model": "the model is not moved",
    "second_model": "a teacher, an EMA, a target network or a discriminator is not moved",
    "loss_weight": "the weight of a loss, or a loss with buffers, is not moved",
    "late_move": "the optimizer is built and restored before the model is moved",
    "created": "a tensor is created in `forward` or in the loop without a device",
    "noise": "noise or timesteps are drawn without a device",
    "generator": "a generator is made without a device",
    "state": "a hidden state, an accumulator or a replay memory is created without a device",
    "index": "an index or a mask is created without a device",
    "attribute": "a buffer is a plain attribute",
    "plain_list": "layers are in a plain list",
    "cpu_forgotten": "`.numpy()` or `pack_padded_sequence` without `.cpu()`",
    "optimizer_state": "the state of the optimizer is moved to the CPU after it was loaded",
    "hard_coded": "the input is moved to `cuda:1`",
}
#: Kinds that change the keys of the model's state_dict: a mutant, and each script with its fixes, is trained again.
CHANGES_KEYS: Final = frozenset({"attribute", "plain_list"})

#: Kinds whose tensors are computed from others: a fix may be at those.
_OF_BATCHES: Final = frozenset({"input", "target", "batch"})
_TARGETS: Final = re.compile(r"(true_)?(targets?|labels?|tags|y|Y|masks|ratings|tgt|answers?|batch_y|tails?)$")
_SECOND: Final = re.compile(r"teacher|target|ema|swa|average|netD|vgg|predictor|qf")
_LOSS: Final = re.compile(r"criterion|loss")
_WEIGHT: Final = re.compile(r"(\w+_)?weights?$")
_INDEX: Final = re.compile(r"\w*(mask|ind|perm|rows|ids|indices|index|permutation|shuffle)\w*$")
_RANDOM: Final = frozenset({"rand", "randn", "randint", "normal"})
_INDICES: Final = frozenset({"arange", "eye", "randperm", "tril", "triu"})
_FILLED: Final = frozenset({"zeros", "ones", "full", "empty", "tensor", "linspace"})
_TO_CPU: Final = """\
for slots in {name}.state.values():
    for key, value in slots.items():
        if torch.is_tensor(value):
            slots[key] = value.cpu()
"""
#: Methods whose result a report may name in place of the tensor that they are called on.
_VIEWS: Final = frozenset(
    {"view", "reshape", "unsqueeze", "flatten", "float", "long", "items", "expand", "unbind", "split"}
)


class Mutant(NamedTuple):
    """A script with one bug.

    Attributes:
        kind: a key of `KINDS`.
        source: text of the script.
        lines: lines of the text that the insertion changed, from 1; empty if it only deleted lines.
        names: variables with a tensor on the wrong device.
    """

    kind: str
    source: str
    lines: frozenset[int]
    names: frozenset[str]

    def aliases(self) -> frozenset[str]:
        """Names of the same tensors elsewhere in the script; for a batch, also of its sources."""
        tree = ast.parse(self.source)
        functions: dict[str, list[ast.FunctionDef]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
        flows = [flow for node in ast.walk(tree) for flow in _flows(node, functions)]
        found = _closure(self.names, flows)
        if self.kind in _OF_BATCHES:
            found |= _closure(self.names, [(to, origin) for origin, to in flows])
            computed = [pair for node in ast.walk(tree) if isinstance(node, ast.Assign) for pair in _pairs(node)]
            found |= {name for target, value in computed if _names(target) & self.names for name in _all_names(value)}
        return frozenset(found)


class _Edit(NamedTuple):
    """A replacement of a range of the source."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class _Site:
    """A place for a bug: its kind, the edits that make it, and the variables that it leaves on the wrong device."""

    kind: str
    edits: tuple[_Edit, ...]
    names: frozenset[str]


def mutants(source: str) -> list[Mutant]:
    """All mutants of a script: one of each kind that it has room for, in the order of `KINDS`."""
    script = _Script(source)
    first: dict[str, _Site] = {}
    for site in sorted(script.sites(), key=lambda one: one.edits[0].start):
        first.setdefault(site.kind, site)
    return [script.mutant(first[kind]) for kind in KINDS if kind in first]


class _Script:
    """The syntax tree of a script, with the parent of each node."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        # Offsets of a syntax tree count bytes, and the scripts are ASCII.
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def mutant(self, site: _Site) -> Mutant:
        """The script with the edits of a site."""
        text, changed, shift = self.source, set[int](), 0
        for start, end, new in sorted(site.edits):
            text = text[: start + shift] + new + text[end + shift :]
            line = text.count("\n", 0, start + shift) + 1
            changed |= set(range(line, line + max(1, new.count("\n")))) if new.strip() or end - start else set()
            if not new and self.source[start:end].endswith("\n"):
                changed -= {line}  # a deleted line
            shift += len(new) - (end - start)
        return Mutant(site.kind, text, frozenset(changed), site.names - {""})

    def sites(self) -> Iterator[_Site]:
        """Every place for a bug."""
        for node in ast.walk(self.tree):
            # Before Python 3.12, nodes of an f-string have no position of their own.
            if isinstance(node, ast.Call) and not any(isinstance(one, ast.JoinedStr) for one in self._ancestors(node)):
                yield from self._of_call(node)
        yield from self._of_resume()
        yield from self._of_copy()

    # Facts about names

    @cached_property
    def _classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    def _is_module_class(self, name: str) -> bool:
        if name not in self._classes:
            return False
        bases = [ast.unparse(base) for base in self._classes[name].bases]
        return any(base.startswith("nn.") or self._is_module_class(base) for base in bases)

    @cached_property
    def _modules(self) -> frozenset[str]:
        """Variables with a module: the script uses their parameters or their mode."""
        asked = {"parameters", "named_parameters", "train", "eval", "load_state_dict"}
        found = (node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute) and node.attr in asked)
        names = {_last_name(node.value) for node in found if isinstance(node.value, (ast.Name, ast.Attribute))}
        return frozenset(names) - {"self"} - self._optimizers

    @cached_property
    def _optimizers(self) -> frozenset[str]:
        return frozenset(
            name
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign)
            and re.match(r"(torch\.)?(optim\.)?[A-Z]\w*\(.*param|.*optim\.", ast.unparse(node.value))
            for name in _names(node.targets[0])
            if re.search(r"opt", name)
        )

    # Facts about places

    def _ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def _statement(self, node: ast.AST) -> ast.stmt:
        return next(one for one in (node, *self._ancestors(node)) if isinstance(one, ast.stmt))

    def _function(self, node: ast.AST) -> str:
        return next((one.name for one in self._ancestors(node) if isinstance(one, ast.FunctionDef)), "")

    def _is_in_module(self, node: ast.AST) -> bool:
        owner = next((one for one in self._ancestors(node) if isinstance(one, ast.ClassDef)), None)
        return owner is not None and self._is_module_class(owner.name)

    def _is_in_loop(self, node: ast.AST) -> bool:
        return any(isinstance(one, (ast.For, ast.While)) for one in self._ancestors(node))

    def _assigned(self, node: ast.AST) -> frozenset[str]:
        """Variables that a statement assigns from an expression; for a tuple, the one at the same position."""
        statement = self._statement(node)
        if isinstance(statement, ast.AugAssign):
            return _names(statement.target)
        if not isinstance(statement, ast.Assign):
            return frozenset()
        found = (_names(target) for target, value in _pairs(statement) if node in set(ast.walk(value)))
        return frozenset().union(*found)

    # Text

    def _range(self, node: Any) -> tuple[int, int]:
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ""

    def _replaced(self, node: ast.AST, text: str) -> _Edit:
        return _Edit(*self._range(node), text)

    def _without_call(self, node: ast.Call, func: ast.Attribute, text: str = "") -> _Edit:
        """Replace a method call, with its dot; the object stays, with its parentheses."""
        return _Edit(self._range(func)[1] - len(f".{func.attr}"), self._range(node)[1], text)

    def _deleted(self, statement: ast.stmt) -> _Edit:
        """Delete a statement with its line, or replace it by ``pass`` if it is alone in its block."""
        parent: Any = self.parents[statement]
        blocks = [block for block in (getattr(parent, field, []) for field in ("body", "orelse", "finalbody")) if block]
        if any(block == [statement] for block in blocks):
            return self._replaced(statement, "pass")
        return _Edit(self._starts[statement.lineno - 1], self._starts[statement.end_lineno or statement.lineno], "")

    def _would_be_idle(self, node: ast.expr, text: str) -> bool:
        """Whether a statement would have no effect after a node in it is replaced."""
        statement = self._statement(node)
        if isinstance(statement, ast.Assign):
            return statement.value is node and ast.unparse(statement.targets[0]) == text
        return isinstance(statement, ast.Expr) and statement.value is node

    # Sites

    def _of_call(self, node: ast.Call) -> Iterator[_Site]:
        if isinstance(node.func, ast.Attribute):
            yield from self._of_move(node, node.func)
            yield from self._of_factory(node, node.func)
            yield from self._of_cpu(node, node.func)
            yield from self._of_registration(node, node.func)

    def _of_move(self, node: ast.Call, func: ast.Attribute) -> Iterator[_Site]:
        """``x.to(device)``."""
        device = next((one for one in (*node.args, *(kw.value for kw in node.keywords)) if _is_device(one)), None)
        if func.attr != "to" or device is None or self._function(node) == "to":
            return
        value = func.value
        rest = [self._text(one) for one in node.args if one is not device]
        rest += [self._text(kw) for kw in node.keywords if kw.value is not device and kw.arg != "non_blocking"]
        text = f".to({', '.join(rest)})" if rest else ""
        assigned = self._assigned(node)
        own = frozenset({_last_name(value)}) if isinstance(value, (ast.Name, ast.Attribute)) else assigned
        is_idle = not rest and self._would_be_idle(node, self._text(value))
        edit = self._deleted(self._statement(node)) if is_idle else self._without_call(node, func, text)
        container = next((one for one in self._ancestors(node) if isinstance(one, (ast.ListComp, ast.DictComp))), None)
        kind = self._kind_of_moved(value, own)
        if container is not None:
            yield self._of_comprehension(node, container, edit)
        elif kind:
            yield _Site(kind, (edit,), own | assigned)
            if kind == "input":
                other = '"cuda:1" if torch.cuda.is_available() else "cpu"'
                yield _Site("hard_coded", (self._replaced(device, other),), own | assigned)

    def _kind_of_moved(self, value: ast.expr, names: frozenset[str]) -> str:
        called = _last_name(value.func) if isinstance(value, ast.Call) else ""
        is_module = called in self._classes and self._is_module_class(called)
        if any(map(_LOSS.search, names)) or (is_module and _LOSS.search(called.lower())):
            has_tensors = called in self._classes and re.search(
                r"register_buffer|Parameter", self._text(self._classes[called])
            )
            return "loss_weight" if has_tensors else ""
        if names & self._modules or is_module:
            is_copy = called == "AveragedModel"  # a copy of a model that was moved
            return "" if is_copy else "second_model" if any(map(_SECOND.search, names)) else "model"
        if any(map(_WEIGHT.match, names)):
            return "loss_weight"
        if any(map(_TARGETS.match, names)):
            return "target"
        has_objects = any(_method(one, "to") for one in self._classes.values())
        return "batch" if has_objects and names & {"batch", "data"} else "input"

    def _of_comprehension(self, node: ast.Call, container: ast.ListComp | ast.DictComp, edit: _Edit) -> _Site:
        """Members of a list or dict that are moved; if only that, the list or dict replaces the comprehension."""
        inner = container.generators[0].iter
        element = container.elt if isinstance(container, ast.ListComp) else container.value
        named = _names(container.generators[0].target)
        if element is node and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in named:
            whole = inner.func.value if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) else inner
            outer = self.parents[container]
            if isinstance(outer, ast.ListComp):  # a list of dicts
                container, whole = outer, outer.generators[0].iter
            text = self._text(whole)
            is_idle = self._would_be_idle(container, text)
            edit = self._deleted(self._statement(node)) if is_idle else self._replaced(container, text)
            return _Site("batch", (edit,), frozenset({_last_name(whole)}) | self._assigned(container))
        return _Site("batch", (edit,), self._assigned(container) | frozenset({_root_name(element)}))

    def _of_factory(self, node: ast.Call, func: ast.Attribute) -> Iterator[_Site]:
        """``torch.zeros(..., device=device)``."""
        keyword = next((kw for kw in node.keywords if kw.arg == "device"), None)
        if keyword is None or ast.unparse(func.value) != "torch":
            return
        start, end = self._range(keyword)
        before, after = self.source[:start].rstrip(), self.source[end:].lstrip()
        if before.endswith(","):
            start = len(before) - 1
        elif after.startswith(","):
            end = len(self.source) - len(after[1:].lstrip())
        names = self._assigned(node)
        if not names and isinstance(kw := self.parents[node], ast.keyword):
            names = frozenset({kw.arg or ""})
        kind = self._kind_of_created(node, func.attr, names)
        if kind:
            yield _Site(kind, (_Edit(start, end, ""),), names)

    def _kind_of_created(self, node: ast.Call, called: str, names: frozenset[str]) -> str:
        ancestors, function = list(self._ancestors(node)), self._function(node)
        is_weight = any(isinstance(one, ast.keyword) and one.arg in {"weight", "pos_weight"} for one in ancestors)
        is_hidden = function == "init_hidden" or bool(names & {"h0", "h_t"})
        in_forward = self._is_in_module(node) and function != "__init__"
        kinds = {
            "generator": called == "Generator",
            "noise": called in _RANDOM,
            "loss_weight": is_weight or any(map(_WEIGHT.match, names)),
            "state": is_hidden,
            "created": in_forward or (called in _FILLED and self._is_in_loop(node)),
            "index": called in _INDICES or any(map(_INDEX.match, names)),
            "target": any(map(_TARGETS.match, names)),
        }
        return next((kind for kind, fits in kinds.items() if fits), "state" if called in _FILLED else "")

    def _of_cpu(self, node: ast.Call, func: ast.Attribute) -> Iterator[_Site]:
        """``x.cpu()`` that `numpy()` or `pack_padded_sequence` needs."""
        outer = self.parents[node]
        is_numpy = isinstance(outer, ast.Attribute) and outer.attr == "numpy"
        is_length = isinstance(outer, ast.Call) and _last_name(outer.func) == "pack_padded_sequence"
        if func.attr == "cpu" and (is_numpy or is_length):
            own = frozenset({_root_name(func.value)})
            yield _Site("cpu_forgotten", (self._without_call(node, func),), own | self._assigned(node))

    def _of_registration(self, node: ast.Call, func: ast.Attribute) -> Iterator[_Site]:
        """Buffers and lists of layers."""
        if func.attr == "register_buffer":
            name, value = ast.literal_eval(node.args[0]), node.args[1]
            yield _Site("attribute", (self._replaced(node, f"self.{name} = {self._text(value)}"),), frozenset({name}))
        if func.attr in {"ModuleList", "ModuleDict"}:
            yield _Site("plain_list", (self._replaced(node, self._text(node.args[0])),), self._assigned(node))

    def _of_resume(self) -> Iterator[_Site]:
        """Bugs in the order of moves and loads."""
        for block in (one for one in ast.walk(self.tree) if isinstance(one, ast.If)):
            loads = [
                node
                for node in ast.walk(block)
                if isinstance(node, ast.Call) and _last_name(node.func) == "load_state_dict"
            ]
            for load in loads:
                owner = load.func.value if isinstance(load.func, ast.Attribute) else load.func
                if _last_name(owner) in self._optimizers:
                    text = _TO_CPU.format(name=self._text(owner))
                    yield self._after(self._statement(load), text, "optimizer_state", _last_name(owner))
            if loads:
                yield from self._late_moves(block)

    def _late_moves(self, block: ast.If) -> Iterator[_Site]:
        body = next((one.body for one in self._ancestors(block) if isinstance(one, ast.FunctionDef)), [])
        if block not in body:
            return
        earlier = body[: body.index(block)]
        for node in (inner for statement in earlier for inner in ast.walk(statement)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                for site in self._of_move(node, node.func):
                    if site.kind == "model":
                        name = min(site.names)
                        device = next(
                            one for one in (*node.args, *(kw.value for kw in node.keywords)) if _is_device(one)
                        )
                        moved = self._after(block, f"{name}.to({self._text(device)})\n", "late_move", name)
                        yield _Site("late_move", (*site.edits, *moved.edits), site.names | self._optimizers)

    def _of_copy(self) -> Iterator[_Site]:
        """A copy of the model that is made before the model is moved."""
        for function in (one for one in ast.walk(self.tree) if isinstance(one, ast.FunctionDef)):
            moves = [
                one for one in function.body if re.fullmatch(r"(model = )?model\.to\(.*device.*\)", ast.unparse(one))
            ]
            copies = [one for one in function.body if re.match(r"\w*ema\w* = \w+\(model\b", ast.unparse(one))]
            if moves and copies:
                copied, moved = copies[0], moves[0]
                start = self._starts[moved.lineno - 1]
                line = self.source[self._starts[copied.lineno - 1] : self._starts[copied.lineno]]
                edits = (_Edit(start, start, line), self._deleted(copied))
                yield _Site("second_model", edits, self._assigned(copied) | {"module"})

    def _after(self, statement: ast.stmt, text: str, kind: str, name: str) -> _Site:
        end = self._starts[statement.end_lineno or statement.lineno]
        return _Site(kind, (_Edit(end, end, textwrap.indent(text, " " * statement.col_offset)),), frozenset({name}))


def _closure(names: AbstractSet[str], flows: Sequence[_Flow]) -> set[str]:
    found = set(names)
    while new := {name for origin, to in flows if origin & found for name in to} - found:
        found |= new
    return found


def _flows(node: ast.AST, functions: dict[str, list[ast.FunctionDef]]) -> Iterator[_Flow]:
    """Names whose tensors a node passes on, and the names that receive them."""
    if isinstance(node, (ast.For, ast.comprehension)):
        yield _seen(node.iter), _names(node.target)
    if isinstance(node, ast.For) and _seen(node.iter):
        yield from ((_seen(one), _names(node.target)) for one in _given(functions.get("__iter__", [])))
    if isinstance(node, ast.Assign):
        for target, value in _pairs(node):
            yield _seen(value), _names(target)
            if isinstance(value, ast.Call):
                called = _last_name(value.func)
                held = [*value.args, *(kw.value for kw in value.keywords)] * called[:1].isupper()  # EMA(model)
                yield from ((_seen(one), _names(target)) for one in held)
                for one in _given(functions.get(called, [])):
                    both = isinstance(one, ast.Tuple) and isinstance(target, ast.Tuple)
                    pairs = zip(one.elts, target.elts, strict=False) if both else [(one, target)]  # type: ignore[attr-defined]
                    yield from ((_seen(returned), _names(to)) for returned, to in pairs)
    if isinstance(node, ast.Call):
        called = _last_name(node.func)
        for function in functions.get(called, []) + functions.get("forward", []) * called[:1].islower():
            parameters = [one.arg for one in function.args.args if one.arg != "self"]
            yield from ((_seen(value), {name}) for name, value in zip(parameters, node.args, strict=False))
            for kw in node.keywords:
                yield _seen(kw.value), {*parameters} if kw.arg is None else {kw.arg} & {*parameters}


def _pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Pairs of target and value of an assignment; one for each member of a tuple."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(one, value) for one in node.targets]


def _given(functions: Sequence[ast.FunctionDef]) -> list[ast.expr]:
    """Expressions that functions return and yield."""
    nodes = (one for function in functions for one in ast.walk(function) if isinstance(one, (ast.Return, ast.Yield)))
    return [one.value for one in nodes if one.value is not None]


def _all_names(node: ast.AST) -> Iterator[str]:
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name))


def _seen(node: ast.expr) -> set[str]:
    """The variable or attribute whose tensors an expression shows; the arguments of `zip` and `enumerate`."""
    while isinstance(node, (ast.Subscript, ast.Starred)) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS
    ):
        node = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else node.value  # type: ignore[union-attr]
    if isinstance(node, ast.Call) and _last_name(node.func) in {"zip", "enumerate", "stack", "cat"}:
        inner = [one.elts if isinstance(one, (ast.List, ast.Tuple)) else [one] for one in node.args]
        return set[str]().union(*(_seen(one) for group in inner for one in group))
    return {_last_name(node), _root_name(node)} if isinstance(node, (ast.Name, ast.Attribute)) else set()


def _is_device(node: ast.expr) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and _last_name(node) == "device"


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _root_name(node: ast.AST) -> str:
    """The variable that an expression begins with."""
    while not isinstance(node, ast.Name):
        inner = getattr(node, "value", None) or getattr(node, "func", None)
        if inner is None:
            return ""
        node = inner
    return node.id


def _names(target: ast.AST) -> frozenset[str]:
    """Variables and attributes that a target assigns."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return frozenset().union(*(_names(one) for one in target.elts))
    if isinstance(target, ast.Subscript):
        return _names(target.value)
    name = _last_name(target)
    return frozenset({name}) if name else frozenset()


def _method(owner: ast.ClassDef, name: str) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == name for one in owner.body)

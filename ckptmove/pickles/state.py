"""State of the symbolic machine."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.pickles.calls import is_settled, made_in, uses_of_call, uses_of_given
from ckptmove.pickles.tree import Global, Opaque
from ckptmove.torch_facts.verdicts import dangerous, is_dangerous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptmove.limits import Limits
    from ckptmove.pickles.tree import Persistent, Starts, Tuple, Value
    from ckptmove.torch_facts.verdicts import Use

    Handler: TypeAlias = Callable[["Machine", int], int]

#: Marks an index of the memo without a value.
UNSET: Final = Opaque("nothing")


class Machine:
    """State of the symbolic machine for one pickle.

    A ``start`` is the offset in ``data`` of the operation that pushed a value.
    """

    __slots__ = (
        "begin", "containers", "counted", "data", "data_bytes", "end", "excess", "filled", "foreign", "frames",
        "given", "globals", "limits", "marks", "memo", "memo_gaps", "memo_starts", "persistents", "reads", "reread",
        "root", "runs", "stack", "stacked", "starts", "storages",
    )  # fmt: skip

    def __init__(self, data: bytes, limits: Limits, begin: int = 0, excess: int = 0) -> None:
        self.data, self.data_bytes = data, len(data)  # the data is dropped once it was read in larger steps
        self.limits = limits
        self.begin = begin  # offset of the pickle in the data
        self.stack: list[Value] = []  # values above the last mark; empty after STOP
        self.starts: Starts = []  # their starts: a list, or an array if the tree is not edited
        self.marks: list[tuple[list[Value], Starts]] = []  # the stack below each mark
        # Lists, not dicts: a pickler numbers memo entries from 0. Empty after STOP.
        self.memo: list[Value] = []
        self.memo_starts: array[int] = array("q")
        self.memo_gaps = 0  # number of indices in the memo without a value
        #: All persistent ids in the order of the pickle, reachable from the root or not.
        self.persistents: list[Persistent] = []
        #: Full names of all globals, each with the start of the first operation that names it.
        self.globals: dict[str, int] = {}
        #: Dangerous names among them, and those that calls reach without naming them, as torch looks them up.
        self.runs: dict[str, None] = {}
        #: Values that a harmless function may call, or whose attributes it may call; empty after STOP.
        self.given: list[Value] = []
        #: Globals that STACK_GLOBAL made of two strings, by start; they have no literal.
        self.stacked: dict[int, Global] = {}
        #: Operations that repeat a value: a memoised string or global, or the top of the stack (DUP). A flat array of
        #: pairs: start of the operation, start of the operation that it repeats (which may be a repeat itself). Sorted
        #: by start. An array, not a list, because there are about ten numbers for each tensor.
        self.reads: array[int] = array("q")
        self.reread: dict[int, Tuple | bytes] = {}  # what is read again from the memo or by DUP, by its `id`
        self.frames: list[int] = []  # start of each FRAME operation
        #: Opcodes that torch's weights-only unpickler rejects, each with its first start; and full names of classes
        #: whose objects get items, which it rejects too.
        self.foreign: dict[int, int] = {}
        self.filled: set[str] = set()
        #: Numbers of globals, lists, sets, dicts and one-item tuples; of persistent ids counted so far; and of those
        #: among them that look like a storage.
        self.containers = self.counted = self.storages = 0
        #: Estimated memory of the tree beyond the size of the pickle, in bytes, with that of the file's other pickles.
        self.excess = excess
        self.end = begin  # offset of the first byte after STOP
        self.root: Value = None

    def merge(self, inner: Machine) -> None:
        """Add the results of a machine that has read another pickle of the same bytes."""
        self.reads += inner.reads
        self.reread |= inner.reread
        self.frames += inner.frames
        self.persistents += inner.persistents
        self.stacked |= inner.stacked
        self.note_names(inner)
        self.excess = inner.excess
        self.end = inner.end

    def note_names(self, inner: Machine) -> None:
        """Record the names and opcodes of another pickle of the same file."""
        for name, start in inner.globals.items():
            self.globals.setdefault(name, start)
        for code, start in inner.foreign.items():
            self.foreign.setdefault(code, start)
        self.runs |= inner.runs
        self.filled |= inner.filled

    def note_global(self, value: Global, start: int) -> None:
        """Record a name that the pickle would import."""
        if value.full_name not in self.globals:
            self.globals[value.full_name] = start
            self.note_uses([(value.full_name, "stored")])

    def note_call(self, function: Value, args: Value, opcode: int, kwargs: Value = None) -> None:
        """Record the dangerous names that a call uses."""
        self.note_uses(uses_of_call(function, args, kwargs, opcode, self.given))
        if type(function) is Global:
            function.is_settled = is_settled(function)

    def note_given(self) -> None:
        """Record the dangerous names that harmless functions call, in the state that the last operation left."""
        if any(is_dangerous(name, "called") for name in self.globals):
            self.given += chain.from_iterable(map(made_in, self.persistents))
            self.note_uses(uses_of_given(self.given))
        self.given = []

    def note_runs(self, names: Iterable[str]) -> None:
        """Record the dangerous names before the damage of another pickle of the same file."""
        self.runs |= dict.fromkeys(names)

    def note_uses(self, uses: Iterable[tuple[str, Use]]) -> None:
        """Record the dangerous ones of some uses of names."""
        self.runs |= dangerous(uses)

"""The state of the symbolic machine while it walks over one pickle.

Never knows an opcode: the handlers change it, :func:`ckptmove.pickles.machine.interpret` drives it.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.pickles.tree import Opaque

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.limits import Limits
    from ckptmove.pickles.tree import Global, Persistent, Tuple, Value

    Handler: TypeAlias = Callable[["Machine", int], int]

#: What the memo has at an index below its highest where nothing was put.
UNSET: Final = Opaque("nothing")


class Machine:
    """State of the walk over one pickle; read it when the walk is over.

    Attributes:
        data: the bytes that hold the pickle.
        stack: values above the last mark; after the walk, empty.
        starts: starts of the values on ``stack``.
        marks: stacks below each mark.
        memo: memoised values by index; after the walk, empty.
        memo_starts: start of the operation that pushed each of them.
        memo_gaps: how many of them are not set.
        persistents: persistent ids, in the order of the pickle: the reader meets them all, reachable or not.
        globals: full names of the globals that the pickle names, each with the start of the first operation that does.
        stacked: those that STACK_GLOBAL made of two strings, by its start: no literal says there what it pushes.
        reads: operations that push a memoised string or global, or the top of the stack once more (DUP), laid flat:
            their own start, and then the start of what they repeat, which may itself be such an operation. They come in
            the order of the pickle, and of several pickles in that of their bytes. There are
            ten for each tensor of torch's: as an array they are no objects.
        reread: tuples and bytes that are read back from the memo, or from the top of the stack, by their ``id``.
        frames: start of each FRAME operation.
        foreign: opcodes that torch's weights-only unpickler lacks, each with its first start.
        filled: full names of the classes that items are put into, where torch's weights-only unpickler puts none.
        begin: offset of the pickle in ``data``.
        end: offset of the first byte after STOP.
        containers: how many names, lists, sets, dicts and tuples of one item were made.
        counted: how many persistent ids were counted so far.
        storages: how many persistent ids look like a storage's, of those that were counted.
        excess: memory that the tree takes beyond what the pickle's bytes account for, estimated; with that of other
            pickles of the same file.
        root: the tree.
    """

    __slots__ = (
        "begin",
        "containers",
        "counted",
        "data",
        "end",
        "excess",
        "filled",
        "foreign",
        "frames",
        "globals",
        "limits",
        "marks",
        "memo",
        "memo_gaps",
        "memo_starts",
        "persistents",
        "reads",
        "reread",
        "root",
        "stack",
        "stacked",
        "starts",
        "storages",
    )

    def __init__(self, data: bytes, limits: Limits, begin: int = 0, excess: int = 0) -> None:
        self.data = data
        self.limits = limits
        self.begin = begin
        self.stack: list[Value] = []
        self.starts: list[int] = []
        self.marks: list[tuple[list[Value], list[int]]] = []
        # A pickler counts from 0: lists, and no dicts of a million numbers.
        self.memo: list[Value] = []
        self.memo_starts: list[int] = []
        self.memo_gaps = 0
        self.persistents: list[Persistent] = []
        self.globals: dict[str, int] = {}
        self.stacked: dict[int, Global] = {}
        self.reads: array[int] = array("q")
        self.reread: dict[int, Tuple | bytes] = {}
        self.frames: list[int] = []
        self.foreign: dict[int, int] = {}
        self.filled: set[str] = set()
        self.containers = self.storages = self.counted = 0
        self.excess = excess
        self.end = begin
        self.root: Value = None

    def note_names(self, inner: Machine) -> None:
        """Remember the names and opcodes that another pickle of the same file uses."""
        for name, start in inner.globals.items():
            self.globals.setdefault(name, start)
        for code, start in inner.foreign.items():
            self.foreign.setdefault(code, start)
        self.filled |= inner.filled

    def note_global(self, value: Global, start: int) -> None:
        """Remember a name that the pickle would import."""
        self.globals.setdefault(value.full_name, start)

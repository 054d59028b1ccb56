"""Edit a pickle: the operations that a plan names push a new value, and nothing else changes.

A site is the start of an operation that pushes a value for one consumer. Pickle shares equal strings through the memo,
so other operations may read the same literal again. Some of them are sites too, others are not. Each site gets exactly
its own new value: a memo read is kept if the memo then holds that value, and is replaced by a literal if not. The
other readers of a memo entry still get the old value.

An edit adds no opcode that torch's weights-only unpickler rejects, unless the source already has one.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.errors import UneditablePickle
from ckptmove.pickles import atoms
from ckptmove.pickles.scan import PUTS, operation_end
from ckptmove.pickles.state import Machine
from ckptmove.pickles.structure import HANDLERS as STRUCTURE
from ckptmove.pickles.tree import Global, Tuple
from ckptmove.torch_facts.devices import split
from ckptmove.torch_facts.dtypes import DTYPE_STORAGE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.model import Mention
    from ckptmove.moves import MovePlan, StorageEdit

    Patch: TypeAlias = tuple[int, bytes]
Wanted: TypeAlias = "str | Global | bool | int"

_GLOBAL: Final = ord("c")
_STACK_GLOBAL: Final = 0x93
_POP: Final = b"0"
_LITERALS: Final = {code: atoms.HANDLERS[code] for code in b"SVTUX\x8c\x8d\x88\x89IKMJL\x8a"} | {
    _GLOBAL: STRUCTURE[_GLOBAL]
}
#: Size in bytes of the length field of a string.
_STRING_WIDTHS: Final = {ord("X"): 4, 0x8C: 1, 0x8D: 8, ord("T"): 4, ord("U"): 1}
_PYTHON2_STRINGS: Final = b"STU"
#: String opcodes of protocol 0, whose argument is a line.
_LINE_STRINGS: Final = b"VS"
_FRAME_HEAD: Final = 9
_TUPLE: Final = ord("t")
_TUPLE1: Final = 0x85
_TUPLE2: Final = 0x86


def apply_plan(machine: Machine, plan: MovePlan) -> bytes:
    """Return ``machine.data`` with the changes of a plan; bytes before ``begin`` and after STOP are unchanged."""
    literals = _Literals(machine)
    draft = _Draft(machine, literals)
    for edit in plan.edits:
        if edit.target != edit.source:
            for site in edit.sites:
                draft.claim_argument(site, edit.target)
        if edit.cast is not None:
            draft.cast(edit, edit.cast[1])
    for flag in plan.flags:
        mention = flag.mention
        place = flag.site if mention is None else mention.site
        if place is None:
            raise UneditablePickle(f"the place of '{flag.where}' is not known", offset=0)
        if mention is None:
            draft.claim(place, flag.target == "True")
        elif mention.kind == "torch.device":
            draft.name_device(place, mention, flag.target)
        else:
            draft.claim(place, flag.target)
    return _apply(literals, draft.values, draft.patches)


def _apply(literals: _Literals, values: Mapping[int, Wanted], patches: Mapping[int, Patch]) -> bytes:
    """Combine the new values and the patches; a patch maps the start of an operation to its end and its new bytes."""
    changes = dict(patches)
    machine = literals.machine
    for site, wanted in values.items():
        if literals.definition(site) is None:
            literals.replace(changes, site, wanted)
    for read, definition in zip(literals.reads, literals.definitions, strict=True):
        wanted_here, wanted_there = values.get(read), values.get(definition)
        if wanted_here is not wanted_there:  # mostly the same: neither is a site, or both belong to one edit
            literals.unshare(changes, read, wanted_here, wanted_there)
    return _splice(machine, changes)


def _splice(machine: Machine, changes: Mapping[int, Patch]) -> bytes:
    data = machine.data
    ordered = sorted((start, *patch) for start, patch in changes.items())
    starts = [start for start, _, _ in ordered]
    growth = [0, *accumulate(len(new) - (end - start) for start, end, new in ordered)]
    for frame in machine.frames:
        begin = frame + _FRAME_HEAD
        length = int.from_bytes(data[frame + 1 : begin], "little")
        grown = growth[bisect_left(starts, begin + length)] - growth[bisect_left(starts, begin)]
        ordered.append((frame + 1, begin, (length + grown).to_bytes(8, "little")))
    pieces: list[bytes] = []
    position = 0
    for start, end, new in sorted(ordered):
        pieces += data[position:start], new
        position = end
    pieces.append(data[position:])
    return b"".join(pieces)


class _Literals:
    """The literals of one pickle: read them, and replace them in the same encoding."""

    __slots__ = ("_known", "_scratch", "definitions", "machine", "reads")

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        # Sorted, since they are in the order of the pickle. There are five for each tensor: a dict would be large.
        self.reads, self.definitions = machine.reads[::2], machine.reads[1::2]
        self._known: dict[int, tuple[Wanted, int]] = {}
        self._scratch = Machine(machine.data, machine.limits, machine.begin)

    def definition(self, site: int) -> int | None:
        """Return the operation whose value a site repeats, or None if the site pushes its own value."""
        index = bisect_left(self.reads, site)
        return self.definitions[index] if index < len(self.reads) and self.reads[index] == site else None

    def root(self, site: int) -> int:
        """Return the operation that first pushed the value of a site."""
        while (before := self.definition(site)) is not None:
            site = before
        return site

    def read(self, start: int) -> tuple[Wanted, int]:
        """Return the value and the end of the literal at ``start``."""
        known = self._known.get(start)
        if known is None:
            known = self._known[start] = self._read(start)
        return known

    def _read(self, start: int) -> tuple[Wanted, int]:
        machine = self.machine
        opcode = machine.data[start]
        if opcode == _STACK_GLOBAL:
            return machine.stacked[start], start + 1
        handler = _LITERALS.get(opcode)
        if handler is None:
            raise UneditablePickle("a value that is not a literal", offset=start - machine.begin)
        end = handler(self._scratch, start)
        value = self._scratch.stack.pop()
        self._scratch.starts.clear()
        return value, end  # type: ignore[return-value]  # the table holds literals only

    def replace(self, changes: dict[int, Patch], site: int, wanted: Wanted) -> None:
        """Replace the value of a literal."""
        value, end = self.read(site)
        if _same(value, wanted):
            return
        self._require_type(value, wanted, site)
        # The machine does not record who reads a memoised flag or number again.
        if type(wanted) in {bool, int} and self.machine.data[end] in PUTS:
            raise UneditablePickle("a memoised flag or number", offset=site - self.machine.begin)
        new = _written(wanted, self.machine.data[site])
        if self.machine.data[site] == _STACK_GLOBAL:
            new = bytes([_STACK_GLOBAL]) + _POP + new  # its two strings are already on the stack
        changes[site] = end, new

    def unshare(self, changes: dict[int, Patch], read: int, here: Wanted | None, there: Wanted | None) -> None:
        """Replace a memo read by a literal, unless the edited memo holds the value that the read needs."""
        root = self.root(read)
        value, end = self.read(root)
        wanted = value if here is None else here
        if _same(wanted, value if there is None else there):
            return
        self._require_type(value, wanted, read)
        data = self.machine.data
        keeps = _same(wanted, value) and data[root] != _STACK_GLOBAL
        new = data[root:end] if keeps else _written(wanted, data[root])
        changes[read] = operation_end(data, read), new

    def _require_type(self, value: Wanted, wanted: Wanted, site: int) -> None:
        if type(value) is not type(wanted):
            raise UneditablePickle("a value of another type", offset=site - self.machine.begin)


class _Draft:
    """The changes of a plan, by the operations that they affect."""

    __slots__ = ("_literals", "_machine", "_shared", "patches", "values")

    def __init__(self, machine: Machine, literals: _Literals) -> None:
        self._machine = machine
        self._literals = literals
        shared = (one.starts for one in machine.reread.values() if type(one) is Tuple)
        self._shared = frozenset(chain.from_iterable(shared))
        self.values: dict[int, Wanted] = {}  # the new value of each site
        self.patches: dict[int, Patch] = {}  # end and new bytes of an operation, by its start

    def claim(self, site: int, value: Wanted) -> None:
        """Set the new value of a site; a site cannot have two values."""
        if self.values.setdefault(site, value) != value:
            raise self._refusal("one value with two uses", site)

    def claim_argument(self, site: int, value: Wanted) -> None:
        """Set the new value of a site in a persistent id or in the arguments of a call."""
        self._require_unshared(site)
        self.claim(site, value)

    def cast(self, edit: StorageEdit, dtype: str) -> None:
        """Set the storage class of another dtype, from the module of the present class."""
        for site in edit.class_sites:
            self._require_unshared(site)
            value, _ = self._literals.read(self._literals.root(site))
            if type(value) is not Global:
                raise self._refusal("a storage class that is not a global", site)
            self.values[site] = Global(value.module, DTYPE_STORAGE[dtype])

    def name_device(self, site: int, mention: Mention, tag: str) -> None:
        """Change the arguments of ``torch.device(type[, index])``."""
        if mention.tuple_site == site:
            self.claim(site, tag)
            return
        kind, index = split(tag)
        self.claim_argument(site, kind)
        if mention.index_site is not None and index is not None:
            self.claim(mention.index_site, index)
        elif mention.index_site is not None:
            _, end = self._literals.read(mention.index_site)
            if end != mention.tuple_site:  # without the index, the next operation (a PUT) would apply to the type
                raise self._refusal("a device index with another use", mention.index_site)
            self.patches[mention.index_site] = end, b""
            self._resize(mention.tuple_site, b"", _TUPLE2, _TUPLE1)
        elif index is not None:
            in_lines = self._machine.data[self._literals.root(site)] in _LINE_STRINGS
            self._resize(mention.tuple_site, _written(index, ord("I" if in_lines else "K")), _TUPLE1, _TUPLE2)

    def _resize(self, tuple_site: int | None, pushed: bytes, before: int, after: int) -> None:
        """Change the length of the argument tuple; TUPLE needs no change, since it takes all items above the mark."""
        opcode = self._machine.data[tuple_site] if tuple_site is not None else None
        if tuple_site is None or opcode not in {before, _TUPLE}:
            raise self._refusal("device arguments that are not made in place", tuple_site or 0)
        self.patches[tuple_site] = tuple_site + 1, pushed + bytes([after if opcode == before else _TUPLE])

    def _require_unshared(self, site: int) -> None:
        """Refuse a site in a tuple that is read again: the other readers would get the new value too."""
        if site in self._shared:
            raise self._refusal("a tuple with another use", site)

    def _refusal(self, detail: str, site: int) -> UneditablePickle:
        return UneditablePickle(detail, offset=site - self._machine.begin)


def _same(first: Wanted, second: Wanted) -> bool:
    if isinstance(first, Global) and isinstance(second, Global):
        return (first.module, first.name) == (second.module, second.name)
    return type(first) is type(second) and first == second


@lru_cache(maxsize=64, typed=True)  # a plan writes a few values many times; typed, since True == 1
def _written(value: Wanted, opcode: int) -> bytes:
    """Encode a value as a literal, with the opcode of the literal that it replaces if possible."""
    if isinstance(value, Global):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, str):
        return _written_text(value, opcode)
    if isinstance(value, bool):
        return b"I0%d\n" % value if opcode == ord("I") else b"\x88" if value else b"\x89"
    return _written_index(value, opcode)


def _written_text(text: str, opcode: int) -> bytes:
    if opcode == ord("V"):  # escapes as in pickle.py ``save_str``
        for char in "\\\0\n\r\x1a":
            text = text.replace(char, f"\\u{ord(char):04x}")
        return b"V" + text.encode("raw_unicode_escape") + b"\n"
    if opcode in _PYTHON2_STRINGS and not text.isascii():
        opcode = ord("X")
    if opcode == ord("S"):
        return f"S{text!r}\n".encode()
    raw = text.encode("utf-8", "surrogatepass")
    width = _STRING_WIDTHS[opcode]
    if len(raw) >= 1 << 8 * width:
        opcode, width = ord("X"), 4
    return bytes([opcode]) + len(raw).to_bytes(width, "little") + raw


def _written_index(index: int, opcode: int) -> bytes:
    """Encode a small number as pickle.py ``save_long`` does."""
    if opcode == ord("I"):
        return b"I%d\n" % index
    if opcode == ord("L"):
        return b"L%dL\n" % index
    if index < 1 << 8:
        return b"K" + index.to_bytes(1, "little")
    return b"M" + index.to_bytes(2, "little") if index < 1 << 16 else b"J" + index.to_bytes(4, "little")

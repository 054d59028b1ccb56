"""Find the names in a pickle after the operation at which the machine has stopped.

``pickle.load`` may go on there: its C code reads some operations that are damage to the machine (SETITEMS without items
on a number, an octal number), and it has no limits. What follows is found by its operations alone, without a stack.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedPickle
from ckptmove.pickles.scan import operations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.pickles.state import Machine
    from ckptmove.torch_facts.verdicts import Use

_TEXTS: Final = frozenset(b"SUTVX\x8c\x8d")
#: Width in bytes of the length of a text, by opcode; the others are lines.
_WIDTHS: Final = {ord("U"): 1, ord("T"): 4, ord("X"): 4, 0x8C: 1, 0x8D: 8}
_GET_BYTES: Final = {ord("h"), ord("j")}
_PUT_BYTES: Final = {ord("q"), ord("r")}
_GET_LINE, _PUT_LINE, _MEMOIZE, _STACK_GLOBAL = ord("g"), ord("p"), 0x94, 0x93
_NAMES: Final = frozenset(b"ci")
_CALLS: Final = frozenset(b"Rio\x92")
#: A name that can be imported; bytes after real damage rarely look like one.
_NAME: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", re.ASCII)
_MOST: Final = 1 << 20


def uses_after(machine: Machine, position: int) -> Iterator[tuple[str, Use]]:
    """The names that operations from ``position`` on import, as called if one of them calls something afterwards."""
    names: list[str] = []
    called = 0
    reader = _Texts(machine)
    try:
        for start, end, code in islice(operations(machine.data, position), _MOST):
            found = reader.read(code, machine.data[start + 1 : end])
            if _NAME.fullmatch(found):
                names.append(found)
            if code in _CALLS:
                called = len(names)
    except DamagedPickle:
        pass
    yield from ((name, "called" if index < called else "stored") for index, name in enumerate(names))


class _Texts:
    """The texts that operations push, and the names that they make of them."""

    def __init__(self, machine: Machine) -> None:
        self._memo = {index: value for index, value in enumerate(machine.memo) if type(value) is str}
        self._next = len(machine.memo)
        self._last = [value for value in machine.stack[-2:] if type(value) is str]
        self._is_text = False

    def read(self, code: int, argument: bytes) -> str:
        """Follow one operation; return the name that it imports, or an empty text."""
        was_text, self._is_text = self._is_text, False
        if code in _NAMES:
            return ".".join(argument.decode("utf-8", "replace").split("\n")[:2])
        if code == _STACK_GLOBAL:
            return ".".join(self._last[-2:])
        if code in _TEXTS:
            self._push(argument[_WIDTHS[code] :] if code in _WIDTHS else argument.strip(b"\n'\""))
        elif code in _GET_BYTES or code == _GET_LINE:
            self._push(self._memo.get(_index(code, argument), ""))
        elif code in _PUT_BYTES or code in {_PUT_LINE, _MEMOIZE}:
            index = self._next if code == _MEMOIZE else _index(code, argument)
            self._next += 1
            if was_text:
                self._memo[index] = self._last[-1]
                self._is_text = True
        return ""

    def _push(self, text: bytes | str) -> None:
        self._last = [*self._last[-1:], text if isinstance(text, str) else text.decode("utf-8", "replace")]
        self._is_text = True


def _index(code: int, argument: bytes) -> int:
    if code in {_GET_LINE, _PUT_LINE}:
        digits = argument.strip()
        return int(digits) if digits.isdigit() and len(digits) < len(str(_MOST**2)) else -1
    return int.from_bytes(argument, "little")

"""Pickles that execute code when they are loaded: one for each opcode that can call.

They call names of ``trap_module``, which creates a file when it is used. The tests provide that module.
"""

from __future__ import annotations

from typing import Final

MODULE: Final = "trap_module"


def text(word: str) -> bytes:
    """A BINUNICODE operation."""
    raw = word.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


_SPRING: Final = b"ctrap_module\nspring\n"
_TYPE: Final = b"ctrap_module\nSpring\n"
#: By opcode: operations that push one value, without PROTO and STOP. ``{marker}`` is the path of the created file.
BODIES: Final[dict[str, bytes]] = {
    "GLOBAL": _SPRING,
    "STACK_GLOBAL": text(MODULE) + text("spring") + b"\x93",
    "REDUCE": _SPRING + b")R",
    "INST": b"(itrap_module\nspring\n",
    "OBJ": b"(" + _SPRING + b"o",
    "NEWOBJ": _TYPE + b")\x81",
    "NEWOBJ_EX": _TYPE + b")}\x92",
    "BUILD": _TYPE + b")R}b",
    "BUILD of a global": _TYPE + b"}X\x01\0\0\0aK\x01sb",
    "APPEND": _TYPE + b")RNa",
    "APPENDS": _TYPE + b")R(NNe",
    "ADDITEMS": _TYPE + b")R(N\x90",
    "SETITEM": _TYPE + b")RNNs",
    "SETITEMS": _TYPE + b")R(NNu",
    "EXT1": b"\x82\x70",
    "EXT2": b"\x83\x70\x70",
    "EXT4": b"\x84\x70\x70\x70\x00",
    "system": b"cos\nsystem\n" + text("echo > {marker}") + b"\x85R",
    "eval": b"cbuiltins\neval\n" + text("open('{marker}', 'w').close()") + b"\x85R",
    "exec": b"cbuiltins\nexec\n" + text("open('{marker}', 'w').close()") + b"\x85R",
}
#: Persistent ids, which some readers resolve.
PERSISTENT: Final[dict[str, bytes]] = {"PERSID": b"Ptrap_module.spring\n", "BINPERSID": _SPRING + b")RQ"}
#: Codes of the extension registry.
EXTENSIONS: Final = {"EXT1": 0x70, "EXT2": 0x7070, "EXT4": 0x707070}


def body(name: str, marker: str) -> bytes:
    """The operations of a payload, with the path of its file; without PROTO and STOP."""
    found = {**BODIES, **PERSISTENT}[name]
    head, _, tail = found.partition(b"X")
    if b"{marker}" not in tail:
        return found
    return head + text(tail[4 : tail.index(b"\x85")].decode().replace("{marker}", marker)) + b"\x85R"


def armed(name: str, marker: str) -> bytes:
    """A pickle of protocol 4 with only a payload."""
    return b"\x80\x04" + body(name, marker) + b"."

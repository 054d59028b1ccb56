"""Read the pickles of a TorchScript archive as one tree.

From torch/csrc/jit/serialization/export_module.cpp ``ScriptModuleSerializer::serialize``: ``data.pkl`` holds the
module, ``constants.pkl`` a tuple of the values that its code calls ``CONSTANTS.c0`` and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptmove.errors import DamagedPickle
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import operations
from ckptmove.pickles.state import Machine
from ckptmove.pickles.storage_id import prefix_keys
from ckptmove.pickles.tree import Call, Dict, Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as AnySequence

    from ckptmove.limits import Limits
    from ckptmove.model import Span
    from ckptmove.pickles.tree import Value


class PicklePart(NamedTuple):
    """One of several pickles that a container returns as one run of bytes."""

    span: Span  # its bytes in that run
    record: str  # its name in the container, for errors
    folder: str = ""  # prefix of its storage keys, which makes them unique in the container; empty in the first pickle
    attribute: str = ""  # attribute of the module that holds its values; empty if they are not added to the module


def interpret_parts(data: bytes, parts: AnySequence[PicklePart], limits: Limits) -> Machine:
    """Read several pickles as data, into one machine after STOP.

    Its ``root`` is the tree of the first pickle, with the other pickles as attributes. Its starts are offsets in
    ``data``. Its storage keys begin with the folder of their part.
    """
    joined = Machine(data, limits)
    attributes: list[tuple[str, Value]] = []
    for part in parts:
        machine = _interpret_part(data, part, limits, joined.excess)
        joined.merge(machine)
        if part.folder:
            prefix_keys(machine.persistents, part.folder)
        if part is parts[0]:
            joined.root = machine.root
        elif part.attribute and isinstance(machine.root, Sequence) and machine.root.items:
            attributes.append((part.attribute, _numbered(machine.root)))
    if attributes:
        joined.root = _with_attributes(joined.root, attributes)
    return joined


def split_parts(data: bytes, count: int) -> tuple[bytes, ...]:
    """Split consecutive pickles."""
    pieces: list[bytes] = []
    start = 0
    for _ in range(count - 1):
        end = start
        for _, after, _ in operations(data, start):
            end = after
        pieces.append(data[start:end])
        start = end
    return *pieces, data[start:]


def _interpret_part(data: bytes, part: PicklePart, limits: Limits, excess: int) -> Machine:
    try:
        machine = interpret(data[: part.span.end], limits, part.span.start, excess)
    except DamagedPickle as error:
        raise DamagedPickle(f"{error.detail} in {part.record}", offset=error.offset, runs=error.runs) from error
    if machine.end != part.span.end:
        raise DamagedPickle(f"bytes after STOP in {part.record}", offset=machine.end - part.span.start)
    return machine


def _numbered(constants: Sequence) -> Dict:
    """Return the constants by their names in the code."""
    flat: list[Value] = []
    starts: list[int] = []
    for index, (value, start) in enumerate(zip(constants.items, constants.starts, strict=True)):
        flat += f"c{index}", value
        starts += start, start
    return Dict(flat, starts)


def _with_attributes(root: Value, attributes: AnySequence[tuple[str, Value]]) -> Value:
    """Add attributes to an object; if its own are not in a dict, return a dict with the object under ``data``."""
    own = root.state if type(root) is Call else None
    whole = Dict([*own.flat], [*own.starts]) if type(own) is Dict else Dict(["data", root], [-1, -1])
    for name, value in attributes:
        whole.flat += name, value
        whole.starts += -1, -1
    if type(root) is not Call or type(own) is not Dict:
        return whole
    module = Call(root.func, root.args, root.args_start, root.opcode)
    module.state, module.state_start = whole, root.state_start
    return module

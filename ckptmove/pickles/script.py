"""The pickles of a TorchScript archive, read as one tree with one count of bytes.

Never compiles the code beside them, and never joins the memos of two pickles.

From torch/csrc/jit/serialization/export_module.cpp ``ScriptModuleSerializer::serialize``: ``data.pkl`` holds the
module, ``constants.pkl`` a tuple of what its code calls ``CONSTANTS.c0`` and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptmove.errors import DamagedPickle
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import operations
from ckptmove.pickles.state import Machine
from ckptmove.pickles.tree import Call, Dict, Sequence, Tuple

if TYPE_CHECKING:
    from collections.abc import Sequence as AnySequence

    from ckptmove.limits import Limits
    from ckptmove.model import Span
    from ckptmove.pickles.tree import Persistent, Value

#: Place of the key in ``('storage', class, key, location, numel)``.
_KEY_FIELD = 2


class PicklePart(NamedTuple):
    """One of several pickles that a container hands out as one run of bytes.

    Attributes:
        span: where it lies in that run.
        record: its name in the container, for errors.
        folder: what leads the keys of its storages, so that they are unique in the container; empty in the first.
        attribute: name under which its values hang on the object; empty where they do not hang there.
    """

    span: Span
    record: str
    folder: str = ""
    attribute: str = ""


def interpret_parts(data: bytes, parts: AnySequence[PicklePart], limits: Limits) -> Machine:
    """Read several pickles as data.

    Args:
        data: the bytes that hold them.
        parts: where each of them is.
        limits: what each of them may ask for.

    Returns:
        One machine at rest: its ``root`` is the tree of the first pickle with those of the others on it, its starts
        are offsets in ``data``, and the keys of its storages are led by the folder of their part.

    Raises:
        DamagedPickle: one of them is no pickle, or ends before the next one begins.
        LimitExceeded: one of them asks for more than the limits allow.
    """
    joined = Machine(data, limits)
    joined.end = len(data)
    attributes: list[tuple[str, Value]] = []
    for part in parts:
        machine = _interpret_part(data, part, limits, joined.excess)
        _join(joined, machine)
        if part.folder:
            for node in machine.persistents:
                _qualify(node, part.folder)
        if part is parts[0]:
            joined.root = machine.root
        elif part.attribute and isinstance(machine.root, Sequence) and machine.root.items:
            attributes.append((part.attribute, _numbered(machine.root)))
    if attributes:
        joined.root = _with_attributes(joined.root, attributes)
    return joined


def split_parts(data: bytes, count: int) -> tuple[bytes, ...]:
    """Pickles that lie one after the other.

    Args:
        data: nothing but the pickles.
        count: how many they are.

    Raises:
        DamagedPickle: as :func:`ckptmove.pickles.scan.operations`.
    """
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
        raise DamagedPickle(f"bytes behind STOP in {part.record}", offset=machine.end - part.span.start)
    return machine


def _join(joined: Machine, machine: Machine) -> None:
    joined.reads += machine.reads
    joined.reread |= machine.reread
    joined.excess = machine.excess
    joined.frames += machine.frames
    joined.persistents += machine.persistents
    joined.note_names(machine)
    joined.stacked |= machine.stacked


def _qualify(node: Persistent, folder: str) -> None:
    """Lead the key of a storage by its folder; the tuple may be another one's too."""
    pid = node.pid
    if type(pid) is Tuple:
        items = [*pid.items]
        key = items[_KEY_FIELD] if len(items) > _KEY_FIELD else None
        if type(key) is str:
            items[_KEY_FIELD] = folder + key
            node.pid = Tuple(tuple(items), pid.starts)


def _numbered(constants: Sequence) -> Dict:
    """Constants by the names that the code has for them."""
    flat: list[Value] = []
    starts: list[int] = []
    for index, (value, start) in enumerate(zip(constants.items, constants.starts, strict=True)):
        flat += f"c{index}", value
        starts += start, start
    return Dict(flat, starts)


def _with_attributes(root: Value, attributes: AnySequence[tuple[str, Value]]) -> Value:
    """The object with more attributes; where its own are in no dict, a dict that has it under ``data``."""
    own = root.state if type(root) is Call else None
    whole = Dict([*own.flat], [*own.starts]) if type(own) is Dict else Dict(["data", root], [-1, -1])
    for name, value in attributes:
        whole.flat += name, value
        whole.starts += -1, -1
    if type(root) is not Call or type(own) is not Dict:
        return whole
    module = Call(root.func, root.args, root.args_start)
    module.state, module.state_start = whole, root.state_start
    return module

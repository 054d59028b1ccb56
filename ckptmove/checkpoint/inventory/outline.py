"""Print the outline of a checkpoint: one line for each node of its tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory import shapes
from ckptmove.errors import LimitExceeded
from ckptmove.pickles.rebuild_arguments import device_text
from ckptmove.pickles.tensors import TensorReader
from ckptmove.pickles.tree import Call, Global, List, Node, Opaque, Persistent, Sequence, Set

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.checkpoint.inventory.shapes import Member
    from ckptmove.limits import Limits
    from ckptmove.pickles.tree import Value

_LONGEST: Final = 60
#: Allowed lines: a base for shared nodes, and a number for each byte of the pickle, whose operations need at least one.
_LINES: Final = 10_000
_LINES_PER_BYTE: Final = 2


class OutlineLine(NamedTuple):
    """A line of the outline."""

    depth: int  # number of containers around the value
    name: str  # last part of its path; empty for the root
    description: str  # type and content: `dict (3)`, `float32 [4, 3] cuda:0`, `1e-3`


def outline(root: Value, limits: Limits, pickle_bytes: int) -> tuple[OutlineLine, ...]:
    """Return the lines of a tree, in the order of the file; the length of the pickle limits their number."""
    reader = TensorReader()
    lines: list[OutlineLine] = []
    frames: list[tuple[Iterator[Member], int]] = [(iter([("", root, -1)]), -1)]
    opened: set[int] = set()
    most = min(limits.visits, limits.factor * (_LINES + _LINES_PER_BYTE * pickle_bytes))
    while frames:
        member = next(frames[-1][0], None)
        if member is None:
            opened.discard(frames.pop()[1])
            continue
        name, value, _ = member
        description, inner = _describe(value, reader)
        lines.append(OutlineLine(len(frames) - 1, name, description))
        if len(lines) > most or len(frames) > limits.depth:
            raise LimitExceeded("paths through the pickle", limit=most, actual=len(lines))
        if inner is not None and id(value) not in opened:
            opened.add(id(value))
            frames.append((inner, id(value)))
    return tuple(lines)


def _describe(value: Value, reader: TensorReader) -> tuple[str, Iterator[Member] | None]:
    """Describe a value in one line; also return its members, or None if they are not listed."""
    if isinstance(value, Call):
        return _describe_call(value, reader)
    pairs = shapes.as_dict(value)
    if pairs is not None:
        return f"dict ({len(pairs.flat) // 2})", shapes.members(pairs)
    if isinstance(value, Sequence):
        return _describe_sequence(value)
    if isinstance(value, Persistent):
        record = reader.storage(value, "", "other")
        return (f"storage {record.dtype} [{record.shape[0]}] {record.device}" if record else "persistent id"), None
    return _short(value), None


def _describe_sequence(value: Sequence) -> tuple[str, Iterator[Member] | None]:
    kind = "list" if isinstance(value, List) else "set" if isinstance(value, Set) else "tuple"
    if any(isinstance(item, Node) for item in value.items):
        return f"{kind} ({len(value.items)})", _numbered(value)
    shown = ", ".join(_short(item) for item in value.items[:8])
    more = ", …" if len(value.items) > 8 else ""
    return (f"{kind} ({len(value.items)}): {shown}{more}"[: 2 * _LONGEST] if value.items else f"{kind} (0)"), None


def _describe_call(call: Call, reader: TensorReader) -> tuple[str, Iterator[Member] | None]:
    record = reader.tensor(call, "", "other") if reader.is_tensor(call) else None
    if record is not None:
        kind = "" if record.kind in {"tensor", "parameter"} else f" {record.kind}"
        return f"{record.dtype} {list(record.shape)} {record.device}{kind}", None
    device = device_text(call)
    if device is not None:
        return f"torch.device({device})", None
    pairs = shapes.as_dict(call)
    if pairs is not None:
        return f"{call.name.rpartition('.')[2]} ({len(pairs.flat) // 2})", shapes.members(pairs)
    state = shapes.attributes(call)
    if state is not None:
        return call.name or "object", shapes.members(state)
    if isinstance(call.args, Sequence) and call.args.items:
        return f"{call.name or 'object'}(…)", _numbered(call.args)
    return f"{call.name or 'object'}()", None


def _numbered(value: Sequence) -> Iterator[Member]:
    return ((str(index), item, -1) for index, item in enumerate(value.items))


def _short(value: Value) -> str:
    if isinstance(value, Global):
        return value.full_name
    if isinstance(value, Opaque):
        return value.description
    if isinstance(value, int) and value.bit_length() > 256:  # longer than a line
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes) and len(value) > _LONGEST:
        return f"{value[:_LONGEST]!r}…"
    return repr(value)

"""Build nodes that no operation of a pickle pushes: their starts are -1, so that no edit touches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.pickles.tree import Call, Dict, Global, List, Tuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.pickles.tree import Value


def new_tuple(*items: Value) -> Tuple:
    """A tuple."""
    return Tuple(items, (-1,) * len(items))


def new_list(items: Iterable[Value]) -> List:
    """A list."""
    listed = [*items]
    return List(listed, [-1] * len(listed))


def new_dict(pairs: Iterable[tuple[Value, Value]] = ()) -> Dict:
    """A dict of keys and values."""
    flat = [item for pair in pairs for item in pair]
    return Dict(flat, [-1] * len(flat))


def ordered_dict(pairs: Dict) -> Call:
    """An ``OrderedDict`` with the pairs of a dict: the root of a state_dict."""
    root = Call(Global("collections", "OrderedDict"), Tuple((), ()), -1)
    root.assigned = pairs
    return root

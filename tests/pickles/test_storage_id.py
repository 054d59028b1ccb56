"""The persistent ids of storages."""

from __future__ import annotations

from ckptmove.pickles.build import new_tuple
from ckptmove.pickles.storage_id import prefix_keys, storage_id, with_key, with_location
from ckptmove.pickles.tree import Persistent, Tuple

STARTS = (1, 2, 3, 4, 5)
ID = Tuple(("storage", "class", "0", "cuda:1", 6), STARTS)


def test_an_id_keeps_its_places_with_another_key_or_location() -> None:
    assert with_key(ID, "a").items == ("storage", "class", "a", "cuda:1", 6)
    assert with_location(ID, "cpu").items == ("storage", "class", "0", "cpu", 6)
    assert with_key(ID, "a").starts == with_location(ID, "cpu").starts == STARTS


def test_only_keys_of_storages_that_are_text_get_a_prefix() -> None:
    pids = ID, Tuple(("storage", "class", 7), STARTS[:3]), new_tuple("storage"), new_tuple("module", "a", "b"), "text"
    nodes = [Persistent(pid, -1) for pid in pids]
    assert [storage_id(node) is not None for node in nodes] == [True, True, True, False, False]
    prefix_keys(nodes, "part/")
    assert [node.pid for node in nodes[1:]] == [*pids[1:]]
    assert nodes[0].pid.items[2] == "part/0"
    assert ID.items[2] == "0"  # other nodes may share it

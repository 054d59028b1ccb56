"""What a file may ask for before it is refused.

Never counts anything: whoever does compares with it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: Operations that the pickles of all compressed records may have, and of each as many more as it takes bytes in the
#: archive. What torch writes has one or two for each byte of it once deflated, masks written as lists have fifty.
_OPERATIONS: Final = 1 << 21
_OPERATIONS_PER_BYTE: Final = 16
#: The same of the bytes of pickles, which are gone through before their operations are; those of torch are a dozen.
_PICKLE_BYTES: Final = 1 << 22
_PICKLE_BYTES_PER_BYTE: Final = 64
#: Indices of a memo beyond one for each byte of the pickle: every pickler counts from 0 or 1.
_MEMO_INDICES: Final = 1 << 12
#: Estimated memory of a pickle's tree, in bytes: an operation takes room on the stack, in the memo and in the node that
#: keeps its value; a container, a name or a persistent id takes more.
_OPERATION_COST: Final = 64
_CONTAINER_COST: Final = 160
_PERSISTENT_COST: Final = 48
#: Memory that a byte of a pickle, or a storage that it names, accounts for. A tensor of torch has 35 to 110 bytes, 28
#: to 32 operations and 2 KB of memory; text and numbers stay below the first figure; a bomb has 50 to 200 for a byte.
_MEMORY_PER_BYTE: Final = 16
_MEMORY_PER_STORAGE: Final = 2200
_MOST_MEMORY_PER_BYTE: Final = 64
#: How an error names the limit ``tree_bytes``, the one that large lists of plain values can meet in a real checkpoint.
TREE_MEMORY: Final = "the memory of a pickle in bytes"
#: What a deflated record may inflate to, whatever it says: 64 MiB, and a hundred times what it takes in the archive. A
#: storage may have more, where its tensors need it.
_INFLATED_BYTES: Final = 1 << 26
_INFLATED_RATIO: Final = 100


class Limits(NamedTuple):
    """What a file may ask for before it is refused.

    Attributes:
        operations: operations of one pickle.
        depth: marks that may be open at once in a pickle, and nesting of its tree.
        string_bytes: size of one string or bytes object in a pickle.
        pickle_bytes: size of one pickle.
        tree_bytes: memory of the trees of a file's pickles, beyond what their bytes and tensors account for.
        records: records of one archive.
        visits: nodes of the tree that are visited, a shared one once for each path to it.
        entries: files, folders and links of one directory.
        factor: how many times as much as usual every other bound allows, those that follow from a file's size too.
    """

    operations: int = 500_000_000
    depth: int = 10_000
    string_bytes: int = 2**30
    pickle_bytes: int = 2**33
    tree_bytes: int = 2**30
    records: int = 20_000_000
    visits: int = 50_000_000
    entries: int = 200_000
    factor: int = 1

    def times(self, factor: int) -> Limits:
        """The same, with every bound so many times as high."""
        return Limits(**{name: factor * bound for name, bound in self._asdict().items()})

    def for_packed(self, stored_bytes: int, among: int = 1) -> Limits:
        """The same, with less for a compressed pickle: a few kilobytes inflate to operations that take a minute.

        Args:
            stored_bytes: what it takes as it is stored.
            among: how many such pickles there are.
        """
        operations = self.factor * (_OPERATIONS // among + _OPERATIONS_PER_BYTE * stored_bytes)
        nbytes = self.factor * (_PICKLE_BYTES // among + _PICKLE_BYTES_PER_BYTE * stored_bytes)
        return self._replace(operations=min(self.operations, operations), pickle_bytes=min(self.pickle_bytes, nbytes))

    def most_memoised(self, pickle_bytes: int) -> int:
        """The highest index that the memo of a pickle of so many bytes may use: all below it takes room."""
        return self.factor * (_MEMO_INDICES + pickle_bytes)

    def tree_excess(self, nbytes: int, operations: int, containers: int, persistents: int, storages: int) -> int:
        """Estimate the memory that a pickle's tree takes beyond what its bytes and storages account for.

        Args:
            nbytes: length of the pickle.
            operations: number of its operations.
            containers: number of names, and of lists, sets, dicts and tuples of one item, that they made.
            persistents: number of persistent ids.
            storages: number of those that look like a storage's.
        """
        taken = _OPERATION_COST * operations + _CONTAINER_COST * containers + _PERSISTENT_COST * persistents
        accounted = min(_MOST_MEMORY_PER_BYTE * nbytes, _MEMORY_PER_BYTE * nbytes + _MEMORY_PER_STORAGE * storages)
        return taken - self.factor * accounted

    def most_inflated(self, stored_bytes: int) -> int:
        """How many bytes may come of so many deflated ones, of what is no storage."""
        return self.factor * (_INFLATED_BYTES + _INFLATED_RATIO * stored_bytes)

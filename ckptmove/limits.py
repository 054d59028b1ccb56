"""Define the resource limits for reading a file. The code that reads compares with them."""

from typing import Final, NamedTuple

#: Operations allowed in the pickles of all compressed records together, and in each for every byte that it takes in
#: the archive. torch's pickles have one or two for each deflated byte; masks written as lists have fifty.
_OPERATIONS: Final = 1 << 21
_OPERATIONS_PER_BYTE: Final = 16
#: The same limits in bytes of the pickles, which are scanned before their operations are counted. torch's pickles
#: inflate to about a dozen bytes for each deflated byte.
_PICKLE_BYTES: Final = 1 << 22
_PICKLE_BYTES_PER_BYTE: Final = 64
#: Memo indices allowed beyond one for each byte of the pickle: every pickler counts from 0 or 1.
_MEMO_INDICES: Final = 1 << 12
#: Estimated memory of a pickle's tree, in bytes: an operation takes space on the stack, in the memo and in the node of
#: its value; a container, a name or a persistent id takes more.
_OPERATION_COST: Final = 64
_CONTAINER_COST: Final = 160
_PERSISTENT_COST: Final = 48
#: Memory in bytes that a byte of a pickle, or a storage that it names, justifies. A tensor of torch takes 35 to 110
#: bytes of pickle, 28 to 32 operations and 2 KB of memory. Text and numbers stay below the first figure; a bomb needs
#: 50 to 200 for each byte.
_MEMORY_PER_BYTE: Final = 16
_MEMORY_PER_STORAGE: Final = 2200
_MOST_MEMORY_PER_BYTE: Final = 64
#: Name of the limit ``tree_bytes`` in errors. Large lists of plain values in a real checkpoint can exceed it.
TREE_MEMORY: Final = "the memory of a pickle in bytes"
#: Maximum size of an inflated record: 64 MiB plus a hundred times its deflated size. The size in its header is not
#: trusted. A storage may be larger if its tensors need it.
_INFLATED_BYTES: Final = 1 << 26
_INFLATED_RATIO: Final = 100


class Limits(NamedTuple):
    """Resource limits for reading a file. A file that needs more is refused.

    Attributes:
        operations: operations of one pickle.
        depth: open marks at one time in a pickle, and nesting depth of its tree.
        string_bytes: size of one string or bytes object in a pickle.
        pickle_bytes: size of one pickle.
        tree_bytes: memory of the trees of a file's pickles, beyond what their bytes and tensors justify.
        records: records of one archive.
        visits: visited nodes of the tree; a shared node counts once for each path to it.
        entries: files, folders and links of one directory.
        factor: multiplier of all other bounds, including those that depend on the size of a file.
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

    def times(self, factor: int) -> "Limits":
        """Return the limits with every bound multiplied."""
        return Limits(**{name: factor * bound for name, bound in self._asdict().items()})

    def for_packed(self, stored_bytes: int, among: int = 1) -> "Limits":
        """Return lower limits for a compressed pickle: a few kilobytes can inflate to a minute of operations.

        As many pickles as ``among`` says share the allowance.
        """
        operations = self.factor * (_OPERATIONS // among + _OPERATIONS_PER_BYTE * stored_bytes)
        nbytes = self.factor * (_PICKLE_BYTES // among + _PICKLE_BYTES_PER_BYTE * stored_bytes)
        return self._replace(operations=min(self.operations, operations), pickle_bytes=min(self.pickle_bytes, nbytes))

    def max_memo_index(self, pickle_bytes: int) -> int:
        """Return the highest memo index allowed in a pickle; every index below it takes memory."""
        return self.factor * (_MEMO_INDICES + pickle_bytes)

    def tree_excess(self, nbytes: int, operations: int, containers: int, persistents: int, storages: int) -> int:
        """Estimate the bytes of memory that a pickle's tree takes beyond what its bytes and storages justify.

        Names and one-item tuples count as containers. Persistent ids that refer to a storage are counted again.
        """
        taken = _OPERATION_COST * operations + _CONTAINER_COST * containers + _PERSISTENT_COST * persistents
        accounted = min(_MOST_MEMORY_PER_BYTE * nbytes, _MEMORY_PER_BYTE * nbytes + _MEMORY_PER_STORAGE * storages)
        return taken - self.factor * accounted

    def max_inflated_bytes(self, stored_bytes: int) -> int:
        """Return the maximum inflated size of a deflated record that is not a storage."""
        return self.factor * (_INFLATED_BYTES + _INFLATED_RATIO * stored_bytes)

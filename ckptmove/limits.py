"""What a file may ask for before it is refused.

Never counts anything: whoever does compares with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a file may ask for before it is refused.

    Attributes:
        operations: operations of one pickle.
        depth: marks that may be open at once in a pickle, and nesting of its tree.
        memo_index: highest index that the memo of a pickle may use.
        string_bytes: size of one string or bytes object in a pickle.
        pickle_bytes: size of one pickle.
        records: records of one archive.
        visits: nodes of the tree that are visited, a shared one once for each path to it.
        entries: files, folders and links of one directory.
        factor: how many times as much as usual every other bound allows, those that follow from a file's size too.
    """

    operations: int = 500_000_000
    depth: int = 10_000
    memo_index: int = 2**31
    string_bytes: int = 2**30
    pickle_bytes: int = 2**33
    records: int = 20_000_000
    visits: int = 50_000_000
    entries: int = 200_000
    factor: int = 1

    def times(self, factor: int) -> Limits:
        """The same, with every bound so many times as high."""
        return Limits(**{name: factor * bound for name, bound in asdict(self).items()})

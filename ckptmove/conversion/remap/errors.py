"""Define the errors of a change of keys or parts. Their facts are in fields, and hints and exit codes in ``cli``."""

from __future__ import annotations

from ckptmove.errors import Refused, UsageError
from ckptmove.text import amount


class NoMatch(UsageError):
    """An option names nothing in the checkpoint.

    Attributes:
        option: name of the option, with its dashes.
        word: its value.
        known: names that it could mean instead: similar ones, or else the first ones.
    """

    kind = "no-match"

    def __init__(self, option: str, word: str, known: tuple[str, ...]) -> None:
        super().__init__(f"{option} '{word:.200}' matches nothing" if word else f"{option} matches nothing")
        self.option = option
        self.word = word
        self.known = known


class InsideObject(Refused):
    """A part of a pickled object cannot be removed. ``where`` is the path of the object, empty for the root."""

    kind = "inside-object"

    def __init__(self, option: str, word: str, where: str) -> None:
        place = f"the object at '{where:.200}'" if where else "a pickled object"
        super().__init__(f"{option} '{word:.200}' names a part of {place}, which is stored as a whole")
        self.where = where


class ListItems(Refused):
    """Some items of a list would be removed, which would change the indices of the others. ``where`` is its path."""

    kind = "list-items"

    def __init__(self, where: str) -> None:
        super().__init__(f"single items of a list cannot be removed: '{where:.200}'" if where else "the root is a list")
        self.where = where


class SharedPart(Refused):
    """A dict or a list would lose entries, but is stored only once for two paths.

    Attributes:
        names: the paths.
    """

    kind = "shared-part"

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"'{first:.200}' and '{second:.200}' are the same object, and only one would lose entries")
        self.names = (first, second)


class NeededByOptimizer(Refused):
    """An optimizer that stays would lose a part of its state, or some of its parameters.

    Attributes:
        optimizer: path of the optimizer; empty for the root.
        lost: the first part that it would lose.
    """

    kind = "needed-by-optimizer"

    def __init__(self, optimizer: str, lost: str, others: int) -> None:
        more = f" and {amount(others, 'other part')}" if others else ""
        owner = f"the optimizer at '{optimizer:.200}'" if optimizer else "the optimizer"
        super().__init__(f"{owner} cannot be resumed without '{lost:.200}'{more}")
        self.optimizer = optimizer
        self.lost = lost


class NothingLeft(Refused):
    """No part of the checkpoint would stay."""

    kind = "nothing-left"

    def __init__(self) -> None:
        super().__init__("the new file would be empty")


class PartialPrefix(Refused):
    """Only some keys of a state_dict have a prefix that is to be removed.

    Attributes:
        prefix: the prefix.
        having: the first keys with it.
        lacking: the first keys without it.
    """

    kind = "partial-prefix"

    def __init__(self, prefix: str, having: tuple[str, ...], lacking: tuple[str, ...]) -> None:
        super().__init__(
            f"only some keys of a state_dict begin with '{prefix:.200}': {_listed(having)}, but not {_listed(lacking)}"
        )
        self.prefix = prefix
        self.having = having
        self.lacking = lacking


class KeysCollide(Refused):
    """Two keys of a dict would become one.

    Attributes:
        where: path of the dict; empty for the root.
        target: the new key.
        sources: the old keys.
    """

    kind = "keys-collide"

    def __init__(self, where: str, target: str, sources: tuple[str, ...]) -> None:
        place = f" of '{where:.200}'" if where else ""
        super().__init__(f"two keys{place} would become '{target:.200}': {_listed(sources)}")
        self.where = where
        self.target = target
        self.sources = sources


def _listed(keys: tuple[str, ...]) -> str:
    return " and ".join(f"'{key:.200}'" for key in keys)

"""Define the errors of a change of keys or parts. Their facts are in fields, and hints and exit codes in ``cli``."""

from __future__ import annotations

from typing import Final

from ckptmove.errors import Refused, UsageError
from ckptmove.text import Argument, Phrase, amount

#: Number of values that a message names.
_SHOWN: Final = 3


class NoMatch(UsageError):
    """An option names nothing in the checkpoint.

    Attributes:
        option: name of the option, with its dashes.
        word: its value.
        known: names that it could mean instead: similar ones, or else the first ones.
    """

    kind = "no-match"
    is_of_checkpoint = True

    def __init__(self, option: str, word: str, known: tuple[str, ...]) -> None:
        super().__init__(Phrase(Argument.typed(option), f" '{word:.200}'" if word else "", " matches nothing"))
        self.option = option
        self.word = word
        self.known = known


class InsideObject(Refused):
    """A part of a pickled object cannot be removed. ``where`` is the path of the object, empty for the root."""

    kind = "inside-object"

    def __init__(self, option: str, word: str, where: str) -> None:
        place = f"the object at '{where:.200}'" if where else "a pickled object"
        super().__init__(
            Phrase(Argument.typed(option), f" '{word:.200}' names a part of {place}, which is stored as a whole")
        )
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


class NotRemappable(Refused):
    """Keys, parts or dtypes of the checkpoint cannot be changed. ``reason`` is a clause.

    Attributes:
        container: its format.
    """

    kind = "not-remappable"

    def __init__(self, path: str, container: str, reason: str) -> None:
        super().__init__(f"a checkpoint of format {container} cannot be rewritten: {reason}", path=path)
        self.container = container


class SavedWhole(Refused):
    """An object of a distributed checkpoint cannot be written into another file: only its class reads its bytes.

    Attributes:
        name: its name.
    """

    kind = "saved-whole"

    def __init__(self, path: str, name: str, others: int) -> None:
        more = f" and {others:,} more" if others else ""
        super().__init__(
            f"'{name:.200}'{more} cannot be rewritten: an object whose bytes only its class reads", path=path
        )
        self.name = name


class MixedByteOrders(Refused):
    """One file cannot hold storages of both byte orders. The path is that of a big-endian file."""

    kind = "mixed-byte-orders"

    def __init__(self, path: str) -> None:
        super().__init__("its storages are big-endian, and those of another file are little-endian", path=path)


class NotCastable(Refused):
    """``--dtype`` selects a tensor whose elements cannot be cast on their own.

    Attributes:
        name: the tensor.
        reason: why, as a clause.
    """

    kind = "not-castable"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(Phrase(Argument("dtype"), f" cannot cast '{name:.200}': {reason}"))
        self.name = name
        self.reason = reason


class SharedStorage(NotCastable):
    """``--dtype`` selects one of two tensors that share a storage. ``other`` is the tensor that it does not select."""

    kind = "shared-storage"

    def __init__(self, name: str, other: str, role: str) -> None:
        super().__init__(name, f"'{other:.200}', of role '{role}', shares its storage and is not cast")
        self.other = other
        self.role = role


class ShardNotCastable(NotCastable):
    """``--dtype`` selects a DTensor in the file of one rank."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "it is a shard of a tensor, in the file of one rank")


class NotInFormat(Refused):
    """The format of the output cannot hold some entries of the checkpoint.

    Attributes:
        entries: key and description of each: ``("epoch", "an int")``. An empty key stands for the root.
        root: key of the entry that is a state_dict; empty if there is none.
    """

    kind = "not-in-format"

    def __init__(self, container: str, entries: tuple[tuple[str, str], ...], root: str = "") -> None:
        shown = ", ".join(f"{repr(key)[:200] if key else 'the root'} is {found}" for key, found in entries[:_SHOWN])
        more = f", and {len(entries) - _SHOWN:,} more" if len(entries) > _SHOWN else ""
        super().__init__(f"{container} cannot hold all entries: {shown}{more}")
        self.entries = entries
        self.root = root


class NotPlain(Refused):
    """Objects of the file have no value that ``torch.load(weights_only=True)`` loads.

    Attributes:
        objects: path, full name of the class or function, and reason, as a clause, of each object.
        is_dangerous: whether the objects are functions that no checkpoint needs.
    """

    kind = "not-plain"

    def __init__(self, objects: tuple[tuple[str, str, str], ...], *, is_dangerous: bool = False) -> None:
        shown = "; ".join(f"{where or 'the root'} ({name}): {why}" for where, name, why in objects[:_SHOWN])
        more = f"; and {len(objects) - _SHOWN} more" if len(objects) > _SHOWN else ""
        super().__init__(f"no plain value for {shown}{more}")
        self.objects = objects
        self.is_dangerous = is_dangerous


def _listed(keys: tuple[str, ...]) -> str:
    return " and ".join(f"'{key:.200}'" for key in keys)


class ScaledWeightCast(Refused):
    """A quantized weight, or the scale that is stored beside it, would be cast by itself.

    Attributes:
        weight: name of the weight.
        scale: name of its scale.
    """

    kind = "scaled-weight"

    def __init__(self, weight: str, scale: str) -> None:
        super().__init__(f"'{weight:.200}' is quantized, with its scale in '{scale:.200}': a cast of either changes it")
        self.weight = weight
        self.scale = scale

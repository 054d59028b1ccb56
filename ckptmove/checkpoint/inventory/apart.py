"""The names that the pickles of a file import: those of the checkpoint, and those that a load of it does not read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.formats.facts import facts_of
from ckptmove.formats.two_readers import other_readings
from ckptmove.io.part import MemorySource
from ckptmove.model import ArchiveFact
from ckptmove.torch_facts.verdicts import uses_of_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckptmove.formats.contract import Container
    from ckptmove.formats.salvage import Salvage
    from ckptmove.io.contracts import ByteSource
    from ckptmove.model import GlobalUse
    from ckptmove.pickles.state import Machine


#: Classes of an archive's own code, functions of TorchScript's reader, and modules lowered to a backend
#: (torch/csrc/jit/backends/backend_detail.cpp). No load imports one of them.
SCRIPT_NAMES: Final = re.compile(r"__torch__\..*|torch\.jit\._pickle\..*|torch\.jit\.\w+LoweredModule")


def judged(machine: Machine, opened: Collection[str] = ()) -> tuple[GlobalUse, ...]:
    """The names that a pickle imports; ``opened``, whose calls the container has read itself, are not dangerous."""
    uses = uses_of_names(machine.globals, machine.runs)
    return tuple(use._replace(verdict="unknown") if use.name in opened else use for use in uses)


class Apart(NamedTuple):
    """What a file holds beside its checkpoint."""

    uses: tuple[GlobalUse, ...]  # imported names, each with the record that imports it
    facts: tuple[ArchiveFact, ...]  # second readings, stray bytes and archives that were not searched
    strays: frozenset[str]  # names of the stray bytes in these facts


def find_apart(container: Container, machine: Machine) -> Apart:
    """Read what a load of the checkpoint does not read."""
    uses: list[GlobalUse] = []
    facts: list[ArchiveFact] = []
    strays: set[str] = set()
    for reading in other_readings(container):
        facts.append(ArchiveFact(reading.kind, reading.what, reading.nbytes))
        facts += _unread(reading.salvage)
        uses += _uses(reading.what, reading.salvage.machine, container)
        strays.add(reading.stray)
    for name, source in _apart(container, machine):
        from ckptmove.formats.salvage import Salvage  # most files need none

        salvage = Salvage(container.limits)
        salvage.read(source, name)
        facts += _unread(salvage)
        uses += _uses(name, salvage.machine, container)
    return Apart(tuple(uses), tuple(facts), frozenset(strays - {""}))


def _apart(container: Container, machine: Machine) -> Iterator[tuple[str, ByteSource]]:
    """The parts of a file that a load does not read, with the bytes after the end of its object pickle."""
    yield from container.apart()
    if machine.data_bytes > machine.end:
        yield "bytes after the end of data.pkl", MemorySource("", container.object_pickle()[machine.end :])


def _unread(salvage: Salvage) -> Iterator[ArchiveFact]:
    return (ArchiveFact("inner-archive", name, nbytes) for name, nbytes in salvage.unread.items())


def _uses(record: str, names: Machine, container: Container) -> Iterator[GlobalUse]:
    for use in judged(names, container.opened):
        if not (facts_of(container.name).has_code and SCRIPT_NAMES.fullmatch(use.name)):
            yield use._replace(record=record)

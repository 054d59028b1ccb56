"""Rules about the names that loading a file would import: S701 to S703.

No fix allows a name, or loads the file in a way that runs code from it.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.trainers import resumes_despite
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import checkpoint_of, look_at_each
from ckptmove.formats.facts import facts_of
from ckptmove.model import OLDEST_TORCH, Severity
from ckptmove.text import Command, amount, quoted, some
from ckptmove.torch_facts.weights_only import DTENSOR_MODULE, DTENSOR_NAMES, WEIGHTS_ONLY_UNTIL, newest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.checkpoint.directories import FileRecord
    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, GlobalUse, Inventory

_SHOWN: Final = 4
#: Modules of paths: Python 3.13 pickles them under the second name.
_PATHLIB, _NEW_PATHLIB = "pathlib.", "pathlib._local."
#: Dotted name of a module; a folder of a remote repository may have a version, with dashes, in its name.
_PATH: Final = re.compile(r"[\w-]+(?:\.[\w-]+)*")


def weights_only(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """S701: ``torch.load(weights_only=True)``, the default since torch 2.6, refuses the file.

    Of the ``.metadata`` of a distributed checkpoint, which torch reads with ``pickle.load``, and of records that a load
    does not read, it names what no library of torch writes there.
    """
    yield from _strangers(inventory)
    container = facts_of(inventory.container)
    if container.is_distributed:
        return
    refused, files = _refused(inventory)
    yield from _dtensors(inventory, context, is_alone=not refused)
    opcodes, filled = inventory.foreign_opcodes, inventory.filled_classes
    is_tar = container.weights_only is False
    if not refused and not opcodes and not is_tar:
        return
    parts = ["every tar of torch 0.1 since torch 2.6"] if is_tar else []
    parts += [f"{amount(len(refused), 'name')}: {some([*map(_refusal, refused)], _SHOWN)}"] if refused else []
    parts += [f"{amount(len(opcodes), 'opcode')}: {some(opcodes, _SHOWN)}"] if opcodes else []
    parts += [f"items in {some(filled, _SHOWN)}"] if filled else []
    if container.loader == "torch.export.load":
        # It falls back to loading without weights-only mode.
        is_dangerous = any(use.verdict == "dangerous" for use in refused)
        message = f"torch.export.load also runs code that weights_only=True refuses: {' and '.join(parts)}"
        yield found("S701", message, [use.name for use in refused], _do_not_load(inventory) if is_dangerous else "")
        return
    message = f"torch.load(weights_only=True) refuses {' and '.join(parts)}"
    message += "".join(f"; {one}" for one in _only_elsewhere(refused))
    later = _newer_names(inventory)
    message += f"; before torch {' also '.join(_older_refusals(later))}" if later else ""
    where = [file.path for file in files] or [use.name for use in refused]
    fix = _remedy(inventory, context, files)
    if not _is_hostile(inventory) and _resumes(inventory, files):
        message += "; its trainer allows them when it resumes, or does not read the file"
        only = Command(f"needed only to load it yourself: {fix}") if fix else ""
        yield found("S701", message, where, only)._replace(severity=Severity.INFO)
        return
    yield found("S701", message, where, fix)


def _strangers(inventory: Inventory) -> Iterator[Finding]:
    """S701 for names of other packages in a pickle that has no weights-only mode, or that no load reads."""
    if facts_of(inventory.container).is_distributed:
        names = [use.name for use in inventory.globals if use.verdict == "unknown"]
        if names:
            message = f"loading unpickles .metadata, which imports {amount(len(names), 'name')}: {some(names, _SHOWN)}"
            yield found("S701", message, names, "")
    apart = [use for use in inventory.apart if use.verdict == "unknown"]
    if apart:
        names = [*dict.fromkeys(use.name for use in apart)]
        records = [*dict.fromkeys(use.record for use in apart)]
        message = f"unpickling {some(records, _SHOWN)} imports {amount(len(names), 'name')}: {some(names, _SHOWN)}"
        yield found("S701", message, [f"{use.record}: {use.name}" for use in apart], "")


def _remedy(inventory: Inventory, context: Context, files: Sequence[FileRecord]) -> str:
    """How to load what weights-only mode refuses; empty if nothing helps."""
    if _is_hostile(inventory):
        return _do_not_load(inventory)
    subject = checkpoint_of(inventory, [file.path for file in files])
    if subject is None:
        return look_at_each(inventory)
    if context.source is None:
        return ""
    from ckptmove.findings.remedies import choose

    remedy = choose(inventory, context.source, subject[0], files)
    return "" if remedy is None else remedy.command


def _is_hostile(inventory: Inventory) -> bool:
    """Whether the file has a dangerous name, or one that is not a dotted path."""
    return any(use.verdict == "dangerous" or not _PATH.fullmatch(use.name) for use in inventory.globals)


def _dtensors(inventory: Inventory, context: Context, *, is_alone: bool) -> Iterator[Finding]:
    """S701 for DTensors, which weights-only mode accepts once their module is imported.

    If other names are refused too, the finding for those has the remedy.
    """
    names = [use.name for use in inventory.globals if use.name in DTENSOR_NAMES]
    if names and facts_of(inventory.container).loader == "torch.load":
        rows = inventory.files if isinstance(inventory, DirectoryInventory) else ()
        files = [file for file in rows if not DTENSOR_NAMES.isdisjoint(file.refused)]
        message = f"torch.load(weights_only=True) accepts its DTensors after 'import {DTENSOR_MODULE}'"
        where = [file.path for file in files] or names
        fix = _remedy(inventory, context, files) if is_alone else ""
        yield found("S701", message, where, fix)._replace(severity=Severity.INFO)


def dangerous_global(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """S702: a pickle of the file, or one in a file beside it, names functions that no checkpoint needs."""
    names = [use.name for use in inventory.globals if use.verdict == "dangerous"]
    apart = [use for use in inventory.apart if use.verdict == "dangerous"]
    parts: list[str] = []
    if names:
        loader = facts_of(inventory.container).loader
        loading = loader if loader == "torch.export.load" else "loading without weights_only"
        parts.append(f"{loading} could run {some(names, _SHOWN)}")
    if apart:
        records = [*dict.fromkeys(use.record for use in apart)]
        others = [*dict.fromkeys(use.name for use in apart)]
        parts.append(f"unpickling {some(records, _SHOWN)} could run {some(others, _SHOWN)}")
        names += [f"{use.record}: {use.name}" for use in apart]
    if names:
        rows = inventory.files if isinstance(inventory, DirectoryInventory) else ()
        files = [file.path for file in rows if file.runs]
        message = f"{some(files, _SHOWN)}: {'; '.join(parts)}" if files else "; ".join(parts)
        yield found("S702", message, [*files, *names], _do_not_load(inventory))
    if isinstance(inventory, DirectoryInventory):
        from ckptmove.findings.beside import dangerous_beside

        yield from dangerous_beside(inventory)


def weights_only_older(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """S703: the newest ``torch.load(weights_only=True)`` accepts the file, but an older one refuses names in it."""
    later = _newer_names(inventory)
    if not later or inventory.foreign_opcodes or not all(use.weights_only for use in inventory.globals):
        return
    message = f"torch.load(weights_only=True) before torch {' refuses '.join(_older_refusals(later))}"
    files = inventory.files if isinstance(inventory, DirectoryInventory) else ()
    where = [file.path for file in files if file.weights_only_since != OLDEST_TORCH]
    first = newest(use.weights_only_since for use in later)
    yield found("S703", message, where or [use.name for use in later], f"load it with torch {first} or later")


def _refused(inventory: Inventory) -> tuple[list[GlobalUse], list[FileRecord]]:
    """Return the names that ``weights_only=True`` refuses, and the files of a directory or an archive with them.

    Files whose trainer resumes despite them count only if there are no others. DTensors have a finding of their own.
    """
    names = [use for use in inventory.globals if not use.weights_only and use.name not in DTENSOR_NAMES]
    if not isinstance(inventory, DirectoryInventory):
        return names, []
    files = [file for file in inventory.files if file.weights_only_since is None]
    files = [file for file in files if not file.refused or not DTENSOR_NAMES.issuperset(file.refused)]
    others = [file for file in files if not resumes_despite(file.layout, file.path, file.refused)]
    if not others or len(others) == len(files):
        return names, files
    own = {name for file in others for name in file.refused}
    return [use for use in names if use.name in own], others


def _resumes(inventory: Inventory, files: Sequence[FileRecord]) -> bool:
    """Whether the trainer that has written the refused files resumes from them."""
    if isinstance(inventory, DirectoryInventory):
        return all(resumes_despite(file.layout, file.path, file.refused) for file in files)
    refused = [] if inventory.foreign_opcodes else [use.name for use in inventory.globals if not use.weights_only]
    return resumes_despite(inventory.layout, inventory.path, refused)


def _refusal(use: GlobalUse) -> str:
    """Return a name, with the first torch that refuses it if older versions accept it."""
    until = WEIGHTS_ONLY_UNTIL.get(use.name)
    return use.name if until is None else f"{use.name} (since torch {until})"


def _only_elsewhere(refused: Sequence[GlobalUse]) -> Iterator[str]:
    """Why another Python, or this system, cannot make the paths in a pickle; pure paths can be made everywhere."""
    paths = [use.name for use in refused if use.name.startswith(_PATHLIB)]
    if any(name.startswith(_NEW_PATHLIB) for name in paths):
        yield "only Python 3.13 and later has pathlib._local"
    name, systems = ("PosixPath", "Linux and macOS") if sys.platform == "win32" else ("WindowsPath", "Windows")
    if any(path.endswith(f".{name}") for path in paths):
        yield f"a {name} can be made only on {systems}"


def _do_not_load(inventory: Inventory) -> str:
    return f"do not load it; see what it would import: ckptmove inspect --globals {quoted(inventory.path)}"


def _newer_names(inventory: Inventory) -> list[GlobalUse]:
    """Return the names that the newest torch accepts, but not every supported torch."""
    if not isinstance(inventory, DirectoryInventory) and not facts_of(inventory.container).is_torch_save:
        return []
    return [use for use in inventory.globals if use.weights_only_since not in {None, OLDEST_TORCH}]


def _older_refusals(later: Sequence[GlobalUse]) -> tuple[str, str]:
    """Return the first torch that accepts all of some names, and a text with the names that older ones refuse."""
    first = newest(use.weights_only_since for use in later)
    names = [f"{use.name}{'' if (at := use.weights_only_since) == first else f' (since {at})'}" for use in later]
    return first, f"{amount(len(names), 'name')}: {some(names, _SHOWN)}"


#: The rules, in the order of the codes.
RULES: Final = (weights_only, dangerous_global, weights_only_older)

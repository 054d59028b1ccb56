"""Rules about the names that loading a file would import: S701 to S703.

No fix allows a dangerous name.
"""

from __future__ import annotations

import ast
import re
from keyword import iskeyword
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import open_load, remap_command
from ckptmove.formats.opening import container_class
from ckptmove.model import OLDEST_TORCH
from ckptmove.text import amount, quoted, some
from ckptmove.torch_facts.weights_only import WEIGHTS_ONLY_UNTIL, newest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, GlobalUse, Inventory

_SHOWN: Final = 4
#: Modules whose objects have moved: torch compares names, so add_safe_globals needs the name in the file as well.
_MOVED: Final = ("numpy.core.", "numpy._core.", "pathlib.")
#: The first torch whose add_safe_globals accepts pairs of object and name (``_get_user_allowed_globals``).
_PAIRS_SINCE: Final = "2.6"
#: Modules of ``torch.optim`` that are its attributes: it deletes the modules of its optimizers from itself.
_OPTIM_MODULES: Final = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")
#: Dotted name of a module; a folder of a remote repository may have a version, with dashes, in its name.
_PATH: Final = re.compile(r"[\w-]+(?:\.[\w-]+)*")
#: Modules that a load expression may name.
_LOADING: Final = frozenset({"io", "pickle", "tarfile", "torch", "zipfile"})
#: Calls that run code from a file, and their warning.
_RUNNING: Final = ("weights_only=False", "pickle.load(", "torch.jit.load(", "torch.export.load(")
_CAUTION: Final = "only if you trust its origin"
#: numpy restores an array through the class of its dtype, whose name is not in the file.
_NUMPY_DTYPES: Final = "*{type(numpy.dtype(code)) for code in numpy.typecodes['All']}"


def weights_only(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """S701: ``torch.load(weights_only=True)``, the default since torch 2.6, refuses the file.

    Does not apply to the ``.metadata`` of a distributed checkpoint: torch reads it with ``pickle.load``.
    """
    container = container_class(inventory.container)
    if not container.is_editable:
        return
    refused = [use for use in inventory.globals if not use.weights_only]
    opcodes, filled = inventory.foreign_opcodes, inventory.filled_classes
    is_tar = container.weights_only is False
    if not refused and not opcodes and not is_tar:
        return
    parts = ["every tar of torch 0.1 since torch 2.6"] if is_tar else []
    parts += [f"{amount(len(refused), 'name')}: {some([*map(_refusal, refused)], _SHOWN)}"] if refused else []
    parts += [f"{amount(len(opcodes), 'opcode')}: {some(opcodes, _SHOWN)}"] if opcodes else []
    parts += [f"items in {some(filled, _SHOWN)}"] if filled else []
    if container.loader == "torch.export.load":
        yield _exported(inventory, refused, parts)
        return
    message = f"torch.load(weights_only=True) refuses {' and '.join(parts)}"
    later = _newer_names(inventory)
    message += f"; before torch {' also '.join(_older_refusals(later))}" if later else ""
    where, files = [use.name for use in refused], _refused_files(inventory)
    load = open_load(inventory, files[0] if files else "")
    is_hostile = any(use.verdict == "dangerous" or not _PATH.fullmatch(use.name) for use in refused)
    if is_hostile:
        fix = _do_not_load(inventory)
    elif container.weights_only is None:
        runs = "the code in it" if container.has_code else "code from the file"
        fix = f"{_imports(load)}{load})  # runs {runs}: {_CAUTION}"
    elif opcodes or is_tar or filled or not all(map(_is_valid_name, refused)):
        fix = f"{_imports(load)}{load}, weights_only=False)  # runs code from the file: {_CAUTION}"
    else:
        fix = _allow(inventory, load)
    plain = remap_command(inventory, "--plain")
    if plain and not is_hostile:
        fix += f"{';' if '  # ' in fix else '  #'} or without the classes: {plain}"
    yield found("S701", message, files or where, fix)


def _exported(inventory: Inventory, refused: Sequence[GlobalUse], parts: Sequence[str]) -> Finding:
    """S701 for ``torch.export.load``, which falls back to loading without weights-only mode."""
    is_dangerous = any(use.verdict == "dangerous" for use in refused)
    call = open_load(inventory)
    load = f"{_imports(call)}{call})  # runs code from the file: {_CAUTION}"
    message = f"torch.export.load also runs code that weights_only=True refuses: {' and '.join(parts)}"
    return found("S701", message, [use.name for use in refused], _do_not_load(inventory) if is_dangerous else load)


def dangerous_global(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """S702: the pickle names functions that no checkpoint needs."""
    names = [use.name for use in inventory.globals if use.verdict == "dangerous"]
    if names:
        loader = container_class(inventory.container).loader
        loading = loader if loader == "torch.export.load" else "loading without weights_only"
        message = f"{loading} could run {some(names, _SHOWN)}"
        yield found("S702", message, names, _do_not_load(inventory))


def weights_only_older(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """S703: the newest ``torch.load(weights_only=True)`` accepts the file, but an older one refuses names in it."""
    later = _newer_names(inventory)
    if not later or inventory.foreign_opcodes or not all(use.weights_only for use in inventory.globals):
        return
    message = f"torch.load(weights_only=True) before torch {' refuses '.join(_older_refusals(later))}"
    files = inventory.files if isinstance(inventory, DirectoryInventory) else ()
    where = [file.path for file in files if file.weights_only_since != OLDEST_TORCH]
    load = open_load(inventory, where[0] if where else "")
    yield found("S703", message, where or [use.name for use in later], _allow(inventory, load))


def cautioned(finding: Finding, inventory: Inventory) -> Finding:
    """Add a warning to a fix that runs code from the file; replace the fix if the file has dangerous names."""
    if not any(word in finding.fix for word in _RUNNING) or _CAUTION in finding.fix:
        return finding
    if any(use.verdict == "dangerous" for use in inventory.globals):
        return finding._replace(fix=_do_not_load(inventory))
    comment = "; " if "  # " in finding.fix else "  # "
    return finding._replace(fix=f"{finding.fix}{comment}runs code from the file: {_CAUTION}")


def _refused_files(inventory: Inventory) -> list[str]:
    """Return the files of a directory or an archive that ``weights_only=True`` refuses."""
    files = inventory.files if isinstance(inventory, DirectoryInventory) else ()
    return [file.path for file in files if file.weights_only_since is None]


def _refusal(use: GlobalUse) -> str:
    """Return a name, with the first torch that refuses it if older versions accept it."""
    until = WEIGHTS_ONLY_UNTIL.get(use.name)
    return use.name if until is None else f"{use.name} (since torch {until})"


def _do_not_load(inventory: Inventory) -> str:
    return f"do not load it; see what it would import: ckptmove inspect --globals {quoted(inventory.path)}"


def _allow(inventory: Inventory, load: str) -> str:
    """Return the line that allows the names of a file, with the oldest torch that can run it if not all can."""
    names = [use.name for use in inventory.globals if not use.weights_only]
    later = _newer_names(inventory)
    pairs = [_PAIRS_SINCE for name in names if name.startswith(_MOVED)]
    oldest = newest([*pairs, *(use.weights_only_since for use in later if not _is_allowable(use))])
    names += [use.name for use in later if oldest == OLDEST_TORCH]
    modules, allowed = _allowed(names)
    allow = f"torch.serialization.add_safe_globals([{', '.join(allowed)}]); " if names else ""
    since = "" if oldest == OLDEST_TORCH else f"  # torch {oldest} or later"
    return f"{_imports(load, modules)}{allow}{load}, weights_only=True){since}"


def _newer_names(inventory: Inventory) -> list[GlobalUse]:
    """Return the names that the newest torch accepts, but not every supported torch."""
    if not isinstance(inventory, DirectoryInventory) and not container_class(inventory.container).is_torch_save:
        return []
    return [use for use in inventory.globals if use.weights_only_since not in {None, OLDEST_TORCH}]


def _older_refusals(later: Sequence[GlobalUse]) -> tuple[str, str]:
    """Return the first torch that accepts all of some names, and a text with the names that older ones refuse."""
    first = newest(use.weights_only_since for use in later)
    names = [f"{use.name}{'' if (at := use.weights_only_since) == first else f' (since {at})'}" for use in later]
    return first, f"{amount(len(names), 'name')}: {some(names, _SHOWN)}"


def _is_allowable(use: GlobalUse) -> bool:
    """Whether an older torch can allow a name: its object must exist there and have a ``__name__``, unlike a dtype."""
    return not use.name.startswith("torch.") or use.weights_only_since == "2.5"


def _allowed(names: list[str]) -> tuple[set[str], list[str]]:
    """Return the modules of some names, and the arguments for ``add_safe_globals``."""
    modules = set()
    objects = []
    for name in names:
        current = name.replace("numpy.core.", "numpy._core.", 1) if name.startswith("numpy.core.") else name
        if current.startswith("torch.optim.") and not current.startswith(_OPTIM_MODULES):
            current = f"torch.optim.{current.rpartition('.')[2]}"
        modules.add(current.rpartition(".")[0] or "builtins")
        objects.append(f"({current}, {name!r})" if name.startswith(_MOVED) else current)
    if "numpy.dtype" in names:
        objects.append(_NUMPY_DTYPES)
    return modules, objects


def _is_valid_name(use: GlobalUse) -> bool:
    """Whether a line of Python can contain the name: a file may have any text as a name, even code."""
    return all(part.isidentifier() and not iskeyword(part) for part in use.name.split("."))


def _imports(load: str, modules: Collection[str] = ()) -> str:
    """Return the import statement that a fix line needs."""
    named = {node.id for node in ast.walk(ast.parse(f"{load})")) if isinstance(node, ast.Name)}
    return f"import {', '.join(sorted({*modules, *(named & _LOADING)}))}; "

"""Rules about the names that loading a file would import: S701 to S703.

No fix allows a dangerous name.
"""

from __future__ import annotations

import ast
import re
from keyword import iskeyword
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.trainers import resumes_despite
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import checkpoint_of, open_load, remap_command
from ckptmove.formats.local_shards import SHARDED_TENSOR
from ckptmove.formats.opening import container_class
from ckptmove.model import OLDEST_TORCH, Severity
from ckptmove.text import amount, quoted, some
from ckptmove.torch_facts.weights_only import DTENSOR_MODULE, DTENSOR_NAMES, WEIGHTS_ONLY_UNTIL, newest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ckptmove.checkpoint.directories import FileRecord
    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, GlobalUse, Inventory

_SHOWN: Final = 4
#: Most characters of a fix that allows names, without the call that loads the file.
_SHORT: Final = 150
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
    yield from _dtensors(inventory)
    refused, files = _refused(inventory)
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
    where = [file.path for file in files] or [use.name for use in refused]
    load = open_load(inventory, files[0].path if files else "")
    is_hostile = any(use.verdict == "dangerous" or not _PATH.fullmatch(use.name) for use in refused)
    if is_hostile:
        yield found("S701", message, where, _do_not_load(inventory))
        return
    if _resumes(inventory, files):
        message += "; its trainer allows them when it resumes, or does not read the file"
        fix = f"needed only to load it yourself: {_list_names(inventory)}"
        yield found("S701", message, where, fix)._replace(severity=Severity.INFO)
        return
    yield found("S701", message, where, _loading(inventory, refused, load, where))


def _loading(inventory: Inventory, refused: Sequence[GlobalUse], load: str, where: Sequence[str]) -> str:
    """How to load what weights-only mode refuses, or the command that writes it in another form."""
    container = container_class(inventory.container)
    plain = remap_command(inventory, where, "--plain") if checkpoint_of(inventory, where) is not None else ""
    if any(use.name == SHARDED_TENSOR for use in refused):
        return _for_sharded_tensors(inventory, load, where)
    if container.weights_only is None:
        runs = "the code in it" if container.has_code else "code from the file"
        fix = f"{_imports(load)}{load})  # runs {runs}: {_CAUTION}"
    elif not (fix := allowing_line(inventory)):
        fix = f"{_imports(load)}{load}, weights_only=False)  # runs code from the file: {_CAUTION}"
    elif plain and len(fix) - len(load) > _SHORT:
        return f"{plain}  # or allow the names: {_list_names(inventory)}"
    if plain:
        fix += f"{';' if '  # ' in fix else '  #'} or without the classes: {plain}"
    return fix


def _for_sharded_tensors(inventory: Inventory, load: str, where: Sequence[str]) -> str:
    """A command that gathers ShardedTensors, or else the line that loads those of one rank on this rank."""
    if isinstance(inventory, DirectoryInventory) and not inventory.sharding:
        return remap_command(inventory, where, "-o", f"{inventory.path}.pth")
    return f"{_imports(load)}{load}, weights_only=False)  # on as many ranks; runs code from the file: {_CAUTION}"


def _dtensors(inventory: Inventory) -> Iterator[Finding]:
    """S701 for DTensors, which weights-only mode accepts once their module is imported."""
    names = [use.name for use in inventory.globals if use.name in DTENSOR_NAMES]
    if names and container_class(inventory.container).loader == "torch.load":
        rows = inventory.files if isinstance(inventory, DirectoryInventory) else ()
        files = [file.path for file in rows if not DTENSOR_NAMES.isdisjoint(file.refused)]
        load = open_load(inventory, files[0] if files else "")
        message = f"torch.load(weights_only=True) accepts its DTensors after 'import {DTENSOR_MODULE}'"
        finding = found(
            "S701", message, files or names, f"{_imports(load, [DTENSOR_MODULE])}{load}, weights_only=True)"
        )
        yield finding._replace(severity=Severity.INFO)


def _exported(inventory: Inventory, refused: Sequence[GlobalUse], parts: Sequence[str]) -> Finding:
    """S701 for ``torch.export.load``, which falls back to loading without weights-only mode."""
    is_dangerous = any(use.verdict == "dangerous" for use in refused)
    call = open_load(inventory)
    load = f"{_imports(call)}{call})  # runs code from the file: {_CAUTION}"
    message = f"torch.export.load also runs code that weights_only=True refuses: {' and '.join(parts)}"
    return found("S701", message, [use.name for use in refused], _do_not_load(inventory) if is_dangerous else load)


def dangerous_global(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """S702: a pickle names functions that no checkpoint needs."""
    names = [use.name for use in inventory.globals if use.verdict == "dangerous"]
    apart = [use for use in inventory.apart if use.verdict == "dangerous"]
    parts: list[str] = []
    if names:
        loader = container_class(inventory.container).loader
        loading = loader if loader == "torch.export.load" else "loading without weights_only"
        parts.append(f"{loading} could run {some(names, _SHOWN)}")
    if apart:
        records = [*dict.fromkeys(use.record for use in apart)]
        others = [*dict.fromkeys(use.name for use in apart)]
        parts.append(f"unpickling {some(records, _SHOWN)} could run {some(others, _SHOWN)}")
        names += [f"{use.record}: {use.name}" for use in apart]
    if names:
        yield found("S702", "; ".join(parts), names, _do_not_load(inventory))


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
    if any(use.verdict == "dangerous" for use in (*inventory.globals, *inventory.apart)):
        return finding._replace(fix=_do_not_load(inventory))
    comment = "; " if "  # " in finding.fix else "  # "
    return finding._replace(fix=f"{finding.fix}{comment}runs code from the file: {_CAUTION}")


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


def _do_not_load(inventory: Inventory) -> str:
    return f"do not load it; see what it would import: {_list_names(inventory)}"


def _list_names(inventory: Inventory) -> str:
    return f"ckptmove inspect --globals {quoted(inventory.path)}"


def allowing_line(inventory: Inventory) -> str:
    """Return the line that allows the names that weights-only mode refuses, and loads the first file with them.

    Returns:
        Python, with its imports; empty if weights-only mode accepts the file, or if no line can allow what it refuses.
    """
    container = container_class(inventory.container)
    refused, files = _refused(inventory)
    is_torch = container.is_editable and container.weights_only
    if not refused or not is_torch or inventory.foreign_opcodes or inventory.filled_classes:
        return ""
    if any(use.verdict == "dangerous" for use in inventory.globals) or not all(map(_is_valid_name, refused)):
        return ""
    return _allow(inventory, open_load(inventory, files[0].path if files else ""))


def _allow(inventory: Inventory, load: str) -> str:
    """Return the line that allows the names of a file, with the oldest torch that can run it if not all can."""
    refused, files = _refused(inventory)
    names = [use.name for use in refused]
    unlisted = files[0].refused if files else [use.name for use in inventory.globals]
    later = _newer_names(inventory)
    pairs = [_PAIRS_SINCE for name in names if name.startswith(_MOVED)]
    oldest = newest([*pairs, *(use.weights_only_since for use in later if not _is_allowable(use))])
    names += [use.name for use in later if oldest == OLDEST_TORCH]
    modules, allowed = _allowed(names)
    modules |= set() if DTENSOR_NAMES.isdisjoint(unlisted) else {DTENSOR_MODULE}
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

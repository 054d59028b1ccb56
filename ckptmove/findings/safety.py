"""Rules about what loading a file would import: S701 and S702.

Never imports any of it, and never offers to allow what is dangerous.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from ckptmove.directories import DirectoryInventory
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import load_expression
from ckptmove.wording import amount

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory

_SHOWN: Final = 4
#: Modules whose objects have moved: torch compares names, so the one in the file has to be given with the object.
_MOVED: Final = ("numpy.core.", "numpy._core.", "pathlib.")
#: numpy restores an array through the class of its dtype, which the file does not name.
_NUMPY_DTYPES: Final = "*{type(numpy.dtype(code)) for code in numpy.typecodes['All']}"


def weights_only(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """S701: ``torch.load(weights_only=True)``, the default since torch 2.6, refuses the file.

    A distributed checkpoint's ``.metadata`` is read by ``pickle.load``, whatever is in it.
    """
    if inventory.container == "dcp":
        return
    refused = [use for use in inventory.globals if not use.weights_only]
    opcodes = inventory.foreign_opcodes
    is_tar = inventory.container == "torch-tar"
    if not refused and not opcodes and not is_tar:
        return
    parts = ["every tar of torch 0.1"] if is_tar else []
    parts += [f"{amount(len(refused), 'name')}: {_some([use.name for use in refused])}"] if refused else []
    parts += [f"{amount(len(opcodes), 'opcode')}: {_some(opcodes)}"] if opcodes else []
    message = f"torch.load(weights_only=True) refuses {' and '.join(parts)}"
    where, files = [use.name for use in refused], _refused_files(inventory)
    load = load_expression(inventory, files[0] if files else "").removesuffix(")")
    if any(use.verdict == "dangerous" for use in refused):
        fix = _distrust(inventory)
    elif inventory.container == "torchscript":
        fix = f"{load})  # runs the code in it: only if you trust its origin"
    elif inventory.container == "pickle":
        fix = f"{load})  # runs what the file says: only if you trust its origin"
    elif opcodes or is_tar:
        fix = f"{load}, weights_only=False)  # runs what the file says: only if you trust its origin"
    else:
        fix = f"{_allow_line(where)}; {load})"
    yield found("S701", message, files or where, fix)


def dangerous_global(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """S702: the pickle names what no checkpoint needs."""
    names = [use.name for use in inventory.globals if use.verdict == "dangerous"]
    if names:
        message = f"loading without weights_only could run {_some(names)}"
        yield found("S702", message, names, _distrust(inventory))


def _refused_files(inventory: Inventory) -> list[str]:
    """Of a directory or an archive, the files that the names and opcodes stand in."""
    files = inventory.files if isinstance(inventory, DirectoryInventory) else ()
    return [file.path for file in files if not file.weights_only]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _distrust(inventory: Inventory) -> str:
    return f"do not load it; see what it would import: ckptmove inspect --globals {shlex.quote(inventory.path)}"


def _allow_line(names: list[str]) -> str:
    """The imports and the call that let ``weights_only=True`` take names; classes of the script are in ``__main__``."""
    modules = {"torch"}
    objects = []
    for name in names:
        current = name.replace("numpy.core.", "numpy._core.", 1) if name.startswith("numpy.core.") else name
        if current.startswith("torch.optim."):  # torch.optim deletes the names of its own modules
            current = f"torch.optim.{current.rpartition('.')[2]}"
        modules.add(current.rpartition(".")[0] or "builtins")
        objects.append(f"({current}, {name!r})" if name.startswith(_MOVED) else current)
    if "numpy.dtype" in names:
        objects.append(_NUMPY_DTYPES)
    return f"import {', '.join(sorted(modules))}; torch.serialization.add_safe_globals([{', '.join(objects)}])"

"""Find pointers to a checkpoint that is not there: text files that a trainer reads first when it resumes.

Only local files are read, because each file at a URL takes a request.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DanglingPointer
from ckptmove.errors import LimitExceeded, UnreadableInput
from ckptmove.opening.detect import read_small

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.listing import Listing

#: DeepSpeed writes the name of a folder into it (deepspeed/runtime/engine.py ``save_checkpoint``).
_LATEST: Final = "latest"
#: Megatron and verl write the number of a folder into it, ``iter_0000100`` or ``global_step_100``, or ``release``.
_ITERATION: Final = "latest_checkpointed_iteration.txt"
_MOST_BYTES: Final = 1 << 10
_NAME: Final = re.compile(r"[\w.-]+")
_NUMBER: Final = re.compile(r"[0-9]+")


def dangling_pointers(listing: Listing) -> Iterator[DanglingPointer]:
    """The pointers of a directory that name what is not beside them.

    Other programs may write anything into a file ``latest``: it counts only if it names a ``global_step``, or if
    something beside it has the same name but for the numbers.
    """
    for file in () if listing.is_remote else listing.files:
        if file.name not in {_LATEST, _ITERATION} or file.is_hidden:
            continue
        text = ""
        with suppress(UnreadableInput, LimitExceeded):
            text = read_small(listing, file.path, _MOST_BYTES).decode("utf-8", "replace").strip()
        prefix = f"{file.folder}/" if file.folder else ""
        paths = [*listing.names, *(one.path for one in listing.folders)]
        beside = {
            path[len(prefix) :].partition("/")[0] for path in paths if path.startswith(prefix) and path != file.folder
        }
        if not _NAME.fullmatch(text) or text in beside:
            continue
        if file.name == _LATEST:
            alike = [name for name in beside if _form(name) == _form(text)]
            is_there = not (alike or text.startswith("global_step"))
        else:
            alike = [name for name in beside if _NUMBER.search(name) and "." not in name]
            is_there = text.isdecimal() and any(_last(name) == int(text) for name in alike)
        if not is_there:
            newest = max(alike, key=lambda name: (_last(name), name), default="")
            yield DanglingPointer(file.path, text, newest)


def _form(name: str) -> str:
    return _NUMBER.sub("0", name)


def _last(name: str) -> int:
    """The last number in a name; -1 without any."""
    numbers = _NUMBER.findall(name)
    return int(numbers[-1][:18]) if numbers else -1

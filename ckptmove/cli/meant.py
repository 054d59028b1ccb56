"""What whoever typed a command line without a command, or a path that is not there, may have meant by it.

Never opens a file: whether one is there is all that it asks.
"""

from __future__ import annotations

import difflib
import os
from glob import has_magic
from itertools import islice
from typing import TYPE_CHECKING, Final

from ckptmove.text import command_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

#: What other programs call the commands.
_SYNONYMS: Final[dict[str, str]] = {
    **dict.fromkeys(("check", "show", "info", "list", "ls", "scan", "view", "dump"), "inspect"),
    **dict.fromkeys(("move", "map", "remap", "load", "to", "cast"), "convert"),
    **dict.fromkeys(("test", "validate", "prove", "resume"), "verify"),
    **dict.fromkeys(("compare", "cmp"), "diff"),
    **dict.fromkeys(("explain", "codes", "findings"), "rules"),
}

#: Entries of a folder that are looked at for a path that was mistyped, and how much of it has to be right.
_MOST_ENTRIES: Final = 1000
_NEARLY: Final = 0.8


def with_command(program: str, words: Sequence[str], commands: Mapping[str, Collection[str]]) -> str:
    """What to type in place of words that do not begin with a command.

    Args:
        program: the name of the program.
        words: what was typed behind it; one at least.
        commands: each command with its options.

    Returns:
        A whole command line to type, or the names of the commands where nobody can tell.
    """
    first, rest = words[0], list(words[1:])
    if first.startswith("-"):
        return _behind(program, words, commands)
    close = difflib.get_close_matches(first.lower(), commands, n=1)
    name = "--help" if first == "help" else _SYNONYMS.get(first.lower()) or (close[0] if close else "")
    if _is_path(first):
        rest, name = list(words), next(_takers(words, commands), "")
    if not name:
        return f"the commands are {', '.join(commands)}: {program} --help"
    if name == "--help":
        return f"did you mean: {command_line([program, *rest, name])}"
    return f"did you mean: {command_line([program, name, *rest])}"


def _behind(program: str, words: Sequence[str], commands: Mapping[str, Collection[str]]) -> str:
    """An option before the command: the same behind it."""
    typed = next((name for name in commands if name in words), None)
    if typed is not None:
        at = words.index(typed)
        words = [*words[:at], *words[at + 1 :]]
    takers = [name for name in _takers(words, commands) if typed in {None, name}]
    if not takers or all(word.startswith("-") for word in words):
        return f"{program} --help"
    return f"options stand behind the command: {command_line([program, takers[0], *words])}"


def _takers(words: Sequence[str], commands: Mapping[str, Collection[str]]) -> Iterator[str]:
    """The commands that have every option among some words."""
    typed = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
    return (name for name, options in commands.items() if typed.issubset(options))


def beside(path: str) -> str:
    """The one path in the same folder that a path which is not there is nearly; empty where there is none."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder or ".") as entries:
            names = [entry.name for entry in islice(entries, _MOST_ENTRIES) if entry.name != name]
    except OSError:
        return ""
    return "".join(os.path.join(folder, near) for near in difflib.get_close_matches(name, names, n=1, cutoff=_NEARLY))  # noqa: PTH118  # a path stays as it was typed


def link_target(path: str) -> str:
    """Where a symbolic link leads, as it says; empty for what is none."""
    try:
        return os.readlink(path)  # noqa: PTH115  # it is told as it stands in the link
    except OSError:
        return ""


def _is_path(word: str) -> bool:
    return os.path.lexists(word) or has_magic(word) or bool(os.path.splitext(word)[1]) or bool(os.path.dirname(word))  # noqa: PTH120, PTH122  # a path stays as it was typed

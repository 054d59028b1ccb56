"""Guess the command or the path that a mistyped command line means."""

from __future__ import annotations

import difflib
import os
from glob import has_magic
from typing import TYPE_CHECKING, Final

from ckptmove.text import command_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

#: Names of the commands in other programs.
_SYNONYMS: Final[dict[str, str]] = {
    **dict.fromkeys(("check", "show", "info", "list", "ls", "scan", "view", "dump"), "inspect"),
    **dict.fromkeys(("move", "map", "remap", "to", "cast"), "convert"),
    **dict.fromkeys(("test", "validate", "prove", "resume"), "verify"),
    **dict.fromkeys(("compare", "cmp"), "diff"),
    **dict.fromkeys(("explain", "codes", "findings"), "rules"),
}


def with_command(program: str, words: Sequence[str], commands: Mapping[str, Collection[str]]) -> str:
    """Correct a command line that does not start with a command: a hint with a whole one, or with all commands."""
    first, rest = words[0], list(words[1:])
    if first.startswith("-"):
        return _options_last(program, words, commands)
    if first == "load" and not os.path.lexists(first):
        path = next((word for word in rest if not word.startswith("-")), "PATH")
        return f"load is a Python function: import ckptmove; checkpoint = ckptmove.load({path!r})"
    close = difflib.get_close_matches(first.lower(), commands, n=1)
    name = "--help" if first == "help" else _SYNONYMS.get(first.lower()) or (close[0] if close else "")
    is_path = os.path.lexists(first) or has_magic(first) or os.path.splitext(first)[1] or os.path.dirname(first)
    if is_path:
        rest, name = list(words), next(_takers(words, commands), "")
    if not name:
        return f"the commands are {', '.join(commands)}: {program} --help"
    if name == "--help":
        return f"did you mean: {command_line([program, *rest, name])}"
    return f"did you mean: {command_line([program, name, *rest])}"


def _options_last(program: str, words: Sequence[str], commands: Mapping[str, Collection[str]]) -> str:
    """Correct an option before the command: move it after the command."""
    typed = next((name for name in commands if name in words), None)
    if typed is not None:
        at = words.index(typed)
        words = [*words[:at], *words[at + 1 :]]
    takers = [name for name in _takers(words, commands) if typed in {None, name}]
    if not takers or all(word.startswith("-") for word in words):
        return f"{program} --help"
    return f"options come after the command: {command_line([program, takers[0], *words])}"


def _takers(words: Sequence[str], commands: Mapping[str, Collection[str]]) -> Iterator[str]:
    """The commands that have all options among the words."""
    typed = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
    return (name for name, options in commands.items() if typed.issubset(options))

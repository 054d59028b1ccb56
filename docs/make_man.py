"""Print the man page: every command with its options, as ``--help`` shows them. ``make docs`` writes the file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer

from ckptmove.api import failures
from ckptmove.cli.app import app
from ckptmove.cli.examples import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Exit codes with their meaning.
EXIT_CODES = (
    (0, "yes"),
    (1, "no: a finding is an error, a resume fails, or two checkpoints differ"),
    (failures.USAGE, "usage"),
    (3, "unreadable, damaged or unknown input"),
    (4, "refused: it would overwrite or lose something, or exceed a limit"),
    (5, "could not write"),
    (failures.BUG, "a bug, with its traceback"),
    (130, "interrupted by Ctrl-C"),
)
#: Characters that roff would change, or read as a command.
_GLYPHS = {"\\": "\\e", "-": "\\-", "'": "\\(aq", '"': "\\(dq", "^": "\\(ha", "`": "\\(ga", "~": "\\(ti"}
ENVIRONMENT = (
    ("CKPTMOVE_*", "Options of verify, for example CKPTMOVE_TO=cuda:0: docs/ci.md lists them."),
    ("CKPTMOVE_PROJECT_CODE", "1: verify also runs the code that pyproject.toml names (case, script, optimizer)."),
    ("NO_COLOR", "If it is set and not empty, no output has colors, on a terminal too."),
    ("FORCE_COLOR", "If it is set and not empty, output has colors, in a pipe too. NO_COLOR is stronger."),
    ("COLUMNS", "Width of the terminal."),
)


def page() -> str:
    """The man page as roff."""
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="ckptmove")
    first = re.split(r"\.\s", group.help)[0]
    commands = [(name, group.get_command(context, name)) for name in group.list_commands(context)]
    lines = [
        '.\\" Written by docs/make_man.py from the commands. Do not edit.',
        '.TH CKPTMOVE 1 "" ckptmove "User Commands"',
        ".SH NAME",
        text(f"ckptmove - {first[:1].lower()}{first[1:]}"),
        ".SH SYNOPSIS",
    ]
    for name, command in commands:
        arguments = " ".join(one.make_metavar(context) for one in command.params if one.param_type_name == "argument")
        lines += [f".B {text(f'ckptmove {name}')}", text(f"[OPTION]... {arguments}"), ".br"]
    lines += [".SH DESCRIPTION", *paragraphs(group.help)]
    for name, command in commands:
        own = group.context_class(command, info_name=name, parent=context)
        lines += [".SH " + text(f"ckptmove {name}").upper(), *paragraphs(command.help), *options(command, own)]
        lines += [".SS Examples", *examples(name)]
    lines += [".SH EXIT STATUS", *items((str(code), meaning) for code, meaning in EXIT_CODES)]
    lines += [".SH ENVIRONMENT", *items(ENVIRONMENT)]
    lines += [".SH FILES", *items([("pyproject.toml", "[tool.ckptmove] sets checkpoints and options: docs/ci.md.")])]
    return "\n".join(lines) + "\n"


def paragraphs(help_text: str) -> Iterator[str]:
    """The paragraphs of a command's help."""
    for part in help_text.strip().split("\n\n"):
        yield ".PP"
        yield text(" ".join(part.split()))


def options(command: Any, context: Any) -> Iterator[str]:
    """The arguments and options of a command by group, with their help."""
    for heading, records in command.groups(context).items():
        yield from (f".SS {text(heading)}", *items(records))


def items(pairs: Any) -> Iterator[str]:
    """A list of words with their meaning."""
    for word, meaning in pairs:
        yield ".TP"
        yield f".B {text(word)}"
        yield text(" ".join(meaning.split()))


def examples(name: str) -> Iterator[str]:
    """The examples of a command, as typed."""
    for line, meaning in EXAMPLES[name][0]:
        yield from (".TP", f".B {text(line)}", text(f"{meaning[:1].upper()}{meaning[1:]}." if meaning else ""))


def text(words: str) -> str:
    """Text as roff that shows exactly its characters."""
    escaped = "".join(_GLYPHS.get(letter, letter) for letter in words)
    return f"\\&{escaped}" if escaped.startswith(".") else escaped


if __name__ == "__main__":
    print(page(), end="")

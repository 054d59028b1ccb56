"""Run every command of ckptmove that its commands print, as a user pastes it into a shell."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from ckptmove.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: What users type for a checkpoint, whose path is left out.
ASKED = (
    "inspect",
    "inspect --expect cpu",
    "inspect --expect mps",
    "inspect --expect cuda:5 --devices 2",
    "convert --to cuda:0",
    "convert --to mps",
    "convert --to mps --in-place",
    "convert --dtype bf16",
    "convert --plain",
    "convert --strip-prefix",
    "convert --compact",
    "convert -o out.safetensors",
    "convert --only model -o out.safetensors",
    "convert --drop optimizer -o out.pth",
)
_COMMAND = re.compile(r"\bckptmove (?:inspect|convert|verify|diff|rules|newest)\b.*")
#: Where a command ends in a sentence.
_ENDS = frozenset({";", "&&", "|", "&"})
_BUG = 70


def printed(text: str) -> Iterator[list[str]]:
    """The commands in what a command has printed, without the name of the program."""
    for match in _COMMAND.finditer(text):
        lexer = shlex.shlex(match.group(), posix=True, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.commenters = True, ""
        words: list[str] = []
        for word in lexer:
            if word in _ENDS:
                break
            words.append(word)
        yield words[1:]


def failing(path: Path, asked: Sequence[str] = ASKED) -> list[str]:
    """What is wrong with the commands that are printed for a checkpoint; a line for each.

    ``inspect`` and ``diff`` may exit with 1 for what they show, and ``verify`` for what ``inspect`` could not see.
    """
    wrong: dict[str, None] = {}
    done: set[str] = set()
    for command in asked:
        first, *options = command.split()
        words = [first, path.name, *options]
        with tempfile.TemporaryDirectory() as scratch:
            before, after = Path(scratch) / "before", Path(scratch) / "after"
            before.mkdir()
            shutil.copytree(path, before / path.name) if path.is_dir() else shutil.copy(path, before)
            code, text = _run(words, before)
            if code == _BUG:
                wrong[f"{shlex.join(words)}: {text}"] = None
            for follower in printed(text):
                line = shlex.join(follower)
                if line in done:
                    continue
                done.add(line)
                shutil.copytree(before, after)
                followed, answer = _run(follower, after)
                shutil.rmtree(after)
                may_fail = follower[0] in {"inspect", "diff"} or (
                    first == "inspect" and follower[0] == "verify" and not code
                )
                if followed and not (followed == 1 and may_fail):
                    wrong[f"`{shlex.join(words)}` prints `{line}`, which exits with {followed}: {answer}"] = None
    return [*wrong]


def _run(words: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a command in a folder; return its exit code, and what it has printed."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(app, list(words))
    finally:
        os.chdir(here)
    return result.exit_code, result.stdout + result.stderr

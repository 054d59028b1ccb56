"""The project's own defaults: ``[tool.ckptmove]`` in the nearest ``pyproject.toml``.

Never looks for a checkpoint: it says which globs to look for, and where they start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from ckptmove.errors import UsageError, reason_of
from ckptmove.findings.codes import codes_of
from ckptmove.torch_facts.devices import parse_target

_NAME: Final = "pyproject.toml"
_KEYS: Final = ("checkpoints", "to", "case", "ignore", "strict")


class Config(NamedTuple):
    """What a project says once, so that nobody has to type it.

    Attributes:
        path: the file that says so; None where there is none.
        checkpoints: globs, as seen from the working directory.
        to: the device that checkpoints are for, or None.
        case: the function that returns the project's case, its file as seen from the working directory; or None.
        ignore: codes of findings that do not count here.
        strict: whether warnings, and a resume that is not proven, fail every command that has ``--strict``.
    """

    path: str | None = None
    checkpoints: tuple[str, ...] = ()
    to: str | None = None
    case: str | None = None
    ignore: tuple[str, ...] = ()
    strict: bool = False


def load_config(folder: Path) -> Config:
    """Read ``[tool.ckptmove]`` of the nearest ``pyproject.toml``, from a folder upwards.

    Args:
        folder: where to begin; the globs are returned as seen from there.

    Returns:
        Its values; all empty where there is no such file, or no such table in it.

    Raises:
        UsageError: the file cannot be read, is no TOML, or its table does not make sense: a device that torch does not
            know (UnknownDevice), or a code that no finding has.
    """
    try:
        folder = folder.absolute()
    except FileNotFoundError:
        return Config()  # the working directory has been removed: nothing is above it
    paths = (home / _NAME for home in (folder, *folder.parents))
    # Path.is_file raises PermissionError where a folder may not be searched: whatever is in it is not for this user.
    found = next((path for path in paths if os.path.isfile(path)), None)  # noqa: PTH113  # a path stays as it was typed: a Path would drop "./" and a slash at its end
    if found is None:
        return Config()
    table = _table(found)
    unknown = sorted(table.keys() - set(_KEYS))
    if unknown:
        raise UsageError(f"[tool.ckptmove] has no '{unknown[0]}'; it knows {', '.join(_KEYS)}", path=str(found))
    to, case = _string(table, "to", found), _string(table, "case", found)
    strict = table.get("strict", False)
    if not isinstance(strict, bool):
        raise UsageError("'strict' in [tool.ckptmove] is neither true nor false", path=str(found))
    start = os.path.relpath(found.parent, folder)
    config = Config(
        path=str(found),
        checkpoints=tuple(os.path.normpath(Path(start, glob)) for glob in _strings(table, "checkpoints", found)),
        to=to,
        case=None if case is None else _seen_from(start, case),
        strict=strict,
        ignore=_strings(table, "ignore", found),
    )
    _check(config)
    return config


def _check(config: Config) -> None:
    """Read what a command would read later, when nobody knows any more that it was not typed."""
    try:
        if config.to is not None:
            parse_target(config.to)
        codes_of(config.ignore)
    except UsageError as error:
        error.path = config.path
        raise


def _table(path: Path) -> dict[str, object]:
    import tomli  # noqa: PLC0415  # most folders have no such file

    try:
        document = tomli.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot be read: {reason_of(error)}", path=str(path)) from error
    except (UnicodeDecodeError, tomli.TOMLDecodeError, RecursionError) as error:
        # RecursionError: tomli's own limit on nested arrays.
        raise UsageError(f"is not TOML: {error}", path=str(path)) from error
    tools = document.get("tool", {})
    table = tools.get("ckptmove", {}) if isinstance(tools, dict) else {}
    if not isinstance(table, dict):
        raise UsageError("'tool.ckptmove' is not a table", path=str(path))
    return table


def _string(table: dict[str, object], key: str, path: Path) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"'{key}' in [tool.ckptmove] is not a string", path=str(path))
    return value


def _seen_from(start: str, case: str) -> str:
    """A case with the path of its file as seen from elsewhere; a module's name is the same everywhere."""
    home, colon, function = case.rpartition(":")
    return f"{os.path.normpath(Path(start, home))}{colon}{function}" if home.endswith(".py") else case


def _strings(table: dict[str, object], key: str, path: Path) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"'{key}' in [tool.ckptmove] is not a list of strings", path=str(path))
    return tuple(value)

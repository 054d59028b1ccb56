"""Defaults of a project: ``[tool.ckptmove]`` in the nearest ``pyproject.toml``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from ckptmove.errors import UsageError, reason_of

_NAME: Final = "pyproject.toml"
_KEYS: Final = ("checkpoints", "to", "case", "script", "script-args", "ignore", "strict")


class Config(NamedTuple):
    """Values of ``[tool.ckptmove]``.

    Attributes:
        path: the ``pyproject.toml``, or None if not found.
        checkpoints: globs, relative to the working directory.
        to: target device, or None.
        case: default of ``--case``, with its file relative to the working directory; or None.
        script: default of ``--script``, relative to the working directory; or None.
        script_args: default of its arguments.
        ignore: codes of findings not to report.
        strict: default of ``--strict``.
    """

    path: str | None = None
    checkpoints: tuple[str, ...] = ()
    to: str | None = None
    case: str | None = None
    script: str | None = None
    script_args: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    strict: bool = False


def load_config(folder: Path) -> Config:
    """Read ``[tool.ckptmove]`` of the nearest ``pyproject.toml``, in a folder or above it.

    Args:
        folder: first folder of the search; globs are returned relative to it.

    Returns:
        The values; all empty without a file or a table.

    Raises:
        UsageError: if the file cannot be read, is not TOML, or its table has a wrong key, type, device
            (UnknownDevice) or code, or both a case and a script.
    """
    try:
        folder = folder.absolute()
    except FileNotFoundError:
        return Config()  # the working directory was removed
    paths = (home / _NAME for home in (folder, *folder.parents))
    # Path.is_file raises PermissionError for a folder that this user may not search.
    found = next((path for path in paths if os.path.isfile(path)), None)
    if found is None:
        return Config()
    table = _table(found)
    unknown = sorted(table.keys() - set(_KEYS))
    if unknown:
        raise UsageError(
            f"unknown key '{unknown[0]}' in [tool.ckptmove]; the keys are {', '.join(_KEYS)}", path=str(found)
        )
    to, case, script = (_string(table, key, found) for key in ("to", "case", "script"))
    if case is not None and script is not None:
        raise UsageError("'case' and 'script' in [tool.ckptmove] exclude each other", path=str(found))
    strict = table.get("strict", False)
    if not isinstance(strict, bool):
        raise UsageError("'strict' in [tool.ckptmove] is not a boolean", path=str(found))
    start = os.path.relpath(found.parent, folder)
    config = Config(
        path=str(found),
        checkpoints=tuple(os.path.normpath(Path(start, glob)) for glob in _strings(table, "checkpoints", found)),
        to=to,
        case=None if case is None else _relative_case(start, case),
        script=None if script is None else os.path.normpath(Path(start, script)),
        script_args=_strings(table, "script-args", found),
        strict=strict,
        ignore=_strings(table, "ignore", found),
    )
    _check(config)
    return config


def _check(config: Config) -> None:
    """Check the device and the codes here, where the error can name the file."""
    from ckptmove.findings.codes import codes_of
    from ckptmove.torch_facts.devices import parse_target

    try:
        if config.to is not None:
            parse_target(config.to)
        codes_of(config.ignore)
    except UsageError as error:
        error.path = config.path
        raise


def _table(path: Path) -> dict[str, object]:
    import tomli

    try:
        document = tomli.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot be read: {reason_of(error)}", path=str(path)) from error
    except (UnicodeDecodeError, tomli.TOMLDecodeError, RecursionError) as error:
        # tomli raises RecursionError for deeply nested arrays.
        raise UsageError(f"not valid TOML: {error}", path=str(path)) from error
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


def _relative_case(start: str, case: str) -> str:
    """Make the file of a case relative to another folder; the name of a module stays."""
    home, colon, function = case.rpartition(":")
    return f"{os.path.normpath(Path(start, home))}{colon}{function}" if home.endswith(".py") else case


def _strings(table: dict[str, object], key: str, path: Path) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"'{key}' in [tool.ckptmove] is not a list of strings", path=str(path))
    return tuple(value)

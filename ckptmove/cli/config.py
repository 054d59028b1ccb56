"""Options that are not typed: from ``CKPTMOVE_*`` in the environment, then ``[tool.ckptmove]`` of ``pyproject.toml``.

Each option of ``verify`` is a key there and a variable here. Both are derived from the options themselves.

A ``pyproject.toml`` may have come with a downloaded checkpoint. Unless the user allows it, its table runs no code,
writes only below its folder, and hides no finding that warns of the folder itself.
"""

from __future__ import annotations

import os
import shlex
import warnings
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptmove.errors import UsageError, reason_of
from ckptmove.io.remote.address import is_url
from ckptmove.text import Argument, quoted, size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

_NAME: Final = "pyproject.toml"
_PREFIX: Final = "CKPTMOVE_"
_TABLE: Final = "[tool.ckptmove]"
#: Most bytes of the file: its parser takes seconds for some texts of this size.
_LARGEST: Final = 1 << 20
#: Pairs of options that exclude each other, each with the options that belong to the pair.
_EXCLUSIVE: Final = (("case", "script", "script_args"), ("json", "format"))
#: Names of types in TOML.
_KINDS: Final = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "a list of strings"}
#: The variable that allows a table what it may not do by itself.
ALLOWS_CODE: Final = f"{_PREFIX}PROJECT_CODE"
#: Keys whose code runs: a case, a script, an optimizer class of another module. Then what only their runs need, what
#: edits files, and what lets a file take more memory.
_CODE: Final = ("case", "script", "optimizer")
_WITH_CODE: Final = ("script_args", "fix", "dry_run", "limit_factor")
#: Keys with files that are written.
_WRITTEN: Final = frozenset({"junit", "report", "download"})
#: Options that write to files of the user. A near spelling does not suggest them.
WRITERS: Final = frozenset({"fix", "force", "in_place", "undo"})
#: Options of earlier versions that ``inspect --fit`` replaces.
MOVED: Final = frozenset({"fit", "device_memory"})
_USE_FIT: Final = "use ckptmove inspect PATH --fit NxSIZE"
#: Findings that warn of a hostile file.
_WARN: Final = frozenset({"S702", "F805", "F815"})
#: Words for a boolean in the environment, as Typer takes them.
_BOOLEANS: Final = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


class UnknownVariable(UserWarning):
    """A variable ``CKPTMOVE_*`` has the name of no option."""


class Config(NamedTuple):
    """The values that are set for a command."""

    path: str | None = None  # the `pyproject.toml`, or None if not found
    #: values by parameter. Paths of the ``pyproject.toml`` are relative to the working directory.
    values: Mapping[str, Any] = {}
    #: where each value is from: the path of the ``pyproject.toml``, or the name of the variable.
    sources: Mapping[str, str] = {}
    #: code of the ``pyproject.toml`` that is not allowed to run: for each key, the option that allows it.
    withheld: Mapping[str, str] = {}

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Globs of checkpoints."""
        return tuple(self.values.get("checkpoints", ()))

    @property
    def to(self) -> str | None:
        """Target device, or None."""
        to: str | None = self.values.get("to")
        return to

    @property
    def ignore(self) -> tuple[str, ...]:
        """Codes of findings not to report."""
        return tuple(self.values.get("ignore", ()))

    @property
    def strict(self) -> bool:
        """Default of ``--strict``."""
        return bool(self.values.get("strict"))


class _Value(NamedTuple):
    value: Any
    source: str


def load_config(
    folder: Path, settings: Callable[[], Mapping[str, type]], typed: Collection[str] = frozenset()
) -> Config:
    """Read the environment, and the nearest ``pyproject.toml`` in a folder or above it.

    Args:
        folder: first folder of the search; paths of the file are returned relative to it.
        settings: returns the types of all values by parameter: str, bool, int, float, or list for strings. It is
            called only if something is set.
        typed: parameters that were typed. Values that exclude one of them are left out.
    """
    path, table = _nearest(folder)
    texts = _variables()
    if not table and not texts:
        return Config(path)
    known = {"checkpoints": list, **settings()}
    texts = _known_only(texts, known)
    from_file = _of_table(table, known, path, folder) if path is not None else {}
    found: dict[str, _Value] = {}
    taken = {*typed}
    for layer, place in ((_of_environment(texts, known), "the environment"), (from_file, _TABLE)):
        _require_one(layer, place)
        excluded = {name for group in _EXCLUSIVE if taken.intersection(group[:2]) for name in group}
        found = {**{name: one for name, one in layer.items() if name not in excluded}, **found}
        taken |= layer.keys()
    _check(found)
    withheld = {} if path is None or _allows_code() else _withhold(found, path)
    values = {name: one.value for name, one in found.items()}
    return Config(path, values, {name: one.source for name, one in found.items()}, withheld)


def _variables() -> dict[str, str]:
    return {
        name: text for name, text in os.environ.items() if name.startswith(_PREFIX) and text and name != ALLOWS_CODE
    }


def _allows_code() -> bool:
    text = os.environ.get(ALLOWS_CODE, "")
    return bool(text and _from_text(text, bool, ALLOWS_CODE))


def _withhold(found: dict[str, _Value], path: str) -> dict[str, str]:
    """Take out what a table may not do by itself. Returns the option that allows it, for each key with code."""
    from ckptmove.findings.codes import codes_of

    own = {name: one.value for name, one in found.items() if one.source == path}
    hidden = sorted(codes_of(own.get("ignore", ())) & _WARN)
    if hidden:
        rest = f"type {Argument('ignore', hidden[0])}, or set {ALLOWS_CODE}=1"
        raise UsageError(f"'ignore' in {_TABLE} may not hide {hidden[0]}; {rest}", path=path)
    if own.get("select"):
        found["select"] = _Value([*own["select"], *sorted(_WARN)], path)
    withheld: dict[str, str] = {
        name: str(Argument(name, own[name]))
        for name in _CODE
        if name in own and (name != "optimizer" or ":" in own[name])
    }
    if "script" in withheld and own.get("script_args"):
        withheld["script"] += f" -- {' '.join(map(quoted, own['script_args']))}"
    for name in {*withheld, *_WITH_CODE} & own.keys():
        del found[name]
    return withheld


def _known_only(texts: Mapping[str, str], known: Mapping[str, type]) -> dict[str, str]:
    """Leave out variables of no option, with a warning: another program may have set them."""
    names = {parameter.upper() for parameter in known}
    own = {variable.removeprefix(_PREFIX): variable for variable in texts}
    for name in sorted(own.keys() - names):
        near = _near(name.lower(), known)
        meant = f"; did you mean {_PREFIX}{near.upper()}?" if near else ""
        meant = f"; {_USE_FIT}" if name.lower() in MOVED else meant
        warnings.warn(
            f"{own[name]} is ignored: no option of verify has this name{meant}", UnknownVariable, stacklevel=2
        )
    return {own[name]: texts[own[name]] for name in own.keys() & names}


def _near(name: str, known: Mapping[str, type]) -> str:
    """The parameter with a name close to an unknown one, unless it writes to files of the user; empty without one."""
    return "".join(one for one in get_close_matches(name, known, 1) if one not in WRITERS)


def _require_one(layer: Mapping[str, _Value], place: str) -> None:
    for first, second, *_ in _EXCLUSIVE:
        if first in layer and second in layer:
            raise UsageError(f"'{first}' and '{second}' in {place} exclude each other", path=layer[first].source)


def _check(found: Mapping[str, _Value]) -> None:
    """Check what several commands read, here, where the error can name the source."""
    from ckptmove.findings.codes import codes_of
    from ckptmove.torch_facts.devices import parse_target

    checks: dict[str, Callable[[Any], object]] = {"to": parse_target, "ignore": codes_of, "select": codes_of}
    for name in checks.keys() & found.keys():
        with from_source(found[name].source):
            checks[name](found[name].value)


@contextmanager
def from_source(source: str) -> Iterator[None]:
    """Name the source of a value in the error of its check."""
    try:
        yield
    except UsageError as error:
        error.path = source
        raise


def set_format(folder: Path) -> str:
    """The report format that is set, for an error that can be about another setting; empty if none is."""
    known = {"json": bool, "format": str}
    found: dict[str, _Value] = {}
    with suppress(UsageError):
        found = _of_environment(_variables(), known)
        if not found:
            path, table = _nearest(folder)
            found = _of_table({key: table[key] for key in table.keys() & known}, known, path or "", folder)
    if "format" in found:
        return str(found["format"].value)
    return "json" if "json" in found and found["json"].value else ""


def set_reports(folder: Path) -> dict[str, list[str]]:
    """The files of reports that are set, by option, for an error that can be about another setting."""
    known = {"report": list, "junit": str}
    found: dict[str, _Value] = {}
    with suppress(UsageError):
        path, table = _nearest(folder)
        found = _of_table({key: table[key] for key in table.keys() & known}, known, path or "", folder)
    with suppress(UsageError):
        found |= _of_environment(_variables(), known)
    values = {name: one.value for name, one in found.items()}
    return {f"--{name}": value if isinstance(value, list) else [value] for name, value in values.items()}


def _of_environment(texts: Mapping[str, str], known: Mapping[str, type]) -> dict[str, _Value]:
    names = {parameter: _PREFIX + parameter.upper() for parameter in known}
    return {
        parameter: _Value(_from_text(texts[name], known[parameter], name), name)
        for parameter, name in names.items()
        if name in texts
    }


def _from_text(text: str, kind: type, name: str) -> object:
    try:
        if kind is list:
            return shlex.split(text)
        return _BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise UsageError(f"'{text:.200}' is not {_KINDS[kind]}", path=name) from None


def _of_table(table: Mapping[str, object], known: Mapping[str, type], path: str, folder: Path) -> dict[str, _Value]:
    keys = {parameter.replace("_", "-"): parameter for parameter in known}
    unknown = sorted(table.keys() - keys.keys())
    if unknown:
        parameter = unknown[0].replace("-", "_")
        near = _near(parameter, known).replace("_", "-")
        rest = f"did you mean '{near}'?" if near else "the keys are 'checkpoints' and the options of verify"
        rest = _USE_FIT if parameter in MOVED else rest
        raise UsageError(f"unknown key '{unknown[0]}' in {_TABLE}; {rest}", path=path)
    start = os.path.relpath(Path(path).parent, folder.absolute())
    found: dict[str, _Value] = {}
    for key, value in table.items():
        kind = known[keys[key]]
        if not _is_of(value, kind):
            raise UsageError(f"'{key}' in {_TABLE} is not {_KINDS[kind]}", path=path)
        if key in _WRITTEN and not _allows_code():
            _require_below(key, value, path)
        found[keys[key]] = _Value(_relative(keys[key], value, start), path)
    return found


def _require_below(key: str, value: Any, path: str) -> None:
    """Refuse a file that is not below the folder of the table, also by a link."""
    files = [word.partition("=")[2] for word in value] if key == "report" else [value]
    home = os.path.realpath(Path(path).parent)
    for file in files:
        try:
            real = os.path.realpath(Path(home, file))
        except ValueError:  # a null byte
            real = ""
        if not real.startswith(home.rstrip(os.sep) + os.sep):
            rest = f"type --{key}, or set {ALLOWS_CODE}=1"
            raise UsageError(f"'{key}' in {_TABLE} may not write outside of its folder; {rest}", path=path)


def _is_of(value: object, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind is float:
        return type(value) in {int, float}
    return type(value) is kind


def _relative(parameter: str, value: Any, start: str) -> Any:
    """The value with its path, if it is or has one, relative to another folder."""
    if parameter in {"script", "against", "junit", "download"}:
        return os.path.normpath(Path(start, value))
    if parameter == "checkpoints":
        return [glob if is_url(glob) else os.path.normpath(Path(start, glob)) for glob in value]
    if parameter == "report":
        pairs = [word.partition("=") for word in value]
        return [f"{kind}{equals}{os.path.normpath(Path(start, path))}" for kind, equals, path in pairs]
    if parameter == "case":
        home, colon, function = value.rpartition(":")  # the name of a module stays
        return f"{os.path.normpath(Path(start, home))}{colon}{function}" if home.endswith(".py") else value
    return value


def _nearest(folder: Path) -> tuple[str | None, dict[str, object]]:
    """The path of the nearest ``pyproject.toml`` and its table; None and an empty one if not found."""
    try:
        folder = folder.absolute()
    except FileNotFoundError:
        return None, {}  # the working directory was removed
    paths = (home / _NAME for home in (folder, *folder.parents))
    # Path.is_file raises PermissionError for a folder that this user may not search.
    found = next((path for path in paths if os.path.isfile(path)), None)
    return (None, {}) if found is None else (str(found), _table(found))


def _table(path: Path) -> dict[str, object]:
    import tomli

    try:
        if path.stat().st_size > _LARGEST:
            raise UsageError(f"larger than {size(_LARGEST)}, too large for a project", path=str(path))
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

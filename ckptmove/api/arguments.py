"""The arguments that users of torch pass: paths, devices, ``map_location``, and changes of keys, parts and dtypes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol, TypeAlias, TypeVar

from ckptmove.errors import UsageError
from ckptmove.io.file_object import location_of
from ckptmove.io.locations import OpenFile
from ckptmove.io.remote.address import as_location
from ckptmove.torch_facts.devices import parse_mapping, parse_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.moves import MoveRequest, Remap, RemapOptions


class OutputsCollide(UsageError):
    """Two checkpoints would be written to one path."""

    def __init__(self, first: str, second: str, output: str) -> None:
        super().__init__(f"'{first:.200}' and '{second:.200}' would both be written as {output}")


class NotAccepted(UsageError):
    """An argument is of a type, or has a value, that a function does not accept.

    Attributes:
        instead: what to pass instead; may be empty.
    """

    def __init__(self, message: str, instead: str = "") -> None:
        super().__init__(message)
        self.instead = instead


def optimizer_name(optimizer: str | type[Any] | None) -> str | None:
    """Name by which another process imports an optimizer class: ``Adam`` of ``torch.optim``, or ``pkg.mod:CLASS``.

    Raises:
        NotAccepted: if it is no class, or in no module that another process can import.
    """
    if optimizer is None or isinstance(optimizer, str):
        return optimizer
    if not isinstance(optimizer, type):
        wrong = f"an optimizer is a class or its name, not {type(optimizer).__name__}"
        raise NotAccepted(wrong, "pass its class; its options are in the checkpoint")
    home, name = optimizer.__module__, optimizer.__qualname__
    if home == "__main__" or not all(map(str.isidentifier, name.split("."))):
        raise NotAccepted(f"no other process can import {name}", "define it at the top level of a module")
    return name if home.startswith("torch.optim.") else f"{home}:{name}"


def of_type(value: Any, name: str, example: str | int) -> Any:
    """The value of an argument, or None.

    Raises:
        NotAccepted: if it is not of the type of the example.
    """
    if value is not None and not isinstance(value, type(example)):
        wrong = f"{name} takes a value of type {type(example).__name__}, not {type(value).__name__}"
        raise NotAccepted(wrong, f"pass for example {name}={example!r}")
    return value


class DeviceLike(Protocol):
    """A ``torch.device``: its ``str`` is the device string. A protocol, since torch need not be installed."""

    @property
    def type(self) -> str:
        """``cuda``."""
        ...

    @property
    def index(self) -> int | None:
        """``0`` of ``cuda:0``."""
        ...


FilePath: TypeAlias = "str | os.PathLike[str]"
Device: TypeAlias = "str | DeviceLike"
#: What to do with other types of paths.
_OTHER_PATHS: Final[dict[type, str]] = {
    **dict.fromkeys((bytes, bytearray, memoryview), "pass the bytes of a file as io.BytesIO(data)"),
    **dict.fromkeys((list, tuple, set), "call the function once for each path"),
}
_F = TypeVar("_F", bound=Callable[..., Any])
#: As in ``torch.load``, except a function, which needs loaded storages and is refused.
MapLocation: TypeAlias = "Device | Mapping[str, Device]"


def location(path: FilePath | BinaryIO) -> str:
    """The path as text; a URL as an :class:`~ckptmove.io.remote.address.Address`, whose text has no credentials.

    A file object without a path becomes an :class:`~ckptmove.io.file_object.OpenFile`.

    Raises:
        UsageError: if it is neither a path nor a binary file object.
    """
    if isinstance(path, str | os.PathLike):
        return as_location(path)
    if not hasattr(path, "read"):
        kind: type = type(path)
        message = f"a checkpoint is a str, a Path or a binary file object, not {kind.__name__}"
        raise NotAccepted(message, _OTHER_PATHS.get(kind, ""))
    return location_of(path)


def words(value: str | Iterable[str]) -> tuple[str, ...]:
    """One word or several; a string is one word, although it is a sequence."""
    return (value,) if isinstance(value, str) else tuple(value)


def written_path(path: FilePath, name: str) -> str:
    """A path to write to, or of a script, as text.

    Raises:
        UsageError: if it is not a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise NotAccepted(f"{name} takes a str or a Path, not {type(path).__name__}")
    return os.fspath(path)


def local_path(path: FilePath | BinaryIO, what: str) -> str:
    """The path as text, for what cannot be done with a file object.

    Raises:
        UsageError: if it is a file object without a path.
    """
    found = location(path)
    if isinstance(found, OpenFile):
        raise UsageError(f"{what} a path, not a file object")
    return found


def targets(to: Device | None, map_location: MapLocation | None) -> tuple[str | None, Mapping[str, str]]:
    """The one target and the mapping that ``to`` and ``map_location`` define."""
    if callable(map_location):
        raise NotAccepted(
            "map_location takes a device or a dict, not a function, which would move loaded storages",
            'pass map_location="cpu" in place of: lambda storage, loc: storage',
        )
    if isinstance(map_location, Mapping):
        return device_text(to), {str(source): str(device) for source, device in map_location.items()}
    if to is not None and map_location is not None and parse_target(str(to)) != parse_target(str(map_location)):
        raise UsageError(f"two targets: to={str(to)!r} and map_location={str(map_location)!r}")
    return device_text(map_location if to is None else to), {}


def named_remap(function: _F) -> _F:
    """Name the parameters behind ``**remap`` in the signature of a function, for ``help`` and completion."""
    from ckptmove.moves import Remap, RemapOptions

    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    named = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if name == "only" else Remap._field_defaults[name],  # an empty one is refused
            annotation=annotation.__forward_arg__,
        )
        for name, annotation in RemapOptions.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]  # read by inspect
    return function


def remap_of(options: RemapOptions) -> Remap:
    """The options of a remapping, from the arguments of :func:`convert`."""
    from ckptmove.conversion.remap.options import remap_options
    from ckptmove.moves import Remap

    unknown = sorted(options.keys() - set(Remap._fields))
    if unknown:
        close = "".join(f"; did you mean '{name}'?" for name in get_close_matches(unknown[0], Remap._fields, 1))
        raise TypeError(f"unexpected keyword argument '{unknown[0]}'{close}")
    return remap_options(**{name: _typed(value, Remap._field_defaults[name]) for name, value in options.items()})


def _typed(value: object, default: object) -> object:
    """The value of an argument as typed on the command line; None for an option that is not typed."""
    if isinstance(default, bool | str):
        return value
    if isinstance(value, Mapping):
        return [f"{old}={new}" for old, new in value.items()]
    if isinstance(value, str):
        return [value]
    if isinstance(value, bool):
        return [""] if value else None
    return value if value is None or isinstance(value, Iterable) else [str(value)]  # a torch.dtype


def device_text(device: Device | None) -> str | None:
    """The device as text: a ``torch.device`` or a string."""
    return None if device is None else str(device)


def move_request(
    to: str | None,
    map_location: Mapping[str, str],
    keep: str | Sequence[str],
    *,
    cast: bool,
    rewrite_strings: bool,
    remap: Remap | None = None,
) -> MoveRequest:
    """The changes of a conversion, with its devices checked.

    Raises:
        UsageError: if a device is unknown, or a glob is empty.
    """
    from ckptmove.moves import MoveRequest, Remap, checked_globs

    return MoveRequest(
        to=parse_target(to) if to is not None else None,
        mapping=tuple(parse_mapping(f"{source}={device}") for source, device in map_location.items()),
        keep=checked_globs("--keep", keep),
        cast=cast,
        rewrite_strings=rewrite_strings,
        remap=remap or Remap(),
    )

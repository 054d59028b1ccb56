"""A command whose options can be set in the environment and in ``pyproject.toml``."""

from __future__ import annotations

from contextlib import suppress
from inspect import signature
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

import typer

from ckptmove.cli.config import from_source, load_config
from ckptmove.cli.typed import TypedCommand
from ckptmove.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_KINDS: Final = (str, bool, int, float, list)
#: Parameters that are no settings. The checkpoints have a key of their own.
_TYPED_ONLY: Final = frozenset({"paths", "version", "help"})


def settings_of(command: Callable[..., object]) -> Mapping[str, type]:
    """The types of the options of a command, by parameter; list for a list of strings."""
    found = {name: _kind(one.annotation) for name, one in signature(command, eval_str=True).parameters.items()}
    return {name: kind for name, kind in found.items() if kind in _KINDS and name not in _TYPED_ONLY}


def _kind(annotation: Any) -> type:
    """A type without its notes, its None and the type of its items."""
    bare = annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation
    (kind,) = [one for one in get_args(bare) if one is not NoneType] if get_origin(bare) is UnionType else [bare]
    plain: type = get_origin(kind) or kind
    return plain


def runs_script(words: Sequence[str], command: Any) -> bool:
    """Whether a command runs a script, which is typed or set.

    Args:
        words: the typed words before ``--``.
        command: the command.
    """
    options = {word.partition("=")[0] for word in words}
    if "--script" in options or "--case" in options or not isinstance(command, ConfiguredCommand):
        return "--script" in options
    callback: Any = command.callback
    with suppress(UsageError):  # the command raises it again
        return "script" in load_config(Path(), lambda: settings_of(callback)).values
    return False


class ConfiguredCommand(TypedCommand):
    """Gives the options that are not typed the values that are set. The command gets the Config as ``context.obj``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command. Those after ``--`` are for the script, if there is one."""
        own = [*takewhile("--".__ne__, args)]
        if len(own) < len(args) and runs_script(own, self):
            args = own + [f"--script-arg={word}" for word in args[len(own) + 1 :]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            UsageError: as :func:`ckptmove.cli.config.load_config`, and if a value is invalid. Its path is the source.
        """
        named = {str(one.name): one for one in self.params}
        typed = {name for name in named if ctx.get_parameter_source(name).name == "COMMANDLINE"}
        config = ctx.obj = load_config(Path(), lambda: settings_of(ctx.command.callback), typed)
        for name in named.keys() & config.values.keys() - typed:
            with from_source(config.sources[name]):
                ctx.params[name] = _processed(ctx, named[name], config.values[name])
        return super().invoke(ctx)


def _processed(ctx: Any, parameter: Any, value: Any) -> Any:
    """The value as Typer passes a typed one. Words that the command parses later are parsed here, for their errors."""
    from ckptmove.cli.render.report_files import open_document
    from ckptmove.conversion.remap.options import remap_options
    from ckptmove.conversion.shards import parse_size
    from ckptmove.moves import Remap

    try:
        processed = parameter.process_value(ctx, value)
    except typer.BadParameter as error:
        raise UsageError(error.format_message()) from error
    if parameter.name in Remap._fields:
        remap_options(**{parameter.name: processed})
    elif parameter.name == "report":
        for word in processed:
            open_document(word)
    elif parameter.name == "device_memory":
        parse_size(processed)
    return processed

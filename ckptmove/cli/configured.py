"""Commands whose options can be set in the environment and in ``pyproject.toml``, and typed once."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from inspect import signature
from itertools import pairwise, takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperOption

from ckptmove.cli.config import from_source, load_config
from ckptmove.cli.options import Group
from ckptmove.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

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
    """Whether a command has a script, also one that may not run: typed in the words before ``--``, or set."""
    options = {word.partition("=")[0] for word in words}
    if "--script" in options or "--case" in options or not isinstance(command, ConfiguredCommand):
        return "--script" in options
    callback: Any = command.callback
    with suppress(UsageError):  # the command raises it again
        config = load_config(Path(), lambda: settings_of(callback))
        return "script" in config.values or "script" in config.withheld
    return False


class TypedCommand(TyperCommand):
    """A command whose help shows its options in groups, and that takes each option once.

    Typer takes the last value of an option that is typed twice, and ``-o`` as the value of ``--only -o``.
    """

    def groups(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """The help of the arguments and options by heading, as far as there are any."""
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in ("Arguments", *Group)}
        parameters: Sequence[Any] = self.get_params(ctx)
        for parameter in parameters:
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups[parameter.rich_help_panel or "Arguments"].append(record)
        return {heading: records for heading, records in groups.items() if records}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the groups, each under its heading."""
        for heading, records in self.groups(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        from ckptmove.cli.examples import epilog

        self.epilog = epilog(self.name or "")
        super().format_epilog(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command."""
        if not ctx.resilient_parsing:
            own = _with_bare_prefix([*takewhile("--".__ne__, args)])
            args = own + args[len(own) :]
            for fault in _faults(own, [one for one in self.params if isinstance(one, TyperOption)]):
                ctx.fail(fault)
        return super().parse_args(ctx, args)


class ConfiguredCommand(TypedCommand):
    """Gives the options that are not typed the values that are set. The command gets the Config as ``context.obj``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command. Those after ``--`` are for the script, if there is one."""
        own = [*takewhile("--".__ne__, args)]
        if len(own) < len(args) and runs_script(own, self):
            args = own + [f"--script-arg={word}" for word in args[len(own) + 1 :]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
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

    try:
        processed = parameter.process_value(ctx, value)
    except typer.BadParameter as error:
        raise UsageError(error.format_message()) from error
    if parameter.name == "report":
        for word in processed:
            open_document(word)
    return processed


def _with_bare_prefix(words: list[str]) -> list[str]:
    """Words in which a bare ``--strip-prefix`` has an empty value, which means the prefixes of known wrappers.

    The next word is its value if it is a prefix and not a path: it ends with a dot, or is the name of a wrapper.
    """
    if "--strip-prefix" not in words:
        return words
    from ckptmove.checkpoint.state_dicts import WRAPPERS

    found: list[str] = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        is_prefix = f"{following}." in WRAPPERS or (following.endswith(".") and set(following) != {"."})
        found.append("--strip-prefix=" if word == "--strip-prefix" and not is_prefix else word)
    return found


def _faults(words: Sequence[str], options: Sequence[Any]) -> Iterator[str]:
    """Iterate over the faults of a command line, in words."""
    known = {name: option for option in options for name in option.opts}
    takers = {name: option for name, option in known.items() if not (option.is_flag or option.count)}
    for word, following in pairwise(words):
        if word in takers and following.partition("=")[0] in known:
            yield f"Option '{word}' requires an argument, and '{following}' is an option."
    typed = Counter(takers[name].opts[0] for name in _named(words, takers))
    for name, count in typed.items():
        if count > 1 and not takers[name].multiple:
            yield f"Option '{name}' is typed {count} times, and takes one value."


def _named(words: Sequence[str], takers: Collection[str]) -> Iterator[str]:
    """Iterate over the typed options with a value, which may be attached: ``--to=cpu``, ``-ox.pth``."""
    is_value = False
    for word in words:
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        if not is_value and name in takers:
            yield name
            is_value = word == name
        else:
            is_value = False

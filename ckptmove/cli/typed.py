"""A command that refuses options that are typed twice, and values that are options."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperOption

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence


class TypedCommand(TyperCommand):
    """Typer takes the last value of an option that is typed twice, and ``-o`` as the value of ``--only -o``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command.

        Raises:
            UsageError: of Typer, if an option is typed twice or has another option as its value.
        """
        if not ctx.resilient_parsing:
            for fault in _faults([*takewhile("--".__ne__, args)], [one for one in self.params if _is_option(one)]):
                ctx.fail(fault)
        return super().parse_args(ctx, args)


def _is_option(parameter: object) -> bool:
    return isinstance(parameter, TyperOption)


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

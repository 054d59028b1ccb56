"""Options as Typer reads them: their groups in ``--help``, and those that several commands share."""

from __future__ import annotations

from enum import Enum
from functools import cached_property, update_wrapper
from inspect import Parameter, Signature, signature
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, get_type_hints

import typer

from ckptmove import __version__
from ckptmove.cli import completion
from ckptmove.cli.render.formats import DEFAULT, DOCUMENTS, RENDERERS
from ckptmove.cli.streams import write_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Group(str, Enum):
    """Headings of ``--help``, in their order."""

    QUESTION = "Question"
    TARGET = "Target"
    CONTENTS = "Keys, parts and dtypes"
    CODE = "Your code"
    OUTPUT = "Output"
    SCALE = "Scale"
    REPORTS = "Reports"
    HELP = "Help"

    __str__ = str.__str__

    def flag(self, names: str, help: str, **more: Any) -> Any:  # noqa: A002  # Typer's name
        """An option without a value; ``names`` are its spellings, separated by spaces."""
        return typer.Option(*names.split(), help=help, rich_help_panel=self, **more)

    def option(self, metavar: str, help: str, *names: str, **more: Any) -> Any:  # noqa: A002  # Typer's name
        """An option with a value. Its help says what happens without one, unless ``show_default`` does."""
        return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=self, **{"show_default": False, **more})


def _show_version(wanted: bool) -> None:
    if wanted:
        write_answer(f"ckptmove {__version__}\n")
        raise typer.Exit


def _show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        write_answer(f"{context.get_help()}\n")
        raise typer.Exit


def _any_of(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def _format_of(word: str) -> str:
    if word in DOCUMENTS and word not in RENDERERS:
        raise typer.BadParameter(f"{word!r} is a report in a file: --report {word}=FILE.")
    if word not in RENDERERS:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(map(repr, RENDERERS))}.")
    return word


Paths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATH]...",
        help="Checkpoints: files, directories, archives, URLs or quoted globs (default: 'checkpoints' of "
        "[tool.ckptmove] in pyproject.toml).",
        show_default=False,
    ),
]
To = Annotated[
    str | None, Group.TARGET.option("DEV", "Target device: cpu, cuda:0, mps.", autocompletion=completion.devices)
]
Keep = Annotated[
    list[str] | None, Group.TARGET.option("GLOB", "Tensors that stay on their device, by name. Repeatable.")
]
Select = Annotated[
    list[str] | None,
    Group.REPORTS.option("CODE", "Report only these findings. Repeatable.", autocompletion=completion.codes),
]
Ignore = Annotated[
    list[str] | None,
    Group.REPORTS.option("CODE", "Do not report these findings. Repeatable.", autocompletion=completion.codes),
]
Devices = Annotated[
    int | None,
    Group.TARGET.option(
        "N", "Number of devices of the target machine.", "--devices", min=1,
        show_default="as many as the target needs, or else the file",
    ),
]  # fmt: skip
Jobs = Annotated[
    int | None,
    Group.SCALE.option(
        "N", "Number of checkpoints, files or processes at once.", "--jobs", min=1, max=256,
        show_default="the cores; 8 for URLs",
    ),
]  # fmt: skip
LimitFactor = Annotated[
    int,
    Group.SCALE.option(
        "N", "Raise every resource limit N-fold, for a file you trust.", min=1, max=1000, show_default=True
    ),
]
Version = Annotated[bool, Group.HELP.flag("--version -V", "Show the version.", callback=_show_version, is_eager=True)]
#: Replaces Typer's own --help, which reports a bug if stdout cannot be written.
Help = Annotated[bool, Group.HELP.flag("--help -h", "Show this message.", callback=_show_help, is_eager=True)]
Report = Annotated[
    list[str] | None,
    Group.REPORTS.option(
        "KIND=FILE",
        f"Also write a report to a file: {_any_of(DOCUMENTS)}. Repeatable.",
        "--report",
        autocompletion=completion.report_kinds,
    ),
]


class OutputOptions(NamedTuple):
    """The last options of every command; those of its report, by field."""

    json: Annotated[bool, Group.REPORTS.flag("--json", "Short for --format json.")] = False
    format: Annotated[
        str | None,
        Group.REPORTS.option(
            f"<{'|'.join(RENDERERS)}>",
            "Report format; github means annotations, jsonl one line of JSON per checkpoint.",
            "--format",
            parser=_format_of,
            autocompletion=completion.formats,
            show_default=DEFAULT,
        ),
    ] = None
    quiet: Annotated[bool, Group.REPORTS.flag("--quiet -q", "Print one line per checkpoint.")] = False
    verbose: Annotated[bool, Group.REPORTS.flag("--verbose -v", "Print every place and every figure.")] = False
    version: Version = False
    help: Help = False


class TakesRecords:
    """A command with parameters that Typer sees as several options: a remapping and a report.

    The command gets ``remap`` as a dict with the values as they were typed, by field of :class:`ckptmove.moves.Remap`;
    that class is imported only for a command that Typer builds. It gets ``out`` as :class:`OutputOptions`.
    """

    def __init__(self, command: Callable[..., None]) -> None:
        self._command = command
        update_wrapper(self, command)

    def __call__(self, **given: Any) -> None:
        """Run the command."""
        for name in _RECORDS.keys() & signature(self._command).parameters.keys():
            fields, record = _RECORDS[name]
            given[name] = record(**{field.name: given.pop(field.name) for field in fields()})
        self._command(**given)

    @cached_property
    def __signature__(self) -> Signature:
        """The parameters that Typer reads."""
        own = signature(self._command, eval_str=True)
        each = (_RECORDS[one.name][0]() if one.name in _RECORDS else [one] for one in own.parameters.values())
        return own.replace(parameters=[*chain.from_iterable(each)])


#: Completions of the options of a remapping.
_COMPLETIONS: Final = {"only": completion.parts, "drop": completion.parts, "dtype": completion.dtypes}


def _remap_parameters() -> Iterator[Parameter]:
    from ckptmove.moves import Remap

    for name, hint in get_type_hints(Remap, include_extras=True).items():
        default, (option,) = Remap._field_defaults[name], hint.__metadata__
        start, kind = (default, type(default)) if isinstance(default, str | bool) else (None, list[str] | None)
        info = typer.Option(
            start,
            f"--{name.replace('_', '-')}",
            metavar=option.metavar or None,
            autocompletion=_COMPLETIONS.get(name),
            help=option.help,
            rich_help_panel=Group.CONTENTS,
            show_default=False,
        )
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=info, annotation=kind)


def _output_parameters() -> Iterator[Parameter]:
    for name, hint in get_type_hints(OutputOptions, include_extras=True).items():
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=OutputOptions._field_defaults[name], annotation=hint)


#: Parameters that Typer sees as several options: those options, and what the command gets.
_RECORDS: Final[dict[str, tuple[Callable[[], Iterator[Parameter]], Callable[..., object]]]] = {
    "remap": (_remap_parameters, dict),
    "out": (_output_parameters, OutputOptions),
}

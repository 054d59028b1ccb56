"""Options that several commands share, as Typer reads them."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptmove import __version__
from ckptmove.cli.render.registry import DEFAULT, RENDERERS
from ckptmove.cli.streams import write_answer


def _show_version(wanted: bool) -> None:
    if wanted:
        write_answer(f"ckptmove {__version__}\n")
        raise typer.Exit


def _show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        write_answer(f"{context.get_help()}\n")
        raise typer.Exit


def _format_of(word: str) -> str:
    if word not in RENDERERS:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(map(repr, RENDERERS))}.")
    return word


Paths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATH]...",
        help="Checkpoints: files, directories, archives or quoted globs (default: 'checkpoints' of [tool.ckptmove] in "
        "pyproject.toml).",
        show_default=False,
    ),
]
To = Annotated[str | None, typer.Option(metavar="DEV", help="Target device: cpu, cuda:0, mps.", show_default=False)]
Keep = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Tensors that stay on their device, by name. Repeatable.", show_default=False),
]
Select = Annotated[
    list[str] | None,
    typer.Option(metavar="CODE", help="Report only these findings. Repeatable.", show_default=False),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="CODE", help="Do not report these findings. Repeatable.", show_default=False),
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices", metavar="N", min=1, help="Number of devices of the target machine.",
        show_default="as many as the file and the target name",
    ),
]  # fmt: skip
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit 1 on warnings too; with verify, also if the resume is not proven.")
]
LimitFactor = Annotated[
    int,
    typer.Option(metavar="N", min=1, max=1000, help="Raise every resource limit N-fold, for a file you trust."),
]
StripPrefix = Annotated[
    list[str] | None,
    typer.Option(
        "--strip-prefix",
        metavar="[PREFIX.]",
        help="Remove a prefix from keys of state_dicts (default: those of known wrappers). Repeatable.",
        show_default=False,
    ),
]
AddPrefix = Annotated[
    str,
    typer.Option("--add-prefix", metavar="PREFIX.", help="Add a prefix to keys of state_dicts.", show_default=False),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="OLD=NEW", help="Rename keys: 'backbone.*=encoder.*'. Repeatable.", show_default=False
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB|ROLE", help="Keep only these parts: model, 'model.encoder.*'. Repeatable.", show_default=False
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB|ROLE", help="Leave out these parts: optimizer. Repeatable.", show_default=False),
]
AsRoot = Annotated[
    str,
    typer.Option(
        "--as-root", metavar="KEY", help="Write the value at this key as the whole file: ema.", show_default=False
    ),
]
Compact = Annotated[bool, typer.Option("--compact", help="Write each storage only as far as its tensors reach.")]
Plain = Annotated[
    bool,
    typer.Option("--plain", help="Replace objects by plain values, so that weights_only=True loads the file."),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[ROLE=]DTYPE",
        help="Cast floating tensors of the model, or of a role: bf16, optimizer=fp32. Repeatable.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Short for --format json.")]
Form = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar=f"<{'|'.join(RENDERERS)}>",
        parser=_format_of,
        autocompletion=lambda: list(RENDERERS),
        help="Report format; github means annotations.",
        show_default=DEFAULT,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print one line per checkpoint.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every place and every figure.")]
Version = Annotated[
    bool,
    typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
]
#: Replaces Typer's own --help, which reports a bug if stdout cannot be written.
Help = Annotated[
    bool,
    typer.Option("--help", "-h", callback=_show_help, is_eager=True, help="Show this message."),
]

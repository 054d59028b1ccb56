"""The options of the commands, as Typer reads them: names, help and bounds.

Never says what an option does to a checkpoint beyond its line of help.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ckptmove import __version__
from ckptmove.cli.streams import Format, write_answer


def _show_version(wanted: bool) -> None:
    if wanted:
        write_answer(f"ckptmove {__version__}\n")
        raise typer.Exit


def _show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        write_answer(f"{context.get_help()}\n")
        raise typer.Exit


Paths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATH]...",
        help="Checkpoints: files, directories, archives, or globs in quotes. Without one: 'checkpoints' of "
        "[tool.ckptmove] in pyproject.toml.",
        show_default=False,
    ),
]
Path = Annotated[
    str | None,
    typer.Argument(
        metavar="PATH",
        help="The checkpoint: a file, a directory or an archive of files. Without it: the one that [tool.ckptmove] in "
        "pyproject.toml names.",
        show_default=False,
    ),
]
First = Annotated[
    str, typer.Argument(metavar="A", help="A file, a directory or an archive of files.", show_default=False)
]
Second = Annotated[str, typer.Argument(metavar="B", help="What it is compared with.", show_default=False)]
Code = Annotated[
    str | None,
    typer.Argument(metavar="CODE", help="A code, the beginning of some (D), or a name.", show_default=False),
]

# --- everywhere ------------------------------------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Short for --format json.")]
Form = Annotated[
    Format | None,
    typer.Option("--format", help="For people, for programs, or as annotations.", show_default="human"),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="One line a checkpoint.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Every place, every figure.")]
Select = Annotated[
    list[str] | None,
    typer.Option(metavar="CODE", help="Only these findings count. Repeatable.", show_default=False),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="CODE", help="These findings do not count. Repeatable.", show_default=False),
]
LimitFactor = Annotated[
    int,
    typer.Option(metavar="N", min=1, max=1000, help="Let a file that is trusted ask for N times as much (exit 4)."),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit 1 on warnings too; in verify, also where a resume is not proven.")
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices", metavar="N", min=1, help="How many devices the target machine has.",
        show_default="as many as the file and the target name",
    ),
]  # fmt: skip
Version = Annotated[
    bool,
    typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
]
#: In place of Typer's own, which takes an answer that cannot be written for a bug.
Help = Annotated[
    bool,
    typer.Option("--help", "-h", callback=_show_help, is_eager=True, help="Show this message."),
]

# --- inspect ---------------------------------------------------------------------------------------------------------

Tensors = Annotated[bool, typer.Option("--tensors", help="A row for each tensor.")]
Tree = Annotated[bool, typer.Option("--tree", help="The outline of everything in the file.")]
Match = Annotated[
    str | None, typer.Option(metavar="GLOB", help="Only tensors of such names, as rows.", show_default=False)
]
Globals = Annotated[bool, typer.Option("--globals", help="The names that its pickle would import.")]
Check = Annotated[bool, typer.Option("--check", help="Read every record and compare its CRC.")]
Expect = Annotated[
    str | None,
    typer.Option(
        metavar="DEV", help="Exit 1 unless every tensor that should move is on this device.", show_default=False
    ),
]

# --- convert ---------------------------------------------------------------------------------------------------------

To = Annotated[str | None, typer.Option(metavar="DEV", help="The device: cpu, cuda:0, mps.", show_default=False)]
Map = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="SRC=DST",
        help="Move one device's tensors to another: 'cuda:*=cuda:0'. Repeatable.",
        show_default=False,
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Leave tensors of such names where they are. Repeatable.", show_default=False),
]
OutputFile = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="OUT",
        help="The new file; by default model.pth becomes model.cuda0.pth (with --map alone: model.moved.pth).",
        show_default=False,
    ),
]  # fmt: skip
InPlace = Annotated[
    bool, typer.Option("--in-place", help="Change the file itself: a matter of kilobytes, whatever its size.")
]
Undo = Annotated[bool, typer.Option("--undo", help="Make it what it was before --in-place, byte for byte.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, write nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Cast = Annotated[bool, typer.Option("--cast", help="Cast dtypes that the device lacks: float64 on mps.")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Compare no CRCs: the kernel copies the bytes.")]
RewriteStrings = Annotated[bool, typer.Option("--rewrite-strings", help="Move device names in configs too.")]

# --- verify ----------------------------------------------------------------------------------------------------------

Against = Annotated[
    str | None,
    typer.Option(metavar="ORIGINAL", help="What it was made from: values must be equal.", show_default=False),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|pkg.mod:CLASS",
        help="Its class, of torch.optim or another module, which is imported; by default told from the file.",
        show_default=False,
    ),
]
RequireDevice = Annotated[bool, typer.Option("--require-device", help="A simulated device is a failure.")]
Case = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:FUNC",
        help="Step your own model too: a function of yours that returns a ckptmove.Case. Or pkg.mod:FUNC.",
        show_default=False,
    ),
]
JUnit = Annotated[
    str | None,
    typer.Option("--junit", metavar="FILE", help="Write the verdicts as JUnit XML too.", show_default=False),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Fail where torch takes longer for its checks, and end it with all that it has started.",
        show_default="none",
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Look at N parameters of each optimizer, and at N other tensors, spread over the file; compare no CRC.",
        show_default="all",
    ),
]
#: As much as ``torch.Generator.manual_seed`` takes, without the negative ones, which it takes for others.
Seed = Annotated[int, typer.Option(metavar="N", min=0, max=2**64 - 1, help="Of the gradients, and of the sample.")]

"""The commands as Typer sees them: signatures and help.

Never does the work of a command: each one hands over at once.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckptmove.cli import options  # noqa: TC001  # Typer reads the annotations at run time
from ckptmove.cli.config import load_config
from ckptmove.cli.guard import PROGRAM, GuardedGroup
from ckptmove.cli.paths import as_operand, checkpoint_paths, single_path
from ckptmove.cli.render.answers import Detail
from ckptmove.cli.selection import selection
from ckptmove.cli.signals import signals_raised
from ckptmove.cli.streams import Format, Output, write_answer
from ckptmove.errors import UsageError
from ckptmove.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

app = typer.Typer(
    name=PROGRAM,
    cls=GuardedGroup,
    context_settings={"help_option_names": []},  # each command has its own: options.Help
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels double the time of --help, and swallow what stands in brackets
)


@app.callback(invoke_without_command=True)
def start(context: typer.Context, _version: options.Version = False, _help: options.Help = False) -> None:
    """Inspect, convert and verify PyTorch checkpoints that have to move to another device.

    Exit codes: 0 yes, 1 the answer is no, 2 usage, 3 unreadable input, 4 refused, 5 could not write, 70 a bug.
    """
    if context.invoked_subcommand is None:
        write_answer(f"{context.get_help()}\n")
        raise typer.Exit(2)


@app.command()
def inspect(
    paths: options.Paths = None,
    tensors: options.Tensors = False,
    tree: options.Tree = False,
    match: options.Match = None,
    names: options.Globals = False,
    check: options.Check = False,
    expect: options.Expect = None,
    devices: options.Devices = None,
    strict: options.Strict = False,
    limit_factor: options.LimitFactor = 1,
    as_json: options.Json = False,
    form: options.Form = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    select: options.Select = None,
    ignore: options.Ignore = None,
    _version: options.Version = False,
    _help: options.Help = False,
) -> None:
    """Show what is inside, where it lies, what is wrong with it.

    Needs no torch and no GPU, and executes nothing. Exits 1 where a finding is an error (a resume fails).
    """
    from ckptmove.cli import inspect_command  # noqa: PLC0415  # --help does not wait for it

    config = load_config(Path())
    asked = inspect_command.InspectOptions(
        target=config.to,
        expect=expect,
        device_count=devices,
        limits=Limits().times(limit_factor),
        match=match,
        check=check,
        strict=strict or config.strict,
        selection=selection(select or (), (*config.ignore, *(ignore or ()))),
        detail=Detail(tensors=tensors or match is not None, tree=tree, globals=names, verbose=verbose),
    )
    out = Output(_one_format(as_json, form), quiet=quiet, verbose=verbose)
    raise typer.Exit(inspect_command.run_inspect(checkpoint_paths(paths or (), config, "inspect"), asked, out))


@app.command()
def convert(
    path: options.Path = None,
    to: options.To = None,
    maps: options.Map = None,
    keep: options.Keep = None,
    output: options.OutputFile = None,
    in_place: options.InPlace = False,
    undo: options.Undo = False,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    cast: options.Cast = False,
    rewrite_strings: options.RewriteStrings = False,
    no_check: options.NoCheck = False,
    strict: options.Strict = False,
    limit_factor: options.LimitFactor = 1,
    as_json: options.Json = False,
    form: options.Form = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    _version: options.Version = False,
    _help: options.Help = False,
) -> None:
    """Rewrite it for another device.

    As map_location should have: tensors, optimizer state, RNG states, flags. Needs no torch, no GPU and no such device.
    A new file is written, also where nothing has to change; of what stores no device (safetensors, directories of
    torch.distributed.checkpoint) only with --output, as a copy. With --in-place, it is the file itself that is changed.
    """
    from ckptmove.cli import convert_command  # noqa: PLC0415  # --help does not wait for it

    config = load_config(Path())
    out = Output(_one_format(as_json, form), quiet=quiet, verbose=verbose)
    limits = Limits().times(limit_factor)
    if undo:
        asked_besides = (to, maps, keep, output, in_place, force, cast, rewrite_strings, no_check, strict)
        convert_command.require_alone(*asked_besides)
        named = single_path(path, config, "convert")
        raise typer.Exit(convert_command.run_undo(named, out, dry_run=dry_run, limits=limits))
    asked = convert_command.ConvertOptions(
        to=to if to is not None or maps else config.to,
        maps=tuple(maps or ()),
        keep=tuple(keep or ()),
        output=None if output is None else as_operand(output),
        in_place=in_place,
        dry_run=dry_run,
        force=force,
        cast=cast,
        rewrite_strings=rewrite_strings,
        check=not no_check,
        strict=strict or config.strict,
        strict_from="" if strict or config.path is None else config.path,
        limits=limits,
    )
    raise typer.Exit(convert_command.run_convert(single_path(path, config, "convert"), asked, out))


@app.command()
def verify(
    paths: options.Paths = None,
    to: options.To = None,
    against: options.Against = None,
    optimizer: options.Optimizer = None,
    require_device: options.RequireDevice = False,
    seed: options.Seed = 0,
    keep: options.Keep = None,
    devices: options.Devices = None,
    case: options.Case = None,
    timeout: options.Timeout = None,
    sample: options.Sample = None,
    strict: options.Strict = False,
    junit: options.JUnit = None,
    limit_factor: options.LimitFactor = 1,
    as_json: options.Json = False,
    form: options.Form = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    select: options.Select = None,
    ignore: options.Ignore = None,
    _version: options.Version = False,
    _help: options.Help = False,
) -> None:
    """Prove that it resumes: one optimizer step on the target.

    Needs torch. A device that is not here is simulated on the CPU, and the verdict says so. Exits 1 where a check
    fails.
    """
    from ckptmove.cli import verify_command  # noqa: PLC0415  # --help does not wait for it

    config = load_config(Path())
    asked = verify_command.VerifyOptions(
        to=to if to is not None else config.to,
        against=None if against is None else as_operand(against),
        optimizer=optimizer,
        require_device=require_device,
        seed=seed,
        keep=tuple(keep or ()),
        devices=devices,
        case=case if case is not None else config.case,
        timeout=timeout,
        sample=sample,
        limits=Limits().times(limit_factor),
        strict=strict or config.strict,
        junit=junit,
        selection=selection(select or (), (*config.ignore, *(ignore or ()))),
    )
    out = Output(_one_format(as_json, form), quiet=quiet, verbose=verbose)
    raise typer.Exit(verify_command.run_verify(checkpoint_paths(paths or (), config, "verify"), asked, out))


@app.command()
def diff(
    first: options.First,
    second: options.Second,
    limit_factor: options.LimitFactor = 1,
    as_json: options.Json = False,
    form: options.Form = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    _version: options.Version = False,
    _help: options.Help = False,
) -> None:
    """Show what differs between two checkpoints.

    Tensors, devices, dtypes, values, and all else; values bit for bit, and nothing is executed. Torch, where it is
    installed, says how far they lie apart.
    Directories and archives are compared file by file; a model that is cut into other files goes by its own names.
    Exits 1 where anything differs.
    """
    from ckptmove.cli import diff_command  # noqa: PLC0415  # --help does not wait for it

    out = Output(_one_format(as_json, form), quiet=quiet, verbose=verbose)
    raise typer.Exit(diff_command.run_diff(as_operand(first), as_operand(second), out, Limits().times(limit_factor)))


@app.command()
def rules(
    code: options.Code = None,
    as_json: options.Json = False,
    form: options.Form = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    _version: options.Version = False,
    _help: options.Help = False,
) -> None:
    """Explain what each finding means, and how to fix it."""
    from ckptmove.cli import rules_command  # noqa: PLC0415  # --help does not wait for it

    out = Output(_one_format(as_json, form), quiet=quiet, verbose=verbose)
    raise typer.Exit(rules_command.run_rules(code, out))


def main(*, ends: bool = False) -> None:
    """The program.

    Args:
        ends: whether the process ends with it.
    """
    with signals_raised(ends=ends), _only_the_command(sys.argv[1:2]):
        app()


@contextmanager
def _only_the_command(words: list[str]) -> Iterator[None]:
    """Leave out all commands but the one that is named: making the others takes a fifteenth of an ``inspect``."""
    commands = app.registered_commands
    named = [one for one in commands if one.callback is not None and one.callback.__name__ in words]
    app.registered_commands = named or commands
    try:
        yield
    finally:
        app.registered_commands = commands


def _one_format(as_json: bool, form: Format | None) -> Format:
    if not as_json:
        return form or Format.HUMAN
    if form not in {None, Format.JSON}:
        raise UsageError(
            f"--json is short for --format json, and --format {form.value} is another one: type one of them"
        )
    return Format.JSON

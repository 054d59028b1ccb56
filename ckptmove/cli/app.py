"""The commands as Typer sees them: options, help, and the request that each command runs."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.models import CommandInfo

from ckptmove.cli import completion, options
from ckptmove.cli.config import load_config
from ckptmove.cli.configured import ConfiguredCommand, TypedCommand, settings_of
from ckptmove.cli.guard import GuardedGroup
from ckptmove.cli.options import Group
from ckptmove.cli.outcome import PROGRAM
from ckptmove.cli.paths import as_operand, download_paths, single_path
from ckptmove.cli.render.renderer import Renderer
from ckptmove.cli.render.reports import reporting
from ckptmove.cli.selection import selection
from ckptmove.cli.signals import signals_raised
from ckptmove.cli.streams import write_answer
from ckptmove.io.remote.address import Address
from ckptmove.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.cli.config import Config

app = typer.Typer(
    name=PROGRAM,
    cls=GuardedGroup,
    context_settings={"help_option_names": []},  # each command has its own: options.Help
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich panels double the time of --help, and drop text in brackets
)


@app.callback(invoke_without_command=True)
def start(context: typer.Context, _version: options.Version = False, _help: options.Help = False) -> None:
    """Inspect, convert and verify PyTorch checkpoints that move to another device.

    Exit codes: 0 yes, 1 the answer is no, 2 usage, 3 unreadable input, 4 refused, 5 could not write, 70 a bug.
    """
    if context.invoked_subcommand is None:
        write_answer(f"{context.get_help()}\n")
        raise typer.Exit(2)


@app.command(cls=TypedCommand)
@options.TakesRecords
def inspect(
    paths: options.Paths = None,
    tensors: Annotated[bool, Group.QUESTION.flag("--tensors", "List every tensor.")] = False,
    tree: Annotated[bool, Group.QUESTION.flag("--tree", "Print the structure of the whole file.")] = False,
    match: Annotated[str | None, Group.QUESTION.option("GLOB", "List the tensors whose name matches.")] = None,
    names: Annotated[bool, Group.QUESTION.flag("--globals", "List the names that the pickle imports.")] = False,
    check: Annotated[bool, Group.QUESTION.flag("--check", "Read every record and compare its CRC.")] = False,
    expect: Annotated[
        str | None,
        Group.QUESTION.option(
            "DEV", "Exit 1 unless every tensor that should move is on DEV.", autocompletion=completion.devices
        ),
    ] = None,
    devices: options.Devices = None,
    fit: Annotated[
        str | None,
        Group.QUESTION.option(
            "NxSIZE",
            "Exit 1 unless training with FSDP2 fits into N devices of this memory (KB to TB, KiB to TiB): 64x80GiB.",
        ),
    ] = None,
    strict: Annotated[bool, Group.QUESTION.flag("--strict", "Exit 1 on warnings too.")] = False,
    limit_factor: options.LimitFactor = 1,
    jobs: options.Jobs = None,
    skip_seen: Annotated[
        str | None,
        Group.SCALE.option(
            "FILE", "Skip the checkpoints of an earlier --format jsonl, unless they have changed.", "--skip-seen"
        ),
    ] = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    report: options.Report = None,
    *,
    out: options.OutputOptions,
) -> None:
    """List tensors, their devices, and problems.

    Needs no torch and no GPU, and never executes the file. Exits 1 if a finding is an error, which breaks a resume.
    """
    from ckptmove.api.inspection import InspectRequest
    from ckptmove.cli.inspect_command import run_inspect
    from ckptmove.cli.paths import find_targets
    from ckptmove.cli.render.renderer import Detail

    config = load_config(Path(), lambda: settings_of(verify))
    is_strict = strict or config.strict
    reported = selection(select or (), (*config.ignore, *(ignore or ())), everything=is_strict or out.verbose)
    if match is not None:
        from ckptmove.moves import checked_globs

        checked_globs("--match", match)
    if fit is not None:
        from ckptmove.findings.fit import parse_fit

        parse_fit(fit)  # its error is not one of each checkpoint
    found = find_targets(paths or (), config)
    seen = None
    if skip_seen is not None:
        from ckptmove.cli.seen import Seen

        seen = Seen(skip_seen)
    request = InspectRequest(
        path="",
        target=config.to if expect is None else None,
        expect=expect,
        device_count=devices,
        fit=fit,
        check=check,
        outline=tree,
        keep_going=True,
        limits=Limits().times(limit_factor),
    )
    detail = Detail(tensors=tensors or match is not None, tree=tree, globals=names, verbose=out.verbose)
    with reporting(out, "inspect", report, [target.path for target in found.targets]) as renderer:
        code = run_inspect(
            found,
            request,
            renderer,
            selection=reported,
            strict=is_strict,
            match=match,
            detail=detail,
            jobs=jobs,
            seen=seen,
        )
    raise typer.Exit(code)


@app.command(cls=TypedCommand, short_help="Rewrite a checkpoint for another device, format or dtype.")
@options.TakesRecords
def convert(
    context: typer.Context,
    paths: options.Paths = None,
    to: options.To = None,
    maps: Annotated[
        list[str] | None,
        Group.TARGET.option(
            "SRC=DST", "Move tensors from one device to another: 'cuda:*=cuda:0'. Repeatable.", "--map"
        ),
    ] = None,
    keep: options.Keep = None,
    output: Annotated[
        str | None,
        Group.OUTPUT.option(
            "OUT",
            "New file (default: model.cuda0.pth for model.pth; model.moved.pth with --map alone, model.new.pth "
            "without a device).",
            "--output",
            "-o",
        ),
    ] = None,
    output_dir: Annotated[
        str | None, Group.OUTPUT.option("DIR", "Folder for the new files, which keep their names.", "--output-dir")
    ] = None,
    skip_existing: Annotated[
        bool, Group.OUTPUT.flag("--skip-existing", "Leave out checkpoints whose output exists.")
    ] = False,
    in_place: Annotated[
        bool, Group.OUTPUT.flag("--in-place", "Change the file itself; writes only kilobytes.")
    ] = False,
    undo: Annotated[bool, Group.OUTPUT.flag("--undo", "Restore the file from before --in-place.")] = False,
    dry_run: Annotated[bool, Group.OUTPUT.flag("--dry-run", "Print the plan and write nothing.")] = False,
    force: Annotated[bool, Group.OUTPUT.flag("--force", "Replace an existing output.")] = False,
    cast: Annotated[
        bool, Group.TARGET.flag("--cast", "Cast dtypes that the device lacks, for example float64 on mps.")
    ] = False,
    rewrite_strings: Annotated[
        bool, Group.TARGET.flag("--rewrite-strings", "Also change device names in configs.")
    ] = False,
    *,
    remap: dict[str, object],
    shard_size: Annotated[
        str | None,
        Group.OUTPUT.option(
            "SIZE", "Write a directory of safetensors files of at most this size: 5GB.", "--shard-size"
        ),
    ] = None,
    verified: Annotated[
        bool,
        Group.OUTPUT.flag("--verify", "Compare every new tensor with its source before the file gets its name."),
    ] = False,
    no_check: Annotated[
        bool, Group.SCALE.flag("--no-check", "Do not compare CRCs; the kernel copies the bytes.")
    ] = False,
    jobs: options.Jobs = None,
    strict: Annotated[
        bool, Group.TARGET.flag("--strict", "Exit 1 and write nothing if --keep or --map matches nothing.")
    ] = False,
    limit_factor: options.LimitFactor = 1,
    report: options.Report = None,
    out: options.OutputOptions,
) -> None:
    """Rewrite a checkpoint: for another device, with other keys, parts or dtypes, or in another format.

    Moves tensors, optimizer state, RNG states and optimizer options, as map_location should. Needs no torch, no GPU
    and no target device.

    Writes a new file, even if nothing changes, or with --in-place changes the file itself. The suffix of --output
    names the format: .safetensors, or .pth for one file of torch.save. With --to alone, a format without devices
    (safetensors, torch.distributed.checkpoint) is copied, and only with --output.
    """  # fmt: skip
    from ckptmove.api.arguments import move_request
    from ckptmove.api.functions import with_default_output
    from ckptmove.cli import convert_command
    from ckptmove.cli.paths import search
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.conversion.remap.options import remap_options
    from ckptmove.conversion.shards import parse_size
    from ckptmove.moves import Remap
    from ckptmove.torch_facts.devices import parse_mapping

    config = load_config(Path(), lambda: settings_of(verify))
    limits = Limits().times(limit_factor)
    if undo:
        convert_command.require_alone(context.params)
        named = single_path(paths or (), config, "convert --undo")
        with reporting(out, "convert") as renderer:
            code = convert_command.run_undo(named, renderer, dry_run=dry_run, force=force, limits=limits)
        raise typer.Exit(code)
    changes = remap_options(**remap)
    move = move_request(
        to if to is not None or maps or changes != Remap() else config.to,
        dict(map(parse_mapping, maps or ())),
        keep or (),
        cast=cast,
        rewrite_strings=rewrite_strings,
        remap=changes,
    )
    convert_command.require_paths(paths or (), context.params)
    found, exclude, failures = search(paths or (), config, "convert")
    outputs = convert_command.outputs(found, output, output_dir, is_sharded=shard_size is not None)
    requests = [
        ConvertRequest(
            path=path,
            exclude=exclude.get(path, ()),
            move=move,
            output=new,
            shard_bytes=None if shard_size is None else parse_size(shard_size),
            in_place=in_place,
            force=force,
            dry_run=dry_run,
            strict=strict or config.strict,
            check=not no_check,
            verify=verified,
            jobs=jobs,
            limits=limits,
        )
        for path, new in outputs
    ]
    strict_from = "" if strict or config.path is None else config.path
    written = [with_default_output(request).target for request in requests]
    with reporting(out, "convert", report, [*found, *written]) as renderer:
        code = convert_command.run_convert(
            requests,
            renderer,
            failures=failures,
            strict_from=strict_from,
            skip_existing=skip_existing,
            folder=output_dir,
        )
    raise typer.Exit(code)


@app.command(cls=ConfiguredCommand, short_help="Prove that a checkpoint resumes, by one optimizer step.")
@options.TakesRecords
def verify(
    context: typer.Context,
    paths: options.Paths = None,
    to: options.To = None,
    against: Annotated[
        str | None,
        Group.QUESTION.option(
            "ORIGINAL", "Checkpoint that it was made from: compare all tensors with it, bit for bit."
        ),
    ] = None,
    *,
    optimizer: Annotated[
        str | None,
        Group.QUESTION.option(
            "NAME|pkg.mod:CLASS",
            "Optimizer class to step with (default: detected).",
            autocompletion=completion.optimizers,
        ),
    ] = None,
    require_device: Annotated[bool, Group.TARGET.flag("--require-device", "Fail if the device is simulated.")] = False,
    # As torch.Generator.manual_seed, without negative seeds: torch maps those to other seeds.
    seed: Annotated[
        int,
        Group.QUESTION.option("N", "Seed of the gradients and of --sample.", min=0, max=2**64 - 1, show_default=True),
    ] = 0,
    keep: options.Keep = None,
    devices: options.Devices = None,
    case: Annotated[
        str | None,
        Group.CODE.option(
            "FILE.py:FUNC",
            "Step your own model too: a function, FILE.py:FUNC or pkg.mod:FUNC, that returns a ckptmove.Case.",
        ),
    ] = None,
    fix: Annotated[
        bool,
        Group.CODE.flag("--fix", "Edit the files of --case or --script until it passes, after a backup (FILE.bak)."),
    ] = False,
    dry_run: Annotated[bool, Group.CODE.flag("--dry-run", "With --fix: print the patch, and write nothing.")] = False,
    script: Annotated[
        str | None,
        Group.CODE.option(
            "FILE.py",
            "Run your training script too, up to its first step after it loaded the checkpoint. Its arguments "
            "follow after --.",
        ),
    ] = None,
    script_args: Annotated[list[str] | None, Group.CODE.flag("--script-arg", "", hidden=True)] = None,
    timeout: Annotated[
        float | None,
        Group.SCALE.option(
            "SECONDS",
            "Fail if the checks with torch take longer, and end them.",
            show_default="none; 300 with --script",
        ),
    ] = None,
    sample: Annotated[
        int | None,
        Group.SCALE.option(
            "N",
            "Check only N parameters per optimizer and N other tensors; skip CRCs.",
            min=1,
            show_default="all",
        ),
    ] = None,
    jobs: options.Jobs = None,
    download: Annotated[
        str | None, Group.SCALE.option("DIR", "Download checkpoints at URLs to this folder first.", "--download")
    ] = None,
    strict: Annotated[
        bool, Group.QUESTION.flag("--strict", "Exit 1 on warnings too, and if the resume is not proven.")
    ] = False,
    limit_factor: options.LimitFactor = 1,
    select: options.Select = None,
    ignore: options.Ignore = None,
    junit: Annotated[str | None, Group.REPORTS.option("FILE", "Short for --report junit=FILE.", "--junit")] = None,
    report: options.Report = None,
    out: options.OutputOptions,
) -> None:
    """Prove that a checkpoint resumes: one optimizer step on the target.

    Needs torch. A device that this machine lacks is simulated on the CPU, and the verdict says so. Exits 1 if a check
    fails.
    """
    from ckptmove.cli.paths import search
    from ckptmove.cli.ranks import own_rank
    from ckptmove.cli.verify_command import run_verify
    from ckptmove.moves import checked_globs
    from ckptmove.proof.request import VerifyRequest

    config: Config = context.obj
    reported = selection(select or (), (*config.ignore, *(ignore or ())), everything=strict or out.verbose)
    found, exclude, failures = search(paths or (), config, "verify")
    copies = download_paths(found, download)
    requests = [
        VerifyRequest(
            path=path,
            exclude=exclude.get(path, ()),
            to=to,
            against=None if against is None else as_operand(against),
            optimizer=optimizer,
            require_device=require_device,
            seed=seed,
            ignore=reported.ignored,
            keep=checked_globs("--keep", keep or ()),
            devices=devices,
            case=case,
            script=script,
            script_args=tuple(script_args or ()),
            timeout=timeout,
            download=copies.get(path.url) if isinstance(path, Address) else None,
            sample=sample,
            jobs=jobs,
            limits=Limits().times(limit_factor),
        )
        for path in found
    ]
    files = [*(report or ()), *([] if junit is None else [f"junit={junit}"])]
    read = [*found, *copies.values(), *([] if against is None else [against])]
    rank = own_rank()
    is_silent = rank is not None and not rank.is_first
    with nullcontext(Renderer()) if is_silent else reporting(out, "verify", files, read) as renderer:
        code = run_verify(
            requests,
            renderer,
            failures=failures,
            selection=reported,
            strict=strict,
            fix=fix,
            dry_run=dry_run,
            withheld=config.withheld,
        )
    raise typer.Exit(code)


@app.command(cls=TypedCommand)
@options.TakesRecords
def diff(
    first: Annotated[
        str, typer.Argument(metavar="A", help="A file, a directory, an archive or a URL.", show_default=False)
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare with.", show_default=False)],
    limit_factor: options.LimitFactor = 1,
    report: options.Report = None,
    *,
    out: options.OutputOptions,
) -> None:
    """Show what differs between two checkpoints.

    Compares tensors, devices, dtypes, values (bit for bit) and everything else, and never executes a file. If torch is
    installed, the size of the differences is shown too.

    Files of directories and archives are matched by path. Tensors of a sharded model are matched by name. Exits 1 if
    anything differs.
    """
    from ckptmove.cli.diff_command import run_diff

    with reporting(out, "diff", report, [first, second]) as renderer:
        code = run_diff(as_operand(first), as_operand(second), renderer, Limits().times(limit_factor))
    raise typer.Exit(code)


@app.command(cls=TypedCommand)
@options.TakesRecords
def rules(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE]",
            autocompletion=completion.codes,
            help="A code, the first letters of codes (D), a name, or words to search for.",
            show_default=False,
        ),
    ] = None,
    *,
    out: options.OutputOptions,
) -> None:
    """Explain what each finding means, and how to fix it."""
    from ckptmove.cli.rules_command import run_rules

    with reporting(out, "rules") as renderer:
        raise typer.Exit(run_rules(code, renderer))


def main(*, ends: bool = False) -> None:
    """Run the program; ``ends`` says whether the process exits afterwards."""
    with signals_raised(ends=ends), _only_typed_command(sys.argv[1:2]):
        app()


@contextmanager
def _only_typed_command(words: list[str]) -> Iterator[None]:
    """Register only the command that is typed; for the help of the program, all of them without their options.

    Building all commands takes a third of ``--help``, and a fifteenth of an ``inspect``.
    """
    commands = app.registered_commands
    named = [one for one in commands if one.callback is not None and one.callback.__name__ in words]
    app.registered_commands = [*map(_listed, commands)] if words in (["--help"], ["-h"]) else named or commands
    try:
        yield
    finally:
        app.registered_commands = commands


def _listed(command: CommandInfo) -> CommandInfo:
    """A command of the same name and help, without its options."""

    def listed() -> None: ...

    listed.__name__, listed.__doc__ = getattr(command.callback, "__name__", ""), command.callback.__doc__
    return CommandInfo(cls=command.cls, callback=listed, short_help=command.short_help)

"""Human-readable report of ``convert``: the plan and the outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.text import DEVICE_STYLE, Column, clean, sentence, table
from ckptmove.conversion.policy import DEVICE_MENTION, GROUP_FLAG, MESH_TYPE, RULES
from ckptmove.moves import Remap
from ckptmove.text import Command, amount, size, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.cli.render.renderer import ConvertAnswer
    from ckptmove.cli.render.text import Page
    from ckptmove.conversion.results import Converted, UndoResult
    from ckptmove.moves import Dropped, Kept, MovePlan, StorageEdit

_REASONS: Final = (
    {rule.name: rule.reason for rule in RULES}
    | {rule.name: rule.reason for rule in (GROUP_FLAG, DEVICE_MENTION, MESH_TYPE)}
    | {
        "dtype": "cast to the dtype of --dtype",
        "tied": "the format stores tensors that are tied once, under another name",
        "compact": "bytes that no tensor reaches",
    }
)
#: Name of the rule of ``--keep``.
_KEEP: Final = "keep"
#: Shortest time in seconds for which a rate is shown: a shorter one measures the start, not the disk.
_WORTH_A_RATE: Final = 1.0
#: Lines of one kind of change that are shown.
_SHOWN: Final = 3
_NOTHING: Final = "nothing to change"
_NO_MOVE: Final = f"{_NOTHING}: no tensor needs to move"


def conversion_lines(page: Page, path: str, result: Converted, *, verbose: bool) -> Iterator[str]:
    """The plan, and the output if one was written."""
    yield page.paint(clean(path), "bold")
    yield ""
    yield from plan_lines(page, result.plan, verbose=verbose)
    yield ""
    yield page.paint(brief_line(path, result), "bold green")
    yield from _note_lines(page, result.notes)


def undo_lines(page: Page, result: UndoResult) -> Iterator[str]:
    """The outcome of ``--undo``, and its notes."""
    yield undo_line(result)
    yield from _note_lines(page, result.notes)


def _note_lines(page: Page, notes: Sequence[str]) -> Iterator[str]:
    for note in notes:
        line = f"note: {sentence(note)}"
        yield from [line] if isinstance(note, Command) else page.wrap(line, 2)


def warning_lines(answer: ConvertAnswer) -> Iterator[str]:
    """A warning for each problem of the source, and for each option without a match: with ``--strict`` an error."""
    for warning in answer.result.warnings:
        yield f"warning: {sentence(warning)}"
    for one in answer.result.unmatched:
        yield f"{'error' if answer.exit_code else 'warning'}: {sentence(str(one))}"
    if answer.exit_code:
        remedy = f"set strict = false in {answer.strict_from}" if answer.strict_from else "leave out --strict"
        yield f"hint: nothing was written because of strict: correct the option, or {sentence(remedy)}"


def brief_line(path: str, result: Converted) -> str:
    """The outcome, in one line."""
    if result.output is None:
        return f"{clean(path)}: nothing was written"
    if result.in_place and result.plan.is_empty:
        return f"{clean(path)}: unchanged"
    rate = f", {size(result.bytes_copied / result.seconds)}/s" if result.seconds >= _WORTH_A_RATE else ""
    is_copy = result.plan.is_empty and not result.plan.inflates and result.plan.request.remap == Remap()
    copied = ", copied unchanged" if is_copy else ""
    did = "changed in place" if result.in_place else "wrote"
    return f"{did} {clean(result.output)}: {size(result.bytes_copied)} in {result.seconds:.2f} s{rate}{copied}"


def skipped_line(path: str, output: str) -> str:
    """That a checkpoint was left out because its output exists."""
    return f"{clean(path)}: skipped, {clean(output)} exists"


def undo_line(result: UndoResult) -> str:
    """The outcome of ``--undo``, in one line."""
    path = clean(result.path)
    if not result.is_done:
        return f"{path}: dry run, {size(result.removed)} would be removed"
    return f"{path}: restored to the original, {size(result.removed)} removed"


def plan_lines(page: Page, plan: MovePlan, *, verbose: bool) -> Iterator[str]:
    """The changes, with similar ones in one row unless ``verbose``; and the tensors that stay, with reasons."""
    if plan.edits:
        yield from _edits(page, [(edit,) for edit in plan.edits] if verbose else _alike(plan.edits))
    yield from _first(page, [
        f"set {clean(flag.where)}: {clean(flag.source)} -> {clean(flag.target)} ({flag.reason})" for flag in plan.flags
    ], verbose=verbose)  # fmt: skip
    yield from _remapping(page, plan, verbose=verbose)
    # If nothing moves, only tensors that --keep holds back are worth a line.
    kept = tuple(one for one in plan.kept if verbose or not plan.is_empty or one.reason == _KEEP)
    yield from _kept(page, kept, verbose=verbose)
    if plan.is_empty and not (plan.inflates and plan.request.remap.compact):
        is_move = plan.request.to is not None or plan.request.mapping
        yield page.paint(_NO_MOVE if is_move else _NOTHING, "bold")
    changes = [one.reason for some in (plan.edits, plan.flags, plan.dropped) for one in some]
    yield from _legend(page, {*changes, *(one.reason for one in kept)})


def _remapping(page: Page, plan: MovePlan, *, verbose: bool) -> Iterator[str]:
    """The changes of keys, parts, objects and storages; a few of each kind unless ``verbose``."""
    replaced: dict[tuple[str, str], list[str]] = {}
    for swap in plan.replaced:
        replaced.setdefault((swap.source, swap.target), []).append(swap.where or "the root")
    yield from _first(page, [
        f"replace {clean(source)} by {clean(target)}: {some([*map(clean, places)])}"
        for (source, target), places in replaced.items()
    ], verbose=verbose)  # fmt: skip
    yield from _first(page, [
        f"drop {clean(one.name)}{_extent(one)} ({one.reason})"
        for one in plan.dropped
    ], verbose=verbose)  # fmt: skip
    renamed: dict[str, list[str]] = {}
    for key in plan.renamed:
        renamed.setdefault(key.where, []).append(f"{clean(key.source)} -> {clean(key.target)}")
    for where, keys in renamed.items():
        yield page.cut(f"rename {amount(len(keys), 'key')} of {clean(where) or 'the root'}")
        yield from _first(page, [f"  {key}" for key in keys], verbose=verbose)
    saved = sum(one.source_nbytes - one.nbytes for one in plan.trimmed)
    if plan.trimmed:
        yield f"trim {amount(len(plan.trimmed), 'storage')} to the bytes that tensors reach: {size(saved)} less"
    if plan.request.remap.compact and plan.inflates:
        yield f"inflate {amount(len(plan.inflates), 'storage')}"
    if plan.format:
        yield f"write as {plan.format}"


def _first(page: Page, lines: list[str], *, verbose: bool) -> Iterator[str]:
    """Lines cut to the page; without ``verbose``, a few of them and the number of the others."""
    shown = len(lines) if verbose or len(lines) <= _SHOWN + 1 else _SHOWN
    yield from map(page.cut, lines[:shown])
    if len(lines) > shown:
        yield f"  and {len(lines) - shown:,} more (-v shows them)"


def _extent(one: Dropped) -> str:
    tensors = f"{amount(one.tensors, 'tensor')}, " if one.tensors else ""
    return f": {tensors}{size(one.nbytes)}" if one.tensors or one.nbytes else ""


def _legend(page: Page, used: set[str]) -> Iterator[str]:
    """The meaning of each reason, in the order of the policy: the last one is "everything else"."""
    reasons = [reason for reason in _REASONS if reason in used]
    broad = max(map(len, reasons), default=0)
    if reasons:
        yield ""
    for reason in reasons:
        for line in page.wrap(f"{reason:<{broad}}  {_REASONS[reason]}", broad + 2):
            yield page.paint(line, "dim")


def _alike(edits: tuple[StorageEdit, ...]) -> list[tuple[StorageEdit, ...]]:
    groups: dict[tuple[object, ...], list[StorageEdit]] = {}
    for edit in edits:
        groups.setdefault((edit.source, edit.target, edit.cast, edit.reason), []).append(edit)
    return [tuple(group) for group in groups.values()]


def _edits(page: Page, groups: list[tuple[StorageEdit, ...]]) -> Iterator[str]:
    is_each = all(len(group) == 1 and len(group[0].names) == 1 for group in groups)
    columns = (
        Column("from", style=DEVICE_STYLE),
        Column("to", style=DEVICE_STYLE),
        Column("tensors", right=True),
        Column("bytes", right=True),
        Column("reason"),
        Column("tensor" if is_each else "first of them", gives_way=True),
    )
    return table(page, columns, [_row(group) for group in groups])


def _row(group: tuple[StorageEdit, ...]) -> tuple[str, ...]:
    first = group[0]
    names = [name for edit in group for name in edit.names]
    cast = f" as {first.cast[1]}" if first.cast else ""
    return (
        clean(first.source),
        clean(first.target) + cast,
        f"{len(names):,}",
        size(sum(edit.nbytes for edit in group)),
        first.reason,
        clean(names[0]) if names else "none",
    )


def _kept(page: Page, kept: tuple[Kept, ...], *, verbose: bool) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for one in kept:
        groups.setdefault((one.device, one.reason), []).append(one.name)
    for (device, reason), names in groups.items():
        yield f"stay on {clean(device)}: {amount(len(names), 'tensor')} ({reason})"
        for name in names if verbose else ():
            yield f"  {page.cut(clean(name), 2)}"

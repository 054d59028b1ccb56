"""Human-readable report of ``diff``: changes of one kind share a row, the largest first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.text import DEVICE_STYLE, Column, clean, table
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.cli.render.text import Page
    from ckptmove.comparison.differences import Change, Differences, Gap, LoneNan

#: Properties whose equal changes share a row, whatever the names.
_SHARED: Final = frozenset({"device", "dtype", "role"})
#: A part of a name that numbers layers, parameters or groups.
_INDEX: Final = re.compile(r"(?<![^.])\d+(?![^.])")
#: Rows of a list; further ones are counted.
_SHOWN: Final = 20


def difference_lines(page: Page, result: Differences, *, verbose: bool) -> Iterator[str]:
    """The differences, and the answer; every change has its own row if ``verbose``."""
    yield page.paint(f"{clean(result.first)} -> {clean(result.second)}", "bold")
    yield ""
    yield from _names(page, f"only in {clean(result.first)}", result.removed, verbose=verbose)
    yield from _names(page, f"only in {clean(result.second)}", result.added, verbose=verbose)
    if result.changed and (result.removed or result.added):
        yield ""
    yield from _changes(page, result.changed, verbose=verbose)
    shown = result.uncompared if verbose else result.uncompared[:_SHOWN]
    for one in shown:
        yield from page.wrap(f"not compared: {clean(one.name)}: {clean(one.reason)}", 2)
    if len(result.uncompared) > len(shown):
        yield f"not compared: {len(result.uncompared) - len(shown):,} more (-v shows them)"
    for note in result.notes:
        yield from page.wrap(f"note: {clean(note)}", 2)
    if result.notes or not result.same:
        yield ""
    yield page.paint(answer_line(result), "bold green" if result.same else "bold yellow")


def brief_line(result: Differences) -> str:
    """The answer in one line, with both paths."""
    return f"{clean(result.first)} -> {clean(result.second)}: {answer_line(result)}"


def answer_line(result: Differences) -> str:
    """The answer in one line, without the paths."""
    if result.same:
        rest = "and everything else that was compared" if result.notes else "all stored devices, and everything else"
        return f"the same: {amount(result.tensors, 'tensor')} bit for bit, {rest}"
    if result.uncompared and not (result.changed or result.added or result.removed):
        count = len(result.uncompared)
        names = amount(count, "tensor or object" if count == 1 else "tensors and object")
        return f"no difference found, but {names} could not be compared"
    counts: dict[str, int] = {}
    for change in result.changed:
        counts[change.what] = counts.get(change.what, 0) + 1
    parts = [f"{what} {count:,}" for what, count in counts.items()]
    parts += [f"added {len(result.added):,}"] if result.added else []
    parts += [f"removed {len(result.removed):,}"] if result.removed else []
    parts += [f"not compared {len(result.uncompared):,}"] if result.uncompared else []
    has_values = not {"value", "shape", "dtype"}.isdisjoint(counts)
    is_unlike = has_values or result.uncompared or result.added or result.removed
    alike = "" if is_unlike else "; all values are equal bit for bit"
    return f"they differ: {', '.join(parts)}{alike}"


def _names(page: Page, title: str, names: Sequence[str], *, verbose: bool) -> Iterator[str]:
    shown = names if verbose else names[:_SHOWN]
    for name in shown:
        yield page.cut(f"{title}: {clean(name)}")
    if len(names) > len(shown):
        yield f"{title}: {len(names) - len(shown):,} more (-v shows them)"


def _changes(page: Page, changes: Sequence[Change], *, verbose: bool) -> Iterator[str]:
    rows = [((change,), _size(change)) for change in changes] if verbose else _alike(changes)
    rows = sorted(rows, key=lambda row: -row[1])
    shown = rows if verbose else rows[: 2 * _SHOWN]
    measured = any(change.gap is not None for change in changes)
    columns = (
        Column("what"),
        Column("from", style=DEVICE_STYLE),
        Column("to", style=DEVICE_STYLE),
        *((Column("max abs", right=True), Column("max rel", right=True)) if measured else ()),
        Column("count", right=True),
        Column("names", gives_way=True),
    )
    if rows:
        yield from table(page, columns, [_row(group, measured=measured) for group, _ in shown])
    if len(rows) > len(shown):
        yield f"and {len(rows) - len(shown):,} more (-v shows them)"


def _alike(changes: Sequence[Change]) -> list[tuple[tuple[Change, ...], float]]:
    """The changes that share a row, with its sort key. Values share one if only indices tell their names apart."""
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        sides = () if change.what == "value" else (change.source, change.target)
        names = () if change.what in _SHARED else (_pattern(change),)
        groups.setdefault((change.what, *sides, *names), []).append(change)
    return [(tuple(group), max(map(_size, group))) for group in groups.values()]


def _pattern(change: Change) -> str:
    """The name with ``*`` for each index; the name itself if elements are NaN on one side only."""
    is_lone = change.gap is not None and change.gap.lone_nan is not None
    return change.name if is_lone else _INDEX.sub("*", change.name)


def _size(change: Change) -> float:
    """Sort key: properties first, then values by their largest difference."""
    if change.what != "value":
        return float("inf")
    return change.gap.max_abs if change.gap is not None else 0.0


def _row(group: tuple[Change, ...], *, measured: bool) -> tuple[str, ...]:
    first = group[0]
    shapes = {change.source for change in group}
    sides = (clean(first.source) if len(shapes) == 1 else "", "" if first.what == "value" else clean(first.target))
    lone = first.gap.lone_nan if first.gap is not None else None
    if lone is not None:
        sides = ", ".join([sides[0], *_nan(lone.first, lone)]), "".join(_nan(lone.second, lone))
        gaps = [(lone.max_abs, lone.max_rel)]
    else:
        gaps = [(change.gap.max_abs, change.gap.max_rel) for change in group if change.gap is not None]
    figures = [f"{max(column):.3g}" for column in zip(*gaps, strict=True)] or ["", ""]
    return (first.what, *sides, *(figures if measured else ()), f"{len(group):,}", clean(_names_of(group)))


def _names_of(group: tuple[Change, ...]) -> str:
    """The name of one change, the pattern of several names, or the first of names without a common one."""
    if len(group) == 1:
        return group[0].name
    patterns = {_pattern(change) for change in group}
    return patterns.pop() if len(patterns) == 1 else f"{group[0].name}, …"


def _nan(count: int, lone: LoneNan) -> list[str]:
    """The count of NaN on one side where the other side has numbers."""
    return [f"NaN only here: {count:,} of {lone.elements:,}"] if count else []


def apart_in_words(result: Differences, gap: Gap) -> str:
    """The difference of the values of a tensor, as a phrase."""
    lone = gap.lone_nan
    if lone is None:
        return f"differs by at most {gap.max_abs:.3g} (relative {gap.max_rel:.3g})"
    sides = (lone.first, result.first), (lone.second, result.second)
    counts = [f"NaN only in {clean(path)}: {count:,} of {lone.elements:,}" for count, path in sides if count]
    if lone.first + lone.second == lone.elements:
        return ", ".join(counts)
    return f"{', '.join(counts)}; the others differ by at most {lone.max_abs:.3g} (relative {lone.max_rel:.3g})"

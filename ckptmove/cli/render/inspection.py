"""Human-readable report of ``inspect``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.api.figures import shares
from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.cli.render.text import DEVICE_STYLE, Column, clean, sentence, table
from ckptmove.model import Severity
from ckptmove.text import amount, size, some
from ckptmove.torch_facts.devices import NO_DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckptmove.api.figures import Expectation
    from ckptmove.api.inspection import Inspection
    from ckptmove.checkpoint.summary import CheckpointSummary
    from ckptmove.cli.render.renderer import InspectAnswer
    from ckptmove.cli.render.text import Page
    from ckptmove.model import Finding, Inventory, OptimizerRecord, TensorRecord

STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold cyan"}
_NOUNS: Final = {"error": "error", "warning": "warning", "info": "note"}
_FIRST: Final = 3
_THOUSAND: Final = 1000
#: Suffixes of counts, for each factor of a thousand.
_SUFFIXES: Final = "KMBT"
#: Learning rates below are shown with an exponent.
_SMALL: Final = 0.01
#: Files of a directory that are listed without -v: enough for a run on one machine.
_MOST_FILES: Final = 24
#: Devices that a line names.
_SHOWN_DEVICES: Final = 4
#: Role and device.
_Place: TypeAlias = "tuple[str, str]"
#: Characters of the longest bar.
_LONGEST_BAR: Final = 16
_BAR, _ASCII_BAR = "█", "#"
#: Meanings of verdicts. A verdict is about a name only: a file of safe names may still hold wrong or huge values.
_VERDICTS: Final = {
    "safe": "a known name of checkpoints, harmless by itself",
    "unknown": "unknown to ckptmove: look at its module",
    "dangerous": "can do harm, and no checkpoint needs it",
}


def inspection_lines(page: Page, answer: InspectAnswer) -> Iterator[str]:
    """The report on one checkpoint."""
    inventory, detail = answer.result.inventory, answer.detail
    yield from _header(page, answer.result)
    yield from _summary(page, answer.result.summary)
    if isinstance(inventory, DirectoryInventory):
        yield ""
        yield from _files(page, inventory, verbose=detail.verbose)
    if inventory.tensors:
        yield ""
        yield from _devices(page, inventory)
        if detail.verbose:
            yield from _bars(page, answer)
    elif not detail.tensors:  # its table says so itself
        yield from ("", _none(inventory))
    if inventory.optimizers:
        yield ""
        for optimizer in inventory.optimizers:
            yield from page.wrap(_optimizer(optimizer), 2)
    yield from optional_lines(page, answer)
    yield ""
    findings = answer.result.findings
    yield from finding_lines(page, findings, verbose=detail.verbose)
    if answer.result.expectation is not None:
        yield from _expectation(page, answer.result.expectation, verbose=detail.verbose)
    if answer.result.unchecked:
        yield from page.wrap(unchecked_line(answer.result), 2)
    yield findings_summary(page, findings) + _unread(answer)
    fit = answer.result.fit
    if fit is not None:
        first, *rest = page.wrap(sentence(str(fit)), 2)
        yield page.paint(first, "bold green" if fit.fits else "bold red")
        yield from rest


def unchecked_line(inspection: Inspection) -> str:
    """The files without CRCs, for ``--check``."""
    names = inspection.unchecked
    if names == (inspection.inventory.path,):
        return "not checked: the file has no CRCs"
    return f"not checked: no CRCs in {some([*map(clean, names)], _FIRST)}"


def optional_lines(page: Page, answer: InspectAnswer) -> Iterator[str]:
    """The parts that need an option, each after an empty line."""
    detail = answer.detail
    if detail.tensors:
        yield ""
        yield from _tensors(page, answer.tensors) if answer.tensors else (_none(answer.result.inventory),)
    if detail.tree:
        yield ""
        for line in answer.result.outline:
            name = f"{clean(line.name)}: " if line.name else ""
            yield page.cut(f"{'  ' * line.depth}{name}{clean(line.description)}")
    if detail.globals:
        yield ""
        yield from _globals(page, answer.result.inventory)


def brief_line(answer: InspectAnswer) -> str:
    """The report on one checkpoint in one line."""
    findings = answer.result.findings
    codes = ", ".join(dict.fromkeys(finding.code for finding in findings))
    expectation = answer.result.expectation
    unmet = f"; not on {clean(expectation.device)}" if expectation is not None and expectation.misplaced else ""
    fit = answer.result.fit
    unmet += f"; {fit.verdict}" if fit is not None else ""
    found = f"{counted(finding.severity.value for finding in findings)}{_unread(answer)}"
    unchecked = "; no CRCs" if answer.result.unchecked else ""
    return f"{clean(answer.result.inventory.path)}: {found}{f' ({codes})' if codes else ''}{unchecked}{unmet}"


def _unread(answer: InspectAnswer) -> str:
    """The number of files that could not be read; an error names each."""
    count = len(answer.result.unreadable)
    return f"; {amount(count, 'file')} not read" if count else ""


def finding_lines(page: Page, findings: Sequence[Finding], *, verbose: bool) -> Iterator[str]:
    """Findings with their places and fixes, the most severe first; every place if ``verbose``."""
    order = list(Severity)
    for finding in sorted(findings, key=lambda finding: order.index(finding.severity)):
        label = f"{finding.severity.value} {finding.code} {finding.name}"
        first, *rest = page.wrap(f"{label}: {sentence(finding.message)}", 2)
        # The label never wraps: it is short.
        yield page.paint(first[: len(label)], STYLES[finding.severity]) + first[len(label) :]
        yield from rest
        yield from _places(page, finding.where, verbose=verbose)
        if finding.fix:
            yield f"  {page.paint('fix', 'dim')} {sentence(finding.fix)}"


def findings_summary(page: Page, findings: Sequence[Finding]) -> str:
    """The number of findings by severity, in the color of the most severe."""
    worst = next((severity for severity in Severity if any(f.severity is severity for f in findings)), None)
    return page.paint(counted(finding.severity.value for finding in findings), STYLES[worst] if worst else "bold green")


def counted(severities: Iterable[str]) -> str:
    """The number of findings of each severity."""
    counts = Counter(severities)
    found = (amount(counts[severity], noun) for severity, noun in _NOUNS.items() if counts[severity])
    return ", ".join(found) or "no findings"


def _places(page: Page, where: Sequence[str], *, verbose: bool) -> Iterator[str]:
    shown = where if verbose else where[:_FIRST]
    for name in shown:
        yield f"  {page.paint('at', 'dim')}  {page.cut(clean(name), 6)}"
    if len(where) > len(shown):
        yield f"      +{len(where) - len(shown):,} more (-v names them)"


def _expectation(page: Page, expectation: Expectation, *, verbose: bool) -> Iterator[str]:
    device = clean(expectation.device)
    names = [f"{name} is on {edit.source}" for edit in expectation.misplaced for name in edit.names or (edit.storage,)]
    if not names:
        unplaced = f" ({amount(expectation.unplaced, 'tensor')} without a device)" if expectation.unplaced else ""
        yield page.paint(f"expected on {device}: yes{unplaced}", "bold green")
        return
    yield page.paint(f"expected on {device}: no, {amount(len(names), 'tensor')} should be elsewhere", "bold red")
    yield from _places(page, names, verbose=verbose)


def _header(page: Page, inspection: Inspection) -> Iterator[str]:
    inventory = inspection.inventory
    kinds = dict.fromkeys((inventory.container, inventory.layout))  # for some formats these have one name
    facts = [*kinds, size(inventory.size_bytes)]
    if inventory.torch_version:
        facts.append(f"torch {clean(inventory.torch_version)}")
    if inventory.producer:
        facts.append(clean(inventory.producer))
    yield page.paint(clean(inventory.path), "bold")
    yield from page.wrap(", ".join(facts), 0)
    if inspection.traffic is not None:
        yield inspection.traffic.described(inventory.size_bytes)


def _summary(page: Page, summary: CheckpointSummary) -> Iterator[str]:
    """The figures of a summary in one line."""
    facts = summary_facts(summary)
    if facts:
        whole = page.separator.join(fact.replace(" ", "\xa0") for fact in facts)  # no line ends inside a fact
        yield from (line.replace("\xa0", " ") for line in page.wrap(whole, 0))


def summary_facts(summary: CheckpointSummary) -> list[str]:
    """The figures of a summary with their nouns: ``124.4 M parameters``, ``epoch 3``."""
    words = {
        "parameters": ("", " parameter" if summary.parameters == 1 else " parameters"),
        "epoch": ("epoch ", ""),
        "step": ("step ", ""),
        "learning rate": ("lr ", ""),
    }
    figures = summary_figures(summary)
    return [value.join(words.get(name, ("", ""))) for name, value in figures.items()]


def summary_figures(summary: CheckpointSummary) -> dict[str, str]:
    """Parameters, dtype, epoch, step, learning rate and optimizer as text; a figure that is unknown is left out."""
    figures: dict[str, str] = {}
    if summary.parameters:
        figures["parameters"] = _short(summary.parameters)
        figures["dtype"] = some([dtype for dtype, _ in summary.dtypes], _FIRST)
    if summary.epoch is not None:
        epoch = round(summary.epoch, 2)
        figures["epoch"] = f"{int(epoch) if epoch == int(epoch) else epoch:,}"
    if summary.step is not None:
        figures["step"] = f"{summary.step:,}"
    rates = sorted(summary.learning_rates)
    if rates:
        figures["learning rate"] = " to ".join(dict.fromkeys([_rate(rates[0]), _rate(rates[-1])]))
    if summary.optimizers:
        figures["optimizer"] = some(summary.optimizers, _FIRST)
    return figures


def _short(count: int) -> str:
    """A count as model cards write it: ``124.4 M``, ``7.2 B``."""
    if count < _THOUSAND:
        return str(count)
    scaled, power = count / _THOUSAND, 0
    while round(scaled, 1) >= _THOUSAND and power + 1 < len(_SUFFIXES):
        scaled, power = scaled / _THOUSAND, power + 1
    return f"{scaled:.1f} {_SUFFIXES[power]}"


def _rate(rate: float) -> str:
    """A learning rate in four digits: ``0.1``, ``6e-4``, ``5.998e-4``."""
    if rate == 0 or abs(rate) >= _SMALL:
        return f"{rate:.4g}"
    mantissa, exponent = f"{rate:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _files(page: Page, inventory: DirectoryInventory, *, verbose: bool) -> Iterator[str]:
    columns = (
        Column("file", gives_way=True),
        Column("roles"),
        Column("layout"),
        Column("devices", gives_way=True, style=DEVICE_STYLE),
        Column("tensors", right=True),
        Column("size", right=True),
    )
    shown = inventory.files if verbose else inventory.files[:_MOST_FILES]
    rows = [
        (
            clean(one.path),
            ", ".join(one.roles),
            one.layout,
            clean(", ".join(one.devices)),
            f"{one.tensors:,}",
            size(one.size_bytes),
        )
        for one in shown
    ]
    yield from table(page, columns, rows)
    if len(inventory.files) > len(shown):
        yield f"+{len(inventory.files) - len(shown):,} more (-v names them)"
    if inventory.checkpoints:
        count = len(inventory.checkpoints)
        kind, each = ("archive", "") if inventory.form else ("directory", ", or add '/**' to read each")
        yield from page.wrap(
            f"the {kind} contains {count:,} separate checkpoints, read as one here: give the path of one{each}", 0
        )


def _devices(page: Page, inventory: Inventory) -> Iterator[str]:
    columns = (
        Column("device", gives_way=True, style=DEVICE_STYLE),
        Column("role"),
        Column("tensors", right=True),
        Column("bytes", right=True),
    )
    parts = shares(inventory.tensors)
    rows = [(clean(part.device), part.role, f"{part.tensors:,}", size(part.nbytes)) for part in parts]
    if len(parts) > 1:
        tensors, nbytes = sum(part.tensors for part in parts), sum(part.nbytes for part in parts)
        rows.append(("", "total", f"{tensors:,}", size(nbytes)))
    yield from table(page, columns, rows)
    if any(part.device == NO_DEVICE for part in parts):
        yield page.paint(f"{NO_DEVICE}: {_why_unknown(inventory)}", "dim")


def _why_unknown(inventory: Inventory) -> str:
    files = inventory.files if isinstance(inventory, DirectoryInventory) else ()
    devices = {device for file in files if file.part is not None for device in file.devices}
    if not devices:
        return "the format stores no device"
    return f"each rank has saved its shards from its own device ({clean(some(sorted(devices), _SHOWN_DEVICES))})"


def _bars(page: Page, answer: InspectAnswer) -> Iterator[str]:
    """The number of tensors by role and device as bars, and again after a conversion that moves some."""
    from ckptmove.cli.render.planned import conversion_of

    now = {(share.role, share.device): share.tensors for share in shares(answer.result.inventory.tensors)}
    conversion = conversion_of(answer)
    after = now if conversion is None else conversion.counts
    if len({*now, *after}) > 1:
        yield ""
        yield from _matrix(page, now, [now, after])
    if conversion is not None and after != now:
        yield ""
        yield f"after {conversion.command}:"
        yield from _matrix(page, after, [now, after])


def _matrix(page: Page, counts: Mapping[_Place, int], both: Sequence[Mapping[_Place, int]]) -> Iterator[str]:
    """The table of some counts, with the rows, columns and scale of both."""
    places = [place for one in both for place in one]
    roles, devices = (list(dict.fromkeys(names)) for names in zip(*places, strict=True))
    largest = max(count for one in both for count in one.values())
    digits = len(f"{largest:,}")
    room = _LONGEST_BAR
    if page.columns is not None:
        room = min(room, (page.columns - max(map(len, roles))) // len(devices) - digits - len("   "))

    def cell(count: int) -> str:
        bar = (_BAR if page.unicode else _ASCII_BAR) * min(max(round(count / largest * room), 1), max(room, 0))
        return f"{count:>{digits},} {bar}".rstrip() if count else ""

    columns = (Column(""), *(Column(clean(device), style=DEVICE_STYLE) for device in devices))
    rows = [(role, *(cell(counts.get((role, device), 0)) for device in devices)) for role in roles]
    yield from table(page, columns, rows)


def _optimizer(optimizer: OptimizerRecord) -> str:
    """Path, class, groups, parameters, and the step if the pickle stores it as a number.

    Since torch 1.12 the step is a tensor. ``inspect`` does not read the bytes of tensors.
    """
    names = " or ".join(optimizer.candidates) or "of no class in torch.optim"
    groups = "no groups (flat)" if optimizer.is_flat else amount(len(optimizer.groups), "group")
    parameters = amount(sum(len(group.params) for group in optimizer.groups), "parameter")
    steps = [value for entry in optimizer.state for key, value in entry.scalars if key == "step"]
    counts = [value for value in steps if type(value) is int]
    step = f", step {max(counts):,}" if counts else ""
    return f"{clean(optimizer.where) or 'optimizer'}: {names}, {groups}, {parameters}{step}"


def _none(inventory: Inventory) -> str:
    """The line that replaces an empty table of tensors."""
    return "no tensor matches (--tensors lists all)" if inventory.tensors else "no tensors"


def _tensors(page: Page, tensors: Sequence[TensorRecord]) -> Iterator[str]:
    columns = (
        Column("name", gives_way=True),
        Column("role"),
        Column("device", style=DEVICE_STYLE),
        Column("dtype"),
        Column("shape", gives_way=True),
        Column("bytes", right=True),
    )
    rows = [
        (
            clean(tensor.name) or "(root)",
            tensor.role,
            clean(tensor.device),
            tensor.dtype if tensor.kind in {"tensor", "parameter"} else f"{tensor.dtype} {tensor.kind}",
            clean(str(list(tensor.shape))),
            size(tensor.nbytes),
        )
        for tensor in tensors
    ]
    return table(page, columns, rows)


def _globals(page: Page, inventory: Inventory) -> Iterator[str]:
    names = (*inventory.globals, *inventory.apart)
    if not names:
        yield "imports nothing"
        return
    columns = [Column("global", gives_way=True), Column("weights_only"), Column("verdict")]
    columns += [Column("only in", gives_way=True)] if inventory.apart else []
    rows = [
        (
            clean(use.name),
            f"since {use.weights_only_since}" if use.weights_only else "no",
            use.verdict,
            clean(use.record),
        )[: len(columns)]
        for use in names
    ]
    yield from table(page, columns, rows)
    yield ""
    used = {use.verdict for use in names}
    for verdict, meaning in _VERDICTS.items():
        for line in page.wrap(f"{verdict:<9}  {meaning}", 11) if verdict in used else ():
            yield page.paint(line, "dim")

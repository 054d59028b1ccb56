"""The section of one checkpoint, the answer of ``inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.cli.render.html import columns
from ckptmove.cli.render.html.findings import finding_part
from ckptmove.cli.render.html.markup import Markup, element, joined
from ckptmove.cli.render.html.matrix import matrices
from ckptmove.cli.render.html.sections import closed_table, facts, part, searchable_table
from ckptmove.cli.render.text import clean
from ckptmove.findings.fit import Fit
from ckptmove.text import amount, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.api.document import Json
    from ckptmove.cli.render.html.devices import Palette
    from ckptmove.cli.render.planned import ConversionEffect


def checkpoint_section(
    checkpoint: Json, figures: Mapping[str, str], conversion: ConversionEffect | None, palette: Palette, name: str
) -> Markup:
    """Return the report on an entry of ``checkpoints``; ``figures`` is its summary as text."""
    findings, tensors = checkpoint["findings"], checkpoint["tensors"]
    codes = _codes(findings)
    in_table = frozenset(code for tensor in tensors for code in codes.get(tensor["name"], ()))
    table = searchable_table(f"{name}-data", tensor_table(checkpoint, codes, palette))
    return element(
        "section",
        element("h2", element("bdi", clean(checkpoint["path"]))),
        facts(figures, "figures"),
        _about(checkpoint),
        part("Tensors by role and device", matrices(checkpoint["devices"], conversion, palette)),
        finding_part(findings, in_table),
        *((_map(tensors, palette), part(amount(len(tensors), "tensor"), table)) if tensors else ()),
        _others(checkpoint, palette),
        id=name,
    )


def tensor_table(checkpoint: Json, codes: Mapping[str, Sequence[str]], palette: Palette) -> Json:
    """Return the table of tensors as data; ``codes`` has the codes of findings by the name of the tensor."""
    tensors = checkpoint["tensors"]
    devices = columns.words("device", (clean(tensor["device"]) for tensor in tensors))
    devices["slots"] = [*map(palette.slot, devices["words"])]
    found = columns.words("findings", (" ".join(codes.get(tensor["name"], ())) for tensor in tensors))
    severities = {finding["code"]: finding["severity"] for finding in checkpoint["findings"]}
    found["grave"] = [_gravest({severities[code] for code in word.split()}) for word in found["words"]]
    return {
        "rows": len(tensors),
        "columns": [
            columns.names("name", [tensor["name"] or "(root)" for tensor in tensors]),
            columns.words("role", (tensor["role"] for tensor in tensors)),
            devices,
            columns.words("dtype", map(_dtype, tensors)),
            columns.words("shape", (clean(str(tensor["shape"])) for tensor in tensors)),
            columns.numbers("bytes", (tensor["bytes"] for tensor in tensors), "bytes"),
            found,
        ],
        "tied": _tied(tensors),
        "owners": _owners(tensors),
    }


def _gravest(severities: set[str]) -> str:
    """``error`` or ``warning``; empty without them."""
    return next((one for one in ("error", "warning") if one in severities), "")


def _tied(tensors: Sequence[Json]) -> list[int]:
    """The rows of tensors that have the values of an earlier one, as tied weights have."""
    views = [
        (one["device"], one["storage"], one["storage_offset"], one["dtype"], *one["shape"], *one["stride"])
        for one in tensors
    ]
    first = {view: row for row, view in reversed([*enumerate(views)])}
    return [row for row, view in enumerate(views) if view[1] is not None and first[view] != row]


def _owners(tensors: Sequence[Json]) -> list[int]:
    """For the state of an optimizer, the row of its parameter; -1 for other tensors."""
    rows = {tensor["name"]: row for row, tensor in enumerate(tensors)}
    return [rows.get(tensor["parameter"], -1) for tensor in tensors]


def _codes(findings: Sequence[Json]) -> dict[str, list[str]]:
    """The codes of findings by the names of their places."""
    codes: dict[str, list[str]] = {}
    for finding in findings:
        for name in dict.fromkeys(finding["where"]):
            found = codes.setdefault(name, [])
            if finding["code"] not in found:
                found.append(finding["code"])
    return codes


def _dtype(tensor: Json) -> str:
    return tensor["dtype"] if tensor["kind"] in {"tensor", "parameter"} else f"{tensor['dtype']} {tensor['kind']}"


def _about(checkpoint: Json) -> Markup:
    remote, fit = checkpoint["remote"], checkpoint["fit"]
    about = {
        "container": checkpoint["container"],
        "layout": checkpoint["layout"],
        "size": size(checkpoint["size_bytes"]),
        "torch": clean(checkpoint["torch_version"] or ""),
        "producer": clean(checkpoint["producer"] or ""),
        "memory": clean(str(Fit(**fit))) if fit else "",
        "read": f"{size(remote['bytes_read'])} in {amount(remote['requests'], 'request')}" if remote else "",
    }
    return facts(about)


def _map(tensors: Sequence[Json], palette: Palette) -> Markup:
    devices = palette.ordered(tensor["device"] for tensor in tensors)
    legend = element("ul", *(element("li", palette.label(device)) for device in devices),
                     element("li", element("span", class_="swatch grave"), "has an error or a warning"))  # fmt: skip
    figure = element("figure", element("div", class_="treemap"), element("figcaption", legend), class_="script")
    return part("Bytes by module", figure)


def _others(checkpoint: Json, palette: Palette) -> Markup:
    """The tables of files, named devices and imports, closed."""
    files = [
        (element("bdi", clean(one["path"])), ", ".join(one["roles"]), one["layout"],
         joined(map(palette.label, one["devices"])), f"{one['tensors']:,}", size(one["size_bytes"]))
        for one in checkpoint["files"]
    ]  # fmt: skip
    mentions = [(clean(one["where"]), one["kind"], clean(one["value"])) for one in checkpoint["mentions"]]
    imports = [
        (clean(one["name"]), "yes" if one["weights_only"] else "no", one["verdict"]) for one in checkpoint["globals"]
    ]
    return joined(
        [
            closed_table(amount(len(files), "file"), ("file", "roles", "layout", "devices", "tensors", "size"), files),
            closed_table(amount(len(mentions), "named device"), ("where", "kind", "value"), mentions),
            closed_table(amount(len(imports), "import"), ("name", "weights_only", "verdict"), imports),
        ]
    )

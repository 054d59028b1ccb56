"""Values that a shell completes. Their tables are imported only for a completion."""

from __future__ import annotations

from typing import Final

#: Devices that are completed, the common ones first.
_DEVICES: Final = ("cpu", "cuda:0", "cuda:1", "mps", "xpu:0", "hpu:0", "mtia:0")


def devices() -> list[str]:
    """Values of ``--to`` and ``--expect``."""
    return [*_DEVICES]


def codes() -> list[tuple[str, str]]:
    """Codes of findings with their names, for ``--select``, ``--ignore`` and ``rules``."""
    from ckptmove.findings.catalogue import CATALOGUE

    return [(entry.code, entry.name) for entry in CATALOGUE.values()]


def optimizers() -> list[str]:
    """Values of ``--optimizer``: the classes of ``torch.optim``."""
    from ckptmove.torch_facts.optimizers import TABLE

    return [row.name for row in TABLE]


def parts() -> list[str]:
    """Values of ``--only`` and ``--drop``: the roles."""
    from ckptmove.conversion.remap.options import ROLES

    return [*ROLES]


def dtypes() -> list[str]:
    """Values of ``--dtype``: dtypes, also of a role."""
    from ckptmove.conversion.remap.options import DTYPES, ROLES

    return [*DTYPES, *(f"{role}={dtype}" for role in ROLES for dtype in DTYPES)]


def formats() -> list[str]:
    """Values of ``--format``."""
    from ckptmove.cli.render.formats import RENDERERS

    return [*RENDERERS]


def report_kinds() -> list[str]:
    """Beginnings of ``--report``."""
    from ckptmove.cli.render.documents import DOCUMENTS

    return [f"{kind}=" for kind in DOCUMENTS]

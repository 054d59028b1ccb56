"""Entries of ``checkpoints`` with the keys of the schema, pages made from them, and a browser."""

from __future__ import annotations

import browser as headless
import pytest

from ckptmove.api.document import checkpoint, envelope
from ckptmove.api.figures import shares
from ckptmove.checkpoint.summary import CheckpointSummary
from ckptmove.cli.render.html.devices import Palette
from ckptmove.cli.render.html.inspection import checkpoint_section
from ckptmove.cli.render.html.page import whole_page
from ckptmove.model import Inventory, TensorRecord


@pytest.fixture
def entry(validator):
    """Makes an entry from names, or from tuples of name, role, device, elements and parameter."""

    def made(rows, **keys):
        whole = [(row, "model", "cpu", 1, None) if isinstance(row, str) else row for row in rows]
        tensors = [
            {
                "name": name, "role": role, "kind": "tensor", "device": device, "dtype": "float32", "shape": [elements],
                "stride": [1], "storage": str(number), "storage_offset": 0, "bytes": 4 * elements,
                "parameter": parameter,
            }
            for number, (name, role, device, elements, parameter) in enumerate(whole)
        ]  # fmt: skip
        records = (TensorRecord(*row[:3], "float32", (), (), str(n), 0, 4) for n, row in enumerate(whole))
        devices = [
            {"device": one.device, "role": one.role, "tensors": one.tensors, "bytes": one.nbytes}
            for one in shares(tuple(records))
        ]
        inventory = Inventory(path="a.pth", container="torch-zip", layout="plain", size_bytes=1)
        empty = checkpoint(inventory, (), tensors=(), summary=CheckpointSummary())
        found = empty | {"tensors": tensors, "devices": devices} | keys
        validator.validate(envelope("inspect", 0, []) | {"checkpoints": [found | {"tensors": tensors[:50]}]})
        return found

    return made


@pytest.fixture
def finding():
    """Makes an entry of ``findings``."""

    def made(code="D102", severity="error", where=(), fix="", message="message"):
        about = {"code": code, "name": "some-name", "severity": severity, "message": message}
        return {**about, "where": [*where], "fix": fix}

    return made


@pytest.fixture
def page_of():
    """Makes a page from entries of ``checkpoints``."""

    def made(*entries):
        palette = Palette()
        named = [checkpoint_section(one, {}, None, palette, f"section-{n}") for n, one in enumerate(entries, 1)]
        return whole_page("test", named)

    return made


@pytest.fixture(scope="session")
def _chromium(tmp_path_factory):
    if headless.CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    started = headless.Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture
def browser(_chromium, tmp_path):
    """Opens a page from a file; afterwards, the page must have asked for nothing and complained of nothing."""

    def opened(page, **options):
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        _chromium.open(path, **options)
        return _chromium

    yield opened
    assert _chromium.errors == []
    assert [address.rpartition("/")[2] for address in _chromium.requests] == ["page.html"]

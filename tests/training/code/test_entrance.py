"""Files of the user that are imported with edits."""

from __future__ import annotations

import importlib
import linecache
import sys
import tempfile
from importlib.machinery import SourceFileLoader

import pytest

from ckptmove.proof.source_edits import Edit
from ckptmove.training.code.entrance import edited_sources, is_generated

SOURCE = b"# coding: latin-1\ndef value():\n    return '\xe9'\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Import the module `edited_module`, which may be a link to a file."""

    def module():
        importlib.invalidate_caches()
        sys.modules.pop("edited_module", None)
        return importlib.import_module("edited_module")

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "real.py").write_bytes(SOURCE)
    (tmp_path / "edited_module.py").symlink_to("src/real.py")
    (tmp_path / "other_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield module
    sys.modules.pop("edited_module", None)
    sys.modules.pop("other_module", None)


def test_edits_are_imported_and_not_written(module, tmp_path):
    path = str(tmp_path / "edited_module.py")
    assert module().value() == "é", "its bytecode is cached"
    get_code = SourceFileLoader.get_code
    edits = [Edit(path, "in place of", 3, 3, "return 'é' * 2"), Edit(path, "before", 3, 3, "import other_module")]
    with edited_sources(edits):
        assert module().value() == "éé"
        assert sys.modules["other_module"].value == 1
        linecache.checkcache(path)
        assert linecache.getline(path, 4) == "    return 'é' * 2\n"
    assert SourceFileLoader.get_code is get_code
    assert linecache.getline(path, 3) == "    return 'é'\n"
    assert module().value() == "é"
    assert (tmp_path / "src" / "real.py").read_bytes() == SOURCE


@pytest.mark.parametrize(
    ("path", "home", "expected"),
    [
        ("/home/train.py", "/home", False),
        ("/home/package/model.py", "/home", False),
        ("/elsewhere/model.py", "/home", False),
        ("/home/.cache/model.py", "/home", True),
        ("/home/me/.cache/model.py", "/home", True),
        ("/home/me/.hidden/model.py", "/home/me/.hidden", False),
        ("/home/me/.hidden/library/model.py", "/home/me/.hidden/scripts", False),
        ("{tmp}/x/model.py", "/home", True),
        ("{tmp}/x/model.py", "{tmp}/x", False),
        ("{tmp}/x/y/model.py", "{tmp}/x", False),
        ("{tmp}/train.py", "{tmp}", False),
        ("{tmp}/x/model.py", "{tmp}", True),
    ],
)
def test_generated_files(monkeypatch, tmp_path, path, home, expected):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert is_generated(path.format(tmp=tmp_path), home.format(tmp=tmp_path)) is expected


def test_files_below_the_working_directory_are_not_generated(monkeypatch, tmp_path):
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    assert not is_generated(str(tmp_path / "x" / "lib" / "model.py"), str(tmp_path / "x" / "scripts"))
    assert is_generated(str(tmp_path / "other" / "model.py"), str(tmp_path / "x" / "scripts"))

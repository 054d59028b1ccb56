from __future__ import annotations

import os

import pytest

from ckptmove.io import walk as module
from ckptmove.io.walk import WalkedFile, fingerprint, local_fingerprint, walk


@pytest.fixture
def folder(tmp_path):
    for path in ("a.pth", "sub/b.pth", ".git/c.pth", "sub/.hidden.pth", "sub/dcp/.metadata"):
        file = tmp_path / "runs" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"12345")
    return tmp_path / "runs"


def test_all_files_but_hidden_ones(folder) -> None:
    found = walk(str(folder))
    assert {file.path: file.size_bytes for file in found.files} == {"a.pth": 5, "sub/b.pth": 5, "sub/dcp/.metadata": 5}
    assert found.errors == []


def test_links_to_folders_are_not_followed(folder) -> None:
    (folder / "latest").symlink_to(folder / "sub", target_is_directory=True)
    (folder / "last.pth").symlink_to(folder / "a.pth")
    (folder / "gone.pth").symlink_to(folder / "none")
    assert {file.path for file in walk(str(folder)).files} == {
        "a.pth", "gone.pth", "last.pth", "sub/b.pth", "sub/dcp/.metadata",
    }  # fmt: skip


def test_a_folder_that_cannot_be_listed(folder, monkeypatch) -> None:
    scandir = os.scandir

    def refuse(path):
        if path.endswith("dcp/"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(module.os, "scandir", refuse)
    found = walk(str(folder))
    assert {file.path for file in found.files} == {"a.pth", "sub/b.pth"}
    assert [error.kind for error in found.errors] == ["access-failed"]


def test_an_entry_that_cannot_be_read_does_not_hide_the_others(folder) -> None:
    (folder / "again.pth").symlink_to(folder / "again.pth")
    found = walk(str(folder))
    assert {file.path for file in found.files} == {"a.pth", "sub/b.pth", "sub/dcp/.metadata"}
    assert [(error.kind, error.path) for error in found.errors] == [("access-failed", str(folder / "again.pth"))]
    assert local_fingerprint(str(folder)) is None


def test_a_file_that_is_deleted_meanwhile(folder, monkeypatch) -> None:
    make = module._file

    def vanished(path, found):
        if path == "a.pth":
            raise FileNotFoundError
        return make(path, found)

    monkeypatch.setattr(module, "_file", vanished)
    found = walk(str(folder))
    assert {file.path for file in found.files} == {"sub/b.pth", "sub/dcp/.metadata"}
    assert found.errors == []


def test_a_fingerprint_changes_with_a_file(folder) -> None:
    seen = {local_fingerprint(str(folder))}
    assert local_fingerprint(str(folder)) in seen
    os.utime(folder / "a.pth", ns=(1, 1))
    seen.add(local_fingerprint(str(folder)))
    (folder / "a.pth").write_bytes(b"1234")
    os.utime(folder / "a.pth", ns=(1, 1))
    seen.add(local_fingerprint(str(folder)))
    (folder / "new.pth").write_bytes(b"1")
    seen.add(local_fingerprint(str(folder)))
    assert len(seen) == 4
    assert None not in seen


def test_a_fingerprint_of_what_is_not_known(folder) -> None:
    assert local_fingerprint(str(folder / "none")) is None
    assert local_fingerprint("a\0b") is None
    assert fingerprint([WalkedFile("a", 1, ""), WalkedFile("b", 1, "v")]) is None

"""Listings of directories, and refusals before any file is opened."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ckptmove.errors import AccessFailed, LimitExceeded, NotACheckpoint, SourceChanged
from ckptmove.io import listing
from ckptmove.io.leftovers import temporary_names
from ckptmove.io.listing import list_directory
from ckptmove.limits import Limits


def listed(folder, **limits):
    return list_directory(str(folder), Limits(**limits))


def test_files_folders_and_links_by_path(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.pt").write_bytes(b"123")
    (tmp_path / "a.pt").write_bytes(b"1")
    (tmp_path / "last.pt").symlink_to("b/x.pt")
    found = listed(tmp_path)
    assert [(file.path, file.folder, file.name, file.size_bytes) for file in found.files] == [
        ("a.pt", "", "a.pt", 1),
        ("b/x.pt", "b", "x.pt", 3),
    ]
    assert [folder.path for folder in found.folders] == ["", "b"]
    assert [(link.path, link.target) for link in found.links] == [("last.pt", "b/x.pt")]
    assert found.names == {"a.pt", "b/x.pt", "last.pt"}
    assert found.full("b/x.pt") == str(tmp_path / "b" / "x.pt")


def test_files_and_folders_are_left_out(tmp_path):
    for path in ("a.pt", "b/x.pt", "b/c/y.pt", "bc/z.pt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"1")
    (tmp_path / "b" / "last.pt").symlink_to("x.pt")
    (tmp_path / "last.pt").symlink_to("bc/z.pt")
    (tmp_path / "bc" / "best.pt").symlink_to("../b/x.pt")
    whole = listed(tmp_path)
    assert whole.without(()) == whole
    assert whole.without({"b"}).names == {"a.pt", "bc/z.pt", "last.pt"}
    assert [folder.path for folder in whole.without({"b"}).folders] == ["", "bc"]
    assert whole.without({"b/c"}).names == whole.names - {"b/c/y.pt"}


def test_what_lies_in_a_hidden_folder_is_hidden(tmp_path):
    (tmp_path / ".git" / "objects").mkdir(parents=True)
    (tmp_path / ".git" / "objects" / "x.pt").write_bytes(b"")
    (tmp_path / ".metadata").write_bytes(b"")
    assert {file.path: file.is_hidden for file in listed(tmp_path).files} == {
        ".git/objects/x.pt": True,
        ".metadata": False,
    }


def test_an_output_that_is_being_written_is_no_part_of_it(tmp_path):
    for path in temporary_names(tmp_path / "out"):
        path.mkdir()
        (path / "x.pt").write_bytes(b"")
    (tmp_path / "run.part").write_bytes(b"")
    # The folder that a conversion was replacing still exists.
    assert [file.path.rpartition(".")[2] for file in listed(tmp_path).files] == ["pt", "part"]
    assert [folder.path.rpartition(".")[2] for folder in listed(tmp_path).folders] == ["", "old"]


def test_modes_are_permission_bits(tmp_path):
    (tmp_path / "secret.pt").write_bytes(b"")
    (tmp_path / "secret.pt").chmod(0o640)
    tmp_path.chmod(0o750)
    found = listed(tmp_path)
    assert (found.files[0].mode, found.folders[0].mode) == (0o640, 0o750)


def test_links_inside_say_where_they_lead_from_where_they_are(tmp_path):
    (tmp_path / "steps" / "2").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(tmp_path / "steps" / "2")
    (tmp_path / "steps" / "up").symlink_to("..")
    (tmp_path / "steps" / "again").symlink_to("../latest")
    assert {link.path: link.target for link in listed(tmp_path).links} == {
        "latest": "steps/2",
        "steps/again": "2",
        "steps/up": "..",
    }


def test_links_that_lead_nowhere_stay_as_they_are(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    (tmp_path / "gone").symlink_to("/nowhere/at/all")
    assert {link.path: link.target for link in listed(tmp_path).links} == {
        "gone": "/nowhere/at/all",
        "one": "two",
        "two": "one",
    }


@pytest.mark.parametrize("target", ["../outside.pt", "..", "{}/outside.pt", "../inside-not"])
def test_a_link_out_of_the_directory_is_refused(tmp_path, target):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside-not").mkdir()
    (tmp_path / "outside.pt").write_bytes(b"")
    (tmp_path / "inside" / "x.pt").symlink_to(target.format(tmp_path))
    with pytest.raises(NotACheckpoint, match="a symbolic link out of its directory") as caught:
        listed(tmp_path / "inside")
    assert caught.value.path == str(tmp_path / "inside" / "x.pt")


@pytest.fixture
def snapshot(tmp_path):
    """A snapshot in the cache of huggingface_hub, whose files are links."""
    folder = tmp_path / "models--who--what" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (folder.parent.parent / "blobs").mkdir()
    (folder.parent.parent / "blobs" / "feed").write_bytes(b"12345")
    (folder / "model.bin").symlink_to("../../blobs/feed")
    return folder


def test_the_files_of_a_cached_snapshot_are_its_own(snapshot):
    found = listed(snapshot)
    assert [(file.path, file.size_bytes) for file in found.files] == [("model.bin", 5)]
    assert not found.links
    found.require_unchanged(found.files[0])
    (snapshot / "model.bin").resolve().write_bytes(b"123456")
    with pytest.raises(SourceChanged):
        found.require_unchanged(found.files[0])


@pytest.mark.parametrize("target", ["../../refs/main", "../../blobs", "../../blobs/more/feed"])
def test_a_snapshot_leads_nowhere_but_to_its_blobs(snapshot, target):
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "blobs" / "more").mkdir()
    for name in ("refs/main", "blobs/more/feed"):
        (snapshot.parent.parent / name).write_bytes(b"")
    (snapshot / "x.bin").symlink_to(target)
    with pytest.raises(NotACheckpoint, match="a symbolic link out of its directory"):
        listed(snapshot)


def test_a_directory_may_itself_be_named_by_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x.pt").write_bytes(b"")
    (tmp_path / "real" / "y.pt").symlink_to("x.pt")
    (tmp_path / "link").symlink_to("real")
    assert listed(tmp_path / "link").names == {"x.pt", "y.pt"}


def test_pipes_and_sockets_are_refused_by_name_and_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotACheckpoint, match="a named pipe") as caught:
        listed(tmp_path)
    assert caught.value.path == str(tmp_path / "pipe")
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        old = Path.cwd()
        os.chdir(tmp_path)  # the address of a socket is short
        try:
            bound.bind("port")
        finally:
            os.chdir(old)
        with pytest.raises(NotACheckpoint, match="a socket"):
            listed(tmp_path)


def test_entries_are_bounded(tmp_path):
    (tmp_path / "more").mkdir()
    for number in range(5):
        (tmp_path / f"{number}.txt").touch()
        (tmp_path / "more" / f"{number}.txt").touch()
    assert len(listed(tmp_path, entries=11).files) == 10
    for most in (10, 3):
        with pytest.raises(LimitExceeded, match="entries of a directory") as caught:
            listed(tmp_path, entries=most)
        assert (caught.value.limit, caught.value.actual) == (most, most + 1)


def test_folders_inside_of_each_other_are_bounded(tmp_path, monkeypatch):
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    monkeypatch.setattr(listing, "DEEPEST", 3)
    assert [folder.path for folder in listed(tmp_path).folders] == ["", "a", "a/b", "a/b/c"]
    monkeypatch.setattr(listing, "DEEPEST", 2)
    with pytest.raises(LimitExceeded, match="folders inside of each other"):
        listed(tmp_path)


def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    (tmp_path / "shut").mkdir()
    real = os.scandir

    def refuse(path):
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(AccessFailed, match="Permission denied") as caught:
        listed(tmp_path)
    assert caught.value.path == str(tmp_path / "shut")


@pytest.mark.parametrize("change", ["written", "replaced", "removed"])
def test_a_file_that_changes_is_noticed(tmp_path, change):
    (tmp_path / "x.pt").write_bytes(b"123")
    found = listed(tmp_path)
    found.require_unchanged(found.files[0])
    if change == "written":
        (tmp_path / "x.pt").write_bytes(b"1234")
    elif change == "replaced":
        (tmp_path / "y.pt").write_bytes(b"123")
        (tmp_path / "y.pt").rename(tmp_path / "x.pt")
    else:
        (tmp_path / "x.pt").unlink()
    with pytest.raises(SourceChanged):
        found.require_unchanged(found.files[0])

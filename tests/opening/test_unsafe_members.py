"""An archive that is not safe to unpack is named (F815), and never copied."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

import ckptmove
from ckptmove.conversion.archive import UnsafeMember
from ckptmove.io.locations import leads_out

CHECKPOINT = (Path(__file__).parents[2] / "sample_ckpts" / "adam-mps.pt").read_bytes()


def zipped(path, *members):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.pt", CHECKPOINT)
        for name, mode, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.create_system = 3
            archive.writestr(info, content)
    return path


def tarred(path, *members):
    with tarfile.open(path, "w") as archive:
        for name, kind, mode, link in (("a.pt", tarfile.REGTYPE, 0o644, ""), *members):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.linkname = kind, mode, link
            info.size = len(CHECKPOINT) if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(CHECKPOINT))
    return path


FILE, FOLDER, LINK = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o2755, stat.S_IFLNK | 0o777
UNSAFE = {
    "parent": (zipped, ("../b.pt", FILE, CHECKPOINT)),
    "inner-parent": (zipped, ("b/../../b.pt", FILE, CHECKPOINT)),
    "absolute": (zipped, ("/b.pt", FILE, CHECKPOINT)),
    "drive": (zipped, ("C:b.pt", FILE, CHECKPOINT)),
    "backslashes": (zipped, ("..\\b.pt", FILE, CHECKPOINT)),
    "setuid": (zipped, ("b.pt", FILE | stat.S_ISUID, CHECKPOINT)),
    "device": (zipped, ("b.pt", stat.S_IFCHR | 0o644, CHECKPOINT)),
    "link-out": (zipped, ("b.pt", LINK, b"../b.pt")),
    "tar-parent": (tarred, ("../b.pt", tarfile.REGTYPE, 0o644, "")),
    "tar-setgid": (tarred, ("b.pt", tarfile.REGTYPE, 0o2755, "")),
    "tar-link-out": (tarred, ("in/b.pt", tarfile.SYMTYPE, 0o777, "../../b.pt")),
    "tar-hard-link-out": (tarred, ("b.pt", tarfile.LNKTYPE, 0o644, "/etc/hostname")),
    "tar-pipe": (tarred, ("b.pt", tarfile.FIFOTYPE, 0o644, "")),
}
SAFE = {
    "files": (zipped, ("b..c/d.pt", FILE, CHECKPOINT)),
    "folder": (zipped, ("b/", FOLDER, b"")),
    "link": (zipped, ("b/c.txt", LINK, b"../a.pt")),
    "tar-folder": (tarred, ("b", tarfile.DIRTYPE, 0o2755, "")),
    "tar-link": (tarred, ("b/c.pt", tarfile.SYMTYPE, 0o777, "../a.pt")),
}


def names(path):
    """The places of the finding F815."""
    findings = ckptmove.inspect(path).findings
    return [place for one in findings if one.code == "F815" for place in one.where]


@pytest.mark.parametrize(("make", "member"), UNSAFE.values(), ids=UNSAFE)
def test_an_unsafe_member_is_named_and_not_copied(tmp_path, make, member):
    path = make(tmp_path / "a", member)
    assert names(path) == [member[0]]
    for options in ({}, {"dry_run": True}, {"force": True}):
        with pytest.raises(UnsafeMember) as caught:
            ckptmove.convert(path, to="cpu", output=tmp_path / "b", **options)
        assert caught.value.name == member[0]
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_unsafe_checkpoint_that_is_dropped_is_in_no_copy(tmp_path, dry_run):
    path = zipped(tmp_path / "a.zip", ("../x.pt", 0o644, CHECKPOINT))
    with pytest.raises(UnsafeMember):
        ckptmove.convert(path, drop="a.pt*", output=tmp_path / "b.zip", dry_run=dry_run)
    ckptmove.convert(path, drop="../x.pt*", output=tmp_path / "c.zip", dry_run=dry_run)
    assert dry_run or not names(tmp_path / "c.zip")


@pytest.mark.parametrize(("make", "member"), SAFE.values(), ids=SAFE)
def test_others_are_copied(tmp_path, make, member):
    path = make(tmp_path / "a", member)
    assert not names(path)
    ckptmove.convert(path, to="cpu", output=tmp_path / "b")
    assert not names(tmp_path / "b")


def test_modes_of_another_system_mean_nothing(tmp_path):
    path = zipped(tmp_path / "a", ("b.pt", FILE | stat.S_ISUID, CHECKPOINT))
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 5] = 0  # written on Windows
    path.write_bytes(data)
    assert not names(path)


def test_a_name_leads_out_on_any_system():
    assert all(map(leads_out, ("..", "../a", "a/../../b", "/a", "\\a", "a\\..\\b", "C:\\a", "c:a")))
    assert not any(map(leads_out, ("a", "a/b", "..a", "a..", "./a", "ab:c", "a/", "")))

"""Pickles that a load of the checkpoint does not read: `inspect` names their imports, and where they are."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile

import pytest
import torch

import ckptmove
from ckptmove.formats.salvage import Salvage
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from tests.hostile.conftest import saved

EVIL = b"\x80\x04cbuiltins\nexec\nX\x01\0\0\x001\x85R."
LEGACY = {"_use_new_zipfile_serialization": False}


def tar(data):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo("x.pkl")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def with_pickle(archives, data):
    return archives.build(*archives.records(data_pkl=archives.Record(b"a/data.pkl", data)))


RECORDS = {
    "a pickle": lambda a: (b"a/extra.pkl", EVIL),
    "a pickle by another name": lambda a: (b"a/README.txt", EVIL),
    "a second pickle": lambda a: (b"a/extra.pkl", b"N." + EVIL),
    "a damaged pickle": lambda a: (b"a/extra.pkl", EVIL[:-1] + b"\xff"),
    "an archive of torch": lambda a: (b"a/inner.pt", with_pickle(a, EVIL)),
    "a legacy stream": lambda a: (b"a/inner.pt", saved({"w": torch.ones(2)}, **LEGACY) + EVIL),
    "a tar": lambda a: (b"a/inner.tar", tar(EVIL)),
    "an archive in an archive": lambda a: (b"a/inner.zip", a.build(a.Record(b"x.pt", with_pickle(a, EVIL)))),
    "among the storages": lambda a: (b"a/data/evil", EVIL),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_the_imports_of_a_record(archives, file_of, name) -> None:
    record, data = RECORDS[name](archives)
    result = ckptmove.inspect(file_of(archives.build(*archives.records(), archives.Record(record, data))))
    assert {use.record for use in result.inventory.apart} == {record.decode()}
    (finding,) = [one for one in result.findings if one.code == "S702"]
    assert record.decode() in finding.message
    assert "S701" not in {one.code for one in result.findings}  # torch.load does not read it
    uses = result.to_dict()["checkpoints"][0]["globals"]
    assert ("builtins.exec", record.decode()) in {(use["name"], use["record"]) for use in uses}


def test_deflated_records(file_of, tmp_path) -> None:
    stream = io.BytesIO(saved({"w": torch.ones(2)}))
    with zipfile.ZipFile(stream, "a", zipfile.ZIP_DEFLATED) as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/extra", EVIL)
        archive.writestr(f"{folder}/large.pkl", EVIL + bytes(range(256)) * 200 + bytes(1 << 20))
        archive.writestr(f"{folder}/large.txt", b"".join(b"%d " % number for number in range(100_000)))
    result = ckptmove.inspect(file_of(stream.getvalue()))
    assert {use.record for use in result.inventory.apart} == {f"{folder}/extra", f"{folder}/large.pkl"}


def test_the_pickle_after_data_pkl(archives, file_of) -> None:
    result = ckptmove.inspect(file_of(with_pickle(archives, archives.pickle + EVIL)))
    assert {use.record for use in result.inventory.apart} == {"bytes after the end of data.pkl"}
    assert "S702" in {one.code for one in result.findings}


def test_what_is_nested_too_deeply_is_a_finding(archives, file_of) -> None:
    data = with_pickle(archives, EVIL)
    for _ in range(3):
        data = archives.build(archives.Record(b"x.pt", data))
    result = ckptmove.inspect(file_of(archives.build(*archives.records(), archives.Record(b"a/inner.zip", data))))
    findings = {one.code: one for one in result.findings}
    assert findings.keys() == {"F804", "S702"}  # a local header is found at any depth
    assert findings["F804"].where == ("a/inner.zip/x.pt/x.pt",)
    assert not findings["F804"].fix  # to unpack it is no remedy


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_records_of_a_script(tmp_path) -> None:
    path = tmp_path / "script.pt"
    module = torch.jit.script(torch.nn.Linear(2, 2))
    torch.jit.save(module, str(path), _extra_files={"notes.txt": "class Notes\nof mine\n"})
    assert ckptmove.inspect(str(path)).inventory.apart == ()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("script/extra/evil", EVIL)
        archive.writestr("script/extra/own", b"\x80\x02c__torch__.torch.nn\nLinear\n.")
    assert {use.record for use in ckptmove.inspect(str(path)).inventory.apart} == {"script/extra/evil"}


def test_the_other_members_of_a_tar(tmp_path) -> None:
    path = tmp_path / "old.pt"
    members = {
        "storages": pickle.dumps(0, 2) + pickle.dumps([], 2),
        "tensors": pickle.dumps(0, 2) + EVIL,
        "pickle": pickle.dumps({"n": 1}, 2),
        "more": EVIL,
    }
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    found = {use.record for use in ckptmove.inspect(str(path)).inventory.apart}
    assert found == {"more", "bytes after the last pickle of 'tensors'"}


def test_tensors_in_a_pickle_are_read_and_not_called(archives, file_of) -> None:
    data = pickle.dumps({"w": torch.ones(2)})
    result = ckptmove.inspect(file_of(archives.build(*archives.records(), archives.Record(b"a/x.pkl", data))))
    assert result.inventory.apart
    assert result.findings == ()


def test_a_sound_archive_that_is_nested_too_deeply_can_be_unpacked(archives, file_of) -> None:
    data = with_pickle(archives, archives.pickle)
    for _ in range(3):
        data = archives.build(archives.Record(b"x.pt", data))
    result = ckptmove.inspect(file_of(archives.build(*archives.records(), archives.Record(b"a/inner.zip", data))))
    (finding,) = result.findings
    assert finding.code == "F804"
    assert finding.fix


def test_archives_without_a_directory_are_named_once(archives) -> None:
    data = with_pickle(archives, EVIL)
    for _ in range(3):
        data = archives.build(archives.Record(b"x.pt", data))
    salvage = Salvage(Limits())
    salvage.read(MemorySource("x", archives.Record(b"a", data).header() + data + bytes(70_000)), "x")
    assert [*salvage.unread] == ["x/a/x.pt"]


def test_a_pickle_of_a_long_line_is_not_read() -> None:
    limits = Limits()._replace(string_bytes=1 << 10)
    salvage = Salvage(limits)
    salvage.read(MemorySource("x", b"V" + b"a" * 5000 + b"\n0" + EVIL), "x")
    assert [*salvage.unread] == ["x"]


def salvaged(data, limits=None):
    salvage = Salvage(limits or Limits())
    salvage.read(MemorySource("x", data), "x")
    return salvage


def test_records_after_too_many_are_not_read(archives, monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.formats.salvage._MOST_RECORDS", 0)
    assert [*salvaged(archives.build(*archives.records())).unread] == ["x"]


def test_a_pickle_with_a_second_one_beyond_a_limit_is_not_read() -> None:
    salvage = salvaged(b"N." + EVIL, Limits()._replace(pickle_bytes=8))
    assert [*salvage.unread] == ["x"]


def test_only_files_of_a_tar_are_read_up_to_its_damage() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        info = tarfile.TarInfo("x.pkl")
        info.size = len(EVIL)
        archive.addfile(info, io.BytesIO(EVIL))
    data = stream.getvalue()[:1536] + b"junk" * 500
    assert [*salvaged(data).machine.runs] == ["builtins.exec"]


def test_records_that_only_say_they_are_deflated(archives) -> None:
    record = archives.Record(b"a/x", b"no stream" * 4, central={"method": 8}, local={"method": 8})
    assert not salvaged(archives.build(record)).machine.globals

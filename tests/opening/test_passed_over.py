"""Other content and missing parts of an archive of checkpoints: reported, and copied byte for byte."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile

import pytest
import torch
from typer.testing import CliRunner

import ckptmove
from ckptmove import limits as of_files
from ckptmove.cli.app import app
from ckptmove.errors import EmptyDirectory, LimitExceeded
from ckptmove.limits import Limits
from ckptmove.model import Severity

FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}


def saved(**tensors):
    stream = io.BytesIO()
    torch.save(tensors or {"w": torch.ones(3)}, stream)
    return stream.getvalue()


def tar_of(files, form=tarfile.GNU_FORMAT):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def zip_of(files, method=zipfile.ZIP_STORED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return stream.getvalue()


def deflated(files):
    return zip_of(files, zipfile.ZIP_DEFLATED)


def without_end(tar):
    """A tar that is cut off after its last member."""
    kept = tar.rstrip(b"\0")
    return kept + bytes(-len(kept) % tarfile.BLOCKSIZE)


CHECKPOINT = saved()
FILES = {"model.pt": CHECKPOINT}
#: Nothing that deflate makes much of, and more of it than is looked at.
NOISE = b"".join(struct.pack("<Q", place * 0x9E3779B97F4A7C15 % 2**64) for place in range(1 << 18))


@pytest.fixture
def findings(tmp_path):
    """Findings in a file of these bytes."""

    def findings(data, **options):
        path = tmp_path / "model.nemo"
        path.write_bytes(data)
        return [one for one in ckptmove.inspect(path, **options).findings if one.code.startswith("F8")]

    return findings


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return json.loads(result.stdout)


# --- a tar that ends early --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_a_tar_without_its_end_is_told(findings, form):
    whole = tar_of(FILES | {"notes.txt": b"hello"}, FORMATS[form])
    assert findings(whole) == []
    (finding,) = findings(without_end(whole))
    assert (finding.code, finding.severity) == ("F802", Severity.WARNING)
    assert "more members" in finding.message
    assert finding.where == ("the blocks of zeros at the end of the tar",)
    assert "model.nemo" in finding.fix


@pytest.mark.parametrize("end", [512, 1024, 3000])
def test_a_tar_with_an_end_of_any_length_is_whole(findings, end):
    assert findings(without_end(tar_of(FILES)) + bytes(end)) == []


def test_tars_one_behind_the_other_and_bytes_behind_the_end_are_no_loss(findings):
    assert findings(tar_of(FILES) + tar_of({"second.pt": CHECKPOINT})) == []
    assert findings(tar_of(FILES) + b"signature") == []


def test_what_else_is_lost_is_a_finding_of_its_own(findings):
    with zipfile.ZipFile(io.BytesIO(CHECKPOINT)) as archive:
        records = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/data/0")}
    both = findings(without_end(tar_of({"model.pt": zip_of(records)})))
    assert [(one.code, one.severity) for one in both] == [("F802", Severity.WARNING), ("F802", Severity.ERROR)]
    assert "(1x, 12 bytes)" in both[1].message


@pytest.mark.parametrize("rest", [b"", bytes(100)])
def test_a_conversion_of_it_loses_nothing_more(tmp_path, rest):
    path, output = tmp_path / "cut.nemo", tmp_path / "out.nemo"
    path.write_bytes(without_end(tar_of({"a.txt": b"1"} | FILES | {"z.txt": b"2"})) + rest)
    document = run("convert", path, "--to", "cuda:0", "-o", output)
    assert sum("F802" in note for note in document["notes"]) == 1
    with tarfile.open(path) as before, tarfile.open(output) as after:
        assert after.getnames() == before.getnames()
    ckptmove.convert(output, to="cpu", output=tmp_path / "back.nemo")
    assert (tmp_path / "back.nemo").read_bytes() == path.read_bytes()


def test_nothing_is_proven_of_it(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    whole = tar_of({"run.pt": saved(model={"w": weight.detach()}, optimizer=optimizer.state_dict())})
    outcomes = []
    for data in (whole, without_end(whole)):
        (tmp_path / "run.tar").write_bytes(data)
        result = ckptmove.verify(tmp_path / "run.tar")
        outcomes.append((result.passed, next(check for check in result.checks if check.name == "file").status))
    assert outcomes == [(True, "passed"), (False, "failed")]
    assert [one.code for one in result.findings if one.code.startswith("F")] == ["F802"]


# --- an archive inside of an archive ----------------------------------------------------------------------------------

INNER = {
    "more.zip": zip_of(FILES),
    "packed.zip": deflated(FILES),
    "more.tar": tar_of(FILES),
    "cut.tar": without_end(tar_of({"notes.txt": b"hello"})),
    "broken.tar": tar_of({"notes.txt": b"hello"})[:1024] + b"?" * 512,
    "more.tar.gz": gzip.compress(tar_of(FILES), 1),
    "long.tar.gz": gzip.compress(tar_of({"noise": NOISE} | FILES), 1),
    "model.pt.gz": gzip.compress(CHECKPOINT, 1),
    "pieces.pt.gz": gzip.compress(CHECKPOINT[:1], 1) + gzip.compress(CHECKPOINT[1:], 1),
    "broken.tar.gz": gzip.compress(tar_of(FILES), 1)[:10] + b"?" * 100,
    "zips.zip": zip_of({"more.zip": zip_of(FILES)}),
    "more.tar.bz2": b"BZh91AY&SY" + bytes(100),
    "more.7z": b"7z\xbc\xaf\x27\x1c" + bytes(100),
    "two.tar": tar_of({"a": b"1"})[:1024] + tar_of({"a": b"2"}),
}
OTHERS = {
    "arrays.npz": zip_of({"w.npy": b"\x93NUMPY\1\0" + bytes(100)}),
    "letter.docx": deflated({"[Content_Types].xml": b"<xml/>", "word/document.xml": b"<xml/>" * 2000}),
    "texts.tar": tar_of({"notes.txt": b"hello"}),
    "log.gz": gzip.compress(b"hello\n" * 1000, 1),
    "logs.gz": gzip.compress(b"hello\n", 1) + gzip.compress(b"hello\n", 1) + bytes(20),
    "log.bz2": b"BZh91AY&SY" + bytes(100),
    "texts.tar.gz": gzip.compress(tar_of({"notes.txt": b"hello"}), 1),
    "apple.zip": zip_of({"__MACOSX/._model.pt": CHECKPOINT, "notes.txt": b"hello"}),
}
OUTER = {"zip": zip_of, "deflated": deflated, "tar": tar_of}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("name", INNER)
def test_an_archive_in_it_that_may_hold_checkpoints_is_told(findings, outer, name):
    (finding,) = findings(OUTER[outer](FILES | {name: INNER[name], "notes.txt": b"hello"}))
    assert (finding.code, finding.severity, finding.where) == ("F804", Severity.WARNING, (name,))
    assert f"({len(INNER[name]):,} bytes)" in finding.message
    assert "unpack" in finding.fix
    assert name in finding.fix


@pytest.mark.parametrize("outer", OUTER)
def test_an_archive_of_something_else_is_a_file_like_any_other(findings, outer):
    assert findings(OUTER[outer](FILES | OTHERS)) == []


def test_a_compressed_tar_is_looked_at_from_its_beginning(findings):
    assert findings(deflated(FILES | {"texts.tar": tar_of({"notes.txt": b"hello", "noise": NOISE[:4096]})})) == []
    (finding,) = findings(deflated(FILES | {"long.tar": tar_of({"notes.txt": b"hello", "noise": NOISE})}))
    assert finding.where == ("long.tar",)


@pytest.mark.parametrize("outer", ["zip", "tar"])
def test_a_conversion_copies_it_and_says_so(tmp_path, outer):
    path = tmp_path / "outer"
    path.write_bytes(OUTER[outer](FILES | {f"{place}.zip": zip_of(FILES) for place in range(5)} | OTHERS))
    (note,) = ckptmove.convert(path, to="cuda:0").warnings
    assert note.endswith(": 0.zip, 1.zip, 2.zip and 2 more")
    path.write_bytes(OUTER[outer](FILES | OTHERS))
    assert not ckptmove.convert(path, to="cuda:0", force=True).warnings


def test_in_a_directory_any_archive_can_be_named_itself(tmp_path):
    for name, data in (FILES | INNER).items():
        (tmp_path / name).write_bytes(data)
    [note] = ckptmove.inspect(tmp_path).findings
    assert (note.code, note.severity) == ("S705", Severity.INFO)
    assert note.where == tuple(sorted(INNER))


def test_where_there_is_nothing_else_it_is_named(tmp_path):
    path = tmp_path / "outer.tar"
    path.write_bytes(tar_of({"notes.txt": b"hello", "more.zip": zip_of(FILES)}))
    with pytest.raises(EmptyDirectory, match=r"'more\.zip'") as caught:
        ckptmove.inspect(path)
    assert (caught.value.form, caught.value.inner) == ("tar", "more.zip")


def test_many_are_one_finding_and_orphans_are_another(findings):
    with zipfile.ZipFile(io.BytesIO(CHECKPOINT)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    orphan = zip_of(records | {"archive/data/99": b"1234"})
    more = {f"{place}.zip": zip_of(FILES) for place in range(3)}
    first, second = findings(tar_of({"model.pt": orphan} | more))
    assert first.where == ("0.zip", "1.zip", "2.zip")
    assert second.message.startswith("4 bytes in 1 record ")


# --- compressed members -----------------------------------------------------------------------------------------------

OPERATIONS = b"\x80\x02" + b"N0" * 40_000 + b"N."


@pytest.mark.unmeasured
def test_few_bytes_that_inflate_to_many_operations_are_refused(tmp_path, monkeypatch):
    assert of_files._OPERATIONS == 2**21
    monkeypatch.setattr(of_files, "_OPERATIONS", 2**17)
    path = tmp_path / "bomb.zip"
    path.write_bytes(deflated(FILES | {"a.pkl": OPERATIONS, "b.pkl": OPERATIONS}))
    with pytest.raises(LimitExceeded, match="operations") as caught:
        ckptmove.inspect(path)
    assert caught.value.path.endswith("a.pkl")
    assert caught.value.limit < 2**17 // 3 + 16 * path.stat().st_size
    assert len(ckptmove.inspect(path, limits=Limits().times(10)).inventory.files) == 3
    path.write_bytes(zip_of(FILES | {"a.pkl": OPERATIONS}))
    assert len(ckptmove.inspect(path).inventory.files) == 2


def test_all_compressed_members_share_what_any_may_have(tmp_path, monkeypatch):
    monkeypatch.setattr(of_files, "_OPERATIONS", 3_000)
    one = OPERATIONS[:2_000] + b"N."
    (tmp_path / "one.zip").write_bytes(deflated({"0.pkl": one}))
    assert len(ckptmove.inspect(tmp_path / "one.zip").inventory.files) == 1
    (tmp_path / "many.zip").write_bytes(deflated({f"{place}.pkl": one for place in range(9)}))
    with pytest.raises(LimitExceeded, match="operations"):
        ckptmove.inspect(tmp_path / "many.zip")


def test_few_bytes_that_inflate_to_a_long_pickle_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.zip"
    path.write_bytes(
        deflated({"a.pkl": b"\x80\x03(" + (b"X\x20\0\0\0" + b"a" * 32) * 5_000 + b"l.", "b.txt": b"hello"})
    )
    assert len(ckptmove.inspect(path).inventory.files) == 1
    monkeypatch.setattr(of_files, "_PICKLE_BYTES", 100_000)
    monkeypatch.setattr(of_files, "_PICKLE_BYTES_PER_BYTE", 1)
    with pytest.raises(LimitExceeded, match=r"bytes: \d+ > 100\d\d\d"):
        ckptmove.inspect(path)


@pytest.mark.parametrize(
    ("limits", "message"),
    [(Limits(operations=10), "pickle operations: 11 > 10"), (Limits(pickle_bytes=50), r"pickle bytes: \d+ > 50")],
)
def test_a_lower_limit_of_the_user_counts(tmp_path, limits, message):
    path = tmp_path / "model.zip"
    path.write_bytes(deflated(FILES))
    with pytest.raises(LimitExceeded, match=message):
        ckptmove.inspect(path, limits=limits)


def test_a_checkpoint_of_many_tensors_may_be_compressed(tmp_path):
    path = tmp_path / "model.zip"
    path.write_bytes(deflated({"model.pt": saved(**{f"layer{place}": torch.zeros(1) for place in range(2_000)})}))
    assert len(ckptmove.inspect(path).inventory.tensors) == 2_000

"""`find_fixes` and `write`: the edits that are kept, the edited files, and the files on the disk."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmove.errors import CaseUnusable, NotDurable, SourceChanged, WriteFailed
from ckptmove.io.sink import FileSink
from ckptmove.proof.checks import failed, passed, skipped
from ckptmove.proof.evidence import NOT_KNOWN, Verdict
from ckptmove.proof.request import VerifyRequest
from ckptmove.proof.source_edits import Edit, FixNotWritten, digest, lines_of
from ckptmove.training.code import entrance
from ckptmove.training.fixes.apply import find_fixes, fixed_files, write

SOURCE = b"a = 1\nb = 2\n"
CLEAN = Verdict(
    path="run.pth", target="cpu", mode="cpu", passed=True, proven=True, checks=(passed("case", "fine"),), findings=()
)


def at(check):
    return replace(CLEAN, passed=False, checks=(check,))


def insertion(path, text="n = 0", number=1, content=SOURCE):
    return Edit(str(path), "before", number, number, text, digest(lines_of(content)))


def faulty(edit, tensor="x", number=2, **figures):
    """The verdict on a fault with an edit."""
    evidence = {"tensor": tensor, "file": edit.path, "line": number, "edit": edit._asdict(), **figures}
    return at(failed("case", "a fault", f"before {edit.path}: {edit.text}", **evidence))


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_bytes(SOURCE)
    return path


@pytest.fixture
def found(script):
    """The fixes of a script whose runs end with given verdicts, one after the other; the last one repeats."""

    def found(*verdicts, **options):
        def verify(request):
            runs.append(request.edits)
            return verdicts[min(len(runs), len(verdicts)) - 1]

        runs = []
        request = VerifyRequest(**{"path": "run.pth", "case": f"{script.name}:case", **options})
        fixes = find_fixes(request, verify)
        assert script.read_bytes() == SOURCE
        return fixes, runs

    return found


def test_a_case_that_passes_needs_one_run(found):
    fixes, runs = found(CLEAN)
    assert (fixes.first, fixes.last, fixes.files, fixes.unfixed, runs) == (CLEAN, CLEAN, (), "", [()])


def test_each_run_has_the_edits_so_far(found, script):
    first = insertion(script)
    second = insertion(script, "m = 0", 4, content=b"n = 0\n" + SOURCE + b"c\n")._replace(
        how="after", first=3, last=3, sha256=digest(lines_of(b"n = 0\n" + SOURCE))
    )
    fixes, runs = found(faulty(first), faulty(second, "y", file="model.py"), CLEAN)
    assert runs == [(), (first,), (first, second)]
    assert (fixes.last, fixes.unfixed) == (CLEAN, "")
    assert fixes.first.passed is False
    (file,) = fixes.files
    assert (file.path, file.after) == (str(script), b"n = 0\na = 1\nb = 2\nm = 0\n")


def test_a_fix_that_does_not_end_its_fault_is_left_out(found, script):
    first = insertion(script)
    second = insertion(script, "m = 0", content=b"n = 0\n" + SOURCE)
    stuck = faulty(second, "y")
    again = second._replace(first=2, last=2)
    fixes, runs = found(faulty(first), stuck, faulty(again, "y", number=3))
    assert len(runs) == 3
    assert fixes.last is stuck, "the verdict is that on the files without the last edit"
    assert fixes.files[0].after == b"n = 0\n" + SOURCE
    assert "left out" in fixes.unfixed
    assert "m = 0" in fixes.unfixed


def test_a_fault_with_another_fix_is_fixed_again(found, script):
    first, second = insertion(script), insertion(script, "m = 0", content=b"n = 0\n" + SOURCE)
    fixes, runs = found(faulty(first), faulty(second, number=3), CLEAN)
    assert runs == [(), (first,), (first, second)]
    assert (fixes.last, fixes.unfixed) == (CLEAN, "")


def test_a_fault_that_keeps_no_edit_leaves_its_fix_out(found, script):
    edit = insertion(script)
    stuck = at(failed("case", "a fault", "by hand", tensor="x", file="train.py", line=3))
    fixes, _ = found(faulty(edit), stuck)
    assert not fixes.files
    assert "left out" in fixes.unfixed


def test_a_fault_that_another_fix_brings_back_ends_the_search(found, script):
    first, second = insertion(script), insertion(script, "m = 0", content=b"n = 0\n" + SOURCE)
    fixes, runs = found(faulty(first), faulty(second, "y", number=3), faulty(first, number=4))
    assert len(runs) == 3
    assert [file.edits for file in fixes.files] == [(first,)]


def test_edits_before_one_that_makes_the_case_unusable_are_kept(script):
    first, second = insertion(script), insertion(script, "m = 0", content=b"n = 0\n" + SOURCE)

    def verify(request):
        if second in request.edits:
            raise CaseUnusable("case returns an int")
        return faulty(second, "y") if request.edits else faulty(first)

    fixes = find_fixes(VerifyRequest(path="run.pth", case="train.py:case"), verify)
    assert [file.edits for file in fixes.files] == [(first,)]
    assert dict(fixes.last.checks[-1].evidence)["tensor"] == "y"
    assert "case returns an int" in fixes.unfixed
    assert "m = 0" in fixes.unfixed
    with pytest.raises(CaseUnusable):
        find_fixes(VerifyRequest(path="run.pth", case="train.py:case", edits=(second,)), verify)


def test_a_fault_without_a_line_is_known_by_its_text(found, script):
    edit = insertion(script)
    verdict = at(failed("case", "no line", "a fix", edit=edit._asdict()))
    fixes, runs = found(verdict)
    assert len(runs) == 2
    assert not fixes.files
    assert "left out" in fixes.unfixed


def test_the_number_of_fixes_is_bounded(script):
    content = [SOURCE]

    def verify(request):
        content.extend([request.edits[-1].applied(content[-1])] if request.edits else [])
        number = len(request.edits)
        return faulty(insertion(script, f"n = {number}", content=content[-1]), f"tensor {number}", 9)

    fixes = find_fixes(VerifyRequest(path="run.pth", case="train.py:case"), verify)
    assert len(fixes.files[0].edits) == 20
    assert "20 fixes" in fixes.unfixed


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (skipped("case", "not supported by the simulation"), "skipped"),
        (failed("case", "a fault", "move it by hand"), "move it by hand"),
        (failed("case", "a fault"), "no fix is known"),
        (failed("script", "no step within the time limit", timed_out=True), NOT_KNOWN),
        (failed("case", "took longer than 5 s", timeout=5.0), NOT_KNOWN),
    ],
)
def test_the_reason_for_no_edit_is_reported(found, check, reason):
    fixes, runs = found(at(check))
    assert reason in fixes.unfixed
    assert (len(runs), fixes.files) == (1, ())


@pytest.fixture
def refused(found):
    """The reason why a file is not edited."""

    def refused(file, **options):
        fixes, runs = found(faulty(insertion(file, content=file.read_bytes())), CLEAN, **options)
        assert bool(fixes.unfixed) == (len(runs) == 1) == (fixes.files == ())
        return fixes.unfixed

    return refused


def written(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(SOURCE)
    return path


@pytest.mark.parametrize("place", ["train.py", "package/model.py"])
def test_files_of_the_user_are_edited(refused, script, place):
    assert not refused(written(script.parent / place))


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("lib/site-packages/model.py", "installed library"),
        (".cache/modules/model.py", "generated file"),
        ("run/modeling.py", "file of the checkpoint"),
    ],
)
def test_files_of_others_are_not(refused, script, place, reason):
    path = written(script.parent / place)
    checkpoint = str(script.parent / "run") if place.startswith("run") else "run.pth"
    assert reason in refused(path, path=checkpoint)


def test_a_file_in_a_temporary_folder_is_edited_only_next_to_the_script(refused, script, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    assert "generated file" in refused(written(elsewhere / "model.py"))
    assert not refused(written(elsewhere / "train.py"), case=f"{elsewhere}/train.py:case")
    assert not refused(written(elsewhere / "model.py"), case=f"{elsewhere}/train.py:case")
    monkeypatch.setattr(tempfile, "tempdir", "/")
    monkeypatch.setattr(entrance, "_TEMPORARY", ())
    assert not refused(written(elsewhere / "model.py"))


def test_a_read_only_file_is_not_edited(refused, script):
    script.chmod(0o444)
    assert "train.py is read-only" in refused(script)


def test_a_file_that_cannot_be_opened_is_not_edited(found, script):
    fixes, _ = found(faulty(insertion(script.parent / "gone.py")))
    assert f"gone.py cannot be written: {os.strerror(errno.ENOENT)}" in fixes.unfixed


def test_a_file_whose_encoding_cannot_be_kept_is_not_edited(found, script):
    other = script.parent / "model.py"
    other.write_bytes(b"# coding: cp932\na = '\xee\xf9'\n")
    fixes, runs = found(faulty(Edit(str(other), "before", 1, 1, "n", "")))
    assert "model.py cannot be edited" in fixes.unfixed
    assert len(runs) == 1


def test_an_edit_of_another_content_is_refused(found, script):
    with pytest.raises(SourceChanged):
        found(faulty(insertion(script, content=b"other\n")))


@pytest.mark.parametrize(
    "change", [lambda path: path.write_bytes(b"mine\n"), Path.unlink, lambda path: (path.unlink(), path.mkdir())]
)
def test_a_file_that_changes_while_its_edits_are_verified_is_refused(script, change):
    def verify(request):
        if not request.edits:
            return faulty(insertion(script))
        change(script)
        return CLEAN

    with pytest.raises(SourceChanged):
        find_fixes(VerifyRequest(path="run.pth", case="train.py:case"), verify)


@pytest.mark.parametrize("tool", [["git", "apply"], ["patch", "-p1"]])
@pytest.mark.parametrize(
    "places", [["other dir/train.py"], ["here/a.py", "other dir/train.py"], ["here/a.py", "here/b/c.py"]]
)
def test_the_patch_applies_in_the_directory_that_it_names(tmp_path, monkeypatch, places, tool):
    paths = [written(tmp_path / place) for place in places]
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    edits = [insertion(path) for path in paths]
    verdicts = [*(faulty(edit, path.name) for edit, path in zip(edits, paths, strict=True)), CLEAN]
    fixes = find_fixes(
        VerifyRequest(path="run.pth", script=str(paths[-1])), lambda request: verdicts[len(request.edits)]
    )
    patch = "".join(one.diff for one in fixed_files(fixes.files))
    first = shlex.split(patch.splitlines()[0])
    home = first[-1] if first[0] == "#" else "."
    assert (first[:-1] == ["#", "patch", "-p1", "-d"]) == any("other" in place for place in places)
    subprocess.run(tool, cwd=home, input=patch, text=True, check=True)
    assert {path.read_bytes() for path in paths} == {b"n = 0\n" + SOURCE}


@pytest.fixture
def files(found, script):
    """The edited files of a script."""
    return found(faulty(insertion(script)), CLEAN)[0].files


def test_a_file_is_written_after_a_backup(files, script):
    script.chmod(0o755)
    (fixed,) = write(files)
    assert (fixed.path, fixed.fixes, fixed.backup) == ("train.py", 1, "train.py.bak")
    assert script.read_bytes() == b"n = 0\n" + SOURCE
    assert (script.parent / "train.py.bak").read_bytes() == SOURCE
    assert {stat.S_IMODE(one.stat().st_mode) for one in script.parent.iterdir()} == {0o755}


def test_another_backup_is_kept(files, script):
    backups = [script.with_name(f"train.py.bak{number}") for number in ("", 1, 2)]
    backups[0].write_bytes(b"mine\n")
    backups[1].mkdir()
    (fixed,) = write(files)
    assert fixed.backup == "train.py.bak2"
    assert backups[0].read_bytes() == b"mine\n"
    assert backups[2].read_bytes() == SOURCE


def test_a_backup_of_the_same_content_is_used_again(files, script):
    script.with_name("train.py.bak").write_bytes(SOURCE)
    assert [one.backup for one in write(files)] == ["train.py.bak"]
    assert {one.name for one in script.parent.iterdir()} == {"train.py", "train.py.bak"}


def test_the_target_of_a_link_is_written(found, script):
    home = script.parent / "src"
    home.mkdir()
    script.rename(home / "real.py")
    script.symlink_to("src/real.py")
    (fixed,) = write(found(faulty(insertion(script)), CLEAN)[0].files)
    assert (fixed.path, fixed.backup) == ("src/real.py", "src/real.py.bak")
    assert script.is_symlink()
    assert (home / "real.py").read_bytes() == b"n = 0\n" + SOURCE


def test_a_file_that_somebody_edits_before_it_is_written_is_refused(files, script):
    script.write_bytes(b"mine\n")
    with pytest.raises(SourceChanged):
        write(files)
    assert [*script.parent.iterdir()] == [script]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (WriteFailed("train.py", os.strerror(errno.ENOSPC)), FixNotWritten),
        (NotDurable("train.py", os.strerror(errno.EIO)), NotDurable),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_file_that_cannot_be_written_keeps_its_content(files, script, monkeypatch, raised, expected):
    commit = FileSink.commit

    def failing(sink, **options):
        if sink.path == str(script):
            raise raised
        commit(sink, **options)

    monkeypatch.setattr(FileSink, "commit", failing)
    with pytest.raises(expected):
        write(files)
    assert script.read_bytes() == SOURCE
    assert {one.name for one in script.parent.iterdir()} == {"train.py", "train.py.bak"}

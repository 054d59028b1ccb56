"""A new file that begins as a clone of its source, on a file system (simulated here) with clones."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from open_containers import open_container

from ckptmove.api import functions as api
from ckptmove.errors import WriteFailed
from ckptmove.io import cloning, new_file
from ckptmove.io.leftovers import clear_leftovers
from ckptmove.io.new_file import NewFile
from ckptmove.io.rewrite import write_segments
from ckptmove.io.segments import without_checks
from ckptmove.io.sink import FileSink
from ckptmove.limits import Limits
from ckptmove.model import Span

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "sample_ckpts" / "adam-mps.pt"
#: As fclonefileat(2) of macOS has it, but for the sharing: a new file, which must not be there yet.
LIBRARY = """
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

int fclonefileat(int source, int folder, const char *name, uint32_t flags) {
    struct stat found;
    char block[4096];
    ssize_t count;
    off_t at = 0;
    if (folder != -2 || flags != 2 || name[0] != '/' || fstat(source, &found)) return -1;
    int new = open(name, O_WRONLY | O_CREAT | O_EXCL, found.st_mode & 0777);
    if (new < 0) return -1;
    for (; (count = pread(source, block, sizeof block, at)) > 0; at += count)
        if (write(new, block, count) != count) return -1;
    return close(new);
}
"""


@pytest.fixture
def clones(monkeypatch):
    """A file system that clones, and the clones that were made."""
    made = []

    def make(source, clone):
        clone.write_bytes(os.pread(source, os.fstat(source).st_size, 0))
        os.chmod(clone, stat.S_IMODE(os.fstat(source).st_mode))  # noqa: PTH101  # one test patches Path.chmod
        made.append(clone)
        return True

    monkeypatch.setattr(cloning, "_cloned", make)
    return made


@pytest.fixture
def written(monkeypatch):
    """The bytes that are written by hand."""
    real, counts = os.write, []

    def write(fd, data):
        counts.append(len(data))
        return real(fd, data)

    monkeypatch.setattr(new_file.os, "write", write)
    return counts


@pytest.fixture
def big(tmp_path):
    """A file with two tensors of a mebibyte, and its folder."""
    torch = pytest.importorskip("torch")
    registry = torch.serialization._package_registry
    before = list(registry)
    registry.insert(0, (0, lambda storage: "cuda:3", lambda storage, location: None))
    try:
        path = tmp_path / "run" / "big.pt"
        path.parent.mkdir()
        torch.save({"a": torch.randn(1 << 18), "b": torch.randn(1 << 18)}, path)
    finally:
        registry[:] = before
    return path


@pytest.mark.parametrize("to", ["cpu", "mps", "cuda:0"])
def test_what_stays_where_it_is_is_not_written(big, clones, written, to):
    big.chmod(0o400)
    expected = api.convert(str(big), to=to, output=str(big.with_name("checked.pt")))
    assert not clones
    written.clear()
    result = api.convert(str(big), to=to, output=str(big.with_name("cloned.pt")), check=False)
    assert len(clones) == 1
    assert sum(written) < 10_000
    assert Path(result.output).read_bytes() == Path(expected.output).read_bytes()
    assert Path(result.output).stat().st_mode == Path(expected.output).stat().st_mode
    assert result.bytes_copied == expected.bytes_copied
    assert sorted(path.name for path in big.parent.iterdir()) == ["big.pt", "checked.pt", "cloned.pt"]


def test_what_moves_is_written(big, clones, written):
    """A longer pickle, which moves the tensors; the end of the archive before them stays."""

    def moved(output):
        container = open_container(str(big), Limits())
        pickle = container.object_pickle()
        longer = pickle[:2] + b"N0" * 9000 + pickle[2:]
        segments = without_checks(container.lay_out(longer, {}))
        assert any(getattr(one, "span", Span(0, 0)).nbytes > 1 << 20 for one in segments)
        with FileSink(str(output), force=False) as sink:
            write_segments(container.source, segments, sink, str(big))
            sink.commit()
        container.source.close()
        return output.read_bytes()

    cloned = moved(big.with_name("cloned.pt"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cloning, "_cloned", lambda source, clone: False)
        assert moved(big.with_name("copied.pt")) == cloned


def test_a_clone_is_claimed_until_it_has_its_name(big, clones):
    with big.open("rb") as source, FileSink(str(big.with_name("out.pt")), force=False) as sink:
        assert sink.clone(source.fileno())
        before = set(big.parent.iterdir())
        clear_leftovers(big.parent)
        assert set(big.parent.iterdir()) == before


def test_a_library_without_a_name_is_not_asked_for_clones(monkeypatch, tmp_path):
    def refuse(name):
        raise TypeError("argument of type 'NoneType' is not iterable")

    monkeypatch.delattr(os, "copy_file_range", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert not cloning._cloned(0, tmp_path / "clone")


def test_the_files_of_a_directory_are_clones_too(big, clones, written):
    shutil.copy(big, big.with_name("second.pt"))
    checked = api.convert(str(big.parent), to="cpu", output=str(big.parent.with_name("checked")))
    written.clear()
    cloned = api.convert(str(big.parent), to="cpu", output=str(big.parent.with_name("cloned")), check=False)
    assert len(clones) == 2
    assert sum(written) < 20_000
    for name in ("big.pt", "second.pt"):
        assert Path(cloned.output, name).read_bytes() == Path(checked.output, name).read_bytes()


@pytest.mark.parametrize("step", ["chmod", "open", "replace"])
def test_a_clone_that_cannot_be_had_is_a_copy(big, clones, monkeypatch, step):
    owner, name = {"chmod": (Path, "chmod"), "open": (cloning.os, "open"), "replace": (Path, "replace")}[step]
    real = getattr(owner, name)

    def refuse(path, *arguments):
        if str(path).endswith(".part") and (step != "open" or Path(path) in clones):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments)

    monkeypatch.setattr(owner, name, refuse)
    result = api.convert(str(big), to="cpu", check=False)
    monkeypatch.undo()
    checked = api.convert(str(big), to="cpu", output=str(big.with_name("checked.pt")))
    assert len(clones) == 1
    assert Path(result.output).read_bytes() == Path(checked.output).read_bytes()
    assert sorted(path.name for path in big.parent.iterdir()) == ["big.cpu.pt", "big.pt", "checked.pt"]


@pytest.mark.parametrize("step", ["chmod", "replace"])
def test_an_interruption_leaves_no_clone(big, clones, monkeypatch, step):
    def interrupt(path, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        api.convert(str(big), to="cpu", check=False)
    assert [path.name for path in big.parent.iterdir()] == ["big.pt"]


def test_a_clone_that_cannot_be_gone_through_is_a_failed_write(tmp_path):
    file = NewFile("out.pt", tmp_path / "new.pt", os.open(tmp_path / "new.pt", os.O_WRONLY | os.O_CREAT))
    file.close()
    with pytest.raises(WriteFailed) as caught:
        file.skip(1)
    assert (caught.value.path, caught.value.reason) == ("out.pt", os.strerror(errno.EBADF))


@pytest.mark.parametrize("system", ["Linux", "without clones", "without libraries"])
def test_who_has_no_clones_copies(tmp_path, monkeypatch, system):
    import ctypes

    if system != "Linux":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    if system == "without libraries":

        def refuse(name):
            raise OSError("no such library")

        monkeypatch.setattr(ctypes, "CDLL", refuse)
    shutil.copy(SAMPLE, tmp_path / "a.pt")
    result = api.convert(str(tmp_path / "a.pt"), to="cpu", check=False)
    checked = api.convert(str(SAMPLE), to="cpu", output=str(tmp_path / "checked.pt"))
    assert Path(result.output).read_bytes() == Path(checked.output).read_bytes()


def test_the_call_is_that_of_the_system(tmp_path, big):
    """The library is real, with the real signature. Only the sharing of blocks is not checked."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "clone.c").write_text(LIBRARY)
    library = tmp_path / "clone.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "clone.c"], check=True)
    program = (
        "import os, sys; vars(os).pop('copy_file_range', None)\n"
        "from ckptmove.io import cloning; real = cloning._cloned\n"
        "cloning._cloned = lambda *given: real(*given) and not print('cloned', file=sys.stderr)\n"
        "from ckptmove.cli.app import main; main()"
    )
    words = ["convert", str(big), "--to", "cpu", "--no-check", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == "cloned\n"
    checked = api.convert(str(big), to="cpu", output=str(tmp_path / "checked.pt"))
    assert big.with_name("big.cpu.pt").read_bytes() == Path(checked.output).read_bytes()

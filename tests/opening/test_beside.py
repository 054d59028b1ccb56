"""Files beside a checkpoint: none that a loader may unpickle, and no code that it would import, is passed over."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch

import ckptmove
from ckptmove.errors import (
    CrcMismatch,
    DamagedPickle,
    LimitExceeded,
    MissingFile,
    NotACheckpoint,
    UnsupportedContainer,
)
from ckptmove.model import Severity

CALL = b"N0cbuiltins\nexec\n(Vpass\ntR."
GGUF = b"GGUF\x03" + bytes(60)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
NAMES = ("builtins.exec",)


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def arrays(save=np.savez, *, padding=0, is_evil=True):
    stream = io.BytesIO()
    items = [os.urandom(padding).hex(), Evil() if is_evil else "word"]
    save(stream, weights=np.zeros(3), items=np.array(items, dtype=object))
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path):
    """A folder with a healthy model."""
    path = tmp_path / "run"
    path.mkdir()
    torch.save({"weight": torch.ones(3)}, path / "pytorch_model.bin")
    (path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return path


def add(folder, name, data):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def each_form(folder):
    """The folder, and a zip, a compressed zip and a tar of it."""
    yield folder
    with zipfile.ZipFile(folder.with_suffix(".stored.zip"), "w") as writer:
        for path in sorted(folder.rglob("*")):
            writer.write(path, path.relative_to(folder).as_posix())
    yield folder.with_suffix(".stored.zip")
    yield shutil.make_archive(str(folder), "zip", folder)
    yield shutil.make_archive(str(folder), "tar", folder)


def found(path, code):
    return [one for one in ckptmove.inspect(path).findings if one.code == code]


# --- files that are read whatever their names -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "training_args.bin", "random_states_0.pkl", "README.md", "vocab.json"]
)
@pytest.mark.parametrize("data", [CALL, b"\x80\x00" + CALL, CALL + b"\n", b"GGUF" + bytes(5) + b"0" + CALL])
def test_a_pickle_with_any_beginning_is_read(folder, name, data):
    add(folder, name, data)
    for path in each_form(folder):
        assert [one.where for one in found(path, "S702")] == [(name, *NAMES)]


def test_a_long_old_pickle_is_read_from_a_compressed_archive(folder):
    add(folder, "rng_state.pth", b"(lp0\nI1\n" + b"aI1\n" * 4000 + b"a0" + CALL)
    for path in each_form(folder):
        assert [one.where for one in found(path, "S702")] == [("rng_state.pth", *NAMES)]


# --- names that a trainer loads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "training_args.bin", "optimizer.pt", "optimizer_1.bin", "scheduler.pt", "scaler.pt", "rng_state.pth",
        "rng_state_3.pth", "random_states_0.pkl", "custom_checkpoint_2.pkl", "pytorch_model-00001-of-00002.bin",
        "pytorch_model_fsdp_0.bin", "diffusion_pytorch_model.fp16.bin", "adapter_model.bin", "model.safetensors",
        "epoch=1.ckpt", "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "model_rng.pt",
    ],
)  # fmt: skip
def test_a_file_that_a_trainer_loads_is_an_error_whatever_it_holds(folder, name):
    add(folder, f"sub/{name}", GGUF)
    for path in each_form(folder):
        with pytest.raises(NotACheckpoint) as caught:
            ckptmove.inspect(path)
        assert caught.value.found == "a GGUF file"


@pytest.mark.parametrize("name", ["brain.ckpt", "epoch_counter.ckpt", "dataloader-TRAIN.ckpt", "label_encoder.ckpt"])
def test_a_ckpt_that_speechbrain_writes_as_text_is_a_note(folder, name):
    add(folder, name, b"7")
    assert found(folder, "S705")[0].where == (name,)


@pytest.mark.parametrize("name", ["last.ckpt", "brain-v1.ckpt", "model.ckpt"])
def test_any_other_ckpt_of_text_is_an_error(folder, name):
    add(folder, name, b"7")
    for path in each_form(folder):
        with pytest.raises(NotACheckpoint) as caught:
            ckptmove.inspect(path)
        assert caught.value.found == "a text file"


# --- other names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("vocab.pkl", b"", "an empty file"),
        ("openvino_model.bin", b"\x01\x02\xff" * 9, "bytes of no known format"),
        ("ggml.bin", GGUF, "a GGUF file"),
        ("notes.pt", b"hello", "a text file"),
        ("tokenizer.model", POINTER, "git-lfs pointer"),
        ("data.pkl.gz", gzip.compress(b"(lp0\n.", mtime=0), "a gzip file"),
        ("stats.npz", arrays(is_evil=False), "a zip archive without data.pkl"),
    ],
)
def test_a_file_that_may_be_unpickled_is_a_note(folder, name, data, why):
    add(folder, name, data)
    for path in each_form(folder):
        [note] = found(path, "S705")
        assert (note.severity, note.where) == (Severity.INFO, (name,))
        assert why in note.message


def test_the_fix_for_a_pointer_is_to_fetch_the_file(folder):
    add(folder, "tokenizer.model", POINTER)
    fixes = [found(path, "S705")[0].fix for path in each_form(folder)]
    assert fixes == ["fetch the real file: git lfs pull"] * 4


def test_other_files_are_no_note(folder):
    for name, data in {
        "README.md": b"text", "merges.txt": b"coverage\ndist\n.env", "model.gguf": GGUF, "empty.txt": b"",
        "arrays.npz": zipped_arrays(), "log.gz": gzip.compress(b"text"), "letter.docx": zipped({"a": b"b"}),
    }.items():  # fmt: skip
        add(folder, name, data)
    for path in each_form(folder):
        assert not found(path, "S705")


def zipped(files):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as writer:
        for name, data in files.items():
            writer.writestr(name, data)
    return stream.getvalue()


def zipped_arrays():
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(3), b=np.ones(2))
    return stream.getvalue()


# --- a pickle inside of a file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 9000])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_objects_are_read(folder, save, padding):
    add(folder, "stats.npz", arrays(save, padding=padding))
    assert found(folder, "S702")[0].where == ("stats.npz",)


def renamed(data, names, method=zipfile.ZIP_STORED):
    """The arrays of a file, with other names."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as reader, zipfile.ZipFile(stream, "w", method) as writer:
        for before, after in names.items():
            writer.writestr(after, reader.read(before))
    return stream.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", ["x", ".hidden/x.npy", "data.txt", "x/", "../x"])
def test_an_array_is_read_whatever_its_name(folder, name, method):
    add(folder, "stats.npz", renamed(arrays(), {"items.npy": name}, method))
    assert found(folder, "S702")[0].where == ("stats.npz",)


def test_an_array_after_a_checkpoint_is_read(folder):
    stream = io.BytesIO(renamed(arrays(), {"items.npy": "x"}))
    with zipfile.ZipFile(stream, "a") as writer:
        writer.write(folder / "pytorch_model.bin", "a.pt")
    add(folder, "stats.npz", stream.getvalue())
    for path in each_form(folder):
        assert found(path, "S702")[0].where == ("stats.npz",)


def broken(data, kind):
    """A file of arrays that is refused here, and that numpy reads."""
    if kind == "a name twice":
        return renamed(data, {"weights.npy": "x", "items.npy": "x"})
    if kind == "a method that is not read":
        stream = io.BytesIO(data)
        with zipfile.ZipFile(stream, "a", zipfile.ZIP_BZIP2) as writer:
            writer.writestr("more.npy", b"words")
        return stream.getvalue()
    return renamed(data, {"weights.npy": "a"}) + data if kind == "an archive before it" else b"PK\x05\x06" + data


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "kind", ["a name twice", "a method that is not read", "an archive before it", "the sign of an empty one"]
)
def test_arrays_in_an_archive_that_is_refused_are_read(folder, kind):
    add(folder, "stats.npz", broken(arrays(), kind))
    with np.load(folder / "stats.npz", allow_pickle=True) as read:
        assert read.files
    for path in each_form(folder):
        assert found(path, "S702")[0].where == ("stats.npz",)


def test_a_damaged_archive_in_an_archive_is_not_read(folder, tmp_path):
    add(folder, "letter.docx", zipped({"a": b"b"}))
    path = tmp_path / "run.zip"
    shutil.make_archive(str(folder), "zip", folder)
    crc = zlib.crc32((folder / "letter.docx").read_bytes())
    path.write_bytes(path.read_bytes().replace(struct.pack("<L", crc), struct.pack("<L", crc ^ 1)))
    assert found(path, "F804")[0].where == ("letter.docx",)


def test_an_array_too_large_to_inflate_is_read_at_its_beginning(folder):
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(arrays())) as reader, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as writer:
        writer.writestr("x", reader.read("items.npy") + bytes(1 << 27))
    add(folder, "stats.npz", stream.getvalue())
    assert found(folder, "S702")[0].where == ("stats.npz",)


def test_an_array_of_objects_is_read_to_its_end(folder):
    with zipfile.ZipFile(io.BytesIO(arrays(padding=9000))) as archive:
        add(folder, "stats.npy", archive.read("items.npy"))
    for path in each_form(folder):
        [finding] = found(path, "S702")
        assert finding.where == ("stats.npy",)
        assert f"{os.system.__module__}.system" in finding.message


def test_without_a_checkpoint_the_names_are_in_the_error(tmp_path):
    (tmp_path / "stats.npz").write_bytes(arrays())
    for path in (tmp_path, tmp_path / "stats.npz"):
        with pytest.raises(NotACheckpoint) as caught:
            ckptmove.inspect(path)
        assert caught.value.runs == (f"{os.system.__module__}.system",)


def test_a_conversion_says_that_it_copies_them(folder, tmp_path):
    add(folder, "stats.npz", arrays())
    as_folder = ckptmove.convert(folder, output=tmp_path / "new", to="cuda:0")
    as_file = ckptmove.convert(folder, output=tmp_path / "one.pth", to="cuda:0")
    assert [any("stats.npz" in line for line in one.warnings) for one in (as_folder, as_file)] == [True, False]


# --- hidden folders ---------------------------------------------------------------------------------------------------


def test_a_pickle_in_a_hidden_folder_is_told(folder):
    add(folder, ".git/x.pkl", CALL)
    add(folder, ".git/broken.pkl", CALL[:-1])
    add(folder, ".git/notes.bin", b"text")
    add(folder, ".git/HEAD", CALL)
    add(folder, ".cache/data.bin", gzip.compress(CALL))
    for path in each_form(folder):
        assert found(path, "S702")[0].where == (".cache/data.bin", ".git/broken.pkl", ".git/x.pkl")


def test_a_checkpoint_in_a_hidden_folder_is_a_note(folder):
    torch.save({"w": torch.ones(2)}, folder / "w.pt")
    add(folder, ".old/w.pt", (folder / "w.pt").read_bytes())
    for path in each_form(folder):
        assert found(path, "S705")[0].where == (".old/w.pt",)


@pytest.mark.parametrize(
    "error",
    [
        MissingFile("w.pt"), UnsupportedContainer("w.pt", "x", "an x"), CrcMismatch("w.pt", "data.pkl"),
        LimitExceeded("records", limit=1, actual=2, path="w.pt"), DamagedPickle("cut off", offset=1),
    ],
    ids=lambda error: error.kind,
)  # fmt: skip
@pytest.mark.parametrize(("runs", "code"), [((), "S705"), (NAMES, "S702")])
def test_one_that_cannot_be_read_is_told(folder, monkeypatch, error, runs, code):
    from ckptmove.opening import beside

    def refuse(*_args, **_options):
        raise error

    error.runs = runs
    add(folder, ".old/w.pt", CALL)
    monkeypatch.setattr(beside, "read_file", refuse)
    told = [one for one in ckptmove.inspect(folder).findings if one.code in {"S702", "S705"}]
    assert [(one.code, one.where) for one in told] == [(code, (".old/w.pt",))]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.npz", arrays()), ("X.PKL", CALL),
        ("x.npz", renamed(arrays(), {"items.npy": "x"})), ("x.pkl.gz", gzip.compress(CALL, mtime=0)),
        ("x.pkl.bz2", bz2.compress(CALL)), ("x.joblib.xz", lzma.compress(CALL)), ("x.pth.tar", CALL),
    ],
    ids=["arrays", "capitals", "renamed", "gzip", "bzip2", "xz", "tar"],
)  # fmt: skip
def test_what_runs_in_a_hidden_file_is_an_error(folder, name, data):
    add(folder, f".old/{name}", data)
    for path in each_form(folder):
        assert found(path, "S702")[0].where == (f".old/{name}",)


def test_what_runs_in_a_hidden_array_is_an_error(folder):
    add(folder, ".old/x.npy", zipfile.ZipFile(io.BytesIO(arrays())).read("items.npy"))
    for path in each_form(folder):
        assert found(path, "S702")[0].where == (".old/x.npy",)


def test_what_runs_beside_the_checkpoint_of_a_hidden_file_is_an_error(folder):
    add(folder, ".old/w.pt", (folder / "pytorch_model.bin").read_bytes())
    with zipfile.ZipFile(folder / ".old/w.pt", "a") as writer:
        writer.writestr("pytorch_model/extra.pkl", CALL)
    for path in each_form(folder):
        assert found(path, "S702")[0].where == (".old/w.pt",)


def test_a_hidden_file_that_is_two_things_is_an_error(folder):
    data = zipped({"x": b"y"})
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    add(folder, ".old/w.pt", len(header).to_bytes(8, "little") + header + data)
    add(folder, ".old/v.pt", (folder / "pytorch_model.bin").read_bytes())
    for path in each_form(folder):
        [finding] = found(path, "F805")
        assert (finding.severity, finding.where) == (Severity.ERROR, (".old/w.pt",))


def test_archives_in_a_hidden_folder_are_a_note(folder):
    add(folder, ".old/model.zip", zipped({"w.pt": (folder / "pytorch_model.bin").read_bytes()}))
    add(folder, ".old/arrays.npz", zipped_arrays())
    add(folder, ".old/zeros.npy", b"\x93NUMPY\x01\x00")
    for path in each_form(folder):
        assert found(path, "S705")[0].where == (".old/model.zip",)


# --- code -------------------------------------------------------------------------------------------------------------

AUTO = {"auto_map": {"AutoModel": "modeling_x.XModel", "AutoTokenizer": ["org/x--tokens.x.X", None]}}


@pytest.mark.parametrize(
    ("name", "text", "files"),
    [
        ("config.json", json.dumps(AUTO), ("modeling_x.py", "tokens/x.py")),
        ("sub/tokenizer_config.json", json.dumps(AUTO), ("sub/modeling_x.py",)),
        ("model_index.json", json.dumps({"n": "X", "unet": ["modeling_x", "UNet"], "m": []}), ("modeling_x.py",)),
        ("modules.json", json.dumps([{"type": "modeling_x.Pool"}, 1]), ("modeling_x.py",)),
    ],
)  # fmt: skip
def test_code_beside_a_model_is_told(folder, name, text, files):
    add(folder, name, text.encode())
    for path in files:
        add(folder, path, b"print()")
    for path in each_form(folder):
        [note] = found(path, "S704")
        assert (note.severity, note.where) == (Severity.INFO, (name, *files))


@pytest.mark.parametrize("text", ["{", "3", "{}", json.dumps({"auto_map": {"A": "other.X"}}), " " * (1 << 21)])
def test_other_code_is_not_told(folder, text):
    add(folder, "config.json", text.encode())
    add(folder, "modeling_x.py", b"print()")
    add(folder, ".git/config.json", json.dumps(AUTO).encode())
    add(folder, ".git/modeling_x.py", b"print()")
    assert not found(folder, "S704")


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("[tool.ckptmove]\nto = 'cpu'\ncase = 'evil.py:make'\n", True),
        ("tool.ckptmove.'script' = 'evil.py'\n", True),
        ("tool.ckptmove.script = 'evil.py'\n", True),
        ("[tool]\nckptmove = {case = 'evil.py:make'}\n", True),
        ('[tool."ckptm\\u006fve"]\ncase = "evil.py:make"\n', True),
        ("[tool.ckptmove]\noptimizer = 'evil:Opt'\n", True),
        ("[tool.ckptmove]\noptimizer = 'AdamW'\n", False),
        ("[tool.ckptmove]\nto = 'cpu'\n", False),
        ("[tool.other]\nscript = 'evil.py'\n", False),
        ('[project]\nx = """\ncase = 1\n"""\n', False),
        ("tool = 3\n", False),
        ("tool.ckptmove = 3\n", False),
        ("[tool.ckptmove\ncase = 'evil.py:make'\n", False),
        ("tool.ckptmove.case = " + "[" * 20_000, False),
        ("[tool.ckptmove]\ncase = 'evil.py:make'\n" + "#" * (1 << 20), False),
    ],
)
def test_code_of_a_project_is_told(folder, text, is_told):
    add(folder, "pyproject.toml", text.encode())
    assert [one.where for one in found(folder, "S704")] == [("pyproject.toml",)] * is_told

"""Every fact and every value of a tar of torch 0.1, compared with ``torch.load``."""

from __future__ import annotations

import shlex
import shutil
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from old_tar import Part, archive, members_of, tar_of
from torch import nn
from typer.testing import CliRunner
from weights_only_lists import numbers

from ckptmove.api.functions import convert, inspect
from ckptmove.cli.app import app
from ckptmove.errors import UnsupportedDtype, UsageError
from ckptmove.formats.contract import ReadOnlyFormat
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.equality import bits
from ckptmove.proof.request import VerifyRequest
from ckptmove.proof.restored.loaded import named_tensors
from ckptmove.proof.tensors.stored import StoredTensors
from ckptmove.training.run import verify_checkpoint

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.bool, torch.bfloat16,
]  # fmt: skip


def views():
    base = torch.arange(24.0).reshape(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on typed storages
        storage = base.storage()
    return {
        "base": base, "row": base[2], "column": base[:, 3], "transposed": base.t(), "part": base[1:3, 2:5],
        "scalar": torch.tensor(3.0), "empty": torch.empty(0, 5), "expanded": torch.ones(1).expand(4, 3),
        "again": [base, base], "storage": storage, "view": Part(base, 7, 9), "no_view": Part(base, 24, 0),
    }  # fmt: skip


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    for held in state["state"].values():
        held["step"] = int(held["step"])
    return {"epoch": 1, "state_dict": model.state_dict(), "optimizer": state}


OBJECTS = {
    "dtypes": lambda: {str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES},
    "views": views,
    "trained": trained,
    "tensor": lambda: torch.arange(6).reshape(2, 3),
    "nothing": OrderedDict,
}


def loaded(path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on typed storages
        return torch.load(path, weights_only=False, **options)


def values_of(root):
    return [(name, one.dtype, tuple(one.shape), one.stride(), bits(one).tolist()) for name, one in named_tensors(root)]


@pytest.fixture(params=OBJECTS)
def value(request):
    return OBJECTS[request.param]()


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_facts_and_values_are_those_of_torch(value, protocol, tmp_path):
    path = tmp_path / "saved.pth.tar"
    path.write_bytes(tar_of(value, protocol=protocol))
    expected = list(named_tensors(loaded(path)))
    with open_checkpoint(str(path), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        records = checkpoint.inventory.tensors
        assert [record.name for record in records] == [name for name, _ in expected]
        for record, (name, own) in zip(records, expected, strict=True):
            within = 7 if name == "view" else 24 if name == "no_view" else 0  # where the view of a storage begins
            facts = (tuple(own.shape), own.stride(), own.storage_offset() + within)
            if record.kind == "tensor":
                assert record.dtype == str(own.dtype).removeprefix("torch."), name
                assert (record.shape, record.stride, record.storage_offset) == facts, name
            mine = bits(stored.tensor(record))
            assert mine.numpy().tobytes() == bits(own).numpy().tobytes(), name
        assert checkpoint.inventory.facts == ()
        assert checkpoint.inventory.container == "torch-tar"


def test_tensors_that_share_a_storage_are_seen_to(tmp_path):
    path = tmp_path / "views.pth"
    path.write_bytes(tar_of(views()))
    root, found = loaded(path), {one.name: one for one in inspect(str(path)).inventory.tensors}
    for name in ("row", "column", "transposed", "part", "view"):
        assert root[name].untyped_storage().data_ptr() - root["base"].untyped_storage().data_ptr() in {0, 4 * 7}
        assert found[name].storage == found["base"].storage
    assert found["scalar"].storage != found["base"].storage


def tags_of(path):
    tags = []

    def note(storage, tag):
        tags.append(tag)
        return storage

    loaded(path, map_location=note)
    return tags


def test_devices_are_those_that_torch_meets(tmp_path):
    first, second, third = torch.ones(3), torch.ones(4), torch.ones(5)
    path = tmp_path / "a.pth"
    path.write_bytes(tar_of({"a": first, "b": second, "c": third}, devices=[(first, "cuda:0"), (third, "cuda:1")]))
    assert tags_of(path) == ["cuda:0", "cpu", "cuda:1"]
    assert [tensor.device for tensor in inspect(str(path)).inventory.tensors] == ["cuda:0", "cpu", "cuda:1"]


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("form", "protocol"), [(tarfile.PAX_FORMAT, 2), (tarfile.GNU_FORMAT, 0), (tarfile.USTAR_FORMAT, 5)]
)
def test_it_becomes_a_zip_with_the_same_values(value, form, protocol, tmp_path):
    source, away = (tmp_path / name for name in ("source", "away"))
    source.write_bytes(tar_of(value, form=form, protocol=protocol))
    result = convert(str(source), map_location={"cpu": "hpu:5"}, output=str(away))
    assert (result.container, zipfile.is_zipfile(away)) == ("torch-zip", True)
    assert {*tags_of(away)} == ({"hpu:5"} if tags_of(source) else set())
    assert values_of(loaded(away, map_location=lambda storage, _: storage)) == values_of(loaded(source))


@pytest.mark.parametrize("options", [{"to": "cpu"}, {"output": "new.zip"}, {"output": "new.pth", "drop": ["b"]}])
def test_every_file_that_is_written_is_a_zip(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pth").write_bytes(tar_of({"a": torch.arange(3.0), "b": torch.ones(2)}))
    output = convert("a.pth", **options).output
    assert torch.equal(torch.load(output, weights_only=True)["a"], torch.arange(3.0))
    with pytest.raises(UsageError, match="needs a target"):
        convert("a.pth")


def packed_in(form):
    def pack(folder):
        return shutil.make_archive(str(folder), form, folder.parent, folder.name)

    return pack


class TestRefusals:
    """Where its format would have to stay."""

    @pytest.fixture
    def folder(self, tmp_path):
        weight = torch.arange(3.0)
        folder = tmp_path / "a run"
        folder.mkdir()
        (folder / "old.pth").write_bytes(tar_of({"w": weight}, devices=[(weight, "cuda:3")]))
        torch.save({"w": weight}, folder / "new.pth")
        return folder

    @pytest.mark.parametrize("dry_run", [True, False])
    @pytest.mark.parametrize("options", [{"to": "cpu"}, {"map_location": {"cuda:3": "cpu"}, "cast": True}])
    def test_in_a_directory_and_in_place_the_remedy_writes_the_file_alone(
        self, folder, tmp_path, monkeypatch, options, dry_run
    ):
        monkeypatch.chdir(tmp_path)
        for path, more in ((folder, {}), (folder / "old.pth", {"in_place": True, "keep": ["*.bias"]})):
            with pytest.raises(ReadOnlyFormat) as caught:
                convert(str(path), dry_run=dry_run, **options, **more)
            error = caught.value
            assert (error.path, error.container) == (str(folder / "old.pth"), "torch-tar")
            program, *words = shlex.split(error.instead.partition(": ")[2])
            assert program == "ckptmove"
            assert error.hint == error.instead
            assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
            assert tags_of(tmp_path / "X.pth") == ["cpu"]
        assert {file.name for file in tmp_path.iterdir()} == {"a run", "X.pth"}

    def test_a_remedy_that_fails_or_would_move_more_is_not_shown(self, folder):
        with pytest.raises(ReadOnlyFormat) as caught:
            convert(str(folder), to="cpu", keep=["new.pth.*"])
        assert caught.value.instead == ""
        members = members_of({"w": torch.ones(2)})
        # An object whose state is set twice, which no pickle that is written can say.
        members["pickle"] = members["pickle"].removesuffix(b".") + b"0" + b"clib\nKind\n)R}b}b."
        (folder / "old.pth").write_bytes(archive(members))
        with pytest.raises(ReadOnlyFormat) as caught:
            convert(str(folder), to="cuda:0")
        assert caught.value.instead == ""

    @pytest.mark.parametrize("form", ["zip", "tar"])
    def test_in_an_archive_the_hint_unpacks_it(self, folder, form):
        packed = packed_in(form)(folder)
        with pytest.raises(ReadOnlyFormat) as caught:
            convert(packed, to="cpu")
        assert caught.value.path == f"{packed}/a run/old.pth"
        assert caught.value.hint.startswith("unpack")

    def test_where_it_stays_as_it_is_it_is_copied(self, folder):
        own = (folder / "old.pth").read_bytes()
        moved = convert(str(folder), map_location={"cpu": "cuda:3"}).output
        assert (Path(moved) / "old.pth").read_bytes() == own
        convert(str(folder / "old.pth"), to="cuda:3", in_place=True)
        assert (folder / "old.pth").read_bytes() == own


def test_a_tag_that_python_2_wrote(tmp_path):
    members = members_of({"w": torch.arange(3.0)})
    assert members["storages"].count(b"X\3\0\0\0cpu") == 1
    members["storages"] = members["storages"].replace(b"X\3\0\0\0cpu", b"U\3cpu")
    (tmp_path / "a.pth").write_bytes(archive(members))
    convert(str(tmp_path / "a.pth"), to="cuda:11", output=str(tmp_path / "b.pth"))
    assert tags_of(tmp_path / "b.pth") == ["cuda:11"]


def test_a_part_of_the_storages_moves(tmp_path):
    first, second = torch.arange(3.0), torch.arange(4.0)
    (tmp_path / "a").write_bytes(tar_of({"model": {"a.b": first, "c.d": second, "e": first[1:]}}))
    convert(str(tmp_path / "a"), to="cuda:0", keep=["model.c.d"], output=str(tmp_path / "b"))
    assert tags_of(tmp_path / "b") == ["cuda:0", "cpu"]


def test_a_cast_is_that_of_torch(tmp_path):
    base = torch.randn(50, dtype=torch.float64)
    value = {"base": base, "view": base[3:9].reshape(2, 3).t(), "part": Part(base, 40, 7), "ids": torch.arange(9)}
    path, output = str(tmp_path / "a.pth"), str(tmp_path / "b.pth")
    (tmp_path / "a.pth").write_bytes(tar_of(value))
    with pytest.raises(UnsupportedDtype, match="float64"):
        convert(path, to="mps", output=output)
    convert(path, to="mps", cast=True, output=output)
    before, after = loaded(path), loaded(output, map_location="cpu")
    for name, tensor in before.items():
        expected = tensor.float() if tensor.dtype == torch.float64 else tensor
        assert torch.equal(after[name], expected)
        assert (after[name].dtype, after[name].stride()) == (expected.dtype, tensor.stride())
    assert after["view"].untyped_storage().data_ptr() == after["base"].untyped_storage().data_ptr()


class Net(nn.Module):
    """A model that was saved whole, its class with it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))


def test_a_class_that_was_saved_with_its_source(tmp_path):
    (tmp_path / "a.pth").write_bytes(tar_of({"net": Net()}))
    assert [tensor.name for tensor in inspect(str(tmp_path / "a.pth")).inventory.tensors] == ["net.table"]
    convert(str(tmp_path / "a.pth"), to="cuda:0", output=str(tmp_path / "b.pth"))
    assert tags_of(tmp_path / "b.pth") == ["cuda:0"]


def test_weights_only_mode_refuses_it_and_the_finding_says_so(tmp_path):
    path = tmp_path / "a b.pth"
    path.write_bytes(tar_of({"w": torch.ones(3)}))
    if numbers(torch.__version__) < (2, 6):
        assert torch.load(path, weights_only=True).keys() == {"w"}
    else:
        with pytest.raises(RuntimeError, match="weights_only=True"):
            torch.load(path)
    (finding,) = [one for one in inspect(str(path)).findings if one.code == "S701"]
    assert "tar of torch 0.1" in finding.message
    assert shlex.split(finding.fix)[:2] == ["ckptmove", "convert"]


def test_it_resumes_and_the_comparison_with_torch_is_left_out(tmp_path):
    path = tmp_path / "trained.pth"
    path.write_bytes(tar_of(trained()))
    checks = {one.name: one for one in verify_checkpoint(VerifyRequest(path=str(path), to="cpu"), ()).checks}
    assert {name: one.status for name, one in checks.items()} == {
        "file": "passed", "restore": "skipped", "placement": "passed", "structure": "passed", "numbers": "passed",
        "step": "passed", "parity": "passed", "fresh": "passed",
    }  # fmt: skip
    assert checks["restore"].detail.endswith("since torch 2.6")

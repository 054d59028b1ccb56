"""Real directories."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptmove
from ckptmove.errors import CkptMoveError, NotACheckpoint

pytestmark = pytest.mark.unmeasured

CORPUS = Path(__file__).resolve().parents[2].parent / "shared" / "corpus"
if not CORPUS.is_dir():
    pytest.skip("the corpus is not next to the repository", allow_module_level=True)

DIRECTORIES = CORPUS / "directories"
LAYOUTS = {"DMalakhov1__PROJECT_LORA": "hf-trainer", "djangohegde__FLAME_AI_23": "accelerate"}


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WHOLE = [*(DIRECTORIES / name for name in LAYOUTS), *(CORPUS / "dcp-directory").iterdir()]


@pytest.mark.parametrize("folder", WHOLE, ids=lambda folder: folder.name)
def test_a_directory_differs_from_its_archive_in_nothing(folder, tmp_path):
    inventory = ckptmove.inspect(folder).inventory
    others = [folder]
    if all(
        file.container != "dcp" for file in inventory.files
    ):  # the pieces of a distributed checkpoint are not read out of an archive
        with tarfile.open(tmp_path / "run.tar", "w") as archive:
            archive.add(folder, folder.name)
        others.append(tmp_path / "run.tar")
    for other in others:
        result = ckptmove.diff(folder, other)
        assert result.same
        assert result.tensors == len(inventory.tensors)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name):
    inventory = ckptmove.inspect(DIRECTORIES / name, check=True).inventory
    assert inventory.layout == LAYOUTS[name]
    assert inventory.facts == ()


def test_roles():
    files = ckptmove.inspect(DIRECTORIES / "DMalakhov1__PROJECT_LORA").inventory.files
    assert {one.path: one.roles for one in files} == {
        "rng_state.pth": ("rng",),
        "scaler.pt": ("scaler",),
        "scheduler.pt": ("scheduler",),
        "training_args.bin": ("other",),
    }


def test_there_and_back(tmp_path):
    source = DIRECTORIES / "djangohegde__FLAME_AI_23"
    ckptmove.convert(source, map_location={"cuda:0": "hpu:5"}, output=tmp_path / "away")
    devices = {tensor.device for tensor in ckptmove.inspect(tmp_path / "away").inventory.tensors}
    assert devices == {"hpu:5", "cpu"}
    ckptmove.convert(tmp_path / "away", map_location={"hpu:5": "cuda:0"}, output=tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_a_pointer_of_git_lfs_is_no_optimizer():
    with pytest.raises(NotACheckpoint, match="git-lfs") as caught:
        ckptmove.inspect(DIRECTORIES / "coderatwork7__data_model")
    assert caught.value.path == str(DIRECTORIES / "coderatwork7__data_model" / "optimizer.ckpt")


def test_a_distributed_checkpoint_of_megatron():
    (folder,) = (CORPUS / "dcp-directory").iterdir()
    found = ckptmove.inspect(folder, check=True)
    assert (found.inventory.container, found.inventory.layout, found.findings) == ("directory", "megatron", ())
    assert [(one.path, one.tensors) for one in found.inventory.files] == [
        ("__0_0.distcp", 14),
        ("__0_1.distcp", 12),
        ("common.pt", 0),
    ]
    said = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {tensor.name: tensor.shape for tensor in found.inventory.tensors} == {
        name: tuple(one.size) for name, one in said.items() if isinstance(one, TensorStorageMetadata)
    }
    assert {(tensor.role, tensor.device) for tensor in found.inventory.tensors} == {("model", "unknown")}


@pytest.mark.parametrize(
    "folder", sorted(path for path in CORPUS.iterdir() if path.is_dir()), ids=lambda path: path.name
)
def test_only_our_own_errors_escape(folder):
    try:
        path = ckptmove.inspect(folder).inventory.path
    except CkptMoveError as error:
        path = error.path
    assert path is not None
    assert path.startswith(str(folder))

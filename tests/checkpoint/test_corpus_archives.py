"""Real archives: agents of stable-baselines3, and a zip of a training run."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.errors import EmptyDirectory

CORPUS = Path(__file__).resolve().parents[2].parent / "shared" / "corpus"
if not CORPUS.is_dir():
    pytest.skip("the corpus is not next to the repository", allow_module_level=True)

AGENTS = sorted((CORPUS / "stable-baselines3").glob("*.zip"))


def members(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {info.filename: (archive.read(info), info.date_time) for info in archive.infolist()}


def tags_of(data):
    tags = []

    def record(storage, tag):
        tags.append(tag)
        return storage

    torch.load(io.BytesIO(data), map_location=record, weights_only=True)
    return Counter(tags)


def test_there_are_agents():
    assert len(AGENTS) > 1


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_an_agent_says_what_torch_says(path):
    inventory = ckptmove.inspect(path, check=True).inventory
    assert (inventory.container, inventory.layout, inventory.facts) == ("archive", "stable-baselines3", ())
    for file in inventory.files:
        held = Counter(one.device for one in inventory.storages if one.key.startswith(f"{file.path}/"))
        assert held == tags_of(members(path)[file.path][0])
    roles = {file.path: file.roles for file in inventory.files}
    assert (roles["policy.pth"], roles["policy.optimizer.pth"]) == (("model",), ("optimizer",))


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_an_agent_there_and_back(path, tmp_path):
    ckptmove.convert(path, to="cpu", output=tmp_path / "away.zip")
    before, after = members(path), members(tmp_path / "away.zip")
    assert list(after) == list(before)
    for name, (data, date) in after.items():
        assert date == before[name][1]
        if name.endswith(".pth"):
            assert tags_of(data).keys() <= {"cpu"}
        else:
            assert data == before[name][0]
    ckptmove.convert(tmp_path / "away.zip", to="cuda:0", output=tmp_path / "back.zip")
    assert (tmp_path / "back.zip").read_bytes() == path.read_bytes()


def test_an_archive_that_holds_nothing_any_more():
    with pytest.raises(EmptyDirectory, match=r"without data\.pkl") as caught:
        ckptmove.inspect(CORPUS / "corrupted-truncated" / "AgileRL__AgileRL__LunarLanderContinuous-v2-DDPG_0.pt")
    assert caught.value.files == 1


@pytest.mark.unmeasured
@pytest.mark.parametrize("form", ["zip", "deflated", "tar"])
def test_everything_of_one_torch_in_an_archive(form, tmp_path):
    found = [path for path in sorted(CORPUS.glob("lightning*/*")) if path.stat().st_size < 1 << 20][:5]
    assert found
    path = tmp_path / "all"
    if form == "tar":
        with tarfile.open(path, "w") as archive:
            for one in found:
                archive.add(one, one.name)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if form == "deflated" else zipfile.ZIP_STORED) as archive:
            for one in found:
                archive.write(one, one.name)
    packed = ckptmove.inspect(path).inventory
    for one in found:
        alone = ckptmove.inspect(one).inventory
        storages = [(f"{one.name}/{storage.key}", storage.device) for storage in alone.storages]
        assert [(s.key, s.device) for s in packed.storages if s.key.startswith(f"{one.name}/")] == storages

"""Real files, compared with torch."""

from __future__ import annotations

import csv
import pickle
import pickletools
import re
import warnings
import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from agreement import NotComparableError, differences
from older_torch import safetensors_table

from ckptmove.api.functions import convert
from ckptmove.errors import CkptMoveError, DamagedArchive, UneditablePickle
from ckptmove.opening.checkpoint import open_checkpoint

pytestmark = pytest.mark.unmeasured

CORPUS = Path(__file__).resolve().parents[2].parent / "shared" / "corpus"
if not CORPUS.is_dir():
    pytest.skip("the corpus is not next to the repository", allow_module_level=True)

with (CORPUS / "MANIFEST.tsv").open(encoding="utf-8", newline="") as manifest:
    ROWS = list(csv.DictReader(manifest, delimiter="\t", quoting=csv.QUOTE_NONE))
CONTAINERS = {row["path"]: row["container"] for row in ROWS if (CORPUS / row["path"]).is_file()}
ZIPS = [name for name, container in CONTAINERS.items() if container == "zip"]
LEGACY = [name for name, container in CONTAINERS.items() if container == "legacy"]
SCRIPTS = [name for name, container in CONTAINERS.items() if container == "torchscript"]
TABLES = [name for name, container in CONTAINERS.items() if container == "safetensors"]
TARS = [name for name, container in CONTAINERS.items() if container == "tar"]
TAGS = {row["path"]: row["location_tags"] for row in ROWS}


def read(name):
    with open_checkpoint(str(CORPUS / name)) as checkpoint:
        return checkpoint.inventory


def test_there_are_files():
    assert len(ZIPS) > 50
    assert len(LEGACY) > 20
    assert len(SCRIPTS) > 12
    assert len(TABLES) > 2
    assert any(kind == "pickle" for kind in CONTAINERS.values())


def has_the_tags_of_the_manifest(name, inventory):
    match = re.search(r"storages\{([^}]*)\}", TAGS[name])
    expected = Counter(
        {tag: int(count) for tag, _, count in (item.rpartition("=") for item in match[1].split())} if match else {}
    )
    assert Counter(storage.device for storage in inventory.storages) == expected


def has_the_tensors_of_torch(name, inventory):
    with suppress(NotComparableError):  # torch refuses it
        assert differences(CORPUS / name, inventory) == []


def is_a_sound_zip(name, inventory):
    with zipfile.ZipFile(CORPUS / name) as archive:
        names = {info.filename for info in archive.infolist()}
    for fact in inventory.facts:
        assert fact.kind in {"orphan-record", "compressed-storage"}
        assert fact.record in names


def is_a_sound_stream(name, inventory):
    assert (inventory.container, inventory.facts) == ("torch-legacy", ())


def is_a_sound_script(name, inventory):
    assert (inventory.container, inventory.layout, inventory.facts) == ("torchscript", "module", ())


def is_the_table_of_the_library(name, inventory):
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(CORPUS / name, framework="pt") as theirs:
        expected = {key: theirs.get_tensor(key) for key in theirs.keys()}
    assert (inventory.container, inventory.facts, inventory.globals) == ("safetensors", (), ())
    assert {tensor.name: (f"torch.{tensor.dtype}", tensor.shape) for tensor in inventory.tensors} == {
        key: (str(tensor.dtype), tuple(tensor.shape)) for key, tensor in expected.items()
    }


def imports_what_pickletools_sees(name, inventory):
    strings, imported, count = [], set(), 0
    for opcode, value, _ in pickletools.genops((CORPUS / name).read_bytes()):
        if opcode.name == "STACK_GLOBAL":
            imported.add(strings[-1])
            count += 1
        elif isinstance(value, str):
            strings.append(value)
    assert (inventory.container, inventory.tensors, inventory.facts) == ("pickle", (), ())
    found = {one.name for one in inventory.globals}
    assert imported <= {part for one in found for part in (one.rpartition(".")[2], ".".join(one.split(".")[-2:]))}
    assert len(found) <= count


CHECKS = {
    "zip": (has_the_tags_of_the_manifest, has_the_tensors_of_torch, is_a_sound_zip),
    "legacy": (has_the_tags_of_the_manifest, has_the_tensors_of_torch, is_a_sound_stream),
    "torchscript": (has_the_tags_of_the_manifest, has_the_tensors_of_torch, is_a_sound_script),
    "safetensors": (has_the_tensors_of_torch, is_the_table_of_the_library),
    "pickle": (imports_what_pickletools_sees,),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_it_is_read_as_others_read_it(name):
    # The metadata of a distributed checkpoint is a pickle as well, and is read with the files around it alone.
    checks = () if name.endswith(".metadata") else CHECKS.get(CONTAINERS[name], ())
    try:
        found = read(name)
    except CkptMoveError as error:
        if checks:
            raise
        found = error
    assert found.path == str(CORPUS / name)
    assert "\n" not in getattr(found, "message", "")
    for check in checks:
        check(name, found)


def tags_that_torch_sees(path):
    """The tags that weights-only mode reads; None if it refuses the file."""
    tags = []

    def record(storage, tag):
        tags.append(tag)
        return storage

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.load(path, map_location=record, weights_only=True)
        except pickle.UnpicklingError:
            return None
    return tags


@pytest.mark.parametrize("name", LEGACY)
def test_a_stream_there_and_back(name, tmp_path):
    source, away = CORPUS / name, tmp_path / "away"
    homes = {storage.device for storage in read(name).storages}
    assert len(homes) <= 1
    convert(str(source), map_location=dict.fromkeys(homes, "hpu:5") or {"cpu": "hpu:5"}, output=str(away))
    before = tags_that_torch_sees(source)
    if before is not None:
        assert tags_that_torch_sees(away) == ["hpu:5"] * len(before)
    for home in homes:
        convert(str(away), map_location={"hpu:5": home}, output=str(tmp_path / "back"))
        assert (tmp_path / "back").read_bytes() == source.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if "foo1" not in name])
def test_a_script_there_and_back(name, tmp_path):
    source, away = CORPUS / name, tmp_path / "away"
    homes = {storage.device for storage in read(name).storages} or {"cpu"}
    convert(str(source), map_location=dict.fromkeys(homes, "hpu:5"), output=str(away))
    assert {storage.device for storage in read(away).storages} <= {"hpu:5"}
    if len(homes) == 1:
        convert(str(away), map_location={"hpu:5": homes.pop()}, output=str(tmp_path / "back"))
        assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_a_script_of_torch_1_0_is_only_read(tmp_path):
    name = next(name for name in SCRIPTS if "foo1" in name)
    inventory = read(name)
    assert inventory.torch_version == "1.0"
    assert [mention.where for mention in inventory.mentions] == ["code/foo1.py:5"]
    with pytest.raises(UneditablePickle):
        convert(str(CORPUS / name), to="cuda:0", output=str(tmp_path / "away"))


@pytest.mark.parametrize("name", TABLES)
def test_tensors_of_a_table_lie_where_it_says(name):
    with (CORPUS / name).open("rb") as file:
        table, start = safetensors_table(file)
    table.pop("__metadata__", None)
    with open_checkpoint(str(CORPUS / name)) as checkpoint:
        spans = [(tensor.name, checkpoint.file.span(tensor.storage)) for tensor in checkpoint.inventory.tensors]
    offsets = [(key, [span.start - start, span.end - start]) for key, span in spans]
    assert offsets == [(key, row["data_offsets"]) for key, row in table.items()]


@pytest.mark.parametrize("name", TARS)
def test_a_tar_that_torch_cannot_read_is_refused(name):
    with pytest.raises(EOFError, match="Ran out of input"):
        torch.load(CORPUS / name, weights_only=False)
    with pytest.raises(DamagedArchive, match=r"a tar of torch 0\.1 without its member 'tensors'"):
        read(name)

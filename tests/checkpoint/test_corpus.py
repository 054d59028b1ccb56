"""Real files, compared with torch."""

from __future__ import annotations

import csv
import pickle
import pickletools
import re
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from agreement import NotComparableError, differences
from older_torch import safetensors_table

from ckptmove.api.functions import convert
from ckptmove.checkpoint.opening import open_checkpoint
from ckptmove.errors import CkptMoveError, DamagedArchive, UneditablePickle

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
FILES = ZIPS + LEGACY
TABLES = [name for name, container in CONTAINERS.items() if container == "safetensors"]
# The metadata of a distributed checkpoint is a pickle as well, and is read with the files around it alone.
PICKLES = [name for name, kind in CONTAINERS.items() if kind == "pickle" and not name.endswith(".metadata")]
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
    assert PICKLES


@pytest.mark.parametrize("name", [row["path"] for row in ROWS if (CORPUS / row["path"]).is_file()])
def test_only_our_own_errors_escape(name):
    try:
        found = read(name)
    except CkptMoveError as error:
        found = error
    assert found.path == str(CORPUS / name)
    assert "\n" not in getattr(found, "message", "")


@pytest.mark.parametrize("name", FILES + SCRIPTS)
def test_location_tags(name):
    inventory = read(name)
    match = re.search(r"storages\{([^}]*)\}", TAGS[name])
    expected = Counter(
        {tag: int(count) for tag, _, count in (item.rpartition("=") for item in match[1].split())} if match else {}
    )
    assert Counter(storage.device for storage in inventory.storages) == expected


@pytest.mark.parametrize("name", FILES + SCRIPTS + TABLES)
def test_tensors_are_those_of_torch(name):
    try:
        differing = differences(CORPUS / name, read(name))
    except NotComparableError as error:
        pytest.skip(f"torch refuses it: {error}")
    assert differing == []


@pytest.mark.parametrize("name", ZIPS)
def test_nothing_is_amiss_that_is_not(name):
    with zipfile.ZipFile(CORPUS / name) as archive:
        names = {info.filename for info in archive.infolist()}
    for fact in read(name).facts:
        assert fact.kind in {"orphan-record", "compressed-storage"}
        assert fact.record in names


@pytest.mark.parametrize("name", LEGACY)
def test_nothing_is_amiss_with_a_stream(name):
    inventory = read(name)
    assert inventory.container == "torch-legacy"
    assert inventory.facts == ()


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


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_amiss_with_a_script(name):
    inventory = read(name)
    assert (inventory.container, inventory.layout, inventory.facts) == ("torchscript", "module", ())


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
def test_a_table_of_tensors_is_the_one_that_torch_reads(name):
    with (CORPUS / name).open("rb") as file:
        table, start = safetensors_table(file)
    table.pop("__metadata__", None)
    with open_checkpoint(str(CORPUS / name)) as checkpoint:
        inventory = checkpoint.inventory
        spans = {tensor.name: checkpoint.file.span(tensor.storage) for tensor in inventory.tensors}
    assert (inventory.container, inventory.facts, inventory.globals) == ("safetensors", (), ())
    assert list(spans) == list(table)
    for tensor in inventory.tensors:
        theirs, span = table[tensor.name], spans[tensor.name]
        assert list(tensor.shape) == theirs["shape"]
        assert [span.start - start, span.end - start] == theirs["data_offsets"]
        assert theirs["dtype"] == {"int64": "I64", "float32": "F32", "bool": "BOOL"}[tensor.dtype]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_tensors_is_the_one_that_the_library_reads(name):
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(CORPUS / name, framework="pt") as theirs:
        expected = {key: theirs.get_tensor(key) for key in theirs.keys()}
    inventory = read(name)
    assert {tensor.name for tensor in inventory.tensors} == set(expected)
    for tensor in inventory.tensors:
        other = expected[tensor.name]
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(other.dtype), tuple(other.shape))


@pytest.mark.parametrize("name", PICKLES)
def test_a_bare_pickle_imports_what_pickletools_sees(name):
    data = (CORPUS / name).read_bytes()
    strings, imported = [], set()
    for opcode, value, _ in pickletools.genops(data):
        if opcode.name == "STACK_GLOBAL":
            imported.add(strings[-1])
        elif isinstance(value, str):
            strings.append(value)
    inventory = read(name)
    assert (inventory.container, inventory.tensors, inventory.facts) == ("pickle", (), ())
    found = {one.name for one in inventory.globals}
    assert imported <= {part for one in found for part in (one.rpartition(".")[2], ".".join(one.split(".")[-2:]))}
    assert len(found) <= sum(opcode.name == "STACK_GLOBAL" for opcode, _, _ in pickletools.genops(data))


@pytest.mark.parametrize("name", TARS)
def test_a_tar_that_torch_cannot_read_is_refused(name):
    with pytest.raises(EOFError, match="Ran out of input"):
        torch.load(CORPUS / name, weights_only=False)
    with pytest.raises(DamagedArchive, match=r"a tar of torch 0\.1 without its member 'tensors'"):
        read(name)

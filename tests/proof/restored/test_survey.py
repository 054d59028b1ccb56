from __future__ import annotations

import os
import sys
import zipfile
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import ckptmove
from ckptmove.errors import AccessFailed, DamagedArchive, SourceChanged
from ckptmove.formats.facts import facts_of
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.restored import loaded, pages
from ckptmove.proof.restored.loaded import Loaded, LoadedFiles, load, named_tensors
from ckptmove.proof.restored.numbers import NumbersTally
from ckptmove.proof.restored.pages import PageRelease, PagesOfFiles, is_mapping
from ckptmove.proof.restored.survey import LoadedTensors, survey
from ckptmove.proof.step.counters import CounterFaults
from ckptmove.proof.tensors.stored import StoredTensors


def known(files, loaded):
    """The one file, which is loaded already."""
    files._loaded[""] = loaded
    return files


def restore(path, change=lambda inventory: inventory, spoil=lambda loaded: None):
    with open_checkpoint(path, Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        loaded = LoadedFiles(checkpoint.parts, stored)
        spoil(loaded.at(""))
        inventory = change(checkpoint.inventory)
        return survey(inventory, stored, loaded, NumbersTally.of(inventory, (), CounterFaults()))


def with_first(inventory, **changes):
    first, *rest = inventory.tensors
    return replace(inventory, tensors=(first._replace(**changes), *rest))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:TypedStorage is deprecated")
@pytest.mark.skipif(
    "_codecs.encode" not in torch._weights_only_unpickler._get_allowed_globals(),
    reason="this torch takes no bytes in weights-only mode",
)
def test_every_kind_of_tensor_is_what_torch_load_returns(make):
    base = torch.arange(12.0).view(3, 4)
    tree = {
        "plain": base.clone(),
        "transposed": base.t(),
        "view": base[1:, 2:],
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor([float("nan"), -0.0]),
        "complex": torch.ones(3, dtype=torch.complex64),
        "flags": torch.tensor([True, False]),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "large": torch.randn(400, 200),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
        "list": [torch.ones(1), (torch.ones(2),)],
        ("a", 1): torch.ones(1),
        b"bytes": torch.ones(1),
        5: {"x": torch.ones(1)},
        "storage": torch.ones(4).untyped_storage(),
    }
    check = restore(make.save(tree, device="cpu"))
    assert check.status == "passed", check.detail
    assert "1 meta tensor " in check.detail
    assert dict(check.evidence)["differing"] == 0
    assert dict(check.evidence)["compared"] == 21


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*[Qq]uantiz", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        lambda: torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.rand(2), 0, torch.quint8),
        lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 1, torch.qint8),
    ],
    ids=["coo", "csr", "per-channel", "per-channel, float", "per-tensor"],
)
def test_the_parts_of_a_tensor_are_known_by_name_at_the_root_too(tmp_path, made):
    path = tmp_path / "c.pt"
    for tree in (made(), {"w": made()}):
        torch.save(tree, path)
        assert restore(str(path)).status == "passed"


def test_two_paths_that_read_alike_are_told_apart(make):
    tree = {"a.b": torch.ones(2), "a": {"b": torch.zeros(3)}}
    assert restore(make.save(tree)).status == "passed"


def test_a_list_that_holds_itself_is_walked_once():
    tree: list[object] = [torch.ones(1)]
    tree.append(tree)
    assert [name for name, _ in named_tensors(tree)] == ["0"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "nobody"}, "nobody is missing"),
        ({"dtype": "int32"}, "dtype torch.float32 in place of torch.int32"),
        ({"shape": (5, 5)}, "shape (5, 6) in place of (5, 5)"),
        ({"stride": (1, 5)}, "stride (6, 1) in place of (1, 5)"),
    ],
    ids=str,
)
def test_what_is_not_as_torch_has_it_fails(make, changes, said):
    check = restore(make("AdamW"), lambda inventory: with_first(inventory, **changes))
    assert check.status == "failed"
    assert said in check.detail


def test_other_bits_fail(make):
    def spoil(loaded):
        loaded.tensors["model.0.weight"][0] = loaded.tensors["model.0.weight"][0] + 1

    check = restore(make("AdamW"), spoil=spoil)
    assert check.status == "failed"
    assert check.detail == "torch.load returns something else: model.0.weight: other bits"


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_of_another_size_fails(make):
    def spoil(loaded):
        loaded.tensors["s"][0] = torch.zeros(3, dtype=torch.uint8)

    assert restore(make.save({"s": torch.ones(4).untyped_storage()}), spoil=spoil).status == "failed"


def test_a_tensor_past_the_end_of_its_storage_fails(make):
    check = restore(make("AdamW"), lambda inventory: with_first(inventory, storage_offset=1000))
    assert check.status == "failed"
    assert check.detail == "bytes encoded or incomplete: model.0.weight"


def test_a_deflated_storage_fails(make, tmp_path):
    path = make("AdamW")
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w") as target:
        for item in source.infolist():
            deflated = item.filename.endswith("/data/0")
            target.writestr(item.filename, source.read(item), zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED)
    check = restore(str(packed))
    assert check.status == "failed"
    assert dict(check.evidence)["unreadable"] == 1
    assert check.detail.endswith("model.0.weight")


def test_a_refusal_of_weights_only_is_said_and_not_got_around(make):
    check = restore(make.save({"args": Namespace(a=1), "w": torch.ones(3)}))
    assert check.status == "skipped"
    assert "argparse.Namespace " in dict(check.evidence)["refusal"]
    assert "torch.serialization" not in check.detail
    assert dict(check.evidence)["weights_only"] is False


class Attack:
    def __reduce__(self):
        return os.system, ("exit 1",)


def test_torchs_advice_to_turn_the_safety_off_is_not_passed_on(make):
    check = restore(make.save({"w": torch.ones(3), "x": Attack()}))
    if hasattr(torch._weights_only_unpickler, "_blocklisted_modules"):
        said = "Trying to load unsupported GLOBAL posix.system whose module posix is blocked"
    else:
        said = "Unsupported global: GLOBAL posix.system was not an allowed global by default"
    assert dict(check.evidence)["refusal"] == said
    assert check.detail.endswith(f": {said}")
    operand = restore(make.save({"w": torch.ones(3), "set": frozenset({1})}))
    assert "weights_only" not in dict(operand.evidence)["refusal"]


def test_a_file_that_torch_cannot_load_fails(make, tmp_path):
    path = tmp_path / "text.pt"
    path.write_text("no checkpoint")
    broken = load(facts_of("torch-zip"), str(path))
    assert broken.error.startswith("RuntimeError: ")
    check = restore_with(make("AdamW"), broken)
    assert check.status == "failed"
    assert check.detail == f"torch.load fails: {broken.error}"
    refused = load(facts_of("pickle"), str(path))
    assert refused.refusal
    assert load(facts_of("pickle"), str(tmp_path / "none")).error


@pytest.mark.parametrize("damage", [b"\x80\x02\x86.", b"\x80\x02K\x01Q."], ids=["an empty list", "no tuple"])
def test_a_pickle_at_which_torchs_own_unpickler_falls_over_is_an_error_too(tmp_path, make, damage):
    path, broken = make.save({"w": torch.ones(3)}), tmp_path / "broken.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(broken, "w") as target:
        for item in source.infolist():
            target.writestr(item, damage if item.filename.endswith("/data.pkl") else source.read(item))
    loaded = load(facts_of("torch-zip"), str(broken))
    if not loaded.refusal.startswith("persistent_load id must be"):  # older torch checks it and reports it
        assert loaded.error.startswith(("IndexError: ", "AssertionError: "))


def restore_with(path, loaded):
    with open_checkpoint(path, Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        loaded = known(LoadedFiles(checkpoint.parts, stored), loaded)
        return survey(checkpoint.inventory, stored, loaded, NumbersTally.of(checkpoint.inventory, (), CounterFaults()))


def test_refusals_without_words_are_passed_on(make, monkeypatch):
    from torch._weights_only_unpickler import UnpicklingError

    def refuse(*args, **kwargs):
        raise UnpicklingError

    monkeypatch.setattr(torch, "load", refuse)
    refused = load(facts_of("torch-zip"), "x")
    assert refused.refusal
    assert not refused.error


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_script_is_not_compiled_to_look_at_its_tensors(make, tmp_path):
    path = str(tmp_path / "script.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), path)
    check = restore(path)
    assert check.status == "skipped"
    assert check.detail.endswith(facts_of("torchscript").not_weights_only)


def test_a_table_that_its_library_refuses_fails(tmp_path, monkeypatch):
    def refuse(path):
        raise SafetensorError("no such dtype")

    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(3)}, path)
    assert restore(str(path)).status == "passed"
    monkeypatch.setattr(loaded, "load_file", refuse)
    assert restore(str(path)).detail.endswith("SafetensorError: no such dtype")


def test_big_endian_files_are_swapped(make):
    tree = {"w": torch.arange(5.0), "b": torch.tensor([1, 2], dtype=torch.uint8)}
    path = make.save(tree)
    with open_checkpoint(path, Limits()) as checkpoint:
        (file,) = checkpoint.parts
        file.byteorder = "big"
        weights, plain = checkpoint.inventory.tensors
        with StoredTensors([file]) as stored:
            twice = stored.tensor(weights)
            twice.untyped_storage().byteswap(torch.float32)
            assert torch.equal(twice, tree["w"])
            assert torch.equal(stored.tensor(plain), tree["b"])


@pytest.mark.parametrize("size", [10, 100_000], ids=["read", "mapped"])
def test_a_file_that_becomes_shorter_is_noticed(make, size):
    path = make.save({"w": torch.zeros(size)})
    with open_checkpoint(path, Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        record = checkpoint.inventory.tensors[0]
        os.truncate(path, 64)
        with pytest.raises(SourceChanged):
            stored.tensor(record)
        with pytest.raises(DamagedArchive):
            stored.tensor(record._replace(storage=None))


def test_the_file_is_never_written_to(make):
    path = make.save({"w": torch.zeros(100_000)})
    with open_checkpoint(path, Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        stored.tensor(checkpoint.inventory.tensors[0]).fill_(1)
        assert stored.tensor(checkpoint.inventory.tensors[0]).sum() == 0


def test_pages_of_the_mapping_are_given_back_and_come_again(make):
    size = 5_000_000
    path = make.save({"a": torch.ones(size), "b": torch.full((size,), 2.0)})
    with open_checkpoint(path, Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        first, second = checkpoint.inventory.tensors
        loaded = LoadedFiles(checkpoint.parts, stored)
        source = LoadedTensors(loaded, stored, checkpoint.inventory, stored)
        one, two = source.tensor(first), source.tensor(second)
        assert one.sum() == size
        assert two.sum() == 2 * size


def test_tensors_whose_paths_read_alike_are_told_apart(make):
    tree = {"a": {"b": torch.ones(2)}, "a.b": torch.full((2,), 2.0)}
    with open_checkpoint(make.save(tree), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        source = LoadedTensors(LoadedFiles(checkpoint.parts, stored), stored, checkpoint.inventory, stored)
        assert [source.tensor(record).sum().item() for record in checkpoint.inventory.tensors] == [2.0, 4.0]


def test_memory_that_is_no_mapping_is_left_alone():
    memory = torch.ones(10_000_000)
    release = PageRelease(enabled=True)
    release.seen(memory.data_ptr() // 4096 * 4096, 0, 100)
    release.seen(memory.data_ptr() + 64, 1, memory.nbytes)
    assert not release.enabled
    release.seen(memory.data_ptr(), 0, memory.nbytes)
    PagesOfFiles(["another"]).seen("one", memory.data_ptr() // 4096 * 4096, 0, memory.nbytes)
    assert memory.sum() == 10_000_000


def test_a_mapping_is_told_from_other_memory(tmp_path, monkeypatch):
    path = str(tmp_path / "weights.safetensors")
    save_file({"w": torch.ones(100_000)}, path)
    mapped, plain = loaded.load_file(path)["w"], torch.ones(100_000)
    assert is_mapping(plain.data_ptr(), path) is False
    assert is_mapping(0, path) is False
    if sys.platform == "linux":
        assert is_mapping(mapped.data_ptr(), path) is True
    assert is_mapping(mapped.data_ptr(), str(tmp_path / "none")) is False
    monkeypatch.setattr(pages, "_REGIONS", tmp_path / "none")
    assert is_mapping(mapped.data_ptr(), path) is False


@pytest.mark.parametrize("result", [Loaded(), Loaded(refusal="no")], ids=["not returned", "refused"])
def test_what_torch_does_not_return_is_read_a_second_time(make, result):
    with open_checkpoint(make("AdamW"), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        refused = known(LoadedFiles(checkpoint.parts, stored), result)
        record = checkpoint.inventory.tensors[0]
        assert torch.equal(
            LoadedTensors(refused, stored, checkpoint.inventory, stored).tensor(record), stored.tensor(record)
        )


def test_a_file_that_has_gone_is_said(make, tmp_path):
    path = make("AdamW")
    with open_checkpoint(path, Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        (tmp_path / "c.pt").unlink()
        with pytest.raises(AccessFailed):
            stored.tensor(checkpoint.inventory.tensors[0])


@pytest.mark.unmeasured
def test_keys_that_are_tuples_of_dtypes(tmp_path):
    torch.save({(torch.bfloat16, torch.float32): torch.ones(2)}, tmp_path / "a.pt")
    (record,) = ckptmove.inspect(tmp_path / "a.pt").inventory.tensors
    assert record.name == "(torch.bfloat16, torch.float32)"
    checks = {check.name: check.status for check in ckptmove.verify(tmp_path / "a.pt").checks}
    assert checks["restore"] == "passed"

"""TorchScript archives that torch does not write, or no longer writes."""

from __future__ import annotations

import json
import re
import struct
import zipfile

import pytest

from ckptmove import limits
from ckptmove.api.functions import convert, inspect
from ckptmove.checkpoint.inventory import build
from ckptmove.errors import CkptMoveError, DamagedArchive, DamagedPickle, LimitExceeded, UneditablePickle
from ckptmove.formats import model_json
from ckptmove.limits import Limits
from ckptmove.model import ArchiveFact
from ckptmove.opening.checkpoint import open_checkpoint

MODULE = b"\x80\x02c__torch__\nM\n)\x81}%sb."
EMPTY = b"\x80\x02)."
LINE = 'x = torch.zeros([3], device=torch.device("cuda:0"))\n'


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def tensor(key="0", *, storage="FloatStorage", numel=1):
    pid = b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text("cpu") + b"K%ctQ" % numel
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"K\x00K\x01\x85K\x01\x85\x89)tR"


@pytest.fixture
def archive(tmp_path):
    def write(records, compression=zipfile.ZIP_STORED, lead=b""):
        path = tmp_path / "m.pt"
        with zipfile.ZipFile(path, "w", compression) as writer:
            for name, data in records.items():
                writer.writestr(f"m/{name}", data)
        path.write_bytes(lead + path.read_bytes())
        return str(path)

    return write


def module(attributes=b"", **records):
    return {"data.pkl": MODULE % attributes, "constants.pkl": EMPTY} | records


@pytest.mark.parametrize("records", [{"constants.pkl": EMPTY}, {"constants.pkl": EMPTY, "code/__torch__.py": b""}])
def test_an_archive_without_its_module_is_damaged(archive, records):
    with pytest.raises(DamagedArchive, match=r"data\.pkl 0 times"):
        inspect(archive(records))


def test_bytes_before_the_archive_are_damage(archive):
    path = archive(module(), lead=b"PK\x03\x04" + bytes(60))
    with pytest.raises(DamagedArchive, match="64 unexpected bytes"):
        inspect(path)


def test_a_damaged_pickle_is_named(archive):
    with pytest.raises(DamagedPickle, match=r"constants\.pkl") as caught:
        inspect(archive(module() | {"constants.pkl": b"\x80\x02"}))
    assert caught.value.offset == 2


def test_code_that_inflates_beyond_reason_is_refused(archive, monkeypatch):
    monkeypatch.setattr("ckptmove.limits._INFLATED_BYTES", 1000)
    path = archive(module() | {"code/a.py": b" " * 400_000, "code/b.py": b" " * 400_000}, zipfile.ZIP_DEFLATED)
    with pytest.raises(LimitExceeded, match="code"):
        inspect(path)


def test_more_devices_than_code_names_are_refused(archive, monkeypatch):
    monkeypatch.setattr(build, "_MOST_MENTIONS", 3)
    assert len(inspect(archive(module() | {"code/a.py": LINE * 3})).inventory.mentions) == 3
    with pytest.raises(LimitExceeded, match="devices") as caught:
        inspect(archive(module() | {"code/a.py": LINE * 4}))
    assert caught.value.limit == 3


def test_what_moves_a_tensor_is_a_device_too(archive):
    code = "class M(Module):\n  y = torch.cuda(x)\n\n  z = torch.cpu(y), torch.device(name)\n  torch.cudart(x)\n" + LINE
    path = archive(module() | {"code/a.py": code, "code/a.py.debug_pkl": LINE, "extra/b.py": LINE})
    found = [(mention.where, mention.value, mention.site) for mention in inspect(path).inventory.mentions]
    assert found == [("code/a.py:2", "cuda", None), ("code/a.py:4", "cpu", None), ("code/a.py:6", "cuda:0", None)]


def test_strings_and_ids_of_a_module_are_mentions_as_elsewhere(archive):
    path = archive(module(b"(" + text("device") + text("cuda:0") + b"u"))
    (mention,) = inspect(path).inventory.mentions
    assert (mention.kind, mention.value, mention.tuple_site) == ("string", "cuda:0", None)


def test_a_type_that_is_no_list_is_walked_into_as_an_object(archive):
    for call in (b"ctorch.jit._pickle\nbuild\n)R", b"ctorch.jit._pickle\nbuild\nNR"):
        assert inspect(archive(module(b"(" + text("a") + call + b"u"))).inventory.tensors == ()
    wrapped = b"ctorch.jit._pickle\nbuild\n" + tensor() + b"\x85R"
    path = archive(module(b"(" + text("a") + wrapped + b"u") | {"data/0": bytes(4)})
    assert [record.name for record in inspect(path).inventory.tensors] == ["a.0"]


def test_facts_are_told_of_both_folders(archive):
    attributes = b"(" + text("a") + tensor() + text("b") + tensor("1") + b"u"
    constants = b"\x80\x02" + tensor() + tensor("1") + b"\x86."
    records = module(attributes) | {"constants.pkl": constants, "data/0": bytes(4), "constants/1": bytes(4)}
    inventory = inspect(archive(records | {"constants/2": bytes(4)})).inventory
    assert [record.name for record in inventory.tensors] == ["a", "b", "CONSTANTS.c0", "CONSTANTS.c1"]
    assert inventory.facts == (
        ArchiveFact("missing-storage", "1", 4),
        ArchiveFact("missing-storage", "constants/0", 4),
        ArchiveFact("orphan-record", "m/constants/2", 4),
    )
    assert inventory.facts[2].storage_key == "constants/2"


def test_inputs_of_a_trace_have_no_bytes(archive):
    inputs = b"\x80\x02" + tensor() + b"."
    records = module() | {"traced_inputs.pkl": inputs, "traced_inputs/0": b"", "traced_inputs/1": b"x"}
    inventory = inspect(archive(records)).inventory
    assert [storage.key for storage in inventory.storages] == ["traced_inputs/0"]
    assert inventory.facts == (ArchiveFact("orphan-record", "m/traced_inputs/1", 1),)


@pytest.mark.parametrize("layout", [b"K\x03", b"K\x02"])
def test_a_sparse_tensor_that_is_none(archive, layout):
    call = b"ctorch._utils\n_rebuild_sparse_tensor\n(" + layout + b"K\x01\x85\x89" + tensor() + tensor() + b"NtR"
    with pytest.raises(DamagedPickle):
        inspect(archive(module(b"(" + text("a") + call + b"u")))


# --- torch before 1.3 ------------------------------------------------------------------------------------------------


def listed(key, **fields):
    shape = {"dims": ["2"], "strides": ["1"], "offset": "0", "dataType": "FLOAT", "device": "cuda:1"}
    return shape | {"data": {"key": key}} | fields


def model(**fields):
    return json.dumps({"producerVersion": "1.1", "mainModule": {"name": "m"}} | fields)


NESTED = {
    "name": "m",
    "parameters": [{"name": "weight", "tensorId": "1", "isBuffer": False}],
    "submodules": [{"name": "inner", "parameters": [{"name": "mean", "isBuffer": True}], "optimize": True}],
}


def test_the_list_of_old_torch_names_devices_and_tensors(archive):
    tensors = [
        listed("tensors/0", dims=[], strides=[]),
        listed("tensors/1", requiresGrad=True),
        listed("tensors/1", device="cpu", offset="1", dims=["1"]),
        listed("tensors/9", dataType="INT64", device="cpu"),
    ]
    records = {"model.json": model(mainModule=NESTED, tensors=tensors), "code/m.py": LINE}
    inventory = inspect(archive(records | {"tensors/0": bytes(4), "tensors/1": bytes(8)})).inventory
    assert (inventory.container, inventory.layout, inventory.torch_version) == ("torchscript", "module", "1.1")
    found = {record.name: record for record in inventory.tensors}
    assert list(found) == ["weight", "inner.mean", "CONSTANTS.c2", "CONSTANTS.c3"]
    weight = found["weight"]
    facts = (weight.device, weight.dtype, weight.shape, weight.stride, weight.storage, weight.requires_grad)
    assert facts == ("cuda:1", "float32", (2,), (1,), "tensors/1", True)
    assert found["CONSTANTS.c2"].storage_offset == 1
    assert inventory.facts == (ArchiveFact("missing-storage", "tensors/9", 16),)
    assert [mention.where for mention in inventory.mentions] == ["code/m.py:1"]


def test_the_list_of_old_torch_is_not_edited(archive, tmp_path):
    path = archive({"model.json": model(tensors=[listed("tensors/0")]), "tensors/0": bytes(8)})
    with pytest.raises(UneditablePickle, match=re.escape("model.json")):
        convert(path, to="cpu", output=str(tmp_path / "out.pt"))
    with pytest.raises(UneditablePickle, match=re.escape("model.json")):
        convert(path, to="cpu", in_place=True)
    convert(path, to="cuda:1", output=str(tmp_path / "out.pt"))
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "m.pt").read_bytes()


def test_a_list_without_a_version_or_tensors_is_read(archive):
    with open_checkpoint(archive({"model.json": '{"mainModule": {}}'})) as checkpoint:
        assert checkpoint.inventory.torch_version is None
        assert checkpoint.inventory.tensors == ()


@pytest.mark.parametrize(
    "listing",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        model(tensors=[{}]),
        model(tensors=[listed("tensors/0", dataType="STRING")]),
        model(tensors=[listed("tensors/0", dims=["2", "2"])]),
        model(tensors=[listed("tensors/0", offset="9" * 30)]),
        model(tensors=[listed("k" * 5000)]),
        model(tensors=[listed("tensors/0", device=None)]),
        model(mainModule={"parameters": [{"name": "a", "tensorId": "7"}]}),
        model(mainModule={"parameters": "ab"}),
    ],
)
def test_a_list_that_torch_did_not_write_is_damage(archive, listing):
    with pytest.raises(CkptMoveError, match=r"model\.json"):
        inspect(archive({"model.json": listing}))


def test_a_list_beyond_reason_is_refused(archive, monkeypatch):
    monkeypatch.setattr("ckptmove.limits._INFLATED_BYTES", 10)
    with pytest.raises(LimitExceeded, match=re.escape("model.json")):
        inspect(archive({"model.json": model()}))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_tensor_that_is_named_without_end_is_refused(archive, monkeypatch, compression):
    """Each name of it is a line of some bytes, and kilobytes of operations."""
    assert model_json._PICKLE_BYTES == 2**20
    monkeypatch.setattr(model_json, "_PICKLE_BYTES", 2**16)
    wide = listed("tensors/0", dims=["1"] * 150, strides=["1"] * 150)
    whole = {"parameters": [{"name": ""}] * 300}
    path = archive({"model.json": model(mainModule=whole, tensors=[wide]), "tensors/0": bytes(4)}, compression)
    with pytest.raises(LimitExceeded, match="pickle") as refused:
        inspect(path)
    assert refused.value.actual < 2**18
    assert len(inspect(path, limits=Limits().times(10)).inventory.tensors) > 0


NODES = b"\x80\x02(" + b"]" * 80_000 + b"t."


@pytest.mark.unmeasured
@pytest.mark.parametrize("packed", [{"data.pkl"}, {"constants.pkl"}, {"data.pkl", "constants.pkl"}])
def test_pickles_that_are_compressed_share_one_bound(tmp_path, monkeypatch, packed):
    assert limits._OPERATIONS == 2**21
    monkeypatch.setattr(limits, "_OPERATIONS", 2**17)
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w") as writer:
        for name in ("data.pkl", "constants.pkl"):
            kind = zipfile.ZIP_DEFLATED if name in packed else zipfile.ZIP_STORED
            writer.writestr(f"m/{name}", NODES if name in packed else EMPTY, kind)
        writer.writestr("m/code/__torch__.py", "")
    with pytest.raises(LimitExceeded, match="operations") as refused:
        inspect(path)
    assert refused.value.limit < 2**17 // 2 + 16 * path.stat().st_size
    assert inspect(path, limits=Limits().times(10)).inventory.container == "torchscript"


def test_an_extra_file_of_that_name_is_no_list(archive):
    assert inspect(archive(module() | {"extra/model.json": "{}"})).inventory.tensors == ()

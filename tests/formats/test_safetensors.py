"""safetensors files; the oracles for the header are torch's reader, and the library if it is installed."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from older_torch import safetensors_table

import ckptmove
from ckptmove.api.functions import convert, inspect
from ckptmove.errors import CkptMoveError, DamagedArchive, LimitExceeded, Refused, UnsupportedContainer
from ckptmove.formats.safetensors_file import SafetensorsFile
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint

#: Codes of the format, as ``safetensors/torch.py`` (``_TYPES``) has them.
CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
if hasattr(torch, "float8_e8m0fnu"):
    CODES["F8_E8M0"] = torch.float8_e8m0fnu
#: Errors of the library for a dtype that this torch lacks.
UNKNOWN = () if hasattr(torch, "float4_e2m1fn_x2") else (AttributeError,)
SHAPES = [(), (0,), (7,), (2, 3), (2, 0, 3), (1, 1, 4, 2)]


def packed(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def row(dtype="U8", shape=(2,), start=0, end=2, **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end], **more}


def of_tensors(tensors, **metadata):
    header, data = ({"__metadata__": metadata} if metadata else {}), b""
    codes = {dtype: code for code, dtype in CODES.items()}
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        header[name] = row(codes[tensor.dtype], tensor.shape, len(data), len(data) + len(raw))
        data += raw
    return packed(header, data)


def zoo():
    found = {}
    for code, dtype in CODES.items():
        for place, shape in enumerate(SHAPES):
            numbers = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8) % 2
            found[f"{code}.{place}"] = numbers.view(dtype).reshape(shape)
    return found


@pytest.fixture
def write(tmp_path):
    def written(data, name="model.safetensors"):
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return written


def check_tensors(path, tensors):
    data = Path(path).read_bytes()
    with open_checkpoint(path) as checkpoint:
        inventory = checkpoint.inventory
        assert [tensor.name for tensor in inventory.tensors] == list(tensors)
        for own, tensor in zip(inventory.tensors, tensors.values(), strict=True):
            assert (f"torch.{own.dtype}", own.shape) == (str(tensor.dtype), tuple(tensor.shape))
            assert own.stride == torch.empty(tensor.shape).stride()
            assert (own.device, own.storage, own.storage_offset) == ("unknown", own.name, 0)
            span = checkpoint.file.span(own.storage)
            raw = data[span.start : span.end]
            assert own.nbytes == len(raw) == tensor.numel() * tensor.element_size()
            assert list(raw) == (tensor.reshape(-1).view(torch.uint8).tolist() if raw else [])
        assert all(storage.tag_sites == storage.class_sites == () for storage in inventory.storages)
        assert inventory.facts == ()


def test_every_dtype_and_shape(write):
    check_tensors(write(of_tensors(zoo())), zoo())


def test_the_table_is_the_one_that_torch_reads(write):
    path = write(of_tensors(zoo(), format="pt"))
    with Path(path).open("rb") as file:
        table, start = safetensors_table(file)
    table.pop("__metadata__")
    with open_checkpoint(path) as checkpoint:
        for tensor in checkpoint.inventory.tensors:
            theirs = table.pop(tensor.name)
            assert list(tensor.shape) == theirs["shape"]
            span = checkpoint.file.span(tensor.name)
            assert [span.start - start, span.end - start] == theirs["data_offsets"]
    assert not table


def test_the_library_writes_what_is_read(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    library = pytest.importorskip("safetensors.torch")
    tensors = {name: tensor for name, tensor in zoo().items() if not name.startswith("F8_E8M0")}
    path = str(tmp_path / "library.safetensors")
    library.save_file(tensors, path, metadata={"format": "pt"})
    with safetensors.safe_open(path, framework="pt") as theirs:
        ordered = {name: theirs.get_tensor(name) for name in theirs.offset_keys()}
    own = {tensor.name: tensor for tensor in inspect(path).inventory.tensors}
    assert set(own) == set(ordered) == set(tensors)
    check_tensors(path, {name: ordered[name] for name in own})
    assert inspect(path).inventory.producer == "format pt"


def test_the_library_refuses_what_is_refused(write):
    safetensors = pytest.importorskip("safetensors")
    for header, data, _ in DAMAGED:
        path = write(packed(header, data))
        try:
            with safetensors.safe_open(path, framework="pt") as theirs:
                for name in theirs.keys():
                    theirs.get_tensor(name)
        except (safetensors.SafetensorError, *UNKNOWN):
            continue
        assert b"stricter" in (header if isinstance(header, bytes) else json.dumps(header).encode())


def test_half_a_byte_for_each_number(write):
    """torch counts the bytes of a tensor of 4-bit floats, the format its numbers."""
    path = write(packed({"w": row("F4", (3, 4), 0, 6), "e": row("F4", (0,), 6, 6)}, b"123456"))
    first, second = inspect(path).inventory.tensors
    assert (first.dtype, first.shape, first.nbytes) == ("float4_e2m1fn_x2", (3, 2), 6)
    assert (second.shape, second.nbytes) == ((0,), 0)


def test_nothing_in_it_but_a_name_of_the_format(write):
    assert inspect(write(packed({}))).inventory.tensors == ()
    assert inspect(write(packed({"__metadata__": None}))).inventory.producer is None
    assert inspect(write(packed({"__metadata__": {"format": "pt", "title": "x"}}))).inventory.producer == "format pt"
    assert inspect(write(packed({"__metadata__": {"title": "x"}}))).inventory.producer is None


def test_roles_by_name(write):
    tensors = {
        name: torch.zeros(2)
        for name in ("embedding", "state.0.exp_avg", "state.0.exp_avg_sq", "state.0.step", "criterion.pos_weight")
    }
    inventory = inspect(write(of_tensors(tensors))).inventory
    roles = {tensor.name: tensor.role for tensor in inventory.tensors}
    assert (inventory.container, inventory.layout) == ("safetensors", "plain")
    assert roles.pop("embedding") == "model"
    assert roles.pop("criterion.pos_weight") == "criterion"
    assert set(roles.values()) == {"optimizer"}


def test_its_tree(write):
    lines = inspect(
        write(of_tensors({"w": torch.zeros(2, 3), "h": torch.zeros(1).to(torch.float8_e5m2)})), outline=True
    )
    assert [(line.name, line.description) for line in lines.outline[1:]] == [
        ("w", "float32 [2, 3] unknown"),
        ("h", "float8_e5m2 [1] unknown"),
    ]


DAMAGED = [
    (b"{", b"", "not JSON"),
    (b'{"w": NaN}', b"", "NaN is not"),
    (b'{"w": {"dtype": "U8", "shape": [2.0], "data_offsets": [0, 2]}}', b"12", "2.0 is not"),
    (b'{"w": {"dtype": "U8", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 2]}}', b"12", "is not a size"),
    (b'{"w": {"dtype": "U8", "shape": [9999999999999999999], "data_offsets": [0, 2]}}', b"12", "is not a size"),
    (b'{"stricter": 1, "a\\nb": 2, "a\\nb": 3}', b"", "duplicate key 'a\\nb'"),
    (b'{"\xff": 1}', b"", "invalid start byte"),
    (b'{"\\ud800": 1}', b"", "surrogates not allowed"),
    (b'{"w": ' + b"[" * 2_000 + b" " * 32_000, b"", "nested too deeply"),
    ({"__metadata__": {"format": 1}}, b"", "not a dict of strings"),
    ({"__metadata__": ["format"]}, b"", "not a dict of strings"),
    ({"w": 1}, b"", "not as safetensors writes it"),
    (row(), b"12", "not as safetensors writes it"),
    ({"w": {"dtype": "U8", "shape": [2]}}, b"12", "not as safetensors writes it"),
    ({"w": {"dtype": 8, "shape": [2], "data_offsets": [0, 2]}}, b"12", "not as safetensors writes it"),
    ({"w": {"dtype": "U8", "shape": "2", "data_offsets": [0, 2]}}, b"12", "not as safetensors writes it"),
    ({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1, 2]}}, b"12", "not as safetensors writes it"),
    ({"w": row(shape=(-2,), end=-2)}, b"12", "a size or an offset"),
    ({"w": row(shape=(True, 2))}, b"12", "a size or an offset"),
    ({"w": row(shape=("2",))}, b"12", "a size or an offset"),
    ({"stricter": row(shape=(1,) * 1001, end=1)}, b"1", "a size or an offset"),
    ({"w": row(shape=(3,))}, b"12", "has 2 bytes"),
    ({"w": row(shape=(2**62, 2**62))}, b"12", "has 2 bytes"),
    ({"w": row(start=2, end=0)}, b"12", "has -2 bytes"),
    ({"w": row("F4", (), 0, 1)}, b"1", "has 1 bytes"),
    ({"w": row("F4", (4, 1), 0, 2)}, b"12", "has 2 bytes"),
    ({"w": row(), "v": row(start=1, end=3)}, b"123", "'v' overlaps"),
    ({"w": row(), "v": row(start=3, end=5)}, b"12345", "'v' has a hole"),
    ({"w": row()}, b"1", "have 2 bytes, but the file has 1"),
    ({"w": row()}, b"123", "have 2 bytes, but the file has 3"),
    ({}, b"1", "have 0 bytes, but the file has 1"),
]


@pytest.mark.parametrize(("header", "data", "detail"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_table_that_does_not_fit(write, header, data, detail):
    with pytest.raises(DamagedArchive) as caught:
        inspect(write(packed(header, data)))
    assert detail in caught.value.message
    assert "\n" not in caught.value.message


DENSE = {"[]": b'{"a": [' + b"[]," * 9_000 + b"[]]}", "{}": b'{"a": [' + b"{}," * 9_000 + b"{}]}"}


@pytest.mark.parametrize("kind", DENSE)
def test_more_objects_and_lists_than_a_table_can_have_are_refused_unread(write, monkeypatch, kind):
    path = write(packed(DENSE[kind], b""))
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(LimitExceeded, match=r"objects.*: 900\d > \d+"):
        inspect(path)


def test_the_smallest_rows_and_texts_of_brackets_are_a_table(write):
    rows = {"": row("U8", (), 0, 1)} | {chr(place): row("U8", (0,), 0, 0) for place in range(48, 100)}
    compact = json.dumps(rows, separators=(",", ":")).encode()
    assert len(inspect(write(packed(compact, b"1"))).inventory.tensors) == 53
    texts = {"a": "[{" * 5_000, "b": '["[{\\\\", {"x": "\\""}]' * 500, "c": "", "d\\": "{"}
    described = json.dumps({"__metadata__": texts, **rows}).encode()
    assert len(inspect(write(packed(described, b"1"))).inventory.tensors) == 53
    with pytest.raises(LimitExceeded):
        inspect(write(packed(described[:-1] + b', "x": [' + b"[]," * 6_000 + b"[]]}", b"1")))


def test_more_strings_than_metadata_have_are_refused_unread(write, monkeypatch):
    entries = b'"a":"",' * 2**18
    path = write(packed(b'{"__metadata__":{' + entries[:-1] + b"}}"))
    with pytest.raises(DamagedArchive, match="duplicate"):
        inspect(path, limits=Limits().times(2))
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(LimitExceeded, match=r"strings.*: 524289 > 524288"):
        inspect(path)


def test_many_tensors_and_quotes_in_texts_are_a_table(write, monkeypatch):
    monkeypatch.setattr("ckptmove.formats.safetensors_file._OTHER_STRINGS", 7)
    rows = {"a": row("U8", (0,), 0, 0)} | {str(place): row("U8", (0, 7), 0, 0) for place in range(99)}
    tags = json.dumps({f'{{"tag\\ {place}': ["\\", '"', {}] for place in range(99)})
    header = {"__metadata__": {"format": "pt", "tags\\": tags, "quoted": json.dumps(tags)}}
    assert len(inspect(write(packed(header | rows))).inventory.tensors) == 100
    header["__metadata__"]["one"] = "more"
    path = write(packed(header | rows))
    with pytest.raises(LimitExceeded, match=r": 9 > 7"):
        inspect(path)
    assert len(inspect(path, limits=Limits().times(2)).inventory.tensors) == 100


@given(texts=st.dictionaries(*[st.text('"\\{[]}:, aé\n', max_size=9)] * 2), is_ascii=st.booleans())
def test_strings_are_counted_whatever_stands_in_them(texts, is_ascii):
    raw = json.dumps({"__metadata__": texts}, ensure_ascii=is_ascii).encode()
    source = MemorySource("a.safetensors", len(raw).to_bytes(8, "little") + raw)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ckptmove.formats.safetensors_file._OTHER_STRINGS", 0)
        with pytest.raises(LimitExceeded) as caught:
            SafetensorsFile(source, Limits())
    assert caught.value.actual == 1 + 2 * len(texts)


def test_metadata_with_the_keys_of_a_row_are_metadata(write):
    notes = {"dtype": "a", "shape": "b", "data_offsets": "c"}
    assert len(inspect(write(packed({"__metadata__": notes, "w": row()}, b"12"))).inventory.tensors) == 1


def test_rows_of_more_forms_than_are_kept(write, monkeypatch):
    monkeypatch.setattr("ckptmove.formats.safetensors_file._MOST_FORMS", 1)
    tensors = {str(size): torch.ones(size, dtype=torch.float64) for size in range(5)}
    check_tensors(write(of_tensors(tensors)), tensors)


@pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2", "Q4_K"])
def test_a_dtype_that_torch_does_not_have_is_named(write, code):
    with pytest.raises(UnsupportedContainer, match=f"dtype '{code}'"):
        inspect(write(packed({"w": row(code)}, b"12")))


def test_more_in_a_row_is_passed_over_as_the_library_does(write):
    assert len(inspect(write(packed({"w": row(note="x")}, b"12"))).inventory.tensors) == 1


def test_cut_off_anywhere(write):
    data = of_tensors({"w": torch.ones(4), "v": torch.ones(2)}, format="pt")
    for length in range(len(data)):
        with pytest.raises(CkptMoveError):
            inspect(write(data[:length]))
    with pytest.raises(DamagedArchive, match=r"header has \d+ bytes"):
        inspect(write(data[:100]))


def test_every_flipped_byte_of_a_header(write):
    data = of_tensors({"w": torch.ones(4), "v": torch.ones(2)}, format="pt")
    for place in range(8, len(data) - 24):
        for bit in (1, 4, 0x40, 0x80):
            spoiled = bytearray(data)
            spoiled[place] ^= bit
            with contextlib.suppress(CkptMoveError):
                inspect(write(bytes(spoiled)))


def test_the_limit_on_tensors(write):
    path = write(of_tensors({"w": torch.ones(4), "v": torch.ones(2)}))
    with pytest.raises(LimitExceeded, match="tensors") as caught:
        inspect(path, limits=Limits(records=1))
    assert (caught.value.limit, caught.value.actual) == (1, 2)


def test_what_is_read_does_not_grow_with_the_tensors(tmp_path):
    path = tmp_path / "large.safetensors"
    header = packed({"w": row("F32", (2**30,), 0, 2**32)})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2**32)
    (tensor,) = inspect(str(path)).inventory.tensors
    assert tensor.nbytes == 2**32


def test_there_is_nothing_to_convert(write, tmp_path):
    path = write(of_tensors({"w": torch.ones(4)}))
    for options in ({"to": "cuda:0"}, {"map_location": {"cpu": "cuda:1"}}, {"to": "mps", "dry_run": True}):
        result = convert(path, **options)
        assert (result.output, result.bytes_copied, result.plan.is_empty) == (None, 0, True)
        assert "load_file(path, device=...)" in result.notes[0]
        assert list(tmp_path.iterdir()) == [tmp_path / "model.safetensors"]


def test_an_output_that_is_asked_for_is_a_copy(write, tmp_path):
    path, copy = write(of_tensors(zoo())), tmp_path / "copy.safetensors"
    result = convert(path, to="cuda:0", output=str(copy))
    assert copy.read_bytes() == Path(path).read_bytes()
    assert result.notes[0] == "safetensors stores no device: load_file(path, device=...) decides"


def test_a_target_without_the_dtype_is_refused_as_ever(write):
    path = write(of_tensors({"w": torch.ones(4, dtype=torch.float64)}))
    for cast in (False, True):
        with pytest.raises(Refused, match="float64: w"):
            ckptmove.convert(path, to="mps", cast=cast)

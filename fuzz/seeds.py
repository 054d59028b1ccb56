"""Seeds of the fuzzers of single files: the samples, and small files that recipes make."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.formats.opening import container_of, recognise
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAMPLES: Final = Path(__file__).resolve().parents[1] / "sample_ckpts"
#: Maximum size of a sample, in bytes: larger ones slow a fuzzer down.
_LARGEST: Final = 40_000
_PLAIN: Final = {
    "state_dict": OrderedDict(weight=("storage", "cuda:0", 4), bias=[1.5, None, True, 2**80, -3]),
    "set": {1, "a"},
    "bytes": b"\x00\xff" * 3,
    "é😀": frozenset({2.5}),
    "shared": ["cpu"] * 3,
}
_TORCH: Final = b"\x80\x02ctorch._utils\n"
STORAGE: Final = (
    b"((X\x07\0\0\0storageqYctorch\nFloatStorage\nX\x01\0\0\x000X\x06\0\0\0cuda:0K\x04tQK\0K\x04\x85K\x01\x85\x89"
    b"ccollections\nOrderedDict\n)RtR"
)


def by_target() -> dict[str, list[bytes]]:
    """Seeds for each target by its name."""
    found: dict[str, list[bytes]] = {name: [] for name in ("torch-zip", "torch-legacy", "safetensors", "pickle")}
    found |= {
        "torchscript": [_script(), _model_json()],
        "torch-export": [program(), program(opaque=b"\x80\x02K\x01.")],
        "machine": list(_pickles()),
    }
    for path in sorted(_SAMPLES.iterdir()):
        if path.suffix in {".pt", ".pth", ".ckpt", ".pkl", ".safetensors"} and path.stat().st_size <= _LARGEST:
            data = path.read_bytes()
            found[recognise(MemorySource(path.name, data))].append(data)
    found["machine"] += [
        container_of(MemorySource("seed", data), Limits()).object_pickle() for data in found["torch-zip"]
    ]
    found["torch-zip"] += [archive_of(pickled, {"0": bytes(16)}) for pickled in tensors()]
    # Nodes that inflate, below the limit.
    nodes = b"\x80\x02(" + b"]" * 1_000 + b"l."
    found["torch-zip"] += [deflated({"a/data.pkl": one, "a/data/0": bytes(16)}) for one in (nodes, *tensors())]
    found["torchscript"] += [deflated({"a/data.pkl": nodes, "a/constants.pkl": nodes, "a/code/__torch__.py": b""})]
    found["safetensors"] += [table(), table({f"{one:x}": "" for one in range(300)} | {"a\\": '"{[\\' * 99})]
    return found


def archive_of(pickled: bytes, storages: dict[str, bytes], **more: bytes) -> bytes:
    """An archive of ``torch.save``, stored without alignment."""
    data = {f"data/{key}": data for key, data in storages.items()}
    records = {"data.pkl": pickled} | data | more | {"version": b"3\n"}
    return zip_of({f"a/{name}": data for name, data in records.items()})


def zip_of(files: dict[str, bytes], packed: dict[str, bytes] | None = None) -> bytes:
    """A zip of stored files and, in ``packed``, compressed ones."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        for name, data in (packed or {}).items():
            archive.writestr(name, data, zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def deflated(files: dict[str, bytes]) -> bytes:
    """A zip of compressed files."""
    return zip_of({}, files)


def _pickles() -> Iterator[bytes]:
    for protocol in range(6):
        yield pickle.dumps(_PLAIN, protocol)
    yield from tensors()


def tensors() -> Iterator[bytes]:
    """Tensors of every kind over one storage of four floats."""
    dense = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE
    yield b"\x80\x02}X\x06\0\0\0weight" + dense + b"s."
    yield b"\x80\x02]" + dense + b"q\x01ah\x01a."
    yield _TORCH + b"_rebuild_parameter\n" + dense + b"\x88ccollections\nOrderedDict\n)R\x87R."
    yield (
        b"\x80\x02}(X\x05\0\0\0state}K\0}(X\x04\0\0\0step" + dense + b"X\x07\0\0\0exp_avg" + dense
        + b"usX\x0c\0\0\0param_groups](}(X\x02\0\0\0lrG?PbM\xd2\xf1\xa9\xfcX\x05\0\0\0fused\x89"
        + b"X\x06\0\0\0params]K\0aueu."
    )  # fmt: skip
    yield b"\x80\x02(X\x06\0\0\0deviceX\x06\0\0\0cuda:0q\x05X\x01\0\0\0dctorch\ndevice\nX\x04\0\0\0cudaK\x01\x86Rd."
    yield b"\x80\x02c__main__\nNet\n)\x81}(X\x06\0\0\0deviceX\x06\0\0\0cuda:1X\x01\0\0\0w" + dense + b"ub."


def _script() -> bytes:
    pickled = (
        b"\x80\x02c__torch__\nModule\n)\x81}X\x06\0\0\0weightctorch._utils\n_rebuild_tensor_v2\n" + STORAGE + b"sb."
    )
    constants = b"\x80\x02(ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE + b"t."
    code = b'class Module(Module):\n  def forward(self):\n    return torch.zeros([2], device=torch.device("cuda:0"))\n'
    return archive_of(pickled, {"0": bytes(16)}, **{
        "constants.pkl": constants, "constants/0": bytes(16), "code/__torch__.py": code,
    })  # fmt: skip


def _model_json() -> bytes:
    tensor = {"dims": ["2"], "offset": "0", "strides": ["1"], "requiresGrad": False, "dataType": "FLOAT",
              "data": {"key": "tensors/0"}, "device": "cuda:0"}  # fmt: skip
    module = {"name": "M", "parameters": [{"isBuffer": False, "tensorId": "0", "name": "weight"}], "submodules": []}
    model = {"protoVersion": "2", "mainModule": module, "producerName": "pytorch", "producerVersion": "1.0",
             "tensors": [tensor, tensor]}  # fmt: skip
    return zip_of({"a/model.json": json.dumps(model).encode(), "a/tensors/0": bytes(8)})


def program(inputs: bytes = b"", opaque: bytes = b"") -> bytes:
    """An archive of ``torch.export`` with a weight and a constant.

    Args:
        inputs: pickle of the sample inputs; a tensor if empty.
        opaque: pickle of an object among the constants. If set, the graph also names a device in a string.
    """
    device = {"type": "cuda", "index": 0}
    meta = {"dtype": 7, "sizes": [{"as_int": 2}, {"as_int": 2}], "requires_grad": True, "device": device,
            "strides": [{"as_int": 2}, {"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}  # fmt: skip
    row = {"path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": meta}
    thing = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    node = {"target": "torch.ops.aten.add.Tensor", "inputs": [
        {"name": "device", "arg": {"as_device": device}}, {"name": "device", "arg": {"as_string": "cuda:0"}},
        {"name": "", "arg": {"as_string": "cuda" if opaque else "sum"}},
    ], "outputs": [{"as_sym_int": {"as_expr": {"expr_str": "2*s0"}}}], "metadata": {}}  # fmt: skip
    graph = {"inputs": [{"as_tensor": {"name": "p_w"}}], "outputs": [], "nodes": [node], "tensor_values": {"p_w": meta}}
    specs = [{"parameter": {"arg": {"name": "p_w"}, "parameter_name": "w"}}]
    module = {"graph": graph, "signature": {"input_specs": specs, "output_specs": []}}
    whole = {"graph_module": module, "schema_version": {"major": 8, "minor": 20}, "torch_version": "2.13",
             "guards_code": ["L['x'] == 2"]}  # fmt: skip
    records = {
        "data/weights/weight_0": bytes(16),
        "data/weights/model_weights_config.json": json.dumps({"config": {"w": row}}).encode(),
        "data/constants/tensor_0": bytes(16),
        "data/constants/opaque_obj_0": opaque,
        "data/constants/model_constants_config.json": json.dumps(
            {"config": {"c": row | {"path_name": "tensor_0"}} | ({"thing": thing} if opaque else {})}
        ).encode(),
        "models/model.json": json.dumps(whole).encode(),
        "data/sample_inputs/model.pt": archive_of(inputs or next(tensors()), {"0": bytes(16)}),
        "archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little",
    }  # fmt: skip
    return zip_of({f"a/{name}": data for name, data in records.items()})


def table(metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file with a tensor of 4-bit floats."""
    rows = {
        "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F4", "shape": [4], "data_offsets": [16, 18]},
        "__metadata__": {"format": "pt", **(metadata or {})},
    }
    raw = json.dumps(rows).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(18)

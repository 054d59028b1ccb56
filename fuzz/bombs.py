"""Recipes for small files that need much time, memory or depth, by family.

Each recipe takes a size: tests make small files, ``benchmarks/hostile.py`` makes large ones.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import TYPE_CHECKING, Final

from fuzz import zip_bombs
from fuzz.payloads import text
from fuzz.seeds import STORAGE, archive_of, deflated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TENSOR: Final = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE
_BYTES: Final = {"0": bytes(16)}


def by_family(size: int) -> dict[str, dict[str, Callable[[], bytes]]]:
    """Recipes by family and name.

    Args:
        size: number of operations of a pickle, records of an archive, or rows of a table.
    """
    return {
        "memo and sharing": _memo(size),
        "nesting and cycles": _nesting(size),
        "indices and lengths": _figures(),
        "wide trees": _wide(size),
        "names": _names(size),
        "zip: inflation": zip_bombs.inflation(size),
        "zip: structure": zip_bombs.structure(size),
        "zip: bits of the central directory": zip_bombs.bits(),
        "streams of torch < 1.6": _legacy(size),
        "TorchScript": _script(size),
        "JSON of safetensors": _json(size),
        "streams in pickles": _nested(size),
    }


def _zipped(pickled: bytes) -> Callable[[], bytes]:
    return lambda: archive_of(pickled, _BYTES)


def _laughs(opening: bytes, closing: bytes, levels: int) -> bytes:
    """Nested containers: each level contains the one below ten times."""
    body = b"".join(b"(" + b"h%c" % (place - 1) * 10 + closing + b"q%c" % place for place in range(1, levels))
    return b"\x80\x02(" + opening + b"q\x00" + body + b"t."


def _memo(size: int) -> dict[str, Callable[[], bytes]]:
    pairs = b"".join(b"(" + b"Nh%c" % (place - 1) * 10 + b"dq%c" % place for place in range(1, 30))
    shared = b"".join(
        b"(" + b"".join(text(str(item)) + b"h%c" % (place - 1) for item in range(10)) + b"dq%c" % place
        for place in range(1, 30)
    )
    return {
        "a billion lists": _zipped(_laughs(b"]", b"l", 30)),
        "a billion tuples": _zipped(_laughs(_TENSOR, b"t", 30)),
        "a billion dicts of one key": _zipped(b"\x80\x02(]q\x00" + pairs + b"t."),
        "a billion tensors by name": _zipped(b"\x80\x02(" + _TENSOR + b"q\x00" + shared + b"t."),
        "one tensor many times": _zipped(b"\x80\x02(" + _TENSOR + b"q\x00" + b"h\x00" * size + b"l."),
        "memo of everything": _zipped(b"\x80\x04N" + b"\x94" * size + b"."),
        "a long string many times": _zipped(
            b"\x80\x02" + text("x" * size) + b"q\x000(" + b"h\x00N" * (size // 10) + b"d."
        ),
        "a long key in every path": _zipped(
            b"\x80\x02" + text("x" * size) + b"q\x000" + b"}h\x00" * 5000 + _TENSOR + b"s" * 5000 + b"."
        ),
        "overlapping views of one storage": lambda: archive_of(_views(size), {"0": bytes(4 * size)}),
    }


def _views(size: int) -> bytes:
    """Distinct views of one storage of ``size`` floats."""
    count = struct.pack("<i", size)
    storage = STORAGE[1 : STORAGE.index(b"Q") + 1].replace(b"K\x04tQ", b"J" + count + b"tQ")
    views = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(h\0J" + struct.pack("<i", one) + b"J" + struct.pack("<i", size - one)
        + b"\x85K\1\x85\x89NtR"
        for one in range(size // 100)
    )  # fmt: skip
    return b"\x80\x02" + storage + b"q\x000(" + b"".join(views) + b"l."


def _nesting(size: int) -> dict[str, Callable[[], bytes]]:
    wide = b"".join(b"h\x00" for _ in range(size))
    return {
        "tuples": _zipped(b"\x80\x02N" + b"\x85" * size + b"."),
        "lists": _zipped(b"\x80\x02" + b"]" * size + b"a" * (size - 1) + b"."),
        "dicts": _zipped(b"\x80\x02}" + b"N}" * size + b"s" * size + b"."),
        "calls": _zipped(b"\x80\x02ccollections\nOrderedDict\n" + b")R" * size + b"."),
        "states": _zipped(b"\x80\x02" + b"N" * (size + 1) + b"b" * size + b"."),
        "persistent ids": _zipped(b"\x80\x02N" + b"Q" * size + b"."),
        "marks": _zipped(b"\x80\x02" + b"(" * size + b"t" * size + b"."),
        "tensors nested as deep as allowed": _zipped(b"\x80\x02" + b"}K\x00" * 4000 + _TENSOR + b"s" * 4000 + b"."),
        "a list of itself": _zipped(b"\x80\x02]q\x00(" + wide + b"e."),
        "a dict of itself": _zipped(b"\x80\x02}q\x00(" + b"".join(b"Nh\x00" for _ in range(size)) + b"u."),
        "an object in its own state": _zipped(b"\x80\x02c__main__\nA\n)\x81q\x00}(" + text("a") + b"h\x00" + b"ub."),
        "parameters of parameters": _zipped(
            b"\x80\x02" + b"ctorch._utils\n_rebuild_parameter\n(" * 2000 + _TENSOR
            + b"\x88ccollections\nOrderedDict\n)RtR" * 2000 + b"."
        ),
    }  # fmt: skip


def _figures() -> dict[str, Callable[[], bytes]]:
    tensor = _TENSOR
    big = b"\x8a\x08" + b"\xff" * 7 + b"\x7f"
    return {
        "a memo index of 32 bits": _zipped(b"\x80\x02Nr\xff\xff\xff\xff."),
        "a memo index of 4000 digits": _zipped(b"\x80\x02Np" + b"9" * 4000 + b"\n."),
        "a string of 4 GiB": _zipped(b"\x80\x02X\xff\xff\xff\xffabc."),
        "bytes of 2**63": _zipped(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fabc."),
        "a frame of 2**64": _zipped(b"\x80\x04\x95" + b"\xff" * 8 + b"N."),
        "frames with a wrong length": _zipped(b"\x80\x04" + b"\x95\x03" + bytes(7) + b"N0" * 50_000 + b"N."),
        "an integer of a million digits": _zipped(b"\x80\x02L" + b"9" * 1_000_000 + b"L\n."),
        "an integer of 8 million bits": _zipped(b"\x80\x02\x8b\x00\x00\x10\x00" + b"\x7f" * 2**20 + b"."),
        "a storage of 2**63 elements": _zipped(b"\x80\x02" + tensor.replace(b"K\x04tQ", big + b"tQ") + b"."),
        "a tensor of 2**63 elements": _zipped(b"\x80\x02" + tensor.replace(b"K\x04\x85K", big + b"\x85K") + b"."),
        "a stride of 2**63": _zipped(b"\x80\x02" + tensor.replace(b"K\x01\x85\x89", big + b"\x85\x89") + b"."),
        "an offset of 2**63": _zipped(b"\x80\x02" + tensor.replace(b"QK\0", b"Q" + big) + b"."),
        "a tensor of 1000 axes": _zipped(
            b"\x80\x02"
            + tensor.replace(b"K\x04\x85", b"(" + big * 1000 + b"t").replace(b"K\x01\x85", b"(" + b"K\0" * 1000 + b"t")
            + b"."
        ),
    }  # fmt: skip


def _optimizer(place: int) -> bytes:
    return (
        b"}(" + text("state") + b"}K\0}(" + text("step") + _TENSOR + text(f"exp_avg{place}") + _TENSOR + b"us"
        + text("param_groups") + b"](}(" + text("lr") + b"K\1" + text("params") + b"]K\0aueu"
    )  # fmt: skip


def _wide(size: int) -> dict[str, Callable[[], bytes]]:
    def named(items: Iterable[bytes]) -> bytes:
        return b"\x80\x02}(" + b"".join(text(f"k{place}") + item for place, item in enumerate(items)) + b"u."

    few = size // 40
    registries = text("_buffers") + b"}" + text("_modules") + b"}"
    module = b"c__main__\nM\n)\x81}(" + registries + text("_parameters") + b"}" + text("w") + _TENSOR + b"sub"
    return {
        "a dict of tensors": _zipped(named(_TENSOR for _ in range(size // 10))),
        "a dict of devices": _zipped(
            named(b"ctorch\ndevice\n" + text(f"cuda:{one}") + b"\x85R" for one in range(size // 10))
        ),
        "a dict of device strings": _zipped(
            b"\x80\x02}(" + b"".join(text("device") + text(f"cuda:{one % 99}") for one in range(size // 10)) + b"u."
        ),
        "many globals": _zipped(b"\x80\x02(" + b"".join(b"cm%d\nx\n" % one for one in range(size // 10)) + b"l."),
        "many optimizers": _zipped(named(map(_optimizer, range(few)))),
        "an optimizer of many groups": _zipped(
            b"\x80\x02}(" + text("state") + b"}" + text("param_groups") + b"("
            + b"".join(b"}" + text("params") + b"(J" + struct.pack("<i", one) + b"ls" for one in range(few)) + b"lu."
        ),
        "many modules": _zipped(named(module for _ in range(few))),
        "many storages to cast, by STACK_GLOBAL": _zipped(
            b"\x80\x04(" + b"".join(
                b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + text("torch") + text("DoubleStorage")
                + b"\x93\x94" + text(str(one)) + b"\x94" + text("cuda:0") + b"\x94K\0tQK\0K\0\x85K\1\x85\x89N)tR0"
                for one in range(few)
            ) + _TENSOR + b"l."
        ),
    }  # fmt: skip


def _names(size: int) -> dict[str, Callable[[], bytes]]:
    """As many names as operations; they take more memory than their bytes, and a healthy file can have as many."""
    rows = (b'"w%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % one for one in range(size))
    return {
        "numbers as keys": _zipped(
            b"\x80\x02}(" + b"".join(b"J" + struct.pack("<i", one) + b"N" for one in range(size)) + b"u."
        ),
        "words as keys": _zipped(b"\x80\x02}(" + b"".join(b"U\x07%07dN" % one for one in range(size)) + b"u."),
        "empty lists": _zipped(b"\x80\x02(" + b"]" * size + b"l."),
        "lists of one item": _zipped(b"\x80\x02(" + b"]Na" * size + b"l."),
        "tensors of safetensors": _table(b"{" + b",".join(rows) + b"}"),
    }


def _stream(*pickles: bytes, rest: bytes = b"") -> bytes:
    sound = [
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
        b"\x80\x02M\xe9\x03.",
        b"\x80\x02}.",
        b"\x80\x02}.",
        b"\x80\x02].",
    ]
    return b"".join(sound[: 5 - len(pickles)]) + b"".join(pickles) + rest


def _legacy(size: int) -> dict[str, Callable[[], bytes]]:
    keys = b"\x80\x02(" + b"".join(text(str(one)) for one in range(size // 10)) + b"l."
    one_tensor = b"\x80\x02" + _TENSOR + b"."
    return {
        "deep system information": lambda: _stream(b"\x80\x02N" + b"\x85" * size + b".", b"\x80\x02}.", b"\x80\x02]."),
        "many keys": lambda: _stream(b"\x80\x02}.", keys),
        "a count of 2**63": lambda: _stream(
            one_tensor.replace(b"K\x04tQ", b"\x8a\x08" + b"\xff" * 7 + b"\x7ftQ"), b"\x80\x02](" + text("0") + b"e.",
            rest=b"\xff" * 7 + b"\x7f" + bytes(16),
        ),
        "a count below zero": lambda: _stream(
            one_tensor, b"\x80\x02](" + text("0") + b"e.", rest=b"\xff" * 8 + bytes(16)
        ),
        "without an end": lambda: _stream(b"\x80\x02" + b"N0" * (size * 5)),
        "a line without an end": lambda: _stream(b"\x80\x02V" + b"x" * (size * 10)),
        "a million views of views": lambda: _stream(
            b"\x80\x02(" + b"".join(
                _TENSOR.replace(b"K\x04tQ", b"K\x04(" + text(str(one)) + b"K\0K\x04ttQ") for one in range(size // 100)
            ) + b"l.", b"\x80\x02](" + text("0") + b"e.", rest=struct.pack("<q", 4) + bytes(16),
        ),
    }  # fmt: skip


def _script(size: int) -> dict[str, Callable[[], bytes]]:
    pickled = b"\x80\x02c__torch__\nModule\n)\x81}" + text("weight") + _TENSOR + b"sb."

    def with_code(code: bytes) -> Callable[[], bytes]:
        return lambda: archive_of(pickled, _BYTES, **{"code/__torch__.py": code, "constants.pkl": b"\x80\x02)."})

    def listed(raw: bytes) -> Callable[[], bytes]:
        def make() -> bytes:
            stream = io.BytesIO()
            with zipfile.ZipFile(stream, "w") as archive:
                archive.writestr("a/model.json", raw)
                archive.writestr("a/tensors/0", bytes(8))
            return stream.getvalue()

        return make

    return {
        "code that only names devices": with_code(b'torch.device("cuda:0")\n' * (size // 20)),
        "code of quotes": with_code(b'"' * size),
        "code of escapes": with_code(b'"\\' * size),
        "code of open calls": with_code(b"torch.device(" * (size // 10)),
        "code of spaces": with_code(b"torch.device" + b" " * size),
        "code that inflates": lambda: deflated({
            "a/data.pkl": pickled, "a/data/0": bytes(16), "a/constants.pkl": b"\x80\x02).",
            **{f"a/code/{one}.py": bytes(20 * size) for one in range(20)},
        }),
        "model.json of brackets": listed(b"[" * size),
        "model.json of objects": listed(b'{"tensors": [' + b"{}," * size + b"{}]}"),
        "model.json of modules": listed(
            b'{"mainModule": ' + b'{"name": "a", "submodules": [' * (size // 100) + b"]}" * (size // 100) + b"}"
        ),
        "model.json of one tensor": listed(_one_tensor(size)),
        "model.json of large numbers": listed(b'{"mainModule": {}, "tensors": [{"dims": ["' + b"9" * size + b'"]}]}'),
    }  # fmt: skip


def _one_tensor(size: int) -> bytes:
    """A ``model.json`` whose module names one tensor of many axes many times."""
    tensor = {"dims": ["1"] * 150, "strides": ["1"] * 150, "dataType": "FLOAT", "device": "cpu"}
    whole = {"parameters": [{"name": ""}] * (size // 12)}
    return json.dumps({"mainModule": whole, "tensors": [tensor | {"data": {"key": "tensors/0"}}]}).encode()


def _table(header: bytes, data: bytes = b"") -> Callable[[], bytes]:
    return lambda: len(header).to_bytes(8, "little") + header + data


def _json(size: int) -> dict[str, Callable[[], bytes]]:
    rows = {f"k{one}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for one in range(size // 20)}
    return {
        "brackets": _table(b'{"a":' + b"[" * (size * 10)),
        "empty lists": _table(b'{"a":[' + b"[]," * (size * 10) + b"[]]}"),
        "empty objects": _table(b'{"a":[' + b"{}," * (size * 10) + b"{}]}"),
        "small numbers": _table(b'{"a":[' + b"7," * (size * 10) + b"7]}"),
        "larger numbers": _table(b'{"a":[' + b"257," * (size * 10) + b"7]}"),
        "sizes of zero": _table(b'{"a":{"dtype":"U8","shape":[' + b"0," * (size * 10) + b'0],"data_offsets":[0,0]}}'),
        "short keys": _table(b"{" + b",".join(b'"%d":0' % one for one in range(size)) + b"}"),
        "entries of metadata": _table(_metadata(size)),
        "entries of metadata, as many as allowed": _table(_metadata(min(size, 262_000))),
        "quotes in a string": _table(b'{"__metadata__":{"a":"' + b'\\"' * (size * 5) + b'"}}'),
        "escaped brackets in a string": _table(b'{"__metadata__":{"a":"' + b'\\\\{[\\"' * size + b'"}}'),
        "extra keys in an entry": _table(
            b'{"a":{"dtype":"U8","shape":[],' + b",".join(b'"%x":""' % one for one in range(size)) + b"}}"
        ),
        "lists and strings": _table(b'{"a":[' + b",".join(b'[],"","","%x"' % one for one in range(size // 2)) + b"]}"),
        "escapes": _table(b'{"' + b"\\u0041" * (size * 5) + b'":0}'),
        "a number of a million digits": _table(b'{"a":' + b"9" * size + b"}"),
        "many tensors": _table(json.dumps(rows).encode()),
        "spaces": _table(b"{" + b" " * (size * 10) + b"}"),
        "a length of 2**63": lambda: b"\xff" * 7 + b"\x7f{}",
    }


def _metadata(count: int) -> bytes:
    return b'{"__metadata__":{' + b",".join(b'"%x":""' % one for one in range(count)) + b"}}"


def _nested(size: int) -> dict[str, Callable[[], bytes]]:
    load = b"ctorch.storage\n_load_from_bytes\n"
    stream = _stream(
        b"\x80\x02" + _TENSOR + b".", b"\x80\x02](" + text("0") + b"e.", rest=struct.pack("<q", 4) + bytes(16)
    )
    call = load + b"B" + len(stream).to_bytes(4, "little") + stream + b"\x85R"
    inner = stream
    for _ in range(10):
        inner = b"\x80\x02" + load + b"B" + len(inner).to_bytes(4, "little") + inner + b"\x85R."
    return {
        "many streams": lambda: b"\x80\x03(" + call * (size // 200) + b"l.",
        "one stream many times": lambda: b"\x80\x03(" + call + b"q\x00" + b"h\x00" * size + b"l.",
        "streams in streams": lambda: inner,
        "short strings": lambda: b"\x80\x03(" + (b"B\x80\0\0\0" + bytes(128)) * (size // 10) + b"l.",
        "bytes encoded as text": lambda: (
            b"\x80\x02" + load + b"c_codecs\nencode\nX" + (size * 10).to_bytes(4, "little") + b"a" * (size * 10)
            + text("latin1") + b"\x86R\x85R."
        ),
        "without an end": lambda: b"\x80\x03" + b"N0" * (size * 5),
        "a line without an end": lambda: b"\x80\x03V" + b"x" * (size * 10),
        "protocol 0 without an end": lambda: b"(" * (size * 10) + b".",
    }  # fmt: skip

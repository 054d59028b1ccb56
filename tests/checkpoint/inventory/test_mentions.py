"""Devices outside of tensors, and the operations that name them."""

from __future__ import annotations

import sys
import zipfile
from argparse import Namespace
from pickle import BININT1, BINUNICODE, GLOBAL, TUPLE2

import pytest
import torch
from torch import nn

from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.scan import operations


@pytest.fixture
def read(tmp_path):
    """Save an object; its mentions, and the operation at an offset of its pickle."""

    def mentions_of(obj, **options):
        path = tmp_path / "saved.pt"
        torch.save(obj, path, **options)
        with zipfile.ZipFile(path) as archive:
            data = archive.read("saved/data.pkl")
        found = {start: data[start:end] for start, end, _ in operations(data)}
        with open_checkpoint(str(path)) as checkpoint:
            return checkpoint.inventory.mentions, found

    return mentions_of


def told(mentions):
    return [(mention.where, mention.kind, mention.value) for mention in mentions]


def test_a_device_without_an_index(read):
    (mention,), operation = read({"d": torch.device("mps")})
    assert told([mention]) == [("d", "torch.device", "mps")]
    assert operation[mention.site] == BINUNICODE + b"\x03\0\0\0mps"
    assert mention.index_site is None
    assert operation[mention.tuple_site] == b"\x85"


def test_a_device_with_an_index(read):
    (mention,), operation = read([torch.device("cuda", 3)])
    assert told([mention]) == [("0", "torch.device", "cuda:3")]
    assert operation[mention.site] == BINUNICODE + b"\x04\0\0\0cuda"
    assert operation[mention.index_site] == BININT1 + b"\x03"
    assert operation[mention.tuple_site] == TUPLE2


def test_a_string_in_the_memo_has_a_site_for_each_reader(read):
    tag = "cuda:0"
    mentions, operation = read({"a": tag, "b": [tag], "c": torch.device(tag)})
    assert told(mentions) == [("a", "string", tag), ("b.0", "string", tag), ("c", "torch.device", tag)]
    assert operation[mentions[0].site].startswith(BINUNICODE)
    assert operation[mentions[1].site].startswith(b"h")
    assert not any(operation[mention.site].startswith(GLOBAL) for mention in mentions)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"anything": "cuda:0"}, [("anything", "string", "cuda:0")]),
        (["cuda:0", "x"], [("0", "string", "cuda:0")]),
        ({"deep": [("x", ["mps:0"])]}, [("deep.0.1.0", "string", "mps:0")]),
        ({"device": "cpu"}, [("device", "string", "cpu")]),
        ({"map_location": "cuda"}, [("map_location", "string", "cuda")]),
        ({"devices": ["cuda", "cpu"]}, [("devices.0", "string", "cuda"), ("devices.1", "string", "cpu")]),
        (Namespace(device="cuda", gpu=1), [("device", "string", "cuda"), ("gpu", "device_ids", "1")]),
        ({"device_ids": [0, 1]}, [("device_ids", "device_ids", "[0, 1]")]),
        ({"gpu_ids": (3,)}, [("gpu_ids", "device_ids", "[3]")]),
        ({"device": 0}, [("device", "device_ids", "0")]),
        ({"gpus": 2}, []),
        ({"devices": 1}, []),
        ({"device_ids": []}, []),
        ({"device_ids": [True]}, []),
        ({"device_ids": [0, "a"]}, []),
        ({"device_ids": [0, 5000]}, []),
        ({"device": -1}, []),
        ({"vocabulary": ["gpu", "cpu", "cuda", "meta"]}, []),
        ({"vocabulary": {"cpu": 3, "cuda:0": 4}}, []),
        ({"words": "cpu"}, []),
        ({"device": "device"}, []),
        ({"time": "12:30"}, []),
        ({"device": "cuda:0" + "0" * 100}, []),
        ({"device": 2.5, "devices": None}, []),
    ],
)
def test_what_is_a_mention(saved, expected, read):
    assert told(read(saved)[0]) == expected


def test_a_module_in_data_parallel(read, monkeypatch):
    # Another test of this process may simulate a device, which DataParallel would move the module to.
    module = sys.modules["torch.nn.parallel.data_parallel"]  # the package has a function of that name
    monkeypatch.setattr(module, "_get_available_device_type", lambda: None)
    wrapped = nn.DataParallel(nn.Linear(1, 1))
    wrapped.device_ids, wrapped.output_device = [0, 1], 0
    wrapped.src_device_obj = torch.device("cuda:0")
    assert told(read(wrapped)[0]) == [
        ("device_ids", "device_ids", "[0, 1]"),
        ("output_device", "device_ids", "0"),
        ("src_device_obj", "torch.device", "cuda:0"),
    ]


def test_a_device_of_odd_arguments_is_none(read_pickle):
    for arguments in (b")", b"K\x01\x85", b"X\x04\0\0\0cudaX\x01\0\0\0a\x86", b"]", b"X\x03\0\0\0cpuK\x01K\x02\x87"):
        inventory = read_pickle(b"\x80\x02ctorch\ndevice\n" + arguments + b"R.")
        assert told(inventory.mentions) == ([("", "torch.device", "cpu:1")] if arguments.endswith(b"\x87") else [])


def test_a_list_in_place_of_an_argument_tuple_has_no_site(read_pickle):
    assert read_pickle(b"\x80\x02ctorch\ndevice\n]X\x03\0\0\0cpuaR.").mentions == ()

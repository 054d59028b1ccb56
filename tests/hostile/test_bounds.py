"""Small files that need much time or memory: each ends with a result, or with an error that names the limit."""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptmove.cli.app import app
from ckptmove.errors import LimitExceeded, UsageError
from ckptmove.limits import Limits
from fuzz import whole_bombs
from fuzz.bombs import by_family
from fuzz.folders import folders
from fuzz.payloads import text
from fuzz.seeds import STORAGE, archive_of

FAMILIES = by_family(2000) | whole_bombs.by_family(2000)
BOMBS = {f"{family}: {name}": make for family, recipes in FAMILIES.items() for name, make in recipes.items()}
FOLDERS = folders(100) | whole_bombs.folders(2000)
DENSE = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE


def run(*words):
    result = CliRunner().invoke(app, [*words, "--json"])
    assert isinstance(result.exception, SystemExit | None), result.exception
    document = json.loads(result.stdout)
    error = document["error"]
    assert result.exit_code in {0, 1, 3, 4}
    assert (error is None) == (result.exit_code in {0, 1})
    if result.exit_code == 4 and error["kind"] == "limit-exceeded":
        limit, actual = re.fullmatch(r".*: (\d+) > (\d+)", error["message"]).group(2, 1)
        assert int(actual) > int(limit)
        assert error["hint"]
    return error


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", BOMBS)
def test_every_bomb_ends(name, tmp_path) -> None:
    path, output = tmp_path / "bomb", tmp_path / "out"
    path.write_bytes(BOMBS[name]())
    run("inspect", str(path), "--tree", "--check", "--expect", "cpu")
    run("convert", str(path), "--to", "mps", "--cast", "--rewrite-strings", "-o", str(output))
    run("diff", str(path), str(output) if output.exists() else str(path))


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_every_folder_ends(name, tmp_path) -> None:
    FOLDERS[name](tmp_path / "run")
    run("inspect", str(tmp_path / "run"), "--tree", "--check")
    run("convert", str(tmp_path / "run"), "--to", "mps", "--dry-run")
    run("convert", str(tmp_path / "run"), "--to", "mps", "-o", str(tmp_path / "out"))
    run("diff", str(tmp_path / "run"), str(tmp_path / "run"))


def test_verify_refuses_what_inspect_does_before_anything_is_started(tmp_path, monkeypatch) -> None:
    """Every fourth bomb, with one of the four ways to run a child."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('ran', 'w')\n\ndef case(device): ...\n")
    torch.save({"w": torch.ones(1)}, "healthy.pt")

    def start(*_):
        raise UsageError("a child is started")

    monkeypatch.setattr("ckptmove.training.run._start", start)
    ways = ["verify {}", "verify {} --case train.py:case", "verify {} --optimizer train:Own", "verify x --against {}"]
    refused = set()
    for number, (name, make) in enumerate([*BOMBS.items()][::4]):
        path = tmp_path / str(number)
        path.write_bytes(make())
        words = ways[number % 4].format(path).replace(" x ", " healthy.pt ").split()
        inspected, verified = (
            CliRunner().invoke(app, [*command, "--json"]) for command in (["inspect", str(path)], words)
        )
        said, error = (json.loads(one.stdout)["error"] for one in (inspected, verified))
        assert verified.exit_code in ({inspected.exit_code} if said else {2, 4}), name
        assert not said or (error["kind"], error["message"]) == (said["kind"], said["message"]), name
        assert "\n" not in error["message"], name
        refused.add((number % 4, verified.exit_code))
    assert refused >= {(way, code) for way in range(4) for code in (2, 3)} | {(0, 4)}
    assert not (tmp_path / "ran").exists()


def shared(container, count):
    """A list of one container, many times."""
    return b"(" + container + b"q\x00" + b"h\x00" * count + b"l"


ATOMS = b"(" + b"K\x01" * 3000 + b"l"
SHARED = {
    "a list of numbers": shared(ATOMS, 3000),
    "a list of devices": shared(b"}" + text("device") + b"(" + text("cuda:0") * 3000 + b"ls", 3000),
    "a tensor of many axes": shared(
        DENSE.replace(b"K\x04\x85", b"(" + b"K\x01" * 900 + b"t").replace(b"K\x01\x85", b"(" + b"K\0" * 900 + b"t"),
        3000,
    ),
    "an optimizer": shared(
        b"}(" + text("state") + b"}" + text("param_groups") + b"](}" + text("params") + ATOMS + b"seu", 3000
    ),
    "parameters of groups": (
        b"}(" + text("state") + b"}" + text("param_groups") + b"(" + ATOMS + b"q\x000"
        + b"".join(b"}" + text("params") + b"h\x00s" for _ in range(3000)) + b"lu"
    ),
    "a long tag": shared(DENSE.replace(b"X\x06\0\0\0cuda:0", text("x" * 100_000)), 3000),
    "an object of a large state": shared(b"c__main__\nA\n)\x81}(" + b"K\x01N" * 3000 + b"ub", 3000),
}  # fmt: skip


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", [name for name in SHARED if name != "an object of a large state"])
def test_what_is_shared_counts_once_for_each_path(name, read_pickle) -> None:
    with pytest.raises(LimitExceeded) as caught:
        read_pickle(b"\x80\x02" + SHARED[name] + b".", Limits(visits=300_000))
    assert "paths" in caught.value.resource


def test_an_object_is_looked_at_once_wherever_it_hangs(read_pickle) -> None:
    read_pickle(b"\x80\x02" + SHARED["an object of a large state"] + b".", Limits(visits=30_000))


@pytest.mark.parametrize(
    "itself",
    [
        b"]q\x00(" + b"h\x00" * 3000 + b"e",
        b"}q\x00(" + b"Nh\x00" * 3000 + b"u",
        b"c__main__\nA\n)\x81q\x00}(" + b"".join(text(f"a{one}") + b"h\x00" for one in range(3000)) + b"ub",
        b"ccollections\nOrderedDict\n)Rq\x00(" + b"Nh\x00" * 3000 + b"u",
    ],
)
def test_what_holds_itself_is_looked_at_once(itself, read_pickle) -> None:
    assert read_pickle(b"\x80\x02" + itself + b".", Limits(visits=40_000)).tensors == ()


@pytest.fixture
def read_pickle(file_of):
    """The inventory of an archive with a pickle."""
    from ckptmove.opening.checkpoint import open_checkpoint

    def read(pickled, limits):
        with open_checkpoint(file_of(archive_of(pickled, {"0": bytes(16)})), limits) as checkpoint:
            return checkpoint.inventory

    return read


def test_a_parameter_that_hangs_on_itself_is_listed_and_left(read_pickle) -> None:
    body = (
        b"ctorch._utils\n_rebuild_parameter_with_state\n(" + DENSE + b"\x88ccollections\nOrderedDict\n)R}q\x50tRq\x51"
        b"h\x50" + text("again") + b"h\x51s0"
    )  # fmt: skip
    names = [tensor.name for tensor in read_pickle(b"\x80\x02]" + body + b"a.", Limits()).tensors]
    assert names == ["0", "0.again"]


def test_a_graph_of_objects_is_compared_along_its_objects(tmp_path) -> None:
    held = argparse.Namespace(d={1: torch.ones(1), "1": torch.zeros(1)})
    for _ in range(40):
        held = argparse.Namespace(k={0: held, "0": held})
    torch.save({"r": held}, tmp_path / "x.pt")
    assert run("diff", str(tmp_path / "x.pt"), str(tmp_path / "x.pt")) is None


#: Inspects a file in a process of its own; prints the limit that it exceeds, and the peak of its memory in KiB.
PEAK = """
import re, sys
from pathlib import Path
import ckptmove
from ckptmove.errors import LimitExceeded, UsageError
try:
    ckptmove.inspect(sys.argv[1])
except LimitExceeded as error:
    print(error.resource)
else:
    print()
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""
NESTS = {
    "lists": b"]" * 2_000_000 + b"a" * 1_999_999,
    "tuples": b"N" + b"\x85" * 3_000_000,
    "dicts": b"}" + b"K\x00}" * 1_000_000 + b"s" * 1_000_000,
}


def peak(path):
    """The limit that a file exceeds, and the peak memory of its inspection in MiB."""
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux says what a process had at most")
    done = subprocess.run([sys.executable, "-c", PEAK, path], stdout=subprocess.PIPE, check=True, text=True)
    limit, kib = done.stdout.splitlines()
    return limit, int(kib) / 1024


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.parametrize("name", NESTS)
def test_a_nest_is_refused_before_it_takes_memory(name, file_of) -> None:
    limit, mib = peak(file_of(archive_of(b"\x80\x02" + NESTS[name] + b".", {"0": bytes(16)})))
    assert limit == "the depth of a pickle"
    assert mib < 250


def numbers(count):
    keys = b"".join(b"J" + struct.pack("<i", one) + b"N" for one in range(count))
    return archive_of(b"\x80\x02}(" + keys + b"u.", {"0": bytes(16)})


def rows(count):
    header = {f"w{one}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for one in range(count)}
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.parametrize(("make", "count"), [(numbers, 1_500_000), (rows, 200_000)])
def test_many_names_take_sixteen_times_their_bytes(make, count, file_of) -> None:
    data = make(count)
    limit, mib = peak(file_of(data))
    assert not limit
    assert mib < 16 * len(data) / 2**20 + 100

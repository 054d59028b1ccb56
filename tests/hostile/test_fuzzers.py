"""The harness of the fuzzers, over their seeds, over mutations, and over all inputs that failed before."""

from __future__ import annotations

import io
import pickle
from random import Random

import pytest
import torch

from fuzz.harness import examine_file, guarded
from fuzz.mutators import mixed
from fuzz.packing import Entry, lay_out, pack, unpack
from fuzz.seeds import STORAGE, archive_of
from fuzz.targets import TARGETS, seeds_by_target
from fuzz.verifying import examine_resume
from fuzz.whole_seeds import saved

SEEDS = seeds_by_target()
DENSE = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE


def nested(code):
    stream = archive_of(b"\x80\x02" + DENSE + b".", {"0": bytes(16)})
    load = b"ctorch.storage\n_load_from_bytes\n" + code % (len(stream).to_bytes(4, "little") + stream)
    return b"\x80\x03" + load + b"q\x020}h\x01h\x02s."


def bare(value):
    return pickle.dumps(value, 4)


LONG = (b"k" * 200, 1)
#: Inputs that failed, by the fault.
FOUND = {
    "an end record in a file too short for a directory": lambda: b"PK\3\4\x14\0\0ZZVPK\5\6\0\0\0",
    "a long key of a bare pickle had a name that changed with the file": lambda: bare(
        {b"k" * 200: torch.zeros(2), "x" * 70_000: torch.ones(2), "device": torch.device("cuda:1")}
    ),
    "a long key in another key, in two dicts": lambda: bare(
        [{LONG: torch.zeros(2)}, {LONG: torch.ones(2), "device": torch.device("cuda:1")}]
    ),
    **{
        f"a key of a dict was also a stream, and changed with it: {name}": lambda code=code: nested(code)
        for name, code in {
            "bytes": b"B%bq\x01\x85R",
            "a str of Python 2": b"T%bq\x01\x85R",
            "arguments": b"B%b\x85q\x01R",
        }.items()
    },
    "a long key that is written as text": lambda: pickle.dumps(
        {b"k" * 70_000: torch.zeros(2), "device": torch.device("cuda:1")}, 2
    ),
    "a key of a dict was also a persistent id, and changed with it": lambda: archive_of(
        b"\x80\x02}" + DENSE.replace(b"K\x04tQ", b"K\x04tq\x01Q") + b"0h\x01" + DENSE + b"s.", {"0": bytes(16)}
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_mended(name) -> None:
    assert guarded(examine_file, FOUND[name]()) in {"ok", "damaged-archive", "uneditable-pickle"}


def resumed(**entry):
    stream = io.BytesIO()
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0]}
    torch.save({"state": {0: entry}, "param_groups": [group]}, stream)
    return stream.getvalue()


FOUND_BY_VERIFY = {
    "a key of state that begins like the key of a list's member": lambda: resumed(
        **{"al": [torch.ones(1)], "al.key": torch.ones(1), "al.0.key": 3, "momentum_buffer": torch.ones(1)}
    ),
}


@pytest.mark.parametrize("name", FOUND_BY_VERIFY)
def test_what_was_found_by_verifying_is_mended(name) -> None:
    assert guarded(examine_resume, FOUND_BY_VERIFY[name]()) == "ok"


@pytest.mark.unmeasured
@pytest.mark.parametrize("target", TARGETS)
def test_every_seed_holds(target) -> None:
    outcomes = {guarded(TARGETS[target].run, data) for data in SEEDS[target]}
    assert "ok" in outcomes
    refused = {"unsupported-dtype", "uncastable-dtype", "uneditable-pickle", "read-only-format", "two-readings"}
    assert outcomes <= {"ok", *refused}


@pytest.mark.unmeasured
@pytest.mark.parametrize("target", TARGETS)
def test_mutations_of_seeds_hold(target) -> None:
    random = Random(target)

    def plain(data):
        changed = bytearray(data)
        for _ in range(random.randint(1, 3)):
            if changed:
                changed[random.randrange(len(changed))] = random.randrange(256)
        return bytes(changed)

    outcomes = set()
    for _ in range(50):
        data = random.choice(SEEDS[target])
        for _ in range(random.randint(1, 3)):
            data = mixed(TARGETS[target].mutator, data, random, plain)
        outcomes.add(guarded(TARGETS[target].run, data))
    assert len(outcomes) > 1, "the mutations are all of one kind"


def test_a_fault_is_not_passed_over() -> None:
    def broken(data):
        raise KeyError(len(data))

    with pytest.raises(KeyError):
        guarded(broken, b"")


@pytest.mark.filterwarnings("ignore")  # torch warns about old files
def test_torch_reads_the_tars_of_the_seeds(tmp_path) -> None:
    path = tmp_path / "old.pt"  # torch reads this tar from a file only
    for data in SEEDS["torch-tar"]:
        path.write_bytes(data)
        loaded = torch.load(path, map_location="cpu", weights_only=False)
        assert {key: value.tolist() for key, value in loaded.items()} == {
            "21": [1, 2, 3, 4], "22": [2, 3], "23": [3, 4], "24": [5, 6],
        }  # fmt: skip


def test_torch_reads_the_metadata_of_the_seeds() -> None:
    files = saved({"w": [("__0_0.distcp", (0,)), ("__1_0.distcp", (4,))]})
    metadata = pickle.loads(files[".metadata"])
    assert metadata.state_dict_metadata["w"].size == torch.Size([8])
    assert metadata.state_dict_metadata["w"].properties.dtype == torch.float32
    for index, place in metadata.storage_data.items():
        data = files[place.relative_path][place.offset : place.offset + place.length]
        chunk = torch.load(io.BytesIO(data), map_location="cpu")
        assert chunk == 3 if index.fqn == "step" else torch.equal(chunk, torch.zeros(4))


def test_an_input_stands_for_nothing_outside_of_its_folder(tmp_path) -> None:
    names = b"../up", b"/etc/abs", b"a/../../b", b"\0", b"..", b"", b"a/b/c/d/e/f", b"long" * 60, b"a", b"\xff"
    data = pack([Entry(kind, name, b"../../../etc/passwd") for name in names for kind in range(4)][:16])
    lay_out(data + pack([Entry(0, b"rest", b"x" * 99)])[:50], tmp_path / "in" / "put")
    assert [one.name for one in tmp_path.iterdir()] == ["in"]
    assert [one.name for one in (tmp_path / "in").iterdir()] == ["put"]
    for path in (tmp_path / "in" / "put").rglob("*"):
        assert path.is_relative_to(tmp_path / "in" / "put")
        assert path.resolve().is_relative_to(tmp_path / "in" / "put")


def test_what_is_packed_is_laid_out(tmp_path) -> None:
    entries = [Entry(0, b"a/b", b"x"), Entry(2, b"c", b""), Entry(1, b"a/d", b"a/b")]
    assert unpack(pack(entries)) == entries
    lay_out(pack(entries), tmp_path / "input")
    assert (tmp_path / "input" / "a" / "d").read_bytes() == b"x"
    assert (tmp_path / "input" / "c").is_dir()


def test_the_samples_are_among_the_seeds() -> None:
    stream = io.BytesIO()
    torch.save({}, stream)
    assert stream.getvalue()[:4] == SEEDS["torch-zip"][0][:4]
    assert sum(map(len, SEEDS.values())) > 30

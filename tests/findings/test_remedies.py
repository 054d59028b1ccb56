"""What helps with a checkpoint that weights-only mode refuses: the first that works on it."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from http_server import serving

import ckptmove
from ckptmove.errors import CkptMoveError
from ckptmove.findings import trials
from ckptmove.findings.remedies import choose, note_on
from ckptmove.findings.trials import Source, below, loads
from ckptmove.io.remote.address import Address
from ckptmove.limits import Limits
from ckptmove.model import ArchiveFact, GlobalUse
from ckptmove.moves import MoveRequest
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.write import write_pickle
from ckptmove.text import Argument, Command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WEIGHT = torch.arange(6.0).reshape(2, 3)


class Config:
    """Attributes in ``__dict__``."""

    def __init__(self) -> None:
        self.lr, self.layers = 0.1, [1, 2]


@dataclasses.dataclass
class DataConfig:
    """Fields in ``__dict__``."""

    lr: float = 0.1
    inner: Config = dataclasses.field(default_factory=Config)


@dataclasses.dataclass
class SlotConfig:
    """Fields in slots."""

    __slots__ = ("lr", "name")

    lr: float
    name: str


class Sizes(NamedTuple):
    """A tuple with names."""

    depth: int
    width: int


class Mode(enum.Enum):
    """A member with a value."""

    TRAIN = "train"


class Schedule:
    """Made by a call of its class."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.steps = warmup, steps

    def __reduce__(self) -> tuple[object, ...]:
        return Schedule, (self.warmup, self.steps)


class Attributes(dict):  # type: ignore[type-arg]  # any items
    """A dict whose items are attributes, as of omegaconf's and easydict's users."""

    __getattr__ = dict.get


CONFIGS = {
    "class": (Config(), {"lr": 0.1, "layers": [1, 2]}),
    "dataclass": (DataConfig(), {"lr": 0.1, "inner": {"lr": 0.1, "layers": [1, 2]}}),
    "slots": (SlotConfig(0.1, "a"), {"lr": 0.1, "name": "a"}),
    "namedtuple": (Sizes(3, 4), (3, 4)),
    "enum": (Mode.TRAIN, "train"),
    "namespace": (argparse.Namespace(lr=0.1, on=True), {"lr": 0.1, "on": True}),
    "reduce": (Schedule(10, 100), (10, 100)),
    "dict": (Attributes(lr=0.1), {"lr": 0.1}),
}


@contextmanager
def source_of(path: Path) -> Iterator[Source]:
    """An open checkpoint, as ``inspect`` has it."""
    with open_checkpoint(str(path), tree="inventory") as checkpoint:
        yield Source(str(path), checkpoint)


def remedy_of(path: Path) -> str:
    """The fix of S701."""
    (finding,) = (one for one in ckptmove.inspect(path).findings if one.code == "S701")
    assert not finding.fix or isinstance(finding.fix, Command)
    return finding.fix


def run(command: str, folder: Path) -> None:
    """Run a command as it is pasted into a shell."""
    words = shlex.split(command)
    assert words[0] in {"ckptmove", "python"}
    begin = [sys.executable, "-m", "ckptmove"] if words[0] == "ckptmove" else [sys.executable]
    done = subprocess.run([*begin, *words[1:]], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("config", "plain"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_of_the_user_becomes_plain_values(config, plain, tmp_path) -> None:
    path = tmp_path / "run.pt"
    torch.save({"model": {"weight": WEIGHT}, "config": config, "epoch": 3}, path)

    words = shlex.split(remedy_of(path))

    assert words == ["ckptmove", "convert", str(path), "--plain"]
    ckptmove.convert(path, plain=True)
    found = torch.load(tmp_path / "run.new.pt", weights_only=True)
    assert torch.equal(found["model"]["weight"], WEIGHT)
    assert (found["config"], found["epoch"]) == (plain, 3)


def test_a_pickled_module_becomes_its_state_dict(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    torch.save(model, tmp_path / "it's a model.pt")

    run(remedy_of(tmp_path / "it's a model.pt"), tmp_path)

    found = torch.load(tmp_path / "it's a model.new.pt", weights_only=True)
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["run.tar", "run.pkl", "protocol 4.pt"])
def test_other_forms_become_a_file_that_torch_loads(name, tmp_path) -> None:
    import pickle

    from old_tar import tar_of

    value = {"weight": WEIGHT, "config": argparse.Namespace(lr=1)}
    path = tmp_path / name
    if name == "run.tar":
        path.write_bytes(tar_of({"weight": WEIGHT}))
    elif name == "run.pkl":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save({"weight": WEIGHT}, path, pickle_protocol=4)

    run(remedy_of(path), tmp_path)

    found = torch.load(path.with_suffix(f".new{path.suffix}"), weights_only=True)
    assert torch.equal(found["weight"], WEIGHT)


@pytest.mark.slow
def test_classes_that_their_module_registers_need_its_import(tmp_path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    path = tmp_path / 'a "file".pt'
    torch.save({"jagged": jagged}, path)

    command = remedy_of(path)

    assert "import torch, torch._dynamo; torch.load(" in command
    run(command, tmp_path)


@pytest.mark.slow
def test_a_file_of_a_directory_is_loaded_by_its_own_path(tmp_path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    torch.save({"jagged": jagged}, tmp_path / "model.pt")
    torch.save({"weight": WEIGHT}, tmp_path / "other.pt")

    command = remedy_of(tmp_path)

    assert f"{tmp_path}/model.pt" in command
    run(command, tmp_path)


def test_a_member_of_an_archive_has_no_path_to_load(tmp_path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    torch.save({"jagged": jagged}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.write(tmp_path / "model.pt", "model.pt")

    assert remedy_of(tmp_path / "run.zip") == ""


def test_integers_that_torch_never_loads_are_loaded_by_ckptmove(tmp_path) -> None:
    path = tmp_path / "run.pt"
    torch.save({"weight": WEIGHT, "number": 1 << 3000}, path)

    command = remedy_of(path)

    assert shlex.split(command) == ["python", "-c", f'import ckptmove; ckptmove.load("{path}")']
    run(command, tmp_path)
    assert ckptmove.load(path)["number"] == 1 << 3000


@pytest.mark.parametrize("name", ["uuid._get_command_stdout", "builtins.getattr", "logging.basicConfig"])
def test_nothing_helps_with_a_function_that_is_not_known(name, tmp_path) -> None:
    module, _, attribute = name.rpartition(".")
    path = tmp_path / "run.pt"
    data = f"\x80\x02}}X\x01\x00\x00\x00xc{module}\n{attribute}\n(X\x02\x00\x00\x00lstRs."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data.encode("latin-1"))
        archive.writestr("archive/version", "3\n")

    fixes = [one.fix for one in ckptmove.inspect(path).findings if one.code in {"S701", "S702"}]

    assert fixes
    assert all(fix == "" or fix.startswith("do not load it") for fix in fixes)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_nothing_helps_with_two_kinds_of_refusal(tmp_path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    torch.save({"jagged": jagged}, tmp_path / "opcodes.pt", pickle_protocol=4)
    module = torch.jit.script(torch.nn.Linear(1, 1))
    module.save(tmp_path / "script.pt")

    assert remedy_of(tmp_path / "opcodes.pt") == ""
    with source_of(tmp_path / "script.pt") as source:
        assert choose(source.checkpoint.inventory, source) is None


def test_what_only_its_reader_can_open_has_no_command(tmp_path) -> None:
    torch.save({"weight": WEIGHT, "config": argparse.Namespace(lr=1)}, tmp_path / "run.pt")
    data = io.BytesIO((tmp_path / "run.pt").read_bytes())

    inspection = ckptmove.inspect(data)

    assert [one.fix for one in inspection.findings if one.code == "S701"] == [""]
    with source_of(tmp_path / "run.pt") as source:
        secret = trials.Source(Address("https://host/run.pt?signature=secret"), source.checkpoint)
        assert choose(inspection.inventory, secret) is None


def test_a_path_below_a_url() -> None:
    found = below(Address("s3://bucket/run"), "step-1")

    assert isinstance(found, Address)
    assert found == "s3://bucket/run/step-1"
    assert (below("run", ""), below("run", "step-1")) == ("run", "run/step-1")


def test_items_of_a_class_that_takes_none_are_not_loaded(tmp_path) -> None:
    torch.save({"weight": WEIGHT}, tmp_path / "run.pt")
    with source_of(tmp_path / "run.pt") as source:
        filled = dataclasses.replace(
            source.checkpoint.inventory,
            globals=(GlobalUse("collections.deque", None, "safe"),),
            filled_classes=("collections.deque",),
            facts=(ArchiveFact("past-end", "0", 1),),
        )
        source.checkpoint.file.inventory = filled
        assert choose(filled, source) is None


def test_one_of_several_checkpoints(tmp_path) -> None:
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(WEIGHT)], momentum=0.9)
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        extra = {"config": argparse.Namespace(lr=1)} if step == 2 else {}
        torch.save({"model": {"weight": WEIGHT}, "optimizer": optimizer.state_dict(), **extra}, folder / "run.pt")

    assert remedy_of(tmp_path) == f"ckptmove convert {tmp_path}/checkpoint-2 --plain"
    shutil.copy(tmp_path / "checkpoint-2" / "run.pt", tmp_path / "checkpoint-1" / "run.pt")
    assert remedy_of(tmp_path).startswith(f"ckptmove inspect '{tmp_path}{os.sep}**'")


def jagged_file(path: Path) -> Path:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    torch.save({"weight": WEIGHT, "jagged": jagged}, path)
    return path


def test_a_conversion_names_the_same_remedy(tmp_path) -> None:
    torch.save({"weight": WEIGHT, "config": argparse.Namespace(lr=1)}, tmp_path / "run.pt")
    refused = "torch.load(weights_only=True) still refuses it (S701)"

    *_, note = ckptmove.convert(jagged_file(tmp_path / "jagged.pt"), to="cuda:0").notes
    assert note.startswith(f"{refused}: python -c ")
    assert isinstance(note, Command)
    *_, note = ckptmove.convert(tmp_path / "run.pt", to="cuda:0", in_place=True).notes
    assert note == f"{refused}: ckptmove convert {tmp_path}/run.pt --plain"


def test_a_conversion_of_what_nothing_helps_with(tmp_path) -> None:
    torch.save({"weight": WEIGHT, "lazy": torch.nn.UninitializedParameter()}, tmp_path / "run.pt")

    [note] = ckptmove.convert(tmp_path / "run.pt", to="cuda:0").notes

    assert note == "torch.load(weights_only=True) still refuses it (S701)"


def test_a_source_that_is_gone_has_no_note(tmp_path) -> None:
    request: Any = SimpleNamespace(path=str(tmp_path / "absent.pt"), limits=Limits(), move=MoveRequest(None))

    assert [*note_on(SimpleNamespace(container="torch-zip"), request)] == []  # type: ignore[arg-type]  # only its container is asked for


def test_a_load_names_what_reads_the_file(tmp_path) -> None:
    torch.save({"config": argparse.Namespace(lr=1)}, tmp_path / "run.pt")
    torch.save({"lazy": torch.nn.UninitializedParameter()}, tmp_path / "lazy.pt")
    hints = {}
    for path in (tmp_path / "run.pt", tmp_path / "lazy.pt", jagged_file(tmp_path / "jagged.pt")):
        with pytest.raises(CkptMoveError) as raised:
            ckptmove.load(path)
        hints[path.name] = raised.value.hint

    assert hints["run.pt"].endswith("plain=True")
    assert hints["jagged.pt"].endswith("import torch._dynamo")
    assert not hints["lazy.pt"]


def test_the_file_is_read_once(tmp_path, monkeypatch) -> None:
    from ckptmove.checkpoint import parts

    opened: list[object] = []
    original = parts.container_of
    monkeypatch.setattr(parts, "container_of", lambda *given: opened.append(given) or original(*given))
    torch.save({"weight": WEIGHT, "config": Config()}, tmp_path / "run.pt")

    assert remedy_of(tmp_path / "run.pt").endswith(" --plain")
    assert len(opened) == 1


def test_a_remedy_takes_no_request(tmp_path) -> None:
    torch.save({"weight": torch.ones(500_000)}, tmp_path / "accepted.pt")
    torch.save({"weight": torch.ones(500_000), "config": Config()}, tmp_path / "refused.pt")
    torch.save({"weight": torch.ones(500_000), "number": 1 << 3000}, tmp_path / "loaded.pt")
    fixes, requests = {}, {}
    with serving(tmp_path) as server:
        for name in ("accepted", "refused", "loaded"):
            server.clear()
            inspection = ckptmove.inspect(f"{server.url}/{name}.pt")
            fixes[name] = [one.fix for one in inspection.findings if one.code == "S701"]
            requests[name] = len(server.log)
        assert fixes["refused"] == [f"ckptmove convert {server.url}/refused.pt --plain"]
        assert "ckptmove.load(" in fixes["loaded"][0]
    assert requests["refused"] == requests["loaded"] == requests["accepted"]


@pytest.mark.parametrize("name", ["run.pt", "legacy.pt", "run.pkl", "run.zip"])
def test_the_tree_that_is_held_stays_as_it_is(name, tmp_path) -> None:
    import pickle

    value = {"weight": WEIGHT, "config": Config(), "modes": {1, 2}, "plain": [b"a", (Mode.TRAIN,)]}
    path = tmp_path / name
    if name == "run.pkl":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, tmp_path / "own.pt", _use_new_zipfile_serialization=name != "legacy.pt")
        if name == "run.zip":
            with zipfile.ZipFile(path, "w") as archive:
                archive.write(tmp_path / "own.pt", "run.pt")
        else:
            (tmp_path / "own.pt").rename(path)

    with open_checkpoint(str(path), keep_trees=True) as checkpoint:
        before = write_pickle(checkpoint.parts[0].tree())
        assert Source(str(path), checkpoint).becomes_plain()
        assert write_pickle(checkpoint.parts[0].tree()) == before


def test_what_the_dry_run_refuses_is_no_remedy(tmp_path) -> None:
    torch.save(
        {"weight": torch.ones(100), "config": Config()}, tmp_path / "cut.pt", _use_new_zipfile_serialization=False
    )
    data = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(data[:-60])

    with source_of(tmp_path / "cut.pt") as source:
        assert not source.becomes_plain()
        assert not source.is_written("", Argument("plain", True))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_code_among_the_files_is_not_converted(tmp_path) -> None:
    torch.jit.script(torch.nn.Linear(1, 1)).save(tmp_path / "script.pt")
    torch.save({"config": Config()}, tmp_path / "run.pt")

    with source_of(tmp_path) as source:
        assert not source.becomes_plain()
        assert not source.loads("")
        assert not source.is_written("", Argument("plain", True))


def test_other_changes_are_planned_with_it(tmp_path) -> None:
    torch.save({"weight": WEIGHT, "lazy": torch.nn.UninitializedParameter(), "config": Config()}, tmp_path / "run.pt")

    *_, dropped = ckptmove.convert(tmp_path / "run.pt", drop="lazy").notes
    *_, kept = ckptmove.convert(tmp_path / "run.pt", drop="weight", force=True).notes

    assert "plain=True" in dropped
    assert kept == "torch.load(weights_only=True) still refuses it (S701)"


def test_integers_in_one_of_several_files_are_loaded_by_ckptmove(tmp_path) -> None:
    torch.save({"weight": WEIGHT, "number": 1 << 3000}, tmp_path / "a.pt")
    torch.save({"bias": WEIGHT}, tmp_path / "b.pt")

    command = remedy_of(tmp_path)

    assert f'ckptmove.load("{tmp_path}")' in command
    run(command, tmp_path)


def test_what_cannot_be_opened_is_not_loaded(tmp_path) -> None:
    assert not loads(str(tmp_path / "absent.pt"), Limits())


def test_shards_of_tensors_become_one_file(tmp_path) -> None:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"model": {"weight": WEIGHT}, "kind": ShardedTensor}, folder / "run.pt")

    command = remedy_of(folder)

    assert command == f"ckptmove convert {folder} --plain --output {folder}.pth"
    run(command, tmp_path)
    found = torch.load(tmp_path / "run.pth", weights_only=True)
    assert found["kind"].endswith(".ShardedTensor")


def test_a_conversion_of_a_directory_or_of_dangerous_names_has_no_note(tmp_path) -> None:
    torch.save({"weight": WEIGHT, "function": os.system}, tmp_path / "run.pt")
    (tmp_path / "folder").mkdir()
    torch.save({"weight": WEIGHT, "config": Config()}, tmp_path / "folder" / "run.pt")

    for name in ("run.pt", "folder"):
        assert not any("(S701)" in note for note in ckptmove.convert(tmp_path / name, to="cuda:0").notes)


def test_the_remedy_of_what_a_trainer_resumes_from_stays_a_command(tmp_path) -> None:
    state = {
        "python": (3, (1, 2), None),
        "numpy": np.random.RandomState(0).get_state(),
        "cpu": torch.get_rng_state(),
    }
    torch.save(state, tmp_path / "rng_state.pth")
    torch.save({"weight": WEIGHT}, tmp_path / "pytorch_model.bin")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')

    fix = remedy_of(tmp_path)

    assert fix.startswith("needed only to load it yourself: ckptmove convert ")


def fixes_of(path: Path | io.BytesIO, **options: Any) -> dict[str, str]:
    return {one.code: one.fix for one in ckptmove.inspect(path, **options).findings}


def test_a_command_that_convert_would_refuse_is_no_fix(tmp_path) -> None:
    wrapped = {"_orig_mod.weight": WEIGHT}
    torch.save({"model": wrapped, "ema": {**wrapped, "weight": WEIGHT}}, tmp_path / "some.pt")
    torch.save({"model": wrapped}, tmp_path / "all.pt")

    assert fixes_of(tmp_path / "all.pt")["K601"] == f"ckptmove convert {tmp_path}/all.pt --strip-prefix"
    assert "ckptmove" not in fixes_of(tmp_path / "some.pt")["K601"]
    assert "ckptmove" not in fixes_of(io.BytesIO((tmp_path / "all.pt").read_bytes()))["K601"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantized_weight_is_not_cast_by_itself(tmp_path) -> None:
    scaled = {"l.weight": torch.ones(4).to(torch.float8_e4m3fn), "l.weight_scale": torch.ones(4, 1)}
    own = {"l.weight": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}
    for weights in (scaled, own):
        torch.save(weights, tmp_path / "run.pt")

        assert fixes_of(tmp_path / "run.pt", target="mps")["T401"].startswith("dequantize l.weight")


def test_a_dry_run_is_made_once(tmp_path, monkeypatch) -> None:
    made = []
    monkeypatch.setattr(trials, "dry_run", lambda *words: made.append(words))
    torch.save({"model": {"module.weight": WEIGHT}}, tmp_path / "run.pt")
    with source_of(tmp_path / "run.pt") as source:
        inventory = source.checkpoint.inventory
        strip, cpu = Argument("strip_prefix", True), Argument("to", "cpu")
        assert not source.converts(inventory, inventory.path, strip)
        assert not source.converts(inventory, inventory.path, strip)
        assert source.converts(inventory, inventory.path, cpu)
        remote = trials.Source(Address(inventory.path), source.checkpoint)
        assert remote.converts(inventory, inventory.path, strip)
        monkeypatch.setattr(trials, "_TRIED_BYTES", 0)
        assert trials.Source(source.location, source.checkpoint).converts(inventory, inventory.path, strip)
    assert len(made) == 1


def test_a_conversion_opens_a_url_once(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": WEIGHT, "config": Config()}, tmp_path / "refused.pt")
    torch.save({"weight": WEIGHT, "config": "text"}, tmp_path / "accepted.pt")
    requests = {}
    with serving(tmp_path) as server:
        for name in ("accepted", "refused"):
            server.clear()
            made = ckptmove.convert(f"{server.url}/{name}.pt", to="cuda:0", dry_run=True)
            requests[name] = len(server.log)
        assert [note for note in made.notes if "S701" in note] == [
            "torch.load(weights_only=True) still refuses it (S701)"
        ]
        server.clear()
        with pytest.raises(CkptMoveError) as raised:
            ckptmove.convert(f"{server.url}/refused.pt", output="new.safetensors", dry_run=True)
        requests["failed"] = len(server.log)
    assert raised.value.mends == ()
    assert requests["accepted"] == requests["refused"] == requests["failed"]

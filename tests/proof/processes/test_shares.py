"""``verify --jobs``: several processes give the report of one, and a failure of one leaves no other running."""

from __future__ import annotations

import json
import math
import os
import signal
import zipfile
from collections import Counter

import pytest
import simulation
import torch
from answers import checks_of
from distributed_checkpoints import Distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptmove.api.failures import failure_of
from ckptmove.api.functions import verify
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.errors import UsageError
from ckptmove.io.cores import cores
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.codec import dumps, loads
from ckptmove.proof.errors import ChildKilled
from ckptmove.proof.place import TorchDevice
from ckptmove.proof.processes.child import worker_command
from ckptmove.proof.processes.shares import share
from ckptmove.proof.request import VerifyRequest
from ckptmove.proof.restored.survey import RestoreTally
from ckptmove.proof.step import trial
from ckptmove.proof.step.tally import TrialTally
from ckptmove.training import run as module
from ckptmove.training import worker
from ckptmove.training.worker import run


class Ranks:
    """A group whose processes run one after the other, that of rank 0 last."""

    def __init__(self, rank, size, gathered):
        self.rank, self.size, self.gathered = rank, size, gathered

    def join(self, tally):
        if self.rank:
            self.gathered[self.rank].append(dumps(tally))
            return
        for rank in range(1, self.size):
            tally.join(loads(type(tally), self.gathered[rank].pop(0)))


def told(request, size):
    """The messages of a group of this size."""
    messages, gathered = [], {rank: [] for rank in range(size)}
    for rank in reversed(range(size)):
        run(request, messages.append, Ranks(rank, size, gathered))
        assert messages == [] or rank == 0
    return messages


@pytest.fixture
def same(request):
    """Check that groups of two and of three report what one process does, and return the checks by name."""

    def compare(path, to="cpu", **options):
        asked = VerifyRequest(path=str(path), to=to, devices=1, **options)
        alone = told(asked, 1)
        assert [told(asked, size) for size in (2, 3)] == [alone, alone]
        return checks_of(alone)

    return compare


def statuses(checks):
    return {name for name, check in checks.items() if check["status"] == "failed"}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamW", {"amsgrad": True}),
        ("SGD", {"momentum": 0.9}),
        ("Adafactor", {}),
        ("Adam", {"dtype": torch.bfloat16}),
        ("Adagrad", {"lr": 0.0}),
    ],
)
def test_healthy_files(make, same, optimizer, options):
    assert not statuses(same(make(optimizer, device="cpu", **options)))


def test_parameters_that_are_stepped_together(make, same):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(1, 3)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    path = make.folder / "lbfgs.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    checks = same(path)
    assert checks["step"]["status"] == "passed"


def test_a_simulated_device(make, same):
    checks = same(make(), "cuda:0")
    assert checks["step"]["evidence"]["simulated"]


def test_casts_and_parameters_without_state(make, same):
    tree = make.tree()
    moments = tree["optimizer"]["state"]
    del moments[3]
    for entry in moments.values():
        entry["exp_avg"] = entry["exp_avg"].double()
    moments[1] = {name: torch.zeros_like(value) for name, value in moments[1].items()}
    checks = same(make.save(tree, device="cpu"))
    assert "casts 3 exp_avg" in checks["step"]["detail"]


def test_two_optimizers_that_train_one_model_and_weights_that_are_tied(make, same):
    tree = make.tree()
    tree["model"]["tied"] = tree["model"]["0.weight"]
    tree["model"]["part"] = tree["model"]["0.weight"][1:]
    tree["other"] = make.tree("SGD", momentum=0.5)["optimizer"]
    assert not statuses(same(make.save(tree, device="cpu")))


def test_weights_alone(make, same):
    path = make.folder / "w.pt"
    torch.save({"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}, path)
    assert same(path)["step"]["status"] == "skipped"


def test_tensors_on_meta_are_counted_by_their_kind(make, same):
    tree = make.tree()
    tree["extra"] = {"a": torch.empty(3, device="meta"), "b": torch.empty(2, device="meta")}
    path = make.folder / "meta.pt"
    torch.save(tree, path)
    assert "2 meta tensors" in same(path)["restore"]["detail"]


def test_an_optimizer_without_its_model(make, same):
    tree = make.tree()
    assert same(make.save({"optimizer": tree["optimizer"]}, device="cpu"))["step"]["evidence"]["standins"] == 4


def test_the_first_of_several_errors_of_the_step(make, same):
    tree = make.tree()
    for key in (1, 3):
        tree["optimizer"]["state"][key]["exp_avg"] = torch.ones(7)
    tree["other"] = make.tree("SGD", momentum=0.5)["optimizer"]
    checks = same(make.save(tree, device="cpu"))
    assert "model.0.bias" in checks["step"]["detail"]
    assert checks["step"]["evidence"]["parameters"] == 0


@pytest.mark.parametrize(("with_state", "check"), [(True, "parity"), (False, "fresh")])
@simulation.on_a_simulated_device
def test_a_second_step_that_fails_for_some(make, same, monkeypatch, with_state, check):
    take_step = trial.take_step

    def fails(recipe, drafts, source, place, **options):
        for draft in drafts:
            is_chosen = isinstance(place, TorchDevice) and options["with_state"] == with_state
            if is_chosen and draft.piece.name.endswith("bias"):
                raise RuntimeError(f"no {draft.piece.name}")
        return take_step(recipe, drafts, source, place, **options)

    monkeypatch.setattr(trial, "take_step", fails)
    checks = same(make(), "cuda:0")
    assert "fails: RuntimeError: no model.0.bias" in checks[check]["detail"]
    assert checks["parity"]["evidence"]["apart"] == 2 * with_state
    assert checks["fresh"]["evidence"] == ({"with_state": 2, "changed": 2} if with_state else {})


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("spoil", "failed"),
    [
        (lambda tree: tree["model"]["0.bias"].fill_(math.nan), {"numbers"}),
        (lambda tree: [one.fill_(math.inf) for one in tree["model"].values()], {"numbers"}),
        (lambda tree: tree["optimizer"]["state"][2]["exp_avg_sq"].fill_(-1), {"numbers", "step"}),
        (lambda tree: [one["step"].fill_(-3) for one in tree["optimizer"]["state"].values()], {"numbers"}),
        (lambda tree: tree["optimizer"]["state"][0]["step"].fill_(0), {"numbers"}),
        (lambda tree: tree["optimizer"]["state"][1].update(exp_avg=torch.ones(7)), {"step"}),
        (lambda tree: [one["exp_avg"].fill_(9) for one in tree["optimizer"]["state"].values()], {"step"}),
        (lambda tree: [one["exp_avg"].zero_() for one in tree["optimizer"]["state"].values()], set()),
        (lambda tree: tree.update(rng=torch.zeros(5000, dtype=torch.uint8)), set()),
    ],
)
def test_faults_in_the_order_of_the_file(make, same, spoil, failed):
    tree = make.tree()
    spoil(tree)
    checks = same(make.save(tree, device="cpu"))
    assert failed <= statuses(checks)


def test_bits_that_torch_loads_otherwise(make, same, monkeypatch):
    loaded = torch.load

    def load(*args, **options):
        tree = loaded(*args, **options)
        for tensor in tree["model"].values():
            tensor.add_(1)
        return tree

    monkeypatch.setattr(torch, "load", load)
    checks = same(make(device="cpu"))
    assert checks["restore"]["evidence"]["differing"] == 4
    assert checks["restore"]["failures"][0].endswith("model.0.weight: other bits")


@pytest.mark.parametrize("spoil", [None, "__0_0.distcp"])
def test_distributed_checkpoints(tmp_path, same, spoil):
    halves = [(rank, (2 * rank, 0), (2, 3)) for rank in (0, 1)]
    tensors = {f"model.{name}": (torch.rand(4, 3), halves) for name in "abc"}
    folder = Distributed.save_ranks(tmp_path / "ranks", tensors)
    if spoil is not None:
        whole = (folder / spoil).read_bytes()
        (folder / spoil).write_bytes(whole.replace(b"FloatStorage", b"FloatStorags"))
    assert bool(statuses(same(folder))) == bool(spoil)


@pytest.mark.slow
def test_a_trained_distributed_checkpoint_and_an_archive_of_files(tmp_path, make, same):
    assert not statuses(same(Distributed.save(tmp_path / "dcp", Distributed.trained_tree())))
    archive = tmp_path / "both.tar"
    import tarfile

    with tarfile.open(archive, "w") as tar:
        for name in ("a.pt", "b.pt"):
            tar.add(make(device="cpu", name=name), arcname=name)
    assert same(archive)["restore"]["evidence"]["compared"] == 32


def test_an_original(make, same):
    original = make(device="cpu")
    assert not statuses(same(make(name="c2.pt", device="cpu"), against=original))
    tree = make.tree()
    tree["model"]["1.bias"] += 1
    tree["optimizer"]["state"][0]["exp_avg"] += 1
    checks = same(make.save(tree, "other.pt", "cpu"), against=original)
    assert dict(checks["restore"]["evidence"])["changed"] == 2


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12), count=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_shares_are_a_partition_of_about_equal_size(tmp_path_factory, sizes, count):
    path = tmp_path_factory.mktemp("shares") / "c.pt"
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    model = {f"p{index}": parameter.detach() for index, parameter in enumerate(parameters)}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, path)
    with open_checkpoint(str(path), Limits()) as checkpoint:
        inventory = checkpoint.inventory
        pairings = list(zip(inventory.optimizers, pair_all(inventory), strict=True))
        shares = [share(checkpoint, pairings, index, count) for index in range(count)]
    nbytes = {record.name: record.nbytes for record in inventory.tensors}
    assert sorted(name for one in shares for name in one.names) == sorted(nbytes)
    assert sorted(key for one in shares for key in one.keys[0]) == sorted(map(str, range(len(sizes))))
    for one in shares:
        own = {name.split(".")[2] for name in one.names if ".state." in name}
        assert own == one.keys[0]
    loads = [sum(nbytes[name] for name in one.names) for one in shares]
    assert max(loads) - min(loads) <= max(sizes) * 12 + 4


def deflated(path):
    """A copy whose last storage is deflated."""
    packed = f"{path}.deflated"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w") as target:
        for item in source.infolist():
            kind = zipfile.ZIP_DEFLATED if item.filename.endswith("/data/1") else zipfile.ZIP_STORED
            target.writestr(item.filename, source.read(item), kind)
    return packed


def legacy(path):
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    return path


def safetensors(path):
    save_file(torch.load(path), path)
    return path


def scripted(path):
    module = torch.nn.Module()
    for name, value in torch.load(path).items():
        module.register_buffer(name, value)
    torch.jit.save(torch.jit.script(module), path)
    return path


@pytest.mark.parametrize(("change", "owners"), [(str, 2), (safetensors, 2), (scripted, 2), (legacy, 1), (deflated, 1)])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_file_that_is_not_mapped_is_loaded_by_one_process(make, change, owners):
    path = change(make.save({"one": torch.ones(64), "two": torch.ones(64)}, device="cpu"))
    with open_checkpoint(path, Limits()) as checkpoint:
        shares = [share(checkpoint, [], index, 2) for index in range(2)]
    assert {name for one in shares for name in one.names} == {"one", "two"}
    assert sum(bool(one.names) for one in shares) == owners


def test_a_file_of_an_old_torch(make, same):
    assert not statuses(same(legacy(make(device="cpu"))))


@pytest.fixture
def two(monkeypatch):
    """Small checkpoints have two children, too."""
    monkeypatch.setattr(module, "_JOB_BYTES", 1)


def result_of(path, **options):
    found = verify(path, to="cpu", **options).to_dict()
    return json.loads(json.dumps(found))


def test_children_report_what_one_reports(two, make):
    tree = make.tree()
    tree["model"]["1.bias"][0] = math.nan
    for path in (make(device="cpu"), make.save(tree, "nan.pt", "cpu")):
        assert result_of(path, jobs=1) == result_of(path, jobs=2)


def test_a_small_checkpoint_has_one_child_and_a_large_one_as_many_as_cores(make, monkeypatch):
    request = VerifyRequest(path="c.pt")
    assert module._jobs(request, 2**20) == 1
    assert module._jobs(request, 2**40) == cores()
    assert module._jobs(request._replace(jobs=3), 2**40) == 3
    assert module._jobs(request._replace(jobs=3), 2 * module._JOB_BYTES) == 2
    assert module._jobs(request._replace(jobs=3, sample=9), 2**40) == 1
    assert module._jobs(request._replace(jobs=3, case="a.py:f"), 2**40) == 1
    with pytest.raises(UsageError):
        verify(make(), jobs=0)


@pytest.mark.parametrize("has_affinity", [True, False])
def test_the_cores_are_those_that_this_process_may_use(monkeypatch, has_affinity):
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    if has_affinity:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 7}, raising=False)
    else:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores() == (3 if has_affinity else 1)


@pytest.fixture
def verified(two, make, monkeypatch):
    """Verify with two processes, the first of which begins with some code."""

    def verified(code, path=None):
        command = worker_command()
        command[2] = f"{code}\n{command[2]}"
        monkeypatch.setattr(module, "worker_command", lambda: command)
        return result_of(path or make(device="cpu"), jobs=2)

    return verified


@pytest.mark.unmeasured
@pytest.mark.parametrize(("end", "code"), [("lambda: os._exit(0)", 1), ("os.abort", -signal.SIGABRT)])
def test_a_process_that_ends_without_results_fails_the_first_check(verified, end, code):
    found = verified(f"import os\nos.register_at_fork(after_in_child={end})")
    restore = next(check for check in found["results"][0]["checks"] if check["name"] == "restore")
    assert (restore["status"], restore["evidence"]) == ("failed", {"exit_code": code})


@pytest.mark.unmeasured
def test_a_process_that_is_killed_says_nothing_of_the_checkpoint(verified):
    with pytest.raises(ChildKilled) as caught:
        verified("import os\nos.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), 9))")
    assert failure_of(caught.value).exit_code == 70


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_process_that_cannot_fork_starts_another(verified, make):
    path = make(device="cpu")
    never = "from ckptmove.proof.processes import group\ngroup.can_fork = lambda: False"
    assert verified(never, path) == result_of(path, jobs=1)


@pytest.mark.parametrize(("mode", "is_shared"), [("real", False), ("simulated", True)])
def test_an_accelerator_is_used_by_one_process(make, monkeypatch, mode, is_shared):
    site = worker.find_site("cuda:0")._replace(mode=mode)
    begun = []
    monkeypatch.setattr(worker, "find_site", lambda _: site)
    monkeypatch.setattr(worker, "limit_memory", lambda _: False)
    monkeypatch.setattr(worker, "start_others", lambda request, _: (request, ["another"]))
    monkeypatch.setattr(worker, "_answer", lambda _request, _opened, others, **_: begun.append(others))
    worker.work(VerifyRequest(path=make(), to="cuda:0", jobs=2))
    assert begun == [["another"] if is_shared else []]


def test_tensors_without_bytes_are_added_by_kind():
    tally = RestoreTally(apart=Counter(meta=1))
    tally.join(RestoreTally(apart={"meta": 2, "text-encoded": 1}))
    assert tally.apart == {"meta": 3, "text-encoded": 1}


def test_casts_and_counts_of_processes_are_added():
    cast, other = ("exp_avg", "float32", "float64"), ("exp_avg_sq", "float32", "float64")
    tally = TrialTally(casts={cast: 2}, counts=(2.0, 3.0), counted=1)
    tally.join(TrialTally(casts={cast: 3, other: 1}, counts=(1.0, 2.0), counted=4))
    assert (tally.casts, tally.counts, tally.counted) == ({cast: 5, other: 1}, (1.0, 3.0), 5)

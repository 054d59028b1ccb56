"""Tensors with more values than bytes, and options with impossible requests: memory stays bounded."""

from __future__ import annotations

import resource
import zipfile
from pathlib import Path

import pytest
import torch
from answers import checks_of

import ckptmove
from ckptmove import limits
from ckptmove.errors import DamagedArchive, LimitExceeded
from ckptmove.proof.request import VerifyRequest
from ckptmove.training.worker import run

GROUP = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": None, "params": [0],
}  # fmt: skip
ONE = torch.ones(1)


def adam(parameter, moment):
    entry = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment}
    return {"model": {"w": parameter}, "optimizer": {"state": {0: entry}, "param_groups": [GROUP]}}


def lbfgs(**options):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state_dict()
    state["param_groups"][0].update(options)
    return {"model": model.state_dict(), "optimizer": state}


@pytest.fixture
def saved_to(tmp_path):
    def saved_to(tree):
        torch.save(tree, tmp_path / "hostile.pt")
        return str(tmp_path / "hostile.pt")

    return saved_to


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_byte_order_that_is_no_word_never_reaches_torch(tmp_path, method):
    # torch reads all of it, and repeats it in its error: a gibibyte for a file of a megabyte.
    torch.save({"w": ONE}, tmp_path / "sound.pt")
    with zipfile.ZipFile(tmp_path / "sound.pt") as sound, zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name in sound.namelist():
            is_order = name.endswith("/byteorder")
            archive.writestr(name, b"little".ljust(65) if is_order else sound.read(name), method if is_order else None)
    with pytest.raises(ValueError, match="endianness"):
        torch.load(tmp_path / "x.pt")
    for use in (ckptmove.inspect, ckptmove.verify):
        with pytest.raises(DamagedArchive, match="byte order '65 bytes'"):
            use(tmp_path / "x.pt")


@pytest.fixture
def little_memory():
    """The limit for this process: one gibibyte more than it has mapped, in bytes."""
    figures = Path("/proc/self/statm")
    if not figures.exists():
        pytest.skip("only Linux says what a process has mapped")
    pages = int(figures.read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def checks(path, to="cuda:0"):
    messages = []
    run(VerifyRequest(path=path, to=to), messages.append)
    return checks_of(messages)


LARGE = torch.ones(2**22)
EXCESS = {
    "an expanded parameter": adam(ONE.expand(10**13), ONE.expand(10**13)),
    "an expanded matrix": {"model": {"w": ONE.expand(10**6, 10**7)}},
    "windows over each other": {"model": {"w": torch.ones(4000).as_strided((1000,) * 4, (1, 1, 1, 1))}},
    "many windows": {"ema": [LARGE[index:] for index in range(150)]},
}


@pytest.mark.parametrize("name", EXCESS)
def test_more_values_than_bytes_are_refused_before_torch_is_started(name, saved_to, monkeypatch) -> None:
    path = saved_to(EXCESS[name])
    monkeypatch.setattr("ckptmove.training.run.worker_command", pytest.fail)
    with pytest.raises(LimitExceeded) as caught:
        ckptmove.verify(path, to="cuda:0")
    assert caught.value.path == path
    assert "memory" in caught.value.resource
    plain = saved_to({"w": ONE})
    with pytest.raises(LimitExceeded):
        ckptmove.verify(plain, against=saved_to(EXCESS[name]))


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_storage_that_would_be_inflated_to_much_more_is_refused(tmp_path, monkeypatch) -> None:
    torch.save({"w": torch.zeros(2**28, dtype=torch.uint8).expand(2**28)[:1], "v": ONE}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed:
        for record in plain.infolist():
            packed.writestr(record.filename, plain.read(record))
    (tmp_path / "plain.pt").unlink()
    monkeypatch.setattr("ckptmove.proof.step.tensor_sizes._IN_ANY_CASE", 2**20)
    with pytest.raises(LimitExceeded, match="take in memory"):
        ckptmove.verify(str(tmp_path / "packed.pt"), to="cpu")


@pytest.mark.unmeasured
def test_one_tensor_under_many_names_counts_once(saved_to) -> None:
    tensor = torch.ones(2**20)
    path = saved_to({"model": {f"w{index}": tensor for index in range(400)}})
    assert ckptmove.verify(path, to="cpu").passed


def test_state_counts_as_often_as_it_is_stepped(saved_to) -> None:
    moment = torch.ones(2**20)
    group = {**GROUP, "params": list(range(400))}
    state = {index: {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment} for index in range(400)}
    path = saved_to({"optimizer": {"state": state, "param_groups": [group]}})
    with pytest.raises(LimitExceeded):
        ckptmove.verify(path, to="cpu")


def test_what_is_expanded_within_the_limit_is_not_copied(saved_to, little_memory) -> None:
    path = saved_to({"model": {"mask": ONE.expand(2**27, 2), "w": torch.ones(8).as_strided((4, 4), (1, 1))}})
    found = checks(path)
    assert found["restore"]["status"] == "passed"
    assert found["numbers"]["status"] == "passed"
    assert found["numbers"]["detail"].startswith("268,435,472 values in 2 tensors ")


def test_what_is_not_a_number_is_found_where_values_lie_over_each_other(saved_to) -> None:
    windows = torch.tensor([0, 1, float("nan"), 3]).as_strided((3, 2), (1, 1))
    found = checks(saved_to({"model": {"b": windows}}))
    assert "model.b holds 1 NaN in 4 values" in found["numbers"]["detail"]


@pytest.mark.parametrize("to", ["cpu", "cuda:0"])
def test_no_step_is_made_of_what_lies_over_itself(saved_to, little_memory, to) -> None:
    many = ONE.expand(2**26)
    found = checks(saved_to(adam(many, many)), to)
    assert "model.w: 67,108,864 values overlap in 1 element of memory" in found["step"]["detail"]
    found = checks(saved_to(adam(torch.ones(2**11, 2**9), ONE.expand(2**11, 2**9))), to)
    assert "exp_avg: 1,048,576 values overlap in 1 element" in found["step"]["detail"]


def test_a_rate_that_lies_over_itself_is_not_copied(saved_to, little_memory) -> None:
    tree = adam(torch.ones(3), torch.ones(3))
    tree["optimizer"]["param_groups"] = [{**GROUP, "lr": ONE.expand(2**27)}]
    found = checks(saved_to(tree))
    assert "param_groups.0.lr: 134,217,728 values overlap" in found["step"]["detail"]


def test_a_small_one_that_lies_over_itself_is_stepped_as_torch_restores_it(saved_to) -> None:
    assert checks(saved_to(adam(torch.ones(3), ONE.expand(3))))["step"]["status"] == "passed"


@pytest.mark.parametrize(
    "options", [{"max_iter": 10**9, "max_eval": 10**9, "tolerance_grad": 0, "tolerance_change": 0}]
)
def test_lbfgs_does_not_iterate_for_ever(saved_to, options) -> None:
    found = checks(saved_to(lbfgs(**options)), "cpu")
    assert found["step"]["status"] == "passed"
    assert "max_iter of 1,000 instead of the larger stored value, max_eval of 1,000" in found["step"]["detail"]


def test_lbfgs_makes_no_list_of_any_length(saved_to, little_memory) -> None:
    found = checks(saved_to(lbfgs(history_size=10**12)), "cpu")
    assert found["step"]["status"] == "passed"
    assert "history_size of 1,0" in found["step"]["detail"]
    found = checks(saved_to(lbfgs(history_size=None)), "cpu")
    assert found["step"]["status"] == "failed"


@pytest.mark.parametrize(("count", "limit"), [(75_000, "pickle operations"), (190_000, "pickle bytes")])
def test_a_kilobyte_does_not_inflate_to_a_pickle_of_millions_of_operations(tmp_path, monkeypatch, count, limit):
    assert (limits._OPERATIONS, limits._PICKLE_BYTES) == (2**21, 2**22)
    monkeypatch.setattr(limits, "_OPERATIONS", 2**17)
    monkeypatch.setattr(limits, "_PICKLE_BYTES", 2**18)
    torch.save({"w": ONE}, tmp_path / "sound.pt")
    with zipfile.ZipFile(tmp_path / "sound.pt") as sound, zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name in sound.namelist():
            data = b"\x80\x02" + b"N0" * count + b"N." if name.endswith("/data.pkl") else sound.read(name)
            archive.writestr(name, data, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "x.pt").stat().st_size < 2000
    with pytest.raises(LimitExceeded) as caught:
        ckptmove.inspect(tmp_path / "x.pt")
    assert caught.value.resource == limit

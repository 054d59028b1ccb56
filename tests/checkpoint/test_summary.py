"""The summary of a checkpoint, compared with a script that uses ``torch.load``."""

from __future__ import annotations

import json
import zipfile

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove.checkpoint.pairing import parameter_names
from ckptmove.checkpoint.parts import FilePart
from ckptmove.errors import SourceChanged


class Tied(torch.nn.Module):
    """A model with tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def numel(model):
    return sum(parameter.numel() for parameter in model.parameters())


def trained(model, make, steps=3):
    optimizer = make(model.parameters())
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


@pytest.fixture
def summary(tmp_path):
    def of(saved, name="x.pt"):
        torch.save(saved, tmp_path / name)
        return ckptmove.inspect(tmp_path / name).summary

    return of


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m.state_dict(), lambda m: {"model": m.state_dict()}])
def test_parameters_are_those_of_the_model(summary, wrap) -> None:
    model = Tied()
    found = summary(wrap(model))
    assert found.parameters == numel(model)
    assert found.dtypes == (("float32", numel(model)),)


def test_dtypes_are_counted_by_elements(summary) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2).bfloat16())
    assert summary(model.state_dict()).dtypes == (("float32", 20), ("bfloat16", 12))


def test_networks_count_together_and_their_copies_not(summary) -> None:
    one, two = torch.nn.Linear(3, 5), torch.nn.Linear(3, 5)
    saved = {"netG": one.state_dict(), "netD": two.state_dict()}
    assert summary(saved).parameters == numel(one) + numel(two)
    saved["best_model"] = {key: value.clone() for key, value in one.state_dict().items()}
    assert summary(saved).parameters == numel(one) + numel(two)
    assert summary({"best_model": one.state_dict()}).parameters == numel(one)


def test_an_ema_copy_counts_only_without_a_model(summary) -> None:
    model = torch.nn.Linear(3, 5)
    copy = {key: value.clone() for key, value in model.state_dict().items()}
    assert summary({"model": model.state_dict(), "ema": copy}).parameters == numel(model)
    assert summary({"ema": copy}).parameters == numel(model)
    average = {"state_dict": model.state_dict(), "current_model_state": copy}
    assert summary(average).parameters == numel(model)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_weight_counts(summary) -> None:
    weight = torch.quantize_per_tensor(torch.ones(3, 5), 0.1, 0, torch.qint8)
    assert summary({"model": {"fc.weight": weight, "fc.bias": torch.ones(3)}}).parameters == 18


def test_a_model_in_two_formats_counts_once(tmp_path) -> None:
    model = torch.nn.Linear(3, 5)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert ckptmove.inspect(tmp_path).num_parameters == numel(model)
    torch.save(model.state_dict(), tmp_path / "other.bin")  # another network or a copy: unknown
    assert ckptmove.inspect(tmp_path).num_parameters > numel(model)


def test_equal_checkpoints_of_a_directory_count_once(tmp_path) -> None:
    model = torch.nn.Linear(3, 5)
    optimizer = trained(model, torch.optim.AdamW)
    for epoch in (1, 2):
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": 7}
        torch.save(saved, tmp_path / f"{epoch}.pt")
    found = ckptmove.inspect(tmp_path)
    assert len(found.inventory.checkpoints) == 2
    assert found.num_parameters == numel(model)
    assert (found.summary.epoch, found.summary.step) == (None, 7)  # what differs is unknown


def test_a_file_without_tensors_has_no_parameters(summary) -> None:
    assert summary({"epoch": 3}) == (0, (), 3, None, (), ())


# --- epoch and step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"epoch": 3, "global_step": 1200, "pytorch-lightning_version": "2.6"}, (3, 1200)),
        ({"epoch": 3, "iter": 5}, (3, 5)),
        ({"iter_num": 2000}, (None, 2000)),
        ({"iteration": 9, "model": {}, "scheduler": {}}, (None, 9)),
        ({"meta": {"epoch": 2, "iter": 40}, "state_dict": {}}, (2, 40)),
        ({"global_steps": 4, "ds_version": "0.1"}, (None, 4)),
        ({"extra_state": {"train_iterator": {"epoch": 6}}, "optimizer_history": [{"num_updates": 8}]}, (6, 8)),
        ({"optimizer_history": [{"num_updates": 1}, {"num_updates": 8}]}, (None, 8)),
        ({"epoch": 1.5, "step": 10.0}, (1.5, 10)),
        ({"epoch": torch.tensor(4), "step": torch.tensor([12])}, (4, 12)),
        ({"epoch": -1}, (None, None)),
        ({"epoch": True, "step": "12"}, (None, None)),
        ({"epoch": float("nan"), "step": 1 << 80}, (None, None)),
        ({"args": {"steps": 100, "epoch": 5}}, (None, None)),
        ({"step": torch.ones(2), "epoch": torch.ones((), dtype=torch.bfloat16)}, (None, None)),
        (5, (None, None)),
    ],
)  # fmt: skip
def test_the_trainer_counts(summary, saved, expected) -> None:
    found = summary(saved)
    assert (found.epoch, found.step) == expected


def test_a_numpy_counter_counts(summary) -> None:
    numpy = pytest.importorskip("numpy")
    assert summary({"epoch": numpy.int64(3), "step": numpy.float32(2)})[2:4] == (3, 2)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.Adagrad,
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.001), foreach=False),
    ],
)
def test_without_a_trainer_the_optimizer_counts(summary, make) -> None:
    model = torch.nn.Linear(3, 5)
    optimizer = trained(model, make)
    found = summary({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert found.step == 3
    assert found.learning_rates == (pytest.approx(optimizer.param_groups[0]["lr"].__float__()),)
    assert summary({"optimizer": optimizer.state_dict(), "step": 100}).step == 100


def test_the_first_and_the_last_parameter_are_read(summary) -> None:
    states = {key: {"step": torch.tensor(float(step))} for key, step in enumerate((1, 9, 5))}
    groups = [{"params": [0, 1, 2], "lr": 0.1}]
    assert summary({"state": states, "param_groups": groups}).step == 5
    assert summary({"state": {}, "param_groups": [{**groups[0], "step": 6}]}).step == 6
    assert summary({"state": {0: {"step": 4}}, "param_groups": groups}).step == 4


def test_optimizers_that_differ_count_nothing(summary) -> None:
    model = torch.nn.Linear(3, 5)
    found = {f"opt_{steps}": trained(model, torch.optim.Adam, steps).state_dict() for steps in (2, 3)}
    assert summary(found).step is None


def test_a_large_step_is_exact(summary) -> None:
    state = {0: {"step": torch.tensor(float(1 << 24))}}
    assert summary({"state": state, "param_groups": [{"params": [0], "lr": 1e-3}]}).step == 1 << 24


def test_a_step_whose_bytes_are_missing_is_unknown(tmp_path) -> None:
    saved = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0], "lr": 1e-3}]}
    torch.save(saved, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "cut.pt", "w") as new:
        for name in old.namelist():
            if not name.endswith("data/0"):
                new.writestr(name, old.read(name))
    assert ckptmove.inspect(tmp_path / "cut.pt").summary.step is None


def test_a_step_that_cannot_be_read_is_unknown(tmp_path, monkeypatch) -> None:
    def fail(_self, record):
        raise SourceChanged(record.name)

    saved = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0], "lr": 1e-3}]}
    torch.save(saved, tmp_path / "x.pt")
    monkeypatch.setattr(FilePart, "elements", fail)
    assert ckptmove.inspect(tmp_path / "x.pt").summary.step is None


def test_a_compressed_member_is_not_read_again(tmp_path) -> None:
    saved = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0], "lr": 1e-3}]}
    torch.save(saved, tmp_path / "x.pt")
    for method, step in ((zipfile.ZIP_STORED, 3), (zipfile.ZIP_DEFLATED, None)):
        with zipfile.ZipFile(tmp_path / "run.zip", "w", method) as archive:
            archive.write(tmp_path / "x.pt", "run/x.pt")
        assert ckptmove.inspect(tmp_path / "run.zip").summary.step == step


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps({"epoch": 2.5, "global_step": 50, "log_history": []}), (2.5, 50)),
        ("{", (None, None)),
        ("[1]", (None, None)),
        ("[" * 100_000, (None, None)),
    ],
)
def test_the_trainer_of_transformers_counts_in_json(tmp_path, text, expected) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text(text)
    found = ckptmove.inspect(tmp_path).summary
    assert (found.epoch, found.step) == expected


# --- learning rates and optimizers ------------------------------------------------------------------------------------


def test_rates_and_classes_are_listed_once(summary) -> None:
    model = torch.nn.Linear(3, 5)
    one = torch.optim.SGD([{"params": model.weight, "lr": 0.1}, {"params": model.bias, "lr": 0.01}])
    two = torch.optim.RMSprop(model.parameters(), lr=0.1)
    found = summary({"opt_a": one.state_dict(), "opt_b": two.state_dict(), "opt_c": two.state_dict()})
    assert found.learning_rates == (0.1, 0.01)
    assert found.optimizers == ("SGD", "RMSprop")


def test_a_rate_that_is_no_number_is_unknown(summary) -> None:
    for rate in (float("inf"), "fast", True, torch.ones(2), torch.nn.Linear(1, 1)):
        assert summary({"state": {}, "param_groups": [{"params": [0], "lr": rate}]}).learning_rates == ()


# --- names of parameters ----------------------------------------------------------------------------------------------


def named(path):
    found = ckptmove.inspect(path)
    return parameter_names(found.inventory.optimizers, found.pairings)


def test_optimizer_tensors_carry_the_name_of_their_parameter(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = trained(model, torch.optim.Adam)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    keys = ("step", "exp_avg", "exp_avg_sq")
    expected = {f"optimizer.state.{place}.{key}": name for place, name in enumerate(names) for key in keys}
    assert named(tmp_path / "x.pt") == expected


def test_an_ambiguous_match_names_nothing(tmp_path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    optimizer = trained(model[1], torch.optim.Adam)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    assert named(tmp_path / "x.pt") == {}


def test_the_state_of_all_parameters_belongs_to_none_of_them(tmp_path) -> None:
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: optimizer.zero_grad() or (loss := model(torch.ones(3)).sum()).backward() or loss)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    assert any(tensor.role == "optimizer" for tensor in ckptmove.inspect(tmp_path / "x.pt").inventory.tensors)
    assert named(tmp_path / "x.pt") == {}


def test_an_optimizer_alone_names_its_parameters_itself(tmp_path) -> None:
    model = torch.nn.Linear(3, 5)
    optimizer = trained(model, lambda _: torch.optim.SGD(model.named_parameters(), momentum=0.9))
    torch.save(optimizer.state_dict(), tmp_path / "x.pt")
    assert named(tmp_path / "x.pt") == {
        "state.0.momentum_buffer": "weight",
        "state.1.momentum_buffer": "bias",
    }

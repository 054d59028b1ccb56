from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

import ckptmove
from ckptmove.errors import CaseUnusable

HEAD = """
import functools
import torch
from torch import nn
import ckptmove

def net():
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))

def batch():
    return torch.randn(4, 6), torch.randn(4, 3)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A file of the user's, and how its function is typed."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def script(body, function="case", name="train.py"):
        (tmp_path / name).write_text(HEAD + textwrap.dedent(body))
        return f"{name}:{function}"

    return script


@pytest.fixture
def case_check(answers, make, script):
    """The case check of a function, given by its body, on a checkpoint of the plain model."""

    def case_check(body, to="cuda:0", path=None, **options):
        return answers(path or make(), to, case=script(body), **options)["case"]

    return case_check


def returning(**parts):
    """A case of the plain model, with some parts in place of the usual ones."""
    usual = {
        "model": "net().to(device)",
        "optimizer": "torch.optim.AdamW(model.parameters())",
        "criterion": "nn.MSELoss()",
        "batch": "batch()",
        "step": "None",
        **parts,
    }
    lines = [f"    {name} = {usual[name]}" for name in ("model", "optimizer", "criterion")]
    return "\n".join([
        "def case(device):",
        *lines,
        f"    return ckptmove.Case(model, optimizer, criterion, {usual['batch']}, {usual['step']})",
    ])  # fmt: skip


def test_a_case_is_a_value_that_needs_no_torch_of_ours():
    case = ckptmove.Case("model", "optimizer", None, ("batch",))
    assert case.step is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.model = None


def test_a_function_without_parameters_has_its_model_moved(case_check):
    body = """
    def case():
        model = net()
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), batch())
    """
    assert case_check(body)["status"] == "passed"
    assert case_check(body, to="cpu")["status"] == "passed"


def test_a_loss_that_nobody_moved_is_named_there_too(case_check):
    check = case_check("""
    def case():
        model = net()
        criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), criterion, batch())
    """)
    assert check["evidence"]["tensor"] == "criterion.weight"


def test_a_model_that_is_left_on_the_cpu_is_named(case_check):
    check = case_check(returning(model="net()"))
    assert check["evidence"]["tensors"] == ["model.0.bias", "model.0.weight"]
    assert check["evidence"]["on"] == "cpu"
    assert check["evidence"]["fix"].startswith("model = model.to(device)")


def test_a_step_that_never_goes_to_the_target_is_no_proof(case_check):
    check = case_check(returning(model="net()", step="lambda pair: criterion(model(pair[0]), pair[1])"))
    assert check["status"] == "failed"
    assert (check["evidence"]["tensor"], check["evidence"]["on"]) == ("model.0.weight", "cpu")
    assert "operation" not in check["evidence"]


@pytest.mark.parametrize("move", ["net().cuda()", "net().to('cuda')", "net().to(torch.device('cuda:0'))"])
def test_code_that_names_the_target_gets_the_device_that_stands_for_it(case_check, move):
    step = "lambda pair: criterion(model(pair[0].cuda()), pair[1].to('cuda'))"
    check = case_check(returning(model=move, step=step))
    assert check["status"] == "passed", check["detail"]


def test_code_that_names_a_device_that_is_not_the_target_is_told_what_to_take(case_check):
    check = case_check(returning(model="net().cuda()"), to="cpu")
    reason = "Found no NVIDIA driver" if torch.version.cuda else "Torch not compiled with CUDA enabled"
    assert reason in check["detail"]
    assert check["evidence"]["fix"] == "model = net().to(device)"


def test_a_device_that_is_named_by_other_means_is_mended_in_words(case_check):
    check = case_check(returning(model="getattr(net(), 'cu' + 'da')()"), to="cpu")
    assert (check["evidence"]["fix_at"], "device" in check["evidence"]["fix"]) == ("", True)


def test_a_dataset_that_is_moved_by_other_means_is_noted_in_words(case_check):
    check = case_check("""
    ROWS, move = torch.randn(64, 6), torch.Tensor.to

    def case(device):
        model = net().to(device)
        rows = move(ROWS, device)
        step = lambda some: model(rows[some]).sum()
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), None, torch.arange(4), step)
    """)
    assert check["status"] == "passed", check["detail"]
    assert check["evidence"]["fix"].endswith(": batch = batch.to(device)")
    assert check["evidence"]["fix_at"] == ""


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ({"batch": "{'input': torch.randn(4, 6), 'labels': torch.randn(4, 3)}", "model": "Named()"}, "passed"),
        ({"batch": "({'input': torch.randn(4, 6)}, torch.randn(4, 3))", "model": "Named()"}, "passed"),
        ({"batch": "([torch.randn(4, 6)], torch.randn(4, 3))"}, "passed"),
        ({"batch": "Pair(*batch())"}, "passed"),
        ({"batch": "iter([batch()])"}, "passed"),
        ({"batch": "(Encoding(torch.randn(4, 6)), torch.randn(4, 3))", "model": "Named()"}, "passed"),
        ({"batch": "batch()[0]", "criterion": "None", "model": "Losing()"}, "passed"),
        ({"batch": "(*batch(), 'ids')", "step": "lambda all: criterion(model(all[0].to(device)), all[1].to(device))"},
         "passed"),
        ({"batch": "(*batch(), 'ids')"}, "failed"),
    ],
)  # fmt: skip
def test_what_a_batch_may_be(case_check, parts, status):
    body = """
    from collections import namedtuple, UserDict
    Pair = namedtuple('Pair', 'inputs targets')

    class Encoding(UserDict):
        def __init__(self, ids): super().__init__(input=ids)
        def to(self, device): return {key: value.to(device) for key, value in self.items()}

    class Named(nn.Sequential):
        def __init__(self): super().__init__(nn.Linear(6, 5), nn.Linear(5, 3))
        def forward(self, input): return super().forward(input)

    class Output:
        def __init__(self, loss): self.loss = loss

    class Losing(Named):
        def forward(self, input): return Output(super().forward(input).square().mean())
    """
    parts = {key: f"{value}.to(device)" if key == "model" else value for key, value in parts.items()}
    check = case_check(textwrap.dedent(body) + returning(**parts))
    assert check["status"] == status, check["detail"]
    if status == "failed":
        assert "batch is not a pair of inputs and targets" in check["detail"]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("lambda pair: 3.0", "step returns no loss (a tensor with one value)"),
        ("lambda pair: model(pair[0].to(device))", "step returns no loss (a tensor with one value)"),
        ("lambda pair: model(pair[0].to(device)).sum().detach()", "step returns a loss without a gradient"),
        ("lambda pair: model(pair[0].to(device)).sum() * float('nan')", "the loss is nan on cuda:0 (simulated)"),
        ("lambda pair: model(pair[0].to(device)).sum() * 0", "no parameter of the model changed"),
    ],
)
def test_what_a_step_must_return(case_check, make, step, said):
    # SGD without momentum moves nothing without a gradient.
    parts = {"optimizer": "torch.optim.SGD(model.parameters(), lr=0.1)", "step": step}
    check = case_check(returning(**parts), path=make("SGD", lr=0.1))
    assert check["status"] == "failed"
    assert said in check["detail"]


def test_state_of_another_class_is_refused_that_load_state_dict_would_take(case_check):
    check = case_check(returning(optimizer="torch.optim.SGD(model.parameters(), lr=0.1)"))
    assert check["status"] == "failed"
    assert {"AdamW,", "SGD"} <= {*check["detail"].split()}


def test_weights_that_are_not_finite_after_the_step_are_named(case_check):
    step = "lambda pair: (model[0].weight.register_hook(lambda grad: grad / 0), model(pair[0].to(device)).sum())[1]"
    check = case_check(returning(step=step))
    assert check["evidence"]["tensor"] == "model.0.weight"
    assert "finite" in check["detail"]


def test_a_learning_rate_of_zero_moves_nothing_and_is_no_fault(case_check, make):
    check = case_check(returning(optimizer="torch.optim.SGD(model.parameters(), lr=0.0)"), path=make("SGD", lr=0.0))
    assert (check["status"], check["evidence"]["moved"], check["evidence"]["proven"]) == ("passed", 0, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LBFGS", "Adagrad", "Adafactor", "Adam"])
def test_other_optimizers_take_their_state(case_check, make, name):
    tree = make.tree("SGD")
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    model.load_state_dict(tree["model"])
    kind = getattr(torch.optim, name, None) or pytest.skip(f"this torch has no {name}")
    optimizer = kind(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    inputs, targets = torch.randn(4, 6), torch.randn(4, 3)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    path = make.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    built = "AdamW" if name == "Adam" else name  # each takes the other's
    check = case_check(returning(optimizer=f"torch.optim.{built}(model.parameters(), lr=0.01)"), path=path)
    assert check["status"] == "passed", check["detail"]
    assert check["evidence"]["entries"] == (1 if name == "LBFGS" else 4)


def test_an_option_that_is_a_tensor_goes_into_the_group(case_check, make):
    tree = make.tree("AdamW", lr=torch.tensor(0.25), foreach=False)
    tree["optimizer"]["param_groups"][0] |= {"where": torch.device("cpu"), "part": Fraction(1, 2)}
    body = returning(optimizer="Seen(model.parameters(), lr=0.1, foreach=False)")
    seen = """
class Seen(torch.optim.AdamW):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        group = self.param_groups[0]
        assert (float(group['lr']), group['where'], 'part' in group) == (0.25, torch.device("cpu"), False)

"""
    check = case_check(seen + body, path=make.save(tree))
    assert check["status"] == "passed", check["detail"]
    assert check["evidence"]["unproven"].startswith("part is in the file")


def test_weights_alone_are_stepped_and_prove_no_resume(case_check, make):
    path = make.save({"model": make.tree()["model"]})
    check = case_check(returning(), path=path)
    assert (check["status"], check["evidence"]["proven"]) == ("passed", False)
    assert "there is no optimizer state, so the optimizer starts fresh" in check["detail"]


def test_groups_of_other_sizes_are_named(case_check):
    check = case_check(returning(optimizer="torch.optim.AdamW(model[0].parameters())"))
    assert re.findall(r"(\d) groups? of (\d)", check["detail"]) == [("1", "4"), ("1", "2")]


def test_shapes_that_differ_are_named(case_check):
    check = case_check(returning(model="nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).to(device)"))
    assert "model.1.weight is 3x5, the model's 4x5" in check["detail"]


def keys_of(check):
    """The keys that a fault names, of the model and of the checkpoint."""
    assert check["status"] == "failed"
    return re.findall(r"\S+\.weight", check["detail"])


def test_a_model_of_another_name_is_not_there(case_check):
    check = case_check(returning(model="nn.ModuleDict({'x': net()}).to(device)"))
    assert keys_of(check) == ["x.0.weight", "model.0.weight"]
    check = case_check(returning(model="nn.ModuleDict({'x': nn.ModuleDict({'1': nn.Linear(6, 3)})}).to(device)"))
    assert keys_of(check) == ["x.1.weight", "model.1.weight"]
    check = case_check(returning(model="nn.ModuleDict({'x': nn.PReLU()}).to(device)"))
    assert keys_of(check) == ["x.weight", "model.0.weight"]


def test_keys_of_one_side_alone(case_check, make, tmp_path):
    tree = make.tree()
    torch.save({"optimizer": tree["optimizer"]}, tmp_path / "alone.pt")
    check = case_check(returning(), path=str(tmp_path / "alone.pt"))
    assert check["detail"].endswith("checkpoint has none")
    check = case_check(returning(model="nn.ReLU()", optimizer="torch.optim.SGD([torch.ones(1, device=device)])"))
    assert check["detail"].endswith("model has none")


def test_the_part_of_a_lightning_module_that_the_case_builds_is_found(case_check, make):
    tree = make.tree()
    tree["state_dict"] = {f"net.{key}": value for key, value in tree.pop("model").items()}
    assert case_check(returning(), path=make.save(tree))["status"] == "passed"


def test_of_two_models_the_one_that_is_trained_is_taken(case_check, make):
    tree = make.tree()
    tree["ema"] = {key: torch.zeros_like(value) for key, value in tree["model"].items()}
    check = case_check(returning(), path=make.save({"ema": tree.pop("ema"), **tree}))
    assert check["evidence"]["model"] == "model"


def test_a_copy_in_place_of_a_model_that_does_not_fit_proves_nothing(case_check, make):
    tree = make.tree()
    tree["ema"] = {key: value.clone() for key, value in tree["model"].items()}
    tree["model"]["other"] = tree["model"].pop(next(iter(tree["model"])))
    check = case_check(returning(), path=make.save(tree))
    assert (check["status"], check["evidence"]["model"], check["evidence"]["proven"]) == ("passed", "ema", False)
    assert "was restored from ema" in check["evidence"]["unproven"]
    del tree["model"]
    check = case_check(returning(), path=make.save(tree))
    assert "was restored from ema" not in str(check["evidence"])


def test_a_tied_weight_that_is_stored_once_is_enough(case_check, make):
    body = """
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.second.weight = self.first.weight
        def forward(self, x): return self.second(self.first(x))

    def case(device):
        model = Tied().to(device)
        pair = torch.randn(4, 6), torch.randn(4, 6)
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), pair)
    """
    weights = {"first.weight": torch.randn(6, 6)}
    check = case_check(body, path=make.save({"model": weights}))
    assert check["status"] == "passed", check["detail"]


def test_a_tensor_without_plain_values_is_named(case_check, make, tmp_path):
    tree = {"model": make.tree()["model"]}
    tree["model"]["0.weight"] = torch.zeros(5, 6).to_sparse()
    torch.save(tree, tmp_path / "c.pt")
    check = case_check(returning(), path=str(tmp_path / "c.pt"))
    assert "model.0.weight is a sparse_coo," in check["detail"]


def test_what_load_state_dict_refuses_is_said(case_check):
    body = """
    class Picky(nn.Sequential):
        def _load_from_state_dict(self, *_): raise ValueError('not today')

    class Stubborn(torch.optim.AdamW):
        def load_state_dict(self, state): raise RuntimeError('not me')

    def case(device):
        model = (Picky if PICKY else nn.Sequential)(nn.Linear(6, 5), nn.Linear(5, 3)).to(device)
        return ckptmove.Case(model, Stubborn(model.parameters()), nn.MSELoss(), batch())
    """
    assert "model.load_state_dict refuses: not today" in case_check("PICKY = True\n" + textwrap.dedent(body))["detail"]
    assert (
        "optimizer.load_state_dict refuses: not me" in case_check("PICKY = False\n" + textwrap.dedent(body))["detail"]
    )


@pytest.mark.parametrize(
    ("criterion", "name"),
    [
        ("functools.partial(nn.functional.cross_entropy, weight=torch.ones(3))", "criterion.keywords['weight']"),
        ("Weighted()", "criterion.weight"),
        ("Held()", "criterion.weight"),
    ],
)
def test_a_loss_of_any_kind_names_its_tensor(case_check, criterion, name):
    body = """
    class Weighted:
        def __init__(self): self.weight = torch.ones(3)
        def __call__(self, output, target): return (self.weight * output).mean()

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.ones(3)
        def forward(self, output, target): return (self.weight * output).mean()
    """
    check = case_check(textwrap.dedent(body) + returning(criterion=criterion))
    assert check["evidence"]["tensor"] == name


def test_an_optimizer_may_hold_more_than_the_model_has(case_check, make):
    optimizer = "torch.optim.AdamW([*model.parameters(), extra], lr=torch.tensor(0.1), foreach=False)"
    step = "lambda pair: model(pair[0]).sum() * extra"
    body = "extra = nn.Parameter(torch.ones(()))\n" + returning(optimizer=optimizer, step=step)
    check = case_check(body, path=make.save({"model": make.tree()["model"]}))
    assert check["evidence"]["tensor"] == "batch[0]"


def test_an_exception_in_the_step_is_told_with_its_line(case_check):
    check = case_check("""
    def case(device):
        model = net().to(device)
        def step(pair):
            raise KeyError('pixel_values')
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), None, batch(), step)
    """)
    assert check["status"] == "failed"
    assert "KeyError: 'pixel_values', at train.py:" in check["detail"]
    assert check["evidence"]["source"] == "raise KeyError('pixel_values')"


@pytest.mark.parametrize(
    "what",
    ["raise RuntimeError('no data here')", "raise SystemExit(3)", "raise KeyboardInterrupt", "torch.ones(2) @ 3"],
)
def test_an_exception_in_the_function_is_told_with_its_line(case_check, what):
    check = case_check(f"""
    def case(device):
        {what}
    """)
    assert check["status"] == "failed"
    assert check["evidence"]["source"] == what


def test_an_exception_at_import_is_told_with_its_line(case_check):
    check = case_check("import no_such_library\n" + returning())
    assert check["evidence"]["error"] == "ModuleNotFoundError: No module named 'no_such_library'"
    assert check["evidence"]["file"] == "train.py"


def test_a_mismatch_in_the_function_itself_is_named(case_check):
    check = case_check("""
    def case(device):
        mean = torch.zeros(6)
        inputs = torch.randn(4, 6).to(device) - mean
    """)
    assert check["evidence"]["tensor"] == "mean"
    assert check["evidence"]["fix"] == "mean = torch.zeros(6, device=device)"


def test_a_mismatch_that_the_user_wraps_is_still_named(case_check):
    check = case_check(
        returning(step="guarded(model)")
        + """
def guarded(model):
    def step(pair):
        try:
            return model(pair[0]).sum()
        except RuntimeError as error:
            raise ValueError('batch 0 failed') from error
    return step
"""
    )
    assert check["evidence"]["tensor"] == "batch[0]"


@pytest.mark.parametrize(
    ("preprocess", "tensor", "fix"),
    [
        ("return x - self.mean", "self.mean", "self.mean = self.mean.to(x.device)"),
        ("return (x -\n            self.mean)", "self.mean", "self.mean = self.mean.to(x.device)"),
        ("return x - torch.tensor([1.0] * 6)", "the tensor of torch.tensor",
         "return x - torch.tensor([1.0] * 6, device=x.device)"),
        ("return x - torch.from_numpy(numpy.ones(6, 'float32'))", "a tensor that your code made",
         "return x - torch.from_numpy(numpy.ones(6, 'float32')).to(x.device)"),
        ("return x - (\n            torch.ones(6) / 2)", "the tensor of torch.ones",
         "torch.ones(6, device=x.device) / 2)"),
        ("return x - halves(6)", "a tensor that div made", "return x - halves(6).to(x.device)"),
    ],
)  # fmt: skip
def test_preprocessing_on_the_cpu_is_named(case_check, preprocess, tensor, fix):
    body = f"""
import numpy

def halves(n):
    return torch.ones(n) / 2

class Normalize:
    def __init__(self): self.mean = torch.zeros(6)
    def __call__(self, x):
        {preprocess}

"""
    step = "lambda pair: criterion(model(normalize(pair[0].to(device))), pair[1].to(device))"
    check = case_check(body + "normalize = Normalize()\n" + returning(step=step))
    assert check["evidence"]["tensor"] == tensor, check["detail"]
    assert check["evidence"]["fix"] == fix


def test_a_device_without_a_simulation_skips_the_case(answers, make, script, monkeypatch):
    monkeypatch.setattr("ckptmove.proof.place.unavailable_reason", lambda: "torch 2.4 cannot")
    check = answers(make(), "cuda:0", case=script(returning()))["case"]
    assert check["status"] == "skipped"


def test_a_case_has_the_options_that_are_objects(case_check, make):
    tree = make.tree()
    tree["optimizer"]["param_groups"][0]["factors"] = {"loss": [2.0]}
    step = "lambda pair: model(pair[0].to(device)).sum() * optimizer.param_groups[0]['factors']['loss'][0]"
    check = case_check(returning(step=step), path=make.save(tree))
    assert (check["status"], check["evidence"]["proven"]) == ("passed", True)


def test_a_storage_that_is_gone_is_said(case_check, make, monkeypatch):
    from ckptmove.errors import DamagedArchive
    from ckptmove.training.case import check as room

    def restore(bench, case, place):
        raise DamagedArchive("c.pt", "'model.0.weight' is not stored plainly and whole")

    monkeypatch.setattr(room, "restore_case", restore)
    assert "is not stored plainly and whole" in case_check(returning())["detail"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def case(device):\n    return 3", "returns a int, not a ckptmove.Case"),
        ("def case(device, data):\n    return 3", "requires device, data,"),
        (returning(model="net", optimizer="3"), "checkpoint, not function and int"),
        ("case = 3", "has no function 'case'"),
    ],
)
def test_what_is_no_case_is_a_mistake_of_whoever_typed_it(answers, make, script, body, said):
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.training.worker import run

    messages = []
    run(VerifyRequest(path=make(), to="cpu", case=script(body)), messages.append)
    assert said in messages[-1].unusable


def test_a_module_is_imported_from_the_working_directory(answers, make, script, tmp_path):
    (tmp_path / "project").mkdir()
    script(returning(), name="project/jobs.py")
    check = answers(make(), "cpu", case="project.jobs:case")["case"]
    assert check["status"] == "passed", check["detail"]


def test_a_module_that_is_not_there_and_one_that_wants_what_is_not_there(answers, make, script):
    from ckptmove.training.case.name import parse_case
    from ckptmove.training.code.entrance import Entrance

    with pytest.raises(CaseUnusable, match=r"there is no module 'no_such_project.jobs' here"):
        Entrance(parse_case("no_such_project.jobs:case")).load()
    script("import no_such_library", name="wanting.py")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        Entrance(parse_case("wanting:case")).load()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("case", "FILE.py:FUNC or pkg.mod:FUNC"),
        ("train.py", "FILE.py:FUNC or pkg.mod:FUNC"),
        ("train.py:", "FILE.py:FUNC or pkg.mod:FUNC"),
        ("a-b:case", "FILE.py:FUNC or pkg.mod:FUNC"),
        ("nowhere.py:case", "its file cannot be read: No such file"),
        ("train.py:cases", "it has no function 'cases'"),
        ("broken.py:case", "not valid Python, line 1"),
        ("zeros.py:case", "not valid Python"),
        ("jobs/train:case", "its file cannot be read"),
    ],
)
def test_a_name_is_held_against_its_file_before_any_work(script, tmp_path, typed, said):
    from ckptmove.training.case.name import parse_case

    script(returning())
    (tmp_path / "broken.py").write_text("def case(:\n")
    (tmp_path / "zeros.py").write_bytes(b"\0\0")
    with pytest.raises(CaseUnusable) as raised:
        parse_case(typed)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "body", ["from x import case", "from x import *", "import case", "case = partial(3)", "if 1:\n    def case(): ..."]
)
def test_names_that_are_bound_otherwise_are_left_to_python(script, body):
    from ckptmove.training.case.name import parse_case

    assert parse_case(script(body)).function == "case"


def test_a_file_without_its_ending_is_no_python_file(script, tmp_path):
    from ckptmove.training.case.name import parse_case
    from ckptmove.training.code.entrance import Entrance

    (tmp_path / "train").write_text("def case(): ...")
    with pytest.raises(CaseUnusable, match=r"its name does not end in .py"):
        Entrance(parse_case("./train:case")).load()


def test_a_directory_has_its_model_in_one_file_and_its_optimizer_in_another(case_check, make, tmp_path):
    tree = make.tree()
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    half = {key: value for key, value in tree["model"].items() if key.startswith("0.")}
    rest = {key: value for key, value in tree["model"].items() if key.startswith("1.")}
    torch.save(half, folder / "pytorch_model-00001-of-00002.bin")
    torch.save(rest, folder / "pytorch_model-00002-of-00002.bin")
    torch.save(tree["optimizer"], folder / "optimizer.pt")
    check = case_check(returning(), path=str(folder))
    assert check["status"] == "passed", check["detail"]
    assert check["evidence"]["entries"] == 4


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
def test_on_a_real_device_the_operands_of_the_refused_call_are_named(case_check, make, monkeypatch):
    from ckptmove.proof.place import TorchDevice
    from ckptmove.training import worker

    # Every torch has a meta device, which refuses operands of the CPU as an accelerator does.
    class Meta(TorchDevice):
        def to_cpu(self, tensor):
            return torch.zeros(tensor.shape)

    site = SimpleNamespace(target="meta", mode="real", reason="", place=lambda: Meta("meta"))
    monkeypatch.setattr(worker, "find_site", lambda target: site)
    monkeypatch.setattr(worker, "resume", lambda *_: ())
    check = case_check(returning(model="net().to_empty(device=device)", step="lambda pair: model(pair[0]).sum()"))
    assert check["evidence"]["tensor"] == "batch[0]"
    assert check["evidence"]["operation"] == "torch.nn.functional.linear"
    assert check["evidence"]["fix"].endswith("lambda pair: model(pair[0].to(device)).sum())")


def test_a_tensor_that_no_line_of_the_user_asked_for_has_no_origin():
    from ckptmove.training.code.watch import Watch

    with Watch(torch.device("meta"), SimpleNamespace(caller=lambda frame: None)) as watch:
        made = torch.ones(2)
    assert watch.origin(made) is None
    assert list(watch.lineage(made)) == [made]


def test_an_operation_without_memory_is_not_kept_for_a_caller_that_tries_a_smaller_one():
    from ckptmove.training.code.watch import Watch

    def full(one):
        raise torch.OutOfMemoryError("CUDA out of memory")

    watch = Watch(torch.device("cpu"), SimpleNamespace(caller=lambda frame: None))
    with pytest.raises(torch.OutOfMemoryError):
        watch.__torch_function__(full, (), (torch.ones(2),))
    assert watch.refusals == []


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "function", ["functools.partial(build, lr=0.1)", "Builder()", "lambda device: build(device, 0.1)", "keyword_only"]
)
def test_whatever_can_be_called_with_a_device_or_nothing_is_a_function(case_check, function):
    check = case_check(f"""
    def build(device, lr):
        model = net().to(device)
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters(), lr=lr), nn.MSELoss(), batch())

    class Builder:
        def __call__(self, device): return build(device, 0.1)

    def keyword_only(*, lr=0.1): return build("cpu", lr)

    case = {function}
    """)
    assert check["status"] == "passed", check["detail"]


def test_half_precision_and_sparse_gradients_are_stepped_on_a_simulated_device(case_check, make):
    check = case_check(
        """
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True)
        def forward(self, words): return self.words(words).square().sum(-1)

    def case(device):
        model = Words().to(device)
        optimizer = torch.optim.SparseAdam(model.parameters())

        def step(words):
            with torch.autocast(device.type, torch.bfloat16):
                return model(words.to(device)).float().mean()

        return ckptmove.Case(model, optimizer, None, torch.tensor([1, 3, 3]), step)
    """,
        path=make.save({"model": {"words.weight": torch.ones(9, 4)}}),
    )
    assert check["status"] == "passed", check["detail"]


def test_a_hook_that_meets_two_devices_in_backward_is_named_as_any_line(case_check):
    check = case_check("""
    def case(device):
        model = net().to(device)
        mask = torch.ones(5)
        model[0].bias.register_hook(lambda grad: grad * mask)
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), batch())
    """)
    assert check["status"] == "failed"
    assert (check["evidence"]["tensor"], check["evidence"]["on"]) == ("mask", "cpu")
    assert check["evidence"]["source"] == "model[0].bias.register_hook(lambda grad: grad * mask)"
    assert check["evidence"]["operation"] == "aten::mul in torch.Tensor.backward"
    assert check["evidence"]["fix"] == "mask = torch.ones(5, device=device)"


def test_what_a_backward_of_torchs_refuses_is_told_by_the_line_of_its_forward(case_check):
    check = case_check("""
    def case(device):
        model = net().to(device)
        criterion = nn.MSELoss()

        def step(pair):
            inputs, targets = (one.to(device) for one in pair)
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.cpu(), lambda saved: saved):
                made = model(inputs).exp()
            return criterion(made, targets)

        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), criterion, batch(), step)
    """)
    assert check["status"] == "failed"
    assert check["evidence"]["operation"] == "aten::mul in torch.Tensor.backward (ExpBackward0)"
    assert check["evidence"]["source"] == "made = model(inputs).exp()"
    assert (check["evidence"]["on"], check["evidence"]["file"]) == ("cpu", "train.py")


def test_a_model_whose_state_dict_takes_no_arguments_is_restored(case_check):
    body = """
    class Own(nn.Sequential):
        def state_dict(self): return dict(super().state_dict())

    """
    check = case_check(textwrap.dedent(body) + returning(model="Own(*net()).to(device)"))
    assert (check["status"], check["evidence"]["proven"]) == ("passed", True), check["detail"]


def test_an_optimizer_with_a_rate_of_its_own_is_stepped(case_check):
    body = """
    class Rated(torch.optim.AdamW):
        def step(self, closure=None):
            self.param_groups[0]['lr'] = 0.1
            super().step()
            self.param_groups[0]['lr'] = None

    """
    check = case_check(textwrap.dedent(body) + returning(optimizer="Rated(model.parameters())"))
    assert (check["status"], check["evidence"]["proven"]) == ("passed", True), check["detail"]


RAISED = [
    "OSError('disk')",
    "SystemExit(2)",
    "KeyboardInterrupt",
    "GeneratorExit",
    "type('Own', (BaseException,), {})('x')",
]


@pytest.mark.unmeasured
@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("method", ["load_state_dict", "state_dict", "named_parameters", "forward"])
def test_an_exception_of_a_model_is_told_with_its_line(case_check, error, method):
    body = f"""
    class Faulty(nn.Sequential):
        def parameters(self, *args, **kwargs): return nn.Sequential(*self).parameters()
        def {method}(self, *args, **kwargs):
            raise {error}

    """
    check = case_check(textwrap.dedent(body) + returning(model="Faulty(*net()).to(device)"))
    assert check["status"] == "failed"
    assert check["evidence"]["source"] == f"raise {error}"
    assert check["evidence"]["proven"] is False


def test_an_exception_of_an_optimizer_in_the_resume_is_told_with_its_line(case_check):
    body = """
    class Faulty(torch.optim.AdamW):
        def load_state_dict(self, state):
            raise OSError('gone')

    """
    check = case_check(textwrap.dedent(body) + returning(optimizer="Faulty(model.parameters())"))
    assert (check["status"], check["evidence"]["source"]) == ("failed", "raise OSError('gone')")


@pytest.mark.unmeasured
def test_a_wrapper_that_is_an_optimizer_by_name_alone_is_stepped(case_check):
    body = """
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        def load_state_dict(self, state):
            self.inner.load_state_dict(state)
            self.param_groups, self.state = self.inner.param_groups, self.inner.state
        def zero_grad(self): self.inner.zero_grad()
        def step(self): self.inner.step()

    """
    check = case_check(textwrap.dedent(body) + returning(optimizer="Wrapper(torch.optim.AdamW(model.parameters()))"))
    assert (check["status"], check["evidence"]["proven"]) == ("passed", True), check["detail"]

from __future__ import annotations

import sys

import pytest
import torch
from trained import EXAMPLES, case_of, parts_of

from ckptmove.proof.request import VerifyRequest
from ckptmove.training.case.step import one_batch
from ckptmove.training.fixes.apply import find_fixes
from ckptmove.training.run import verify_checkpoint

HEALTHY = sorted(path.stem for path in EXAMPLES.glob("*.py"))

#: The line of the last one, with its batch on the device.
FED = (
    "return ckptmove.Case(module, optimizer, None, batch, "
    "lambda batch: module.training_step(tuple(one.to(device) for one in batch), 0))"
)
#: For each bug: the example, its function, the tensor, the operation, the source of the line, and the mending line.
NAMED = {
    "input": (
        "input_left_on_cpu", "broken", "batch[0]", "torch.nn.functional.linear",
        "return criterion(model(images), labels)", "images = images.to(device)",
    ),
    "labels": (
        "labels_left_on_cpu", "broken", "batch[1]", "torch.nn.functional.cross_entropy",
        "return criterion(logits, labels)", "labels = labels.to(device)",
    ),
    "pos_weight": (
        "loss_weight_left_on_cpu", "broken", "criterion.pos_weight",
        "torch.nn.functional.binary_cross_entropy_with_logits",
        "criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0, 1.0, 0.5]))",
        "criterion = criterion.to(device)",
    ),
    "optimizer of replaced parameters": (
        "optimizer_before_move", "broken", "model.0.weight", "torch.optim.Optimizer.step",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
    ),
    "model moved after the resume": (
        "optimizer_before_move", "broken_by_late_move", "optimizer.state['0.weight']['exp_avg']",
        "torch._foreach_lerp_", "model.to(device)",
        "model = model.to(device)",
    ),
    "made in forward": (
        "made_in_forward", "broken", "places", "torch.nn.functional.embedding",
        "return self.head(self.encoder(self.words(words) + self.places(places))).flatten(0, 1)",
        "places = torch.arange(words.shape[1], device=words.device)",
    ),
    "unregistered buffer": (
        "unregistered_buffer", "broken", "model.0.scale", "torch.Tensor.mul",
        "return self.linear(inputs) * self.scale",
        "self.register_buffer('scale', torch.linspace(0.5, 1.5, 6), persistent=False)",
    ),
    "tokenizer": (
        "tokenizer_dict", "broken", "batch['attention_mask']", "torch.nn.functional.multi_head_attention_forward",
        "mixed, _ = self.attention(words, words, words, key_padding_mask=attention_mask == 0)",
        "batch = {k: v.to(device) for k, v in batch.items()}",
    ),
    "preprocessing": (
        "preprocessing_on_cpu", "broken", "MEAN", "torch.Tensor.sub", "return (images - MEAN) / STD",
        "return (images - MEAN.to(images.device)) / STD",
    ),
    "a gradient returned elsewhere": (
        "gradient_left_on_cpu", "broken", "gradient 0 of RoundedOnCpu.backward",
        "torch.autograd.Function RoundedOnCpu", "return grad.cpu() * (values.cpu().abs() <= 1)",
        "return (grad.cpu() * (values.cpu().abs() <= 1)).to(grad.device)",
    ),
    "a dataset as the batch": (
        "dataset_moved_whole", "broken", "batch", "torch.Tensor.to", "def broken(device):",
        "dataset = next(iter(torch.utils.data.DataLoader(dataset, batch_size=8)))",
    ),
    "a module that a trainer would have fed": (
        "recurrent", "broken", "batch[0]", "torch.lstm", "states, _ = self.cells(series)",
        FED,
    ),
    "real images of a GAN": (
        "gan", "broken", "batch[0]", "torch.nn.functional.conv2d", "return self.main(images).view(-1)",
        "real = real.to(device)",
    ),
    "a module that owns its loss": (
        "lightning_module", "broken", "batch[0]", "torch.nn.functional.linear",
        "return self.loss_fn(self.net(inputs), labels)", "batch = tuple(one.to(device) for one in batch)",
    ),
}  # fmt: skip
#: A bug for each kind of a fix: those of the others are written by the same functions.
KINDS = [
    "input",
    "optimizer of replaced parameters",
    "tokenizer",
    "preprocessing",
    "a gradient returned elsewhere",
    "a dataset as the batch",
    "a module that a trainer would have fed",
]


def function_of(example):
    return "plain" if example == "data_parallel" else "case"


def trained(case, steps=3):
    """The example's own training on the CPU, and the loss of the last step, or its losses by name."""
    for _ in range(steps):
        batch = one_batch(case.batch)
        if isinstance(case.optimizer, dict):
            losses = case.step(batch)
            continue
        case.optimizer.zero_grad()
        result = case.step(batch) if case.step else called(case, batch)
        losses = result["loss"] if isinstance(result, dict) else result
        losses.backward()
        case.optimizer.step()
    if isinstance(losses, dict):
        return {f"[{name!r}]": loss for name, loss in losses.items()}
    return float(losses.detach())


def called(case, batch):
    if case.criterion is None:
        return case.model(**batch)
    return case.criterion(case.model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    """The checkpoint of an example, as if it had been saved on cuda:0."""
    made = {}

    def checkpoint_of(example):
        if example not in made:
            from ckptmove import convert

            torch.manual_seed(0)
            case = case_of(example, function_of(example))
            trained(case)
            folder = tmp_path_factory.mktemp(example)
            torch.save({key: part.state_dict() for key, part in parts_of(case).items()}, folder / "c.pth")
            convert(folder / "c.pth", to="cuda:0", output=folder / "cuda.pth")
            made[example] = folder / "cuda.pth"
        return str(made[example])

    return checkpoint_of


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(EXAMPLES.parent)


@pytest.mark.parametrize("example", HEALTHY)
def test_a_healthy_example_resumes_with_the_loss_of_a_plain_script(answers, checkpoint_of, example):
    function = function_of(example)
    path = checkpoint_of(example)
    check = answers(path, "cuda:0", case=f"examples/{example}.py:{function}")["case"]
    assert check["status"] == "passed", check["detail"]
    evidence = check["evidence"]
    assert (evidence["simulated"], evidence["proven"]) == (True, True)
    assert evidence["moved"] == evidence["parameters"] > 0
    torch.manual_seed(0)
    case = case_of(example, function)
    stored = torch.load(path, map_location="cpu", weights_only=True)
    for key, part in parts_of(case).items():
        part.load_state_dict(stored[key])
    assert evidence["loss"] == trained(case, steps=1), "the simulated device computes what the CPU does"


@pytest.mark.unmeasured
@pytest.mark.parametrize("bug", NAMED)
def test_a_broken_example_is_named(answers, checkpoint_of, bug):
    example, function, tensor, operation, source, fix = NAMED[bug]
    check = answers(checkpoint_of(example), "cuda:0", case=f"examples/{example}.py:{function}")["case"]
    assert check["status"] == "failed"
    evidence = check["evidence"]
    assert {key: evidence[key] for key in ("tensor", "operation", "source", "fix")} == {
        "tensor": tensor, "operation": operation, "source": source, "fix": fix
    }  # fmt: skip
    lines = (EXAMPLES / f"{example}.py").read_text().splitlines()
    assert evidence["file"] == f"examples/{example}.py"
    assert lines[evidence["line"] - 1].strip() == source
    for part in (f"examples/{example}.py:{evidence['line']}", tensor, f"; fix: {evidence['fix_at']}: {fix}"):
        assert part in check["detail"]
    assert evidence["proven"] is False


def test_a_dataset_that_is_moved_at_once_is_noted(answers, checkpoint_of):
    path = checkpoint_of("dataset_moved_whole")
    check = answers(path, "cuda:0", case="examples/dataset_moved_whole.py:moved_by_hand")["case"]
    assert check["status"] == "passed", "the target may have room for it"
    assert "512 rows are moved at once for a batch of 16" in check["detail"]
    assert check["evidence"]["source"] == "images = IMAGES.to(device)"


@pytest.mark.unmeasured
@pytest.mark.parametrize("function", ["plain", "wrapped"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_matched_either_way(answers, checkpoint_of, tmp_path, prefix, function):
    tree = torch.load(checkpoint_of("data_parallel"), map_location="cpu", weights_only=True)
    tree["model"] = {prefix + key: value for key, value in tree["model"].items()}
    torch.save(tree, tmp_path / "c.pth")
    check = answers(str(tmp_path / "c.pth"), "cuda:0", case=f"examples/data_parallel.py:{function}")["case"]
    assert check["status"] == "passed", check["detail"]


def test_another_model_under_the_same_prefix_is_named(answers, checkpoint_of):
    check = answers(checkpoint_of("data_parallel"), "cuda:0", case="examples/data_parallel.py:broken")["case"]
    assert check["status"] == "failed"
    assert "missing module.2.weight" in check["detail"]
    assert "unexpected model.3.weight" in check["detail"]


@pytest.mark.unmeasured
@pytest.mark.parametrize("bug", KINDS)
def test_the_fixes_of_a_broken_example_end_clean(checkpoint_of, tmp_path, monkeypatch, bug):
    example, function, *_ = NAMED[bug]
    script = tmp_path / f"{example}.py"
    script.write_bytes((EXAMPLES / script.name).read_bytes())
    monkeypatch.chdir(tmp_path)
    request = VerifyRequest(path=checkpoint_of(example), to="cuda:0", case=f"{script.name}:{function}")
    fixes = find_fixes(request, verify_checkpoint)
    assert (fixes.last.checks[-1].status, fixes.unfixed) == ("passed", "")
    assert 1 <= len(fixes.files[0].edits) <= 3

"""The fixes of a training script: where a tensor is made, whatever else reads it."""

from __future__ import annotations

import sys

import pytest
import torch

from ckptmove.proof.source_edits import Edit
from ckptmove.training.code.watch import Watch
from ckptmove.training.fixes.training import of_training

HEAD = """
import sys
import numpy
import numpy as np
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"

def labels():
    return torch.from_numpy(numpy.ones((4, 3), "f"))

def build():
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
"""
LOADED = """
model = build().to(device)
optimizer = torch.optim.AdamW(model.parameters())
stored = torch.load(sys.argv[1], map_location=device)
model.load_state_dict(stored["model"])
optimizer.load_state_dict(stored["optimizer"])
"""
STEP = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MANY = 8


@pytest.fixture
def run(answers, make, tmp_path, monkeypatch):
    """The check of a script, each time in a folder of its own: the source of a file is read once."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    runs = iter(range(100))

    def run(source, path=None, **options):
        folder = tmp_path / f"run{next(runs)}"
        folder.mkdir()
        (folder / "train.py").write_text(source)
        monkeypatch.chdir(folder)
        path = path or make()
        return answers(path, "cuda:0", script="train.py", script_args=(path,), **options)["script"]

    return run


@pytest.fixture
def mended(run):
    """The edits that make a script pass, as ``--fix`` finds them."""

    def mended(*parts, **options):
        source, fixes = "".join(parts), []
        for _ in range(MANY):
            check = run(source, **options)
            edit = check["evidence"].get("edit")
            if edit is None:
                assert check["status"] == "passed", (check["detail"], fixes)
                return fixes
            fixes.append(edit["text"])
            source = Edit(**edit).applied(source.encode()).decode()
        raise AssertionError(fixes)

    return mended


GET = """
class Data:
    def __init__(self, device):
        self.device = device

    def get(self):
        y = labels()
        return torch.randn(4, 6, device=self.device), y

data = Data(device)

def get():
    def unused():
        return 0
    x, y = torch.randn(4, 6), labels()
    x, y = x.to(device), y
    return x, y

def pair():
    x, y = get()
    return [x, y]

def given(device):
    return torch.randn(4, 6).to(device), labels()

def hidden(device=None):
    return torch.randn(4, 6).cuda(), labels()

def whole():
    both = torch.randn(4, 6, device=device), labels()
    return both

def parts():
    both = [torch.randn(4, 6, device=device), labels()]
    return [*both]

def either(first=True):
    if first:
        return torch.randn(4, 6, device=device), labels()
    return torch.randn(4, 6, device=device), labels()

several = [get]
"""
HERE = "y = y.to(device)"
#: The call that sets ``x, y``, and the line that the fix writes.
CALLED = {
    "a function": ("get()", "return x, y.to(device)"),
    "a method": ("data.get()", "return torch.randn(4, 6, device=self.device), y.to(self.device)"),
    "its own device": ("given(device)", "return torch.randn(4, 6).to(device), (labels()).to(device)"),
    "no device": ("hidden()", HERE),
    "several returns": ("either()", HERE),
    "a tuple of a variable": ("whole()", HERE),
    "the items of a list": ("parts()", HERE),
    "an item": ("several[0]()", HERE),
    "no call": ("(torch.randn(4, 6, device=device), labels())", HERE),
}  # fmt: skip


@pytest.mark.parametrize(("call", "text"), CALLED.values(), ids=CALLED)
def test_a_value_that_two_lines_use_is_mended_where_it_is_returned(mended, call, text):
    loop = f"""
for number in range(3):
    if number == 1:
        x, y = {call}
        print((model(x) - y.to(device)).sum().item())
    x, y = {call}
    loss = nn.functional.mse_loss(model(x), y)
"""
    assert mended(HEAD, GET, LOADED, loop, STEP) == [text.replace("(labels()).to", "labels().to")]


YIELDED = """
def stream():
    while True:
        yield {"x": torch.randn(4, 6, device=device), "y": labels()}

def batch():
    both = {"x": torch.from_numpy(numpy.ones((4, 6), "f")), "y": labels()}
    return both
"""
#: The loop, and the line that the fix writes.
CONTAINERS = {
    "a dict of a variable": (
        """
for _ in range(3):
    both = batch()
    both = batch()
    loss = nn.functional.mse_loss(model(both['x']), both['y'])
""",
        "return {k: v.to(device) for k, v in both.items()}",
    ),
    "a dict without a name": (
        """
for _ in stream(): break
for both in stream():
    loss = nn.functional.mse_loss(model(both['x']), both['y'])
""",
        "both = {k: v.to(device) for k, v in both.items()}",
    ),
    "one call": (
        """
both = batch()
for _ in range(3):
    loss = nn.functional.mse_loss(model(both['x']), both['y'])
""",
        "both = {k: v.to(device) for k, v in both.items()}",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("loop", "text"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_is_moved_where_it_has_a_name(mended, loop, text):
    assert mended(HEAD, YIELDED, LOADED, loop + "\n", STEP) == [text]


METER = """
class Meter:
    def __init__(self):
        self.values = []

    def add(self, value):
        self.values.append(value)

    def mean(self):
        return np.mean(self.values[-3:])

meter = Meter()
"""
#: Lines before the step, and what the fixes write.
TO_NUMPY = {
    "a list": ("np.mean([loss])", ["np.mean([loss.detach().cpu()])"]),
    "its numbers": ("losses.append(loss); np.mean(losses)", ["losses.append(loss.item()); np.mean(losses)"]),
    "an attribute": ("meter.add(loss)\n    meter.mean()", ["self.values.append(value.item())"]),
    "two appends": (
        "losses.append(loss.detach())\n    losses.append(loss)\n    np.mean(losses)",
        ["losses.append(loss.detach().item())", "losses.append(loss.item())"],
    ),
    "its tensors": ("outs.append(out)\n    np.concatenate(outs)", ["outs.append(out.detach().cpu())"]),
    "what torch reads": (
        "outs.append(out)\n    np.concatenate(outs)\n    torch.cat(outs)",
        ["np.concatenate([one.detach().cpu() for one in outs])"],
    ),
    "what is added": (
        "outs += [out]\n    np.concatenate(outs)", ["np.concatenate([one.detach().cpu() for one in outs])"],
    ),
    "items and computed values": (
        'logs = {"a": loss.detach(), 0: [loss.detach()]}\n    np.mean([logs["a"] * 2, logs["a"], *logs[0], 1.0])',
        ['np.mean([(logs["a"] * 2).cpu(), logs["a"].cpu(), *[one.cpu() for one in logs[0]], 1.0])'],
    ),
    "a comprehension": (
        "np.mean([one for one in [loss.detach()]])", ["np.mean([one.cpu() for one in [loss.detach()]])"],
    ),
    "what has no variable": (
        "pairs = [[loss.detach()]]\n    np.mean([pairs[-1][0], pairs[0][number], 1.0])",
        ["np.mean([pairs[-1][0].cpu(), pairs[0][number].cpu(), 1.0])"],
    ),
    "a call": ("np.mean([(lambda: loss.detach())()])", ["np.mean([(lambda: loss.detach())().detach().cpu()])"]),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "texts"), TO_NUMPY.values(), ids=TO_NUMPY)
def test_numpy_is_given_copies_of_tensors_and_not_of_their_list(mended, lines, texts):
    loop = f"""
losses, outs, number = [], [], 0
for _ in range(3):
    out = model(torch.randn(4, 6, device=device))
    loss = out.sum()
    {lines}
"""
    assert mended(HEAD, METER, LOADED, loop, STEP) == texts


NET = """
class Base(nn.Module):
    {kind}
    def __init__(self):
        {early}
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.prepare()
        {init}
    def prepare(self):
        {prepare}
    def forward(self, x):
        return self.second(self.first(x * self.scale))
    def predict(self, x):
        {predict}

def build():
    return Base()
"""
RESTORED = LOADED.replace('stored["model"]', '{k.replace("0.", "first.").replace("1.", "second."): v '
                          'for k, v in stored["model"].items()}')  # fmt: skip
BUFFER = "self.register_buffer('scale', None, persistent=False)"
USED = ["return self.second(self.first(x * self.scale.to(device)))", "return x / self.scale.to(device)"]
#: Parts of the class, and what the fixes write.
ATTRIBUTES = {
    "several at once": ({"prepare": "self.scale, self.other = torch.ones(6), 1"}, [BUFFER]),
    "two branches": (
        {"prepare": "if self.training: self.scale = torch.ones(6)\n        else: self.scale = torch.zeros(6)"},
        [BUFFER],
    ),
    "computed again": (
        {"init": "self.scale = self.scale * 2", "prepare": "self.scale = torch.ones(6)"},
        ["self.register_buffer('scale', torch.ones(6), persistent=False)"],
    ),
    "a number first": ({"prepare": "self.scale = 0\n        self.scale = torch.ones(6)"}, USED),
    "an attribute of the class": ({"kind": "scale = None", "prepare": "self.scale, _ = torch.ones(6), 1"}, USED),
    "too early": ({"early": "self.scale, _ = torch.ones(6), 1"}, USED),
    "updated": ({"prepare": "self.scale, _ = torch.ones(6), 1",
                 "predict": "self.scale, _ = self.scale * 0.9, 1\n        return x / self.scale"}, None),
    "one reader": ({"prepare": "self.scale, _ = torch.ones(6), 1", "predict": "return x"}, USED[:1]),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "texts"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_an_attribute_that_two_methods_read_is_mended_where_it_is_made(mended, parts, texts):
    named = {"kind": "", "early": "", "init": "", "prepare": "pass", "predict": "return x / self.scale", **parts}
    loop = """
for _ in range(3):
    x = torch.randn(4, 6, device=device)
    loss = model(x).sum()
    model.predict(x)
"""
    fixes = mended(HEAD, NET.format(**named), RESTORED, loop, STEP)
    assert fixes == (texts or fixes)
    assert (BUFFER in fixes) == (texts == [BUFFER])


def test_an_attribute_that_is_set_from_outside_is_made_on_the_device(mended):
    named = {"kind": "", "early": "", "init": "", "prepare": "pass", "predict": "return x"}
    setting = RESTORED.replace("optimizer =", "model.scale = torch.ones(6)\noptimizer =", 1)
    loop = "for _ in range(3):\n    loss = model(torch.randn(4, 6, device=device)).sum()\n"
    fixes = mended(HEAD, NET.format(**named), setting, loop, STEP)
    assert fixes == ["model.scale = torch.ones(6, device=device)"]


@pytest.mark.parametrize("variables", ["kind = 'cuda'\nplace = kind", "place = torch.device(device)\nkind = device"])
def test_the_model_is_moved_to_what_the_script_itself_moves_it_to(mended, variables):
    script = f"""
class Net(nn.Sequential):
    def optimizer(self, kind):
        return torch.optim.AdamW(self.parameters())

{variables}
model = Net(nn.Linear(6, 5), nn.Linear(5, 3))
optimizer = model.optimizer(kind)
stored = torch.load(sys.argv[1], map_location="cpu")
model.load_state_dict(stored["model"])
optimizer.load_state_dict(stored["optimizer"])
model.to(place)
for _ in range(3):
    loss = model(torch.randn(4, 6, device=place)).sum()
"""
    assert mended(HEAD, script, STEP) == ["model = model.to(place)"]


#: The call that loads, and what is in its place.
LOADS = {
    "nothing": ("torch.load(sys.argv[1])", "torch.load(sys.argv[1], map_location=device)"),
    "a device that is not there": (
        "torch.load(sys.argv[1], map_location='cuda:3')", "torch.load(sys.argv[1], map_location=device)",
    ),
    "by position": ("torch.load(sys.argv[1], None)", "torch.load(sys.argv[1], device)"),
    "options": ("torch.load(sys.argv[1], **{})", ""),
    "another name": ("(lambda file: torch.load)(0)(sys.argv[1])", ""),
}  # fmt: skip


@pytest.mark.parametrize(("call", "text"), LOADS.values(), ids=LOADS)
def test_a_load_of_a_device_that_is_not_there_gets_map_location(run, make, call, text):
    loaded = LOADED.replace("torch.load(sys.argv[1], map_location=device)", call)
    loop = "for _ in range(3):\n    loss = model(torch.randn(4, 6, device=device)).sum()\n"
    check = run(HEAD + loaded + loop + STEP, make(device="cuda:3"), devices=1)
    evidence = check["evidence"]
    assert check["status"] == "failed"
    assert evidence.get("edit", {}).get("text", "") == (f"stored = {text}" if text else "")
    assert ("map_location=device" in str(evidence.get("fix"))) == (
        call != LOADS["another name"][0] and call != LOADS["by position"][0]
    )


def test_a_load_without_a_known_device_goes_to_the_cpu(run, make):
    script = "def read(path):\n    import torch\n    return torch.load(path)\nimport sys\nread(sys.argv[1])\n"
    check = run(script, make(device="cuda:3"), devices=1)
    assert check["evidence"]["fix"] == 'return torch.load(path, map_location="cpu")'


def test_of_the_keys_that_do_not_fit_the_first_are_named(run, make):
    few = run(HEAD + "nn.Linear(6, 5).load_state_dict({})\n", make())["detail"]
    assert ('"weight", "bias"' in few, " more" in few) == (True, False)
    many = run(HEAD + "build().load_state_dict({})\n", make())["detail"]
    assert ('"0.weight", "0.bias", "1.weight" and 1 more' in many, '"1.bias"' in many) == (True, False)


# Optimizers, schedulers and gradient scalers


@pytest.mark.parametrize(
    ("stored", "built"), [("AdamW", "SGD(model.parameters(), momentum=0.9)"), ("SGD", "AdamW(model.parameters())")]
)
def test_an_optimizer_of_another_class_is_named_with_the_stored_one(run, make, stored, built):
    path = make(stored, **({"momentum": 0.9} if stored == "SGD" else {}))
    loaded = LOADED.replace("AdamW(model.parameters())", built)
    check = run(
        HEAD + loaded + "for _ in range(3):\n    loss = model(torch.randn(4, 6, device=device)).sum()" + STEP, path
    )
    evidence = check["evidence"]
    assert (check["status"], evidence["stored"], evidence["built"]) == ("failed", stored, built.partition("(")[0])
    assert f"build {stored}" in check["fix"]


def test_a_missing_key_of_the_same_class_or_of_no_optimizer_is_no_other_class(run, make):
    tree = make.tree()
    del tree["optimizer"]["state"][0]["exp_avg"]
    loop = "for _ in range(3):\n    loss = model(torch.randn(4, 6, device=device)).sum()" + STEP
    lacking = make.save(tree)
    assert "built" not in run(HEAD + LOADED + loop, lacking)["evidence"]
    assert "built" not in run(HEAD + LOADED + "stored['scheduler']\n", make())["evidence"]


INITIAL = {"initial_lr": 0.1}
#: What the file has beside the optimizer, its options, and a word of the remedy.
SCHEDULERS = {
    "a scheduler": ({"scheduler": {"last_epoch": 3, "_last_lr": [0.1], "base_lrs": [0.1], "_step_count": 4}}, INITIAL,
                    "scheduler.load_state_dict"),
    "the options": ({}, INITIAL, "before the scheduler is built"),
    "neither": ({}, {}, "no group in the file has initial_lr"),
}  # fmt: skip


@pytest.mark.parametrize(("more", "options", "words"), SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_without_initial_lr_has_a_remedy_that_the_file_allows(run, make, more, options, words):
    tree = make.tree() | more
    tree["optimizer"]["param_groups"][0] |= options
    built = "\ntorch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, last_epoch=3)\n"
    early = LOADED.replace("optimizer.load_state_dict", built + "optimizer.load_state_dict")
    check = run(HEAD + early, make.save(tree))
    assert (check["status"], words in check["fix"]) == ("failed", True), check["detail"]
    assert "\\n" not in check["detail"]


SCALED = """
scaler = torch.amp.GradScaler(device, init_scale=8.0)
for _ in range(3):
    with torch.autocast(device, dtype=torch.float16):
        loss = model(torch.randn(4, 6, device=device)).sum()
    {}
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_loss_that_was_not_scaled_is(mended):
    assert mended(HEAD, LOADED, SCALED.format("loss.backward()")) == ["scaler.scale(loss).backward()"]


def test_a_loss_that_something_else_differentiates_is_scaled_by_hand(run):
    check = run(HEAD + LOADED + SCALED.format("torch.autograd.backward(loss)"))
    assert (check["status"], "edit" in check["evidence"]) == ("failed", False)
    assert "scaler.scale(loss).backward()" in check["evidence"]["fix"]


def test_parameters_in_half_precision_are_kept_in_float32(run, make):
    check = run(HEAD + LOADED.replace(".to(device)", ".to(device, torch.float16)")
                + SCALED.format("scaler.scale(loss).backward()"), make(dtype=torch.float16))  # fmt: skip
    assert check["status"] == "failed"
    assert "model = build().to(device, torch.float16)" in check["evidence"]["fix"]


def _misused(*calls):
    """The message of torch for calls of a gradient scaler in this order."""
    model = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    steps = {
        "scale": lambda: scaler.scale(model(torch.ones(1, 2)).sum()).backward(),
        "scale alone": lambda: scaler.scale(torch.ones(())),
        "unscale": lambda: scaler.unscale_(optimizer),
        "step": lambda: scaler.step(optimizer),
        "update": scaler.update,
    }
    for call in calls[:-1]:
        steps[call]()
    with pytest.raises((RuntimeError, AssertionError)) as raised:
        steps[calls[-1]]()
    return str(raised.value)


#: Calls of a gradient scaler that torch refuses at the last, and a word of the remedy.
MISUSES = {
    ("unscale",): "scaler.scale(loss).backward()",
    ("update",): "scaler.scale(loss).backward()",
    ("scale", "unscale", "unscale"): "once for each scaler.update()",
    ("scale", "step", "unscale"): "before scaler.step(optimizer)",
    ("scale", "step", "step"): "scaler.update() after scaler.step(optimizer)",
    ("scale alone", "step"): "no parameter of this optimizer has a gradient",
    ("scale alone", "update"): "scaler.step(optimizer) before scaler.update()",
}


@pytest.mark.parametrize("calls", MISUSES, ids=" ".join)
def test_each_refusal_of_a_gradient_scaler_has_a_remedy(calls, cuda):
    watch = Watch(torch.device("cpu"), None)
    assert MISUSES[calls] in str(of_training(_misused(*calls), None, watch))
    assert "float32" in str(of_training("Attempting to unscale FP16 gradients.", None, watch))


CONSTANT = """
import sys
import torch
from torch import nn

WEIGHT = torch.tensor([1.0, 2.0, 0.5])

def loss_of(prediction, y):
    return (WEIGHT * (prediction - y) ** 2).mean()

def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    stored = torch.load(sys.argv[1], map_location=device)
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    loss = loss_of(model(torch.randn(4, 6).to(device)), torch.randn(4, 3).to(device))
    loss.backward()
    optimizer.step()

main()
"""


def test_a_constant_of_the_script_is_moved_where_it_is_used(mended):
    """With the name of the target where it is made, the script would run on no other one."""
    assert mended(CONSTANT) == ["return (WEIGHT.to(prediction.device) * (prediction - y) ** 2).mean()"]

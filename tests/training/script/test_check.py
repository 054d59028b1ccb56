"""`verify --script`: an unchanged training script, up to its first step after the load."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from distributed_checkpoints import Distributed

import ckptmove
from ckptmove.errors import UnreadableInput
from ckptmove.proof.checks import failed
from ckptmove.proof.processes.uncompiled import uncompiled_calls
from ckptmove.simulation.targets import is_any_active
from ckptmove.training.script import check as room
from ckptmove.training.script import protection
from ckptmove.training.script import session as recorded
from ckptmove.training.script import step as compared

HEAD = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

def batches():
    for _ in range(100):
        yield torch.randn(4, 6), torch.randn(4, 3)

def build():
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
"""
BUILT = """
model = build().to(device)
optimizer = torch.optim.AdamW(model.parameters())
"""
LOADED = """
stored = torch.load(args.resume, map_location=device)
model.load_state_dict(stored["model"])
optimizer.load_state_dict(stored["optimizer"])
"""
LOOP = """
for x, y in batches():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def ran(answers, make, tmp_path, monkeypatch):
    """The check of a script."""
    monkeypatch.chdir(tmp_path)
    before = sys.argv, sys.path[:], sys.modules["__main__"], torch.load, torch.nn.Module.load_state_dict

    def ran(*parts, path=None, to="cuda:0", arguments=None, **options):
        file = tmp_path / "train.py"
        file.write_text("".join(textwrap.dedent(part) for part in parts))
        path = path or make()
        given = ("--resume", path) if arguments is None else arguments
        check = answers(path, to, script="train.py", script_args=given, **options)["script"]
        assert before == (sys.argv, sys.path, sys.modules["__main__"], torch.load, torch.nn.Module.load_state_dict)
        assert not is_any_active()
        assert check["evidence"].get("arguments", list(given)) == list(given)
        return check

    return ran


def outcome(check):
    return check["status"], check["evidence"].get("proven")


@pytest.mark.unmeasured
@pytest.mark.parametrize(("to", "simulated"), [("cuda:0", True), ("mps", True), ("cpu", False)])
def test_a_script_that_resumes_passes(ran, to, simulated):
    head = HEAD.replace("cuda", to.partition(":")[0]).replace("torch.mps", "torch.backends.mps")
    check = ran(head, BUILT, LOADED, LOOP, to=to)
    assert outcome(check) == ("passed", True), check["detail"]
    evidence = check["evidence"]
    assert evidence["simulated"] is simulated
    assert (evidence["tensors"], evidence["of_tensors"], evidence["entries"], evidence["of_entries"]) == (4, 4, 4, 4)
    assert (evidence["optimizer"], evidence["parameters"], evidence["moved"]) == (["AdamW"], 4, 4)
    assert evidence["loaded_at"].startswith("train.py:")


def test_a_script_runs_as_main_in_its_own_folder(ran):
    check = ran(
        """
        import os, sys
        assert __name__ == "__main__" and sys.modules["__main__"].__file__ == __file__
        assert sys.argv == ["train.py", "--epochs", "3"]
        assert sys.path[0] == os.path.dirname(__file__) == os.getcwd()
        sys.exit("as it should be")
        """,
        arguments=("--epochs", "3"),
    )
    assert "as it should be" in check["detail"]


def test_a_mapping_of_the_users_is_not_read(ran):
    """Its values may be computed, and may raise, as those of a configuration of OmegaConf do."""
    lazy = """
    from collections.abc import Mapping

    class Settings(Mapping):
        def __getitem__(self, key):
            raise RuntimeError("not set")
        def __iter__(self):
            raise RuntimeError("not set")
        def __len__(self):
            raise RuntimeError("not set")

    settings = Settings()
    """
    check = ran(HEAD, lazy, BUILT, LOADED, LOOP)
    assert outcome(check) == ("passed", True), check["detail"]


def test_settings_whose_missing_attribute_is_a_key_error_hide_no_fault(ran):
    settings = """
    class Settings(dict):
        __getattr__ = dict.__getitem__

    settings = Settings(vars(args), nested=Settings(rate=0.1))
    """
    check = ran(HEAD, settings, BUILT, LOADED, LOOP.replace("x.to(device)", "x"))
    assert (check["evidence"]["tensor"], bool(check["evidence"]["fix"])) == ("x", True), check["detail"]


@pytest.mark.unmeasured
def test_a_forgotten_move_is_named_with_its_line(ran):
    check = ran(HEAD, BUILT, LOADED, LOOP.replace("x.to(device)", "x"))
    assert outcome(check) == ("failed", False)
    assert (check["evidence"]["tensor"], check["evidence"]["operation"]) == ("x", "torch.nn.functional.linear")
    assert "model(x)" in check["evidence"]["source"]
    assert check["evidence"]["fix"]


PLAIN, WHOLE, PART = "0.weight", "_orig_mod.0.weight", "0._orig_mod.weight"
#: The keys of the file, the line that compiles, and the outcome.
COMPILED = {
    "then plain keys are loaded": (PLAIN, "model = torch.compile(model)\n", ("failed", False)),
    "then its own keys": (WHOLE, "model = torch.compile(model, mode='reduce-overhead')\n", ("passed", True)),
    "a part": (PART, "model[0] = torch.compile(model[0])\n", ("passed", True)),
    "a part, then plain keys": (PLAIN, "model[0] = torch.compile(model[0])\n", ("failed", False)),
    "in place": (PLAIN, "model.compile()\n", ("passed", True)),
    "in place, then keys of a wrapper": (WHOLE, "model.compile()\n", ("failed", False)),
    "disabled": (PLAIN, "model = torch.compile(model, disable=True)\n", ("passed", True)),
    "disabled by the environment": (
        PLAIN,
        "import os\nos.environ['TORCHDYNAMO_DISABLE'] = '1'\nmodel = torch.compile(model)\n",
        ("passed", True),
    ),
    "the forward": (PLAIN, "model.forward = torch.compile(model.forward)\n", ("passed", True)),
    "in a DataParallel": (f"module.{WHOLE}", "model = nn.DataParallel(torch.compile(model))\n", ("passed", True)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by the compiler
@pytest.mark.unmeasured
@pytest.mark.parametrize(("key", "line", "expected"), COMPILED.values(), ids=COMPILED)
def test_a_compiled_model_has_the_keys_that_torch_gives_it(ran, make, key, line, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", {key: one for key, one in os.environ.items() if key != "TORCHDYNAMO_DISABLE"})
    tree = make.tree()
    inner = "_orig_mod." if key == PART else ""
    before = key.removesuffix("0.weight").removesuffix("0._orig_mod.weight")
    tree["model"] = {
        f"{before}0.{inner}{name[2:]}" if name[0] == "0" else before + name: one for name, one in tree["model"].items()
    }
    with uncompiled_calls():
        check = ran(HEAD, BUILT, line, LOADED, LOOP, path=make.save(tree))
    assert outcome(check) == expected, check["detail"]
    assert expected[0] == "failed" or (check["evidence"]["tensors"], check["evidence"]["of_tensors"]) == (4, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by the compiler
@pytest.mark.unmeasured
def test_a_compiled_model_that_takes_no_key_of_the_file_fails(ran, monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    line = "model = torch.compile(model)\n"
    with uncompiled_calls():
        check = ran(HEAD, BUILT, line, LOADED.replace('"model"])', '"model"], strict=False)'), LOOP)
        healthy = ran(HEAD, BUILT, LOADED, line, LOOP)
    assert outcome(check) == ("failed", False)
    assert check["evidence"]["tensors"] == 0
    assert outcome(healthy) == ("passed", True)


#: Two networks of one shape: the second one has a file of its own, and is stepped first.
PAIR = """
other = build().to(device)
other_optimizer = torch.optim.AdamW(other.parameters())
elsewhere = torch.load("other.pt", map_location=device)
other.load_state_dict(elsewhere["model"])
other_optimizer.load_state_dict(elsewhere["optimizer"])
"""
ROUND = """
for x, y in batches():
    for one, stepped in ((other, other_optimizer), (model, optimizer)):
        stepped.zero_grad()
        nn.functional.mse_loss(one(x.to(device)), y.to(device)).backward()
        stepped.step()
"""
#: The parts of a script with a file for each network, and the evidence of the check.
NETWORKS = {
    "each has its optimizer": ((BUILT, LOADED, PAIR, ROUND), {"optimizer": ["AdamW"], "of_tensors": 4, "proven": True}),
    "the file of the other comes first": ((BUILT, PAIR, LOADED, ROUND), {"of_tensors": 4, "proven": True}),
    "the weights alone": (
        (BUILT, PAIR, LOADED.replace("optimizer.load", "# "), ROUND),
        {"tensors": 4, "of_tensors": 4, "entries": 0, "proven": False},
    ),
    "one optimizer steps both": (
        (
            BUILT,
            LOADED.replace("optimizer.load", "# "),
            PAIR,
            "optimizer = torch.optim.AdamW([*other.parameters(), *model.parameters()])\n",
            LOOP.replace("model(", "(lambda x: model(x) + other(x))("),
        ),
        {"tensors": 4, "of_tensors": 4, "proven": False},
    ),
    "the network of the file is never stepped": (
        (BUILT, PAIR, LOADED, LOOP.replace("model(", "other(").replace("optimizer", "other_optimizer")),
        {"tensors": 0, "proven": False},
    ),
}


@pytest.mark.parametrize(("parts", "expected"), NETWORKS.values(), ids=NETWORKS)
def test_a_network_with_a_file_of_its_own_is_not_compared_with_the_checkpoint(ran, make, parts, expected):
    path = make()
    torch.manual_seed(7)
    make("AdamW", "other.pt", steps=5, model=torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)))
    check = ran(HEAD, *parts, path=path)
    assert {key: check["evidence"].get(key) for key in expected} == expected, check["detail"]
    assert check["status"] == ("passed" if check["evidence"]["tensors"] else "failed")


def test_every_network_that_the_checkpoint_was_loaded_into_is_compared(ran, make):
    tree = make.tree()
    second = {f"1.{key}": one + 1 for key, one in tree["model"].items()}
    path = make.save({"model": tree["model"], "second": second})
    check = ran(
        HEAD,
        BUILT,
        "other = build().to(device)\nother_optimizer = torch.optim.AdamW(other.parameters())\n",
        LOADED.replace("optimizer.load", "# ") + "other.load_state_dict(stored['second'], strict=False)\n",
        ROUND.replace("(other, other_optimizer), (model, optimizer)", "(model, optimizer), (other, other_optimizer)"),
        path=path,
    )
    assert outcome(check) == ("failed", False)
    assert check["evidence"]["optimizer"] == ["AdamW", "AdamW"]


AFTER = {
    "an average of the weights": (
        "    average[0].lerp_(model[0].weight, 0.1)\n",
        ("failed", "average[0]"),
    ),
    "a metric": ("    loss.detach().numpy()\n", ("failed", None)),
    "a fault that names no device": ("    raise RuntimeError('the log is full')\n", ("passed", None)),
    "a missing package": ("    import no_such_package\n", ("passed", None)),
    "the end": ("    raise SystemExit(3)\n", ("passed", None)),
    "a save": ("    torch.save({}, 'last.pth')\n    torch.ones(1).cuda(7)\n", ("passed", None)),
    "a save over the checkpoint": ("    torch.save({}, args.resume)\n", ("passed", None)),
    "the next step": ("    pass\n", ("passed", None)),
}


@pytest.mark.unmeasured
@pytest.mark.parametrize(("line", "expected"), AFTER.values(), ids=AFTER)
def test_the_rest_of_the_iteration_runs_after_a_step_that_passed(ran, line, expected):
    average = "average = [build()[0].weight.detach()]\n"
    check = ran(HEAD, BUILT, LOADED, average, LOOP + line + "    calls = globals().get('calls', 0) + 1\n")
    assert (check["status"], check["evidence"].get("tensor")) == expected, check["detail"]
    assert check["evidence"]["proven"] is (expected[0] == "passed")
    assert not Path("last.pth").exists()


@pytest.mark.unmeasured
def test_a_script_that_goes_on_too_long_after_its_step_has_passed(ran, exits, monkeypatch):
    monkeypatch.setattr(recorded, "GRACE", 0.1)
    check = ran(HEAD, BUILT, LOADED, LOOP + "    import time\n    time.sleep(1)\n")
    assert outcome(check) == ("passed", True)
    assert exits == ["exit functions", 0]


@pytest.mark.unmeasured
def test_a_buffer_that_a_running_module_computes_with_is_named_by_its_module(ran):
    criterion = """
        class Pinball(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("quantiles", torch.tensor([0.1, 0.5, 0.9]))

            def forward(self, made, wanted):
                errors = wanted - made
                return torch.maximum((self.quantiles - 1) * errors, self.quantiles * errors).mean()

        criterion = Pinball()
        """
    loop = LOOP.replace("nn.functional.mse_loss(", "criterion(")
    check = ran(HEAD, criterion, BUILT, LOADED, loop)
    assert (check["status"], check["evidence"]["tensor"]) == ("failed", "criterion.quantiles")
    assert check["evidence"]["fix"].endswith("criterion.to(device)")


@pytest.mark.unmeasured
def test_state_that_stayed_on_the_cpu_is_named_with_a_line_to_paste(ran):
    moved = BUILT.replace(".to(device)", "")
    loaded = LOADED.replace("map_location=device", "map_location='cpu'") + "model.to(device)\n"
    loop = LOOP + "    break\n"
    check = ran(HEAD, moved, loaded, loop)
    assert check["evidence"]["tensor"].startswith("optimizer.state['0.weight']")
    assert check["evidence"]["fix"].startswith("model = model.to(")
    assert check["evidence"]["fix_at"].startswith("before train.py:")


UNMOVED = """
device = ""
dev, best = "cuda:0", 1e9
noise = torch.zeros(1).to(dev)
best = noise
second = nn.Linear(3, 3)
"""
REBOUND = "another = torch.optim.SGD(second.parameters())\nif args.resume:\n    second = second.train()\n"


@pytest.mark.parametrize(
    ("made", "passed", "fix"),
    [
        (UNMOVED, "dev", "second = second.to(dev)"),
        (UNMOVED + REBOUND, "dev", "second = second.to(dev)"),
        (
            UNMOVED.replace(".to(dev)", ".to('cuda:0')").replace('dev, best = "cuda:0"', "_, best = 0"),
            "noise.device",
            None,
        ),
    ],
)
def test_a_module_of_the_script_is_moved_where_it_is_made(ran, made, passed, fix):
    loop = f"for y in [torch.ones(3, 3).to({passed})]:\n    second(y)\n"
    evidence = ran(HEAD, made, loop)["evidence"]
    assert evidence["tensor"] == "second.weight"
    assert evidence["fix"] == (fix or "second = second.to(noise.device)")
    number = Path("train.py").read_text().splitlines().index("second = nn.Linear(3, 3)") + 1
    assert evidence["fix_at"] == f"after train.py:{number}"


def test_a_device_that_the_target_lacks_has_the_option_for_it(ran):
    fix = ran(HEAD, "device = torch.device('cuda:1')\nmodel = build().to(device)\n")["evidence"]["fix"]
    assert "--devices" in fix
    assert "'cuda:0'" in fix


def test_without_a_variable_for_the_model_the_fix_is_a_sentence(ran):
    hidden = "models = [build()]\noptimizer = torch.optim.AdamW(models[0].parameters())\n"
    loaded = LOADED.replace("map_location=device", "map_location='cpu'").replace("model.load", "models[0].load")
    loop = LOOP.replace("model(", "models[0](")
    check = ran(HEAD, hidden, loaded, "models[0].to(device)\n", loop)
    assert (check["evidence"]["fix_at"], check["evidence"]["fix"]) == (
        "", "model = model.to(device), before the optimizer is built",
    )  # fmt: skip


@pytest.mark.unmeasured
def test_a_tensor_in_an_attribute_of_a_module_is_named(ran):
    head = HEAD + textwrap.dedent(
        """
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = build()
                self.scale = torch.ones(3)

            def forward(self, x):
                return self.body(x) * self.scale
        """
    )
    loaded = LOADED.replace("model.load", "model.body.load")
    built = BUILT.replace("build()", "Scaled()")
    assert ran(head, built, loaded, LOOP)["evidence"]["tensor"] == "model.scale"


@pytest.mark.unmeasured
def test_a_tensor_of_the_criterion_is_named_before_there_is_an_optimizer(ran):
    check = ran(HEAD, "weight = nn.Linear(3, 3)\nweight(torch.ones(3, 3, device=device))\n")
    assert check["evidence"]["tensor"] == "weight.weight"


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("", []),
        ("torch.save({}, 'other.pt'); torch.load('other.pt')", ["other.pt"]),
        ("raise SystemExit", []),
    ],
)
def test_a_script_that_never_loads_the_checkpoint(ran, code, loaded):
    check = ran("import torch\n", code, arguments=())
    assert outcome(check) == ("failed", False)
    assert check["evidence"]["loaded"] == loaded
    assert check["fix"].endswith("-- --resume PATH")
    assert not ran("import torch\n", code)["fix"], "the arguments name the checkpoint"


@pytest.mark.unmeasured
def test_an_exception_after_another_file_was_loaded_names_that_file(ran):
    torch.save({}, "other.pt")
    check = ran("import torch\n", "torch.load('other.pt')['model']")
    assert outcome(check) == ("failed", False)
    assert check["evidence"]["loaded"] == ["other.pt"]
    assert "other.pt, not the checkpoint" in check["detail"]
    assert ran(HEAD, BUILT, LOADED, "stored['nothing']")["evidence"]["loaded"] == []


def test_a_checkpoint_that_the_script_cannot_load_needs_a_plain_copy(ran, make):
    path = make.save({**make.tree(), "path": Path("somewhere")})
    check = ran(HEAD, BUILT, LOADED, LOOP, path=path)
    assert outcome(check) == ("failed", False)
    assert check["fix"].endswith(f"ckptmove convert {path} --plain")
    error = check["evidence"]["error"]
    assert "Path" in error
    assert "\x1b" not in error
    assert "weights_only=False" not in error, "torch's advice"


def test_the_refusal_of_another_file_is_not_mended_in_the_checkpoint(ran):
    torch.save({"path": Path("somewhere")}, "other.pt")
    check = ran(HEAD, BUILT, LOADED, "torch.load('other.pt')", LOOP)
    assert outcome(check) == ("failed", False)
    assert "Weights only load failed: " in check["evidence"]["error"]
    assert check["fix"] == ""


def test_the_keys_of_another_file_are_not_renamed_in_the_checkpoint(ran, make):
    torch.save({f"x.{key}": value for key, value in make.tree()["model"].items()}, "other.pt")
    check = ran(HEAD, BUILT, "model.load_state_dict(torch.load('other.pt'))", LOADED, LOOP)
    assert outcome(check) == ("failed", False)
    assert check["evidence"]["loaded"] == ["other.pt"]
    assert check["fix"] == ""


def test_the_error_of_pickle_after_a_refusal_is_its_own(ran):
    code = """
    import pickle
    Path = __import__("pathlib").Path
    torch.save({"path": Path("somewhere")}, "other.pt")
    Path("cut.pkl").write_bytes(pickle.dumps([1, 2])[:-3])
    try:
        torch.load("other.pt")
    except pickle.UnpicklingError:
        pickle.loads(Path("cut.pkl").read_bytes())
    """
    assert "truncated" in ran("import torch\n", code)["evidence"]["error"]


def test_live_modules_are_found_next_to_a_class_that_has_no_hash():
    class Meta(type):
        __hash__ = None

    odd, model = Meta("Odd", (), {})(), torch.nn.Linear(1, 1)
    assert any(one is model for one in compared._live(torch.nn.Module))
    assert not any(one is odd for one in compared._live(torch.nn.Module))


def test_a_script_that_trains_without_the_checkpoint_is_ended(ran):
    check = ran(HEAD, BUILT, LOOP, "open('to the end', 'w')")
    assert outcome(check) == ("failed", False)
    assert "20 optimizer steps" in check["detail"]
    assert not Path("to the end").exists()


def test_a_few_steps_before_the_load_are_no_fault(ran):
    copied = "model.load_state_dict(model.state_dict())\noptimizer.load_state_dict(optimizer.state_dict())\n"
    assert outcome(ran(HEAD, BUILT, LOOP + "    break\n", copied, LOADED, LOOP)) == ("passed", True)


RNG = """
torch.save([torch.get_rng_state(), torch.cuda.get_rng_state()], "rng.pt")
cpu, cuda = torch.load("rng.pt", map_location=device)
"""


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("torch.set_rng_state(cpu)", "torch.set_rng_state(cpu.cpu())"),
        ("torch.random.set_rng_state(new_state=cpu)", "torch.random.set_rng_state(new_state=cpu.cpu())"),
        ("torch.cuda.set_rng_state(cuda)", "torch.cuda.set_rng_state(cuda.cpu())"),
        ("torch.cuda.set_rng_state_all([cuda])", "torch.cuda.set_rng_state_all([one.cpu() for one in [cuda]])"),
        ("torch.Generator().set_state(cpu)", "torch.Generator().set_state(cpu.cpu())"),
        ("set = torch.set_rng_state; set(cpu)", "move the state of the generator to the CPU at train.py:20: .cpu()"),
    ],
)
def test_the_state_of_a_generator_stays_on_the_cpu(ran, line, fix):
    check = ran(HEAD, RNG, line)
    assert check["evidence"]["fix"] == fix
    assert ran(HEAD, RNG, fix + "\n", BUILT, LOADED, LOOP)["status"] == "passed" or "at train.py" in fix


@pytest.mark.parametrize(
    ("stored", "model", "fix"),
    [
        ("module.{}", "build()", "--strip-prefix module."),
        ("{}", "nn.ModuleDict({'net': build()})", "--add-prefix net."),
        ("module.{}", "nn.ModuleDict({'net': build()})", "--rename 'module.*=net.*'"),
        ("x{}", "build()", ""),
    ],
)
def test_keys_with_a_prefix_have_the_command_that_renames_them(ran, make, stored, model, fix):
    tree = make.tree()
    tree["model"] = {stored.format(key): value for key, value in tree["model"].items()}
    path = make.save(tree)
    check = ran(HEAD, BUILT.replace("build()", model), LOADED, path=path)
    assert check["fix"] == (f"ckptmove convert {path} {fix}" if fix else "")
    assert ("prefix" in check["evidence"]) == fix.startswith("--strip-prefix")


def test_a_strict_load_that_fails_for_another_reason_has_no_command(ran):
    check = ran(HEAD, "nn.Linear(6, 5).load_state_dict({'weight': torch.ones(2)})")
    assert check["fix"] == ""


def test_a_script_that_ends_after_the_load_says_where_it_loaded(ran):
    check = ran(HEAD, BUILT, LOADED, "print('evaluated')\n")
    assert outcome(check) == ("failed", False)
    assert "train.py:" in check["detail"]
    assert check["failures"][0].endswith("evaluated")
    assert "epochs" in check["fix"]
    assert not ran(HEAD, "torch.load(args.resume)\n")["fix"], "it trains nothing"


def test_a_checkpoint_that_is_read_and_not_restored_is_a_fault(ran):
    check = ran(HEAD, BUILT, "torch.load(args.resume)\n", LOOP)
    assert outcome(check) == ("failed", False)
    assert check["evidence"]["tensors"] == 0


def test_an_optimizer_that_starts_fresh_is_not_proven(ran):
    check = ran(HEAD, BUILT, LOADED.replace("optimizer.load_state_dict", "id"), LOOP)
    assert outcome(check) == ("passed", False)
    assert (check["evidence"]["entries"], check["evidence"]["of_entries"]) == (0, 4)


@pytest.mark.unmeasured
def test_a_layer_that_is_made_anew_is_not_proven(ran):
    check = ran(HEAD, BUILT, LOADED, "nn.init.zeros_(model[1].weight)\n", LOOP)
    assert outcome(check) == ("passed", False)
    assert "model.1.weight" in check["evidence"]["unproven"]


def test_state_of_parameters_in_another_order_is_not_proven(ran):
    built = BUILT.replace("model.parameters()", "[*model.parameters()][::-1]")
    early = LOOP + "    if optimizer.state[model[0].weight]['step'] == 3: break\n"  # as many as in the saved run
    check = ran(HEAD, built, early, LOADED.replace("optimizer.load_state_dict", "id"), LOOP)
    assert outcome(check) == ("passed", False)
    assert check["evidence"]["entries"] == 0


def test_a_model_that_the_checkpoint_does_not_have_is_not_proven(ran):
    check = ran(HEAD, BUILT.replace("build()", "nn.Linear(6, 3)"), "torch.load(args.resume)\n", LOOP)
    assert outcome(check) == ("passed", False)


def test_weights_alone_prove_no_resume(ran, make):
    path = make.save({"model": make.tree()["model"]})
    check = ran(HEAD, BUILT, LOADED.replace('optimizer.load_state_dict(stored["optimizer"])', ""), LOOP, path=path)
    assert outcome(check) == ("passed", False)
    assert check["evidence"]["optimizer_state"] == [None]


def test_of_two_state_dicts_that_fit_the_one_with_the_values_counts(ran, make):
    tree = make.tree()
    tree["model_b"] = {key: value + 1 for key, value in tree["model"].items()}
    check = ran(HEAD, BUILT, LOADED.replace('["model"]', '["model_b"]'), LOOP, path=make.save(tree))
    assert check["evidence"]["model"] == ["model_b"]


def test_a_frozen_layer_has_nothing_to_resume(ran, make):
    tree = make.tree()
    for key in (0, 1):
        del tree["optimizer"]["state"][key]
    frozen = "model[0].requires_grad_(False)\n"
    assert outcome(ran(HEAD, BUILT, frozen, LOADED, LOOP, path=make.save(tree))) == ("passed", True)


def test_parameters_without_a_gradient_are_not_proven(ran):
    check = ran(HEAD, BUILT, LOADED, LOOP.replace("model(x.to(device))", "model[1](x.to(device)[:, :5])"))
    assert outcome(check) == ("passed", False)
    assert "model.0.weight" in check["evidence"]["unproven"]


@pytest.mark.parametrize(
    "change",
    [
        ('torch.device("cuda"', 'torch.device("cpu"'),
        ("loss.backward()", "(loss * float('nan')).backward()"),
        ("optimizer.step()", "optimizer.zero_grad(); optimizer.step()"),
    ],
)
def test_a_step_that_does_not_train_on_the_target_is_a_fault(ran, change):
    assert outcome(ran((HEAD + BUILT + LOADED + LOOP).replace(*change))) == ("failed", False)


@pytest.mark.unmeasured
def test_buffers_are_compared_as_they_were_loaded(ran, make):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    head = HEAD.replace("nn.Linear(6, 5), ", "nn.Linear(6, 5), nn.BatchNorm1d(5), ")
    check = ran(head, BUILT, LOADED, LOOP, path=make(model=model))
    assert outcome(check) == ("passed", True)
    assert check["evidence"]["tensors"] == check["evidence"]["of_tensors"] == 9


def test_buffers_that_are_not_restored_and_tensors_that_are_cast_are_not_proven(ran, make):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    model[1].running_mean += 1
    head = HEAD.replace("nn.Linear(6, 5), ", "nn.Linear(6, 5), nn.BatchNorm1d(5), ")
    weights = 'load_state_dict({k: v for k, v in stored["model"].items() if "running" not in k}, strict=False)'
    path = make(model=model)
    left_out = ran(head, BUILT, LOADED.replace('load_state_dict(stored["model"])', weights), LOOP, path=path)
    double = LOOP.replace("to(device)", "to(device).double()")
    cast = ran(head, BUILT, "model = model.double()\n", LOADED, double, path=path)
    for check, words in ((left_out, "1.running_mean"), (cast, "0.weight")):
        assert outcome(check) == ("passed", False), check["detail"]
        assert words in check["evidence"]["unproven"]


GAN = """
one, two = (nn.Linear(2, 2).to(device) for _ in range(2))
first, second = (torch.optim.Adam(each.parameters()) for each in (one, two))
stored = torch.load(args.resume, map_location=device)
for key, each in (("one", one), ("two", two), ("first", first), ("second", second)):
    each.load_state_dict(stored[key])
x = torch.ones(1, 2, device=device)
while True:
    one(x).sum().backward()
    first.step()
    if {often}:
        two(x).sum().backward()
        second.step()
"""


@pytest.fixture
def pair(make):
    """A checkpoint of two models with an optimizer each."""
    tree = {}
    for model, optimizer in (("one", "first"), ("two", "second")):
        made = make.tree("Adam", model=torch.nn.Linear(2, 2))
        for values in made["optimizer"]["state"].values():
            values["exp_avg"] += len(tree)
        tree |= {model: made["model"], optimizer: made["optimizer"]}
    return make.save(tree)


@pytest.mark.unmeasured
def test_every_optimizer_that_was_loaded_makes_a_step(ran, pair):
    check = ran(HEAD, GAN.format(often="True"), path=pair)
    assert outcome(check) == ("passed", True), check["detail"]
    assert check["evidence"]["optimizer_state"] == ["first", "second"]


def test_an_optimizer_that_makes_no_step_is_not_waited_for(ran, pair):
    check = ran(HEAD, GAN.format(often="False"), path=pair)
    assert outcome(check) == ("passed", False)
    assert "second" in check["evidence"]["unproven"]


@pytest.mark.unmeasured
@pytest.mark.parametrize(("end", "status"), [("", "passed"), ("raise SystemExit", "passed"), ("exit(2)", "failed")])
def test_a_script_may_end_before_the_second_optimizer_makes_a_step(ran, pair, end, status):
    short = GAN.format(often="False").replace("while True", "for _ in range(3)")
    check = ran(HEAD, short, end, path=pair)
    assert outcome(check) == (status, False)


def test_of_several_optimizers_that_fit_one_may_not_be_comparable(ran, make, monkeypatch):
    tree = make.tree()
    tree["optimizer_b"] = make.tree()["optimizer"]
    whole = compared.optimizer_state_dict

    def partial(record, *args):
        if record.where == "optimizer_b":
            raise compared.NeedsUnpickling("only unpickling could rebuild it")
        return whole(record, *args)

    monkeypatch.setattr(compared, "optimizer_state_dict", partial)
    check = ran(HEAD, BUILT, LOADED, LOOP, path=make.save(tree))
    assert check["evidence"]["optimizer_state"] == ["optimizer"], check["detail"]


@pytest.mark.unmeasured
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_the_device_of_the_parameters_is_reported(ran, device):
    head = HEAD.replace('torch.device("cuda"', f'torch.device("{device}"')
    check = ran(head, BUILT, LOADED, LOOP, devices=2)
    assert check["evidence"]["device"] == device
    assert f" on {device} (simulated)" in check["detail"]


def test_two_optimizers_of_one_model(ran, make):
    tree = make.tree("Adam")
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    for at, key in enumerate(("first", "second")):
        optimizer = torch.optim.Adam(model[at].parameters())
        model[at](torch.ones(2, 6 - at)).sum().backward()
        optimizer.step()
        tree[key] = optimizer.state_dict()
    del tree["optimizer"]
    tree["model"] = model.state_dict()
    built = """
    model = build().to(device)
    first, second = (torch.optim.Adam(one.parameters()) for one in model)
    stored = torch.load(args.resume, map_location=device)
    for key, one in (("model", model), ("first", first), ("second", second)):
        one.load_state_dict(stored[key])
    """
    check = ran(
        HEAD,
        built,
        LOOP.replace("optimizer.step()", "first.step(); second.step()").replace("optimizer.", "model."),
        path=make.save(tree),
    )
    assert outcome(check) == ("passed", True), check["detail"]
    assert check["evidence"]["model"] == ["model"]


def test_the_step_of_a_subclass_is_one_step(ran):
    kind = """
    class Mine(torch.optim.AdamW):
        def step(self, closure=None):
            super().step()
            with torch.no_grad():
                for group in self.param_groups:
                    for one in group["params"]:
                        one.add_(1)

    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    """
    check = ran(HEAD, kind, BUILT.replace("torch.optim.AdamW", "Mine"), LOADED, LOOP)
    assert outcome(check) == ("passed", True)
    assert check["evidence"]["optimizer"] == ["Mine"]


@pytest.mark.unmeasured
@pytest.mark.parametrize("change", ["state['rows'].pop()", "state['options']['k'] = 2"])
def test_lists_and_dicts_of_state_are_compared(ran, make, change):
    tree = make.tree("SGD", momentum=0.9)
    for state in tree["optimizer"]["state"].values():
        state |= {"rows": [torch.ones(2), torch.ones(2)], "options": {"k": 1}}
    built = BUILT.replace("AdamW(model.parameters()", "SGD(model.parameters(), 0.1, 0.9")
    changed = f"for state in optimizer.state.values():\n    {change}\n"
    check = ran(HEAD, built, LOADED, changed, LOOP, path=make.save(tree))
    assert check["evidence"]["entries"] == 0
    assert check["evidence"]["of_entries"] == 4


CAUGHT = """
for x, y in batches():
    nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
    try:
        optimizer.step({closure})
    except (RuntimeError, ValueError):
        optimizer.zero_grad()
"""
RAISES = """
calls = 0

def refuse(number):
    global calls
    calls += 1
    if calls < number:
        raise ValueError("a smaller batch, please")
"""
ON_THE_CPU = "for slots in optimizer.state.values():\n    slots['exp_avg'] = slots['exp_avg'].cpu()\n"


@pytest.mark.parametrize(
    ("rounds", "end"), [(100, ""), (1, ""), (1, "raise SystemExit\n"), (1, "raise SystemExit(1)\n")]
)
def test_a_fault_in_a_step_that_the_script_catches_is_reported(ran, rounds, end):
    head = HEAD.replace("range(100)", f"range({rounds})")
    check = ran(head, BUILT, LOADED, ON_THE_CPU, CAUGHT.format(closure=""), end)
    assert outcome(check) == ("failed", False)
    assert check["evidence"]["tensor"].startswith("optimizer.state"), check["detail"]


@pytest.mark.parametrize(("number", "rounds", "status"), [(3, 100, "passed"), (100, 100, "failed"), (100, 2, "failed")])
def test_a_step_that_raised_may_be_tried_again(ran, number, rounds, status):
    head = HEAD.replace("range(100)", f"range({rounds})")
    check = ran(head, BUILT, LOADED, RAISES, CAUGHT.format(closure=f"lambda: refuse({number})"))
    assert outcome(check) == (status, status == "passed"), check["detail"]
    if status == "failed":
        assert "the script caught, at train.py:" in check["detail"]


@pytest.mark.unmeasured
def test_a_step_before_the_load_may_raise(ran):
    early = CAUGHT.format(closure="lambda: refuse(3)")
    check = ran(HEAD.replace("range(100)", "range(4)"), BUILT, RAISES, early, LOADED, LOOP)
    assert outcome(check) == ("passed", True)


def test_a_step_that_always_raises_is_not_hidden_by_that_of_another_optimizer(ran, pair):
    tried = """
        def refuse(): raise ValueError
        try: second.step(refuse)
        except ValueError: pass
    """
    check = ran(
        HEAD,
        GAN.format(often="True").replace("        second.step()", textwrap.indent(textwrap.dedent(tried), "        ")),
        path=pair,
    )
    assert outcome(check) == ("failed", False)
    assert "raised an exception" in check["detail"]


def test_lbfgs_makes_its_step_with_a_closure(ran, make):
    loop = """
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 6, device=device)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    """
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    path = make.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, device="cpu")
    check = ran(HEAD, BUILT.replace("AdamW", "LBFGS"), LOADED, loop, path=path)
    assert check["status"] == "passed", check["detail"]
    assert check["evidence"]["entries"] == check["evidence"]["of_entries"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "status"), [("1", "passed"), ("float('inf')", "failed")])
def test_a_gradient_scaler_may_skip_a_few_steps(ran, factor, status):
    loop = LOOP.replace("loss.backward()", f"scaler.scale(loss * {factor}).backward()")
    loop = loop.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()")
    scaler = "scaler = torch.amp.GradScaler('cuda')\n"
    for head in (HEAD, HEAD.replace("range(100)", "range(10)")):
        check = ran(head, BUILT, LOADED, scaler, loop)
        assert check["status"] == status
        assert ("not finite" in check["detail"]) == (status == "failed")


@pytest.mark.parametrize(
    "load",
    [
        "ckptmove.load(args.resume, map_location=device)",
        "ckptmove.load(args.resume)",
        "ckptmove.load(args.resume, 'cpu', only=['model', 'optimizer'])",
        "ckptmove.load(io.BytesIO(pathlib.Path(args.resume).read_bytes()), device)",
    ],
)
def test_a_load_of_ckptmove_counts(ran, make, load):
    lines = (
        HEAD,
        BUILT,
        "import io, pathlib, ckptmove\n",
        LOADED.replace("torch.load(args.resume, map_location=device)", load),
    )
    check = ran(*lines, LOOP, path=make())
    assert check["status"] == "passed", check["detail"]
    assert "restored by train.py" in check["detail"]


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("load", "status"),
    [
        ("torch.load(args.resume, weights_only=False, map_location=device)", "passed"),
        ("torch.load(file, weights_only=True)", "passed"),
        ("torch.load(__import__('io').BytesIO(file.read()))", "passed"),
        ("torch.load(__import__('shutil').copy(args.resume, 'copy.pt'))", "passed"),
        ("torch.load(__import__('io').BytesIO(b'no'))", "failed"),
        ("torch.load(3)", "failed"),
    ],
)
def test_the_checkpoint_is_known_however_it_is_opened(ran, load, status):
    loaded = LOADED.replace("torch.load(args.resume, map_location=device)", load)
    opened = "with open(args.resume, 'rb') as file:\n" + textwrap.indent(loaded, "    ")
    assert ran(HEAD, BUILT, opened, LOOP)["status"] == status


def test_the_checkpoint_is_not_unpickled_even_if_the_script_asks_for_it(ran, make):
    path = make.save({**make.tree(), "path": Path("somewhere")})
    loaded = LOADED.replace("map_location=device", "map_location=device, weights_only=False")
    check = ran(HEAD, BUILT, loaded, LOOP, path=path)
    assert outcome(check) == ("skipped", False)
    assert check["fix"].endswith(f"ckptmove convert {path} --plain")


class Planted:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("options", "status"),
    [("pickle_module=__import__('pickle')", "skipped"), ("weights_only=0", "skipped"), ("weights_only=True", "failed")],
)
def test_no_argument_unpickles_the_checkpoint(ran, make, tmp_path, options, status):
    path = make.save({**make.tree(), "planted": Planted(tmp_path / "made")})
    check = ran(HEAD, BUILT, LOADED.replace("map_location=device", options), LOOP, path=path)
    assert outcome(check) == (status, False)
    assert not (tmp_path / "made").exists()


@pytest.mark.unmeasured
@pytest.mark.parametrize("value", ["1", "0"])
def test_no_environment_unpickles_the_checkpoint(ran, make, tmp_path, monkeypatch, value):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", value)
    path = make.save({**make.tree(), "planted": Planted(tmp_path / "made")})
    ran(HEAD, BUILT, LOADED, LOOP, path=path)
    assert not (tmp_path / "made").exists()


UNPICKLES = {
    "a file": "pickle.load(file)",
    "bytes": "pickle.loads(file.read())",
    "an unpickler": "pickle.Unpickler(file).load()",
    "an unpickler of the script": "Mine(file).load()",
    "the unpickler that joblib inherits from": "pickle._Unpickler(file=file).load()",
    "an unpickler of a library": "library.Theirs(file).load()",
    "numpy": "numpy.load(args.resume, allow_pickle=True)",
}


@pytest.mark.parametrize("line", UNPICKLES.values(), ids=UNPICKLES)
def test_no_function_of_pickle_unpickles_the_checkpoint(ran, make, tmp_path, monkeypatch, line):
    library = types.ModuleType("library")
    library.Theirs = type("Theirs", (pickle.Unpickler,), {})
    monkeypatch.setitem(sys.modules, "library", library)
    path = tmp_path / "run.pkl"
    path.write_bytes(pickle.dumps({**make.tree(), "planted": Planted(tmp_path / "made")}, protocol=2))
    mine = "import pickle, library, numpy\nclass Mine(pickle.Unpickler):\n    pass\n"
    line = f"with open(args.resume, 'rb') as file: {line}"
    before = [pickle.load, pickle.Unpickler, pickle._Unpickler.__init__]
    check = ran(HEAD, mine, line, path=str(path))
    assert outcome(check) == ("skipped", False), check["detail"]
    assert check["evidence"]["source"] == line
    assert not (tmp_path / "made").exists()
    assert before == [pickle.load, pickle.Unpickler, pickle._Unpickler.__init__]


@pytest.mark.unmeasured
def test_other_files_are_unpickled(ran):
    code = """
    import pickle

    class Mine(pickle.Unpickler):
        def find_class(self, module, name):
            return super().find_class(module, name)

    with open("data.pkl", "wb") as file:
        pickle.dump([nn.Linear(2, 2)], file)
    for kind in (Mine, pickle._Unpickler):
        with open("data.pkl", "rb") as file:
            assert kind(file).load()
    torch.save(nn.Linear(2, 2), "model.pt")
    torch.load("model.pt", weights_only=False)
    """
    assert outcome(ran(HEAD, code, BUILT, LOADED, LOOP)) == ("passed", True)


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("subprocess.run([sys.executable, 'worker.py', '--resume', args.resume])", "skipped"),
        ("subprocess.run([sys.executable, 'worker.py', '--resume=' + args.resume])", "skipped"),
        ("subprocess.run(f'python worker.py < {args.resume}', shell=True)", "skipped"),
        ("os.system('cat ' + args.resume)", "skipped"),
        ("subprocess.run(['true'])", "passed"),
    ],
)
def test_a_program_is_not_started_with_the_checkpoint(ran, line, status):
    check = ran(HEAD, "import os, subprocess, sys\n", line + "\n", BUILT, LOADED, LOOP)
    assert outcome(check) == (status, status == "passed")
    assert status == "passed" or check["evidence"]["source"] == line


def test_weights_in_safetensors_are_a_load_too(ran, make, tmp_path):
    from safetensors.torch import save_file

    tree = make.tree()
    save_file(tree["model"], tmp_path / "model.safetensors")
    loaded = """
    from safetensors.torch import load_file, load_model, safe_open
    load_model(model, args.resume)
    load_file(args.resume)
    assert not isinstance(3, safe_open)
    with safe_open(args.resume, "pt") as file:
        model.load_state_dict({key: file.get_tensor(key) for key in file.keys()})
    """
    check = ran(HEAD, BUILT, loaded, LOOP, path=str(tmp_path / "model.safetensors"))
    assert outcome(check) == ("passed", False)
    assert check["evidence"]["tensors"] == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_of_dcp_is_a_load_too(ran, make, tmp_path):
    Distributed.save(tmp_path / "dcp", {"model": make.tree()["model"]})
    loaded = """
    import torch.distributed.checkpoint as dcp
    state = {"model": {key: torch.zeros_like(value, device="cpu") for key, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=__import__("shutil").copytree(args.resume, "other"))
    dcp.load(state, checkpoint_id=args.resume)
    model.load_state_dict(state["model"])
    """
    check = ran(HEAD, BUILT, loaded, LOOP, path=str(tmp_path / "dcp"))
    assert check["evidence"]["tensors"] == 4, check["detail"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("place", ["entry", "metadata"])
def test_a_directory_of_dcp_is_not_unpickled(ran, make, tmp_path, place):
    planted, folder = Planted(tmp_path / "made"), tmp_path / "dcp"
    Distributed.save(folder, {"model": make.tree()["model"], "planted": planted if place == "entry" else 3})
    if place == "metadata":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.planted = planted
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    loaded = """
    import torch.distributed.checkpoint as dcp
    dcp.load({"planted": 0}, checkpoint_id=args.resume)
    """
    assert outcome(ran(HEAD, BUILT, loaded, LOOP, path=str(folder))) == ("skipped", False)
    assert not (tmp_path / "made").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("loop", "status"), [("", "skipped"), (LOOP, "passed")])
def test_a_directory_of_dcp_is_not_overwritten(ran, make, tmp_path, loop, status):
    Distributed.save(tmp_path / "dcp", {"model": make.tree()["model"]})
    before = {file: file.read_bytes() for file in (tmp_path / "dcp").iterdir()}
    loaded = """
    import torch.distributed.checkpoint as dcp
    state = {"model": {key: value.cpu() for key, value in model.state_dict().items()}}
    dcp.save(state, checkpoint_id="other")
    dcp.load(state, checkpoint_id=args.resume)
    model.load_state_dict(state["model"])
    """
    check = ran(HEAD, BUILT, loaded, loop, "dcp.save(state, checkpoint_id=args.resume)", path=str(tmp_path / "dcp"))
    assert outcome(check) == (status, False)
    assert before == {file: file.read_bytes() for file in (tmp_path / "dcp").iterdir()}


CHANGES = """
for change in (
    lambda: torch.save({}, open(args.resume, "wb")),
    lambda: os.open(args.resume, os.O_RDWR),
    lambda: os.remove(args.resume),
    lambda: os.replace("new.pt", args.resume),
    lambda: shutil.move(args.resume, "old.pt"),
    lambda: os.truncate(args.resume, 3),
):
    try:
        change()
    except PermissionError:
        refused += 1
assert refused == 6
"""


def test_the_checkpoint_is_protected_from_the_script(ran, make):
    path = make()
    before = Path(path).read_bytes()
    start = "import os, shutil\nrefused = 0\ntorch.save({}, 'new.pt')\n"
    assert outcome(ran(HEAD, start, CHANGES, BUILT, LOADED, LOOP, path=path)) == ("passed", True)
    line = "torch.save({}, open(args.resume, 'wb'))"
    check = ran(HEAD, line, "\n", BUILT, LOADED, LOOP, path=path)
    assert outcome(check) == ("skipped", False)
    assert check["evidence"]["source"] == line
    assert Path(path).read_bytes() == before


def test_a_file_that_was_there_is_not_overwritten(ran, make):
    """A script saves to a fixed name, which may be the original of the checkpoint that is verified."""
    path = make()
    before = Path(path).read_bytes()
    Path("best.pt").write_bytes(before)
    saved = "torch.save({}, args.resume)\ntorch.save({}, 'best.pt')\n"
    own = "torch.save({}, 'own.pt'); torch.save({'a': 1}, 'own.pt'); assert torch.load('own.pt') == {'a': 1}\n"
    check = ran(HEAD, BUILT, saved, own, LOADED, LOOP, path=path)
    assert outcome(check) == ("passed", True), check["detail"]
    assert check["evidence"]["not_written"] == [path, "best.pt"]
    assert Path("best.pt").read_bytes() == Path(path).read_bytes() == before


def test_a_mistyped_path_is_a_fault(ran):
    check = ran(HEAD, BUILT, LOADED, LOOP, arguments=("--resume", "typo.pth"))
    assert outcome(check) == ("failed", False)
    assert "typo.pth" in check["detail"]
    assert check["fix"].endswith("-- --resume PATH")


@pytest.mark.slow
def test_a_script_decides_on_the_placement(make, tmp_path, monkeypatch):
    """``torch.load`` of the script runs on the machine that the finding assumes (D103): ``cuda:0`` alone."""
    monkeypatch.chdir(tmp_path)
    path = make(device="cuda:3")

    def judged(*parts):
        Path("train.py").write_text("".join(parts))
        result = ckptmove.verify(path, to="cuda:0", script="train.py", script_args=("--resume", path))
        checks = {one.name: one.status for one in result.checks}
        return checks["script"], checks["placement"], "D103" in {one.code for one in result.findings}, result.proven

    assert judged(HEAD, BUILT, LOADED, LOOP) == ("passed", "passed", False, True)
    assert not ckptmove.verify(path, to="cuda:0").passed
    # A conversion would not mend a script that fails.
    unmapped = LOADED.replace(", map_location=device", "")
    assert judged(HEAD, BUILT, unmapped, LOOP) == ("failed", "skipped", True, False)


@pytest.mark.parametrize(
    ("frozen", "shown"),
    [("", []), ("model[0].requires_grad_(False)\n", ["0", "1"]), ("model[1].requires_grad_(False)\n", [])],
)
def test_parameters_without_state_that_are_frozen(ran, make, frozen, shown):
    """Those of the second layer have state."""
    tree = make.tree("AdamW")
    for key in (0, 1):
        del tree["optimizer"]["state"][key]
    figures = ran(HEAD, BUILT, LOADED, frozen, LOOP, path=make.save(tree))["evidence"]
    assert figures["frozen"] == [f"optimizer.param_groups.0.params.{key}" for key in shown]


def test_a_script_may_write_other_files_a_copy_and_bytes_of_the_same_length(ran):
    saved = """
    import io, pathlib, shutil
    from safetensors.torch import save_file
    torch.save(model.state_dict(), "first.pt")
    torch.save({}, shutil.copy(args.resume, "last.pt"))
    save_file(tensors={"x": torch.ones(2)}, filename="x.safetensors")
    data = bytearray(pathlib.Path(args.resume).read_bytes())
    data[-1] ^= 1
    torch.save({}, io.BytesIO(data))
    """
    assert ran(HEAD, BUILT, saved, LOADED, LOOP)["status"] == "passed"
    assert Path("first.pt").exists()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("open('data/train.csv')", "skipped"),
        ("import a_package_that_is_not_here", "skipped"),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:9/')", "skipped"),
        ('raise RuntimeError("Distributed package doesn\'t have NCCL built in")', "skipped"),
        ("torch.cuda.MemPool()", "skipped"),
        ("import os\nwith os.popen('stty size') as told: _, width = told.read().split()", "skipped"),
        ("import subprocess\nsize = subprocess.run('stty size', shell=True).stdout\nsize.split()", "skipped"),
        ("import os\nwith os.popen('stty size') as told:\n    told.read()\n\n1 / 0", "failed"),
        ("import os\nwith os.popen('echo 3') as told: told.read().split()[1]", "failed"),
        ("import os, errno\nraise OSError(errno.ENOTTY, 'Inappropriate ioctl for device')", "skipped"),
        ("try: open('x.csv')\nexcept OSError as error: raise ValueError('no data') from error", "skipped"),
        ("try: open('x.csv')\nexcept OSError: raise ValueError", "failed"),
        ("torch.multiprocessing.spawn(print, nprocs=2)", "skipped"),
        ("raise EOFError('EOF when reading a line')", "failed"),
        ("raise KeyboardInterrupt", "failed"),
        ("1 / 0", "failed"),
        ("import sys; sys.exit(2)", "failed"),
    ],
)
def test_a_script_that_cannot_run_here_says_nothing_about_the_checkpoint(ran, code, status):
    check = ran("import torch\n", code)
    assert outcome(check) == (status, False)
    assert check["failures"] or check["detail"].startswith("not proven: ")


def test_a_file_that_the_checkpoint_lacks_is_a_fault(ran, make, tmp_path):
    make.folder = tmp_path / "run"
    make.folder.mkdir()
    make()
    check = ran(HEAD, "torch.load(args.resume + '/scaler.pt')", path=str(tmp_path / "run"))
    assert outcome(check) == ("failed", False)


@pytest.mark.unmeasured
def test_advice_about_mps_is_for_mps_only(ran):
    assert ran("raise ValueError('unknown split MPS')")["fix"] == ""


def test_one_process_for_one_device_is_run_here(ran):
    code = "def main(rank, name):\n    assert rank == 0\n"
    code += textwrap.indent(textwrap.dedent(BUILT + LOADED + LOOP), "    ")
    assert outcome(ran(HEAD, code, "torch.multiprocessing.spawn(main, ('gpu',), nprocs=1)")) == ("passed", True)


def test_a_script_that_catches_everything_is_ended_at_its_next_call_of_torch(ran):
    code = """
    try:
        train()
    except:
        for call in (lambda: torch.ones(3), lambda: torch.save({}, args.resume), lambda: torch.load(args.resume)):
            try:
                call()
            except BaseException as error:
                assert type(error).__name__ == "Stopped"
    """
    train = "def train():\n" + textwrap.indent(textwrap.dedent(BUILT + LOADED + LOOP), "    ")
    assert outcome(ran(HEAD, train, code)) == ("passed", True)


@pytest.fixture
def exits(monkeypatch):
    """Replace the end of the process, for a script that waits for it."""
    codes = []

    def leave(code):
        codes.append(code)
        Path("ended").touch()

    monkeypatch.setattr(room.os, "_exit", leave)
    monkeypatch.setattr(room.atexit, "_run_exitfuncs", lambda: codes.append("exit functions"))
    return codes


WAIT = "import os, time\nwhile not os.path.exists('ended'): time.sleep(0.01)\n"


def test_a_script_that_does_not_end_is_ended(ran, exits, monkeypatch):
    monkeypatch.setattr(recorded, "GRACE", 0.1)
    body = BUILT + LOADED + LOOP
    train = "try:\n" + textwrap.indent(body, "    ") + "except:\n" + textwrap.indent(WAIT, "    ")
    check = ran(HEAD, train)
    assert outcome(check) == ("passed", True)
    assert exits == ["exit functions", 0]


def test_a_target_that_cannot_be_simulated_is_skipped(ran, monkeypatch):
    monkeypatch.setattr("ckptmove.proof.place.unavailable_reason", lambda: "torch is too old")
    assert ran(HEAD, BUILT)["status"] == "skipped"


def test_bytes_that_cannot_be_read_are_a_fault(ran, monkeypatch):
    def unreadable(*_):
        raise UnreadableInput("no", path="c.pt")

    monkeypatch.setattr(compared, "model_state", unreadable)
    assert outcome(ran(HEAD, BUILT, LOADED, LOOP)) == ("failed", False)


@pytest.mark.unmeasured
def test_a_script_that_takes_too_long_says_where_it_was(answers, make, tmp_path, monkeypatch, exits):
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text("def prepare():\n" + textwrap.indent(WAIT, "    ") + "prepare()\n")
    messages = []
    monkeypatch.setattr(
        room, "failed", lambda *args, **evidence: messages.append(evidence) or failed(*args, **evidence)
    )
    monkeypatch.setattr(room.time, "time", lambda: 0.0)
    answers(make(), "cuda:0", script="slow.py", deadline=2.0)
    assert exits == ["exit functions", 0]
    assert messages[0]["file"] == "slow.py"


def test_a_script_leaves_no_bytecode(ran, tmp_path):
    ran(HEAD)
    assert not (tmp_path / "__pycache__").exists()


HOLDERS = {
    "set before": ("self.device = where\n        self.teacher = teacher", "self.teacher.to(self.device)"),
    "set after": ("self.teacher = teacher\n        self.device = where", "self.teacher.to(where)"),
    "made after": ("self.teacher = teacher\n        self.device = torch.device('cuda:0')", "teacher"),
}


@pytest.mark.parametrize(("kept", "fix"), HOLDERS.values(), ids=HOLDERS)
def test_a_module_of_a_holder_is_moved_where_it_is_assigned(ran, kept, fix):
    trainer = f"""
class Trainer:
    def __init__(self, teacher, where):
        {kept}

    def loss(self, x, made):
        return nn.functional.mse_loss(made, self.teacher(x.to(self.device)))

trainer = Trainer(build(), device)
"""
    loss = "nn.functional.mse_loss(model(x.to(device)), y.to(device))"
    loop = LOOP.replace(loss, "trainer.loss(x, model(x.to(device)))")
    check = ran(HEAD, trainer, BUILT, LOADED, loop)
    assert check["evidence"]["tensor"].startswith("trainer.teacher.0.")
    assert fix in check["evidence"]["fix"]


@pytest.mark.unmeasured
def test_a_module_whose_device_a_tensor_was_made_on_is_named(ran):
    noise = """
class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    @property
    def device(self):
        return self.scale.device

    def forward(self, x):
        return x + torch.ones(6, device=self.device)

noise = Noise()
"""
    check = ran(HEAD, noise, BUILT, LOADED, LOOP.replace("model(x.to(device))", "model(noise(x.to(device)))"))
    assert check["evidence"]["tensor"] == "noise.scale"
    assert check["evidence"]["fix"].endswith("noise.to(device)")


@pytest.mark.unmeasured
def test_state_that_a_line_moves_to_the_cpu_is_fixed_there(ran):
    moved = """
for slots in optimizer.state.values():
    for key, value in slots.items():
        slots[key] = value.cpu()
"""
    check = ran(HEAD, BUILT, LOADED, moved, LOOP)
    assert check["evidence"]["fix"].startswith("slots[key] = value")


def test_a_tensor_that_an_exception_handler_reads_is_moved(ran):
    loop = """
torch.save(torch.randn(4, 6), "rows.pt")
rows = torch.load("rows.pt")
for _ in range(3):
    try:
        raise ValueError
    except ValueError:
        loss = model(rows).sum()
"""
    check = ran(HEAD, BUILT, LOADED, loop)
    assert check["evidence"]["tensor"] == "rows"
    assert check["evidence"]["fix"].startswith("rows = rows.to(")


@pytest.mark.parametrize(
    ("event", "args", "is_refused"),
    [
        ("open", ("{}", "w", os.O_WRONLY), True),
        ("open", (b"{}", None, os.O_RDWR | os.O_CREAT), True),
        ("open", ("{}", "r", os.O_RDONLY), False),
        ("open", (3, "w", os.O_WRONLY), False),
        ("open", ("other", "w", os.O_WRONLY), False),
        ("os.rename", ("other", "{}", -1, -1), True),
        ("os.listdir", ("{}",), False),
    ],
)
def test_what_changes_a_protected_file_is_refused(tmp_path, event, args, is_refused):
    """Python traces no audit hook, so it is called here."""
    path = str(tmp_path / "run.pth")
    own = {"{}": path, b"{}": os.fsencode(path)}
    given = tuple(own.get(one, one) for one in args)
    refusal = pytest.raises(PermissionError) if is_refused else contextlib.nullcontext()
    with protection.protected([path], print), refusal:
        protection._refuse(event, given)
    protection._refuse(event, given)


@pytest.mark.parametrize(
    ("event", "args", "expected"),
    [
        ("subprocess.Popen", ("python", ["python", "a.py", "--resume={}"], None, None), True),
        ("os.system", (b"cat < '{}'",), True),
        ("os.exec", ("cat", [b"cat", Path("other.pth")], {}), False),
        ("os.listdir", ("{}",), False),
    ],
)
def test_the_words_of_a_program_are_observed(tmp_path, event, args, expected):
    path = str(tmp_path / "run.pth")

    def filled(value):
        if isinstance(value, list):
            return [filled(one) for one in value]
        return type(value)(str(value).replace("{}", path)) if isinstance(value, str) else value

    observed = []
    given = tuple(
        os.fsencode(os.fsdecode(one).replace("{}", path)) if isinstance(one, bytes) else filled(one) for one in args
    )
    with protection.protected([path], observed.extend):
        protection._refuse(event, given)
    assert (path in observed) is expected
    protection._refuse(event, given)


def test_a_session_refuses_a_program_once(tmp_path):
    path = str(tmp_path / "run.pth")
    home = room.line_of(str(tmp_path / "train.py"), 0)
    session = recorded.Session(path, room.Entrance(room.CaseName("train.py", "", is_file=True)), home, print, ())
    session.note_program(["cat", "other.pth"])
    assert session.terminal is None
    session.note_program(["/bin/stty", "size"])
    assert session.terminal is not None
    with pytest.raises(recorded.Stopped):
        session.note_program(["cat", path])
    session.close()
    assert session.check.status == "skipped"
    session.note_program(["cat", path])

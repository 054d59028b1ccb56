"""Calls of torch.cuda and the like in a case on a simulated GPU."""

from __future__ import annotations

import sys
import textwrap

import pytest

HEAD = """
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
import ckptmove

def net():
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))

def rows():
    return TensorDataset(torch.rand(8, 6), torch.rand(8, 3))

def pair():
    return torch.rand(4, 6), torch.rand(4, 3)
"""
CASE = """
{before}
def case(device):
    model = net().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(pair):
        x, y = (one.to(device, non_blocking=True) for one in pair)
{step}

    return ckptmove.Case(model, optimizer, None, {batch}, step)
"""
PLAIN = "return mse_loss(model(x), y)"

RIGHT = {
    "losses in one tensor": {"step": "loss = mse_loss(model(x), y)\ntorch.tensor([loss.detach(), 1])\nreturn loss"},
    "settings that hold themselves": {
        "step": "model.settings = [1]\nmodel.settings.append(model.settings)\nmodel.own = [model]\n" + PLAIN,
    },
    "state moved by its data": {
        "step": """
        for one in [*model.parameters(), *(one for some in optimizer.state.values() for one in some.values())]:
            one.data = one.data.cpu()
            one.data = one.data.to(device) if one.dim() else one.data
        return mse_loss(model(x), y)
        """
    },
    "clamped in between": {
        "step": "made = model(x)\nmodel[1].weight.data.clamp_(-1, 1)\nreturn mse_loss(made, y)",
    },
    "moved after a dry run": {
        "before": "plain = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))\nout = plain(torch.ones(1, 6))",
        "step": "return mse_loss(model(plain.to(device)(x)), y)",
    },
    "the GPU where there is one": {
        "before": "DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "step": "return mse_loss(model(x.to(DEVICE)), y.to(DEVICE))",
    },
    "pinned loader": {"batch": "DataLoader(rows(), batch_size=4, shuffle=True, pin_memory=True)"},
    "pinned loader with a worker": {"batch": "DataLoader(rows(), batch_size=4, num_workers=1, pin_memory=True)"},
    "pinned batch": {"batch": "next(iter(DataLoader(rows(), batch_size=4, pin_memory=True)))"},
    "pinned tensor": {"step": "return mse_loss(model(torch.ones(4, 6).pin_memory().to(device)), y)"},
    "made in pinned memory": {
        "step": "return mse_loss(model(x * torch.tensor([1.0] * 6, pin_memory=True).to(device)), y)"
    },
    "generator": {
        "step": """
        g = torch.Generator(device=x.device).manual_seed(0)
        noise = torch.randn(4, 3, generator=g, device=x.device)
        return mse_loss(model(x)[torch.randperm(4, generator=g, device="cuda")] + noise, y)
        """
    },
    "generator by name": {
        "step": """
        g = torch.Generator("cuda")
        picked = torch.multinomial(torch.ones(4, device="cuda"), 4, generator=g)
        return mse_loss(model(x[picked]), y)
        """
    },
    "synchronized": {"step": "torch.cuda.synchronize()\nassert x.is_cuda\nreturn mse_loss(model(x), y)"},
    "scaler": {
        "before": "scaler = torch.amp.GradScaler('cuda')",
        "step": """
        with torch.autocast("cuda", dtype=torch.float16):
            loss = mse_loss(model(x), y)
        return scaler.scale(loss) / scaler.get_scale()
        """,
    },
    "scripted function": {
        "before": "@torch.jit.script\ndef loss(made, y):\n    return ((made - y) ** 2).mean()\n",
        "step": "return loss(model(x), y)",
    },
    "data parallel on the side": {
        "step": """
            side = nn.DataParallel(nn.Linear(2, 2))(x[:, :2].cpu())
            assert side.device == device
            return mse_loss(model(x), y) + 0 * side.sum()
        """,
    },
    "loaded weights": {
        "before": "torch.save(torch.ones(3), 'w.pt')",
        "step": "w = torch.load('w.pt', map_location=device)\nreturn mse_loss(model(x) * w, y)",
    },
}
RIGHT["weights loaded by a function"] = {
    "before": "torch.save(torch.ones(3), 'w.pt')",
    "step": "w = torch.load('w.pt', map_location=lambda s, l: s.cuda())\nreturn mse_loss(model(x) * w, y)",
}
RIGHT["branches on the device"] = {
    "step": """
        assert device == torch.device('cuda:0') == x.device == next(model.parameters()).device
        assert device.type == 'cuda' and str(device).startswith('cuda') and 'cuda' in repr(x) and x.is_cuda
        mask = torch.tril(torch.ones(4, 4, device=x.device)) + torch.eye(4).cuda()
        scaler = torch.amp.GradScaler(device.type, enabled=device.type == 'cuda')
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16, enabled=False):
            loss = mse_loss(model(mask @ x), y)
        assert scaler.is_enabled() and scaler.scale(loss).device == device
        return loss
    """,
}
RIGHT["autocast"] = {
    "step": """
        with torch.autocast(device.type):
            made = model(x)
            assert made.dtype == torch.float16
            loss = mse_loss(made, y)
        assert loss.dtype == torch.float32
        return loss
    """,
}
RIGHT["hooks that name the device"] = {
    "step": """
        made = model(x)
        made.register_hook(lambda grad: grad * torch.ones(3, device=grad.device).to('cuda'))
        return mse_loss(made, y)
    """,
}
RIGHT["a compressed layout, and parallel on the side"] = {
    "step": """
        side = nn.DataParallel(nn.Linear(2, 2).to(device))(x[:, :2])
        found = torch.eye(4, device=device).to_sparse_csr().matmul(model(x))
        return mse_loss(found, y) + 0 * side.sum()
    """,
}
LIMITS = {
    "memory of a graph": ("torch.cuda.MemPool()", "torch.cuda.MemPool"),
    "a graph": ("torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph"),
    "a kernel for the GPU alone": ("torch.ops.ckptmove_test.own(x)", "ckptmove_test::own"),
    "the gradient of a compressed tensor": (
        "torch.eye(4, device=device).to_sparse_csr().requires_grad_()",
        "the gradient of a compressed sparse tensor",
    ),
}
WRONG = {
    "moved to a GPU that is not there": ("x.cuda(7)", "CUDA error: invalid device ordinal"),
    "made on a GPU that is not there": ("torch.ones(1, device=torch.device('cuda', 7))", "invalid device ordinal"),
    "a GPU that is not there by its number": ("x.to(device=3)", "CUDA error: invalid device ordinal"),
    "a GPU that is not there chosen": ("torch.cuda.set_device(3)", "CUDA error: invalid device ordinal"),
    "a model moved to a GPU that is not there": ("model.cuda(1)", "CUDA error: invalid device ordinal"),
    "random state on the GPU": (
        "torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8, device=device))",
        "TypeError: RNG state must be a torch.ByteTensor",
    ),
    "generator of the CPU": (
        "torch.randn(4, 3, generator=torch.Generator(), device=x.device)",
        "RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "default generator": (
        "torch.multinomial(torch.ones(4, device=device), 4, generator=torch.default_generator)",
        "RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "permutation by a generator of the CPU": (
        "torch.randperm(4, generator=torch.Generator(), device=device)",
        "RuntimeError: Expected a 'cuda:0' generator device but found 'cpu'",
    ),
    "generator of the device": (
        "torch.randn(4, 3, generator=torch.Generator(device=device))",
        "RuntimeError: Expected a 'cpu' device type for generator but found 'cuda'",
    ),
    "lengths on the device": (
        "nn.utils.rnn.pack_padded_sequence(x, torch.full((4,), 6, device=device), batch_first=True)",
        "RuntimeError: 'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor",
    ),
    "dtypes that autocast mixes": (
        "with torch.autocast('cuda'): y.clone().index_copy_(0, torch.arange(4, device=device), model(x))",
        "RuntimeError: index_copy_(): self and source expected to have the same dtype",
    ),
    "a loss that autocast bans": (
        "with torch.autocast('cuda'): nn.BCELoss()(model(x).sigmoid(), y)",
        "RuntimeError: torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast",
    ),
    "no kernel in half precision": (
        "with torch.autocast('cuda'): torch.linalg.qr(model(x))",
        """NotImplementedError: "geqrf_cuda" not implemented for 'Half'""",
    ),
    "pinned on the device": (
        "x.pin_memory()",
        "RuntimeError: cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
    ),
    "made in pinned memory of the device": (
        "torch.tensor([1.0], device=device, pin_memory=True)",
        "RuntimeError: Only dense CPU tensors can be pinned",
    ),
}


@pytest.fixture
def case_check(answers, make, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def case_check(before="", batch="pair()", step=PLAIN, to="cuda:0", **options):
        step = textwrap.indent(textwrap.dedent(step), "        ")
        (tmp_path / "train.py").write_text(HEAD + CASE.format(before=before, batch=batch, step=step))
        return answers(make(), to, case="train.py:case", **options)["case"]

    return case_check


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # that it is deprecated, or more
@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor")  # which torch's own loader gave until 2.10
@pytest.mark.parametrize("parts", RIGHT.values(), ids=RIGHT)
def test_what_runs_on_the_target_runs_on_what_stands_for_it(case_check, parts):
    check = case_check(**parts)
    assert check["status"] == "passed", check["detail"]


@pytest.mark.parametrize(("line", "said"), WRONG.values(), ids=WRONG)
def test_what_the_target_refuses_is_refused_in_its_words_and_at_its_line(case_check, line, said):
    check = case_check(step=f"{line}\n{PLAIN}")
    assert check["status"] == "failed", check["detail"]
    assert said in check["detail"]
    assert check["evidence"]["source"] == line


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("line", "operation"), LIMITS.values(), ids=LIMITS)
def test_what_the_simulation_lacks_is_skipped_and_not_the_fault_of_the_line(case_check, line, operation):
    before = """
library = torch.library.Library("ckptmove_test", "FRAGMENT")
if not hasattr(torch.ops.ckptmove_test, "own"):
    library.define("own(Tensor x) -> Tensor")
    library.impl("own", lambda x: x, "CUDA")
    ckptmove.kept = library
"""
    check = case_check(before, step=f"{line}\n{PLAIN}")
    assert check["status"] == "skipped", check["detail"]
    assert check["evidence"]["operation"] == operation
    assert (check["evidence"]["source"], check["evidence"]["proven"]) == (line, False)


def test_of_settings_that_hold_themselves_each_tensor_is_named(case_check):
    before = "settings = {'mask': torch.ones(6)}\nsettings['all'] = [settings]\n"
    check = case_check(before, step="model.settings = settings\nreturn mse_loss(model(x * model.settings['mask']), y)")
    assert check["evidence"]["tensor"] == "model.settings['mask']"


CAPTURABLE = """
torch_step = torch.optim.AdamW
class AdamW(torch.optim.AdamW):
    pass
class Own(torch.optim.Optimizer):
    def __init__(self, parameters, capturable): super().__init__(parameters, {"capturable": capturable})
    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]: one.sub_(one.grad)
"""


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("to", "optimizer", "status"),
    [
        ("mps", "torch.optim.AdamW", "failed"),
        ("mps", "AdamW", "failed"),
        ("mps", "Own", "passed"),
        ("cuda:0", "AdamW", "passed"),
    ],
)
def test_capturable_is_refused_where_torch_does(answers, make, tmp_path, monkeypatch, to, optimizer, status):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    text = HEAD + CASE.format(before=CAPTURABLE, batch="pair()", step=f"        {PLAIN}")
    text = text.replace(
        "= torch.optim.AdamW(model.parameters())", f"= {optimizer}(model.parameters(), capturable=True)"
    )
    (tmp_path / "train.py").write_text(text)
    weights = make.save({"model": make.tree()["model"]}, device="cpu")
    check = answers(weights, to, case="train.py:case")["case"]
    assert check["status"] == status, check["detail"]
    if status == "failed":
        assert (
            "AssertionError: If capturable=True, params and state_steps must be on supported devices" in check["detail"]
        )


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("to", "step", "said"),
    [
        ("cuda:1", "return mse_loss(model(x.to(1)), y.cuda(1))", ""),
        ("cuda:1", "torch.cuda.set_device(device)\nreturn mse_loss(model(x.cuda()), y.to('cuda'))", ""),
        ("cuda:1", "assert x.get_device() == 1\nreturn mse_loss(model(x.new_tensor(x.tolist())), y)", ""),
        ("cuda:1", "return mse_loss(model(x.cuda()), y)", "is on cuda:0, but"),
        ("cuda:1", "return mse_loss(model(x), y.to(torch.device('cuda', 0)))", "is on cuda:0, but"),
        ("cuda:1", "return mse_loss(model(x.to('cuda:2')), y)", "CUDA error: invalid device ordinal"),
        ("cuda:1", "return mse_loss(model(x.cuda(torch.device('cpu'))), y)", "must be cuda device"),
    ],
)
def test_the_number_of_a_device_is_that_of_the_target(case_check, to, step, said):
    check = case_check(step=step, to=to)
    assert said in check["detail"]
    assert check["status"] == ("failed" if said else "passed"), check["detail"]


def test_the_machine_has_as_many_devices_as_were_named(case_check):
    step = f"torch.ones(1).cuda(1)\nassert torch.cuda.device_count() == 2\n{PLAIN}"
    assert case_check(step=step, devices=2)["status"] == "passed"
    assert "invalid device ordinal" in case_check(step=step)["detail"]

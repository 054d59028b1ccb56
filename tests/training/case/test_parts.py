"""Cases of checkpoints with several models and optimizers: how their parts are matched, and their steps."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn

HEAD = """
import torch
from torch import nn
import ckptmove

def generator():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))

def discriminator():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
"""
GAN = """
def case(device):
    netG, netD = generator().to(device), discriminator().to(device)
    optG = torch.optim.Adam(netG.parameters())
    optD = torch.optim.Adam(netD.parameters())
    models = {"netG": netG, "netD": netD}

    def step(images):
        optD.zero_grad()
        fake = netG(torch.randn(4, 2, device=device))
        lossD = netD(fake.detach()).mean() - netD(images.to(device)).mean()
        lossD.backward()
        optD.step()
        optG.zero_grad()
        lossG = -netD(fake).mean()
        lossG.backward()
        optG.step()
        return lossD, lossG

    return ckptmove.Case(models, {"optG": optG, "optD": optD}, batch=torch.randn(4, 3), step=step)
"""


def single(model="generator()", rest=""):
    return f"""
def case(device):
    model = {model}.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    step = lambda batch: model(batch.to(device)).square().mean()
    return ckptmove.Case(model, optimizer, batch=torch.randn(4, model[0].in_features), step=step, {rest})
"""


def trained(*sizes, kind="Adam"):
    model = nn.Sequential(nn.Linear(*sizes[:2]), nn.ReLU(), nn.Linear(*sizes[1:]))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, sizes[0])).square().sum().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def gan_tree():
    torch.manual_seed(0)
    (generator, of_generator), (discriminator, of_discriminator) = trained(2, 4, 3), trained(3, 4, 1)
    models = {"netG": generator, "netD": discriminator}
    return {**models, "optG": of_generator, "optD": of_discriminator, "epoch": 2}


@pytest.fixture
def case_check(answers, make, tmp_path, monkeypatch):
    """The case check of a function, given by its body, on a checkpoint, given by its tree."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def case_check(body, tree=None, to="cuda:0"):
        (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(body))
        path = tree if isinstance(tree, str) else make.save(gan_tree() if tree is None else tree)
        return answers(path, to, case="train.py:case")["case"]

    return case_check


# --- a module that owns its loss --------------------------------------------------------------------------------------

OWNED = """
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.{name} = nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))

    def training_step(self, batch, _):
        return self.{name}(self.net(batch[0]), batch[1])

def case(device):
    module = Module().to(device)
    step = lambda batch: module.training_step([one.to(device) for one in batch], 0)
    batch = torch.randn(4, 6), torch.ones(4, 3)
    return ckptmove.Case(module, torch.optim.AdamW(module.parameters()), None, batch, step)
"""


def owned(name, container="state_dict"):
    module = nn.Module()
    module.net = nn.Linear(6, 3)
    setattr(module, name, nn.BCEWithLogitsLoss(pos_weight=torch.full((3,), 2.0)))
    optimizer = torch.optim.AdamW(module.parameters())
    getattr(module, name)(module.net(torch.randn(4, 6)), torch.ones(4, 3)).backward()
    optimizer.step()
    saved = {"optimizer_states": [optimizer.state_dict()], "pytorch-lightning_version": "2.1.0"}
    return {container: module.state_dict(), **saved}


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", ["loss_fn", "criterion", "loss_func", "loss_module", "loss"])
def test_a_module_may_own_its_loss(case_check, name):
    check = case_check(OWNED.format(name=name), owned(name))
    assert (check["status"], check["evidence"]["tensors"]) == ("passed", 3), check["detail"]
    assert check["evidence"]["proven"] is True


def test_the_loss_of_a_module_is_restored_and_not_only_accepted(case_check):
    returned = "        return self"
    check = "        assert self.loss_fn.pos_weight.tolist() == [2.0] * 3\n"
    body = OWNED.format(name="loss_fn").replace(returned, check + returned)
    check = case_check(body, owned("loss_fn"), to="cpu")
    assert check["status"] == "passed", check["detail"]


def test_a_loss_that_is_not_in_the_state_dict_is_still_missing(case_check):
    tree = owned("loss_fn")
    del tree["state_dict"]["loss_fn.pos_weight"]
    check = case_check(OWNED.format(name="loss_fn"), tree)
    assert check["status"] == "failed"
    assert "missing loss_fn.pos_weight" in check["detail"]


def test_a_loss_with_parameters_of_its_own_is_one_of_the_models(case_check, answers, make):
    body = """
    def case(device):
        model, loss = nn.Linear(6, 4).to(device), nn.Linear(4, 3).to(device)
        optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
        step = lambda batch: loss(model(batch.to(device))).square().mean()
        return ckptmove.Case({"model": model, "criterion": loss}, optimizer, batch=torch.randn(4, 6), step=step)
    """
    both = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(both.parameters())
    both(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    path = make.save(
        {"model": both[0].state_dict(), "criterion": both[1].state_dict(), "optimizer": optimizer.state_dict()}
    )
    check = case_check(body, path)
    assert (check["status"], check["evidence"]["proven"]) == ("passed", True), check["detail"]
    assert check["evidence"]["model"] == {"model": "model", "criterion": "criterion"}
    found = answers(path, "cuda:0")
    assert (found["step"]["status"], found["step"]["evidence"]["proven"]) == ("passed", True), found


# --- a file with several models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "where"), [("generator()", "netG"), ("discriminator()", "netD")])
def test_the_model_and_the_optimizer_that_fit_are_taken(case_check, model, where):
    check = case_check(single(model))
    assert check["status"] == "passed", check["detail"]
    assert check["evidence"]["model"] == where
    assert check["evidence"]["optimizer_state"] == where.replace("net", "opt")
    assert (check["evidence"]["proven"], len(check["evidence"]["not_restored"])) == (False, 1)


@pytest.mark.unmeasured
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_the_prefixes_of_wrappers_do_not_make_two_of_one(case_check, prefix):
    tree = gan_tree()
    tree["netD"] = {prefix + key: value for key, value in tree["netD"].items()}
    check = case_check(single("discriminator()"), tree)
    assert (check["status"], check["evidence"]["model"]) == ("passed", "netD"), check["detail"]
    assert check["evidence"]["keys_as_stored"] is False
    if prefix == "module.":
        body = single("nn.DataParallel(discriminator())").replace("model[0]", "model.module[0]")
        wrapped = case_check(body, tree)
        assert wrapped["evidence"]["keys_as_stored"] is True, wrapped["detail"]


def twins():
    (student, optimizer), (other, _) = trained(2, 4, 3), trained(2, 4, 3)
    return {"student": student, "other": {"state_dict": other}, "optimizer": optimizer}


def test_several_models_that_fit_are_named_and_one_is_to_be_chosen(case_check):
    check = case_check(single(), twins())
    assert (check["status"], check["evidence"]["proven"]) == ("skipped", False)
    assert check["evidence"]["candidates"] == ["student", "other.state_dict"]
    assert "part='student' or part='other.state_dict'" in check["evidence"]["fix"]


@pytest.mark.parametrize(
    ("part", "where"), [("student", "student"), ("other", "other.state_dict"), ("other.state_dict", "other.state_dict")]
)
def test_a_case_chooses_its_model_by_a_key_or_a_path(case_check, part, where):
    check = case_check(single(rest=f"part={part!r}"), twins())
    assert (check["status"], check["evidence"]["model"]) == ("passed", where), check["detail"]


def test_one_state_dict_under_two_keys_is_no_choice(case_check):
    tree = twins()
    tree["other"] = tree["student"]
    assert case_check(single(), tree)["status"] == "passed"


@pytest.mark.unmeasured
@pytest.mark.parametrize("key", ["ema", "teacher", "model_ema", "best", "best_model", "prevModel", "target_net"])
def test_a_copy_is_taken_only_where_it_is_chosen(case_check, key):
    tree = twins()
    tree[key] = tree.pop("other")
    assert case_check(single(), tree)["evidence"]["model"] == "student"
    check = case_check(single(rest=f"part={key!r}"), tree)
    assert (check["status"], check["evidence"]["model"]) == ("passed", f"{key}.state_dict"), check["detail"]


@pytest.mark.parametrize(
    ("rest", "candidates"),
    [("part='netH'", ["netG", "netD"]), ("part='net'", ["netG", "netD"]), ("optimizer_part='opt'", ["optG", "optD"])],
)
def test_a_part_that_is_not_there_is_said_with_those_that_are(case_check, rest, candidates):
    check = case_check(single(rest=rest))
    assert check["status"] == "failed"
    assert check["evidence"]["candidates"] == candidates
    assert candidates[0] in check["evidence"]["fix"]


def test_a_part_of_a_file_without_any_is_not_there_either(case_check):
    tree = gan_tree()
    check = case_check(single(rest="part='net'"), {"optG": tree["optG"]})
    assert "'net'" in check["detail"]
    assert check["status"] == "failed"
    assert "fix" not in check["evidence"]


def test_a_part_that_does_not_fit_is_not_replaced_by_one_that_does(case_check):
    check = case_check(single(rest="part='netD'"))
    assert check["status"] == "failed"
    assert "'netD':" in check["detail"]
    check = case_check(single(rest="optimizer_part='optD'"))
    assert check["status"] == "failed"
    assert "'optD':" in check["detail"]
    assert "[4, 3]" in check["detail"]


def rivals():
    (model, optimizer), (_, other) = trained(2, 4, 3), trained(2, 4, 3)
    return {"model": model, "optimizer": optimizer, "last_optimizer": other}


def test_several_optimizers_that_fit_are_named_and_one_is_to_be_chosen(case_check):
    check = case_check(single(), rivals())
    assert (check["status"], check["evidence"]["proven"]) == ("skipped", False)
    assert check["evidence"]["candidates"] == ["optimizer", "last_optimizer"]
    assert "optimizer_part='optimizer' or optimizer_part='last_optimizer'" in check["evidence"]["fix"]
    check = case_check(single(rest="optimizer_part='last_optimizer'"), rivals())
    assert (check["status"], check["evidence"]["optimizer_state"]) == ("passed", "last_optimizer"), check["detail"]


def test_an_optimizer_that_is_kept_aside_is_taken_only_where_it_is_chosen(case_check):
    tree = rivals()
    tree["best_optimizer"] = tree.pop("last_optimizer")
    assert case_check(single(), tree)["evidence"]["optimizer_state"] == "optimizer"
    check = case_check(single(rest="optimizer_part='best_optimizer'"), tree)
    assert (check["status"], check["evidence"]["optimizer_state"]) == ("passed", "best_optimizer"), check["detail"]


def test_a_model_beside_its_average_in_what_is_kept_aside_is_taken(case_check):
    tree = twins()
    tree["best"] = {"model": tree.pop("student"), "model_ema": tree.pop("other")["state_dict"]}
    assert case_check(single(), tree)["evidence"]["model"] == "best.model"


def test_of_several_optimizers_the_class_decides_too(case_check):
    (model, optimizer), (_, other) = trained(2, 4, 3), trained(2, 4, 3, kind="Adagrad")
    check = case_check(single(), {"model": model, "first": other, "second": optimizer})
    assert (check["status"], check["evidence"]["optimizer_state"]) == ("passed", "second"), check["detail"]


def test_a_module_with_both_models_is_restored_whole_and_its_parts_by_path(case_check):
    tree = gan_tree()
    both = {f"{name}.{key}": value for name in ("netG", "netD") for key, value in tree[name].items()}
    tree = {"state_dict": both, "optimizer_states": [tree["optG"], tree["optD"]]}
    whole = GAN.replace("netG, netD = ", "whole = nn.ModuleDict({'netG': generator(), 'netD': discriminator()})\n    ")
    whole = whole.replace(
        "generator().to(device), discriminator().to(device)", "netG, netD = whole.to(device).values()"
    )
    whole = whole.replace("Case(models, ", "Case(whole, ").replace('"optG": optG', '"optimizer_states.0": optG')
    whole = whole.replace('"optD": optD', '"optimizer_states.1": optD')
    check = case_check(whole, tree)
    assert (check["status"], check["evidence"]["model"]) == ("passed", "state_dict"), check["detail"]
    check = case_check(single(rest="part='state_dict.netG', optimizer_part='optimizer_states.0'"), tree)
    assert (check["status"], check["evidence"]["model"]) == ("passed", "state_dict.netG"), check["detail"]


def test_the_files_of_a_folder_are_parts(case_check, tmp_path):
    tree = gan_tree()
    folder = tmp_path / "run"
    folder.mkdir()
    for key in ("netG", "netD", "optG", "optD"):
        torch.save(tree[key], folder / f"{key}.pth")
    body = GAN.replace('": net', '.pth": net').replace('": opt', '.pth": opt')
    check = case_check(body, str(folder), to="cpu")
    assert check["status"] == "passed", check["detail"]
    assert check["evidence"]["model"] == {"netG.pth": "netG.pth", "netD.pth": "netD.pth"}


# --- several models and optimizers in the case ------------------------------------------------------------------------


def test_a_gan_is_restored_and_stepped(case_check):
    check = case_check(GAN)
    assert check["status"] == "passed", check["detail"]
    evidence = check["evidence"]
    assert evidence["model"] == {"netG": "netG", "netD": "netD"}
    assert evidence["tensors"] == {"netG": 4, "netD": 4}
    assert evidence["optimizer_state"] == {"optG": "optG", "optD": "optD"}
    assert evidence["entries"] == {"optG": 4, "optD": 4}
    assert evidence["optimizer"] == {"optG": "Adam", "optD": "Adam"}
    assert set(evidence["loss"]) == {"[0]", "[1]"}
    assert (evidence["moved"], evidence["not_stepped"], evidence["proven"]) == (8, [], True)


def test_a_function_without_a_device_has_all_its_models_moved(case_check):
    body = GAN.replace("case(device)", "case()").replace(".to(device)", "").replace("images", "images.to('cuda')", 2)
    body = body.replace("def step(images.to('cuda'))", "def step(images)").replace("device=device", "device='cuda'")
    check = case_check(body)
    assert check["status"] == "passed", check["detail"]


def test_weights_alone_of_a_gan_are_stepped_and_prove_no_resume(case_check):
    tree = gan_tree()
    check = case_check(GAN, {"netG": tree["netG"], "netD": tree["netD"]})
    assert (check["status"], check["evidence"]["proven"]) == ("passed", False), check["detail"]
    assert check["evidence"]["entries"] == {"optG": 0, "optD": 0}


def test_an_optimizer_that_is_not_stepped_is_not_proven(case_check):
    check = case_check(GAN.replace("        optG.step()\n", ""))
    assert (check["status"], check["evidence"]["proven"]) == ("passed", False), check["detail"]
    assert check["evidence"]["not_stepped"] == ["optimizer['optG']"]
    assert "not proven" in check["detail"]


def test_a_step_that_steps_no_optimizer_is_a_fault(case_check):
    check = case_check(GAN.replace("        optG.step()\n", "").replace("        optD.step()\n", ""))
    assert check["status"] == "failed"
    assert "optimizer.step():" in check["detail"]


@pytest.mark.parametrize(
    ("frozen", "step", "missed"),
    [
        ("", "model", []),
        ("model[2].requires_grad_(False)", "model", ["model.2.weight", "model.2.bias"]),
        ("", "model[0]", ["model.2.weight", "model.2.bias"]),
    ],
)
def test_every_parameter_that_an_optimizer_lists_is_stepped_or_named(case_check, frozen, step, missed):
    model, optimizer = trained(2, 4, 3)
    body = (
        single()
        .replace("    optimizer =", f"    {frozen}\n    optimizer =")
        .replace(": model(batch", f": {step}(batch")
    )
    check = case_check(body, {"model": model, "optimizer": optimizer})
    assert (check["status"], check["evidence"]["proven"]) == ("passed", not missed), check["detail"]
    assert check["evidence"]["parameters_not_stepped"] == missed


def test_a_layer_that_was_frozen_in_the_saved_run_is_not_missed(case_check):
    model, optimizer = trained(2, 4, 3)
    optimizer["state"] = {key: value for key, value in optimizer["state"].items() if key > 1}
    body = single().replace("    optimizer =", "    model[0].requires_grad_(False)\n    optimizer =")
    check = case_check(body, {"model": model, "optimizer": optimizer})
    assert (check["status"], check["evidence"]["proven"]) == ("passed", True), check["detail"]
    assert check["evidence"]["frozen"] == ["optimizer.param_groups.0.params.0", "optimizer.param_groups.0.params.1"]


def test_a_stored_optimizer_that_the_case_does_not_build_is_named(case_check):
    check = case_check(single(rest="part='netG', optimizer_part='optG'"))
    assert (check["status"], check["evidence"]["not_restored"]) == ("passed", ["optD"]), check["detail"]
    assert "optD" in check["evidence"]["unproven"]
    tree = {**gan_tree(), "best_optD": gan_tree()["optD"]}
    check = case_check(GAN, tree)
    assert (check["evidence"]["not_restored"], check["evidence"]["proven"]) == ([], True), check["detail"]


def test_what_a_loop_changes_beside_its_optimizers_is_not_their_step(case_check):
    clamp = "netG.zero_grad(); optG.step(); [one.data.mul_(0.5) for one in netG.parameters()]"
    check = case_check(GAN.replace("optG.step()", clamp))
    assert check["status"] == "failed", check["detail"]
    assert (check["evidence"]["moved"], len(check["evidence"]["parameters_not_stepped"])) == (4, 4)


def test_the_step_of_a_subclass_that_calls_its_parents_is_one_step(case_check):
    kind = """
class Own(torch.optim.Adam):
    def step(self, closure=None):
        super().step()
        [one.data.mul_(0.5) for group in self.param_groups for one in group["params"]]
"""
    check = case_check(kind + GAN.replace("torch.optim.Adam(netD", "Own(netD"))
    assert (check["status"], check["evidence"]["proven"]) == ("passed", True), check["detail"]


ONE_OPTIMIZER = """
def case(device):
    first, second = nn.Linear(2, 4).to(device), nn.Linear(4, 3).to(device)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])

    def loss_of(batch):
        return second(first(batch.to(device)).relu()).square().mean()

    def whole(batch):
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss

    def without_step(batch):
        loss_of(batch).backward()

    models = {"first": first, "second": second}
    return ckptmove.Case(models, OPTIMIZER, batch=torch.randn(4, 2), step=STEP)
"""


@pytest.mark.parametrize(
    ("optimizer", "step", "said"),
    [
        ("optimizer", "loss_of", ""),
        ('{"optimizer": optimizer}', "whole", ""),
        ("optimizer", "whole", "step calls optimizer.step() itself"),
        ("optimizer", "without_step", "step returns no loss"),
    ],
)
def test_what_step_is_follows_from_the_optimizers_and_not_from_the_models(case_check, optimizer, step, said):
    model, of_model = trained(2, 4, 3)
    first = {"weight": model["0.weight"], "bias": model["0.bias"]}
    second = {"weight": model["2.weight"], "bias": model["2.bias"]}
    body = ONE_OPTIMIZER.replace("OPTIMIZER", optimizer).replace("STEP", step)
    check = case_check(body, {"first": first, "second": second, "optimizer": of_model})
    assert check["status"] == ("failed" if said else "passed"), check["detail"]
    assert check["evidence"]["proven"] is not bool(said)
    assert said in check["detail"]
    assert ("give a dict of optimizers" in check["detail"]) is bool(said)


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return lossD, lossG", "return {'D': lossD, 'G': lossG * float('nan')}", "the loss['G'] is nan"),
        (
            "return lossD, lossG",
            "return __import__('types').MappingProxyType({'G': lossG * float('nan')})",
            "the loss['G'] is nan",
        ),
        ("return lossD, lossG", "return float('inf')", "the loss is inf"),
        ("lossG = -netD(fake).mean()", "lossG = -netD(fake).mean() * 1e38 * 1e38", "model['netG'].0.weight is not fin"),
        ("optG.step()", "netG.zero_grad(); optG.step()", "changed in the step of optimizer['optG'] on"),
    ],
)
def test_what_came_of_a_step_is_judged_for_each_model(case_check, old, new, said):
    check = case_check(GAN.replace(old, new).replace("return lossD, lossG", "return None"))
    assert check["status"] == "failed", check["detail"]
    assert said in check["detail"]


def test_a_loss_that_is_not_returned_is_not_missed(case_check):
    check = case_check(GAN.replace("return lossD, lossG", "pass"))
    assert (check["status"], check["evidence"]["loss"]) == ("passed", {}), check["detail"]


def test_a_discriminators_batch_that_is_left_on_the_cpu_is_named(case_check):
    check = case_check(GAN.replace("netD(images.to(device))", "netD(images)"))
    assert check["status"] == "failed"
    assert check["evidence"]["tensor"] == "batch"
    assert check["evidence"]["source"].startswith("lossD = ")
    assert check["evidence"]["fix"] == "images = images.to(device)"


@pytest.mark.parametrize("models", ["models", '{"netG": netG, "netD": netD}'])
def test_a_model_that_is_left_on_the_cpu_is_named_by_its_key(case_check, models):
    check = case_check(
        GAN.replace("discriminator().to(device)", "discriminator()").replace("Case(models", f"Case({models}")
    )
    assert check["status"] == "failed"
    assert check["evidence"]["tensors"] == ["model['netD'].0.bias", "model['netD'].0.weight"]
    assert check["evidence"]["fix"] == "netD = netD.to(device)"
    built = (HEAD + GAN).splitlines().index("    optD = torch.optim.Adam(netD.parameters())") + 1
    assert check["evidence"]["fix_at"] == f"before train.py:{built}"


def test_a_model_in_a_dict_that_is_not_written_out_is_mended_in_words(case_check):
    body = GAN.replace("discriminator().to(device)", "discriminator()")
    body = body.replace('models = {"netG": netG, "netD": netD}', "models = dict(netG=netG, netD=netD)")
    check = case_check(body)
    assert check["evidence"]["fix"].startswith("netD = netD.to(device), ")
    assert check["evidence"]["fix_at"] == ""


def test_models_that_never_go_to_the_target_are_no_proof(case_check):
    body = GAN.replace("generator().to(device)", "generator()").replace("discriminator().to(device)", "discriminator()")
    check = case_check(body.replace("images.to(device)", "images").replace("device=device", "device='cpu'"))
    assert check["status"] == "failed"
    assert (check["evidence"]["tensor"], check["evidence"]["on"]) == ("model['netG'].0.weight", "cpu")
    assert "operation" not in check["evidence"]
    assert check["evidence"].get("fix", "") == "netG = netG.to(device)"


def test_state_that_is_left_behind_is_named_by_its_optimizer(case_check):
    body = GAN.replace("generator().to(device), discriminator().to(device)", "generator(), discriminator()")
    body = body.replace("    def step(images):\n", "    def step(images):\n        netG.to(device), netD.to(device)\n")
    check = case_check(body)
    assert check["status"] == "failed"
    assert check["evidence"]["tensor"] == "optimizer['optD'].state['netD.0.weight']['exp_avg']", check["detail"]
    assert check["evidence"]["source"] == "optD.step()"
    assert check["evidence"]["fix"] == "netD = netD.to(device)"


def test_parameters_that_were_replaced_are_named_by_their_model(case_check):
    body = GAN.replace("    models =", "    netD[0] = nn.Linear(3, 4).to(device)\n    models =")
    check = case_check(body)
    assert check["status"] == "failed"
    assert check["evidence"]["tensor"] == "model['netD'].0.weight"
    assert check["detail"].startswith("optimizer['optD'], ")
    assert check["evidence"]["operation"] == "torch.optim.Optimizer.step"
    assert check["evidence"]["fix"] == "optD = torch.optim.Adam(netD.parameters())"


def test_a_gradient_that_two_devices_meet_in_is_named_in_a_whole_step_too(case_check):
    hook = "    mask = torch.ones(4)\n    netD[0].bias.register_hook(lambda grad: grad * mask)\n    models ="
    check = case_check(GAN.replace("    models =", hook))
    assert check["status"] == "failed"
    assert check["evidence"]["tensor"] == "mask"
    assert check["evidence"]["operation"] == "aten::mul in torch.Tensor.backward"


def test_capturable_is_refused_in_a_whole_step_too(case_check):
    tree = gan_tree()
    tree["optG"]["param_groups"][0]["capturable"] = True
    check = case_check(GAN, tree, to="mps")
    assert check["status"] == "failed"
    assert "capturable=True" in check["evidence"]["error"]
    assert check["evidence"]["source"] == "optG.step()"


def test_keys_that_are_missing_are_said_of_the_model_that_wants_them(case_check):
    check = case_check(GAN.replace("discriminator().to", "nn.Sequential(*discriminator(), nn.Linear(1, 1)).to"))
    assert check["status"] == "failed"
    assert check["detail"].startswith("model['netD'] ")
    assert "missing 3.weight; missing 3.bias" in check["detail"]


def test_keys_of_a_dict_that_the_checkpoint_does_not_have_are_said(case_check):
    check = case_check(GAN.replace('"netG": netG', '"gen": netG'))
    assert (check["status"], check["evidence"]["candidates"]) == ("failed", ["netG", "netD"]), check["detail"]
    check = case_check(GAN.replace('"optG": optG', '"gen": optG'))
    assert (check["status"], check["evidence"]["candidates"]) == ("failed", ["optG", "optD"]), check["detail"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("step=step", "step=None", "needs a step(batch)"),
        ("step=step", "step=step, part='netG'", ": part cannot be used with a dict"),
        ("step=step", "step=step, optimizer_part='optG'", ": optimizer_part cannot be used with a dict"),
        ("Case(models,", "Case({},", "not dict and dict"),
        ("Case(models,", "Case({1: netG},", "not dict and dict"),
        ('"optD": optD}', '"optD": netD}', "not dict and dict"),
    ],
)
def test_fields_that_do_not_go_together_are_a_mistake_of_usage(make, tmp_path, monkeypatch, old, new, said):
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.training.worker import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.py").write_text(HEAD + GAN.replace(old, new))
    messages = []
    run(VerifyRequest(path=make.save(gan_tree()), to="cpu", case="train.py:case"), messages.append)
    assert said in messages[-1].unusable


# --- state that nests -------------------------------------------------------------------------------------------------

NESTED = """
class Nested(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(KEPT(parameter))
            (m,) = [one for one in torch.utils._pytree.tree_leaves(dict(state)) if isinstance(one, torch.Tensor)]
            READ(state)
            m.mul_(0.9).add_(parameter.grad)
            parameter.sub_(m, alpha=self.param_groups[0]["lr"])

def case(device):
    model = nn.Linear(2, 3).to(device)
    step = lambda batch: model(batch.to(device)).square().mean()
    return ckptmove.Case(model, Nested(model.parameters()), batch=torch.randn(4, 2), step=step)
"""
SHAPES = {
    "a dict": ('{"buf": {"m": torch.zeros_like(p)}}', 's["buf"]["m"]'),
    "a list in a dict": ('{"buf": {"m": [None, torch.zeros_like(p)]}}', 's["buf"]["m"][1]'),
    "a tuple": ('{"buf": (1, torch.zeros_like(p))}', "(s['buf'].index, s['buf'][1])"),
    "keys that are numbers": ('{"buf": {0: torch.zeros_like(p), "n": 1}}', 's["buf"][0]'),
    "all of them": ('{0: {"x": [({2.5: torch.zeros_like(p)}, "y")]}, "step": 3}', 's[0]["x"][0][0][2.5]'),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_state_that_nests_is_rebuilt_for_a_case_and_for_a_named_optimizer(
    case_check, answers, make, tmp_path, monkeypatch, shape
):
    kept, read = SHAPES[shape]
    body = f"KEPT = lambda p: {kept}\nREAD = lambda s: {read}\n" + NESTED
    namespace = {}
    exec(HEAD + body, namespace)  # the optimizer of the script, to train with
    torch.manual_seed(0)
    case = namespace["case"](torch.device("cpu"))
    for _ in range(2):
        case.optimizer.zero_grad()
        case.step(case.batch).backward()
        case.optimizer.step()
    path = make.save({"model": case.model.state_dict(), "optimizer": case.optimizer.state_dict()}, device="cpu")
    check = case_check(body, path, to="cpu")
    assert (check["status"], check["evidence"]["proven"]) == ("passed", True), check["detail"]
    (tmp_path / f"nested_{abs(hash(shape))}.py").write_text(HEAD + body)
    found = answers(path, "cpu", optimizer=f"nested_{abs(hash(shape))}:Nested")
    assert [found[name]["status"] for name in ("step", "parity")] == ["passed", "passed"], found


def test_state_that_only_unpickling_could_rebuild_is_not_judged(case_check, make):
    model, optimizer = trained(2, 4, 3)
    optimizer["state"][0]["exp_avg"] = {(1, 2): torch.zeros(4, 2)}
    check = case_check(single(), {"model": model, "optimizer": optimizer})
    assert check["status"] == "skipped"
    assert "exp_avg (a dict with keys that are objects)" in check["detail"]

"""Suggested lines for a user's case: their names exist, and they work where they are pasted."""

from __future__ import annotations

import textwrap

import pytest

CASE = """
def case(device):
    model = Mine().to(device)
    return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), batch())
"""


#: A line that makes a value a part of the model.
UNSAVED = "  # not in the checkpoint, because it was never registered: train and save again"


def mine(*lines, init="pass"):
    """A model of the user's, by the lines of its `forward`."""
    prepare = textwrap.indent(textwrap.dedent(init), " " * 8)
    forward = textwrap.indent("\n".join(lines), " " * 8)
    return f"class Mine(Net):\n    def prepare(self):\n{prepare}\n    def forward(self, x):\n{forward}\n"


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("held", "used", "name", "fix"),
    [
        ("[nn.Linear(3, 3)]", "[0](h)", "[0].weight", f"self.held = nn.ModuleList(self.held){UNSAVED}"),
        ("(nn.Linear(3, 3),)", "[0](h)", "[0].weight", f"self.held = nn.ModuleList(self.held){UNSAVED}"),
        ("{'a': nn.Linear(3, 3)}", "['a'](h)", "['a'].weight", f"self.held = nn.ModuleDict(self.held){UNSAVED}"),
        ("[nn.BatchNorm1d(3, affine=False)]", "[0](h)", "[0].running_mean",
         f"self.held = nn.ModuleList(self.held){UNSAVED}"),
        ("[nn.Parameter(torch.ones(3))]", "[0] * h", "[0]", f"self.held = nn.ParameterList(self.held){UNSAVED}"),
        ("{'a': nn.Parameter(torch.ones(3))}", "['a'] * h", "['a']",
         f"self.held = nn.ParameterDict(self.held){UNSAVED}"),
        ("[torch.ones(3)]", "[0] * h", "[0]",
         "return self.held[0].to(x.device) * h"),
        ("{'keys': nn.Linear(3, 3)}", "['keys'](h)", "['keys'].weight",
         f"self.held_registered = nn.ModuleList(self.held.values()){UNSAVED}"),
        ("[nn.Linear(3, 3), torch.ones(3)]", "[0](h)", "[0].weight",
         f"self.held_registered = nn.ModuleList(one for one in self.held if isinstance(one, nn.Module)){UNSAVED}"),
    ],
)  # fmt: skip
def test_what_a_plain_list_or_dict_holds_is_named_as_python_reaches_it(fault_of, held, used, name, fix):
    body = mine("h = super().forward(x)", f"return self.held{used}", init=f"self.held = {held}")
    detail, evidence = fault_of(body, CASE)
    assert f"model.held{name}" in evidence["tensors"], detail
    assert evidence["fix"] == fix


def test_a_list_in_a_module_of_a_list_is_mended_from_without(fault_of):
    body = """
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(3)
            self.others = [self]
        def forward(self, h): return h * self.scale
    """
    made = mine("return self.blocks[0](super().forward(x))", init="self.blocks = [Block()]")
    _, evidence = fault_of(body, made, CASE)
    assert evidence["tensor"] == "model.blocks[0].scale"
    assert evidence["fix"] == f"self.blocks = nn.ModuleList(self.blocks){UNSAVED}"


def test_nn_is_spelt_out_where_the_script_has_no_such_name(fault_of):
    body = mine("return self.held[0](super().forward(x))", init="self.held = [torch.nn.Linear(3, 3)]")
    _, evidence = fault_of(body, CASE.replace("nn.MSELoss", "torch.nn.MSELoss"), "del nn\n")
    assert evidence["fix"] == f"self.held = torch.nn.ModuleList(self.held){UNSAVED}"


@pytest.mark.parametrize(
    ("init", "fix"),
    [
        ("self.mean = torch.zeros(1, 3)", "self.register_buffer('mean', torch.zeros(1, 3), persistent=False)"),
        ("self.mean: torch.Tensor = torch.zeros(3)", "self.register_buffer('mean', torch.zeros(3), persistent=False)"),
        ("self._mean = self.mean = torch.zeros(3)", "return super().forward(x) - self.mean.to(x.device)"),
        ("mean = torch.zeros(3)\nself.mean = mean", "self.register_buffer('mean', mean, persistent=False)"),
        ("self.mean = torch.zeros(\n    1,\n    3,\n) + 1",
         "self.register_buffer('mean', torch.zeros(1, 3) + 1, persistent=False)"),
        ("self.mean = None\nself.mean = torch.zeros(3)", "self.register_buffer('mean', None, persistent=False)"),
        ("self.mean = None\nmean = torch.zeros(3)\nself.mean = mean",
         "self.register_buffer('mean', None, persistent=False)"),
        ("self.mean = 0\nself.mean = torch.zeros(3)", "return super().forward(x) - self.mean.to(x.device)"),
    ],
)  # fmt: skip
def test_a_buffer_is_registered_with_what_the_script_assigns(fault_of, init, fix):
    _, evidence = fault_of(mine("return super().forward(x) - self.mean", init=init), CASE)
    assert evidence["fix"] == fix


def test_a_buffer_that_the_function_sets_is_registered_on_the_users_variable(fault_of):
    body = CASE.replace("Mine()", "Mine()\n    model.mean = torch.zeros(3)\n    model")
    _, evidence = fault_of(mine("return super().forward(x) - self.mean"), body)
    assert evidence["fix"] == "model.register_buffer('mean', torch.zeros(3), persistent=False)"


@pytest.mark.parametrize("said", ["", "no Python"])
def test_a_class_without_lines_has_its_buffer_mended_in_words(fault_of, said):
    made = mine("return super().forward(x) - self.mean", init="self.mean = torch.zeros(3)")
    made = f"import pathlib\n\npathlib.Path('other.txt').write_text({said!r})\nMADE = {made!r}\n"
    _, evidence = fault_of(made, "exec(compile(MADE, 'other.txt', 'exec'))\n", CASE)
    assert evidence["fix_at"] == ""
    assert "model.mean a buffer" in evidence["fix"]


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("lines", "tensor", "fix"),
    [
        (["return torch.where(", "    h > 0,", "    h,", "    torch.zeros(3),", ")"], "the tensor of torch.zeros",
         "torch.zeros(3, device=x.device),"),
        (["return torch.where(", "    h > 0,", "    h,", "    MEAN,", ")"], "MEAN", "MEAN.to(x.device),"),
        (["a = h; b = a - MEAN; return b"], "MEAN", "a = h; b = a - MEAN.to(x.device); return b"),
        (["a = h; b = a - torch.zeros(3); return b"], "the tensor of torch.zeros",
         "a = h; b = a - torch.zeros(3, device=x.device); return b"),
        (["return h + torch.zeros(3) + torch.zeros(3)"], "the tensor of torch.zeros",
         "return h + torch.zeros(3, device=x.device) + torch.zeros(3, device=x.device)"),
        (["return h + torch.zeros(3, device='cpu')"], "the tensor of torch.zeros",
         "return h + torch.zeros(3, device=x.device)"),
        (["from torch import zeros", "return h + zeros(3)"], "the tensor of torch.zeros",
         "return h + zeros(3, device=x.device)"),
        (["if (h > MEAN).any():", "    return h"], "MEAN",
         "if (h > MEAN.to(x.device)).any():"),
        (["held = [MEAN]", "if (h > held[0]).any():", "    h = h - MEAN"], "MEAN", "held = [MEAN.to(x.device)]"),
        (["if x is None:", "    pass", "elif (h > MEAN).any():", "    pass"], "MEAN",
         "elif (h > MEAN.to(x.device)).any():"),
        (["if (h > torch.zeros(3)).any():", "    pass"], "the tensor of torch.zeros",
         "if (h > torch.zeros(3, device=x.device)).any():"),
        (["if x is None:", "    pass", "elif (h > torch.zeros(3)).any():", "    pass"], "the tensor of torch.zeros",
         "elif (h > torch.zeros(3, device=x.device)).any():"),
        (["held = [MEAN]", "return h + held[0]"], "MEAN", "held = [MEAN.to(x.device)]"),
        (["back = h.cpu()", "return h + back"], "back", "back = h"),
        (["a = h; h2 = torch.zeros(h.shape); h2[:] = a; return h2"], "h2",
         "a = h; h2 = torch.zeros(h.shape, device=x.device); h2[:] = a; return h2"),
        (["h2: torch.Tensor = torch.zeros(h.shape)", "h2[:] = h", "return h2"], "h2",
         "h2: torch.Tensor = torch.zeros(h.shape, device=x.device)"),
        (["return torch.zeros(h.shape)"], "a tensor that torch.zeros made",
         "return torch.zeros(h.shape, device=x.device)"),
    ],
)  # fmt: skip
def test_a_fix_is_one_statement_or_one_call(fault_of, lines, tensor, fix):
    detail, evidence = fault_of("MEAN = torch.ones(3)\n", mine("h = super().forward(x)", *lines), CASE)
    assert (evidence["tensor"], evidence["fix"]) == (tensor, fix), detail


def test_a_tensor_that_is_made_where_nothing_is_on_the_target_has_the_device_of_the_function(fault_of):
    body = """
    def case(device):
        model = Net().to(device)
        def step(pair):
            return (model(pair[0].to(device)) * weight()).sum()
        def weight():
            weight = torch.ones(3)
            return weight
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), None, batch(), step)
    """
    detail, evidence = fault_of(body)
    assert (evidence["tensor"], evidence["fix"]) == ("weight", "weight = torch.ones(3, device=device)"), detail


LOSS = """
def case(device):
    model = Net().to(device)
    loss_fn = {loss}
    step = {step}
    return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), {given}, batch=batch(), step=step)
"""
STEP = "lambda pair: loss_fn(model(pair[0].to(device)), pair[1].to(device).sigmoid())"
CALL = "return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), {}, batch=batch(), step=step)"
BCE = "nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))"


@pytest.mark.parametrize(
    ("loss", "given", "step", "fix"),
    [
        (BCE, "loss_fn", "None", "loss_fn = loss_fn.to(device)"),
        (BCE, "criterion=loss_fn", "None", "loss_fn = loss_fn.to(device)"),
        (BCE, "loss_fn", STEP, "loss_fn = loss_fn.to(device)"),
        (BCE, "(loss_fn,)[0]", "None", CALL.format("(loss_fn,)[0].to(device)")),
        (BCE, "None", STEP, "loss_fn = loss_fn.to(device)"),
        ("functools.partial(nn.functional.cross_entropy, weight=torch.ones(3))", "loss_fn", "None",
         "loss_fn = functools.partial(nn.functional.cross_entropy, weight=torch.ones(3, device=device))"),
        ("functools.partial(nn.functional.cross_entropy, weight=torch.from_numpy(numpy.ones(3, 'f')))", "loss_fn",
         "None", "loss_fn.keywords['weight'] = loss_fn.keywords['weight'].to(device)"),
        ("Held()", "loss_fn", "None", "self.register_buffer('weight', torch.ones(3), persistent=False)"),
        ("Module(torch.ones(3))", "loss_fn", "None", "loss_fn = loss_fn.to(device)"),
    ],
)  # fmt: skip
def test_a_loss_is_mended_by_the_users_name_for_it(fault_of, loss, given, step, fix):
    body = """
    import numpy

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.ones(3)
        def forward(self, output, target): return (self.weight * output).mean()

    class Module(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.register_buffer('weight', weight)
        def forward(self, output, target): return (self.weight * output).mean()
    """
    detail, evidence = fault_of(body, LOSS.format(loss=loss, given=given, step=step))
    assert evidence["fix"] == fix, detail
    if step == STEP:
        assert evidence["source"] == f"step = {STEP}"


@pytest.mark.parametrize("order", ["reversed(list(model.parameters()))", "sorted(model.parameters(), key=len)"])
def test_parameters_in_another_order_than_the_checkpoints_are_told_from_their_shapes(fault_of, order):
    detail, _ = fault_of(f"""
    def case(device):
        model = Net().to(device)
        return ckptmove.Case(model, torch.optim.AdamW({order}), nn.MSELoss(), batch())
    """)
    assert "another order" in detail
    name, shape = ("model.1.bias", "[3]") if "reversed" in order else ("model.1.weight", "[3, 5]")
    assert f"[5, 6], but {name} in its position has shape {shape};" in detail


def test_moments_of_no_parameters_shape_are_left_to_the_optimizer(fault_of):
    detail, _ = fault_of("""
    class Other(torch.optim.AdamW):
        def load_state_dict(self, state):
            raise RuntimeError('own moments')

    def case(device):
        model = Net().to(device)
        model[0].weight.requires_grad_(False)
        extra = nn.Parameter(torch.ones(7, device=device))
        optimizer = Other([extra, model[0].bias, *model[1].parameters()])
        return ckptmove.Case(model, optimizer, nn.MSELoss(), batch())
    """)
    assert "own moments" in detail

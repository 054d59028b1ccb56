"""Where no line can be had, a fix is in words: what the file does not tell, and what is out of its sight."""

from __future__ import annotations

import pytest
from pasting import mine

BCE = "nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))"
AT = ", in the case at train.py:"
REBUILT = "build the optimizer after model = model.to(device), and after whatever else replaces its parameters"
WORDS = {
    "a model": ("Net()", "nn.MSELoss()", "batch()", "None",
                f"model = model.to(device), before the optimizer is built{AT}41"),
    "a loss": ("Net().to(device)", BCE, "batch()", "None", f"criterion = criterion.to(device){AT}41"),
    "a dataset": ("Net().to(device)", "nn.MSELoss()", "torch.utils.data.TensorDataset(*batch())", "None",
                  f"batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=8))){AT}41"),
    "a batch": ("Net().to(device)", "nn.MSELoss()", "(Held.x, batch()[1])", "step",
                "move batch[0] in the step, for train.py:45: .to(device)"),
    "what a loss is called with": ("Net().to(device)", "Numbers()", "batch()", "None",
                                   f"criterion.weight = criterion.weight.to(device){AT}41"),
    "an optimizer": ("copied(Net().to(device))", "nn.MSELoss()", "batch()", "None",
                     f"{REBUILT}{AT}41"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "criterion", "pair", "step", "fix"), WORDS.values(), ids=WORDS)
def test_where_the_file_does_not_tell_what_is_given_words_have_to_do(fault_of, model, criterion, pair, step, fix):
    made = "copied(model)" if "copied" in model else "model"
    body = f"""
    import copy
    import numpy

    class Held:
        x = torch.randn(4, 6)

    class Numbers:
        def __init__(self): self.weight = torch.from_numpy(numpy.ones(3, 'f'))
        def __call__(self, output, target): return (self.weight * output).mean()

    def copied(model):
        return copy.deepcopy(model)

    def case(device):
        model = {model}
        def step(pair):
            pair = None
            return model(Held.x).sum()
        optimizer = torch.optim.AdamW(model.parameters())
        parts = [{made}, optimizer, {criterion}, {pair}, {step}]
        return ckptmove.Case(*parts)
    """
    detail, evidence = fault_of(body)
    assert (evidence["fix"], evidence["fix_at"]) == (fix, ""), detail


@pytest.mark.parametrize("init", ["setattr(self, 'held', [nn.Linear(3, 3)])", "self.held = [{'a': nn.Linear(3, 3)}]"])
def test_what_a_list_holds_that_is_not_set_in_sight_or_too_deep_is_mended_in_words(fault_of, init):
    used = "[0]['a']" if "{" in init else "[0]"
    _, evidence = fault_of(mine(f"return self.held{used}(super().forward(x))", init))
    assert (
        evidence["fix"] == f"make model.held{used}.bias a part of the model where it is first assigned, for train.py:31"
    )


def test_a_parameter_that_only_the_optimizer_has_is_made_on_the_device(fault_of):
    _, evidence = fault_of("""
    class Free(torch.optim.AdamW):
        def load_state_dict(self, state): pass

    def case(device):
        model, extra = Net().to(device), nn.Parameter(torch.ones(3))
        model[1].bias.requires_grad_(False)
        optimizer = Free([*model[0].parameters(), model[1].weight, extra])
        return ckptmove.Case(model, optimizer, None, batch(), lambda pair: (model(pair[0].to(device)) * extra).sum())
    """)
    assert (
        evidence["fix"]
        == "make optimizer.param_groups[0]['params'][3] on the device, before the optimizer is built at train.py:34"
    )


def test_a_loss_that_is_made_in_the_call_from_numbers_is_mended_in_words(fault_of):
    _, evidence = fault_of("""
    import numpy

    class Numbers:
        def __init__(self): self.weight = torch.from_numpy(numpy.ones(3, 'f'))
        def __call__(self, output, target): return (self.weight * output).mean()

    def case(device):
        model = Net().to(device)
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), Numbers(), batch())
    """)
    assert evidence["fix"] == "make criterion.weight on the device that the function is given, for train.py:36"


def test_of_two_cases_of_which_neither_is_in_the_function_the_words_are_of_no_variable(fault_of):
    _, evidence = fault_of("""
    def one(model, device):
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), DATA)

    def other(model, device):
        return ckptmove.Case(model, torch.optim.SGD(model.parameters()), nn.MSELoss(), DATA)

    DATA = torch.utils.data.TensorDataset(*batch())

    def case(device):
        return one(Net().to(device), device)
    """)
    assert (
        evidence["fix"]
        == "batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=8))), in the case at train.py:36"
    )

"""A fix without a line of code is a sentence: for values that the file does not show."""

from __future__ import annotations

import ast
import sys

import pytest
from executing.executing import Executing, Source
from pasting import case, mine

from ckptmove.training.code import source
from ckptmove.training.code.source import tree_of
from ckptmove.training.fixes.edits import replaced

BCE = "nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))"
AT = ", in the case at train.py:"
REBUILT = "build the optimizer after model = model.to(device), and after any other line that replaces its parameters"
WORDS = {
    "a model": ("Net()", "nn.MSELoss()", "batch()", "None",
                f"model = model.to(device), before the optimizer is built{AT}41"),
    "a loss": ("Net().to(device)", BCE, "batch()", "None", f"criterion = criterion.to(device){AT}41"),
    "a dataset": ("Net().to(device)", "nn.MSELoss()", "torch.utils.data.TensorDataset(*batch())", "None",
                  f"batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=8))){AT}41"),
    "a batch": ("Net().to(device)", "nn.MSELoss()", "(Held.x, batch()[1])", "step",
                "move batch[0] in the step, for train.py:45: .to(device)"),
    "an argument of a loss": ("Net().to(device)", "Numbers()", "batch()", "None",
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
            return model(vars(Held)["x"]).sum()
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


def test_a_device_that_a_function_is_called_with_is_not_replaced(fault_of):
    mask = "def mask(number, device=None):\n    return torch.ones(number, device=device)\n\nmasked = mask\n\n"
    step = "lambda pair: criterion(model(pair[0].to(device) * masked(6)), pair[1].to(device))"
    _, evidence = fault_of(mask, case(step=step, given="None"))
    assert evidence["fix"].startswith("device is not the target here: ")
    assert evidence["fix"].endswith("(train.py:28)")
    assert evidence["fix_at"] == ""


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
    assert evidence["fix_at"] == ""
    assert "optimizer.param_groups[0]['params'][3]" in evidence["fix"]
    assert evidence["fix"].endswith(" train.py:34")


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
    assert evidence["fix_at"] == ""
    assert "criterion.weight" in evidence["fix"]
    assert evidence["fix"].endswith(" train.py:36")


def test_of_two_calls_of_case_the_one_that_ran_is_mended(mended):
    (fix,) = mended("""
    def one(model, device):
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), DATA)

    def other(model, device):
        return ckptmove.Case(model, torch.optim.SGD(model.parameters()), nn.MSELoss(), DATA)

    DATA = torch.utils.data.TensorDataset(*batch())

    def case(device):
        return one(Net().to(device), device)
    """)
    assert " train.py:29: " in fix
    assert "DataLoader(DATA, batch_size=8)" in fix


def test_what_a_loss_keeps_by_a_key_that_is_no_literal_is_told_in_words(fault_of):
    detail, evidence = fault_of("""
    import enum

    class Part(enum.Enum):
        X = 1

    class Weighted:
        def __init__(self): self.weights = {Part.X: torch.from_numpy(numpy.ones(3, 'f'))}
        def __call__(self, output, target): return (self.weights[Part.X] * output).mean()

    def case(device):
        model = Net().to(device)
        loss = Weighted()
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), loss, batch())
    """)
    text = "loss.weights[<Part.X: 1>] = loss.weights[<Part.X: 1>].to(device)"
    assert (evidence["fix"], evidence["fix_at"]) == (f"at train.py:40, add: {text}", ""), detail


def test_what_only_a_condition_names_is_moved_in_it(mended):
    (fix,) = mended("""
    def case(device):
        model = Net().to(device)
        def step(pair):
            every = iter([dict(zip('xy', pair))])
            del pair
            while (p := next(every, None)) is not None and (out := model(p.get('x'))) is not None:
                pass
            return out.sum()
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), None, batch(), step)
    """)
    assert "model({k: v.to(device) for k, v in p.items()}.get('x'))" in fix


def test_what_a_function_hands_on_by_its_object_is_moved_before(mended):
    (fix,) = mended("""
    class Trainer:
        def __init__(self, model): self.model = model
        def step(self, pair):
            self.pair = pair
            return self.run()
        def run(self):
            return self.model(self.pair[0]).sum()

    def case(device):
        model = Net().to(device)
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), None, batch(), Trainer(model).step)
    """)
    assert fix.startswith(
        "before train.py:31: pair = tuple(one.to(next(self.model.parameters()).device) for one in pair"
    )


def test_a_case_of_the_module_has_its_model_moved_there(mended):
    (fix,) = mended("""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    CASE = ckptmove.Case(model, optimizer, nn.MSELoss(), batch())

    def case(device):
        return CASE
    """)
    assert fix == "before train.py:29: model = model.to('cuda:0')"


@pytest.mark.parametrize(("text", "is_known"), [("ones(3)", True), ("f'{ones(3)}'", sys.version_info >= (3, 12))])
def test_a_node_without_a_position_is_mended_in_words(tmp_path, text, is_known):
    path = tmp_path / "train.py"
    path.write_text(f"h = {text}\n")
    (node,) = (one for one in ast.walk(tree_of(str(path))) if isinstance(one, ast.Call))
    fix = replaced(str(path), (node, "1"))
    assert bool(fix.where) is is_known
    assert fix.text == ("h = " + text.replace("ones(3)", "1") if is_known else f"at {path}:1, replace ones(3) with 1")


def test_a_move_that_the_file_has_already_is_not_suggested_again(fault_of):
    _, evidence = fault_of(f"""
    class Loss(nn.BCEWithLogitsLoss):
        def to(self, device): return self

    def case(device):
        model, pair = Net().to(device), batch()
        criterion = {BCE.replace("nn.BCEWithLogitsLoss", "Loss")}
        criterion = criterion.to(device)
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), criterion, pair)
    """)
    assert (evidence["tensor"], evidence["fix_at"]) == ("criterion.pos_weight", "")
    assert evidence["fix"].endswith(": criterion = criterion.to(device)")


UNREAD = {
    "made": (mine("return super().forward(x) * torch.ones(3)"), "the tensor of torch.ones"),
    "the model": (case("Net()"), "model.0.bias"),
    "the batch": (case(step="def step(pair):\n    return criterion(model(pair[0]), pair[1])"), "batch[0]"),
    "a list": (mine("return super().forward(x) * self.held[0]", "self.held = [torch.ones(3)]"), "model.held[0]"),
    "an array": (case(step="def step(pair):\n    return model(pair[0].to(device)).detach().numpy()"), None),
    "lengths": (
        case(
            step="""def step(pair):
    rows = pair[0].to(device)[None]
    torch.nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([4], device=device), batch_first=True)"""
        ),
        None,
    ),
    "another module": (
        case(batch="batch()\nold = Net()", step="def step(pair):\n    return old(pair[0].to(device)).sum()"),
        "old.0.bias",
    ),
}


class _Unread(Source):
    """Finds no node, as for code that the user's own code has made."""

    @classmethod
    def executing(cls, found):
        return Executing(found, cls.for_filename(""), None, set(), None)


@pytest.mark.parametrize(("body", "tensor"), UNREAD.values(), ids=UNREAD)
def test_without_a_known_node_every_fix_is_in_words(fault_of, monkeypatch, body, tensor):
    monkeypatch.setattr(source, "Source", _Unread)
    detail, evidence = fault_of(body)
    assert tensor is None or tensor in evidence["tensors"], detail
    assert (evidence["fix_at"], bool(evidence["fix"])) == ("", True)


@pytest.mark.parametrize("typed", ["train.py:case", "train:case"])
def test_a_script_that_parses_arguments_is_to_do_so_where_it_is_run(fault_of, answers, make, typed):
    detail, evidence = fault_of("import argparse\nargparse.ArgumentParser().parse_args(['--data'])\n", case())
    asked = answers(make(), "cuda:0", case=typed)["case"]
    assert "import: SystemExit: 2," in detail
    assert asked["detail"] == detail
    assert "if __name__ == '__main__':" in evidence["fix"]


def test_a_case_that_exits_when_it_is_called_is_no_matter_of_its_import(fault_of):
    detail, evidence = fault_of("def case(device):\n    raise SystemExit(2)\n")
    assert detail.startswith("SystemExit: 2, at train.py:")
    assert "fix" not in evidence
